"""Model shapes by name: two that run anywhere, and three published ones, with their predicted sizes."""

from ..config import ModelConfig
from ..errors import ConfigError

PRESETS: dict[str, ModelConfig] = {
    # For tests and notebooks: a step takes milliseconds on a laptop.
    "tiny": ModelConfig(
        vocab=512, width=64, layers=2, heads=4, kv_heads=2, experts=8, top_k=2, expert_width=32, max_positions=1024,
        normalize_gates=True, family="mixtral",
    ),
    # What `make demo` trains: from random weights it spells words backward after a minute on two cores. Larger ones
    # (16 experts, or 4 layers of width 128) learnt less in the same time. init_std is 0.5 / sqrt(width).
    "demo": ModelConfig(
        vocab=2048, width=96, layers=3, heads=4, kv_heads=4, experts=8, top_k=2, expert_width=96, max_positions=1024,
        qk_norm="head", normalize_gates=True, init_std=0.05, family="qwen3_moe",
    ),
    "OLMoE-1B-7B": ModelConfig(
        vocab=50304, width=2048, layers=16, heads=16, experts=64, top_k=8, expert_width=1024, max_positions=4096,
        qk_norm="full", family="olmoe",
    ),
    "Qwen3-30B-A3B": ModelConfig(
        vocab=151936, width=2048, layers=48, heads=32, kv_heads=4, head_dim=128, experts=128, top_k=8,
        expert_width=768, max_positions=40960, qk_norm="head", normalize_gates=True, norm_eps=1e-6, rope_theta=1e6,
        family="qwen3_moe",
    ),
    "Mixtral-8x7B": ModelConfig(
        vocab=32000, width=4096, layers=32, heads=32, kv_heads=8, experts=8, top_k=2, expert_width=14336,
        max_positions=32768, normalize_gates=True, rope_theta=1e6, family="mixtral",
    ),
}  # fmt: skip


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
