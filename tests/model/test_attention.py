"""Attention by document: against the masked definition, against each document alone, and its gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moekit.data.batch import Batch
from moekit.model.attention import Attention, document_attention, rope_angles

KINDS = ["padded", "packed", "interleaved", "shared", "full"]


def qkv(flat, heads, groups, d=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randn(flat.positions, n, d, generator=g, dtype=torch.float64).requires_grad_()
        for n in (heads, groups, groups)
    ]


def masked_attention(q_NHd, k_NGd, v_NGd, flat):
    """The same as `document_attention` from its definition, with an [N, N] mask."""
    N, H, d = q_NHd.shape
    k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (k_NGd, v_NGd))
    doc, at = flat.document_N, torch.arange(N, device=q_NHd.device)
    parent = torch.where(doc >= 0, flat.parent_S[doc.clamp(min=0)] if flat.documents else -1, -1)
    same = (doc[:, None] == doc) & (doc[:, None] >= 0) & (at[:, None] >= at)
    inherited = (parent[:, None] == doc) & (doc >= 0)
    seen = same | inherited | (at[:, None] == at)
    score = torch.einsum("nhd,mhd->hnm", q_NHd, k) / d**0.5
    return torch.einsum("hnm,mhd->nhd", score.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (3, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_masked_definition(small, kind, heads, groups):
    flat = small.batch(kind).flat
    tensors = qkv(flat, heads, groups)
    got, want = document_attention(*tensors, flat), masked_attention(*tensors, flat)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    dy = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(got, tensors, dy), torch.autograd.grad(want, tensors, dy)):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", ["packed", "shared"])
def test_the_mask_is_the_definition_position_by_position(small, kind):
    """The masked form, against softmax over an explicit list of visible positions in the batch's own order."""
    batch = small.batch(kind)
    flat = batch.flat
    q, k, v = qkv(flat, 2, 2)
    got = flat.to_rows(masked_attention(q, k, v, flat))
    q, k, v = (flat.to_rows(t.detach()) for t in (q, k, v))
    for b in range(batch.rows):
        for t in range(batch.length):
            s, p = int(batch.segment[b, t]), int(batch.parent[b, t])
            seen = [j for j in range(t + 1) if int(batch.segment[b, j]) in ({s} if p < 0 else {s, p})]
            seen = [t] if s < 0 else seen
            for h in range(2):
                weight = (k[b, seen, h] @ q[b, t, h] / 2).softmax(0)
                torch.testing.assert_close(got[b, t, h], weight @ v[b, seen, h], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("qk_norm", ["none", "full", "head"])
def test_gradcheck_of_the_whole_layer(small, qk_norm):
    made = small.model(qk_norm=qk_norm, layers=1, width=8, head_dim=2).layers[0].attention
    batch = small.batch("shared")
    flat, angles = batch.flat, rope_angles(batch.flat.position_N, replace(small.config, head_dim=2), torch.float64)
    x = torch.randn(flat.positions, 8, dtype=torch.float64, requires_grad=True)
    parameters = list(made.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: made(x, flat, angles), (x, *parameters), fast_mode=True)


def test_scores_use_relative_positions_only(small):
    """Rotary: shifting all positions of a document by the same number leaves its attention as it was."""
    made = small.model().layers[0].attention
    batch = Batch.make(torch.zeros(1, 9, dtype=torch.long))
    x = torch.randn(9, 16, dtype=torch.float64)
    a, b = (
        made(x, batch.flat, rope_angles(batch.flat.position_N + shift, small.config, torch.float64))
        for shift in (0, 17)
    )
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_rope_angle_values(small):
    """theta^(-2i/d) with theta 10000 and d 4: rates 1 and 0.01."""
    cos, sin = rope_angles(torch.tensor([0, 3]), small.config, torch.float64)
    want = torch.tensor([[0.0, 0.0], [3.0, 0.03]], dtype=torch.float64)
    torch.testing.assert_close(cos, want.cos())
    torch.testing.assert_close(sin, want.sin())


def test_bc_024_a_packed_document_has_the_positions_it_has_alone():
    """BC-024: lengths 3 and 2 in a row of 6: positions [0,1,2,0,1,*], cumulative lengths [0,3,5]."""
    batch = Batch.make(torch.tensor([[1, 2, 3, 4, 5, 0]]), segment=torch.tensor([[0, 0, 0, 1, 1, -1]]))
    assert batch.position[0, :5].tolist() == [0, 1, 2, 0, 1]
    assert [(r.start, r.start + r.documents * r.length) for r in batch.flat.runs] == [(0, 3), (3, 5)]


def test_bc_026_the_separator_closes_its_document():
    """BC-026: [5,6,2,7,8,2,0,0], eos 2, pad 0: documents [0,0,0,1,1,1,-,-], cumulative lengths [0,3,6].

    Seen by the model: eos attends to its own document's tokens; a document cut at the limit is a document all the same.
    """
    segment = torch.tensor([[0, 0, 0, 1, 1, 1, -1, -1]])
    flat = Batch.make(torch.tensor([[5, 6, 2, 7, 8, 2, 0, 0]]), segment=segment).flat
    assert flat.document_N.tolist() == [0, 0, 0, 1, 1, 1, -1, -1]
    assert [(r.start, r.documents, r.length) for r in flat.runs] == [(0, 2, 3)] and flat.real == 6
    cut = Batch.make(torch.tensor([[5, 6, 2, 7]]), segment=torch.tensor([[0, 0, 0, 1]])).flat
    assert [(r.start, r.documents, r.length) for r in cut.runs] == [(0, 1, 3), (3, 1, 1)] and cut.real == 4


def test_padding_output_is_its_own_value(small):
    flat = small.batch("padded").flat
    q, k, v = qkv(flat, 4, 2)
    got = document_attention(q, k, v, flat)[flat.real :]
    assert torch.equal(got, v[flat.real :].repeat_interleave(2, 1))


def test_heads_of_a_group_share_keys_in_order(small):
    """Grouped queries: heads 0 and 1 use key/value head 0, heads 2 and 3 use head 1."""
    assert isinstance(small.model().layers[0].attention, Attention)
    flat = small.batch("full").flat
    q, k, v = qkv(flat, 4, 2)
    got = document_attention(q, k, v, flat)
    for h in range(4):
        alone = document_attention(q[:, h : h + 1], k[:, h // 2 : h // 2 + 1], v[:, h // 2 : h // 2 + 1], flat)
        torch.testing.assert_close(got[:, h : h + 1], alone, rtol=1e-12, atol=1e-12)
