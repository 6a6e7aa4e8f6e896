"""The shape of the tree: which part may import which, how long files are, what may not be committed."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import tokenize
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What each part of the library may import from moekit besides itself. "data.batch" allows that module only.
ARROWS = {
    "errors": "",
    "kernels": "",
    "config": "errors",
    "workloads": "config errors",
    "launch": "errors",
    "ops": "kernels config errors",
    "data": "config errors",
    "model": "ops data.batch objectives.logprobs config errors",
    "objectives": "ops data.batch config errors",
    "checkpoint": "config errors",
    "measure": "data.batch config errors",
    "learner": "model objectives.base objectives.denominator objectives.balance objectives.logprobs checkpoint measure"
    " data.batch ops config errors",
    "rollout": "model objectives.logprobs checkpoint measure data.batch ops config errors",
    "viz": "measure data.batch launch.job config errors",
}
EVERYTHING = {"recipes", "cli", "doctor"}  # these may import all of moekit
LIBRARY = ("moekit", "kernels", "launch")
LINE_LIMIT, LONG_FILES, LIBRARY_LIMIT = 400, 3, 21_700


def tracked(*under: str) -> list[str]:
    """Paths that git tracks or would take (new files that nobody ignores), links left out, relative to the root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *under],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\n")  # fmt: skip
    return sorted({p for p in listed if p and (ROOT / p).is_file() and not (ROOT / p).is_symlink()})


def library() -> list[str]:
    """Every Python file of the library."""
    return [p for p in tracked(*LIBRARY) if p.endswith(".py")]


def module_name(path: str) -> str:
    """`kernels/permute.py` -> `moekit.kernels.permute`; `moekit/data/__init__.py` -> `moekit.data`."""
    dotted = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return dotted if dotted.split(".")[0] == "moekit" else f"moekit.{dotted}"


@dataclass(frozen=True)
class Import:
    """One imported module, and where."""

    target: str  # absolute, as far as it names a module of ours
    line: int
    level: int  # dots of a relative import
    typing_only: bool
    inside_function: bool


def imports(source: str, path: str, modules: set[str]) -> list[Import]:
    """All imports of a file, inside functions and under TYPE_CHECKING too, and importlib.import_module("...")."""
    package = module_name(path).split(".")
    if not path.endswith("__init__.py"):
        package = package[:-1]
    found: list[Import] = []

    def add(target: str, node: ast.stmt | ast.expr, level: int, typing_only: bool, inside: bool) -> None:
        found.append(Import(target, node.lineno, level, typing_only, inside))

    def visit(node: ast.AST, typing_only: bool, inside: bool) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                add(alias.name, node, 0, typing_only, inside)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:  # `from . import ops` names a module, `from .ops import sort_rows` does not
                whole = f"{base}.{alias.name}"
                add(whole if whole in modules else base, node, node.level, typing_only, inside)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            name = node.args[0].value
            if called in ("import_module", "__import__") and isinstance(name, str) and not name.startswith("."):
                add(name, node, 0, typing_only, inside)
        under_typing = isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        in_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, typing_only or under_typing, inside or in_function)

    visit(ast.parse(source, path), False, False)
    return found


def ours(target: str) -> bool:
    return target.split(".")[0] == "moekit"


def refused(path: str, source: str, modules: set[str]) -> list[str]:
    """Imports of a library file that the table of arrows does not allow."""
    part = (module_name(path).split(".") + [""])[1]
    if part in EVERYTHING:
        return []
    found = [i for i in imports(source, path, modules) if ours(i.target)]
    if part == "":  # moekit/__init__.py names anything, and loads nothing
        return [f"{path}:{i.line} loads {i.target} when moekit is imported" for i in found if not i.typing_only
                and not i.inside_function]  # fmt: skip
    if part not in ARROWS:
        return [f"{path}: part {part!r} is not in the table of arrows"]
    allowed = [f"moekit.{a}" for a in [part, *ARROWS[part].split()]]
    return [
        f"{path}:{i.line} imports {i.target}; {part} may import {', '.join(allowed[1:]) or 'nothing of moekit'}"
        for i in found
        if not any(i.target == a or i.target.startswith(a + ".") for a in allowed)
    ]


def test_arrows_point_down() -> None:
    modules = {module_name(p) for p in library()}
    wrong = [w for p in library() for w in refused(p, (ROOT / p).read_text(), modules)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("path", "source", "fine"),
    [
        ("kernels/permute.py", "from ..config import ModelConfig", False),
        ("kernels/permute.py", "from .reference import swiglu", True),
        ("launch/job.py", "from ..errors import JobError", True),
        ("moekit/viz/live.py", "def f():\n    from ..learner import learner", False),
        ("moekit/viz/live.py", "from ..launch.job import Job", True),
        ("moekit/viz/live.py", "from ..launch import submit", False),
        ("moekit/model/moe.py", "from ..objectives import sft", False),
        ("moekit/model/moe.py", "from ..objectives.logprobs import token_logprobs", True),
        ("moekit/model/moe.py", "import moekit.learner.learner", False),
        ("moekit/data/pack.py", "import importlib\nimportlib.import_module('moekit.model')", False),
        ("moekit/measure/cost.py", "from moekit import Learner", False),
        ("moekit/__init__.py", "from .config import ModelConfig", False),
        ("moekit/recipes/sft.py", "from ..learner.learner import Learner", True),
        ("moekit/other.py", "import os", False),
    ],
)
def test_the_arrow_rule_itself(path: str, source: str, fine: bool) -> None:
    modules = {"moekit.objectives.sft", "moekit.launch.submit", "moekit.learner.learner"}
    assert (refused(path, source, modules) == []) is fine


def code_lines(source: str) -> int:
    """Lines that hold code: not blank, not only a comment, not of a docstring."""
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in layout:
            held |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and ast.get_docstring(node):
                held -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(held)


def test_code_lines_are_what_they_say() -> None:
    lines = [
        '"""Doc',
        'of two."""',
        "",
        "x = 1  # why",
        "# only this",
        'y = """a',
        'b"""',
        "def f():",
        '    """One."""',
    ]
    assert code_lines("\n".join([*lines, "    return (", "        x", "    )", ""])) == 7


def test_files_stay_short() -> None:
    """Near 300 lines: at most three files of the library over 400, and the whole under `LIBRARY_LIMIT` lines of code.

    Docstrings, comments and blank lines count in a file and not in the whole: they are what makes it readable, and a
    limit on them would be one on explaining.
    """
    sources = {p: (ROOT / p).read_text() for p in library()}
    long = sorted(f"{p}: {n}" for p, s in sources.items() if (n := s.count("\n")) > LINE_LIMIT)
    assert len(long) <= LONG_FILES, f"at most {LONG_FILES} files over {LINE_LIMIT} lines, got {long}"
    total = sum(map(code_lines, sources.values()))
    assert total < LIBRARY_LIMIT, total


def test_kernels_and_launch_are_linked_flat_folders() -> None:
    for name in ("kernels", "launch"):
        mode, _, _, path = subprocess.run(
            ["git", "ls-files", "--stage", "--", f"moekit/{name}"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
        assert (mode, path) == ("120000", f"moekit/{name}"), f"moekit/{name} must be committed as a link"
        assert (ROOT / "moekit" / name).readlink() == Path("..") / name
        # without __init__.py a regular package of that name always wins over our folder, even from the root
        assert not (ROOT / name / "__init__.py").exists(), f"{name}/__init__.py would shadow another project's {name}"
        deeper = [p for p in tracked(name) if p.count("/") > 1]
        assert not deeper, f"{name}/ stays flat (its package list is explicit): {deeper}"


def code_of(path: str) -> str:
    """Python source of a file; of a notebook, its code cells without magics."""
    text = (ROOT / path).read_text()
    if not path.endswith(".ipynb"):
        return text
    cells = ["".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
    return "\n".join(line for cell in cells for line in cell.split("\n") if not line.lstrip().startswith(("%", "!")))


def test_top_level_folders_are_never_imported_by_name() -> None:
    """`kernels` belongs to another project that Transformers looks for; ours is `moekit.kernels`."""
    wrong = []
    for path in [p for p in tracked() if p.endswith((".py", ".ipynb"))]:
        for i in imports(code_of(path), path, set()):
            if i.level == 0 and i.target.split(".")[0] in ("kernels", "launch"):
                wrong.append(f"{path}:{i.line} imports {i.target}")
    assert not wrong, "\n".join(wrong)


def test_linked_folders_use_relative_imports_only() -> None:
    wrong = [
        f"{p}:{i.line} imports {i.target}"
        for p in library()
        if not p.startswith("moekit/")
        for i in imports((ROOT / p).read_text(), p, set())
        if ours(i.target) and i.level == 0
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_is_hidden_by_a_name_of_its_package() -> None:
    """A package that re-exports `show` from its module `show` makes `import package.show` return the function."""
    wrong = []
    for path in [p for p in library() if p.endswith("__init__.py")]:
        siblings = {Path(p).stem for p in library() if Path(p).parent == Path(path).parent}
        for node in ast.parse((ROOT / path).read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                wrong += [f"{path} hides its module {a.name}" for a in node.names if (a.asname or a.name) in siblings]
    assert not wrong, "\n".join(wrong)


def test_tests_are_no_package_and_the_root_holds_no_notebook() -> None:
    assert not [p for p in tracked("tests") if p.endswith("__init__.py")], "it would put the root on sys.path"
    assert not list(ROOT.glob("*.ipynb")), "a notebook in the root has kernels/ and launch/ on its path"


def test_every_package_is_listed() -> None:
    """A sub-package that pyproject.toml does not list is missing from the wheel."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {module_name(str(Path(p).parent / "__init__.py")) for p in library()}
    assert set(setuptools["packages"]) == folders
    assert {n: setuptools["package-dir"].get(n) for n in ("moekit.kernels", "moekit.launch")} == {
        "moekit.kernels": "kernels",
        "moekit.launch": "launch",
    }
    for folder in {Path(p).parent for p in library() if p.startswith("moekit/")}:
        assert (ROOT / folder / "__init__.py").is_file(), f"{folder} needs an __init__.py of one docstring line"


@pytest.mark.parametrize("path", [p for p in tracked() if p.endswith(".ipynb")] or [None])
def test_notebooks_are_stripped_and_open(path: str | None) -> None:
    if path is None:
        pytest.skip("no notebook yet")
    import nbformat
    from nbstripout import strip_output

    text = (ROOT / path).read_text()
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None, "run nbstripout on it"
    assert notebook.metadata.get("kernelspec", {}).get("name") == "python3", "JupyterLab would ask for a kernel"
    stripped = strip_output(nbformat.reads(text, as_version=4), keep_output=False, keep_count=False, keep_id=True)
    assert stripped == notebook, "run nbstripout on it"


MACHINE = re.compile(
    r"(?<![\w.$}])/(work|tmp/venvs|opt|root|home/[a-z]+|etc/xdg|mnt|Users/[a-z]+)(/|\b(?=['\"`\s]))"
    r"|\b(pypi|pythonhosted|npmjs)\.(org|com)\b"
)


def test_nothing_names_a_machine() -> None:
    """No path of one machine and no package registry in any file: the tree works wherever it is cloned."""
    for named in ("see /{}/main", "'/{}'", "--find-links=/{}/wheels"):
        assert MACHINE.search(named.format("work")), named
    assert not MACHINE.search("examples/work/, a/root/b and $HOME/opt/x")
    wrong = []
    for path in tracked():
        try:
            text = (ROOT / path).read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.split("\n"), 1):
            if match := MACHINE.search(line):
                wrong.append(f"{path}:{number} names {match.group().strip()}")
    assert not wrong, "\n".join(wrong)


def public_without_docstring(path: str, source: str) -> list[str]:
    """Public functions, classes and methods (what torch prescribes excepted) that say nothing about themselves."""
    given = {"forward", "backward", "setup_context", "extra_repr"}  # names and meaning are torch's
    tree = ast.parse(source)
    wrong = [] if ast.get_docstring(tree) else [f"{path}: the module has no docstring"]

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            if node.name.startswith("_") or (prefix and node.name in given):
                continue
            if any(ast.unparse(d).endswith(".setter") for d in node.decorator_list):  # its getter explains it
                continue
            if ast.get_docstring(node) is None:
                wrong.append(f"{path}:{node.lineno} {prefix}{node.name} has no docstring")
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    visit(tree.body, "")
    return wrong


def test_public_names_have_docstrings() -> None:
    wrong = [w for p in library() for w in public_without_docstring(p, (ROOT / p).read_text())]
    assert not wrong, "\n".join(wrong)
    example = '"""m"""\nclass A:\n    """a"""\n    def f(self): ...\n    def forward(self): ...\ndef _g(): ...\n'
    assert public_without_docstring("a.py", example) == ["a.py:4 A.f has no docstring"]
