"""MXFP8 experts in the learner: copies that are always of the weights as they are, and training that stays close."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked import run_ranks

from moekit import ops
from moekit.config import LearnerConfig, ModelConfig
from moekit.data.batch import Batch
from moekit.errors import ConfigError, StaleCacheError
from moekit.learner.learner import Learner
from moekit.learner.mesh import World
from moekit.learner.precision import ExpertCaches
from moekit.model.presets import preset
from moekit.model.transformer import Transformer
from moekit.objectives.sft import SFT

torch.set_num_threads(1)
SHAPE = preset("tiny")
MX = LearnerConfig(lr=3e-3, precision="mxfp8")


def batches(steps: int, seed: int = 0) -> list[Batch]:
    """Arithmetic sequences: learnable at once."""
    g = torch.Generator().manual_seed(seed)
    return [Batch.make((torch.randint(0, 512, (4, 1), generator=g) + 3 * torch.arange(33)) % 512) for _ in range(steps)]


def learner(config: LearnerConfig = MX, dtype=torch.float32, seed: int = 0) -> Learner:
    return Learner(Transformer(SHAPE, dtype=dtype, seed=seed), SFT(), config)


def experts(model: Transformer) -> dict[str, torch.nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if n.endswith((".moe.gate_up", ".moe.down"))}


def held(caches: ExpertCaches) -> int:
    """Bytes of codes and scales."""
    copies = [q for c in caches.caches.values() for q in (c.operands.forward, c.operands.transposed) if q is not None]
    return sum(t.nbytes for q in copies for t in (q.code, q.scale))


def fresh(made: Learner) -> None:
    """Every copy is, bit for bit, what the weight as it is now gives, both ways."""
    assert made.caches is not None and len(made.caches.caches) == 2 * SHAPE.layers
    for name, p in experts(made.model).items():
        have, want = p.mx_cache.current(), ops.Operands.of(p.detach().clone())
        for a, b in ((have.forward, want.forward), (have.transposed, want.transposed)):
            assert torch.equal(a.scale, b.scale) and torch.equal(a.code.view(torch.uint8), b.code.view(torch.uint8)), (
                name
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_follow_init_step_and_restore(dtype, tmp_path):
    a = learner(dtype=dtype)
    fresh(a)
    some = batches(3)
    before = [p.mx_cache.current() for p in experts(a.model).values()]
    a.step(some[:1])
    fresh(a)
    assert all(p.mx_cache.current() is not old for p, old in zip(experts(a.model).values(), before))
    a.save(tmp_path / "checkpoint")
    b = learner(dtype=dtype, seed=1)
    b.restore(tmp_path / "checkpoint")
    fresh(b)
    assert [a.step([x])["loss/total"] for x in some[1:]] == [b.step([x])["loss/total"] for x in some[1:]]


def write_data(p, bucket):
    p.data.mul_(2)  # no version counter sees this


def write_parameter(p, bucket):
    with torch.no_grad():
        p.add_(1)


def write_detached(p, bucket):
    p.detach()[0, 0, 0] = 7


def write_bucket(p, bucket):
    bucket.param.mul_(2)


def write_swap(p, bucket):
    p.data.copy_(p.data.flip(0))  # the same bytes at other places


def move(p, bucket):
    p.data = p.data.clone()  # the same bytes; later writes to the bucket would not reach them


@pytest.mark.parametrize("change", [write_data, write_parameter, write_detached, write_bucket, write_swap, move])
@pytest.mark.parametrize("which", ["gate_up", "down"])
def test_a_stale_copy_is_refused(change, which):
    """However the weight was changed, forward and step raise until the copies are made again."""
    made, (batch,) = learner(), batches(1)
    name = f"layers.1.moe.{which}"
    p = experts(made.model)[name]
    change(p, next(b for b in made.gradients.buckets if name in b.params))
    with pytest.raises(StaleCacheError, match=r"\.moe\..*rebuild"):
        made.step([batch])
    with pytest.raises(StaleCacheError):
        made.evaluate([batch])
    made.caches.rebuild()
    fresh(made)
    made.evaluate([batch])


def test_a_version_counter_alone_tells(monkeypatch):
    """What a GPU has: no checksum. Writes to the parameter, to its bucket and to its master are seen all the same."""
    from moekit.learner import precision

    monkeypatch.setattr(precision.zlib, "crc32", lambda _: 0)
    for target in ("parameter", "param", "master"):
        made = learner()
        name, p = next(iter(experts(made.model).items()))
        bucket = next(b for b in made.gradients.buckets if name in b.params)
        with torch.no_grad():
            (p if target == "parameter" else getattr(bucket, target)).mul_(2)
        with pytest.raises(StaleCacheError):
            p.mx_cache.current()


def test_loaded_weights_do_not_run_with_old_copies():
    made, (batch,) = learner(), batches(1)
    made.model.load_state_dict(Transformer(SHAPE, seed=5).state_dict())
    with pytest.raises(StaleCacheError):
        made.evaluate([batch])
    made.caches.rebuild()
    fresh(made)
    made.evaluate([batch])


def test_a_skipped_step_keeps_the_copies():
    made, (batch,) = learner(), batches(1)
    before = [p.mx_cache.current() for p in experts(made.model).values()]
    made.step([replace(batch, labels=torch.full_like(batch.input_ids, -100))])
    assert made.skipped == 1
    assert all(p.mx_cache.current() is old for p, old in zip(experts(made.model).values(), before))


def test_a_frozen_model_holds_the_forward_copy_only():
    """33/32 bytes an element; it runs under no_grad with the learner's numbers, and a gradient is refused by name."""
    made, (batch,) = learner(), batches(1)
    frozen = Transformer(SHAPE, seed=0)
    caches = ExpertCaches(frozen, backward=False)
    elements = sum(p.numel() for p in experts(frozen).values())
    assert held(caches) == elements * 33 // 32 and held(made.caches) == 2 * elements * 33 // 32
    with torch.no_grad():
        assert torch.equal(frozen(batch).logprob_M, made.model(batch).logprob_M)
    with pytest.raises(ConfigError, match="forward-only"):
        frozen(batch)
    caches.close()
    wide = Transformer(SHAPE, seed=0)
    assert torch.equal(frozen(batch).logprob_M, wide(batch).logprob_M)
    assert not torch.equal(wide(batch).logprob_M, made.model(batch).logprob_M)


def test_shapes_and_dtypes_that_cannot_work_are_refused():
    odd = Transformer(replace(SHAPE, expert_width=48), seed=0)
    with pytest.raises(ConfigError, match="width=64 and expert_width=48"):
        Learner(odd, SFT(), MX)
    assert not any(hasattr(p, "grad_slot") for p in odd.parameters())  # before anything was moved
    with pytest.raises(ConfigError, match="float64"):
        learner(dtype=torch.float64)
    with pytest.raises(ConfigError, match="precision='fp8'"):
        LearnerConfig(precision="fp8")
    half = Transformer(SHAPE, seed=0)
    ExpertCaches(half)
    del next(iter(experts(half).values())).mx_cache
    with pytest.raises(ConfigError, match="only one"):
        half(batches(1)[0])


@pytest.mark.parametrize("recompute", ["moe", "block"])
def test_gradients_are_close_and_recompute_changes_nothing(recompute):
    """With the wide run's routes (3 of 256 rows would flip): 5 to 7 % noise, and the same bits with recompute."""
    some = batches(2)
    wide, mx, again = (learner(c) for c in (LearnerConfig(lr=3e-3), MX, replace(MX, recompute=recompute)))
    wide.step(some, record=True)
    for one in (mx, again):
        one.step(some, replay=[list(layers.values()) for layers in wide.routes])
    g, h, k = (one.gradient() for one in (wide, mx, again))
    for name in g:
        assert torch.equal(h[name], k[name]), name
        off = ((g[name] - h[name]).norm() / g[name].norm()).item()
        assert 1e-3 < off < 0.08, (name, off)


def test_expert_parallel_ranks_quantise_their_own_experts(tmp_path):
    """ep=2 on two processes: both dispatchers and a redone step have the same bits, and the single process's numbers
    up to rounding that another order of additions flips."""
    module = Path(__file__).parent / "precisions.py"
    assert run_ranks(module, [(r, 2, tmp_path) for r in range(2)], timeout=120) == [0, 0]
    first, second = (pickle.loads((tmp_path / f"rank_{r}.pkl").read_bytes()) for r in range(2))
    sys.path.insert(0, str(module.parent))
    alone = importlib.import_module("precisions").run(World())
    assert [first[name]["redone"].item() > 0 for name in ("sync", "rowwise", "redone")] == [False, False, True]
    for name, t in alone.items():
        if name == "redone":
            continue
        for other in (first["rowwise"], first["redone"], second["sync"]):
            assert torch.equal(first["sync"][name], other[name]), name
        assert (first["sync"][name] - t).norm() <= 0.02 * t.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_thirty_steps_end_at_the_same_loss(dtype):
    """A tiny model that goes from ln 512 = 6.24 to below 4.7: final loss within 2 % of the run without MXFP8."""
    final = []
    for config in (LearnerConfig(lr=3e-3), MX):
        made = learner(config, dtype)
        losses = [made.step([b])["loss/total"] for b in batches(30)]
        final.append(sum(losses[-5:]) / 5)
    assert final[0] < 4.8 and abs(final[1] / final[0] - 1) < 0.02 and final[0] != final[1]


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_the_demo_in_mxfp8_ends_within_two_percent_of_bfloat16(tmp_path):
    """The demo's data, model and schedule in 150 shorter steps, bfloat16 parameters, 3 seeds of weights and row order:
    loss of the finished model, in the precision it was trained in, on 256 rows of questions that no run has seen. Every
    seed is within 2 %, their mean within 1 %. At a third of the demo's learning rate, where the same bfloat16
    mathematics with a step's rows cut in two stays within 0.8 %; at all of it these two come apart by 1.7 %
    (benchmarks/RESULTS.md)."""
    from moekit.config import DataConfig
    from moekit.data import tasks
    from moekit.data.chat import load_tokenizer
    from moekit.data.dataset import build
    from moekit.data.stream import RowStream
    from moekit.learner.weights import export, load
    from moekit.recipes import demo, sft

    demo._make_data(tmp_path)
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    unseen = [
        x for n, kind in demo.TASKS.items() for x in tasks.make_task(n, "heldout", **{**kind, "size": 900, "seed": 1})
    ]
    (tmp_path / "unseen.jsonl").write_text("".join(json.dumps({"messages": x["messages"]}) + "\n" for x in unseen))
    rows = build(str(tmp_path / "unseen.jsonl"), tokenizer, DataConfig(length=256))
    stream = RowStream(rows, 16, 0, False)
    held_out = [rows.batch(stream.take()) for _ in range(16)]
    shape = replace(preset("demo"), vocab=len(tokenizer), bos_id=tokenizer.bos_token_id,
                    eos_id=tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id)  # fmt: skip
    base = replace(demo._config(tmp_path, 150), batch_rows=8, dtype="bfloat16", save_every=None)
    assert len(rows) >= 256 and base.learner.lr == 3e-3
    ratios = []
    for seed in range(3):
        export(Transformer(shape, seed=seed), tmp_path / "initial", tmp_path / "tokenizer", overwrite=True)
        final = []
        for precision in ("model", "mxfp8"):
            config = replace(base.learner, lr=1e-3, precision=precision)
            out = tmp_path / f"{precision}_{seed}"
            sft.train(replace(base, seed=seed, out=str(out), rows=replace(base.rows, seed=seed), learner=config))
            finished = Learner(load(out / "export", dtype="bfloat16"), SFT(), config)
            final.append(finished.evaluate(held_out)["eval/sft"])
            finished.close()
        print(f"seed {seed}: bfloat16 {final[0]:.4f}, mxfp8 {final[1]:.4f}, ratio {final[1] / final[0]:.4f}")
        assert final[0] < 3 and abs(final[1] / final[0] - 1) < 0.02, (seed, final)
        ratios.append(final[1] / final[0])
    assert abs(sum(ratios) / 3 - 1) < 0.01, ratios


def test_config_travels():
    assert LearnerConfig.from_dict(MX.to_dict()) == MX
    assert isinstance(SHAPE, ModelConfig)
