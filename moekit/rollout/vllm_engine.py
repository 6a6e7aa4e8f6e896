"""vLLM as a rollout engine, in this process or over HTTP: token ids in, token ids and their log-probs out.

    with start_server("runs/sft/export") as server:                    # moekit.rollout.vllm_http
        engine = VLLMEngine(server.link(), model.config)
        engine.update_weights(model, version=7, mode="in_place")
        rollouts = engine.generate(prompts, Sampling(n=4), prompt_ids=ids)

An update is believed when it is proved: the engine's log-probs of a fixed text are those of the new weights, to within
rounding, and not those of the old ones (`moekit.rollout.vllm_probe`). vLLM answers "done" to updates that left its
experts wrong.

A server may have been left paused or half updated by somebody before, and it may die and be started again, with other
weights: at the first contact, and after a loss, it is asked for its state, and nothing is sampled from it before it has
a whole update of ours.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..checkpoint.export import choose_family
from ..checkpoint.names import Naming, pieces
from ..config import ModelConfig
from ..errors import CapabilityError, ConfigError, EngineError
from ..model.transformer import Transformer
from .embedded import DTYPES
from .engine import Answer, Capabilities, Rollout, Sampling, Told
from .sampling import draw_key
from .stats import Stats
from .vllm_files import abandon, send
from .vllm_messages import PLAIN, Link, parameters, parse, parse_prompt
from .vllm_plugin import TORN
from .vllm_probe import TOLERANCE, Proof, Reading, probe_ids, prove, read
from .weight_plan import held
from .weight_transfer import Chunk, Sent, Update, chunks, pieces_of

STARTED = -1  # stands for the weights that a server was started with, once it was given others


class VLLMEngine:
    """An `Engine` on vLLM.

    Args:
        link: `vllm_http.HTTPLink`, or `vllm_http.LocalLink` in process.
        config: shape of the model.
        dtype: that vLLM serves in, "float32" or "bfloat16".
        version: of the weights that vLLM was started with.
        family, naming: as which Hugging Face family, and how experts are named on the way.
        tolerance: of the probe, nats; None = by dtype (`vllm_probe`).
        need_proof: an update whose weights the probe cannot tell from the old ones raises; else it is counted
            (`unproved`), and held only to the new weights' log-probs. So is one of a server that could not be asked
            before, because it was paused or half updated.
        chunk_bytes: of one file.
        folder: where files stand for a moment; vLLM must see it. None = shared memory.

    The trainer's side keeps a copy of the weights in `dtype`: what the probe expects, and what a new server is given.
    """

    shared, counter = False, None

    def __init__(
        self, link: Link, config: ModelConfig, *, dtype: str = "float32", version: int = 0, family: str | None = None,
        naming: Naming = "per_expert", tolerance: float | None = None, need_proof: bool = True,
        chunk_bytes: int = 1 << 28, folder: str | Path | None = None,
    ):  # fmt: skip
        if dtype not in TOLERANCE:
            raise ConfigError(f"dtype={dtype!r} is not one of {', '.join(TOLERANCE)}")
        self.link, self.config, self.dtype = link, config, dtype
        self.pieces, self.chunk_bytes = pieces(config, choose_family(config, family), naming), chunk_bytes
        self.tolerance, self.need_proof, self.probe_ids = tolerance, need_proof, probe_ids(config)
        self.stats, self.unproved, self.restarts, self.proof = Stats(), 0, 0, Proof(0.0, 0.0, False)
        self._version, self._given, self._broken, self._old = version, False, "", None
        self._due: int | None = version  # of the weights that `model` holds; None = of no version, they are a mixture
        self._gate, self._paused, self._asking, self._stopped = threading.Condition(), False, 0, False
        self._attached, self._routes, self._kept = False, None, dict[str, tuple[Answer, Tensor | None]]()
        self._folder = tempfile.mkdtemp(prefix="moekit-vllm-", dir=folder or "/dev/shm")
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, True)  # also of an engine nobody closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of vLLM and of the folder."""
        self.link.close()
        self._remove()

    @cached_property
    def model(self) -> Transformer:
        """The trainer's side of the weights; not there before it is needed."""
        return Transformer(self.config, dtype=DTYPES[self.dtype], seed=None)

    @property
    def gap(self) -> float:
        """Of the last proof, nats."""
        return self.proof.gap

    @property
    def capabilities(self) -> Capabilities:
        """Routes where vLLM's replies have them: where none came yet, one token is asked for. Updates in place only."""
        self.attach()
        if self._routes is None and not self._broken:
            self._score([self.probe_ids[:2]])
        return self._capabilities

    @property
    def _capabilities(self) -> Capabilities:
        why = "the server's replies have none" if self._routes is False else f"not known yet: {self._broken}"
        how = "; start it with --enable-return-routed-experts, which vLLM 0.32 has on GPUs only"
        modes = ("in_place",), ("finish",)
        return Capabilities("vllm", True, bool(self._routes), True, True, True, False, *modes, {"routes": why + how})

    @property
    def version(self) -> int:
        """Of the weights that serve now."""
        return self._version

    def metrics(self) -> dict[str, float]:
        """What was done since the last call."""
        found, self.stats = self.stats.metrics(), Stats()
        if "model" not in vars(self):  # another engine brings the weights, and proves them
            return found
        told = {"gap": self.proof.gap, "limit": self.proof.limit, "unproved": float(self.unproved)}
        return found | {f"probe/{name}": value for name, value in told.items()}

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, prompt_ids: Sequence[int] | None = None,
        told: Told | None = None,
    ) -> list[Rollout]:  # fmt: skip
        """`sampling.n` answers to each prompt; each has a seed of its own, from (seed, prompt id, sample).

        Answers that were finished when an error came are kept: the same call, after `recover`, asks for the others.

        Raises:
            ConfigError: an empty prompt, a token outside the vocabulary.
            EngineError: paused, broken by a failed update, no answer, or answers of weights that nobody sent.
        """
        self._check(prompts)
        names = range(len(prompts)) if prompt_ids is None else prompt_ids
        requests = [
            (list(p), parameters(sampling, draw_key(sampling.seed, int(i), s)))
            for p, i in zip(prompts, names, strict=True)
            for s in range(sampling.n)
        ]
        names = [json.dumps(request) for request in requests]
        found = {name: self._kept[name] for name in names if name in self._kept}
        missing = [i for i, name in enumerate(names) if name not in found]

        def keep(at: int, reply: dict[str, Any]) -> None:
            name = names[missing[at]]
            found[name] = self._kept[name] = self._read(reply, requests[missing[at]][0])
            if told:
                told(len(requests) - len(missing) + at + 1, len(requests))

        with self._through():
            self.link.ask([requests[i] for i in missing], keep)
        out = [Rollout(list(p), None, []) for p in prompts]
        for at, name in enumerate(names):
            answer, out[at // sampling.n].prompt_experts = found[name]
            out[at // sampling.n].answers.append(answer)
            self._kept.pop(name, None)
        return out

    def score(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[Sequence[int]]], sampling: Sampling
    ) -> list[Rollout]:
        """Given answers with the log-probs that vLLM's weights give them; no routes.

        Raises CapabilityError: another distribution than softmax(logits), which is all that vLLM scores.
        """
        if (sampling.temperature, sampling.top_k, sampling.top_p) != (1, 0, 1):
            raise CapabilityError("engine 'vllm' scores at temperature=1, top_k=0, top_p=1; score with the learner")
        self._check(prompts)
        pairs = [(list(p), list(a)) for p, group in zip(prompts, answers, strict=True) for a in group]
        with self._through():
            found = iter(self._score([p + a for p, a in pairs]))
        out = []
        for prompt, group in zip(prompts, answers):
            out.append(Rollout(list(prompt), None, []))
            for a in group:
                version, finish = torch.full((len(a),), self._version), "stop" if sampling.stopped(a) else "length"
                logprobs = next(found)[len(prompt) - 1 :]
                out[-1].answers.append(Answer(list(a), logprobs, None, version, finish))
        return out

    # ---- weights ----

    def update(self, source: Iterable[Chunk], version: int, mode: str = "in_place") -> Sent:
        """Take new weights as chunks of our parameters; all of them must come."""
        began = time.perf_counter()
        self._take(source, version)
        cast = time.perf_counter() - began
        return self.update_weights(self.model, version, mode) + Sent(0, {"cast": cast})

    def update_weights(
        self, source: Mapping[str, Tensor] | Transformer, version: int, mode: str = "in_place", *,
        expected: Tensor | None = None,
    ) -> Sent:  # fmt: skip
        """Take new weights and prove it; nothing happens where this version was given already.

        Args:
            source: every parameter by the model's names, or the model.
            version: the learner's step.
            mode: "in_place".
            expected: log-probs of `probe_ids` after the first under the new weights; None = computed here from them.

        Raises:
            ConfigError: a parameter is missing or has another size; nothing was sent.
            EngineError: vLLM refused, or the probe fails, or cannot tell. Then vLLM is paused and refuses to generate
                until an update succeeds.
        """
        self._capabilities.need(updates=mode)
        if self._given and not self._broken and version == self._version == self._served():
            return Sent()
        if source is not self.model:
            own = held(self.model)
            own_dtypes = {n: flat.dtype for n, (_, flat) in own.items()}
            self._take(chunks(pieces_of(source, own), dtype=own_dtypes), version)
        self._due = version
        self.attach()
        with self._alone():
            if not self._stopped:  # one that is paused or half updated cannot be asked
                self._old, _ = read(self.link, self.probe_ids, STARTED)
            before = self._old
            self._broken = f"the update to version {version} is not done; update the weights again"
            try:
                how = Path(self._folder), self.chunk_bytes, self._stopped
                sent = send(self.link, self.model, self.pieces, version, *how)
                began = time.perf_counter()
                self.link.control("resume")
                now, reply = read(self.link, self.probe_ids, STARTED)
                if set(now.after.version.tolist()) != {version}:
                    raise EngineError(f"vLLM samples with version {now.after.version.tolist()}, not {version}")
                self._prove(now, before, expected)
                self._routes = reply["choices"][0].get("routed_experts") is not None
                sent.seconds["verify"] = time.perf_counter() - began
            except BaseException as error:
                self._stop(f"the update to version {version} failed: {error}")
                if isinstance(error, EngineError) or not isinstance(error, Exception):
                    raise
                raise EngineError(self._broken) from error
            self._old = now
            self.follow(version)
        return sent

    def _take(self, source: Iterable[Chunk], version: int) -> None:
        """The trainer's side of an update; whatever ends it half-way, nobody is given a mixture."""
        self._due, new = None, Update(self.model, version, "in_place")
        for chunk in source:
            new.write(chunk)
        new.check()

    def _prove(self, now: Reading, before: Reading | None, expected: Tensor | None) -> None:
        how: dict[str, Any] = {"dtype": self.dtype, "tolerance": self.tolerance, "expected": expected}
        self.proof = prove(self.model, self.probe_ids, now, before, **how)
        if not self.proof.apart:
            if self.need_proof and before is not None:
                limit = f"{self.proof.limit:.3g}"
                raise EngineError(f"the probe cannot tell the new weights from the old ones to within {limit}: update "
                                  "when they have moved, or set need_proof=False")  # fmt: skip
            self.unproved += 1

    def follow(self, version: int) -> None:
        """vLLM has this version: another engine on the same server may have brought it."""
        if version != self._version:
            self._kept.clear()
        self._version, self._given, self._broken, self._stopped = version, True, "", False

    def recover(self, patience: float) -> Sent:
        """Wait until vLLM answers, and give it the weights again where it is not whole or has others, as a server that
        was started again. `patience`: seconds, and those of one request.

        Raises EngineError: it did not come back in time, or is not proved.
        """
        until, self._attached = time.monotonic() + patience, False
        while True:
            try:
                self.attach()
                whole = self._given and not self._broken and self._served() == self._due
                break
            except EngineError as error:
                if time.monotonic() > until:
                    gone = f"the vLLM server {self.link.url} did not come back within {patience:g} s ({error}). "
                    how = "Start it again at the same address, and the run with resume=True, from its last checkpoint"
                    raise EngineError(gone + how) from error
                time.sleep(0.25)
        if whole or "model" not in vars(self):
            return Sent()
        if self._due is None:
            raise EngineError("no weights to give to vLLM again: an update ended half-way. Update the weights")
        self.restarts, self._broken = self.restarts + 1, self._broken or "it lost its weights"
        return self.update_weights(self.model, self._due)

    def _score(self, sequences: Sequence[list[int]]) -> list[Tensor]:
        found = dict[int, Tensor]()

        def keep(at: int, reply: dict[str, Any]) -> None:
            self._read(reply, sequences[at])
            found[at] = parse_prompt(reply, sequences[at])

        self.link.ask([(ids, {**PLAIN, "prompt_logprobs": 0}) for ids in sequences], keep)
        return [found[at] for at in range(len(sequences))]

    # ---- who may ask when ----

    def pause(self) -> None:
        """Ask for nothing more until `resume`; returns when what was asked for is answered."""
        with self._gate:
            self._paused = True
            self._gate.wait_for(lambda: not self._asking)

    def resume(self) -> None:
        """Go on."""
        with self._gate:
            self._paused = False
            self._gate.notify_all()

    @contextmanager
    def _through(self) -> Iterator[None]:
        self.attach()
        with self._gate:
            if self._broken or self._paused:
                raise EngineError(f"the engine cannot sample: {self._broken or 'it is paused; call resume() first'}")
            self._asking += 1
        try:
            yield
        finally:
            with self._gate:
                self._asking -= 1
                self._gate.notify_all()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        paused = self._paused
        self.pause()
        try:
            yield
        finally:
            self._paused = paused

    def attach(self) -> None:
        """At the first contact: ask what state the server is in. Raises EngineError: nobody answers."""
        if self._attached:
            return
        why = ""
        try:
            self.link.control("init", init_info={"root": self._folder, "ask": True})
        except EngineError as error:
            if TORN not in str(error):
                raise
            why = "was left with half an update of its weights"
        if self.link.control("paused")["is_paused"]:
            why = why or "is paused"
        self._attached, self._stopped = True, bool(why)
        if why:
            self._broken = f"the vLLM server {self.link.url} {why}; update the weights"

    def _served(self) -> int:
        """The version that vLLM says it has."""
        label = self.link.control("version")["weight_version"]
        return int(label) if label.isdigit() else STARTED

    def _stop(self, why: str) -> None:
        self._broken, self._stopped = f"{why}; update the weights again", True
        abandon(self.link)
        with suppress(EngineError):  # it may be gone
            self.link.control("pause", mode="abort")

    def _read(self, reply: dict[str, Any], prompt: list[int]) -> tuple[Answer, Tensor | None]:
        """An answer of the weights that serve, and the experts of its prompt."""
        initial = STARTED if self._given else self._version
        answer, before = parse(reply, prompt, initial, self.config, bool(self._routes))
        if wrong := set(answer.version.tolist()) - {self._version}:
            found = "those that it was started with" if wrong == {STARTED} else f"version {max(wrong)}"
            self._broken = f"vLLM sampled with other weights ({found}) than version {self._version}: "
            self._broken += "was it started again? update the weights"
            raise EngineError(self._broken)
        self._routes = before is not None
        return answer, before

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        for i, p in enumerate(prompts):
            if not p or not 0 <= min(p) <= max(p) < self.config.vocab:
                raise ConfigError(f"prompt {i} is empty, or holds a token outside 0..{self.config.vocab - 1}")
