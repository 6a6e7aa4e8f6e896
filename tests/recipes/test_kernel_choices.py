"""Which kernels a run chose is in its checkpoints, and a resumed run takes the same ones instead of measuring."""

from __future__ import annotations

import torch

from moekit.checkpoint.save import latest, read_manifest
from moekit.kernels import cpu_choice, cpu_ffn
from moekit.recipes.setup import CHECKPOINTS
from moekit.recipes.sft import train

torch.set_num_threads(1)


def test_choices_are_recorded_and_replayed_on_resume(kit, tmp_path, monkeypatch, capfd):
    """The clock says torch in the first half and native in the resumed one; the resumed run stays with torch."""
    monkeypatch.setattr(cpu_choice, "SMALL", 0)
    monkeypatch.setattr(cpu_ffn, "fits", lambda *_: (True, ""))
    monkeypatch.setattr(cpu_choice, "_choices", {})
    monkeypatch.setattr(cpu_choice, "_seconds", lambda form, *_: 1.0 if form is cpu_choice.FORMS["torch"] else 2.0)
    train(kit.config(tmp_path / "run", steps=1))
    recorded = read_manifest(latest(tmp_path / "run" / CHECKPOINTS))["extra"]["kernels"][0]
    assert recorded and {c["form"] for c in recorded.values()} == {"torch"}
    monkeypatch.setattr(cpu_choice, "_choices", {})  # another process
    monkeypatch.setattr(cpu_choice, "_seconds", lambda form, *_: 2.0 if form is cpu_choice.FORMS["torch"] else 1.0)
    train(kit.config(tmp_path / "run", steps=2, resume=True))
    assert recorded.items() <= cpu_choice.choices().items()
    changed = {key: value | {"form": "gone"} for key, value in recorded.items()}
    monkeypatch.setattr(cpu_choice, "choices", lambda: changed)
    monkeypatch.setattr("moekit.ops.choices", lambda: changed)
    train(kit.config(tmp_path / "run", steps=3, resume=True))
    capfd.readouterr()
    train(kit.config(tmp_path / "run", steps=4, resume=True))
    assert "resumed, but not bitwise: recorded kernel choices" in capfd.readouterr().out
