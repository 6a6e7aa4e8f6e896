"""Rewards: verifiers in processes that can be killed, and reward models, added up by weight.

A verifier is any `call(item, answer) -> number`. It runs in a worker process under a hard time limit: at the limit the
worker is killed, with all it has started, and replaced, so neither `while True` nor a loop in C code holds up a step.
Whatever a verifier does, its answer gets a score: an exception, a time-out, a dead worker, NaN or something that is no
number counts by its kind and scores 0.

A pool belongs to one process (one for each rank) and one thread of it stands behind each worker. Workers die with
their pool, also when its process is killed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import cloudpickle

from ..errors import BackendError, ConfigError, DataError
from .reward_worker import judge

VERDICTS = ("ok", "error", "timeout", "crash", "nan", "type")
UNJUDGED = ("nan", "type")  # the verifier did answer, but with nothing to learn from
WORKER = Path(__file__).with_name("reward_worker.py")


@dataclass(frozen=True)
class Verifier:
    """A function that judges one answer in a worker process, e.g. `moekit.data.tasks.score`.

    Args:
        name: what its scores are called in metrics.
        call: `(item, answer) -> number`; a function of a module, a notebook cell or a closure (cloudpickle).
        weight: of its score in the reward. 0 = measured only.
        seconds: hard limit of one call, on the wall clock.
        modules: imported when a worker starts, so that no call's time limit pays for it.
    """

    name: str
    call: Callable[[Any, str], Any]
    weight: float = 1.0
    seconds: float = 10.0
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelReward:
    """A reward model as a verifier: `scores(sequences) -> numbers`, one for each list of token ids, in their order.

    It runs in the calling process, where the model is, while the workers work; it may be a collective. What it raises
    is raised: that is no property of an answer.
    """

    name: str
    scores: Callable[[Sequence[Sequence[int]]], Any]
    weight: float = 1.0

    def judge(self, sequences: Sequence[Sequence[int]]) -> list[Score]:
        """A `Score` for each sequence; NaN counts and scores 0, as a verifier's does.

        Raises:
            DataError: not one number for each sequence.
        """
        start = time.perf_counter()
        values = list(self.scores(sequences))
        if len(values) != len(sequences):
            raise DataError(f"reward model {self.name!r} gave {len(values)} scores for {len(sequences)} sequences")
        seconds = (time.perf_counter() - start) / max(1, len(values))
        return [Score(score, verdict, seconds, why) for score, verdict, why in map(judge, values)]


@dataclass(frozen=True)
class Score:
    """What one verifier said of one answer."""

    score: float  # 0 unless the verdict is "ok"
    verdict: str  # one of VERDICTS
    seconds: float
    message: str = ""


@dataclass(frozen=True)
class Reward:
    """sum_v weight_v score_v of one answer, and its parts by verifier."""

    reward: float
    parts: dict[str, Score]

    @property
    def valid(self) -> bool:
        """False where a verifier gave NaN or no number: the caller may mask such an answer."""
        return not any(part.verdict in UNJUDGED for part in self.parts.values())


def summary(rewards: Sequence[Reward]) -> dict[str, float]:
    """Metrics: mean reward, mean score and seconds of each verifier, and how often each verdict but "ok" was given."""
    out = {"reward/count": float(len(rewards)), "reward/invalid": float(sum(not r.valid for r in rewards))}
    if rewards:
        out["reward/mean"] = math.fsum(r.reward for r in rewards) / len(rewards)
    for name in rewards[0].parts if rewards else ():
        parts = [r.parts[name] for r in rewards]
        out[f"reward/{name}"] = math.fsum(p.score for p in parts) / len(parts)
        out[f"reward/{name}_s"] = math.fsum(p.seconds for p in parts)
        verdicts = Counter(p.verdict for p in parts)
        out |= {f"reward/{name}_{verdict}": float(verdicts[verdict]) for verdict in VERDICTS[1:]}
    return out


class RewardPool:
    """Scores answers with verifiers in `workers` processes, and with reward models in this one.

    Start it once and keep it; use it as a context manager or `close` it (the end of the process does, too).

    Args:
        verifiers: at least one, or a model; names differ.
        models: reward models.
        workers: processes of this pool; under torchrun each rank has a pool.
        start_seconds: limit for a worker to start, `Verifier.modules` included.

    Raises:
        ConfigError: nothing to score with, names twice, a limit or weight that cannot work, a verifier that cannot be
            pickled.
        BackendError: a worker cannot start, with what it said.

    >>> with RewardPool([Verifier("length", lambda item, answer: len(answer) / item)], workers=1) as pool:
    ...     [r.reward for r in pool.score([4, 4, 0], ["abc", "ab", "a"])]       # 1 / 0 raises: counted, scored 0
    [0.75, 0.5, 0.0]
    """

    def __init__(
        self, verifiers: Sequence[Verifier] = (), models: Sequence[ModelReward] = (), *, workers: int = 2,
        start_seconds: float = 120.0,
    ):  # fmt: skip
        self.verifiers, self.models = tuple(verifiers), tuple(models)
        names = [v.name for v in (*self.verifiers, *self.models)]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"a reward pool needs verifiers or models with different names, got {names}")
        if workers < 1:
            raise ConfigError(f"workers={workers} must be at least 1")
        for v in (*self.verifiers, *self.models):
            if not math.isfinite(v.weight) or not getattr(v, "seconds", 1.0) > 0:
                raise ConfigError(f"{v}: weight must be finite and seconds above 0")
        calls = [_pack(cloudpickle.dumps, v.call, f"verifier {v.name!r}", ConfigError) for v in self.verifiers]
        modules = list(dict.fromkeys(m for v in self.verifiers for m in v.modules))
        self._crew = crew = _Crew(pickle.dumps((sys.path, modules, calls)), start_seconds)
        self.close = weakref.finalize(self, crew.close)  # by hand, by the garbage collector or at exit, once
        started = [Future() for _ in range(workers if calls else 0)]
        crew.threads += [threading.Thread(target=crew.serve, args=(f,), daemon=True) for f in started]
        for thread in crew.threads:
            thread.start()
        try:
            _ = [future.result() for future in started]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(
        self, items: Sequence[Any], answers: Sequence[str], sequences: Sequence[Sequence[int]] | None = None
    ) -> list[Reward]:
        """One `Reward` for each answer, in their order.

        Args:
            items: what each answer is judged against; a verifier's first argument.
            answers: texts; the second.
            sequences: token ids of prompt and answer, for reward models.

        Raises:
            DataError: lengths differ, or an item cannot be pickled.
            BackendError: the pool is closed, is another process's, or can start no worker any more.

        Cost: at most (answers x sum of the verifiers' limits) / workers, however they behave, plus restarts.
        """
        if len(items) != len(answers) or (self.models and len(sequences or ()) != len(answers)):
            got = f"{len(items)} items, {len(answers)} answers, {len(sequences or ())} sequences"
            raise DataError(f"each answer needs an item, and for reward models a sequence; got {got}")
        self._crew.need_open()
        data = [
            [_pack(pickle.dumps, (which, i, a), f"item {i!r:.80}", DataError) for i, a in zip(items, answers)]
            for which in range(len(self.verifiers))
        ]
        futures = [[self._crew.send(d, v.seconds) for d in column] for v, column in zip(self.verifiers, data)]
        try:
            self._crew.need_open()  # still: nobody would take what was sent to one that another thread closed meanwhile
            models = {m.name: m.judge(sequences or ()) for m in self.models}
            columns = {v.name: [f.result() for f in column] for v, column in zip(self.verifiers, futures)} | models
        except BaseException:  # an interrupt, too: what still waits is nobody's any more
            _ = [future.cancel() for column in futures for future in column]
            raise
        weights = {v.name: v.weight for v in (*self.verifiers, *self.models)}
        rows = [{name: column[i] for name, column in columns.items()} for i in range(len(answers))]
        return [Reward(math.fsum(weights[n] * part.score for n, part in row.items()), row) for row in rows]


def _pack(dumps: Callable[[Any], bytes], value: Any, what: str, kind: type[Exception]) -> bytes:
    try:
        return dumps(value)
    except Exception as problem:  # noqa: BLE001 (pickling raises anything)
        how = "keep locks, open files and models out of it"
        raise kind(f"{what} cannot be sent to a worker ({problem}); {how}") from None


@dataclass(eq=False)
class _Crew:
    """The threads behind the workers; holds no reference to the pool, so that the pool can be collected."""

    hello: bytes
    start_seconds: float
    jobs: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    threads: list[threading.Thread] = field(default_factory=list)
    workers: weakref.WeakSet[_Worker] = field(default_factory=weakref.WeakSet)
    pid: int = field(default_factory=os.getpid)
    closed: bool = False

    def need_open(self) -> None:
        """Raises BackendError: it is not."""
        if self.closed or os.getpid() != self.pid:
            raise BackendError("this reward pool is closed, or was forked from another process; make one here")

    def send(self, data: bytes, seconds: float) -> Future[Score]:
        """Queue a job for the first worker that is free."""
        self.jobs.put((future := Future(), data, seconds))
        return future

    def serve(self, started: Future) -> None:
        """One worker's thread: it starts the worker, hands it job after job, and replaces it when it must."""
        try:
            worker = _Worker(self)
        except BaseException as problem:  # noqa: BLE001 (no process, no memory: whoever waits must hear of it)
            return started.set_exception(problem)
        started.set_result(None)
        for future, data, seconds in iter(self.jobs.get, None):
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if worker.ended:  # while it was idle: not this answer's doing
                    worker = worker.replaced(self)
                found = worker.work(data, seconds)
                if self.closed:
                    raise BackendError("the reward pool was closed while this answer was judged")
                future.set_result(found)
                if worker.ended:  # a new one starts while nobody waits for it; if it cannot, the next job says why
                    with suppress(Exception):
                        worker = worker.replaced(self)
            except BaseException as problem:  # noqa: BLE001 (a thread that ended unheard would leave its jobs waiting)
                future.set_exception(problem)
        worker.kill()

    def close(self) -> None:
        """Kill and reap all workers; jobs that wait get an error. In a fork of the process they are not ours."""
        if os.getpid() != self.pid:
            return
        self.closed = True
        for _ in self.threads:
            self.jobs.put(None)
        for worker in list(self.workers):
            worker.kill()
        for thread in self.threads:
            if thread is not threading.current_thread() and thread.ident:
                thread.join(5.0)


class _Worker:
    """One worker process that is ready, and the line to it."""

    def __init__(self, crew: _Crew) -> None:
        self.dead = False
        self.line, theirs = socket.socketpair()
        command = [sys.executable, "-P", str(WORKER), str(theirs.fileno()), str(os.getpid())]
        quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        null = subprocess.DEVNULL
        with theirs:  # a session of its own: Ctrl-C does not reach it, and `kill` reaches all that it started
            self.process = subprocess.Popen(command, env=os.environ | quiet, pass_fds=[theirs.fileno()], stdin=null,
                                            stdout=null, start_new_session=True)  # fmt: skip
        crew.workers.add(self)  # first known, then asked: `close` sees it, or we see that the pool is closed
        try:
            problem = "the pool was closed" if crew.closed else self.ask(crew.hello, crew.start_seconds)
        except (OSError, EOFError):
            problem = f"it did not start within {crew.start_seconds:g} s (exit code {self.kill()}), see its stderr"
        if problem:
            self.kill()
            how = "verifiers must be importable from sys.path, or defined in a notebook cell"
            raise BackendError(f"a reward worker cannot start: {problem}; {how}")

    @property
    def ended(self) -> bool:
        """Whether it was killed, or an idle worker's line is not silent: it closed."""
        return self.dead or bool(select.select([self.line], [], [], 0)[0])

    def replaced(self, crew: _Crew) -> _Worker:
        """A new worker in place of this one."""
        self.kill()
        self.line.close()
        return _Worker(crew)

    def work(self, data: bytes, seconds: float) -> Score:
        """The score of one job; the worker is dead afterwards if it took too long or died."""
        begin = time.perf_counter()
        try:
            return Score(*self.ask(data, seconds))
        except TimeoutError:
            verdict, why = "timeout", f"took more than {seconds:g} s and was killed"
            self.kill()
        except (EOFError, OSError, ValueError, TypeError):  # the last two: something else wrote to the line
            verdict, why = "crash", f"the worker died with exit code {self.kill()}"
        return Score(0.0, verdict, time.perf_counter() - begin, why)

    def ask(self, data: bytes, seconds: float) -> Any:
        """Send a job and wait for its answer; TimeoutError, or EOFError / OSError where the worker has died."""
        end, reply = time.monotonic() + seconds, b""
        self.line.settimeout(seconds)
        self.line.sendall(len(data).to_bytes(8, "big") + data)
        while not reply.endswith(b"\n"):
            self.line.settimeout(max(1e-3, end - time.monotonic()))
            if not (more := self.line.recv(1 << 16)):
                raise EOFError
            reply += more
        return json.loads(reply)

    def kill(self) -> int:
        """End it and all that it has started; returns its exit code, of before if it was dead."""
        self.dead = True
        if self.process.returncode is None:
            with suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # it can hang in the kernel, and nothing can end it then
            return self.process.wait(10.0)
        return -signal.SIGKILL


def math_equal(item: Any, answer: str, gold: str = "answer") -> float:
    """1.0 if math-verify finds `answer` equal to the item's right answer, else 0.0. `gold`: key, "a.b" = item[a][b]."""
    from math_verify import parse, verify

    for key in gold.split("."):
        item = item[key]
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own limits are off: ours is harder
    read = partial(parse, parsing_timeout=None, raise_on_error=True)  # pyright: ignore[reportArgumentType]
    right = read(str(item)) or read(f"${item}$")
    if not right:
        raise ValueError(f"math-verify cannot read the right answer {item!r:.80}")
    return float(verify(right, read(answer), timeout_seconds=None, raise_on_error=True))


def math_verifier(gold: str = "answer", **settings: Any) -> Verifier:
    """math-verify as a `Verifier`: `gold` names the right answer in an item, `settings` are the verifier's.

    Raises:
        BackendError: math-verify is not installed.
    """
    try:
        import math_verify  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as problem:
        raise BackendError(f"this verifier needs math-verify ({problem}); install: pip install 'moekit[rl]'") from None
    settings = {"name": "math", "modules": ("math_verify",)} | settings
    return Verifier(call=partial(math_equal, gold=gold), **settings)
