"""`workers`: ranks that stay, for stepping through ideas: define, step, edit, step again, look at any rank's tensors.

>>> pool = workers(2)                                           # doctest: +SKIP
>>> pool(make_learner, config)  # in it: `global learner`       # doctest: +SKIP
>>> pool.put("batch", batch)                                    # doctest: +SKIP
>>> pool(lambda: learner.step([batch], record=True))            # doctest: +SKIP
>>> pool.get("learner.routes[0]", rank=1)  # experts by layer   # doctest: +SKIP

Names stay on the ranks: what a function assigns with `global`, what a ``%%px`` cell assigns, what `Pool.put` puts. What
a function uses of the notebook travels with it, as it is now; names that the notebook does not have are the rank's. A
module of yours that was edited is loaded again before the next call or cell, by IPython's superreload, so objects made
before have the new methods. Installed modules and moekit's own are not; after an edit of those, `Pool.restart`.
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
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from itertools import islice
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

_START_S = 120.0
_GRACE_S = 2.0  # for the other ranks after the first error, until they are interrupted; and after that, to answer
_LINES, _WIDTH, _CHUNK = 200, 2000, 1 << 16  # of a rank's output in one call
_ANEW = "pool.restart() starts it anew, without the names that its ranks had"


def workers(
    nproc: int, *, device: str = "auto", threads: int | None = None, timeout: float = 600.0,
    env: dict[str, str] | None = None, malloc: str = "default",
) -> "Pool":  # fmt: skip
    """Starts `nproc` processes that stay, joined by torch.distributed as those of `moekit.submit` are.

    They are ipyparallel engines: ``pool(fn, *args)`` runs on all of them, and so does a ``%%px`` cell (of the pool that
    was started last, or that `Pool.activate` chose). They end with this process, however that ends.

    Args:
        nproc: ranks; may be more than there are cores, but not more than there are GPUs (see `device`).
        device, threads, timeout, env, malloc: as in `moekit.submit`.
    Raises:
        ConfigError: a setting cannot work. Nothing was started.
        BackendError: ipyparallel is not installed, or the processes did not come up.
    """
    if find_spec("ipyparallel") is None:
        raise BackendError("moekit.workers needs ipyparallel; install it with: pip install 'moekit[notebooks]'")
    if threads is None and _is_count(nproc):
        threads = max(1, cpu_count() // nproc)
    settings = {"threads": threads, "device": device, "timeout": timeout}
    rest = {"backend": "local", "nodes": 1, "nproc": nproc, "malloc": malloc, "port": None, "slurm": {}}
    _check(workers, env or {}, SimpleNamespace(**settings, **rest))
    gpus = 0 if device == "cpu" else visible_gpus()
    if nproc > gpus and (gpus or device == "cuda"):
        raise ConfigError(f"nproc={nproc} ranks need one GPU each, and {gpus} are visible here; or use device='cpu'")
    return Pool(nproc, settings, environment(env, threads=threads or 1, malloc=malloc))


class Pool:
    """Ranks that stay; get one from `moekit.workers`. A context manager that closes itself."""

    def __init__(self, nproc: int, settings: dict[str, Any], env: dict[str, str]):
        self.nproc, self._settings = nproc, settings
        self._env = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"} | env
        self._env |= {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
        self._start()

    def _start(self) -> None:
        for left in (2, 1, 0):
            self._launch()
            try:
                return self._connect()
            except BaseException as error:
                again = left and isinstance(error, Exception) and self._ports_were_taken()
                self.close()
                if not again:
                    raise

    def _launch(self) -> None:
        self._client: Any = None
        self._stuck, self.pids = dict[int, Any](), list[int]()
        self.folder, me = Path(tempfile.mkdtemp(prefix="moekit-pool-")), os.getpid()
        for name in ("logs", "ranks"):
            (self.folder / name).mkdir()
        command = python_command("engines", "guard", str(self.folder), str(self.nproc), str(me), stamp(me) or "")
        env = self._env | {"IPYTHONDIR": str(self.folder)}  # nothing of this is to be found in the user's own
        with (self.folder / "logs" / "guard.log").open("ab") as log:
            self._guard = subprocess.Popen(  # its own session: an interrupt of the notebook must not reach it
                command, cwd=self.folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def _connect(self) -> None:
        from ipyparallel import Client

        info = self.folder / "security" / "ipcontroller-pool-client.json"

        def reached() -> bool:
            with suppress(TimeoutError):  # of a controller that is slow, or has just died
                self._client = Client(str(info), ipython_dir=str(self.folder), timeout=5)
            return self._client is not None

        self._wait_for((self.folder / "ready").exists)
        self._wait_for(reached)
        self._wait_for(lambda: len(self._client.ids) == self.nproc)
        self._logs = [(self.folder / "logs" / f"rank_{rank}.log").open("rb") for rank in range(self.nproc)]
        port = self._call(engines.open_store, (), ranks=[0])[0]
        path = [os.path.abspath(entry) for entry in sys.path]
        joined = self._call(engines.join, (port, os.getcwd(), path, self._settings))
        self.pids, self.devices = [pid for pid, _ in joined], [device for _, device in joined]
        self.activate()

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        begin = time.monotonic()
        while not condition():
            self._check_alive()
            taken, waited = self._ports_were_taken(), time.monotonic() - begin
            if taken or waited > _START_S:
                why = ": others took its ports" * taken
                raise BackendError(f"the pool did not start in {waited:.0f} s{why}; its log:\n{self.logs('guard')}")
            time.sleep(0.02)

    def _ports_were_taken(self) -> bool:
        """Whether the controller lost a port, which it looks for before it binds it, to another process. What it said
        is in a log of its own, until the guard notes that it died and what it said."""
        found = ""
        for log in (*self.folder.glob("log/ipcontroller*.log"), self.folder / "logs" / "guard.log"):
            with suppress(FileNotFoundError):
                found += log.read_text(errors="replace")
        return "Address already in use" in found

    def activate(self) -> None:
        """Makes this the pool whose ranks ``%px`` and ``%%px`` use; in a notebook only."""
        from ipyparallel.client.magics import ParallelMagics
        from IPython import get_ipython

        pool, view, shell = self, self._client.direct_view(block=True), get_ipython()

        class PoolMagics(ParallelMagics):
            def parallel_execute(self, cell, block=None, groupby="type", save_name=None, **_):
                pool._check_alive(idle=True)
                result = self.last_result = view.execute(cell, silent=False, block=False)
                if save_name:
                    shell.user_ns[save_name] = result  # type: ignore[union-attr]
                if not (view.block if block is None else block):
                    return result
                try:
                    pool._finish({part._targets[0]: part for part in result.split()})
                finally:
                    if result.done() and result.wait_for_output(5):  # displays come on a channel of their own, later
                        result.display_outputs(groupby)
                        pool._client.purge_local_results(result)

        if shell is not None:
            shell.magics_manager.register(PoolMagics(shell, view))

    # Calls

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Runs ``fn(*args, **kwargs)`` on all ranks; what they return, by rank. ``pool(fn, ...)`` is the same.

        The first lines of what ranks print are shown, each with its rank; `logs` has the last ones.

        Args:
            timeout: seconds after which the ranks are interrupted. A keyword `timeout` of `fn` has to be bound with
                functools.partial.
        Raises:
            JobError: a rank failed (`rank`, `traceback`). The others get 2 s and are then interrupted; those that this
                does not reach either, for they wait in a collective, are named, and the pool needs `restart`.
                Or a rank has died.
            TimeoutError: it took longer than `timeout`.
        """
        return self._call(fn, args, kwargs, limit=timeout)

    __call__ = run

    def get(self, expression: str, rank: int = 0) -> Any:
        """A copy of what a name, or any expression, is on `rank`."""
        return self._call(engines.look, (expression,), ranks=[rank])[0]

    def put(self, name: str, value: Any, rank: int | None = None) -> None:
        """Assigns a copy of `value` to `name` on `rank`; on all ranks when None."""
        self._call(engines.put, ({name: value},), ranks=None if rank is None else [rank])

    def _call(
        self, fn: Any, args: tuple, kwargs: Any = None, ranks: Any = None, limit: float | None = None
    ) -> list[Any]:
        packed = _pack(fn, args, kwargs or {}, _name_of(fn))
        if wrong := [rank for rank in ranks or () if rank not in range(self.nproc)]:
            raise ConfigError(f"rank={wrong[0]!r} is not one of the pool's ranks, 0 to {self.nproc - 1}")
        self._check_alive(idle=True)
        parts = {r: self._client[r].apply_async(engines.call, packed) for r in ranks or range(self.nproc)}
        values = self._finish(parts, limit)
        self._client.purge_local_results(list(parts.values()))
        return [pickle.loads(value) for value in values]

    def _finish(self, parts: dict[int, Any], limit: float | None = None) -> list[Any]:
        """Waits for the part of every rank: their values, or the error of the rank that failed first."""
        answers, failed, interrupted = dict[int, Any](), dict[int, Any](), list[int]()
        told, end = None, time.monotonic() + (math.inf if limit is None else limit)
        self._shown = [0] * self.nproc
        while pending := [rank for rank in parts if rank not in answers | failed]:
            try:
                wait([parts[rank] for rank in pending], 0.05, FIRST_COMPLETED)
                self._show()
                for rank in (done := [rank for rank in pending if parts[rank].done()]):
                    good, answer = _answer(parts[rank])
                    (answers if good else failed)[rank] = answer
                if not done:
                    self._check_alive()
                if failed and not interrupted:
                    end = min(end, time.monotonic() + _GRACE_S)
                if done or time.monotonic() < end:
                    continue
                if interrupted or not self.pids:
                    break
                interrupted, end = pending, time.monotonic() + _GRACE_S
                self._signal(interrupted, signal.SIGINT)
                told = told or TimeoutError(f"the call took longer than {limit} s")
            except KeyboardInterrupt as error:
                told, end = error, 0.0
        self._show(last=True)
        self._stuck = {rank: parts[rank] for rank in pending}
        note = f"{_ranks(interrupted)} had not ended and got an interrupt; the pool goes on" if interrupted else ""
        note = self._where(pending) if pending and self.pids else note
        if own := {rank: error for rank, error in failed.items() if rank not in interrupted}:
            rank, error = min(own.items(), key=lambda item: (item[1]["knock_on"], item[1]["time"]))
            message = f"rank {rank}: {error['type']}: {error['message']}\n\n{error['traceback']}\n{note}"
            raise JobError(message.rstrip(), rank, error["traceback"])
        if told is not None:
            told.add_note(note)
            raise told
        return [answers[rank] for rank in parts]

    def _check_alive(self, idle: bool = False) -> None:
        """Raises JobError: the pool has ended, a rank has died, or (`idle`) ranks are still in an earlier call."""
        if self._guard.poll() is not None:
            log = self.logs("guard", 15)
            raise JobError(f"the pool was closed, or process {self._guard.pid}, which keeps it, ended; {_ANEW}\n{log}")
        for rank in range(self.nproc):
            if ended := read_json(self.folder / "ranks" / f"exit_{rank}.json"):
                how = death_notice(rank, ended["exit_code"], 0.0)["message"]
                raise JobError(f"the pool lost rank {rank}: it {how}; {_ANEW}\n\nIts log:\n{self.logs(rank, 15)}", rank)
        if idle and (still := [rank for rank, part in self._stuck.items() if not part.done()]):
            raise JobError(self._where(still), still[0])

    def _signal(self, ranks: list[int], number: int) -> None:
        for rank in ranks:
            with suppress(ProcessLookupError):  # it died, and the guard has not said so yet
                os.kill(self.pids[rank], number)

    def _where(self, ranks: list[int]) -> str:
        """That they did not answer, and the line that each is at. Raises JobError: one of them has died."""
        sizes = lambda: [(self.folder / "ranks" / f"rank_{rank}.stack").stat().st_size for rank in ranks]
        before = now = sizes()
        self._signal(ranks, signal.SIGUSR1)  # has them write their stacks
        end, last = time.monotonic() + _GRACE_S, []
        while time.monotonic() < end and not (now == last and all(new > old for new, old in zip(now, before))):
            time.sleep(0.1)
            self._check_alive()
            last, now = now, sizes()
        at = "".join(f"\n  rank {rank} is at {place(self.folder, rank)}" for rank in ranks)
        return f"{_ranks(ranks)} did not answer to an interrupt, as in a collective that not all join; {_ANEW}{at}"

    def _show(self, last: bool = False) -> None:
        for rank, log in enumerate(self._logs):
            for line in islice(iter(partial(log.readline, _CHUNK), b""), _CHUNK):
                if not (last or line.endswith(b"\n") or len(line) == _CHUNK):
                    log.seek(-len(line), os.SEEK_CUR)  # until it is whole
                    break
                self._shown[rank] += 1
                if self._shown[rank] <= _LINES:  # of a progress bar, its last state
                    print(f"[rank {rank}] {line.decode(errors='replace').rstrip().rpartition(chr(13))[2][:_WIDTH]}")
            if last and self._shown[rank] > _LINES:
                print(f"[rank {rank}] ... pool.logs({rank}) has the last of its lines")
                log.seek(0, os.SEEK_END)

    def logs(self, rank: int | str = 0, lines: int = 40) -> LogText:
        """The last `lines` lines that `rank` printed."""
        return Job(self.folder).logs(rank, lines)

    # Its end

    def restart(self) -> None:
        """Ends the pool's processes and starts it anew; the names that its ranks had are gone."""
        self.close()
        self._start()

    def close(self) -> None:
        """Ends the pool's processes; none is left when it returns."""
        if self._client is not None:
            self._client.close(linger=0)
        self._guard.terminate()
        try:
            self._guard.wait(15.0)
        except subprocess.TimeoutExpired:
            kill_descendants(self._guard.pid)
            self._guard.kill()
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


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _answer(part: Any) -> tuple[bool, Any]:
    """Whether a rank's part went well, and its value or its error as plain data."""
    from ipyparallel.error import CompositeError, RemoteError

    try:
        got = part.get()
        return got if isinstance(got, tuple) else (True, None)
    except RemoteError as error:  # of a cell
        name, text, trace, _ = (
            error.elist[0] if isinstance(error, CompositeError) else (*error.args, error.traceback, 0)
        )
        knock_on = name.startswith("Dist") or (name == "RuntimeError" and bool(COLLECTIVE.search(text)))
        return False, {"type": name, "message": text, "traceback": trace, "time": time.time(), "knock_on": knock_on}
