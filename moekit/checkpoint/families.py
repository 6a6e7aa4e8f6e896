"""The Hugging Face families that moekit reads and writes, and their config.json as a `ModelConfig`.

A family is what Transformers calls a model type. Each leaves some things out of config.json, because its code fixes
them (Mixtral always normalises its gates) or because its configuration class has a default. A file is read as that
class would read it: the file first, then the default of that very family, never a guess that serves all.

Nothing is dropped in silence: a feature that moekit's model does not have is refused by name and with its value."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import ModelConfig, QKNorm
from ..errors import CheckpointError, ConfigError

# fmt: off
# what Transformers' configuration classes hold where a config.json has no key: what all agree on, and each family's own
_DEFAULTS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("families.json").read_text())
# ModelConfig's field -> the key of config.json that holds the same value
_INTEGERS = {
    "vocab": "vocab_size", "width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "top_k": "num_experts_per_tok", "max_positions": "max_position_embeddings",
}
_NUMBERS = {"norm_eps": "rms_norm_eps", "init_std": "initializer_range"}
_TOKENS = {"bos_id": "bos_token_id", "eos_id": "eos_token_id", "pad_id": "pad_token_id"}
# keys that must be absent, zero or false
_ABSENT = {
    "attention_bias": "moekit's projections have no bias",
    "attention_dropout": "moekit has no dropout; set it to 0",
    "router_jitter_noise": "moekit's router has no noise; set it to 0",
    "quantization_config": "read the weights before quantisation",
    "per_layer_config": "moekit's layers share one shape",
}
# fmt: on


@dataclass(frozen=True)
class Family:
    """What sets one Hugging Face family apart from the others."""

    name: str  # its `model_type`
    architecture: str  # the class that holds it with a language model head
    qk_norm: QKNorm
    normalizes: bool | None  # None: as `norm_topk_prob` says; True: always, whatever the file says
    dense_layers: bool  # some layers may have a dense feed-forward
    free_head_dim: bool  # head_dim may differ from width / heads
    router_loss: float  # its default coefficient of the balance loss, written so that the file is complete

    @property
    def width_key(self) -> str:
        """The config.json key that holds the width of one routed expert."""
        return "moe_intermediate_size" if self.dense_layers else "intermediate_size"

    def default(self, key: str) -> Any:
        """Value of `key` where a config.json does not have it."""
        return _DEFAULTS[self.name].get(key, _DEFAULTS["common"].get(key))


FAMILIES: dict[str, Family] = {
    "olmoe": Family(
        "olmoe", "OlmoeForCausalLM", "full", None, dense_layers=False, free_head_dim=False, router_loss=0.01
    ),
    "qwen3_moe": Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", "head", None, dense_layers=True, free_head_dim=True, router_loss=0.001
    ),
    "mixtral": Family(
        "mixtral", "MixtralForCausalLM", "none", True, dense_layers=False, free_head_dim=True, router_loss=0.001
    ),
}


def family_of(values: dict[str, Any], where: str = "config.json") -> Family:
    """The family that a config.json names in `model_type`. Raises `CheckpointError` for one that moekit lacks."""
    name = values.get("model_type")
    if name not in FAMILIES:
        raise CheckpointError(f"{where}: model_type={name!r} is no family that moekit reads: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def config_from_hf(values: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """The `ModelConfig` that a Hugging Face config.json describes.
    Args: `values`: the parsed JSON object. `where`: its path, for error messages.
    Returns: The config, with `family` set. An absent key has the default of the family's own configuration class. Of
        several eos ids the first is kept, and a special id outside the vocabulary, which no token can have, is None.
    Raises:
        CheckpointError: unknown family, a value of the wrong kind, or features that moekit's model does not have (all
            of them in one message, each with its value)."""
    family = family_of(values, where)
    read = _Reader(values, family, where)
    same: dict[str, Any] = {field: read.integer(key) for field, key in _INTEGERS.items()}
    same |= {field: read.number(key) for field, key in _NUMBERS.items()}
    same |= {field: read.token_id(key, same["vocab"]) for field, key in _TOKENS.items()}
    theta = _refuse_unknown_features(read, same["width"] // max(same["heads"], 1), same["max_positions"])
    dense = _dense_layers(read, same["layers"])
    try:
        return ModelConfig(
            **same,
            kv_heads=read.integer("num_key_value_heads", or_none=True),
            head_dim=read.integer("head_dim", or_none=True) or same["width"] // max(same["heads"], 1),
            experts=read.experts(),
            expert_width=read.integer(family.width_key),
            dense_layers=dense,
            dense_width=read.integer("intermediate_size") if dense else 0,
            gate="softmax",
            normalize_gates=bool(read.value("norm_topk_prob")) if family.normalizes is None else family.normalizes,
            qk_norm=family.qk_norm,
            rope_theta=theta,
            tied_head=bool(read.value("tie_word_embeddings")),
            family=family.name,  # type: ignore[arg-type]
        )
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from error


def config_to_hf(config: ModelConfig, family: Family, dtype: str) -> dict[str, Any]:
    """The config.json of `config` as `family`, complete, so that no default of any version decides anything.

    `rope_theta` and `num_experts` are written in the older spelling too, which Transformers 4 and other engines read.
    """
    values = {key: getattr(config, field) for field, key in {**_INTEGERS, **_NUMBERS, **_TOKENS}.items()}
    # fmt: off
    values |= {
        "architectures": [family.architecture], "model_type": family.name, "dtype": dtype, "hidden_act": "silu",
        "num_key_value_heads": config.kv_heads, "tie_word_embeddings": config.tied_head, "attention_dropout": 0.0,
        "rope_theta": config.rope_theta, "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "output_router_logits": False, "router_aux_loss_coef": family.router_loss, "use_cache": True,
        family.width_key: config.expert_width,
    }
    if family.free_head_dim:
        values["head_dim"] = config.head_dim
    if family.normalizes is None:
        values["norm_topk_prob"] = config.normalize_gates or config.gate == "topk_softmax"
    if family.name == "mixtral":
        values |= {"num_local_experts": config.experts, "sliding_window": None, "router_jitter_noise": 0.0}
    else:
        values |= {"num_experts": config.experts, "attention_bias": False}
    if family.name == "olmoe":
        values["clip_qkv"] = None
    if family.dense_layers:
        values |= {
            "intermediate_size": config.dense_width or config.expert_width, "decoder_sparse_step": 1,
            "mlp_only_layers": sorted(config.dense_layers), "use_sliding_window": False, "sliding_window": None,
        }
    # fmt: on
    return dict(sorted(values.items()))


class _Reader:
    """Typed access to a config.json, with the family's defaults and errors that name key, value and file."""

    def __init__(self, values: dict[str, Any], family: Family, where: str):
        self.values, self.family, self.where = values, family, where

    def value(self, key: str) -> Any:
        return self.values[key] if key in self.values else self.family.default(key)

    def integer(self, key: str, or_none: bool = False) -> Any:
        value = self.value(key)
        if (value is None and or_none) or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise CheckpointError(f"{self.where}: {key}={value!r} is not an integer")

    def number(self, key: str) -> float:
        value = self.value(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {key}={value!r} is not a number")
        return float(value)

    def experts(self) -> int:
        # one number under two names: Transformers 5 saves num_local_experts where Qwen's own files say num_experts
        found = {k: self.integer(k) for k in ("num_experts", "num_local_experts") if k in self.values}
        if len(set(found.values())) > 1:
            raise CheckpointError(f"{self.where}: two different numbers of experts: {found}; remove one")
        return next(iter(found.values()), self.family.default("num_experts"))

    def token_id(self, key: str, vocab: int) -> int | None:
        value = self.value(key)
        if isinstance(value, list):
            value = value[0] if value else None
        return value if isinstance(value, int) and 0 <= value < vocab else None


def _dense_layers(read: _Reader, layers: int) -> tuple[int, ...]:
    if not read.family.dense_layers:
        return ()
    step, listed = read.integer("decoder_sparse_step"), read.value("mlp_only_layers") or []
    if step < 1:
        raise CheckpointError(f"{read.where}: decoder_sparse_step={step} must be at least 1")
    return tuple(i for i in range(layers) if i in listed or (i + 1) % step)


def _refuse_unknown_features(read: _Reader, head_dim: int, max_positions: int) -> float:
    """Raises one error with every feature that moekit's model lacks; returns the rotary base."""
    values, problems = read.values, []

    def need(ok: bool, key: str, why: str) -> None:
        if not ok:
            problems.append(f"{key}={read.value(key)!r} ({why})")

    for key, why in _ABSENT.items():
        need(not values.get(key), key, why)
    need(read.value("hidden_act") in ("silu", "swish"), "hidden_act", "moekit's experts are SwiGLU: silu")
    need(values.get("clip_qkv") is None, "clip_qkv", "moekit does not clip queries, keys and values")
    need(values.get("partial_rotary_factor") in (None, 1, 1.0), "partial_rotary_factor", "moekit rotates whole heads")
    kinds = {kind for kind in values.get("layer_types") or [] if kind != "full_attention"}
    need(not kinds, "layer_types", "moekit's attention is full attention")
    window = read.value("sliding_window")
    if read.family.name == "qwen3_moe" and not values.get("use_sliding_window"):
        window = None  # this family ignores the number unless it is switched on
    why = (
        f"shorter than max_position_embeddings={max_positions} and moekit's attention has no window; to train within "
        "the window, set max_position_embeddings to it in a copy of config.json"
    )
    need(window is None or window >= max_positions, "sliding_window", why)
    if not read.family.free_head_dim:
        need(values.get("head_dim") in (None, head_dim), "head_dim", f"{read.family.name} has width / heads")
    theta = _rope_theta(read, problems)
    if problems:
        raise CheckpointError(f"{read.where}: moekit cannot hold {'; '.join(problems)}")
    return theta


def _rope_theta(read: _Reader, problems: list[str]) -> float:
    bases = {}
    for key in ("rope_parameters", "rope_scaling"):
        rope = read.values.get(key) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        nested = any(isinstance(v, dict) for v in rope.values())
        if kind != "default" or nested or rope.get("partial_rotary_factor") not in (None, 1, 1.0):
            problems.append(f"{key}={rope!r} (moekit's rotary embedding is the default one, unscaled)")
        if isinstance(rope.get("rope_theta"), (int, float)):
            bases[f"{key}.rope_theta"] = float(rope["rope_theta"])
    if read.values.get("rope_theta") is not None:
        bases["rope_theta"] = read.number("rope_theta")
    if len(set(bases.values())) > 1:
        problems.append(f"two different rotary bases, {bases}")
    return next(iter(bases.values()), float(read.family.default("rope_theta")))
