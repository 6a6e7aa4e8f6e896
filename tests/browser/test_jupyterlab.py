"""The lab as a reader meets it: JupyterLab in a browser, real kernels, real jobs.

Notebooks here are written by the tests, except for 00_quickstart, which runs as it stands with the sizes for tests.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

STEPS = 200  # of the quickstart's job: enough to be seen under way
UPDATES = ("comm_msg", "display_data", "update_display_data")  # messages that change what is drawn
ENDED = ("finished", "failed", "stopped")


def recorded(folder: Path, name: str) -> tuple[list[float], list[float]]:
    """Steps and values of a metric, from the file itself."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if name in line], [line[name] for line in lines if name in line]


def state(folder: Path) -> str:
    path = folder / "state.json"
    return json.loads(path.read_text())["state"] if path.exists() else ""


def test_quickstart(lab: Any, opened: Callable[[str], Any]) -> None:
    """Runs to its end without an error, and its live figure moves while the job runs."""
    path = lab.root / "00_quickstart.ipynb"
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    sizes = code[0].metadata.nbmake.mock | {"STEPS": STEPS}
    code[0].source += "".join(f"\n{name} = {value!r}" for name, value in sizes.items())
    nbformat.write(notebook, path)
    run = lab.root / "runs" / "quickstart"
    sheet = opened(path.name)
    sheet.shot("opened")
    sheet.run_all()
    live = next(i for i, cell in enumerate(code) if "mk.dashboard(" in cell.source)
    sheet.wait_cell(live)
    looks: list[tuple[int, float]] = []  # last step and loss in the page, while the job runs

    def moved() -> bool:
        sheet.look_at(live)
        x, y = sheet.lines(live).get("loss/sft", ([], []))
        if x and (x[-1], y[-1]) not in looks and state(run) == "running":
            looks.append((x[-1], y[-1]))
            sheet.shot(f"live-{len(looks)}")
        return len(looks) >= 3 or state(run) in ENDED

    sheet.until(moved, "the live figure to move", 120)
    assert len(looks) >= 3 and looks[0][0] < looks[1][0] < looks[2][0] < STEPS, looks
    sheet.until(lambda: sheet.has_run(len(code) - 1) or sheet.error(), "the last cell", 120)
    assert not sheet.error()
    assert all(sheet.has_run(i) for i in range(len(code))) and state(run) == "finished"
    assert state(lab.root / "runs" / "patient") == "stopped"


FLOOD = """
import ipywidgets
import moekit as mk

def flood(count=10_000, seconds=10):
    import math, time
    from pathlib import Path
    from moekit.measure.record import RunWriter

    while not Path("go").exists():
        time.sleep(0.05)
    with RunWriter(mk.here().folder) as writer:
        began = time.monotonic()
        for i in range(count):
            loss = 5 * math.exp(-i / count) + math.sin(i) / 7
            writer.write(i, {"loss/sft": loss, "rate/supervised_tokens_s": 1000 + i, "load/max_over_mean": 2})
            time.sleep(max(0.0, began + (i + 1) * seconds / count - time.monotonic()))
    return time.monotonic() - began

def count(button):
    button.description = str(int(button.description) + 1)

button = ipywidgets.Button(description="0")
button.on_click(count)
"""


def test_ten_thousand_lines_in_ten_seconds(lab: Any, opened: Callable[[str], Any]) -> None:
    """The page answers all the while, gets a bounded number of messages, and ends with exactly the last value."""
    show = 'job = mk.submit(flood, name="flood", overwrite=True)\npage = mk.dashboard(job)\npage'
    sheet = opened(lab.write("flood.ipynb", FLOOD, "button", show, "page.wait()\nround(job.result()[0], 1)"))
    folder = lab.root / "runs" / "flood"
    for number in range(3):
        sheet.run(number)
    button = sheet.cell(1).locator(".jupyter-button")
    sheet.until(lambda: sheet.lines(2) and state(folder) == "running", "the figure")
    sheet.listen()
    first, answers = len(sheet.frames), []
    began = time.monotonic()
    (lab.root / "go").touch()
    while state(folder) not in ENDED:
        clicked = time.monotonic()
        button.click()
        sheet.cell(1).locator(".jupyter-button", has_text=str(len(answers) + 1)).wait_for()
        answers.append(time.monotonic() - clicked)
        sheet.sleep(0.3)
    took = time.monotonic() - began
    sheet.shot("flooded")
    assert sheet.deaf() < 1 and max(answers) < 1 and len(answers) > 5, (sheet.deaf(), answers)
    figure = [f for f in sheet.frames[first:] if f.kind in UPDATES]
    assert len(figure) - 3 * len(answers) < 40 * took, f"{len(figure)} messages in {took:.1f} s"
    sheet.run(3)
    assert float(sheet.output(3)) < 15  # it was a flood indeed
    for name in ("loss/sft", "rate/supervised_tokens_s"):
        want = tuple(values[-1] for values in recorded(folder, name))
        assert want[0] == 9999
        sheet.until(lambda name=name, want=want: tuple(v[-1] for v in sheet.lines(2)[name]) == want, f"the last {name}")


FAILING = """
import time
from pathlib import Path
import moekit as mk

def inner(value):
    return 1 / value

def fails():
    if mk.here().rank == 1:
        Path("raised").write_text(str(time.time()))
        return inner(0)
    time.sleep(60)

job = mk.submit(fails, nproc=2, name="fails", overwrite=True)
job.result()
"""


def test_an_error_in_rank_1_of_a_job_shows_in_its_cell(lab: Any, opened: Callable[[str], Any]) -> None:
    """As that rank's traceback, with the lines that were typed, within 10 s; no other rank is waited for."""
    sheet = opened(lab.write("fails.ipynb", FAILING))
    sheet.run(0, wait=False)
    shown = sheet.until(sheet.error, "a traceback")
    assert time.time() - float((lab.root / "raised").read_text()) < 10
    for words in ("rank 1", "ZeroDivisionError: division by zero", "return inner(0)", "return 1 / value"):
        assert words in shown, shown
    assert state(lab.root / "runs" / "fails") == "failed"


POOL = """
import torch
import torch.distributed as dist
import moekit as mk

pool = mk.workers(2, device="cpu")

def inner(value):
    if mk.here().rank == 1:
        return 1 / (value - 2)  # the line that rank 1 fails on
    return value

def step(value):
    total = torch.tensor([value + mk.here().rank])
    dist.all_reduce(total)
    return inner(int(total))

pool(step, 3)
"""
CELL = """%%px
import moekit as mk
if mk.here().rank == 1:
    raise KeyError("no such expert")
"""


def test_an_error_in_rank_1_of_a_pool_shows_in_its_cell(lab: Any, opened: Callable[[str], Any]) -> None:
    """Of a call and of a %%px cell, within 10 s; the pool goes on, with a function that was edited."""
    edited = "def inner(value):\n    return 10 * value\n\npool(step, 0.5)"
    sheet = opened(lab.write("pool.ipynb", POOL, "pool(step, 0.5)", CELL, edited, "pool.close()"))
    sheet.run(0)
    assert sheet.output(0).strip() == "[7, 0.2]"
    wrong = {
        1: ("rank 1: ZeroDivisionError", "# the line that rank 1 fails on"),
        2: ("rank 1: KeyError", "no such expert"),
    }
    for number, words in wrong.items():
        sheet.run(number, wait=False)
        shown = sheet.until(lambda number=number: sheet.error(number), "a traceback", 10)
        assert all(word in shown for word in words), shown
    sheet.shot("errors")
    sheet.run(3)
    assert sheet.output(3).strip() == "[20, 20]"
    sheet.run(4)


@pytest.fixture(scope="module")
def small(lab: Any) -> str:
    """The lines of a cell that make `config`: supervised fine-tuning that goes on for longer than a test."""
    from moekit.data.tasks import make_task
    from moekit.data.tokenizer import train_tokenizer
    from moekit.learner.weights import export
    from moekit.model.presets import preset
    from moekit.model.transformer import Transformer

    home = lab.root / "small"
    home.mkdir()
    chats = make_task("spell_backward", "train", 200, min_word_len=3, max_word_len=4)
    lines = [json.dumps({"messages": chat["messages"]}) for chat in chats]
    (home / "train.jsonl").write_text("\n".join(lines))
    tokenizer = train_tokenizer(lines, 400, home / "tokenizer")
    ids = {"eos_id": tokenizer.eos_token_id, "pad_id": tokenizer.pad_token_id}
    export(Transformer(replace(preset("demo"), vocab=len(tokenizer), **ids), seed=0), home / "start", tokenizer)
    return """
import moekit as mk
from moekit.recipes.sft import train

config = mk.SFTConfig(model="small/start", data="small/train.jsonl", steps=5000, batch_rows=8, microbatch_rows=4,
                      rows=mk.DataConfig(length=256), save_every=10)
"""


def gone(folder: Path) -> bool:
    """Whether no process of a job is left; one that has ended and that nobody has asked about is none."""
    pids = json.loads((folder / "state.json").read_text())["pids"]
    every = [pid for value in pids.values() for pid in (value if isinstance(value, list) else [value]) if pid]
    return not any(p.status() != psutil.STATUS_ZOMBIE for p in psutil.process_iter() if p.pid in every)


def watch(sheet: Any, number: int, folder: Path, more: int = 3) -> list[float]:
    """Sees the loss in cell `number` get longer, `more` times, while the job runs; returns the steps."""
    sheet.look_at(number)
    seen: list[float] = []

    def grew() -> bool:
        x, _ = sheet.lines(number).get("loss/sft", ([], []))
        if x and state(folder) == "running" and x[-1] not in seen:
            seen.append(x[-1])
        return len(seen) > more

    sheet.until(grew, "the loss to get longer")
    assert seen == sorted(seen)
    return seen


def press(sheet: Any, number: int, button: str) -> None:
    """Presses a button of the dashboard in a cell, once it can be pressed."""
    sheet.cell(number).get_by_role("button", name=button, exact=True).click()


def says(sheet: Any, number: int, word: str) -> None:
    """Waits until the dashboard in a cell names a state."""
    sheet.cell(number).locator(".moekit-state", has_text=word).wait_for()


def whole(sheet: Any, number: int, folder: Path) -> None:
    """Every recorded point of the loss is in the page, exactly, and the load of the experts is drawn."""
    want = recorded(folder, "loss/sft")
    assert 3 <= len(want[0]) <= 1000 and want[0] == list(range(len(want[0])))
    sheet.until(lambda: sheet.lines(number).get("loss/sft") == want, "the whole history")
    sheet.until(lambda: sheet.cell(number).locator(".heatmaplayer image").count() >= 2, "the load of the experts")


def test_stop_restart_and_attach_to_the_stopped_job(lab: Any, small: str, opened: Callable[[str], Any]) -> None:
    """Stop leaves no process; after a restart of the kernel the job's whole history is in the page."""
    submit = 'job = mk.submit(train, config, nproc=2, name="first", overwrite=True)\nmk.dashboard(job)'
    attach = 'import moekit as mk\n\nmk.dashboard(mk.attach("runs/first"))'
    sheet, folder = opened(lab.write("stop.ipynb", small, submit, attach)), lab.root / "runs" / "first"
    sheet.run(0)
    sheet.run(1)
    watch(sheet, 1, folder)
    sheet.shot("running")
    press(sheet, 1, "Stop")
    says(sheet, 1, "stopped")
    assert state(folder) == "stopped"
    sheet.until(lambda: gone(folder), "the end of its processes", 5)
    whole(sheet, 1, folder)
    sheet.shot("stopped")
    sheet.restart()
    sheet.run(2)
    says(sheet, 2, "stopped")
    sheet.look_at(2)
    whole(sheet, 2, folder)
    assert sheet.cell(2).locator(".moekit-log").inner_text().strip()
    sheet.shot("attached")


def test_restart_and_attach_to_the_running_job(lab: Any, small: str, opened: Callable[[str], Any]) -> None:
    """A detached job outlives its kernel and is found again running; an attached one ends with its kernel."""
    submit = """
job = mk.submit(train, config, nproc=2, name="second", detach=True, overwrite=True)

def waits():
    import time
    time.sleep(600)

attached = mk.submit(waits, name="attached", overwrite=True)
mk.dashboard(job)
"""
    attach = 'import moekit as mk\n\nmk.dashboard(mk.attach("runs/second"))'
    sheet, runs = opened(lab.write("attach.ipynb", small, submit, attach)), lab.root / "runs"
    sheet.run(0)
    sheet.run(1)
    before = watch(sheet, 1, runs / "second", more=1)
    sheet.until(lambda: state(runs / "attached") == "running", "the attached job")
    sheet.restart()
    sheet.until(lambda: gone(runs / "attached"), "the attached job to end", 10)
    sheet.run(2)
    says(sheet, 2, "running")
    after = watch(sheet, 2, runs / "second")
    assert after[0] > before[-1]
    sheet.shot("attached-running")
    press(sheet, 2, "Stop")
    says(sheet, 2, "stopped")
    whole(sheet, 2, runs / "second")
    sheet.until(lambda: gone(runs / "second"), "the end of its processes", 5)
    steps = len(recorded(runs / "second", "loss/sft")[0])
    press(sheet, 2, "Resume")
    says(sheet, 2, "running")
    sheet.until(lambda: len(recorded(runs / "second", "loss/sft")[0]) > steps, "the resumed job to go on")
    sheet.shot("resumed")
    press(sheet, 2, "Stop")
    says(sheet, 2, "stopped")
    whole(sheet, 2, runs / "second")
