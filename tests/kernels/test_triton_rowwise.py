"""Put and get through addresses in Triton's interpreter: the peers' buffers are tensors of this process."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moekit.kernels import rowwise

torch.set_num_threads(1)
W, ROOM = 3, 40


def destinations(R, seed=0):
    """Every row its own place, in no order; every fifth is dropped."""
    g = torch.Generator().manual_seed(seed)
    place = torch.randperm(W * ROOM, generator=g)[:R]
    rank, row = place // ROOM, place % ROOM
    row[::5] = -1
    return rank, row


@pytest.mark.parametrize("dtype, D", [(torch.float32, 33), (torch.bfloat16, 520), (torch.uint8, 1), (torch.float32, 4)])
@pytest.mark.parametrize("R, copies", [(60, 1), (60, 3), (1, 1), (0, 1)])
def test_a_row_is_written_where_it_belongs_and_nowhere_else(R, copies, dtype, D, monkeypatch):
    monkeypatch.setattr(rowwise, "PROGRAMS", 2)  # a program has several turns
    rows = torch.randint(1, 100, (R // copies, D)).to(dtype)
    buffers = [torch.full((ROOM, D), 7).to(dtype) for _ in range(W)]
    want = [b.clone() for b in buffers]
    rank, row = destinations(R)
    for r, (w, at) in enumerate(zip(rank.tolist(), row.tolist())):
        if at >= 0:
            want[w][at] = rows[r // copies]
    peers = torch.tensor([b.data_ptr() for b in buffers])
    rowwise.put(rows, peers, rank, row, copies=copies)
    for found, expected in zip(buffers, want):
        assert torch.equal(found, expected)

    out = torch.full((R, D), 9).to(dtype)
    assert rowwise.get(out, peers, rank, row) is out
    for r, (w, at) in enumerate(zip(rank.tolist(), row.tolist())):
        assert torch.equal(out[r], want[w][at] if at >= 0 else torch.zeros(D, dtype=dtype))


def test_dropped_rows_are_neither_read_nor_sent():
    """A rank out of range and NaN go with a dropped row; what comes back for it is exactly zero."""
    rows, buffer = torch.full((2, 4), torch.nan), torch.zeros(3, 4)
    rows[1] = 5.0
    rank, row = torch.tensor([10**9, 0]), torch.tensor([-1, 2])
    peers = torch.tensor([buffer.data_ptr()])
    rowwise.put(rows, peers, rank, row)
    assert buffer.tolist() == [[0.0] * 4, [0.0] * 4, [5.0] * 4]
    assert rowwise.get(torch.full((2, 4), torch.nan), peers, rank, row).tolist() == [[0.0] * 4, [5.0] * 4]


@pytest.mark.parametrize(
    "rows, rank, row, copies",
    [
        (torch.zeros(2, 4), torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), 1),
        (torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), 1),
        (torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), 2),
        (torch.zeros(2, 4), torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), 1),
        (torch.zeros(4, 2).T, torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), 1),
    ],
)
def test_what_does_not_fit_is_refused_before_a_byte_moves(rows, rank, row, copies):
    with pytest.raises(ValueError, match="rowwise"):
        rowwise.put(rows, torch.zeros(1, dtype=torch.int64), rank, row, copies=copies)
