"""The dashboard: it shows what was recorded, however fast it comes; its sliders and buttons do what they say."""

from __future__ import annotations

import base64
import io
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from moekit.data.batch import CLASSES
from moekit.errors import ConfigError, JobError, RunError
from moekit.measure.record import RunWriter, decode, encode
from moekit.viz import dashboard as module
from moekit.viz import overview, static
from moekit.viz.controls import Controls
from moekit.viz.dashboard import dashboard
from moekit.viz.follow import FASTEST_S

EXPERTS = 4


def metrics(step: int) -> dict[str, float]:
    rates = {"rate/supervised_tokens_s": 10.0 + step, "rate/tokens_s": 50.0, "rate/routed_rows_s": 200.0 + step}
    rows = {"rows/supervised": 8, "rows/context": 24 + step, "rows/filtered": 0, "rows/padding": 0}
    work = {"rows/dispatched": 32 + step, "rows/backward": 32 + step, "rows/reference_score": 5}
    return {"loss/total": 9.0, "loss/sft": 1 / (step + 1), **rates, **rows, **work}


def arrays(step: int) -> dict[str, torch.Tensor]:
    """Layers 2 and 5; at step s expert s of layer 2 has all rows, and 3 experts of layer 5 share them; padding counts
    for nothing."""
    decided = torch.zeros(2, len(CLASSES), EXPERTS, dtype=torch.int64)
    decided[0, CLASSES.index("supervised"), step % EXPERTS] = 6
    decided[1, CLASSES.index("context"), :3] = 2
    decided[:, CLASSES.index("padding"), 3] = 99
    return {"policy/forward/decided": decided, "policy/layers": torch.tensor([2, 5])}


def record(folder: Path, steps: int, start: int = 0) -> Path:
    with RunWriter(folder, resume=start if start else None) as writer:
        for step in range(start, start + steps):
            writer.write(step, metrics(step), arrays(step))
    return folder


def job(folder: Path, state: str = "running", **more: Any) -> Any:
    """What the dashboard uses of a Job."""
    ranks = [{"rank": 0, "pid": 11, "alive": True, "exit": None}, {"rank": 1, "pid": 12, "alive": False, "exit": -9}]
    how = {"folder": folder, "state": state, "nproc": 2, "done": False, "elapsed": 62.0, "reason": "", "ranks": ranks,
           "cannot_resume": "it has written no checkpoint", "logs": lambda rank, lines: f"log of {rank}"}  # fmt: skip
    return SimpleNamespace(**(how | more))


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def words(fig: Any) -> str:
    return " | ".join(note.text for note in fig.layout.annotations if note.text)


# ------------------------------------------------------------------ what is shown is what was recorded


def test_the_figures_hold_the_recorded_numbers(tmp_path: Path) -> None:
    board = dashboard(job(record(tmp_path, 6), "finished"))
    assert board.done and board.updates == 1
    loss, useful, tokens, rows = board.figures["progress"].data
    assert list(loss.x) == list(range(6)) and list(loss.y) == [1 / (s + 1) for s in range(6)]  # the objective's own
    assert list(useful.y) == [10.0 + s for s in range(6)] and list(rows.y) == [200.0 + s for s in range(6)]
    assert list(tokens.y) == [50.0] * 6
    assert all(
        text in words(board.figures["progress"]) for text in ("loss/sft, nats a token", "<b>0.1667</b>", "<b>15</b>")
    )
    bars = {trace.name: list(trace.y) for trace in board.figures["work"].data}
    assert bars == {"supervised": [8] * 6, "context": [24 + s for s in range(6)], "reference score": [5] * 6,
                    "policy forward": [32 + s for s in range(6)], "policy backward": [32 + s for s in range(6)],
                    }  # fmt: skip
    assert "context 29" in words(board.figures["work"])


def test_the_map_of_expert_load_follows_the_last_step_until_the_slider_is_moved(tmp_path: Path) -> None:
    run = job(record(tmp_path, 5))
    board = dashboard(run, interval=0.1)
    step, layer = board.widgets["step"], board.widgets["layer"]
    layers, history = board.figures["load"].data
    share = lambda: [list(row) for row in layers.customdata]
    assert share() == [[4, 0, 0, 0], [4 / 3, 4 / 3, 4 / 3, 0]] and step.value == 4  # step 4: expert 0, of layer 2
    assert np.array(history.customdata).T.tolist() == [[4.0 * (e == s % 4) for e in range(4)] for s in range(5)]
    assert list(layers.y) == ["2", "5"] and layer.options == ("2", "5")
    record(tmp_path, 2, start=5)
    until(lambda: step.value == 6)
    until(lambda: share()[0] == [0, 0, 4, 0])
    step.value = 1  # the reader moves it
    until(lambda: share()[0] == [0, 4, 0, 0] and "at step 1" in words(board.figures["load"]))
    (marked,) = (note.x for note in board.figures["load"].layout.annotations if note.text == "▾")
    assert marked == pytest.approx(0.56 + 0.44 * 1.5 / 7)  # column 1 of 7
    record(tmp_path, 1, start=7)
    until(lambda: step.max == 7)
    assert step.value == 1 and share()[0] == [0, 4, 0, 0]
    step.value = 7  # and back to the end
    record(tmp_path, 1, start=8)
    until(lambda: step.value == 8)
    layer.value = "5"
    until(lambda: "of layer 5" in words(board.figures["load"]))
    assert np.array(history.customdata)[:3].tolist() == [[4 / 3] * 9] * 3
    run.state = "finished"
    board.wait(20)
    step.value = 2  # sliders go on working after the end
    until(lambda: share()[0] == [0, 0, 4, 0])
    board.close()


def test_a_run_without_metrics_or_launcher_and_one_whose_metrics_come_later(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    board = dashboard(tmp_path / "run", interval=0.1)
    assert "recorded" in board.widgets["state"].value and "no step recorded yet" in board.widgets["state"].value
    assert board.widgets["stop"].disabled and "no launcher" in board.widgets["stop"].tooltip
    assert board.widgets["resume"].disabled and "no launcher" in board.widgets["message"].value
    with pytest.raises(ConfigError, match="no launcher"):
        board.stop()
    record(tmp_path / "run", 3)
    until(lambda: len(board.figures["work"].data) == 5 and len(board.figures["load"].data) == 2)
    until(lambda: "step 2" in board.widgets["state"].value)
    before = threading.active_count()
    board.close()
    board.close()
    assert board.done and threading.active_count() == before - 1


def test_ranks_logs_and_what_the_buttons_say(tmp_path: Path) -> None:
    board = dashboard(job(record(tmp_path, 2), reason="<b>why</b>"))
    told = board.widgets["state"].value
    assert "● alive" in told and "✕ signal 9" in told and "0:01:02" in told and "&lt;b&gt;why" in told
    assert "log of 0" in board.widgets["log"].value
    board.widgets["rank"].value = "supervisor"
    until(lambda: "log of supervisor" in board.widgets["log"].value)
    assert not board.widgets["stop"].disabled and board.widgets["resume"].disabled
    assert board.widgets["resume"].tooltip == "it has written no checkpoint"
    board.close()


def test_ranks_that_are_not_shown_are_counted(tmp_path: Path) -> None:
    ranks = [{"rank": r, "pid": 10 + r, "alive": True, "exit": None} for r in range(module.RANKS + 6)]
    told = dashboard(job(record(tmp_path, 1), "finished", ranks=ranks, nproc=len(ranks))).widgets["state"].value
    assert told.count("alive") == module.RANKS and "and 6 more" in told


def test_a_button_does_not_block_and_its_failure_is_said_in_the_page(tmp_path: Path) -> None:
    go, threads = threading.Event(), []

    def stop() -> None:
        threads.append(threading.current_thread())
        go.wait(20)
        raise JobError("rank 1 <does> not answer")

    board = dashboard(job(record(tmp_path, 2), stop=stop), interval=0.1)
    board.widgets["stop"].click()
    until(lambda: "stopping" in board.widgets["message"].value and board.widgets["stop"].disabled)
    board.widgets["stop"].click()  # once is enough
    go.set()
    until(lambda: "stop failed: rank 1 &lt;does&gt; not answer" in board.widgets["message"].value)
    assert len(threads) == 1 and threads[0] is not threading.main_thread()
    board.close()


def test_several_runs_lie_over_each_other_and_one_is_chosen(tmp_path: Path) -> None:
    for name, steps in (("a", 3), ("b", 5)):
        record(tmp_path / "runs" / name, steps)
    board = dashboard(tmp_path / "runs")  # a folder of runs
    lines = board.figures["progress"].data
    assert [(trace.name, len(trace.x)) for trace in lines[:2]] == [("a loss/sft", 3), ("b loss/sft", 5)]
    assert lines[0].line.color != lines[1].line.color and "a <b>0.3333</b>" in words(board.figures["progress"])
    assert len(board.figures["work"].data[0].x) == 3
    board.widgets["run"].value = 1
    until(lambda: len(board.figures["work"].data[0].x) == 5)
    assert [s.name for s in board.sources] == ["a", "b"] and "Runs" in repr(board)
    board.close()
    with pytest.raises(ConfigError, match="no run folder"):
        dashboard(tmp_path / "absent")
    with pytest.raises(ConfigError, match="no run to show"):
        dashboard([])
    with pytest.raises(ConfigError, match="interval=0"):
        dashboard(tmp_path / "runs", interval=0)


def launched(folder: Path, state: str = "running") -> Path:
    """A folder as a launcher leaves it, of a job on another host."""
    told = {"state": state, "reason": "", "host": "elsewhere", "created": time.time(), "ended": None,
            "pids": {"supervisor": None, "ranks": [None]}, "stamps": {}}  # fmt: skip
    (folder / "state.json").write_text(json.dumps(told))
    (folder / "config.json").write_text(json.dumps({"nproc": 1, "function": "train"}))
    return folder


def test_a_deleted_run_is_gone_and_the_others_go_on(tmp_path: Path) -> None:
    gone, stays = (launched(record(tmp_path / name, 3)) for name in "ab")
    board, alone = dashboard(tmp_path, interval=0.1), dashboard(gone, interval=0.1)
    assert board.widgets["state"].value.count("running") == 2
    shutil.rmtree(gone)
    until(lambda: "gone" in board.widgets["state"].value and "was deleted" in board.widgets["message"].value)
    assert board.widgets["stop"].disabled and board.widgets["resume"].disabled
    record(stays, 2, start=3)
    until(lambda: len(board.figures["progress"].data[1].x) == 5)
    assert len(board.figures["progress"].data[0].x) == 3 and not board.done  # what was read of it stays
    assert "gone" in alone.wait(20).widgets["state"].value and alone.done
    board.close()


def test_a_button_acts_on_the_run_that_it_was_pressed_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread may come late: another run may be chosen by then."""
    stopped: list[str] = []
    runs = [job(record(tmp_path / name, 2), stop=lambda name=name: stopped.append(name)) for name in "ab"]
    board, late = dashboard(runs, interval=0.1), []
    board.widgets["run"].value = 1
    with monkeypatch.context() as patch:
        patch.setattr(
            module.threading, "Thread", lambda target, **how: SimpleNamespace(start=lambda: late.append(target))
        )
        board._act("stop")
    board.stop()
    board.widgets["run"].value = 0
    late[0]()
    assert stopped == ["b", "b"]
    board.close()


def test_a_loss_that_is_no_number_is_said_and_a_line_that_is_being_written_is_left(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        for step in range(5):
            writer.write(step, metrics(step) | ({"loss/sft": float("nan")} if step > 2 else {}))
        writer.write(5, {"eval/sft": 0.5})  # no step of training
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step":6,"loss/sf')
    board = dashboard(job(tmp_path, "finished"))
    loss = board.figures["progress"].data[0]
    assert list(loss.x) == [0, 1, 2, 3, 4] and np.isnan(loss.y[3:].tolist()).all() and board.error is None
    assert "<b>NaN</b>" in words(board.figures["progress"]) and "image/png" in board._twin()


def test_a_record_written_just_before_the_end_is_not_missed(tmp_path: Path) -> None:
    """The state is read before the metrics, and not again after them."""
    with RunWriter(tmp_path) as writer:
        writer.write(0, metrics(0))
        states: list[str] = []

        class Job(SimpleNamespace):
            @property
            def state(self) -> str:
                states.append("finished" if states else "running")
                if len(states) == 2:
                    writer.write(1, metrics(1))
                return states[-1]

        what = vars(job(tmp_path))
        board = dashboard(Job(**{name: value for name, value in what.items() if name != "state"}), interval=0.1)
        assert list(board.wait(20).figures["progress"].data[0].x) == [0, 1]


def test_runs_of_one_name_are_told_apart_and_one_that_is_given_twice_is_one(tmp_path: Path) -> None:
    first, second = record(tmp_path / "x" / "a" / "run", 2), record(tmp_path / "y" / "a" / "run", 3)
    board = dashboard([first, second, first])
    assert [name for name, _ in board.widgets["run"].options] == ["x/a/run", "y/a/run"]
    assert [(line.name, len(line.x)) for line in board.figures["progress"].data[:2]] == [
        ("x/a/run loss/sft", 2),
        ("y/a/run loss/sft", 3),
    ]
    assert "y/a/run" in board.widgets["state"].value
    board.close()


def test_a_run_that_goes_on_with_fewer_ranks_and_other_layers(tmp_path: Path) -> None:
    run = job(record(tmp_path, 4), "stopped")
    board = dashboard(run, interval=0.1)
    board.widgets["rank"].value, board.widgets["layer"].value = 1, "5"
    until(lambda: "log of 1" in board.widgets["log"].value and "of layer 5" in words(board.figures["load"]))
    run.nproc, run.ranks, run.state = 1, run.ranks[:1], "running"
    with RunWriter(tmp_path, resume=2) as writer:
        for step in (2, 3, 4):
            load = {
                "policy/forward/decided": arrays(step)["policy/forward/decided"][:1],
                "policy/layers": torch.tensor([2]),
            }
            writer.write(step, metrics(step) | {"loss/sft": 7.0}, load if step == 4 else None)
    board._nudge()
    until(lambda: "log of 0" in board.widgets["log"].value and board.widgets["rank"].value == 0)
    until(lambda: list(board.figures["progress"].data[0].y) == [1.0, 0.5, 7.0, 7.0, 7.0])
    until(lambda: len(board.widgets["rank"].options) == 2 and "signal 9" not in board.widgets["state"].value)
    board.close()


@pytest.mark.parametrize("names", [["run"], ["20261130-080000-train", "20261130-091500-train", "short"]])
def test_nothing_that_is_written_lies_over_something_else(names: list[str]) -> None:
    """Labels of lines that end low and have many digits, beside ticks with many digits."""
    table = pd.DataFrame(
        [metrics(s) | {"loss/sft": 9.87654 / (s + 1) ** 2, "rate/tokens_s": 1e5 + s} for s in range(120)]
    )
    load = np.arange(16).reshape(2, 8)
    steps = list(range(0, 250, 5))
    history = np.ones((len(steps), 8))
    for fig in (
        overview.progress({name: table for name in names}),
        overview.work(table),
        overview.load(load, ["10", "11"], 245, history, steps, "11"),
    ):
        drawn = static.to_matplotlib(fig)
        drawn.canvas.draw()
        axes = [axis for ax in drawn.axes for axis in (ax.xaxis, ax.yaxis)]
        ticks = [tick.label1 for axis in axes for tick in axis._update_ticks()]  # those that are drawn
        texts = [text for text in (*drawn.texts, *ticks, *(axis.label for axis in axes)) if text.get_text()]
        boxes = [(text.get_text(), text.get_window_extent().padded(-1)) for text in texts if text.get_visible()]
        for i, (words, box) in enumerate(boxes):
            assert box.x0 >= 0 and box.x1 <= drawn.bbox.x1, f"{words} is cut"
            over = [other for other, its in boxes[i + 1 :] if box.overlaps(its) and other != words]
            assert not over, f"{words} lies over {over}"


def test_what_goes_wrong_is_said_in_the_page_and_raised_by_wait(tmp_path: Path) -> None:
    board = dashboard(job(record(tmp_path, 2)), interval=0.1)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write("not json\n")
    with pytest.raises(RunError, match="broken"):
        board.wait(20)
    assert "stopped following" in board.widgets["message"].value


def test_what_is_set_for_the_reader_is_not_taken_for_a_choice_of_hers() -> None:
    changed: list[int] = []
    page = Controls(["run"], lambda name: None, lambda: changed.append(1))
    with page.setting():
        page.steps(0, 9)
    assert page.value("step") == 9 and page.follows and not changed
    page.widgets["step"].value = 5
    assert changed == [1] and not page.follows
    with page.setting():
        page.steps(0, 2)  # the run was cut
        page.steps(0, 4)
    assert page.value("step") == 2 and not page.follows and changed == [1]


def test_plotlys_script_goes_to_the_page_once(tmp_path: Path) -> None:
    board = dashboard(job(record(tmp_path, 2), "finished"))
    first, *later = (len(fig._esm) for fig in board.figures.values())
    assert first > 1e6 and len(later) == 2 and max(later) < 1000


# ------------------------------------------------------------------ the twin


def test_bc_126_the_twin_is_a_picture_and_numbers_of_the_last_state(tmp_path: Path) -> None:
    board = dashboard(job(record(tmp_path, 4), "finished"))
    data = board._twin()
    picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
    high = sum(fig.layout.height for fig in board.figures.values()) + 50
    assert picture.size == (overview.WIDE, high) and (np.asarray(picture.convert("L")) < 200).any()
    assert "finished" in data["text/plain"] and "0.25" in data["text/plain"]
    assert board.figures["progress"].layout.height == high - 50 - 256 - 276  # drawing the twin leaves the page alone


def test_without_widgets_it_says_so_and_shows_the_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, said = [], []
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.setattr(module, "place", lambda: "notebook")
    monkeypatch.setattr(module, "put", lambda handle, data: shown.append(data) or "handle")
    monkeypatch.setattr("builtins.print", lambda *text: said.append(" ".join(map(str, text))))
    run = job(record(tmp_path, 2))
    board = dashboard(run)
    board._ipython_display_()
    assert "static picture" in said[0] and 'pip install "moekit[notebooks]"' in said[0] and board.widgets == {}
    assert set(shown[0]) == {"text/plain", "image/png"}
    record(tmp_path, 1, start=2)
    run.state = "finished"
    board._nudge()
    board.wait(20)
    assert "0.3333" in shown[-1]["text/plain"] and len(shown) == 2


# ------------------------------------------------------------------ however much, however fast


def count_messages(board: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Messages that the widgets send, by name, from now on."""
    from ipywidgets import Widget

    sent: dict[str, int] = {}
    names = {id(w): name for name, w in {**board.figures, **board.widgets}.items()}
    send = Widget._send

    def counted(self: Any, *args: Any, **how: Any) -> Any:
        name = names.get(id(self), "other")
        sent[name] = sent.get(name, 0) + 1
        return send(self, *args, **how)

    monkeypatch.setattr(Widget, "_send", counted)
    return sent


@pytest.mark.parametrize(("lines", "seconds"), [(600, 0.6), pytest.param(10_000, 10.0, marks=pytest.mark.long)])
def test_bc_122_messages_are_bounded_and_the_last_value_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: int, seconds: float
) -> None:
    """10,000 metric lines in 10 s."""
    run = job(tmp_path)
    board = dashboard(run, interval=0.01)
    sent, began = count_messages(board, monkeypatch), time.monotonic()
    with RunWriter(tmp_path) as writer:
        for step in range(lines):
            writer.write(step, metrics(step))
            time.sleep(max(0.0, began + step * seconds / lines - time.monotonic()))
    run.state = "finished"
    board.wait(30)
    looks = 2 + (time.monotonic() - began) / FASTEST_S
    assert 2 <= board.updates <= looks
    # plotly sends two numbers, the change and its end; bars that are new come in messages of their own
    assert max(sent.get("progress", 0), sent.get("work", 0)) <= 4 * board.updates + 8, (board.updates, sent)
    assert sent["state"] <= looks and sum(sent.values()) <= 14 * (board.updates + 2), (board.updates, sent)
    loss = board.figures["progress"].data[0]
    assert (loss.x[-1], loss.y[-1]) == (lines - 1, 1 / lines) and len(loss.x) <= overview.POINTS + 2
    assert f"<b>{overview.number(1 / lines)}</b>" in words(board.figures["progress"])


def write_long(folder: Path, steps: int) -> Path:
    """As many lines as that, of the size that a real run's have."""
    folder.mkdir()
    filler = {f"group/metric_{i}": 0.12345678901234567 * i for i in range(28)}
    with open(folder / "metrics.jsonl", "wb") as file:
        file.writelines(encode(step, metrics(step) | filler) for step in range(steps))
    return folder


@pytest.mark.long
def test_a_run_of_100_000_steps_opens_in_three_seconds(tmp_path: Path) -> None:
    folder = write_long(tmp_path / "run", 100_000)
    dashboard(record(tmp_path / "warm", 2)).close()
    began = time.process_time()  # of this process: tests that run beside it do not count
    board = dashboard(job(folder, "finished"))
    seconds = time.process_time() - began
    began = time.process_time()
    for line in (folder / "metrics.jsonl").read_bytes().splitlines()[:10_000]:
        decode(line)
    tenth = time.process_time() - began  # 0.25 s where the page took 1.3 s; a slow machine has longer for both
    loss = board.figures["progress"].data[0]
    assert (loss.x[-1], loss.y[-1]) == (99_999, 1e-5)
    assert seconds < max(3, 12 * tenth), f"{seconds:.1f} s, and a tenth of the lines one by one {tenth:.1f} s"


# ------------------------------------------------------------------ a real job


@pytest.mark.long
def test_a_real_job_is_stopped_and_goes_on(tmp_path: Path) -> None:
    """Stop and Resume by the buttons: the resumed run takes the steps that are left, in the same folder."""
    import moekit
    from moekit.recipes.sft import train
    from moekit.recipes.small import small_start

    start = small_start(tmp_path / "start", steps=1, size=60, held_out=4)
    config = moekit.SFTConfig(
        model=start.model, data=start.chats, steps=60, batch_rows=2, microbatch_rows=2, save_every=2, export=False,
        rows=moekit.DataConfig(length=32), keep_checkpoints=1,
    )  # fmt: skip
    run = moekit.submit(train, config, nproc=2, name="run", runs=tmp_path, threads=1)
    board = dashboard(run, interval=0.1)
    try:
        until(lambda: any((run.folder / "checkpoints").glob("step_*")), 90)
        until(lambda: board.widgets["resume"].tooltip == "the job is running")
        assert not board.widgets["stop"].disabled and board.widgets["resume"].disabled
        board.widgets["stop"].click()
        until(lambda: run.state == "stopped", 60)
        until(lambda: not board.widgets["resume"].disabled)
        assert not any(rank["alive"] for rank in run.ranks)
        done = len(run.metrics())
        assert 0 < done < 60
        board.widgets["resume"].click()
        until(lambda: run.state == "running", 60)
        until(lambda: board.widgets["resume"].disabled and not board.widgets["stop"].disabled)
        assert run.wait(120) == "finished", run.logs()
        board.wait(30)
        loss = board.figures["progress"].data[0]
        assert list(loss.x) == list(range(60)) and "finished" in board.widgets["state"].value
        records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        assert list(loss.y) == [r["loss/sft"] for r in records]
        assert run.result()[0]["steps"] == 60
        with pytest.raises(JobError, match="cannot be resumed: it has finished"):
            board.resume()
    finally:
        run.stop()
        board.close()
