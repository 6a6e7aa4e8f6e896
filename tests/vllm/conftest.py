"""What the tests against a real vLLM share: the interpreter that has it, two models of one shape, and a server."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moekit.learner.weights import export
from moekit.model.presets import preset
from moekit.model.transformer import Transformer
from moekit.rollout.vllm_http import start_server

torch.set_num_threads(1)

# vLLM's attention on CPU wants heads of 32 or more
SHAPE = replace(preset("demo"), vocab=512, width=128, heads=4, kv_heads=4, head_dim=32, init_std=0.12)


@pytest.fixture(scope="session")
def interpreter() -> str:
    """Of an environment with vLLM; its absence is a failure, so that a run without vLLM is not taken for one with."""
    path = os.environ.get("MOEKIT_VLLM_PYTHON", "")
    assert path and Path(path).exists(), f"MOEKIT_VLLM_PYTHON={path!r} names no interpreter; run `make test-vllm`"
    return path


@pytest.fixture(scope="session")
def models() -> tuple[Transformer, Transformer]:
    """A and B."""
    return Transformer(SHAPE, seed=0), Transformer(SHAPE, seed=1)


@pytest.fixture(scope="session")
def folder(models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A as a Hugging Face folder."""
    path = tmp_path_factory.mktemp("vllm") / "A"
    export(models[0], path)
    return path


@pytest.fixture(scope="session")
def server(interpreter: str, folder: Path):
    """Started on A; tests leave any weights in it, and update before they sample."""
    with start_server(folder, python=interpreter, log=folder.parent / "server.log") as made:
        yield made
