"""FLOPs of a step by part, with their convention; rates and MFU from one step's counts.

Axis letters: N positions, D width, H heads, d head width, E experts, K top_k, F expert width, V vocabulary,
L documents' lengths.
"""

from collections.abc import Iterable
from dataclasses import astuple, dataclass

from ..config import Elide, ModelConfig
from ..data.batch import PADDING, SUPERVISED, Batch, Flat
from ..errors import ConfigError
from .measures import Measures, attention_pairs
from .tokens import RowCounter

CONVENTION = """\
FLOPs: a multiply-add is 2; the backward is twice the forward; norms, activations, softmax, embedding look-up,
gradient sums and the optimizer are left out.
  model     what the batch's tokens need, padding excluded: routed experts at top_k for every token and routing layer.
  executed  what was run, padding included: routed experts at the rows that entered their matmuls, forward and backward
            counted apart.
Both: attention scores causal and per document, L(L+1)/2 pairs (a child of a shared prompt adds its length times the
prompt's); the head at supervised positions only; router, shared experts and dense layers at every position counted."""

PARTS = ("attention_projections", "attention_scores", "router", "experts", "shared", "dense", "head")


@dataclass(frozen=True)
class Work:
    """What FLOPs depend on besides the shape of the model. Adds up over microbatches and ranks.

    >>> Work(8, 6, 3, 21) + Work(8, 8, 4, 36)
    Work(positions=16, tokens=14, supervised=7, pairs=57)
    """

    positions: int  # N, padding included
    tokens: int  # positions that are not padding
    supervised: int  # positions with a label
    pairs: int  # (query, key) pairs of causal attention inside documents

    @classmethod
    def of(cls, what: "Work | Flat | Batch | Measures | Iterable[Flat | Batch]") -> "Work":
        """From microbatches, or from what was counted. Reads nothing from a device for a `Flat`."""
        if isinstance(what, Work):
            return what
        if isinstance(what, Batch):
            what = what.flat
        if isinstance(what, Flat):
            return cls(what.positions, what.real, what.label_index_M.shape[0], attention_pairs(what))
        if isinstance(what, Measures):
            by_class = what.positions_C.tolist()
            n = sum(by_class)
            return cls(n, n - by_class[PADDING], by_class[SUPERVISED], int(what.pairs))
        return sum((cls.of(one) for one in what), cls(0, 0, 0, 0))

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(sum, zip(astuple(self), astuple(other))))


def step_flops(
    config: ModelConfig,
    what: Work | Flat | Batch | RowCounter | Iterable[Flat | Batch],
    *,
    rows: tuple[int, int] | None = None,
    backward: bool = True,
    elide: Elide = "padding",
) -> dict[str, float]:
    """FLOPs of one step by part; "model" FLOPs, or "executed" ones when `rows` is given. See `CONVENTION`.

    Forward, with n positions counted: projections 2 n D (2 H + 2 G) d, scores 4 H d pairs, router 2 n D E for each
    routing layer, experts 6 D F for each row, shared 6 n D Fs, dense 6 n D Fd, head 2 V D at supervised positions.

    Args:
        config: the model's shape.
        what: the step's microbatches (this rank's, or all), their `Work`, or a `RowCounter` (pass "forward").
        rows: expert rows that were dispatched in all layers, (forward, backward); None = "model": K for each token
            and routing layer. `executed_flops` takes both from a counter.
        backward: include the backward.
        elide: with "padding+last_layer", executed shared experts and dense layers run at supervised positions only
            in the last layer. Has no effect on "model" FLOPs.

    Returns:
        `PARTS`, forward and backward together; "forward", "backward", and "total".

    >>> c = ModelConfig(vocab=10, width=4, layers=1, heads=1, experts=4, top_k=2, expert_width=8)
    >>> step_flops(c, Work(positions=3, tokens=3, supervised=2, pairs=6), backward=False)["experts"]
    1152.0
    """
    if isinstance(what, RowCounter):
        what = Work.of(what.measures[what.component, "forward"])
    work = Work.of(what)
    executed = rows is not None
    n = work.positions if executed else work.tokens
    routing, dense = len(config.moe_layers), len(config.dense_layers)
    last = work.supervised if executed and elide == "padding+last_layer" else n
    last_is_dense = config.layers - 1 in config.dense_layers
    at_shared = routing * n + (0 if last_is_dense else last - n)
    at_dense = dense * n + (last - n if last_is_dense else 0)
    D, H = config.width, config.heads
    d, G = config.head_dim or D // H, config.kv_heads or H
    forward_rows, backward_rows = rows if rows is not None else (work.tokens * config.top_k * routing,) * 2
    row = 6 * D * config.expert_width
    forward = {
        "attention_projections": 2 * n * D * (2 * H + 2 * G) * d * config.layers,
        "attention_scores": 4 * H * d * work.pairs * config.layers,
        "router": 2 * n * D * config.experts * routing,
        "experts": row * forward_rows,
        "shared": 6 * at_shared * D * config.shared_width,
        "dense": 6 * at_dense * D * config.dense_width,
        "head": 2 * config.outputs * D * work.supervised,
    }
    back = {name: 2 * value for name, value in forward.items()} | {"experts": 2 * row * backward_rows}
    if not backward:
        back = dict.fromkeys(forward, 0)
    out = {name: float(forward[name] + back[name]) for name in PARTS}
    ahead, behind = float(sum(forward.values())), float(sum(back.values()))
    return out | {"forward": ahead, "backward": behind, "total": ahead + behind}


def executed_flops(config: ModelConfig, counter: RowCounter, elide: Elide = "padding") -> dict[str, float]:
    """FLOPs that a step ran, with its expert rows as counted, forward and backward; over all ranks if `counter` is."""
    forward, back = (counter.measures[counter.component, name] for name in ("forward", "backward"))
    rows = int(forward.dispatched_LCE.sum()), int(back.dispatched_LCE.sum())
    return step_flops(config, counter, rows=rows, backward=rows[1] > 0, elide=elide)


def rates(what: RowCounter | Measures, seconds: float) -> dict[str, float]:
    """The four rates of one step, summed over ranks if the counts are; all from the same counts and the same seconds.

    supervised tokens/s (positions with a label), tokens/s (all but padding), positions/s (padding included), routed
    rows/s (rows dispatched in the forward, all layers). They measure different work: see `tokens/...` for what lies
    between them.

    Args:
        what: counts of a training step (pass "forward"), or the measures of one pass.
        seconds: wall time of the step, the slowest rank's.
    """
    if seconds <= 0:
        raise ConfigError(f"rates need a positive time, got seconds={seconds}")
    m = what.measures[what.component, "forward"] if isinstance(what, RowCounter) else what
    work = Work.of(m)
    return {
        "rate/supervised_tokens_s": work.supervised / seconds,
        "rate/tokens_s": work.tokens / seconds,
        "rate/positions_s": work.positions / seconds,
        "rate/routed_rows_s": int(m.dispatched_LCE.sum()) / seconds,
    }


def mfu(flops: float, seconds: float, peak: float, devices: int = 1) -> float:
    """Model FLOPs utilisation: flops / (seconds x devices x peak), in [0, 1] if `peak` is true.

    Args:
        flops: "model" FLOPs of the step over all ranks: `step_flops(...)["total"]`.
        seconds: wall time of the step.
        peak: FLOP/s of one device in the dtype of the matmuls. State it beside the figure, with `CONVENTION`.
        devices: how many took part.
    """
    for name, value in {"seconds": seconds, "peak": peak, "devices": devices}.items():
        if value <= 0:
            raise ConfigError(f"mfu needs a positive {name}, got {value}")
    return flops / (seconds * peak * devices)
