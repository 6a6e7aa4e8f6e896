"""The run folder, which is the contract between a job, whoever watches it, and whoever reads it a year later.

::

    runs/<name>/
      config.json           what was asked: function, arguments, ranks, environment, versions, command
      call.pkl              the pickled call
      state.json            starting | running | finished | failed | stopped; pids, times, exit codes, reason
      logs/                 rank_<r>.log: stdout and stderr of each rank; supervisor.log
      ranks/rank_<r>.json   where each rank is: pid, host, phase, time; .stack: where a SIGTERM met it
      results/rank_<r>.pkl  what the function returned
      errors/rank_<r>.json  what went wrong
      node.sh, job.sbatch   of a job on several nodes: what each runs, and the batch script; slurm_job: its id
      metrics.jsonl, arrays/, checkpoints/, export/, card.*, report.html     written by the recipes

JSON files are replaced in one move, so a reader never sees half of one.
"""

import itertools
import json
import os
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import ConfigError, MoekitError, RunExistsError, StorageError
from .processes import host_id, is_alive

# What a job writes about itself, and what the recipes in it write: all that `overwrite` may remove.
_CONTROL = ("config.json", "call.pkl", "state.json", "ranks", "results", "errors", "node.sh", "job.sbatch", "slurm_job")
_RECIPES = ("metrics.jsonl", "arrays", "checkpoints", "critic", "reference", "samples.jsonl", "export", "card.json",
            "card.html", "report.html")  # fmt: skip
OWNED = (*_CONTROL, "logs", *_RECIPES)
ENDED = ("finished", "failed", "stopped")
HEARTBEAT_S = 5.0  # how often a supervisor touches state.json
_SILENT_S = 60.0  # a supervisor of another host that was silent for so long is taken for dead
_START_S = 30.0  # and so is one that did not get as far as writing its process id (that takes 0.1 s)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes `values` to `path` in one move; on a full disk falls back to the blocks that the old file has."""
    text = json.dumps(values, indent=1, default=str) + "\n"
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(text)
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        if not path.exists():
            raise
        with path.open("r+") as file:
            file.write(text)
            file.truncate()


def read_json(path: Path) -> dict[str, Any] | None:
    """The values at `path`; None when there is no such file (or, on the fallback above, while it is rewritten)."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None


def read_state(folder: Path, gone: bool = False) -> dict[str, Any]:
    """state.json, with a job whose supervisor died silently turned into a failed one; ConfigError if there is none.

    `gone`: the caller knows that the supervisor has ended.
    """
    path = folder / "state.json"
    state = read_json(path)
    if state is None:
        time.sleep(0.05)  # it may be the moment in which a full disk has it rewritten
        state = read_json(path)
    if state is None:
        raise ConfigError(f"no run at {folder} (no readable state.json); give the folder of a run, such as runs/<name>")
    if state["state"] in ENDED:
        return state
    if state.get("backend", "local") != "local":  # nobody watches over it but its own ranks, and Slurm
        from .outcome import from_ranks

        return from_ranks(folder, state)
    if not (gone or _supervisor_is_lost(folder, state)):
        return state
    again = read_json(path) or state  # it may have written its last word between our two looks
    if again["state"] in ENDED:
        return again
    who = f"the supervisor (process {state['pids'].get('supervisor')} on {state['host']})"
    how = "it was killed, could not start, or the machine went down"
    lost = f"lost: {who} ended without recording how the job went; {how}"
    state |= {"state": "failed", "ended": time.time(), "reason": lost}
    with suppress(OSError):  # a folder that we may only read: the verdict is ours alone
        write_json(path, state)
    return state


def _supervisor_is_lost(folder: Path, state: dict[str, Any]) -> bool:
    pid = state["pids"].get("supervisor")
    if state["host"] != host_id():
        return time.time() - (folder / "state.json").stat().st_mtime > _SILENT_S
    if pid is None:
        return time.time() - state["created"] > _START_S
    return not is_alive(pid, state["stamps"].get(str(pid)))


def _fresh_name(function: str, runs: Path) -> str:
    """Date, time and function name, with a number when a run of that name is there already."""
    kept = "".join(c if c.isalnum() or c in "_-" else "-" for c in function.rpartition(".")[2]).strip("-")
    base = f"{time.strftime('%Y%m%d-%H%M%S')}-{kept or 'run'}"
    names = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not (runs / name).exists())


def create(
    runs: str | Path, name: str | None, function: str, config: dict[str, Any], call: bytes, *,
    overwrite: bool = False, resume: bool = False,
) -> Path:  # fmt: skip
    """Makes the folder of a new run, whole or not at all, and returns it.

    Everything is written beside the final place first and then moved there, so that neither a full disk nor a crash
    leaves half a run, and `overwrite` loses nothing of the old run unless the new one is ready. Only files that
    moekit writes are removed by `overwrite`; `resume` keeps checkpoints, metrics and logs of the run before.
    Raises:
        RunExistsError: the folder exists and both are off, or the run in it is still going.
        StorageError: it cannot be written.
    """
    runs = Path(runs).absolute()
    missing = [path for path in (runs, *runs.parents) if not path.exists()]
    if name is not None and (not name or name != os.path.basename(name) or name.startswith(".")):
        raise ConfigError(f"name={name!r} cannot name a folder inside {runs}; use letters, digits, '-' and '_'")
    new = runs / f".new-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        while True:
            folder = runs / (name or _fresh_name(function, runs))
            _refuse_existing(folder, overwrite or resume)
            _write_new(new, config | {"name": folder.name}, call)
            try:
                _move_into_place(new, folder, () if not (overwrite or resume) else OWNED if overwrite else _CONTROL)
                return folder
            except RunExistsError:  # another job took the name since we looked
                if name is not None:
                    raise
                shutil.rmtree(new)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        for path in missing:
            with suppress(OSError):
                path.rmdir()
        if isinstance(error, MoekitError):
            raise
        raise StorageError(
            f"cannot write the run folder in {runs}: {error.strerror or error} ({error.filename or runs}); nothing was "
            "started and nothing was left behind. Free some space there, or give another place with runs=..."
        ) from error


def _write_new(new: Path, config: dict[str, Any], call: bytes) -> None:
    for part in ("logs", "ranks", "results", "errors"):
        (new / part).mkdir(parents=True)
    (new / "call.pkl").write_bytes(call)
    write_json(new / "config.json", config)
    nobody = [None] * config["nproc"] * config.get("nodes", 1)
    write_json(new / "state.json", {
        "state": "starting", "reason": "", "host": host_id(), "exit_codes": nobody, "failed_rank": None,
        "backend": config.get("backend", "local"), "pids": {"supervisor": None, "agent": None, "ranks": nobody},
        "stamps": {}, "created": time.time(), "started": None, "ended": None,
    })  # fmt: skip


def remove(folder: Path, names: tuple[str, ...] = OWNED) -> None:
    """Removes what moekit wrote in `folder`, nothing else."""
    for name in names:
        old = folder / name
        shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink(missing_ok=True)


def _refuse_existing(folder: Path, allowed: bool) -> None:
    if not allowed and (folder.exists() or folder.is_symlink()):
        raise RunExistsError(
            f"the run folder {folder} exists; give another name=, or overwrite=True to replace the run in it, or "
            "resume=True to go on in it"
        )
    if (folder / "state.json").exists() and read_state(folder)["state"] not in ENDED:
        raise RunExistsError(f"the run in {folder} is still going; end it: moekit.attach({str(folder)!r}).stop()")


def _move_into_place(new: Path, folder: Path, replaced: tuple[str, ...]) -> None:
    if replaced and folder.is_dir():
        remove(folder, replaced)
        # state.json last: the folder is a run only when it is whole.
        for part in sorted(new.iterdir(), key=lambda path: path.name == "state.json"):
            if not (folder / part.name).exists():  # logs go on when the run goes on
                os.rename(part, folder / part.name)
        shutil.rmtree(new)
        return
    try:
        os.rename(new, folder)
    except OSError as error:
        if not folder.exists():
            raise
        raise RunExistsError(f"another job made the run folder {folder} just now; give another name=") from error
