"""What every rollout engine takes and gives: sampling settings, answers with their log-probs, routes and versions.

Token ids are the actions: what was sampled is trained on as it is, and text is never encoded again. The stop token that
was sampled belongs to the answer; none is ever added.

Axis letters: P positions of a prompt, L layers that route, K experts per token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..config import Config, _need
from ..errors import CapabilityError, ConfigError, DataError

Finish = Literal["stop", "length", "abort"]
Told = Callable[[int, int], None]  # told(answers done, answers in all)
REMEDY = {
    "routes": "train without routing replay, or take the embedded engine",
    "updates": "take a mode that is listed, or share the learner's own model",
    "running": "pause until the running answers are finished, then update",
    "score": "score with the learner (`Forward.score`)",
}


@dataclass(frozen=True)
class Sampling(Config):
    """How answers are drawn.

    Tokens come from softmax(logits / temperature), cut to the `top_k` largest, then to the smallest set of most likely
    tokens whose probabilities (after top-k) reach `top_p`, and renormalised; log-probs are of that distribution.
    `temperature=0` takes the most likely token and reports log softmax(logits) of it, untempered and uncut: the limit
    of the tempered one is no density, so a policy gradient needs temperature > 0 (`check_trainable`).

    A draw depends on (seed, the caller's prompt id, sample, position in the answer) and on nothing else.
    """

    max_new_tokens: int = 128
    n: int = 1  # answers to each prompt
    temperature: float = 1.0
    top_k: int = 0  # 0 = all
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    seed: int = 0

    def _check(self) -> None:
        _need(self.max_new_tokens >= 1, f"Sampling.max_new_tokens={self.max_new_tokens} must be at least 1")
        _need(self.n >= 1, f"Sampling.n={self.n} must be at least 1 answer")
        _need(0 <= self.temperature < float("inf"), f"Sampling.temperature={self.temperature} must be >= 0 and finite")
        _need(self.top_k >= 0, f"Sampling.top_k={self.top_k} must be >= 0; 0 keeps every token")
        _need(0 < self.top_p <= 1, f"Sampling.top_p={self.top_p} must be in (0, 1]; 1 keeps every token")
        _need(all(self.stop_sequences), "Sampling.stop_sequences holds an empty sequence, which would stop at once")

    def check_trainable(self) -> None:
        """Raises ConfigError: answers drawn like this have no distribution to take a gradient of."""
        _need(
            self.temperature > 0,
            "Sampling.temperature=0 is no distribution to train on; set a temperature > 0, the same as the objective's",
        )

    def stopped(self, ids: Sequence[int]) -> bool:
        """Whether an answer ends with a stop token or a stop sequence.

        >>> [Sampling(stop_ids=(2,), stop_sequences=((7, 8),)).stopped(i) for i in ([5, 2], [7, 8], [8], [])]
        [True, True, False, False]
        """
        if not ids:
            return False
        return ids[-1] in self.stop_ids or any(list(s) == list(ids[-len(s) :]) for s in self.stop_sequences)


@dataclass
class Answer:
    """What was sampled after a prompt."""

    ids: list[int]  # the sampled stop token included
    logprobs: Tensor  # [len] float32, of the distribution really sampled from
    experts: Tensor | None  # [len, L, K] int16, choices at the position that read token j; the last is not read: -1
    version: Tensor  # [len] int64, of the weights that sampled token j
    finish: Finish

    def __post_init__(self) -> None:
        lengths = {"logprobs": len(self.logprobs), "version": len(self.version)}
        lengths |= {} if self.experts is None else {"experts": len(self.experts)}
        for name, length in lengths.items():
            if length != len(self.ids):
                raise DataError(f"an answer of {len(self.ids)} tokens has {length} {name}; they must be aligned")

    @property
    def terminated(self) -> bool:
        """Whether the policy ended it; else it was cut."""
        return self.finish == "stop"

    def mask(self, width: int) -> Tensor:
        """[width] int64: 1 where there is a token of the answer, the sampled stop token included.

        >>> Answer([8, 9, 2], torch.zeros(3), None, torch.zeros(3), "stop").mask(4).tolist()
        [1, 1, 1, 0]
        """
        if width < len(self.ids):
            raise DataError(f"an answer of {len(self.ids)} tokens does not fit into {width}")
        return (torch.arange(width) < len(self.ids)).long()


@dataclass
class Rollout:
    """A prompt and its answers."""

    prompt: list[int]
    prompt_experts: Tensor | None  # [P, L, K] int16
    answers: list[Answer]


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do; a demand that it cannot meet raises."""

    engine: str
    logprobs: bool = False  # of the distribution sampled from
    routes: bool = False  # routed experts of every token
    versions: bool = False  # weight version of every token
    seeds: bool = False  # draws that depend on nothing but seed, prompt id, sample and position
    score: bool = False
    stop_sequences: bool = False
    updates: tuple[str, ...] = ()  # modes of update_weights
    running: tuple[str, ...] = ()  # what may happen to running answers at an update
    why: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by what it has not: the reason

    def need(self, **wants: bool | str) -> None:
        """Raise unless every wish is met; a wish is True, or one of the named modes.

        Raises CapabilityError: names engine, wish and remedy.
        >>> Capabilities("mine", logprobs=True, updates=("atomic",)).need(logprobs=True, updates="atomic")
        """
        known = [f.name for f in dataclasses.fields(self)][1:-1]
        for name, want in wants.items():
            if name not in known:
                raise ConfigError(f"no engine has a capability {name!r}; there are {', '.join(known)}")
            have = getattr(self, name)
            if not (want in have if isinstance(have, tuple) else have or not want):
                has = f"only {', '.join(have) or 'none'}" if isinstance(have, tuple) else "not at all"
                remedy = self.why.get(name, "") + "; " * (name in self.why)
                remedy += REMEDY.get(name, "choose another engine, or do without")
                raise CapabilityError(
                    f"engine {self.engine!r} was asked for {name}={want!r} and has it {has}; {remedy}"
                )


@runtime_checkable
class Engine(Protocol):
    """What samples answers. Weights change between tokens, never within one."""

    @property
    def capabilities(self) -> Capabilities:
        """What can be asked for."""
        ...

    @property
    def version(self) -> int:
        """Of the weights that serve now: the learner's step at the transfer."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, prompt_ids: Sequence[int] | None = None,
        told: Told | None = None,
    ) -> list[Rollout]:  # fmt: skip
        """Answers to each prompt, in order. `prompt_ids` key the draws; absent = 0, 1, ..."""
        ...

    def score(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[Sequence[int]]], sampling: Sampling
    ) -> list[Rollout]:
        """Given answers with the log-probs and experts that the engine's weights give them."""
        ...

    def update_weights(self, source: Mapping[str, Tensor] | Any, version: int, mode: str = "atomic") -> None:
        """Take new weights, by parameter name."""

    def pause(self) -> None:
        """Sample nothing more until `resume`."""

    def resume(self) -> None:
        """Go on."""
