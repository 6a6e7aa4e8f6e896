"""Engines that share the experts answer as one engine that holds them all, whoever has which request."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from moekit.config import LearnerConfig
from moekit.errors import ConfigError
from moekit.model.transformer import Part, Transformer
from moekit.recipes.serve import serving_engine
from moekit.rollout.embedded import EmbeddedEngine

sys.path.insert(0, str(Path(__file__).parent))
s = importlib.import_module("serving")
torch.set_num_threads(1)


@cache
def whole(kind: str):
    """Answers of one engine, by request, and its counts."""
    engine = EmbeddedEngine(s.model(), slots=2, ahead=10)
    found = s.answered(engine, list(range(7)), s.HOW[kind])
    return found, {key: m.dispatched_LCE.sum(1) for key, m in engine.counter.host().items()}


def same(got, want) -> None:
    """Ids and experts equal, log-probs to 1e-5: sampled, and scored."""
    assert sorted(got) == sorted(want)
    for i in want:
        for a, b in zip(got[i], want[i]):
            assert torch.equal(a.prompt_experts, b.prompt_experts)
            for x, y in zip(a.answers, b.answers, strict=True):
                assert x.ids == y.ids and x.finish == y.finish and torch.equal(x.experts, y.experts)
                assert torch.allclose(x.logprobs, y.logprobs, rtol=0, atol=1e-5)


def check(size: int, ranks: list[dict], name: str) -> None:
    found = [r[name] for r in ranks]
    held = 8 // size
    for kind in s.HOW:
        got = {i: answer for r in found for i, answer in r[kind].items()}
        assert [sorted(r[kind]) for r in found] == list(map(sorted, s.MINE[size]))
        same(got, whole(kind)[0])
    assert all(r["experts"] == (held, 16, 16) for r in found)
    # every row ran once, on some rank: sums over ranks are those of one engine
    want = {key: sum(whole(kind)[1][key] for kind in s.HOW) for key in whole("greedy")[1]}
    assert all(torch.equal(found[0]["rows"][key], rows) for key, rows in want.items()) and len(want) == 3
    none = found[s.MINE[size].index([])]["metrics"]  # a rank without a request runs rows of others, and no step
    assert none["engine/steps"] == 0 and none["engine/idle_steps"] > 20 and none["engine/idle_slots"] == 1
    assert none["engine/rows_per_expert_decode"] >= 1 and none["engine/expert_imbalance_prefill"] >= 1
    read = 8 * held + 16 * size * (name == "sync")  # where experts' rows end; rows to and from every rank
    assert none["engine/route_bytes_decode"] == none["engine/idle_steps"] * 2 * read
    most = max(r["metrics"]["engine/idle_steps"] + r["metrics"]["engine/steps"] for r in found)
    assert all(r["metrics"]["engine/idle_steps"] + r["metrics"]["engine/steps"] == most for r in found)
    assert found[0]["bad"].startswith("ConfigError: prompt 0 holds a token outside")
    assert all(r["bad"].startswith("EngineError: ranks [0] left the call") for r in found[1:])
    assert found[0]["closed"] == "nothing" and all("ranks [0] left" in r["closed"] for r in found[1:])
    assert all("change between calls" in r["inside"] for r in found)
    assert all(r["versions"].startswith(f"EngineError: ranks serve versions {[3] + [4] * (size - 1)}") for r in found)
    for r in found:
        same(r["again"], {i: whole("greedy")[0][i] for i in r["again"]})
        assert all((a.version == 5).all() for pair in r["again"].values() for part in pair for a in part.answers)


def test_two_ranks_answer_as_one_process():
    """EP=2 against the whole engine: all requests on one rank, the other has none; ragged lengths, refilled slots."""
    check(2, s.run(2, ["sync"]), "sync")


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "names"), [(2, ["padded", "shared_memory"]), (4, ["sync", "padded", "shared_memory"])]
)
def test_dispatchers_answer_as_one_process(size, names):
    ranks = s.run(size, names)
    for name in names:
        check(size, ranks, name)


@pytest.mark.long
@pytest.mark.parametrize(("size", "learns", "serves"), [(2, 1, 2), (2, 2, 1), (4, 2, 4), (4, 4, 2)])
def test_served_at_another_degree_than_trained(size, learns, serves):
    """The learner's pieces go to the ranks that serve them; answers are those of an engine with gathered weights."""
    found = [r[f"{learns}to{serves}"] for r in s.run(size, [f"{learns}to{serves}"])]
    made = Transformer(s.MODEL, seed=None)
    made.load_state_dict(dict(s.model().named_buffers()) | found[0]["whole"])
    want = s.answered(EmbeddedEngine(made, slots=2), list(range(7)), s.HOW["greedy"])
    same({i: answer for r in found for i, answer in r["answers"].items()}, want)
    start = s.answered(EmbeddedEngine(s.model(), slots=2), list(range(7)), s.HOW["greedy"])
    assert any(start[i][0].answers[0].ids != want[i][0].answers[0].ids for i in range(7))  # the step changed answers


def test_one_rank_is_an_ordinary_engine_and_a_part_needs_the_others():
    engine = serving_engine(s.model(), LearnerConfig())
    assert engine.passes.gather is None and engine.model.part == Part.whole(s.MODEL)
    with pytest.raises(ConfigError, match="1 ranks cannot be split over ep=2"):
        serving_engine(s.model(), LearnerConfig(ep=2))
    for part in (Part(((0, 3),), (0, 4)), Part(((0, 2),), (0, 8))):
        with pytest.raises(ConfigError, match="needs all layers, dispatcher and gather"):
            EmbeddedEngine(s.MODEL, part=part)
