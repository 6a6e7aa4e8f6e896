"""Jobs on several nodes: the scripts that start torchrun on each of them, and Slurm, which runs such a script.

The run folder, on a file system that all nodes see, is all that the nodes and the notebook share. ``node.sh`` in it is
one node's part: torchrun with that node's ranks. ``job.sbatch`` runs it on every node that Slurm gives; by hand
(``backend="torchrun"``) it is ``bash RUN/node.sh HOST:PORT`` on each. No supervisor watches such a job: how it stands
is read from what its ranks write (outcome.py) and, for a Slurm job, from ``squeue`` and ``sacct``.
"""

import re
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import BackendError, ConfigError
from .processes import python_command

_OURS = {"nodes", "ntasks", "ntasks_per_node", "job_name", "output", "open_mode", "requeue", "no_requeue"}
_GOING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "RESIZING", "SUSPENDED", "STAGE_OUT")
_LOOK_S = 5  # the least time between two questions to Slurm about one job


def check_options(options: Any) -> None:
    """Raise `ConfigError` unless `options` can become directives of a batch script."""
    for key, value in options.items() if isinstance(options, dict) else [(options, None)]:
        named = isinstance(key, str) and re.fullmatch(r"[a-z][a-z0-9_]*", key) and key not in _OURS
        plain = isinstance(value, str | int) and (key == "setup" or "\n" not in str(value))
        if not (named and plain):
            raise ConfigError(
                f"slurm={options!r}: {key!r} cannot be used; give options of sbatch with underscores and their values, "
                "such as {'partition': 'gpu', 'gpus_per_node': 4, 'exclusive': True}, 'setup' (shell "
                f"lines to run first) and 'submit' (False: only write the script); moekit sets {sorted(_OURS)} itself"
            )


def write_scripts(folder: Path, config: dict[str, Any], env: dict[str, str]) -> None:
    """Writes ``node.sh``, and for Slurm ``job.sbatch``, into a run folder; `env` is what ranks need to start with."""
    run = shlex.quote(str(folder))
    shown = env | {name: value for name, value in config["env"].items() if value != "***"}  # no secret into a file
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in shown.items())
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", f"--nnodes={config['nodes']}"]
    torchrun += [f"--nproc-per-node={config['nproc']}", f"--rdzv-id={config['run_id']}", "--rdzv-backend=c10d"]
    worker = ["--no-python", *python_command("worker", str(folder))]
    called = {"torchrun": shlex.join(torchrun), "worker": shlex.join(worker)}
    _fill(folder / "node.sh", exports=exports, **called)
    if config["backend"] != "slurm":
        return
    log = str(folder / "logs" / "supervisor.log").replace("\\", "\\\\").replace("%", "%%")  # % stands for the job's id
    options = {"job_name": folder.name, "nodes": config["nodes"], "ntasks_per_node": 1, "output": log}
    options |= {"open_mode": "append", "no_requeue": True, "cpus_per_task": config["nproc"] * config["threads"]}
    directives = ""
    for name, value in (options | config["slurm"]).items():
        if value is not False and name not in ("setup", "submit"):
            directives += f"#SBATCH --{name.replace('_', '-')}"
            directives += "\n" if value is True else f"={shlex.quote(str(value))}\n"
    setup = config["slurm"].get("setup", "")
    _fill(folder / "job.sbatch", directives=directives, run=run, setup=setup, port=config["port"])


def _fill(script: Path, **values: Any) -> None:
    """Write a script from the template of its name beside this file."""
    from jinja2 import Template

    template = Template(Path(__file__).with_name(f"{script.name}.jinja").read_text(), keep_trailing_newline=True)
    script.write_text(template.render(values))


def send(folder: Path, env: dict[str, str]) -> None:
    """Hands the batch script to ``sbatch`` and keeps the id of the Slurm job in ``slurm_job``.
    Raises:
        BackendError: no ``sbatch`` here, or it refused; the script stays and can be submitted by hand."""
    try:
        said = _run("sbatch", str(folder / "job.sbatch"), env=env)
    except BackendError as error:
        told = f"{error}. The script is written, and moekit.attach({str(folder)!r}) follows its job"
        raise BackendError(told) from None
    (folder / "slurm_job").write_text("".join(re.findall(r"\d+", said)[:1]))


def cancel(folder: Path) -> bool:
    """Ends the run's Slurm job, waiting or running; False when it has none. Raises `BackendError` without Slurm."""
    job, *_ = status(folder)
    if job:
        _run("scancel", job)
    return bool(job)


def status(folder: Path) -> tuple[str, str, bool]:
    """The run's Slurm job (empty: none), what Slurm says of it (empty: nothing), and whether that means it is over."""
    path = folder / "slurm_job"
    job = path.read_text().strip() if path.exists() else ""
    said = _ask(job, int(time.monotonic() / _LOOK_S)) if job else ""
    return job, said, bool(said) and said not in _GOING


@lru_cache(maxsize=64)
def _ask(job: str, _moment: int) -> str:
    for command in (["squeue", "-h", "-j", job, "-o", "%T"], ["sacct", "-n", "-X", "-P", "-j", job, "-o", "State"]):
        with suppress(BackendError):  # no such program here, or the queue no longer knows the job
            if words := _run(*command).split():
                return words[0]
    return ""


def _run(*command: str, env: dict[str, str] | None = None) -> str:
    line = shlex.join(command)
    try:
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout
    except FileNotFoundError:
        raise BackendError(f"this machine has no `{command[0]}`; run `{line}` where Slurm is") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise BackendError(f"`{line}` failed: {(getattr(error, 'stderr', '') or str(error)).strip()}") from None
