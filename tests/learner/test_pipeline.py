"""Pipeline schedules give the single-process gradient: what single-process autograd says is the oracle."""

import functools
import importlib.util
import pickle
from collections import Counter
from pathlib import Path

import pytest
import torch
from forked import run_ranks

from moekit.config import LearnerConfig
from moekit.errors import ConfigError
from moekit.learner import loop
from moekit.learner.mesh import World
from moekit.learner.pipeline import Part, Pipeline
from moekit.learner.stages import chunks, stages_of

HERE = Path(__file__).parent / "pipelines.py"
spec = importlib.util.spec_from_file_location("pipelines", HERE)
pipelines = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pipelines)

ALL = [(size, name, at) for size, cases in pipelines.CASES.items() for name, c in cases.items()
       for at in range(len(c["ns"]))]  # fmt: skip
DTYPE_BYTES, WIDTH = 8, 16


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Results of every case, rank by rank: one start of processes a world size."""
    out = {}
    for size in pipelines.CASES:
        folder = tmp_path_factory.mktemp(f"pipeline{size}")
        assert run_ranks(HERE, [(r, size, folder) for r in range(size)], timeout=240) == [0] * size
        out[size] = [pickle.loads((folder / f"rank_{r}.pkl").read_bytes()) for r in range(size)]
    return out


@functools.cache
def alone(size: int, name: str, at: int) -> dict:
    """The same step in one process."""
    case = pipelines.CASES[size][name]
    return pipelines.alone(case["ns"][at], **{k: v for k, v in case.items() if k != "ns"})


@pytest.mark.parametrize("size, name, at", ALL)
def test_one_gradient_in_every_schedule(worlds, size, name, at):
    """Gradients, losses, router losses of every stage; a tied embedding's two parts add up; a frozen stage has none."""
    want, got = alone(size, name, at), [r[name][at] for r in worlds[size]]
    total: dict[str, torch.Tensor] = {}
    for rank in got:
        for parameter, g in rank["gradient"].items():
            total[parameter] = total.get(parameter, 0) + g
    assert total.keys() == want["gradient"].keys()
    for parameter, g in want["gradient"].items():
        assert (total[parameter] - g).norm() <= 1e-12 * g.norm(), parameter
    assert float(sum(sum(r["losses"]) for r in got)) == pytest.approx(want["loss"], rel=1e-12)
    assert sum(r["balance"] for r in got) == pytest.approx(want["balance"], rel=1e-12)


@pytest.mark.parametrize("size, name, at", ALL)
def test_who_gets_losses_and_what_forward_only_gives(worlds, size, name, at):
    """One loss a microbatch, on the last stage's ranks; forward only gives the same bits; no buffer is left."""
    case = pipelines.CASES[size][name]
    config = case["config"]
    for rank in (r[name][at] for r in worlds[size]):
        last = config.pp * config.stages_per_rank - 1 in stages_of(config, rank["place"][0])
        assert len(rank["losses"]) == (case["ns"][at] if last else 0)
        assert [float(x) for x in rank["losses"]] == [float(x) for x in rank["again"]]
        assert not any(x.requires_grad for x in rank["losses"] + rank["again"])
        assert not rank["moved"] and rank["kept"] == 0


@pytest.mark.parametrize("size, name, at", ALL)
def test_every_row_is_reported_once(worlds, size, name, at):
    """An observer on all ranks together sees one process's rows, forward and backward, and as many recomputed."""
    want, seen = alone(size, name, at)["rows"], sum((r[name][at]["rows"] for r in worlds[size]), Counter())
    kept = Counter({k: v for k, v in seen.items() if k[0] != "recompute"})
    assert kept == Counter({k: v for k, v in want.items() if v})
    again = {layer: v for (kind, layer), v in seen.items() if kind == "recompute"}
    recompute = pipelines.CASES[size][name]["config"].recompute
    assert again == (
        {layer: v for (kind, layer), v in kept.items() if kind == "forward"} if recompute != "none" else {}
    )


@pytest.mark.parametrize("size, name, at", ALL)
def test_bytes_on_the_wire(worlds, size, name, at):
    """L x D numbers for each microbatch of the schedule, over every edge between ranks, once each way."""
    case = pipelines.CASES[size][name]
    config, n = case["config"], case["ns"][at]
    home = {s: r for r in range(config.pp) for s in stages_of(config, r)}
    for rank in (r[name][at] for r in worlds[size]):
        me = rank["place"][0]
        one = chunks(config, n) * rank["longest"] * WIDTH * DTYPE_BYTES
        forward = sum(home[s] == me != home[s + 1] for s in range(len(home) - 1))
        backward = sum(home[s] == me != home[s - 1] for s in range(1, len(home)))
        assert rank["sent"] == one * (forward + backward) and rank["sent again"] == one * forward


def test_buffers_live_from_receive_to_use(worlds):
    """7 microbatches, 2 stages: a rank of 1f1b has one microbatch to use and one to receive, never 7."""
    assert all(rank["1f1b"][0]["peak"] <= 2 for rank in worlds[2])
    assert all(rank["1f1b, 4 stages"][0]["peak"] <= 8 < 2 * 7 for rank in worlds[4])


def test_an_error_of_a_stage_comes_out_as_it_is(worlds):
    """Not wrapped in one of torch's."""
    assert worlds[2][0]["refused"] == "a bad row"


@pytest.mark.parametrize(
    "n, pp, pipeline, want",
    [(1, 4, "1f1b", 4), (9, 4, "1f1b", 9), (5, 2, "interleaved", 6), (10, 4, "interleaved", 10), (1, 2, "zbv", 1)],
)  # fmt: skip
def test_idle_microbatches(n, pp, pipeline, want):
    """torch's 1F1B takes at least one a stage; interleaved n // pp rounds of equal length (10 = 2 rounds of 5)."""
    spread = 1 if pipeline == "1f1b" else 2
    assert chunks(LearnerConfig(pp=pp, pipeline=pipeline, stages_per_rank=spread), n) == want


def test_one_rank_is_a_plain_loop():
    """d/dw of w^2 + 3w at 2 is 7; a loss without a graph is let through."""
    w = torch.tensor(2.0, requires_grad=True)
    flats = [b.flat for b in pipelines.step(3, 0)]
    terms = [lambda: w * w, lambda: 3 * w, lambda: torch.tensor(1.0)]
    assert loop.run(flats, lambda place, x, i: terms[i]()) == [4.0, 6.0, 1.0]
    assert float(w.grad) == 7.0
    assert loop.run(flats, lambda place, x, i: terms[i](), backward=False) == [4.0, 6.0, 1.0]
    assert float(w.grad) == 7.0 and loop.run([], lambda place, x, i: terms[i]()) == []


def test_wrong_shapes_are_refused():
    """A stage's output must fit the wire, a loss must be a scalar, the group must have pp ranks."""
    flats = [b.flat for b in pipelines.step(1, 0)]
    for last, y, said in ((False, torch.zeros(3, 16), r"\(24, 16\)"), (True, torch.zeros(2), "a scalar")):
        part = Part(0, True, last, torch.empty(()).expand(30, 16))
        part.work = flats, lambda place, x, i, y=y: y
        with pytest.raises(ConfigError, match=said):
            part(i=torch.tensor([0]))
    with pytest.raises(ConfigError, match="pp=2, but the pipeline's group has 1 ranks"):
        Pipeline(LearnerConfig(pp=2), pipelines.MODEL, World(), torch.float32, "cpu")
