"""What all tests share: one thread a process (spawned workers inherit it), and no network."""

from __future__ import annotations

import os

for name, value in {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRITON_INTERPRET": "1",  # must stand before triton is imported, and transformers imports it
}.items():
    os.environ.setdefault(name, value)
