"""What one (component, pass) did: the int64 counts behind `moekit.measure.tokens.RowCounter`, in one flat buffer.

Axis letters: L layers that route, C classes of positions (`moekit.data.batch.CLASSES`), E experts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..data.batch import CLASSES, Flat

C = len(CLASSES)


class Measures:
    """What one (component, pass) did. All fields are int64 views of one flat `buffer`: to add is one addition.

    A new field is one more entry in `shapes`; bytes are integers, and seconds go in as nanoseconds."""

    decided_LCE: Tensor  # choices of the router, whether or not the row was run; a shared position's for each child
    dispatched_LCE: Tensor  # rows that entered the expert GEMM
    elided_LC: Tensor  # rows proved not to reach the loss, and not run
    dropped_LC: Tensor  # rows over capacity (only with on_overflow="drop")
    positions_C: Tensor  # positions of the batches, padding included
    shared_C: Tensor  # positions saved by prefix sharing: (children - 1) for each shared position
    pairs: Tensor  # [1] (query, key) pairs of causal attention inside documents and to their parents

    def __init__(self, layers: Sequence[int], experts: int, device: torch.device | str = "cpu"):
        self.layers, self.experts = tuple(layers), experts
        axes = {"L": len(self.layers), "C": C, "E": experts}
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(axes[letter] for letter in name.partition("_")[2]) or (1,) for name in Measures.__annotations__
        }
        size = sum(torch.Size(s).numel() for s in self.shapes.values())
        self._bind(torch.zeros(size, dtype=torch.int64, device=device))

    def _bind(self, buffer: Tensor) -> None:
        self.buffer = buffer
        parts = buffer.split([torch.Size(s).numel() for s in self.shapes.values()])
        for (name, shape), part in zip(self.shapes.items(), parts):
            setattr(self, name, part.view(shape))

    def follow(self, device: torch.device) -> "Measures":
        """Move from the CPU to the device of the first event from elsewhere, and stay there. Returns self."""
        if self.buffer.device.type == "cpu" and device.type != "cpu":
            with torch.inference_mode(
                False
            ):  # a forward in inference mode may be the first; `reset` comes outside of it
                self._bind(self.buffer.to(device))
        return self

    def copy(self, device: torch.device | str | None = None) -> "Measures":
        """An independent copy, by default on the same device."""
        other = Measures(self.layers, self.experts, device or self.buffer.device)
        other.buffer.copy_(self.buffer)
        return other

    @property
    def dispatched_LC(self) -> Tensor:
        """Rows that entered the expert GEMM, summed over experts."""
        return self.dispatched_LCE.sum(-1)

    def __repr__(self) -> str:
        rows, positions = int(self.dispatched_LCE.sum()), int(self.positions_C.sum())
        return f"Measures({len(self.layers)} layers, {self.experts} experts, {positions:,} positions, {rows:,} rows)"


def attention_pairs(flat: Flat) -> int:
    """(query, key) pairs of causal attention: L(L+1)/2 for each document, plus length x prefix for each child.

    A padding position's attention to itself is not counted.
    >>> import torch; from moekit.data.batch import Batch
    >>> attention_pairs(Batch.make(torch.zeros(1, 5), segment=torch.tensor([[0, 0, 0, 1, -1]])).flat)
    7
    """
    own = sum(r.documents * r.length * (r.length + 1) // 2 for r in flat.runs)
    return own + sum(c.length * (c.length + 1) // 2 + c.length * c.parent_length for c in flat.children)
