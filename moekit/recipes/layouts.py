r"""`moekit check-layouts`: one step in many layouts, and whether all of them give one gradient.

One process, the whole batch in one microbatch, is the reference. Every other layout runs in a job of its number of
processes (CPU, gloo, one thread each) with the same weights and rows, and every rank compares what it owns:

    difference = max over parameters of ||g - g0|| / ||g0||,  and where ||g0|| = 0, g must be exactly 0

`Learner`, dispatch, pipeline and optimizer are those of training; nothing is replaced for the check. Where near-tied
routes fall differently they are counted, and the layout runs again with the reference's routes.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ..config import DataConfig, LearnerConfig, ModelConfig, RouterLossConfig
from ..data.batch import Batch
from ..data.chat import load_tokenizer
from ..data.dataset import build
from ..data.pack import check_vocabulary
from ..data.source import load_examples
from ..errors import ConfigError
from ..launch.submit import submit
from ..learner.layouts import plan_rank
from ..learner.learner import Learner
from ..learner.mesh import World, check_layout
from ..measure.plan import Microbatch
from ..viz.progress import Progress
from .layout_runs import Case, Work, run_case, run_cases
from .setup import DTYPES, model_shape

TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
PROCESS_BYTES = 400 << 20  # of an interpreter with torch
BALANCE = RouterLossConfig(balance=0.05, z=0.01)
CONFIG = LearnerConfig(lr=0.01, weight_decay=0.1, clip_norm=0.5, warmup_steps=2, router=BALANCE)
TINY = ModelConfig(
    vocab=31, width=16, layers=4, heads=4, kv_heads=2, experts=8, top_k=1, expert_width=12, dense_layers=(1,),
    dense_width=20, shared_width=8, qk_norm="head", selection_bias=True, init_std=0.3,
)  # fmt: skip
SHARED: dict[str, Any] = {"dispatch": "rowwise", "transport": "shared_memory"}
PADDED = SHARED | {"transport": "padded"}
INTERLEAVED: dict[str, Any] = {"pp": 2, "pipeline": "interleaved", "stages_per_rank": 2}


def _case(world: int, rows: int = 2, **config: Any) -> dict[str, Any]:
    """With rowwise buffers that hold everything, unless told otherwise."""
    return {"world": world, "microbatch_rows": rows, "capacity": float(config.get("ep", 1)), **config}


LAYOUTS: dict[str, dict[str, Any]] = {
    "rows one by one, recompute block": _case(1, 1, recompute="block"),
    "dp 2, zero 0": _case(2, 8, zero=0),
    "dp 2, zero 1, recompute moe": _case(2, zero=1, recompute="moe"),
    "dp 2, zero 2, reduced each microbatch": _case(2, 1, zero=2, reduce="microbatch"),
    "ep 2, sync": _case(2, ep=2),
    "ep 2, rowwise, shared memory": _case(2, ep=2, **SHARED),
    "ep 2, rowwise, padded, recompute moe": _case(2, 1, ep=2, recompute="moe", **PADDED),
    "ep 2, rowwise, overflow redone": _case(2, ep=2, capacity=0.5, **SHARED),
    "pp 2": _case(2, 1, pp=2),
    "pp 2 interleaved, recompute block": _case(2, **INTERLEAVED, recompute="block"),
    "dp 4, zero 2": _case(4, zero=2),
    "dp 4 x ep 2, zero 1": _case(4, 1, ep=2, zero=1),
    "ep 4, rowwise, shared memory": _case(4, ep=4, **SHARED),
    "pp 4": _case(4, 1, pp=4),
    "pp 2 x dp 2, zero 0": _case(4, pp=2, zero=0),
    "pp 2 x ep 2, recompute block": _case(4, 1, pp=2, ep=2, recompute="block"),
    "pp 2 interleaved x ep 2, rowwise, padded": _case(4, 1, **INTERLEAVED, ep=2, **PADDED),
    "dp 8, zero 2": _case(8, zero=2),
    "dp 8 x ep 4, zero 1, recompute moe": _case(8, 1, ep=4, zero=1, recompute="moe"),
    "pp 2 x dp 4 x ep 2, rowwise, shared memory": _case(8, 1, pp=2, ep=2, **SHARED),
    "pp 4 x ep 2, recompute block": _case(8, 1, pp=4, ep=2, recompute="block"),
}  # fmt: skip


def small_batch(seed: int = 0, vocab: int = TINY.vocab) -> Batch:
    """8 rows of 12: uneven lengths and labels, a shared prompt; rows 2, 3, 6 and 7 have no label (one rank of two)."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (8, 12), generator=g)
    segment, parent = torch.full((8, 12), -1), torch.full((8, 12), -1)
    for row, lengths in enumerate([(7, 3), (12,), (2, 2, 2), (5,), (1, 10), (4, 4, 4), (), (11,)]):
        of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long))
        segment[row, : len(of)] = of
    parent[5][segment[5] > 0] = 0
    labels = Batch.make(ids, segment=segment, parent=parent).labels.clone()
    labels[torch.rand(8, 12, generator=g) < 0.4] = -100
    labels[[2, 3, 6, 7]] = -100
    return Batch.make(ids, segment=segment, parent=parent, labels=labels)


@dataclass(frozen=True)
class LayoutReport:
    """What `check_layouts` found. `rows`: one dictionary a layout; see `text`, `figure`, `verdict`."""

    rows: list[dict[str, Any]]
    reference: dict[str, Any]
    dtype: str
    used: str  # which weights and rows
    left_out: dict[str, str] = field(default_factory=dict)  # layout -> why

    @property
    def verdict(self) -> bool:
        """Whether all layouts agree."""
        return all(not row["problems"] for row in self.rows)

    def text(self) -> str:
        """The table; what its columns mean; what was left out; the verdict, as the last line."""
        lines = [["layout", "ranks", "loss", "gradient", "parameters", "flips", "host reads", "wire", "optimizer",
                  "found", ""]]  # fmt: skip
        for row in (self.reference, *self.rows):
            flips = f"{row['flips']}{' *' if row['replayed'] else ''}"
            sizes = [_size(row[k]) for k in ("wire_bytes", "optimizer_predicted", "optimizer_measured")]
            lines.append([row["layout"], str(row["world"]), f"{row['loss']:.6f}", f"{row['gradient']:.1e}",
                          f"{row['parameters']:.1e}", flips, " + ".join(map(str, row["host_reads"])), *sizes,
                          "DIFFERS" if row["problems"] else "ok"])  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*lines)]
        out = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
        out += ["", f"{self.used}; {self.dtype}, {len(self.rows)} layouts against one process.", LEGEND]
        if any(row["replayed"] for row in self.rows):
            out += ["* near-tied routes fell differently; compared on the reference's routes."]
        out += [f"left out: {name}: {why}" for name, why in self.left_out.items()]
        bad = [f"{row['layout']}: {'; '.join(row['problems'])}" for row in self.rows if row["problems"]]
        most, limit = max((row["gradient"] for row in self.rows), default=0.0), TOLERANCE[self.dtype]
        good = f"all {len(self.rows)} layouts give one gradient: largest difference {most:.1e}, {limit:g} allowed"
        told = f"{len(bad)} of {len(self.rows)} layouts do not give the gradient of one process: "
        return "\n".join([*out, *bad, "", told + ", ".join(b.partition(":")[0] for b in bad) if bad else good])

    __repr__ = text

    def figure(self) -> Any:
        """Gradient difference and bytes on the wire, layout by layout (`moekit.viz.layouts`)."""
        from ..viz.layouts import layouts_figure

        return layouts_figure(self.rows, TOLERANCE[self.dtype])

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        return asdict(self) | {"tolerance": TOLERANCE[self.dtype], "verdict": self.verdict}


LEGEND = """\
gradient, parameters: largest ||x - x0|| / ||x0|| of a parameter, after clipping; after all AdamW steps.
flips: (position, layer) pairs that chose other experts. wire: bytes that all ranks sent in the first step.
host reads: values that one MoE layer's forward reads on the host, the most of any layer and rank, in the last step:
in dispatch + in the expert matmuls, which must know their sizes on a CPU + in the router and its losses.
optimizer: bytes of moments and separate masters of the fullest rank, predicted and found in the storages."""


def check_layouts(
    model: str | ModelConfig | None = None, data: Any = None, *, world_sizes: Sequence[int] | None = None,
    dtype: str = "float64", steps: int = 3, layouts: Mapping[str, Mapping[str, Any]] | None = None,
    told: Callable[[int, int, str], None] | None = None, plant: Callable[[Learner], None] | None = None,
) -> LayoutReport:  # fmt: skip
    """Prove that every layout gives one gradient: of a tiny model, or of your own weights and rows. Needs no GPU.

    Args:
        model: a Hugging Face folder, a preset or a shape (random weights); None = a tiny model made for this, whose
            batch has uneven rows, a rank without labels, an idle expert and one with more than half of all rows.
        data: chats, with a folder as model: the first 8 rows of 64 positions are used. None = small random rows.
        world_sizes: numbers of processes; None = 2, 4 and 8, where memory allows.
        dtype: "float64" (1e-9 allowed, parameters after `steps` AdamW steps too) or "float32" (1e-5, gradients only).
        steps: optimizer steps.
        layouts: name -> `world` (processes), `microbatch_rows` and fields of `LearnerConfig`; None = `LAYOUTS`, what
            of it the model allows.
        told: called as `told(done, total, layout)`; None = a progress line.
        plant: called with every learner before its first step (not with the reference's), to see an error caught.
    Returns: LayoutReport; `print` it.
    Raises:
        ConfigError, DataError, CheckpointError: a bad argument, before any process starts.
        JobError: a layout failed on its way.
    """
    if dtype not in TOLERANCE:
        raise ConfigError(f"dtype={dtype!r} is not one of {', '.join(TOLERANCE)}: bfloat16 sums differ by their order")
    if dist.is_initialized():
        raise ConfigError("check_layouts starts jobs of its own; call it in a process that is no rank of one")
    if steps < 1:
        raise ConfigError(f"steps={steps} must be at least 1")
    shape, batches, used = _made(model, data, steps)
    cases, left_out = _cases(shape, batches[0], dtype, LAYOUTS if layouts is None else layouts, world_sizes)
    line = Progress(len(cases) + 1, "layouts") if told is None else None
    say = told or (lambda done, total, name: line.update(done, last=name))  # type: ignore[union-attr]
    folder, threads, rows = tempfile.mkdtemp(prefix="moekit-layouts-"), torch.get_num_threads(), []
    name = "" if model is None else model if isinstance(model, str) else "tiny"
    work = Work(name, shape, dtype, tuple(batches), folder, plant)
    one = Case("one process", 1, batches[0].rows, CONFIG)
    try:
        torch.set_num_threads(1)
        reference = run_case(work, one, World(), reference=True)
        say(1, len(cases) + 1, one.name)
        for size in sorted({c.world for c in cases}):
            some = [c for c in cases if c.world == size]
            done = 1 + len(rows)
            if size == 1:
                rows += [run_case(work, c, World()) for c in some]
            else:
                job = submit(
                    run_cases, work, some, nproc=size, threads=1, device="cpu", runs=folder, name=f"world_{size}"
                )
                rows += _follow(job, lambda n, last: say(done + n, len(cases) + 1, last))  # noqa: B023
            say(1 + len(rows), len(cases) + 1, some[-1].name)
        shutil.rmtree(folder, ignore_errors=True)  # kept when a job failed: its logs are there
    finally:
        torch.set_num_threads(threads)
        if line is not None:
            line.close()
    table = [{"layout": c.name, "world": c.world, **row, "problems": _problems(row, reference, dtype)}
             for c, row in zip(sorted(cases, key=lambda c: c.world), rows)]  # fmt: skip
    return LayoutReport(table, {"layout": one.name, "world": 1, **reference, "problems": []}, dtype, used, left_out)


def _follow(job: Any, say: Callable[[int, str], None]) -> list[dict[str, Any]]:
    """Rank 0's rows, told how far the job is meanwhile."""
    try:
        while not job.done:
            job.wait(0.2)
            path = job.folder / "layouts.txt"
            if path.exists() and (names := path.read_text().splitlines()):
                say(len(names), names[-1])
        return job.result()[0]
    except KeyboardInterrupt:
        job.stop()
        raise


def _made(model: Any, data: Any, steps: int) -> tuple[ModelConfig, list[Batch], str]:
    """Shape, one batch a step, and what they are in words."""
    folder = isinstance(model, str) and Path(model).is_dir()
    if data is not None and not folder:
        raise ConfigError(f"data={data!r} needs a Hugging Face folder with a tokenizer as model, got model={model!r}")
    tokenizer = load_tokenizer(model) if data is not None else None
    shape = TINY if model is None else model_shape(model, tokenizer) if isinstance(model, str) else model
    whose = "a tiny model made for this check" if model is None else f"the weights of {model}" if folder else "random"
    if data is None:
        batches = [small_batch(seed, shape.vocab) for seed in range(steps)]
        kind = "made-up rows"
    else:
        length = min(64, shape.max_positions)
        rows = build(load_examples(data)[:64], tokenizer, DataConfig(length=length, rows="packed", shuffle=False))
        check_vocabulary(rows, shape.vocab)
        batches, kind = [rows.batch(slice(8))] * steps, f"the first rows of {data}"
    labels = int((batches[0].labels != batches[0].ignore_index).sum())
    return shape, batches, f"{whose}, {kind}: {batches[0].rows} of {batches[0].length} positions, {labels} labels"


def _cases(
    shape: ModelConfig, batch: Batch, dtype: str, layouts: Mapping[str, Any], worlds: Sequence[int] | None
) -> tuple[list[Case], dict[str, str]]:
    """The layouts that this model and this machine allow, and why the others are left out."""
    cases, left_out = [], {}
    if absent := set(worlds or ()) - {fields.get("world") for fields in layouts.values()}:
        raise ConfigError(f"world_sizes={list(worlds or ())}: no layout has {sorted(absent)} processes; give layouts=")
    free, work = psutil.virtual_memory().available, Microbatch.full(batch.rows, batch.length)
    for name, fields in layouts.items():
        own = {k: v for k, v in fields.items() if k not in ("world", "microbatch_rows")}
        unknown = own.keys() - asdict(CONFIG).keys()
        if unknown or not isinstance(fields.get("world"), int):
            raise ConfigError(f"layout {name!r} needs world=N and fields of LearnerConfig, got {dict(fields)}")
        case = Case(name, fields["world"], fields.get("microbatch_rows", 2), replace(CONFIG, **own))
        if worlds is not None and case.world not in {1, *worlds}:
            continue
        try:
            check_layout(case.config, shape, case.world)
        except ConfigError as error:
            left_out[name] = str(error)
            continue
        each = max(plan_rank(shape, case.config, case.world, DTYPES[dtype], work, 1, r, "cpu")["memory"]["total"]
                   for r in range(case.config.pp))  # fmt: skip
        if (need := case.world * (PROCESS_BYTES + 2 * each)) > free:
            left_out[name] = f"{case.world} processes would take {_size(need)}, of {_size(free)} that are free"
        else:
            cases.append(case)
    if not cases:
        raise ConfigError("no layout is left to check: " + "; ".join(f"{k}: {v}" for k, v in left_out.items()))
    return cases, left_out


def _problems(row: Mapping[str, Any], one: Mapping[str, Any], dtype: str) -> list[str]:
    """In words, what is not as in the reference."""
    limit = TOLERANCE[dtype]
    out = [f"gradient of {row['worst']} differs by {row['gradient']:.1e}"] if not row["gradient"] <= limit else []
    for key, word in (("loss", "loss"), ("norm", "gradient norm")):
        if not abs(row[key] - one[key]) <= limit * abs(one[key]):
            out.append(f"{word} is {row[key]:.9g}, not {one[key]:.9g}")
    if dtype == "float64" and not row["parameters"] <= limit:
        out.append(f"parameters differ by {row['parameters']:.1e} after all steps")
    if row["rows"] != one["rows"]:
        out.append(f"{row['rows']:.0f} expert rows ran, not {one['rows']:.0f}")
    return out if row["replicas"] else [*out, "replicas of a parameter differ between ranks"]


def _size(value: float) -> str:
    unit, name = next(u for u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"), (0, "B")) if value >= u[0])
    return f"{value / (unit or 1):.{int(unit > 1)}f} {name}"
