"""The reference's log-probs of all pairs, scored once before training: built on any layout, resumed, checked, read.

A policy that has not moved is its own reference: `cached` scores with the learner itself, and no second model is held.
"""

from __future__ import annotations

import hashlib
import json
import random
import secrets
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import ops
from ..data.batch import Batch
from ..data.families import with_values
from ..data.preference import Pairs
from ..errors import CheckpointError, NumericsError
from ..learner.forward import Forward
from ..learner.gradients import is_expert
from ..objectives import reference as store
from ..objectives.reference import CacheKey, ReferenceCache, answer_hash
from .setup import share, together

SHARD_PAIRS = 256
# what a log-prob may differ by between two cuts into microbatches; in low precision a near-tied route can flip
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.3}
UNSEEN = (
    "family",
    "bos_id",
    "eos_id",
    "pad_id",
    "init_std",
    "max_positions",
)  # of the shape: no log-prob depends on it


def weights_digest(layout: Forward) -> str:
    """Hash of every parameter, buffer and the shape of a model, the same whatever its layout. A collective.

    Raises:
        CheckpointError: replicas that differ.
    Cost: every rank hashes what it holds.
    """
    model, mine = layout.model, dict[str, str]()
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        parts, first = ([*t], model.part.experts[0]) if is_expert(name) else ([t], 0)
        for i, part in enumerate(parts):
            x = part.detach().cpu().contiguous()
            digest = hashlib.sha256(f"{x.dtype} {list(x.shape)}".encode())
            digest.update(x.view(-1).view(torch.uint8).numpy().data)
            mine[f"{name} {first + i}"] = digest.hexdigest()
    whole: dict[str, str] = {}
    for rank, some in enumerate(layout.world.gather(mine)):
        wrong = [name for name, digest in some.items() if whole.setdefault(name, digest) != digest]
        if wrong:
            raise CheckpointError(
                f"rank {rank} holds another {wrong[0]} than the ranks before it; load the model again"
            )
    shape = {k: v for k, v in model.config.to_dict().items() if k not in UNSEEN}
    return hashlib.sha256(json.dumps([shape, whole], sort_keys=True).encode()).hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """Hash of a fast tokenizer and its chat template."""
    parts = [tokenizer.backend_tokenizer.to_str(), tokenizer.get_chat_template()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def cache_key(layout: Forward, pairs: Pairs, tokenizer: Any, truncation: str = "") -> CacheKey:
    """What the log-probs of these pairs depend on. A collective."""
    weight = next(layout.model.parameters())
    forms = {name: text.split(":")[0].split(",")[0] for name, text in ops.explain(weight.device, weight.dtype).items()}
    return CacheKey(
        dataset=pairs.content, tokenizer=tokenizer_digest(tokenizer), weights=weights_digest(layout),
        dtype=str(weight.dtype).removeprefix("torch."), precision=layout.config.precision,
        kernels=" ".join([weight.device.type, ops.backend(), *(f"{k}={v}" for k, v in sorted(forms.items()))]),
        truncation=truncation,
    )  # fmt: skip


def resident(layout: Forward, batches: Sequence[Batch]) -> list[Batch]:
    """The microbatches with the log-probs of a model that is held beside the learner. A collective."""
    return [with_values(b, "ref_logprob", x_M) for b, x_M in zip(batches, layout.score(batches))]


def cached(
    layout: Forward, pairs: Pairs, tokenizer: Any, root: str | Path, *, truncation: str = "",
    microbatch_tokens: int = 4096, spot: int = 8, tolerance: float | None = None, shard_pairs: int = SHARD_PAIRS,
    progress: Callable[[int, int, str], None] | None = None,
) -> Pairs:  # fmt: skip
    """The pairs with reference log-probs from a cache below `root`, built or completed if need be. A collective.

    Args:
        layout: the reference; the learner itself before its first step.
        truncation: how long examples were cut; part of the key.
        microbatch_tokens: positions of one forward, on one rank.
        spot: how many pairs, drawn anew each time, are scored again when any shard was there already.
        tolerance: largest difference of a token's log-prob there; None = by dtype, see `TOLERANCE`.
        shard_pairs: pairs of one file, and of one round of work for each data-parallel rank.
        progress: called on rank 0 as `progress(pairs done, pairs, "scoring the reference")`.
    Raises:
        CheckpointError: a spot that differs, with the place; the folder names another key.
        NumericsError: a log-prob that is not finite, with the pair.
        StorageError: it cannot be written.
    """
    key = cache_key(layout, pairs, tokenizer, truncation)
    folder = Path(root) / key.digest
    found = build(layout, pairs, key, folder, microbatch_tokens, shard_pairs, progress)
    with together(layout.world):
        cache = ReferenceCache.open(folder, key)
        for p in pairs.pairs:  # nothing is missing: an answer that has no scores raises here and not later
            _ = cache(p.prompt, p.chosen), cache(p.prompt, p.rejected)
    if found and spot:
        check(layout, pairs, cache, spot, tolerance, microbatch_tokens)
    return replace(pairs, reference=cache)


def build(
    layout: Forward, pairs: Pairs, key: CacheKey, folder: Path, microbatch_tokens: int = 4096,
    shard_pairs: int = SHARD_PAIRS, progress: Callable[[int, int, str], None] | None = None,
) -> int:  # fmt: skip
    """Score what is missing, a shard at a time on every data-parallel rank; returns how many shards were there already.
    A collective; see `cached`. Broken shards are made again."""
    world, dp = layout.world, layout.mesh.dp
    plan: tuple[int, int, list[int]] = (0, 0, [])
    with together(world):
        if world.rank == 0:
            plan = _missing(folder, key, -(-len(pairs) // shard_pairs), shard_pairs)
    shards, shard_pairs, todo = share(world, plan)
    for at in range(0, len(todo), dp.size):
        number = todo[at + dp.rank] if at + dp.rank < len(todo) else shards  # past the last one: no pairs
        mine = range(len(pairs))[number * shard_pairs : (number + 1) * shard_pairs]
        values = _score(layout, pairs, mine, microbatch_tokens)
        with together(world):
            for answer in values.values():
                if not bool(torch.isfinite(answer).all()):
                    where = f"{pairs.pairs[mine[0]].source}, pairs {mine[0]} to {mine[-1]}"
                    raise NumericsError(f"the reference gives log-probs that are not finite ({where}); mend the model")
            if mine and layout.mesh.pp.rank == 0:
                store.write_shard(folder, number, values, key)
        if progress is not None and world.rank == 0:
            done = (shards - len(todo) + min(at + dp.size, len(todo))) * shard_pairs
            progress(min(done, len(pairs)), len(pairs), "scoring the reference")
    return shards - len(todo)


def check(
    layout: Forward, pairs: Pairs, cache: ReferenceCache, count: int = 8, tolerance: float | None = None,
    microbatch_tokens: int = 4096,
) -> float:  # fmt: skip
    """Score some pairs again and compare; returns the largest difference of a token's log-prob. A collective.

    The draw is not from any global random state. Raises CheckpointError: more than the tolerance apart.
    """
    dtype = str(next(layout.model.parameters()).dtype).removeprefix("torch.")
    limit = TOLERANCE.get(dtype, 1e-4) if tolerance is None else tolerance
    drawn = random.Random(share(layout.world, secrets.randbits(63))).sample(range(len(pairs)), min(count, len(pairs)))
    mine = sorted(drawn)[layout.mesh.dp.rank :: layout.mesh.dp.size]
    values, worst = _score(layout, pairs, mine, microbatch_tokens), 0.0
    with together(layout.world):
        for i in mine:
            p = pairs.pairs[i]
            for answer in (p.chosen, p.rejected):
                off = (cache(p.prompt, answer) - values[answer_hash(p.prompt, answer)].cpu()).abs().max().item()
                worst = max(worst, off)
                if not off <= limit:
                    raise CheckpointError(
                        f"the reference cache {cache.folder} says otherwise than the model: a log-prob of the answers "
                        f"to {p.source}, {p.index} differs by {off:.3g}, allowed are {limit:g}; delete the folder"
                    )
    return layout.world.max_list([worst])[0]


def _score(layout: Forward, pairs: Pairs, chosen: Sequence[int], microbatch_tokens: int) -> dict[bytes, Tensor]:
    """Log-probs of both answers of some pairs, by hash; the microbatches are those of a training step on them."""
    plain = replace(pairs, reference=None)
    each = max(1, microbatch_tokens // max((pairs.size(i) for i in chosen), default=1))
    cuts = [np.array(chosen[at : at + each]) for at in range(0, len(chosen), each)]
    batches = [plain.batch(cut).trim() for cut in cuts]
    values: dict[bytes, Tensor] = {}
    for cut, batch, score_M in zip(cuts, batches, layout.score(batches)):
        names, sizes = torch.unique_consecutive(batch.flat.at_labels("answer"), return_counts=True)
        for name, score in zip(names.tolist(), score_M.cpu().split(sizes.tolist())):
            p = pairs.pairs[int(cut[name // 2])]
            values.setdefault(answer_hash(p.prompt, p.rejected if name % 2 else p.chosen), score)
    return values


def _missing(folder: Path, key: CacheKey, shards: int, shard_pairs: int) -> tuple[int, int, list[int]]:
    """Shards of the cache, pairs in each, and the shards that have to be made; begins the folder if there is none."""
    if not (folder / store.KEY).exists():
        store.write_key(folder, key, shards, shard_pairs, {"torch": torch.__version__})
    shards, shard_pairs = store.read_key(folder, key)
    todo = [number for number in range(shards) if not store.shard_path(folder, number).exists()]
    for number in sorted({*range(shards)} - {*todo}):
        try:
            store.read_shard(folder, number, key)
        except CheckpointError as problem:
            warnings.warn(f"{problem} (it is made again now)", stacklevel=4)
            todo.append(number)
    return shards, shard_pairs, todo
