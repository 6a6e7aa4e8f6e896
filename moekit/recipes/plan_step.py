"""What one step of a workload runs, from its config and lengths: microbatches of every pass on every rank, and rows.

Rows are made, packed, shared out and cut by the functions that the recipes call, on made-up tokens of the right number,
so that a plan for the lengths of a real step has exactly its microbatches.

Axis letters: N positions of a microbatch, P positions whose expert rows run, K experts per position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..config import LearnerConfig, ModelConfig, RunConfig, SFTConfig
from ..data.batch import Batch
from ..data.chat import Document
from ..data.families import Sample, family_rows, family_size
from ..data.pack import build_rows
from ..data.preference import Pair, Pairs
from ..data.stream import RowStream, share
from ..errors import ConfigError
from ..measure.plan import Microbatch
from ..workloads import DPOConfig, PairConfig, PPOConfig, RewardConfig, RLConfig
from . import pairs, rl

Lengths = tuple[tuple[int, tuple[int, ...]], ...]  # tokens of every prompt, and of each answer to it
Ranks = list[list[Microbatch]]  # microbatches of every data-parallel rank


@dataclass(frozen=True)
class Step:
    """One step (a rollout, with GRPO and PPO) of a workload on prompts and answers of known lengths.

    `lengths`: of the whole step, over all ranks; of `SFTConfig` of the data set, whose rows its steps take.
    """

    config: RunConfig
    lengths: Lengths
    full: bool = False  # supervised fine-tuning on rows that are one document each, every position labelled

    @staticmethod
    def of(config: RunConfig, lengths: Any = None) -> Step:
        """The step of a config; what it does not say is taken to be as long as it may be.

        Args:
            lengths: one (prompt, answer) for all, in tokens; or a (prompt, [answers]) for each prompt. None = rows of
                one document with every position labelled (SFT), the longest prompts and answers (GRPO, PPO), pairs
                that fill a row, half of it with the prompt (DPO, reward model).
        Raises:
            ConfigError: a config of no known workload; a number below 1; a family that its row does not hold.
        """
        kinds = (SFTConfig, PairConfig, RLConfig)
        if not isinstance(config, kinds) or type(config) in (PairConfig, RLConfig):
            raise ConfigError(f"workload={config!r} is no SFTConfig, DPOConfig, RewardConfig, GRPOConfig or PPOConfig")
        T, count, answers, pair = config.row_length, 1, 1, isinstance(config, PairConfig)
        if isinstance(config, SFTConfig):
            most = (1, T - 1)
        elif isinstance(config, PairConfig):
            prompt = max(1, T // 2)
            shared = prompt - 1 if config.share_prompt else 0
            count, answers, most = config.batch_pairs, 2, (prompt, (T + shared) // 2 - prompt)
        else:
            count, answers, most = config.prompts, config.group, (config.max_prompt, config.max_new_tokens)
        try:
            given: Any = most if lengths is None else lengths
            if len(given) == 2 and all(isinstance(n, int) for n in given):
                if isinstance(config, SFTConfig):
                    packed = config.rows.rows == "packed"
                    count = config.batch_rows * (max(1, T // max(1, sum(given))) if packed else 1)
                given = ((given[0], (given[1],) * answers),) * count
            found = tuple((int(p), tuple(map(int, a))) for p, a in given)
        except (TypeError, ValueError):
            how = "give (prompt, answer), or a (prompt, [answers]) for each prompt, in tokens"
            raise ConfigError(f"lengths={lengths!r}: {how}") from None
        rollout = isinstance(config, RLConfig)
        least, many = (0, None) if rollout else (1, answers)
        for p, a in found or ((0, ()),):
            if p < 1 or min(a, default=-1) < least or (many and len(a) != many):
                what = f"a prompt needs 1 token at least, and {many or 'some'} answers"
                raise ConfigError(f"lengths: a prompt of {p} tokens with answers of {list(a)}; {what}")
            size = family_size(p, a, config.share_prompt) if pair else p + max(a)  # type: ignore[attr-defined]
            if size > T and (pair or rollout):
                what = f"lengths: a prompt of {p} tokens with answers of {list(a)} takes {size} positions"
                raise ConfigError(f"{what}, a row has length={T}; make rows longer, or lengths shorter")
        return Step(config, found, full=isinstance(config, SFTConfig) and lengths is None)

    @property
    def updates(self) -> int:
        """Optimizer steps."""
        return self.config.updates if isinstance(self.config, RLConfig) else 1

    @property
    def scores(self) -> dict[str, bool]:
        """Which passes without gradient score the answers, by component, as the recipes decide it."""
        c = self.config
        if isinstance(c, RLConfig):
            again = isinstance(c, PPOConfig) or c.updates > 1 or c.importance_cap is not None
            return {"policy": again or bool(c.kl and c.kl_in == "reward"), "reference": bool(c.kl),
                    "critic": isinstance(c, PPOConfig)}  # fmt: skip
        frozen = isinstance(c, DPOConfig) and c.reference == "resident"
        return {"policy": False, "reference": frozen, "critic": False}

    def trained(self, dp: int) -> list[Ranks]:
        """Microbatches of every optimizer step."""
        return _trained(self, dp)

    def scored(self, dp: int) -> Ranks:
        """Microbatches of a pass over everything without gradient."""
        return _scored(self, dp)

    def mine(self, rank: int, world: int) -> Lengths:
        """The prompts that a rank samples answers to."""
        n, more = divmod(len(self.lengths), world)  # as numpy.array_split
        start = rank * n + min(rank, more)
        return self.lengths[start : start + n + (rank < more)]

    def rows(self, shape: ModelConfig, learner: LearnerConfig, critic: LearnerConfig, world: int) -> dict[str, int]:
        """Routed rows by component/pass, over all ranks and layers: what the counters of such a step count."""
        out, K, at = dict[str, int](), shape.top_k, [i == shape.layers - 1 for i in shape.moe_layers]

        def rows(some: Sequence[Ranks], how: LearnerConfig) -> int:
            every = [m for ranks in some for rank in ranks for m in rank]
            return K * sum(at.count(last) * sum(m.routed(how.elide, last) for m in every) for last in (False, True))

        for name in ("policy", "critic"):
            how = critic if name == "critic" else learner
            if name == "policy" or self.scores["critic"]:
                n = rows(self.trained(world // how.pp), how)
                again = n * (how.recompute != "none")
                out |= {f"{name}/forward": n, f"{name}/recompute": again, f"{name}/backward": n}
        for name in (k for k, needed in self.scores.items() if needed):
            how = critic if name == "critic" else learner
            out[f"{name}/score"] = rows([self.scored(world // how.pp)], how)
        if isinstance(self.config, RLConfig):  # the last layer reads the last token of a prompt only
            prompts, some = sum(p for p, _ in self.lengths), len(self.lengths)
            out["engine/prefill"] = K * sum(some if last else prompts for last in at)
            out["engine/decode"] = K * len(at) * self.decoded
        return out

    @property
    def decoded(self) -> int:
        """Tokens that are fed back to the engine: the first of an answer follows from its prompt's pass."""
        return sum(max(0, n - 1) for _, a in self.lengths for n in a)


@lru_cache(maxsize=256)
def _trained(step: Step, dp: int) -> list[Ranks]:
    c = step.config
    if isinstance(c, RLConfig):
        parts = [p for e in range(c.epochs) for p in rl.minibatches(len(step.lengths), c.minibatches, c.seed, 0, e)]
        return [_answers(step, dp, frozenset(part)) for part in parts]
    if isinstance(c, PairConfig):
        data: Any = Pairs([Pair([0] * p, [0] * a[0], [0] * a[1]) for p, a in step.lengths], c.length, c.share_prompt,
                          labels="last" if isinstance(c, RewardConfig) else "answer")  # fmt: skip
        chosen = RowStream(data, c.batch_pairs, c.seed).take()
        return [[[Microbatch.of(b.flat) for b in pairs.microbatches(data, chosen, c, _at(r, dp))] for r in range(dp)]]
    assert isinstance(c, SFTConfig)
    if step.full:
        parts = [share(np.arange(c.batch_rows), r, dp, c.microbatch_rows) for r in range(dp)]
        return [[[Microbatch.full(len(p), c.row_length) for p in some] for some in parts]]
    documents = [Document(np.zeros(p + a[0]), np.arange(p + a[0]) >= p) for p, a in step.lengths]
    rows = build_rows(documents, c.rows)
    chosen = RowStream(rows, c.batch_rows, c.rows.seed, c.rows.shuffle).take()
    return [_cut(rows.batch(chosen), dp, c.microbatch_rows, trim=False)]


@lru_cache(maxsize=256)
def _scored(step: Step, dp: int) -> Ranks:
    return _answers(step, dp, None) if isinstance(step.config, RLConfig) else step.trained(dp)[0]


def _answers(step: Step, dp: int, families: frozenset[int] | None) -> Ranks:
    """As `rl.microbatches`, for all ranks at once."""
    c = step.config
    assert isinstance(c, RLConfig)
    some = None if families is None or len(families) == len(step.lengths) else families
    return _families(step.lengths, c.length, c.share_prompt, max(1, c.microbatch_tokens // c.length), dp, some)


@lru_cache(maxsize=256)  # by what it depends on: a plan tries many configs whose rows are the same
def _families(
    lengths: Lengths, length: int, shared: bool, each: int, dp: int, families: frozenset[int] | None
) -> Ranks:
    return _cut(_rows(lengths, length, shared, families), dp, each, trim=True)


@lru_cache(maxsize=16)
def _rows(lengths: Lengths, length: int, shared: bool, families: frozenset[int] | None) -> Batch:
    some = lambda i, a: [[0] * (n if families is None or i in families else 0) for n in a]
    return family_rows([Sample([0] * p, some(i, a)) for i, (p, a) in enumerate(lengths)], length, shared)


def _cut(whole: Batch, dp: int, each: int, trim: bool) -> Ranks:
    """Rows shared out; microbatches of rows that look alike are made once."""
    looks = [hash((s.numpy().tobytes(), p.numpy().tobytes(), l.numpy().tobytes()))
             for s, p, l in zip(whole.segment, whole.parent, whole.labels != whole.ignore_index)]  # fmt: skip
    known: dict[tuple[int, ...], Microbatch] = {}

    def made(part: np.ndarray) -> Microbatch:
        key = tuple(looks[i] for i in part)
        if key not in known:
            batch = whole.take(part.tolist())
            known[key] = Microbatch.of((batch.trim() if trim else batch).flat)
        return known[key]

    return [[made(part) for part in share(np.arange(whole.rows), r, dp, each)] for r in range(dp)]


def _at(rank: int, size: int) -> Any:
    """What `pairs.microbatches` reads of a layout."""
    return SimpleNamespace(mesh=SimpleNamespace(dp=SimpleNamespace(rank=rank, size=size)))
