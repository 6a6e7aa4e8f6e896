"""`show`: each token in the colour of its class, boundaries drawn, counts exact, text escaped."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import torch

from moekit.data.batch import Batch
from moekit.errors import DataError
from moekit.viz.show import show

WORDS = {0: "<pad>", 1: "<b>", 2: "</s>", 3: " a&b", 4: " it", 5: " is", 6: "\n", 7: " 42", 8: " x"}
TAGS = {"b": "supervised", "span": "context", "s": "filtered", "i": "padding"}


class Tokenizer:
    """The part of a tokenizer that `show` uses."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        assert len(ids) == 1 and not skip_special_tokens
        return WORDS[ids[0]]


def make() -> Batch:
    """Row 0: prompt [1, 3, 4], answer [5, 7, 2], then a filtered document [8, 8], two of padding.

    Row 1: a shared prompt [1, 3], two children that start with the prompt's last token 4, then padding.
    """
    ids = torch.tensor([[1, 3, 4, 5, 7, 2, 8, 8, 0, 0], [1, 3, 4, 5, 2, 4, 7, 2, 0, 0]])
    no = -100
    labels = torch.tensor([[no, no, 5, 7, 2, no, 8, no, no, no], [no, no, 5, 2, no, 7, 2, no, no, no]])
    segment = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1, -1, -1], [0, 0, 1, 1, 1, 2, 2, 2, -1, -1]])
    parent = torch.full_like(ids, -1)
    parent[1, 2:8] = 0
    filtered = torch.zeros_like(ids, dtype=torch.bool)
    filtered[0, 6:8] = True
    return Batch.make(ids, labels=labels, segment=segment, parent=parent, filtered=filtered, removed=1)


class Tokens(HTMLParser):
    """(class, title, text) of every drawn token, in order, and the document marks."""

    def __init__(self, page: str):
        super().__init__()
        self.tokens, self.marks, self._open, self._rows = [], [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self._rows = self._rows or attrs.get("class") == "t"
        self._open.append((tag, attrs))

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag, "tags are not nested"

    def handle_data(self, data):
        if not self._rows:
            return
        attrs = self._open[-1][1]
        if (attrs.get("class") or "").startswith("d"):
            self.marks.append((data, attrs["title"]))
        elif re.match(r"\d+: ", attrs.get("title") or ""):
            self.tokens.append((TAGS[self._open[-2][0]], attrs["title"], data))


def test_counts_are_by_the_position_that_predicts() -> None:
    shown = show(make(), Tokenizer())
    assert shown.counts == {"supervised": 7, "context": 7, "filtered": 2, "padding": 4}
    assert sum(shown.counts.values()) == 20 and shown.documents == 5 and shown.misplaced == 0


def test_every_token_has_the_colour_of_its_class() -> None:
    s, c, f = "supervised", "context", "filtered"
    tokens = Tokens(show(make(), Tokenizer())._repr_html_()).tokens
    assert [k for k, _, _ in tokens] == [c, c, s, s, s, c, f, f] + [c, c, s, s, c, s, s, c]
    assert [t for _, _, t in tokens] == [WORDS[i] for i in [1, 3, 4, 5, 7, 2, 8, 8, 1, 3, 4, 5, 2, 4, 7, 2]]
    assert tokens[2][1] == "2: 4 → 5" and tokens[5][1] == "5: 2"  # position, id, and the target where there is one


def test_boundaries_sharing_and_padding_are_drawn() -> None:
    page = show(make(), Tokenizer())._repr_html_()
    assert Tokens(page).marks == [
        ("0", "document 0"),
        ("1", "document 1"),
        ("0", "document 0"),
        ("1 ↳ 0", "document 1, continues the prompt of document 0"),
        ("2 ↳ 0", "document 2, continues the prompt of document 0"),
    ]
    assert page.count("padding ×2") == 2
    assert "2 documents share 2 prompt positions" in page
    interleaved = Batch.make(torch.tensor([[1, 3, 4, 5]]), segment=torch.tensor([[0, 1, 0, 1]]))
    assert [m for m, _ in Tokens(show(interleaved)._repr_html_()).marks] == ["0", "1", "0 …", "1 …"]


def test_html_is_escaped_and_white_space_is_seen() -> None:
    batch = Batch.make(torch.tensor([[1, 3, 6, 2]]))
    page = show(batch, Tokenizer())._repr_html_()
    assert ">&lt;b&gt;</span>" in page and " a&amp;b" in page and "↵\n" in page
    assert not re.search(r"<script|<img", show(batch, lambda i: "<script>1</script><img onerror=1>")._repr_html_())


def test_plain_text_says_the_same_without_colour_codes() -> None:
    text = repr(show(make(), Tokenizer()))
    assert "|0| <b> a&b⟦ it is 42⟧</s>" in text and "|1| ~ x x~" in text and "|2 ↳ 0| ⟦ it 42⟧</s>" in text
    assert re.search(r"supervised⟧? +7 \(35 %\)", text) and "\x1b" not in text


def test_rows_are_chosen_and_limits_are_said() -> None:
    batch = make()
    one = show(batch, rows=[1], max_positions=3)
    assert list(one.rows) == [1] and one.counts == {"supervised": 4, "context": 4, "filtered": 0, "padding": 2}
    assert "5 more positions" in one._repr_html_() and "1 4 " not in repr(one)
    many = Batch.join([batch] * 10)
    shown = show(many)
    assert len(shown.rows) == 8 and shown.counts["supervised"] == 70
    assert "8 of 20 rows drawn" in repr(shown)


def test_labels_that_are_not_the_next_token_are_pointed_at() -> None:
    """The mistakes of BC-001, seen before training: labels that were not shifted, or shifted twice."""
    ids = torch.tensor([[10, 11, 12, 20, 21, 2]])
    for labels in ([-100, -100, -100, 20, 21, 2], [-100, 20, 21, 2, -100, -100]):
        shown = show(Batch.make(ids, labels=torch.tensor([labels])))
        assert shown.misplaced == 3 and "3 labels are not the next token" in shown._repr_html_()
    right = show(Batch.make(ids, labels=torch.tensor([[-100, -100, 20, 21, 2, -100]])))
    assert right.misplaced == 0 and "WARNING" not in repr(right)


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(DataError, match="not a list"):
        show([1, 2])
    with pytest.raises(DataError, match="row 2 is not in the batch, which has rows 0 to 1"):
        show(make(), rows=[2])
    assert show(make().empty()).counts == dict.fromkeys(("supervised", "context", "filtered", "padding"), 0)


def test_a_long_batch_stays_small_enough_for_a_notebook() -> None:
    batch = Batch.make(torch.randint(0, 9, (16, 4096)))
    assert len(show(batch, Tokenizer())._repr_html_()) < 1_000_000
