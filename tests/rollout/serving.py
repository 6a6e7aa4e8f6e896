"""What the tests of serving on several ranks run in every process: uneven requests, refills, updates, ranks that leave.

Imported by spawned processes, so it is a module beside the tests and not a test itself.
"""

import os
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import run_ranks

from moekit.config import LearnerConfig, ModelConfig
from moekit.data.batch import Batch
from moekit.errors import MoekitError
from moekit.learner.learner import Learner
from moekit.learner.mesh import World
from moekit.model.transformer import Transformer
from moekit.objectives.sft import SFT
from moekit.recipes.serve import serving_engine
from moekit.rollout.embedded import EmbeddedEngine
from moekit.rollout.engine import Sampling
from moekit.rollout.weight_plan import held, plan
from moekit.rollout.weight_transfer import chunks

MODEL = ModelConfig(
    vocab=50, width=16, layers=3, heads=4, kv_heads=2, experts=8, top_k=2, expert_width=8, max_positions=64,
    dense_layers=(1,), dense_width=12, shared_width=8, selection_bias=True, gate="sigmoid", init_std=0.3,
)  # fmt: skip
PROMPTS = [[5, 6], [7], [9, 8, 7, 6, 5, 4, 3, 40, 41], [20, 21, 22], [49] * 12, [1, 2], [3] * 7]
LIMITS = [3, 17, 9, 1, 12, 20, 6]
MINE = {2: ([0, 1, 2, 3, 4, 5, 6], []), 4: ([2, 4, 6], [], [1], [0, 3, 5])}  # requests of every rank
HOW = {"greedy": Sampling(max_new_tokens=20, temperature=0), "sampled": Sampling(max_new_tokens=20, n=2, top_p=0.9)}
LAYOUTS = {"sync": {}, "padded": {"dispatch": "rowwise", "transport": "padded"},
           "shared_memory": {"dispatch": "rowwise", "transport": "shared_memory"}}  # fmt: skip


def model() -> Transformer:
    """Selection biases are not zero."""
    made = Transformer(MODEL, seed=1)
    for buffer in made.buffers():
        buffer.copy_(torch.linspace(-0.2, 0.2, buffer.numel()))
    return made


def answered(engine: EmbeddedEngine, mine: list[int], how: Sampling) -> dict[int, Any]:
    """Answers by request, with what they are when scored."""
    prompts, limits = [PROMPTS[i] for i in mine], [LIMITS[i] for i in mine]
    found = engine.generate(prompts, how, prompt_ids=mine, limits=limits)
    scored = engine.score(prompts, [[a.ids for a in r.answers] for r in found], how)
    return {i: (rollout, again) for i, rollout, again in zip(mine, found, scored)}


def refusal(call: Any) -> str:
    try:
        call()
    except MoekitError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def serve(world: World, name: str) -> dict[str, Any]:
    """All that one dispatcher is asked."""
    mine = MINE[world.size][world.rank]
    engine = serving_engine(model(), LearnerConfig(ep=world.size, **LAYOUTS[name]), slots=2, ahead=10)
    out: dict[str, Any] = {kind: answered(engine, mine, how) for kind, how in HOW.items()}
    out["experts"] = tuple(engine.model.blocks[0].moe.gate_up.shape)
    counter = engine.counter.all_reduce()
    counter.check()
    out["rows"] = {key: m.dispatched_LCE.sum(1) for key, m in counter.host().items()}
    counter.reset()
    out["metrics"], out["idle"] = engine.metrics(), engine.stats.steps
    # a rank with a bad request, a closed stream, another version: all ranks are told, and serve on afterwards
    bad = [[99]] if world.rank == 0 else [PROMPTS[0]]
    out["bad"] = refusal(lambda: engine.generate(bad, HOW["greedy"]))
    stream = engine.stream([[5, 6]] * 3, HOW["greedy"], limits=[1, 20, 20] if world.rank == 0 else [20] * 3)
    out["closed"] = refusal(lambda: (next(stream), stream.close()) if world.rank == 0 else list(stream))
    out["inside"] = refusal(lambda: crossing(engine))
    engine.update_weights(model(), 3 if world.rank == 0 else 4)
    out["versions"] = refusal(lambda: engine.generate([], HOW["greedy"]))
    engine.update_weights(model(), 5)
    out["again"] = answered(engine, mine, HOW["greedy"])
    return out


def crossing(engine: EmbeddedEngine) -> None:
    stream = engine.stream([[5, 6]], HOW["greedy"])
    next(stream)
    try:
        engine.update_weights(model(), 9, "in_place")
    finally:
        list(stream)


def trained(world: World, learns: int, serves: int) -> dict[str, Any]:
    """A learner at one degree takes a step; an engine at another gets what it wants of it, piece by piece."""
    learner = Learner(model(), SFT(), LearnerConfig(lr=0.05, ep=learns))
    ids = torch.randint(0, MODEL.vocab, (4, 10), generator=torch.Generator().manual_seed(world.rank))
    learner.step([Batch.make(ids)])
    engine = serving_engine(MODEL, LearnerConfig(ep=serves), slots=2)
    have = world.gather([piece for piece, _ in held(learner.model).values()])
    want = world.gather([piece for piece, _ in held(engine.model).values()])
    way = plan(have, want, 4)
    for version in (1, 2):
        assert engine.begin_update(version, "atomic" if version == 1 else "in_place")
        sent = world.gather([(s.target, list(chunks(held(learner.model), [s]))) for s in way.of(world.rank)])
        for target, parts in (one for rank in sent for one in rank):
            for chunk in parts if target == world.rank else ():
                engine.write(chunk)
        engine.finish_update()
    found = answered(engine, MINE[world.size][world.rank], HOW["greedy"])
    return {"answers": found, "whole": learner.gathered("parameter")}


def main(rank: int, size: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
    out = {n: serve(World.current(), n) for n in names if n in LAYOUTS}
    out |= {n: trained(World.current(), *map(int, n.split("to"))) for n in names if "to" in n}
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(out))
    dist.destroy_process_group()


def run(size: int, names: list[str]) -> list[dict[str, Any]]:
    """What every rank found."""
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(__file__, [(r, size, folder, *names) for r in range(size)], timeout=100) == [0] * size
        return [pickle.loads((Path(folder) / f"{r}.pickle").read_bytes()) for r in range(size)]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    os._exit(0)  # groups of a mesh that is cached are freed by the interpreter's end, too late for gloo's threads
