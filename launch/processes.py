"""Who a process is, whether it still lives, and how to end it with everything below it.

A process id alone proves nothing, since the system gives it away again; an id with its start time (`stamp`) does.
On Linux a process can also ask to get the orphans below it (`adopt_orphans`) and to die with its parent
(`die_with_parent`); elsewhere a thread that watches the parent does the latter.
"""

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NoReturn

import psutil

STOP_GRACE_S = 5.0  # between SIGTERM and SIGKILL
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def stamp(pid: int) -> str | None:
    """The start of process `pid` in a form that no later process with the same id shares; None = gone, or a zombie."""
    if sys.platform == "linux":
        try:
            # The name field may hold spaces and brackets, so fields are counted from the last bracket.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else f"{_boot_id()}:{fields[19]}"
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.0f}"
    except psutil.Error:
        return None


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


def is_alive(pid: int | None, start: str | None) -> bool:
    """Whether the very process that had id `pid` and stamp `start` still runs on this host."""
    return pid is not None and start is not None and stamp(pid) == start


@cache
def host_id() -> str:
    """This host as process ids see it: its name and, on Linux, the process-id namespace (a container has its own)."""
    try:
        return f"{socket.gethostname()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """All living processes below `pid` (default: this process), zombies left out."""
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    return [process for process in below if stamp(process.pid) is not None]


def kill_descendants(pid: int | None = None, patience: float = 10.0) -> list[int]:
    """SIGKILL everything below `pid` until nothing is left; returns the ids of what would not die (normally none)."""
    end = time.monotonic() + patience
    while left := descendants(pid):  # one pass is not enough: a process can start another before it is killed
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=0.5)
        if time.monotonic() > end:
            return [process.pid for process in descendants(pid)]
    return []


def _prctl(option: int, value: int) -> bool:
    return sys.platform == "linux" and ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0


def adopt_orphans() -> bool:
    """Makes this process the parent of every orphan below it, so that it can end them. Linux only; False elsewhere."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """From now on this process is killed when `parent`, which must be its parent, ends in whatever way."""
    if not _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        threading.Thread(target=watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def watch_parent(parent: int) -> None:
    """Waits until `parent` is this process's parent no more; then ends all that is below this process, and itself."""
    while os.getppid() == parent:
        time.sleep(0.1)
    kill_descendants()
    os.kill(os.getpid(), signal.SIGKILL)


def leave(code: int) -> NoReturn:
    """Ends this process at once: freeing torch's modules takes half a second, in which the job would not be done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 99` for a number without a name."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def python_command(module: str, *arguments: str) -> list[str]:
    """A fresh interpreter that runs `main` of moekit.launch.`module`, out of the very moekit that runs here."""
    root = str(Path(sys.modules["moekit"].__path__[0]).absolute().parent)
    # -P and del: neither the working folder nor ours may shadow anything (they may hold a folder called `kernels`).
    code = f"import sys; sys.path.insert(0, {root!r}); import moekit; del sys.path[0]; "
    code += f"from moekit.launch.{module} import main; main()"
    return [sys.executable, "-P", "-c", code, *arguments]
