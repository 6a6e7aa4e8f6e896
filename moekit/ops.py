"""The only door to kernels: every operation by name, and which form of it runs where, and why.

Four backends: "auto" picks the fastest form for the tensors at hand, "triton" insists on Triton kernels where there are
any, "torch" is the portable fast form, "reference" the plain form that the others are tested against. `explain()` says
what each operation would run and why.

Axis letters: N positions, K experts per position, R routed rows, E experts, D width, F expert width, S documents,
L their length, H query heads, G key/value heads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import BackendError, ConfigError
from .kernels import attention, cpu_choice, elementwise, mxfp8, permute, ragged, reference
from .kernels import explain as words
from .kernels import token_logprobs as logprobs
from .kernels.cpu_choice import choices
from .kernels.mxfp8 import Mode, Operands, Quantised
from .kernels.permute import Sorted, count

__all__ = [
    "GradSlot",
    "Operands",
    "Quantised",
    "Sorted",
    "backend",
    "causal_attention",
    "choices",
    "choose_experts",
    "count",
    "embedding",
    "expert_ffn",
    "explain",
    "moe_ffn",
    "operands",
    "quantise",
    "replay_choices",
    "rms_norm",
    "rope",
    "rows_by_address",
    "set_backend",
    "sort_rows",
    "swiglu",
    "token_logprobs",
]

Backend = Literal["auto", "triton", "torch", "reference"]
_backend: Backend = "auto"
_Operation = TypeVar("_Operation", bound=Callable[..., Any])


@dataclass
class GradSlot:
    """Where a stacked expert weight keeps its gradient; set as the parameter's `grad_slot` by the learner.

    The backward of `moe_ffn` writes into `view` (overwriting while not `filled`, adding afterwards), marks it filled,
    and gives autograd no gradient for that weight. Full-size gradients are then written once, in the learner's dtype.
    """

    view: Tensor  # the weight's shape; float32 or float64
    filled: bool = False


def backend() -> Backend:
    """The backend in force."""
    return _backend


def set_backend(name: Backend) -> Backend:
    """Choose the backend for this process; returns the one that was in force, to put it back."""
    global _backend
    if name not in ("auto", "triton", "torch", "reference"):
        raise BackendError(f"backend {name!r} does not exist; choose 'auto', 'triton', 'torch' or 'reference'")
    if name == "triton" and find_spec("triton") is None:
        raise BackendError("backend 'triton': triton is not installed; install it, or choose 'auto'")
    if name == "triton" and not (torch.cuda.is_available() or _interpreted()):
        raise BackendError("backend 'triton' needs a CUDA device, or TRITON_INTERPRET=1 for its interpreter, or 'auto'")
    before, _backend = _backend, name
    return before


def _plain() -> bool:
    return _backend == "reference"


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _triton(device: torch.device, dtype: torch.dtype) -> tuple[bool, str]:
    """Whether operations run in Triton here, and why; no device read, and triton is not imported."""
    if _backend in ("torch", "reference"):
        return False, f"set_backend({_backend!r})"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False, f"Triton multiplies float32, bfloat16 and float16, not {dtype}"
    if _backend == "triton" and _interpreted():
        return True, "set_backend('triton') in Triton's interpreter: for tests, slow"
    if device.type != "cuda":
        return False, f"Triton needs CUDA, not {device.type}"
    if find_spec("triton") is None:
        return False, "triton is not installed"
    if (found := torch.cuda.get_device_capability(device)) < (8, 0):
        return False, f"Triton kernels are compiled for compute capability 8.0 or newer, this is {found[0]}.{found[1]}"
    return True, "CUDA: device offsets, no host read"


def _runs_triton(name: str, x: Tensor, limit: str = "") -> bool:
    """Whether this call runs in Triton; `limit` = why it cannot. BackendError where "triton" insists on what cannot."""
    kind = x.dtype if x.is_floating_point() else torch.float32  # kernels that move integers or bytes take all
    use, why = (False, limit) if limit else _triton(x.device, kind)
    if _backend == "triton" and not use:
        raise BackendError(f"backend 'triton', {name}: {why}; choose 'auto' to run what fits")
    return use


def _there(operation: _Operation) -> _Operation:
    """`operation` with its first tensor's device as the current one, which is where Triton launches."""

    @wraps(operation)
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device_of(x):
            return operation(x, *args, **kwargs)

    return run  # type: ignore[return-value]


def _ffn(x: Tensor, weights: tuple[Tensor, Tensor]) -> Any:
    """The module that holds the expert feed-forward for these tensors: `triton_ffn`, `cpu_choice` or `ragged`."""
    kinds = {x.dtype, *(w.dtype for w in weights)}
    if _runs_triton("experts", x, "" if len(kinds) == 1 else f"dtypes differ: {kinds}"):
        from .kernels import triton_ffn

        return triton_ffn
    return cpu_choice if _backend == "auto" and x.device.type == "cpu" and len(kinds) == 1 else ragged


def _mxfp8(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """The form of MXFP8 matmuls here (reference, torch, triton or refused); how it multiplies, and why."""
    use, why = _triton(device, dtype)
    found = torch.cuda.get_device_capability(device) if use and device.type == "cuda" else None
    if found and found < (8, 9):
        use, why = False, f"compute capability {found[0]}.{found[1]} has no E4M3, 8.9 has"
    if _backend == "triton" and not use:
        return "refused", why
    if found and use:
        why = f"compute capability {found[0]}.{found[1]}"
    why = "set_backend('reference')" if _plain() else why
    unit = use and found is not None and found >= (10, 0)
    how = "block-scaled dot on the matrix unit" if unit else "exact emulation, codes are read back"
    return "reference" if _plain() else "triton" if use else "torch", f"{how} ({why})"


def _mxfp8_form(x: Tensor) -> Any:
    """The module that holds it; None = the plain one in `reference`."""
    form, why = _mxfp8(x.device, x.dtype)
    if form == "refused":
        raise BackendError(f"backend 'triton', mxfp8: {why}; choose 'auto' to run what fits")
    return None if form == "reference" else mxfp8.forms(form == "triton")


def explain(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, length: int = words.SHORT
) -> dict[str, str]:
    """For each operation, what would run on this device and dtype (documents of `length` positions), and why."""
    place = torch.device(device)
    wide = f"forward and dgrad in MXFP8, wgrad in {dtype} from values that were not quantised"
    mx = f"{': '.join(_mxfp8(place, dtype))}; {wide}"
    return words.explain(_backend, place, dtype, length, _triton(place, dtype), _triton(place, torch.float32), mx)


def replay_choices(recorded: dict[str, Any]) -> None:
    """Take the kernel choices of another run, from its `choices()`, instead of measuring. BackendError: cannot here."""
    try:
        cpu_choice.replay_choices(recorded)
    except ValueError as e:
        raise BackendError(f"recorded kernel choices: {e}; start without them (not bitwise), or on that machine") from e


@_there
def quantise(x: Tensor, mode: Mode = "ceil") -> Quantised:
    """To MXFP8 along the last axis, a multiple of 32; `kernels/mxfp8.py` has the format. Cost: x is read once.

    >>> quantise(torch.full((1, 32), 250.0)).dequantise()[0, 0].item()
    256.0
    """
    return (_mxfp8_form(x) or mxfp8).quantise(x, mode)


@_there
def operands(weight: Tensor, backward: bool = True) -> Operands:
    """A stack of expert weights [E, M, K] in MXFP8 along K and, for a backward, along M too. Cost: read once."""
    return Operands.of(weight, backward, form=_mxfp8_form(weight) or mxfp8)


def _mx_operands(x: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Operands, Operands] | None:
    """The weights' MXFP8 copies, where they have them (`mx_cache`, set by `moekit.learner.precision`)."""
    high, low = getattr(gate_up, "mx_cache", None), getattr(down, "mx_cache", None)
    if high is None and low is None:
        return None
    if high is None or low is None:
        raise ConfigError("only one of a layer's two expert weights has an mxfp8 copy; make both with ExpertCaches")
    found: tuple[Operands, Operands] = high.current(), low.current()
    backward = torch.is_grad_enabled() and any(t.requires_grad for t in (x, gate_up, down))
    if backward and any(o.transposed is None for o in found):
        raise ConfigError("these mxfp8 copies are forward-only: run under no_grad, or make them with backward")
    return found


@_there
def choose_experts(logits_NE: Tensor, score_NE: Tensor, top_k: int, gate: str, bias_E: Tensor | None = None) -> Tensor:
    """The K experts of largest score + bias of each position, best first: [N, K] int64, distinct.

    Args:
        logits_NE, score_NE: the router's. The fused form ranks logits, or with a bias scores that it makes itself:
            scores within a rounding error of each other may change places.
        gate: "softmax", "sigmoid" or "topk_softmax".
        bias_E: [E] float32, for the choice alone.

    Gradients: none. Cost: one read of [N, E]. Of equal scores Triton takes the lowest index; torch.topk promises none.
    """
    shape = f"the fused choice takes 16 of 1024 experts at most, not {top_k} of {logits_NE.shape[1]}"
    if _runs_triton("choose_experts", logits_NE, shape if top_k > 16 or logits_NE.shape[1] > 1024 else ""):
        from .kernels.router_topk import choose

        return choose(logits_NE, top_k, gate=gate, bias_E=bias_E)[0]
    return (score_NE if bias_E is None else score_NE + bias_E).topk(top_k, -1).indices


@_there
def sort_rows(expert_NK: Tensor, experts: int) -> Sorted:
    """Group all (position, expert) pairs by expert, stably: `kernels.permute.sort_rows`; Triton's equals it in bits."""
    if _runs_triton("sort_rows", expert_NK):
        from .kernels.permute_triton import plan_rows

        return plan_rows(expert_NK, experts)[0]
    return permute.sort_rows(expert_NK, experts)


@_there
def token_logprobs(
    hidden_MD: Tensor, head_VD: Tensor, label_M: Tensor, *, temperature: float, chunk_bytes: int
) -> Tensor:
    """Log-probability of each label: `moekit.objectives.logprobs.token_logprobs` says more."""
    if _plain():
        return reference.token_logprobs(hidden_MD, head_VD, label_M, temperature)
    form, kinds = logprobs.token_logprobs, {hidden_MD.dtype, head_VD.dtype}
    fits = kinds in ({torch.float32}, {torch.bfloat16})
    limit = "" if fits else f"fused log-probs take one dtype, float32 or bfloat16, not {kinds}"
    if _runs_triton("token_logprobs", hidden_MD, limit):
        from .kernels.token_logprobs_triton import token_logprobs as fused

        form = lambda *args, **options: fused(*args, **options)[0]
    return form(hidden_MD, head_VD, label_M, temperature=temperature, chunk_bytes=chunk_bytes)


def rows_by_address(device: torch.device | str) -> Any:
    """`kernels.rowwise`, whose `put` and `get` reach other ranks' memory; BackendError where Triton does not run."""
    use, why = _triton(torch.device(device), torch.float32)
    if not use:
        raise BackendError(f"rows by address: {why}; use transport='padded'")
    from .kernels import rowwise

    return rowwise


@_there
def moe_ffn(x_ND: Tensor, rows: Sorted, gate_NK: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor) -> Tensor:
    r"""Routed experts: gather rows, SwiGLU feed-forward per expert, weighted sum back to positions.

    y_n = sum_k gate_nk * down_e @ (silu(g) * u),  (g, u) = gate_up_e @ x_n,  e = expert_nk

    Args:
        x_ND: [N, D]; N may be 0.
        rows: `sort_rows(expert_NK, E)`.
        gate_NK: [N, K], any float dtype.
        gate_up_E2FD: [E, 2F, D], gate first.
        down_EDF: [E, D, F].

    Gradients: to all four; an expert without rows gets exactly zero. A weight with a `grad_slot` gets its gradient
    there and None from autograd (the reference form leaves slots alone and gives autograd all gradients).
    d gate_nk = <dy_n @ down_e, silu(g) * u>, so no expert output is kept.

    Cost: 6*R*D*F multiply-adds forward, twice that backward; keeps the pre-activations [R, 2F]; one host read of E
    offsets (none in Triton). The gate multiplies the activation, not the output: F numbers a row instead of D.
    """
    experts, two_f, width = gate_up_E2FD.shape
    if x_ND.shape[1] != width or down_EDF.shape != (experts, width, two_f // 2) or rows.offset_E.shape[0] != experts:
        raise ConfigError(
            f"moe_ffn: x {tuple(x_ND.shape)}, gate_up {tuple(gate_up_E2FD.shape)}, down {tuple(down_EDF.shape)} and "
            f"{rows.offset_E.shape[0]} experts in the rows do not fit [N, D], [E, 2F, D], [E, D, F]"
        )
    slots = (getattr(gate_up_E2FD, "grad_slot", None), getattr(down_EDF, "grad_slot", None))
    if (mx := _mx_operands(x_ND, gate_up_E2FD, down_EDF)) is not None:
        if (form := _mxfp8_form(x_ND)) is None:
            return reference.mxfp8_ffn(x_ND, rows, gate_NK, gate_up_E2FD, down_EDF, *mx)
        return mxfp8.moe_ffn(x_ND, rows, gate_NK, gate_up_E2FD, down_EDF, *mx, slots, form)
    if _plain():
        return reference.moe_ffn(x_ND, rows, gate_NK, gate_up_E2FD, down_EDF)
    return _ffn(x_ND, (gate_up_E2FD, down_EDF)).moe_ffn(x_ND, rows, gate_NK, gate_up_E2FD, down_EDF, slots)


@_there
def expert_ffn(
    x_RD: Tensor, offset_E: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, order_R: Tensor | None = None
) -> Tensor:
    r"""SwiGLU feed-forward of rows that have come to their expert; no gates.

    y_r = down_e @ (silu(g) * u),  (g, u) = gate_up_e @ x_r,  e = the first with r < offset_e

    Args:
        x_RD: [R, D], rows in expert order. R is static: rows at and past offset_E[-1] are room, and may hold anything.
        offset_E: [E] int64, where the rows of each expert end.
        gate_up_E2FD: [E, 2F, D], gate first.
        down_EDF: [E, D, F].
        order_R: the rows do not stand in expert order: the r-th in that order is x[order_R[r]] ([offset_E[-1]] int64).

    Returns:
        [R, D], every result where its row was; zero in the room.

    Gradients: to x (zero in the room) and to both weights, with `grad_slot` as in `moe_ffn`. Cost: as `moe_ffn`; the
    host read of E offsets is the only one between router and combine (none in Triton, which trusts offset_E and
    order_R).
    """
    experts, two_f, width = gate_up_E2FD.shape
    fits = x_RD.shape[1] == width and down_EDF.shape == (experts, width, two_f // 2) and offset_E.shape == (experts,)
    if not fits:
        raise ConfigError(
            f"expert_ffn: x {tuple(x_RD.shape)}, gate_up {tuple(gate_up_E2FD.shape)}, down {tuple(down_EDF.shape)} and "
            f"offsets {tuple(offset_E.shape)} do not fit [R, D], [E, 2F, D], [E, D, F], [E]"
        )
    slots = (getattr(gate_up_E2FD, "grad_slot", None), getattr(down_EDF, "grad_slot", None))
    mx = _mx_operands(x_RD, gate_up_E2FD, down_EDF)
    form: Any = None if mx is not None or _plain() else _ffn(x_RD, (gate_up_E2FD, down_EDF))
    if hasattr(form, "expert_ffn"):  # Triton
        return form.expert_ffn(x_RD, offset_E, gate_up_E2FD, down_EDF, order_R, slots)
    scaled = None if mx is None else _mxfp8_form(x_RD)  # None: reference, or no MXFP8
    if mx is not None and scaled is not mxfp8 and scaled is not None:  # Triton: no host read
        return mxfp8.expert_ffn(x_RD, offset_E, gate_up_E2FD, down_EDF, *mx, slots, order_R, scaled)
    total = int(offset_E[-1])
    if total > x_RD.shape[0] or (order_R is not None and order_R.shape[0] != total):
        raise ConfigError(f"expert_ffn: {total} rows of experts, but x has {x_RD.shape[0]} and order_R={order_R}")
    row_R = torch.arange(total, device=x_RD.device) if order_R is None else order_R
    rows = Sorted(row_R, row_R, offset_E)
    if mx is not None and scaled is mxfp8:
        return mxfp8.expert_ffn(x_RD, offset_E, gate_up_E2FD, down_EDF, *mx, slots, order_R, scaled)
    if _plain():
        plain, one = reference.mxfp8_ffn if mx else reference.moe_ffn, x_RD.new_ones(x_RD.shape[0], 1)
        return plain(x_RD, rows, one, gate_up_E2FD, down_EDF, *(mx or ()))
    return form.moe_ffn(x_RD, rows, None, gate_up_E2FD, down_EDF, slots)


def embedding(ids_N: Tensor, table_VD: Tensor) -> Tensor:
    """table[ids]; the gradient of the table adds up in float32 at least, whatever its dtype."""
    narrow = table_VD.is_cpu and table_VD.dtype.itemsize < 4 and not _plain()  # CUDA's own backward is wide
    return elementwise.NarrowEmbedding.apply(ids_N, table_VD) if narrow else F.embedding(ids_N, table_VD)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, the mean in float32 at least."""
    return reference.rms_norm(x, weight, eps) if _plain() else elementwise.RMSNorm.apply(x, weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for [..., 2F], gate half first.

    >>> round(swiglu(torch.tensor([1.0, 2.0])).item(), 6)
    1.462117
    """
    return reference.swiglu(gate_up) if _plain() else elementwise.SwiGLU.apply(gate_up)


def rope(q_NHd: Tensor, k_NHd: Tensor, cos_Nd: Tensor, sin_Nd: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of queries and keys; cos and sin are [N, d/2], pairs are (i, i + d/2)."""
    form = reference.rope if _plain() else elementwise.Rope.apply
    return form(q_NHd, cos_Nd, sin_Nd), form(k_NHd, cos_Nd, sin_Nd)


def causal_attention(q_SLHd: Tensor, k_SLGd: Tensor, v_SLGd: Tensor) -> Tensor:
    """softmax(q k / sqrt(d)) v with position l seeing 0..l of its own document; [S, L, H, d].

    H is a multiple of G, and consecutive query heads share a key/value head.
    """
    if _plain():
        return reference.causal_attention(q_SLHd, k_SLGd, v_SLGd)
    if words.short_attention(q_SLHd.device, q_SLHd.dtype, q_SLHd.shape[1]):
        return attention.ShortCausal.apply(q_SLHd, k_SLGd, v_SLGd)
    q, k, v = (t.transpose(1, 2) for t in (q_SLHd, k_SLGd, v_SLGd))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)
