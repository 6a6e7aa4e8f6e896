"""benchmarks/gpu.py where there is no GPU: its checks interpreted, its exit status, and that its timing code runs."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from moekit import ops
from moekit.kernels import router_topk

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
torch.set_num_threads(1)


def script(*options: str, interpret: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(FOLDER / "gpu.py"), *options]
    env = os.environ | {"TRITON_INTERPRET": interpret}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture
def gpu(monkeypatch):
    """The script as a module, with the backend put back afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("gpu_benchmark", FOLDER / "gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    before = ops.backend(), torch.backends.cuda.matmul.fp32_precision
    yield module
    ops.set_backend(before[0])
    torch.backends.cuda.matmul.fp32_precision = before[1]
    sys.modules.pop("gpu_checks", None)


@pytest.mark.long
def test_all_checks_hold_in_the_interpreter(tmp_path):
    """Exit 0, every check right but the one that needs CUDA, and the same in the file."""
    done = script("--quick", "--json", str(tmp_path / "gpu.json"), interpret="1")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert "interpreter" in found["machine"] and len(found["rows"]) >= 12
    assert [r["name"] for r in found["rows"] if not r["right"]] == [
        "no host read from router to combine (sync debug mode)"
    ]
    assert all(r["name"][:60] in done.stdout for r in found["rows"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends_with_2():
    done = script("--quick", interpret="0")
    assert done.returncode == 2 and "no CUDA device here" in done.stderr and "TRITON_INTERPRET=1" in done.stderr


def test_one_failure_hides_no_other_and_ends_with_1(gpu, monkeypatch, capsys, tmp_path):
    """A choice that names the worst experts is seen by the router's check; the check after it still runs."""
    checks = dict(gpu.CHECKS)
    names = ["router: choices and counts", "rows by address: put and get in own memory"]
    inner = router_topk.choose

    def worst(logits, *args, **options):
        return inner(-logits, *args, **options)

    monkeypatch.setattr(router_topk, "choose", worst)
    monkeypatch.setattr(gpu, "CHECKS", [(n, checks[n]) for n in names])
    assert gpu.main(["--quick", "--json", str(tmp_path / "found.json")]) == 1
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [r["right"] for r in rows] == [False, True] and "AssertionError" in rows[0]["found"]
    assert "WRONG" in capsys.readouterr().out
    assert gpu.main(["--quick", "--seconds", "-1"]) == 1  # no time: what was not checked is not right
    assert "not run: -1 s are over" in capsys.readouterr().out


class Event:
    """A clock in the place of CUDA's."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


@pytest.mark.long
def test_the_timing_code_runs(gpu, monkeypatch, capsys):
    """All of it at tiny sizes, interpreted, one round, on a stand-in for CUDA's clock: rows, goals, lines to paste."""
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("max_memory_allocated", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no GPU")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", small(torch.empty))
    for name, value in {"E": 4, "EACH": 16, "WIDE": 64, "OUT": 32, "TOP": 2, "LABELS": 10, "WORDS": 48}.items():
        monkeypatch.setattr(gpu, name, value)
    inner = gpu.seconds
    monkeypatch.setattr(gpu, "seconds", lambda candidates, rounds=1: inner(candidates, 1))
    monkeypatch.setattr(gpu, "INTERPRETED", False)
    monkeypatch.setattr(gpu, "CHECKS", [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_of", lambda _: contextlib.nullcontext())
    assert gpu.main([]) == 0
    said = capsys.readouterr()
    assert "Error" not in said.out and "Error" not in said.err, said
    for product in ("forward", "dgrad", "wgrad", "whole layer"):
        assert f"{product}, against grouped_mm" in said.out
    for name in ("permute", "combine", "quantise both", "put", "log-probs", "choice", "plan", "MXFP8 GEMM"):
        assert f"\n{name}" in "\n".join(line[8:] for line in said.out.splitlines())
    for line, tiles in (("NARROW = {128: Tile(", gpu.GEMM_TILES), ("WEIGHTS = {2: Tile(", gpu.WEIGHT_TILES)):
        assert any(f"{line}{', '.join(map(str, tile))})}}" in said.out for tile in tiles), said.out


def small(empty):
    """`torch.empty` that gives the buffer that flushes a cache as one byte."""
    return lambda *size, **options: empty(*((1,) if size == (2**28,) else size), **options)
