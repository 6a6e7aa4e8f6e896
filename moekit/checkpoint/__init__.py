"""Checkpoints: our own safetensors format, and Hugging Face folders."""
