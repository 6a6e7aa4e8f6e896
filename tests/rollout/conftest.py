"""Small models, prompts and engines that the tests of rollout share."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moekit.config import ModelConfig
from moekit.data.batch import Batch
from moekit.model.transformer import Transformer, logits

torch.set_num_threads(1)

CONFIG = ModelConfig(
    vocab=50, width=16, layers=3, heads=4, kv_heads=2, experts=6, top_k=2, expert_width=8, max_positions=64,
    init_std=0.3,
)  # fmt: skip
VARIANTS = {
    "plain": {},
    "olmoe": {"qk_norm": "full", "kv_heads": 4},
    "qwen3": {"qk_norm": "head", "normalize_gates": True, "head_dim": 6},
    "mixtral": {"gate": "topk_softmax", "kv_heads": 1},
    "sigmoid": {"gate": "sigmoid", "normalize_gates": True, "selection_bias": True},
    "dense+shared": {"dense_layers": (0,), "dense_width": 24, "shared_width": 8, "tied_head": True},
}
PROMPTS = [[5, 6], [7], [9, 8, 7, 6, 5, 4, 3, 40, 41], [20, 21, 22], [49] * 12]


def model(variant="plain", dtype=torch.float32, seed=1) -> Transformer:
    """One of VARIANTS; norm weights and selection biases are not their neutral values."""
    made = Transformer(replace(CONFIG, **VARIANTS[variant]), dtype=dtype, seed=seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()))
        for buffer in made.buffers():
            buffer.copy_(torch.linspace(-0.2, 0.2, buffer.numel()))
    return made


@torch.no_grad()
def following(made: Transformer, ids: list[int]) -> torch.Tensor:
    """[len, V] float64 logits after every token of a sequence, by the model's own whole forward."""
    return logits(made, Batch.make(torch.tensor([ids])))[0].double()


@torch.no_grad()
def routes(made: Transformer, ids: list[int]) -> torch.Tensor:
    """[len, L, K], the routers' choices in a whole forward."""
    out = made(Batch.make(torch.tensor([ids])), record=True, elide="none")
    rows = [out.flat.to_rows(r.expert_NK)[0] for r in out.routes]
    return torch.stack(rows, 1)


@pytest.fixture
def small() -> SimpleNamespace:
    """The helpers of this file."""
    return SimpleNamespace(
        model=model, following=following, routes=routes, prompts=PROMPTS, variants=VARIANTS, config=CONFIG
    )
