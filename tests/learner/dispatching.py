"""What the dispatch tests run in every process: one MoE layer, uneven positions, an empty expert and a crowded one.

Imported by spawned processes, so it is a module beside the tests and not a test itself.
"""

import functools
import os
import pickle
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from forked import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from moekit.learner.dispatch import SyncDispatcher, make_dispatcher
from moekit.learner.mesh import Wire, World
from moekit.learner.rowwise import RowwiseDispatcher
from moekit.learner.transport import TRANSPORTS, Symmetric, Transport, map_segment
from moekit.model.moe import LocalDispatcher, Memo

E, D, F, CROWDED, EMPTY = 8, 6, 5, 2, 5
POSITIONS = {2: (21, 8), 4: (13, 0, 4, 9)}  # P of every rank; one rank of 4 has none


def layer(positions, top_k, dtype, seed=0, load="crowded"):
    """Every rank's (x, expert, gate, class, dy), and the weights of all experts.

    Expert 2 is everybody's first choice, nobody's is 5; load="one": all rows go to expert 2 (top_k = 1).
    """
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    weights = [rand(E, 2 * F, D).to(dtype), rand(E, D, F).to(dtype)]
    ranks = []
    for p in positions:
        score = torch.rand(p, E, generator=g)
        score[: p if load == "one" else p - p // 4, CROWDED] += 2
        score[:, EMPTY] = -1
        expert = score.argsort(1, descending=True)[:, :top_k].contiguous()
        gate = torch.rand(p, top_k, generator=g, dtype=torch.float64)
        ranks.append((rand(p, D).to(dtype), expert, gate.to(dtype), torch.arange(p) % 4, rand(p, D).to(dtype)))
    return ranks, weights


def run(dispatcher, mine, weights, sizes, ep=None, memo=None, classes=True):
    """Forward and backward on this rank; what came out."""
    x, expert, gate, class_P, dy = mine
    e = weights[0].shape[0] // ep.size if ep else weights[0].shape[0]
    part = slice(ep.rank * e, (ep.rank + 1) * e) if ep else slice(None)
    leaves = [t.clone().requires_grad_() for t in (x, gate, weights[0][part], weights[1][part])]
    y, counts = dispatcher(
        leaves[0], expert, leaves[1], leaves[2], leaves[3], class_P if classes else None, sizes, memo
    )  # fmt: skip
    y.backward(dy)
    return {
        "y": y.detach(), "dx": leaves[0].grad, "dgate": leaves[1].grad, "dup": leaves[2].grad, "ddown": leaves[3].grad,
        "dispatched": counts.dispatched_CE if classes else None, "dropped": counts.dropped_C if classes else None,
    }  # fmt: skip


def alone(ranks, weights):
    """The same by `LocalDispatcher`, all ranks' positions in one process."""
    mine = tuple(torch.cat(ts) for ts in zip(*ranks))
    return run(LocalDispatcher(), mine, weights, ())


class Calls(TorchDispatchMode):
    """Every collective that torch starts inside: its name, and (dtype, bytes) of every tensor that it is given."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            self.made.append((func._opname, [(t.dtype, t.nbytes) for t in given]))
        return func(*args, **(kwargs or {}))

    @property
    def names(self):
        """How often each was called."""
        return Counter(name for name, _ in self.made)


def in_flight(dispatcher, ep, dtype, top_k=2):
    """Two microbatches of other sizes: both forwards, then both backwards in the order of the forwards."""
    out, second = [], tuple(reversed(POSITIONS[ep.size]))
    held = E // ep.size
    for seed, positions in ((0, POSITIONS[ep.size]), (1, second)):
        ranks, weights = layer(positions, top_k, dtype, seed)
        x, expert, gate, class_P, dy = ranks[ep.rank]
        part = slice(ep.rank * held, (ep.rank + 1) * held)
        leaves = [t.clone().requires_grad_() for t in (x, gate, weights[0][part], weights[1][part])]
        y, _ = dispatcher(leaves[0], expert, leaves[1], leaves[2], leaves[3], class_P, positions)
        out.append((y, dy, leaves))
    for y, dy, _ in out:
        y.backward(dy)
    return [{"y": y.detach(), **{n: t.grad for n, t in zip(("dx", "dgate", "dup", "ddown"), leaves)}}
            for y, _, leaves in out]  # fmt: skip


def recomputed(dispatcher, ep, mine, weights, sizes):
    """As `run`, the experts' activations given up and computed again in the backward; and the collectives of it."""
    x, expert, gate, class_P, dy = mine
    held = E // ep.size
    part = slice(ep.rank * held, (ep.rank + 1) * held)
    leaves = [t.clone().requires_grad_() for t in (x, gate, weights[0][part], weights[1][part])]
    memo, counts = Memo(), []

    def routed(x, gate):
        y, c = dispatcher(x, expert, gate, leaves[2], leaves[3], class_P, sizes, memo)
        counts.append(c.dispatched_CE)
        memo.again = True
        return y

    y = checkpoint(routed, leaves[0], leaves[1], use_reentrant=False, preserve_rng_state=False, early_stop=False)
    ep.wire.reset()
    with Calls() as calls:
        y.backward(dy)
    return {
        "y": y.detach(), **{n: t.grad for n, t in zip(("dx", "dgate", "dup", "ddown"), leaves)},
        "counted alike": len(counts) == 2 and torch.equal(*counts), "calls": calls.names,
        "sent": dict(ep.wire.sent),
    }  # fmt: skip


def without_labels(dispatcher, ep, sizes, dtype=torch.float64):
    """Rank 0's loss does not depend on its output's values, the last rank's x is a constant without a graph."""
    ranks, weights = layer(sizes, 2, dtype)
    x, expert, gate, _, dy = ranks[ep.rank]
    held = E // ep.size
    leaves = [w[ep.rank * held : (ep.rank + 1) * held].clone().requires_grad_() for w in weights]
    x = x.clone().requires_grad_(ep.rank != ep.size - 1)
    y, _ = dispatcher(x, expert, gate, *leaves, None, sizes)
    (y[:0].sum() if ep.rank == 0 else (y * dy).sum()).backward()
    return {"dup": leaves[0].grad, "ddown": leaves[1].grad, "dx": x.grad}


class Peers(Symmetric):
    """Memory of other processes in the place of other GPUs': the addresses lead there, Triton interprets."""

    def __init__(self, ep):
        from moekit.kernels import rowwise

        Transport.__init__(self, ep)
        self.rowwise = rowwise

    def _rendezvous(self, ep, size):
        self.ep.barrier()
        whole = map_segment(ep, size * ep.size)
        addresses = [whole.data_ptr() + size * rank for rank in range(ep.size)]
        self.handle = SimpleNamespace(buffer_ptrs=addresses, barrier=ep.barrier)
        self.base_W = torch.tensor(addresses)
        return whole[size * ep.rank : size * (ep.rank + 1)]


def cases(ep: World) -> dict:
    """All that one world size has to show."""
    TRANSPORTS["symmetric"] = Peers
    sizes, out = POSITIONS[ep.size], {}
    make = {
        "sync": lambda capacity=8.0: SyncDispatcher(ep, E),
        "shared_memory": lambda capacity=8.0: RowwiseDispatcher(ep, E, "shared_memory", capacity),
        "padded": lambda capacity=8.0: RowwiseDispatcher(ep, E, "padded", capacity),
        "symmetric": lambda capacity=8.0: RowwiseDispatcher(ep, E, "symmetric", capacity),
    }
    for name, new in make.items():
        dispatcher = new()
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            for top_k in (1, 2, 3):
                ranks, weights = layer(sizes, top_k, dtype)
                out[name, dtype, top_k] = run(dispatcher, ranks[ep.rank], weights, sizes, ep)
        ranks, weights = layer(sizes, 2, torch.float64)
        mine = ranks[ep.rank]
        ep.wire.reset()
        with Calls() as calls:
            out[name, "counted"] = run(dispatcher, mine, weights, sizes, ep)
        out[name, "counted"] |= {"calls": calls.made, "sent": dict(ep.wire.sent)}
        out[name, "in flight"] = in_flight(dispatcher, ep, torch.float64)
        out[name, "recomputed"] = recomputed(dispatcher, ep, mine, weights, sizes)
        out[name, "without labels"] = without_labels(dispatcher, ep, sizes)
        with torch.no_grad():
            held = E // ep.size
            parts = [w[ep.rank * held : (ep.rank + 1) * held] for w in weights]
            out[name, "no gradient"] = dispatcher(mine[0], mine[1], mine[2], *parts, None, sizes)[0]
        one, few = layer(sizes, 1, torch.float64, load="one")
        out[name, "one expert"] = run(dispatcher, one[ep.rank], few, sizes, ep)
        nothing, few = layer((0,) * ep.size, 2, torch.float64)
        out[name, "nothing"] = run(dispatcher, nothing[ep.rank], few, (0,) * ep.size, ep)
        if name != "sync":
            small = new(0.6)
            out[name, "overflow"] = run(small, mine, weights, sizes, ep) | {
                "need": float(small.need),
                "used": float(small.used),
                "index": small.plan(mine[1], sizes).index_KP,
            }
            small.reset()
            out[name, "overflow"]["reset"] = float(small.need)
            small.close()
        if ep.size == 2:
            two = SyncDispatcher(ep, 2) if name == "sync" else RowwiseDispatcher(ep, 2, name, 8.0)
            out[name, "BC-049"] = linear(two, ep, [[[1.0], [3.0]]])
            out[name, "BC-053"] = linear(two, ep, [[[1.0], [6.0]], [[2.0], []], [[3.0], []]])
            two.close()
        dispatcher.close()
    out["files"] = [p.name for p in Path("/dev/shm").glob("moekit-*")]
    return out


def linear(dispatcher, ep, rounds):
    """One expert y = w x in rounds of tokens, the mean over all tokens as loss (BC-049, BC-053).

    x = (token, 1), up = (1, 0), gate = (0, c) with silu(c) = 1, down = (w, 0): the expert is linear, w = 1.
    """
    c = 1.2784645427610738
    up = torch.tensor([[[0.0, c], [1.0, 0.0]]], dtype=torch.float64, requires_grad=True)
    down = torch.tensor([[[1.0], [0.0]]], dtype=torch.float64, requires_grad=True)
    tokens = sum(len(t) for ranks in rounds for t in ranks)
    loss, rows, dx = 0.0, [], []
    for ranks in rounds:
        mine = torch.tensor(ranks[ep.rank], dtype=torch.float64)
        x = torch.stack((mine, torch.ones_like(mine)), 1).requires_grad_()
        expert = torch.zeros(len(mine), 1, dtype=torch.int64)
        y, counts = dispatcher(
            x, expert, torch.ones(len(mine), 1, dtype=torch.float64), up, down,
            torch.zeros(len(mine), dtype=torch.int64), tuple(len(t) for t in ranks),
        )  # fmt: skip
        part = y[:, 0].sum() / tokens
        part.backward()
        loss, rows, dx = loss + part.item(), [*rows, int(counts.dispatched_CE.sum())], [*dx, x.grad[:, 0].tolist()]
    return {"loss": loss, "dw": float(down.grad[0, 0, 0]), "rows": rows, "dx": dx}


def timing(ep):
    """Processor time and wall time of a rank that waits for a slow peer at a window."""
    dispatcher = RowwiseDispatcher(ep, E, "shared_memory", 8.0)
    ranks, weights = layer(POSITIONS[ep.size], 1, torch.float32)
    run(dispatcher, ranks[ep.rank], weights, POSITIONS[ep.size], ep)
    start, busy = time.perf_counter(), time.process_time()
    dist.barrier()  # rank 0 sleeps when all have looked at their clocks
    if ep.rank == 0:
        time.sleep(0.7)
    run(dispatcher, ranks[ep.rank], weights, POSITIONS[ep.size], ep)
    return time.perf_counter() - start, time.process_time() - busy


def gone(ep: World) -> str:
    """Rank 1 is killed between two steps; what rank 0 gets."""
    from moekit.errors import MoekitError

    dispatcher = RowwiseDispatcher(ep, E, "shared_memory", 8.0)
    ranks, weights = layer(POSITIONS[2], 1, torch.float32)
    plan = dispatcher.plan(ranks[ep.rank][1], POSITIONS[2])
    run(dispatcher, ranks[ep.rank], weights, POSITIONS[2], ep)
    if ep.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dispatcher.transport.deliver(plan, dispatcher.transport.targets(plan, [ranks[0][0]]), True)
    except MoekitError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def main(rank: int, size: int, folder: str, what: str) -> None:
    """One rank of a gloo world."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    world = World(rank, size, dist.group.WORLD, Wire())
    result = gone(world) if what == "gone" else cases(world) | {"timing": timing(world)}
    if what != "gone":
        from moekit.config import LearnerConfig

        for dispatch in ("sync", "rowwise"):
            made = make_dispatcher(LearnerConfig(ep=size, dispatch=dispatch), world, E)
            result[f"made {dispatch}"] = (type(made).__name__, made.explain)
    Path(folder, f"rank_{rank}.pkl").write_bytes(pickle.dumps(result))
    if what != "gone":
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)


@functools.cache
def results(size: int) -> list[dict]:
    """What every rank of a world of `size` shows; one start of processes for all test files."""
    with tempfile.TemporaryDirectory() as folder:
        codes, found = start(Path(folder), size)
    assert codes == [0] * size
    return found


def start(folder: Path, size: int, what: str = "cases", timeout: float = 120) -> tuple[list[int | None], list]:
    """Run `main` in `size` processes; their exit codes, and the results of those that left one."""
    codes = run_ranks(__file__, [(r, size, folder, what) for r in range(size)], timeout)
    found = [Path(folder, f"rank_{r}.pkl") for r in range(size)]
    return codes, [pickle.loads(p.read_bytes()) if p.exists() else None for p in found]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
