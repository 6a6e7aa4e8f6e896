"""One rank of an expert-parallel world of two whose experts run in MXFP8.

Imported by spawned processes, so it is a module beside the tests and not a test itself.
"""

import pickle
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from moekit.config import LearnerConfig
from moekit.data.batch import Batch
from moekit.learner.learner import Learner
from moekit.learner.mesh import World
from moekit.model.presets import preset
from moekit.model.transformer import Transformer
from moekit.objectives.sft import SFT

MX = LearnerConfig(lr=3e-3, precision="mxfp8")
ROWWISE = {"dispatch": "rowwise", "transport": "shared_memory"}
LAYOUTS = {"sync": {}, "rowwise": {"capacity": 2.0}, "redone": {"capacity": 0.6}}  # room for every row; for too few


def run(world: World, **layout) -> dict[str, torch.Tensor]:
    """Two steps on 8 rows, each rank with its half: parameters, and the last gradient, whole."""
    learner = Learner(Transformer(preset("tiny"), seed=0), SFT(), replace(MX, **layout), world)
    redone, g = 0.0, torch.Generator().manual_seed(0)
    for _ in range(2):
        ids = (torch.randint(0, 512, (8, 1), generator=g) + 3 * torch.arange(21)) % 512
        metrics = learner.step([Batch.make(ids.chunk(learner.mesh.dp.size)[learner.mesh.dp.rank])])
        redone += metrics.get("dispatch/redone", 0.0)
    found = {f"grad {n}": t for n, t in learner.gradient().items()} | learner.gathered("parameter")
    return found | {"redone": torch.tensor(redone)}


def main(rank: int, size: int, folder: str) -> None:
    """All layouts; the results in a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    results = {}
    for name, layout in LAYOUTS.items():
        results[name] = run(World.current(), ep=2, **layout, **(ROWWISE if layout else {}))
    Path(folder, f"rank_{rank}.pkl").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
