"""A shared prompt is the unshared one: DESIGN 4, "Equal", for DPO pairs on every kind of layout (`sharing.py`)."""

import functools
import importlib.util
import pickle
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from forked import run_ranks

from moekit.learner.mesh import World

HERE = Path(__file__).parent / "sharing.py"
spec = importlib.util.spec_from_file_location("sharing", HERE)
sharing = importlib.util.module_from_spec(spec)
sys.modules["sharing"] = sharing  # dataclasses look their module up
spec.loader.exec_module(sharing)
CASES = sharing.CASES
PLAIN = {torch.float64: "1, unshared, one microbatch", torch.float32: "1, unshared, float32"}
ROUTING_LAYERS, TOP_K = 3, 2


@functools.cache
def world(size: int) -> list[dict]:
    """Results of every case of that many ranks: one start of processes a world size."""
    if size == 1:
        return [{n: c.run(World()) for n, c in CASES.items() if c.world == 1}]
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(HERE, [(r, size, folder) for r in range(size)], timeout=250) == [0] * size
        return [pickle.loads(Path(folder, f"rank_{r}.pkl").read_bytes()) for r in range(size)]


def difference(a: dict, b: dict) -> float:
    """max over tensors of |a - b| / |b|; where b is zero, a must be exactly zero."""
    assert a.keys() == b.keys()
    worst = 0.0
    for name, value in a.items():
        want = b[name].double()
        if want.norm() == 0:
            assert not value.any(), name
        else:
            worst = max(worst, float((value.double() - want).norm() / want.norm()))
    return worst


def test_the_fixture_is_not_symmetric():
    """One expert without rows, one with more than half of the positions, clipping and router losses active."""
    r = world(1)[0][PLAIN[torch.float64]]
    count_LE = r["decided"][:, :3].sum(1)
    assert (count_LE[:, -1] == 0).all() and (count_LE[:, 0] > count_LE.sum(1) / TOP_K / 2).all()
    assert r["grad/clipped"] == 1.0 and r["loss/balance"] > 0 and r["loss/z"] > 0
    assert abs(r["dpo/margin"]) > 1e-3 and 0 < r["dpo/accuracy"] < 1


def named(names):
    """As parameters; four processes are left to the long run."""
    return [pytest.param(n, marks=pytest.mark.long) if CASES[n].world > 2 else n for n in names]


@pytest.mark.parametrize("name", named(n for n in CASES if n not in PLAIN.values()))
def test_shared_equals_unshared_on_every_layout(name):
    case = CASES[name]
    exact = case.dtype == torch.float64
    want, tolerance = world(1)[0][PLAIN[case.dtype]], 1e-9 if exact else 1e-4
    pairs = sharing.pairs(case.share).pairs
    saved = sum(len(p.prompt) - 1 for p in pairs) * case.share  # (G - 1)(P - 1) with G = 2
    for got in (rank[name] for rank in world(case.world)):
        assert difference(got["gradient"], want["gradient"]) <= tolerance
        for key, value in want.items():
            if key.startswith(("dpo/", "loss/", "load", "grad/norm")):
                assert got[key] == pytest.approx(value, rel=tolerance, abs=tolerance), key
        if exact:  # three steps of AdamW, decay, clipping and the moving selection bias
            assert difference(got["parameters"], want["parameters"]) <= tolerance
            assert got["last"]["loss/dpo"] == pytest.approx(want["last"]["loss/dpo"], rel=tolerance)
        # router statistics count a shared position once per child; rows are the work that was done
        assert torch.equal(got["decided"][:, :3], want["decided"][:, :3])
        assert got["tokens/supervised"] == want["tokens/supervised"]
        assert got["tokens/context"] == want["tokens/context"] - saved
        assert got["rows/shared"] == saved * TOP_K * ROUTING_LAYERS
        if case.config.get("elide") is None:
            assert got["rows/dispatched"] + got["rows/shared"] == want["rows/dispatched"]
            assert got["rows/backward"] == got["rows/dispatched"]
    assert bool(saved) == case.share


@pytest.mark.parametrize("name", named(n for n, c in CASES.items() if c.world > 1))
def test_ranks_hold_the_same_bits(name):
    first, *others = (rank[name]["parameters"] for rank in world(CASES[name].world))
    assert all(torch.equal(first[n], o[n]) for o in others for n in first)
