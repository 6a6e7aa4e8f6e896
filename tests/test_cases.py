"""The checklist of known failures: every case id is held by a test, or has a written reason why not yet.

`cases.json` lists the ids and their kinds. Each id is a failure that was seen in the field and has a right value. A
test holds a case when its name or docstring has the id, as in `def test_bc_001_...`.
"""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
CASES: dict[str, str] = json.loads((TESTS / "cases.json").read_text())

# Reasons, by kind and by case; none is needed now.
KIND_WAITS: dict[str, str] = {}
CASE_WAITS: dict[str, str] = {}
CASE_ID = re.compile(r"\bbc[-_](\d{3})(?!\d)", re.IGNORECASE)


def cases_in(source: str) -> dict[str, list[str]]:
    """Case id -> names of the test functions that hold it. A skipped or expected failure holds nothing."""
    held: dict[str, list[str]] = defaultdict(list)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or not node.name.startswith("test"):
            continue
        if any(re.search(r"\b(skip|xfail)\b", ast.unparse(d)) for d in node.decorator_list):
            continue
        text = f"{node.name.replace('_bc_', ' bc_')} {ast.get_docstring(node) or ''}"
        for number in CASE_ID.findall(text):
            held[f"BC-{number}"].append(node.name)
    return held


HELD: dict[str, list[str]] = defaultdict(list)
for _file in sorted(TESTS.rglob("test_*.py")):
    for _case, _names in cases_in(_file.read_text()).items():
        HELD[_case] += [f"{_file.relative_to(TESTS)}::{name}" for name in _names]


@pytest.mark.parametrize("case", CASES)
def test_case_is_held_or_explained(case: str) -> None:
    reason = CASE_WAITS.get(case, KIND_WAITS.get(CASES[case], ""))
    assert HELD[case] or reason, f"{case} ({CASES[case]}) needs a test whose name or docstring has its id"


def test_the_list_is_whole() -> None:
    """76 public cases, and no test that names an id which does not exist."""
    assert len(CASES) == 76
    unknown = {case: tests for case, tests in HELD.items() if tests and case not in CASES}
    assert not unknown, unknown


def test_what_counts_as_held() -> None:
    source = (
        "def test_bc_001_copy(): ...\n"
        "def test_other():\n    'Case BC-002, and BC-0031 is none.'\n"
        "@pytest.mark.skip\ndef test_bc_004(): ...\n"
        "def helper_bc_005(): ...\n"
    )
    assert {c: n for c, n in cases_in(source).items()} == {"BC-001": ["test_bc_001_copy"], "BC-002": ["test_other"]}
