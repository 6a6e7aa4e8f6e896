"""Run by a test with the interpreter that has vLLM: python in_process.py FOLDER; the last line is JSON."""

import json
import sys
from dataclasses import replace

import torch
from vllm import LLM

from moekit.errors import EngineError
from moekit.model.presets import preset
from moekit.model.transformer import Transformer
from moekit.rollout.embedded import EmbeddedEngine
from moekit.rollout.engine import Sampling
from moekit.rollout.vllm_engine import VLLMEngine
from moekit.rollout.vllm_http import LocalLink

torch.set_num_threads(1)
SHAPE = replace(preset("demo"), vocab=512, width=128, heads=4, kv_heads=4, head_dim=32, init_std=0.12)


def gap(model, rollouts, sampling):
    """The largest |engine - learner| of log-probs."""
    own = EmbeddedEngine.of(model, lambda: 0)
    again = own.score([r.prompt for r in rollouts], [[a.ids for a in r.answers] for r in rollouts], sampling)
    pairs = [(a, b) for x, y in zip(rollouts, again) for a, b in zip(x.answers, y.answers)]
    return max(float((a.logprobs - b.logprobs).abs().max()) for a, b in pairs)


def main(folder: str) -> None:
    """B, then A again."""
    A, B = Transformer(SHAPE, seed=0), Transformer(SHAPE, seed=1)
    llm = LLM(
        folder, dtype="float32", enforce_eager=True, max_model_len=512, seed=0, logprobs_mode="processed_logprobs",
        max_logprobs=-1, distributed_executor_backend="uni", skip_tokenizer_init=True, generation_config="vllm",
        weight_transfer_config={"backend": "moekit_files"}, enable_chunked_prefill=False,
    )  # fmt: skip
    engine, sampling = VLLMEngine(LocalLink(llm), SHAPE), Sampling(n=2, max_new_tokens=8, temperature=0.7)
    told = {"gaps": [], "others": [], "versions": [], "probe": [], "routes": engine.capabilities.routes}
    scheduler = llm.llm_engine.vllm_config.scheduler_config
    scheduler.enable_chunked_prefill = True
    try:
        engine.update_weights(B, 1)
    except EngineError as error:
        told["splits"] = str(error)
    scheduler.enable_chunked_prefill = False
    for version, model, other in ((1, B, A), (2, A, B)):
        engine.update_weights(model, version)
        found = engine.generate([[5, 6, 7], [9] * 200], sampling)
        told["probe"].append(engine.gap)
        told["gaps"].append(gap(model, found, sampling))
        told["others"].append(gap(other, found, sampling))
        told["versions"].append(sorted({v for r in found for a in r.answers for v in a.version.tolist()}))
    own = engine.link.control
    engine.link.control = lambda what, **body: {"success": True} if what == "reset" else own(what, **body)
    try:
        engine.update_weights(B, 3)
    except EngineError as error:
        told["stale"] = str(error)
    engine.link.control = own
    engine.update_weights(B, 4)
    engine.close()
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
