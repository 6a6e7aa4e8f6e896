"""Resident workers: real pools on gloo. One pool serves the tests of a pool that goes on, and at the end one that ends.

Functions for the rank's namespace are made by `typed`, as a notebook's cells would make them.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import moekit
from moekit.config import DataConfig, LearnerConfig, ModelConfig, SFTConfig
from moekit.data.batch import Batch
from moekit.errors import ConfigError, JobError
from moekit.launch import pool as pools

MODEL = ModelConfig(vocab=31, width=16, layers=2, heads=4, kv_heads=2, experts=4, top_k=2, expert_width=12)


def typed(source: str) -> dict[str, Any]:
    """The names that a notebook would have after a cell with this source; its functions are `__main__`'s."""
    names = {"__name__": "__main__", "moekit": moekit}
    exec(compile(textwrap.dedent(source), "<cell>", "exec"), names)  # noqa: S102
    return names


@pytest.fixture(scope="module")
def mark(new_mark: Callable[[], Any]) -> Any:
    return new_mark()


@pytest.fixture(scope="module")
def pool(mark: Any) -> Iterator[pools.Pool]:
    with moekit.workers(2, threads=1, device="cpu", timeout=60, env=mark.env) as made:
        yield made
    assert mark.all_gone(10), [p.cmdline() for p in mark.living()]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts its background commands with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_bc_116_ranks_are_fresh_processes_of_one_group(pool: pools.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """BC-116: whatever this process did with CUDA, ranks are new interpreters and share none of it."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    def total(power: int) -> tuple[float, int, str]:
        mine = torch.tensor((moekit.here().rank + 2.0) ** power, dtype=torch.float64)
        torch.distributed.all_reduce(mine)
        return mine.item(), torch.get_num_threads(), moekit.here().device

    assert pool(total, 3) == pool.run(total, power=3) == [(8.0 + 27.0, 1, "cpu")] * 2
    assert pool(lambda: torch.cuda.is_initialized()) == [False, False]
    assert pool(os.getpid) == pool.pids and len({os.getpid(), *pool.pids}) == 3
    assert pool(os.getcwd) == [os.getcwd()] * 2
    assert repr(pool) == "Pool(2 ranks on cpu, ready)"


def test_names_stay_and_an_edited_function_meets_them(pool: pools.Pool) -> None:
    cell = typed("""
        import torch
        def make(scale):
            global weight, steps
            weight, steps = torch.full((3,), scale * (1.0 + moekit.here().rank)), 0
        def size():
            return 10
        def step():
            global steps
            steps += 1
            return steps, (weight.sum() * size()).item()
    """)
    assert pool(cell["make"], 2.0) == [None, None]
    assert pool(cell["step"]) == [(1, 60.0), (1, 120.0)]
    assert "weight" not in cell
    edited = typed("""
        FACTOR = 1000
        def size():
            return FACTOR
        def step(extra):
            return steps + extra, (weight.sum() * size()).item()
    """)
    assert pool(edited["step"], extra=5) == [(6, 6000.0), (6, 12000.0)]
    assert torch.equal(pool.get("weight", rank=1), torch.full((3,), 4.0))
    assert torch.equal(pool.get("weight[:1] * FACTOR"), torch.full((1,), 2000.0))
    pool.put("weight", torch.ones(3), rank=1)
    assert pool(edited["step"], 0) == [(1, 6000.0), (1, 3000.0)]
    pool.put("steps", 7)
    assert pool.get("steps") == pool.get("steps", rank=1) == 7
    with pytest.raises(ConfigError, match="rank=2 is not one of the pool's ranks, 0 to 1"):
        pool.get("steps", rank=2)
    with pytest.raises(JobError, match="name 'nothing' is not defined"):
        pool.get("nothing")


def test_an_edited_module_is_loaded_again(pool: pools.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "my_layers.py"
    source = "class Layer:\n    def width(self):\n        return {}\ndef depth():\n    return {}\n"
    file.write_text(source.format(4, 1))
    module = importlib.import_module("my_layers")
    assert pool(module.depth) == [1, 1]
    pool(typed("def make():\n    global layer\n    import my_layers\n    layer = my_layers.Layer()")["make"])
    assert pool.get("layer.width()") == 4
    file.write_text(source.format(8, 2) + "# edited\n")
    os.utime(file, (time.time() + 5,) * 2)
    assert pool(module.depth) == [2, 2]
    assert pool.get("layer.width()", rank=1) == 8  # an object made before
    file.write_text("def depth(:\n")
    os.utime(file, (time.time() + 9,) * 2)
    with pytest.raises(JobError, match=r"rank [01]: SyntaxError.*my_layers\.py"):
        pool(module.depth)
    file.write_text(source.format(8, 3))
    os.utime(file, (time.time() + 13,) * 2)
    assert pool(module.depth) == [3, 3]
    monkeypatch.delitem(sys.modules, "my_layers")


def test_a_learner_steps_as_in_one_process(pool: pools.Pool) -> None:
    def batch(rows: slice) -> Batch:
        g = torch.Generator().manual_seed(3)
        ids = torch.randint(0, MODEL.vocab, (4, 9), generator=g)
        labels = torch.where(torch.rand(4, 9, generator=g) < 0.5, ids, -100)
        return Batch.make(ids[rows], labels=labels[rows])

    def steps(ep: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        from moekit import SFT, Learner, Transformer

        model = Transformer(MODEL, dtype=torch.float64, seed=1)
        learner = Learner(model, SFT(), LearnerConfig(lr=0.01, ep=ep))
        rank, each = moekit.here().rank, 4 // moekit.here().world
        told = [learner.step([batch(slice(each * rank, each * (rank + 1)))]) for _ in range(3)]
        return [one["loss/total"] for one in told], learner.gradient()

    losses, gradient = steps(1)
    assert losses[0] > losses[2]
    for got, grads in pool(steps, 2):
        assert got == pytest.approx(losses, rel=1e-9)
        assert gradient.keys() == grads.keys()
        assert all(torch.allclose(grads[name], value, rtol=1e-9, atol=1e-12) for name, value in gradient.items())
    cell = typed("""
        def make(shape, config):
            global learner
            model = moekit.Transformer(shape, seed=1)
            learner = moekit.Learner(model, moekit.SFT(), config)
    """)
    pool(cell["make"], MODEL, LearnerConfig(ep=2))
    pool.put("batch", batch(slice(0, 2)))
    pool(typed("def route():\n    learner.step([batch], record=True)")["route"])
    routes = pool.get("learner.routes[0]", rank=1)
    assert {layer: chosen.shape for layer, chosen in routes.items()} == {0: (18, 2), 1: (18, 2)}


def test_a_recipe_runs_unchanged(pool: pools.Pool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from moekit.data.tokenizer import train_tokenizer
    from moekit.model.presets import preset
    from moekit.recipes.sft import train

    words = ["red", "blue", "green", "cat", "dog"]
    chats = [[{"role": "user", "content": f"say {a} {b}"}, {"role": "assistant", "content": f"{a} {b}"}]
             for a in words for b in words]  # fmt: skip
    tokenizer = train_tokenizer([m["content"] for chat in chats for m in chat], 300, tmp_path / "tokenizer")
    ids = {"vocab": len(tokenizer), "eos_id": tokenizer.eos_token_id, "pad_id": tokenizer.pad_token_id}
    model = moekit.Transformer(replace(preset("demo"), **ids), seed=0)
    start = moekit.export(model, tmp_path / "start", tokenizer)
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    config = SFTConfig(
        model=str(start), data=str(tmp_path / "chats.jsonl"), out=str(tmp_path / "one"), steps=3, batch_rows=4,
        microbatch_rows=2, rows=DataConfig(length=32), learner=LearnerConfig(lr=1e-2), dtype="float64",
    )  # fmt: skip
    train(config)
    capfd.readouterr()
    pool(train, replace(config, out=str(tmp_path / "pool"), learner=replace(config.learner, ep=2)))
    assert "[rank 0] " in capfd.readouterr().out
    runs = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("one", "pool")]
    one, two = ([json.loads(line)["loss/total"] for line in lines] for lines in runs)
    assert len(one) == 3 and two == pytest.approx(one, rel=1e-9)


def test_output_has_its_rank_and_an_end(pool: pools.Pool, capfd: pytest.CaptureFixture[str]) -> None:
    def talk(lines: int) -> None:
        rank = moekit.here().rank
        print(f"hello from {rank}\nbar 1 %\rbar 100 %")
        os.system("echo a child")
        print("grüße", file=sys.stderr, end="")
        if rank == 1:
            print("\n" + "\n".join(str(i) for i in range(lines)))

    pool(talk, 30_000)
    shown = capfd.readouterr().out.splitlines()
    assert [line for line in shown if "[rank 0]" in line] == [
        "[rank 0] hello from 0", "[rank 0] bar 100 %", "[rank 0] a child", "[rank 0] grüße"
    ]  # fmt: skip
    one = [line.removeprefix("[rank 1] ") for line in shown if "[rank 1]" in line]
    assert one[:4] == ["hello from 1", "bar 100 %", "a child", "grüße"]
    assert one[4:-1] == [str(i) for i in range(196)] and "pool.logs(1)" in one[-1]
    assert pool.logs(1, 2) == "29998\n29999"
    pool(talk, 3)
    assert len(capfd.readouterr().out.splitlines()) == 4 + 7  # nothing of the call before


def test_an_error_on_all_ranks_is_shown_with_its_traceback(pool: pools.Pool) -> None:
    def bad(rank: int) -> None:
        raise ValueError(f"{rank} of the notebook")  # the line that the traceback shows

    with pytest.raises(JobError, match="rank [01]: ValueError: 7 of the notebook") as caught:
        pool(bad, 7)
    assert caught.value.rank in (0, 1)
    assert caught.value.traceback.rstrip() in str(caught.value)
    assert "# the line that the traceback shows" in caught.value.traceback
    assert "engines.py" not in caught.value.traceback
    with pytest.raises(JobError, match="returned cannot be pickled"):
        pool(lambda: (i for i in range(3)))
    with pytest.raises(ConfigError, match="cannot be sent to other processes"):
        pool(bad, threading.Lock())
    assert pool(lambda: 1) == [1, 1]


def test_an_error_on_one_rank_ends_the_call_and_the_others_get_an_interrupt(pool: pools.Pool) -> None:
    def half() -> None:
        if moekit.here().rank == 1:
            raise RuntimeError("only here")
        time.sleep(60)

    begin = time.monotonic()
    with pytest.raises(JobError, match="rank 1: RuntimeError: only here") as caught:
        pool(half)
    assert time.monotonic() - begin < 10
    assert caught.value.rank == 1
    assert "rank 0 had not ended and got an interrupt; the pool goes on" in str(caught.value)
    assert pool(lambda: moekit.here().rank) == [0, 1]


def test_a_timeout_and_an_interrupt_reach_the_ranks_and_leave_the_pool(pool: pools.Pool, interruptible: None) -> None:
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="longer than 0.5 s"):
        pool.run(time.sleep, 60, timeout=0.5)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        pool(time.sleep, 60)
    assert time.monotonic() - begin < 10
    assert pool(os.getpid) == pool.pids


def test_nothing_of_a_pool_is_in_the_users_folders(pool: pools.Pool) -> None:
    assert pool.folder.parent == Path(os.environ.get("TMPDIR", "/tmp"))
    assert oct(pool.folder.stat().st_mode)[-3:] == "700"  # its keys are there


# A pool that ends


def test_a_rank_in_a_collective_is_named_and_so_is_one_that_was_killed(
    pool: pools.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lonely() -> None:
        if moekit.here().rank == 1:
            raise ValueError("not joining")
        torch.distributed.barrier()  # where it is stuck

    begin = time.monotonic()
    with pytest.raises(JobError, match="rank 1: ValueError: not joining") as caught:
        pool(lonely)
    assert time.monotonic() - begin < 10
    assert caught.value.rank == 1 and "# where it is stuck" not in caught.value.traceback
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# where it is stuck" in text)
    for said in (str(caught.value), repr(pool)):
        assert "rank 0 did not answer to an interrupt" in said and "pool.restart()" in said
    assert f"rank 0 is at {__file__}:{line} in lonely" in str(caught.value)
    begin = time.monotonic()
    with pytest.raises(JobError, match="rank 0 did not answer"):
        pool(lambda: 1)
    assert time.monotonic() - begin < 2
    kill, dead = os.kill, pool.pids[0]
    kill(pool._guard.pid, signal.SIGSTOP)  # it is late to say how a rank ended
    kill(dead, signal.SIGKILL)

    def reaped(pid: int, number: int) -> None:
        if pid == dead:
            raise ProcessLookupError
        kill(pid, number)

    monkeypatch.setattr(os, "kill", reaped)
    threading.Timer(0.5, kill, (pool._guard.pid, signal.SIGCONT)).start()
    with pytest.raises(JobError, match=r"the pool lost rank 0: it was killed by signal 9 \(SIGKILL\).*restart") as lost:
        pool(lambda: 1)
    assert lost.value.rank == 0


def test_a_closed_pool_leaves_nothing_and_says_so(pool: pools.Pool, mark: Any) -> None:
    assert len(mark.living()) >= 3
    pool.close()
    assert mark.living() == [] and not pool.folder.exists()
    with pytest.raises(JobError, match=r"the pool was closed, or process .*restart"):
        pool(lambda: 1)
    pool.close()
