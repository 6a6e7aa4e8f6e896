"""Sweeps: what is run, in which order, how many at a time; what is left after failures, stops and restarts.

Most tests give the queue jobs that are folders and no processes; the last ones run real ones."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from moekit.config import LearnerConfig, SFTConfig
from moekit.errors import ConfigError, RunExistsError, StorageError
from moekit.launch import sweep as module
from moekit.launch.sweep import Sweep, attach_sweep, sweep

until: Callable[..., bool]


@dataclass
class Fakes:
    """Stands in for `submit` and `Job`: a job runs until it is told to end; notes what was asked for."""

    asked: list[tuple[str, tuple, dict]] = field(default_factory=list)
    functions: list[Any] = field(default_factory=list)
    most: int = 0
    resumed: list[str] = field(default_factory=list)
    refuse: str = ""

    def submit(self, fn: Any, *args: Any, name: str, runs: Path, **options: Any) -> FakeJob:
        if self.refuse and self.refuse in name:
            raise StorageError("no room")
        folder = runs / name
        folder.mkdir()  # never twice
        self.asked.append((name, args or fn.keywords, options))
        self.functions.append(fn)
        end(folder, "running")
        states = [json.loads(p.read_text())["state"] for p in runs.glob("*/state.json")]
        self.most = max(self.most, states.count("running"))
        return FakeJob(folder)


def end(folder: Path, state: str, reason: str = "") -> None:
    (folder / ".new").write_text(json.dumps({"state": state, "reason": reason}))
    (folder / ".new").rename(folder / "state.json")  # in one move, as jobs do


class FakeJob:
    fakes: Fakes

    def __init__(self, folder: Path):
        self.folder, self.cannot_resume = folder, "" if (folder / "checkpoint").exists() else "no checkpoint"

    @property
    def state(self) -> str:
        return json.loads((self.folder / "state.json").read_text())["state"]

    @property
    def reason(self) -> str:
        return json.loads((self.folder / "state.json").read_text())["reason"]

    @property
    def done(self) -> bool:
        return self.state != "running"

    def metrics(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def result(self) -> list[Any]:
        return json.loads((self.folder / "result.json").read_text())

    def stop(self) -> str:
        if not self.done:
            end(self.folder, "stopped")
        return self.state

    def resume(self) -> FakeJob:
        self.fakes.resumed.append(self.folder.name)
        end(self.folder, "running")
        return self


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    made = Fakes()
    FakeJob.fakes = made
    monkeypatch.setattr(module, "submit", made.submit)
    monkeypatch.setattr(module, "Job", FakeJob)
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    return made


CONFIG = SFTConfig(model="tiny", data="chats.jsonl", learner=LearnerConfig(lr=1.0))
GRID = {"learner.lr": (0.1, 0.2), "batch_rows": (4, 8)}


def started(fakes: Fakes, count: int, until: Callable[..., bool]) -> list[str]:
    assert until(lambda: len(fakes.asked) == count, 5), fakes.asked
    time.sleep(0.1)  # and no more than that
    assert len(fakes.asked) == count
    return [name for name, _, _ in fakes.asked]


def test_grid_and_seeds_are_put_into_the_config(fakes: Fakes, runs: Path) -> None:
    """Every combination of every config, in order; each seed of the config, wherever it stands, takes the repeat's."""
    found = sweep(print, CONFIG, GRID, seeds=(5, 6), name="s", runs=runs, at_once=99, nproc=2, device="cpu")
    configs = [args[0] for _, args, _ in fakes.asked]
    assert [(c.learner.lr, c.batch_rows, c.seed, c.rows.seed) for c in configs] == [
        (lr, rows, seed, seed) for lr in (0.1, 0.2) for rows in (4, 8) for seed in (5, 6)
    ]
    assert configs[0] == replace(CONFIG, learner=LearnerConfig(lr=0.1), batch_rows=4, seed=5,
                                 rows=replace(CONFIG.rows, seed=5))  # fmt: skip
    assert [name for name, _, _ in fakes.asked][:2] == [
        "00_lr-0.1_batch_rows-4_seed-5",
        "01_lr-0.1_batch_rows-4_seed-6",
    ]
    assert all(o["nproc"] == 2 and o["device"] == "cpu" and o["threads"] == 1 for _, _, o in fakes.asked)
    assert set(found.varying) == {"learner.lr", "batch_rows", "seed", "rows.seed"}
    assert list(found.table().columns[:5]) == ["learner.lr", "batch_rows", "seed", "state", "why"]
    found.stop()


def test_configs_of_ones_own_and_plain_functions(fakes: Fakes, runs: Path) -> None:
    two = sweep(print, [CONFIG, replace(CONFIG, steps=7)], name="two", runs=runs, at_once=2)
    assert [args for _, args, _ in fakes.asked] == [(CONFIG,), (replace(CONFIG, steps=7),)]
    assert two.varying == ("steps",) and two.table()["steps"].tolist() == [100, 7]
    plain = sweep(
        print, {"y": 1, "sub": {"z": 0}}, {"x": "ab", "sub.z": [3]}, seeds=[9], name="p", runs=runs, at_once=2
    )
    assert [kwargs for _, kwargs, _ in fakes.asked[2:]] == [{"y": 1, "sub": {"z": 3}, "x": x, "seed": 9} for x in "ab"]
    two.stop(), plain.stop()


def test_at_most_so_many_at_a_time_and_in_order(fakes: Fakes, runs: Path, until: Callable[..., bool]) -> None:
    found = sweep(print, {}, {"x": range(5)}, name="s", runs=runs, at_once=2)
    assert started(fakes, 2, until) == ["00_x-0", "01_x-1"]
    assert repr(found) == "sweep s: 5 jobs, 2 running, 3 waiting"
    end(runs / "s" / "01_x-1", "finished")
    assert started(fakes, 3, until)[-1] == "02_x-2"
    end(runs / "s" / "00_x-0", "failed", "rank 0: ValueError: no")
    end(runs / "s" / "02_x-2", "finished")
    assert started(fakes, 5, until)[-2:] == ["03_x-3", "04_x-4"]  # a failed job stops no other
    assert not found.done and found.queue["pid"] > 0
    for name in ("03_x-3", "04_x-4"):
        end(runs / "s" / name, "finished")
    assert found.wait(5).done and not (runs / "s" / "queue.json").exists()
    assert fakes.most == 2
    table = found.table()
    assert table["state"].tolist() == ["failed", *["finished"] * 4]
    assert table.loc["00_x-0", "why"] == "rank 0: ValueError: no" and table["why"].tolist()[1:] == [""] * 4
    assert list(found.finished) == ["01_x-1", "02_x-2", "03_x-3", "04_x-4"]
    assert table["folder"].tolist() == [str(runs / "s" / n) for n in found.asked]


def test_a_job_that_cannot_be_submitted_says_so_and_others_go_on(
    fakes: Fakes, runs: Path, until: Callable[..., bool]
) -> None:
    fakes.refuse = "x-1"
    found = sweep(print, {}, {"x": range(3)}, name="s", runs=runs, at_once=3)
    assert started(fakes, 2, until) == ["00_x-0", "02_x-2"]
    assert found.table().loc["01_x-1", ["state", "why"]].tolist() == ["failed", "not submitted: StorageError: no room"]
    found.stop()


def test_what_cannot_work_leaves_nothing(fakes: Fakes, runs: Path) -> None:
    fakes.refuse = "x"
    with pytest.raises(StorageError, match="no room"):
        sweep(print, {}, {"x": range(3)}, name="s", runs=runs)
    for wrong, match in (
        ({"grid": {"learner.rl": [1]}}, "LearnerConfig has no field 'rl'"),
        ({"grid": {"lr": [1]}}, "SFTConfig has no field 'lr'"),
        ({"at_once": 0}, "at_once=0"),
        ({"grid": {"steps": []}}, "0 configurations"),
        ({"grid": {"steps": [0]}}, "steps=0 must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=match):
            sweep(print, CONFIG, name="s", runs=runs, **wrong)
    assert not (runs / "s").exists() and not fakes.asked
    with pytest.raises(ConfigError, match="no sweep at"):
        attach_sweep(runs / "s")


def test_bc_120_every_job_runs_the_cell_as_it_was_when_the_sweep_began(
    fakes: Fakes, runs: Path, until: Callable[..., bool]
) -> None:
    """What the notebook changes meanwhile reaches no job that waits, nor one that is begun after a restart."""
    cell: dict[str, Any] = {"__name__": "__main__", "FACTOR": 10}
    exec("def h(x):\n    return x * FACTOR", cell)  # noqa: S102 (a cell)
    found = sweep(cell["h"], {}, {"x": (1, 2)}, name="s", runs=runs)
    cell["FACTOR"] = 1000
    end(runs / "s" / "00_x-1", "finished")
    started(fakes, 2, until)
    found.stop()
    attach_sweep(runs / "s").resume().stop()
    assert [fn() for fn in fakes.functions] == [10, 20, 20]


def test_nothing_is_ever_overwritten(fakes: Fakes, runs: Path) -> None:
    found = sweep(print, {}, {"x": [1]}, name="s", runs=runs)
    before = sorted(p.name for p in (runs / "s").iterdir())
    with pytest.raises(RunExistsError, match=r"attach_sweep\('.*/runs/s'\).resume\(\)"):
        sweep(print, {}, {"x": [2]}, name="s", runs=runs)
    assert sorted(p.name for p in (runs / "s").iterdir()) == before and len(fakes.asked) == 1
    found.stop()


def test_stop_ends_the_queue_and_what_runs(fakes: Fakes, runs: Path) -> None:
    found = sweep(print, {}, {"x": range(4)}, name="s", runs=runs, at_once=2)
    found.stop()
    assert found.done and list(found.states.values()) == ["stopped", "stopped", "waiting", "waiting"]
    time.sleep(0.1)
    assert len(fakes.asked) == 2
    assert repr(found) == "sweep s: 4 jobs, 2 stopped, 2 waiting"


def test_attached_again_it_goes_on_with_what_has_not_finished(
    fakes: Fakes, runs: Path, until: Callable[..., bool]
) -> None:
    """Finished jobs stay; one with a checkpoint goes on from it; another starts anew beside what it left."""
    sweep(print, {"y": 7}, {"x": range(4)}, name="s", runs=runs, at_once=3).stop()
    end(runs / "s" / "00_x-0", "finished")
    (runs / "s" / "01_x-1" / "checkpoint").touch()
    again = attach_sweep(runs / "s")
    assert again.varying == ("x",) and again.done
    assert list(again.states.values()) == ["finished", "stopped", "stopped", "waiting"]
    again.resume()
    assert started(fakes, 5, until)[3:] == ["02_x-2.try2", "03_x-3"] and fakes.resumed == ["01_x-1"]
    assert [kwargs for _, kwargs, _ in fakes.asked[3:]] == [{"y": 7, "x": 2}, {"y": 7, "x": 3}]
    assert (runs / "s" / "02_x-2").is_dir()  # and the first try is still there
    with pytest.raises(ConfigError, match=r"process \d+ runs sweep s; wait\(\), or stop\(\) it first"):
        attach_sweep(runs / "s").resume()
    attach_sweep(runs / "s").stop()  # from elsewhere: the queue of `again` ends too
    assert until(lambda: again.done, 5)
    assert again.resume().jobs["02_x-2"].folder.name == "02_x-2.try3"
    again.stop()


def test_folders_that_are_gone_or_are_not_ours_stop_nothing(
    fakes: Fakes, runs: Path, until: Callable[..., bool]
) -> None:
    """A run folder that was archived, removed, or taken away while its job ran: the others go on, numbers go up."""
    found = sweep(print, {}, {"x": range(4)}, name="s", runs=runs, at_once=2)
    shutil.rmtree(runs / "s" / "00_x-0")  # it runs
    end(runs / "s" / "01_x-1", "failed")
    assert started(fakes, 4, until)[2:] == ["02_x-2", "03_x-3"]
    found.stop().resume().stop()
    assert started(fakes, 6, until)[4:] == ["00_x-0", "01_x-1.try2"]
    for name in ("01_x-1", "02_x-2"):
        shutil.rmtree(runs / "s" / name)
    (runs / "s" / "02_x-2.tar.gz").touch()
    (runs / "s" / "02_x-2.old").mkdir()
    (runs / "s" / "03_x-3").rename(runs / "s" / "03_x-3.try9")
    assert list(found.states.values()) == ["stopped", "stopped", "waiting", "stopped"] and len(found.table()) == 4
    end(runs / "s" / "00_x-0", "finished")
    found.resume()
    assert started(fakes, 8, until)[6:] == ["01_x-1.try3", "02_x-2"]
    end(runs / "s" / "01_x-1.try3", "finished")
    assert started(fakes, 9, until)[8:] == ["03_x-3.try10"] and not found.refused
    found.stop()


def test_sweeps_of_one_second_and_folders_that_cannot_be(
    fakes: Fakes, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda *_: "20261130-120000")
    names = [sweep(print, {}, {"x": [1]}, runs=runs).stop().name for _ in range(2)]
    assert names == ["20261130-120000-sweep", "20261130-120000-sweep-2"]
    (runs / "file").touch()
    with pytest.raises(StorageError, match="cannot write the sweep's folder .*/file/s: .*; nothing was started"):
        sweep(print, {}, {"x": [1]}, name="s", runs=runs / "file")


def test_a_dead_owner_holds_no_queue(fakes: Fakes, runs: Path) -> None:
    found = sweep(print, {}, {"x": range(2)}, name="s", runs=runs).stop()
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    (runs / "s" / "queue.json").write_text(json.dumps({"pid": int(gone.stdout), "start": "1"}))
    assert found.done and not found.queue
    assert found.resume().queue["pid"] != int(gone.stdout)
    found.stop()


def test_a_detached_job_that_still_runs_counts_and_is_not_begun_again(
    fakes: Fakes, runs: Path, until: Callable[..., bool]
) -> None:
    found = sweep(print, {}, {"x": range(3)}, name="s", runs=runs, at_once=1).stop()
    end(runs / "s" / "00_x-0", "running")
    found.resume()
    time.sleep(0.1)
    assert len(fakes.asked) == 1 and list(found.states.values()) == ["running", "waiting", "waiting"]
    end(runs / "s" / "00_x-0", "finished")
    assert started(fakes, 2, until)[1] == "01_x-1"
    found.stop()


def test_the_table_has_last_metrics_and_mean_and_spread_over_repeats(fakes: Fakes, runs: Path) -> None:
    """A value that was not finite is the last one; repeats that failed are in no mean."""
    found = sweep(print, {}, {"x": (1, 2)}, seeds=(0, 1, 2), name="s", runs=runs, at_once=6)
    for i, job in enumerate(found.jobs.values()):
        lines = [{"step": 0, "loss/sft": 9.0, "eval/score": 0.5, "lr": 1}, {"step": 1, "loss/sft": i * i}]
        if i == 5:
            lines.append({"step": 2, "loss/sft": None, "nonfinite": {"loss/sft": "nan"}})
        (job.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        end(job.folder, "failed" if i == 2 else "finished")
    table = found.wait(5).table()
    assert table["loss/sft"].tolist()[:5] == [0, 1, 4, 9, 16] and math.isnan(table["loss/sft"].iloc[5])
    assert table["eval/score"].tolist() == [0.5] * 6 and "lr" not in table and "lr" in found.table(metrics=["lr"])
    means = found.table(repeats=False)
    assert list(means.columns) == ["x", "finished", "loss/sft", "eval/score", "loss/sft std", "eval/score std"]
    assert means["x"].tolist() == [1, 2] and means["finished"].tolist() == [2, 3]
    assert means["loss/sft"].tolist() == [0.5, 12.5]
    assert means["loss/sft std"].tolist() == pytest.approx([math.sqrt(0.5), math.sqrt(24.5)])


def test_without_metrics_it_has_what_the_function_returned(fakes: Fakes, runs: Path) -> None:
    found = sweep(print, {}, {"x": (1, 2, 3)}, name="s", runs=runs, at_once=3)
    for job, value in zip(found.jobs.values(), (2.5, {"a": 1, "b": "text"}, [1])):
        (job.folder / "result.json").write_text(json.dumps([value]))
        end(job.folder, "finished")
    table = found.wait(5).table()
    assert table["result"].iloc[0] == 2.5 and table["a"].iloc[1] == 1 and "b" not in table


def test_each_job_has_gpus_of_its_own_as_far_as_there_are(fakes: Fakes, runs: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    found = sweep(print, {}, {"x": range(3)}, name="s", runs=runs, at_once=3, nproc=2, env={"A": "1"})
    places = [options["env"] for _, _, options in fakes.asked]
    assert places == [{"CUDA_VISIBLE_DEVICES": some, "A": "1"} for some in ("4,5", "6,7", "4,5")]
    found.stop()


def test_interrupting_the_wait_ends_nothing(fakes: Fakes, runs: Path, monkeypatch: Any) -> None:
    found = sweep(print, {}, {"x": range(2)}, name="s", runs=runs)

    def interrupted(self: Sweep) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(Sweep, "__repr__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            found.wait()
    assert found.queue and list(found.states.values()) == ["running", "waiting"]
    found.stop()


def work(x: int, folder: str, seed: int) -> dict[str, float]:
    at = time.time()
    time.sleep(0.3)
    if x == 2:
        raise ValueError("two is wrong")
    (Path(folder) / f"{x}-{seed}").write_text(f"{at} {time.time()}")
    return {"value": 10 * x + seed}


def test_real_jobs_one_of_which_fails(runs: Path, tmp_path: Path, marked: Any) -> None:
    began = time.monotonic()
    found = sweep(work, {"folder": str(tmp_path)}, {"x": (1, 2)}, seeds=(0,), name="s", runs=runs, at_once=2,
                  device="cpu", env=marked.env)  # fmt: skip
    assert time.monotonic() - began < 2  # returns at once
    assert found.wait(100).done
    table = attach_sweep(runs / "s").table()
    assert table["state"].tolist() == ["finished", "failed"] and table["value"].iloc[0] == 10
    assert "ValueError: two is wrong" in table["why"].iloc[1]
    assert marked.all_gone()


@pytest.mark.long
def test_a_kernel_that_is_killed_leaves_a_sweep_that_can_go_on(
    runs: Path, tmp_path: Path, marked: Any, until: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_sweep import work, sweep\n"
        f"s = sweep(work, {{'folder': {str(tmp_path)!r}}}, {{'x': (1, 3, 4, 5)}}, seeds=(0,), name='s', "
        f"runs={str(runs)!r}, device='cpu', env={marked.env!r})\n"
        "s.wait()"
    )
    kernel = subprocess.Popen([sys.executable, "-c", script, str(Path(__file__).parent)])
    assert until(lambda: (tmp_path / "1-0").exists() and len(list((runs / "s").glob("0*"))) > 1, 60)
    kernel.kill()
    kernel.wait()
    assert marked.all_gone()
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    again = attach_sweep(runs / "s")
    assert again.done and again.states["00_x-1_seed-0"] == "finished"
    first = (tmp_path / "1-0").read_text()
    assert again.resume().wait(120).states == dict.fromkeys(again.asked, "finished")
    assert (tmp_path / "1-0").read_text() == first  # was not run again
    spans = sorted(tuple(map(float, (tmp_path / f"{x}-0").read_text().split())) for x in (1, 3, 4, 5))
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))  # one at a time
    assert again.table()["value"].tolist() == [10, 30, 40, 50]
