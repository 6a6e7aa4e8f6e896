"""How routed rows get from the rank of their position to the rank of their expert, and back.

A plan says where every row goes; a transport moves rows to there (`targets`, then `deliver`) and back (`give_back`), in
plain tensors. `Send` and `Combine` make the pair differentiable: the backward of either runs the other direction, so
rows cross the wire once out and once back in a forward, and the same in a backward. All transports obey the plan's
keep decision, which is made for a rank's whole buffer, never for a pair of ranks.

Axis letters: W ranks that share the experts, P positions whose expert rows run, K choices of a position, R rows of
this rank's buffer, E experts, D width.
"""

import mmap
import os
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import ops
from ..errors import BackendError, ConfigError, StorageError
from .mesh import World

FOLDER = Path("/dev/shm")
ALIGN = 4096  # bytes
KINDS = ("rows", "metadata")  # what is delivered: rows, and the class of each row, a byte


@dataclass
class Plan:
    """Where the rows of one microbatch and layer go. Tensors are int64 and stay on their device."""

    index_KP: Tensor  # choice k of position p stands there, in `targets` and in what `give_back` returns
    offset_E: Tensor  # where the rows of each expert held here end
    counts: Any = None  # the `DispatchCounts` of the first forward
    # exactly the rows that there are:
    order_R: Tensor | None = None  # the r-th arrived row in expert order; None = they stand in that order
    send: list[int] = field(default_factory=list)  # rows to and from every rank
    got: list[int] = field(default_factory=list)
    # buffers of fixed size:
    room: int = 0  # rows of every rank's buffer
    block: int = 0  # rows that one rank can send to one other
    dropped_P: Tensor | None = None  # choices of each position that found no room
    at_R: Any = None  # where buffer row r stands in W blocks that arrived, W * block = nowhere; padded
    rank_S: Any = None  # symmetric: rank and buffer row of every choice, choice by choice; row -1 = dropped
    row_S: Any = None
    sent: Any = 0  # rows of this rank kept by others, and rows of others kept here
    served: Any = 0


class Transport:
    """What moves rows. Every rank calls the same methods in the same order; all are collective.

    `targets(plan, parts)`: memory to write rows into, at `plan.index_KP`: for each part a piece as wide, of its dtype.
    `deliver(plan, targets, keep)`: brings what was written to the experts' ranks; returns what arrived here, a piece
    for each target. `keep` = it must outlive the next call.
    `give_back(plan, rows_RD)`: brings rows home that were made of arrived ones; each stands at its `plan.index_KP`
    again, and where dropped ones look there is zero.
    """

    name = ""
    borrowed = True  # what `give_back` returns is overwritten soon, or larger than the rows that were asked for
    targets: Callable[[Plan, list[Tensor]], list[Tensor]]
    deliver: Callable[[Plan, list[Tensor], bool], list[Tensor]]
    give_back: Callable[[Plan, Tensor], Tensor]

    def __init__(self, ep: World):
        self.ep, self.turn = ep, 0
        self.memory: Any = None  # uint8, two windows; of transports that have them

    def _window(self, rows: int, parts: list[Tensor], make: Callable[[World, int], Tensor]) -> list[Tensor]:
        """Pieces [rows, width] of the window whose turn it is, for every part; memory is made anew if too small."""
        sizes = [rows * p.shape[1] * p.element_size() for p in parts]
        starts = [0, *accumulate(-(-n // ALIGN) * ALIGN for n in sizes)]
        if self.memory is None or starts[-1] > self.memory.shape[0] // 2:
            self.memory = make(self.ep, 2 * starts[-1])
        self.turn = 1 - self.turn
        window = self.memory[self.turn * (self.memory.shape[0] // 2) :]
        return [window[a : a + n].view(p.dtype).view(rows, p.shape[1]) for a, n, p in zip(starts, sizes, parts)]

    def close(self) -> None:
        """Free what is held."""
        self.memory = None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class Send(torch.autograd.Function):
    """Rows of positions to the ranks of their experts. d x_p = sum_k of the gradients that come back."""

    @staticmethod
    def forward(ctx, x_PD, class_P, plan: Plan, transport: Transport, keep: bool):
        parts = [x_PD] if class_P is None else [x_PD, class_P.to(torch.uint8)[:, None]]
        targets = transport.targets(plan, parts)
        for target, part in zip(targets, parts):
            for index_P in plan.index_KP.unbind():
                target.index_copy_(0, index_P, part)
        rows_RD, *classes = transport.deliver(plan, targets, keep)
        ctx.plan, ctx.transport, ctx.positions = plan, transport, x_PD.shape[0]
        return rows_RD, classes[0][:, 0] if classes else None

    @staticmethod
    @once_differentiable
    def backward(ctx, drows_RD, _):
        back = ctx.transport.give_back(ctx.plan, drows_RD)
        dx_PD = back.new_zeros(ctx.positions, back.shape[1], dtype=_wide(back.dtype))
        for index_P in ctx.plan.index_KP.unbind():
            dx_PD.add_(back.index_select(0, index_P))
        return dx_PD.to(back.dtype), None, None, None, None


class Combine(torch.autograd.Function):
    """y_p = sum_k gate_pk * row_pk, rows brought home from their experts; d gate_pk = <dy_p, row_pk>.

    Sums over k run in the order of k and in float32 at least, alike for all transports. Keeps the K*P rows.
    """

    @staticmethod
    def forward(ctx, rows_RD, gate_PK, plan: Plan, transport: Transport, keep: bool):
        back, index_KP = transport.give_back(plan, rows_RD), plan.index_KP
        if keep and transport.borrowed:
            back = back.index_select(0, index_KP.reshape(-1))
            index_KP = torch.arange(index_KP.numel(), device=back.device).view_as(index_KP)
        y_PD = back.new_zeros(gate_PK.shape[0], back.shape[1], dtype=_wide(back.dtype))
        for index_P, gate_P in zip(index_KP.unbind(), gate_PK.to(y_PD.dtype).unbind(1)):
            y_PD.addcmul_(back.index_select(0, index_P).to(y_PD.dtype), gate_P[:, None])
        ctx.save_for_backward(gate_PK, back if keep else None, index_KP)
        ctx.plan, ctx.transport = plan, transport
        return y_PD.to(rows_RD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_PD):
        gate_PK, back, index_KP = ctx.saved_tensors  # first: this may run the forward again, which exchanges rows
        plan, transport, dy = ctx.plan, ctx.transport, dy_PD.to(_wide(dy_PD.dtype))
        (target,) = transport.targets(plan, [dy_PD])
        for index_P, gate_P in zip(plan.index_KP.unbind(), gate_PK.to(dy.dtype).unbind(1)):
            target.index_copy_(0, index_P, (dy * gate_P[:, None]).to(target.dtype))
        (drows_RD,) = transport.deliver(plan, [target], True)
        if back is None:
            return drows_RD, None, None, None, None
        dgate_PK = torch.empty_like(gate_PK)
        for k, index_P in enumerate(index_KP.unbind()):
            dgate_PK[:, k] = (dy * back.index_select(0, index_P)).sum(-1)
        return drows_RD, dgate_PK, None, None, None


def places(ep: World) -> list[str]:
    """For every rank, in rank order, which host it is on and which shared memory it sees. Collective."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text().strip() if boot.exists() else socket.gethostname()
    return ep.gather(f"{host}/{FOLDER.stat().st_dev}" if FOLDER.is_dir() else f"{host}/no {FOLDER}")


def one_host(found: list[str]) -> bool:
    """Whether ranks at these `places` can share memory by way of `FOLDER`."""
    return len(set(found)) == 1 and f"no {FOLDER}" not in found[0]


def map_segment(ep: World, size: int) -> Tensor:
    """`size` bytes that all ranks of one host see; collective. The file is gone when this returns, or raises.

    All pages are allocated here: a first write to a page that does not fit would end the process by SIGBUS.

    Raises:
        StorageError: on all ranks, if it does not fit.
    """
    path, problem, memory = FOLDER / ep.gather(f"moekit-{uuid.uuid4().hex}")[0], "", None
    try:
        for turn in (0, 1):  # rank 0 makes it, then the others open it
            if (ep.rank > 0) == turn:
                try:
                    fd = os.open(path, os.O_RDWR | (0 if turn else os.O_CREAT | os.O_EXCL), 0o600)
                    try:
                        if not turn:
                            os.posix_fallocate(fd, 0, size)
                        memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
                    finally:
                        os.close(fd)
                except OSError as error:
                    problem = f"rank {ep.rank}: {error.strerror}"
            if problems := [p for p in ep.gather(problem) if p]:
                room = os.statvfs(FOLDER)
                raise StorageError(
                    f"rowwise dispatch asked for {size:,} bytes of shared memory, {FOLDER} has "
                    f"{room.f_bavail * room.f_frsize:,} free ({problems[0]}); make it larger (docker: --shm-size) or "
                    "set transport='padded'"
                )
    finally:  # all have mapped it, or somebody gave up or is gone: whoever is left takes the name away
        path.unlink(missing_ok=True)
    return torch.frombuffer(memory, dtype=torch.uint8)  # pyright: ignore[reportArgumentType]


class SharedMemory(Transport):
    """One-sided writes and reads in memory that the processes of a host share; no collective carries rows.

    A segment holds two windows, used in turn; a window has a buffer of `room` rows and a trash row for every rank. To
    deliver, a rank writes its rows where they belong in the others' buffers; to give back, it writes its own buffer
    and the others read from it. One barrier stands between writing and reading, and none is needed between reading and
    the next exchange: exchange n+2 writes the same window as n, a rank starts it only after the barrier of n+1, and
    everybody enters that one after reading n. Whatever must outlive the next exchange is copied out of the window:
    arrived rows (the backward needs them) and rows that came home. The segment grows when a larger buffer is asked
    for, on all ranks at the same call, because sizes are known on every host.

    Raises:
        ConfigError: ranks of several hosts, or no shared memory here.
    """

    name = "shared_memory"

    def __init__(self, ep: World):
        super().__init__(ep)
        if ep.cuda:
            raise ConfigError("transport='shared_memory' is for CPU processes, not for GPUs; use 'padded'")
        if not one_host(found := places(ep)):
            raise ConfigError(
                f"transport='shared_memory' needs all {ep.size} expert-parallel ranks on one host with {FOLDER}; "
                f"they are on {sorted(set(found))}; set transport='padded'"
            )

    def targets(self, plan: Plan, parts: list[Tensor]) -> list[Tensor]:
        """[W * (room + 1), width] for every part, in the window that is next."""
        return self._window(self.ep.size * (plan.room + 1), parts, self._map)

    def _map(self, ep: World, size: int) -> Tensor:
        self.memory = None  # all let go of the old one before the new one is made
        return map_segment(ep, size)

    def _own(self, plan: Plan, window: Tensor) -> Tensor:
        return window.view(self.ep.size, plan.room + 1, -1)[self.ep.rank]

    def _wait(self) -> None:
        """Until every rank has written. The backend sleeps while it waits, and knows when a peer is gone."""
        try:
            self.ep.barrier()
        except RuntimeError as error:
            raise BackendError(
                f"rank {self.ep.rank} of {self.ep.size} expert-parallel ranks waited for rows, and a peer is gone or "
                f"did not answer in time; look at the other ranks' logs ({error})"
            ) from error

    def deliver(self, plan: Plan, targets: list[Tensor], keep: bool) -> list[Tensor]:
        """This rank's buffer, copied if it is to be kept."""
        self._wait()
        for kind, t in zip(KINDS, targets):
            self.ep.wire.add(kind, plan.sent * (t.shape[1] * t.element_size()))
        own = [self._own(plan, t)[: plan.room] for t in targets]
        return [t.clone() for t in own] if keep else own

    def give_back(self, plan: Plan, rows_RD: Tensor) -> Tensor:
        """The window that holds everybody's buffer; the own trash row, which dropped rows read, is zero."""
        (window,) = self.targets(plan, [rows_RD])
        own = self._own(plan, window)
        own[: plan.room].copy_(rows_RD)
        own[plan.room].zero_()
        self.ep.wire.add("rows", plan.served * (rows_RD.shape[1] * rows_RD.element_size()))
        self._wait()
        return window


class Padded(Transport):
    """Equal-split all-to-all: every rank sends every other a block of `plan.block` rows, mostly padding.

    A block is as tall as what one rank can have kept at one other, min(room, K * largest P): no count is read. The
    padding is sent, so the wire counts it.
    """

    name = "padded"

    def targets(self, plan: Plan, parts: list[Tensor]) -> list[Tensor]:
        """W blocks and a last row for what is not sent."""
        return [p.new_empty(self.ep.size * plan.block + 1, p.shape[1]) for p in parts]

    def _swap(self, target: Tensor, kind: str) -> Tensor:
        """Block w of rank v becomes block v of rank w; the last row is zero."""
        out = torch.empty_like(target)
        self.ep.all_to_all(target[:-1], out[:-1], kind=kind)
        out[-1].zero_()
        return out

    def deliver(self, plan: Plan, targets: list[Tensor], keep: bool) -> list[Tensor]:
        """This rank's buffer, its rows picked from the blocks."""
        return [self._swap(t, kind).index_select(0, plan.at_R) for kind, t in zip(KINDS, targets)]

    def give_back(self, plan: Plan, rows_RD: Tensor) -> Tensor:
        """Own rows in the blocks that they were sent in."""
        (target,) = self.targets(plan, [rows_RD])
        return self._swap(target.index_copy_(0, plan.at_R, rows_RD), "rows")


class Symmetric(Transport):
    """Rows put into the buffers of the other GPUs of a host, and fetched from there, by address: no collective runs.

    Torch symmetric memory gives the addresses, `kernels/rowwise.py` moves the rows. Unproven across GPUs: it has not
    run on two yet. Two windows of `room` rows in turn, as in `SharedMemory` and for its reason; barriers are on the
    stream, the host waits for nothing. Rows that found no room are not sent, and come home as zero.

    Raises:
        BackendError: not on CUDA, or `set_backend` keeps Triton off.
    """

    name, borrowed = "symmetric", False

    def __init__(self, ep: World):
        if not ep.cuda:
            raise BackendError(
                "transport='symmetric' needs CUDA (torch symmetric memory has no form for cpu); "
                "use 'shared_memory' between processes of a host, or 'padded'"
            )
        super().__init__(ep)
        self.rowwise = ops.rows_by_address("cuda")

    def targets(self, plan: Plan, parts: list[Tensor]) -> list[Tensor]:
        """Room for this rank's rows, choice by choice."""
        return [p.new_empty(plan.index_KP.numel(), p.shape[1]) for p in parts]

    def _rendezvous(self, ep: World, size: int) -> Tensor:
        from torch.distributed import _symmetric_memory as symmetric

        torch.cuda.synchronize()  # the old memory may go: nobody reads it once all ranks are here
        made = symmetric.empty(size, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
        self.handle: Any = symmetric.rendezvous(made, ep.group)  # pyright: ignore[reportArgumentType]
        before = made.data_ptr() - int(self.handle.buffer_ptrs[ep.rank])  # in its allocation; alike on all ranks
        self.base_W = torch.tensor(self.handle.buffer_ptrs, device=made.device) + before
        return made

    def _peers(self, window: Tensor) -> Tensor:
        """Where every rank has this window."""
        return self.base_W + (window.storage_offset() * window.element_size() - self.memory.storage_offset())

    def deliver(self, plan: Plan, targets: list[Tensor], keep: bool) -> list[Tensor]:
        """This rank's buffer, copied if it is to be kept."""
        windows = self._window(plan.room, targets, self._rendezvous)
        for kind, t, window in zip(KINDS, targets, windows):
            self.rowwise.put(t, self._peers(window), plan.rank_S, plan.row_S)
            self.ep.wire.add(kind, plan.sent * (t.shape[1] * t.element_size()))
        self.handle.barrier()
        return [w.clone() for w in windows] if keep else windows

    def give_back(self, plan: Plan, rows_RD: Tensor) -> Tensor:
        """Own rows, choice by choice, from the windows where their experts' ranks have put them."""
        (window,) = self._window(plan.room, [rows_RD], self._rendezvous)
        window.copy_(rows_RD)
        self.ep.wire.add("rows", plan.served * (rows_RD.shape[1] * rows_RD.element_size()))
        self.handle.barrier()
        out = rows_RD.new_empty(plan.index_KP.numel(), rows_RD.shape[1])
        return self.rowwise.get(out, self._peers(window), plan.rank_S, plan.row_S)


TRANSPORTS: dict[str, type] = {t.name: t for t in (SharedMemory, Padded, Symmetric)}
