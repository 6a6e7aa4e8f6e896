"""One rank: a fresh interpreter that joins the others, runs the call, and leaves its result or its error behind.

`here()` tells any code which rank it is; it also works in a plain process and under torchrun.
"""

import atexit
import faulthandler
import io
import linecache
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import CodeType
from typing import Any

import cloudpickle

from ..errors import ConfigError
from .folder import HEARTBEAT_S, read_json, write_json
from .processes import die_with_parent, host_id, leave, stamp


@dataclass(frozen=True)
class Here:
    """Where this code runs: `rank` of `world` processes, `local_rank` on its host, its device, its run folder."""

    rank: int
    world: int
    local_rank: int
    device: str  # "cpu" or "cuda:<index>"
    folder: Path | None  # None outside of a job


def here() -> Here:
    """This process's place in its job; in a plain process the only rank of one.
    >>> here().world
    1
    """
    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    device = os.environ.get("MOEKIT_RUN_DEVICE")
    if device is None:
        import torch

        device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    folder = os.environ.get("MOEKIT_RUN_FOLDER")
    return Here(rank, world, local_rank, device, Path(folder) if folder else None)


def main() -> None:
    """Entry of a rank's process: ``<folder> [<process id of the agent>]``; the rank is in the environment."""
    folder, rank = Path(sys.argv[1]).absolute(), int(os.environ["RANK"])
    die_with_parent(int(sys.argv[2]) if len(sys.argv) > 2 else os.getppid())
    log_to(folder / "logs" / f"rank_{rank}.log")
    faulthandler.enable()
    # A rank that is ended because others failed leaves behind where it was: that may be what they waited for.
    stack = (folder / "ranks" / f"rank_{rank}.stack").open("w")
    faulthandler.register(signal.SIGTERM, stack, all_threads=False, chain=True)
    os.environ["MOEKIT_RUN_FOLDER"] = str(folder)
    _tell(folder, rank, "starting")
    threading.Thread(target=_live, args=(folder, rank), daemon=True).start()
    try:
        value = _call(folder, read_json(folder / "config.json") or {}, rank)
        (folder / "results" / f"rank_{rank}.pkl").write_bytes(dumps_result(value, rank))
        _tell(folder, rank, "returned")
    except BaseException as error:  # noqa: BLE001  whatever ended the call is what the user has to see
        _store_error(folder, rank, error)
        _tell(folder, rank, "failed")
        leave(1)  # not a normal exit: its handlers could wait for the other ranks, which wait for this one
    _leave()


def log_to(path: Path) -> None:
    """stdout and stderr, also those of C++ code and of child processes, go to one file, line by line."""
    with path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]


def _tell(folder: Path, rank: int, phase: str) -> None:
    said = {"pid": os.getpid(), "stamp": stamp(os.getpid()), "host": host_id(), "phase": phase, "time": time.time()}
    write_json(folder / "ranks" / f"rank_{rank}.json", said)


def _live(folder: Path, rank: int) -> None:
    """Touches this rank's file, and ends this rank when another failed (torchrun would take 30 s, or never do it)."""
    ends = iter((signal.SIGTERM, signal.SIGKILL))
    while True:
        time.sleep(HEARTBEAT_S)
        with suppress(OSError):  # a file system that is away for a moment, or a folder that was taken away
            os.utime(folder / "ranks" / f"rank_{rank}.json")
            if any((folder / "errors").iterdir()):
                os.kill(os.getpid(), next(ends))


def code_with_file(make: Callable[..., CodeType], parts: tuple, file: str) -> CodeType:
    """A code object from what cloudpickle took it apart into, with the name of the file or cell that it came from."""
    return make(*parts).replace(co_filename=file)


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):
            return code_with_file, (*self.dispatch_table[CodeType](obj), obj.co_filename)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and obj.is_cuda:
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


def dumps(value: Any) -> bytes:
    """cloudpickle, in which code keeps the name of its file or cell (for tracebacks), and CUDA tensors go to the CPU:
    to read a result must not start CUDA in the notebook."""
    with io.BytesIO() as file:
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
        return file.getvalue()


def _call(folder: Path, config: dict[str, Any], rank: int) -> Any:
    with (folder / "call.pkl").open("rb") as file:
        packed = pickle.load(file)
    os.chdir(packed["cwd"])
    sys.path[:] = packed["sys_path"]
    know_sources(packed["sources"])
    world = config["nproc"] * config["nodes"]
    if int(os.environ["WORLD_SIZE"]) != world:
        asked = f"{folder} was submitted for {world} (nodes={config['nodes']}, nproc={config['nproc']})"
        raise ConfigError(f"torchrun started {os.environ['WORLD_SIZE']} ranks, and {asked}; use its node.sh")
    join(config["threads"], config["device"], config["timeout"])
    _tell(folder, rank, "running")
    fn, args, kwargs = loads(packed["call"], config["function"])
    return fn(*args, **kwargs)


def know_sources(sources: dict[str, str]) -> None:
    """Lets tracebacks, inspect and compilers see the source of cells: name of the cell -> its text."""
    for name, text in sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def loads(call: bytes, function: str, unpickler: type[pickle.Unpickler] = pickle.Unpickler) -> tuple[Any, tuple, dict]:
    """The call of `function` that `dumps` made: what to call, with which arguments and keywords."""
    try:
        return unpickler(io.BytesIO(call)).load()
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a rank cannot import {error.name!r}, which {function} needs; put that module on the path of "
            "the process that submits, or define what it holds in the notebook"
        ) from error


def join(threads: int | None = None, device: str = "auto", timeout: float = 600.0) -> None:
    """Threads, device and process group (gloo, on CUDA with NCCL) of a rank that torchrun started; see `submit`."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads or torch.get_num_threads())
    local_rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    visible = torch.cuda.device_count()
    if device == "cuda" or (device == "auto" and visible):
        if ranks > visible:
            raise ConfigError(
                f"nproc={ranks} ranks need one GPU each, and {visible} are visible here; use at most {visible} ranks, "
                "or device='cpu'"
            )
        torch.cuda.set_device(local_rank)
        device, backend = f"cuda:{local_rank}", "cpu:gloo,cuda:nccl"
    else:
        device, backend = "cpu", "gloo"
    os.environ["MOEKIT_RUN_DEVICE"] = device
    on = torch.device(device) if device != "cpu" else None
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), device_id=on)
    # Together once: a rank whose function ended at once would cut off those that still make their connections.
    dist.all_reduce(torch.zeros(1))


def dumps_result(value: Any, rank: int) -> bytes:
    """What `rank` returned, for the process that asked."""
    try:
        return dumps(value)
    except Exception as error:
        raise ConfigError(
            f"the value that rank {rank} returned cannot be pickled ({type(error).__name__}: {error}); return plain "
            "data, arrays or tensors, or write a file in moekit.here().folder"
        ) from error


COLLECTIVE = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|process ?group", re.IGNORECASE)


def _is_knock_on(error: BaseException | None) -> bool:
    """Whether a collective failed, as it does on every other rank when one rank is gone."""
    from torch.distributed import DistError

    seen = list[BaseException]()
    while error is not None and error not in seen:  # an error raised again may be in its own past
        seen.append(error)
        if isinstance(error, DistError) or (isinstance(error, RuntimeError) and COLLECTIVE.search(str(error))):
            return True
        error = error.__cause__ or error.__context__
    return False


def describe_error(rank: int, error: BaseException) -> dict[str, Any]:
    """`error` as plain data; the traceback begins at the user's first frame, when there is one."""
    said = {"rank": rank, "type": type(error).__name__, "message": "", "time": time.time()}
    with suppress(Exception):  # its own code, which may raise
        said["message"] = str(error)
    tb, ours = error.__traceback__, (__name__, f"{__package__}.engines")
    while tb is not None and tb.tb_frame.f_globals.get("__name__") in ours and tb.tb_next is not None:
        tb = tb.tb_next
    said["traceback"] = "".join(traceback.format_exception(type(error), error, tb))
    said["knock_on"] = "torch" in sys.modules and _is_knock_on(error)
    return said


def _store_error(folder: Path, rank: int, error: BaseException) -> None:
    said = describe_error(rank, error)
    print(said["traceback"], file=sys.stderr, flush=True)
    try:
        write_json(folder / "errors" / f"rank_{rank}.json", said)
    except OSError:
        traceback.print_exc()


def _leave() -> None:
    """A normal exit (threads joined, exit handlers run) without the half second that freeing torch's modules takes."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    leave(0)
