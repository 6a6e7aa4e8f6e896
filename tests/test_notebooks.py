"""The notebooks keep their form, and the quickstart teaches its model what its text says.

That they run, and that the numbers they state are true, is tested by their own assertions under `pytest --nbmake`;
these sit in the metadata of their cells, with smaller sizes for the parameters.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
PATHS = sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))
INDEX = NOTEBOOKS / "index.ipynb"
each = pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)


def read(path: Path) -> tuple[Any, list[Any], str]:
    """Notebook, its code cells, and all of its prose."""
    notebook = nbformat.read(path, as_version=4)
    prose = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    return notebook, [c for c in notebook.cells if c.cell_type == "code"], prose


def test_they_are_numbered_without_gaps() -> None:
    assert [p.name[:3] for p in PATHS] == [f"{i:02d}_" for i in range(len(PATHS))] and len(PATHS) >= 3


def test_the_index_has_every_notebook_with_its_picture_and_a_number_that_it_asserts() -> None:
    notebook, code, prose = read(INDEX)
    assert not code and {*NOTEBOOKS.glob("*.ipynb")} == {*PATHS, INDEX}
    numbers = notebook.metadata.moekit.numbers
    assert sorted(numbers) == [path.stem for path in PATHS]
    for path in PATHS:
        (row,) = re.findall(rf"^\| \[{path.stem[:2]}\]\({path.name}\) .*", prose, re.MULTILINE)
        assert f"](pictures/{path.stem}.svg)]({path.name})" in prose
        words, assertion = numbers[path.stem]
        assert f"**{words}**" in row and re.search(r"\| \d+ s \|$", row), row
        checks = ["\n".join(c.metadata.get("nbmake", {}).get("post_cell_execute", [])) for c in read(path)[1]]
        assert sum(assertion in check for check in checks) == 1, f"{path.stem} does not assert {assertion}"


def test_one_leads_to_the_next_and_all_to_the_index() -> None:
    for path, following in zip(PATHS, [*PATHS[1:], None]):
        last = read(path)[0].cells[-1].source.split("\n")[-1]
        assert last.startswith("**Next:** ") and last.endswith(" All notebooks: [index](index.ipynb).")
        assert following is None or f"[{following.stem}]({following.name})" in last


@each
def test_short_cells_in_the_agreed_order(path: Path) -> None:
    notebook, code, prose = read(path)
    assert len(code) <= 25 and max(len(c.source.split("\n")) for c in code) <= 15
    first = notebook.cells[0].source
    assert first.startswith("# ") and first.count("**Question.**") == 1
    at = [prose.index(mark) for mark in ("**Question.**", "](pictures/", "## What you should see", "## Exercises")]
    assert at == sorted(at) and "cost" in prose and "Section 22" in prose
    assert 0 < notebook.metadata.execution.timeout <= 60


@each
def test_pictures_are_there_and_say_what_they_show(path: Path) -> None:
    for words, picture in re.findall(r"!\[(.*?)\]\((.*?)\)", read(path)[2], re.DOTALL):
        assert len(words) > 20 and (NOTEBOOKS / picture).is_file(), picture


@each
def test_parameters_come_first_and_the_sizes_for_tests_are_among_them(path: Path) -> None:
    code = read(path)[1]
    assert code[0].metadata.get("tags") == ["parameters"]
    assert not [c for c in code[1:] if "parameters" in c.metadata.get("tags", [])]
    body = ast.parse(code[0].source).body
    assert all(isinstance(node, ast.Assign) for node in body), "parameters are plain assignments"
    names = {n.id for node in body for n in ast.walk(node) if isinstance(n, ast.Name)}
    assert all(name.isupper() for name in names)
    assert all("  # " in line for line in code[0].source.split("\n")), "each parameter says what it is"
    assert set(code[0].metadata.nbmake.mock) <= names


@each
def test_every_notebook_asserts_its_effect(path: Path) -> None:
    checks = ["\n".join(c.metadata.get("nbmake", {}).get("post_cell_execute", [])) for c in read(path)[1]]
    stated = [node for check in checks for node in ast.walk(ast.parse(check)) if isinstance(node, ast.Assert)]
    assert len(stated) >= 10


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_quickstart_learns_its_task(tmp_path: Path) -> None:
    """With the sizes that a reader gets: no held-out question is answered before, nine in ten after."""
    from nbclient import NotebookClient

    notebook, *_ = read(NOTEBOOKS / "00_quickstart.ipynb")
    check = "assert before['exact'] == 0 and after['exact'] > 0.9, (before['exact'], after['exact'])"
    load = "assert run.metrics['load/max_over_mean'].iloc[-1] < 1.5, run.metrics['load/max_over_mean']"
    notebook.cells.append(nbformat.v4.new_code_cell(f"{check}\n{load}"))
    NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()
