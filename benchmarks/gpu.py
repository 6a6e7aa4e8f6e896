"""Kernels on a GPU: first whether they are right, then how fast. Under 6 minutes; one table, and a JSON file.

    python benchmarks/gpu.py [--quick] [--seconds 330] [--json gpu.json]
    TRITON_INTERPRET=1 python benchmarks/gpu.py --quick        # without a GPU: the first part, interpreted, on the CPU

Exit status: 0 = all that was checked is right, 1 = something is wrong or there was no time to check it, 2 = there is no
GPU. A goal that is missed is said in the table and changes nothing. `--quick` leaves the timing out.

Right: `gpu_checks.py`. Fast: medians of rounds in which all candidates take turns, the second-level cache flushed
before each.

Axis letters: N positions, K experts per position, R routed rows, E experts, D width, F expert width, M labels, V words.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch
import torch.nn.functional as F
from gpu_checks import CHECKS, DEVICE, INTERPRETED, randn, seed


@dataclass
class Row:
    """A line of the table. right: None = nothing was checked. met: None = there is no goal."""

    part: str  # "right", "fast" or "tile"
    name: str
    found: str
    right: bool | None = None
    met: bool | None = None
    seconds: float = 0.0


SPEEDS: list[tuple[str, Callable[[], list[Row]]]] = []


def speed(name: str):
    """Register a function that measures and returns rows."""
    return lambda function: SPEEDS.append((name, function)) or function


E, EACH, WIDE, OUT, TOP = 64, 1024, 2048, 1024, 8
LABELS, WORDS = 4096, 50304
GEMM_TILES = [(128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 8, 4), (128, 128, 64, 4, 4),
              (256, 128, 64, 8, 3), (64, 256, 64, 8, 4), (128, 128, 128, 8, 3)]  # fmt: skip
WEIGHT_TILES = [(128, 128, 64, 8, 4), (128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (128, 128, 128, 8, 3),
                (64, 256, 64, 8, 4)]  # fmt: skip
SCORE_TILES = [(128, 128, 64, 8, 3), (64, 256, 64, 8, 3), (128, 64, 64, 4, 4), (128, 256, 64, 8, 3)]
PASTE: list[str] = []


def seconds(candidates: dict[str, Callable[[], Any]], rounds: int = 20) -> dict[str, float]:
    """Median seconds of each; all take turns, after one warm call. One that raises is left out, and said."""
    flush = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
    times: dict[str, list[float]] = {}
    for name, run in candidates.items():
        try:
            run()
            torch.cuda.synchronize()
            times[name] = []
        except Exception as error:  # noqa: BLE001 - e.g. a tile that needs too much shared memory
            print(f"  {name}: {type(error).__name__}: {str(error).splitlines()[0][:100]}", file=sys.stderr)
    for _ in range(rounds):
        for name, found in times.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            begin.record()
            candidates[name]()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
    return {name: statistics.median(t) for name, t in times.items()}


def where() -> str:
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}"


def sweep(run: Callable[[Any], Any], tiles: list[tuple[int, ...]]) -> tuple[Any, Any, dict[str, float]]:
    """(shipped tile, fastest tile, seconds by tile); the first of the list is the one that is shipped."""
    from moekit.kernels.tuning import Tile

    made = {str(Tile(*t)): Tile(*t) for t in tiles}
    took = seconds({name: lambda t=t: run(t) for name, t in made.items()}, 8)
    return Tile(*tiles[0]), made[min(took, key=took.__getitem__)], took


@speed("grouped GEMM in bf16: 64 experts, 1024 rows each, 2048 -> 1024")
def gemms() -> list[Row]:
    from moekit.kernels.grouped_gemm import grouped_gemm, grouped_wgrad
    from moekit.kernels.tuning import NARROW, WEIGHTS

    assert NARROW[128] == type(NARROW[128])(*GEMM_TILES[0]) and WEIGHTS[2] == type(WEIGHTS[2])(*WEIGHT_TILES[0])
    g, R, half = seed(), E * EACH, torch.bfloat16
    x, dy, w = randn(R, WIDE, g=g, dtype=half), randn(R, OUT, g=g, dtype=half), randn(E, OUT, WIDE, g=g, dtype=half)
    offset = torch.arange(1, E + 1, device=DEVICE) * EACH
    ends, dense, dw = offset.int(), w[0].contiguous(), torch.empty_like(w)
    out = {n: torch.empty(R, n, dtype=half, device=DEVICE) for n in (WIDE, OUT)}
    products = {
        "forward": (
            lambda t: grouped_gemm(x, w, offset, out=out[OUT], tile=t), GEMM_TILES,
            lambda: F.grouped_mm(x, w.mT, offs=ends), lambda: torch.mm(x, dense.T, out=out[OUT]),
        ),
        "dgrad": (
            lambda t: grouped_gemm(dy, w.mT, offset, out=out[WIDE], tile=t), GEMM_TILES,
            lambda: F.grouped_mm(dy, w, offs=ends), lambda: torch.mm(dy, dense, out=out[WIDE]),
        ),
        "wgrad": (
            lambda t: grouped_wgrad(dy, x, offset, dw, tile=t), WEIGHT_TILES,
            lambda: F.grouped_mm(dy.T, x, offs=ends), lambda: torch.mm(dy.T, x),
        ),
    }  # fmt: skip
    rows, flops, by_tile = [], 2 * R * WIDE * OUT, {}
    for name, (ours, tiles, peer, bound) in products.items():
        shipped, best, by_tile[name] = sweep(ours, tiles)
        took = seconds({
            "shipped": lambda ours=ours, t=shipped: ours(t), "best": lambda ours=ours, t=best: ours(t),
            "grouped_mm": peer, "dense": bound,
        })  # fmt: skip
        rate = {k: flops / s / 1e12 for k, s in took.items()}
        said = "; ".join(f"{k} {v:.0f} TFLOP/s" for k, v in rate.items())
        times = rate["best"] / rate["grouped_mm"] if "grouped_mm" in rate else float("nan")
        share = rate["best"] / rate["dense"]
        rows.append(Row("fast", f"{name}, against grouped_mm", f"{times:.2f}x (goal 1.1x); {said}", met=times >= 1.1))
        rows.append(
            Row("fast", f"{name}, against cuBLAS dense", f"{share:.0%} (goal 80%); best {best}", met=share >= 0.8)
        )
    both = {t: by_tile["forward"][t] + by_tile["dgrad"][t] for t in by_tile["forward"].keys() & by_tile["dgrad"].keys()}
    for key, took, work in (("NARROW = {128: ", both, 2 * flops), ("WEIGHTS = {2: ", by_tile["wgrad"], flops)):
        name = min(took, key=took.__getitem__)
        values = ", ".join(v.split("=")[1] for v in name[5:-1].split(", "))
        PASTE.append(f"{key}Tile({values})}}  # {work / took[name] / 1e12:.0f} TFLOP/s, {where()}")
    return rows


@speed("experts, forward and backward in bf16: 8192 positions, top-8 of 64, width 2048, expert width 512")
def layer() -> list[Row]:
    from moekit import ops

    N, K, width = E * EACH // TOP, TOP, OUT // 2
    g, half = seed(), torch.bfloat16
    x, dy = randn(N, WIDE, g=g, dtype=half).requires_grad_(), randn(N, WIDE, g=g, dtype=half)
    gate = torch.rand(N, K, generator=g).to(DEVICE).requires_grad_()
    up, down = (randn(*s, g=g, dtype=half).mul(0.02).requires_grad_() for s in ((E, OUT, WIDE), (E, WIDE, width)))
    expert = ((torch.arange(N)[:, None] * K + torch.arange(K)) % E).to(DEVICE)
    rows = ops.sort_rows(expert, E)
    ends, leaves = rows.offset_E.int(), (x, gate, up, down)

    def peer() -> torch.Tensor:
        pre = F.grouped_mm(x[rows.row_R], up.mT, offs=ends)
        hidden = F.silu(pre[:, :width]) * pre[:, width:] * gate.reshape(-1)[rows.slot_R, None].to(half)
        y = F.grouped_mm(hidden, down.mT, offs=ends)
        return torch.zeros(N, WIDE, device=DEVICE).index_add(0, rows.row_R, y.float()).to(half)

    tall, tall_dy = randn(N * K, WIDE, g=g, dtype=half).requires_grad_(), randn(N * K, WIDE, g=g, dtype=half)
    w, v = up[0].detach().clone().requires_grad_(), down[0].detach().clone().requires_grad_()

    def dense() -> torch.Tensor:
        pre = tall @ w.T
        return (F.silu(pre[:, :width]) * pre[:, width:]) @ v.T

    forms = {"moekit": lambda: ops.moe_ffn(x, rows, gate, up, down), "grouped_mm": peer, "dense": dense}
    given = {"dense": ((tall, w, v), tall_dy)}
    took = seconds({
        k: lambda k=k, f=f: torch.autograd.grad(f(), *given.get(k, (leaves, dy))) for k, f in forms.items()
    })  # fmt: skip
    said = "; ".join(f"{k} {s * 1e3:.2f} ms" for k, s in took.items())
    times, share = took.get("grouped_mm", float("nan")) / took["moekit"], took["dense"] / took["moekit"]
    return [Row("fast", "whole layer, against grouped_mm", f"{times:.2f}x (goal 1.1x); {said}", met=times >= 1.1),
            Row("fast", "whole layer, against dense of equal FLOPs", f"{share:.0%}")]  # fmt: skip


@speed("bandwidth: permute, combine, quantise, rows by address, against a device copy")
def bandwidth() -> list[Row]:
    from moekit.kernels import mxfp8_triton, rowwise
    from moekit.kernels.permute_triton import combine, permute, plan_rows

    N, K, half = E * EACH // TOP, TOP, torch.bfloat16
    g, R = seed(), E * EACH
    x, tall = randn(N, WIDE, g=g, dtype=half), randn(R, WIDE, g=g, dtype=half)
    expert = torch.rand(N, E, generator=g).argsort(1)[:, :K].to(DEVICE)
    rows, place = plan_rows(expert, E)
    gate, target = torch.rand(N, K, generator=g).to(DEVICE), torch.empty_like(tall)
    peers = torch.tensor([target.data_ptr()], device=DEVICE)
    to = (peers, torch.zeros(R, dtype=torch.int64, device=DEVICE), torch.randperm(R, generator=g).to(DEVICE))
    moves = {  # bytes that have to move, and how
        "copy": (2 * tall.nbytes, lambda: target.copy_(tall)),
        "permute": (x.nbytes + tall.nbytes, lambda: permute(x, rows, place)),
        "combine": (x.nbytes + tall.nbytes, lambda: combine(tall, gate, rows, place)),
        "quantise rows": (tall.nbytes * 97 // 64, lambda: mxfp8_triton.quantise(tall)),
        "quantise columns": (tall.nbytes * 97 // 64, lambda: mxfp8_triton.quantise_columns(tall)),
        "quantise both": (tall.nbytes * 130 // 64, lambda: mxfp8_triton.quantise_both(tall)),
        "put": (2 * tall.nbytes, lambda: rowwise.put(tall, *to)),
        "get": (2 * tall.nbytes, lambda: rowwise.get(tall, *to)),
    }
    took = seconds({k: run for k, (_, run) in moves.items()})
    rate = {k: moves[k][0] / s for k, s in took.items()}
    found = []
    for name in (n for n in rate if n != "copy"):
        share = rate[name] / rate["copy"]
        goal = None if name in ("put", "get") else share >= 0.8
        text = f"{share:.0%} of {rate['copy'] / 1e12:.2f} TB/s{'' if goal is None else ' (goal 80%)'}"
        found.append(Row("fast", name, text, met=goal))
    return found


@speed("log-probs, forward and backward in bf16: 4096 labels, width 2048, 50304 words")
def scores() -> list[Row]:
    from moekit.kernels import token_logprobs as chunked
    from moekit.kernels import token_logprobs_triton as fused

    M, V, half = LABELS, WORDS, torch.bfloat16
    g = seed()
    hidden, head = (randn(n, WIDE, g=g, dtype=half).mul(0.05).requires_grad_() for n in (M, V))
    label = torch.randint(0, V, (M,), generator=g).to(DEVICE)
    shipped = fused.TILES[half]
    assert shipped[1:] == SCORE_TILES[0], "the first tile must be the one that is shipped"

    def ours(tile: tuple[int, ...]) -> torch.Tensor:
        fused.TILES[half] = (shipped[0], *tile)
        return fused.token_logprobs(hidden, head, label)[0].sum()

    def logits() -> torch.Tensor:
        return (hidden @ head.T).float().log_softmax(-1).gather(1, label[:, None]).sum()

    back = lambda loss: torch.autograd.grad(loss, (hidden, head))
    by_tile = seconds({str(t): lambda t=t: back(ours(t)) for t in SCORE_TILES}, 5)
    best = next(t for t in SCORE_TILES if str(t) == min(by_tile, key=by_tile.__getitem__))
    forms = {
        "moekit": lambda: back(ours(best)), "shipped tile": lambda: back(ours(SCORE_TILES[0])),
        "logits + log_softmax": lambda: back(logits()),
        "torch in chunks": lambda: back(
            chunked.token_logprobs(hidden, head, label, temperature=1.0, chunk_bytes=2**26).sum()
        ),
    }  # fmt: skip
    took, memory = seconds(forms, 10), {}
    for name in took:
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        forms[name]()
        memory[name] = (torch.cuda.max_memory_allocated() - base) / 2**20
    fused.TILES[half] = shipped
    PASTE.append(f"token_logprobs_triton.TILES bf16: {best}  # {min(by_tile.values()) * 1e3:.2f} ms, {where()}")
    said = "; ".join(f"{k} {took[k] * 1e3:.2f} ms, {memory[k]:.0f} MiB" for k in took)
    return [Row("fast", "log-probs", f"{took['logits + log_softmax'] / took['moekit']:.2f}x; {said}")]


@speed("router and plan: 65536 positions, top-8 of 64; MXFP8 grouped GEMM")
def rest() -> list[Row]:
    from moekit.kernels import mxfp8_triton, permute
    from moekit.kernels.grouped_gemm import grouped_gemm
    from moekit.kernels.permute_triton import plan_rows
    from moekit.kernels.router_topk import choose

    g = seed()
    logits = randn(E * EACH, E, g=g)
    expert = logits.topk(TOP, -1).indices
    x, w = randn(E * EACH, WIDE, g=g, dtype=torch.bfloat16), randn(E, OUT, WIDE, g=g, dtype=torch.bfloat16)
    offset, q, p = torch.arange(1, E + 1, device=DEVICE) * EACH, mxfp8_triton.quantise(x), mxfp8_triton.quantise(w)
    pairs = {
        "choice, against softmax + topk": (
            lambda: choose(logits, TOP, gate="softmax"), lambda: logits.softmax(-1).topk(TOP, -1)),
        "plan, against a stable sort": (lambda: plan_rows(expert, E), lambda: permute.sort_rows(expert, E)),
        "MXFP8 GEMM, against ours in bf16": (
            lambda: mxfp8_triton.grouped_mm(q, p, offset, torch.bfloat16), lambda: grouped_gemm(x, w, offset)),
        "the same with x quantised first": (
            lambda: mxfp8_triton.grouped_mm(mxfp8_triton.quantise(x), p, offset, torch.bfloat16),
            lambda: grouped_gemm(x, w, offset)),
    }  # fmt: skip
    found = []
    for name, (ours, peer) in pairs.items():
        took = seconds({"ours": ours, "peer": peer}, 10)
        text = f"{took['peer'] / took['ours']:.2f}x; {took['ours'] * 1e3:.3f} against {took['peer'] * 1e3:.3f} ms"
        found.append(Row("fast", name, text))
    return found


def main(argv: list[str] | None = None) -> int:
    """Run everything; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="correctness only")
    parser.add_argument("--seconds", type=float, default=330, help="start nothing after this")
    parser.add_argument("--json", default="", help="also write the rows to this file")
    options = parser.parse_args(argv)
    if not INTERPRETED and not torch.cuda.is_available():
        advice = "TRITON_INTERPRET=1 python benchmarks/gpu.py --quick"
        print(f"no CUDA device here. To check the kernels without one: {advice}", file=sys.stderr)
        return 2
    from moekit import ops

    if INTERPRETED and not options.quick:
        print("interpreted: nothing is timed", file=sys.stderr)
    ops.set_backend("triton")
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    began, rows = time.perf_counter(), []
    spent = lambda: time.perf_counter() - began
    for name, function in CHECKS:
        start = spent()
        try:
            if start > options.seconds:
                raise TimeoutError(f"not run: {options.seconds:.0f} s are over")
            found = function()
            row = Row("right", name, found, None if found.startswith("skipped") else True)
        except Exception as error:  # noqa: BLE001 - one failure must not hide the others
            where_at = traceback.extract_tb(error.__traceback__)[-1]
            text = (str(error).splitlines() or [""])[0]
            row = Row("right", name, f"{type(error).__name__} at line {where_at.lineno}: {text[:200]}", False)
        row.seconds = spent() - start
        rows.append(row)
        print(
            f"{'WRONG' if row.right is False else 'ok   '} {name}: {row.found} ({row.seconds:.0f} s)", file=sys.stderr
        )
    for name, function in () if options.quick or INTERPRETED else SPEEDS:
        start = spent()
        try:
            if start > options.seconds:
                raise TimeoutError(f"not run: {options.seconds:.0f} s are over")
            found = function()
        except Exception as error:  # noqa: BLE001
            found = [Row("fast", name, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")]
        found[0].seconds = spent() - start
        rows += found
        torch.cuda.empty_cache()
        print(f"      {name} ({found[0].seconds:.0f} s)", file=sys.stderr)
    rows += [Row("tile", "fastest that was tried", line) for line in PASTE]
    import triton

    machine = "Triton's interpreter" if INTERPRETED else where()
    print(f"\n{machine}; triton {triton.__version__}; {spent():.0f} s\n")
    words = {(True, None): "right", (False, None): "WRONG", (None, True): "met", (None, False): "missed"}
    print(f"{'':7} {'what':60} found")
    for r in rows:
        print(f"{words.get((r.right, r.met), ''):7} {r.name[:60]:60} {r.found}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine, "triton": triton.__version__, "seconds": round(spent(), 1),
                       "rows": [asdict(r) for r in rows]}, file, indent=1)  # fmt: skip
    return 1 if any(r.right is False for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
