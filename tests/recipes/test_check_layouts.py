"""`moekit check-layouts`: its table against what is known otherwise, and errors that it must catch."""

import json
import math
from dataclasses import replace

import pytest
import torch

import moekit
from moekit.cli import main
from moekit.errors import ConfigError
from moekit.learner.learner import Learner
from moekit.objectives.sft import SFT
from moekit.recipes import layouts as L
from moekit.recipes.layouts import LAYOUTS, TINY, check_layouts, small_batch
from moekit.viz.static import render

FEW = {n: LAYOUTS[n] for n in ("rows one by one, recompute block", "dp 2, zero 2, reduced each microbatch", "pp 2",
                               "ep 2, sync", "ep 2, rowwise, overflow redone")}  # fmt: skip


def divide(learner: Learner) -> None:
    """Expert gradients averaged over ep, as if they were data-parallel."""
    gradients, finish = learner.gradients, learner.gradients.finish

    def wrong() -> None:
        finish()
        for b in gradients.buckets:
            if b.family.expert:
                b.owned_grad.div_(learner.mesh.ep.size)

    gradients.finish = wrong


def drift(learner: Learner) -> None:
    """Rank 1 changes its copy of a replicated bucket after every step, which no gradient shows in time."""
    step = learner.optimizer.step

    def wrong(*a, **k):
        clipped = step(*a, **k)
        if learner.world.rank == 1:
            learner.gradients.buckets[0].param[0] += 1e-3
        return clipped

    learner.optimizer.step = wrong


@pytest.fixture(scope="module")
def report():
    return check_layouts(layouts=FEW, told=lambda *_: None)


def row(report, name):
    return next(r for r in report.rows if r["layout"] == name)


def test_all_agree_and_the_last_line_says_so(report):
    assert report.verdict and report.text().splitlines()[-1].startswith("all 5 layouts give one gradient")
    assert len(report.rows) == len(FEW) and report.left_out == {}
    assert 0 < max(r["gradient"] for r in report.rows) < 1e-12
    assert all(0 < r["parameters"] < 1e-12 and r["flips"] == 0 and not r["replayed"] for r in report.rows)


def test_the_reference_is_a_plain_step(report):
    """Loss and gradient norm are those of torch autograd on one process, without a Learner."""
    work = L.Work("", TINY, "float64", (small_batch(),), "")
    learner = work.learner(L.Case("", 1, 8, L.CONFIG), L.World())
    metrics = learner.step([small_batch()])
    assert report.reference["loss"] == metrics["loss/total"] and report.reference["clipped"] == 1.0
    flat = small_batch().flat
    plain = work.learner(L.Case("", 1, 8, L.CONFIG), L.World()).model
    loss = SFT()(flat, plain(flat)).loss_M.mean().detach()
    assert metrics["loss/sft"] == pytest.approx(float(loss), rel=1e-12)


def test_the_fixture_is_not_symmetric():
    """An idle expert, one with more than half of the rows, a rank without labels."""
    learner = L.Work("", TINY, "float64", (small_batch(),), "").learner(L.Case("", 1, 8, L.CONFIG), L.World())
    learner.step([small_batch()])
    count_LE = learner.counter.measures["policy", "forward"].decided_LCE[:, :3].sum(1)
    assert (count_LE[:, -1] == 0).all() and (count_LE[:, 0] > count_LE.sum(1) / 2).all()
    second = [r for r in range(8) if r // 2 % 2 == 1]
    assert (small_batch().labels[second] == -100).all() and (small_batch().labels >= 0).any()


def test_numbers_that_are_known_otherwise(report):
    dp, pp = row(report, "dp 2, zero 2, reduced each microbatch"), row(report, "pp 2")
    sync, redone = row(report, "ep 2, sync"), row(report, "ep 2, rowwise, overflow redone")
    assert all(r["optimizer_predicted"] == r["optimizer_measured"] > 0 for r in (report.reference, *report.rows))
    assert dp["optimizer_measured"] == pytest.approx(report.reference["optimizer_measured"] / 2, rel=0.02)
    # hidden states of 8 microbatches of one row (12 x 16 numbers of 8 bytes) go forward, their gradients back
    assert pp["wire"]["pipeline"] == 2 * 8 * 12 * 16 * 8 and pp["wire"]["rows"] == 0
    assert sync["wire"]["rows"] > 0 and dp["wire"]["rows"] == 0
    assert redone["redone"] == 1.0 and redone["gradient"] == sync["gradient"]  # bitwise the synchronized path
    assert sync["host_reads"][0] == 1 and redone["host_reads"][0] == 0  # sync reads counts, rowwise nothing
    assert all(r["host_reads"][1] > 0 for r in report.rows)


def test_json_and_figure(report):
    told = json.loads(json.dumps(report.to_dict()))
    assert (
        told["verdict"] is True and told["tolerance"] == 1e-9 and told["rows"][0]["layout"] == report.rows[0]["layout"]
    )
    fig = report.figure()
    assert len(fig.data[0].y) == 5 and list(fig.data[0].x) == pytest.approx([r["gradient"] for r in report.rows])
    assert render(fig)[:4] == b"\x89PNG"


def test_planted_errors_are_caught_and_named():
    """Expert gradients divided by ep show in the gradient; a replica that drifts away does not, and is seen too."""
    names = ("ep 2, sync", "dp 2, zero 0", "pp 2")

    def plant(learner: Learner) -> None:
        divide(learner)  # does nothing where ep is 1
        if learner.config.ep == learner.config.pp == 1:
            drift(learner)

    wrong = check_layouts(layouts={n: LAYOUTS[n] for n in names}, told=lambda *_: None, plant=plant, steps=1)
    ep, dp, pp = (row(wrong, n) for n in names)
    last = wrong.text().splitlines()[-1]
    assert not wrong.verdict and last.startswith("2 of 3 layouts do not") and "pp 2" not in last
    assert ep["gradient"] > 0.1 and ".moe." in ep["worst"] and not pp["problems"]
    assert dp["gradient"] < 1e-12 and "replicas" in " ".join(dp["problems"])


def test_flipped_routes_are_counted_and_replayed(tmp_path, monkeypatch):
    """The reference's routes are others than the router's: all flips are counted, and then compared on equal routes."""
    work = L.Work("", TINY, "float64", (small_batch(),), str(tmp_path))
    case = L.Case("again", 1, 8, L.CONFIG)
    biased = L.Work.learner

    def other(self, case, world):
        learner = biased(self, case, world)
        for block in learner.model.blocks.values():
            if block.routes:
                block.moe.router.selection_bias.zero_()
        return learner

    reference = L.run_case(work, case, L.World(), reference=True)
    monkeypatch.setattr(L.Work, "learner", other)
    found = L.run_case(work, replace(case, rows=3), L.World())
    assert found["flips"] > 10 and found["replayed"] and found["gradient"] < 1e-12
    assert found["loss"] == pytest.approx(reference["loss"], rel=1e-12)


def test_bad_arguments_are_said_before_any_process_starts():
    for arguments, word in (
        ({"dtype": "bfloat16"}, "bfloat16"), ({"steps": 0}, "steps=0"), ({"data": "x.jsonl"}, "tokenizer"),
        ({"layouts": {"odd": {"world": 2, "eb": 2}}}, "odd"), ({"layouts": {"x": {"world": 3, "ep": 2}}}, "ep=2"),
        ({"world_sizes": [1, 2], "model": "none"}, "none"), ({"world_sizes": [2, 3]}, "3"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=word):
            check_layouts(**arguments)


def test_exit_statuses(monkeypatch, capsys, report):
    """0 when all agree, 1 when one does not, 2 for bad usage."""
    bad = replace(report, rows=[r | {"problems": ["gradient of w differs by 0.5"]} for r in report.rows[:1]])
    for found, status in ((report, 0), (bad, 1)):
        monkeypatch.setattr(L, "check_layouts", lambda *a, f=found, **k: f)
        assert main(["check-layouts", "--json"]) == status
        assert json.loads(capsys.readouterr().out)["verdict"] is (status == 0)
    monkeypatch.undo()
    assert main(["check-layouts", "--data", "chats.jsonl"]) == 2
    assert moekit.check_layouts is check_layouts


def test_your_own_weights_and_rows(kit):
    """A Hugging Face folder and chats, in float32: what its shape does not allow is left out, and said."""
    names = ("dp 2, zero 0", "pp 2 interleaved, recompute block")
    found = check_layouts(str(kit.model), str(kit.data), dtype="float32", told=lambda *_: None, steps=2,
                          layouts={n: LAYOUTS[n] for n in names})  # fmt: skip
    assert found.verdict and str(kit.model) in found.used and str(kit.data) in found.used
    assert len(found.rows) + len(found.left_out) == 2 and found.rows[0]["gradient"] < 1e-5
    assert math.isfinite(found.reference["loss"]) and not found.rows[0]["problems"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_default_command(capsys):
    torch.set_num_threads(1)
    assert main(["check-layouts"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"all {len(LAYOUTS)} layouts give one gradient")
