"""What goes to vLLM and comes back: requests, how they are sent, and replies as answers.

Axis letters: P positions of a prompt, L layers that route, K experts per token.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..config import ModelConfig
from ..errors import CapabilityError, EngineError
from .engine import Answer, Finish, Sampling

FINISH: dict[str, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}
Request = tuple[list[int], dict[str, Any]]  # prompt, sampling parameters by vLLM's names
PLAIN = {"temperature": 1.0, "max_tokens": 1, "seed": 0, "logprobs": 0, "ignore_eos": True, "detokenize": False}


class Link(Protocol):
    """How vLLM is reached. Errors of any kind come as EngineError."""

    url: str  # or what stands for it in messages

    def ask(self, requests: Sequence[Request], done: Callable[[int, dict[str, Any]], None]) -> None:
        """Hand each reply, as the token endpoint shapes it, to `done(number of the request, reply)`, in order. After an
        error no more is asked, what was on its way is still handed over, and then it is raised."""

    def control(self, what: str, **body: Any) -> dict[str, Any]:
        """pause(mode), resume, init(init_info), start, update(update_info), finish(weight_version), reset, version,
        paused."""
        ...

    def close(self) -> None:
        """Let go."""


def parameters(sampling: Sampling, key: int) -> dict[str, Any]:
    """Of one answer, by vLLM's names. Raises CapabilityError: what vLLM does not draw from as we define it."""
    if sampling.stop_sequences:
        raise CapabilityError("engine 'vllm' stops at token ids; give stop_ids instead of stop_sequences")
    if 0 < sampling.temperature < 0.01:
        raise CapabilityError(
            f"engine 'vllm' raises temperature={sampling.temperature} to 0.01; take 0, or 0.01 or more"
        )
    return {
        **PLAIN, "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens, "seed": key >> 1, "stop_token_ids": list(sampling.stop_ids),
    }  # fmt: skip


def routed(found: str | np.ndarray, rows: int, config: ModelConfig) -> Tensor:
    """[rows, L, K] int16: the experts that vLLM says it chose.

    Over HTTP they are an .npy in base64, in process an array: uint8, uint16 or int32, [rows, layers, K], with the
    layers that do not route, whose numbers mean nothing.

    Raises EngineError: another shape, or experts that the model does not have.
    """
    packed = np.load(io.BytesIO(base64.b64decode(found)), allow_pickle=False) if isinstance(found, str) else found
    if packed.shape != (rows, config.layers, config.top_k):
        want = f"{rows} tokens were read, by {config.layers} layers and top_k={config.top_k}"
        raise EngineError(f"vLLM gave routes of shape {packed.shape} where {want}")
    chosen = torch.from_numpy(packed[:, list(config.moe_layers)].astype(np.int64))
    if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < config.experts:
        raise EngineError(f"vLLM chose expert {int(chosen.max())} of a model of {config.experts}")
    return chosen.to(torch.int16)


def parse(
    reply: Mapping[str, Any], prompt: Sequence[int], initial: int, config: ModelConfig | None = None,
    routes: bool = False,
) -> tuple[Answer, Tensor | None]:  # fmt: skip
    """An answer from a reply of the token endpoint, and the experts [P, L, K] of its prompt.

    Args:
        initial: stands for the weights that vLLM was started with, which have no number.
        config: of the model; None = its experts are not read.
        routes: the reply must have them, as others had.

    Raises EngineError: log-probs, weight version or routes are missing, or do not fit the tokens.
    """
    try:
        (choice,) = reply["choices"]
        ids, content = choice["token_ids"] or [], (choice["logprobs"] or {}).get("content") or []
        if [c["token_id"] for c in content] != ids:
            raise EngineError(f"vLLM sampled {len(ids)} tokens and gave log-probs of {len(content)}, or of others")
        finish, spans = choice["finish_reason"], choice["weight_versions"]
        if finish not in FINISH:
            raise EngineError(f"vLLM ended an answer with finish_reason={finish!r}")
        version, said = torch.zeros(len(ids), dtype=torch.int64), torch.zeros(len(ids), dtype=torch.bool)
        for span in spans or []:
            version[span["start"] : span["end"]] = initial if span["version"] == "default" else int(span["version"])
            said[span["start"] : span["end"]] = True
        if not said.all():
            raise EngineError(f"vLLM does not say which weights sampled each token (weight_versions={spans}); "
                              "it has to be 0.32 or newer")  # fmt: skip
        experts = before = None
        if config is not None and (found := choice.get("routed_experts")) is not None:
            whole, P = routed(found, len(prompt) + len(ids) - 1, config), len(prompt)
            before, experts = whole[:P], torch.cat((whole[P:], torch.full_like(whole[:1], -1)))
        elif routes:
            raise EngineError("vLLM gave no routed_experts with this answer, and did with others")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"vLLM's reply is not that of its token endpoint: {error!r} in {str(reply)[:200]}") from error
    logprobs = torch.tensor([c["logprob"] for c in content], dtype=torch.float32)
    return Answer(list(ids), logprobs, experts, version, FINISH[finish]), before


def parse_prompt(reply: Mapping[str, Any], ids: Sequence[int]) -> Tensor:
    """[len(ids) - 1] float32, log-probs of the tokens of a prompt after the first, at temperature 1."""
    try:
        given = [at[str(t)] if str(t) in at else at[t] for t, at in zip(ids[1:], reply["prompt_logprobs"][1:])]
        found = torch.tensor([g["logprob"] if isinstance(g, dict) else g.logprob for g in given])
    except (KeyError, TypeError) as error:
        raise EngineError(f"vLLM gave no log-probs of a prompt: {error!r} in {str(reply)[:200]}") from error
    if len(found) != len(ids) - 1:
        raise EngineError(f"vLLM gave log-probs of {len(found)} tokens of a prompt of {len(ids)}")
    return found
