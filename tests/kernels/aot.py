"""Compile Triton kernels for GPUs that are not there, and read registers, spills, shared memory and instructions.

`python tests/kernels/aot.py 90` prints the table of all kernels for one architecture. What is compiled is listed
in `shipped.py`.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SHIPPED = str(Path(__file__).with_name("shipped.py"))
SHARED_LIMIT = 227 * 1024  # usable by one block on sm_90 and sm_100
UNITS = {90: ("HGMMA", "QGMMA", "HMMA"), 100: ("UTCHMMA", "UTCQMMA", "HMMA")}  # 8 bits: Q; warp by warp: HMMA


@dataclass(frozen=True)
class Report:
    """One kernel on one architecture."""

    name: str
    arch: int
    registers: int  # per thread
    stack: int  # bytes per thread; spills live there
    shared: int  # bytes per block
    warps: int
    instructions: dict[str, int]  # matrix-unit instructions in the machine code, by name


def compile_kernel(name, fn, signature: dict[str, str], constexprs: dict[str, Any], warps, stages, arch) -> Report:
    """Compile, and read the machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    at, unknown = fn.arg_names.index, (set(signature) | set(constexprs)) - set(fn.arg_names)
    assert not unknown - set(signature), f"{name}: {fn.__name__} has no constants {unknown}"
    types = {a: "constexpr" if a in constexprs else signature[a].partition(":")[0] for a in fn.arg_names}
    divisible = {
        (at(a),): [["tt.divisibility", 16]]
        for a in fn.arg_names
        if types[a] != "constexpr" and signature[a].endswith(":16")
    }
    source = ASTSource(fn, types, constexprs, divisible)
    options = {"num_warps": warps, "num_stages": stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, stack = resources(kernel.asm["cubin"])
    counts = Counter(re.findall(r"\b((?:UTC[A-Z]?|[HQ]G|[HQO])MMA)\b", kernel.asm["sass"]))
    return Report(name, arch, registers, stack, kernel.metadata.shared, warps, dict(counts))


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes) of a cubin, read by the cuobjdump that comes with triton."""
    import tempfile

    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def reports(arch: int, only: str = "") -> list[Report]:
    """Every shipped kernel for one architecture."""
    entries = [e for forms in runpy.run_path(SHIPPED)["ALL"] for e in forms()]
    return [compile_kernel(*entry, arch=arch) for entry in entries if only in entry[0]]


def start(arch: int, only: str = "") -> subprocess.Popen:
    """Compile in another process, where triton is not in interpreter mode; its output is JSON."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, str(arch), only, "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def collect(process: subprocess.Popen) -> list[Report]:
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err[-4000:]
    return [Report(**r) for r in json.loads(out.splitlines()[-1])]


def table(found: list[Report]) -> str:
    """Registers, spills, shared memory and matrix instructions, a line a kernel."""
    lines = [f"{'kernel':44} {'arch':>6} {'warps':>5} {'regs':>5} {'stack B':>7} {'shared KB':>9}  matrix instructions"]
    for r in found:
        units = " ".join(f"{k} x{v}" for k, v in sorted(r.instructions.items())) or "-"
        arch = f"sm_{r.arch}"
        lines.append(f"{r.name:44} {arch:>6} {r.warps:5} {r.registers:5} {r.stack:7} {r.shared / 1024:9.1f}  {units}")
    return "\n".join(lines)


if __name__ == "__main__":
    options = [a for a in sys.argv[1:] if a != "--json"]
    result = reports(int(options[0]) if options else 90, options[1] if len(options) > 1 else "")
    print(json.dumps([asdict(r) for r in result]) if "--json" in sys.argv else table(result))
