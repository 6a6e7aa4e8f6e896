"""A recipe as a job that a person watches: checked first, submitted, followed with one progress line, then a table."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from .. import errors
from ..config import RunConfig
from ..errors import ConfigError, JobError, MoekitError
from ..launch.folder import read_json
from ..launch.job import Job
from ..launch.submit import submit
from ..launch.worker import Here, join
from ..viz.progress import Progress
from ..workloads import RLConfig
from . import setup

LOOK_S = 0.2
Train = Callable[[Any], dict[str, Any]]


def run_job(
    train: Train, config: RunConfig, *, out: str | None = None, nproc: int = 1, detach: bool = False, **how: Any
) -> tuple[dict[str, Any] | None, Job]:
    """Submit `train(config)`, follow it, and return (its summary, the job); only local jobs are followed.

    Input that can be seen to be bad is refused before a process starts; where a rank finds it, the folder that was
    made for this run goes again. Interrupting stops the job.
    Args:
        train: a recipe.
        config: with `out=None`; the run folder is `out`.
        out: run folder; None = a new one under runs/.
        detach, how: see `moekit.submit`; a local job without `detach` is followed to its end.
    Raises:
        MoekitError: of the kind that `train` raised, if that was before the first step.
        JobError: the job failed on its way."""
    if nproc < 1:
        raise ConfigError(f"nproc={nproc} must be at least 1")
    ranks = nproc * how.get("nodes", 1)
    name = train.__module__.rpartition(".")[2]
    folder, _, _ = setup.check(
        replace(config, out=out), Here(0, ranks, 0, "cpu", None), name, task=isinstance(config, RLConfig)
    )
    existed = folder.exists() and any(folder.iterdir())
    record = folder / "metrics.jsonl"
    known = record.stat().st_size if config.resume else 0
    if folder.exists() and not existed:
        folder.rmdir()  # the launcher makes its folder itself
    job = submit(train, replace(config, overwrite=False), nproc=nproc, detach=detach, overwrite=config.overwrite,
                 resume=config.resume, name=folder.resolve().name, runs=folder.resolve().parent, **how)  # fmt: skip
    if detach or how.get("backend", "local") != "local":
        return None, job
    try:
        follow(job, config.steps)
        return job.result()[0], job
    except KeyboardInterrupt:
        print(f"\nstopping {job.folder}", flush=True)
        job.stop()
        raise
    except JobError as error:
        found = input_error(job, error)
        if found is None or (record.exists() and record.stat().st_size > known):
            raise
        if not existed:
            shutil.rmtree(job.folder, ignore_errors=True)  # nothing but the call that could not work
        raise found from error


def run_rank(train: Train, config: RunConfig, out: str | None = None, **how: Any) -> dict[str, Any]:
    """`train(config)` as one of the ranks that torchrun started; the summary, the same on every rank.
    Args:
        train, config, out: as for `run_job`; every rank must see the run folder.
        how: `threads`, `device`, `timeout`: see `moekit.submit`."""
    join(**how)
    summary = train(replace(config, out=out))
    dist.destroy_process_group()
    return summary


def follow(job: Job, steps: int) -> None:
    """Wait for the end of a job, with one line that says how far it is."""
    known = len(job.metrics())  # of the run before, where this one goes on
    print(f"run folder {job.folder}, {job.nproc} process{'es' if job.nproc > 1 else ''} starting", flush=True)
    while len(job.metrics()) == known:
        if job.done and len(job.metrics()) == known:
            return
        job.wait(LOOK_S)
    with Progress(steps, "step") as progress:  # counted from here, so that the time left is that of the steps
        while True:
            over = job.done  # before reading, so that the last record is not missed
            for last in job.metrics()[-1:]:  # none for a moment, where a resumed run cuts its record
                facts = {"loss": last.get("loss/sft", last.get("loss/dpo")), "reward": last.get("reward/mean"),
                         "supervised_tokens/s": last.get("rate/supervised_tokens_s")}  # fmt: skip
                progress.update(last["step"] + 1, **{name: value for name, value in facts.items() if value is not None})
            if over:
                return
            job.wait(LOOK_S)


def input_error(job: Job, error: JobError) -> MoekitError | None:
    """What the failing rank raised, as an error of its own kind, if the input was to blame; else None."""
    rank = error.rank
    told = read_json(job.folder / "errors" / f"rank_{rank}.json") if rank is not None else None
    kind = getattr(errors, (told or {}).get("type", ""), None)
    if told is None or not (isinstance(kind, type) and issubclass(kind, MoekitError)) or kind is JobError:
        return None
    return kind(told["message"])


def table(values: Mapping[str, Any]) -> str:
    """Names and values in two columns.
    >>> print(table({"steps": 1200, "loss": 0.25}))
    steps  1,200
    loss   0.25
    """
    width = max(map(len, values), default=0)
    return "\n".join(f"{name:<{width}}  {_show(value)}" for name, value in values.items())


def _show(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
