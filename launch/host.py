"""What this machine offers a job: cores, GPUs, a free port, and the environment that ranks get.

Nothing here touches CUDA: GPUs are read from ``nvidia-smi``, so a notebook process can ask and stay clean.
"""

import csv
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# What a notebook kernel, or a rank that submits a job of its own, must not hand on: the first would send plots to a
# front end that is not there, the second would make the new ranks believe that they belong to the old job.
_NOT_INHERITED = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|(JPY|TORCHELASTIC|MOEKIT_RUN)_.*"
)

# Memory that was freed stays with the process, so the next step does not fault its pages in again. 32 MiB is the
# largest mmap threshold that every glibc accepts.
_KEEP = {"MALLOC_TRIM_THRESHOLD_": str(1 << 36), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}


def cpu_count(cgroup_root: str | Path = "/sys/fs/cgroup") -> int:
    """Cores that this process may use: CPU affinity, then the container's quota (cgroup v2 or v1), at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(int(quota) for quota in _cgroup_cores(Path(cgroup_root)))]))


def _cgroup_cores(root: Path) -> Iterator[float]:
    """Quota over period, wherever one is set: on the way from this process's cgroup up to the root."""
    try:
        own = root / Path("/proc/self/cgroup").read_text().partition("0::/")[2].strip()
    except OSError:
        own = root
    files = [[folder / "cpu.max"] for folder in (own, *own.parents)]
    files.append([root / "cpu" / "cpu.cfs_quota_us", root / "cpu" / "cpu.cfs_period_us"])  # cgroup v1
    for paths in files:
        try:
            quota, period = " ".join(path.read_text() for path in paths).split()
        except (OSError, ValueError):
            continue
        if quota not in ("max", "-1"):
            yield int(quota) / int(period)


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
    apps = _nvidia_smi("--query-compute-apps=gpu_uuid,pid", timeout) if rows else []
    return [
        Gpu(int(index), uuid, name, _int(total), _int(used), tuple(_int(pid) for at, pid in apps if at == uuid))
        for index, uuid, name, total, used in rows
    ]


def visible_gpus() -> int:
    """GPUs that processes started from here would see: this machine's, less what CUDA_VISIBLE_DEVICES hides."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(gpus())
    return count if listed is None else min(count, sum(entry.strip() not in ("", "-1") for entry in listed.split(",")))


def _nvidia_smi(query: str, timeout: float) -> list[list[str]]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True)
    except (OSError, subprocess.SubprocessError):  # no such program, no driver, or no device
        return []
    return [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines()) if row]


def _int(text: str) -> int:
    return int(text) if text.isdigit() else 0  # "[N/A]" on machines that share memory with the host


def port_is_free(port: int) -> bool:
    """Whether a server could listen on `port` of this host now, on every address."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=dual).close()
    except OSError:
        return False
    return True


def environment(extra: dict[str, str] | None = None, *, threads: int, malloc: str = "default") -> dict[str, str]:
    """This process's environment for a job's processes: less what belongs to this one, then settings, then `extra`."""
    made = {name: value for name, value in os.environ.items() if not _NOT_INHERITED.fullmatch(name)}
    if made.get("MPLBACKEND", "").startswith("module://"):
        del made["MPLBACKEND"]
    return made | process_settings(threads, malloc) | (extra or {})


def process_settings(threads: int, malloc: str = "default") -> dict[str, str]:
    """What has to be in the environment before the interpreter of a rank starts."""
    count = str(threads)
    return {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count} | (_KEEP if malloc == "keep" else {})
