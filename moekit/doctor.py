"""What this machine has, and what of moekit will run on it: `moekit doctor`.

It installs and starts nothing, CUDA included: GPUs are read from the driver's own tool."""

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from .errors import MoekitError
from .measure.files import existing

# versions that the tests ran with; tests/test_doctor.py holds them against constraints.txt
TESTED = {
    "torch": "2.13.0", "triton": "3.7.1", "transformers": "5.24.0", "tokenizers": "0.23.3", "safetensors": "0.8.0",
    "datasets": "5.2.0", "numpy": "2.4.6", "pandas": "3.1.1", "cloudpickle": "3.1.3", "plotly": "7.1.0",
    "ipywidgets": "8.1.9", "anywidget": "0.11.0", "jupyterlab": "4.6.6", "reasoning-gym": "0.1.25",
}  # fmt: skip
# what is lost without an optional package
WITHOUT = {
    "triton": "GPU kernels",
    "plotly": "figures and reports; install moekit[notebooks]",
    **dict.fromkeys(("ipywidgets", "anywidget"), "live figures; install moekit[notebooks]"),
    "jupyterlab": "`make lab`; install moekit[notebooks]",
    "reasoning-gym": "the demo's tasks; install moekit[rl]",
}
SHM_WANTED = DISK_WANTED = 1 << 30  # bytes of shared memory, and bytes free where runs are written
RUNS_SHOWN = 20


@dataclass
class Report:
    """Findings by section, what deserves attention, and what is missing for moekit to run at all."""

    sections: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0, or 1 when something required is missing."""
        return 1 if self.missing else 0

    def __str__(self) -> str:
        width = max((len(k) for rows in self.sections.values() for k, _ in rows), default=0)
        lines = []
        for title, rows in self.sections.items():
            lines += [title, *(f"  {k:<{width}}  {v}" for k, v in rows), ""]
        lines += [f"note: {w}" for w in self.warnings]
        lines += [f"MISSING: {m}" for m in self.missing] or ["Everything that moekit requires is here."]
        return "\n".join(lines)


def report(runs: str | Path = "runs") -> Report:
    """Look at everything; print what comes back, or read its `sections`, `warnings`, `missing` and `exit_code`.
    Args: `runs`: the folder that holds the run folders of this project."""
    found, place = Report(), Path(runs)
    looks: dict[str, tuple[Any, ...]] = {
        "Versions": (_versions, found), "Backends": (_backends, found), "CPU and memory": (_cpu,),
        "Allocator and threads": (_settings,), "GPUs": (_gpus, found), "Storage": (_storage, found, place),
        "Runs": (_runs, place),
    }  # fmt: skip
    for title, (look, *arguments) in looks.items():
        try:
            found.sections[title] = look(*arguments)
        except Exception as error:  # noqa: BLE001 (one unreadable corner of a machine must not hide the rest)
            found.sections[title] = [("could not be read", f"{type(error).__name__}: {error}")]
    return found


def size(count: float) -> str:
    """Bytes for people.
    >>> size(3 * 2**30), size(512)
    ('3.0 GB', '512 B')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TB"


def _versions(found: Report) -> list[tuple[str, str]]:
    rows = [("python", f"{platform.python_version()} ({sys.executable})")]
    try:
        needs = [r.split(";")[0].strip() for r in importlib.metadata.requires("moekit") or [] if "extra ==" not in r]
        required = {re.split(r"[^\w.-]", need, maxsplit=1)[0].lower(): need for need in needs}
        rows.append(("moekit", f"{importlib.metadata.version('moekit')} in {Path(__file__).parent}"))
    except importlib.metadata.PackageNotFoundError:
        required = {name: "" for name in ("torch", "numpy", "transformers", "safetensors", "cloudpickle")}
        found.warnings.append("moekit is not installed, only on the path: run `pip install -e .` for worker processes")
    for name in [*required, *(n for n in TESTED if n not in required)]:
        wanted = required.get(name) or name
        try:
            have = importlib.metadata.version(name)
            same = have.split("+")[0] == TESTED.get(name, have.split("+")[0])
            rows.append((name, have if same else f"{have} (tested with {TESTED[name]})"))
            if not _fits(have, required.get(name, "")):
                found.missing.append(f"package {wanted}: {have} is installed")
        except importlib.metadata.PackageNotFoundError:
            rows.append((name, f"not installed ({WITHOUT.get(name, 'required')})"))
            found.missing += [f"package {wanted}: pip install '{wanted}'"] if name in required else []
    found.missing += [
        f"moekit/{folder} is no folder: this checkout does not support links; install the wheel instead"
        for folder in ("kernels", "launch")
        if not (Path(__file__).parent / folder).is_dir()
    ]
    return rows


def _fits(have: str, requirement: str) -> bool:
    try:
        from packaging.requirements import Requirement
    except ImportError:  # comes with several dependencies; without it only presence is checked
        return True
    return not requirement or Requirement(requirement).specifier.contains(have, prereleases=True)


def _backends(found: Report) -> list[tuple[str, str]]:
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # noqa: BLE001 (a broken build of torch can raise anything)
        if not any("package torch" in m for m in found.missing):
            found.missing.append(f"torch cannot be imported: {error}")
        return [("torch", f"cannot be imported: {error}")]
    from . import ops

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    rows = [("torch build", build), ("kernels", f"backend {ops.backend()!r}, as follows on cpu, float32")]
    rows += [(f"  {name}", why) for name, why in ops.explain("cpu", torch.float32).items()]
    gloo, nccl = (dist.is_available() and here() for here in (dist.is_gloo_available, dist.is_nccl_available))
    if not gloo:
        found.missing.append("torch.distributed with gloo: this build of torch has none")
    rows.append(("gloo", "yes: processes on CPU" if gloo else "no"))
    return [*rows, ("nccl", "yes: processes on GPUs" if nccl else "no: this build of torch has none; GPUs need it")]


def _cpu() -> list[tuple[str, str]]:
    import psutil

    from .launch.host import cpu_count
    from .measure.machine import processor

    flags = set(processor("(?:flags|Features)").split())
    told = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16", "sve")
    known = [name for name in told if name in flags]
    fast = [name for name in known if "bf16" in name]
    slow = "no instructions for it: float32 is usually faster here"
    memory, limit = psutil.virtual_memory(), Path("/sys/fs/cgroup/memory.max")
    total = f"{size(memory.total)} total, {size(memory.available)} free"
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        total += f", limited to {size(int(most))} by the container"
    return [
        ("model", processor()),
        ("cores", f"{psutil.cpu_count(False)} physical, {os.cpu_count()} logical, {cpu_count()} usable here"),
        ("instructions", ", ".join(known) or "unknown"),
        ("bfloat16", f"in hardware ({', '.join(fast)})" if fast else slow),
        ("memory", total),
    ]


def _settings() -> list[tuple[str, str]]:
    from .measure.machine import SWITCHES

    torch = sys.modules.get("torch")
    rows = [("torch threads", str(torch.get_num_threads()))] if torch else []
    rows += [(name, os.environ[name]) for name in SWITCHES if name in os.environ]
    if not any(n in os.environ for n in ("MALLOC_TRIM_THRESHOLD_", "LD_PRELOAD")):
        rows.append(("malloc", "default thresholds; large CPU steps then spend time on page faults"))
    return rows


def _gpus(found: Report) -> list[tuple[str, str]]:
    if not shutil.which("nvidia-smi"):
        return [("none found", "nvidia-smi is not on the path; everything runs on CPU with gloo")]
    import psutil

    from .launch.host import gpus

    rows = []
    for gpu in gpus():
        rows.append((f"gpu {gpu.index}", f"{gpu.name}, {gpu.used_mb} of {gpu.memory_mb} MB used"))
        for pid in gpu.pids:
            try:
                process = psutil.Process(pid)
                who = f"{process.username()}: {process.name()}"
            except psutil.Error:  # of another container, or gone
                who = "unknown process"
            rows.append(("  used by", f"{who} (pid {pid})"))
    torch = sys.modules.get("torch")
    if rows and torch is not None and not torch.version.cuda:
        found.warnings.append("there are GPUs, but this torch is a CPU build: install the CUDA build to use them")
    return rows or [("none found", "nvidia-smi is here, but reports no GPU: is the driver loaded?")]


def _storage(found: Report, runs: Path) -> list[tuple[str, str]]:
    rows, shm = [], Path("/dev/shm")
    if shm.is_dir():
        free = shutil.disk_usage(shm)
        rows.append(("/dev/shm", f"{size(free.total)}, {size(free.free)} free"))
        if free.total < SHM_WANTED:
            how = "processes that share memory want more (in Docker: --shm-size=1g or --ipc=host)"
            found.warnings.append(f"/dev/shm holds only {size(free.total)}; {how}")
    place = existing(runs)
    disk = shutil.disk_usage(place)
    rows.append(("disk for runs", f"{size(disk.free)} free of {size(disk.total)} at {place}"))
    if disk.free < DISK_WANTED:
        found.warnings.append(f"only {size(disk.free)} are free at {place}; checkpoints may not fit")
    if not os.access(place, os.W_OK):
        found.warnings.append(f"{place} cannot be written: runs need another folder")
    return rows


def _runs(runs: Path) -> list[tuple[str, str]]:
    from .launch.folder import read_state

    folders = [p for p in runs.iterdir() if p.is_dir()] if runs.is_dir() else []
    if not folders:
        return [("none", f"no run folder under {runs}")]
    rows, total = [], 0
    for folder in sorted(folders, key=lambda p: p.stat().st_mtime, reverse=True):
        held = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
        total += held
        try:
            state = read_state(folder)["state"]  # a job whose supervisor is gone reads as failed
        except MoekitError:
            state = "holds no run"
        day = datetime.fromtimestamp(folder.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
        rows.append((folder.name, f"{size(held):>9}  {day}  {state}"))
    more = [(f"and {len(rows) - RUNS_SHOWN} older ones", "")] if len(rows) > RUNS_SHOWN else []
    return [*rows[:RUNS_SHOWN], *more, ("all", f"{size(total):>9}  in {len(rows)} run folders under {runs}")]
