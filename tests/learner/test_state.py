"""State at many layouts: save at each, resume at each other, bitwise; and gradients put in by hand (`states.py`)."""

import importlib.util
import pickle
from pathlib import Path

import pytest
import torch
from forked import run_ranks

HERE = Path(__file__).parent / "states.py"
spec = importlib.util.spec_from_file_location("states", HERE)
states = importlib.util.module_from_spec(spec)
spec.loader.exec_module(states)
LAYOUTS = {states.name(layout): layout for layout in states.MATRIX}


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> dict:
    """(phase, world size, rank) -> results: all layouts save, then all resume from all."""
    folder, out = tmp_path_factory.mktemp("states"), {}
    every = [(size, r) for size in (1, 2, 4) for r in range(size)]  # three worlds side by side
    for phase in ("first", "second"):
        codes = run_ranks(HERE, [(r, size, folder, phase) for size, r in every], timeout=300)
        assert codes == [0] * len(every), (phase, every)
        for size, r in every:
            out[phase, size, r] = pickle.loads((folder / f"{phase}_{size}_{r}.pkl").read_bytes())
    return out


def same(a, b) -> None:
    for kind, group in a.items():
        if isinstance(group, dict):
            assert group.keys() == b[kind].keys(), kind
            assert all(torch.equal(t, b[kind][n]) for n, t in group.items()), kind
        else:
            assert group == b[kind], kind


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_a_checkpoint_resumes_at_every_layout(ran, source, target):
    """Masters, moments, parameters, step and router bias bit for bit; at the same layout the next losses too."""
    saved = ran["first", states.world_of(LAYOUTS[source]), 0][source]
    size = states.world_of(LAYOUTS[target])
    for rank in range(size):
        got = ran["second", size, rank][source, target]
        same(got["state"], saved["state"])
        assert got["extra"] == {"row": 7}
        if source == target:
            assert got["losses"] == saved["losses"]
        else:
            assert got["losses"] == pytest.approx(saved["losses"], rel=2e-2)  # bf16: the layouts round differently
    state = saved["state"]
    assert any(t.any() for t in state["bias"].values()) and state["updates"] == 2
    assert all(torch.equal(p, state["master"][n].bfloat16()) for n, p in state["parameter"].items())
    assert any((state["master"][n] != p.float()).any() for n, p in state["parameter"].items())


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_bc_051_the_clip_norm_counts_shared_once_and_every_expert_once(ran, zero):
    ranks = [ran["first", 2, r][f"bc_051 {zero}"] for r in range(2)]
    assert [r["norm"] for r in ranks] == pytest.approx([7.0, 7.0], rel=1e-6)
    assert [r["expert"] for r in ranks] == pytest.approx([1.5, 3.0], rel=1e-6)
    held = [r["shared"] for r in ranks if r["shared"] is not None]
    assert len(held) == (2 if zero == 0 else 1) and held == pytest.approx([1.0] * len(held), rel=1e-6)
    same({"p": ranks[0]["parameter"]}, {"p": ranks[1]["parameter"]})


def test_bc_053_ranks_with_different_numbers_of_microbatches(ran):
    """Token losses 1, 2, 3 on one rank and 6 on the other: 12 / 4; rounds without a row route nothing."""
    for rank in range(2):
        got = ran["first", 2, rank]["bc_053"]
        assert got["loss"] == 3.0 and got["rows"] == got["want"]


def test_bc_055_tied_embeddings_get_the_sum_of_both_stages(ran):
    """Lookup and head gradients meet before anything else: 6 on all four ranks; the copies stay equal."""
    assert [ran["first", 4, r]["bc_055"] for r in range(4)] == [6.0] * 4
    for size, copies in ((2, 2), (4, 4)):
        held = ran["first", size, 0]["tied"]
        assert len(held) == copies and all(torch.equal(held[0], t) for t in held)


@pytest.mark.parametrize("zero", [0, 2])
def test_bc_058_the_norm_covers_all_stages_and_a_tied_weight_once(ran, zero):
    """3, 6 and the tied 2: 7 on both stages. (moekit clips by the 2-norm; it has no inf-norm.)"""
    assert [ran["first", 2, r][f"bc_058 {zero}"] for r in range(2)] == pytest.approx([7.0, 7.0], rel=1e-6)


def test_bc_060_moments_survive_another_expert_layout(ran):
    """Adam by hand: saved after 2 steps at EP=2, the third at EP=1 and EP=4; every expert has its own signs."""
    want = [0.7738007, 0.8716838, 1.0545154, 0.7]
    # first moments after +,+,- and so on, by hand: m = 0.9 m + 0.1 g
    moments = [0.071, 0.091, 0.109, 0.271]
    for size in (1, 4):
        got = ran["second", size, 0]["adam"]
        for name, master in got["master"].items():
            per_expert = master.flatten(1)
            assert (per_expert == per_expert[:, :1]).all(), name
            assert per_expert[:, 0].tolist() == pytest.approx(want, abs=1e-6), name
            assert got["exp_avg"][name].flatten(1)[:, 0].tolist() == pytest.approx(moments, abs=1e-6), name


def test_what_happens_when_a_buffer_is_too_small(ran):
    """redo: as if it had been large enough; drop: rows are missing, counted, and nothing else; raise: nothing moves."""
    for rank in range(2):
        redo, drop, stop = (ran["first", 2, rank][p] for p in ("redo", "drop", "raise"))
        assert redo["dispatch/redone"] == 1 and redo["rows/dropped"] == 0 and redo["capacity_now"] > 0.3
        assert drop["dispatch/redone"] == 0 and drop["rows/dropped"] > 0 and drop["capacity_now"] == 0.3
        assert drop["rows/dispatched"] + drop["rows/dropped"] == redo["rows/dispatched"]
        assert drop["rows/backward"] == drop["rows/dispatched"]
        assert drop["dispatch/buffer_need"] == redo["dispatch/buffer_need"] > 1 >= drop["dispatch/buffer_used"]
        assert redo["moved"] and drop["moved"] and redo["loss/sft"] != drop["loss/sft"]
        assert "capacity=0.3" in stop["error"] and not stop["moved"] and stop["updates"] == 0
