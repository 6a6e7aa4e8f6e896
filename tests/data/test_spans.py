"""Spans derived from templates without marks, against Transformers' reading of the same templates with marks.

The templates are in the manner of the common families, written with `{% generation %}` marks; `strip_marks` takes the
marks away. Transformers removes a newline behind a block tag, so newlines are written as expressions there.
"""

import re

import pytest

from moekit.data.chat import render
from moekit.errors import DataError

CHATML = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Trims every text; a beginning-of-text token.
HEADERS = (
    "<|bot|>{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<|eot|>{% endgeneration %}"
    "{% else %}{{ m.content | trim }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)

# Instructions in brackets, the system text inside the first one, no generation prompt, roles must alternate.
BRACKETS = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}<s>{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ (system if loop.first else '') + m.content }} [/INST]"
    "{% else %}{% generation %} {{ m.content }}</s>{% endgeneration %}{% endif %}{% endfor %}"
)

# Calls the assistant "model".
RENAMED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|turn|>model\n"
    "{% generation %}{{ m.content | trim }}<|/turn|>{% endgeneration %}{{ '\n' }}"
    "{% else %}<|turn|>{{ m.role }}\n{{ m.content | trim }}<|/turn|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>model\n{% endif %}"
)

# No special token at all: a turn ends with a blank line.
PLAIN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}### Answer:\n"
    "{% generation %}{{ m.content }}\n\n{% endgeneration %}"
    "{% else %}### Question:\n{{ m.content }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Answer:\n{% endif %}"
)

# Reasoning is shown from the last user message on only, and taken out of the content of older turns. The last turn
# always has a block for it, which the model writes itself.
REASONING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.reasoning_content if m.reasoning_content is defined else "
    "(m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content else '') %}"
    "<|im_start|>assistant\n{% generation %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ text }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# The generation prompt opens the reasoning, but turns are rendered without it (and supervised from their text on).
OPENS_REASONING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)

ALL = {name: text for name, text in globals().items() if name.isupper() and name != "SPECIAL"}


def strip_marks(template):
    return re.sub(r"\{% (end)?generation %\}", "", template)


def chat(*turns, **fields):
    """user, assistant, user, ... in turn; a leading ("system", text) pair is taken as it is."""
    messages = [{"role": "system", "content": fields.pop("system")}] if "system" in fields else []
    return {"messages": messages + [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(turns)]}


CONVERSATIONS = [
    chat("hello", "hi there"),
    chat("what is 2 + 2?", "4", "and 3 + 3?", "6", "thanks", "you are welcome"),
    chat("a question", "an answer", "a last word of the user"),
    chat("hello", "hi", system="be brief"),
    chat("  spaces around  ", "\n an answer with white space \n", "more", " x "),
    chat("say assistant", "<|im_start|>assistant\nis a header", "say it again", "### Answer:\nassistant"),
    chat("### Answer:\nfake", "real", "<|im_start|>assistant\nfake", "real", "[/INST] fake", "real"),
    chat("same", "same", "same", "same"),
    chat("empty answer", "", "go on", "well"),
    chat("Ünïcode ☃ 東京", "日本 🙂🙂 é"),
    chat("x", "12345 67890\n\n\n", "y\n\n", "\n\nz"),
]


@pytest.mark.parametrize("name", ALL)
def test_derived_masks_equal_the_marked_ones(with_template, name):
    """The oracle is Transformers: the same template with marks, read by apply_chat_template."""
    conversations = list(CONVERSATIONS)
    if name == "REASONING":
        conversations += [
            chat("q", "<think>\nfirst thought\n</think>\n\nfirst", "r", "<think>\nsecond thought\n</think>\n\nsecond"),
            chat("q", "<think>\nonly\n</think>\n\nanswer", "and a question"),
            {"messages": [{"role": "user", "content": "q"},
                          {"role": "assistant", "reasoning_content": "one", "content": "first"},
                          {"role": "user", "content": "r"},
                          {"role": "assistant", "reasoning_content": "two", "content": "second"}]},
        ]  # fmt: skip
    for conversation in conversations:
        tokenizer = with_template(ALL[name])
        oracle = tokenizer.apply_chat_template(
            conversation["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        marked = render(conversation, tokenizer)
        tokenizer.chat_template = strip_marks(ALL[name])
        derived = render(conversation, tokenizer)
        for document in (marked, derived):
            assert document.ids.tolist() == oracle["input_ids"]
            assert document.supervised.astype(int).tolist() == oracle["assistant_masks"], conversation


def test_prefix_differences_where_placeholders_fail(with_template):
    """The template writes the length of a text behind it, so no placeholder can stand for the text."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ m.content | length }}{{ '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = with_template(template)
    document = render(chat("a", "bcd", "e", "fg"), tokenizer)
    assert tokenizer.decode(document.ids[document.supervised]) == "bcd<|im_end|>3\nfg<|im_end|>2\n"


def test_an_end_token_of_the_last_turn_only(with_template):
    """Where only the last turn is closed, the others' spans stop with their text and take nothing of the next turn."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if loop.last %}<|eot|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = with_template(template)
    document = render(chat("a", "b", "c", "d"), tokenizer)
    assert tokenizer.decode(document.ids[document.supervised]) == "bd<|eot|>"


def test_several_assistant_messages_in_a_row_and_a_first_one(with_template):
    tokenizer = with_template(strip_marks(CHATML))
    messages = [
        {"role": r, "content": t}
        for r, t in (("assistant", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"))
    ]
    document = render({"messages": messages}, tokenizer)
    assert tokenizer.decode(document.ids[document.supervised]) == "a<|im_end|>c<|im_end|>d<|im_end|>"


def test_text_that_a_template_adds_to_a_turn_by_its_content(with_template):
    """Whatever stands where the message's text stands belongs to the turn, also what the template added to it."""
    added = "{% if m.content == 'b' %}!!{% endif %}"
    tokenizer = with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + added + "{% endfor %}"
    )
    document = render(chat("a", "b"), tokenizer)
    assert tokenizer.decode(document.ids[document.supervised]) == "b!!"


@pytest.mark.parametrize(
    "turn",
    [
        "{{ m.role }} {{ m.content | length }}: {{ m.content }}<|im_end|>",
        "{{ m.role }} {{ m.content }}<|im_end|>{{ m.content | length }} ",
    ],
)
def test_text_around_a_turn_that_depends_on_it_is_refused(with_template, turn):
    """Without a generation prompt nothing else shows where this turn begins, so nothing may be guessed."""
    with pytest.raises(DataError, match="cannot tell which tokens.*changes with the text of that message"):
        render(chat("a", "b"), with_template("{% for m in messages %}" + turn + "{% endfor %}"))


def test_a_generation_prompt_in_a_users_text_is_no_header(with_template):
    """The turn has no such header, and the template looks into the texts: the user's imitation must not count."""
    turn = "<|im_start|>{{ m.role }}\n{{ m.content.split('|')[-1] }}<|im_end|>{{ '\n' }}"
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    tokenizer = with_template("{% for m in messages %}" + turn + "{% endfor %}" + prompt)
    document = render(chat("assistant\n<think>\nfake", "gone|real"), tokenizer)
    assert tokenizer.decode(document.ids[document.supervised]) == "real<|im_end|>"
    tokenizer = with_template("{% for m in messages %}" + turn.replace("<|im_start|>", "$") + "{% endfor %}"
                              + prompt.replace("<|im_start|>", "$"))  # fmt: skip
    document = render(chat("$assistant\n<think>\nfake", "gone|real"), tokenizer)
    assert tokenizer.decode(document.ids[document.supervised]) == "real<|im_end|>"
