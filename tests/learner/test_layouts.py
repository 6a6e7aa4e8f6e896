"""One gradient, whatever the ranks and microbatches: DESIGN 4, "Equal", with its unsymmetric fixture."""

import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moekit.learner.mesh import World

HERE = Path(__file__).parent / "layouts.py"
spec = importlib.util.spec_from_file_location("layouts", HERE)
layouts = importlib.util.module_from_spec(spec)
spec.loader.exec_module(layouts)


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


@pytest.fixture(scope="module")
def one():
    """One process, one microbatch, in both dtypes and with each setting that changes the mathematics."""
    c = layouts.CASES
    torch.manual_seed(0)
    plain = {d: layouts.run(World(), d, rows=8) for d in (torch.float64, torch.float32)}
    return {
        **{n: plain[case["dtype"]] for n, case in c.items()},
        "float64, sequence mean": layouts.run(World(), torch.float64, rows=8, denominator="sequence_mean"),
        "float64, one microbatch a rank, microbatch balance": layouts.run(
            World(), **c["float64, one microbatch a rank, microbatch balance"]
        ),
    }


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Results of every case on 1, 2 and 4 gloo processes: one start of processes a world size."""
    out = {1: [{n: layouts.run(World(), **case) for n, case in layouts.CASES.items()}]}
    for size in (2, 4):
        folder = tmp_path_factory.mktemp(f"world{size}")
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen([sys.executable, HERE, str(r), str(size), folder], env=env) for r in range(size)]
        assert [p.wait(timeout=240) for p in ranks] == [0] * size
        out[size] = [pickle.loads((folder / f"rank_{r}.pkl").read_bytes()) for r in range(size)]
    return out


def test_the_fixture_is_not_symmetric():
    """One expert without rows, one with more than half, a rank without labels, clipping active."""
    r = layouts.run(World(), torch.float64, rows=8, steps=1)
    count_LE = r["decided"][:, :3].sum(1)
    assert (count_LE[:, -1] == 0).all() and (count_LE[:, 0] > count_LE.sum(1) / 2).all()
    assert r["grad/clipped"] == 1.0 and r["loss/balance"] > 0 and r["loss/z"] > 0
    assert layouts.take(layouts.batch(), 1, 2).flat.label_index_M.numel() == 0
    assert all(float(g.norm()) > 0 for n, g in r["gradient"].items())


@pytest.mark.parametrize("case", layouts.CASES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_one_gradient_in_every_layout(one, worlds, size, case):
    want, tolerance = one[case], 1e-9 if "float64" in case else 1e-5
    for got in (rank[case] for rank in worlds[size]):
        assert difference(got["gradient"], want["gradient"]) <= tolerance
        assert torch.equal(got["decided"], want["decided"])
        assert got["loss/sft"] == pytest.approx(want["loss/sft"], rel=tolerance)
        assert got["loss/balance"] == pytest.approx(want["loss/balance"], rel=tolerance)
        assert got["loss/z"] == pytest.approx(want["loss/z"], rel=tolerance)
        assert got["grad/norm"] == pytest.approx(want["grad/norm"], rel=tolerance)
        if "float64" in case:  # three steps of AdamW, decay, clipping and the moving selection bias
            assert difference(got["parameters"], want["parameters"]) <= tolerance
        assert difference(got["bias"], want["bias"]) == 0.0
        for key in ("tokens/supervised", "tokens/padding"):
            assert got[key] == want[key]


def test_ranks_hold_the_same_bits(worlds):
    for size in (2, 4):
        for case in layouts.CASES:
            first, *others = (rank[case]["parameters"] for rank in worlds[size])
            assert all(torch.equal(first[n], o[n]) for o in others for n in first)


def test_bc_013_a_rank_without_labels_adds_nothing(one, worlds):
    """Rank 1 of 2 has only ignored labels: loss and gradient are those of one process, finite, equal on both."""
    got = [rank["float64"] for rank in worlds[2]]
    assert got[0]["loss/sft"] == got[1]["loss/sft"] == pytest.approx(one["float64"]["loss/sft"], rel=1e-12)
    assert all(torch.isfinite(g).all() for r in got for g in r["gradient"].values())


def test_uneven_numbers_of_microbatches():
    """BC-053 without its collectives: an empty microbatch adds nothing to loss, counts or router losses."""
    whole = layouts.take(layouts.batch(), 0, 1)
    learner = layouts.Learner(layouts.model(torch.float64), layouts.SFT(), layouts.CONFIG, World())
    metrics = learner.step([*whole.split(4), whole.empty()])
    want = layouts.run(World(), torch.float64, rows=4, steps=1)
    assert metrics["loss/sft"] == want["loss/sft"] and metrics["rows/dispatched"] == want["rows/dispatched"]
    assert metrics["loss/balance"] == want["loss/balance"]
