"""One gradient, whatever the layout: DESIGN 4, "Equal", with its unsymmetric fixture (`layouts.py`, beside this)."""

import functools
import importlib.util
import pickle
import sys
from pathlib import Path

import pytest
import torch
from forked import run_ranks

from moekit.learner.mesh import World

HERE = Path(__file__).parent / "layouts.py"
spec = importlib.util.spec_from_file_location("layouts", HERE)
layouts = importlib.util.module_from_spec(spec)
sys.modules["layouts"] = layouts  # dataclasses look their module up
spec.loader.exec_module(layouts)
CASES, BUGS = layouts.CASES, layouts.BUGS


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


@functools.cache
def one(name: str) -> dict:
    """The same mathematics on one process, in one microbatch."""
    c = (CASES | BUGS)[name]
    assert not c.skew, "its routes depend on the cut: compare with its synchronized twin"
    return _one(c.plain, c.dtype, c.model, c.denominator)


@functools.cache
def _one(config, dtype, model, denominator) -> dict:
    steps = 3 if dtype == torch.float64 else 1
    return layouts.run(World(), dtype, 8, steps, config, model, denominator)


@functools.cache
def world(size: int) -> list[dict]:
    """Results of every case of that many ranks: one start of processes a world size."""
    import tempfile

    if size == 1:
        return [{n: c.run(World()) for n, c in CASES.items() if c.world == 1}]
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(HERE, [(r, size, folder) for r in range(size)], timeout=400) == [0] * size
        return [pickle.loads(Path(folder, f"rank_{r}.pkl").read_bytes()) for r in range(size)]


def results(name: str) -> list[dict]:
    return [rank[name] for rank in world((CASES | BUGS)[name].world)]


def test_the_fixture_is_not_symmetric():
    """One expert without rows, one with more than half, a rank without labels, shared prompts, clipping active."""
    r = one("1 process")
    count_LE = r["decided"][:, :3].sum(1)
    assert (count_LE[:, -1] == 0).all() and (count_LE[:, 0] > count_LE.sum(1) / 2).all()
    assert r["grad/clipped"] == 1.0 and r["loss/balance"] > 0 and r["loss/z"] > 0
    assert layouts.take(layouts.batch(), 1, 2).flat.label_index_M.numel() == 0
    assert layouts.batch().flat.children and all(float(g.norm()) > 0 for g in r["gradient"].values())


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if not c.skew])
def test_one_gradient_in_every_layout(name):
    """BC-051 and BC-058 in steps: the norm that clips is one process' with experts and stages (a tied weight, too)
    spread over ranks."""
    case, want = CASES[name], one(name)
    exact = case.dtype == torch.float64
    tolerance = 1e-9 if exact else 1e-5
    for got in results(name):
        assert difference(got["gradient"], want["gradient"]) <= tolerance
        assert torch.equal(got["decided"], want["decided"])
        for key in ("loss/sft", "loss/balance", "loss/z", "grad/norm"):
            assert got[key] == pytest.approx(want[key], rel=tolerance), key
        if exact:  # three steps of AdamW, decay, clipping and the moving selection bias
            assert difference(got["parameters"], want["parameters"]) <= tolerance
        key = "eval/sft"
        assert got["scored"][key] == pytest.approx(want["scored"][key], rel=tolerance)
        assert difference(got["bias"], want["bias"]) == 0.0
        for key in ("tokens/supervised", "tokens/padding", "rows/dispatched", "rows/backward", "rows/elided"):
            assert got[key] == want[key], key
        for part, ran in got["ran"].items():  # by layer, class and expert; recomputed rows are the forward's
            like = want["ran"]["forward" if part == "recompute" else part]
            again = part != "recompute" or case.learner.recompute != "none"
            assert torch.equal(ran, like if again else torch.zeros_like(like)), part


def test_mxfp8_is_what_these_layouts_ran():
    """Their gradient is one to 1e-5 although codes are rounded: weights, and rows of a position, are quantised by
    themselves, so a cut moves no block. (A value on a tie could flip with another order of sums; none does here.)
    It is not the wide gradient."""
    want = layouts.run(World(), torch.float32, 8, 1, layouts.CONFIG, layouts.WHOLE)["gradient"]
    for name in ("1, mxfp8", "2, ep2, mxfp8", "2, pp2, mxfp8"):
        got = results(name)[0]["gradient"]
        experts = {n: g for n, g in got.items() if ".moe.gate_up" in n or ".moe.down" in n}
        assert len(experts) == 6 and all((g - want[n]).norm() > 1e-3 * want[n].norm() for n, g in experts.items())


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.world > 1])
def test_ranks_hold_the_same_bits(name):
    first, *others = (rank["parameters"] for rank in results(name))
    assert all(torch.equal(first[n], o[n]) for o in others for n in first)


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.learner.ep > 1])
def test_expert_rows_cross_the_wire_once_each_way(name):
    """Out and back forward, out and back backward, and once more each way where the forward is run again."""
    case, got = CASES[name], results(name)[0]
    size = case.dtype.itemsize * case.model.width
    ways = 4 + 2 * (case.learner.recompute != "none")
    if case.learner.transport == "padded":
        assert got["wire/rows_bytes"] > got["remote"] * size * ways  # it sends padding too, and says so
    elif got["dispatch/redone"] if case.learner.dispatch == "rowwise" else False:
        assert got["wire/rows_bytes"] > got["remote"] * size * ways  # what was discarded was sent as well
    else:
        assert got["wire/rows_bytes"] == got["remote"] * size * ways


@pytest.mark.parametrize("name", [n for n in CASES if "overflow" in n])
def test_an_overflow_is_redone_on_the_synchronized_path_bitwise(name):
    """Real overflow (in the skewed case in microbatch 2 of stage 1 and nowhere else): the step, and a pass without
    gradient, are what dispatch="sync" gives, bit for bit."""
    case = CASES[name]
    sync = results("4, pp2 ep2, skewed" if case.skew else {2: "2, ep2", 4: "4, pp2 ep2"}[case.world])
    for got, want in zip(results(name), sync):
        assert got["dispatch/redone"] == 1 and got["dispatch/buffer_need"] > 1 and got["redone"] >= 1
        assert all(torch.equal(got["gradient"][n], g) for n, g in want["gradient"].items())
        assert all(torch.equal(got["parameters"][n], p) for n, p in want["parameters"].items())
        for key in ("loss/total", "grad/norm", "rows/dispatched", "rows/dropped"):
            assert got[key] == want[key], key
        assert got["scored_redone"] == 1 and got["scored"] == want["scored"]


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug):
    got, want = results(bug)[0], one(bug)
    if "norm" in bug:
        assert abs(got["grad/norm"] / want["grad/norm"] - 1) > 1e-3
        assert difference(got["parameters"], want["parameters"]) > 1e-6  # it clips too hard
    else:
        assert difference(got["gradient"], want["gradient"]) > 1e-3


def test_bc_013_a_rank_without_labels_adds_nothing():
    """Rank 1 of 2 has only ignored labels: loss and gradient are those of one process, finite, equal on both."""
    got = results("2, dp2, zero 2")
    want = one("2, dp2, zero 2")["loss/sft"]
    assert got[0]["loss/sft"] == got[1]["loss/sft"] == pytest.approx(want, rel=1e-12)
    assert all(torch.isfinite(g).all() for r in got for g in r["gradient"].values())


def test_uneven_numbers_of_microbatches():
    """BC-053 without its collectives: an empty microbatch adds nothing to loss, counts or router losses."""
    whole = layouts.take(layouts.batch(), 0, 1)
    learner = layouts.Learner(layouts.model(torch.float64), layouts.SFT(), layouts.CONFIG, World())
    metrics = learner.step([*whole.split(4), whole.empty()])
    want = layouts.run(World(), torch.float64, rows=4, steps=1)
    assert metrics["loss/sft"] == want["loss/sft"] and metrics["rows/dispatched"] == want["rows/dispatched"]
    assert metrics["loss/balance"] == want["loss/balance"]


def test_bc_042_pooled_statistics_are_not_divided_by_the_ranks():
    """BC-042: choices pooled over two ranks: the balance loss and the routers' gradient are those of one process."""
    name = "2, dp2, microbatch balance"
    want = one(name)
    routers = {n: g for n, g in want["gradient"].items() if n.endswith("router.weight")}
    assert len(routers) == 3 and all(float(g.norm()) > 0 for g in routers.values())
    for got in results(name):
        assert got["loss/balance"] == pytest.approx(want["loss/balance"], rel=1e-9)
        assert difference({n: got["gradient"][n] for n in routers}, routers) <= 1e-9
