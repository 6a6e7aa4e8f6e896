"""`workers`: ranks that stay, for stepping through ideas: define, step, edit, step again, look at any rank's tensors.

>>> pool = workers(2)                                          # doctest: +SKIP
>>> pool.run(lambda: moekit.here().rank)                       # doctest: +SKIP
[0, 1]
>>> pool.put("batch", batch)                                   # doctest: +SKIP
>>> pool.run(lambda: learner.model.layers[0].moe.router(x))    # doctest: +SKIP

Names live on: what a function assigns with `global`, and what a ``%%px`` cell assigns, is there in the next call. What
a function uses of the notebook travels with it, in its newest form; names that the notebook does not have are the
rank's. A module of your own that was edited is loaded again before the next call or cell runs (IPython's superreload);
after an edit of moekit itself, `Pool.restart`.
"""

import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from ..errors import BackendError, ConfigError, JobError
from . import engines
from .folder import read_json
from .host import cpu_count, environment, visible_gpus
from .job import Job, LogText
from .outcome import death_notice, place
from .processes import kill_descendants, python_command, stamp
from .submit import _check, _is_count, _name_of, _pack
from .worker import COLLECTIVE

START_S = 120.0
GRACE_S = 3.0  # what other ranks get after the first error, before they are interrupted; and again after that
SHOWN_LINES, SHOWN_WIDTH = 200, 2000  # of a rank's output in one call
_ANEW = "pool.restart() starts it anew, without the names that its ranks had"


def workers(
    nproc: int, *, device: str = "auto", threads: int | None = None, timeout: float = 600.0,
    env: dict[str, str] | None = None, malloc: str = "default",
) -> "Pool":  # fmt: skip
    """Starts `nproc` processes that stay, joined by torch.distributed as those of `moekit.submit` are.

    They are ipyparallel engines: a ``%%px`` cell runs on all of them (of the pool that was started last, see
    `Pool.activate`), and so does ``pool(fn, *args)``. They end with this process, however that ends.

    Args:
        nproc: ranks; may be more than there are cores, not more than there are GPUs (but with `device="cpu"`).
        device, threads, timeout, env, malloc: as in `moekit.submit`.
    Raises:
        ConfigError: a setting cannot work. Nothing was started.
        BackendError: ipyparallel is not installed, or the processes did not come up.
    Cost: about 4 s, and 2 s more for every rank beyond the number of cores; a call about 10 ms.
    """
    if find_spec("ipyparallel") is None:
        raise BackendError("moekit.workers needs ipyparallel: pip install 'moekit[notebooks]'")
    if threads is None and _is_count(nproc):
        threads = max(1, cpu_count() // nproc)
    settings = {"threads": threads, "device": device, "timeout": timeout}
    rest = {"backend": "local", "nodes": 1, "nproc": nproc, "malloc": malloc, "port": None, "slurm": {}}
    _check(workers, env or {}, SimpleNamespace(**settings, **rest))
    gpus = 0 if device == "cpu" else visible_gpus()
    if nproc > gpus and (gpus or device == "cuda"):
        raise ConfigError(f"nproc={nproc} ranks need a GPU each, and there are {gpus}; use fewer, or device='cpu'")
    return Pool(nproc, settings, environment(env, threads=threads or 1, malloc=malloc))


class Pool:
    """Ranks that stay; get one from `moekit.workers`. As a context manager it closes itself."""

    def __init__(self, nproc: int, settings: dict[str, Any], env: dict[str, str]):
        self.nproc, self._settings = nproc, settings
        self._env = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"} | env
        self._env |= {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
        self._start()

    def _start(self) -> None:
        self._client, self._logs, self._stuck, self.pids = None, [], {}, []
        self.folder = Path(tempfile.mkdtemp(prefix="moekit-pool-"))
        for name in ("logs", "ranks"):
            (self.folder / name).mkdir()
        me = os.getpid()
        command = python_command("engines", "guard", str(self.folder), str(self.nproc), str(me), stamp(me) or "")
        with (self.folder / "logs" / "guard.log").open("ab") as log:
            self._guard = subprocess.Popen(  # its own session: an interrupt of the notebook must not reach it
                command, cwd=self.folder, env=self._env | {"IPYTHONDIR": str(self.folder)}, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        from ipyparallel import Client

        self._wait_for((self.folder / "ready").exists)
        info = self.folder / "security" / "ipcontroller-pool-client.json"
        self._client = client = Client(
            str(info), profile_dir=str(self.folder), ipython_dir=str(self.folder), timeout=60
        )
        self._wait_for(lambda: len(client.ids) == self.nproc)
        self._logs = [_Log(self.folder / "logs" / f"rank_{rank}.log", rank) for rank in range(self.nproc)]
        port = self._call(engines.open_store, (), ranks=[0])[0]
        path = [os.path.abspath(entry) for entry in sys.path]
        joined = self._call(engines.join, (port, os.getcwd(), path, self._settings))
        self.pids, self.devices = [pid for pid, _ in joined], [device for _, device in joined]
        self.activate()

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + START_S
        while not condition():
            self._check_alive()
            if time.monotonic() > end:
                raise BackendError(f"the pool did not start in {START_S:.0f} s:\n{self.logs('guard')}")
            time.sleep(0.02)

    def activate(self) -> None:
        """Makes this the pool whose ranks ``%px`` and ``%%px`` use; in a notebook only."""
        shell = sys.modules["IPython"].get_ipython()
        if shell is None:
            return
        from ipyparallel.client.magics import ParallelMagics

        class PoolMagics(ParallelMagics):
            def parallel_execute(
                magics, cell: str, block: Any = None, groupby: str = "type", save_name: Any = None, **_: Any
            ):
                self._check_alive(idle=True)
                result = magics.last_result = magics.view.execute(cell, silent=False, block=False)
                if save_name:
                    shell.user_ns[save_name] = result
                if not (magics.view.block if block is None else block):
                    return result
                try:
                    self._finish({part._targets[0]: part for part in result.split()})
                finally:
                    result.display_outputs(groupby)

        shell.magics_manager.register(PoolMagics(shell, self._client.direct_view(block=True)))

    # Calls

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Runs ``fn(*args, **kwargs)`` on all ranks; what they return, by rank. ``pool(fn, ...)`` is the same.

        What ranks print is shown with the rank before it, the first lines of it; `logs` has all.

        Args:
            timeout: seconds after which the ranks are interrupted. A keyword `timeout` of `fn` has to be bound with
                functools.partial.
        Raises:
            JobError: a rank failed (`rank`, `traceback`). The others get 3 s, are then interrupted, and when that does
                not reach them within 3 s, for they wait in a collective, the pool needs `restart`. Or a rank has died.
            TimeoutError: it took longer than `timeout`.
        """
        return self._call(fn, args, kwargs, limit=timeout)

    __call__ = run

    def get(self, expression: str, rank: int = 0) -> Any:
        """A copy of what a name or an expression is on `rank`: ``pool.get("learner.parameters['head']", rank=1)``."""
        return self._call(engines.look, (expression,), ranks=[rank])[0]

    def put(self, name: str, value: Any, rank: int | None = None) -> None:
        """Assigns a copy of `value` to `name` on `rank`; on all ranks when None."""
        self._call(engines.put, ({name: value},), ranks=None if rank is None else [rank])

    def _call(
        self, fn: Any, args: tuple, kwargs: dict[str, Any] | None = None, ranks: Any = None, limit: float | None = None
    ) -> list[Any]:
        packed = _pack(fn, args, kwargs or {}, _name_of(fn))
        if wrong := [rank for rank in ranks or () if rank not in range(self.nproc)]:
            raise ConfigError(f"rank={wrong[0]!r} is not one of the pool's ranks, 0 to {self.nproc - 1}")
        self._check_alive(idle=True)
        parts = {r: self._client[r].apply_async(engines.call, packed) for r in ranks or range(self.nproc)}
        return [pickle.loads(value) for value in self._finish(parts, limit)]

    def _finish(self, parts: dict[int, Any], limit: float | None = None) -> list[Any]:
        """Waits for the part of every rank: their values, or the error of the rank that failed first."""
        answers, interrupted, told = dict[int, tuple[bool, Any]](), list[int](), None
        end = time.monotonic() + (math.inf if limit is None else limit)
        while pending := [rank for rank in parts if rank not in answers]:
            try:
                wait([parts[rank] for rank in pending], 0.05, FIRST_COMPLETED)
                self._show()
            except KeyboardInterrupt as error:
                told, end = error, 0.0
            answers |= {rank: _answer(rank, parts[rank]) for rank in pending if parts[rank].done()}
            failed = {rank: answer for rank, (good, answer) in answers.items() if not good}
            pending = [rank for rank in pending if rank not in answers]
            if failed and not interrupted:
                end = min(end, time.monotonic() + GRACE_S)
            if pending:
                self._check_alive()
            if pending and time.monotonic() >= end:
                if interrupted or not self.pids:
                    break
                interrupted, end = pending, time.monotonic() + GRACE_S
                for rank in pending:
                    os.kill(self.pids[rank], signal.SIGINT)
                if not failed and told is None:
                    told = TimeoutError(f"the call took longer than {limit} s")
        self._show(last=True)
        self._stuck = {rank: parts[rank] for rank in pending}
        note = f"{_ranks(interrupted)} had not ended and got an interrupt; the pool can be used" if interrupted else ""
        if pending:
            note = self._stuck_at(pending)
        else:
            self._client.purge_local_results(list(parts.values()))
        own = {rank: error for rank, error in failed.items() if rank not in interrupted}
        if own:
            rank, error = min(own.items(), key=lambda item: (item[1]["knock_on"], item[1]["time"]))
            message = f"rank {rank}: {error['type']}: {error['message']}\n\n{error['traceback']}\n{note}".rstrip()
            raise JobError(message, rank, error["traceback"])
        if told is not None:
            told.add_note(note)
            raise told
        return [answers[rank][1] for rank in parts]

    def _check_alive(self, idle: bool = False) -> None:
        """Raises JobError: the pool has ended, a rank has died, or (`idle`) ranks are still in an earlier call."""
        if self._guard.poll() is not None:
            raise JobError(f"the pool's processes have ended: it was closed, or process {self._guard.pid} was; {_ANEW}")
        for rank in range(self.nproc):
            if ended := read_json(self.folder / "ranks" / f"exit_{rank}.json"):
                how = death_notice(rank, ended["exit_code"], 0.0)["message"]
                raise JobError(f"the pool lost rank {rank}: it {how}; {_ANEW}\n\nIts log:\n{self.logs(rank, 15)}", rank)
        if idle and (still := [rank for rank, part in self._stuck.items() if not part.done()]):
            raise JobError(self._stuck_at(still), still[0])

    def _stuck_at(self, ranks: list[int]) -> str:
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGUSR1)  # writes the rank's stack
        time.sleep(0.3)
        at = "".join(f"\n  rank {rank} at {place(self.folder, rank)}" for rank in ranks)
        return f"{_ranks(ranks)} did not answer to an interrupt, as in a collective that not all join; {_ANEW}{at}"

    def _show(self, last: bool = False) -> None:
        for log in self._logs:
            log.show(last)

    def logs(self, rank: int | str = 0, lines: int = 40) -> LogText:
        """The last `lines` lines that `rank` printed."""
        return Job(self.folder).logs(rank, lines)

    # Its end

    def restart(self) -> None:
        """Ends the pool's processes and starts it anew; the names that ranks had are gone."""
        self.close()
        self._start()

    def close(self) -> None:
        """Ends the pool's processes; none is left when it returns."""
        if self._client is not None:
            self._client.close(linger=0)
        for log in self._logs:
            log.file.close()
        self._guard.terminate()
        try:
            self._guard.wait(15.0)
        except subprocess.TimeoutExpired:
            kill_descendants(self._guard.pid)
            self._guard.kill()
            self._guard.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        try:
            self._check_alive(idle=True)
        except JobError as error:
            return f"Pool({self.nproc} ranks: {str(error).splitlines()[0]})"
        return f"Pool({self.nproc} ranks on {', '.join(dict.fromkeys(self.devices))}, ready)"


class _Log:
    """What a rank prints: the first lines of each call are shown, with the rank before them."""

    def __init__(self, path: Path, rank: int):
        self.file, self.rank = path.open(errors="backslashreplace", newline="\n"), rank
        self.rest, self.lines = "", 0

    def show(self, last: bool) -> None:
        while chunk := self.file.read(1 << 16):
            *lines, self.rest = (self.rest + chunk).split("\n")
            self.rest = self.rest.rpartition("\r")[2][-SHOWN_WIDTH:]  # of a progress bar, its last state
            self._print(lines)
            if not last:
                return
        if last:
            self._print([self.rest] if self.rest else [])
            if self.lines > SHOWN_LINES:
                print(f"[rank {self.rank}] and {self.lines - SHOWN_LINES} lines more: pool.logs({self.rank})")
            self.rest, self.lines = "", 0

    def _print(self, lines: list[str]) -> None:
        for line in lines[: max(0, SHOWN_LINES - self.lines)]:
            print(f"[rank {self.rank}] {line.rpartition(chr(13))[2][:SHOWN_WIDTH]}")
        self.lines += len(lines)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _answer(rank: int, part: Any) -> tuple[bool, Any]:
    """Whether a rank's part went well, and its value or its error as plain data."""
    from ipyparallel.error import CompositeError, RemoteError

    try:
        got = part.get()
    except RemoteError as error:  # of a cell
        one = RemoteError(*error.elist[0]) if isinstance(error, CompositeError) else error
        knock_on = one.ename.startswith("Dist") or (one.ename == "RuntimeError" and bool(COLLECTIVE.search(one.evalue)))
        said = {"type": one.ename, "message": one.evalue, "traceback": one.traceback, "time": time.time()}
        return False, said | {"knock_on": knock_on}
    return got if isinstance(got, tuple) else (True, None)
