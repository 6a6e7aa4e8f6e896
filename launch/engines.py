"""The processes of a pool: a guard that owns them, and the ranks, each an ipyparallel engine.

::

    notebook --> guard --> controller, rank 0, rank 1, ...

The guard imports no torch. It runs ipyparallel's `Cluster`, notes how a rank ended, and kills all of it when the
notebook's process is gone, when the controller is, or on SIGTERM; the others die with it.
"""

import asyncio
import faulthandler
import os
import pickle
import shutil
import signal
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

import cloudpickle

from . import processes, worker
from .folder import write_json

_INSTALLED = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
_kept = dict[str, Any]()  # the store, times of modules, objects of theirs


def main() -> None:
    """Entry of all: ``guard FOLDER RANKS NOTEBOOK STAMP``, ``controller FOLDER GUARD``, ``rank FOLDER GUARD``."""
    role, folder, number, *stamp = sys.argv[1:]
    if role == "guard":
        _guard(Path(folder), int(number), int(stamp[0]), stamp[1])
    processes.die_with_parent(int(number))
    if role == "rank":
        _rank(Path(folder), os.environ["RANK"])
    from ipyparallel.controller.app import IPController

    os.register_at_fork(after_in_child=lambda: processes.die_with_parent(os.getppid()))  # its heart monitor
    # Ranks count as there once their hearts beat; later the guard watches them, and hearts may stand still (a suspended
    # laptop). The database would keep all that was ever sent.
    hearts = ["--HeartMonitor.period=200", "--HeartMonitor.max_heartmonitor_misses=1000000000"]
    IPController.launch_instance(["--usethreads", "--nodb", "--log-level=ERROR", *hearts])


def _guard(folder: Path, ranks: int, notebook: int, start: str) -> None:
    processes.adopt_orphans()
    try:
        asyncio.run(_keep(folder, ranks, notebook, start))
    except Exception:  # noqa: BLE001  told, whatever it is
        traceback.print_exc()
    processes.kill_descendants()
    if not processes.is_alive(notebook, start):
        shutil.rmtree(folder, ignore_errors=True)
    processes.leave(0)


async def _keep(folder: Path, ranks: int, notebook: int, start: str) -> None:
    from ipyparallel.cluster import Cluster
    from ipyparallel.cluster.launcher import LocalEngineLauncher, LocalEngineSetLauncher
    from traitlets.config import Config

    class Rank(LocalEngineLauncher):
        def get_env(self) -> dict[str, str]:
            return super().get_env() | {"RANK": self.identifier, "LOCAL_RANK": self.identifier}

        def notify_stop(self, data: dict[str, Any]) -> Any:
            write_json(folder / "ranks" / f"exit_{self.identifier}.json", {"exit_code": data["exit_code"]})
            return super().notify_stop(data)

    class Ranks(LocalEngineSetLauncher):
        launcher_class = Rank

    config, me = Config(), str(os.getpid())
    config.ControllerLauncher.controller_cmd = processes.python_command("engines", "controller", str(folder), me)
    config.EngineLauncher.engine_cmd = processes.python_command("engines", "rank", str(folder), me)
    where = {"profile_dir": str(folder), "cluster_id": "pool", "cluster_file": "", "load_profile": False}
    cluster = Cluster(engines=Ranks, n=ranks, delay=0, shutdown_atexit=False, config=config, **where)
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    await cluster.start_cluster()
    (folder / "ready").touch()
    while not ending.is_set() and processes.is_alive(notebook, start) and cluster.controller.running:  # type: ignore[union-attr]
        await asyncio.sleep(0.1)


def _rank(folder: Path, rank: str) -> None:
    worker.log_to(folder / "logs" / f"rank_{rank}.log")
    faulthandler.enable()
    stack = (folder / "ranks" / f"rank_{rank}.stack").open("w")
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)  # tells where a rank is that does not answer
    from ipyparallel.engine.app import IPEngine

    class Engine(IPEngine):
        def redirect_output(self, iopub_socket: Any) -> None:
            """What is printed, also by C++ and by other processes, goes to the log, which the notebook follows."""

    alone = ["--IPEngine.enable_nanny=False", "--IPEngine.max_heartbeat_misses=0"]  # the guard watches
    Engine.launch_instance([f"--IPEngine.id={rank}", *alone, "--log-level=ERROR", "--InteractiveShell.colors=nocolor"])
    processes.leave(0)


# What the notebook calls on a rank


def open_store() -> int:
    """The store in which the ranks of a pool meet: rank 0 keeps it, on a port that the system gave."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    _kept["store"] = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return _kept["store"].port


def join(port: int, cwd: str, path: list[str], settings: dict[str, Any]) -> tuple[int, str]:
    """Makes this process a rank, as the launcher's worker does. Returns its id and its device."""
    # the last one: all ranks are clients of a store that is there already, as under torch elastic
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.chdir(cwd)
    sys.path[:] = path
    worker.join(**settings)
    from IPython import get_ipython

    get_ipython().events.register("pre_run_cell", lambda _: refresh())  # type: ignore[union-attr]
    get_ipython().events.register("post_run_cell", lambda _: refresh(reload=False))  # type: ignore[union-attr]
    return os.getpid(), os.environ["MOEKIT_RUN_DEVICE"]


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
        refresh(reload=False)


def look(expression: str) -> Any:
    """The value of `expression` among the names of this rank."""
    return eval(expression, _names())


def put(names: dict[str, Any]) -> None:
    """Gives this rank's namespace these names."""
    _names().update(names)


def _names() -> dict[str, Any]:
    return sys.modules["__main__"].__dict__


class _Unpickler(pickle.Unpickler):
    """Lets functions of the notebook live in the rank's namespace, so that they see its names and those of %%px."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        found = super().find_class(module_name, global_name)
        return _make_function if found is cloudpickle.cloudpickle._make_function else found


def _make_function(code: Any, names: dict[str, Any], *rest: Any) -> Any:
    home = _names() if names.get("__name__") == "__main__" else names
    return cloudpickle.cloudpickle._make_function(code, home, *rest)


def refresh(reload: bool = True) -> None:
    """Loads edited modules again (not: installed ones, moekit's); what was made of them before gets the new code."""
    times, old = _kept.setdefault("times", {}), _kept.setdefault("old", {})
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if not file.endswith(".py") or file.startswith(_INSTALLED) or name.partition(".")[0] == "moekit":
            continue
        now = os.path.getmtime(file) if os.path.exists(file) else times.get(name)
        if reload and times.get(name, now) != now:
            from IPython.extensions.autoreload import superreload

            superreload(module, old_objects=old)
        times[name] = now if reload else times.get(name, now)
