"""Small models and batches that the tests of the model share. Never symmetric: uneven lengths, a row with no label."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moekit.config import ModelConfig
from moekit.data.batch import Batch
from moekit.model.transformer import Transformer

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


def model(variant="plain", dtype=torch.float64, seed=1, **changes) -> Transformer:
    """One of VARIANTS; norm weights and selection biases are not their neutral values."""
    made = Transformer(replace(CONFIG, **VARIANTS[variant], **changes), dtype=dtype, seed=seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()))
        for buffer in made.buffers():
            buffer.copy_(torch.linspace(-0.2, 0.2, buffer.numel()))
    return made


def batch(kind: str, seed=0, labels="response") -> Batch:
    """Rows of 12 positions. Labels of the first three positions of every document are masked ("response")."""
    segment = torch.tensor(
        {
            "padded": [[0] * 7 + [-1] * 5, [0] * 12, [0] * 2 + [-1] * 10],
            "packed": [[0] * 5 + [1] * 5 + [2] * 2, [0] * 3 + [1] * 5 + [-1] * 4, [0] * 12],
            "interleaved": [[0, 0, 0, 1, 1, 0, 0, 1, 1, 1, -1, -1], [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2]],
            "shared": [[0] * 4 + [1] * 3 + [2] * 5, [0] * 2 + [1] * 2 + [2] * 3 + [3] * 2 + [-1] * 3],
            "full": [[0] * 12, [0] * 12],
            "filtered": [[0] * 6 + [1] * 6, [0] * 9 + [-1] * 3],
        }[kind]
    )
    parent = torch.full_like(segment, -1)
    if kind == "shared":  # row 0: segment 0 is the prompt of 1 and 2; row 1: of 1, 2, and 3 stands alone
        parent[0, 4:] = 0
        parent[1, 2:7] = 0
    filtered = segment == 1 if kind == "filtered" else None
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, CONFIG.vocab, segment.shape, generator=g)
    made = Batch.make(ids, segment=segment, parent=parent, filtered=filtered)
    if labels == "all":
        return made
    masked = made.labels.masked_fill(made.position < 3, -100)
    if kind == "packed":
        masked[2] = -100  # a document without any label
    return replace(made, labels=masked)


class Watcher:
    """Records what a model tells its observer."""

    def __init__(self):
        self.forward, self.backwards = {}, {}

    def layer(self, layer, decided_CE, dispatched_CE, elided_C, dropped_C):
        assert layer not in self.forward
        self.forward[layer] = (decided_CE, dispatched_CE, elided_C, dropped_C)

    def backward(self, layer, dispatched_CE):
        assert layer not in self.backwards
        self.backwards[layer] = dispatched_CE


def gradients(made: Transformer, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradient of every parameter; zero where the loss does not reach."""
    names, parameters = zip(*made.named_parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, found)}


def distance(got: dict, want: dict) -> float:
    """The largest ||g - g0|| / ||g0|| over parameters; where ||g0|| = 0, g must be exactly zero."""
    worst = 0.0
    for name, w in want.items():
        if float(w.norm()) == 0:
            assert float(got[name].norm()) == 0, name
        else:
            worst = max(worst, float((got[name] - w).norm() / w.norm()))
    return worst


@pytest.fixture
def small() -> SimpleNamespace:
    """The helpers of this file."""
    return SimpleNamespace(
        model=model, batch=batch, Watcher=Watcher, gradients=gradients, distance=distance, config=CONFIG
    )
