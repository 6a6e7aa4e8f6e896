"""The plan's figure has the plan's bytes; its twin is drawn; sliders plan again."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import moekit
from moekit.config import DataConfig, LearnerConfig, SFTConfig
from moekit.errors import ConfigError
from moekit.viz import plan as view
from moekit.viz import static, theme
from moekit.workloads import DPOConfig, GRPOConfig, PPOConfig

torch.set_num_threads(1)
PPO = PPOConfig("", "", prompts=8, group=2, max_prompt=64, max_new_tokens=32, length=128, microbatch_tokens=256)


@pytest.fixture(scope="module")
def made():
    return moekit.plan("tiny", PPO, 4, 4e6, device="cpu", zero=(2,), recompute=("none", "block"))


def test_bars_are_the_bytes_of_the_phase_that_takes_most(made):
    """The best option of each layout, in the plan's order; parts add up to its total, drawn where they stand."""
    late = made.again(workload=replace(PPO, prompts=16, max_new_tokens=128, length=192))
    assert {o.peak for o in late.options} >= {
        "train",
        "rollout",
    }  # so that what is drawn of one is not there in another
    for plan in (late, made):
        fig, best = view.plan_figure(plan), {}
        for o in plan.options:
            best.setdefault((o.dp, o.ep, o.pp), o)
        for i, o in enumerate(best.values()):
            drawn = {t.name: t.x[i] * 1e6 for t in fig.data if t.x[i]}
            assert drawn == pytest.approx(o.at_peak) and sum(drawn.values()) == pytest.approx(o.total)
            assert fig.data[0].y[i].startswith(f"dp {o.dp}, ep {o.ep}, pp {o.pp}")
    assert len(fig.data[0].y) == len(best) and len(view.plan_figure(made, most=2).data[0].y) == 2
    (line,) = fig.layout.shapes
    assert line.x0 == line.x1 == 4.0
    words = [a.text for a in fig.layout.annotations]
    assert any("4 MB" in w for w in words)
    late = [a for a in fig.layout.annotations if re.match(r"[\d.]+ MB · ", a.text)]
    assert [a.font.color != view.SERIES[1] for a in late] == [o.fits for o in best.values()]
    assert {"<b>policy</b>", "<b>critic</b>", "<b>reference</b>"} <= set(words) and all(any(t.x) for t in fig.data)


def test_the_legend_says_what_is_drawn_and_no_text_leaves_the_figure():
    """Every component that a learner can hold, from the left edge on (6.2 pixels a letter, as the twin draws them)."""
    learner = LearnerConfig(ep=2, precision="mxfp8", recompute="block")
    config = replace(PPO, learner=learner, kl=0.1, dtype="bfloat16")
    fig = moekit.plan("tiny", config, 2, 4e6, device="cpu", ep=(2,), pp=(1,), zero=(2,), recompute=("block",)).figure()
    legend = [a for a in fig.layout.annotations if (a.x, a.y) == (0, 1)]
    words = [a.text.replace(" ", "_") for a in legend if a.text != "■"]
    assert {t.name.split("/")[-1] for t in fig.data} - {"reference"} == {w for w in words if "<b>" not in w}
    assert {*view.STATE} <= {*words}
    assert fig.layout.margin.l + 6.6 * len(theme.heading(fig)[1]) <= fig.layout.width
    for a in legend:
        left = fig.layout.margin.l + a.xshift
        assert 0 <= left and left + 6.2 * len(re.sub("<.*?>", "", a.text)) <= fig.layout.width, a.text


def test_every_component_has_a_colour_of_its_owner():
    from moekit.recipes.plan import PARTS

    assert set(view.LOOK) == set(PARTS) and len({c for c, _ in view.LOOK.values()}) == len(PARTS)


def test_the_twin_is_drawn(made):
    png = static.render(made.figure(), "png")
    assert png.startswith(b"\x89PNG") and len(png) > 10_000


def test_a_limit_far_away_is_not_drawn(made):
    assert not view.plan_figure(made.again(memory=1e12)).layout.shapes


def test_sliders_plan_again(made):
    """Each control moves what it names; what cannot be is said and leaves the plan as it was."""
    w = made.widget()
    assert list(w.controls) == ["world", "memory", "tokens", "prompts", "group", "ep", "pp", "recompute"]
    w.set(world=2, memory=16.0, group=4, tokens=64, recompute="block")
    now = w.plan
    c = now.step.config
    assert (now.world, now.memory, c.group, c.max_new_tokens, c.length) == (2, 16e9, 4, 64, 128)
    assert {o.recompute for o in now.options} == {"block"} and now.fitting and not w.note
    w.set(ep=2)
    assert {o.ep for o in w.plan.options} == {2}
    w.set(world=1)
    assert "no layout of 1 ranks" in w.note and w.plan.world == 2
    w.set(ep="all")
    assert not w.note and w.plan.world == 1
    with pytest.raises(ConfigError, match="colour"):
        w.set(colour=1)
    with pytest.raises(ConfigError, match=r"world=3 is not on its slider \(1, 2, 4"):
        w.set(world=3)


def test_sliders_stand_where_the_plan_is(made, monkeypatch):
    """A planner that was moved before it is shown, as in notebook 10."""
    monkeypatch.setattr(view, "place", lambda: "notebook")
    monkeypatch.setattr(view, "put", lambda handle, data: handle)
    w = made.widget().set(world=2, memory=16.0)
    w._ipython_display_()
    assert {name: slider.value for name, slider in w._sliders.items()} == w.value and w.value["world"] == 2


@pytest.mark.parametrize(
    ("config", "rows"),
    [(SFTConfig("", "", rows=DataConfig(length=64)), "batch_rows"), (DPOConfig("", "", length=64), "batch_pairs"),
     (GRPOConfig("", "", length=512), "prompts")],
)  # fmt: skip
def test_controls_of_each_workload(config, rows):
    w = moekit.plan("tiny", config, 2, zero=(2,)).widget()
    before = w.plan.supervised
    w.set(**{rows: 2 * w.value[rows]})
    assert w.plan.supervised == 2 * before
    w.set(tokens=2 * w.value["tokens"])
    assert w.plan.supervised > 3 * before and not w.note


def test_outside_a_notebook_it_is_text(made, capsys):
    made._ipython_display_()
    assert capsys.readouterr().out.strip() == repr(made)
