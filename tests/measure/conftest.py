"""A small model and an unsymmetric batch that the tests of measure share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moekit.config import ModelConfig
from moekit.data.batch import Batch
from moekit.model.transformer import Transformer

torch.set_num_threads(1)

CONFIG = ModelConfig(
    vocab=37, width=16, layers=4, heads=4, kv_heads=2, experts=5, top_k=2, expert_width=12, dense_layers=(1,),
    dense_width=20, shared_width=8, max_positions=64, init_std=0.3,
)  # fmt: skip


def batch(labels: str = "response") -> Batch:
    """4 rows of 10: two documents and padding; one filtered document; a short row; a shared prompt with two children.

    Positions by class with response labels: see `test_tokens.test_positions_by_class`.
    """
    segment = torch.tensor(
        [
            [0, 0, 0, 0, 0, 1, 1, 1, -1, -1],
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            [0, 0, 0, -1, -1, -1, -1, -1, -1, -1],
            [0, 0, 0, 1, 1, 1, 2, 2, 2, 2],
        ]
    )
    parent = torch.full_like(segment, -1)
    parent[3, 3:] = 0
    filtered = torch.zeros_like(segment, dtype=torch.bool)
    filtered[1] = True
    ids = torch.randint(0, CONFIG.vocab, segment.shape, generator=torch.Generator().manual_seed(3))
    made = Batch.make(ids, segment=segment, parent=parent)
    wanted = made.labels.clone()
    if labels == "response":
        wanted[0, :2] = -100
        wanted[2] = -100
        wanted[3, :3] = -100
        return Batch.make(ids, segment=segment, parent=parent, labels=wanted, filtered=filtered, removed=1)
    return made


def model(**changes) -> Transformer:
    """The model, float32."""
    config = CONFIG if not changes else ModelConfig(**{**CONFIG.to_dict(), **changes})
    return Transformer(config, seed=2)


@pytest.fixture
def small() -> SimpleNamespace:
    """The helpers of this file."""
    return SimpleNamespace(config=CONFIG, batch=batch, model=model)
