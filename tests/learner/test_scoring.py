"""Passes without gradient give one answer in every layout, on all ranks of a pipeline; a critic's gradient too."""

import functools
import importlib.util
import math
import pickle
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from forked import run_ranks

from moekit.learner.mesh import World

HERE = Path(__file__).parent / "scoring.py"
spec = importlib.util.spec_from_file_location("scoring", HERE)
scoring = importlib.util.module_from_spec(spec)
sys.modules["scoring"] = scoring
spec.loader.exec_module(scoring)
CASES = scoring.CASES
STEP = ("loss/critic", "loss/balance", "grad/norm", "critic/clipped", "critic/error", "critic/error_sq", "critic/value",
        "critic_rows/dispatched", "critic_tokens/supervised")  # fmt: skip

NAMES = [pytest.param(n, marks=pytest.mark.long if c.world > 2 else ()) for n, c in CASES.items()]


@functools.cache
def world(size: int) -> list[dict]:
    """Results of every case of that many ranks: one start of processes a world size."""
    if size == 1:
        return [{n: c.run(World()) for n, c in CASES.items() if c.world == 1}]
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(HERE, [(r, size, folder) for r in range(size)], timeout=280) == [0] * size
        return [pickle.loads(Path(folder, f"rank_{r}.pkl").read_bytes()) for r in range(size)]


@functools.cache
def one(name: str) -> dict:
    """The same on one process in one microbatch."""
    return _plain(*(getattr(CASES[name].plain, n) for n in ("dtype", "shape")), CASES[name].config.get("elide"))


@functools.cache
def _plain(dtype, shape, elide) -> dict:
    how = {"elide": elide} if elide else {}
    how |= {} if shape.selection_bias and shape is not scoring.TIED else {"bias_rate": 0.0}
    return scoring.Case(1, scoring.ROWS, dtype, shape, how).run(World())


def test_the_fixture_is_not_symmetric():
    """A quarter of the ranks without rows, one expert without rows, one with more than half, labels that differ."""
    assert [len(scoring.take(scoring.batch(), r, 4, 2)) for r in range(4)] == [2, 1, 2, 0]
    found = one("2, dp2")
    decided_LE = found["arrays"]["reference/score/decided"][:, :3].sum(1)
    assert (decided_LE[:, -1] == 0).all() and (decided_LE[:, 0] * 2 > decided_LE.sum(1) / 2).all()
    assert len(found["plain"]) == 30 and len({*found["plain"].values()}) == len(found["plain"])
    for other in ("tempered", "replayed"):
        assert max(abs(found[other][p] - x) for p, x in found["plain"].items()) > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_one_process(name):
    case, want = CASES[name], one(name)
    tolerance = 1e-9 if case.dtype == torch.float64 else 1e-5
    for rank, got in enumerate(r[name] for r in world(case.world)):
        for what in ("plain", "tempered", "replayed"):
            assert got[what].keys() == want[what].keys(), (rank, what)
            worst = max(abs(x - want[what][place]) / max(1, abs(x)) for place, x in got[what].items())
            assert worst <= tolerance, (rank, what)
        assert got["chose"]
        assert got["redone"] == (3 if "overflow" in name else 0)


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_accounted_for(name):
    """positions x K = dispatched + elided + dropped, by layer and class; nothing dropped, nothing counted twice."""
    case, want = CASES[name], one(name)
    for got in (r[name] for r in world(case.world)):
        a, b = got["arrays"], want["arrays"]
        for quantity in ("positions", "shared", "decided", "dispatched", "elided", "dropped"):
            key = f"reference/score/{quantity}"
            if quantity == "decided":  # of positions that stay; padding decides nothing where it is elided
                assert torch.equal(a[key][:, :3], b[key][:, :3]), quantity
            else:
                assert torch.equal(a[key], b[key]), quantity
        rows_LC = a["reference/score/dispatched"].sum(-1) + a["reference/score/elided"]
        assert not a["reference/score/dropped"].any()
        assert torch.equal(rows_LC, (a["reference/score/positions"] * case.shape.top_k).expand_as(rows_LC))
        assert int(a["reference/score/positions"].sum()) == scoring.ROWS * scoring.LENGTH
        told, both = ({k: v for k, v in got[name].items() if not k.startswith("wire/")} for name in ("metrics", "both"))
        assert told == {k: v for k, v in want["metrics"].items() if not k.startswith("wire/")}
        assert told["rows/reference_score"] == int(a["reference/score/dispatched"].sum())
        assert {*both} == {f"{kind}/reference_{p}" for kind in ("rows", "positions") for p in ("score", "evaluate")}
        assert got["both"]["rows/reference_evaluate"] == got["metrics"]["rows/reference_score"]
        assert got["empty"] == ({}, {})


@pytest.mark.parametrize("name", [p for p in NAMES if CASES[p.values[0]].shape.value_head])
def test_a_critic_has_one_gradient_in_every_layout(name):
    case, want = CASES[name], one(name)
    assert want["step"]["grad/norm"] > 0
    for got in (r[name] for r in world(case.world)):
        for key in STEP:
            assert math.isfinite(got["step"][key]) and got["step"][key] == pytest.approx(want["step"][key], rel=1e-9), (
                key
            )
        assert got["gradient"].keys() == want["gradient"].keys()
        for n, g in want["gradient"].items():
            if g.norm() == 0:
                assert not got["gradient"][n].any(), n
            else:
                assert float((got["gradient"][n] - g).norm() / g.norm()) <= 1e-9, n
        assert "head.weight" in got["gradient"] and got["gradient"]["head.weight"].shape == (1, 16)
