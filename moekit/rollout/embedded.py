"""The rollout engine that runs everywhere: the learner's own model code, in this process, on any device.

It serves a whole model: a copy of its own, in a dtype of its own, or the learner's parameters themselves
(`EmbeddedEngine.of`), which then need no transfer. Or several processes serve together, each with a slice of the
experts and its own requests (`moekit.recipes.serve`). No token is sampled from keys of other weights: when the
version changes under running answers, what was read is read again, or they end, or they were finished first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import ModelConfig
from ..errors import ConfigError, EngineError
from ..model.moe import Dispatcher
from ..model.transformer import Part, Transformer
from .engine import Answer, Capabilities, Rollout, Sampling, Told
from .kv_cache import ordinary
from .passes import Gather, Passes
from .score import score
from .slots import Slots, requests
from .stats import Stats
from .weight_plan import held
from .weight_transfer import Chunk, Update, chunks

RUNNING = ("recompute", "abort", "finish")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Finished:
    """One answer of a stream: to which prompt, which sample, and the experts of the prompt's tokens."""

    prompt: int
    sample: int
    answer: Answer
    prompt_experts: Tensor | None


class EmbeddedEngine:
    """An `Engine` on a `Transformer`.

    Args:
        model: a whole model; copied, unless made by `EmbeddedEngine.of`. A `ModelConfig` makes an engine that waits for
            its first weights.
        dtype: of the engine's copy: "float32", "bfloat16", "float64"; None = the model's.
        version: of the weights given, the learner's step.
        slots: answers that decode together. The cache holds 2 * layers * kv_heads * head_dim numbers for each token of
            each slot; its room is the longest prompt and answer of a call.
        ahead: prompt tokens that are read together.
        running: what happens to running answers when the weights change: "recompute" (what they hold is read again
            with the new weights, and they go on), "abort", or "finish" (with the old weights, before the change).
        device: of the engine's copy; None = the model's.
        crossover: rows per expert under which metrics call a pass small; 16 = the lowest tile in `kernels/tuning.py`,
            the least rows that a matrix instruction takes.
        part, dispatcher, gather: the experts held here; what brings rows to those of other ranks; integers of all ranks
            that share them. `generate`, `stream` (read to its end) and `score` are then calls of all ranks together.

    Raises:
        ConfigError: part of a model, a value head, an unknown dtype or mode, a `part` of the layers, or one alone.

    >>> from moekit.model.presets import preset
    >>> engine = EmbeddedEngine(Transformer(preset("tiny")))
    >>> [len(a.ids) for r in engine.generate([[5, 6]], Sampling(max_new_tokens=3, n=2)) for a in r.answers]
    [3, 3]
    """

    def __init__(
        self, model: Transformer | ModelConfig, *, dtype: str | None = None, version: int = 0, slots: int = 64,
        ahead: int = 4096, running: str = "recompute", device: torch.device | str | None = None,
        crossover: float = 16, part: Part | None = None, dispatcher: Dispatcher | None = None,
        gather: Gather | None = None,
    ):  # fmt: skip
        config = model if isinstance(model, ModelConfig) else model.config
        if config.value_head:
            raise ConfigError("this model has a value head and no vocabulary to sample from; give the policy")
        if dtype is not None and dtype not in DTYPES:
            raise ConfigError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
        if running not in RUNNING or slots < 1 or ahead < 1:
            raise ConfigError(f"running={running!r} is not one of {RUNNING}, or slots={slots}, ahead={ahead} below 1")
        part = part or Part.whole(config)
        if part.stages != ((0, config.layers),) or None in (dispatcher, gather) and part != Part.whole(config):
            raise ConfigError(f"an engine of {part} needs all layers, dispatcher and gather; see moekit.recipes.serve")
        whole = None if isinstance(model, ModelConfig) else _whole(model)
        kind = DTYPES[dtype] if dtype else torch.float32 if whole is None else whole.head_weight.dtype
        place = device or (whole.device if whole else None)
        self.model = Transformer(config, dtype=kind, device=place, seed=None, part=part)
        for block in [b for b in self.model.blocks.values() if b.routes]:
            block.moe.dispatcher = dispatcher or block.moe.dispatcher
        self.slots, self.ahead, self.when_running, self.shared = slots, ahead, running, False
        self.passes = Passes(self.model, gather, lambda: self.version, crossover)
        self.counter = self.passes.counter
        self._version: int | Callable[[], int] = version
        self._broken = "no weights were given to it yet; call update_weights"
        self._batch: Slots | None = None
        self._update: Update | None = None
        self._spare: dict[str, Tensor] = {}  # memory of the version before, on a CPU: warm for the next one
        self._lock, self._go, self._paused_by, self._sampler = threading.RLock(), threading.Event(), 0, 0
        self._go.set()
        if whole is not None:
            self.update_weights(whole, version, "in_place")

    @classmethod
    def of(cls, model: Transformer, version: Callable[[], int], **how) -> EmbeddedEngine:
        """An engine on the learner's own parameters: nothing is copied, and `version()` must change when they do."""
        kind = str(_whole(model).head_weight.dtype).removeprefix("torch.")
        if how.get("dtype") not in (None, kind):
            raise ConfigError(
                f"{kind} cannot be shared with an engine in {how['dtype']}; make EmbeddedEngine(model, ...)"
            )
        engine = cls(model.config, **how, device="meta")
        engine.model = engine.passes.model = model
        engine.shared, engine._version, engine._broken = True, version, ""
        engine.capabilities.need(running=engine.when_running)
        return engine

    # ---- the protocol ----

    @property
    def capabilities(self) -> Capabilities:
        """Everything; a shared model needs no update, and so cannot finish answers before one."""
        updates, running = ((), RUNNING[:2]) if self.shared else (("atomic", "in_place"), RUNNING)
        routes = bool(self.model.config.moe_layers)
        return Capabilities("embedded", True, routes, True, True, True, True, updates, running)

    @property
    def stats(self) -> Stats:
        """Since `metrics` was last called."""
        return self.passes.stats

    @property
    def version(self) -> int:
        """Of the weights that serve now."""
        return self._version() if callable(self._version) else self._version

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, prompt_ids: Sequence[int] | None = None,
        limits: Sequence[int] | None = None, told: Told | None = None,
    ) -> list[Rollout]:  # fmt: skip
        """Sample `sampling.n` answers to each prompt.

        Args:
            prompts: token ids, at least one each.
            sampling: how.
            prompt_ids: what the draws of each prompt are keyed by; absent = 0, 1, ...
            limits: the most new tokens of each prompt's answers, where that is fewer than `max_new_tokens`.
            told: called as `told(done, total)` when answers are finished.

        Raises:
            ConfigError: an empty prompt, one that leaves no room for its answer, a token outside the vocabulary.
            EngineError: paused by this thread, without weights, broken by a failed update, or generating already.

        Cost: each prompt once, whatever `n`; then a pass over one token a slot for every step.
        """
        out, found = [Rollout(list(p), None, []) for p in prompts], list[Finished]()
        for one in self.stream(prompts, sampling, prompt_ids=prompt_ids, limits=limits):
            found.append(one)
            if told:
                told(len(found), len(out) * sampling.n)
        for one in sorted(found, key=lambda f: f.sample):
            out[one.prompt].prompt_experts = one.prompt_experts
            out[one.prompt].answers.append(one.answer)
        return out

    def stream(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, prompt_ids: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
    ) -> Iterator[Finished]:  # fmt: skip
        """Answers as they are finished, for arguments as of `generate`. Between two of them weights may be updated."""
        if self._batch is not None:
            raise EngineError("the engine is generating already; finish that stream, or close it, first")
        with self.passes.call():
            groups = requests(self.model.config, prompts, sampling, prompt_ids, limits)
            if not groups:
                return
            self._ready()
            self._sampler, slots = threading.get_ident(), min(self.slots, len(groups) * sampling.n)
            with torch.inference_mode():  # what the slots keep lives in there; what they hand out are ordinary tensors
                self._batch = batch = Slots(self.passes, sampling, groups, slots, self.ahead)
            try:
                while batch.n or batch.waiting or batch.done:
                    while batch.done:
                        group, sample, answer = batch.done.popleft()
                        yield Finished(group.index, sample, answer, ordinary(group.experts))
                    with self._step(), torch.inference_mode():
                        if batch.stale or batch.weights != self.version:
                            batch.renew(abort=self.when_running == "abort")
                        batch.step()
            finally:
                self._batch = None

    def score(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[Sequence[int]]], sampling: Sampling
    ) -> list[Rollout]:
        """Given answers as if they had been sampled: log-probs and experts from whole forward passes, without a cache.

        Raises:
            ConfigError: an empty prompt, or not as many groups of answers as prompts.
            DataError: a token outside the vocabulary, or a sequence past the model's positions.
            EngineError: as `generate`; a score needs no slot and may run beside a stream.
        """
        with self.passes.call(), self._step():
            if len(prompts) != len(answers) or not all(map(len, prompts)):
                raise ConfigError(f"score: {len(prompts)} prompts, answers to {len(answers)}, or a prompt of 0 tokens")
            pairs = [(list(p), list(a)) for p, group in zip(prompts, answers) for a in group]
            found, version = iter(score(self.passes, pairs, sampling, self.ahead)), self.version
        out = []
        for prompt, group in zip(prompts, answers):
            rollout, P = Rollout(list(prompt), None, []), len(prompt)
            for answer, (logprobs, experts) in zip(group, found):
                rollout.prompt_experts, mine = (None, None) if experts is None else (experts[:P], experts[P:])
                versions, finish = torch.full((len(answer),), version), "stop" if sampling.stopped(answer) else "length"
                rollout.answers.append(Answer(list(answer), logprobs, mine, versions, finish))
            out.append(rollout)
        return out

    def update_weights(self, source: Mapping[str, Tensor] | Transformer, version: int, mode: str = "atomic") -> None:
        """Take new weights, cast to the engine's dtype; `source` has every parameter and buffer by the model's names.

        As `begin_update`, `write` and `finish_update`, with the thread that samples held meanwhile. Nothing is done
        where `version` serves already, or for an engine that shares the model `source`.

        Raises:
            CapabilityError: an unknown mode; other weights for a shared model.
            ConfigError: a name is missing or unknown, or a shape differs.
        """
        if self.shared and source is self.model:
            return
        values = source.state_dict() if isinstance(source, Transformer) else source
        own = held(self.model)
        if wrong := sorted(own.keys() ^ set(values)):
            kind = "has no" if wrong[0] in own else "has an unknown"
            raise ConfigError(
                f"the update {kind} {wrong[0]} ({len(wrong)} names differ); send every parameter and buffer"
            )
        with self._between_steps():
            if not self.begin_update(version, mode):
                return
            try:
                for name, (piece, flat) in own.items():
                    found = values[name].detach()
                    if (got := tuple(found.shape)) != piece.shape:
                        raise ConfigError(f"the update's {name} has shape {got}, not {piece.shape}")
                    mine = {name: (piece, found.reshape(-1)[piece.start : piece.stop])}
                    for chunk in chunks(mine, dtype=flat.dtype):
                        self.write(chunk)
                self.finish_update()
            except BaseException:
                self.abort_update()
                raise

    def begin_update(self, version: int, mode: str = "atomic") -> bool:
        """Open an update; False, and nothing is opened, where `version` serves already.

        "atomic" takes chunks into a copy (one more copy of the weights, kept for the next update on a CPU): the old
        version serves until `finish_update`, and after any failure. "in_place" takes them into the weights (no more
        memory): from now on the engine refuses to generate until an update is finished.

        Raises:
            CapabilityError: an unknown mode; a shared model, which needs no update.
            EngineError: an update is open.
        """
        self.capabilities.need(updates=mode)
        if self._update is not None:
            raise EngineError(f"an update to version {self._update.version} is open; abort_update() ends it")
        if version == self.version and not self._broken:
            return False
        with self._between_steps():
            if mode == "in_place":
                self._turn()
                self._broken = "an update in place is under way or failed half-way; update the weights again"
                self._spare = {}
            self._update = Update(self.model, version, mode, self._spare)
        return True

    def write(self, chunk: Chunk) -> None:
        """Take a chunk of the open update, in the dtype of the engine's tensor. See `Update.write` for what is refused.

        Raises EngineError: no update is open.
        """
        self._opened().write(chunk)

    def finish_update(self, digests: Mapping[str, str] | None = None) -> None:
        """Let the new weights serve, under their version; refused, and the update over, unless all of them are here.

        Args:
            digests: SHA-256 of tensors as the engine holds them, by name (`weight_transfer.digest`).

        Raises:
            TransferError: elements that did not come; a hash that differs.
        """
        try:
            update = self._opened()
            update.check(digests)
            with self._between_steps():
                if update.mode == "atomic":
                    self._turn()
                update.switch()
                warm = update.mode == "atomic" and not self._broken and self.model.device.type == "cpu"
                self._version, self._broken, self._spare = update.version, "", update.into if warm else {}
        finally:
            self._update = None

    def abort_update(self) -> None:
        """Drop the open update, if there is one; after one in place the engine still waits for weights."""
        self._update = None

    def pause(self) -> None:
        """Sample nothing more until `resume`; returns when the step under way is over.

        Another thread that generates waits; this one is told. Raises EngineError: this thread is the one that samples.
        """
        if self._batch is not None and self._sampler == threading.get_ident():
            raise EngineError("this thread samples, and does not while it takes no answer; pause from another")
        self._paused_by = threading.get_ident()
        self._go.clear()
        with self._lock:
            pass

    def resume(self) -> None:
        """Go on."""
        self._go.set()

    def abort(self) -> None:
        """End every answer of the stream under way where it is; its stream hands them out with finish "abort"."""
        with self._between_steps(), torch.inference_mode():
            if self._batch is not None:
                self._batch.abort(waiting=True)

    def metrics(self) -> dict[str, float]:
        """What was done since the last call: tokens/s, seconds, occupancy and counts (`Stats.metrics`)."""
        before, self.passes.stats = self.passes.stats, Stats()
        return before.metrics()

    # ---- inside ----

    def _ready(self) -> None:
        """Between two steps: wait while another thread holds the engine."""
        if self._broken:
            raise EngineError(f"the engine cannot sample: {self._broken}")
        if not self._go.is_set():
            if self._paused_by == threading.get_ident():
                raise EngineError("the engine is paused by this thread; call resume() first")
            self._go.wait()

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Hold the engine for a step, once nobody else does and its weights are whole."""
        while True:
            self._ready()
            with self._lock:
                if self._go.is_set() and not self._broken:  # nothing came between
                    yield
                    return

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Hold the thread that samples, if there is one, between two steps."""
        free, self._paused_by = self._go.is_set(), threading.get_ident()
        self._go.clear()
        try:
            with self._lock:
                yield
        finally:
            if free:
                self._go.set()

    def _opened(self) -> Update:
        if self._update is None:
            raise EngineError("no update is open; call begin_update first")
        return self._update

    def _turn(self) -> None:
        """Before the weights change: running answers finish, or what they read is read again."""
        if self.passes.inside:
            raise EngineError("the weights of an engine of several ranks change between calls; finish the stream first")
        if self._batch is not None:
            with torch.inference_mode():
                while self.when_running == "finish" and self._batch.n:
                    self._batch.step(admit=False)
            self._batch.stale = True


def _whole(model: Transformer) -> Transformer:
    if model.part != Part.whole(model.config):
        here = f"only layers {model.part.stages} and experts {model.part.experts} are here"
        raise ConfigError(f"{here}; make EmbeddedEngine(config) and give it gathered weights by update_weights")
    return model
