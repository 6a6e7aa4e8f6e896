"""Counters of positions and routed rows, by class, layer, expert, pass and rank: exact, and without host reads.

Axis letters: L layers that route, C classes of positions (`moekit.data.batch.CLASSES`), E experts, K top_k, W ranks,
N positions of a microbatch.

A routed row is one (position, chosen expert) pair. Rows are counted where they enter the expert GEMM and positions
where the batch is made, so that the identity that `RowCounter.check` tests,

    positions x K = dispatched + dropped + elided        (every layer, class and pass),

compares two independent counts and not a formula with itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import ModelConfig, Scope
from ..data.batch import CLASSES, PADDING, SUPERVISED, Flat
from ..errors import ConfigError, NumericsError
from . import routing
from .measures import C, Measures, attention_pairs

if TYPE_CHECKING:
    import pandas as pd

COMPONENTS = ("policy", "reference", "critic", "reward", "engine")
_SCOPES = {"all": slice(None), "valid": slice(PADDING), "supervised": slice(SUPERVISED, SUPERVISED + 1)}
PASSES = ("forward", "recompute", "backward", "score", "prefill", "decode", "evaluate")


class RowCounter:
    """Counts what one model did in a step; it is the model's `observer`. One counter for each model (component).

    Use: `counter.positions(flat)` once beside every forward, `model(flat, observer=counter)`, then `all_reduce`,
    `check`, `metrics`, `arrays`, and `reset` before the next step. Passes other than the training forward are named:

        with counter.during("evaluate"):
            counter.positions(flat)
            model(flat, observer=counter)

    Events that come from a backward are counted under "backward". The positions, elided and dropped rows of a
    training forward ("forward" with gradients enabled) count for "backward" too: `check` then shows that every
    row that went forward came back once.

    Args:
        layers: how many layers route, or the indices of those that do (`ModelConfig.moe_layers`).
        experts: E, routed experts of a layer.
        component: one of `COMPONENTS`.
        top_k: K; needed by `skip` and for `rows/shared`, and the default of `check`.

    Cost: a few small additions on the rows' device for each layer; nothing is read to the host before `all_reduce`,
    `check`, `metrics`, `arrays` or `frame`.
    """

    def __init__(
        self, layers: int | Sequence[int], experts: int, component: str = "policy", *, top_k: int | None = None
    ):
        if component not in COMPONENTS:
            raise ConfigError(f"component={component!r} is not one of {', '.join(COMPONENTS)}")
        self.layers = tuple(range(layers)) if isinstance(layers, int) else tuple(layers)
        self.experts = experts
        self.component = component
        self.top_k = top_k
        self.measures: dict[tuple[str, str], Measures] = {}
        self.ranks: dict[tuple[str, str], Tensor] = {}  # dispatched rows by rank [W, L, C], filled by all_reduce
        self.reduced = False
        self._place = {layer: at for at, layer in enumerate(self.layers)}
        self._make("backward")
        self.pass_name = "forward"

    @classmethod
    def of(cls, config: ModelConfig, component: str = "policy") -> RowCounter:
        """The counter that fits a model."""
        return cls(config.moe_layers, config.experts, component, top_k=config.top_k)

    def _make(self, name: str) -> Measures:
        key = (self.component, name)
        if key not in self.measures:
            self.measures[key] = Measures(self.layers, self.experts)
        return self.measures[key]

    @property
    def pass_name(self) -> str:
        """The pass under which events are counted, one of `PASSES`. Every rank must go through the same passes."""
        return self._pass

    @pass_name.setter
    def pass_name(self, name: str) -> None:
        if name not in PASSES:
            raise ConfigError(f"pass {name!r} is not one of {', '.join(PASSES)}")
        self._pass = name
        self._make(name)  # at once, so that `all_reduce` finds the same passes on a rank that counts nothing

    @contextmanager
    def during(self, pass_name: str) -> Iterator[RowCounter]:
        """Count what happens inside under another pass."""
        before, self.pass_name = self.pass_name, pass_name
        try:
            yield self
        finally:
            self.pass_name = before

    def _open(self, device: torch.device) -> list[Measures]:
        """Where an event of the current pass goes: its own measures, and those of the backward that will follow."""
        if self.reduced:
            raise ConfigError(
                "this RowCounter holds the sum over ranks; call reset() before counting the next step, "
                "or the earlier rows would be summed again"
            )
        training = self.pass_name == "forward" and torch.is_grad_enabled()
        return [
            self._make(name).follow(device)
            for name in ((self.pass_name, "backward") if training else (self.pass_name,))
        ]

    def _at(self, layer: int) -> int:
        if layer not in self._place:
            raise ConfigError(f"layer {layer} is not one of the layers that this RowCounter counts: {self.layers}")
        return self._place[layer]

    # ---- events ----

    def positions(self, flat: Flat) -> None:
        """Count a microbatch's positions, by class. Once for every forward."""
        n = flat.class_N
        one_NC = n[:, None] == torch.arange(C, device=n.device)  # not bincount: it reads to the host on CUDA
        saved_NC = one_NC * (flat.share_N - 1)[:, None]
        pairs = attention_pairs(flat)
        for m in self._open(n.device):
            m.positions_C += one_NC.sum(0).to(m.buffer.device)
            m.shared_C += saved_NC.sum(0).to(m.buffer.device)
            m.pairs += pairs

    def layer(self, layer: int, decided_CE: Tensor, dispatched_CE: Tensor, elided_C: Tensor, dropped_C: Tensor) -> None:
        """Count one layer's forward: [C, E] rows decided and dispatched, [C] rows elided and dropped (int64)."""
        at = self._at(layer)
        here, *backward = self._open(dispatched_CE.device)
        here.decided_LCE[at] += decided_CE
        here.dispatched_LCE[at] += dispatched_CE
        for m in (here, *backward):
            m.elided_LC[at] += elided_C
            m.dropped_LC[at] += dropped_C

    def recompute(self, layer: int, dispatched_CE: Tensor, elided_C: Tensor, dropped_C: Tensor) -> None:
        """Count one layer's forward that was run again for the backward; nothing was decided there."""
        m, at = self._make("recompute").follow(dispatched_CE.device), self._at(layer)
        m.dispatched_LCE[at] += dispatched_CE
        m.elided_LC[at] += elided_C
        m.dropped_LC[at] += dropped_C

    def backward(self, layer: int, dispatched_CE: Tensor) -> None:
        """Count the rows of one layer's backward, [C, E] int64; called from inside the backward."""
        self._make("backward").follow(dispatched_CE.device).dispatched_LCE[self._at(layer)] += dispatched_CE

    def skip(self, flats: Iterable[Flat]) -> None:
        """Count microbatches of a step that was not run, because nothing in it could be learned: all rows elided."""
        if not self.top_k:
            raise ConfigError("RowCounter.skip needs top_k; make the counter with RowCounter.of(model.config)")
        with torch.no_grad():  # there will be no backward
            before = self.measures[self.component, self.pass_name].positions_C.clone()
            for flat in flats:
                self.positions(flat)
            m = self.measures[self.component, self.pass_name]
            m.elided_LC += (m.positions_C - before.to(m.positions_C.device)) * self.top_k

    # ---- sums ----

    def all_reduce(self, group: dist.ProcessGroup | None = None, *, alone: bool = False) -> RowCounter:
        """Replace the counts by their sum over ranks, with one collective for everything, and fill `ranks`.

        Does nothing but fill `ranks` if `alone`, or without torch.distributed. Twice is a `ConfigError`. Returns self.
        """
        if self.reduced:
            raise ConfigError("this RowCounter is summed over ranks already; call reset() first")
        live = not alone and dist.is_available() and dist.is_initialized()
        world, rank = (dist.get_world_size(group), dist.get_rank(group)) if live else (1, 0)
        keys = sorted(self.measures)
        self.reduced = True
        if world == 1:
            self.ranks = {key: self.measures[key].dispatched_LC[None] for key in keys}
            return self
        device = _collective_device(group)
        parts, ranks = [], []
        for key in keys:
            m = self.measures[key]
            by_rank_WLC = m.elided_LC.new_zeros(world, *m.elided_LC.shape, device=device)
            by_rank_WLC[rank] = m.dispatched_LC  # the other ranks' places are zero, so that a sum gathers
            parts.append(m.buffer.to(device))
            ranks.append(by_rank_WLC)
        everything = torch.cat([*parts, *(r.view(-1) for r in ranks)])
        dist.all_reduce(everything, group=group)
        pieces = everything.split([x.numel() for x in (*parts, *ranks)])
        for key, total, by_rank, like in zip(keys, pieces, pieces[len(keys) :], ranks):
            self.measures[key].buffer.copy_(total)
            self.ranks[key] = by_rank.view(like.shape)
        return self

    def add(self, other: RowCounter) -> RowCounter:
        """Add what another counter of this component and rank has counted. Returns self."""
        for (component, name), m in other.measures.items():
            if component != self.component or self.reduced or other.reduced:
                raise ConfigError(f"counts of {component} cannot be added to those of {self.component}, or are sums")
            self._make(name).follow(m.buffer.device).buffer.add_(m.buffer)
        return self

    def reset(self) -> RowCounter:
        """Set everything to zero for the next step. Returns self."""
        for m in self.measures.values():
            m.buffer.zero_()
        self.ranks = {}
        self.reduced = False
        return self

    # ---- reading (on the host) ----

    def decided(self, layer: int, scope: Scope = "valid", pass_name: str = "forward") -> Tensor:
        """[E] int64: how often the router of a layer chose each expert, for positions in scope; not a host read."""
        if scope not in _SCOPES:
            raise ConfigError(f"scope={scope!r} is not one of {', '.join(_SCOPES)}")
        return self.measures[self.component, pass_name].decided_LCE[self._at(layer), _SCOPES[scope]].sum(0)

    def host(self) -> dict[tuple[str, str], Measures]:
        """Copies on the CPU of all (component, pass) in which anything happened."""
        here = {key: m.copy("cpu") for key, m in sorted(self.measures.items())}
        happened = ("decided_LCE", "dispatched_LCE")
        return {
            key: m for key, m in here.items()
            if any(bool(getattr(m, name).any()) for name in happened)
            or (key[1] != "backward" and bool(m.positions_C.any()))
        }  # fmt: skip

    def check(self, top_k: int | None = None) -> None:
        """Raise unless every layer, class and pass accounts for each of its positions x K rows.

        Also: every dispatched row was decided (per expert), and the backward ran the forward's rows.

        Raises:
            NumericsError: names component, pass, layer and class, and both sides of the identity.
        """
        k = top_k or self.top_k
        if not k:
            raise ConfigError("RowCounter.check needs top_k (rows per position); give it here or to RowCounter")
        for (component, name), m in self.host().items():
            want_LC = (m.positions_C * k).expand(len(m.layers), C)
            got_LC = m.dispatched_LC + m.dropped_LC + m.elided_LC
            where = f"{component}/{name}"
            if bool(got_LC.any()) and not bool(m.positions_C.any()):
                raise NumericsError(
                    f"{where}: rows were counted but no positions; call counter.positions(flat) beside the forward"
                )
            for at, c in (want_LC != got_LC).nonzero().tolist():
                raise NumericsError(
                    f"{where}, layer {m.layers[at]}, {CLASSES[c]} positions: {int(m.positions_C[c])} x top_k {k} = "
                    f"{int(want_LC[at, c])} rows, but {int(m.dispatched_LC[at, c])} dispatched + "
                    f"{int(m.dropped_LC[at, c])} dropped + {int(m.elided_LC[at, c])} elided = {int(got_LC[at, c])}"
                )
            if name in ("backward", "recompute"):
                continue
            for at, c, e in (m.dispatched_LCE > m.decided_LCE).nonzero().tolist():
                raise NumericsError(
                    f"{where}, layer {m.layers[at]}, {CLASSES[c]} positions, expert {e}: "
                    f"{int(m.dispatched_LCE[at, c, e])} rows dispatched, only {int(m.decided_LCE[at, c, e])} decided"
                )

    def metrics(self, pass_name: str = "forward", component: str | None = None) -> dict[str, float]:
        """Flat scalars of one pass, by moekit's names; another component than the policy's is a prefix.

        tokens/<class>: positions. rows/dispatched, elided, dropped, shared and rows/<class> (dispatched rows):
        summed over layers. rows/backward and rows/recompute: dispatched rows of those, with pass "forward". load/...:
        the router's decisions for all tokens (`moekit.measure.routing`); load_supervised/...: for supervised tokens.
        A position of a shared prompt is one token and K rows, but a decision for each of its children: loads are
        those of the unshared batch.
        """
        component = component or self.component
        m = self.measures.get((component, pass_name))
        if m is None:
            raise ConfigError(f"nothing was counted for {component}/{pass_name}; counted: {sorted(self.measures)}")
        m = m.copy("cpu")
        by_class = m.dispatched_LC.sum(0).tolist()
        out: dict[str, float] = {f"tokens/{name}": n for name, n in zip(CLASSES, m.positions_C.tolist())}
        out["rows/dispatched"] = sum(by_class)
        out["rows/elided"] = int(m.elided_LC.sum())
        out["rows/dropped"] = int(m.dropped_LC.sum())
        if self.top_k:
            out["rows/shared"] = int(m.shared_C.sum()) * self.top_k * len(m.layers)
        out |= {f"rows/{name}": n for name, n in zip(CLASSES, by_class)}
        for again in ("backward", "recompute") if pass_name == "forward" else ():
            if (component, again) in self.measures:
                out[f"rows/{again}"] = int(self.measures[component, again].dispatched_LCE.sum())
        out |= routing.load_metrics(m.decided_LCE[:, :PADDING].sum(1), "load")
        out |= routing.load_metrics(m.decided_LCE[:, SUPERVISED], "load_supervised")
        return out if component == "policy" else {f"{component}_{name}": value for name, value in out.items()}

    def arrays(self) -> dict[str, Tensor]:
        """Tensors for `RunWriter.write`, named `component/pass/quantity`, and `component/layers` (layer indices).

        decided, dispatched [L, C, E]; elided, dropped [L, C]; positions, shared [C]; ranks [W, L, C] (dispatched rows
        by rank, after `all_reduce`). All int64 on the CPU; passes in which nothing happened are left out.
        """
        out: dict[str, Tensor] = {}
        for (component, name), m in self.host().items():
            out[f"{component}/layers"] = torch.tensor(m.layers, dtype=torch.int64)
            for quantity in m.shapes:
                if quantity != "pairs" and not (name == "backward" and quantity == "decided_LCE"):
                    out[f"{component}/{name}/{quantity.split('_')[0]}"] = getattr(m, quantity).clone()
            if (component, name) in self.ranks:
                out[f"{component}/{name}/ranks"] = self.ranks[component, name].cpu()
        return out

    def frame(self, experts: bool = False) -> pd.DataFrame:
        """A table with one line for each component, pass, layer and class (and expert, if asked).

        Columns: component, pass, layer, class, rows (dispatched), and decided; without `experts` also elided, dropped,
        positions and shared (positions saved by prefix sharing).
        """
        import pandas as pd

        parts, names = {}, ["component", "pass", "layer", "class", *(["expert"] if experts else [])]
        for key, m in self.host().items():
            axes = [pd.Index(m.layers, name="layer"), pd.Index(CLASSES, name="class")]
            if experts:
                axes.append(pd.RangeIndex(m.experts, name="expert"))
            index = pd.MultiIndex.from_product(axes)
            over = (lambda x: x) if experts else (lambda x: x.sum(-1))
            columns = {"rows": over(m.dispatched_LCE), "decided": over(m.decided_LCE)}
            if not experts:
                columns |= {"elided": m.elided_LC, "dropped": m.dropped_LC}
                columns |= {n: getattr(m, f"{n}_C").expand(len(m.layers), C) for n in ("positions", "shared")}
            parts[key] = pd.DataFrame({n: x.reshape(-1).numpy() for n, x in columns.items()}, index=index)
        return (
            pd.concat(parts, names=names).reset_index() if parts else pd.DataFrame(columns=[*names, "rows", "decided"])
        )

    def __repr__(self) -> str:
        lines = [f"  {c}/{p}: {m!r}" for (c, p), m in self.host().items()]
        return "\n".join([f"RowCounter({self.component}, {'all ranks' if self.reduced else 'this rank'})", *lines])


def _collective_device(group: dist.ProcessGroup | None) -> torch.device:
    """gloo takes host tensors, NCCL device tensors."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
