"""Sampled answers drawn: every token with its probability, experts and version, in HTML and in text."""

from __future__ import annotations

import pytest
import torch

import moekit
from moekit.errors import ConfigError
from moekit.rollout.engine import Answer, Rollout
from moekit.viz.answers import draw_answers

ROLLOUT = Rollout(
    [5, 6], None,
    [Answer([7, 2], torch.tensor([0.5, 0.25]).log(), torch.tensor([[[3, 1], [0, 2]], [[-1, -1], [-1, -1]]]),
            torch.tensor([4, 5]), "stop")],
)  # fmt: skip


class Words:
    """A tokenizer of few words, one of which is markup."""

    def decode(self, ids, **_):
        return "".join({5: "a", 6: "b ", 7: "<i>x", 2: "<end>"}[i] for i in ids)


def test_a_token_shows_log_prob_experts_and_version():
    drawn = draw_answers(ROLLOUT, Words())
    assert drawn.texts == ("<i>x<end>",) and drawn.prompt == "ab "
    ((facts, tokens),) = drawn.drawn
    assert facts == "answer 0: 2 tokens, stop, log-prob -2.079"
    assert [(t, round(p, 6)) for t, p, _ in tokens] == [("<i>x", 0.5), ("<end>", 0.25)]
    assert tokens[0][2] == "id 7, log-prob -0.693, version 4, experts 3 1 | 0 2"
    assert tokens[1][2] == "id 2, log-prob -1.386, version 5, experts not read"
    assert all(words in repr(drawn) for _, _, words in tokens)
    html = drawn._repr_html_()
    assert "&lt;i&gt;x" in html and "<i>" not in html and "experts 3 1 | 0 2" in html


def test_generate_in_a_cell():
    model = moekit.Transformer(moekit.ModelConfig(50, 16, 2, 2, 4, 2, 8))
    shown = moekit.generate(model, [5, 6, 7], n=3, max_new_tokens=4, seed=2)
    again = moekit.generate(model, [5, 6, 7], n=3, max_new_tokens=4, seed=2)
    assert [a.ids for a in shown.rollout.answers] == [a.ids for a in again.rollout.answers]
    assert len({tuple(a.ids) for a in shown.rollout.answers}) == 3 and len(shown.drawn) == 3
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        moekit.generate(model, "hello")
