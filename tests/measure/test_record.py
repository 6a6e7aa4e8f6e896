"""The run record: exact round trips, strict JSON, crashes, resuming, foreign folders, full disks."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# (pandas annotates a column as anything that a column can be)

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from moekit.errors import ConfigError, RunError, RunExistsError, StorageError
from moekit.measure import chunks, files, record, run
from moekit.measure.follow import Columns
from moekit.measure.record import RunWriter, decode, encode, open_run
from moekit.measure.tokens import RowCounter


def strict(line: str):
    """Parse as a parser would that knows no NaN."""

    def refuse(word):
        raise ValueError(word)

    return json.loads(line, parse_constant=refuse)


def write(folder, steps, start=0, **options):
    with RunWriter(folder, **options) as writer:
        for s in range(start, steps):
            arrays = {"policy/layers": torch.tensor([0, 2]), "policy/forward/decided": torch.full((2, 4, 3), s)}
            writer.write(s, {"loss/total": 1 / (s + 1), "rows/dispatched": s}, arrays)


def test_metrics_round_trip_exactly(tmp_path):
    """Doubles, large integers, text, missing values and non-finite ones come back as they went in."""
    values = {
        "loss/total": [0.1, math.nan, 1e-308, 3.0],
        "grad/norm": [math.inf, -math.inf, 2, 2.5],
        "rows/dispatched": [2**53 + 1, 0, 5, 7],
        "data/name": ["a", 'b"\n', "c", "2026-01-01"],
        "always/nan": [math.nan] * 4,
        "now/none": [None, 1.5, None, None],
    }
    with RunWriter(tmp_path) as writer:
        for s in range(4):
            writer.write(s, {n: v[s] for n, v in values.items()})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [strict(line)["step"] for line in lines] == [0, 1, 2, 3]
    assert strict(lines[0])["grad/norm"] is None and strict(lines[0])["nonfinite"]["grad/norm"] == "inf"
    m = open_run(tmp_path).metrics
    assert m.index.name == "step" and m.index.tolist() == [0, 1, 2, 3] and list(m.columns) == list(values)
    for name, want in values.items():
        for got, wanted in zip(m[name].tolist(), want):
            missing = wanted is None or (isinstance(wanted, float) and math.isnan(wanted))
            assert math.isnan(got) if missing else got == wanted, (name, got, wanted)
    assert m["rows/dispatched"].dtype == "int64"
    assert [decode(line) for line in lines][1]["grad/norm"] == -math.inf


def test_a_column_of_mixed_types_is_read(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.write(0, {"data/at": 1, "loss/total": math.nan})
        writer.write(1, {"data/at": "two", "loss/total": 2.0})
    m = open_run(tmp_path).metrics
    assert m["data/at"].tolist() == [1, "two"] and math.isnan(m["loss/total"][0])


def test_what_a_metric_may_be():
    got = decode(encode(0, {"t": torch.tensor(2.5), "n": np.float32(0.5), "i": np.int64(3), "b": True}))
    assert got == {"step": 0, "t": 2.5, "n": 0.5, "i": 3, "b": True}
    assert decode(encode(0, {"t": torch.tensor(math.nan)}))["t"] != 0
    for bad, message in (
        ({"x": torch.ones(2)}, "'x' has shape"),
        ({"x": [1]}, "'x' is a list"),
        ({"step": 1}, "'step'"),
        ({"nonfinite": 1}, "'nonfinite'"),
    ):
        with pytest.raises(ConfigError, match=message):
            encode(0, bad)


def test_two_records_of_a_step_are_joined(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.write(0, {"loss/total": 1.0})
        writer.write(0, {"eval/sft": 5.0})
        writer.write(1, {"loss/total": 2.0})
        with pytest.raises(ConfigError, match="step 0 comes after step 1"):
            writer.write(0, {})
    m = open_run(tmp_path).metrics
    assert m["loss/total"].tolist() == [1, 2] and m["eval/sft"][0] == 5 and math.isnan(m["eval/sft"][1])


# ------------------------------------------------------------------ crashes and resuming


def test_a_half_written_last_line_is_left_out_and_then_repaired(tmp_path):
    write(tmp_path, 5)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    for cut in (1, 10, len(whole.splitlines(keepends=True)[-1]) - 1):
        path.write_bytes(whole[:-cut])
        assert open_run(tmp_path).metrics.index.tolist() == [0, 1, 2, 3], cut
        write(tmp_path, 6, start=4, resume=4)
        assert open_run(tmp_path).metrics["rows/dispatched"].tolist() == [0, 1, 2, 3, 4, 5], cut
        path.write_bytes(whole)


def test_resume_cuts_the_future(tmp_path):
    """10 steps were recorded, the checkpoint knows 4: records and arrays of 4.. are cut and written again."""
    write(tmp_path, 10)
    with RunWriter(tmp_path, resume=4) as writer:
        for s in range(4, 7):
            arrays = {"policy/layers": torch.tensor([0, 2]), "policy/forward/decided": torch.full((2, 4, 3), 100 + s)}
            writer.write(s, {"loss/total": -1.0}, arrays)
    found = open_run(tmp_path)
    assert found.metrics.index.tolist() == list(range(7))
    assert found.metrics["loss/total"].tolist() == [1, 1 / 2, 1 / 3, 1 / 4, -1, -1, -1]
    series = found.arrays("policy/forward/decided")
    assert series.steps.tolist() == list(range(7))
    assert series.values[:, 1, 2, 0].tolist() == [0, 1, 2, 3, 104, 105, 106]


@pytest.mark.parametrize("resume", (0, 3, 9, 10, 50))
def test_resume_anywhere_over_several_chunks(tmp_path, monkeypatch, resume):
    monkeypatch.setattr(chunks, "CHUNK_STEPS", 4)
    write(tmp_path, 10)
    assert len(list((tmp_path / "arrays").iterdir())) == 3
    write(tmp_path, resume + 2, start=resume, resume=resume)
    found = open_run(tmp_path)
    want = [*range(min(resume, 10)), resume, resume + 1]
    assert found.metrics.index.tolist() == want
    assert found.arrays("policy/forward/decided").steps.tolist() == want
    assert {int(p.stem) for p in (tmp_path / "arrays").iterdir()} <= set(want), "no empty chunk is left"
    assert found.arrays("policy/forward/decided").values[:, 0, 0, 0].tolist() == want


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    write(tmp_path, 5)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:-9] + b"\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(RunError, match="line 3 is broken"):
        open_run(tmp_path).metrics  # noqa: B018
    with pytest.raises(RunError, match="line 3 is broken and not the last"):
        RunWriter(tmp_path, resume=5)
    assert path.read_bytes() == b"".join(lines), "nothing was cut"


def test_a_killed_process_loses_no_record(tmp_path):
    """os._exit after 50 records, without close: all records are there, arrays up to the last flush."""
    code = """
import os, sys, torch
from moekit.measure.record import RunWriter
w = RunWriter(sys.argv[1])
for s in range(50):
    w.write(s, {"loss/total": float(s)}, {"x": torch.tensor([s])})
    if s == 30:
        w.flush()
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 9
    found = open_run(tmp_path)
    assert found.metrics["loss/total"].tolist() == list(range(50))
    steps = found.arrays("x").steps.tolist()
    assert steps == list(range(len(steps))) and len(steps) >= 31


def test_full_disk_leaves_no_half_record(tmp_path, monkeypatch):
    """The disk fills up after 7 bytes of a line: one clear error, the file as before, and it can go on later."""
    writer = RunWriter(tmp_path)
    writer.write(0, {"loss/total": 1.0})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    real, left = os.write, [7]

    def nearly_full(fd, data):
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        n, left[0] = real(fd, data[: left[0]]), 0
        return n

    monkeypatch.setattr(files.os, "write", nearly_full)
    with pytest.raises(StorageError, match=r"metrics.jsonl: the disk is full; free some space"):
        writer.write(1, {"loss/total": 2.0})
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    monkeypatch.setattr(files.os, "write", real)
    writer.write(1, {"loss/total": 2.0})
    writer.close()
    assert open_run(tmp_path).metrics["loss/total"].tolist() == [1, 2]


def test_full_disk_keeps_the_old_file(tmp_path, monkeypatch):
    path = files.write_atomic(tmp_path / "card.json", b"old")

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(StorageError, match="disk is full"):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["card.json"]


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file/run/metrics.jsonl"):
        RunWriter(tmp_path / "file" / "run")


def test_existing_run_is_not_touched(tmp_path):
    write(tmp_path, 3)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(RunExistsError, match="resume=<step>"):
        RunWriter(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_other_ranks_write_nothing(tmp_path):
    with RunWriter(tmp_path / "run", rank=1) as writer:
        writer.write(0, {"loss/total": 1.0}, {"x": torch.ones(1)})
        writer.config({"lr": 1})
        writer.flush()
    assert not (tmp_path / "run").exists()


def test_closed_writer(tmp_path):
    writer = RunWriter(tmp_path)
    writer.close()
    writer.close()
    with pytest.raises(ConfigError, match="closed"):
        writer.write(0, {})


# ------------------------------------------------------------------ reading


def test_a_running_job_can_be_read_and_followed(tmp_path):
    writer = RunWriter(tmp_path)
    found = open_run(tmp_path)
    assert len(found.metrics) == 0 and found.state == "unknown"
    writer.write(0, {"loss/total": 1.0})
    assert found.metrics["loss/total"].tolist() == [1]
    following = Columns(tmp_path / "metrics.jsonl", lambda name: True)
    assert following.read() and following.table["loss/total"].tolist() == [1]
    writer.write(1, {"loss/total": math.inf})
    with open(tmp_path / "metrics.jsonl", "ab") as f:
        f.write(b'{"step":2,"lo')
    assert found.metrics["loss/total"].tolist() == [1, math.inf]
    assert following.read() and following.table["loss/total"].to_dict() == {0: 1, 1: math.inf}
    assert not following.read()
    (tmp_path / "metrics.jsonl").write_bytes(encode(0, {"loss/total": 7.0}))  # resumed from an earlier step
    assert following.read() and following.table["loss/total"].to_dict() == {0: 7}
    assert not Columns(tmp_path / "nothing", lambda name: True).read()


def test_missing_and_foreign_folders(tmp_path):
    with pytest.raises(RunError, match="there is no run folder"):
        open_run(tmp_path / "nope")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(RunError, match="is not a run folder: it has none of metrics.jsonl"):
        open_run(tmp_path)


def test_config_state_and_repr(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"nproc": 2}))
    (tmp_path / "state.json").write_text(json.dumps({"state": "running"}))
    with RunWriter(tmp_path) as writer:
        writer.config({"lr": 0.5})
        writer.write(0, {"loss/total": 2.0, "tokens/supervised": 10, "rate/supervised_tokens_s": 5.0})
        writer.write(1, {"loss/total": 1.0, "tokens/supervised": 11, "rate/supervised_tokens_s": 6.0})
    found = open_run(tmp_path)
    assert found.config == {"nproc": 2, "recipe": {"lr": 0.5}}, "the launcher's keys stay"
    assert found.state == "running" and found.card is None
    assert "2 -> 1" in repr(found) and "21" in repr(found)
    assert "2 -&gt; 1" in found._repr_html_()
    (tmp_path / "card.json").write_text("{")
    with pytest.raises(RunError, match=r"card.json is broken"):
        found.card  # noqa: B018


# ------------------------------------------------------------------ arrays


def counted(step: int) -> RowCounter:
    """2 layers (0 and 2), 3 experts; rows that encode where they belong."""
    counter = RowCounter((0, 2), 3, top_k=1)
    for layer in (0, 2):
        rows = torch.arange(12).view(4, 3) + 100 * layer + 1000 * step
        counter.layer(layer, rows, rows, torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long))
        counter.backward(layer, rows)
    return counter


def test_rows_as_a_table(tmp_path):
    with RunWriter(tmp_path) as writer:
        for s in range(3):
            writer.write(s, {"loss/total": 0.0}, counted(s).arrays())
    found = open_run(tmp_path)
    table = found.rows()
    assert list(table.columns) == ["step", "component", "pass", "layer", "class", "expert", "rows"]
    assert len(table) == 3 * 2 * 2 * 4 * 3
    one = table[(table.step == 2) & (table.layer == 2) & (table["class"] == "filtered") & (table.expert == 1)]
    assert one["rows"].tolist() == [2207, 2207] and sorted(one["pass"]) == ["backward", "forward"]
    by_class = found.rows(by=("step", "class"), pass_name="forward")
    assert by_class["rows"].sum() * 2 == table["rows"].sum()
    assert by_class[(by_class.step == 1) & (by_class["class"] == "context")]["rows"].tolist() == [
        sum(1000 + x for x in (3, 4, 5)) + sum(1200 + x for x in (3, 4, 5))
    ]
    whole = found.rows(by=["class"]).set_index("class")["rows"]
    assert whole.to_dict() == table.groupby("class")["rows"].sum().to_dict(), "passes are summed when not asked for"
    assert found.rows(by=("step",), steps=[1], pass_name="forward")["step"].tolist() == [1]
    assert len(found.rows(component="critic")) == 0
    with pytest.raises(ConfigError, match="choose from step"):
        found.rows(by=("token",))
    with pytest.raises(RunError, match="no array 'x'; it has: policy/backward/dispatched"):
        found.arrays("x")


def test_arrays_come_back_in_their_values_and_types(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_STEPS", 3)
    big = 2**40
    with RunWriter(tmp_path) as writer:
        for s in range(8):
            arrays = {"i": torch.tensor([s, -s]), "f": torch.tensor([s / 3]), "big": torch.tensor(big + s)}
            writer.write(s, {}, arrays if s != 5 else {"i": arrays["i"]})
    found = open_run(tmp_path)
    i, f, large = found.arrays("i"), found.arrays("f"), found.arrays("big")
    assert i.values.dtype == np.int64 and i.values.tolist() == [[s, -s] for s in range(8)]
    assert f.values.dtype == np.float32 and f.steps.tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert large.values.tolist() == [big + s for s in (0, 1, 2, 3, 4, 6, 7)]
    assert found.arrays("i", [6, 1]).steps.tolist() == [1, 6]
    assert len(found.arrays("i", [99])) == 0
    assert found.array_names == ["big", "f", "i"]


def test_arrays_are_copied_when_they_are_given(tmp_path):
    x = torch.zeros(2)
    with RunWriter(tmp_path) as writer:
        for s in range(3):
            x.fill_(s)
            writer.write(s, {}, {"x": x})
    assert open_run(tmp_path).arrays("x").values.tolist() == [[0, 0], [1, 1], [2, 2]]


def test_many_steps_make_few_files_and_little_rewriting(tmp_path, monkeypatch):
    """3000 steps: 3 files; the current chunk is not written again at every step."""
    writes = []
    real = chunks.write_atomic
    monkeypatch.setattr(chunks, "write_atomic", lambda path, data: (writes.append(len(data)), real(path, data)))
    with RunWriter(tmp_path) as writer:
        for s in range(3000):
            writer.write(s, {"loss/total": 0.0}, {"x": torch.tensor([s])})
    assert len(list((tmp_path / "arrays").iterdir())) == 3
    assert sum(writes) < 20 * 3000 * 12
    assert open_run(tmp_path).arrays("x").values[:, 0].tolist() == list(range(3000))


def test_a_step_is_recorded_once_and_shapes_may_change_between_chunks(tmp_path):
    writer = chunks.ArrayWriter(tmp_path)
    writer.add(0, {"x": torch.zeros(2)})
    with pytest.raises(ConfigError, match="step 0 was recorded already"):
        writer.add(0, {"x": torch.zeros(2)})
    writer.add(1, {"x": torch.zeros(3)})
    writer.close()
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(RunError, match=r"array 'x' is \(3,\), earlier \(2,\)"):
        chunks.series(tmp_path, "x")


def test_leftovers_of_a_crash_are_removed(tmp_path):
    write(tmp_path, 2)
    (tmp_path / "arrays" / ".000000002.safetensors.123.partial").write_bytes(b"half")
    assert len(open_run(tmp_path).arrays("policy/layers")) == 2
    write(tmp_path, 3, start=2, resume=2)
    assert [p.name for p in (tmp_path / "arrays").glob(".*")] == []
    (tmp_path / "arrays" / "000000009.safetensors").write_bytes(b"junk")
    with pytest.raises(RunError, match="000000009.safetensors cannot be read"):
        open_run(tmp_path).arrays("policy/layers")


def test_record_names():
    assert record.METRICS == "metrics.jsonl" and set(run.AXES) >= {"step", "class", "expert"}
