"""Budgets in bytes: what the memory plan says of families, given to `moekit.data.budget`."""

from collections.abc import Sequence
from typing import Any

import torch

from ..config import LearnerConfig, ModelConfig
from ..data.budget import Budget, Lengths, derive
from ..data.families import family_size
from ..measure.plan import Microbatch, activation_bytes


def memory_budget(
    shape: ModelConfig, config: LearnerConfig, families: Sequence[Lengths], memory: float, *, share: bool = True,
    dtype: torch.dtype = torch.float32, layers: tuple[int, int] | None = None, device: str = "cpu", **options: Any,
) -> Budget:  # fmt: skip
    """Families that fit in `memory` bytes on a rank: each position is taken to cost what it does in the dearest family.

    Args:
        families: lengths of each prompt and of its answers.
        layers, device: as for `moekit.measure.plan.activation_bytes`.
        options: `fixed` (bytes of `moekit.measure.plan.storage_bytes`), `length`, `word`, ...: of `derive`.
    Raises: what `derive` raises.
    """
    dearest = 0.0
    for prompt, answers in {(p, tuple(a)) for p, a in families}:
        told = activation_bytes(shape, Microbatch.family(prompt, answers, share), dtype, config, layers, device)
        dearest = max(dearest, (told["total"] + told["again"]) / family_size(prompt, answers, share))
    return derive(families, memory=memory, bytes_per_position=dearest, share=share, **options)
