"""What README and guides say exists does: their cells run, commands and options are known, links lead somewhere."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text()
RUN = {  # pages whose Python blocks run, one after the other as cells of one notebook, and what must hold then
    "README.md": "assert len(losses) == 20 and losses[-1] < losses[0], losses",
    "first-experiment.md": "",
    "add-an-objective-or-kernel.md": "",
}
WRITTEN = {"cluster.md"}  # pages whose blocks need what no test machine has: they are read only
ELSEWHERE = {"vllm.md"}  # and one whose blocks tests/vllm/test_guide.py runs


def blocks(page: Path, kind: str) -> list[str]:
    return [text for k, text in re.findall(r"```(\w+)\n(.*?)```", page.read_text(), re.DOTALL) if k == kind]


# every `moekit sub --option ...` of the shell blocks
COMMANDS = sorted({
    line.split("#")[0].strip()
    for page in PAGES
    for text in blocks(page, "bash")
    for line in text.replace("\\\n", " ").splitlines()
    if line.startswith("moekit ")
})  # fmt: skip


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen]]:
    """A process for each page, side by side."""
    started = {}
    for page in PAGES:
        if page.name in RUN:
            code = "\n".join([*blocks(page, "python"), RUN[page.name]])
            how: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            how["cwd"] = tmp_path_factory.mktemp("cells")
            started[page.name] = subprocess.Popen([sys.executable, "-c", code], **how)
    yield started
    for process in started.values():
        process.kill()


@pytest.mark.parametrize("name", RUN)
def test_the_cells_run(name: str, cells: dict[str, subprocess.Popen]) -> None:
    said, _ = cells[name].communicate(timeout=240)
    assert cells[name].returncode == 0, said


def test_every_page_with_cells_is_run_or_read() -> None:
    with_cells = {page.name: blocks(page, "python") for page in PAGES if blocks(page, "python")}
    assert with_cells.keys() == RUN.keys() | WRITTEN | ELSEWHERE
    for name in WRITTEN | ELSEWHERE:
        assert all(ast.parse(text) for text in with_cells[name])


@cache
def options_of(command: str) -> str:
    script = "import sys; from moekit.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", script, command, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_and_options_exist(line: str) -> None:
    _, command, *words = line.split()
    unknown = [
        w for w in words if w.startswith("--") and not re.search(rf"(?<![\w-]){w}(?![\w-])", options_of(command))
    ]
    assert not unknown, f"moekit {command} has no {unknown}"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = {
        target for page in PAGES for target in re.findall(r"`?\bmake ([a-z-]+)\b", "\n".join(blocks(page, "bash")))
    }
    assert named > {"demo", "test"}
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith(("http://", "https://", "#")):
            assert (page.parent / target.split("#")[0]).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:moekit|kernels|launch|tests|benchmarks|notebooks|docs)/[\w/.*-]+)`", page.read_text())
    for path in named:
        assert list(ROOT.glob(path.rstrip("/"))), path


def test_public_names_that_are_named_exist() -> None:
    import moekit

    for page in PAGES:
        for name in re.findall(r"moekit\.(\w+)", page.read_text()):
            assert hasattr(moekit, name) or (ROOT / "moekit" / name).exists() or name in ("cli", "config"), name


def test_named_folders_exist() -> None:
    table = README[README.index("## Where things are") : README.index("## How correctness")]
    named = re.findall(r"`([\w/.]+)`", "".join(line for line in table.splitlines(True) if line.startswith("|")))
    paths = [n for n in named if not n.startswith("moekit.")]
    assert len(paths) > 8
    for path in paths:
        assert (ROOT / path).exists(), path
