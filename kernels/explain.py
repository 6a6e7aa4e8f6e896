"""What would run, and why, in words: the text behind `moekit.ops.explain`."""

from __future__ import annotations

import torch

from . import cpu_choice, ragged, recycle

SHORT = 512  # positions; longer documents take flash attention on CPU too


def short_attention(device: torch.device, dtype: torch.dtype, length: int) -> bool:
    """Whether documents are short enough for attention as matrix products: bfloat16 on CPU, up to 512 positions."""
    return device.type == "cpu" and dtype == torch.bfloat16 and length <= SHORT


def explain(
    backend: str, device: torch.device, dtype: torch.dtype, length: int, triton: tuple[bool, str], mxfp8: str
) -> dict[str, str]:
    """By operation; `triton` = whether Triton runs here and why, `mxfp8` = the text about that."""
    fused = {
        "moe_ffn": "persistent grouped GEMM, gather and scatter fused",
        "expert_ffn": "persistent grouped GEMM, gather and scatter fused",
        "choose_experts": "scores and choice in one read, up to 16 of 1024 experts in float32",
        "sort_rows": "rows counted in blocks, no sort",
        "token_logprobs": "logits stay in registers, float32 or bfloat16",
        "rows_by_address": "put and get through peer pointers",
    }
    names = ("rms_norm", "swiglu", "rope", "causal_attention")
    if backend == "reference":
        plain = dict.fromkeys((*fused, *names), "reference: set_backend('reference')")
        return plain | {"rows_by_address": "refused: set_backend('reference')", "mxfp8": mxfp8}
    use, why = triton
    if use:
        kernels = {name: f"triton: {what} ({why})" for name, what in fused.items()}
    elif backend == "triton":
        kernels = dict.fromkeys(fused, f"refused: {why}")
    else:
        unit = ragged.padding_unit(device, dtype)
        padded = f", row counts padded to {unit} because every new shape is compiled" if unit > 1 else ""
        reads = ", reads row counts on the host: the GPU waits there" if device.type == "cuda" else ""
        experts = f"ragged: one matmul per expert in scratch, backward written by hand{padded}{reads} ({why})"
        if backend == "auto" and device.type == "cpu":
            experts = f"{cpu_choice.words(dtype)}; {recycle.words()}; torch is {experts}"
        kernels = dict.fromkeys(fused, experts) | {
            "choose_experts": f"torch: topk ({why})",
            "sort_rows": f"torch: stable sort ({why})",
            "token_logprobs": f"torch: a chunk of logits at a time, backward written by hand ({why})",
            "rows_by_address": f"refused: {why}; use transport='padded'",
        }
    written = "torch: backward written by hand, because torch composes this from many passes over memory"
    flash = f"flash: scaled_dot_product_attention ({dtype}, {length} positions)"
    products = f"products: flash is slow on CPU in bfloat16 up to {SHORT} positions"
    attention = products if short_attention(device, dtype, length) else flash
    return kernels | dict.fromkeys(names[:3], written) | {"causal_attention": attention, "mxfp8": mxfp8}
