"""Runs of the recipes laid side by side: every kind of difference is refused by its name, and equal runs are not."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import moekit
from moekit.config import FilterConfig, RouterLossConfig, SFTConfig
from moekit.errors import UnlikeRunsError
from moekit.measure.compare import check, differences, facts
from moekit.measure.record import open_run
from moekit.recipes import grpo
from moekit.recipes.sft import train
from moekit.workloads import GRPOConfig


def run(config: SFTConfig, out: Path, **changes: Any) -> Any:
    train(replace(config, out=str(out), **changes))
    return open_run(out)


@pytest.fixture(scope="module")
def base(kit, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A config of a run of one step, and the run."""
    config = kit.config(None, steps=1, save_every=None, export=False)
    return config, run(config, tmp_path_factory.mktemp("base") / "run")


def one_weight(kit, config: SFTConfig, at: Path) -> SFTConfig:
    """Another base checkpoint: one weight of thousands, by the smallest step."""
    shutil.copytree(kit.model, at)
    weights = load_file(at / "model.safetensors")
    name = next(n for n in weights if "experts.2.down_proj" in n)
    weights[name].view(-1)[3] *= 1 + 2**-23
    save_file(weights, at / "model.safetensors", {"format": "pt"})
    return replace(config, model=str(at))


def one_word(kit, config: SFTConfig, at: Path) -> SFTConfig:
    at = at.with_suffix(".jsonl")
    at.write_text(kit.data.read_text().replace("say red", "say dog", 1))
    return replace(config, data=str(at))


def template(kit, config: SFTConfig, at: Path) -> SFTConfig:
    shutil.copytree(kit.tokenizer, at)
    held = at / "chat_template.jinja"
    held.write_text(held.read_text().replace("message['content'] ~", "message['content'] ~ ' ' ~"))
    return replace(config, tokenizer=str(at))


def rows(**changes: Any) -> Callable[..., SFTConfig]:
    return lambda kit, config, at: replace(config, rows=replace(config.rows, **changes))


def learner(**changes: Any) -> Callable[..., SFTConfig]:
    return lambda kit, config, at: replace(config, learner=replace(config.learner, **changes))


def top(**changes: Any) -> Callable[..., SFTConfig]:
    return lambda kit, config, at: replace(config, **changes)


CHANGES: dict[str, tuple[Callable[..., SFTConfig], str]] = {  # what is done -> the one name that must be said
    "base checkpoint": (one_weight, "base.weights"),
    "data": (one_word, "batch.data"),
    "template": (template, "batch.template"),
    "order": (rows(seed=1), "rows.seed"),
    "no shuffle": (rows(shuffle=False), "rows.shuffle"),
    "packing": (rows(rows="padded"), "rows.rows"),
    "row length": (rows(length=64), "rows.length"),
    "filter": (rows(filter=FilterConfig(max_period=3, min_repeats=9)), "rows.filter"),
    "label rule": (rows(supervise="all"), "rows.supervise"),
    "tokens of a step": (top(batch_rows=5), "batch_rows"),
    "microbatch": (top(microbatch_rows=3), "microbatch_rows"),
    "denominator": (top(denominator="rank_mean"), "denominator"),
    "dtype": (top(dtype="bfloat16"), "dtype"),
    "router loss scope": (learner(router=RouterLossConfig(0.02, 1e-3, scope="supervised")), "learner.router.scope"),
    "elision": (learner(elide="none"), "learner.elide"),
    "layout": (learner(zero=1), "learner.zero"),
    "recompute": (learner(recompute="moe"), "learner.recompute"),
    "learner": (learner(lr=5e-3), "learner.lr"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_difference_is_refused_by_its_name_alone(what: str, kit, base: Any, tmp_path: Path) -> None:
    change, name = CHANGES[what]
    config, one = base
    other = run(change(kit, config, tmp_path / "changed"), tmp_path / "run")
    found = differences({"one": one, "other": other})
    assert {n for n in found if not n.startswith(name)} == set(), found
    assert found, what
    with pytest.raises(UnlikeRunsError, match=rf"differ in\n  {name}") as told:
        moekit.compare({"one": one, "other": other}, warmup=0)
    values = next(iter(found.values()))
    assert values["one"] != values["other"] and "(one)" in str(told.value) and "(other)" in str(told.value)
    check({"one": one, "other": other}, [name], [], strict=True)  # and may differ where it is meant to
    check({"one": one, "other": other}, [], [name], strict=True)


def test_equal_work_under_other_names_is_alike(kit, base: Any, tmp_path: Path) -> None:
    """Where things lie, and what is saved, makes no difference: contents are compared."""
    shutil.copytree(kit.model, tmp_path / "moved")
    shutil.copy(kit.data, tmp_path / "moved.jsonl")
    config = replace(base[0], model=str(tmp_path / "moved"), data=str(tmp_path / "moved.jsonl"))
    other = run(config, tmp_path / "run", steps=2, save_every=1, keep_checkpoints=1)
    assert differences({"one": base[1], "other": other}) == {}
    assert len(facts(other)["base.weights"]) == len(facts(other)["batch.data"]) == 64


def test_a_made_model_is_known_by_shape_and_seed(kit, base: Any, tmp_path: Path) -> None:
    config = replace(base[0], model="tiny", tokenizer=str(kit.tokenizer))
    one, same, seed = (run(config, tmp_path / n, seed=s) for n, s in (("one", 3), ("same", 3), ("seed", 4)))
    assert differences({"one": one, "same": same}) == {}
    assert differences({"one": one, "seed": seed}) == {"seed": {"one": 3, "seed": 4}}
    made = differences({"one": one, "folder": base[1]})
    assert {"base.weights", "base.model.width", "base.model.experts"} <= made.keys()


CARD: list[tuple[str, tuple[str, ...], Any]] = [  # name that is said, place in card.json, another value
    ("layout.world", ("layout", "world"), 2),
    ("layout.threads", ("layout", "threads of a rank"), 7),
    ("layout.device", ("layout", "device"), "cuda"),
    ("layout.backend", ("layout", "backend"), "reference"),
    ("layout.kernels.moe_ffn", ("layout", "kernels", "moe_ffn"), "triton"),
    ("machine.processor", ("environment", "hardware", "processor"), "another"),
    ("versions.torch", ("environment", "versions", "torch"), "2.0"),
    ("settings.MALLOC_ARENA_MAX", ("environment", "settings", "MALLOC_ARENA_MAX"), "1"),
    ("objective", ("objective", "name"), "dpo"),
    ("accounting.identity", ("definitions", "identity"), "another"),
    ("base.weights", ("base", "sha256"), None),
    ("layout.device", ("layout", "device"), None),
]


def edited(run: Any, folder: Path, place: tuple[str, ...], value: Any) -> Any:
    """A copy of a run whose card says something else."""
    shutil.copytree(run.folder, folder)
    card = json.loads((folder / "card.json").read_text())
    *above, last = place
    part = card
    for name in above:
        part = part[name]
    part[last] = value
    (folder / "card.json").write_text(json.dumps(card))
    return open_run(folder)


@pytest.mark.parametrize(("name", "place", "value"), CARD)
def test_what_the_machine_says_is_compared_too(
    name: str, place: tuple[str, ...], value: Any, base: Any, tmp_path: Path
) -> None:
    other = edited(base[1], tmp_path / "other", place, value)
    with pytest.raises(UnlikeRunsError, match=rf"differ in\n  {name}: .*\(one\), .*\(other\)\nname"):
        moekit.compare({"one": base[1], "other": other}, warmup=0)


def test_kernels_that_were_measured_count_where_both_met_the_shape(base: Any, tmp_path: Path) -> None:
    kernels = ("layout", "kernels", "float32 E4 D16 F12 rows64 threads1")
    one = edited(base[1], tmp_path / "one", kernels, "native")
    other = edited(base[1], tmp_path / "other", kernels, "torch")
    assert differences({"base": base[1], "one": one}) == {}
    told = differences({"base": base[1], "one": one, "other": other})
    assert told == {f"layout.kernels.{kernels[-1]}": {"one": "native", "other": "torch"}}


def test_what_no_run_recorded_cannot_be_called_alike(base: Any, tmp_path: Path) -> None:
    bare = shutil.copytree(base[1].folder, tmp_path / "bare")
    (bare / "card.json").unlink()
    with pytest.raises(UnlikeRunsError, match=r"base.weights: not recorded \(a; b\)"):
        moekit.compare({"a": bare, "b": bare}, warmup=0)


def test_a_verifier_of_ones_own_is_known_by_its_code(kit, tmp_path: Path, monkeypatch) -> None:
    """Edited under the same name it gives other rewards: losses are then of different things. The kit's has no file."""
    monkeypatch.syspath_prepend(str(tmp_path))
    how = {"model": str(kit.model), "data": str(kit.data), "steps": 1, "prompts": 2, "group": 2, "max_prompt": 32,
           "max_new_tokens": 4, "length": 48, "export": False, "save_every": None}  # fmt: skip

    def rewarded(out: str, verifier: str, code: str) -> Any:
        (tmp_path / "judge_of_length.py").write_text(code)
        sys.modules.pop("judge_of_length", None)
        grpo.train(GRPOConfig(**how, verifier=verifier, out=str(tmp_path / out)))
        return open_run(tmp_path / out)

    codes = [f"def judge(item, answer):\n    return len(answer) % {n} / {n}\n" for n in (3, 4)]
    a, b, c = (rewarded(name, "judge_of_length:judge", codes[n]) for name, n in (("a", 0), ("b", 1), ("c", 0)))
    ours = rewarded("ours", "task", codes[0])
    assert differences({"a": a, "c": c}) == {}
    (values,) = (found := differences({"a": a, "b": b})).values()
    assert list(found) == ["batch.verifier"] and [len(v) for v in values.values()] == [64, 64]
    assert differences({"a": a, "ours": ours}) == {"verifier": {"a": "judge_of_length:judge", "ours": "task"}}
    told = moekit.compare({"a": a, "b": b}, varying=("batch.verifier",), warmup=0)
    assert any("different quantities here, not to be compared (batch.verifier)" in line for line in told.remarks)
