"""The router: scores each position against each expert, chooses K, and says with which gate each counts.

Axis letters: N positions, E experts, K experts per position, D width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..config import ModelConfig
from ..errors import ConfigError


@dataclass(frozen=True)
class Route:
    """What the router decided for N positions of one layer."""

    logits_NE: Tensor  # float32 (float64 in a float64 model), differentiable
    probs_NE: Tensor  # scores normalised to sum 1 over E, what router losses use
    expert_NK: Tensor  # int64, distinct within a row, best first
    gate_NK: Tensor  # dtype of the logits, differentiable


class Router(nn.Module):
    """Linear scores, then one of three gates over the chosen experts C(n), the K largest scores + selection bias.

    softmax:       p = softmax(z),           gate_k = p_k
    sigmoid:       s = sigmoid(z),           gate_k = s_k
    topk_softmax:  p = softmax(z),           gate_k = exp(z_k) / sum_{j in C} exp(z_j)

    With `normalize_gates` the K gates are divided by their sum. The selection bias (Wang et al. 2024,
    arXiv:2408.15664) moves the choice and never the gate; it stays float32 whatever dtype the model is cast to, because
    bfloat16 rounds away the differences that decide. Scores are computed in float32 at least, also in a bfloat16
    model: near-ties decide where a position goes.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device=None):
        super().__init__()
        self.top_k, self.gate, self.normalize = config.top_k, config.gate, config.normalize_gates
        self.weight = nn.Parameter(torch.empty(config.experts, config.width, dtype=dtype, device=device))
        bias = torch.zeros(config.experts, dtype=torch.float32, device=device) if config.selection_bias else None
        self.register_buffer("selection_bias", bias)

    def _apply(self, fn, recurse=True):
        before = self.selection_bias
        super()._apply(fn, recurse)
        if before is not None:  # moved, never cast: a round trip through bfloat16 would lose it
            after = self.selection_bias
            self.selection_bias = after.float() if before.is_meta else before.to(after.device)
        return self

    def forward(self, x_ND: Tensor, replay_NK: Tensor | None = None, whole: bool = False) -> Route:
        """Scores, choices and gates; with `replay_NK` the choices are given and only the gates are computed.

        A position whose replayed choices are -1 chooses for itself; `whole` = there is none of that kind.
        """
        wide = torch.float64 if x_ND.dtype == torch.float64 else torch.float32
        logits_NE = F.linear(x_ND.to(wide), self.weight.to(wide))
        if self.gate == "sigmoid":
            score_NE = torch.sigmoid(logits_NE)
            probs_NE = score_NE / score_NE.sum(-1, keepdim=True).clamp(min=torch.finfo(wide).tiny)
        else:
            score_NE = probs_NE = logits_NE.softmax(-1)
        if replay_NK is not None and replay_NK.shape != (want := (x_ND.shape[0], self.top_k)):
            raise ConfigError(
                f"replayed routes have shape {tuple(replay_NK.shape)}, this layer needs {want}: one row per position, "
                "in the batch's flat order"
            )
        if replay_NK is not None and whole:
            expert_NK = replay_NK
        else:
            with torch.no_grad():  # adding the bias to logits and to scores would choose differently: it is for scores
                expert_NK = ops.choose_experts(logits_NE, score_NE, self.top_k, self.gate, self.selection_bias)
                if replay_NK is not None:
                    expert_NK = torch.where(replay_NK[:, :1] < 0, expert_NK, replay_NK)
        if self.gate == "topk_softmax":
            gate_NK = logits_NE.gather(-1, expert_NK).softmax(-1)
        else:
            gate_NK = score_NE.gather(-1, expert_NK)
        if self.normalize:
            gate_NK = gate_NK / gate_NK.sum(-1, keepdim=True).clamp(min=torch.finfo(wide).tiny)
        return Route(logits_NE, probs_NE, expert_NK, gate_NK)
