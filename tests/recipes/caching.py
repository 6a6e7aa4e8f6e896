"""What runs in processes of their own for the tests of the reference cache: a build that is killed, and layouts.

Imported by the tests and run by spawned processes.
"""

import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moekit.config import LearnerConfig, ModelConfig
from moekit.data.preference import Pair, Pairs
from moekit.learner.forward import Forward
from moekit.learner.mesh import World
from moekit.model.transformer import Transformer
from moekit.recipes.reference_cache import cached, weights_digest

MODEL = ModelConfig(
    vocab=31, width=16, layers=4, heads=4, kv_heads=2, experts=8, top_k=2, expert_width=12, dense_layers=(1,),
    dense_width=20, shared_width=8, selection_bias=True, init_std=0.3,
)  # fmt: skip
LAYOUTS = {"dp2": {}, "ep2": {"ep": 2}, "pp2": {"pp": 2}}


def pairs(count=23, seed=0) -> Pairs:
    """Pairs of uneven lengths."""
    g = torch.Generator().manual_seed(seed)
    ids = lambda most: torch.randint(0, MODEL.vocab, (int(torch.randint(1, most, (1,), generator=g)),), generator=g)
    return Pairs([Pair(*(ids(n).tolist() for n in (8, 7, 10)), "made", i) for i in range(count)], 40)


def tokenizer(template="{{ messages }}"):
    """The least that has a digest."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    made.chat_template = template
    return made


def layout(world: World | None = None, dtype=torch.float32, seed=1, **config) -> Forward:
    """The reference model, on a layout."""
    return Forward(Transformer(MODEL, dtype=dtype, seed=seed), LearnerConfig(**config), world or World())


def build(root, shard_pairs=4, kill_after=None, **changes):
    """`cached` on one process; with `kill_after`, dies by SIGKILL when so many pairs are done."""

    def progress(done, total, stage):
        if kill_after is not None and done >= kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    how = {"tokenizer": tokenizer(), "truncation": "length=40", "microbatch_tokens": 80} | changes
    where, data = how.pop("layout", None) or layout(), how.pop("pairs", None) or pairs()
    return cached(where, data, how.pop("tokenizer"), root, shard_pairs=shard_pairs, progress=progress, **how)


def values(found: Pairs) -> dict[bytes, torch.Tensor]:
    """All entries of a cache."""
    reference: Any = found.reference
    return dict(reference.values)


def ranks(rank: int, size: int, folder: str) -> None:
    """One rank of a gloo world: build on every layout, leave what was found in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    out = {}
    for name, config in LAYOUTS.items():
        where = layout(World.current(), **config)
        root = Path(folder) / name
        found = values(build(root, layout=where))
        where.scored.reset()
        again = build(root, layout=where, spot=0)
        rebuilt = where.collect()[0]
        build(root, layout=where, spot=5)
        spots = where.collect()[0]
        out[name] = {"values": found, "again": values(again), "rebuilt": rebuilt, "spots": spots,
                     "digest": weights_digest(where), "folders": sorted(p.name for p in root.iterdir())}  # fmt: skip
    double = layout(World.current(), dtype=torch.float64, ep=2)
    with torch.no_grad():
        if rank == 1:
            next(double.model.parameters()).view(-1)[0] += 1
    try:
        weights_digest(double)
    except Exception as error:  # noqa: BLE001
        out["differ"] = f"{type(error).__name__}: {error}"
    Path(folder, f"rank_{rank}.pkl").write_bytes(pickle.dumps(out))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "kill":
        torch.set_num_threads(1)
        build(sys.argv[2], kill_after=int(sys.argv[3]))
    else:
        ranks(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
