"""Rows: nothing lost, nothing twice, every label the next token of its own document; and the public cases."""

import time
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from moekit.config import DataConfig, FilterConfig
from moekit.data.batch import FILTERED, Batch
from moekit.data.chat import Document
from moekit.data.pack import best_fit_decreasing, build_rows, check_vocabulary, interleave
from moekit.errors import ConfigError, DataError


def document(ids, mask=None, index=0):
    return Document(ids, [True] * len(ids) if mask is None else mask, "test", index)


def random_documents(rng, count, longest, vocab=10**6):
    """Uneven documents, some fully supervised, some not at all; ids are all different within a document."""
    out = []
    for i in range(count):
        n = int(rng.integers(1, longest + 1))
        mask = rng.random(n) < rng.choice([0.0, 0.3, 1.0])
        out.append(Document(rng.choice(vocab, n, replace=False), mask, "random", i))
    return out


def padded(length, **settings):
    return DataConfig(length=length, rows="padded", **settings)


# --- public cases -----------------------------------------------------------------------------------------------


def test_bc_001_exactly_one_shift():
    """BC-001: a loss on logits that predict the next token is 0, on logits that copy it is 50."""
    ids = [10, 11, 12, 20, 21, 2]
    ours = build_rows([document(ids, [0, 0, 0, 1, 1, 1])], padded(6)).batch()
    derived = Batch.make(torch.tensor([ids]))  # labels derived from the ids: also shifted once, but all of them
    assert ours.labels.tolist() == [[-100, -100, 20, 21, 2, -100]]
    assert derived.labels.tolist() == [[11, 12, 20, 21, 2, -100]]
    follow = torch.full((6, 32), 0.0).scatter(1, torch.tensor([*ids[1:], 0])[:, None], 50.0)
    copy = torch.full((6, 32), 0.0).scatter(1, torch.tensor(ids)[:, None], 50.0)
    for batch, count in ((ours, 3), (derived, 5)):
        assert int((batch.labels != -100).sum()) == count
        assert F.cross_entropy(follow, batch.labels[0]) < 1e-6
        assert abs(F.cross_entropy(copy, batch.labels[0]) - 50) < 1e-6
        assert batch.flat.label_M.tolist() == [t for t in batch.labels[0].tolist() if t != -100]


@pytest.mark.parametrize("pad", [2, 0])
def test_bc_002_padding_is_by_place(pad):
    """BC-002: with pad == eos the true end token stays a target, and pads are none."""
    rows = build_rows([document([5, 6, 7, 2], [0, 0, 1, 1])], padded(6), pad_id=pad)
    batch = rows.batch()
    assert batch.input_ids.tolist() == [[5, 6, 7, 2, pad, pad]]
    assert batch.labels.tolist() == [[-100, 7, 2, -100, -100, -100]]  # unshifted: [-100, -100, 7, 2, -100, -100]
    assert batch.segment.tolist() == [[0, 0, 0, 0, -1, -1]]
    assert rows.report.counts["supervised"] == 2


def test_bc_005_truncation_keeps_a_prefix():
    """BC-005: a cut in the middle of an answer keeps the ids and the mask up to there, and invents no end token."""
    ids, mask = [1, 11, 3, 2, 12, 13, 14, 3], [0, 0, 0, 0, 1, 1, 1, 1]
    rows = build_rows([document(ids, mask)], padded(6))
    batch = rows.batch()
    assert batch.input_ids.tolist() == [[1, 11, 3, 2, 12, 13]]
    assert batch.labels.tolist() == [[-100, -100, -100, 12, 13, -100]]
    assert rows.report.counts["truncated"] == 1 and rows.report.counts["targets_lost"] == 2
    assert rows.report.select("truncated")[0][1:] == (0, "truncated", "6 of 8 tokens kept")


def test_bc_008_answers_cut_off_leave_no_row():
    """BC-008: a document without a target after the cut is left out and counted; the others' mean stays theirs."""
    a = document([1, 2, 3, 4, 5, 6, 7, 8], [0] * 6 + [1] * 2, index=0)
    b = document([1, 2, 3, 4], [0, 1, 1, 1], index=1)
    rows = build_rows([a, b], padded(5))
    assert rows.report.counts["rows_without_target"] == 1
    assert rows.report.select("rows_without_target")[0].index == 0
    losses = torch.tensor([[1.0, 2.0, 3.0, float("nan"), float("nan")]])
    kept = losses[rows.batch().labels != -100]
    assert len(kept) == 3 and kept.mean() == 2.0


def test_bc_010_keeping_the_end_goes_by_each_length():
    """BC-010: of lengths 8 and 3, keeping the last 5 leaves 5 and 3 real tokens."""
    rows = build_rows([document(range(1, 9)), document([1, 2, 3])], padded(5, keep="end"), pad_id=0)
    batch = rows.batch()
    assert (batch.segment >= 0).sum(1).tolist() == [5, 3]
    assert batch.input_ids.tolist() == [[4, 5, 6, 7, 8], [1, 2, 3, 0, 0]]


def test_bc_023_no_label_crosses_documents():
    """BC-023: two packed documents of three tokens have 2 + 2 targets; their losses add up to the unpacked ones."""
    documents = [document([5, 6, 2]), document([7, 8, 2])]
    packed = build_rows(documents, DataConfig(length=6)).batch()
    assert packed.labels.tolist() == [[6, 2, -100, 8, 2, -100]]
    assert torch.equal(Batch.make(packed.input_ids, segment=packed.segment).labels, packed.labels)  # derived ones
    logits = torch.randn(10, 10, generator=torch.Generator().manual_seed(0))  # of any model that reads one token
    together, apart = (
        F.cross_entropy(logits[b.input_ids].flatten(0, 1), b.labels.flatten(), reduction="sum")
        for b in (packed, build_rows(documents, padded(3)).batch())
    )
    assert torch.allclose(together, apart)


def test_bc_024_positions_start_again():
    """BC-024: every document has the positions it has when alone."""
    batch = build_rows([document([5, 6, 2]), document([7, 2])], DataConfig(length=6)).batch()
    assert batch.position[0, :5].tolist() == [0, 1, 2, 0, 1]
    assert [(r.start, r.length, r.documents) for r in batch.flat.runs] == [(0, 3, 1), (3, 2, 1)]


def test_bc_026_the_separator_closes_its_document():
    """BC-026: the end token belongs to the document that it ends; a document without one still ends with its row."""
    batch = build_rows([document([5, 6, 2]), document([7, 8, 2])], DataConfig(length=8), pad_id=0).batch()
    assert batch.input_ids.tolist() == [[5, 6, 2, 7, 8, 2, 0, 0]]
    assert batch.segment.tolist() == [[0, 0, 0, 1, 1, 1, -1, -1]]
    assert batch.flat.runs[0].documents == 2 and batch.flat.runs[0].length == 3 and batch.flat.real == 6
    unclosed = build_rows([document([5, 6, 2, 9]), document([7, 8, 2, 9])], DataConfig(length=4)).batch()
    assert unclosed.segment.tolist() == [[0] * 4] * 2


# --- properties over random documents ------------------------------------------------------------------------------


def read_back(rows):
    """Every piece of every row, from the batch alone: (ids, {place in the piece: label})."""
    batch = rows.batch()
    for r in range(batch.rows):
        ids, label, segment = batch.input_ids[r], batch.labels[r], batch.segment[r]
        for s in range(int(segment.max()) + 1):
            at = torch.nonzero(segment == s).flatten()
            assert batch.position[r, at].tolist() == list(range(len(at)))
            yield r, s, ids[at].tolist(), label[at].tolist()
        pads = segment < 0
        assert (label[pads] == -100).all() and (ids[pads] == rows.pad_id).all()


@pytest.mark.parametrize("over_long", ["truncate", "split", "drop"])
@pytest.mark.parametrize("kind", ["padded", "packed", "interleaved"])
def test_nothing_lost_and_labels_are_the_own_next_token(kind, over_long):
    rng = np.random.default_rng(7)
    for trial in range(8):
        documents = random_documents(rng, 40, 60)
        config = DataConfig(length=48, rows=kind, over_long=over_long, documents_per_row=3, chunks_per_document=4)
        limit = 16 if kind == "interleaved" else 48
        want = Counter()  # every piece that must be there, by a slow definition
        lost = 0
        for d in documents:
            n = len(d)
            cuts = {"truncate": [(0, min(n, limit))], "drop": [(0, n)] * (n <= limit),
                    "split": [(at, min(at + limit, n)) for at in range(0, n, limit)]}[over_long]  # fmt: skip
            lost += int(d.supervised[1:].sum())
            for a, b in cuts:
                labels = [int(d.ids[i + 1]) if i + 1 < b and d.supervised[i + 1] else -100 for i in range(a, b)]
                targets = sum(t != -100 for t in labels)
                lost -= targets
                if targets:
                    want[(tuple(d.ids[a:b].tolist()), tuple(labels), d.index)] += 1
        rows = build_rows(documents, config, pad_id=trial)
        got = Counter()
        for r, s, ids, labels in read_back(rows):
            got[(tuple(ids), tuple(labels), rows.documents(r)[s][1])] += 1
        assert got == want
        counts = rows.report.counts
        assert counts["tokens"] == sum(len(k[0]) * n for k, n in want.items()) == int(rows.tokens_R.sum())
        assert counts["tokens"] + counts["padding"] == len(rows) * 48
        assert counts["pieces"] == sum(want.values()) and counts["targets_lost"] == lost
        assert counts["supervised"] == int((rows.batch().labels != -100).sum())
        long = sum(len(d) > limit for d in documents)
        assert (
            len(rows.report.select({"truncate": "truncated", "split": "split", "drop": "dropped"}[over_long])) == long
        )


def test_flat_view_of_interleaved_rows_is_document_order():
    """Chunks of two documents take turns; seen flat each document is whole again."""
    config = DataConfig(length=12, rows="interleaved", documents_per_row=2, chunks_per_document=3)
    batch = build_rows([document([1, 2, 3, 4, 5]), document([11, 12, 13])], config, pad_id=0).batch()
    assert batch.input_ids.tolist() == [[1, 2, 11, 3, 4, 12, 5, 13, 0, 0, 0, 0]]
    assert batch.labels.tolist() == [[2, 3, 12, 4, 5, 13, -100, -100, -100, -100, -100, -100]]
    assert batch.flat.ids_N[:8].tolist() == [1, 2, 3, 4, 5, 11, 12, 13]


def test_interleave_places_are_a_permutation():
    rng = np.random.default_rng(3)
    for _ in range(50):
        sizes, chunks = rng.integers(1, 20, rng.integers(1, 6)), int(rng.integers(1, 7))
        places = interleave(sizes, chunks)
        assert sorted(places.tolist()) == list(range(sizes.sum()))
        for own in np.split(places, np.cumsum(sizes)[:-1]):
            assert (np.diff(own) > 0).all()  # a document's tokens stay in order


def test_best_fit_decreasing_against_the_plain_algorithm():
    rng = np.random.default_rng(5)
    for _ in range(30):
        capacity = int(rng.integers(5, 40))
        sizes = rng.integers(1, capacity + 1, rng.integers(1, 80))
        free: list[int] = []
        for size in sorted(sizes.tolist(), reverse=True):
            fits = [r for r, f in enumerate(free) if f >= size]
            if fits:
                free[min(fits, key=lambda r: free[r])] -= size
            else:
                free.append(capacity - size)
        row = best_fit_decreasing(sizes, capacity)
        filled = np.bincount(row, weights=sizes)
        assert (filled <= capacity).all() and set(row.tolist()) == set(range(len(filled)))
        assert sorted((capacity - filled).astype(int).tolist()) == sorted(free)


def test_a_hundred_thousand_documents_pack_in_seconds():
    rng = np.random.default_rng(0)
    sizes = np.minimum(rng.lognormal(4, 1, 100_000).astype(int) + 2, 600)
    ids = np.zeros(600, np.int32)
    documents = [Document(ids[:n], ids[:n] == 0) for n in sizes.tolist()]
    start = time.process_time()
    rows = build_rows(documents, DataConfig(length=512))
    assert time.process_time() - start < 8  # under 1 s on a quiet core
    assert rows.report.counts["padding"] < 0.01 * rows.report.counts["tokens"]


def test_any_selection_of_rows():
    rng = np.random.default_rng(2)
    rows = build_rows(random_documents(rng, 50, 20), DataConfig(length=32))
    every = rows.batch()
    some = rows.batch([3, 0, 3])
    assert torch.equal(some.input_ids, every.input_ids[[3, 0, 3]]) and torch.equal(some.labels, every.labels[[3, 0, 3]])
    none = rows.batch([])
    assert none.rows == 0 and none.length == 32 and none.flat.real == 0
    with pytest.raises(DataError, match=f"row {len(rows)} does not exist"):
        rows.batch([len(rows)])


# --- the instance filter --------------------------------------------------------------------------------------------

LOOP = [9] * 32


def test_filter_judges_documents_of_padded_rows():
    rows = build_rows([document([1, 2, 3]), document([1, *LOOP, 2])], padded(40, filter=FilterConfig()), pad_id=7)
    batch = rows.batch()
    assert batch.removed == 1 and rows.removed_R.tolist() == [0, 1]
    assert batch.labels[1].eq(-100).all() and batch.labels[0, :2].tolist() == [2, 3]
    assert batch.filtered[1].tolist() == [True] * 34 + [False] * 6
    assert (batch.classes == FILTERED).sum() == 34
    assert rows.batch([0]).removed == 0 and rows.batch([1, 1]).removed == 2
    assert rows.report.counts["filtered"] == 1 and rows.report.counts["targets_filtered"] == 33
    assert rows.report.counts["supervised"] == 2 and len(rows.report.select("filtered")) == 1


def test_filter_sees_no_padding():
    """A long run of pads is a pattern of period 1; real tokens alone are judged."""
    rows = build_rows([document([9, 9, 9])], padded(200, filter=FilterConfig()), pad_id=9)
    assert rows.batch().removed == 0
    rows = build_rows([document([9, 9, 9])], DataConfig(length=200, filter=FilterConfig()), pad_id=9)
    assert rows.batch().removed == 0


def test_filter_judges_rows_when_packed():
    """The whole row is one instance: two documents are removed, one instance is counted, and both are listed."""
    documents = [document([1, *LOOP], index=0), document([5, 6], index=1), document(range(100, 135), index=2)]
    rows = build_rows(documents, DataConfig(length=36, filter=FilterConfig()))
    batch = rows.batch()
    assert rows.removed_R.tolist() == [0, 1] and batch.removed == 1
    assert batch.filtered[1].sum() == 35 and not batch.filtered[0].any()
    assert rows.report.counts["filtered"] == 1
    assert [e.index for e in rows.report.select("filtered")] == [0, 1]


def test_filter_on_interleaved_rows_judges_documents_before_interleaving():
    config = DataConfig(
        length=80, rows="interleaved", documents_per_row=2, chunks_per_document=4, filter=FilterConfig()
    )
    rows = build_rows([document(LOOP), document(range(100, 132))], config)
    batch = rows.batch()
    assert batch.removed == 1
    assert batch.filtered[0].tolist() == [s == 0 for s in batch.segment[0].tolist()]


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_nothing_to_learn_is_an_error():
    with pytest.raises(DataError, match="no documents"):
        build_rows([], DataConfig())
    with pytest.raises(DataError, match=r"none of 1 documents.*1 truncated.*test, 4"):
        build_rows([document([1, 2, 3, 4], [0, 0, 0, 1], index=4)], padded(3))


def test_a_mask_of_another_length_is_an_error():
    with pytest.raises(DataError, match="must agree"):
        Document([1, 2, 3], [True])


def test_interleaved_rows_need_room():
    with pytest.raises(DataError, match="documents_per_row=4"):
        build_rows([document([1, 2])], DataConfig(length=7, rows="interleaved"))
    with pytest.raises(ConfigError, match="chunks_per_document=0"):
        DataConfig(chunks_per_document=0)


def test_vocabulary_mismatch_is_named():
    rows = build_rows([document([1, 2, 3], index=0), document([1, 70, 3], index=5)], padded(4), pad_id=0)
    check_vocabulary(rows, 71)
    with pytest.raises(DataError, match=r"vocabulary of 70 \(first: id 70 in test, 5\)"):
        check_vocabulary(rows, 70)
    with pytest.raises(DataError, match="padding id 90"):
        check_vocabulary(build_rows([document([1, 2])], padded(4), pad_id=90), 50)


def test_ignore_index_of_the_config():
    batch = build_rows([document([1, 2, 3])], padded(5, ignore_index=-1)).batch()
    assert batch.labels.tolist() == [[2, 3, -1, -1, -1]] and batch.ignore_index == -1
