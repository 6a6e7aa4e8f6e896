"""One mixture-of-experts layer: route, drop what cannot reach the loss, dispatch, attach the router's own loss.

Who moves the rows is an argument: `LocalDispatcher` keeps them in this process. Counts are taken from the sorted rows
that enter the matmuls, never from the router's choices.

Axis letters: N positions, P positions whose expert rows run, K experts per position, R routed rows, E experts,
C = 4 position classes, D width, F expert width.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import ops
from ..config import ModelConfig
from ..data.batch import CLASSES, Flat
from .router import Route, Router

C = len(CLASSES)


class RouterLoss(Protocol):
    """Scaled scalar that one layer adds to the training loss; `again` = this is a recomputation, record nothing."""

    def __call__(self, layer: int, route: Route, flat: Flat, again: bool = False) -> Tensor: ...


class Observer(Protocol):
    """Told of every routed row, in the forward and in the backward (`moekit.measure.tokens.RowCounter`)."""

    def layer(self, layer: int, decided_CE: Tensor, dispatched_CE: Tensor, elided_C: Tensor, dropped_C: Tensor) -> None:
        """One forward of one layer: positions x top_k = dispatched + dropped + elided, class by class."""
        ...

    def recompute(self, layer: int, dispatched_CE: Tensor, elided_C: Tensor, dropped_C: Tensor) -> None:
        """The forward of one layer was run again for the backward, with the choices it had made."""
        ...

    def backward(self, layer: int, dispatched_CE: Tensor) -> None:
        """The expert rows of one layer went through backward."""
        ...


@dataclass
class Memo:
    """What one layer's forward decided. A recomputation of it reads these and decides nothing again."""

    expert_NK: Tensor | None = None
    plan: Any = None  # the dispatcher's: where each row goes
    again: bool = False  # the first forward is over; what runs now is a recomputation


@dataclass(frozen=True)
class DispatchCounts:
    """int64 rows that entered the matmuls, by class and expert, and rows dropped for lack of room, by class."""

    dispatched_CE: Tensor
    dropped_C: Tensor


class Dispatcher(Protocol):
    """Brings positions to their experts and the weighted results back.

    The weights are this rank's experts only. `class_P` absent = counts are not wanted. `sizes` = P on every rank that
    shares the experts, known on the host; () = alone. `memo.plan` is made in a first forward and read in a
    recomputation (`memo.again`).
    """

    def __call__(
        self,
        x_PD: Tensor,
        expert_PK: Tensor,
        gate_PK: Tensor,
        gate_up_E2FD: Tensor,
        down_EDF: Tensor,
        class_P: Tensor | None = None,
        sizes: tuple[int, ...] = (),
        memo: Memo | None = None,
    ) -> tuple[Tensor, DispatchCounts | None]: ...


def count_CE(class_R: Tensor, expert_R: Tensor, experts: int, weight_R: Tensor | None = None) -> Tensor:
    """int64 [C, E]: how many rows there are of each class and expert, or the sum of their weights."""
    return ops.count(class_R * experts + expert_R, C * experts, weight_R).view(C, experts)


class LocalDispatcher:
    """All experts live in this process: sort the rows, run them. Dropless."""

    explain = "local: all experts live in this process"

    def __call__(self, x_PD, expert_PK, gate_PK, gate_up_E2FD, down_EDF, class_P=None, sizes=(), memo=None):
        """See `Dispatcher`."""
        experts = gate_up_E2FD.shape[0]
        rows = ops.sort_rows(expert_PK, experts)
        y_PD = ops.moe_ffn(x_PD, rows, gate_PK, gate_up_E2FD, down_EDF)
        if class_P is None:
            return y_PD, None
        counts = DispatchCounts(count_CE(class_P[rows.row_R], rows.expert_R, experts), class_P.new_zeros(C))
        return y_PD, counts


class _Attach(torch.autograd.Function):
    """y unchanged; in the backward `loss` gets gradient 1, whatever the gradient of y is."""

    @staticmethod
    def forward(ctx, y, loss):
        ctx.like = loss.detach()
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        return dy, torch.ones_like(ctx.like)


class _Watch(torch.autograd.Function):
    """y unchanged; calls `told()` when the gradient of y comes by."""

    @staticmethod
    def forward(ctx, y, told):
        ctx.told = told
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        ctx.told()
        return dy, None


class Linear(nn.Module):
    """x @ weight.T, weight [out, in]. Left uninitialised: the transformer draws all weights from one seed."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, device=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """x @ weight.T"""
        return nn.functional.linear(x, self.weight)


class FeedForward(nn.Module):
    """SwiGLU feed-forward that every position passes: a dense layer's, or the shared expert's."""

    def __init__(self, width: int, hidden: int, dtype: torch.dtype, device=None):
        super().__init__()
        self.gate_up = Linear(width, 2 * hidden, dtype, device)
        self.down = Linear(hidden, width, dtype, device)

    def forward(self, x_ND: Tensor) -> Tensor:
        """down(silu(gate) * up)"""
        return self.down(ops.swiglu(self.gate_up(x_ND)))


class MoE(nn.Module):
    """Routed experts, and the shared expert if there is one. `experts` = [start, stop) of those that live here."""

    def __init__(
        self, config: ModelConfig, layer: int, dtype: torch.dtype, device=None, experts: tuple[int, int] | None = None
    ):
        super().__init__()
        start, stop = experts or (0, config.experts)
        held, width, hidden = stop - start, config.width, config.expert_width
        self.layer, self.experts = layer, (start, stop)
        self.router = Router(config, dtype, device)
        self.gate_up = nn.Parameter(torch.empty(held, 2 * hidden, width, dtype=dtype, device=device))
        self.down = nn.Parameter(torch.empty(held, width, hidden, dtype=dtype, device=device))
        self.shared = FeedForward(width, config.shared_width, dtype, device) if config.shared_width else None
        self.dispatcher: Dispatcher = LocalDispatcher()

    def forward(
        self,
        x_ND: Tensor,
        flat: Flat | None,
        *,
        real: int,
        needed_M: Tensor | None = None,
        sizes: tuple[int, ...] = (),
        replay_NK: Tensor | None = None,
        router_loss: RouterLoss | None = None,
        observer: Observer | None = None,
        memo: Memo | None = None,
        recompute: bool = False,
    ) -> tuple[Tensor, Route]:
        """The layer's output, and what the router decided for all N positions.

        Args:
            x_ND: [N, D], normalised.
            flat: the microbatch; its classes are what counts are kept by. Only router losses and observers need it.
            real: expert rows run for positions [0, real); the others' routed output is zero. N = elide nothing.
            needed_M: the output is wanted at these positions only ([M] int64); no other row runs, output is [M, D].
            sizes: how many positions run expert rows, on every rank that shares the experts; () = alone.
            replay_NK: choices to use instead of the router's; -1 = the router's own for that position.
            router_loss: scalar added to the training loss by way of this layer's output.
            observer: told of every row.
            memo: of a layer that is recomputed as part of a block.
            recompute: give up the experts' activations (rows are dispatched again in the backward).
        """
        again = memo is not None and memo.again
        route = self.router(x_ND, memo.expert_NK if memo is not None and again else replay_NK, whole=again)

        def keep(t: Tensor) -> Tensor:
            return t[:real] if needed_M is None else t[needed_M]

        class_P = keep(flat.class_N) if observer is not None else None  # pyright: ignore[reportOptionalMemberAccess]
        kept_x = x_ND if needed_M is None and real == x_ND.shape[0] else keep(x_ND)
        expert_PK = keep(route.expert_NK)
        recompute = recompute and memo is None and torch.is_grad_enabled()
        memo = memo if memo is not None else Memo()
        expert_NK = route.expert_NK.detach()  # not the route itself: a recomputation keeps what `routed` names

        def routed(x_PD: Tensor, gate_PK: Tensor) -> Tensor:
            y, counts = self.dispatcher(
                x_PD, expert_PK, gate_PK, self.gate_up, self.down, class_P, sizes, memo
            )  # fmt: skip
            if observer is not None:
                y = self._tell(observer, y, counts, expert_NK, flat, class_P, memo.again)  # pyright: ignore
            memo.again = True
            return y

        if recompute:
            y = checkpoint(
                routed, kept_x, keep(route.gate_NK), use_reentrant=False, preserve_rng_state=False, early_stop=False
            )
        else:
            y = routed(kept_x, keep(route.gate_NK))
        assert isinstance(y, Tensor)
        memo.expert_NK = route.expert_NK
        if needed_M is None and real < x_ND.shape[0]:
            y = torch.cat((y, y.new_zeros(x_ND.shape[0] - real, y.shape[1])))
        if self.shared is not None:
            y = y + self.shared(kept_x if needed_M is not None else x_ND)
        if router_loss is not None:
            y = _Attach.apply(y, router_loss(self.layer, route, flat, again))  # pyright: ignore[reportArgumentType]
        return y, route

    def _tell(
        self, observer: Observer, y: Tensor, counts: DispatchCounts, expert_NK: Tensor, flat: Flat, class_P: Tensor,
        again: bool,
    ) -> Tensor:  # fmt: skip
        """y; tells of the layer's rows, and of their backward when it comes."""
        top_k, experts = expert_NK.shape[1], self.router.weight.shape[0]
        elided_C = (ops.count(flat.class_N, C) - ops.count(class_P, C)) * top_k
        if again:
            observer.recompute(self.layer, counts.dispatched_CE, elided_C, counts.dropped_C)
        else:
            # a position of a shared prompt is one row, but a decision for each of its children
            class_R, share_R = (x.repeat_interleave(top_k) for x in (flat.class_N, flat.share_N))
            decided_CE = count_CE(class_R, expert_NK.reshape(-1), experts, share_R)
            observer.layer(self.layer, decided_CE, counts.dispatched_CE, elided_C, counts.dropped_C)
        if not (torch.is_grad_enabled() and y.requires_grad):
            return y
        return _Watch.apply(y, lambda: observer.backward(self.layer, counts.dispatched_CE))  # pyright: ignore
