"""Incremental decoding: the prompt once through the model, then one token per row and call, with a key/value cache.

The plain form, with the training blocks: rows have one fixed room, none joins or leaves.

Axis letters: B rows, N prompt positions seen flat, G key/value heads, T room of a row, d head width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.batch import Batch
from ..errors import ConfigError
from .attention import document_attention, rope_angles

if TYPE_CHECKING:
    from .transformer import Transformer


@dataclass
class Cache:
    """Keys and values of every layer; row b holds `length_B[b]` tokens."""

    keys: Tensor  # [layers, B, G, T, d]
    values: Tensor  # [layers, B, G, T, d]
    length_B: Tensor  # int64

    @property
    def room(self) -> int:
        """T, the most tokens that a row can hold."""
        return self.keys.shape[3]


@torch.no_grad()
def prefill(model: Transformer, prompts: list[list[int]], room: int) -> tuple[Tensor, Cache]:
    """Logits [B, V] of the token after each prompt (one token at least), and the cache to go on from.

    `room`: tokens that a row can hold, prompt included.
    """
    config, longest = model.config, max(map(len, prompts), default=0)
    if not prompts or min(map(len, prompts)) == 0:
        raise ConfigError("prefill needs at least one prompt, and at least one token in each")
    if longest > room or room > config.max_positions:
        raise ConfigError(
            f"room={room} must hold the longest prompt ({longest} tokens) and be at most "
            f"max_positions={config.max_positions}"
        )
    length_B = torch.tensor([len(p) for p in prompts])
    ids_BT = torch.tensor([p + [0] * (longest - len(p)) for p in prompts])
    batch = Batch.make(ids_BT, segment=torch.where(torch.arange(longest) < length_B[:, None], 0, -1))
    last_B = batch.flat.order_N.argsort()[torch.arange(len(prompts)) * longest + length_B - 1].to(model.device)
    flat = batch.flat.to(model.device)
    shape = (config.layers, len(prompts), config.kv_heads, room, config.head_dim)
    x_ND = F.embedding(flat.ids_N, model.embed.weight)
    cache = Cache(x_ND.new_zeros(shape), x_ND.new_zeros(shape), length_B.to(model.device))
    row_N, at_N = flat.order_N[: flat.real] // longest, flat.position_N[: flat.real]
    angles = rope_angles(flat.position_N, config, x_ND.dtype)
    for i, block in enumerate(model.layers):

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int = i) -> Tensor:
            cache.keys[layer][row_N, :, at_N] = k[: flat.real]
            cache.values[layer][row_N, :, at_N] = v[: flat.real]
            return document_attention(q, k, v, flat)

        needed = last_B if i == config.layers - 1 else None
        x_ND, _ = block(x_ND, flat, angles, attend=attend, needed_M=needed, real=flat.real)
    return F.linear(model.final_norm(x_ND), model.head_weight), cache


@torch.no_grad()
def decode(model: Transformer, token_B: Tensor, cache: Cache) -> Tensor:
    """Append one token to every row of the cache; logits [B, V] of the token after it."""
    if int(cache.length_B.max()) >= cache.room:
        raise ConfigError(f"a row of the cache is full ({cache.room} tokens); give prefill more room")
    at_B, row_B = cache.length_B, torch.arange(len(token_B), device=model.device)
    x_BD = F.embedding(token_B.to(model.device), model.embed.weight)
    angles = rope_angles(at_B, model.config, x_BD.dtype)
    stop = int(at_B.max()) + 1
    seen = (torch.arange(stop, device=model.device) <= at_B[:, None])[:, None, None]
    for i, block in enumerate(model.layers):

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int = i) -> Tensor:
            cache.keys[layer][row_B, :, at_B] = k
            cache.values[layer][row_B, :, at_B] = v
            keys, values = cache.keys[layer][:, :, :stop], cache.values[layer][:, :, :stop]
            return F.scaled_dot_product_attention(q[:, :, None], keys, values, seen, enable_gqa=True)[:, :, 0]

        x_BD, _ = block(x_BD, None, angles, attend=attend, real=len(token_B))
    cache.length_B = at_B + 1
    return F.linear(model.final_norm(x_BD), model.head_weight)
