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
SOURCE = Path(__file__).with_name("cpu_ffn.cpp")


class Args(ctypes.Structure):
    """What one call gets; pointers are integers."""

    _fields_ = [(name, ctypes.c_int64) for name in FIELDS]


def _found(path: str, start: str) -> list[str]:
    """The words of the first line that starts so."""
    try:
        with open(path) as lines:
            return next((line.split() for line in lines if line.startswith(start)), [])
    except OSError:
        return []


def _openmp() -> str | None:
    """The OpenMP runtime that torch has loaded: a second one would be a second pool of threads."""
    with open("/proc/self/maps") as lines:
        loaded = {line.split()[-1] for line in lines if line.rstrip().endswith((".so", ".so.1", ".so.5"))}
    return next((p for p in sorted(loaded) if Path(p).name.startswith(("libgomp", "libiomp5", "libomp"))), None)


def cache_folder() -> Path:
    """MOEKIT_CACHE, else moekit under the user's cache folder."""
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("MOEKIT_CACHE") or Path(user) / "moekit")


@functools.cache
def build() -> tuple[Any, str]:
    """(the library, where it is), or (None, why there is none)."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None, f"it is written for Linux on x86-64, this is {platform.system()} on {platform.machine()}"
    flags = _found("/proc/cpuinfo", "flags")
    if missing := sorted(NEEDS - set(flags)):
        return None, f"the processor lacks {', '.join(missing)}"
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        return None, f"no C++ compiler: {os.environ.get('CXX') or 'g++'} is not on the path"
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
        parts = (SOURCE.read_text(), version, " ".join(flags), torch.__version__, str(_openmp()), " ".join(FLAGS))
        path = cache_folder() / f"cpu_ffn-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:20]}.so"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                made = Path(folder) / path.name
                command = [compiler, *FLAGS, "-o", str(made), str(SOURCE), *filter(None, [_openmp()])]
                done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
                if done.returncode:
                    return None, f"{compiler} failed: {done.stderr.strip()[:300]}"
                os.replace(made, path)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as e:
        return None, f"it could not be built: {e}"
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


def _arguments(x_ND: Tensor, gate: Tensor | None, gate_up: Tensor, down: Tensor, rows: Sorted) -> tuple[Args, list]:
    """What both passes need, and the tensors whose memory that is."""
    held = [x_ND, gate, gate_up, down, rows.offset_E.contiguous(), rows.row_R.contiguous(), rows.slot_R.contiguous()]
    a = Args(bf16=x_ND.dtype == torch.bfloat16, threads=torch.get_num_threads(), R=rows.rows)
    (a.N, a.D), a.E, a.F = x_ND.shape, gate_up.shape[0], down.shape[2]
    a.K = 0 if gate is None else gate.shape[1]
    for name, tensor in zip(("x", "gate", "gate_up", "down", "offset", "row", "slot"), held):
        _point(a, **{name: tensor})
    return a, held


def _point(a: Args, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        setattr(a, name, 0 if tensor is None else tensor.data_ptr())


class NativeFFN(torch.autograd.Function):
    """`ragged.MoEFFN` in C++."""

    @staticmethod
    def forward(ctx, x_ND, gate_NK, gate_up_E2FD, down_EDF, rows: Sorted, slots: tuple[Any, Any]):
        x, gate_up, down = x_ND.contiguous(), gate_up_E2FD.contiguous(), down_EDF.contiguous()
        gate = None if gate_NK is None else gate_NK.float().contiguous()
        a, _held = _arguments(x, gate, gate_up, down, rows)
        keep = any(ctx.needs_input_grad)
        pre = recycle.empty((a.R, 2 * a.F), x.dtype) if keep else None
        sums = recycle.empty((a.R, a.D), x.dtype) if a.K else None
        y_ND = torch.empty_like(x) if a.K else torch.zeros_like(x)
        _point(a, pre=pre, rows_y=sums, y=y_ND)
        build()[0].moe_forward(a)
        ctx.save_for_backward(x, gate_NK, gate_up, down, pre)
        ctx.rows, ctx.slots = rows, slots
        return y_ND

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_ND):
        x, gate_NK, gate_up, down, pre = ctx.saved_tensors
        gate, need, dy = (
            None if gate_NK is None else gate_NK.float().contiguous(),
            ctx.needs_input_grad,
            dy_ND.contiguous(),
        )
        a, _held = _arguments(x, gate, gate_up, down, ctx.rows)
        dgate = torch.zeros(gate.shape) if gate is not None and need[1] else None  # choices without a row: zero
        dx = None if not need[0] else torch.empty_like(x) if a.K else torch.zeros_like(x)
        sums = recycle.empty((a.R, a.D), x.dtype) if a.K and need[0] else None
        hidden, dpre = recycle.empty((a.R, a.F), x.dtype), recycle.empty((a.R, 2 * a.F), x.dtype)
        up, low = (Target(w, s) if n else None for w, s, n in zip((gate_up, down), ctx.slots, need[2:4]))
        _point(a, pre=pre, dy=dy, dgate=dgate, dx=dx, rows_dx=sums, hidden=hidden, dpre=dpre)
        if up is not None:
            a.d_up, a.up_wide, a.up_add = up.out.data_ptr(), up.wide, up.add
        if low is not None:
            a.d_down, a.down_wide, a.down_add = low.out.data_ptr(), low.wide, low.add
        a.stream = sum(t.out.nbytes for t in (up, low) if t is not None) > _cache_bytes() // 2
        build()[0].moe_backward(a)
        dgate = None if dgate is None else dgate.to(gate_NK.dtype)
        return dx, dgate, *(None if t is None else t.close() for t in (up, low)), None, None


class Target:
    """Where a weight's gradient goes: straight into the slot, or into a fresh tensor (added to a slot that is not
    contiguous or not float32)."""

    def __init__(self, weight: Tensor, slot: Any):
        self.slot = slot
        self.direct = slot is not None and slot.view.is_contiguous() and slot.view.dtype == torch.float32
        self.out: Tensor = slot.view if self.direct else recycle.empty(weight.shape, weight.dtype)
        self.wide, self.add = self.out.dtype == torch.float32, self.direct and slot.filled

    def close(self) -> Tensor | None:
        """The gradient that autograd gets (None when a slot has it)."""
        if self.slot is None:
            return self.out
        if not self.direct:
            self.slot.view.add_(self.out) if self.slot.filled else self.slot.view.copy_(self.out)
        self.slot.filled = True
        return None


@functools.cache
def _cache_bytes() -> int:
    """The last-level cache; 32 MiB where the system does not say."""
    found = os.sysconf("SC_LEVEL3_CACHE_SIZE") if "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names else 0
    return found if found > 0 else 32 << 20


def moe_ffn(x_ND, rows: Sorted, gate_NK, gate_up_E2FD, down_EDF, slots=(None, None)) -> Tensor:
    """See `moekit.ops.moe_ffn`, and with `gate_NK=None` `moekit.ops.expert_ffn`."""
    return NativeFFN.apply(x_ND, gate_NK, gate_up_E2FD, down_EDF, rows, slots)
