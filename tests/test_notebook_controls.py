"""What a notebook shows is gone when its cause is switched off: each line of "What you should see" has a control.

A control sits in the metadata of its notebook (`moekit.controls`). It names what it `shows` (the bold words of one or
more lines), says in words what is `off`, and how: other values of parameters (`set`), or an `edit` of cells, old
text -> new text. The cells `again`, by their names, run once more with it, in a kernel that has run what they need
as nbmake does, and each assertion that `fails` quotes must now fail. Some lines need the sizes that a reader gets:
`held_by` names the test that has them, and a control of its own.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from symtable import symtable
from typing import Any

import nbformat
import pytest

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
PATHS = sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))
each = pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)


def bare(words: str) -> str:
    """An assertion, or a part of it, without the spaces."""
    return re.sub(r"\s+", "", words.replace('"', "'"))


def switched_off(control: dict[str, Any], cells: dict[str, tuple[str, str]], names: dict[str, Any]) -> list[str]:
    """Runs the cells (source, check) of a control with its changes; the assertions that failed. Names are as before."""
    kept, failed, unused = dict(names), [], set(control.get("edit", {}))
    names |= control.get("set", {})
    try:
        for cell in control["again"]:
            source, check = cells[cell]
            for old, new in control.get("edit", {}).items():
                unused -= {old} if old in source else set()
                source = source.replace(old, new)
            exec(compile(source, f"<{cell}>", "exec"), names)  # noqa: S102
            for node in ast.parse(check).body:
                try:
                    exec(compile(ast.Module([node], []), f"<check of {cell}>", "exec"), names)  # noqa: S102
                except AssertionError:
                    failed.append(ast.get_source_segment(check, node))
    finally:
        for name in set(names) - set(kept):
            del names[name]
        names.update(kept)
    assert not unused, f"edits of text that is not there: {unused}"
    for words in control["fails"]:
        holds = f"{control['off']}, but this still holds: {words}; what failed: {failed}"
        assert any(bare(words) in bare(one) for one in failed), holds
    return failed


def read(path: Path) -> tuple[Any, list[dict[str, Any]], dict[str, tuple[str, str]]]:
    """Notebook, its controls, and source and check of its code cells by name."""
    notebook = nbformat.read(path, as_version=4)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    names = [c.metadata.get("name", c.id) for c in code]
    checks = ["\n".join(c.metadata.get("nbmake", {}).get("post_cell_execute", [])) for c in code]
    cells = {name: (c.source, check) for name, c, check in zip(names, code, checks)}
    return notebook, notebook.metadata.get("moekit", {}).get("controls", []), cells


@each
def test_everything_shown_has_a_control(path: Path) -> None:
    notebook, controls, cells = read(path)
    prose = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    section = prose[prose.index("## What you should see") :].split("\n## ")[0]
    lines = [re.sub(r"\s+", " ", line) for line in section.split("\n- ")[1:]]
    shown = [f"**{words}" for control in controls for words in control["shows"]]
    assert lines and not [words for words in shown if not any(line.startswith(words) for line in lines)]
    assert not [line for line in lines if not any(line.startswith(words) for words in shown)], "without a control"
    for control in controls:
        assert control["off"]
        if "held_by" in control:
            assert f"def {control['held_by']}(" in (Path(__file__).parent / "test_notebooks.py").read_text()
            continue
        stated = [bare(cells[cell][1]) for cell in control["again"]]
        assert control["fails"]
        for words in control["fails"]:
            assert any(bare(words) in check for check in stated), f"no assertion says {words!r}"


def names_of(source: str, fixed: set[str]) -> tuple[set[str], set[str]]:
    """What a cell binds or changes in place (but for what is `fixed`, as modules are), and what it uses."""
    cell = symtable(source, "cell", "exec")
    binds = {s.get_name() for s in cell.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    uses = {s.get_name() for s in cell.get_symbols() if s.is_referenced()}
    tables = cell.get_children()
    while tables:
        table = tables.pop()
        uses |= {s.get_name() for s in table.get_symbols() if s.is_global()}
        tables += table.get_children()
    for node in ast.walk(ast.parse(source)):  # x[i] = ..., x.name = ..., x.method()
        inner = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else node
        if inner is node and not isinstance(getattr(node, "ctx", None), ast.Store):
            continue
        if isinstance(inner, ast.Attribute | ast.Subscript):
            while isinstance(inner, ast.Attribute | ast.Subscript):
                inner = inner.value
            binds |= {inner.id} - fixed if isinstance(inner, ast.Name) else set()
    loops = [node.target for node in ast.walk(ast.parse(source)) if isinstance(node, ast.For)]
    return binds, uses - {name.id for loop in loops for name in ast.walk(loop) if isinstance(name, ast.Name)}


def needed(control: dict[str, Any], cells: dict[str, tuple[str, str]]) -> set[str]:
    """The cells that must have run before those of a control."""
    code = "\n".join(source for source, _ in cells.values())
    fixed = {s.get_name() for s in symtable(code, "all", "exec").get_symbols() if s.is_imported()}
    found = {name: names_of(f"{source}\n{check}", fixed) for name, (source, check) in cells.items()}
    wanted, there = set[str](), set[str]()
    for name in control["again"]:
        binds, uses = found[name]
        wanted |= uses - there
        there |= binds
    order, keep, before = list(cells), set[str](), set[str]()
    for name in reversed(order[: max(map(order.index, control["again"]))]):
        binds, uses = found[name]
        if binds & before or (binds & wanted and name not in control["again"]):
            keep.add(name)
            before |= uses
    return keep


def run(path: Path, folder: Path) -> list[str]:
    """Runs what a notebook's controls need of it, then the controls, in one kernel; the assertions that failed."""
    from nbclient import NotebookClient

    notebook, controls, cells = read(path)
    controls = [control for control in controls if "again" in control]
    folder.mkdir()
    keep, base = set().union(*(needed(control, cells) for control in controls)), []
    for c, (name, (source, check)) in zip((c for c in notebook.cells if c.cell_type == "code"), cells.items()):
        mock = [f"{name} = {value!r}" for name, value in c.metadata.get("nbmake", {}).get("mock", {}).items()]
        base += ["\n".join([source, *mock, check])] if name in keep else []
    tools = "\n\n".join(["import ast, json, re\nfrom typing import Any", *map(inspect.getsource, (bare, switched_off))])
    base += [f"{tools}\n_cells, _failed = {cells!r}, []"]
    base += [f"_failed += switched_off({control!r}, _cells, globals())" for control in controls]
    base += ["open('failed.json', 'w').write(json.dumps(_failed))"]
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in base]
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return json.loads((folder / "failed.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Path, Future[list[str]]]]:
    """All notebooks, two at a time."""
    home = tmp_path_factory.mktemp("controls")
    with ThreadPoolExecutor(2) as pool:
        yield {path: pool.submit(run, path, home / path.stem) for path in PATHS}


@pytest.mark.long
@pytest.mark.timeout(600)
@each
def test_assertions_fail_when_their_cause_is_off(path: Path, runs: dict[Path, Future[list[str]]]) -> None:
    assert runs[path].result()
