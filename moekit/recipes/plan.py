"""Before a run: what every layout of it takes, and which fits. `moekit.plan`.

    plan = moekit.plan("OLMoE-1B-7B", GRPOConfig("OLMoE-1B-7B", "chain_sum", dtype="bfloat16"), world=8, memory=80e9)
    plan.best, plan.table(), plan.figure(), plan.widget()

Storage is computed tensor by tensor as the learner, the reference, the critic and the engine lay it out, activations as
autograd saves them, rows and microbatches as the recipes make them (`moekit.recipes.plan_step`). Nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import LearnerConfig, ModelConfig, Recompute, RunConfig, _need
from ..errors import ConfigError
from ..learner import layouts
from ..learner.mesh import check_layout
from ..learner.precision import check_shape
from ..model.presets import parameter_counts
from ..viz.theme import number
from ..workloads import RewardConfig
from . import plan_bytes
from .plan_bytes import STATE
from .plan_step import Step
from .setup import model_shape
from .unit_costs import UnitCosts, predict

if TYPE_CHECKING:
    import pandas as pd

WORK = ("activations", "recomputed", "dispatch")
PARTS = (*STATE, *WORK, "reference", *(f"critic/{k}" for k in (*STATE, *WORK)),
         "serving", "staging", "transfer", "kv_cache", "prompts")  # fmt: skip
WORKING = {  # phase -> what is there besides what stays all the time
    "train": WORK, "critic": tuple(f"critic/{k}" for k in WORK),
    "score": ("dispatch",), "rollout": ("kv_cache", "prompts"), "transfer": ("transfer",),
}  # fmt: skip
CONVENTION = """\
Memory: bytes of the fullest rank; the total is that of the phase that takes most. Storage is exact, activations are
what autograd keeps for the microbatches in flight and one recomputation. Buffers of kernels and collectives, the
allocator and the CUDA context come on top. Wire: sent by the rank that sends most, in one step (one rollout of GRPO and
PPO); all-reduces are counted as rings. Routing is taken to be balanced: an expert-parallel rank that is sent more rows
keeps and returns more. GB = 1e9 bytes."""


@dataclass(frozen=True)
class Option:
    """One layout of the run. Bytes are of the fullest rank; see `CONVENTION`."""

    dp: int
    ep: int
    pp: int
    zero: int
    recompute: Recompute
    microbatches: int  # of a rank in one optimizer step
    learner: LearnerConfig = field(repr=False)
    memory: dict[str, int]  # by component (`PARTS`), what is not there left out
    phases: dict[str, int]  # phase -> bytes in it
    wire: dict[str, float]  # by kind
    rows: dict[str, int] = field(repr=False)  # component/pass -> routed rows of all ranks in one step
    fits: bool = True
    seconds: dict[str, float] | None = None  # by phase, and "total"; None = no unit costs were given
    beside: bool = False  # answers are sampled while the learner trains (`staleness`)

    @property
    def peak(self) -> str:
        """The phase that takes most."""
        return max(self.phases, key=self.phases.__getitem__)

    @property
    def total(self) -> int:
        """Bytes in it."""
        return self.phases[self.peak]

    @property
    def name(self) -> str:
        """In words."""
        return f"dp {self.dp} ep {self.ep} pp {self.pp} zero {self.zero} recompute {self.recompute}"

    @property
    def at_peak(self) -> dict[str, int]:
        """`memory` without what is not there in the phase that takes most."""
        return {k: n for k, n in self.memory.items() if k in _alive(self.peak, self.memory, self.beside)}


def plan(
    model: ModelConfig | str, workload: RunConfig, world: int = 1, memory: float | None = None, *,
    lengths: Any = None, ep: Sequence[int] | int | None = None, pp: Sequence[int] | int | None = None,
    zero: Sequence[int] | int = (0, 1, 2), recompute: Sequence[Recompute] | Recompute = ("none", "moe", "block"),
    costs: UnitCosts | str | Path | None = None, device: str | None = None,
) -> Plan:  # fmt: skip
    """What every layout of a run takes: memory by component, bytes on the wire, routed rows, seconds; which fit.

    Args:
        model: a `ModelConfig`, a preset ("OLMoE-1B-7B", "Qwen3-30B-A3B", "Mixtral-8x7B", ...) or a Hugging Face folder.
        workload: the config that the run would be started with: `SFTConfig`, `DPOConfig`, `RewardConfig`, `GRPOConfig`
            or `PPOConfig`. Its dtype, rows, precision, dispatch, engine, reference and critic count; of its `learner`
            everything but the layout, zero and recompute, which are tried. Its `model` and `data` are not read.
        world: ranks.
        memory: bytes that a rank may use; None = no limit.
        lengths: tokens of what is trained on: one (prompt, answer) for all, or a (prompt, [answers]) for each prompt
            of the step (for SFT: of the data set). None = as long as the config allows (`plan_step.Step.of`).
        ep, pp, zero, recompute: what to try, one or several; of ep and pp None = all that model and world allow.
        costs: measured unit costs (`moekit.recipes.unit_costs.measure_unit_costs`, or a JSON file of them), or a
            device's peak figures (`UnitCosts.peak`), which give a floor. None = no seconds are predicted.
        device: "cuda" or "cpu", whose kernels keep other things; None = that of `costs`, else "cuda".

    Returns:
        `Plan`: `best`, `options`, `table()`, `verdict`, `figure()`, `widget()`, `again(...)`. In JupyterLab it shows
        itself as a figure with sliders.

    Raises:
        ConfigError: no such preset, a world, memory or lengths that cannot be, or no layout that is legal.

    Cost: seconds for a hundred options; rows of a step are made once.

    >>> from moekit.config import SFTConfig
    >>> p = plan("OLMoE-1B-7B", SFTConfig("", "", dtype="bfloat16"), world=8, memory=40e9, pp=[1], recompute=["none"])
    >>> p.best.dp, p.best.ep, p.best.total < 40e9, p.rows["policy/backward"]
    (8, 8, True, 524288)
    """
    shape = model_shape(model) if isinstance(model, str) else model
    name = model if isinstance(model, str) else f"a model of {number(parameter_counts(model)['total'])} parameters"
    _need(isinstance(world, int), f"world={world!r} must be a whole number of ranks")
    enough = memory is None or (isinstance(memory, Real) and memory > 0)
    _need(enough, f"memory={memory!r} must be above 0 bytes of a rank (80 GB are 80e9)")
    given = {"ep": ep, "pp": pp, "zero": zero, "recompute": recompute}
    tries: dict[str, Any] = {k: (x,) if isinstance(x, (int, str)) else x for k, x in given.items()}
    costs = UnitCosts.load(costs) if isinstance(costs, (str, Path)) else costs
    device = device or (costs.device if costs else "cuda")
    _need(device in ("cpu", "cuda"), f"device={device!r} is not 'cpu' or 'cuda'")
    step = Step.of(workload, lengths)
    if isinstance(workload, RewardConfig):
        shape = replace(shape, value_head=True, tied_head=False)
    T, most = workload.row_length, shape.max_positions
    _need(T <= most, f"rows of length={T} are longer than the model's {most} positions; make them shorter")
    if workload.learner.precision == "mxfp8":
        check_shape(shape)
    legal = layouts.legal_layouts(shape, world)
    some = [x for x in legal if all(tries[k] is None or getattr(x, k) in tries[k] for k in ("ep", "pp"))]
    out, refused = list[Option](), list[ConfigError]()
    tried = [(x, z, r) for x in some for z in (tries["zero"] if x.dp > 1 else tries["zero"][-1:])
             for r in tries["recompute"]]  # fmt: skip
    for x, z, r in tried:
        try:
            out.append(_option(shape, step, x, z, r, world, memory, costs, device))
        except ConfigError as error:
            refused.append(error)
    if not out:
        asked = ", ".join(f"{k}={x}" for k, x in tries.items())
        why = str(refused[0]) if refused else "legal are (dp, ep, pp) = " + ", ".join(str(tuple(x)) for x in legal)
        raise ConfigError(f"no layout of {world} ranks with {asked} can be planned: {why}")
    out.sort(key=lambda o: (not o.fits, *_order(o)))
    how = {"lengths": lengths, **tries, "costs": costs, "device": device}
    return Plan(name, shape, step, world, memory, tuple(out), how)


def _order(o: Option) -> tuple[float, ...]:
    """Best first: least time; without unit costs least idle time of the pipeline, in tenths of a step, then least wire
    and recomputation. Of what does not fit, least memory."""
    again = ("none", "moe", "block").index(o.recompute)
    if not o.fits:
        return o.total, again
    if o.seconds:
        return o.seconds["total"], again, o.total
    return round(10 * (o.pp - 1) / (o.microbatches + o.pp - 1)), o.wire["total"], again, o.total


@dataclass(frozen=True)
class Plan:
    """Every layout of a run and what it takes, the best first; `print` it, or show it in a cell."""

    name: str  # of the model
    shape: ModelConfig
    step: Step
    world: int
    memory: float | None
    options: tuple[Option, ...]
    how: dict[str, Any] = field(repr=False)

    @property
    def fitting(self) -> tuple[Option, ...]:
        """The options that fit."""
        return tuple(o for o in self.options if o.fits)

    @property
    def best(self) -> Option | None:
        """What fits in the least predicted time, or without unit costs in the pipeline that idles least, with the
        least bytes on the wire; None = none fits, and `verdict` says by how much."""
        return next(iter(self.fitting), None)

    @property
    def supervised(self) -> int:
        """Labels that the policy is trained on in one step, each time it is, over all ranks."""
        return sum(m.labels for u in self.step.trained(self.options[0].dp) for rank in u for m in rank)

    @property
    def rows(self) -> dict[str, int]:
        """component/pass -> routed rows of one step, of the first option; recompute decides whether any run again."""
        return self.options[0].rows

    def again(self, **changes: Any) -> Plan:
        """The plan with other arguments of `plan`: world, memory, workload, lengths, ep, pp, zero, recompute, ..."""
        given = {"model": self.shape, "workload": self.step.config, "world": self.world, "memory": self.memory}
        return replace(plan(**given | self.how | changes), name=self.name)

    def table(self) -> pd.DataFrame:
        """A line for each option: its layout, GB of each component and of the phase that takes most, GB on the wire by
        kind, routed rows per supervised token, seconds (with unit costs), and whether it fits."""
        import pandas as pd

        parts, lines = [p for p in PARTS if any(p in o.memory for o in self.options)], []
        for o in self.options:
            line: dict[str, Any] = {k: getattr(o, k) for k in ("dp", "ep", "pp", "zero", "recompute", "microbatches")}
            line |= {f"{k}, GB": o.memory.get(k, 0) / 1e9 for k in parts}
            line |= {"total, GB": o.total / 1e9, "peak": o.peak, "fits": o.fits}
            line |= {f"wire {k}, GB": n / 1e9 for k, n in o.wire.items()}
            line |= {"rows a label": sum(o.rows.values()) / max(1, self.supervised)}
            lines.append(line | ({f"{k}, s": s for k, s in o.seconds.items()} if o.seconds else {}))
        return pd.DataFrame(lines)

    @property
    def verdict(self) -> str:
        """Which layout to take, or that none fits, by how much, and what would help."""
        if (best := self.best) is not None:
            limit = "" if self.memory is None else f" of {_gb(self.memory)}"
            least = f"{_gb(best.wire['total'])} sent by a rank"
            if best.seconds:
                floor = " (a floor, from peak figures)" * self.how["costs"].floor
                least = f"{best.seconds['total']:.3g} s a step{floor}"
            of = f"{len(self.fitting)} of {len(self.options)} fit"
            return f"{best.name}: {_gb(best.total)}{limit} a rank in its {best.peak} phase, {least}; {of}"
        assert self.memory is not None
        near = min(self.options, key=lambda o: o.total)
        most = sorted(near.at_peak.items(), key=lambda kv: -kv[1])[:3]
        told = ", ".join(f"{k} {_gb(n)}" for k, n in most)
        lines = [f"nothing fits in {_gb(self.memory)} a rank: {near.name} lacks {_gb(near.total - self.memory)}"]
        lines += [f"its {near.peak} phase takes {_gb(near.total)} ({told})"]
        helps = [f"{words}: {_gb(n)}{' fits' * (n <= self.memory)}" for words, n in self.helps()
                 if n < 0.995 * near.total]  # fmt: skip
        return "; ".join(lines + (["what would help: " + ", ".join(helps)] if helps else []))

    def helps(self) -> list[tuple[str, int]]:
        """Single changes and the least bytes of a rank that each leads to, the most effective first."""
        c, found = self.step.config, list[tuple[str, int]]()
        changes: dict[str, dict[str, Any]] = {f"world={n}": {"world": n} for n in (2 * self.world, 8 * self.world)}
        changes |= {"recompute='block'": {"recompute": ("block",)}}
        other: dict[str, Any] = {
            "dtype": "bfloat16", "microbatch_rows": 1, "microbatch_tokens": c.row_length, "reference": "cached",
            "update_mode": "in_place", "rollout_dtype": "bfloat16", "slots": max(1, getattr(c, "slots", 1) // 4),
        }  # fmt: skip
        if getattr(c, "engine", "") == "embedded":
            other["serve_ep"] = gcd(self.world, self.shape.experts)
        if c.dtype == "bfloat16" and getattr(c, "rollout_dtype", None) is None:
            del other["rollout_dtype"]  # that is what it is
        for k, value in other.items():
            if getattr(c, k, value) != value:
                changes[f"{k}={value!r}"] = {"workload": replace(c, **{k: value})}
        near = min(self.options, key=lambda o: o.total)
        kept = {"zero": (near.zero,), "recompute": (near.recompute,)}
        for words, change in changes.items():
            kept |= {"ep": None, "pp": None} if "world" in change else {"ep": (near.ep,), "pp": (near.pp,)}
            try:
                found.append((words, min(o.total for o in self.again(**kept | change).options)))
            except ConfigError:
                continue  # not possible here
        return sorted(found, key=lambda kv: kv[1])

    def figure(self, most: int = 12) -> Any:
        """Memory by component of the best options, against the limit (`moekit.viz.plan`)."""
        from ..viz.plan import plan_figure

        return plan_figure(self, most)

    def widget(self) -> Any:
        """The figure with sliders (`moekit.viz.plan`)."""
        from ..viz.plan import Planner

        return Planner(self)

    def __repr__(self) -> str:
        shown, costs, n = self.table().head(12), self.how["costs"], len(self.options)
        keep = ["dp", "ep", "pp", "zero", "recompute", "microbatches", "total, GB", "peak", "fits", "wire total, GB"]
        table = shown[keep + ["total, s"] * ("total, s" in shown)]
        rows = ", ".join(f"{k} {number(n)}" for k, n in self.rows.items() if n)
        first = ", the first 12" * (n > 12)
        head = f"{type(self.step.config).__name__} of {self.name} on {self.world} ranks: {n} options{first}"
        time = costs.name if costs else "none, give costs= (measure_unit_costs, or UnitCosts.peak)"
        lines = [self.verdict, head, table.to_string(index=False, float_format="%.3g")]
        lines += [f"routed rows a step: {rows}; {number(self.supervised)} labels", f"seconds: {time}", CONVENTION]
        return "\n".join(lines)

    def _ipython_display_(self) -> None:
        self.widget()._ipython_display_()


def _gb(n: float) -> str:
    return f"{n / 1e9:.3g} GB" if n >= 1e8 else f"{n / 1e6:.3g} MB"


# ------------------------------------------------------------------ one option


def _option(
    shape: ModelConfig, step: Step, x: layouts.Layout, zero: int, recompute: Recompute, world: int,
    memory: float | None, costs: UnitCosts | None, device: str,
) -> Option:  # fmt: skip
    c = step.config
    reduce = c.learner.reduce if zero == 2 and x.pp == 1 else "step"
    layout: dict[str, Any] = {"ep": x.ep, "pp": x.pp, "zero": zero, "recompute": recompute, "reduce": reduce}
    learner = replace(c.learner, pipeline="1f1b", stages_per_rank=1, **layout)
    own = getattr(c, "critic_learner", None) or learner
    critic = plan_bytes.critic_shape(c, shape) if step.scores["critic"] else None
    if critic is not None:
        check_layout(own, critic, world)
    each, size, beside = min(x.dp, world // own.pp), lambda found: sum(found.values()), getattr(c, "staleness", 0) > 0

    def phases_of(held: dict[str, int]) -> dict[str, int]:
        some = [p for p, working in WORKING.items() if p == "train" or held.keys() & working]
        return {p: sum(held[k] for k in _alive(p, held, beside)) for p in some}

    def held_at(start: int) -> dict[str, int]:  # ranks of one pipeline place are alike but for their prompts
        engines = (plan_bytes.engine_bytes(shape, step, learner, world, start + i, device) for i in range(each))
        found = plan_bytes.rank_bytes(shape, critic, step, learner, own, world, start, device) | max(engines, key=size)
        return {k: found[k] for k in PARTS if found.get(k)}

    held = max(map(held_at, range(0, world, each)), key=lambda held: max(phases_of(held).values()))
    phases = phases_of(held)
    wire = plan_bytes.wire(shape, critic, step, learner, own, world)
    rows = step.rows(shape, learner, own, world)
    seconds = predict(costs, shape, critic, step, learner, own, world, wire, held) if costs else None
    fits = memory is None or max(phases.values()) <= memory
    count = max(len(rank) for update in step.trained(x.dp) for rank in update)
    return Option(*x, zero, recompute, count, learner, held, phases, wire, rows, fits, seconds, beside)


def _alive(phase: str, held: Iterable[str], beside: bool) -> list[str]:
    """Components that are there in a phase: what stays, and what works in it; an engine that works `beside` the learner
    is done with its answers before it takes new weights."""
    working, too = {k for some in WORKING.values() for k in some}, WORKING["rollout"] * (beside and phase != "transfer")
    return [k for k in held if k not in working or k in WORKING[phase] or k in too]
