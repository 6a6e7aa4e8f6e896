"""How a job went, out of what its ranks left in the run folder: which failure was first, and who held up the others.

A local job's supervisor knows how each rank died. A job on several nodes has no supervisor: there `from_ranks` judges
by the ranks' own words, by whether their processes live (on this host) or are silent (elsewhere), and by Slurm.
"""

import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import slurm
from .folder import read_json, write_json
from .processes import STOP_GRACE_S, host_id, is_alive, signal_name

SILENT_S = 300.0  # a rank of another host that was silent for so long is taken for dead; when Slurm says that the job
SETTLE_S = 30.0  # is over, for so long: its last words may still be on their way through the file system


def first_failure(
    folder: Path, nproc: int, deaths: dict[int, dict[str, Any]], clean: bool = False
) -> dict[str, Any] | None:
    """The error that started it all, out of what ranks wrote and how they died.

    When one rank fails, the collectives of the others fail as well, and the agent ends those that still run. So an
    error of a rank's own comes before a collective's, and then the earlier before the later; a death by SIGTERM or
    SIGKILL counts only when the agent had no reason yet to send one (and an unknown one if no SIGTERM was noted).
    Deaths that count are written to ``errors/``, for those ranks could not do it.
    Args:
        deaths: of ranks that ended badly: `exit_code` (minus the signal; None = unknown), and `time` it was noticed.
        clean: all ranks exited with 0, so one that left no result left by ``os._exit``.
    """
    written = {rank: read_json(folder / "errors" / f"rank_{rank}.json") for rank in range(nproc)}
    errors = [error for error in written.values() if error is not None]
    noticed = min((death["time"] for death in deaths.values()), default=0.0)
    had_reason = any(death["exit_code"] not in (-signal.SIGTERM, -signal.SIGKILL) for death in deaths.values())
    if clean:
        lost = [rank for rank in range(nproc) if not (folder / "results" / f"rank_{rank}.pkl").exists()]
        deaths = {rank: {"exit_code": 0, "time": time.time()} for rank in lost}
    for rank, death in deaths.items():
        code = death["exit_code"]
        late = death["time"] >= noticed + STOP_GRACE_S
        by_agent = (code == -signal.SIGTERM and had_reason) or (code == -signal.SIGKILL and late)
        by_agent |= code is None and bool(_stack(folder, rank))
        if written[rank] is None and not by_agent:
            error = death_notice(rank, code, death["time"])
            write_json(folder / "errors" / f"rank_{rank}.json", error)
            errors.append(error)
    return min(errors, key=lambda error: (error["knock_on"], error["time"]), default=None)


def death_notice(rank: int, code: int | None, when: float) -> dict[str, Any]:
    """The error of a rank that could not write one: it ended with `code`, minus the signal; None = unknown."""
    message = f"ended with exit code {code} before its function returned"
    if code is None:
        message = "ended without a word: it was killed (as when memory runs out), or its node went down"
    elif code < 0:
        message = f"was killed by signal {-code} ({signal_name(-code)})"
    if code == -signal.SIGKILL:
        message += "; if nobody did that, the system did because memory ran out"
    return {"rank": rank, "type": "", "message": message, "traceback": "", "time": when, "knock_on": False}


def failure(folder: Path, world: int, failed: dict[str, Any]) -> dict[str, Any]:
    """The state of a job that failed by `failed`; when that is a collective's error, with who did not join it."""
    kind = f": {failed['type']}:" if failed["type"] else ""
    reason = f"rank {failed['rank']}{kind} {failed['message']}".splitlines()[0]
    if failed["knock_on"]:
        for rank in range(world):
            at = re.search(r'File "(.*)", line (\d+) in (.*)', stack := _stack(folder, rank))
            told = (read_json(folder / "ranks" / f"rank_{rank}.json") or {}).get("phase") == "returned"
            left = (folder / "errors" / f"rank_{rank}.json", folder / "results" / f"rank_{rank}.pkl")
            if not (stack or told or any(path.exists() for path in left)):
                reason += f"; rank {rank} ended before its function returned"
            if at and "torch/distributed/" not in at[1]:
                reason += f"; rank {rank} was not in it, but at {at[1]}:{at[2]} in {at[3]}"
    return {"state": "failed", "reason": reason, "failed_rank": failed["rank"]}


def _stack(folder: Path, rank: int) -> str:
    """Where a SIGTERM met a rank; empty when there was none."""
    path = folder / "ranks" / f"rank_{rank}.stack"
    return path.read_text() if path.exists() else ""


def place(folder: Path, rank: int) -> str:
    """Where the last stack that a rank left stands: its innermost frame outside of torch."""
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', _stack(folder, rank).rpartition("(most recent")[2])
    own = [frame for frame in frames if "/torch/" not in frame[0]]
    return "{}:{} in {}".format(*own[0]) if own else "an unknown place"


def from_ranks(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """The state of a job that torchrun runs on several nodes, whose state.json is as it was submitted."""
    world, now = len(state["pids"]["ranks"]), time.time()
    paths = [folder / "ranks" / f"rank_{rank}.json" for rank in range(world)]
    said = [read_json(path) or {} for path in paths]
    phases = [one.get("phase", "starting") for one in said]
    job, word, over = slurm.status(folder)
    alive = [_lives(one, path, SETTLE_S if over else SILENT_S) for one, path in zip(said, paths)]
    state["pids"]["ranks"] = [one.get("pid") for one in said]
    state["stamps"] = {str(one["pid"]): one["stamp"] for one in said if one and one["host"] == host_id()}
    if all(phase == "returned" for phase in phases):
        state |= {"state": "finished", "reason": "", "exit_codes": [0] * world}
    elif not any(alive) and (over or any(said)):
        lost = [rank for rank, phase in enumerate(phases) if said[rank] and phase != "returned"]
        failed = first_failure(folder, world, {rank: {"exit_code": None, "time": now} for rank in lost})
        nobody = {"state": "failed", "reason": "its ranks were ended from outside, or never ran"}
        state |= failure(folder, world, failed) if failed else nobody
        if word:
            state["reason"] += f" (Slurm job {job}: {word})"
            state["state"] = "stopped" if word == "CANCELLED" else "failed"
    else:
        waits = f"`bash {folder}/node.sh HOST:PORT` on every node"
        if state["backend"] == "slurm":
            waits = f"Slurm job {job} ({word or 'no news'})" if job else f"`sbatch {folder}/job.sbatch`"
        running = "running" if "starting" not in phases else "starting"
        return state | {"state": running, "reason": "" if any(said) else f"waits for {waits}"}
    state["ended"] = max((one["time"] for one in said if one), default=now)
    with suppress(OSError):
        write_json(folder / "state.json", state)
    return state


def _lives(said: dict[str, Any], path: Path, patience: float) -> bool:
    if not said or said["phase"] in ("returned", "failed"):
        return False
    if said["host"] == host_id():
        return is_alive(said["pid"], said["stamp"])
    return time.time() - path.stat().st_mtime < patience
