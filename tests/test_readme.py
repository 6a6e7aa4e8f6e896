"""What the README says exists does: its cell runs, its commands and options are known, its folders are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
SHELL = "\n".join(text for kind, text in BLOCKS if kind == "bash")
# every `moekit sub --option ...` of the shell blocks
COMMANDS = [line.split()[1:] for line in SHELL.splitlines() if line.startswith("moekit ")]


def test_the_cell_runs(tmp_path: Path) -> None:
    """The Python blocks, one after the other as cells of one notebook."""
    code = "\n".join(text for kind, text in BLOCKS if kind == "python")
    check = "\nassert len(losses) == 20 and losses[-1] < losses[0], losses"
    done = subprocess.run(
        [sys.executable, "-c", code + check], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_commands_and_options_exist(command: list[str]) -> None:
    script = "import sys; from moekit.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", script, command[0], "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    unknown = [w for w in command if w.startswith("--") and not re.search(rf"(?<![\w-]){w}(?![\w-])", done.stdout)]
    assert not unknown, f"moekit {command[0]} has no {unknown}"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def test_named_folders_exist() -> None:
    table = README[README.index("## Where things are") : README.index("## How correctness")]
    named = re.findall(r"`([\w/.]+)`", "".join(line for line in table.splitlines(True) if line.startswith("|")))
    paths = [n for n in named if not n.startswith("moekit.")]
    assert len(paths) > 8
    for path in paths:
        assert (ROOT / path).exists(), path
