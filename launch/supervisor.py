"""The two processes between a job and its ranks: a supervisor that owns the run's state, and torch elastic's agent.

::

    whoever called submit --> supervisor --> agent (torch elastic) --> rank 0, rank 1, ...

The supervisor imports no torch, so it is there within 0.1 s and too small to be what the system kills when memory runs
out. Ten times a second it looks at its submitter (gone = the kernel ended; a detached job has none), the agent, and
SIGTERM (= `Job.stop`). In each case it ends the whole tree below it, orphans included, and writes the last state.

The agent runs `torch.distributed.launcher.api.elastic_launch`: rendezvous on a port of its own, no restarts. When
its supervisor is gone it ends all ranks and itself; ranks die with the agent. So no single kill leaves a process.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import processes
from .folder import HEARTBEAT_S, read_json, write_json
from .outcome import failure, first_failure
from .processes import STOP_GRACE_S, descendants, is_alive, kill_descendants, signal_name

_POLL_S = 0.1


def main() -> None:
    """Entry of both: ``<folder> [<id of the submitter> <its stamp>]``, or ``agent <folder> <id of the supervisor>``."""
    if sys.argv[1] != "agent":
        _Supervisor(Path(sys.argv[1]), *sys.argv[2:]).run()
        return
    folder = Path(sys.argv[2])
    processes.adopt_orphans()
    threading.Thread(target=processes.watch_parent, args=(int(sys.argv[3]),), daemon=True).start()
    processes.leave(_launch(folder, read_json(folder / "config.json") or {}))


class _Supervisor:
    def __init__(self, folder: Path, submitter: str = "", submitter_stamp: str = ""):
        self.folder = folder
        self.config = read_json(folder / "config.json") or {}
        self.submitter = submitter, submitter_stamp
        self.state = read_json(folder / "state.json") or {}
        self.stop_reason = ""

    def run(self) -> None:
        processes.adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        self._note_process("supervisor", os.getpid(), started=time.time())
        try:
            changes = self._outcome(self._watch())
        except BaseException:  # noqa: BLE001  the state must say how it ended, whatever happened
            print(traceback.format_exc(), file=sys.stderr, flush=True)
            changes = {"state": "failed", "reason": "the supervisor failed; see logs/supervisor.log"}
        left = kill_descendants()
        with suppress(ChildProcessError):  # adopted orphans that have ended shall not stay as zombies
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if left:
            changes["reason"] = f"{changes.get('reason', '')} (processes {left} could not be killed)"
        shutil.rmtree(self.folder / "logs" / "elastic", ignore_errors=True)
        self._update(ended=time.time(), **changes)

    def _update(self, **changes: Any) -> None:
        self.state |= changes
        write_json(self.folder / "state.json", self.state)
        self.written = time.monotonic()

    def _note_process(self, role: str, pid: int, **changes: Any) -> None:
        self.state["pids"][role] = pid
        self.state["stamps"][str(pid)] = processes.stamp(pid)
        self._update(**changes)

    def _on_signal(self, number: int, _frame: Any) -> None:
        self.stop_reason = self.stop_reason or f"stopped on request ({signal_name(number)})"

    def _watch(self) -> int | None:
        """Runs the agent until it ends (its exit code) or the job is to be stopped (None, with the tree ended)."""
        command = processes.python_command("supervisor", "agent", str(self.folder), str(os.getpid()))
        agent = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self._note_process("agent", agent.pid)
        pid, start = self.submitter
        while not self.stop_reason:
            with suppress(subprocess.TimeoutExpired):
                code = agent.wait(_POLL_S)
                self._note_ranks()
                return code
            if pid and not is_alive(int(pid), start):
                self.stop_reason = f"the process that submitted the job (process {pid}) ended"
            self._note_ranks()
            if time.monotonic() - self.written > HEARTBEAT_S:
                self._update()
        # SIGTERM to the agent, which hands it to the ranks; after the grace `run` ends all that is left.
        agent.terminate()
        end = time.monotonic() + STOP_GRACE_S
        while time.monotonic() < end and descendants():
            agent.poll()
            time.sleep(0.05)
        return None

    def _note_ranks(self) -> None:
        """Takes over what the ranks say about themselves; all of them in the function = the job is running."""
        if self.state["state"] == "running":
            return
        said = [read_json(self.folder / "ranks" / f"rank_{r}.json") or {} for r in range(self.config["nproc"])]
        pids = [rank.get("pid") for rank in said]
        running = all(rank.get("phase", "starting") != "starting" for rank in said)
        if pids != self.state["pids"]["ranks"] or running:
            self.state["pids"]["ranks"] = pids
            self.state["stamps"] |= {str(rank["pid"]): rank["stamp"] for rank in said if rank}
            self._update(state="running" if running else "starting")

    def _outcome(self, code: int | None) -> dict[str, Any]:
        nproc = self.config["nproc"]
        if code is None:
            return {"state": "stopped", "reason": self.stop_reason}
        report = read_json(self.folder / "ranks" / "agent.json") or {}
        deaths = {int(rank): death for rank, death in report.get("failures", {}).items()}
        codes = [deaths[rank]["exit_code"] if rank in deaths else (0 if code == 0 else None) for rank in range(nproc)]
        failed = first_failure(self.folder, nproc, deaths, clean=code == 0)
        if failed is not None:
            return failure(self.folder, nproc, failed) | {"exit_codes": codes}
        if code == 0:
            return {"state": "finished", "exit_codes": codes}
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        reason = report.get("error") or f"the launching process {how}; see logs/supervisor.log"
        return {"state": "failed", "reason": reason, "exit_codes": codes}


def _launch(folder: Path, config: dict[str, Any]) -> int:
    """Runs all ranks to their end; how they died goes to ``ranks/agent.json``. Returns the exit code."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    endpoint = f"127.0.0.1:{config['port'] or 0}"  # 0: the store binds whatever is free and keeps it
    elastic = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=config["nproc"], run_id=config["run_id"], role="rank",
        rdzv_backend="c10d", rdzv_endpoint=endpoint, local_addr="127.0.0.1", max_restarts=0, monitor_interval=0.1,
        start_method="spawn", logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs" / "elastic")),
    )  # fmt: skip
    command = processes.python_command("worker", str(folder), str(os.getpid()))
    report: dict[str, Any] = {"failures": {}, "error": ""}
    try:
        elastic_launch(elastic, command[0])(*command[1:])
        return 0
    except ChildFailedError as error:
        died = error.failures.items()
        report["failures"] = {rank: {"exit_code": one.exitcode, "time": float(one.timestamp)} for rank, one in died}
    except SignalException as error:
        report["error"] = f"the launching process got {error.sigval.name}"
    except Exception as error:  # noqa: BLE001  reported, whatever it is
        traceback.print_exc()
        report["error"] = f"torch elastic could not launch the ranks: {type(error).__name__}: {error}"
    finally:
        write_json(folder / "ranks" / "agent.json", report)
    return 1
