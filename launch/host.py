"""What this machine offers a job: cores, GPUs, a free port, and the environment that ranks get.

Nothing here touches CUDA: GPUs are read from ``nvidia-smi``, so a notebook process can ask and stay clean.
"""

from __future__ import annotations

import csv
import math
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# What a notebook kernel, or a rank that submits a job of its own, must not hand on: the first would send plots to a
# front end that is not there, the second would make the new ranks believe that they belong to the old job.
_NOT_INHERITED = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "JPY_PARENT_PID",
    "JPY_SESSION_NAME",
)
_PREFIXES_NOT_INHERITED = ("TORCHELASTIC_", "MOEKIT_RUN_")

# "keep": memory that was freed stays with the process, so the next step does not fault its pages in again. 32 MiB is
# the largest mmap threshold that every glibc accepts.
_MALLOC = {
    "default": {},
    "keep": {"MALLOC_TRIM_THRESHOLD_": str(1 << 36), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)},
}


def cpu_count(cgroup_root: str | Path = "/sys/fs/cgroup") -> int:
    """Cores that this process may use: CPU affinity, then the container's quota (cgroup v2 or v1), at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _cgroup_cores(Path(cgroup_root))
    if quota is not None:
        cores = min(cores, max(1, math.floor(quota)))
    return max(1, cores)


def _cgroup_cores(root: Path) -> float | None:
    """Quota over period, the smallest one on the way from this process's cgroup up to the root; None = no limit."""
    folders = [root]
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, _, path = line.split(":", 2)
            if number == "0":
                own = root / path.lstrip("/")
                folders += [folder for folder in (own, *own.parents) if root in folder.parents]
    except (OSError, ValueError):
        pass
    found = []
    for folder in folders:
        try:
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                found.append(int(quota) / int(period))
        except (OSError, ValueError):
            pass
    try:  # cgroup v1
        quota = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        if quota > 0:
            found.append(quota / int((root / "cpu" / "cpu.cfs_period_us").read_text()))
    except (OSError, ValueError):
        pass
    return min(found) if found else None


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver reports it; `pids` are the processes that compute on it (seen from this machine)."""

    index: int
    uuid: str
    name: str
    memory_mb: int
    used_mb: int
    pids: tuple[int, ...] = ()


def gpus(timeout: float = 10.0) -> list[Gpu]:
    """All GPUs of this machine, from ``nvidia-smi``; an empty list where there is none. CUDA is not initialised."""
    rows = _nvidia_smi("--query-gpu=index,uuid,name,memory.total,memory.used", timeout)
    users: dict[str, list[int]] = {}
    if rows:
        for uuid, pid in _nvidia_smi("--query-compute-apps=gpu_uuid,pid", timeout):
            if pid.isdigit():
                users.setdefault(uuid, []).append(int(pid))
    return [
        Gpu(int(index), uuid, name, _int(total), _int(used), tuple(users.get(uuid, ())))
        for index, uuid, name, total, used in rows
    ]


def free_gpus(max_used_mb: int = 1024) -> list[Gpu]:
    """GPUs that nobody computes on and that have at most `max_used_mb` MB in use."""
    return [gpu for gpu in gpus() if not gpu.pids and gpu.used_mb <= max_used_mb]


def _nvidia_smi(query: str, timeout: float) -> list[list[str]]:
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0:  # no driver, or no device
        return []
    return [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines()) if row]


def _int(text: str) -> int:
    return int(text) if text.isdigit() else 0  # "[N/A]" on machines that share memory with the host


def free_port() -> int:
    """A TCP port of this host that is free now. (A job's own rendezvous does not need it: it binds port 0.)"""
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def port_is_free(port: int) -> bool:
    """Whether a server could listen on `port` of this host now, on every address."""
    for family, address in ((socket.AF_INET, ""), (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family) as s:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                s.bind((address, port))
        except OSError:
            if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
                continue
            return False
    return True


def environment(extra: dict[str, str] | None = None, *, threads: int, malloc: str = "default") -> dict[str, str]:
    """The environment of a job's processes: this process's, less what belongs to this process, plus the settings.

    Thread counts and malloc settings have to be there before the interpreter starts; `extra` wins over both.
    """
    made = {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_INHERITED and not name.startswith(_PREFIXES_NOT_INHERITED)
    }
    if made.get("MPLBACKEND", "").startswith("module://"):
        del made["MPLBACKEND"]
    # All ranks are on this host: loopback works whatever the host's name resolves to.
    made.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    made["OMP_NUM_THREADS"] = made["MKL_NUM_THREADS"] = str(threads)
    made.update(_MALLOC[malloc])
    made.update(extra or {})
    return made
