"""BC-120: functions typed in a notebook cell, in a real notebook with a real kernel."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

COUNTED = """
from pathlib import Path
counter = Path("counter.txt")
counter.write_text(str(int(counter.read_text()) + 1) if counter.exists() else "1")
FACTOR = 10
def f(rank):
    return helper(rank) * FACTOR
def helper(rank):
    return rank
def g():
    raise ValueError("typed in a cell")  # the line that the traceback shows
"""

SUBMITTED = """
import sys
import moekit
good = moekit.submit(lambda: f(moekit.here().rank), nproc=2, threads=1)
bad = moekit.submit(g, threads=1)
print(good.result(200), good.result(200) == [0, 10])
try:
    bad.result(200)
except moekit.errors.JobError as error:
    print(error)
print("torch here:", "torch" in sys.modules)
good
"""


def test_bc_120_functions_of_a_cell_travel_by_value_and_cells_are_not_run_again(tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell(source) for source in (COUNTED, SUBMITTED)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=280, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    printed = "".join(out["text"] for out in cells[1]["outputs"] if out["output_type"] == "stream")
    assert "[0, 10] True" in printed
    assert "rank 0: ValueError: typed in a cell" in printed
    assert "# the line that the traceback shows" in printed  # the cell's source reached the rank
    assert "torch here: False" in printed
    assert (tmp_path / "counter.txt").read_text() == "1"
    shown = cells[1]["outputs"][-1]["data"]
    assert "finished" in shown["text/plain"] and "finished" in shown["text/html"]
    assert len(list((tmp_path / "runs").iterdir())) == 2
