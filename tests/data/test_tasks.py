"""Reasoning-gym tasks: disjoint splits, the task's own scorer, clear refusals."""

import builtins
import json

import pytest

from moekit.config import DataConfig
from moekit.data.dataset import build
from moekit.data.tasks import SMALL, make_task, score
from moekit.errors import BackendError, DataError

pytest.importorskip("reasoning_gym")


def questions(items):
    return [i["messages"][0]["content"] for i in items]


@pytest.mark.parametrize("name", SMALL)
def test_small_tasks(name, tokenizer):
    train, held = make_task(name, "train", 60), make_task(name, "heldout", 12, seed=5)
    assert len(set(questions(train))) == 60 and len(set(questions(held))) == 12
    assert not set(questions(train)) & set(questions(held))
    for item in train:
        answer = item["messages"][1]["content"]
        assert score(item, f" {answer}\n") == 1.0
        assert score(item, "") == 0.0 and score(item, "no idea at all") < 1.0  # some give part of a point
    assert make_task(name, "train", 60) == train != make_task(name, "train", 60, seed=1)
    assert build(json.loads(json.dumps(train)), tokenizer, DataConfig(length=256)).report.counts["documents"] == 60


def test_splits_stay_disjoint_to_the_last_question():
    """One-digit sums have 200 questions at most; all of them are in one split or the other, never in both."""
    train, held = (make_task("chain_sum", split, size, seed=size) for split, size in (("train", 140), ("heldout", 35)))
    assert not set(questions(train)) & set(questions(held))
    with pytest.raises(DataError, match=r"gave 1\d\d different train questions in \d+ tries, 5000 were asked for"):
        make_task("chain_sum", "train", 5000)


def test_answers_are_right():
    """Arithmetic checked by Python, not by reasoning-gym."""
    for item in make_task("chain_sum", "train", 50, max_digits=3):
        sum_ = item["entry"]["question"].split(":")[1].strip(" =")
        assert str(eval(sum_)) == item["messages"][1]["content"]  # digits and signs only


def test_refusals(monkeypatch):
    with pytest.raises(DataError, match="no task 'chain_sums'; close: chain_sum"):
        make_task("chain_sums", "train", 1)
    with pytest.raises(DataError, match="refuses the settings.*terms_of_use"):
        make_task("chain_sum", "train", 1, terms_of_use=1)
    with pytest.raises(DataError, match="split='test'"):
        make_task("chain_sum", "test", 1)
    with pytest.raises(DataError, match="size=0"):
        make_task("chain_sum", "train", 0)
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("reasoning_gym"):
            raise ImportError("No module named 'reasoning_gym'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BackendError, match=r"moekit\[rl\]"):
        make_task("chain_sum", "train", 1)
