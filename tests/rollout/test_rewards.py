"""Rewards when verifiers misbehave: every answer gets a score, in order, within its time, and no process is left."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path

import cloudpickle
import numpy as np
import psutil
import pytest

from moekit.data import tasks
from moekit.errors import BackendError, ConfigError, DataError
from moekit.rollout.rewards import ModelReward, RewardPool, Verifier, math_verifier, summary

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a test module is not on the workers' path
LIMIT = 0.6


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: list[int], patience: float = 8.0) -> bool:
    end = time.monotonic() + patience
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


OTHERS = set()


@pytest.fixture(scope="module", autouse=True)
def _others():
    """What other tests of this session have started and keep."""
    OTHERS.update(psutil.Process().children(recursive=True))


def below() -> list[psutil.Process]:
    """Our children since this file's first test, zombies too: a pool leaves neither."""
    return [p for p in psutil.Process().children(recursive=True) if p not in OTHERS]


def behave(item: float, answer: str) -> object:
    """Does what the answer says."""
    if answer == "loop":
        while True:
            pass
    if answer == "stuck in C":  # PyDLL keeps the interpreter's lock: no thread of the worker runs meanwhile
        ctypes.PyDLL(None).sleep(1000)
    if answer == "deaf":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(1000)
    if answer == "raise":
        raise KeyError("no such thing")
    if answer == "unprintable":
        raise type("Silent", (Exception,), {"__str__": lambda self: 1 / 0})()
    if answer == "exit":
        sys.exit(3)
    if answer == "die":
        os._exit(7)
    if answer == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if answer == "junk on the line":
        for fd in range(3, 4096):  # the line's number is the parent's: high, where that has many files open
            try:
                os.write(fd, b"nonsense\n")
            except OSError:
                pass
        time.sleep(1000)
    if answer == "huge":
        sys.stdout.write("x" * 30_000_000)
        return "x" * 30_000_000
    if answer == "huge error":
        raise ValueError("x" * 30_000_000)
    values = {"nan": math.nan, "inf": math.inf, "none": None, "text": "1.0", "list": [1.0], "two": np.ones(2),
              "one": np.float32(0.5), "bool": True, "complex": 1j}  # fmt: skip
    return values.get(answer, item)


WANT = {
    "loop": "timeout", "stuck in C": "timeout", "deaf": "timeout", "raise": "error", "unprintable": "error",
    "exit": "error", "die": "crash", "segfault": "crash", "junk on the line": "crash", "huge": "type",
    "huge error": "error", "nan": "nan", "inf": "nan", "none": "type", "text": "type", "list": "type", "two": "type",
    "complex": "type",
}  # fmt: skip


def test_every_answer_gets_its_score_in_order_whatever_the_verifier_does():
    """Bad answers between good ones, two workers: nothing is lost, nothing hangs, the rest is scored right."""
    answers = [a for bad in WANT for a in (bad, "good")] + ["one", "bool"]
    items = [float(i) for i in range(len(answers))]
    with RewardPool([Verifier("v", behave, seconds=LIMIT)], workers=2) as pool:
        start = time.perf_counter()
        rewards = pool.score(items, answers)
        took = time.perf_counter() - start
        again = pool.score([2.0], ["good"])  # it lives on
    want = WANT | {"junk on the line": rewards[answers.index("junk on the line")].parts["v"].verdict}
    assert want["junk on the line"] in ("crash", "timeout")  # on a busy machine the limit may come first
    assert {a: r.parts["v"].verdict for a, r in zip(answers, rewards) if a in want} == want
    for i, (answer, r) in enumerate(zip(answers, rewards)):
        score = 0.0 if answer in WANT else {"one": 0.5, "bool": 1.0}.get(answer, float(i))
        assert r.reward == r.parts["v"].score == score, answer
        assert r.valid == (r.parts["v"].verdict not in ("nan", "type"))
        assert len(r.parts["v"].message) <= 300
    assert again[0].reward == 2.0
    stuck = [r.parts["v"] for r in rewards if r.parts["v"].verdict == "timeout"]
    assert all(LIMIT <= s.seconds < LIMIT + 1.5 for s in stuck) and took < 20
    assert "KeyError: 'no such thing'" in rewards[answers.index("raise")].parts["v"].message
    assert "exit code 7" in rewards[answers.index("die")].parts["v"].message
    assert f"exit code {-signal.SIGSEGV}" in rewards[answers.index("segfault")].parts["v"].message
    told, verdicts = summary(rewards), Counter(want.values())
    assert {v: told[f"reward/v_{v}"] for v in verdicts} == verdicts
    assert told["reward/invalid"] == verdicts["nan"] + verdicts["type"] and told["reward/count"] == len(answers)
    assert told["reward/mean"] == pytest.approx(sum(r.reward for r in rewards) / len(rewards))


def test_what_a_stuck_verifier_has_started_is_killed_with_it(tmp_path: Path):
    def starts_more(item: str, answer: str) -> float:
        child = subprocess.Popen(["sleep", "1000"])
        Path(item).write_text(str(child.pid))
        child.wait()
        return 1.0

    with RewardPool([Verifier("v", starts_more, seconds=LIMIT)], workers=1) as pool:
        (reward,) = pool.score([str(tmp_path / "pid")], ["x"])
    assert reward.parts["v"].verdict == "timeout" and gone([int((tmp_path / "pid").read_text())])


def test_workers_run_side_by_side_survive_between_steps_and_hold_no_torch(tmp_path: Path):
    def told(item: str, answer: str) -> float:
        """Ends when three have begun: one after the other, the first would wait for its limit."""
        Path(item, str(os.getpid())).touch()
        while len(os.listdir(item)) < 3:
            time.sleep(0.01)
        assert "torch" not in sys.modules and not os.environ["CUDA_VISIBLE_DEVICES"]
        return float(os.getpid())

    before = {p.pid for p in below()}
    for step in ("a", "b"):
        (tmp_path / step).mkdir()
    pool = RewardPool([Verifier("pid", told)], workers=3)
    try:
        first, second = ({r.reward for r in pool.score([str(tmp_path / s)] * 3, [""] * 3)} for s in ("a", "b"))
        assert first == second and len(first) == 3 and first.isdisjoint({0.0, float(os.getpid())})
    finally:
        pool.close()
    assert {p.pid for p in below()} <= before, "zombies count, too"
    with pytest.raises(BackendError, match="closed"):
        pool.score([0], [""])


def test_weights_several_verifiers_and_reward_models():
    """reward = sum of weight x score; a model's NaN counts as a verifier's; one number a sequence is demanded."""
    verifiers = [Verifier("length", lambda item, answer: len(answer), weight=0.5),
                 Verifier("right", lambda item, answer: item == answer, weight=10.0),
                 Verifier("watched", lambda item, answer: 1 / 0, weight=0.0)]  # fmt: skip
    model = ModelReward("model", lambda sequences: np.array([s[0] if s else math.nan for s in sequences]), weight=2.0)
    with RewardPool(verifiers, [model], workers=2) as pool:
        rewards = pool.score(["ab", "x"], ["ab", "abcd"], [[3, 4], []])
        assert [r.reward for r in rewards] == [0.5 * 2 + 10 + 2 * 3, 0.5 * 4 + 0 + 0]
        assert [r.valid for r in rewards] == [True, False]
        assert rewards[1].parts["model"].verdict == "nan" and rewards[0].parts["watched"].verdict == "error"
        assert list(rewards[0].parts) == ["length", "right", "watched", "model"]
        with pytest.raises(DataError, match="2 items, 2 answers, 0 sequences"):
            pool.score(["ab", "x"], ["ab", "abcd"])
        assert pool.score([], [], []) == [] and summary([])["reward/count"] == 0
    short = ModelReward("short", lambda sequences: [1.0])
    with RewardPool(models=[short]) as pool, pytest.raises(DataError, match="1 scores for 2 sequences"):
        pool.score([0, 0], ["", ""], [[1], [2]])


def test_reasoning_gym_and_math_verify_score():
    """The task's own scorer, and math-verify on forms that differ as text."""
    item = tasks.make_task("chain_sum", "train", 1)[0]
    right = item["messages"][1]["content"]
    item |= {"answer": "1/2"}
    verifiers = [
        Verifier("task", tasks.score, modules=("reasoning_gym",)),
        math_verifier(),
    ]
    with RewardPool(verifiers, workers=1) as pool:
        answers = [right, f"\n {right} ", "no idea", r"$\frac{2}{4}$", "0.5", r"so \boxed{\frac{1}{3}}", ""]
        rewards = pool.score([item] * len(answers), answers)
        assert [r.parts["task"].score for r in rewards] == [tasks.score(item, a) for a in answers]
        assert [r.parts["task"].score == 1 for r in rewards] == [True, True] + [False] * 5
        assert [r.parts["math"].score for r in rewards[2:]] == [0.0, 1.0, 1.0, 0.0, 0.0]
        assert {r.parts[v].verdict for r in rewards for v in r.parts} == {"ok"}
        (bad,) = pool.score([item | {"answer": ""}], ["1"])
        assert bad.parts["math"].verdict == "error" and "cannot read the right answer" in bad.parts["math"].message
    nested = math_verifier("entry.answer", weight=3.0)
    assert nested.call({"entry": {"answer": r"\frac{1}{2}"}}, "$0.5$") == 1.0 and nested.weight == 3.0


def test_a_missing_math_verify_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(BackendError, match=r"moekit\[rl\]"):
        math_verifier()


def test_what_cannot_work_is_said_before_any_score():
    fine = Verifier("v", behave)
    with pytest.raises(ConfigError, match="different names"):
        RewardPool([fine, fine])
    with pytest.raises(ConfigError, match="different names"):
        RewardPool([])
    with pytest.raises(ConfigError, match="workers=0"):
        RewardPool([fine], workers=0)
    for bad in (Verifier("v", behave, seconds=0.0), Verifier("v", behave, weight=math.nan)):
        with pytest.raises(ConfigError, match="weight must be finite and seconds above 0"):
            RewardPool([bad])
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="'v' cannot be sent to a worker"):
        RewardPool([Verifier("v", lambda item, answer: lock.locked())])
    with pytest.raises(BackendError, match="cannot start: ModuleNotFoundError"):
        RewardPool([Verifier("v", behave, modules=("no_such_module",))])
    with pytest.raises(BackendError, match="did not start within 0.01 s"):
        RewardPool([fine], workers=1, start_seconds=0.01)
    with RewardPool([fine], workers=1) as pool:
        with pytest.raises(DataError, match="cannot be sent to a worker"):
            pool.score([lock], ["x"])
        with pytest.raises(DataError, match="1 items, 2 answers"):
            pool.score([1.0], ["x", "y"])
        assert pool.score([1.5], ["good"])[0].reward == 1.5
    assert not below()


def test_a_machine_that_can_start_no_process_is_said_at_once_and_later(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("no more processes")

    with RewardPool([Verifier("v", behave)], workers=1) as pool:
        monkeypatch.setattr(subprocess, "Popen", refuse)
        with pytest.raises(OSError, match="no more processes"):
            RewardPool([Verifier("v", behave)], workers=1)
        assert pool.score([1.0], ["die"])[0].parts["v"].verdict == "crash"
        with pytest.raises(OSError, match="no more processes"):
            pool.score([1.0], ["good"])
        monkeypatch.undo()
        assert pool.score([1.0], ["good"])[0].reward == 1.0


def test_an_idle_worker_that_was_killed_is_replaced_and_no_answer_pays_for_it():
    with RewardPool([Verifier("v", behave)], workers=2) as pool:
        killed = below()
        for process in killed:
            process.kill()
        assert gone([p.pid for p in killed])
        assert [r.reward for r in pool.score([1.0, 2.0, 3.0], ["good"] * 3)] == [1.0, 2.0, 3.0]


def test_dropping_a_pool_or_closing_it_under_a_score_ends_its_workers():
    pool = RewardPool([Verifier("v", behave, seconds=100.0)], workers=1)
    workers = [p.pid for p in below()]
    problems = []

    def stuck() -> None:
        try:
            pool.score([1.0, 1.0], ["loop", "good"])
        except BaseException as problem:  # noqa: BLE001
            problems.append(problem)

    thread = threading.Thread(target=stuck)
    thread.start()
    time.sleep(0.3)
    pool.close()
    thread.join(5)
    assert not thread.is_alive() and isinstance(problems[0], BackendError) and gone(workers)
    pool = RewardPool([Verifier("v", behave)], workers=1)
    workers = [p.pid for p in below()]
    pool = None
    gc.collect()
    assert workers and gone(workers)


@pytest.mark.timeout(30)
def test_a_pool_that_is_closed_just_before_an_answer_is_sent_is_an_error(monkeypatch: pytest.MonkeyPatch):
    """By another thread, after the pool was seen to be open: nobody would ever take that answer."""
    pool = RewardPool([Verifier("v", behave)], workers=1)
    send = pool._crew.send

    def late(*job):
        pool.close()
        return send(*job)

    monkeypatch.setattr(pool._crew, "send", late)
    with pytest.raises(BackendError, match="closed"):
        pool.score([1.0], ["good"])


def test_an_interrupt_leaves_nothing_for_the_next_step():
    def slow(item: float, answer: str) -> float:
        time.sleep(0.2)
        return item

    with RewardPool([Verifier("v", slow)], workers=1) as pool:
        timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pool.score([float(i) for i in range(50)], [""] * 50)
        start = time.perf_counter()
        assert pool.score([7.0], [""])[0].reward == 7.0
        assert time.perf_counter() - start < 2.0  # the 48 that were waiting would take 9 s


PARENT = """
import os, signal, sys, time, ctypes
from moekit.rollout.rewards import RewardPool, Verifier

def stuck(item, answer):
    open(item, "a").write(f"{os.getpid()}\\n")
    ctypes.PyDLL(None).sleep(1000)

pool = RewardPool([Verifier("v", stuck, seconds=1000.0), Verifier("w", lambda item, answer: 1.0)], workers=3)
print("ready", flush=True)
how = sys.argv[2]
if how == "falls off":
    raise RuntimeError("on purpose")
if how == "fork":
    if os.fork() == 0:
        sys.exit(0)      # the child's exit leaves the parent's pool alone
    os.wait()
    assert len(pool.score([], [])) == 0 and len(pool._crew.workers) == 3
    assert all(w.process.poll() is None for w in pool._crew.workers)
    os._exit(0)
pool.score([sys.argv[1]] * 2, ["", ""])
"""


@pytest.mark.parametrize("how", ("SIGKILL", "SIGTERM", "falls off", "fork"))
def test_workers_die_with_their_parent_however_it_ends(how: str, tmp_path: Path):
    """Two workers stuck in C code with the interpreter's lock held, one idle; the parent is killed, or raises, or
    leaves by os._exit (after a fork whose exit did no harm)."""
    script, log = tmp_path / "parent.py", tmp_path / "pids"
    script.write_text(textwrap.dedent(PARENT))  # no guard of __main__: workers do not run it again
    parent = subprocess.Popen([sys.executable, str(script), str(log), how], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True)  # fmt: skip
    assert parent.stdout.readline() == "ready\n"
    workers = [p.pid for p in psutil.Process(parent.pid).children(recursive=True)] if how.startswith("SIG") else []
    if how.startswith("SIG"):
        end = time.monotonic() + 10
        while (not log.exists() or len(log.read_text().split()) < 2) and time.monotonic() < end:
            time.sleep(0.02)
        assert len(log.read_text().split()) == 2 and len(workers) == 3
        parent.send_signal(signal.Signals[how])
    parent.wait(20)
    if how == "fork":
        assert parent.returncode == 0, parent.stderr.read()
    if how == "falls off":
        assert "on purpose" in parent.stderr.read()
    assert gone(workers)
    mine = [p.pid for p in psutil.process_iter(["cmdline"]) if str(parent.pid) in (p.info["cmdline"] or [])[-1:]]
    assert gone(mine)
