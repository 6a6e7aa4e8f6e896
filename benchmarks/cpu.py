"""One MoE layer on this CPU, forward and backward: moekit's forms beside what torch offers, in one table.

    python benchmarks/cpu.py [--config B] [--dtype float32] [--threads 2] [--rows 1 4 16 64 256] [--load uniform]
    MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_MMAP_THRESHOLD_=17179869184 python benchmarks/cpu.py   # another allocator

GFLOP/s of the useful products (18 * rows * width * expert width), median (min-max) of interleaved repetitions. Every
call makes fresh gradients of x, gates and weights; "grad slots" writes the weights' into float32 buffers that stay, as
the learner does. "dense" does the same FLOPs with one expert's weights; "memory" is the time to read all weights twice
and write their gradient once, at the measured rate of reading. Columns first agree with the reference, then are timed.
Takes 1 to 3 minutes.
"""

import argparse
import os
import statistics
import time

import torch
import torch.nn.functional as F

from moekit import ops
from moekit.kernels import cpu_choice, cpu_ffn, ragged

CONFIGS = {"A": (16, 4, 256, 128), "B": (64, 8, 512, 256)}  # experts, top_k, width, expert width


def swiglu(pre):
    gate, up = pre.chunk(2, -1)
    return F.silu(gate) * up


def gathered(x, rows, gate, experts):
    """Rows in expert order through `experts`, weighted, added up."""
    y = experts(x[rows.row_R]) * gate.reshape(-1)[rows.slot_R, None]
    return torch.zeros_like(x).index_add(0, rows.row_R, y)


def loop(x, rows, gate, up, down):
    def experts(r):
        parts = zip(r.split(rows.count_E.tolist()), up.unbind(), down.unbind())
        return torch.cat([F.linear(swiglu(F.linear(p, a)), b) for p, a, b in parts])

    return gathered(x, rows, gate, experts)


def grouped_mm(x, rows, gate, up, down):
    offset = rows.offset_E.int()
    pre = lambda r: F.grouped_mm(r, up.transpose(1, 2), offs=offset)
    return gathered(x, rows, gate, lambda r: F.grouped_mm(swiglu(pre(r)), down.transpose(1, 2), offs=offset))


def padded_bmm(x, rows, gate, up, down):
    experts, height = up.shape[0], int(rows.count_E.max())
    place = rows.expert_R * height + torch.arange(rows.rows) - (rows.offset_E - rows.count_E)[rows.expert_R]

    def run(r):
        full = r.new_zeros(experts * height, r.shape[1]).index_copy(0, place, r).view(experts, height, -1)
        return torch.bmm(swiglu(torch.bmm(full, up.transpose(1, 2))), down.transpose(1, 2)).flatten(0, 1)[place]

    return gathered(x, rows, gate, run)


def inputs(config, dtype, rows, load):
    E, K, D, width = CONFIGS[config]
    N = max(1, rows * E // K)
    g = torch.Generator().manual_seed(0)
    make = lambda *shape: (torch.randn(*shape, generator=g) * 0.05).to(dtype).requires_grad_()
    share = torch.ones(E) if load == "uniform" else 1 / torch.arange(1, E + 1)
    expert = torch.multinomial(share.expand(N, -1), K, generator=g)
    gate = torch.rand(N, K, generator=g).to(dtype).requires_grad_()
    return expert, (make(N, D), gate, make(E, 2 * width, D), make(E, D, width)), make(N, D).detach()


def columns(expert, tensors, dy):
    """Name to a callable of one forward and backward."""
    x, gate, up, down = tensors
    E = up.shape[0]
    slotted = [t.detach().requires_grad_() for t in (up, down)]
    for t in slotted:
        t.grad_slot = ops.GradSlot(torch.zeros(t.shape))
    one = [t[0].detach().clone().requires_grad_() for t in (up, down)]
    wide, dwide = (
        x.detach().repeat_interleave(expert.shape[1], 0).requires_grad_(),
        dy.repeat_interleave(gate.shape[1], 0),
    )

    def case(form, *weights):
        def run():
            y = form(x, ops.sort_rows(expert, E), gate, *weights)
            y.backward(dy)
            for t in (x, gate, *weights):
                t.grad = None
                if hasattr(t, "grad_slot"):
                    t.grad_slot.filled = False
            return y.detach()

        return run

    def dense():
        F.linear(swiglu(F.linear(wide, one[0])), one[1]).backward(dwide)
        for t in (wide, *one):
            t.grad = None

    forms = {"loop": loop, "padded bmm": padded_bmm, "grouped_mm": grouped_mm, "moekit, torch form": ragged.moe_ffn}
    if cpu_ffn.fits(x.dtype)[0]:
        forms["moekit, native form"] = cpu_ffn.moe_ffn
    found = {name: case(form, up, down) for name, form in (forms | {"moekit": ops.moe_ffn}).items()}
    return found | {"moekit, grad slots": case(ops.moe_ffn, *slotted), "dense": dense}


def check(found, expert, tensors, tolerance):
    before = ops.set_backend("reference")
    want = ops.moe_ffn(tensors[0], ops.sort_rows(expert, tensors[2].shape[0]), *tensors[1:]).detach()
    ops.set_backend(before)
    for name, run in found.items():
        if name != "dense" and (run() - want).norm() > tolerance * want.norm():
            raise ValueError(f"{name} disagrees with the reference")


def seconds(run, least=0.1):
    start, calls = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < least:
        run()
        calls += 1
    return spent / calls


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--config", default="B", choices=CONFIGS)
    p.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    p.add_argument("--rows", type=int, nargs="*", default=[1, 4, 16, 64, 256], help="per expert, on average")
    p.add_argument("--load", default="uniform", choices=["uniform", "skewed"])
    p.add_argument("--rounds", type=int, default=5)
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    dtype, (E, K, D, width) = getattr(torch, args.dtype), CONFIGS[args.config]
    buffer = torch.ones(1 << 26)
    rate = buffer.nbytes / min(seconds(buffer.sum) for _ in range(5))
    malloc = {k: v for k, v in os.environ.items() if k.startswith("MALLOC_") or k in ("LD_PRELOAD", "GLIBC_TUNABLES")}
    print(
        f"configuration {args.config}: {E} experts, top-{K}, width {D}, expert width {width}; {args.dtype}, {args.load}"
    )
    print(f"{args.threads} threads, {rate / 1e9:.1f} GB/s read, allocator {malloc or 'default'}")
    print(ops.explain(dtype=dtype)["moe_ffn"])
    table = {}
    for rows in args.rows:
        expert, tensors, dy = inputs(args.config, dtype, rows, args.load)
        found = columns(expert, tensors, dy)
        check(found, expert, tensors, 1e-5 if dtype == torch.float32 else 2e-2)
        work = 18 * expert.numel() * D * width / 1e9
        times = {name: [] for name in found}
        for _ in range(args.rounds):
            for name, run in found.items():
                times[name].append(work / seconds(run))
        cells = {n: f"{statistics.median(v):.4g} ({min(v):.4g}-{max(v):.4g})" for n, v in times.items()}
        memory = work / (9 * E * D * width * dtype.itemsize / rate)
        table[rows] = cells | {"memory": f"{memory:.4g}"}
    names = list(table[args.rows[0]])
    print("| GFLOP/s, rows per expert | " + " | ".join(map(str, args.rows)) + " |\n|" + "---|" * (len(args.rows) + 1))
    for name in names:
        print(f"| {name} | " + " | ".join(table[rows][name] for rows in args.rows) + " |")
    for key, choice in cpu_choice.choices().items():
        print(f"{key}: {choice['form']} {choice['seconds']}")


if __name__ == "__main__":
    main()
