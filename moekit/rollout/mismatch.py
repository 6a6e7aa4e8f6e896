"""Learner against engine, token by token: how far log-probs are apart, and whether routing or arithmetic did it.

The learner scores the sampled tokens twice: with its own routing, and with the engine's choices replayed. What vanishes
with the replay came from routing flips, at this position or at one that it attends to; what stays is arithmetic (dtype,
kernels, order of sums, other weights). Flips are expected where the k-th and the (k+1)-th score nearly tie, so every
choice comes with that margin.

Axis letters: B rows, T positions in a row, N flat positions, M sampled tokens, L layers that route, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from ..data.batch import IGNORE, Batch
from ..errors import DataError
from ..model.router import Route
from ..model.transformer import Transformer
from .engine import Answer, Rollout

QUANTILES = (0.01, 0.5, 0.99)


@dataclass(frozen=True)
class Mismatch:
    """What `inspect` found.

    tokens: a line for each sampled token: rollout, answer, token (its place), id, version; engine, learner, replayed
        (log-probs); difference = learner - engine = flips + arithmetic; changed (layers in which the position that
        predicts it chose other experts).
    choices: a line for each position and layer whose choice the engine told: layer, agreement (share of the K experts),
        changed, margin.
    """

    tokens: pd.DataFrame
    choices: pd.DataFrame

    @property
    def layers(self) -> pd.DataFrame:
        """By layer: mean agreement, share of changed choices, median margin of changed ones and of the others."""
        c = self.choices
        parts = c.assign(margin_changed=c.margin.where(c.changed), margin_same=c.margin.where(~c.changed))
        how = {"agreement": "mean", "changed": "mean", "margin_changed": "median", "margin_same": "median"}
        return parts.groupby("layer").agg(how)

    def summary(self) -> dict[str, float]:
        """Metrics `mismatch/*`; `vanishes_with_replay` is a share of the mean absolute difference, 0 where there is
        none (below 0: the replay made it worse)."""
        t, c = self.tokens, self.choices
        out = divergence(torch.tensor(t.engine.to_numpy()), torch.tensor(t.learner.to_numpy()))
        total, left = out["difference_abs"], float(t.arithmetic.abs().mean())
        out |= {"flips_abs": float(t.flips.abs().mean()), "arithmetic_abs": left}
        out |= {"vanishes_with_replay": 1 - left / total if total else 0.0}
        out |= {"agreement": float(c.agreement.mean()), "changed": float(c.changed.mean())}
        changed, same = (float(c.margin[c.changed == kind].median()) for kind in (True, False))
        out |= {"margin_changed": changed, "margin_same": same}
        return {f"mismatch/{name}": value for name, value in out.items()}


def divergence(engine_M: Tensor, learner_M: Tensor) -> dict[str, float]:
    """Distances of two log-probs of the same tokens, sampled by the engine: with d = learner - engine and r = e^d,

    mean and largest |d|; k1 = mean(-d) and k3 = mean(r - 1 - d), both estimates of KL(engine || learner); quantiles of
    r, the weight that an importance correction would give. (J. Schulman, "Approximating KL Divergence", 2020.)

    >>> found = divergence(torch.tensor([0.5]).log(), torch.tensor([0.25]).log())
    >>> round(found["k1"], 6), round(found["k3"], 6), round(found["ratio_q50"], 6)
    (0.693147, 0.193147, 0.5)
    """
    d = learner_M.double() - engine_M.double()
    ratio = d.exp()
    out = {"difference_abs": d.abs().mean(), "difference_max": d.abs().max()}
    out |= {"k1": -d.mean(), "k3": (ratio - 1 - d).mean()}
    out |= {f"ratio_q{100 * q:02.0f}": ratio.quantile(q) for q in QUANTILES}
    return {name: float(value) for name, value in out.items()}


def agreement(one_NLK: Tensor, other_NLK: Tensor) -> Tensor:
    """[N, L] float64: the share of the K experts that both chose, in whatever order.

    >>> agreement(torch.tensor([[[0, 1], [2, 3]]]), torch.tensor([[[1, 0], [3, 5]]])).tolist()
    [[1.0, 0.5]]
    """
    return (one_NLK[..., :, None] == other_NLK[..., None, :]).any(-1).double().mean(-1)


def margin(route: Route, gate: str, bias_E: Tensor | None = None) -> Tensor:
    """[N]: how far the K-th score is above the (K+1)-th, the choice's distance from a flip; NaN where K = E.

    Scores are the logits, which order experts as their gates do; with a selection bias they are scores plus bias.
    """
    score_NE, K = route.logits_NE, route.expert_NK.shape[1]
    if bias_E is not None:
        score_NE = (score_NE.sigmoid() if gate == "sigmoid" else route.probs_NE) + bias_E
    if score_NE.shape[1] == K:
        return torch.full_like(score_NE[:, 0], torch.nan)
    best_NK = score_NE.topk(K + 1, -1).values
    return best_NK[:, K - 1] - best_NK[:, K]


@torch.no_grad()
def inspect(model: Transformer, rollouts: Sequence[Rollout], *, temperature: float = 1.0, rows: int = 16) -> Mismatch:
    """Score what an engine sampled with the learner's model, freely routed and with the engine's routes.

    Args:
        model: the learner's weights, whole, at the version that the tokens were sampled from.
        rollouts: with routed experts. Answers without tokens are left out.
        temperature: that the tokens were sampled at. (Top-k or top-p cuts count as a difference.)
        rows: sequences in one forward.

    Raises:
        DataError: no sampled token, or no routes (or those of another model).

    Cost: two forwards over all prompts and answers, no prompt shared.
    """
    found = [(r, a, x, y) for r, x in enumerate(rollouts) for a, y in enumerate(x.answers) if y.ids]
    if not found:
        raise DataError("no answer holds a token; there is nothing to compare")
    want = (len(model.config.moe_layers), model.config.top_k)
    for r, a, rollout, answer in found:
        for told in (rollout.prompt_experts, answer.experts):
            if told is None or told.shape[1:] != want:
                got = "no routed experts" if told is None else f"experts [layers, top_k] = {list(told.shape[1:])}"
                how = f"this model has {list(want)}; use an engine with the capability 'routes' and the same model"
                raise DataError(f"answer {a} to prompt {r} came with {got}, {how}")
    parts = [_compare(model, found[at : at + rows], temperature) for at in range(0, len(found), rows)]
    return Mismatch(*(pd.concat(tables, ignore_index=True) for tables in zip(*parts)))


def _compare(
    model: Transformer, found: list[tuple[int, int, Rollout, Answer]], temperature: float
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tokens and choices of one forward; one document a row."""
    c, device = model.config, model.device
    B, T = len(found), max(len(r.prompt) + len(a.ids) for *_, r, a in found)
    ids, segment = torch.zeros(B, T, dtype=torch.long), torch.full((B, T), -1)
    labels, known_BTLK = torch.full((B, T), IGNORE), torch.full((B, T, len(c.moe_layers), c.top_k), -1)
    for b, (*_, rollout, answer) in enumerate(found):
        first, end = len(rollout.prompt), len(rollout.prompt) + len(answer.ids)
        ids[b, :end], segment[b, :end] = torch.tensor([*rollout.prompt, *answer.ids]), 0
        labels[b, first - 1 : end - 1] = torch.tensor(answer.ids)
        assert rollout.prompt_experts is not None and answer.experts is not None
        known_BTLK[b, :end] = torch.cat((rollout.prompt_experts, answer.experts)).long()
    flat = Batch.make(ids, labels=labels, segment=segment).flat
    known_NLK = known_BTLK.flatten(0, 1)[flat.order_N]
    free = model(flat, record=True, temperature=temperature)
    replayed = model(flat, replay=list(known_NLK.unbind(1)), temperature=temperature)
    routes = free.routes or []
    same_NL = agreement(known_NLK.to(device), torch.stack([r.expert_NK for r in routes], 1)).cpu()
    biases = [model.blocks[layer].moe.router.selection_bias for layer in c.moe_layers]
    margin_NL = torch.stack([margin(r, c.gate, bias) for r, bias in zip(routes, biases)], 1).cpu()
    by_row_M = flat.order_N[flat.label_index_M].argsort()  # answer after answer, token after token
    at_M = flat.label_index_M[by_row_M]
    engine, version = (torch.cat([getattr(a, name) for *_, a in found]) for name in ("logprobs", "version"))
    own, replayed = (o.logprob_M.double().cpu()[by_row_M] for o in (free, replayed))
    columns = {"id": flat.label_N[at_M], "version": version, "engine": engine.double(), "learner": own}
    columns |= {"replayed": replayed, "difference": own - columns["engine"], "flips": own - replayed}
    columns |= {"arithmetic": replayed - columns["engine"], "changed": (same_NL[at_M] < 1).sum(1)}
    names = [(r, a, j) for r, a, _, answer in found for j in range(len(answer.ids))]
    tokens = pd.DataFrame(names, columns=["rollout", "answer", "token"])
    tokens = tokens.assign(**{name: value.numpy() for name, value in columns.items()})
    told_N = known_NLK[:, 0, 0] >= 0
    flips = {"agreement": same_NL[told_N].flatten(), "margin": margin_NL[told_N].double().flatten()}
    choices = pd.DataFrame({"layer": [*c.moe_layers] * int(told_N.sum())} | {k: v.numpy() for k, v in flips.items()})
    return tokens, choices.assign(changed=choices.agreement < 1)
