"""Pairs: the prompt is the common prefix of both conversations, and nothing is left out in silence."""

import json

import pytest

from moekit.data.preference import Pair, Pairs, as_pair, load_pairs
from moekit.data.stream import RowStream
from moekit.data.tasks import make_pairs, score
from moekit.errors import DataError

TURNS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}12 {% generation %}{{ m.content }} 3 {% endgeneration %}"
    "{% else %}11 {{ m.content }} 3 {% endif %}{% endfor %}{% if add_generation_prompt %}12 {% endif %}"
)
RECORD = {"prompt": "20 21", "chosen": "30 31", "rejected": "40"}
USER = {"role": "user", "content": "20 21"}


def answer(text):
    return {"role": "assistant", "content": text}


FORMS = [
    RECORD,
    {"prompt": [USER], "chosen": [answer("30 31")], "rejected": [answer("40")]},
    {"prompt": "20 21", "chosen": [USER, answer("30 31")], "rejected": [USER, answer("40")]},
    {"chosen": [USER, answer("30 31")], "rejected": [USER, answer("40")]},
]


@pytest.mark.parametrize("record", FORMS)
def test_forms_of_a_pair(record, number_tokenizer):
    """Prompt 11 20 21 3 12, answers 30 31 3 and 40 3: ids by hand."""
    pairs = load_pairs([record], number_tokenizer(TURNS), 16)
    (p,) = pairs.pairs
    assert (p.prompt, p.chosen, p.rejected) == ([11, 20, 21, 3, 12], [30, 31, 3], [40, 3])
    batch = pairs.batch([0])
    assert batch.input_ids[0, :11].tolist() == [11, 20, 21, 3, 12, 30, 31, 3, 12, 40, 3]
    assert batch.extra["chosen"][0, :11].tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0]
    assert pairs.size(0) == 11 and load_pairs([record], number_tokenizer(TURNS), 16, share=False).size(0) == 15


def test_a_conversation_before_the_answers(number_tokenizer):
    """Earlier assistant turns belong to the prompt; they have no label."""
    before = [USER, answer("50"), {"role": "user", "content": "22"}]
    record = {"chosen": [*before, answer("30")], "rejected": [*before, answer("40")]}
    (p,) = load_pairs([record], number_tokenizer(TURNS), 32).pairs
    assert p.prompt == [11, 20, 21, 3, 12, 50, 3, 11, 22, 3, 12] and (p.chosen, p.rejected) == ([30, 3], [40, 3])


def test_real_merges(tokenizer):
    """A tokenizer that joins letters: prompt and answer put together are the ids of the whole conversation."""
    record = {"prompt": "What routes a token?", "chosen": "The router does.", "rejected": " The rotor"}
    (p,) = load_pairs([record], tokenizer, 128).pairs
    for name in ("chosen", "rejected"):
        messages = [{"role": "user", "content": record["prompt"]}, answer(record[name])]
        whole = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        ids = [*p.prompt, *getattr(p, name)]
        assert whole[: len(ids)] == ids and tokenizer.decode(whole[len(ids) :]).strip() == ""


def test_what_does_not_fit_is_said(number_tokenizer):
    tokenizer = number_tokenizer(TURNS)
    records = [
        RECORD,
        {**RECORD, "chosen": "30 " * 8},
        {**RECORD, "rejected": "30 31"},
        {**RECORD, "prompt": "20 " * 20},
    ]
    pairs = load_pairs(records, tokenizer, 16)
    assert [p.index for p in pairs.pairs] == [0]
    assert pairs.report.counts["dropped"] == 2 and pairs.report.counts["rejected"] == 1
    assert "both answers are the same 3 tokens" in str(pairs.report)
    cut = load_pairs(records, tokenizer, 16, over_long="truncate")
    assert (
        [p.index for p in cut.pairs] == [0, 1] and cut.pairs[1].chosen == [30] * 8 and cut.pairs[1].rejected == [40, 3]
    )
    assert cut.size(1) == 16 and cut.report.counts["truncated"] == 1
    with pytest.raises(DataError, match="none of the 1 records"):
        load_pairs(records[2:3], tokenizer, 16)


@pytest.mark.parametrize(
    "record, why",
    [
        ({"prompt": "1", "chosen": "2"}, "no pair among the fields prompt, chosen"),
        ([1], "a pair must be an object, got list"),
        ({"chosen": "1", "rejected": "2"}, "needs a prompt and two answers"),
        ({"prompt": "1", "chosen": [answer("2"), USER, answer("2")], "rejected": "3"}, "several assistant turns"),
        ({"prompt": "1", "chosen": [USER], "rejected": "3"}, "no assistant message"),
    ],
)
def test_bad_records_name_their_line(tmp_path, record, why, number_tokenizer):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in (RECORD, record, RECORD)))
    with pytest.raises(DataError, match=f"line 2: .*{why}"):
        load_pairs(path, number_tokenizer(TURNS), 64)
    pairs = load_pairs(path, number_tokenizer(TURNS), 64, reject=True)
    assert [p.index for p in pairs.pairs] == [1, 3] and why.split(" ")[-1] in pairs.report.select("rejected")[0].why
    assert pairs.report.counts["examples"] == 3 and pairs.report.counts["rejected"] == 1


def test_prompts_must_be_the_same_tokens(number_tokenizer):
    """A template that looks at the answer changes the prompt: no pair."""
    odd = "{% set n = messages[-1].content | length %}{{ n }} " + TURNS
    with pytest.raises(DataError, match="not the same tokens before the two answers"):
        load_pairs([RECORD], number_tokenizer(odd), 64)


def test_a_stream_of_pairs():
    """Steps of pairs, shuffled and shared out over ranks; every pair once an epoch."""
    pairs = Pairs([Pair([1, 2], [10 + i], [30 + i]) for i in range(7)], 5)
    stream = RowStream(pairs, batch_rows=4, seed=1)
    taken = []
    for _ in range(2):
        position = stream.state()
        for rank in range(2):
            stream.restore(position)
            taken += [i for b in stream.next(rank, 2, 1) for i in b.labels[b.extra["chosen"] == 1].tolist()]
    assert sorted(taken) == [10 + i for i in range(7)]
    other = Pairs([*pairs.pairs[:6], Pair([1, 2], [16], [37])], 5)
    assert pairs.fingerprint != other.fingerprint
    with pytest.raises(DataError, match="cannot be put in a row"):
        Pairs([Pair([1], [2] * 9, [3])], 5).batch()


def test_as_pair_keeps_what_else_a_record_has():
    chosen, _ = as_pair({**RECORD, "task": "x"})
    assert chosen.extra == {"task": "x"} and chosen.first == 1


def test_pairs_of_a_task():
    """Right answers are right, wrong ones are not, by the task's own scorer; train and held-out stay disjoint."""
    pytest.importorskip("reasoning_gym")
    pairs = make_pairs("chain_sum", "train", 50)
    assert all(score(p, p["chosen"]) == 1.0 and score(p, p["rejected"]) < 1.0 for p in pairs)
    held = {p["prompt"] for p in make_pairs("chain_sum", "heldout", 20)}
    assert not held & {p["prompt"] for p in pairs} and make_pairs("chain_sum", "train", 50) == pairs
