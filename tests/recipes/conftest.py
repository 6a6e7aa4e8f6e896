"""What the recipes' tests share: a small tokenizer, chats, and a random model that a step takes milliseconds for."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moekit.config import DataConfig, LearnerConfig, ModelConfig, RouterLossConfig, SFTConfig
from moekit.data.tokenizer import train_tokenizer
from moekit.learner.weights import export
from moekit.model.transformer import Transformer

WORDS = ["red", "blue", "green", "seven", "cat", "dog", "sun", "moon", "tree", "river"]


@dataclass(frozen=True)
class Kit:
    """Folders of a tokenizer, a Hugging Face model and a chat file, with the config that trains one on the other."""

    tokenizer: Path
    model: Path
    data: Path
    shape: ModelConfig

    def config(self, out: Path | None, **changes: Any) -> SFTConfig:
        learner = LearnerConfig(
            lr=1e-2, warmup_steps=2, weight_decay=0.1, router=RouterLossConfig(balance=0.02, z=1e-3)
        )
        base = SFTConfig(
            model=str(self.model), data=str(self.data), out=str(out) if out else None, steps=6, batch_rows=7,
            microbatch_rows=2, learner=learner, rows=DataConfig(length=48), save_every=3,
        )  # fmt: skip
        return replace(base, **changes)


def with_nan(model: Path, folder: Path) -> str:
    """A copy of a Hugging Face folder with one NaN among the weights; returns the tensor's name."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    name = next(n for n in weights if "experts.2.down_proj" in n)
    weights[name][0, 1] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return name


def chats(count: int) -> list[dict[str, Any]]:
    """Conversations of one to three turns and uneven lengths."""
    out = []
    for i in range(count):
        messages = []
        for turn in range(1 + i % 3):
            words = [WORDS[(i * 3 + turn + k) % len(WORDS)] for k in range(1 + (i + turn) % 4)]
            messages += [{"role": "user", "content": "say " + " ".join(words)},
                         {"role": "assistant", "content": " ".join(reversed(words))}]  # fmt: skip
        out.append({"messages": messages})
    return out


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


@pytest.fixture(scope="session")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("kit")
    data = write_lines(folder / "chats.jsonl", chats(20))
    tokenizer = train_tokenizer([data.read_text()], 300, folder / "tokenizer")
    shape = ModelConfig(
        vocab=len(tokenizer), width=16, layers=2, heads=2, experts=4, top_k=2, expert_width=12, max_positions=96,
        qk_norm="head", normalize_gates=True, family="qwen3_moe", init_std=0.3, eos_id=tokenizer.eos_token_id,
        bos_id=tokenizer.bos_token_id, pad_id=tokenizer.pad_token_id,
    )  # fmt: skip
    export(Transformer(shape, seed=3), folder / "model", folder / "tokenizer")
    return Kit(folder / "tokenizer", folder / "model", data, shape)


@pytest.fixture
def broken_model(kit: Kit, tmp_path: Path) -> tuple[Path, str]:
    """A model folder with a NaN, and the name of the tensor that has it."""
    return tmp_path / "broken", with_nan(kit.model, tmp_path / "broken")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a run without `out` goes to a runs/ of its own."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
