"""Model shapes by name: two that run anywhere, and three published ones, with their predicted sizes.

Of our own shapes "tiny" is for tests and notebooks: a step takes milliseconds on a laptop. "demo" is what `make demo`
trains: from random weights it spells words backward after a minute on two cores. Larger ones (16 experts, or 4 layers
of width 128) learnt less in the same time. Its init_std is 0.5 / sqrt(width).
"""

import json
from pathlib import Path

from ..config import ModelConfig
from ..errors import ConfigError

_SHAPES = json.loads(Path(__file__).with_name("presets.json").read_text())
PRESETS: dict[str, ModelConfig] = {name: ModelConfig(**shape) for name, shape in _SHAPES.items()}


def preset(name: str) -> ModelConfig:
    """The shape called `name`.
    >>> preset("tiny").experts
    8
    """
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Predicted numbers of parameters: total, active for one token (top_k of the E experts), and by part.
    >>> parameter_counts(preset("OLMoE-1B-7B"))["total"]
    6919161856
    """
    D, d, layers, routing = config.width, config.head_dim, config.layers, len(config.moe_layers)
    q, kv = config.heads * d, config.kv_heads * d
    norms = {"none": 0, "full": q + kv, "head": 2 * d}[config.qk_norm]
    parts = {
        "embedding": config.vocab * D,
        "head": 0 if config.tied_head else config.outputs * D,
        "attention": layers * ((q + 2 * kv) * D + D * q + norms),
        "norms": (2 * layers + 1) * D,
        "routers": routing * config.experts * D,
        "experts": routing * config.experts * 3 * config.expert_width * D,
        "shared": routing * 3 * config.shared_width * D,
        "dense": len(config.dense_layers) * 3 * config.dense_width * D,
    }
    total = sum(parts.values())
    idle = parts["experts"] * (config.experts - config.top_k) // config.experts
    return {"total": total, "active": total - idle, **parts}
