"""The SFT recipe on many processes: any layout, resumed at another one, and after a rank was killed."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import moekit
from moekit.errors import ConfigError, JobError
from moekit.learner.weights import from_checkpoint, load
from moekit.recipes.job import run_job
from moekit.recipes.sft import train


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss/total"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def split(config, **layout):
    return replace(config, dtype="float64", learner=replace(config.learner, **layout))


def die_at_step_four(config, rank):
    """The recipe; unless it resumes, one rank is killed as it starts step 4 (the newest checkpoint is of step 3)."""
    import time

    from moekit.learner.learner import Learner

    step, calls, metrics = Learner.step, [], moekit.here().folder / "metrics.jsonl"

    def watched(self, batches, **kwargs):
        calls.append(1)
        if len(calls) == 5 and moekit.here().rank == rank:
            while metrics.read_bytes().count(b"\n") < 4:  # rank 0 writes the record of a step after the others left it
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, batches, **kwargs)

    if not config.resume:
        Learner.step = watched
    return train(config)


@pytest.fixture(scope="module")
def runs(kit, tmp_path_factory):
    """One process unbroken; EP x PP on four, killed at step 4, resumed on the same four; and on two others."""
    folder = tmp_path_factory.mktemp("layout_runs")
    train(split(kit.config(folder / "one")))
    four = split(kit.config(None), ep=2, pp=2, recompute="moe", dispatch="rowwise", transport="shared_memory")
    how = {"runs": folder, "threads": 1, "timeout": 60.0}
    unbroken = moekit.submit(train, four, nproc=4, name="four", **how).result()
    job = moekit.submit(die_at_step_four, four, 2, nproc=4, name="broken", **how)
    with pytest.raises(JobError) as error:
        job.result()
    before = losses(folder / "broken")
    other = split(replace(four, resume=True, keep_checkpoints=9), ep=1, pp=1, recompute="none", dispatch="sync", zero=0)
    import shutil

    shutil.copytree(folder / "broken", folder / "elsewhere")
    again = moekit.submit(train, replace(four, resume=True), nproc=4, name="broken", resume=True, **how)
    again.result()
    moekit.submit(train, other, nproc=2, name="elsewhere", resume=True, **how).result()
    return folder, unbroken, error.value, before


def test_a_layout_trains_like_one_process(runs):
    folder, told, *_ = runs
    assert losses(folder / "four") == pytest.approx(losses(folder / "one"), rel=1e-9)
    assert all(rank == told[0] for rank in told)
    one, four = (from_checkpoint(folder / name / "checkpoints" / "step_6") for name in ("one", "four"))
    for (name, p), q in zip(one.named_parameters(), four.parameters()):
        assert float((p - q).detach().norm()) <= 1e-9 * float(p.detach().norm()), name


def test_the_export_of_a_split_model_is_its_weights(runs):
    folder = runs[0]
    exported, kept = load(folder / "four" / "export"), from_checkpoint(folder / "four" / "checkpoints" / "step_6")
    assert all(torch.equal(p, q) for p, q in zip(exported.parameters(), kept.parameters()))


def test_a_killed_rank_is_named_and_the_run_goes_on_as_if_unbroken(runs):
    folder, _, error, before = runs
    assert error.rank == 2 and "SIGKILL" in str(error)
    assert before == losses(folder / "four")[:4]
    assert losses(folder / "broken") == losses(folder / "four")  # bitwise


def test_resume_at_another_world_size(runs):
    folder = runs[0]
    assert losses(folder / "elsewhere") == pytest.approx(losses(folder / "four"), rel=1e-9)
    card = moekit.open_run(folder / "elsewhere").card
    assert card.layout["world"] == 2 and card.layout["ep"] == 1


def test_bc_054_an_impossible_layout_is_refused_before_a_process_starts(kit, tmp_path):
    for layout, nproc, numbers in (({"ep": 3}, 3, "4 experts.*ep=3"), ({"ep": 2}, 3, "3 ranks.*ep=2"),
                                   ({"pp": 2}, 3, "3 ranks.*pp=2"), ({"pp": 4}, 4, "2 layers.*4")):  # fmt: skip
        with pytest.raises(ConfigError, match=numbers):
            run_job(train, split(kit.config(None), **layout), out=str(tmp_path / "run"), nproc=nproc)
        assert not (tmp_path / "run").exists()
