"""The live figure: follows a run, at most ten redraws a second, and ends with exactly what was recorded."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from moekit.errors import ConfigError, RunError
from moekit.measure.record import RunWriter
from moekit.viz.follow import FASTEST_S
from moekit.viz.live import live
from moekit.viz.panels import rank_logs
from moekit.viz.theme import heading


def job(folder: Path, state: str = "running") -> SimpleNamespace:
    """What the live figure uses of a Job."""
    return SimpleNamespace(folder=folder, state=state, nproc=2, done=state == "finished")


def test_it_follows_to_the_exact_end(tmp_path: Path) -> None:
    run = job(tmp_path, "starting")
    shown = live(run, "loss/sft", ("rows/context", "rows/padding"), interval=0.01)  # before there is any file
    assert not shown.done
    start = time.monotonic()
    run.state = "running"
    with RunWriter(tmp_path) as writer:
        for step in range(300):
            writer.write(step, {"loss/sft": 1 / (step + 1), "rows/context": step, "rows/padding": 1.0})
            time.sleep(0.001)
        writer.write(299, {"eval/sft": 0.5})  # a second record of a step
    run.state = "finished"
    shown.wait(20)
    elapsed = time.monotonic() - start
    assert shown.done and 2 <= shown.redraws <= 3 + elapsed / FASTEST_S
    loss, context, padding = shown.figure.data
    assert list(loss.x) == list(range(300)) and list(loss.y) == [1 / (s + 1) for s in range(300)]
    assert context.y[-1] == 299 and len(padding.y) == 300
    assert heading(shown.figure)[1] == "finished · step 299"
    assert "299" in repr(shown)


def test_a_record_written_just_before_the_end_is_not_missed(tmp_path: Path) -> None:
    """The state is read before the metrics: whatever was written before the run ended is then there."""
    with RunWriter(tmp_path) as writer:
        writer.write(0, {"loss/sft": 2.0})

        class Job:
            folder = tmp_path

            @property
            def state(self) -> str:
                writer.write(1, {"loss/sft": 1.0})
                return "finished"

        assert live(Job(), "loss/sft").figure.data[0].y == (2.0, 1.0)


def test_close_takes_what_is_there_and_ends_the_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with RunWriter(tmp_path) as writer:
        shown = live(tmp_path, "loss/sft", interval=60)  # a folder that no launcher watches: until it is closed
        writer.write(0, {"loss/sft": 2.5})
        shown.close()
        shown.close()
    assert shown.done and shown.figure.data[0].y == (2.5,) and set(threading.enumerate()) <= before
    assert heading(shown.figure)[1] == "closed · step 0"


def test_a_finished_run_is_drawn_at_once(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        for step in range(3):
            writer.write(step, {"loss/sft": float(step), "load/max_over_mean": 1.5})
    shown = live(job(tmp_path, "finished"), "loss/sft", "load/max_over_mean")
    assert shown.done and shown.redraws == 1 and [list(t.y) for t in shown.figure.data] == [[0, 1, 2], [1.5] * 3]


def test_what_goes_wrong_in_the_thread_is_raised_by_wait(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    shown = live(tmp_path, "loss/sft", interval=0.01)
    (tmp_path / "metrics.jsonl").write_text("not json\n")
    with pytest.raises(RunError, match="broken"):
        shown.wait(20)
    assert "stopped following" in heading(shown.figure)[1]


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run folder"):
        live(tmp_path / "absent")
    with pytest.raises(ConfigError, match="interval=0"):
        live(tmp_path, interval=0)


def test_rank_logs_follow_each_file_in_its_own_panel(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    run = job(tmp_path)
    logs = rank_logs(run)
    for rank in (0, 1):
        (tmp_path / "logs" / f"rank_{rank}.log").write_text("".join(f"{rank}: line {i}\n" for i in range(5)) + "end")
    run.done = True
    logs.wait(20)
    for rank in (0, 1):
        assert logs.panels[rank].lines == [*(f"{rank}: line {i}" for i in range(5)), "end"]


def test_a_folder_of_a_launched_run_is_read_with_its_state(tmp_path: Path) -> None:
    state = {"state": "stopped", "reason": "", "host": "", "pids": {"supervisor": None, "ranks": []}, "stamps": {}}
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert heading(live(tmp_path, "loss/sft").figure)[1] == "stopped · no step recorded yet"
