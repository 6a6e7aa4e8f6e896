"""The numbers of a comparison, worked out from metrics.jsonl by hand; and a loop of one's own."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pytest

from moekit.data.batch import CLASSES
from moekit.errors import ConfigError, DataError, UnlikeRunsError
from moekit.measure import machine
from moekit.measure.card import RunCard, hash_data
from moekit.measure.compare import PER, RATES, check, differences, side_by_side, under, words
from moekit.measure.record import RunWriter, open_run

COUNTS = {"supervised": 10, "context": 20, "filtered": 4, "padding": 6}


def record(folder: Path, steps: int = 9, scale: int = 1, skip: tuple[int, ...] = (), **card: Any) -> Any:
    """A run of uneven steps: step i has (1 + i % 3) x scale times `COUNTS`, in 0.5 + i/10 seconds."""
    layout = {"world": 1, "device": "cpu", "threads of a rank": 1}
    told = {"base": {"sha256": "a" * 64}, "batch": {"sha256": "b" * 64}, "layout": layout, "objective": {"name": "sft"}}
    with RunWriter(folder, rank=0) as writer:
        writer.card(RunCard(folder.name, **{**told, **card}, environment={}))
        for i in range(steps):
            times = 0 if i in skip else (1 + i % 3) * scale
            metrics: dict[str, Any] = {f"tokens/{c}": n * times for c, n in COUNTS.items()}
            metrics |= {"rows/dispatched": 90 * times + i, "time/step_s": 0.5 + i / 10, "loss/sft": 4.0 - i / 4}
            writer.write(i, metrics)
    return open_run(folder)


def by_hand(run: Any, warmup: int) -> dict[str, list[float]]:
    """Rates of each step from the lines of the file."""
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()][warmup:]
    out: dict[str, list[float]] = {name: [] for name in (*RATES, PER)}
    for m in lines:
        supervised, seconds = m["tokens/supervised"], m["time/step_s"]
        positions = sum(m[f"tokens/{c}"] for c in CLASSES)
        for name, count in zip(RATES, (supervised, positions - m["tokens/padding"], positions, m["rows/dispatched"])):
            out[name].append(count / seconds)
        out[PER].append(m["rows/dispatched"] / supervised)
    return out


def test_four_rates_of_the_same_steps_without_the_warm_up(tmp_path: Path) -> None:
    run = record(tmp_path / "a")
    table, _ = side_by_side({"a": run, "b": run}, warmup=2)
    hand = by_hand(run, 2)
    for name in RATES:
        low, middle, high = quantiles(hand[name], n=4, method="inclusive")
        assert table.loc["a", name] == pytest.approx(middle) == median(hand[name])
        assert table.loc["a", f"{name} q25"] == pytest.approx(low)
        assert table.loc["a", f"{name} q75"] == pytest.approx(high)
    times = [1 + i % 3 for i in range(2, 9)]
    whole = sum(90 * t + i for t, i in zip(times, range(2, 9))) / sum(10 * t for t in times)
    assert table.loc["a", PER] == pytest.approx(whole)  # of the sums, not a mean of ratios
    assert table.loc["a", f"{PER} q75"] == pytest.approx(quantiles(hand[PER], n=4, method="inclusive")[2])
    assert table.loc["a", "steps"] == 9 and table.loc["a", "warm-up steps"] == 2
    assert list(table.columns[::3][:5]) == [*RATES, PER]


def test_loss_at_equal_supervised_tokens_not_at_equal_steps(tmp_path: Path) -> None:
    """The small run ends at 180 tokens. The large one is there after three steps, (10 + 20 + 30) x 3, and its last
    tenth (162, 180] holds that step alone; the small one's holds its last, which has 30 tokens."""
    small, large = record(tmp_path / "small"), record(tmp_path / "large", scale=3)
    table, curves = side_by_side({"small": small, "large": large}, warmup=0)
    assert table.attrs == {"loss": "loss/sft", "budget": 180.0}
    assert table.loc["small", "loss"] == 2.0 and table.loc["large", "loss"] == 3.5
    assert list(table["at tokens"]) == [180.0, 180.0] and list(table["supervised tokens"]) == [180.0, 540.0]
    assert curves["large"][0].tolist()[:3] == [30.0, 90.0, 180.0] and curves["small"][1].tolist()[-1] == 2.0


def test_the_loss_is_a_mean_over_the_last_tenth_weighted_by_tokens(tmp_path: Path) -> None:
    run = record(tmp_path / "a", steps=60, skip=(57,))
    table, _ = side_by_side({"a": run, "b": run}, warmup=0)
    weight = [0 if i == 57 else 10 * (1 + i % 3) for i in range(60)]
    done = [sum(weight[: i + 1]) for i in range(60)]
    inside = [i for i in range(60) if done[i] > 0.9 * done[-1] and weight[i]]
    assert len(inside) == 6
    loss = sum(weight[i] * (4.0 - i / 4) for i in inside) / sum(weight[i] for i in inside)
    assert table.loc["a", "loss"] == pytest.approx(loss)
    low, _, high = quantiles([4.0 - i / 4 for i in inside], n=4, method="inclusive")
    assert table.loc["a", ["loss q25", "loss q75"]].tolist() == pytest.approx([low, high])


def test_a_loss_that_was_not_finite_is_not_averaged_away(tmp_path: Path) -> None:
    run = record(tmp_path / "a", steps=30)
    with RunWriter(tmp_path / "a", resume=30, rank=0) as writer:
        writer.write(30, {**run.metrics.iloc[29].to_dict(), "loss/sft": math.nan})
    table, _ = side_by_side({"a": run, "b": run}, warmup=0)
    assert math.isnan(table.loc["a", "loss"])


def test_steps_larger_than_the_last_tenth_give_the_last_one_before(tmp_path: Path) -> None:
    """The small run has 10 tokens, the large one takes 30 in its first step: that is all it can be compared at."""
    small, large = record(tmp_path / "small", steps=1), record(tmp_path / "large", scale=3)
    table, _ = side_by_side({"small": small, "large": large}, warmup=0)
    assert table["loss"].tolist() == [4.0, 4.0] and table["at tokens"].tolist() == [10.0, 30.0]


def test_runs_without_counts_or_steps_are_refused(tmp_path: Path) -> None:
    run = record(tmp_path / "a", steps=3)
    with pytest.raises(DataError, match=r"b: .*recorded 3 steps .*warmup=3"):
        side_by_side({"b": run}, warmup=3)
    with RunWriter(tmp_path / "bare", rank=0) as writer:
        writer.write(0, {"loss/sft": 1.0})
    with pytest.raises(DataError, match="recorded 0 steps with tokens/supervised"):
        side_by_side({"b": open_run(tmp_path / "bare")}, warmup=0)


def test_a_loop_of_ones_own_is_compared_by_its_card(tmp_path: Path) -> None:
    one = record(tmp_path / "a", learner={"lr": 0.1, "ep": 1})
    two = record(tmp_path / "b", learner={"lr": 0.2, "ep": 1}, batch={"sha256": "c" * 64})
    found = differences({"a": one, "b": two})
    assert found == {"learner.lr": {"a": 0.1, "b": 0.2}, "batch.data": {"a": "b" * 64, "b": "c" * 64}}
    with pytest.raises(UnlikeRunsError, match=r"learner.lr: 0.1 \(a\), 0.2 \(b\)\n  batch.data: b{12} \(a\), c{12}"):
        check({"a": one, "b": two}, [], [], strict=True)
    with pytest.raises(UnlikeRunsError) as told:
        check({"a": one, "b": two}, ["learner"], [], strict=True)
    assert "batch.data" in str(told.value) and "learner.lr" not in str(told.value)
    assert check({"a": one, "b": two}, ["learner"], ["batch"], strict=True) == found
    assert check({"a": one, "b": two}, [], [], strict=False) == found


def test_a_changed_source_is_known_by_its_changes(tmp_path: Path) -> None:
    """Two runs of one commit with different changes on top of it, tracked or staged, do not pass for the same code."""
    git = lambda *how: subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *how], cwd=tmp_path, check=True
    )
    git("init", "-q")
    (tmp_path / "code.py").write_text("x = 1\n")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    found = []
    for text in ("x = 1\n", "x = 2\n", "x = 3\n", "x = 2\n"):
        (tmp_path / "code.py").write_text(text)
        found.append(machine._git(tmp_path))
    assert [f["changed"] for f in found] == [False, True, True, True] and "changes" not in found[0]
    assert found[1] == found[3] != found[2] and len({f["commit"] for f in found}) == 1
    runs = {}
    for name, source in zip("abc", found[1:]):
        with RunWriter(tmp_path / name, rank=0) as writer:
            writer.card(RunCard(name, base={"sha256": "a"}, batch={"sha256": "b"}, layout={"world": 1, "device": "cpu"},
                                environment={"source": {"moekit": source}}))  # fmt: skip
        runs[name] = open_run(tmp_path / name)
    assert list(differences({n: runs[n] for n in "ab"})) == ["source.changes"]
    assert not differences({n: runs[n] for n in "ac"})


def test_what_is_meant_to_differ_must(tmp_path: Path) -> None:
    one = record(tmp_path / "a", learner={"lr": 0.1})
    with pytest.raises(ConfigError, match="varying='learner.lr' does not differ.* alike in everything"):
        check({"a": one, "b": one}, ["learner.lr"], [], strict=False)


def test_values_are_told_with_their_runs() -> None:
    assert words({"a": "f" * 64, "b": "f" * 64, "c": None}) == f"{'f' * 12} (a; b), not recorded (c)"


def test_data_are_known_by_content(tmp_path: Path) -> None:
    """A file by its bytes whatever it is called; a folder by all of its files and their names."""
    one, two = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    one.write_text("x\n")
    two.write_text("x\n")
    assert hash_data(one) == hash_data(two)
    before = hash_data(tmp_path)
    two.write_text("y\n")
    assert hash_data(one) != hash_data(two) and hash_data(tmp_path) != before
    two.write_text("x\n")
    assert hash_data(tmp_path) == before
    two.rename(tmp_path / "c.jsonl")
    assert hash_data(tmp_path) != before


def test_a_name_covers_what_is_inside_it_and_nothing_that_only_begins_alike() -> None:
    assert under("rows.length", ["rows"]) and under("rows", ["rows"]) and not under("rows", ["rows.length"])
    assert not under("rows_of_a_step", ["rows"]) and not under("learner.lr_min", ["learner.lr"])
