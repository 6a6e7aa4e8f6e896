"""The processes of a pool: a guard that owns them, and the ranks, each an ipyparallel engine.

::

    notebook --> guard --> controller, rank 0, rank 1, ...

The guard imports no torch. It runs ipyparallel's `Cluster`, notes how a rank ended, and ends all of it when the
notebook's process is gone, when the controller is, or on SIGTERM; all of it ends with the guard.
"""

import asyncio
import faulthandler
import importlib
import os
import pickle
import shutil
import signal
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle

from . import processes, worker
from .folder import write_json

_CLOSE_S = 2.0  # between SIGTERM and SIGKILL
_INSTALLED = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))


def main() -> None:
    """Entry of all of them: ``guard FOLDER RANKS NOTEBOOK STAMP``, ``controller PARENT``, ``rank PARENT FOLDER``."""
    role, *rest = sys.argv[1:]
    if role == "guard":
        _guard(Path(rest[0]), int(rest[1]), int(rest[2]), rest[3])
    processes.die_with_parent(int(rest[0]))
    if role == "controller":
        from ipyparallel.controller.app import IPController

        # Ranks are watched by the guard; a heart that stood still (a suspended laptop) is no reason to drop one.
        IPController.launch_instance(["--usethreads", "--HeartMonitor.max_heartmonitor_misses=1000000000"])
    else:
        _rank(Path(rest[1]), os.environ["RANK"])


# The guard


def _guard(folder: Path, ranks: int, notebook: int, start: str) -> None:
    processes.adopt_orphans()
    try:
        asyncio.run(_keep(folder, ranks, notebook, start))
    finally:
        processes.kill_descendants()
        shutil.rmtree(folder, ignore_errors=True)
        processes.leave(0)


async def _keep(folder: Path, ranks: int, notebook: int, start: str) -> None:
    from ipyparallel.cluster import Cluster
    from ipyparallel.cluster.launcher import LocalControllerLauncher, LocalEngineLauncher, LocalEngineSetLauncher

    def command(role: str, *arguments: str) -> list[str]:
        return processes.python_command("engines", role, str(os.getpid()), *arguments)

    class Controller(LocalControllerLauncher):
        def find_args(self) -> list[str]:
            return command("controller")

    class Rank(LocalEngineLauncher):
        def find_args(self) -> list[str]:
            return command("rank", str(folder))

        def get_env(self) -> dict[str, str]:
            return super().get_env() | {"RANK": self.identifier, "LOCAL_RANK": self.identifier}

        def notify_stop(self, data: dict[str, Any]) -> Any:
            write_json(folder / "ranks" / f"exit_{self.identifier}.json", {"exit_code": data["exit_code"]})
            return super().notify_stop(data)

    class Ranks(LocalEngineSetLauncher):
        launcher_class = Rank

    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    cluster = Cluster(
        controller=Controller, engines=Ranks, profile_dir=str(folder), cluster_id="pool", n=ranks, delay=0,
        load_profile=False, shutdown_atexit=False, cluster_file="",
    )  # fmt: skip
    await cluster.start_cluster()
    (folder / "ready").touch()
    while not ending.is_set() and processes.is_alive(notebook, start) and cluster.controller.running:
        await asyncio.sleep(0.1)
    await cluster.signal_engines(signal.SIGTERM)
    end = asyncio.get_running_loop().time() + _CLOSE_S
    while cluster.engine_set.running and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.02)


# A rank


def _rank(folder: Path, rank: str) -> None:
    worker.log_to(folder / "logs" / f"rank_{rank}.log")
    faulthandler.enable()
    stack = (folder / "ranks" / f"rank_{rank}.stack").open("w")
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)  # tells where a rank is that does not answer
    from ipyparallel.engine.app import IPEngine

    class Engine(IPEngine):
        def redirect_output(self, iopub_socket: Any) -> None:
            """What is printed, also by C++ and by other processes, goes to the log, which the notebook follows."""

    Engine.launch_instance(
        [
            f"--IPEngine.id={rank}",
            "--IPEngine.enable_nanny=False",
            "--log-level=ERROR",
            "--InteractiveShell.colors=nocolor",
        ]
    )


def _namespace() -> dict[str, Any]:
    return sys.modules["__main__"].__dict__


def _function(code: Any, made: dict[str, Any], *rest: Any) -> Any:
    home = _namespace() if made.get("__name__") == "__main__" else made
    return cloudpickle.cloudpickle._make_function(code, home, *rest)


class _Unpickler(pickle.Unpickler):
    """Lets functions of the notebook live in the rank's namespace, so that they see its names and those of %%px."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        found = super().find_class(module_name, global_name)
        return _function if found is cloudpickle.cloudpickle._make_function else found


def call(packed: bytes) -> tuple[bool, Any]:
    """Runs what the notebook sent. Returns True and the pickled value, or False and the error as plain data."""
    rank = int(os.environ["RANK"])
    try:
        sent = pickle.loads(packed)
        sys.path += [entry for entry in sent["sys_path"] if entry not in sys.path]
        worker.know_sources(sent["sources"])
        refresh()
        fn, args, kwargs = worker.loads(sent["call"], "the call", _Unpickler)
        return True, worker.dumps_result(fn(*args, **kwargs), rank)
    except BaseException as error:  # noqa: BLE001  whatever ended the call is what the user has to see
        return False, worker.describe_error(rank, error)
    finally:
        note_modules()


def open_store() -> int:
    """The store in which the ranks of a pool meet: rank 0 keeps it, on a port that the system gave."""
    from torch.distributed import TCPStore

    open_store.kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    return open_store.kept.port  # type: ignore[attr-defined]


def join(port: int, cwd: str, path: list[str], settings: dict[str, Any]) -> tuple[int, str]:
    """Makes this process a rank, as the launcher's worker does. Returns its id and its device."""
    # the last one: all ranks are clients of a store that is there already, as under torch elastic
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.chdir(cwd)
    sys.path[:] = path
    worker.join(**settings)
    from IPython import get_ipython

    events = get_ipython().events  # type: ignore[union-attr]
    events.register("pre_run_cell", lambda _info: refresh())
    events.register("post_run_cell", lambda _result: note_modules())
    return os.getpid(), os.environ["MOEKIT_RUN_DEVICE"]


def look(expression: str) -> Any:
    """The value of `expression` among the names of this rank."""
    return eval(expression, _namespace())


def put(names: dict[str, Any]) -> None:
    """Gives this rank's namespace these names."""
    _namespace().update(names)


# Modules that were edited

_seen = dict[str, tuple[str, float]]()
_old = dict[Any, Any]()


def _own_modules() -> dict[str, tuple[str, float]]:
    """Name -> file and time of its last change, of modules that are neither installed nor moekit's."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and file.endswith(".py") and name.split(".")[0] != "moekit" and not file.startswith(_INSTALLED):
            with suppress(OSError):
                found[name] = file, os.path.getmtime(file)
    return found


def note_modules() -> None:
    """Remembers the files of the modules that are loaded now."""
    for name, at in _own_modules().items():
        _seen.setdefault(name, at)


def refresh() -> None:
    """Loads again what was edited since it was loaded; instances and functions made before get the new code."""
    for name, at in _own_modules().items():
        if _seen.get(name, at) != at:
            from IPython.extensions.autoreload import superreload

            importlib.invalidate_caches()
            superreload(sys.modules[name], old_objects=_old)
            _seen[name] = at
