"""Bytes saved for the backward, against sizes known beforehand."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from moekit.measure.memory import saved_bytes


def test_known_sizes():
    x = torch.ones(8, 4, requires_grad=True)
    w = nn.Parameter(torch.ones(4, 6))
    with saved_bytes() as saved:
        y = x @ w  # saves x: 128 bytes, and w, a parameter
        z = y.exp()  # saves its result: 8 x 6 x 4
    assert saved.bytes == 128 + 192
    assert z.sum() > 0


def test_one_storage_counts_once_and_whole():
    base = torch.ones(100, 10, requires_grad=True) * 1.0
    with saved_bytes() as saved:
        a = base[:2] * base[:2]  # two views of one storage of 4000 bytes
        b = base[5:7] * base[0:2]
    assert saved.bytes == 4000 and saved.tensors == 4
    assert (a + b).shape == (2, 10)


def test_freed_memory_is_not_taken_for_a_known_storage():
    """The same address given out again is another storage: what was released still counts, and so does the new one."""
    with saved_bytes() as saved:
        for _ in range(5):
            x = torch.ones(1000, requires_grad=True)
            (x * x).sum().backward()
            del x
    assert saved.bytes == 5 * 4000
    gc.collect()
    assert saved.live == 0


def test_live_goes_down_with_the_backward():
    x = torch.ones(1000, requires_grad=True)
    with saved_bytes() as saved:
        y = x.exp()
        z = y.exp()
        del y
    assert saved.bytes == saved.live == 8000
    z.sum().backward()
    del z
    assert saved.live == 0


def test_gradients_are_unchanged_and_no_cycle_is_left():
    x = torch.linspace(0, 1, 5, requires_grad=True)
    with saved_bytes():
        y = x.sigmoid()
    (g,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(g, y.detach() * (1 - y.detach()))
    gone = weakref.ref(y)
    gc.disable()
    try:
        del y
        assert gone() is None, "the graph keeps its own output alive"
    finally:
        gc.enable()


def test_parameters_of_a_model_are_left_out(small):
    made, flat = small.model(), small.batch().flat
    with saved_bytes(made) as saved:
        out = made(flat)
    weights = sum(p.numel() * 4 for p in made.parameters())
    assert 0 < saved.bytes < weights * 40
    with saved_bytes() as whole:
        again = made(flat)
    assert whole.bytes >= saved.bytes and torch.equal(out.logprob_M, again.logprob_M)


def test_buffers_and_detached_weights_of_the_model_are_left_out():
    """x * buffer saves the buffer and x; x * weight.detach() saves the weight's storage: neither is an activation."""
    made = nn.Module()
    made.weight = nn.Parameter(torch.ones(50))
    made.register_buffer("scale", torch.full((50,), 2.0))
    x = torch.ones(50, requires_grad=True)
    with saved_bytes(made) as saved:
        y = x * made.scale + x * made.weight.detach()
    assert saved.bytes == 0
    with saved_bytes() as saved:
        z = x * made.scale + x * made.weight.detach()
    assert saved.bytes == 400 and torch.equal(y, z)


def test_eliding_padding_saves_memory(small):
    """The baseline keeps expert activations of padding: 9 of 40 positions here."""
    made, flat = small.model(), small.batch().flat
    sizes = {}
    for elide in ("none", "padding", "padding+last_layer"):
        with saved_bytes(made) as saved:
            out = made(flat, elide=elide)
        sizes[elide] = saved.bytes
        del out
    assert sizes["none"] > sizes["padding"] > sizes["padding+last_layer"]
