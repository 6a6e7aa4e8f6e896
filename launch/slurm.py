"""Jobs on several nodes: the scripts that start torchrun on each of them, and Slurm, which runs such a script.

The run folder, on a file system that all nodes see, is all that the nodes and the notebook share. ``node.sh`` in it is
one node's part: torchrun with that node's ranks. ``job.sbatch`` runs it on every node that Slurm gives; by hand
(``backend="torchrun"``) it is ``bash RUN/node.sh HOST:PORT`` on each. No supervisor watches such a job: how it stands
is read from what its ranks write (outcome.py) and, for a Slurm job, from ``squeue`` and ``sacct``.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import BackendError, ConfigError
from .processes import python_command

_OURS = {"nodes", "ntasks", "ntasks_per_node", "job_name", "output", "open_mode"}
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
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", f"--nnodes={config['nodes']}"]
    torchrun += [f"--nproc-per-node={config['nproc']}", f"--rdzv-id={config['run_id']}", "--rdzv-backend=c10d"]
    worker = ["--no-python", *python_command("worker", str(folder))]
    (folder / "node.sh").write_text(f"""\
#!/bin/bash
# One node's part of a moekit run. On every node: bash node.sh HOST:PORT [ADDRESS]
# HOST is the first node, PORT a free port of it, ADDRESS this node's own where its name does not lead to it.
: "${{1:?give HOST:PORT, the same on every node}}"
unset MPLBACKEND
{exports}exec {shlex.join(torchrun)} --rdzv-endpoint="$1" ${{2:+--local-addr="$2"}} \\
  {shlex.join(worker)}
""")
    if config["backend"] != "slurm":
        return
    options = {"cpus_per_task": config["nproc"] * config["threads"], "no_requeue": True} | config["slurm"]
    if options.get("requeue"):
        del options["no_requeue"]
    setup = options.pop("setup", "")
    log = str(folder / "logs" / "supervisor.log").replace("\\", "\\\\").replace("%", "%%")  # % stands for the job's id
    options = {"job_name": folder.name, "nodes": config["nodes"], "ntasks_per_node": 1} | options
    options |= {"output": log, "open_mode": "append", "submit": False}
    given = {name.replace("_", "-"): value for name, value in options.items() if value is not False}
    directives = "".join(
        f"#SBATCH --{name}{'' if value is True else '=' + shlex.quote(str(value))}\n" for name, value in given.items()
    )
    (folder / "job.sbatch").write_text(f"""\
#!/bin/bash
{directives}
# Not requeued unless asked for: a second run begins anew in this folder, unless the call itself resumes from its
# checkpoints. To go on after a failure, also with other nodes, submit again with resume=True.
echo "$SLURM_JOB_ID" > {run}/slurm_job
rm -f {run}/ranks/* {run}/results/* {run}/errors/*
{setup}
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
PORT={config["port"] or "$((20000 + SLURM_JOB_ID % 20000))"}
exec srun --kill-on-bad-exit=1 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}} \\
  bash {run}/node.sh "$HEAD:$PORT"
""")


def send(folder: Path, env: dict[str, str]) -> None:
    """Hands the batch script to ``sbatch`` and keeps the id of the Slurm job in ``slurm_job``.

    Raises:
        BackendError: no ``sbatch`` here, or it refused; the script stays and can be submitted by hand.
    """
    script = folder / "job.sbatch"
    by_hand = f"the script is written; `sbatch {shlex.quote(str(script))}` where Slurm is submits it, and "
    by_hand += f"moekit.attach({str(folder)!r}) then follows it"
    try:
        done = subprocess.run(["sbatch", str(script)], env=env, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise BackendError(f"backend='slurm', but this machine has no `sbatch`; {by_hand}") from None
    except subprocess.CalledProcessError as error:
        raise BackendError(
            f"sbatch refused the job: {error.stderr.strip() or error.stdout.strip()}; {by_hand}"
        ) from None
    found = re.search(r"\d+", done.stdout)
    if found is None:
        raise BackendError(f"sbatch said {done.stdout!r}, which has no job id; {by_hand}")
    (folder / "slurm_job").write_text(found.group() + "\n")


def job_id(folder: Path) -> str:
    """The id of the run's Slurm job; empty when it has none."""
    path = folder / "slurm_job"
    return path.read_text().strip() if path.exists() else ""


def status(folder: Path) -> tuple[str, bool]:
    """What Slurm says of the run's job (empty: nothing), and whether the job is over by that."""
    job = job_id(folder)
    said = _ask(job, int(time.monotonic() / _LOOK_S)) if job else ""
    return said, bool(said) and said not in _GOING


@lru_cache(maxsize=64)
def _ask(job: str, _moment: int) -> str:
    for command in (["squeue", "-h", "-j", job, "-o", "%T"], ["sacct", "-n", "-X", "-P", "-j", job, "-o", "State"]):
        try:
            words = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
        except (OSError, subprocess.SubprocessError):  # no such program, or the queue no longer knows the job
            continue
        if words:
            return words[0]
    return ""


def cancel(folder: Path) -> None:
    """Ends the run's Slurm job, waiting or running, with ``scancel``; nothing where there is none.

    Raises:
        BackendError: it could not be asked for.
    """
    if not (job := job_id(folder)):
        return
    try:
        subprocess.run(["scancel", job], capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or error
        raise BackendError(
            f"cannot stop Slurm job {job} from here ({said}); run `scancel {job}` where Slurm is"
        ) from None
