"""Families for one microbatch: sizes as the rows have them, and memory as autograd really keeps it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moekit.config import LearnerConfig, ModelConfig
from moekit.data.batch import Batch
from moekit.data.budget import cut, derive
from moekit.data.families import Sample, family_rows
from moekit.errors import ConfigError, DataError
from moekit.measure.memory import saved_bytes
from moekit.measure.plan import Microbatch, activation_bytes
from moekit.model.transformer import Transformer
from moekit.recipes.budget import memory_budget

torch.set_num_threads(1)
SHAPE = ModelConfig(vocab=97, width=32, layers=2, heads=4, kv_heads=2, experts=8, top_k=2, expert_width=24)


def sample(prompt: int, answers: tuple[int, ...], seed: int = 0) -> Sample:
    g = torch.Generator().manual_seed(seed)
    ids = lambda n: torch.randint(0, SHAPE.vocab, (n,), generator=g).tolist()
    return Sample(ids(prompt), [ids(n) for n in answers])


def rows(families: list, share: bool) -> Batch:
    """The families one after the other, in one row, without padding."""
    samples = [sample(p, a, i) for i, (p, a) in enumerate(families)]
    batch = family_rows(samples, 20_000, share)
    return batch.trim()


def kept(model: Transformer, batch: Batch) -> int:
    with saved_bytes(model) as saved:
        out = model(batch)
    del out
    return saved.bytes


@pytest.mark.parametrize("share", (True, False))
def test_sizes_are_the_positions_that_rows_have(share: bool):
    """(G - 1)(P - 1) positions fewer with a shared prompt: 700 + 2 x 100 against 2 x 700 - (600 - 1)."""
    families = [(600, (100, 100)), (31, (7,)), (1, (5, 9, 2)), (20, (1, 1, 30, 4))]
    budget = derive(families, tokens=5000, share=share)
    assert list(budget.sizes) == [int((rows([f], share).segment >= 0).sum()) for f in families]
    assert budget.sizes[0] == (801 if share else 1400)


def test_a_pretraining_microbatch_of_pairs_overflows_and_the_derived_one_fits():
    """8 rows of 128 fit the memory of 8 rows; 8 pairs do not, by what autograd keeps; the derived microbatches do."""
    torch.manual_seed(0)
    model, c = Transformer(SHAPE), LearnerConfig()
    pretraining = Batch.make(torch.randint(0, SHAPE.vocab, (8, 128)))
    memory = kept(model, pretraining)
    families = [(60 + 7 * i, (40 + 3 * i, 20 + 11 * (i % 4))) for i in range(8)]
    for share in (True, False):
        budget = memory_budget(SHAPE, c, families, memory, share=share, pretraining=(8, 128), word="pair")
        assert budget.overflow > 1 and kept(model, rows(families, share)) > 1.2 * memory
        assert "they overflow" in str(budget) and "8 rows x 128 = 1024 positions" in str(budget)
        parts = budget.microbatches
        assert sorted(i for part in parts for i in part) == list(range(8)) and 2 <= len(parts) <= 6
        used = [kept(model, rows([families[i] for i in part], share)) for part in parts]
        assert max(used) <= memory
        assert max(used) > 0.6 * memory, "a budget that wastes memory is none"
        largest = max(families, key=lambda f: budget.sizes[families.index(f)])
        assert kept(model, rows([largest] * budget.families, share)) <= memory
        assert 1 <= budget.families < 8


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_plan_knows_what_shared_prompts_keep(dtype: torch.dtype):
    """Children keep their prompt's keys and values once more, and a mask: the plan of a family is that of its rows."""
    model = Transformer(SHAPE, dtype=dtype)
    for prompt, answers, share in ((100, (20, 20), True), (150, (9, 40, 3, 60), True), (50, (20, 9), False)):
        batch, work = rows([(prompt, answers)], share), Microbatch.family(prompt, answers, share)
        real = Microbatch.of(batch.flat)
        assert (work.positions, work.labels, sorted(work.children)) == (
            real.positions, real.labels, sorted(real.children)
        )  # fmt: skip
        plan = activation_bytes(SHAPE, work, dtype, LearnerConfig())["total"]
        assert plan == pytest.approx(kept(model, batch), rel=0.07)


def test_budgets_by_hand():
    """(10,000 - 1,000) / 20 = 450 positions; the largest group is 20 + 3 x 31 - 1 = 112: 4 fit; in rows of 200, 2."""
    groups = [(20, (30, 30, 30)), (5, (1, 2, 3))]
    b = derive(groups, memory=10_000, fixed=1_000, bytes_per_position=20)
    assert (b.positions, b.sizes, b.families) == (450, (112, 13), 4)
    b = derive(groups, memory=10_000, fixed=1_000, bytes_per_position=20, length=200)
    assert (b.positions, b.families) == (400, 2)
    assert derive(groups, tokens=112).families == 1
    with pytest.raises(DataError, match=r"group 0 takes 150 positions .*, 112 are there.*share=True"):
        derive(groups, tokens=112, share=False, word="group")
    with pytest.raises(DataError, match="family 0 takes 112 positions .*, 100 are there"):
        derive(groups, tokens=500, length=100)
    with pytest.raises(DataError, match="0 are there"):
        derive(groups, memory=500, fixed=1_000, bytes_per_position=20)
    for bad in ({}, {"tokens": 5, "memory": 5.0}, {"memory": 5.0}):
        with pytest.raises(ConfigError, match="one of them"):
            derive(groups, **bad)
    with pytest.raises(DataError, match="no families"):
        derive([], tokens=5)


def test_cuts_hold_everything_once_within_the_limit_and_are_always_the_same():
    g = np.random.default_rng(0)
    for _ in range(20):
        sizes = g.integers(1, 100, 57).tolist()
        parts = cut(sizes, 128)
        assert sorted(i for part in parts for i in part) == list(range(57))
        assert all(sum(sizes[i] for i in part) <= 128 for part in parts)
        assert len(parts) <= 1.25 * sum(sizes) / 128 + 1 and parts == cut(sizes, 128)
    assert cut([], 10) == []
    with pytest.raises(DataError, match="one of size 11"):
        cut([11], 10)
