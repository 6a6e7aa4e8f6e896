"""Generating text and scoring it: through the template, by the task's scorer, from every kind of model folder."""

from __future__ import annotations

import json

import pytest
import torch

from moekit.errors import CheckpointError, ConfigError, DataError
from moekit.recipes.evaluate import evaluate, generate, open_model, read_items
from moekit.recipes.sft import train
from moekit.rollout.embedded import EmbeddedEngine
from moekit.rollout.engine import Sampling


@pytest.fixture(scope="module")
def opened(kit):
    return open_model(kit.model)


def test_text_goes_through_the_template(opened, kit):
    model, tokenizer = opened
    ids = tokenizer.apply_chat_template(
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say red"}],
        add_generation_prompt=True, return_dict=False,
    )  # fmt: skip
    how = {"max_new_tokens": 6, "temperature": 0.0}
    (rollout,) = EmbeddedEngine(model).generate([ids], Sampling(**how, stop_ids=(tokenizer.eos_token_id,)))
    want = tokenizer.decode([i for i in rollout.answers[0].ids if i != tokenizer.eos_token_id])
    assert generate(model, tokenizer, ["say red"], system="be brief", **how) == [want]
    first = rollout.answers[0].ids[0]
    assert generate(model, tokenizer, ["say red"], system="be brief", **how, stop_ids=[first]) == [""]
    with pytest.raises(ConfigError, match="temperature=-1"):
        generate(model, tokenizer, ["say red"], temperature=-1)


def test_a_run_folder_a_checkpoint_and_an_export_are_one_model(kit, tmp_path):
    train(kit.config(tmp_path / "run", steps=2))
    models = [open_model(tmp_path / "run" / part)[0] for part in ("", "export", "checkpoints/step_2")]
    for model in models[1:]:
        assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), model.parameters()))
    train(kit.config(tmp_path / "bare", steps=2, export=False))
    model, tokenizer = open_model(tmp_path / "bare")  # the newest checkpoint, and the tokenizer of its base
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), model.parameters()))
    assert tokenizer.get_vocab() == open_model(kit.model)[1].get_vocab()
    with pytest.raises(CheckpointError, match="no such model folder"):
        open_model(tmp_path / "gone")


def test_exact_match(opened):
    model, tokenizer = opened
    questions = ["say red", "say cat dog"]
    answers = generate(model, tokenizer, questions, max_new_tokens=8)
    wanted = [f" {answers[0]}\n", "never this"]  # white space around does not matter
    items = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": w}]}
        for q, w in zip(questions, wanted)
    ]
    found = evaluate(model, tokenizer, items, max_new_tokens=8)
    assert (found["score"], found["exact"], found["items"]) == (0.5, 0.5, 2)
    assert found["tasks"] == {"chats": {"score": 0.5, "exact": 0.5, "items": 2}}
    assert [a["answer"] for a in found["answers"]] == answers
    with pytest.raises(DataError, match="item 1 does not end with the assistant"):
        evaluate(model, tokenizer, [items[0], {"messages": items[1]["messages"][:1]}])
    with pytest.raises(DataError, match="no items"):
        evaluate(model, tokenizer, [])


def test_tasks_are_scored_by_their_own_scorer(opened, tmp_path, monkeypatch):
    pytest.importorskip("reasoning_gym")
    from moekit.data.tasks import make_task
    from moekit.recipes import evaluate as module

    model, tokenizer = opened
    items = make_task("chain_sum", "heldout", 3)
    path = tmp_path / "held_out.jsonl"
    path.write_text("\n".join(json.dumps(i, default=str) for i in items))
    again = read_items(path)
    right = [i["messages"][-1]["content"] for i in items]
    monkeypatch.setattr(module, "generate", lambda *_, **__: [right[0], right[1] + "7", "none"])
    found = evaluate(model, tokenizer, again)
    assert found["answers"][0]["score"] == 1.0 and found["exact"] == pytest.approx(1 / 3)
    assert list(found["tasks"]) == ["chain_sum"]
