"""`submit`: a function call becomes a job of several processes, and the calling process stays as it was."""

import dataclasses
import functools
import importlib.machinery
import importlib.metadata
import inspect
import itertools
import json
import linecache
import os
import pickle
import reprlib
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle

from ..errors import ConfigError, StorageError
from . import slurm as slurm_jobs
from .folder import create, remove
from .host import cpu_count, environment, port_is_free, process_settings
from .job import Job
from .processes import python_command, stamp
from .worker import dumps

_LARGE_CALL = 256 << 20
_PACKAGES = ("moekit", "torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "datasets")
_CHOICES = {"backend": ("local", "torchrun", "slurm"), "device": ("auto", "cpu", "cuda"), "malloc": ("default", "keep")}
_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = 500
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")


def submit(
    fn: Callable[..., Any], *args: Any, nproc: int = 1, nodes: int = 1, backend: str = "local", name: str | None = None,
    runs: str | Path = "runs", detach: bool = False, overwrite: bool = False, resume: bool = False,
    env: dict[str, str] | None = None, threads: int | None = None, timeout: float = 600.0, device: str = "auto",
    malloc: str = "default", port: int | None = None, slurm: dict[str, Any] | None = None, **kwargs: Any,
) -> Job:  # fmt: skip
    """Runs ``fn(*args, **kwargs)`` in `nproc` fresh processes that are joined by torch.distributed; returns at once.

    A function typed in a notebook cell travels by value, with what it uses of the notebook (a module's function by
    name); no cell is run again. Changes that ranks make to such globals stay there: what comes back is the return
    value, ``job.result()[rank]``. This process never forks and never touches torch or CUDA.

    An attached job ends with this process, however that ends; ``detach=True`` outlives it, and
    ``moekit.attach("runs/<name>")`` finds either again.

    Args:
        fn: what every rank calls, after the process group is there. `moekit.here()` tells it its rank and device.
        nproc: ranks of a node; may be more than there are cores.
        nodes: machines; above 1 with one of the other backends.
        backend: "local" runs on this machine. "slurm" writes and submits a batch script that runs torchrun on every
            node. "torchrun" starts nothing: `bash RUN/node.sh HOST:PORT` on every node does. `runs` must then be a
            folder that all nodes see, and the job does not end with this process.
        name: of the run folder in `runs`; made from date, time and function when None.
        overwrite: replace the run that is in the folder (only files that moekit writes are removed).
        resume: go on in the folder of a run that has ended, keeping its checkpoints, metrics and logs.
        env: variables for the job's processes, on top of this process's own.
        threads: CPU threads per rank; when None: cores // nproc, at least 1, on this machine, and 1 on others.
        timeout: seconds after which a collective that some rank does not join fails.
        device: "cpu", "cuda" (one GPU per rank), or "auto": cuda where there is a GPU.
        malloc: "keep" lets glibc keep freed memory, which saves page faults in training; "default" leaves it alone.
        port: of the rendezvous; a free one of the job's own when None.
        slurm: options of sbatch (`{"partition": "gpu", "gpus_per_node": 4}`), "setup": shell lines that run first,
            "submit": False to write the script only.
        args, kwargs: for `fn`. A keyword that `submit` has itself has to be bound with functools.partial.
    Raises:
        ConfigError: a setting cannot work, or the call cannot be pickled. Nothing was started.
        RunExistsError: the run folder exists. Nothing was touched.
        StorageError: the run folder cannot be written. Nothing was started or left behind.
        BackendError: no `sbatch` here, or it refused. The script stays, and the message says how to use it.
    """
    if threads is None and _is_count(nproc):
        threads = max(1, cpu_count() // nproc) if backend == "local" else 1
    settings = {"backend": backend, "nodes": nodes, "nproc": nproc, "threads": threads, "device": device}
    settings |= {"timeout": timeout, "malloc": malloc, "port": port, "slurm": slurm or {}}
    _check(fn, env or {}, SimpleNamespace(**settings))
    function = _name_of(fn)
    call = _pack(fn, args, kwargs, function)
    config = settings | {
        "run_id": uuid.uuid4().hex, "function": function, "args": [_describe(value) for value in args],
        "kwargs": {key: _describe(value) for key, value in kwargs.items()}, "detach": detach, "resume": resume,
        "env": {k: "***" if any(word in k.upper() for word in _SECRET) else v for k, v in (env or {}).items()},
        "versions": _versions(), "python": sys.executable, "command": sys.argv, "cwd": os.getcwd(),
        "submitted": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }  # fmt: skip
    folder = create(runs, name, function, config, call, overwrite=overwrite, resume=resume)
    whole = environment(env, threads=threads or 1, malloc=malloc)
    if backend == "local":
        return Job(folder, _start(folder, detach, whole, resume))
    slurm_jobs.write_scripts(folder, config, process_settings(threads or 1, malloc))
    if backend == "slurm" and config["slurm"].get("submit", True):
        slurm_jobs.send(folder, whole)
    return Job(folder)


def again(folder: Path, config: dict[str, Any]) -> subprocess.Popen:
    """Starts the local job in `folder` once more, to go on from its checkpoint: see `Job.resume`."""
    env = {name: os.environ.get(name, "") if text == "***" else text for name, text in config["env"].items()}
    if lost := [name for name, text in config["env"].items() if text == "***" and name not in os.environ]:
        raise ConfigError(f"the job was given {', '.join(lost)}, which no file keeps; set os.environ[{lost[0]!r}] here")
    packed = pickle.loads((folder / "call.pkl").read_bytes())
    if "resumed" not in packed:
        packed |= {"call": dumps((_go_on, (packed["call"],), {})), "resumed": True}
    config = config | {"run_id": uuid.uuid4().hex, "resume": True, "submitted": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    create(folder.parent, folder.name, config["function"], config, pickle.dumps(packed), resume=True)
    whole = environment(env, threads=config["threads"], malloc=config["malloc"])
    return _start(folder, config["detach"], whole, resume=True)


def _go_on(call: bytes) -> Any:
    """On a rank: the call of the job that goes on, its configs told to `resume`."""

    def told(value: Any) -> Any:
        if not dataclasses.is_dataclass(value) or isinstance(value, type) or not hasattr(value, "resume"):
            return value
        return dataclasses.replace(value, resume=True, **{"overwrite": False} if hasattr(value, "overwrite") else {})

    fn, args, kwargs = pickle.loads(call)
    return fn(*map(told, args), **{name: told(value) for name, value in kwargs.items()})


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check(fn: Any, env: Any, s: SimpleNamespace) -> None:
    def need(ok: bool, message: str) -> None:
        if not ok:
            raise ConfigError(message)

    need(callable(fn), f"fn={fn!r} cannot be called; give the function itself: submit(train, config, nproc=2)")
    for name, what in (("nproc", "ranks"), ("nodes", "machines"), ("threads", "CPU threads per rank")):
        value = getattr(s, name)
        need(_is_count(value), f"{name}={value!r} must be a whole number of {what}, at least 1")
    for name, known in _CHOICES.items():
        need(getattr(s, name) in known, f"{name}={getattr(s, name)!r} is not one of {', '.join(map(repr, known))}")
    remedy = "it runs on this machine only; use backend='slurm', or 'torchrun' to start it by hand on each"
    need(s.nodes == 1 or s.backend != "local", f"nodes={s.nodes} with backend='local': {remedy}")
    need(not s.slurm or s.backend == "slurm", f"slurm={s.slurm!r} needs backend='slurm', not {s.backend!r}")
    slurm_jobs.check_options(s.slurm)
    is_number = isinstance(s.timeout, int | float) and not isinstance(s.timeout, bool)
    need(is_number and 0 < s.timeout < 1e9, f"timeout={s.timeout!r} must be a number of seconds above 0")
    strings = isinstance(env, dict) and all(isinstance(text, str) for pair in env.items() for text in pair)
    need(strings, f"env={env!r} must map names of variables to strings")
    if s.port is not None:
        tcp = _is_count(s.port) and s.port < 65536
        need(tcp, f"port={s.port!r} must be a TCP port, 1 to 65535, or None for a free one")
        remedy = "give a free one, or leave port=None and the job takes one of its own"
        free = s.backend != "local" or port_is_free(s.port)
        need(free, f"port={s.port} of this machine is in use by another process; {remedy}")
    need(bool(sys.executable), "this interpreter does not know its own executable, so it cannot start another one")


def _unwrap(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def _name_of(fn: Any) -> str:
    fn = _unwrap(fn)
    named = fn if hasattr(fn, "__qualname__") else type(fn)
    return f"{getattr(named, '__module__', None) or '__main__'}.{named.__qualname__}".replace("<locals>.", "")


def _pack(fn: Any, args: tuple, kwargs: dict[str, Any], function: str) -> bytes:
    """The call as bytes: by value what ranks could not import, and what they need around it to run it alike."""
    module = inspect.getmodule(_unwrap(fn)) or inspect.getmodule(type(_unwrap(fn)))
    with ExitStack() as undo:
        if module is not None and module.__name__ != "__main__" and not _ranks_can_import(module):
            cloudpickle.register_pickle_by_value(module)
            undo.callback(cloudpickle.unregister_pickle_by_value, module)
        try:
            call = dumps((fn, args, kwargs))
        except Exception as error:
            raise ConfigError(
                f"{function} and its arguments cannot be sent to other processes ({type(error).__name__}: {error}); "
                "open files, locks, generators and connections have to be made inside the function"
            ) from error
    if len(call) > _LARGE_CALL:
        told = f"{function} and its arguments take {len(call) >> 20} MB, which every rank reads and the run folder "
        warnings.warn(told + "keeps; give the path of large data instead", stacklevel=3)
    path = [os.path.abspath(entry) for entry in sys.path]
    return pickle.dumps({"cwd": os.getcwd(), "sys_path": path, "sources": _typed_sources(), "call": call})


def _ranks_can_import(module: ModuleType) -> bool:
    """Whether a fresh interpreter with our sys.path would find this very module under its name."""
    path, spec = None, None
    for name in itertools.accumulate(module.__name__.split("."), "{}.{}".format):
        spec = _find(name, path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    origin, file = getattr(spec, "origin", None), getattr(module, "__file__", None)
    return file is None or origin is None or os.path.realpath(origin) == os.path.realpath(file)


def _find(name: str, path: Any) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        with suppress(Exception):  # a finder of somebody else's; the next one may know
            if spec := finder.find_spec(name, path):
                return spec
    return None


def _typed_sources() -> dict[str, str]:
    """Sources that exist in no file: cells, the prompt."""
    typed = [(name, entry) for name, entry in list(linecache.cache.items()) if len(entry) == 4 and entry[1] is None]
    return {name: "".join(entry[2]) for name, entry in typed if not os.path.exists(name)}


def _describe(value: Any) -> Any:
    """`value` for config.json: configs as dictionaries, plain data as it is, anything else as a short repr."""
    with suppress(Exception):  # not plain data; its own code may raise anything
        plain: Any = value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            plain = plain.to_dict() if hasattr(plain, "to_dict") else dataclasses.asdict(plain)
        if len(json.dumps(plain)) <= 100_000:
            return plain
    return _SHORT.repr(value)


def _versions() -> dict[str, str]:
    installed = {d.name: d.version for name in _PACKAGES for d in importlib.metadata.Distribution.discover(name=name)}
    return {"python": sys.version.split()[0]} | installed


def _start(folder: Path, detach: bool, env: dict[str, str], resume: bool) -> subprocess.Popen:
    """Starts the supervisor, which watches this process unless the job is detached."""
    me = os.getpid()
    watched = [] if detach else [str(me), stamp(me) or ""]
    # All ranks are on this host: loopback works whatever the host's name resolves to.
    env.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    try:
        with (folder / "logs" / "supervisor.log").open("ab") as log:
            return subprocess.Popen(  # its own session: an interrupt meant for the notebook must not reach the job
                python_command("supervisor", str(folder), *watched), env=env, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        if not resume:  # its checkpoints are another run's work
            remove(folder)
            if not any(folder.iterdir()):
                folder.rmdir()
        raise StorageError(f"cannot start the job in {folder}: {error}; no process was left") from error
