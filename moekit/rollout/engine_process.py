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
from ..errors import BackendError, ConfigError, EngineError
from ..measure.tokens import RowCounter
from ..model.transformer import Transformer
from .embedded import DTYPES
from .engine import Answer, Capabilities, Rollout, Sampling, Told
from .engine_server import put, take
from .shared_ring import SharedRing
from .stats import Stats
from .weight_plan import dtypes, held
from .weight_transfer import CHUNK, Chunk, Sent, chunks

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
        if dtype is not None and dtype not in DTYPES:
            raise ConfigError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
        self.config, self.dtypes = config, dtypes(config, DTYPES[dtype or "float32"])
        self.counter, self.stats, self.restarts, self.busy_s = RowCounter.of(config, "engine"), Stats(), 0, 0.0
        for name in ("prefill", "decode", "score"):
            self.counter.pass_name = name
        how = {"dtype": dtype or "float32", "slots": slots, "ahead": ahead, "device": device and str(device)}
        self._how, self._weights, self._version, self._broken = how, weights, 0, "no weights were given to it yet"
        self._lock, self._go, self._paused_by = threading.RLock(), threading.Event(), 0
        self._go.set()
        self._host = _Host(stall_s, start_s, chunk_bytes)
        self.close = weakref.finalize(self, self._host.close)  # by hand, by the garbage collector or at exit, once
        self._start()

    @property
    def capabilities(self) -> Capabilities:
        """As the embedded engine's; answers that run are finished before an update."""
        return Capabilities("process", True, bool(self.config.moe_layers), True, True, True, True,
                            ("atomic", "in_place"), ("finish",))  # fmt: skip

    @property
    def version(self) -> int:
        """Of the weights that serve now."""
        return self._version

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
        ids = list(range(len(prompts))) if prompt_ids is None else list(prompt_ids)
        for name, given in (("prompt_ids", ids), ("limits", limits)):
            if given is not None and len(given) != len(prompts):
                raise ConfigError(f"{len(prompts)} prompts, but {len(given)} {name}; give one for each")
        out, found = [Rollout(list(p), None, []) for p in prompts], dict[tuple[int, int], Answer]()
        with self._turn():
            tries = 0
            while missing := [i for i in range(len(out)) if any((i, s) not in found for s in range(sampling.n))]:
                request = {"prompts": [out[i].prompt for i in missing], "ids": [ids[i] for i in missing],
                           "limits": limits and [limits[i] for i in missing]}  # fmt: skip
                before = len(found)
                try:
                    for at, sample, answer, experts in self._answers("generate", sampling, request):
                        i = missing[at]
                        if experts is not None:
                            out[i].prompt_experts = experts
                        if (i, sample) not in found:
                            found[i, sample] = answer
                            if told:
                                told(len(found), len(out) * sampling.n)
                except _Gone as problem:
                    tries = 1 if len(found) > before else tries + 1
                    self._restart(problem, tries)
        for i, rollout in enumerate(out):
            rollout.answers = [found[i, s] for s in range(sampling.n)]
        return out

    def score(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[Sequence[int]]], sampling: Sampling
    ) -> list[Rollout]:
        """As `EmbeddedEngine.score`."""
        request = {"prompts": [list(p) for p in prompts], "answers": [[list(a) for a in group] for group in answers]}
        with self._turn():
            for tries in range(1, TRIES + 2):
                out = [Rollout(p, None, []) for p in request["prompts"]]
                try:
                    for at, _, answer, experts in self._answers("score", sampling, request):
                        out[at].answers.append(answer)
                        out[at].prompt_experts = experts if experts is not None else out[at].prompt_experts
                    return out
                except _Gone as problem:
                    self._restart(problem, tries)
        raise AssertionError

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
        with self._lock:
            if version == self._version and not self._broken:
                return Sent()
            source = iter(source)
            try:
                return self._push(source, version, mode, verify)
            except _Gone as problem:
                for _ in source:  # who makes them may keep them, or others may be waiting for us to take them
                    pass
                self._version = version
                return self._restart(problem, 1)

    def update_weights(self, source: Mapping[str, Tensor] | Transformer, version: int, mode: str = "atomic") -> None:
        """Take new weights, cast to the engine's dtype; every parameter and buffer by the model's names.

        Raises:
            ConfigError: a name is missing or unknown, or a shape differs.
        """
        values = source.state_dict() if isinstance(source, Transformer) else source
        own = held(Transformer(self.config, device="meta", seed=None))
        shapes = {n: tuple(t.shape) for n, t in values.items()}
        if wrong := sorted(n for n in own.keys() | shapes.keys() if n not in own or shapes.get(n) != own[n][0].shape):
            raise ConfigError(f"the update and the model differ in {wrong[0]} ({len(wrong)} tensors); send all of them")
        mine = {n: (piece, values[n].detach().reshape(-1)) for n, (piece, _) in own.items()}
        self.update(chunks(mine, None, self.dtypes, self._host.chunk_bytes), version, mode)

    def pause(self) -> None:
        """Sample nothing more until `resume`; waits for the answers under way in another thread."""
        with self._lock:
            self._paused_by = threading.get_ident()
            self._go.clear()

    def resume(self) -> None:
        """Go on."""
        self._go.set()

    def metrics(self) -> dict[str, float]:
        """What was done since the last call, and how often a process was started again in all. What a process did not
        tell before it died is not counted."""
        with self._lock:
            found, self.stats, self.busy_s = dict[str, float](), Stats(), 0.0
            with suppress(_Gone):  # the next request sees it, too
                found = next(h["metrics"] for h, _ in self._host.ask({"op": "metrics"}) if "done" in h)
            return found | {"engine/restarts": float(self.restarts)}

    # ---- inside ----

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The line to the process, for one request."""
        while True:
            if not self._go.is_set() and self._paused_by == threading.get_ident():
                raise EngineError("the engine is paused by this thread; call resume() first")
            self._go.wait()
            with self._lock:
                if not self._go.is_set():
                    continue
                if self._broken:
                    raise EngineError(f"the engine cannot sample: {self._broken}; update the weights")
                began = time.perf_counter()
                try:
                    yield
                finally:
                    self.busy_s += time.perf_counter() - began
                return

    def _answers(
        self, op: str, sampling: Sampling, request: dict[str, Any]
    ) -> Iterator[tuple[int, int, Answer, Tensor | None]]:
        for head, t in self._host.ask({"op": op, "sampling": sampling.to_dict(), **request}):
            if "prompt" in head:
                a = Answer(t["ids"].tolist(), t["logprobs"], t.get("experts"), t["version"], head["finish"])
                yield head["prompt"], head["sample"], a, t.get("prompt_experts")
                continue
            vars(self.stats).update(head["stats"])
            told = RowCounter.of(self.config, "engine")
            for name, buffer in t.items():
                told.pass_name = name
                told.measures["engine", name].buffer.copy_(buffer)
            self.counter.add(told)

    def _start(self) -> None:
        self._host.start({"model": self.config.to_dict(), "how": self._how, "threads": torch.get_num_threads(),
                          "choices": ops.choices()})  # fmt: skip

    def _push(self, source: Iterator[Chunk], version: int, mode: str, verify: bool = False) -> Sent:
        if mode == "in_place":
            self._broken = "an update in place was not finished"
        sent, head = self._host.push(source, {"op": "update", "version": version, "mode": mode}, verify)
        self._version, self._broken = version, ""
        theirs = {p: s for p, s in head["seconds"].items() if p != "wire"}  # theirs is the time they wait for us
        return sent + Sent(0, theirs)

    def _restart(self, problem: _Gone, tries: int) -> Sent:
        """Another process with the same weights."""
        if self._weights is None or tries > TRIES or self._host.closed:
            how = (
                "give weights= to start another one" if self._weights is None else f"{self.restarts} were started again"
            )
            self._broken = "its process has died"
            raise EngineError(f"the engine's process {problem}; {how}") from None
        print(f"the engine's process {problem}; it is started again", file=sys.stderr, flush=True)
        self.restarts += 1
        try:
            self._start()
            return self._push(iter(self._weights()), self._version, "in_place")
        except _Gone as again:
            return self._restart(again, tries + 1)


class _Host:
    """The process that serves now, and the lines to it; holds no reference to the engine."""

    def __init__(self, stall_s: float, start_s: float, chunk_bytes: int):
        self.stall_s, self.start_s, self.chunk_bytes, self.closed = stall_s, start_s, chunk_bytes, False
        self.starter = ThreadPoolExecutor(1)  # a process dies with the thread that started it: one that lasts
        self.process: Any = None
        self.ring: SharedRing | None = None
        self.number = 0  # of the last request

    def start(self, hello: dict[str, Any]) -> None:
        """A process in place of the one before."""
        self.kill()
        (self.line, theirs), (self.lines, others) = socket.socketpair(), socket.socketpair()
        self.stream, self.ring, null = self.line.makefile("rb"), None, subprocess.DEVNULL
        fds = [theirs.fileno(), others.fileno()]
        command = [sys.executable, "-P", "-m", "moekit.rollout.engine_server", *map(str, fds), str(os.getpid())]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        with theirs, others:  # a session of its own: Ctrl-C does not reach it
            self.process = self.starter.submit(
                subprocess.Popen, command, env=env, pass_fds=fds, stdin=null, stdout=null, start_new_session=True
            ).result()
        try:
            put(self.line, hello)
            self.line.settimeout(self.start_s)
            take(self.stream)
        except (EOFError, OSError):
            problem = f"did not start within {self.start_s:g} s (exit code {self.kill()})"
            raise BackendError(f"the engine's process {problem}; its stderr says why") from None

    def ask(self, request: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
        """Replies, the last one with "done". Raises _Gone, or what went wrong there."""
        try:
            self.say(request)
            yield from self.replies()
        except LOST as problem:
            raise self.gone(problem) from None

    def push(self, source: Iterator[Chunk], request: dict[str, Any], verify: bool) -> tuple[Sent, dict[str, Any]]:
        """Weights through the ring, which is made anew after a failure."""
        try:
            if self.ring is None:
                self.say({"op": "ring", "timeout": self.stall_s})
                mine, theirs = socket.socketpair()
                with theirs:
                    socket.send_fds(self.lines, [b"r"], [theirs.fileno()])
                self.ring = SharedRing.make(mine, chunk_bytes=self.chunk_bytes, timeout=self.stall_s)
                list(self.replies())
            self.say(request)
            try:
                sent = self.ring.send(source, verify=verify)
            except BaseException as problem:
                list(self.replies())  # raises what the engine says of it
                raise problem from None
            return sent, [head for head, _ in self.replies()][-1]
        except LOST as problem:
            raise self.gone(problem) from None
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
        """What comes until the request is done."""
        at, since = None, time.monotonic()
        while True:
            head, tensors = take(self.stream)
            if head["number"] != self.number:
                continue  # of a request that was given up
            if "beat" not in head or head["beat"] != at:
                at, since = head.get("beat", at), time.monotonic()
            elif time.monotonic() - since > self.stall_s:
                raise TimeoutError
            if "error" in head:
                raise getattr(errors, head["error"])(head["message"])
            if "beat" not in head:
                yield head, tensors
            if "done" in head:
                return

    def gone(self, problem: Exception) -> _Gone:
        """What to say of a process that is dead or stuck; it is dead afterwards."""
        stuck = isinstance(problem, TimeoutError)
        code = self.kill()
        return _Gone(f"made no step for {self.stall_s:g} s and was killed" if stuck else f"died with exit code {code}")

    def kill(self) -> int:
        """End the process; its exit code."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            with suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
        for end in (self.stream, self.line, self.lines):
            end.close()
        if self.ring is not None:
            self.ring.close()
            self.ring = None
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(10.0)
        return -signal.SIGKILL

    def close(self) -> None:
        """End the process for good."""
        self.closed = True
        self.kill()
        self.starter.shutdown(wait=False)
