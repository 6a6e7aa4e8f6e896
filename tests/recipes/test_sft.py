"""The SFT recipe in one process: a resumed run is the unbroken one, and the folder says what was done."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moekit.config import DataConfig, FilterConfig, SFTConfig
from moekit.errors import ConfigError, NumericsError, RunExistsError, StorageError
from moekit.measure.record import open_run
from moekit.recipes import setup
from moekit.recipes import sft as recipe
from moekit.recipes.sft import train

TIMES = ("time/", "rate/", "flops/mfu", "memory/")  # clocks differ; memory is told at the first step after a start


def records(folder: Path) -> list[dict]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith(TIMES)} for r in found]


def same_run(a: Path, b: Path, done: int) -> None:
    """Metrics, arrays, checkpoint and export of two runs are bitwise equal."""
    assert records(a) == records(b)
    for name in open_run(a).array_names:
        one, two = open_run(a).arrays(name), open_run(b).arrays(name)
        assert (one.steps == two.steps).all() and (one.values == two.values).all(), name
    state = [load_file(f / "checkpoints" / f"step_{done}" / "rank_00000.safetensors") for f in (a, b)]
    assert state[0].keys() == state[1].keys() and all(torch.equal(state[0][k], state[1][k]) for k in state[0])
    weights = [(f / "export" / "model.safetensors").read_bytes() for f in (a, b)]
    assert weights[0] == weights[1]


@pytest.fixture(scope="module")
def whole(kit, tmp_path_factory):
    """A run that nothing disturbed, and what it returned."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, train(kit.config(folder))


def test_a_run_leaves_what_it_says(kit, whole):
    folder, told = whole
    found = records(folder)
    assert [r["step"] for r in found] == list(range(6))
    assert told["steps"] == 6 and told["skipped"] == 0 and told["run"] == str(folder)
    assert told["loss_first"] == found[0]["loss/sft"] > told["loss_last"] == found[-1]["loss/sft"]
    assert told["supervised_tokens"] == sum(r["tokens/supervised"] for r in found) > 0
    assert told["rows_dispatched"] == sum(r["rows/dispatched"] for r in found)
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step_3", "step_6"]
    run = open_run(folder)
    run.card.to_html()
    assert run.card.batch["data"] == str(kit.data) and run.card.layout["world"] == 1
    assert run.card.accounting["steps"] == 6 and run.card.objective["denominator"] == "global_tokens"
    assert SFTConfig.from_dict(run.config["recipe"]) == kit.config(folder)
    assert (folder / "card.html").exists()
    rows, steps = run.card.batch["report"]["rows"], -(-run.card.batch["report"]["rows"] // 7)  # of one epoch
    assert 1 < steps < 6 and rows % 7  # more than one epoch, whose last step is short
    assert [(r["data/epoch"], r["data/row"]) for r in found] == [
        (i // steps, min(7 * (i % steps + 1), rows)) for i in range(6)
    ]


def test_transformers_loads_the_export(kit, whole):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from moekit.data.batch import Batch
    from moekit.learner.weights import load
    from moekit.model.transformer import logits

    told = whole[1]
    theirs = AutoModelForCausalLM.from_pretrained(told["export"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(told["export"])
    ids = torch.tensor([tokenizer("say red cat", add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        want, ours = theirs(ids).logits, logits(load(told["export"]), Batch.make(ids))
    assert ((ours - want).abs().max() / want.abs().max()) < 1e-5
    assert theirs.generation_config.eos_token_id == tokenizer.eos_token_id


def test_resume_is_bitwise_the_unbroken_run(kit, whole, tmp_path):
    train(kit.config(tmp_path / "run", steps=3))
    told = train(kit.config(tmp_path / "run", resume=True))
    same_run(whole[0], tmp_path / "run", 6)
    assert told["steps"] == 6


def test_resume_after_a_crash_between_checkpoints(kit, whole, tmp_path, monkeypatch):
    """Steps past the last checkpoint are recorded, then cut, then made again."""
    real = recipe.Learner.step

    def dies(learner, batches):
        if learner.updates == 5:
            raise RuntimeError("power cut")
        return real(learner, batches)

    with monkeypatch.context() as patch:
        patch.setattr(recipe.Learner, "step", dies)
        with pytest.raises(RuntimeError, match="power cut"):
            train(kit.config(tmp_path / "run"))
    assert len(records(tmp_path / "run")) == 5
    train(kit.config(tmp_path / "run", resume=True, microbatch_rows=2))
    same_run(whole[0], tmp_path / "run", 6)


def test_resume_refuses_another_run(kit, whole, tmp_path):
    folder = whole[0]
    before = sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("*"))
    config = kit.config(folder, resume=True)
    with pytest.raises(ConfigError, match="denominator was 'global_tokens', is 'sequence_mean'"):
        train(replace(config, denominator="sequence_mean"))
    with pytest.raises(ConfigError, match="learner was .*0.01.* is .*0.5"):
        train(replace(config, learner=replace(config.learner, lr=0.5)))
    with pytest.raises(ConfigError, match="6 steps on, but steps=4"):
        train(replace(config, steps=4))
    with pytest.raises(ConfigError, match="choose one"):
        train(replace(config, overwrite=True))
    assert sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("*")) == before


def test_without_out_a_new_folder_under_runs(kit):
    told = train(kit.config(None, steps=1, export=False, save_every=None))
    assert Path(told["run"]).parent == Path("runs") and told["run"].endswith("-sft")
    assert told["export"] is None and not (Path(told["run"]) / "export").exists()


def test_overwrite_replaces_the_run_and_nothing_else(kit, tmp_path):
    folder = tmp_path / "run"
    train(kit.config(folder, steps=2))
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(RunExistsError, match="overwrite=True"):
        train(kit.config(folder, steps=1))
    told = train(kit.config(folder, steps=1, overwrite=True))
    assert told["steps"] == 1 and len(records(folder)) == 1
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step_1"]
    assert (folder / "notes.txt").read_text() == "mine"


def test_overwrite_with_bad_input_leaves_the_old_run(kit, tmp_path, broken_model):
    folder = tmp_path / "run"
    train(kit.config(folder, steps=1))
    before = sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("*"))
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    with pytest.raises(ValueError, match="line 1"):
        train(kit.config(folder, overwrite=True, data=str(bad)))
    with pytest.raises(NumericsError):
        train(kit.config(folder, overwrite=True, model=str(broken_model[0])))
    assert sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("*")) == before


@pytest.mark.parametrize("rows", ["packed", "padded", "interleaved"])
def test_the_row_kinds_learn(kit, tmp_path, rows):
    data = DataConfig(length=64, rows=rows, filter=FilterConfig(max_period=3, min_repeats=8))
    told = train(kit.config(tmp_path / "run", rows=data, export=False, save_every=None))
    assert told["loss_last"] < told["loss_first"]


def test_a_full_disk_at_a_checkpoint_keeps_the_run_resumable(kit, whole, tmp_path, capfd):
    """A limit on file sizes stands for the full disk: the second checkpoint cannot be written."""
    folder = tmp_path / "run"
    train(kit.config(folder, steps=3, export=False))
    size = (folder / "checkpoints" / "step_3" / "rank_00000.safetensors").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, hard))
    try:
        with pytest.raises(StorageError, match="step_6"):
            train(kit.config(folder, resume=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step_3"]
    assert [r["step"] for r in records(folder)] == list(range(6))
    train(kit.config(folder, resume=True))
    same_run(whole[0], folder, 6)


def test_room_on_the_disk_is_checked_first(kit, tmp_path, monkeypatch):
    used = setup.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda _: used._replace(free=100_000))
    with pytest.raises(StorageError, match="GB free"):
        train(kit.config(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
