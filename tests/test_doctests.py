"""Every example in a docstring of the library runs and gives what it says."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(
    str(p.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__")
    for folder in ("moekit", "moekit/kernels", "moekit/launch")
    for p in (ROOT / folder).glob("*.py" if "/" in folder else "**/*.py")
)


@pytest.mark.parametrize("name", sorted({m for m in MODULES if not m.endswith("__main__")}))
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # an example that writes a file writes it here
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples failed; see the captured output"
