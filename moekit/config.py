"""Frozen dataclasses for every setting, checked once when they are made.

A config is a value: compare it, print it, put it in a run folder (`to_dict`), read it back (`from_dict`), make a
variant with `dataclasses.replace`. A bad value raises `moekit.errors.ConfigError` that names field, value and remedy.
"""

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import ConfigError

Family = Literal["", "olmoe", "qwen3_moe", "mixtral"]
Gate = Literal["softmax", "sigmoid", "topk_softmax"]
QKNorm = Literal["none", "full", "head"]
Elide = Literal["none", "padding", "padding+last_layer"]
Denominator = Literal[
    "global_tokens", "rank_mean", "microbatch_mean", "sequence_mean", "constant", "kept_plus_filtered"
]
Granularity = Literal["sequence", "microbatch", "hf"]
Scope = Literal["all", "valid", "supervised"]
Dtype = Literal["float32", "bfloat16", "float64"]
Schedule = Literal["constant", "cosine", "linear"]
Zero = Literal[0, 1, 2]
Reduce = Literal["step", "microbatch"]
Dispatch = Literal["sync", "rowwise"]
TransportName = Literal["auto", "shared_memory", "padded", "symmetric"]
OnOverflow = Literal["redo", "drop", "raise"]
Recompute = Literal["none", "moe", "block"]
Precision = Literal["model", "mxfp8"]
PipelineName = Literal["1f1b", "interleaved", "zbv"]
RowKind = Literal["packed", "padded", "interleaved"]
OverLong = Literal["truncate", "split", "drop"]


def _need(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


class Config:
    """What all configs share: choices are checked, and they turn into plain dictionaries and back."""

    def _check_choices(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            hint = hints[f.name]
            if typing.get_origin(hint) is Literal and getattr(self, f.name) not in typing.get_args(hint):
                choices = ", ".join(repr(c) for c in typing.get_args(hint))
                raise ConfigError(f"{type(self).__name__}.{f.name}={getattr(self, f.name)!r} is not one of {choices}")

    def __post_init__(self) -> None:
        self._check_choices()
        self._check()

    def _check(self) -> None:
        pass

    def to_dict(self) -> dict[str, Any]:
        """Plain, JSON-ready dictionary of all fields, nested configs included."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, values: dict[str, Any]):
        """Inverse of `to_dict`. Unknown keys raise `ConfigError` (a typo must not pass for a default)."""
        hints = typing.get_type_hints(cls)
        known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        unknown = sorted(set(values) - known)
        _need(not unknown, f"{cls.__name__} has no field {', '.join(unknown)}; fields: {', '.join(sorted(known))}")
        made = {}
        for name, value in values.items():
            made[name] = _revive(hints[name], value)
        return cls(**made)


def _revive(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if isinstance(hint, type) and issubclass(hint, Config) and isinstance(value, dict):
        return hint.from_dict(value)
    if typing.get_origin(hint) is tuple or hint is tuple:
        return tuple(value)
    return value


@dataclass(frozen=True)
class ModelConfig(Config):
    """Shape of a decoder-only MoE transformer. Axis letters: V vocab, D width, H heads, E experts, K top_k, F."""

    vocab: int  # V
    width: int  # D
    layers: int
    heads: int  # H
    experts: int  # E, routed
    top_k: int  # K, routed experts per token
    expert_width: int  # F, hidden width of one routed expert
    kv_heads: int = None  # type: ignore[assignment]  # grouped-query attention; None = heads
    head_dim: int = None  # type: ignore[assignment]  # None = width / heads
    dense_layers: tuple[int, ...] = ()  # layer indices whose feed-forward is dense
    dense_width: int = 0  # hidden width of those
    shared_width: int = 0  # hidden width of the always-on shared expert; 0 = none
    gate: Gate = "softmax"
    normalize_gates: bool = False  # rescale the K chosen gates to sum 1
    selection_bias: bool = False  # aux-loss-free balancing: added to scores for the choice, not for the gate
    qk_norm: QKNorm = "none"  # "full": RMSNorm over all heads together (OLMoE); "head": per head (Qwen3)
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_positions: int = 4096
    tied_head: bool = False
    value_head: bool = False  # one output, a value, in place of the vocabulary's: a critic or a reward model
    init_std: float = 0.02
    family: Family = ""  # the Hugging Face family that the model came from, "" = none
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None

    def __post_init__(self) -> None:
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.head_dim is None:
            _need(
                self.heads > 0 and self.width % self.heads == 0,
                f"width={self.width} is not a multiple of heads={self.heads}; give head_dim",
            )
            object.__setattr__(self, "head_dim", self.width // self.heads)
        super().__post_init__()

    def _check(self) -> None:
        for name in ("vocab", "width", "layers", "heads", "experts", "top_k", "expert_width", "max_positions"):
            _need(getattr(self, name) >= 1, f"ModelConfig.{name}={getattr(self, name)} must be at least 1")
        _need(
            self.top_k <= self.experts,
            f"top_k={self.top_k} is larger than experts={self.experts}; a token cannot choose an expert twice",
        )
        _need(
            self.heads % self.kv_heads == 0,
            f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}",
        )
        _need(self.head_dim % 2 == 0, f"head_dim={self.head_dim} must be even (rotary embedding)")
        _need(
            not (self.value_head and self.tied_head),
            "value_head=True has one output and cannot be tied to the embedding; set tied_head=False",
        )
        bad = [i for i in self.dense_layers if not 0 <= i < self.layers]
        _need(not bad, f"dense_layers={bad} are outside 0..{self.layers - 1}")
        _need(
            not self.dense_layers or self.dense_width > 0,
            f"dense_layers={self.dense_layers} need dense_width > 0, got {self.dense_width}",
        )

    @property
    def outputs(self) -> int:
        """Rows of the head: a logit for each token, or one value."""
        return 1 if self.value_head else self.vocab

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that route."""
        return tuple(i for i in range(self.layers) if i not in self.dense_layers)


@dataclass(frozen=True)
class RouterLossConfig(Config):
    """Router losses (DESIGN 4): their coefficients, how statistics are pooled, and which positions count."""

    balance: float = 0.0  # coefficient of the load-balancing loss
    z: float = 0.0  # coefficient of the router z-loss
    granularity: Granularity = "sequence"  # over what the balance loss pools its statistics
    scope: Scope = "valid"

    def _check(self) -> None:
        _need(self.balance >= 0 and self.z >= 0, f"router loss coefficients must be >= 0, got {self.balance}, {self.z}")


@dataclass(frozen=True)
class LearnerConfig(Config):
    """Everything that `Learner` needs beyond model and objective."""

    lr: float = 1e-4  # peak learning rate
    schedule: Schedule = "constant"  # of the learning rate, after the warm-up
    warmup_steps: int = 0  # of a linear warm-up
    total_steps: int | None = None  # length of the schedule; needed by "cosine" and "linear"
    min_lr_ratio: float = 0.0  # lr at the end of the schedule, as a share of `lr`
    weight_decay: float = 0.0  # never applied to norms, biases and one-dimensional parameters
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip_norm: float | None = 1.0  # None = no clipping
    router: RouterLossConfig = field(default_factory=RouterLossConfig)
    bias_rate: float = 0.0  # step of the selection bias, with ModelConfig.selection_bias
    elide: Elide = "padding"  # expert rows that are skipped because they cannot reach the loss
    # Layout: world = pp x dp ranks; ep divides dp and the number of experts (`moekit layouts` lists what is possible).
    ep: int = 1  # expert-parallel ranks: the routed experts of a layer are split over them
    pp: int = 1  # pipeline ranks: the layers are split over them
    pipeline: PipelineName = "1f1b"  # the pipeline's schedule
    stages_per_rank: int = 1  # pipeline stages of a rank: "interleaved" takes 2 or more, "zbv" takes 2
    zero: Zero = 2  # 0: all-reduce, state replicated; 1: all-reduce, state sharded; 2: reduce-scatter, state sharded
    reduce: Reduce = "step"  # with zero=2: reduce once a step (less wire), or after every microbatch (less memory)
    dispatch: Dispatch = "sync"  # how rows reach experts of other ranks; matters with ep > 1 only
    transport: TransportName = "auto"  # of dispatch="rowwise"
    capacity: float = 1.25  # rows that a rank's rowwise buffer holds, as a multiple of its balanced share
    on_overflow: OnOverflow = "redo"  # more rows than that: redo the step synchronized, drop rows, or raise
    recompute: Recompute = "none"  # activations given up in the forward: of the experts ("moe"), or of whole blocks
    precision: Precision = "model"  # of the routed experts' matmuls; "mxfp8": forward and input gradients in MXFP8

    def _check(self) -> None:
        for name in ("lr", "warmup_steps", "weight_decay", "bias_rate", "eps"):
            _need(getattr(self, name) >= 0, f"LearnerConfig.{name}={getattr(self, name)} must be >= 0")
        _need(
            self.clip_norm is None or self.clip_norm > 0,
            f"clip_norm={self.clip_norm} must be above 0 (below, gradients turn round); None = no clipping",
        )
        _need(0 <= self.min_lr_ratio <= 1, f"min_lr_ratio={self.min_lr_ratio} must be in [0, 1], a share of lr")
        _need(all(0 <= b < 1 for b in self.betas), f"betas={self.betas} must be in [0, 1)")
        for name in ("ep", "pp", "stages_per_rank"):
            _need(getattr(self, name) >= 1, f"LearnerConfig.{name}={getattr(self, name)} must be at least 1")
        _need(self.capacity > 0, f"capacity={self.capacity} must be above 0")
        _need(
            self.reduce == "step" or (self.zero == 2 and self.pp == 1),
            f"reduce='microbatch' needs zero=2 and pp=1, got zero={self.zero}, pp={self.pp}; use reduce='step'",
        )
        stages = {"1f1b": self.stages_per_rank == 1, "interleaved": self.stages_per_rank >= 2}
        _need(
            self.pp == 1 or stages.get(self.pipeline, self.stages_per_rank == 2),
            f"pipeline={self.pipeline!r} does not fit stages_per_rank={self.stages_per_rank}: "
            "'1f1b' has one stage a rank, 'interleaved' two or more, 'zbv' two",
        )
        _need(
            not (self.pipeline == "zbv" and self.pp > 1 and self.recompute != "none"),
            f"pipeline='zbv' computes weight gradients apart and cannot recompute (recompute={self.recompute!r}); "
            "set recompute='none' or pipeline='interleaved'",
        )
        _need(
            not (self.router.granularity == "hf" and self.pp > 1),
            f"router granularity 'hf' pools over all layers, which pp={self.pp} splits; use 'sequence'",
        )
        _need(
            self.schedule == "constant" or bool(self.total_steps),
            f"schedule={self.schedule!r} needs total_steps, got {self.total_steps}",
        )
        _need(
            not (self.router.scope == "all" and self.elide != "none"),
            f"router scope 'all' counts padding positions, so elide={self.elide!r} is not possible; "
            "set elide='none' or scope='valid'",
        )


@dataclass(frozen=True)
class FilterConfig(Config):
    """Instance filter: removes instances in which a short pattern repeats too often (DESIGN 4)."""

    max_period: int = 13  # patterns of 1..max_period tokens
    min_repeats: int = 32  # this many repeats in a row remove the instance

    def _check(self) -> None:
        _need(self.max_period >= 1, f"FilterConfig.max_period={self.max_period} must be at least 1")
        _need(self.min_repeats >= 2, f"FilterConfig.min_repeats={self.min_repeats} must be at least 2")


@dataclass(frozen=True)
class DataConfig(Config):
    """How examples become rows of fixed length."""

    length: int = 512  # T, positions per row
    rows: RowKind = "packed"  # how conversations become rows
    over_long: OverLong = "truncate"  # what happens to conversations longer than a row
    keep: Literal["start", "end"] = "start"  # which end of a document truncation keeps
    documents_per_row: int = 4  # interleaved rows only
    chunks_per_document: int = 4  # interleaved rows only
    filter: FilterConfig | None = None  # None = off
    supervise: Literal["response", "all"] = "response"  # learn the assistant's turns only, or every token
    ignore_index: int = -100
    shuffle: bool = True
    seed: int = 0

    def _check(self) -> None:
        _need(self.length >= 2, f"DataConfig.length={self.length} must be at least 2")
        for name in ("documents_per_row", "chunks_per_document"):
            _need(getattr(self, name) >= 1, f"DataConfig.{name}={getattr(self, name)} must be at least 1")


@dataclass(frozen=True)
class RunConfig(Config):
    """What every training run is told, whatever it trains."""

    model: str  # a Hugging Face folder, or a preset name (see moekit.model.presets)
    data: str  # a .jsonl or .parquet file, or a `datasets` folder saved to disk
    out: str | None = None  # run folder; None = the launcher's, or a new one under runs/
    tokenizer: str | None = None  # a tokenizer folder; None = the model folder's
    steps: int = 100  # optimizer steps; with GRPO and PPO rollouts, each with epochs x minibatches of those
    seed: int = 0
    dtype: Dtype = "float32"  # of the parameters; masters and moments are the wider of float32 and this
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    save_every: int | None = None  # steps between checkpoints; None = only the last
    keep_checkpoints: int = 2  # how many stay
    export: bool = True  # write a Hugging Face folder at the end
    overwrite: bool = False
    resume: bool = False

    def _check(self) -> None:
        _need(self.steps >= 1, f"{type(self).__name__}.steps={self.steps} must be at least 1")

    @property
    def row_length(self) -> int:
        """T, the most positions of a row."""
        raise NotImplementedError


@dataclass(frozen=True)
class SFTConfig(RunConfig):
    """One supervised fine-tuning run: `moekit.recipes.sft.train`."""

    batch_rows: int = 8  # rows of one optimizer step, over all ranks
    microbatch_rows: int = 4  # rows of one forward, on one rank
    denominator: Denominator = "global_tokens"
    constant_length: int | None = None  # tokens of a sequence, with denominator="constant"
    rows: DataConfig = field(default_factory=DataConfig)

    def _check(self) -> None:
        super()._check()
        for name in ("batch_rows", "microbatch_rows"):
            _need(getattr(self, name) >= 1, f"SFTConfig.{name}={getattr(self, name)} must be at least 1")
        _need(
            self.denominator != "constant" or bool(self.constant_length),
            "denominator='constant' needs constant_length (tokens per sequence)",
        )

    @property
    def row_length(self) -> int:
        """T, the positions of a row."""
        return self.rows.length
