"""The model: router, mixture-of-experts layer, attention, transformer, presets."""
