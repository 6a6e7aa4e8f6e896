"""The value head: a language model's backbone with one output, for a critic or a reward model."""

from dataclasses import replace

import torch

from .moe import Linear
from .transformer import Transformer


def to_value_head(model: Transformer) -> Transformer:
    """Put a value head in place of a language model's head; in place, returns `model`.

    The head starts at zero, so every value is 0 before the first step, and the backbone is kept. A tied embedding is
    freed where only the head used it.
    """
    if model.config.value_head:
        return model
    last = model.final_norm is not None
    weight = next(model.parameters())
    if last and model.embed is not None and 0 not in model.blocks:
        model.embed = None  # type: ignore[assignment]
    model.config = replace(model.config, value_head=True, tied_head=False)
    if last:
        model.head = Linear(model.config.width, 1, weight.dtype, weight.device)
        torch.nn.init.zeros_(model.head.weight)
    return model
