"""The lab as a reader meets it: JupyterLab in a browser, real kernels, real jobs.

Notebooks here are written by the tests, except for 00_quickstart, which runs as it stands with the sizes for tests.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

STEPS = 60  # of the quickstart's job: enough to be seen under way
UPDATES = ("comm_msg", "display_data", "update_display_data")  # messages that change what is drawn
ENDED = ("finished", "failed", "stopped")


def recorded(folder: Path, name: str) -> list[list[float]]:
    """[steps, values] of a metric, from the file itself."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [[r["step"] for r in lines if name in r], [r[name] for r in lines if name in r]]


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
    live = next(i for i, cell in enumerate(code) if "mk.live(" in cell.source)
    sheet.wait_cell(live)
    looks: list[tuple[int, float]] = []  # last step and loss in the page, while the job runs

    def moved() -> bool:
        sheet.look_at(live)
        lines = [line for plot in sheet.plots() for line in plot["lines"] if line["x"]]
        look = (lines[0]["x"][-1], lines[0]["y"][-1]) if lines else None
        if look and look not in looks and state(run) == "running":
            looks.append(look)
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
    show = 'job = mk.submit(flood, name="flood", overwrite=True)\nfigure = mk.live(job)\nfigure'
    sheet = opened(lab.write("flood.ipynb", FLOOD, "button", show, "figure.wait()\nround(job.result()[0], 1)"))
    folder = lab.root / "runs" / "flood"
    for number in range(3):
        sheet.run(number)
    button = sheet.panel.locator(".jupyter-button")
    sheet.until(lambda: sheet.plots() and state(folder) == "running", "the figure")
    sheet.listen()
    first, answers = len(sheet.frames), []
    began = time.monotonic()
    (lab.root / "go").touch()
    while state(folder) not in ENDED:
        clicked = time.monotonic()
        button.click()
        sheet.panel.locator(".jupyter-button", has_text=str(len(answers) + 1)).wait_for()
        answers.append(time.monotonic() - clicked)
        sheet.sleep(0.3)
    took = time.monotonic() - began
    sheet.shot("flooded")
    assert sheet.deaf() < 1 and max(answers) < 1 and len(answers) > 5, (sheet.deaf(), answers)
    figure = [f for f in sheet.frames[first:] if f.kind in UPDATES]
    assert len(figure) - 3 * len(answers) < 40 * took, f"{len(figure)} messages in {took:.1f} s"
    sheet.run(3)
    assert float(sheet.cell(3).locator(".jp-OutputArea-output").inner_text()) < 15  # it was a flood indeed
    sheet.look_at(2)
    sheet.cell(2).locator(".jp-OutputArea-output").hover()  # a figure that is over is drawn under the pointer
    lines = {line["name"]: line for line in sheet.until(sheet.plots, "the figure")[0]["lines"]}
    for name, line in lines.items():
        steps, values = recorded(folder, name)
        assert (line["x"][-1], line["y"][-1]) == (steps[-1], values[-1]) and steps[-1] == 9999
    assert len(lines) == 3


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
