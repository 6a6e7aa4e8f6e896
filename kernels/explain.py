"""What would run, and why, in words: the text behind `moekit.ops.explain`."""

import torch

from . import cpu_choice, ragged, recycle

SHORT = 512  # positions; longer documents take flash attention on CPU too


def short_attention(device: torch.device, dtype: torch.dtype, length: int) -> bool:
    """Whether documents are short enough for attention as matrix products: bfloat16 on CPU, up to 512 positions."""
    return device.type == "cpu" and dtype == torch.bfloat16 and length <= SHORT


def explain(
    backend: str, device: torch.device, dtype: torch.dtype, length: int,
    triton: tuple[bool, str], moves: tuple[bool, str], mxfp8: str,
) -> dict[str, str]:  # fmt: skip
    """By operation; `triton` = whether Triton multiplies here and why, `moves` = moves rows, `mxfp8` = its text."""
    gemm = "persistent grouped GEMM, gather and scatter fused"
    fused = {
        "moe_ffn": gemm,
        "expert_ffn": gemm,
        "choose_experts": "scores and choice in one read, up to 16 of 1024 experts, torch.topk for more",
        "sort_rows": "rows counted in blocks, no sort",
        "token_logprobs": "logits stay in registers",
        "rows_by_address": "put and get through peer pointers",
    }
    names = ("rms_norm", "swiglu", "rope", "causal_attention")
    if backend == "reference":
        plain = dict.fromkeys((*fused, *names), "reference: set_backend('reference')")
        return plain | {"rows_by_address": "refused: set_backend('reference')", "mxfp8": mxfp8}
    unit = ragged.padding_unit(device, dtype)
    padded = f", row counts padded to {unit} because every new shape is compiled" if unit > 1 else ""
    reads = ", reads row counts on the host: the GPU waits there" if device.type == "cuda" else ""
    experts = f"ragged: one matmul per expert in scratch, backward written by hand{padded}{reads}"
    forms = dict.fromkeys(fused, experts) | {
        "choose_experts": "torch: topk",
        "sort_rows": "torch: stable sort",
        "token_logprobs": "torch: a chunk of logits at a time, backward written by hand",
        "rows_by_address": "refused, use transport='padded'",
    }
    because = dict.fromkeys(fused, triton) | {"sort_rows": moves, "rows_by_address": moves}
    if triton[0] and dtype == torch.float16:
        because["token_logprobs"] = (False, "the fused form takes float32 or bfloat16")
    kernels = {}
    for name, (use, why) in because.items():
        kernels[name] = f"triton: {fused[name]} ({why})" if use else f"{forms[name]} ({why})"
        if not use and backend == "triton":
            kernels[name] = f"refused: {why}"
    if not triton[0] and backend == "auto" and device.type == "cpu":
        fast = f"{cpu_choice.words(dtype)}; {recycle.words()}; torch is {kernels['moe_ffn']}"
        kernels |= {"moe_ffn": fast, "expert_ffn": fast}
    written = "torch: backward written by hand, because torch composes this from many passes over memory"
    flash = f"flash: scaled_dot_product_attention ({dtype}, {length} positions)"
    products = f"products: flash is slow on CPU in bfloat16 up to {SHORT} positions"
    attention = products if short_attention(device, dtype, length) else flash
    return kernels | dict.fromkeys(names[:3], written) | {"causal_attention": attention, "mxfp8": mxfp8}
