"""Which tensor of a Hugging Face folder is which part of which of our parameters.

Every tensor of the three families is one contiguous run of one of our parameters seen flat, so a checkpoint is a list
of pieces (Hugging Face name, shape, our parameter, start of the run) and nothing is ever transposed or computed:

    embed.weight [V, D]                       model.embed_tokens.weight
    layers.i.attention.qkv.weight             q_proj, k_proj, v_proj: rows of it, in this order
    layers.i.moe.gate_up [E, 2F, D]           per expert: gate_proj, up_proj (Mixtral: w1, w3); fused: gate_up_proj
    layers.i.moe.down [E, D, F]               per expert: down_proj (Mixtral: w2);              fused: down_proj

Axes: V vocabulary, D model width, E experts, F expert width."""

import math
from dataclasses import dataclass
from typing import Any, Literal

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
    c, out, mixtral = config, [], family.name == "mixtral"
    V, D, F = c.vocab, c.width, c.expert_width

    def put(parameter: str, *parts: tuple[Any, ...]) -> None:
        """`parameter` seen flat, as parts that follow each other: (name in the folder, *shape)."""
        start = 0
        for name, *shape in parts:
            out.append(Piece(name, tuple(shape), parameter, start))
            start = out[-1].stop

    heads, kv_heads = c.heads * c.head_dim, c.kv_heads * c.head_dim
    norm_q, norm_k = (heads, kv_heads) if c.qk_norm == "full" else (c.head_dim, c.head_dim)
    put("embed.weight", ("model.embed_tokens.weight", V, D))
    for i in range(c.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        attention = f"{theirs}.self_attn"
        put(f"{ours}.attention_norm.weight", (f"{theirs}.input_layernorm.weight", D))
        qkv = {"q": heads, "k": kv_heads, "v": kv_heads}
        put(f"{ours}.attention.qkv.weight", *((f"{attention}.{n}_proj.weight", rows, D) for n, rows in qkv.items()))
        if c.qk_norm != "none":
            put(f"{ours}.attention.q_norm.weight", (f"{attention}.q_norm.weight", norm_q))
            put(f"{ours}.attention.k_norm.weight", (f"{attention}.k_norm.weight", norm_k))
        put(f"{ours}.attention.out.weight", (f"{attention}.o_proj.weight", D, heads))
        put(f"{ours}.ffn_norm.weight", (f"{theirs}.post_attention_layernorm.weight", D))
        if i in c.dense_layers:
            mlp = f"{theirs}.mlp"
            put(f"{ours}.dense.gate_up.weight", *((f"{mlp}.{n}_proj.weight", c.dense_width, D) for n in ("gate", "up")))
            put(f"{ours}.dense.down.weight", (f"{mlp}.down_proj.weight", D, c.dense_width))
            continue
        # Mixtral's files call the block block_sparse_moe, its fused tensors exist only under Transformers 5's mlp
        block = f"{theirs}.{'block_sparse_moe' if mixtral and naming == 'per_expert' else 'mlp'}"
        gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        put(f"{ours}.moe.router.weight", (f"{block}.gate.weight", c.experts, D))
        gate_up_parts = [(f"{block}.experts.{e}.{n}.weight", F, D) for e in range(c.experts) for n in (gate, up)]
        down_parts = [(f"{block}.experts.{e}.{down}.weight", D, F) for e in range(c.experts)]
        if naming == "fused":
            gate_up_parts = [(f"{block}.experts.gate_up_proj", c.experts, 2 * F, D)]
            down_parts = [(f"{block}.experts.down_proj", c.experts, D, F)]
        put(f"{ours}.moe.gate_up", *gate_up_parts)
        put(f"{ours}.moe.down", *down_parts)
    put("final_norm.weight", ("model.norm.weight", D))
    if not c.tied_head:
        put("head.weight", ("lm_head.weight", V, D))
    return out


def spellings(name: str, family: Family) -> tuple[str, ...]:
    """The names under which a folder may hold the tensor `name`: Mixtral's block has an old and a new name."""
    if family.name != "mixtral":
        return (name,)
    return (name, name.replace(".block_sparse_moe.", ".mlp."), name.replace(".mlp.", ".block_sparse_moe."))
