"""Records read while they grow: the same numbers whoever parses them, a run that was cut read anew, arrays by step."""

from __future__ import annotations

import timeit
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from moekit.data.batch import CLASSES
from moekit.errors import RunError
from moekit.measure import chunks, follow
from moekit.measure.follow import Columns, read_table
from moekit.measure.record import RunWriter, decode, encode


def metrics(step: int) -> dict[str, float]:
    return {"loss/sft": 1 / (step + 1), "rows/context": 24 + step}


def record(folder: Path, steps: int) -> Path:
    """With expert (step % 4) of the first of two layers chosen 6 times."""
    with RunWriter(folder) as writer:
        for step in range(steps):
            decided = torch.zeros(2, len(CLASSES), 4, dtype=torch.int64)
            decided[0, CLASSES.index("supervised"), step % 4] = 6
            arrays = {"policy/forward/decided": decided, "policy/layers": torch.tensor([2, 5])}
            writer.write(step, metrics(step), arrays)
    return folder


def test_a_long_record_is_read_faster_than_line_by_line(tmp_path: Path) -> None:
    path, filler = tmp_path / "metrics.jsonl", {f"group/metric_{i}": 0.12345678901234567 * i for i in range(38)}
    path.write_bytes(b"".join(encode(step, metrics(step) | filler) for step in range(10_000)))
    read_table(path)  # Arrow's first use loads it
    line_by_line = lambda: [decode(line) for line in path.read_bytes().splitlines()]
    both = (lambda: read_table(path)), line_by_line
    # in turn, so that both meet what else runs
    turns = [[timeit.timeit(read, number=1) for read in both] for _ in range(4)]
    ours, theirs = (min(column) for column in zip(*turns))
    (table, end, last), records = read_table(path), line_by_line()
    assert ours < theirs and end == path.stat().st_size and decode(last) == records[-1]
    for name in ("loss/sft", "rows/context", "group/metric_7"):
        assert table[name].tolist() == [r[name] for r in records]


def test_arrow_and_lines_agree_on_awkward_records(tmp_path: Path) -> None:
    """Non-finite values, null, text that looks like a date, integers that become floats, a name that comes late."""
    path, filler = tmp_path / "metrics.jsonl", {f"x/{i}": 0.5 for i in range(40)}
    awkward = [{"a": 1, "when": "2026-11-30T10:00:00"}, {"a": 0.5, "b": float("-inf")}, {"b": None, "c": "word"},
               {"b": float("nan"), "late": 3}]  # fmt: skip
    for rows in (awkward, [{k: v for k, v in r.items() if k != "when"} for r in awkward]):
        path.write_bytes(b"".join(encode(step, rows[step % len(rows)] | filler) for step in range(2000)))
        assert path.stat().st_size > 1 << 18
        table = read_table(path)[0]
        for line in (0, 1, 2, 3, 1998, 1999):
            for name, value in rows[line % len(rows)].items():
                seen = table[name].iloc[line]
                assert pd.isna(seen) if pd.isna(value) else seen == value, (line, name, seen)
    with open(path, "ab") as file:
        file.write(b'{"step":2000}{"step":2001}\n')  # which Arrow would take for two records
    with pytest.raises(RunError, match="line 2001"):
        read_table(path)


def test_a_run_that_was_cut_and_grew_again_is_read_anew(tmp_path: Path) -> None:
    columns = Columns(tmp_path / "metrics.jsonl", {"loss/sft", "eval/sft"}.__contains__)
    assert not columns.read()
    record(tmp_path, 6)
    assert columns.read() and columns.table["loss/sft"].tolist() == [1 / (s + 1) for s in range(6)]
    with RunWriter(tmp_path, resume=2) as writer:
        for step in range(2, 9):  # longer than before by the time somebody looks
            writer.write(step, {"loss/sft": 7.0, "eval/sft": 1.0})
        writer.write(8, {"eval/sft": 0.5})
    assert columns.read() and columns.table["loss/sft"].tolist() == [1, 0.5, *[7.0] * 7]
    assert columns.table["eval/sft"].iloc[-1] == 0.5 and list(columns.table) == ["loss/sft", "eval/sft"]
    with RunWriter(tmp_path, resume=9) as writer:
        writer.write(9, {"eval/sft": 0.25})
        writer.write(9, {"loss/sft": 0.125})
    assert columns.read() and columns.table.loc[9].to_dict() == {"loss/sft": 0.125, "eval/sft": 0.25}


@pytest.mark.parametrize("where", ["the middle of a line", "the end of one"])
def test_a_run_that_is_cut_while_it_is_read_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Between the look whether it goes on and the reading; what stands where the reading begins is another's."""
    path, read = record(tmp_path, 4) / "metrics.jsonl", follow.read_table
    columns = Columns(path, {"loss/sft"}.__contains__)
    assert columns.read()
    as_long = path.read_bytes().replace(b":0.", b":7.")  # 1.0, 7.5, 7.33, 7.25
    lines = [as_long] if where == "the end of one" else [encode(step, {"loss/sft": 7.0, "x": 1}) for step in range(4)]
    anew = b"".join([*lines, *(encode(step, metrics(step) | {"loss/sft": 7.0}) for step in range(4, 9))])
    assert (anew[path.stat().st_size - 1 :][:1] == b"\n") == (where == "the end of one")

    def late(*args: Any) -> Any:
        monkeypatch.undo()
        path.write_bytes(anew)
        return read(*args)

    monkeypatch.setattr(follow, "read_table", late)
    assert columns.read() and columns.table["loss/sft"].tolist() == [decode(x)["loss/sft"] for x in anew.splitlines()]


def test_some_steps_of_an_array_are_read_from_the_files_that_hold_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_STEPS", 10)
    record(tmp_path, 45)
    assert len(list((tmp_path / "arrays").glob("*.safetensors"))) == 5
    opened, read = [], chunks.safe_open
    monkeypatch.setattr(chunks, "safe_open", lambda path, **how: opened.append(path.stem) or read(path, **how))
    found = chunks.series(tmp_path / "arrays", "policy/forward/decided", [9, 10, 44])
    assert found.steps.tolist() == [9, 10, 44] and [int(name) for name in opened] == [0, 10, 40]
    assert found.values[2, 0, CLASSES.index("supervised")].tolist() == [6, 0, 0, 0]  # step 44
    assert chunks.steps(tmp_path / "arrays", "policy/layers").tolist() == list(range(45))
    opened.clear()
    assert len(chunks.steps(tmp_path / "arrays", "policy/layers")) == 45 and not opened
    assert chunks.series(tmp_path / "arrays", "policy/layers", [99]).steps.tolist() == []
