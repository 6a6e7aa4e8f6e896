"""MXFP8 expert weights: quantised copies made from the parameters, and refused once those have changed.

`LearnerConfig(precision="mxfp8")` runs the routed experts' matmuls in MXFP8 (forward and the gradient of their input;
see `kernels/mxfp8.py` for the format and for why weight gradients stay wide). Nothing else changes: parameters and
float32 masters stay what they are, and the copies are made anew from the parameters after every committed optimizer
step, after `restore`, and at the start. A copy takes 1.03 bytes an element, two of them where there is a backward.

The copy hangs on its parameter (`mx_cache`), where `moekit.ops` finds it, as it finds a `grad_slot`: the model and the
dispatchers know nothing of precision. A copy that is not of the parameter as it is now raises `StaleCacheError`.

A frozen model holds the forward copy only: `ExpertCaches(model, backward=False)`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..config import ModelConfig
from ..errors import ConfigError, StaleCacheError
from ..model.transformer import Transformer
from .gradients import is_expert

BLOCK = 32


class WeightCache:
    """One stack of expert weights in MXFP8, and what the weights were when it was made.

    Args:
        name: of the parameter, for errors.
        weight: [E, M, K].
        backward: keep the transposed copy too, for the gradient of the input.
        behind: tensors that share the weight's memory; a write to them is a write to the weight.
    """

    def __init__(self, name: str, weight: Tensor, backward: bool = True, behind: Iterable[Tensor] = ()):
        self.name, self.weight, self.backward, self.behind = name, weight, backward, tuple(behind)
        self.rebuild()

    def rebuild(self) -> None:
        """Quantise the weight as it is now. Cost: it is read once."""
        self.operands, self._made = ops.Operands.of(self.weight, self.backward), self._state()

    def current(self) -> ops.Operands:
        """The copy.

        Raises:
            StaleCacheError: the weight was written to, or moved, after the copy was made.

        Writes are seen by version counters and the address: free. `.data` has no counter: on CPU a checksum of the
        bytes is compared too (they are all read back from codes there anyway); on a GPU that would be a host read.
        """
        if self._state() != self._made:
            raise StaleCacheError(
                f"{self.name} has changed after its mxfp8 copy was made; call ExpertCaches.rebuild() "
                "(a learner does, after each committed step and after restore)"
            )
        return self.operands

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        parts = [q for q in (self.operands.forward, self.operands.transposed) if q is not None]
        return sum(t.nbytes for q in parts for t in (q.code, q.scale))

    def _state(self) -> tuple[Any, ...]:
        w = self.weight.detach()
        bits = 0 if w.is_cuda else zlib.crc32(w.contiguous().view(torch.uint8).numpy())  # pyright: ignore
        return w.data_ptr(), self.weight._version, *(t._version for t in self.behind), bits


class ExpertCaches:
    """The copies of all routed experts that a model holds here; from now on its experts run in MXFP8.

    Args:
        model: all of a model or a part of it.
        backward: False = forward only, for a model that no gradient passes.
        behind: by parameter name, tensors that share its memory.

    Raises:
        ConfigError: widths that are no multiples of 32; float64 parameters.
    """

    def __init__(self, model: Transformer, backward: bool = True, behind: Mapping[str, Iterable[Tensor]] | None = None):
        check_shape(model.config)
        experts = {n: p for n, p in model.named_parameters() if is_expert(n)}
        if any(p.dtype == torch.float64 for p in experts.values()):
            raise ConfigError("precision='mxfp8' needs float32 or bfloat16 parameters, these are float64")
        self.caches = {n: WeightCache(n, p, backward, (behind or {}).get(n, ())) for n, p in experts.items()}
        for cache in self.caches.values():
            cache.weight.mx_cache = cache  # type: ignore[attr-defined]

    def rebuild(self) -> None:
        """Quantise all weights as they are now."""
        for cache in self.caches.values():
            cache.rebuild()

    def close(self) -> None:
        """Give the experts back to the precision of their parameters."""
        for cache in self.caches.values():
            del cache.weight.mx_cache  # type: ignore[attr-defined]


def check_shape(config: ModelConfig) -> None:
    """Both contraction axes of the experts, and of their gradients, must be whole blocks."""
    if config.width % BLOCK or config.expert_width % BLOCK:
        raise ConfigError(
            f"precision='mxfp8' needs width and expert_width that are multiples of {BLOCK}, got width={config.width} "
            f"and expert_width={config.expert_width}; use precision='model'"
        )
