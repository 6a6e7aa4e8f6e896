"""`sweep`: many jobs from one call, a few at a time, each with a run folder of its own; what came out as one table.

::

    runs/<name>/
      sweep.json      the jobs: name, parameters, seed
      call.pkl        the function, and what each job calls it with
      queue.json      the process whose thread submits the jobs; not there when none does
      <job>/          run folders as `submit` makes them; <job>.try2 when it was begun anew

What has become of a job is read from its folder and nowhere else, so a sweep that was attached knows as much as the one
that began it. Nothing is ever overwritten.
"""

import functools
import itertools
import os
import pickle
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RunExistsError, StorageError
from .folder import ENDED, _fresh_name, read_json, write_json
from .host import cpu_count, gpus
from .job import Job
from .processes import is_alive, stamp
from .submit import _name_of, _pack, submit

_POLL_S = 0.2
_METRICS = ("loss/", "eval/", "reward/", "rate/")


def sweep(
    fn: Callable[..., Any], configs: Any = None, grid: Mapping[str, Iterable[Any]] | None = None, *,
    seeds: Iterable[int] = (), name: str | None = None, runs: str | Path = "runs", at_once: int = 1, **options: Any,
) -> "Sweep":  # fmt: skip
    """Runs a job for each configuration, at most `at_once` at a time, each as `moekit.submit` would; returns at once.

    A thread of this process submits them. When the process ends, so do its jobs (unless `detach=True`) and the queue;
    ``moekit.attach_sweep("runs/<name>").resume()`` goes on with what has not finished.

    Args:
        fn: what every job calls: ``fn(config)``, or ``fn(**config)`` where a configuration is a dictionary.
        configs: a configuration (a dataclass, or a dictionary of keyword arguments), or a list of them.
        grid: dotted field -> its values, as ``{"learner.lr": (1e-3, 3e-3)}``: all combinations, for each of `configs`.
        seeds: repeats of each: every field called `seed`, wherever in the configuration, gets these values in turn.
        name: of the sweep's folder in `runs`; made from date and time when None.
        at_once: jobs that run together. They share the cores, and the GPUs as far as there are enough.
        options: of `moekit.submit`: nproc, backend, detach, env, threads, ...
    Raises:
        ConfigError: a field that is not there, or what `submit` refuses. Nothing was started.
        RunExistsError: there is a folder of that name.
        StorageError: it cannot be written. Nothing was started.

    >>> s = moekit.sweep(train, config, {"learner.lr": (1e-3, 3e-3)}, seeds=(0, 1), nproc=2)       # doctest: +SKIP
    >>> s.wait().table(repeats=False)                                                              # doctest: +SKIP
    """
    bases = configs if isinstance(configs, list) else [{} if configs is None else configs]
    points = [list(zip(grid or {}, values)) for values in itertools.product(*(grid or {}).values())]
    made = [functools.reduce(_with, point, base) for base in bases for point in points]
    if at_once < 1 or not made:
        raise ConfigError(f"nothing to run: {len(made)} configurations, at_once={at_once}; both must be at least 1")
    leaves = [_leaves(config) for config in made]
    fields = dict.fromkeys(n for leaf in leaves for n in leaf)
    varying = [n for n in fields if any(leaf.get(n) != leaves[0].get(n) for leaf in leaves)]
    seeded = ([n for n in fields if n.rpartition(".")[2] == "seed"] or ["seed"]) if (seeds := list(seeds)) else []
    jobs, calls = [], []
    for at, seed in itertools.product(range(len(made)), seeds or [None]):
        told = {n: leaves[at].get(n) for n in varying} | ({"seed": seed} if seeds else {})
        words = "_".join([f"{len(jobs):02d}", *(f"{n.rpartition('.')[2]}-{value}" for n, value in told.items())])
        jobs.append({"name": re.sub(r"[^\w.-]+", "-", words)[:80], "config": at, "parameters": told})
        calls.append(functools.reduce(_with, [(n, seed) for n in seeded], made[at]))
    folder = (runs := Path(runs).absolute()) / (name or _fresh_name("sweep", runs))
    options.setdefault("threads", max(1, cpu_count() // (options.get("nproc", 1) * at_once)))
    call = _pack(fn, (calls, options, at_once), {}, _name_of(fn))  # as it is now, for all jobs
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        how = f"give another name=, or go on with it: moekit.attach_sweep({str(folder)!r}).resume()"
        raise RunExistsError(f"the folder {folder} exists; {how}") from None
    except OSError as error:
        raise StorageError(f"cannot write the sweep's folder {folder}: {error}; nothing was started") from error
    try:
        (folder / "call.pkl").write_bytes(call)
        write_json(folder / "sweep.json", {"jobs": jobs, "varying": [*dict.fromkeys([*varying, *seeded])]})
        return Sweep(folder).resume()
    except BaseException:
        if not any(path.is_dir() for path in folder.iterdir()):
            shutil.rmtree(folder)
        raise


def attach_sweep(path: str | Path) -> "Sweep":
    """The sweep in `path`, whoever began it; ConfigError if there is none. `resume` goes on with it."""
    return Sweep(Path(path).absolute())


class Sweep:
    """Jobs in the folder of a sweep. Get one from `moekit.sweep` or `moekit.attach_sweep`."""

    def __init__(self, folder: Path):
        told = read_json(folder / "sweep.json")
        if told is None:
            raise ConfigError(f"no sweep at {folder} (no readable sweep.json); give its folder, such as runs/<name>")
        self.folder, self.name = folder, folder.name
        self.asked: dict[str, dict[str, Any]] = {job["name"]: job for job in told["jobs"]}
        self.varying: tuple[str, ...] = tuple(told["varying"])  # fields that differ between jobs
        self.refused: dict[str, str] = {}  # jobs that could not be submitted, and why
        self._job, self._thread = functools.cache(Job), threading.Thread()

    @property
    def jobs(self) -> dict[str, Job]:
        """Those that were submitted and are there, by name; of each its newest try."""
        return {n: self._job(found[max(found)]) for n in self.asked if (found := self._tries(n))}

    def _tries(self, name: str) -> dict[int, Path]:
        """Run folders of a job by the number of the try; what else stands beside them is not ours."""
        found = dict[int, Path]()
        for path in self.folder.glob(f"{name}*/state.json"):
            if match := re.fullmatch(r"(?:\.try(\d+))?", path.parent.name[len(name) :]):
                found[int(match[1] or 1)] = path.parent
        return found

    @property
    def states(self) -> dict[str, str]:
        """Of every job: waiting, starting, running, finished, failed or stopped."""
        found = {n: job.state for n, job in self.jobs.items()} | dict.fromkeys(self.refused, "failed")
        return {n: found.get(n, "waiting") for n in self.asked}

    @property
    def finished(self) -> dict[str, Path]:
        """Run folders of the jobs that have finished, as `moekit.compare` takes them."""
        return {n: job.folder for n, job in self.jobs.items() if job.state == "finished"}

    @property
    def queue(self) -> dict[str, Any]:
        """The process that submits the jobs; empty when none does."""
        told = read_json(self.folder / "queue.json") or {}
        return told if is_alive(told.get("pid"), told.get("start")) else {}

    @property
    def done(self) -> bool:
        """Whether nothing runs and nothing will."""
        return not self.queue and all(job.done for job in self.jobs.values())

    def resume(self) -> "Sweep":
        """Goes on: jobs that have not finished run again, from their checkpoint where they have one, else in a new
        folder. Finished ones stay as they are. ConfigError: a process, this one or another, is at it."""
        if self.queue:
            raise ConfigError(f"process {self.queue['pid']} runs sweep {self.name}; wait(), or stop() it first")
        packed = pickle.loads((self.folder / "call.pkl").read_bytes())
        fn, (calls, options, at_once), _ = pickle.loads(packed["call"])
        states, mine = self.states, {"pid": os.getpid(), "start": stamp(os.getpid()), "began": time.time()}
        ready = [(n, call) for n, call in zip(self.asked, calls) if states[n] in ("waiting", "failed", "stopped")]
        live = dict(enumerate(job for job in self.jobs.values() if not job.done))  # of one that was detached
        over = lambda job: not (job.folder / "state.json").exists() or job.done  # or somebody took its folder away
        self.refused.clear()
        write_json(self.folder / "queue.json", mine)

        def fill() -> None:
            for place in range(at_once):
                if ready and self.queue == mine and (place not in live or over(live[place])):
                    name, call = ready.pop(0)
                    try:
                        live[place] = self._start(name, fn, call, {**options, "env": _env(place, options)})
                    except Exception as error:
                        self.refused[name] = f"not submitted: {type(error).__name__}: {error}"
                        if not (live or self.jobs):
                            raise

        def follow() -> None:
            try:
                while self.queue == mine and (ready or not all(map(over, live.values()))):
                    fill()
                    time.sleep(_POLL_S)
            finally:
                if self.queue == mine:
                    (self.folder / "queue.json").unlink()

        try:
            fill()  # here, so that what is wrong with the first ones is said here
        except BaseException:
            self.stop()
            raise
        self._thread = threading.Thread(target=follow, daemon=True)
        self._thread.start()
        return self

    def _start(self, name: str, fn: Callable[..., Any], call: Any, options: dict[str, Any]) -> Job:
        old = self.jobs.get(name)
        if old is not None and not old.cannot_resume:
            return old.resume()
        target, args = (functools.partial(fn, **call), ()) if isinstance(call, Mapping) else (fn, (call,))
        least = 1 + max(self._tries(name), default=0)
        names = (name if n == 1 else f"{name}.try{n}" for n in itertools.count(least))
        free = next(n for n in names if not (self.folder / n).exists())
        return submit(target, *args, name=free, runs=self.folder, **options)

    def wait(self, timeout: float = float("inf")) -> "Sweep":
        """Waits until all is done, at most `timeout` seconds, and says how far it is. Interrupting it ends nothing."""
        end, said = time.monotonic() + timeout, ""
        while True:
            over, line = self.done or time.monotonic() > end, repr(self)
            if over or line != said:
                print(f"\r{line:<{len(said)}}", end="\n" * over, flush=True)
            if over:
                return self
            said = line
            time.sleep(_POLL_S)

    def stop(self) -> "Sweep":
        """Ends the queue, whoever runs it, and all jobs that run; no process is left."""
        (self.folder / "queue.json").unlink(missing_ok=True)
        self._thread.join() if self._thread.ident else time.sleep(4 * _POLL_S)  # a job may just be submitted
        for job in self.jobs.values():
            job.stop()
        return self

    def table(self, repeats: bool = True, metrics: Iterable[str] = _METRICS) -> Any:
        """A DataFrame with a line for each job: its parameters, state, why it failed, the last value of each metric (or
        what its function returned: a number, or a dictionary of numbers), and its folder.

        Args:
            repeats: False = a line for each configuration: mean and standard deviation over its finished repeats.
            metrics: beginnings of the names that are wanted.
        """
        import pandas as pd

        jobs, states, told = self.jobs, self.states, {}
        row, asked = dict[str, Any](), dict[str, Any]()
        for n, asked in self.asked.items():
            why, folder = (jobs[n].reason, str(jobs[n].folder)) if n in jobs else ("", "")
            row = {**asked["parameters"], "state": states[n], "why": self.refused.get(n, why)}
            told[n] = row | (_last(jobs[n], tuple(metrics)) if n in jobs else {}) | {"folder": folder}
        table = pd.DataFrame.from_dict(told, orient="index").rename_axis("job")
        if repeats:
            return table
        config, finished = [asked["config"] for asked in self.asked.values()], table["state"] == "finished"
        repeated = ["seed"] if len(set(config)) < len(config) else []
        fixed = [n for n in asked["parameters"] if n not in repeated]
        good = table.drop(columns=[*row, "folder"]).select_dtypes("number").where(finished).groupby(config)
        parts = table[fixed].groupby(config).first(), finished.groupby(config).sum().rename("finished")
        return pd.concat([*parts, good.mean(), good.std().add_suffix(" std")], axis=1)

    def __repr__(self) -> str:
        count = Counter(self.states.values())
        order = (*ENDED, "running", "starting", "waiting")
        return f"sweep {self.name}: {len(self.asked)} jobs, " + ", ".join(f"{count[s]} {s}" for s in order if count[s])


def _with(config: Any, change: tuple[str, Any]) -> Any:
    """`config` with another value of a dotted field."""
    name, _, rest = change[0].partition(".")
    parts = config if isinstance(config, Mapping) else vars(config) if is_dataclass(config) else {}
    if name not in parts and (rest or not isinstance(config, Mapping)):
        raise ConfigError(f"{type(config).__name__} has no field {name!r}, so it cannot be set to {change[1]!r}")
    value = _with(parts[name], (rest, change[1])) if rest else change[1]
    return {**config, name: value} if isinstance(config, Mapping) else replace(config, **{name: value})


def _leaves(config: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> value of all that a configuration holds."""
    parts = config if isinstance(config, Mapping) else vars(config) if is_dataclass(config) else None
    if parts is None:
        return {prefix[:-1]: config}
    return {n: value for name, part in parts.items() for n, value in _leaves(part, f"{prefix}{name}.").items()}


def _env(place: int, options: dict[str, Any]) -> dict[str, str]:
    """Variables of the job in one of the `at_once` places: GPUs of its own, as far as there are enough."""
    n, some = options.get("nproc", 1), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if options.get("device") != "cpu" and options.get("backend", "local") == "local":
        some = some if some != [""] else [str(gpu.index) for gpu in gpus()]
    own = [some[(place * n + rank) % len(some)] for rank in range(n)] if some else []
    return ({"CUDA_VISIBLE_DEVICES": ",".join(own)} if any(own) else {}) | (options.get("env") or {})


def _last(job: Job, wanted: tuple[str, ...]) -> dict[str, Any]:
    """The last value of each metric, also one that was not finite; else the numbers that rank 0 returned."""
    out: dict[str, Any] = {}
    for record in job.metrics():
        out |= record | {name: float(value) for name, value in record.get("nonfinite", {}).items()}
    if not out and job.state == "finished":
        with suppress(Exception):  # whatever it returned
            out = result if isinstance(result := job.result()[0], dict) else {"result": result}
            wanted = ("",)
    return {n: v for n, v in out.items() if n.startswith(wanted) and isinstance(v, int | float)}
