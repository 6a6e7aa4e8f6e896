"""What the tests of critics run in every process: a critic from each source, on layouts that cut it elsewhere.

Imported by spawned processes, so it is a module beside the tests and not a test itself.
"""

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moekit.config import LearnerConfig, RouterLossConfig
from moekit.data.families import Sample, family_rows
from moekit.launch.worker import Here
from moekit.learner.mesh import World
from moekit.learner.stages import plan_stages
from moekit.recipes import ppo, setup
from moekit.recipes.runs import Run
from moekit.workloads import PPOConfig

LEARNER = LearnerConfig(lr=0.01, clip_norm=0.5, router=RouterLossConfig(balance=0.05))
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {}, "pp2": {"pp": 2}, "ep2": {"ep": 2}, "zbv": {"pp": 2, "pipeline": "zbv", "stages_per_rank": 2},
}  # fmt: skip
POLICY = {"dp2": {"pp": 2}, "pp2": {"ep": 2}, "ep2": {}, "zbv": {}}  # its layout, which is another


def rows(rank: int, size: int) -> list:
    """One microbatch of a data-parallel rank."""
    g = torch.Generator().manual_seed(0)
    ids = lambda n: torch.randint(1, 64, (n,), generator=g).tolist()
    samples = []
    for i in range(4):
        answers = [ids(2 + (i + j) % 4) for j in range(1 + i % 2)]
        fields = [{n: torch.randn(len(a), generator=g).double() for n in ("return", "old_value")} for a in answers]
        samples.append(Sample(ids(3 + i), answers, fields))
    return [family_rows(samples[rank::size], 24).trim()]


def run(world: World, config: PPOConfig) -> dict[str, Any]:
    """Weights of the critic as it is made; then, with another head, its values and a step's gradient."""
    shape = setup.model_shape(config.model)
    place = Here(world.rank, world.size, world.rank, "cpu", None)
    critic = ppo.make_critic(Run("ppo", config, Path("none"), shape, None, place, world, setup.patient(world)))
    made = critic.gathered("parameter")
    if critic.model.head is not None:
        weight = critic.model.head.weight
        weight.data.copy_(torch.linspace(-1, 1, weight.numel()).view_as(weight))
        for bucket in critic.gradients.buckets:
            bucket.master.copy_(bucket.param if bucket.zero == 0 else bucket.param[bucket.start : bucket.stop])
    dp = critic.mesh.dp
    batches = rows(dp.rank, dp.size)
    values = dp.gather(critic.score(batches)[0].sort().values)
    metrics = critic.step(batches)
    shape = critic.model.config
    return {"made": made, "values": torch.cat(values).sort().values, "gradient": critic.gradient(),
            "loss": metrics["loss/critic"], "norm": metrics["grad/norm"], "stages": critic.model.part.stages,
            "moves": plan_stages(replace(shape, value_head=False), 2) != plan_stages(shape, 2)}  # fmt: skip


def main(rank: int, size: int, folder: str) -> None:
    """One rank of a gloo world; FOLDER/config.json: {"model": folder, "critics": {name: source}}."""
    torch.set_num_threads(1)
    if size > 1:
        store = dist.FileStore(str(Path(folder) / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    told, found = json.loads(Path(folder, "config.json").read_text()), {}
    for name, source in told["critics"].items():
        for layout, how in LAYOUTS.items() if size > 1 else {"one": {}}.items():
            config = PPOConfig(
                told["model"], "", dtype="float64", learner=replace(LEARNER, **POLICY.get(layout, {})), critic=source,
                critic_learner=replace(LEARNER, **how), max_prompt=8, max_new_tokens=8, length=24,
                microbatch_tokens=24,
            )  # fmt: skip
            found[name, layout] = run(World.current(), config)
    Path(folder, f"rank_{rank}_of_{size}.pkl").write_bytes(pickle.dumps(found))
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
