"""Expert parallelism: positions stay on their rank, their rows visit the ranks that hold their experts.

Two dispatchers with the same numbers, bit for bit: `SyncDispatcher` exchanges counts, reads them on the host and sends
exactly the rows that there are; `rowwise.RowwiseDispatcher` reads nothing on the host and uses buffers of fixed size.
Both run an expert's rows in the order source rank, row, and apply the gates where the position lives.

Axis letters: W ranks that share the experts, P positions whose expert rows run, K choices of a position, R routed rows
that came here, E experts, e experts held here, C = 4 position classes, D width, F expert width.
"""

import torch
from torch import Tensor

from .. import ops
from ..config import LearnerConfig
from ..errors import ConfigError
from ..model.moe import C, DispatchCounts, Dispatcher, LocalDispatcher, Memo
from .mesh import World
from .transport import KINDS, Combine, Plan, Send, Transport, one_host, places


class ExpertParallel:
    """What the two dispatchers share: plan once, send, run the experts, combine, count.

    y_p = sum_k gate_pk * down_e @ swiglu(gate_up_e @ x_p), e = expert_pk, for all ranks' experts e

    Collective: every rank calls it as often as every other, with P = 0 too, and so does its backward: a graph that
    reaches any weight or input here reaches both exchanges. Safe with several layers and several forwards in flight,
    whose backwards come in any order that is the same on all ranks.

    Args:
        ep: the ranks that share the experts; rank r holds experts [r * E / W, (r + 1) * E / W).
        experts: E.

    Raises:
        ConfigError: W does not divide E.
    """

    def __init__(self, ep: World, experts: int, transport: Transport, explain: str):
        if experts % ep.size:
            raise ConfigError(f"{experts} experts cannot be split over {ep.size} expert-parallel ranks")
        self.ep, self.experts, self.transport, self.explain = ep, experts, transport, explain

    def plan(self, expert_PK: Tensor, sizes: tuple[int, ...]) -> Plan:
        """Where the rows go. Collective."""
        raise NotImplementedError

    def __call__(self, x_PD, expert_PK, gate_PK, gate_up_E2FD, down_EDF, class_P=None, sizes=(), memo=None):
        """See `moekit.model.moe.Dispatcher`. A recomputation exchanges rows, and neither counts nor classes.

        Cost: P * K rows of D numbers out and back (in the dtype of x), and again in the backward. Keeps the arrived
        rows [R, D], the rows that came home [P * K, D] and the experts' pre-activations [R, 2F].
        """
        if gate_up_E2FD.shape[0] * self.ep.size != self.experts:
            raise ConfigError(f"{gate_up_E2FD.shape[0]} experts here, not {self.experts} / {self.ep.size}")
        memo = memo or Memo()
        plan: Plan = memo.plan if memo.again else self.plan(expert_PK, sizes)
        memo.plan, keep = plan, torch.is_grad_enabled()
        if keep and (gate_up_E2FD.requires_grad or gate_PK.requires_grad) and not x_PD.requires_grad:
            x_PD = x_PD.detach().requires_grad_()  # on some rank x may be a constant: its backward must still take part
        classes = None if memo.again else class_P
        rows_RD, class_R = Send.apply(x_PD, classes, plan, self.transport, keep)  # pyright: ignore
        if classes is not None:
            plan.counts = self._count(plan, class_R, classes)
        y_RD = ops.expert_ffn(rows_RD, plan.offset_E, gate_up_E2FD, down_EDF, plan.order_R)
        y_PD = Combine.apply(y_RD, gate_PK, plan, self.transport, keep and gate_PK.requires_grad)
        return y_PD, None if class_P is None else plan.counts

    def _count(self, plan: Plan, class_R: Tensor, class_P: Tensor) -> DispatchCounts:
        """Rows that run here, by the class that came with them; own rows that found no room."""
        if plan.order_R is not None:
            class_R = class_R[plan.order_R]
        at_R = torch.arange(class_R.shape[0], device=class_R.device)
        held = plan.offset_E.shape[0]
        local_R = torch.searchsorted(plan.offset_E, at_R, right=True)  # `held` = room
        bin_R = class_R.long() * self.experts + self.ep.rank * held + local_R
        bins = C * self.experts
        dispatched = ops.count(torch.where(local_R < held, bin_R, bins), bins + 1)[:-1].view(C, self.experts)
        dropped_C = class_P.new_zeros(C)
        if plan.dropped_P is not None:
            dropped_C = dropped_C.scatter_add_(0, class_P, plan.dropped_P)
        return DispatchCounts(dispatched, dropped_C)

    def close(self) -> None:
        """Free what the transport holds."""
        self.transport.close()


class AllToAll(Transport):
    """The synchronized path's transport: exactly the rows that there are, in the order of experts."""

    name, borrowed = "all_to_all", False

    def targets(self, plan: Plan, parts: list[Tensor]) -> list[Tensor]:
        """Room for this rank's rows."""
        return [p.new_empty(sum(plan.send), p.shape[1]) for p in parts]

    def deliver(self, plan: Plan, targets: list[Tensor], keep: bool) -> list[Tensor]:
        """One uneven all-to-all for rows, one for their classes."""
        out = [t.new_empty(sum(plan.got), t.shape[1]) for t in targets]
        for kind, t, o in zip(KINDS, targets, out):
            self.ep.all_to_all(t, o, plan.send, plan.got, kind)
        return out

    def give_back(self, plan: Plan, rows_RD: Tensor) -> Tensor:
        """The way back."""
        out = rows_RD.new_empty(sum(plan.send), rows_RD.shape[1])
        return self.ep.all_to_all(rows_RD.contiguous(), out, plan.got, plan.send)


class SyncDispatcher(ExpertParallel):
    """Synchronized dispatch: counts, a host read of them, uneven all-to-all. Dropless; no buffer, no capacity."""

    def __init__(self, ep: World, experts: int):
        super().__init__(ep, experts, AllToAll(ep), "sync: counts, then uneven all-to-all")

    def plan(self, expert_PK: Tensor, sizes: tuple[int, ...] = ()) -> Plan:
        """Exchange counts: E numbers from every rank, read on the host."""
        ranks, held = self.ep.size, self.experts // self.ep.size
        rows = ops.sort_rows(expert_PK, self.experts)
        count_We = self.ep.all_to_all(rows.count_E, torch.empty_like(rows.count_E), kind="metadata").view(ranks, held)
        send, got = torch.stack((rows.count_E.view(ranks, held).sum(1), count_We.sum(1))).tolist()
        local_R = torch.arange(held, device=expert_PK.device).repeat(ranks)
        local_R = torch.repeat_interleave(local_R, count_We.reshape(-1), output_size=sum(got))
        index_KP = inverse(rows.slot_R).view(expert_PK.shape).t().contiguous()
        order_R = torch.argsort(local_R, stable=True)  # source ranks stand one after the other
        return Plan(index_KP, count_We.sum(0).cumsum(0), order_R=order_R, send=send, got=got)


def inverse(order_R: Tensor) -> Tensor:
    """Of a permutation: inverse([2, 0, 1]) = [1, 2, 0]."""
    at_R = torch.arange(order_R.shape[0], device=order_R.device)
    return torch.empty_like(order_R).scatter_(0, order_R, at_R)


def make_dispatcher(config: LearnerConfig, ep: World, experts: int) -> Dispatcher:
    """The dispatcher that a configuration asks for; its `explain` says which and why. Collective over `ep`.

    transport="auto": memory shared between the processes of a host on CPU, symmetric memory between the GPUs of a
    host where Triton runs, padded all-to-all otherwise.

    Raises:
        ConfigError, BackendError: a transport that cannot work here.
    """
    from .rowwise import RowwiseDispatcher

    if ep.size == 1:
        return LocalDispatcher()
    if config.dispatch == "sync":
        return SyncDispatcher(ep, experts)
    name, why = str(config.transport), "as configured"
    if name == "auto":
        near, cuda = one_host(places(ep)), ep.cuda
        by_address = ops.explain("cuda")["rows_by_address"] if near and cuda else ""
        refused = by_address.startswith("refused")
        name = "padded" if not near or refused else "symmetric" if cuda else "shared_memory"
        why = f"{'CUDA' if cuda else 'CPU'} ranks on {'one host' if near else 'several hosts, or without /dev/shm'}"
        why += f", rows by address {by_address}" if refused else ""
    dispatcher = RowwiseDispatcher(ep, experts, name, config.capacity)
    dispatcher.explain = f"rowwise, {name}: {why}"
    return dispatcher
