"""What serving costs by request batch size: rows per expert, balance, small matmuls, route bytes, empty slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigError
from .embedded import EmbeddedEngine
from .engine import Sampling

if TYPE_CHECKING:
    import pandas as pd


def serving_costs(
    engine: EmbeddedEngine, batches: Sequence[int] = (1, 4, 16, 64), *, prompt: int = 64, shortest: int = 8,
    longest: int = 64, seed: int = 0,
) -> pd.DataFrame:  # fmt: skip
    """Run an engine at several request batch sizes; what it measured of itself (`moekit.rollout.stats.Stats.metrics`).

    Args:
        engine: with a slot for every request. Where several ranks serve together, each calls this, and gives as many.
        batches: requests at one time.
        prompt: tokens of each, random.
        shortest, longest: answers have evenly spread lengths from one to the other; slots of short ones stand empty.
        seed: of the tokens, and of the draws (temperature 1).

    Returns: a row for each batch size, indexed by it, with the engine's metrics by name (without "engine/"), and
        decode_step_s: seconds of a decoding step. route_bytes_per_token: kept and read in decoding, by decoded token.
    Raises ConfigError: more requests than slots, or lengths that the model has no positions for.
    Cost: each size runs twice, the first time to warm up.

    >>> from moekit.model.presets import preset
    >>> from moekit.model.transformer import Transformer
    >>> made = serving_costs(EmbeddedEngine(Transformer(preset("tiny"))), (1, 2), prompt=4, shortest=2, longest=4)
    >>> made["answer_tokens"].tolist()  # 4; 2 and 4
    [4.0, 6.0]
    """
    import pandas as pd

    if max(batches) > engine.slots:
        raise ConfigError(f"{max(batches)} requests need as many slots, the engine has {engine.slots}; give it slots=")
    found, generator = {}, torch.Generator().manual_seed(seed)
    for batch in batches:
        ids = torch.randint(engine.model.config.vocab, (batch, prompt), generator=generator).tolist()
        limits = torch.linspace(longest, shortest, batch).round().int().tolist()
        for _ in range(2):
            engine.metrics()
            engine.generate(ids, Sampling(max_new_tokens=longest, seed=seed), limits=limits)
        told = {name.removeprefix("engine/"): value for name, value in engine.metrics().items()}
        decoded = max(1, told["answer_tokens"] - batch)  # the first token of each follows its prompt
        each = {"route_bytes_per_token": told.get("route_bytes_decode", 0.0) / decoded}
        found[batch] = told | each | {"decode_step_s": told["decode_seconds"] / max(1, told["steps"])}
    return pd.DataFrame.from_dict(found, orient="index").rename_axis("batch")
