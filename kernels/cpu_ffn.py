"""The expert feed-forward in C++ for AVX-512 (`cpu_ffn.cpp`): built at first use, one call forward, one backward.

Plain C++ through ctypes: it compiles in 3 s, where the headers of a torch extension alone take about 20, and needs
neither ninja nor Python's headers. The library is kept in a cache folder under a name that holds a hash of the source,
the compiler, the processor's flags and torch's version; it is written beside and renamed, so processes that start
together build it twice at worst. It runs in torch's own OpenMP pool, with torch.get_num_threads() threads.

float32 and bfloat16 (sums in float32; even D and F). bfloat16 is rounded where the torch form rounds it, except that a
weight gradient goes into a wider slot unrounded. Results depend neither on the threads nor, row by row, on other rows.
The pre-activations are kept as [2F, up to 48 rows] panels of one expert.

Axis letters: N positions, K experts per position, R routed rows, E experts, D width, F expert width.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import recycle
from .permute import Sorted

FIELDS = (
    *("bf16", "threads", "N", "K", "R", "E", "D", "F", "stream"),
    *("x", "gate", "gate_up", "down", "offset", "row", "slot", "pre", "y", "rows_y"),
    *("dy", "dgate", "dx", "rows_dx", "hidden", "dpre"),
    *("d_up", "up_wide", "up_add", "d_down", "down_wide", "down_add"),
)
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp")
NEEDS = {"avx512f", "avx512bw", "avx512vl", "avx512_bf16"}
PAST = 16 << 20  # bytes of weight gradients that are written past the caches: half of a common last level
SOURCE = Path(__file__).with_name("cpu_ffn.cpp")


class Args(ctypes.Structure):
    """What one call gets; pointers are integers."""

    _fields_ = [(name, ctypes.c_int64) for name in FIELDS]


def _openmp() -> list[str]:
    """The OpenMP runtime that torch has loaded: a second one would be a second pool of threads."""
    names = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return sorted(n for n in names if Path(n).name.startswith(("libgomp", "libiomp5", "libomp")))[:1]


@functools.cache
def build() -> tuple[Any, str]:
    """(the library, where it is), or (None, why there is none)."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None, f"it is written for Linux on x86-64, this is {platform.system()} on {platform.machine()}"
    flags = set(re.findall(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[0].split())
    if not flags >= NEEDS:
        return None, f"the processor lacks {', '.join(sorted(NEEDS - flags))}"
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        return None, f"no C++ compiler: {compiler} is not on the path"
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
        parts = (SOURCE.read_text(), version, sorted(flags), torch.__version__, _openmp(), FLAGS)
        user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moekit"
        cache = Path(os.environ.get("MOEKIT_CACHE") or user)
        path = cache / f"cpu_ffn-{hashlib.sha256(repr(parts).encode()).hexdigest()[:20]}.so"
        if not path.exists():
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                made = Path(folder) / path.name
                command = [compiler, *FLAGS, "-o", str(made), str(SOURCE), *_openmp()]
                subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
                os.replace(made, path)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as e:
        return None, f"it could not be built: {e} {(getattr(e, 'stderr', '') or '').strip()[:300]}"
    for function in (library.moe_forward, library.moe_backward):
        function.argtypes, function.restype = [ctypes.POINTER(Args)], None
    return library, str(path)


def fits(dtype: torch.dtype, width: int = 2, expert_width: int = 2) -> tuple[bool, str]:
    """Whether this form takes such weights here, and why (not). Builds at the first call."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False, f"native form: float32 and bfloat16, not {dtype}"
    if dtype == torch.bfloat16 and (width % 2 or expert_width % 2):
        return False, f"native form: bfloat16 needs even widths, not {width} and {expert_width}"
    library, text = build()
    return library is not None, f"native form: {text}"


def _shared(x_ND: Tensor, gate_NK: Tensor | None, gate_up: Tensor, down: Tensor, rows: Sorted) -> dict[str, Any]:
    """What both passes are given, by its name in FIELDS."""
    gate = None if gate_NK is None else gate_NK.float().contiguous()
    shape = (*x_ND.shape[:1], 0 if gate is None else gate.shape[1], rows.rows, *down.shape)
    numbers = (x_ND.dtype == torch.bfloat16, torch.get_num_threads(), *shape)
    orders = (t.contiguous() for t in (rows.offset_E, rows.row_R, rows.slot_R))
    return dict(zip(FIELDS[:8], numbers)) | dict(zip(FIELDS[9:16], (x_ND, gate, gate_up, down, *orders)))


def _call(name: str, given: dict[str, Any]) -> None:
    """Tensors become addresses, None 0."""
    numbers = {k: v.data_ptr() if isinstance(v, Tensor) else int(v or 0) for k, v in given.items()}
    getattr(build()[0], name)(Args(**numbers))


class NativeFFN(torch.autograd.Function):
    """`ragged.MoEFFN` in C++."""

    @staticmethod
    def forward(ctx, x_ND, gate_NK, gate_up_E2FD, down_EDF, rows: Sorted, slots: tuple[Any, Any]):
        x, gate_up, down = x_ND.contiguous(), gate_up_E2FD.contiguous(), down_EDF.contiguous()
        given, once, (D, F) = _shared(x, gate_NK, gate_up, down, rows), gate_NK is None, down.shape[1:]
        given["y"] = torch.zeros_like(x) if once else torch.empty_like(x)
        given["rows_y"] = None if once else recycle.empty((rows.rows, D), x.dtype)
        given["pre"] = recycle.empty((rows.rows, 2 * F), x.dtype) if any(ctx.needs_input_grad) else None
        _call("moe_forward", given)
        ctx.save_for_backward(x, gate_NK, gate_up, down, given["pre"], rows.row_R, rows.slot_R)
        ctx.offset_E, ctx.slots = rows.offset_E, slots
        return given["y"]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_ND):
        x, gate_NK, gate_up, down, pre, row_R, slot_R = ctx.saved_tensors
        rows = Sorted(row_R, slot_R, ctx.offset_E)
        given, once, (D, F) = _shared(x, gate_NK, gate_up, down, rows), gate_NK is None, down.shape[1:]
        need, R, fresh = ctx.needs_input_grad, rows.rows, lambda *shape: recycle.empty(shape, x.dtype)
        given |= {"dy": dy_ND.contiguous(), "pre": pre, "hidden": fresh(R, F), "dpre": fresh(R, 2 * F)}
        if need[0]:
            given |= {"dx": torch.zeros_like(x) if once else torch.empty_like(x), "rows_dx": fresh(R, D)}
        if need[1] and not once:  # choices without a row have no gradient
            given["dgate"] = torch.zeros(gate_NK.shape)
        targets = [Target(w, s) if n else None for w, s, n in zip((gate_up, down), ctx.slots, need[2:4])]
        for name, t in zip(("up", "down"), targets):
            if t is not None:
                given |= {f"d_{name}": t.out, f"{name}_wide": t.out.dtype == torch.float32, f"{name}_add": t.add}
        given["stream"] = sum(t.out.nbytes for t in targets if t is not None) > PAST
        _call("moe_backward", given)
        dgate = given["dgate"].to(gate_NK.dtype) if "dgate" in given else None
        return given.get("dx"), dgate, *(None if t is None else t.close() for t in targets), None, None


class Target:
    """Where a weight's gradient goes: straight into the slot, or into a fresh tensor (added to a slot that is not
    contiguous or not float32)."""

    def __init__(self, weight: Tensor, slot: Any):
        self.slot = slot
        self.direct = slot is not None and slot.view.is_contiguous() and slot.view.dtype == torch.float32
        self.out: Tensor = slot.view if self.direct else recycle.empty(weight.shape, weight.dtype)
        self.add = self.direct and slot.filled

    def close(self) -> Tensor | None:
        """The gradient that autograd gets (None when a slot has it)."""
        if self.slot is None:
            return self.out
        if not self.direct:
            self.slot.view.add_(self.out) if self.slot.filled else self.slot.view.copy_(self.out)
        self.slot.filled = True
        return None


def moe_ffn(x_ND, rows: Sorted, gate_NK, gate_up_E2FD, down_EDF, slots=(None, None)) -> Tensor:
    """See `moekit.ops.moe_ffn`, and with `gate_NK=None` `moekit.ops.expert_ffn`."""
    return NativeFFN.apply(x_ND, gate_NK, gate_up_E2FD, down_EDF, rows, slots)
