"""Fixtures of the launcher's tests: run folders, and a mark by which all processes of a test's jobs are found."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest


class Marked:
    """Jobs started with `env` carry a mark in their environment, whatever becomes of their parents."""

    def __init__(self) -> None:
        self.env = {"MOEKIT_TEST_MARK": uuid.uuid4().hex}

    def living(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                marked = process.environ().get("MOEKIT_TEST_MARK") == self.env["MOEKIT_TEST_MARK"]
                if marked and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def all_gone(self, seconds: float = 15.0) -> bool:
        return until(lambda: not self.living(), seconds)


def until(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    """Waits for `condition`; says whether it came true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


@pytest.fixture(scope="module")
def new_mark() -> Iterator[Callable[[], Marked]]:
    made: list[Marked] = []

    def make() -> Marked:
        made.append(Marked())
        return made[-1]

    yield make
    for mark in made:
        for process in mark.living():  # only after a failed test
            process.kill()


@pytest.fixture
def marked(new_mark: Callable[[], Marked]) -> Marked:
    return new_mark()


@pytest.fixture(name="until", scope="session")
def _until():
    return until


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def _ipython_untouched() -> Iterator[None]:
    """Nothing of a pool is to be found in the user's own IPython folder; kernels keep their history there."""
    own = Path("~/.ipython").expanduser()
    there = lambda: {path for path in own.rglob("*") if not path.name.startswith("history.sqlite")}
    before = there()
    yield
    assert there() == before
