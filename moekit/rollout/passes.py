"""Forward passes of an engine: agreed on by all ranks that share the experts, then run and counted.

Where experts are spread over ranks, every pass is one of all ranks: each layer sends rows to all of them. Before a pass
the ranks say which they want, with how many rows, and the last one in `KINDS` that anybody wants is run. A rank that
wants another one takes part without rows and asks again; one that has nothing left asks for none, and all stop
together when all ask for none. So a pass holds rows of one kind only, and counts add up over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from .. import ops
from ..data.batch import Flat, Size
from ..errors import EngineError
from ..measure.tokens import RowCounter
from ..model.transformer import Outputs, Transformer
from .kv_cache import ALONE, KVCache, Prefix, Sizes, decode, prefill
from .stats import Stats

Gather = Callable[[Sequence[int]], Sequence[Sequence[int]]]  # every rank's integers, in rank order: a collective
KINDS = ("", "score", "decode", "prefill")
LEFT = -1


class Passes:
    """Runs passes of a model.

    Args:
        gather: among the ranks that share the experts; None = all experts are here.
        version: of the weights; passes of different versions are refused, on every rank.
        crossover: rows per expert under which a pass is counted as small.
    """

    def __init__(self, model: Transformer, gather: Gather | None, version: Callable[[], int], crossover: float):
        self.model, self.gather, self.version, self.crossover = model, gather, version, crossover
        self.counter, self.stats, self.inside = RowCounter.of(model.config, "engine"), Stats(), False
        for name in KINDS[1:]:  # on a rank without prompts too: all ranks sum the same passes
            self.counter.pass_name = name

    @contextmanager
    def call(self) -> Iterator[None]:
        """What all ranks do together; it ends when none of them wants a pass, or with an error on all of them."""
        if self.inside:
            raise EngineError("the ranks of this engine are in a call already; finish it first")
        self.inside = self.gather is not None
        try:
            yield
            self._agree("")
        except BaseException:
            if self.inside and self.gather:
                self.gather([LEFT, 0, 0, 0])  # the others wait for this rank
            raise
        finally:
            self.inside = False

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Prefix]:
        """See `kv_cache.prefill`."""
        sizes = self._agree("prefill", sum(map(len, prompts)), len(prompts))
        with self._counted("prefill"):
            found = prefill(self.model, prompts, self.counter, sizes)
        self.stats.loads["prefill"].route_bytes += sum(p.experts_PLK.nbytes for p in found if p.experts_PLK is not None)
        return found

    def decode(self, cache: KVCache, token_S: Tensor, length_S: np.ndarray) -> tuple[Tensor, Tensor | None]:
        """See `kv_cache.decode`."""
        sizes = self._agree("decode", len(length_S), len(length_S))
        with self._counted("decode"):
            found = decode(self.model, cache, token_S, length_S, self.counter, sizes[0])
        self.stats.loads["decode"].route_bytes += 0 if found[1] is None else found[1].nbytes
        return found

    def score(self, flat: Flat) -> Outputs:
        """A whole forward pass, with its routes."""
        sizes = self._agree("score", flat.real, len(flat.label_index_M))
        flat = replace(flat, peers=tuple(Size(rows, rows, last) for rows, last in zip(*sizes)))
        with self._counted("score"):
            out = self.model(flat, elide="padding+last_layer", record=True, observer=self.counter)
            self.counter.positions(out.flat)
        return out

    def _agree(self, kind: str, rows: int = 0, last: int = 0) -> Sizes:
        """Take part in passes without rows until `kind` is run; rows of every rank in its layers, and in its last."""
        while self.gather is not None:
            self.inside = False  # if the others cannot be reached, they are not told either
            asked = self.gather([KINDS.index(kind), self.version(), rows, last])
            self.inside = min(a[0] for a in asked) > LEFT and len({a[1] for a in asked}) == 1
            if not self.inside:
                gone = [rank for rank, a in enumerate(asked) if a[0] == LEFT]
                why = f"ranks {gone} left the call" if gone else f"ranks serve versions {[a[1] for a in asked]}"
                raise EngineError(f"{why}: nothing more is sampled; call again with all ranks, and one version")
            now = KINDS[max(a[0] for a in asked)]
            sizes: Sizes = tuple(zip(*(a[2:] if KINDS[a[0]] == now else (0, 0) for a in asked)))  # pyright: ignore
            if now == kind:
                return sizes
            with torch.inference_mode(), self._counted(now):
                prefill(self.model, [], self.counter, sizes)
            self.stats.idle_steps += now == "decode"
        return ALONE

    @contextmanager
    def _counted(self, kind: str) -> Iterator[None]:
        """Count under `kind`, and note the loads of this process's experts."""
        m, (start, stop), loads = self.counter.measures["engine", kind], self.model.part.experts, self.stats.loads[kind]
        before_LCE = m.dispatched_LCE.clone()
        with self.counter.during(kind):
            yield
        rows_LE = (m.dispatched_LCE - before_LCE.to(m.buffer.device)).sum(1)[:, start:stop]
        loads.add(rows_LE, self.crossover)
        loads.route_bytes += len(rows_LE) * self._read

    @cached_property
    def _read(self) -> int:
        """Bytes of counts that the host reads to run one layer's experts."""
        (start, stop), config = self.model.part.experts, self.model.config
        gemm = ops.explain(self.model.device, self.model.head_weight.dtype)["expert_ffn"]
        counts = 0 if gemm.startswith("triton") else 8 * (stop - start)  # where each expert's rows end, int64
        how = [getattr(b.moe.dispatcher, "explain", "") for b in self.model.blocks.values() if b.routes]
        sync = any(words.startswith("sync") for words in how)
        return counts + 16 * (config.experts // (stop - start)) * sync  # rows to and from every rank
