"""What a process runs on: versions, hardware, threads, allocator settings, state of the source."""

import hashlib
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

PACKAGES = ("moekit", "torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "datasets")
SWITCHES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "LD_PRELOAD",
            "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_CONF",
            "CUBLAS_WORKSPACE_CONFIG", "CUDA_VISIBLE_DEVICES")  # fmt: skip


def environment() -> dict[str, Any]:
    """Versions, hardware, threads, allocator settings and the state of the source, of this process.

    GPUs are named only where this process uses CUDA already: a notebook's own process must not start it."""
    import psutil
    import torch

    installed = {d.name: d.version for p in PACKAGES for d in Distribution.discover(name=p)}
    hardware: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor(),
        "logical processors": os.cpu_count(),
        "usable by this process": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory bytes": psutil.virtual_memory().total,
    }
    if torch.cuda.is_initialized():
        hardware["GPUs"] = [
            {"name": p.name, "memory bytes": p.total_memory, "compute capability": f"{p.major}.{p.minor}"}
            for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        ]
    settings = {name: os.environ[name] for name in SWITCHES if name in os.environ}
    source = {"working folder": _git(Path.cwd()), "moekit": _git(Path(__file__).parent)}
    return {
        "versions": {"python": platform.python_version(), **installed, "cuda of torch": torch.version.cuda or "none"},
        "hardware": hardware,
        "threads": {"torch": torch.get_num_threads(), "torch between operations": torch.get_num_interop_threads()},
        "settings": {"deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
                     "float32 matmul precision": torch.get_float32_matmul_precision(), **settings},
        "allocator": "see settings" if settings.keys() & set(SWITCHES[:6]) else "as the system gives it",
        "source": {name: state for name, state in source.items() if state},
        "command": " ".join(sys.argv)[:500],
    }  # fmt: skip


def processor(field: str = "model name") -> str:
    """What the system says of its first processor, by default its name."""
    info = Path("/proc/cpuinfo")
    found = re.search(rf"^{field}\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1].strip() if found else (platform.processor() or platform.machine() or "unknown")


def _git(folder: Path) -> dict[str, Any] | None:
    """Commit, and whether files differ from it, with a hash of how; None outside of a repository or without git."""
    try:
        how: dict[str, Any] = {"cwd": folder, "timeout": 5, "stderr": subprocess.DEVNULL}
        run = lambda *args: subprocess.check_output(["git", *args], **how).strip()
        diff = run("diff", "HEAD", "--no-ext-diff")
        found = {"commit": run("rev-parse", "HEAD").decode(), "changed": bool(diff)}
        return found | ({"changes": hashlib.sha256(diff).hexdigest()} if diff else {})
    except (OSError, subprocess.SubprocessError):
        return None
