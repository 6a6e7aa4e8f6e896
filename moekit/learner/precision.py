"""MXFP8 expert weights: quantised copies made from the parameters, and refused once those have changed.

`LearnerConfig(precision="mxfp8")` runs the matmuls of routed experts in MXFP8 (`kernels/mxfp8.py` says which, and why).
Parameters and masters stay what they are; the copies are made from the parameters at the start, after every committed
optimizer step and after `restore`: 1.03 bytes an element each, two where there is a backward. A copy hangs on its
parameter (`mx_cache`), where `moekit.ops` finds it as it finds a `grad_slot`; model and dispatchers know nothing of it.
A frozen model holds the forward copy only: `ExpertCaches(model, backward=False)`.
"""

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


class WeightCache:
    """One stack of expert weights in MXFP8 (with `backward` transposed too), refused once the weight has changed.

    `behind`: tensors that share the weight's memory.
    """

    def __init__(self, name: str, weight: Tensor, backward: bool = True, behind: Iterable[Tensor] = ()):
        self.name, self.weight, self.backward, self.behind = name, weight, backward, tuple(behind)
        self.rebuild()

    def rebuild(self) -> None:
        """Quantise the weight as it is now. Cost: it is read once."""
        self.operands, self._made = ops.operands(self.weight, self.backward), self._state()

    def current(self) -> ops.Operands:
        """The copy; StaleCacheError if the weight was written to, or moved, after it was made.

        Version counters and the address tell, and cost nothing. `.data` has no counter: on CPU a checksum of the bytes
        is compared too; on a GPU that would be a host read.
        """
        if self._state() != self._made:
            raise StaleCacheError(f"{self.name} has changed after its mxfp8 copy was made: call ExpertCaches.rebuild()")
        return self.operands

    def _state(self) -> tuple[Any, ...]:
        w = self.weight.detach()
        bits = 0 if w.is_cuda else zlib.crc32(w.contiguous().view(torch.uint8).numpy())  # pyright: ignore
        return w.data_ptr(), self.weight._version, *(t._version for t in self.behind), bits


class ExpertCaches:
    """The copies of all routed experts that a model holds here; from now on its experts run in MXFP8.

    Args: as of `WeightCache`, `behind` by parameter name. Raises ConfigError: wrong widths, float64 parameters.
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
    if config.width % 32 or config.expert_width % 32:
        got = f"width={config.width} and expert_width={config.expert_width}"
        raise ConfigError(f"precision='mxfp8' needs multiples of 32, got {got}; use precision='model'")
