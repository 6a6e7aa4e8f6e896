"""Which form runs the experts on a CPU: C++ (`cpu_ffn`) or torch (`ragged`), by measurement, kept and replayable.

The first batch of a bucket (dtype, E, D, F, rows per expert to a power of two, threads) times both, forward and
backward, on its own tensors; torch's form is taken where it is 10 % faster, so that noise does not decide. Layers with
fewer than `SMALL` weights run in C++ unmeasured. What the C++ form does not take (float64, a machine without AVX-512 or
a compiler) runs in torch, and `explain` says why.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from . import cpu_ffn, ragged
from .permute import Sorted

FORMS = {"native": cpu_ffn, "torch": ragged}
SMALL, MARGIN, TURNS = 1 << 20, 1.1, 3
_choices: dict[str, dict[str, Any]] = {}


def choices() -> dict[str, dict[str, Any]]:
    """Shape bucket to the form that it got in this process, and seconds of each; JSON-able, for `replay_choices`."""
    return {key: dict(value) for key, value in _choices.items()}


def replay_choices(recorded: dict[str, dict[str, Any]]) -> None:
    """Take these choices instead of measuring. Raises ValueError: a form that is unknown or does not run here."""
    for key, value in recorded.items():
        if value["form"] not in FORMS:
            raise ValueError(f"choice {key!r}: there is no form {value['form']!r}, only {', '.join(FORMS)}")
        dtype = getattr(torch, key.split()[0])
        if value["form"] == "native" and not (found := cpu_ffn.fits(dtype))[0]:
            raise ValueError(f"choice {key!r} was recorded where the native form runs; {found[1]}")
    _choices.update({key: dict(value) for key, value in recorded.items()})


def bucket(x_ND: Tensor, rows: int, gate_up_E2FD: Tensor) -> str:
    """The key of a shape.

    >>> bucket(torch.empty(8, 16), 40, torch.empty(4, 12, 16))
    'float32 E4 D16 F6 rows16 threads1'
    """
    E, two_f, D = gate_up_E2FD.shape
    height = 1 << max(-(-rows // max(E, 1)) - 1, 0).bit_length()
    return f"{str(x_ND.dtype)[6:]} E{E} D{D} F{two_f // 2} rows{height} threads{torch.get_num_threads()}"


def moe_ffn(x_ND, rows: Sorted, gate_NK, gate_up_E2FD, down_EDF, slots=(None, None)) -> Tensor:
    """See `moekit.ops.moe_ffn`, and with `gate_NK=None` `moekit.ops.expert_ffn`."""
    inputs = (x_ND, rows, gate_NK, gate_up_E2FD, down_EDF)
    return FORMS[_choose(*inputs)].moe_ffn(*inputs, slots)


def _choose(x_ND, rows: Sorted, gate_NK, gate_up_E2FD, down_EDF) -> str:
    if not cpu_ffn.fits(x_ND.dtype, x_ND.shape[1], down_EDF.shape[2])[0]:
        return "torch"
    if rows.rows == 0 or gate_up_E2FD.numel() < SMALL:
        return "native"
    key = bucket(x_ND, rows.rows, gate_up_E2FD)
    if key not in _choices and (torch.is_inference_mode_enabled() or x_ND.is_inference()):
        return "native"  # no backward can be timed there
    if key not in _choices:
        spent = {name: _seconds(form, x_ND, rows, gate_NK, gate_up_E2FD, down_EDF) for name, form in FORMS.items()}
        best = "torch" if spent["torch"] * MARGIN < spent["native"] else "native"
        _choices[key] = {"form": best, "seconds": {name: round(s, 6) for name, s in spent.items()}}
    return _choices[key]["form"]


def _seconds(form: Any, *inputs: Any) -> float:
    """Of one forward and backward, the best of some; it leaves no gradient and draws no random number."""
    own = [t.detach().requires_grad_() if isinstance(t, Tensor) else t for t in inputs]
    best = float("inf")
    for _ in range(TURNS):
        start = time.perf_counter()
        with torch.enable_grad():
            y = form.moe_ffn(*own)
        torch.autograd.grad(y, [t for t in own if isinstance(t, Tensor)], y.detach())
        best = min(best, time.perf_counter() - start)
    return best


def words(dtype: torch.dtype) -> str:
    """What runs on this CPU, why, and what was measured."""
    use, why = cpu_ffn.fits(dtype)
    if not use:
        return f"torch, because {why}"
    known = [f"{k}: {v['form']} {v['seconds']}" for k, v in _choices.items() if k.startswith(f"{str(dtype)[6:]} ")]
    return f"native or torch, measured when a shape is first met ({why}); so far: {'; '.join(known) or 'none'}"
