"""Chats to ids and masks: the public cases, prompts, refusals, and the report."""

import numpy as np
import pytest

from moekit.config import DataConfig
from moekit.data.chat import render, render_all
from moekit.data.dataset import build
from moekit.data.source import CHATS, load_examples
from moekit.errors import DataError

CHATML = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# No special token at all: a turn ends with a blank line.
PLAIN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}### Answer:\n"
    "{% generation %}{{ m.content }}\n\n{% endgeneration %}"
    "{% else %}### Question:\n{{ m.content }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Answer:\n{% endif %}"
)


def strip_marks(template):
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def chat(*turns, **fields):
    """user, assistant, user, ... in turn; a leading ("system", text) pair is taken as it is."""
    messages = [{"role": "system", "content": fields.pop("system")}] if "system" in fields else []
    return {"messages": messages + [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(turns)]}


TOY = (
    "0{% for m in messages %}{% if m.role == 'user' %} 1 {{ m.content }} 3{% else %} 2 "
    "{% if loop.last %}REASON{% endif %}CONTENT 3{% endif %}{% endfor %}{% if add_generation_prompt %} 2{% endif %}"
)
FIELD = TOY.replace("REASON", "{{ m.reasoning }} ").replace("CONTENT", "{{ m.content }}")
INSIDE = TOY.replace("REASON", "{{ m.content.split('/')[0] }}").replace("CONTENT", "{{ m.content.split('/')[-1] }}")


@pytest.mark.parametrize("where", ["own field", "inside the content"])
def test_bc_006_the_full_rendering_and_its_spans(number_tokenizer, where):
    """BC-006: reasoning stays in the last turn only, one BOS; ids and mask are those of the whole conversation."""
    inside = where != "own field"
    first, last = ({"content": "90 /12"}, {"content": "91 /14"}) if inside else (
        {"reasoning": "90", "content": "12"}, {"reasoning": "91", "content": "14"})  # fmt: skip
    messages = [
        {"role": "user", "content": "11"}, {"role": "assistant", **first},
        {"role": "user", "content": "13"}, {"role": "assistant", **last},
    ]  # fmt: skip
    document = render({"messages": messages}, number_tokenizer(INSIDE if inside else FIELD))
    assert document.ids.tolist() == [0, 1, 11, 3, 2, 12, 3, 1, 13, 3, 2, 91, 14, 3]
    assert document.supervised.astype(int).tolist() == [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1]


UNPROVABLE = "{% for m in messages %}{{ m.role }} {{ m.content }} {{ messages[-1].content | length }} {% endfor %}"
UNPROVABLE += "{% if add_generation_prompt %}assistant {% endif %}"


def test_bc_004_a_mask_is_derived_or_refused_never_empty(with_template):
    """BC-004: without marks the mask is derived; where it cannot be, the error names the row and the template."""
    tokenizer = with_template(strip_marks(CHATML))
    document = render(chat("a", "b c d"), tokenizer)
    assert tokenizer.decode(document.ids[document.supervised]) == "b c d<|im_end|>"
    with pytest.raises(DataError, match=r"row 3.*cannot tell which tokens.*chat template of.*generation"):
        build([chat("a", "b")] * 3 + [chat("a", "bx")], with_template(UNPROVABLE), DataConfig())
    nothing = strip_marks(CHATML) + "{% generation %}{% endgeneration %}"
    with pytest.raises(DataError, match=r"row 0.*chat template of.*no token"):
        render(chat("a", "b"), with_template(nothing))


@pytest.mark.parametrize("marks", [True, False])
def test_the_first_target_is_predicted_by_the_prompt_and_the_last_is_the_end_of_turn(with_template, marks):
    template = CHATML if marks else strip_marks(CHATML)
    tokenizer = with_template(template)
    rows = build([chat("q", "answer")], tokenizer, DataConfig(length=64, rows="padded"))
    batch = rows.batch()
    targets = (batch.labels[0] != -100).nonzero().flatten().tolist()
    prompt = tokenizer.apply_chat_template(chat("q")["messages"], add_generation_prompt=True)["input_ids"]
    assert targets[0] == len(prompt) - 1
    assert tokenizer.decode(batch.labels[0, targets]) == "answer<|im_end|>"


def test_a_template_that_marks_no_end_of_turn_is_followed_and_warned_of(with_template):
    template = CHATML.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    with pytest.warns(UserWarning, match="does not learn to end its turn"):
        document = render(chat("q", "answer"), with_template(template))
    assert with_template(template).decode(document.ids[document.supervised]) == "answer"


@pytest.mark.parametrize("marks", [True, False])
def test_assistant_turns_of_a_given_prompt_are_not_learned(with_template, marks):
    tokenizer = with_template(CHATML if marks else strip_marks(CHATML))
    example = {"prompt": chat("q", "given", "r")["messages"], "completion": [{"role": "assistant", "content": "new"}]}
    document = render(example, tokenizer)
    assert tokenizer.decode(document.ids[document.supervised]) == "new<|im_end|>"


def test_supervise_all(tokenizer):
    document = render(chat("a", "b"), tokenizer, supervise="all")
    assert document.supervised.all() and document.ids.tolist() == render(chat("a", "b"), tokenizer).ids.tolist()
    assert len(render(chat("no assistant here"), tokenizer, supervise="all"))


def test_refusals_name_row_role_and_template(tokenizer, with_template):
    unknown = {"messages": [{"role": "narrator", "content": "x"}, {"role": "assistant", "content": "y"}]}
    with pytest.raises(DataError, match=r"row 1: the chat template of .* refuses .*narrator.*unknown role 'narrator'"):
        render_all([chat("a", "b"), unknown], tokenizer)
    with pytest.raises(DataError, match=r"row 0: no assistant message to learn \(roles: user\)"):
        render(chat("a"), tokenizer)
    refuses = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="row 0: the chat template of .* refuses .*roles must alternate"):
        render(chat("a", "b"), with_template(refuses))


@pytest.mark.parametrize("marks", [True, False])
def test_a_role_that_the_template_leaves_out_is_an_error(with_template, marks):
    template = PLAIN.replace("{% else %}###", "{% elif m.role == 'user' %}###")
    tokenizer = with_template(template if marks else strip_marks(template))
    with pytest.raises(DataError, match=r"leaves out messages\[0\] of role 'system'"):
        render(chat("q", "a", system="be brief"), tokenizer)


def test_no_chat_template(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="has no chat template"):
        build([chat("a", "b")], tokenizer, DataConfig())
    tokenizer.chat_template = {"rag": CHATML, "tool_use": CHATML}
    with pytest.raises(DataError, match="no default chat template.*rag"):
        build([chat("a", "b")], tokenizer, DataConfig())
    with pytest.raises(DataError, match="no such tokenizer folder: /nowhere"):
        build([chat("a", "b")], "/nowhere", DataConfig())


def test_rejected_examples_are_counted_and_listed(tokenizer):
    data = [chat("a", "b"), chat("a"), {"messages": []}, chat("c", "d"), {"text": "x"}]
    rows = build(data, tokenizer, DataConfig(length=32), reject=True)
    assert rows.report.counts["examples"] == 5 and rows.report.counts["documents"] == 2
    assert rows.report.counts["rejected"] == 3
    assert sorted(e.index for e in rows.report.select("rejected")) == [1, 2, 4]
    assert "no assistant message" in next(e.why for e in rows.report.select("rejected") if e.index == 1)
    assert "rejected 3" in str(rows.report)
    with pytest.raises(DataError, match="row 2"):
        build(data, tokenizer, DataConfig(length=32))


def test_our_chats_render_and_progress_is_called(tokenizer_folder):
    calls = []
    rows = build(CHATS, tokenizer_folder, DataConfig(length=256), progress=lambda *a: calls.append(a))
    count = len(load_examples(CHATS))
    assert calls[-1] == (count, count, "rendering")
    assert rows.report.counts["documents"] == rows.report.counts["pieces"] == count
    assert 60 <= count <= 120 and not rows.report.events
    masks = [d.supervised.mean() for d in render_all(load_examples(CHATS), tokenizer_folder)]
    assert 0 < min(masks) and max(masks) < 1 and np.mean(masks) > 0.2
