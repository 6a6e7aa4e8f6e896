"""Step time by layout on one machine, against one process with the same rows and the same threads in all.

    python benchmarks/layouts.py [--configs A] [--rounds 5] [--steps 4] [--json]

All layouts' processes are alive together: configuration A takes 4 GB, B some 50 GB.

Every layout starts its own processes (`moekit.submit`), warms up, and then times `--steps` steps a round; rounds of all
layouts take turns, so that a busy machine hits all of them. Shown: seconds a step (median of rounds, slowest rank), the
ratio to one process, and where the time of a rank goes: in collectives of gradients and parameters, in the exchange of
expert rows, in other collectives, and the rest (computing, and waiting for a core).
"""

import argparse
import json
import statistics
import time

import torch

import moekit
from moekit import Batch, Learner, LearnerConfig, ModelConfig, Transformer
from moekit.learner.mesh import World
from moekit.objectives.sft import SFT

CONFIGS = {
    "A": ModelConfig(vocab=4096, width=256, layers=4, heads=4, experts=16, top_k=4, expert_width=128, qk_norm="full"),
    "B": ModelConfig(vocab=8192, width=512, layers=8, heads=8, experts=64, top_k=8, expert_width=256, qk_norm="full"),
}
LAYOUTS = {
    "1 process, 2 threads": (1, 2, {}),
    "1 process, 1 thread": (1, 1, {}),
    "dp2, zero 0": (2, 1, {"zero": 0}),
    "dp2, zero 2": (2, 1, {"zero": 2}),
    "ep2, sync": (2, 1, {"ep": 2}),
    "ep2, rowwise, shared memory": (2, 1, {"ep": 2, "dispatch": "rowwise", "transport": "shared_memory"}),
    "ep2, rowwise, padded": (2, 1, {"ep": 2, "dispatch": "rowwise", "transport": "padded"}),
    "pp2, 1f1b": (2, 1, {"pp": 2}),
}
KINDS = {k: k for k in ("gradients", "parameters", "rows", "pipeline")} | {"metadata": "rows"}


def rows(vocab: int, seed: int = 0) -> Batch:
    """4 packed rows of 512, 4 documents a row, the first half of each without labels."""
    ids = torch.randint(2, vocab, (4, 512), generator=torch.Generator().manual_seed(seed))
    segment = (torch.arange(512) // 128).expand(4, 512)
    whole = Batch.make(ids, segment=segment)
    return Batch.make(ids, segment=segment, labels=whole.labels.masked_fill(torch.arange(512) % 128 < 64, -100))


def timed_worlds(spent: dict[str, float]) -> None:
    """Wrap the collectives so that their time is known, by kind."""
    for name in ("sum", "reduce_scatter", "all_gather", "all_to_all", "sum_list", "max_list", "gather", "barrier"):
        plain = getattr(World, name)

        def call(self, *args, _plain=plain, _name=name, **kwargs):
            words = [a for a in (*args, *kwargs.values()) if isinstance(a, str)]
            default = {"reduce_scatter": "gradients", "all_gather": "parameters", "all_to_all": "rows"}.get(_name, "")
            began = time.perf_counter()
            try:
                return _plain(self, *args, **kwargs)
            finally:
                kind = KINDS.get(words[0] if words else default, "other")
                spent[kind] = spent.get(kind, 0.0) + time.perf_counter() - began

        setattr(World, name, call)


def work(config: str, layout: dict, dtype: str, steps: int, folder: str, rounds: int) -> dict:
    """One rank: rounds start when a file of that name appears, so that layouts take turns."""
    import pathlib

    shape, here = CONFIGS[config], moekit.here()
    spent: dict[str, float] = {}
    timed_worlds(spent)
    model = Transformer(shape, dtype=getattr(torch, dtype), seed=0)
    learner = Learner(model, SFT(), LearnerConfig(lr=1e-5, clip_norm=None, **layout))
    dp = learner.mesh.dp
    batch = rows(shape.vocab)
    mine = [b for i, b in enumerate(batch.split(1)) if i % dp.size == dp.rank]
    parts = mine if learner.config.pp > 1 else [Batch.join(mine)]
    for _ in range(2):
        loss = learner.step(parts)["loss/total"]
    out = []
    for number in range(rounds):
        learner.world.barrier()
        pathlib.Path(folder, f"ready_{number}_{here.rank}").touch()
        while not pathlib.Path(folder, f"go_{number}").exists():
            time.sleep(0.02)
        learner.world.barrier()
        spent.clear()
        began = time.perf_counter()
        for _ in range(steps):
            learner.step(parts)
        seconds = (time.perf_counter() - began) / steps
        out.append({"seconds": seconds, **{k: v / steps for k, v in spent.items()}})
        pathlib.Path(folder, f"done_{number}_{here.rank}").touch()
    return {"loss": loss, "rounds": out}


def main() -> None:
    import pathlib
    import tempfile

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--configs", nargs="+", default=["A"], choices=CONFIGS)
    p.add_argument("--dtype", default="float32")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--steps", type=int, default=4)
    p.add_argument("--json", action="store_true")
    o = p.parse_args()
    for config in o.configs:
        with tempfile.TemporaryDirectory() as root:
            jobs, folders = {}, {}
            for name, (nproc, threads, layout) in LAYOUTS.items():
                folder = pathlib.Path(root, f"{len(jobs)}")
                folder.mkdir()
                jobs[name] = moekit.submit(
                    work, config, layout, o.dtype, o.steps, str(folder), o.rounds, nproc=nproc, threads=threads,
                    runs=root, name=f"job_{len(jobs)}", malloc="keep",
                )  # fmt: skip
                folders[name] = folder, nproc
                _wait(jobs[name], folder, "ready_0", nproc)
            for number in range(o.rounds):
                for name, (folder, nproc) in folders.items():
                    _wait(jobs[name], folder, f"ready_{number}", nproc)
                    (folder / f"go_{number}").touch()
                    _wait(jobs[name], folder, f"done_{number}", nproc)
            results = {name: job.result() for name, job in jobs.items()}
        losses = [r[0]["loss"] for r in results.values()]
        assert max(losses) - min(losses) < 1e-4 * abs(losses[0]), losses
        table = []
        for name, ranks in results.items():
            slowest = [max(r["rounds"][n]["seconds"] for r in ranks) for n in range(o.rounds)]
            mean = lambda k, ranks=ranks: statistics.mean(x.get(k, 0.0) for r in ranks for x in r["rounds"])
            table.append({"layout": name, "s": statistics.median(slowest), "min": min(slowest), "max": max(slowest),
                          **{k: mean(k) for k in ("gradients", "parameters", "rows", "other")}})  # fmt: skip
        if o.json:
            print(json.dumps({"config": config, "dtype": o.dtype, "table": table}))
            continue
        print(
            f"\nconfiguration {config}, {o.dtype}, 4 rows of 512; seconds a step, median of {o.rounds} rounds (min-max)"
        )
        print(f"{'layout':<30}{'step':>22}{'x one':>8}{'gradients':>11}{'parameters':>12}{'rows':>8}{'other':>8}")
        for row in table:
            step = f"{row['s']:.3f} ({row['min']:.3f}-{row['max']:.3f})"
            ratio = row["s"] / table[0]["s"]
            parts = f"{row['gradients']:>11.3f}{row['parameters']:>12.3f}{row['rows']:>8.3f}{row['other']:>8.3f}"
            print(f"{row['layout']:<30}{step:>22}{ratio:>8.2f}{parts}")


def _wait(job, folder, prefix: str, count: int) -> None:
    while len(list(folder.glob(f"{prefix}_*"))) < count:
        if job.done:
            job.result()
        time.sleep(0.02)


if __name__ == "__main__":
    main()
