"""Families in rows: hand-made values, nothing lost, and what is saved is what DESIGN's formula says."""

import pytest
import torch

from moekit.data.batch import Batch
from moekit.data.families import Sample, family_rows, family_size, with_values
from moekit.data.report import Report
from moekit.errors import DataError


def random_samples(seed, count=20, longest=7):
    g = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=g))
    ids = lambda n: torch.randint(1, 50, (n,), generator=g).tolist()
    made = []
    for i in range(count):
        answers = [ids(draw(0 if j % 3 == 2 else 1, longest)) for j in range(draw(1, 6))]
        fields = [{"value": torch.rand(len(a), generator=g)} for a in answers]
        made.append(Sample(ids(draw(1, longest)), answers, fields, "random", i))
    return made


def documents(batch):
    """(family, answer) -> ids, labels, values and positions of the whole sequence, put together from the rows."""
    flat, out = batch.flat, {}
    for row in range(batch.rows):
        parts = {}
        for s in sorted({*batch.segment[row].tolist()} - {-1}):
            parts[s] = batch.segment[row] == s
        for s, where in parts.items():
            answer = batch.extra["answer"][row][where][0].item()
            if answer < 0:
                continue
            up = batch.parent[row][where][0].item()
            both = [parts[up], where] if up >= 0 else [where]
            pick = lambda x, row=row, both=both: torch.cat([x[row][w] for w in both]).tolist()
            family = batch.extra["family"][row][where][0].item()
            assert (family, answer) not in out
            out[family, answer] = [
                pick(x) for x in (batch.input_ids, batch.labels, batch.extra["value"], batch.position)
            ]
    assert len(out) == flat.documents - len({(c.parent_start, c.parent_length) for c in flat.children})
    return out


def test_values_by_hand():
    """A prompt of 3 with answers of 2 and 3, and one of 1 token, which has nothing to share."""
    a = Sample([1, 2, 3], [[7, 0], [8, 9, 0]], [{"v": [0.5, 1.5]}, {"v": [2, 3, 4]}])
    b = Sample([5], [[6], [], [7]], [{"v": [8]}, {"v": []}, {"v": [9]}])
    batch = family_rows([a, b], 13, report=(report := Report()))
    x = -100
    assert batch.input_ids.tolist() == [[1, 2, 3, 7, 0, 3, 8, 9, 0, 5, 6, 5, 7]]
    assert batch.labels.tolist() == [[x, x, 7, 0, x, 8, 9, 0, x, 6, x, 7, x]]
    assert batch.segment.tolist() == [[0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4]]
    assert batch.parent.tolist() == [[-1, -1, 0, 0, 0, 0, 0, 0, 0, -1, -1, -1, -1]]
    assert batch.position.tolist() == [[0, 1, 2, 3, 4, 2, 3, 4, 5, 0, 1, 0, 1]]
    assert batch.extra["v"].tolist() == [[0, 0, 0.5, 1.5, 0, 2, 3, 4, 0, 8, 0, 9, 0]]
    assert batch.extra["family"].tolist() == [[0] * 9 + [1] * 4]
    assert batch.extra["answer"].tolist() == [[-1, -1, 0, 0, 0, 1, 1, 1, 1, 2, 2, 4, 4]]
    assert batch.flat.share_N.tolist() == [2] * 2 + [1] * 11  # two positions serve two children
    assert report.counts["shared"] == (2 - 1) * (3 - 1) == int((batch.flat.share_N - 1).sum())
    assert [e.why for e in report.events] == ["answer 1 is empty"] and report.counts["padding"] == 0
    plain = family_rows([a], 11, share=False, whole=True)
    assert plain.input_ids.tolist() == [[1, 2, 3, 7, 0, 1, 2, 3, 8, 9, 0]]
    assert plain.labels.tolist() == [[x, x, 7, 0, x, x, x, 8, 9, 0, x]] and (plain.parent == -1).all()
    last = family_rows([Sample([1, 2, 3], [[7, 4], [8, 9, 5]], [{"v": [1]}, {"v": [2]}])], 9, labels="last")
    assert last.labels.tolist() == [[x, x, x, x, 4, x, x, x, 5]]
    assert last.extra["v"].tolist() == [[0, 0, 0, 0, 1, 0, 0, 0, 2]]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("share", [False, True])
def test_every_answer_once_in_every_form(share, whole):
    """300 random answers: ids, labels, positions and fields of each, and the count of saved positions."""
    samples, length = random_samples(3, 100), 24
    report = Report()
    batch = family_rows(samples, length, share, whole=whole, report=report)
    found, number, want = documents(batch), 0, {}
    for f, s in enumerate(samples):
        kept = [j for j, a in enumerate(s.answers) if a]
        fits = family_size(len(s.prompt), [len(s.answers[j]) for j in kept], share) <= length
        for j, answer in enumerate(s.answers):
            if answer and (not whole or (fits and len(kept) == len(s.answers))):
                p, x = len(s.prompt), -100
                value = [0.0] * (p - 1) + s.fields[j]["value"].tolist() + [0.0]
                ids, labels = [*s.prompt, *answer], [x] * (p - 1) + answer + [x]
                want[f, number] = [ids, labels, value, list(range(len(ids)))]
            number += 1
    assert found == want and len(want) > 100
    assert report.counts["shared"] == int((batch.flat.share_N - 1).sum()) * (batch.rows > 0)
    assert report.counts["tokens"] + report.counts["padding"] == batch.rows * length
    assert sum(e.reason == "dropped" for e in report.events) == (report.counts["dropped"])
    if whole:
        rows = [{*batch.extra["family"][r].tolist()} - {-1} for r in range(batch.rows)]
        assert sum(map(len, rows)) == len(set().union(*rows))  # a family is in one row
    if share and whole:
        want = sum((len(s.answers) - 1) * (len(s.prompt) - 1) for f, s in enumerate(samples) if f in set().union(*rows))
        assert report.counts["shared"] == want


def test_a_group_that_does_not_fit_is_split_and_repeats_its_prompt():
    group = Sample([1, 2, 3, 4], [[10 + j] * 3 for j in range(5)])
    batch = family_rows([group], 11, report=(report := Report()))  # 3 + 4 + 4: two answers a row
    assert batch.rows == 3 and report.counts["split"] == 1 and report.counts["shared"] == 2 * 3
    assert sorted(batch.extra["answer"].unique().tolist()) == [-1, 0, 1, 2, 3, 4]
    assert family_rows([group], 11, whole=True, report=report).rows == 0
    assert report.events[-1].why == "the family of 23 tokens does not fit in a row of 11"
    assert family_rows([group], 6, report=(report := Report())).rows == 0 and report.counts["dropped"] == 5


def test_values_put_back_at_labels():
    batch = family_rows(random_samples(1, 10), 30)
    again = with_values(batch, "again", batch.flat.at_labels("value"))
    assert torch.equal(again.extra["again"], batch.extra["value"])
    assert "again" not in batch.extra
    wide = family_rows([Sample([1], [[2]], [{"v": torch.ones(1, dtype=torch.float64)}])], 4)
    assert wide.extra["v"].dtype == torch.float64


def test_no_samples_and_bad_ones():
    assert family_rows([], 8).rows == 0
    with pytest.raises(DataError, match="a prompt needs at least one token"):
        family_rows([Sample([], [[1]])], 8)
    with pytest.raises(DataError, match="2 values of 'v' for 1 labels"):
        family_rows([Sample([1], [[2]], [{"v": [1, 2]}])], 8)
    with pytest.raises(DataError, match=r"fields \['w'\], others \['v'\]"):
        family_rows([Sample([1], [[2], [3]], [{"v": [1]}, {"w": [1]}])], 8)
    with pytest.raises(DataError, match="fields of 1 answers, there are 2"):
        family_rows([Sample([1], [[2], [3]], [{"v": [1]}])], 8)


@pytest.mark.parametrize(
    ("parent", "why"),
    [
        ([-1, -1, -1, 0, -1, -1], "position 3: segment 1 has the parents -1 and 0"),
        ([-1, -1, 0, -1, -1, -1], "position 3: segment 1 has the parents 0 and -1"),
        ([-1, -1, 7, 7, -1, -1], "parent segment 7 of segment 1 is not in the row"),
        ([-1, -1, -1, -1, 0, -1], "parent segment 0 of segment -1 is not in the row"),
        ([1, 1, -1, -1, -1, -1], "parent segment 1 must come before its child 0"),
        ([-1, -1, 1, 1, -1, -1], "parent segment 1 of segment 1 is not in the row"),
    ],
)
def test_parents_that_cannot_be_are_refused(parent, why):
    """Of two parents within a segment the attention took the first position's, the positions each their own."""
    with pytest.raises(DataError, match=why):
        Batch.make(torch.zeros(1, 6), segment=torch.tensor([[0, 0, 1, 1, -1, -1]]), parent=torch.tensor([parent]))
    with pytest.raises(DataError, match="one level is allowed"):
        Batch.make(torch.zeros(1, 3), segment=torch.tensor([[0, 1, 2]]), parent=torch.tensor([[-1, 0, 1]]))
