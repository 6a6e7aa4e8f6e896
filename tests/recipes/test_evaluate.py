"""Generating and scoring: the cache changes nothing, neighbours in a batch change nothing, answers are scored right."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from moekit.config import DataConfig
from moekit.data.batch import Batch
from moekit.data.dataset import build
from moekit.errors import CheckpointError, ConfigError, DataError
from moekit.model.transformer import logits
from moekit.recipes.evaluate import evaluate, generate, open_model, read_items, sample, token_loss
from moekit.recipes.sft import train

PROMPTS = [[5, 6], [7], [9, 8, 7, 6, 5, 4, 3, 40, 41], [20, 21, 22], [50] * 12]


@pytest.fixture(scope="module")
def opened(kit):
    return open_model(kit.model)


def continued(model, prompt: list[int], count: int, stops: set[int] = frozenset()) -> list[int]:
    """Greedy, the whole sequence through the model for every token."""
    ids = list(prompt)
    for _ in range(count):
        token = int(logits(model, Batch.make(torch.tensor([ids])))[0, -1].argmax())
        if token in stops:
            break
        ids.append(token)
    return ids[len(prompt) :]


def test_cached_equals_uncached_for_mixed_lengths(opened):
    """BC-108's kind: nothing of the padding that a batch of mixed lengths needs can be seen."""
    model, _ = opened
    want = [continued(model, p, 10) for p in PROMPTS]
    found = sample(model, PROMPTS, max_new_tokens=10)
    assert [f.ids for f in found] == want
    assert len({tuple(w) for w in want}) == len(want)  # the fixture tells prompts apart
    assert not any(f.stopped for f in found)


def test_stop_tokens_end_rows_one_by_one(opened):
    """Rows that have stopped leave the batch; the others go on as if nothing had happened."""
    model, _ = opened
    whole = [continued(model, p, 12) for p in PROMPTS]
    stops = {whole[0][2], whole[1][0], whole[2][5]}
    want = [continued(model, p, 12, stops) for p in PROMPTS]
    found = sample(model, PROMPTS, max_new_tokens=12, stop_ids=sorted(stops))
    assert [f.ids for f in found] == want
    assert [f.stopped for f in found] == [len(w) < 12 for w in want]
    assert len({len(w) for w in want}) > 2


def test_sampling_depends_on_the_prompt_s_own_seed_alone(opened):
    model, _ = opened
    how = {"max_new_tokens": 8, "temperature": 1.3}
    together = sample(model, PROMPTS, seed=5, **how)
    assert [sample(model, [p], seed=5 + i, **how)[0] for i, p in enumerate(PROMPTS)] == together
    assert sample(model, PROMPTS, seed=5, batch=2, **how) == together
    assert sample(model, PROMPTS, seed=6, **how) != together


def test_samples_follow_the_distribution(opened):
    """One token each, 4000 seeds: frequencies within 5 standard errors of softmax(logits / temperature)."""
    model, _ = opened
    p = (logits(model, Batch.make(torch.tensor([PROMPTS[0]])))[0, -1].double() / 0.7).softmax(-1)
    drawn = sample(model, [PROMPTS[0]] * 4000, max_new_tokens=1, temperature=0.7, seed=1, batch=1000)
    count = torch.bincount(torch.tensor([d.ids[0] for d in drawn]), minlength=len(p)).double()
    deviation = (count / 4000 - p).abs() / (p * (1 - p) / 4000 + 1e-7).sqrt()
    assert deviation.max() < 5


def test_prompts_without_room_are_refused(opened):
    model, _ = opened
    with pytest.raises(ConfigError, match="prompt 1 has 90 tokens"):
        sample(model, [[1], [1] * 90], max_new_tokens=8)
    with pytest.raises(ConfigError, match="prompt 0 has 0 tokens"):
        sample(model, [[]], max_new_tokens=8)
    with pytest.raises(ConfigError, match="temperature=-1"):
        sample(model, [[1]], temperature=-1)


def test_text_goes_through_the_template(opened, kit):
    model, tokenizer = opened
    ids = tokenizer.apply_chat_template(
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say red"}],
        add_generation_prompt=True, return_dict=False,
    )  # fmt: skip
    want = tokenizer.decode(sample(model, [ids], max_new_tokens=6, stop_ids=[tokenizer.eos_token_id])[0].ids)
    assert generate(model, tokenizer, ["say red"], system="be brief", max_new_tokens=6) == [want]


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


def test_loss_is_torch_s_cross_entropy(opened, kit):
    model, tokenizer = opened
    rows = build(str(kit.data), tokenizer, DataConfig(length=48))
    found = token_loss(model, rows, batch=2)
    batch = rows.batch()
    with torch.no_grad():
        z = logits(model, batch)
    want = F.cross_entropy(z.view(-1, z.shape[-1]).double(), batch.labels.view(-1), ignore_index=-100)
    assert found["supervised_tokens"] == int((batch.labels != -100).sum())
    assert found["loss"] == pytest.approx(float(want), rel=1e-5)
