"""Which tensor of a Hugging Face folder is which part of which of our parameters.

Every tensor of the three families is one contiguous run of one of our parameters seen flat, so a checkpoint is a list
of pieces (Hugging Face name, shape, our parameter, start of the run) and nothing is ever transposed or computed:

    embed.weight [V, D]                       model.embed_tokens.weight
    layers.i.attention.qkv.weight             q_proj, k_proj, v_proj: rows of it, in this order
    layers.i.moe.gate_up [E, 2F, D]           per expert: gate_proj, up_proj (Mixtral: w1, w3); fused: gate_up_proj
    layers.i.moe.down [E, D, F]               per expert: down_proj (Mixtral: w2);              fused: down_proj

Axes: V vocabulary, D model width, E experts, F expert width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..config import ModelConfig
from .families import Family

Naming = Literal["per_expert", "fused"]


@dataclass(frozen=True)
class Piece:
    """One tensor of a Hugging Face folder: the run [start, stop) of `parameter` seen flat."""

    name: str  # of the tensor in the folder
    shape: tuple[int, ...]
    parameter: str  # of ours
    start: int  # elements

    @property
    def stop(self) -> int:
        """End of the run in the flat parameter, exclusive."""
        return self.start + math.prod(self.shape)


def pieces(config: ModelConfig, family: Family, naming: Naming = "per_expert") -> list[Piece]:
    """All tensors of the folder, in the order of the layers; together they cover every parameter exactly once.
    Args:
        config: shape of the model.
        family: as which it is written, or was.
        naming: "per_expert": one tensor for each matrix of each expert, as released checkpoints have it; "fused": all
            experts of a layer in one tensor, as Transformers 5 holds them in memory."""
    c, out = config, []

    def split(parameter: str, width: int, *parts: tuple[str, int]) -> None:
        """`parameter` [rows, width], cut by rows into named parts."""
        start = 0
        for name, rows in parts:
            out.append(Piece(name, (rows, width), parameter, start))
            start += rows * width

    def whole(parameter: str, name: str, *shape: int) -> None:
        out.append(Piece(name, shape, parameter, 0))

    heads, kv_heads = c.heads * c.head_dim, c.kv_heads * c.head_dim
    norm_q, norm_k = (heads, kv_heads) if c.qk_norm == "full" else (c.head_dim, c.head_dim)
    whole("embed.weight", "model.embed_tokens.weight", c.vocab, c.width)
    for i in range(c.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        whole(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight", c.width)
        attention, width = f"{theirs}.self_attn", c.width
        qkv = {"q": heads, "k": kv_heads, "v": kv_heads}
        split(f"{ours}.attention.qkv.weight", width, *((f"{attention}.{n}_proj.weight", r) for n, r in qkv.items()))
        if c.qk_norm != "none":
            whole(f"{ours}.attention.q_norm.weight", f"{attention}.q_norm.weight", norm_q)
            whole(f"{ours}.attention.k_norm.weight", f"{attention}.k_norm.weight", norm_k)
        whole(f"{ours}.attention.out.weight", f"{attention}.o_proj.weight", c.width, heads)
        whole(f"{ours}.ffn_norm.weight", f"{theirs}.post_attention_layernorm.weight", c.width)
        if i in c.dense_layers:
            gate, up = (f"{theirs}.mlp.{part}_proj.weight" for part in ("gate", "up"))
            split(f"{ours}.dense.gate_up.weight", c.width, (gate, c.dense_width), (up, c.dense_width))
            whole(f"{ours}.dense.down.weight", f"{theirs}.mlp.down_proj.weight", c.width, c.dense_width)
            continue
        # Mixtral's files call the block block_sparse_moe, its fused tensors exist only under Transformers 5's mlp
        older = family.name == "mixtral" and naming == "per_expert"
        block = f"{theirs}.{'block_sparse_moe' if older else 'mlp'}"
        whole(f"{ours}.moe.router.weight", f"{block}.gate.weight", c.experts, c.width)
        if naming == "fused":
            whole(f"{ours}.moe.gate_up", f"{block}.experts.gate_up_proj", c.experts, 2 * c.expert_width, c.width)
            whole(f"{ours}.moe.down", f"{block}.experts.down_proj", c.experts, c.width, c.expert_width)
            continue
        gate, up, down = ("w1", "w3", "w2") if family.name == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        size = c.expert_width * c.width  # of one matrix of one expert
        for e in range(c.experts):
            for name, start in ((gate, 2 * e), (up, 2 * e + 1), (down, e)):
                shape = (c.width, c.expert_width) if name == down else (c.expert_width, c.width)
                parameter = f"{ours}.moe.{'down' if name == down else 'gate_up'}"
                out.append(Piece(f"{block}.experts.{e}.{name}.weight", shape, parameter, start * size))
    whole("final_norm.weight", "model.norm.weight", c.width)
    if not c.tied_head:
        whole("head.weight", "lm_head.weight", c.vocab, c.width)
    return out


def spellings(name: str, family: Family) -> tuple[str, ...]:
    """The names under which a folder may hold the tensor `name`: Mixtral's block has an old and a new name."""
    if family.name != "mixtral":
        return (name,)
    return (name, name.replace(".block_sparse_moe.", ".mlp."), name.replace(".mlp.", ".block_sparse_moe."))
