"""Saving and resuming a learner: bitwise, atomic, and clear when it cannot be."""

import errno
import json
import os

import pytest
import torch

from moekit.checkpoint import files
from moekit.checkpoint.save import latest, retain
from moekit.config import LearnerConfig, ModelConfig, RouterLossConfig
from moekit.data.batch import Batch
from moekit.errors import CheckpointError, LearnerError, StorageError
from moekit.learner.learner import Learner
from moekit.learner.mesh import World
from moekit.learner.optimizer import KINDS
from moekit.learner.weights import from_checkpoint
from moekit.model.transformer import Transformer
from moekit.objectives.sft import SFT

MODEL = ModelConfig(vocab=17, width=8, layers=2, heads=2, experts=4, top_k=2, expert_width=6, selection_bias=True)
CONFIG = LearnerConfig(lr=0.01, warmup_steps=3, weight_decay=0.1, router=RouterLossConfig(balance=0.1), bias_rate=0.01)


def learner(dtype=torch.float32, config=MODEL):
    return Learner(Transformer(config, dtype=dtype, seed=0), SFT(), CONFIG, World())


def state(learner):
    return {f"{n}.{kind}": t for kind in KINDS for n, t in learner.gathered(kind).items()}


def batch(step):
    return Batch.make(torch.randint(0, 17, (2, 9), generator=torch.Generator().manual_seed(step)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_resume_is_bitwise(tmp_path, dtype):
    unbroken, first = learner(dtype), learner(dtype)
    for step in range(2):
        unbroken.step([batch(step)])
        first.step([batch(step)])
    first.save(tmp_path / "c", {"row": 5})
    torch.manual_seed(99)
    again = learner(dtype)
    again.step([batch(7)])  # whatever it did before must not matter
    assert again.restore(tmp_path / "c") == {"row": 5}
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert manifest["dtype"] == str(dtype).removeprefix("torch.")
    for step in range(2, 5):
        a, b = unbroken.step([batch(step)]), again.step([batch(step)])
        assert a["loss/total"] == b["loss/total"] and a["lr"] == b["lr"] and a["step/index"] == b["step/index"]
    for (name, p), q in zip(unbroken.model.named_parameters(), again.model.parameters()):
        assert torch.equal(p, q), name
    one, other = state(unbroken), state(again)
    assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
    biases = [m.layers[1].moe.router.selection_bias for m in (unbroken.model, again.model)]
    assert torch.equal(*biases) and biases[0].abs().sum() > 0


def test_a_bf16_parameter_is_its_rounded_master(tmp_path):
    one = learner(torch.bfloat16)
    for step in range(3):
        one.step([batch(step)])
    held = state(one)
    for name, p in one.model.named_parameters():
        assert torch.equal(p.detach(), held[f"{name}.master"].bfloat16()), name
        assert held[f"{name}.exp_avg"].dtype == torch.float32
    assert any((held[f"{n}.master"] != p.float()).any() for n, p in one.model.named_parameters())


def test_bc_038_a_checkpoint_keeps_the_bias_that_bfloat16_would_round(tmp_path):
    """BC-038: [7.000, 7.010, ...] is the same in bfloat16; saved, resumed and loaded in bfloat16 it stays float32."""
    one, bias = learner(torch.bfloat16), torch.tensor([7.0, 7.01, 7.02, 6.99])
    one.model.layers[0].moe.router.selection_bias.copy_(bias)
    one.save(tmp_path / "c")
    again = learner(torch.bfloat16)
    again.restore(tmp_path / "c")
    loaded = from_checkpoint(tmp_path / "c", dtype="bfloat16")
    for model in (again.model, loaded):
        held = model.layers[0].moe.router.selection_bias
        assert held.dtype == torch.float32 and torch.equal(held, bias)
        assert model.layers[0].moe.router.weight.dtype == torch.bfloat16


def test_bc_059_the_file_holds_the_moment_of_the_call(tmp_path):
    one = learner()
    before = one.model.embed.weight.detach().clone()
    one.save(tmp_path / "c")
    with torch.no_grad():
        one.model.embed.weight.fill_(2)
    one.restore(tmp_path / "c")
    assert torch.equal(one.model.embed.weight.detach(), before)


def damage(folder):
    """Flip a bit near the end of a rank's file."""
    file = folder / "rank_00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)


def test_existing_folder_other_model_and_altered_file_are_refused(tmp_path):
    one = learner()
    one.save(tmp_path / "c")
    with pytest.raises(CheckpointError, match="exists already"):
        one.save(tmp_path / "c")
    one.save(tmp_path / "c", overwrite=True)
    other = learner(config=ModelConfig(**{**MODEL.to_dict(), "experts": 8}))
    with pytest.raises(CheckpointError, match="experts"):
        other.restore(tmp_path / "c")
    assert other.step([batch(0)])["step/index"] == 1  # nothing was read, nothing is broken
    damage(tmp_path / "c")
    with pytest.raises(CheckpointError, match="rank_00000"):
        one.restore(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        one.restore(tmp_path / "nothing")


def test_a_learner_with_half_a_checkpoint_refuses_until_it_has_a_whole_one(tmp_path):
    one, other = learner(), learner()
    for step in range(2):
        other.step([batch(step)])
    other.save(tmp_path / "good")
    other.save(tmp_path / "bad")
    damage(tmp_path / "bad")
    with pytest.raises(CheckpointError, match="rank_00000"):
        one.restore(tmp_path / "bad")
    for use in (lambda: one.step([batch(2)]), lambda: one.evaluate([batch(2)]), lambda: one.save(tmp_path / "half")):
        with pytest.raises(LearnerError, match="whole checkpoint"):
            use()
    assert not (tmp_path / "half").exists()
    one.restore(tmp_path / "good")
    assert one.step([batch(2)])["loss/total"] == other.step([batch(2)])["loss/total"]


def test_a_closed_learner_gives_its_model_back(tmp_path):
    one = learner()
    one.step([batch(0)])
    one.save(tmp_path / "c")
    one.close()
    one.close()
    for use in (lambda: one.step([batch(1)]), lambda: one.save(tmp_path / "d"), lambda: one.restore(tmp_path / "c")):
        with pytest.raises(LearnerError, match="closed"):
            use()
    plain = Transformer(MODEL, seed=0)
    plain.load_state_dict(one.model.state_dict())

    def gradient(model):
        flat = batch(1).flat
        model(flat).score_M.sum().backward()
        return {n: p.grad for n, p in model.named_parameters()}

    got, want = gradient(one.model), gradient(plain)
    assert all(torch.equal(got[n], want[n]) for n in want) and len(want) > 10


def test_a_failed_save_leaves_the_previous_one_and_nothing_else(tmp_path, monkeypatch):
    one = learner()
    one.save(tmp_path / "c", {"n": 1})

    def full(fd, data):
        os.write(fd, memoryview(data)[:4])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "push", full)
    with pytest.raises(StorageError, match="disk is full"):
        one.save(tmp_path / "c", {"n": 2}, overwrite=True)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert json.loads((tmp_path / "c" / "manifest.json").read_text())["extra"] == {"n": 1}
    one.restore(tmp_path / "c")


def test_bc_064_the_schedule_does_not_advance_on_resume(tmp_path):
    """lr(t) = 0.1 (1 - t/10), saved at t = 4, saved and loaded once more: the next step uses 0.06."""
    config = LearnerConfig(lr=0.1, schedule="linear", total_steps=10)
    make = lambda: Learner(Transformer(MODEL, seed=0), SFT(), config, World())
    one = make()
    for step in range(4):
        one.step([batch(step)])
    for name in ("a", "b"):
        one.save(tmp_path / name)
        one = make()
        one.restore(tmp_path / name)
        assert one.updates == 4
    metrics = one.step([batch(4)])
    assert metrics["lr"] == pytest.approx(0.06, abs=1e-12) and metrics["step/index"] == 5


def test_latest_and_retain(tmp_path):
    one = learner()
    for n in (2, 10, 9):
        one.save(tmp_path / f"step_{n}")
    assert latest(tmp_path) == tmp_path / "step_10"
    retain(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_10", "step_9"]
    assert latest(tmp_path / "none") is None
