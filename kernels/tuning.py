"""The tile shapes that the Triton kernels ship with, and where they come from.

Source of every entry so far: arithmetic and the compiler, no measurement. No GPU has run these kernels yet. A shape is
shipped when it compiles for sm_90 and sm_100 without spills, within 227 KB of shared memory and with the matrix unit in
use (`tests/kernels/test_aot.py`). `benchmarks/gpu.py` prints lines to paste, each with its measurement.

That holds for widths that are multiples of 16; at others the products in bfloat16 are right, and spill.

Rows of an expert are cut into tiles of `rows`, so an expert with n rows wastes ceil(n / rows) * rows - n of them. The
mean R / E is known without a device read and decides the height: 16 is the least a matrix instruction takes, from 64 on
sm_90 multiplies by warp group.
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Tile:
    """Output tile rows x cols, depth of one step of the contraction, and how Triton runs it."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int

    @property
    def launch(self) -> dict[str, Any]:
        """Arguments of a launch."""
        return {"num_warps": self.warps, "num_stages": self.stages}


NARROW = {16: Tile(16, 128, 64, 4, 5), 64: Tile(64, 128, 64, 4, 4), 128: Tile(128, 256, 64, 8, 3)}  # 2-byte operands
EXACT = {64: Tile(64, 64, 32, 8, 3)}  # float32
WEIGHTS = {2: Tile(128, 128, 64, 8, 4), 4: Tile(64, 64, 32, 4, 3)}  # dw: depth is rows of x; 128 x 256 spills
ELEMENTWISE = Tile(4, 512, 1, 4, 1)  # SwiGLU: 4 rows of 512 columns at a time


def gemm_tile(rows: int, experts: int, dtype: torch.dtype) -> Tile:
    """The tile for R rows on E experts: the least height that holds the mean number of rows, else the tallest.

    >>> [gemm_tile(n * 8, 8, torch.bfloat16).rows for n in (1, 16, 17, 64, 128, 1024)]
    [16, 16, 64, 64, 128, 128]
    """
    tiles, mean = (EXACT if dtype.itemsize == 4 else NARROW), rows / max(experts, 1)
    return next((t for height, t in tiles.items() if mean <= height), list(tiles.values())[-1])


def weight_tile(dtype: torch.dtype) -> Tile:
    """The tile for weight gradients."""
    return WEIGHTS[dtype.itemsize]
