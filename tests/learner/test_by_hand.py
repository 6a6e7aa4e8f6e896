"""DESIGN 4 written down once more, row by row and in loops: random small models, batches and objectives in float64.

Nothing here uses the flat order, a kernel or a divisor of the library: attention by its rule for (t, j), experts one
position after the other, router losses document by document with shared prompts written out, losses from their
formulas. Learner and this must agree on every loss and on the gradient of every parameter.
"""

import math
import random

import pytest
import torch
import torch.nn.functional as F

from moekit.config import LearnerConfig, ModelConfig, RouterLossConfig
from moekit.data.batch import Batch
from moekit.data.families import Sample, family_rows
from moekit.learner.learner import Learner
from moekit.learner.mesh import World
from moekit.model.transformer import Transformer
from moekit.objectives.dpo import DPO
from moekit.objectives.grpo import GRPO
from moekit.objectives.ppo import ValueLoss
from moekit.objectives.reward_model import RewardModel
from moekit.objectives.sft import SFT

F64 = torch.float64
DENOMINATORS = ("global_tokens", "sequence_mean", "constant", "kept_plus_filtered")


# ------------------------------------------------------------------ the model, one row at a time
def norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def turn(x_THd, position_T, theta):
    half = x_THd.shape[-1] // 2
    angle = position_T[:, None].to(F64) * theta ** (-torch.arange(half, dtype=F64) / half)
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x_THd[..., :half], x_THd[..., half:]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def swiglu(x, gate_up, down):
    gate, up = (x @ gate_up.T).chunk(2, -1)
    return (F.silu(gate) * up) @ down.T


def sees(t, j, segment, parent):
    """Position t attends to j <= t in its own segment or in its parent segment; padding to itself only."""
    if segment[t] < 0:
        return t == j
    return j <= t and (segment[j] == segment[t] or (parent[t] >= 0 and segment[j] == parent[t]))


def row_forward(p, c, b, row, bias):
    """Final hidden states [T, D], and (logits, probabilities, choices) by routing layer."""
    segment, parent, T = b.segment[row].tolist(), b.parent[row].tolist(), b.length
    hidden = torch.tensor([[not sees(t, j, segment, parent) for j in range(T)] for t in range(T)])
    x, routes, (H, G, d) = p["embed.weight"][b.input_ids[row]], {}, (c.heads, c.kv_heads, c.head_dim)
    for i in range(c.layers):
        w = {name.removeprefix(f"layers.{i}."): t for name, t in p.items() if name.startswith(f"layers.{i}.")}
        q, k, v = (norm(x, w["attention_norm.weight"], c.norm_eps) @ w["attention.qkv.weight"].T).split(
            (H * d, G * d, G * d), -1
        )
        shape = (lambda t, n: t.view(T, n, d)) if c.qk_norm == "head" else (lambda t, n: t)
        if c.qk_norm != "none":
            q = norm(shape(q, H), w["attention.q_norm.weight"], c.norm_eps)
            k = norm(shape(k, G), w["attention.k_norm.weight"], c.norm_eps)
        q, k = (turn(t.reshape(T, n, d), b.position[row], c.rope_theta) for t, n in ((q, H), (k, G)))
        heads = [
            (q[:, h] @ k[:, h * G // H].T / d**0.5).masked_fill(hidden, -math.inf).softmax(-1)
            @ v.view(T, G, d)[:, h * G // H]
            for h in range(H)
        ]
        x = x + torch.cat(heads, -1) @ w["attention.out.weight"].T
        y = norm(x, w["ffn_norm.weight"], c.norm_eps)
        if i in c.dense_layers:
            x = x + swiglu(y, w["dense.gate_up.weight"], w["dense.down.weight"])
            continue
        logits = y @ w["moe.router.weight"].T
        score = torch.sigmoid(logits) if c.gate == "sigmoid" else logits.softmax(-1)
        chosen = (score.detach() + bias.get(i, 0.0)).sort(dim=-1, descending=True).indices[:, : c.top_k]
        gate = (logits if c.gate == "topk_softmax" else score).gather(-1, chosen)
        gate = gate.softmax(-1) if c.gate == "topk_softmax" else gate
        gate = gate / gate.sum(-1, keepdim=True) if c.normalize_gates else gate
        x = x + torch.stack([
            sum(g * swiglu(y[t], w["moe.gate_up"][e], w["moe.down"][e]) for g, e in zip(gate[t], chosen[t].tolist()))
            for t in range(T)
        ])  # fmt: skip
        if c.shared_width:
            x = x + swiglu(y, w["moe.shared.gate_up.weight"], w["moe.shared.down.weight"])
        routes[i] = logits, score / score.sum(-1, keepdim=True), chosen
    return norm(x, p["final_norm.weight"], c.norm_eps), routes


# ------------------------------------------------------------------ the losses
def whole_documents(b, row):
    """Places of every document of a row, a child's with its parent's before them, a parent's not by itself."""
    where = {s: (b.segment[row] == s).nonzero()[:, 0].tolist() for s in b.segment[row].unique().tolist() if s >= 0}
    up = {s: int(b.parent[row, places[0]]) for s, places in where.items()}
    return [where.get(up[s], []) + places for s, places in where.items() if s not in up.values()]


def by_hand(p, c, b, objective, scope, bias):
    """(loss or None, balance, z)."""
    said, balance, z, positions, labelled = {}, 0.0, 0.0, 0, b.labels != b.ignore_index
    tau = getattr(objective, "temperature", 1.0)
    for row in range(b.rows):
        x, routes = row_forward(p, c, b, row, bias)
        out = x @ p["embed.weight" if c.tied_head else "head.weight"].T / tau
        for t in labelled[row].nonzero()[:, 0].tolist():
            said[row, t] = out[t, 0] if c.value_head else out[t].log_softmax(-1)[b.labels[row, t]]
        groups = [[t for t in d if scope != "supervised" or labelled[row, t]] for d in whole_documents(b, row)]
        if scope == "all":
            groups.append([t for t in range(b.length) if b.segment[row, t] < 0])
        for group in filter(None, groups):
            positions += len(group)
            for logits, probs, chosen in routes.values():
                f = chosen[group].reshape(-1).bincount(minlength=c.experts).to(F64) / (len(group) * c.top_k)
                balance = balance + len(group) * c.experts * (f * probs[group].mean(0)).sum()
                z = z + sum(logits[t].logsumexp(0) ** 2 for t in group)
    balance, z = balance / max(positions, 1), z / max(positions, 1)
    return (objective_by_hand(objective, b, said) if said else None), balance, z


def objective_by_hand(o, b, said):
    extra = lambda name, at: b.extra[name][at].to(F64)
    documents, pairs, loss = {}, {}, 0.0
    for at in said:
        documents.setdefault((at[0], int(b.segment[at])), []).append(at)
    if isinstance(o, (DPO, RewardModel)):
        for at in said:
            pair = pairs.setdefault((at[0], int(b.extra["family"][at])), {1: [], 0: []})
            pair[int(b.extra["chosen"][at])].append(at)
        for pair in pairs.values():
            if isinstance(o, RewardModel):
                good, bad = said[pair[1][0]], said[pair[0][0]]
                margin = extra("margin", pair[1][0])
                loss = loss - torch.sigmoid(good - bad - margin).log() + o.center * (good + bad) ** 2
                continue
            size = lambda places: len(places) if o.length_normalised else 1
            good, bad = (sum(said[at] - extra("ref_logprob", at) for at in pair[k]) / size(pair[k]) for k in (1, 0))
            delta = good - bad
            ipo = o.kind == "ipo"
            loss = loss + ((delta - 1 / (2 * o.beta)) ** 2 if ipo else -torch.sigmoid(o.beta * delta).log())
        return loss / len(pairs)
    divisor = {
        "global_tokens": lambda n: len(said), "sequence_mean": lambda n: len(documents) * n,
        "constant": lambda n: len(documents) * o.constant_length,
        "kept_plus_filtered": lambda n: len(said) + b.removed * (b.length - 1),
    }[o.denominator]  # fmt: skip
    for places in documents.values():
        moved = [said[at] - extra("old_logprob", at) for at in places] if isinstance(o, GRPO) else []
        for at, d in zip(places, moved or places):
            if isinstance(o, SFT):
                term = -said[at]
            elif isinstance(o, ValueLoss):
                old, goal = extra("old_value", at), extra("return", at)
                near = torch.minimum(torch.maximum(said[at], old - o.clip), old + o.clip)
                term = torch.maximum((said[at] - goal) ** 2, (near - goal) ** 2) / 2
            else:
                ratio = {"token": d, "sequence": sum(moved) / len(moved), "sequence_sum": sum(moved)}[o.ratio].exp()
                gain, far = extra("advantage", at), ratio.clamp(1 - o.clip_low, 1 + o.clip_high)
                term = -torch.minimum(ratio * gain, far * gain) * extra("weight", at)
                q = extra("ref_logprob", at) - said[at]
                term = term + o.beta * {"k1": -q, "k2": q * q / 2, "k3": q.exp() - 1 - q}[o.kl]
            loss = loss + term / divisor(len(places))
    return loss


# ------------------------------------------------------------------ random cases
def documents_in_rows(r, g, vocab):
    """Rows of packed, interleaved and shared documents, of one, and of none; some labels, some documents filtered."""
    B, T = r.randint(1, 4), r.randint(4, 10)
    segment, parent, filtered, removed = torch.full((B, T), -1), torch.full((B, T), -1), torch.zeros(B, T).bool(), 0
    for row in range(B):
        kind, used = r.choice(("packed", "interleaved", "shared", "one", "none")), r.randint(2, T)
        if kind == "one":
            segment[row, :used] = 0
        elif kind == "interleaved":
            segment[row, :used] = torch.tensor([r.randint(0, 2) for _ in range(used)])
        elif kind != "none":
            segment[row, :used] = torch.tensor([0] + [r.random() < 0.4 for _ in range(used - 1)]).cumsum(0)
        if kind == "shared":
            parent[row, segment[row] > 0] = 0
        for s in segment[row].unique().tolist():
            if s >= 0 and r.random() < 0.15:
                filtered[row, segment[row] == s], removed = True, removed + 1
    ids = torch.randint(0, vocab, (B, T), generator=g)
    labels = Batch.make(ids, segment=segment).labels
    labels[torch.rand(B, T, generator=g) < r.choice((0.0, 0.3, 0.9))] = -100
    return Batch.make(ids, labels=labels, segment=segment, parent=parent, filtered=filtered, removed=removed)


def families_in_rows(r, g, vocab, kind):
    draw, ids = lambda n: torch.randn(n, generator=g, dtype=F64), lambda n: torch.randint(0, vocab, (n,), generator=g)
    samples = []
    for _ in range(r.randint(2, 4)):
        answers = [ids(r.randint(1, 4)).tolist() for _ in range(2 if kind in ("dpo", "reward") else r.randint(1, 4))]
        fields = []
        for j, n in enumerate(1 if kind == "reward" else len(a) for a in answers):
            fields.append({
                "dpo": {"chosen": [float(j == 0)] * n, "ref_logprob": draw(n) - 3},
                "reward": {"chosen": [float(j == 0)] * n, "margin": draw(n).abs()},
                "critic": {"return": draw(n), "old_value": draw(n) / 10},
                "grpo": {"advantage": draw(1).expand(n), "old_logprob": draw(n) / 3 - 3, "weight": draw(n).abs(),
                         "ref_logprob": draw(n) / 3 - 3},
            }[kind])  # fmt: skip
        samples.append(Sample(ids(r.choice((1, 2, 5))).tolist(), answers, fields))
    labels, pairs = "last" if kind == "reward" else "answer", kind in ("dpo", "reward")
    return family_rows(samples, 16, r.random() < 0.8, whole=pairs, labels=labels)


def random_case(seed):
    """A model's shape, a batch and an objective."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    kind = ("sft", "dpo", "grpo", "critic", "reward")[seed % 5]
    value, layers, denominator = kind in ("critic", "reward"), r.choice((2, 3)), r.choice(DENOMINATORS)
    shape = ModelConfig(
        vocab=17, width=8, layers=layers, heads=2, kv_heads=r.choice((1, 2)), experts=4, top_k=r.randint(1, 3),
        expert_width=6, dense_layers=r.choice(((), (0,), (layers - 1,))), dense_width=10, shared_width=r.choice((0, 6)),
        gate=r.choice(("softmax", "sigmoid", "topk_softmax")), normalize_gates=r.random() < 0.5, value_head=value,
        selection_bias=r.random() < 0.5, qk_norm=r.choice(("none", "full", "head")), init_std=0.5,
        tied_head=not value and r.random() < 0.5,
    )  # fmt: skip
    divided = {"denominator": denominator, "constant_length": 7 if denominator == "constant" else None}
    level, kl = r.choice(("token", "sequence", "sequence_sum")), r.choice(("k1", "k2", "k3"))
    objective = {
        "sft": SFT(**divided),
        "dpo": DPO(kind=r.choice(("sigmoid", "ipo")), length_normalised=r.random() < 0.5),
        "grpo": GRPO(ratio=level, beta=r.choice((0.0, 0.1)), kl=kl, temperature=r.choice((1.0, 0.7)), **divided),
        "critic": ValueLoss(**divided),
        "reward": RewardModel(center=r.choice((0.0, 0.01))),
    }[kind]
    batch = documents_in_rows(r, g, 17) if kind == "sft" else families_in_rows(r, g, 17, kind)
    return r, g, shape, objective, batch


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_the_learner_is_what_design_says(seed):
    r, g, shape, objective, batch = random_case(seed)
    model, bias = Transformer(shape, dtype=F64, seed=seed), {}
    for i, block in model.blocks.items():
        if block.routes and shape.selection_bias:
            bias[i] = block.moe.router.selection_bias.copy_(torch.randn(4, generator=g) / 10).double()
    p = {name: t.detach().clone().requires_grad_() for name, t in model.named_parameters()}
    scope = r.choice(("all", "valid", "supervised"))
    router = RouterLossConfig(balance=r.choice((0.0, 0.05)), z=r.choice((0.0, 0.02)), scope=scope)
    elide = "none" if scope == "all" else r.choice(("none", "padding", "padding+last_layer"))
    config = LearnerConfig(router=router, elide=elide, clip_norm=None, recompute=r.choice(("none", "moe", "block")))

    learner = Learner(model, objective, config, World())
    got = learner.step(batch.split(r.randint(1, 3)))
    loss, balance, z = by_hand(p, shape, batch, objective, scope, bias)
    if loss is None:  # nothing to learn from: the router's losses do not move it either
        assert got["loss/total"] == 0 and got["step/skipped"] == 1 and got["grad/norm"] == 0
        return
    total = loss + router.balance * balance + router.z * z
    found = torch.autograd.grad(total, list(p.values()), allow_unused=True, materialize_grads=True)
    assert got[f"loss/{learner.name}"] == pytest.approx(loss.item(), rel=1e-10)
    assert got["loss/total"] == pytest.approx(total.item(), rel=1e-10)
    size = max(float(t.norm()) for t in found)
    for (name, mine), want in zip(learner.gradient().items(), (dict(zip(p, found))[n] for n in sorted(p))):
        assert (mine - want).norm() <= 1e-9 * want.norm() + 1e-14 * size, name
