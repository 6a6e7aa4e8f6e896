"""SFT loss and every gradient against Transformers' models with torch's own cross-entropy, packed and unpacked."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moekit.config import LearnerConfig, RouterLossConfig
from moekit.data.batch import Batch
from moekit.learner.learner import Learner
from moekit.learner.mesh import World
from moekit.learner.weights import export, load
from moekit.objectives.balance import balance_hf
from moekit.objectives.sft import SFT

COMMON = {"vocab_size": 43, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
          "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2}  # fmt: skip
FAMILIES = {
    "olmoe": (OlmoeForCausalLM, OlmoeConfig(**COMMON, intermediate_size=20, num_experts=5, num_experts_per_tok=2)),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **COMMON, head_dim=8, moe_intermediate_size=20, intermediate_size=28, num_experts=5,
            num_experts_per_tok=2, norm_topk_prob=True, mlp_only_layers=[1],
        ),
    ),
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig(**COMMON, intermediate_size=20, num_local_experts=5, num_experts_per_tok=2),
    ),
}  # fmt: skip
PLAIN = LearnerConfig(clip_norm=None, lr=0.0)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """(Transformers' model, the folder that it was saved to)."""
    kind, config = FAMILIES[request.param]
    torch.manual_seed(0)
    model = kind(config).float()
    with torch.no_grad():  # norms that are not all one, or a forgotten one would not show
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.uniform_(0.5, 1.5)
    folder = tmp_path_factory.mktemp(request.param) / "model"
    model.save_pretrained(folder)
    return model, folder


def documents():
    """Three documents of uneven length; a third of the labels is masked."""
    g = torch.Generator().manual_seed(1)
    docs = [torch.randint(0, 43, (n,), generator=g) for n in (9, 4, 13)]
    masks = [torch.rand(len(d), generator=g) < 0.35 for d in docs]
    return docs, masks


def packed():
    docs, masks = documents()
    row = torch.cat([*docs, torch.zeros(2, dtype=torch.long)])
    segment = torch.tensor([i for i, d in enumerate(docs) for _ in d] + [-1, -1])
    labels = torch.cat([torch.cat([d[1:], torch.tensor([-100])]).masked_fill(m, -100) for d, m in zip(docs, masks)])
    return Batch.make(row[None], segment=segment[None], labels=torch.cat([labels, torch.full((2,), -100)])[None])


def padded():
    docs, masks = documents()
    ids, labels = torch.zeros(3, 15, dtype=torch.long), torch.full((3, 15), -100)
    segment = torch.full((3, 15), -1)
    for i, (d, m) in enumerate(zip(docs, masks)):
        ids[i, : len(d)], segment[i, : len(d)] = d, 0
        labels[i, : len(d) - 1] = d[1:].masked_fill(m[:-1], -100)
    return Batch.make(ids, segment=segment, labels=labels)


def theirs(model):
    """Loss and gradients: every document alone, torch's cross-entropy summed over all labels, divided once."""
    model.zero_grad(set_to_none=True)
    docs, masks = documents()
    total, count = 0.0, 0
    for d, m in zip(docs, masks):
        labels = d[1:].masked_fill(m[:-1], -100)
        scores = model(input_ids=d[None]).logits[0, :-1].float()
        total = total + torch.nn.functional.cross_entropy(scores, labels, ignore_index=-100, reduction="sum")
        count += int((labels != -100).sum())
    loss = total / count
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}


def ours(folder, parts, tmp_path, config=PLAIN):
    """Loss and gradients under Transformers' names: gradients travel through `export` as if they were weights."""
    learner = Learner(load(folder, dtype="float32"), SFT(), config, World())
    metrics = learner.step(parts)
    carrier = load(folder, dtype="float32")
    with torch.no_grad():
        for name, p in carrier.named_parameters():
            p.copy_(learner.gradient()[name])
    return metrics, load_file(export(carrier, tmp_path / "gradients", naming="fused") / "model.safetensors")


@pytest.mark.parametrize(
    "make,rows,elide",
    [(packed, 1, "padding"), (padded, 3, "none"), (padded, 1, "padding+last_layer")],
    ids=["packed", "padded, nothing elided", "three microbatches, last layer elided"],
)
def test_loss_and_every_gradient(pair, tmp_path, make, rows, elide):
    model, folder = pair
    want_loss, want = theirs(model)
    metrics, got = ours(folder, make().split(rows), tmp_path, replace(PLAIN, elide=elide))
    assert metrics["loss/sft"] == pytest.approx(want_loss, rel=1e-5)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert float((got[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()), name
        assert gradient.any(), name


def test_auxiliary_loss_and_its_gradient(pair, tmp_path):
    """Granularity "hf", one document in one row: Transformers' own loss with output_router_logits."""
    model, folder = pair
    ids = torch.randint(0, 43, (1, 17), generator=torch.Generator().manual_seed(5))
    model.zero_grad(set_to_none=True)
    model.config.router_aux_loss_coef = model.router_aux_loss_coef = 0.7
    out = model(input_ids=ids, labels=ids, output_router_logits=True)
    out.loss.backward()
    config = replace(PLAIN, router=RouterLossConfig(balance=0.7, granularity="hf"))
    metrics, got = ours(folder, [Batch.make(ids)], tmp_path, config)
    assert metrics["loss/balance"] == pytest.approx(out.aux_loss.item(), rel=1e-5)
    assert metrics["loss/total"] == pytest.approx(out.loss.item(), rel=1e-5)
    for name, p in model.named_parameters():
        if p.grad is not None:
            assert float((got[name] - p.grad).norm()) <= 1e-5 * float(p.grad.norm()), name
    mine = load(folder, dtype="float32")
    flat = Batch.make(ids).flat
    assert balance_hf(mine(flat, record=True).routes, flat, "valid").item() == pytest.approx(
        out.aux_loss.item(), rel=1e-5
    )
