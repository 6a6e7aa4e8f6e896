"""An engine in a process of its own: it samples while the caller's process trains, and it may die without harm.

The caller keeps every answer as it is finished. When the engine's process crashes, or makes no step for too long, a new
one is started, gets the weights again, and is asked for what is missing; a draw depends on nothing but its key, so the
answers are those that would have come. Engines end with their owner, also when that is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from .. import errors, ops
from ..config import ModelConfig
from ..errors import BackendError, ConfigError, EngineError, TransferError
from ..measure.tokens import RowCounter
from ..model.transformer import Transformer
from .embedded import DTYPES
from .engine import Answer, Capabilities, Rollout, Sampling, Told
from .engine_server import put, take
from .shared_ring import SharedRing
from .stats import Stats
from .weight_plan import dtypes, held
from .weight_transfer import CHUNK, Chunk, Sent, chunks, pieces_of

LOST = (EOFError, ConnectionError, TimeoutError)  # what a line says when its other end is dead or silent
TRIES = 3  # starts of a process that get nothing done, one after the other


class _Gone(Exception):
    """The process has died, or says nothing."""


class EngineProcess:
    """An `Engine` whose `EmbeddedEngine` is in another process on this host.

    Args:
        config: of the model; weights come by `update`.
        dtype, slots, ahead, device: as of `EmbeddedEngine`.
        weights: makes the chunks of the version that serves, for a process that was started again; None = an engine
            that dies is an error.
        stall_s: seconds without a step, or without a word, after which the process is taken for stuck and replaced.
        start_s: seconds that it may take to start.
        chunk_bytes: the largest chunk of weights; four of them are shared memory.

    Raises:
        BackendError: the process cannot start.
        StorageError: no shared memory for the ring.

    Cost: a process with torch in it; answers and requests go over a socket, weights through shared memory.
    """

    shared = False

    def __init__(
        self, config: ModelConfig, *, dtype: str | None = None, slots: int = 64, ahead: int = 4096,
        device: torch.device | str | None = None, weights: Callable[[], Iterable[Chunk]] | None = None,
        stall_s: float = 300.0, start_s: float = 120.0, chunk_bytes: int = CHUNK,
    ):  # fmt: skip
        if (dtype := dtype or "float32") not in DTYPES:
            raise ConfigError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
        self.config, self.dtypes = config, dtypes(config, DTYPES[dtype])
        self.counter, self.stats, self.restarts = RowCounter.of(config, "engine"), Stats(), 0
        for name in ("prefill", "decode", "score"):
            self.counter.pass_name = name
        how = {"dtype": dtype, "slots": slots, "ahead": ahead, "device": device and str(device)}
        hello = {"model": config.to_dict(), "how": how, "threads": torch.get_num_threads(), "choices": ops.choices()}
        self._weights, self.version, self._broken = weights, 0, "no weights were given to it yet"
        self._free, self._paused_by = threading.Condition(), 0
        self._host = _Host(hello, stall_s, start_s, chunk_bytes)
        self.close = weakref.finalize(self, self._host.close)  # by hand, by the garbage collector or at exit, once
        self._host.start()

    @property
    def capabilities(self) -> Capabilities:
        """As the embedded engine's; answers that run are finished before an update."""
        can = (True, bool(self.config.moe_layers), True, True, True, True)
        return Capabilities("process", *can, ("atomic", "in_place"), ("finish",))

    @property
    def pid(self) -> int:
        """Of the process that serves now."""
        return self._host.process.pid

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, prompt_ids: Sequence[int] | None = None,
        limits: Sequence[int] | None = None, told: Told | None = None,
    ) -> list[Rollout]:  # fmt: skip
        """As `EmbeddedEngine.generate`. After a restart a prompt that misses an answer is read and answered again;
        answers that are here already stay.

        Raises:
            ConfigError: as the embedded engine.
            EngineError: paused by this thread, without weights, or the process dies again and again.
        """
        columns = {"prompt_ids": list(range(len(prompts))) if prompt_ids is None else prompt_ids, "limits": limits}
        return self._collect("generate", prompts, [sampling.n] * len(prompts), sampling, columns, told)

    def score(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[Sequence[int]]], sampling: Sampling
    ) -> list[Rollout]:
        """As `EmbeddedEngine.score`."""
        return self._collect("score", prompts, [len(group) for group in answers], sampling, {"answers": answers})

    def update(self, source: Iterable[Chunk], version: int, mode: str = "atomic", *, verify: bool = False) -> Sent:
        """Send weights; `version` serves when this returns. Answers that run are finished first.

        Args:
            source: chunks of every parameter and buffer, in `self.dtypes`; where the process dies meanwhile they are
                taken to their end all the same, and then `weights` is asked.
            mode: "atomic" or "in_place", as of `EmbeddedEngine.begin_update`.
            verify: hash every tensor's bytes on both sides.

        Returns:
            Bytes, and seconds by phase of both sides; nothing, and `source` is not read, where `version` serves.

        Raises:
            TransferError: the engine refused what came.
            EngineError: the process died, and there are no `weights` to start another one with.
        """
        self.capabilities.need(updates=mode)
        with self._free:
            if version == self.version and not self._broken:
                return Sent()
            source = iter(source)
            try:
                return self._push(source, version, mode, verify)
            except _Gone as problem:
                for _ in source:  # who makes them may keep them, or others may be waiting for us to take them
                    pass
                self.version = version
                return self._restart(problem, 1)

    def update_weights(self, source: Mapping[str, Tensor] | Transformer, version: int, mode: str = "atomic") -> None:
        """Take new weights, cast to the engine's dtype; every parameter and buffer by the model's names.

        Raises:
            ConfigError: a name is missing or unknown, or a shape differs.
        """
        mine = pieces_of(source, held(Transformer(self.config, device="meta", seed=None)))
        self.update(chunks(mine, None, self.dtypes, self._host.chunk_bytes), version, mode)

    def pause(self) -> None:
        """Sample nothing more until `resume`; waits for the answers under way in another thread."""
        with self._free:
            self._paused_by = threading.get_ident()

    def resume(self) -> None:
        """Go on."""
        with self._free:
            self._paused_by = 0
            self._free.notify_all()

    def metrics(self) -> dict[str, float]:
        """What was done since the last call, and how often a process was started again in all. What a process did not
        tell before it died is not counted."""
        with self._free:
            found, self.stats = dict[str, float](), Stats()
            with suppress(_Gone):  # the next request sees it, too
                found = next(self._host.ask({"op": "metrics"}))[0]["metrics"]
            return found | {"engine/restarts": float(self.restarts)}

    # ---- inside ----

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The line to the process, for one request."""
        with self._free:
            if self._paused_by == threading.get_ident():
                raise EngineError("the engine is paused by this thread; call resume() first")
            self._free.wait_for(lambda: not self._paused_by)
            if self._broken:
                raise EngineError(f"the engine cannot sample: {self._broken}; update the weights")
            yield

    def _collect(
        self, op: str, prompts: Sequence[Sequence[int]], counts: list[int], how: Sampling,
        columns: dict[str, Any], told: Told | None = None,
    ) -> list[Rollout]:  # fmt: skip
        """`counts` answers to each prompt; a process that dies is replaced, and asked for the prompts that miss one."""
        for name, column in columns.items():
            if column is not None and len(column) != len(prompts):
                raise ConfigError(f"{len(prompts)} prompts, but {len(column)} {name}; give one for each")
        out, tries = [Rollout(list(p), None, []) for p in prompts], 0
        found: list[dict[int, Answer]] = [{} for _ in prompts]
        with self._turn():
            while missing := [i for i, n in enumerate(counts) if len(found[i]) < n]:
                request = {name: column and [column[i] for i in missing] for name, column in columns.items()}
                request |= {"op": op, "sampling": how.to_dict(), "prompts": [out[i].prompt for i in missing]}
                before = sum(map(len, found))
                try:
                    for head, t in self._host.ask(request):
                        if "done" in head:
                            self._count(head, t)
                            continue
                        i, sample = missing[head["prompt"]], head["sample"]
                        out[i].prompt_experts = t.get("prompt_experts", out[i].prompt_experts)
                        if sample not in found[i]:
                            of = (t["ids"].tolist(), t["logprobs"], t.get("experts"), t["version"], head["finish"])
                            found[i][sample] = Answer(*of)
                            if told:
                                told(sum(map(len, found)), sum(counts))
                except _Gone as problem:
                    tries = 1 if sum(map(len, found)) > before else tries + 1
                    self._restart(problem, tries)
        for rollout, answers in zip(out, found):
            rollout.answers = [answers[s] for s in range(len(answers))]
        return out

    def _count(self, head: dict[str, Any], buffers: dict[str, Tensor]) -> None:
        vars(self.stats).update(head["stats"])
        done = RowCounter.of(self.config, "engine")
        for name, buffer in buffers.items():
            done.pass_name = name
            done.measures["engine", name].buffer.copy_(buffer)
        self.counter.add(done)

    def _push(self, source: Iterator[Chunk], version: int, mode: str, verify: bool = False) -> Sent:
        if mode == "in_place":
            self._broken = "an update in place was not finished"
        sent, theirs = self._host.push(source, version, mode, verify)
        self.version, self._broken = version, ""
        return sent + Sent(0, {p: s for p, s in theirs.items() if p != "wire"})  # their wire is waiting for us

    def _restart(self, problem: _Gone, tries: int) -> Sent:
        """Another process with the same weights."""
        if self._weights is None or tries > TRIES or self._host.closed:
            how = f"{self.restarts} came in its place" if self._weights else "give weights= to start another one"
            self._broken = "its process has died"
            raise EngineError(f"the engine's process {problem}; {how}") from None
        print(f"the engine's process {problem}; it is started again", file=sys.stderr, flush=True)
        self.restarts += 1
        try:
            self._host.start()
            return self._push(iter(self._weights()), self.version, "in_place")
        except _Gone as again:
            return self._restart(again, tries + 1)


class _Host:
    """The process that serves now, and the lines to it; holds no reference to the engine."""

    def __init__(self, hello: dict[str, Any], stall_s: float, start_s: float, chunk_bytes: int):
        self.hello, self.stall_s, self.start_s, self.chunk_bytes = hello, stall_s, start_s, chunk_bytes
        self.starter = ThreadPoolExecutor(1)  # a process dies with the thread that started it: one that lasts
        self.process: Any = None
        self.ring: SharedRing | None = None
        self.closed, self.number = False, 0  # of the last request

    def start(self) -> None:
        """A process in place of the one before."""
        self.kill()
        (self.line, theirs), (self.lines, others) = socket.socketpair(), socket.socketpair()
        self.stream, fds, null = self.line.makefile("rb"), [theirs.fileno(), others.fileno()], subprocess.DEVNULL
        command = [sys.executable, "-P", "-m", "moekit.rollout.engine_server", *map(str, fds), str(os.getpid())]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        how: dict[str, Any] = {"env": env, "pass_fds": fds, "stdin": null, "stdout": null, "start_new_session": True}
        with theirs, others:  # a session of its own: Ctrl-C does not reach it
            self.process = self.starter.submit(subprocess.Popen, command, **how).result()
        try:
            put(self.line, self.hello)
            self.line.settimeout(self.start_s)
            take(self.stream)
        except LOST:
            problem = f"did not start within {self.start_s:g} s (exit code {self.kill()})"
            raise BackendError(f"the engine's process {problem}; its stderr says why") from None

    def ask(self, request: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
        """Replies, the last one with "done". Raises _Gone, or what went wrong there."""
        with self.watched():
            self.say(request)
            yield from self.replies()

    def push(self, source: Iterator[Chunk], version: int, mode: str, verify: bool) -> tuple[Sent, dict[str, float]]:
        """Weights through the ring, which is made anew after a failure. Returns what was sent, and their seconds."""
        request = {"op": "update", "version": version, "mode": mode, "timeout": self.stall_s, "new": self.ring is None}
        try:
            with self.watched():
                self.say(request)
                if self.ring is None:
                    mine, theirs = socket.socketpair()
                    with theirs:
                        socket.send_fds(self.lines, [b"r"], [theirs.fileno()])
                    self.ring = SharedRing.make(mine, chunk_bytes=self.chunk_bytes, timeout=self.stall_s)
                try:
                    sent = self.ring.send(source, verify=verify)
                except TransferError:
                    list(self.replies())  # raises what the engine says of it
                    raise
                except BaseException:  # not of the way: of who makes the chunks, and that is told
                    with suppress(Exception):
                        list(self.replies())
                    raise
                return sent, next(self.replies())[0]["seconds"]
        except BaseException:
            self.ring = None
            raise

    def say(self, request: dict[str, Any]) -> None:
        """Send a request."""
        if self.process.poll() is not None:
            raise EOFError
        self.number += 1
        self.line.settimeout(self.stall_s)
        put(self.line, {**request, "number": self.number})

    def replies(self) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
        """What comes until the request is done, but for what belongs to one that was given up."""
        at, since, head = None, time.monotonic(), dict[str, Any]()
        while "done" not in head:
            head, tensors = take(self.stream)
            if head.pop("number") != self.number:
                head = {}
            elif "error" in head:
                raise getattr(errors, head["error"])(head["message"])
            elif head.get("beat") != at or at is None:
                at, since = head.get("beat"), time.monotonic()
            elif time.monotonic() - since > self.stall_s:
                raise TimeoutError
            if head and "beat" not in head:
                yield head, tensors

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A process that is dead or stuck is killed, and _Gone says so."""
        try:
            yield
        except LOST as problem:
            code, stuck = self.kill(), isinstance(problem, TimeoutError)
            why = f"made no step for {self.stall_s:g} s and was killed" if stuck else f"died with exit code {code}"
            raise _Gone(why) from None

    def kill(self) -> int:
        """End the process; its exit code."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            with suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
        for end in (self.stream, self.line, self.lines):
            end.close()
        self.ring = None
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(10.0)
        return -signal.SIGKILL

    def close(self) -> None:
        """End the process for good."""
        self.closed = True
        self.kill()
        self.starter.shutdown(wait=False)
