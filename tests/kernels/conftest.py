"""Kernel tests run Triton's interpreter (tests/conftest.py sets it, before anything imports triton) and print the table
of what was compiled ahead of time at the end of the run."""

from __future__ import annotations

import os

import pytest

AOT_TABLE = pytest.StashKey[list]()


def pytest_configure(config):
    config.stash[AOT_TABLE] = []


@pytest.fixture(scope="session")
def aot_tables(request):
    """Texts appended here are printed in the terminal summary."""
    return request.config.stash.setdefault(AOT_TABLE, [])


@pytest.fixture(autouse=True)
def interpreter(request):
    """A module named test_triton_* is worth nothing if its kernels were not run by the interpreter."""
    if request.module.__name__.rpartition(".")[2].startswith("test_triton_"):
        knobs = pytest.importorskip("triton").knobs
        if os.environ.get("TRITON_INTERPRET") != "1" or not knobs.runtime.interpret:
            pytest.fail("TRITON_INTERPRET=1 was not set before triton was imported")


def pytest_terminal_summary(terminalreporter, config):
    for text in config.stash.get(AOT_TABLE, []):
        terminalreporter.section("kernels compiled ahead of time")
        terminalreporter.write_line(text)
