"""vLLM as a rollout engine, in this process or over HTTP: token ids in, token ids and their log-probs out.

    with start_server("runs/sft/export") as server:                    # moekit.rollout.vllm_http
        engine = VLLMEngine(server.link(), model.config)
        engine.update_weights(model, version=7, mode="in_place")
        rollouts = engine.generate(prompts, Sampling(n=4), prompt_ids=ids)

An update is believed when it is proved: the engine's log-probs of a fixed text are those of the new weights, to within
rounding, and not those of the old ones. vLLM answers "done" to updates that left its experts wrong.

Axis letters: P positions of a prompt, L layers that route, K experts per token.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..checkpoint.export import choose_family
from ..checkpoint.names import Naming, pieces
from ..config import ModelConfig
from ..errors import CapabilityError, ConfigError, EngineError, StorageError
from ..model.transformer import Transformer
from .embedded import DTYPES, EmbeddedEngine
from .engine import Answer, Capabilities, Rollout, Sampling, Told
from .sampling import draw_key
from .stats import Stats
from .vllm_messages import PLAIN, Link, parameters, parse, parse_prompt
from .weight_transfer import Chunk, Sent

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25}  # nats; float32 was seen at 3e-6 when right, above 1 when wrong
PROBE = 300  # tokens: longer than two blocks of vLLM's cache on CPU


class VLLMEngine:
    """An `Engine` on vLLM.

    Args:
        link: `vllm_http.HTTPLink`, or `vllm_http.LocalLink` in process.
        config: shape of the model.
        dtype: that vLLM serves in, "float32" or "bfloat16".
        version: of the weights that vLLM was started with.
        family, naming: as which Hugging Face family, and how experts are named on the way.
        tolerance: of the probe, nats; None = by dtype (`TOLERANCE`).
        need_proof: an update whose weights the probe cannot tell from the old ones raises; else it is counted
            (`unproved`), and held only to the new weights' log-probs.
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
        self.link, self.config, self.dtype, self.initial = link, config, dtype, version
        self.pieces, self.chunk_bytes = pieces(config, choose_family(config, family), naming), chunk_bytes
        self.tolerance, self.need_proof = TOLERANCE[dtype] if tolerance is None else tolerance, need_proof
        self.model = Transformer(config, dtype=DTYPES[dtype], seed=None)
        self.stats, self.unproved, self.gap = Stats(), 0, 0.0
        self._version, self._given, self._broken, self._old = version, False, "", None
        self._gate, self._paused, self._asking, self._stopped = threading.Condition(), False, 0, False
        self._folder = tempfile.mkdtemp(prefix="moekit-vllm-", dir=folder or "/dev/shm")
        generator = torch.Generator().manual_seed(22)
        self._probe = torch.randint(config.vocab, (min(PROBE, config.max_positions - 2),), generator=generator).tolist()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of vLLM and of the folder."""
        self.link.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def capabilities(self) -> Capabilities:
        """Routes where vLLM was started with them; updates in place only."""
        return Capabilities("vllm", True, self.link.routes, True, True, True, False, ("in_place",), ("finish",))

    @property
    def version(self) -> int:
        """Of the weights that serve now."""
        return self._version

    def metrics(self) -> dict[str, float]:
        """What was done since the last call."""
        found, self.stats = self.stats.metrics(), Stats()
        return found | {"probe/gap": self.gap, "probe/unproved": float(self.unproved)}

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, prompt_ids: Sequence[int] | None = None,
        told: Told | None = None,
    ) -> list[Rollout]:  # fmt: skip
        """`sampling.n` answers to each prompt; each has a seed of its own, from (seed, prompt id, sample).

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
        with self._through():
            replies = self.link.ask(requests, told and (lambda done: told(done, len(requests))))
        out = [Rollout(list(p), None, []) for p in prompts]
        for at, (reply, (prompt, _)) in enumerate(zip(replies, requests)):
            answer, before = parse(reply, prompt, self.initial, self.link.routes)
            out[at // sampling.n].answers.append(self._known(answer))
            out[at // sampling.n].prompt_experts = before
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

    def update(self, chunks: Iterable[Chunk], version: int, mode: str = "in_place") -> Sent:
        """Take new weights as chunks of our parameters; all of them must come."""
        own = {n: t for n, t in (*self.model.named_parameters(), *self.model.named_buffers())}
        began, seen = time.perf_counter(), dict.fromkeys(own, 0)
        with torch.no_grad():
            for chunk in chunks:
                own[chunk.name].view(-1)[chunk.start : chunk.start + len(chunk.data)] = chunk.data
                seen[chunk.name] += len(chunk.data)
        if short := [n for n, t in own.items() if seen[n] != t.numel()]:
            raise EngineError(f"an update brought {seen[short[0]]} of {own[short[0]].numel()} elements of {short[0]}")
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
        self.capabilities.need(updates=mode)
        if version == self._version and self._given and not self._broken:
            return Sent()
        if source is not self.model:
            self._take(source.state_dict() if isinstance(source, Transformer) else source)
        want = self.expected() if expected is None else expected
        with self._alone():
            self._old = before = self._old if self._stopped else self._measure()  # a stopped server cannot be asked
            self._broken = f"the update to version {version} is not done; update the weights again"
            try:
                sent = self._send(version)
                began = time.perf_counter()
                self.link.control("resume")
                now = self._measure(version)
                self._prove(want, before, now)
                sent.seconds["verify"] = time.perf_counter() - began
            except BaseException as error:
                self._stop(f"the update to version {version} failed: {error}")
                if isinstance(error, EngineError) or not isinstance(error, Exception):
                    raise
                raise EngineError(self._broken) from error
            self._version, self._given, self._broken, self._old, self._stopped = version, True, "", now, False
        return sent

    def follow(self, version: int) -> None:
        """Another engine on the same server brought it this version."""
        self._version, self._given, self._broken = version, True, ""

    @property
    def probe_ids(self) -> list[int]:
        """The text of the probe."""
        return list(self._probe)

    def expected(self) -> Tensor:
        """The probe's log-probs under the weights that are to be served."""
        own, ids = EmbeddedEngine.of(self.model, lambda: self._version), self._probe
        return own.score([ids[:1]], [[ids[1:]]], Sampling())[0].answers[0].logprobs

    def _take(self, values: Mapping[str, Tensor]) -> None:
        own = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        wrong = [n for n, t in own.items() if n not in values or values[n].shape != t.shape]
        if wrong or values.keys() - own.keys():
            name = (wrong or sorted(values.keys() - own.keys()))[0]
            raise ConfigError(f"the update's {name} is missing, unknown or of another shape; send every parameter")
        with torch.no_grad():
            for name, t in own.items():
                t.copy_(values[name])

    def _send(self, version: int) -> Sent:
        seconds: dict[str, float] = {"wire": 0.0, "load": 0.0}
        own, size = dict(self.model.named_parameters()), 0
        self.link.control("pause", mode="wait")
        self.link.control("init", init_info={"root": self._folder})
        self.link.control("start")
        for at, files in enumerate(self._files()):
            began, path = time.perf_counter(), Path(self._folder) / f"{version}-{at}.safetensors"
            values = {p.name: own[p.parameter].detach().view(-1)[p.start : p.stop].view(p.shape).cpu() for p in files}
            need, free = sum(v.nbytes for v in values.values()), shutil.disk_usage(self._folder).free
            try:
                if need + (1 << 16) > free:
                    raise StorageError(f"{self._folder} needs {need:,} bytes and has {free:,} free; make room, or "
                                       "give a smaller chunk_bytes or another folder")  # fmt: skip
                save_file(values, path)
                wrote = time.perf_counter()
                info = {"file": path.name, "bytes": path.stat().st_size, "tensors": len(self.pieces)}
                self.link.control("update", update_info=info)
            finally:
                path.unlink(missing_ok=True)
            size, seconds["wire"] = size + need, seconds["wire"] + wrote - began
            seconds["load"] += time.perf_counter() - wrote
        began = time.perf_counter()
        self.link.control("finish", weight_version=str(version))
        self._reset()  # after the last tensor: keys of old weights are of no use to anybody
        seconds["load"] += time.perf_counter() - began
        return Sent(size, seconds)

    def _reset(self) -> None:
        if self.link.control("reset").get("success") is not True:
            raise EngineError("vLLM did not empty its prefix cache: it still holds keys of the old weights")

    def _files(self) -> Iterator[list[Any]]:
        part, size, width = list[Any](), 0, DTYPES[self.dtype].itemsize
        for piece in self.pieces:
            more = (piece.stop - piece.start) * width
            if part and size + more > self.chunk_bytes:
                yield part
                part, size = [], 0
            part, size = [*part, piece], size + more
        yield part

    def _score(self, sequences: Sequence[list[int]]) -> list[Tensor]:
        replies = self.link.ask([(ids, {**PLAIN, "prompt_logprobs": 0}) for ids in sequences])
        return [parse_prompt(reply, ids) for reply, ids in zip(replies, sequences)]

    def _measure(self, version: int | None = None) -> Tensor:
        """The probe's log-probs as vLLM gives them, and once more for its end, read through the prefix cache."""
        ids = self._probe
        (whole,) = self._score([ids])
        (reply,) = self.link.ask([(ids[:-1], {**PLAIN, "allowed_token_ids": None, "logprobs": -1})])
        answer, _ = parse(reply, ids[:-1], self.initial, self.link.routes)
        if version is not None and answer.version.tolist() != [version]:
            raise EngineError(f"vLLM samples with version {answer.version.tolist()}, not {version}")
        top = {t["token_id"]: t["logprob"] for t in reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}
        return torch.cat((whole, torch.tensor([top[ids[-1]]])))

    def _prove(self, want: Tensor, before: Tensor | None, now: Tensor) -> None:
        def gap(a: Tensor, b: Tensor) -> float:
            return float((a - b).abs().nan_to_num(torch.inf).max())

        want, limit = torch.cat((want, want[-1:])), self.tolerance
        self.gap = gap(now, want)
        if self.gap > limit:
            raise EngineError(
                f"vLLM does not serve the weights that it was sent: log-probs of the probe differ by {self.gap:.3g}, "
                f"more than {limit:g} (through its prefix cache by {gap(now[-1:], want[-1:]):.3g})"
            )
        if before is None or gap(want, before) <= limit:
            if self.need_proof:
                raise EngineError(f"the probe cannot tell the new weights from the old ones to within {limit:g}: "
                                  "update when they have moved, or set need_proof=False")  # fmt: skip
            self.unproved += 1
        elif gap(now, before) <= limit:
            raise EngineError("vLLM still serves the old weights")

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

    def _stop(self, why: str) -> None:
        self._broken, self._stopped = f"{why}; update the weights again", self._old is not None
        for what, body in (("update", {"update_info": {"abandon": True}}), ("pause", {"mode": "abort"})):
            try:
                self.link.control(what, **body)
            except EngineError:  # it may be gone, or have no session
                pass

    def _known(self, answer: Answer) -> Answer:
        if set(answer.version.tolist()) - {self._version}:
            self._broken = (
                f"vLLM sampled with version {answer.version.tolist()[-1]}, not {self._version}: was it started "
            )
            self._broken += "again? update the weights"
            raise EngineError(self._broken)
        return answer

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        for i, p in enumerate(prompts):
            if not p or not 0 <= min(p) <= max(p) < self.config.vocab:
                raise ConfigError(f"prompt {i} is empty, or holds a token outside 0..{self.config.vocab - 1}")
