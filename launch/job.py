"""`Job`: a run folder seen as something to watch, wait for, read from and stop; `attach` finds one again.

A `Job` knows nothing that the folder does not say, so the one that `submit` returned and the ones that `attach`
returns, in this process or another, during the run or years later, behave alike.
"""

import html
import io
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..errors import JobError
from . import slurm
from .folder import ENDED, read_json, read_state, write_json
from .processes import host_id, is_alive, kill_descendants

_POLL_S = 0.1


class LogText(str):
    """Text that a notebook shows as it is instead of quoted."""

    def __repr__(self) -> str:
        return str(self)


def _is_local(said: dict[str, Any]) -> bool:
    return said.get("backend", "local") == "local"


def _until(condition: Callable[[], bool], end: float) -> None:
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def attach(path: str | Path) -> "Job":
    """The job whose run folder is `path`, whoever submitted it, running or ended; ConfigError if there is none."""
    folder = Path(path).absolute()
    read_state(folder)
    return Job(folder)


class Job:
    """A job in its run folder. Get one from `moekit.submit` or `moekit.attach`."""

    def __init__(self, folder: Path, process: subprocess.Popen | None = None):
        self.folder, self.name = folder, folder.name
        self.config: dict[str, Any] = read_json(folder / "config.json") or {}  # what was asked for
        self.nproc: int = self.config.get("nproc", 0) * self.config.get("nodes", 1)  # ranks, over all nodes
        self._last: dict[str, Any] = {}
        self._metrics: list[dict[str, Any]] = []
        self._metrics_offset, self._metrics_line = 0, b""
        self._over = threading.Event()
        self._own = process is not None
        if process is not None:
            threading.Thread(target=self._collect, args=(process, self._over), daemon=True).start()

    def _collect(self, process: subprocess.Popen, over: threading.Event) -> None:
        """Waits for our own supervisor, so that it leaves no zombie and waiters need not poll."""
        process.wait()
        over.set()

    def _read(self) -> dict[str, Any]:
        if self._last.get("state") in ENDED:
            if (read_json(self.folder / "state.json") or {}).get("created", 0) <= self._last.get("created", 0):
                return self._last
            self._own, self._over = False, threading.Event()  # it goes on, resumed through another Job
        self._last = read_state(self.folder, gone=self._over.is_set())
        return self._last

    @property
    def state(self) -> str:
        """starting, running, finished, failed or stopped."""
        return self._read()["state"]

    @property
    def reason(self) -> str:
        """Why the job failed or was stopped, in one line; empty otherwise."""
        return self._read()["reason"]

    @property
    def done(self) -> bool:
        """Whether the job has ended, in whatever way."""
        return self.state in ENDED

    @property
    def pids(self) -> list[int | None]:
        """Process id of each rank; None for a rank that has not started yet."""
        return self._read()["pids"]["ranks"]

    @property
    def supervisor_pid(self) -> int | None:
        """Process that watches over the ranks; None before it has told its id."""
        return self._read()["pids"]["supervisor"]

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """Of each rank: `rank`, `pid` (None before it started), `alive` (None where that cannot be seen from here) and
        `exit` (its exit code, minus the signal that ended it; None before, and where it is unknown)."""
        state, living = self._read(), self._living(self._last)
        here = state["host"] == host_id() or not _is_local(state)
        codes = state.get("exit_codes") or []
        return [
            {"rank": rank, "pid": pid, "alive": pid in living if here and (pid is None or str(pid) in state["stamps"])
             else None, "exit": codes[rank] if rank < len(codes) else None}
            for rank, pid in enumerate(self.pids)
        ]  # fmt: skip

    @property
    def elapsed(self) -> float:
        """Seconds from submission to now, or to the end."""
        state = self._read()
        return (state["ended"] or time.time()) - state["created"]

    # Waiting and results

    def wait(self, timeout: float | None = None) -> str:
        """Waits for the end, at most `timeout` seconds; returns the state then. Never raises for how the job went.

        Interrupting the wait leaves the job as it is.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        try:
            while not self.done:
                left = end - time.monotonic()
                if left <= 0:
                    break
                if self._own and not self._over.is_set():
                    self._over.wait(min(left, 3600.0))
                else:  # many hosts share the folder of a job on several nodes
                    time.sleep(min(left, _POLL_S if _is_local(self.config) else 10 * _POLL_S))
        except KeyboardInterrupt:
            print(f"job {self.name} goes on; job.stop() ends it", file=sys.stderr)
            raise
        return self.state

    def result(self, timeout: float | None = None) -> list[Any]:
        """What each rank's function returned, once the job has finished; indexed by rank.
        Raises:
            JobError: it failed (with the traceback of the rank that failed first) or was stopped.
            TimeoutError: it has not ended within `timeout` seconds; it goes on.
        """
        state = self.wait(timeout)
        if state not in ENDED:
            raise TimeoutError(f"job {self.name} is still {state} after {timeout} s; it goes on, job.stop() ends it")
        if state != "finished":
            raise self._error()
        paths = [self.folder / "results" / f"rank_{rank}.pkl" for rank in range(self.nproc)]
        for rank, path in enumerate(paths):
            if not path.exists():
                raise JobError(f"job {self.name} finished, but {path} is gone", rank)
        return [pickle.loads(path.read_bytes()) for path in paths]

    def _error(self) -> JobError:
        state = self._read()
        rank = state["failed_rank"]
        message = f"job {self.name} {'was ' if state['state'] == 'stopped' else ''}{state['state']}: {state['reason']}"
        trace = ""
        if rank is not None:
            trace = (read_json(self.folder / "errors" / f"rank_{rank}.json") or {}).get("traceback", "")
            more = trace or f"The last lines of its log:\n{self.logs(rank, 15)}\n"
            message += f"\n\n{more}\nAll of its output: {self.folder / 'logs' / f'rank_{rank}.log'}"
        elif state["state"] == "failed":
            message += f"\n\nThe last lines of the supervisor's log:\n{self.logs('supervisor', 15)}"
        return JobError(message, rank, trace)

    # Output

    def logs(self, rank: int | str = 0, lines: int = 40) -> LogText:
        """The last `lines` lines that `rank` printed; `rank` "supervisor" is the log of the job's own processes."""
        with suppress(FileNotFoundError), self._log_path(rank).open("rb") as file:
            size, data, back = file.seek(0, os.SEEK_END), b"", 1 << 16
            while len(data) < size and data.count(b"\n") <= lines:  # from the end: a log may be long
                file.seek(max(size - back, 0))
                data, back = file.read(size - file.tell()), 4 * back
            text = io.TextIOWrapper(io.BytesIO(data), errors="backslashreplace").read()
            return LogText("\n".join(text.removesuffix("\n").split("\n")[-lines:] if lines else ()))
        return LogText("")

    def _log_path(self, rank: int | str) -> Path:
        return self.folder / "logs" / (f"rank_{rank}.log" if isinstance(rank, int) else f"{rank}.log")

    def tail(self, rank: int = 0, lines: int = 10) -> None:
        """Prints the last lines of a rank's log and then what follows, until the job ends or you interrupt."""
        with suppress(KeyboardInterrupt), self._log_path(rank).open("a+", errors="backslashreplace") as file:
            print(self.logs(rank, lines))
            done = False
            while not done:
                done = self.wait(3 * _POLL_S) in ENDED  # before reading, so that the last lines are not missed
                print(file.read(), end="", flush=True)

    def metrics(self) -> list[dict[str, Any]]:
        """All metrics written so far, one dictionary per step. Reads only what is new since the last call, or all where
        the last line does not stand where it stood: another run's file, or one cut by a run that went on."""
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._metrics_offset - len(self._metrics_line))
            if file.read(len(self._metrics_line)) != self._metrics_line:
                self._metrics, self._metrics_offset = [], 0
            file.seek(self._metrics_offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be half written
        self._metrics_offset += len(whole)
        self._metrics_line = whole[whole.rfind(b"\n", 0, -1) + 1 :] or self._metrics_line
        for line in whole.splitlines():
            try:
                self._metrics.append(json.loads(line))
            except ValueError:
                if line.strip():
                    warnings.warn(f"{path} has a line that is not JSON: {line[:80]!r}", stacklevel=2)
        return list(self._metrics)

    # Ending it

    def stop(self, patience: float = 15.0) -> str:
        """Ends the job: SIGTERM to its ranks, SIGKILL to what is left after 5 s. Returns the state, once all is gone.

        No process is left. When the supervisor does not do it within `patience` seconds, it is ended too.
        """
        state = self._read()
        if state["state"] in ENDED and not self._living(state):
            return state["state"]
        end = time.monotonic() + patience
        if not _is_local(state):
            told = self._living(state)
            if not slurm.cancel(self.folder) and len(told) < sum(pid is not None for pid in self.pids):
                raise JobError(f"job {self.name} has ranks on other hosts; end its torchrun there")
            self._note_stopped(state, "on request")  # before its ranks end, for their end would look like a failure
        elif state["host"] != host_id():
            raise JobError(f"job {self.name} runs on {state['host']}; stop it there")
        else:  # it may be just submitted
            _until(lambda: self.supervisor_pid is not None or self._over.is_set(), end)
            state = self._read()
            told = [state["pids"]["supervisor"]]
        for pid in set(told) & set(self._living(state)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        _until(lambda: not set(told) & set(self._living(state)), end)
        state = read_state(self.folder)
        for pid in (left := self._living(state)):
            kill_descendants(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if left:
            _until(lambda: not self._living(state), time.monotonic() + 5.0)
            self._note_stopped(state, "by force")
        return self.state

    @property
    def cannot_resume(self) -> str:
        """Why `resume` would not work now, in one line; empty where it would."""
        state = self._read()["state"]
        configs = [*self.config.get("args", ()), *self.config.get("kwargs", {}).values()]
        return next((why for wrong, why in (
            (state not in ENDED, f"the job is {state}"),
            (state == "finished", "it has finished; for more steps submit it again, with more steps and resume=True"),
            (not _is_local(self.config), "it is no local job; submit it again with resume=True"),
            (not any(isinstance(c, dict) and "resume" in c for c in configs),
             f"{self.config.get('function')} takes no config with a field `resume`"),
            (not any((self.folder / "checkpoints").glob("step_*")), "it has written no checkpoint (see save_every)"),
        ) if wrong), "")  # fmt: skip

    def resume(self) -> "Job":
        """Submits the call of a job that was stopped or failed again, with `resume=True` in its config: it goes on from
        its newest checkpoint in its folder, and this Job follows it. Ends with this process unless it was detached.
        Raises JobError: it cannot go on; says why. StorageError, ConfigError: see `moekit.submit`."""
        if why := self.cannot_resume:
            raise JobError(f"job {self.name} cannot be resumed: {why}")
        from .submit import again

        self.__init__(self.folder, again(self.folder, self.config))
        return self

    def _living(self, state: dict[str, Any]) -> list[int]:
        """The processes of the job that still run on this host."""
        if state["host"] != host_id() and _is_local(state):
            return []
        return [int(pid) for pid, start in state["stamps"].items() if is_alive(int(pid), start)]

    def _note_stopped(self, state: dict[str, Any], how: str) -> None:
        if state["state"] not in ENDED:
            state |= {"state": "stopped", "reason": f"stopped {how}", "ended": time.time()}
            write_json(self.folder / "state.json", state)

    # Showing it

    def _facts(self) -> list[tuple[str, str]]:
        state, last = self._read(), (self.metrics() or [{}])[-1]
        step = [("step", f"{last['step/index']:g}")] if "step/index" in last else []
        facts = [("state", state["state"]), *step, ("ranks", str(self.nproc))]
        facts.append(("elapsed", str(timedelta(seconds=int(self.elapsed)))))
        shown = [key for key in ("loss/total", "rate/supervised_tokens_s", "lr") if key in last]
        facts += [(key, f"{last[key]:.4g}") for key in shown if isinstance(last[key], int | float)]
        if state["reason"]:
            facts.append(("reason", state["reason"][:300]))
        return facts

    def __repr__(self) -> str:
        return f"Job({self.name}: " + ", ".join(f"{key} {value}" for key, value in self._facts()) + ")"

    def _repr_html_(self) -> str:
        left = "style='text-align:left'"
        cells = [f"<tr><th {left}>{key}</th><td {left}>{html.escape(value)}</td></tr>" for key, value in self._facts()]
        folder = html.escape(str(self.folder))
        return f"<div>job <b>{html.escape(self.name)}</b> in <code>{folder}</code></div><table>{''.join(cells)}</table>"
