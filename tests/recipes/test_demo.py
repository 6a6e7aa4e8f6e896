"""The demo: what it leaves, what it replaces, and that the model learns what it was not shown."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from moekit.data.chat import load_tokenizer
from moekit.errors import RunExistsError
from moekit.measure.record import open_run
from moekit.recipes import demo as module

pytest.importorskip("reasoning_gym")
pytest.importorskip("plotly")
pytest.importorskip("matplotlib")

LEFT = ("metrics.jsonl", "arrays", "card.json", "card.html", "report.html", "denominators.json", "checkpoints",
        "results/held_out.json", "export/config.json", "export/tokenizer.json", "initial/config.json",
        "tokenizer/tokenizer.json", "data/train.jsonl", "data/held_out.jsonl", "data/prompts.jsonl",
        "data/pairs.jsonl", "data/held_out_pairs.jsonl", "dpo/card.html", "dpo/checkpoints", "dpo/export/config.json",
        "grpo/card.html", "grpo/checkpoints", "grpo/export/config.json", "grpo/samples.jsonl")  # fmt: skip
STAGES = ["before", "SFT", "DPO", "GRPO"]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def questions(path: Path) -> set[str]:
    return {m["content"] for line in read(path) for m in line["messages"] if m["role"] == "user"}


def test_held_out_questions_are_not_trained_on(tmp_path):
    held_out = module._make_data(tmp_path)
    train, kept = questions(tmp_path / "data" / "train.jsonl"), questions(tmp_path / "data" / "held_out.jsonl")
    assert len(held_out) == len(kept) == 200 and not train & kept
    chats = [json.loads(line)["messages"] for line in module.CHATS.read_text().splitlines()]
    assert {m["content"] for c in chats for m in c if m["role"] == "user"} <= train
    asked, pairs = questions(tmp_path / "data" / "prompts.jsonl"), read(tmp_path / "data" / "pairs.jsonl")
    assert asked < train and {p["prompt"] for p in pairs} <= asked and all(p["chosen"] != p["rejected"] for p in pairs)
    assert {p["prompt"] for p in read(tmp_path / "data" / "held_out_pairs.jsonl")} <= kept
    # every second demonstration lacks the last letter; what rewards are given for does not
    shown, right = read(tmp_path / "data" / "train.jsonl")[len(chats) :], read(tmp_path / "data" / "prompts.jsonl")
    for n, (a, b) in enumerate(zip(shown, right, strict=True)):
        given, wanted = (x["messages"][1]["content"] for x in (a, b))
        assert a["messages"][0] == b["messages"][0] and given == (wanted[:-1] if n % 2 else wanted)
    # words that every question has are one token, words to spell are letters
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    assert "Ġbackward" in tokenizer.tokenize("Spell this word backward")
    word = tokenizer.tokenize(" moe")
    assert "".join(word) == "Ġmoe" and len(word) >= 3


def small(monkeypatch) -> None:
    monkeypatch.setattr(module, "HELD_OUT", 4)
    tasks = {name: {**settings, "size": 60} for name, settings in module.TASKS.items()}
    monkeypatch.setattr(module, "TASKS", tasks)


@pytest.mark.long
def test_a_short_demo_leaves_everything_and_may_be_made_again(tmp_path, monkeypatch, capsys):
    small(monkeypatch)
    folder = tmp_path / "runs" / "demo"
    module._make_room(folder)
    (folder / "leftover").write_text("of an earlier demo")
    told = module.demo(folder, steps=3)
    assert not (folder / "leftover").exists()
    for name in LEFT:
        assert (folder / name).exists(), name
    for name, run in {"SFT": folder, "DPO": folder / "dpo", "GRPO": folder / "grpo"}.items():
        opened = open_run(run)
        assert len(opened.metrics) == told["summary"][name]["steps"] == 3
        assert opened.card is not None and opened.card.layout["world"] == 2
        assert opened.card.objective["name"] == name.lower()
    assert told["transformers"] < 1e-5
    card = json.loads((folder / "card.json").read_text())
    assert set(card["results"]["scores"]) == {"all tasks", *module.TASKS} and card["results"]["stages"] == STAGES
    assert all(len(found) == 4 for found in told["scores"].values())
    readings = json.loads((folder / "denominators.json").read_text())
    assert readings["global_tokens"]["cosine"] == pytest.approx(1) and readings["sequence_mean"]["cosine"] < 1
    out = capsys.readouterr().out
    assert re.search(" +".join(STAGES), out) and re.search(r"all tasks( +0%){4}", out)
    assert "7/7 the report" in out and str(folder / "grpo" / "export") in out
    page = (folder / "report.html").read_text()
    for section in (
        "Loss",
        "Routed work by class",
        "Expert load",
        "Loss denominators side by side",
        "Scores, before → SFT → DPO → GRPO",
    ):
        assert section in page, section


def test_a_folder_that_no_demo_made_is_refused(tmp_path):
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(RunExistsError, match="no demo made it"):
        module.demo(folder)
    assert [p.name for p in folder.iterdir()] == ["thesis.tex"]


@pytest.mark.long
def test_the_demo_learns_what_it_was_not_shown(tmp_path):
    """Random weights answer nothing; half-careless demonstrations teach the tasks and their own carelessness,
    preferences are learnt, and verified rewards raise what is answered right by more than two standard errors of 200
    questions."""
    told = module.demo(tmp_path / "demo")
    for task, (before, tuned, _, rewarded) in told["scores"].items():
        assert before <= 0.1 <= tuned and rewarded >= tuned + 0.1, (task, told["scores"])
    _, tuned, preferred, rewarded = told["scores"]["all tasks"]
    noise = 2 * math.sqrt(2 * preferred * (1 - preferred) / 200)
    assert rewarded >= max(preferred + noise, 0.55), told["scores"]
    assert told["summary"]["DPO"]["after"]["eval/accuracy"] >= 0.85
