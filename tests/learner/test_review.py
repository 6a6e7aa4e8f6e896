"""Defects found by reading the learner against its own rules: one failing case each, on processes that really exist.

This file is its own worker: `python test_review.py RANK SIZE FOLDER` runs every case of a world of that size.
"""

import functools
import os
import pickle
import random
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked import run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode

from moekit.checkpoint.intervals import Piece
from moekit.checkpoint.write import save_state
from moekit.config import LearnerConfig, RouterLossConfig
from moekit.data.batch import Batch
from moekit.errors import CheckpointError, ConfigError, DataError, MoekitError
from moekit.learner.learner import Learner
from moekit.learner.mesh import Mesh, World
from moekit.learner.weights import from_checkpoint
from moekit.model.presets import preset
from moekit.model.router import Route
from moekit.model.transformer import Transformer
from moekit.objectives.balance import RouterLoss
from moekit.objectives.base import Terms
from moekit.objectives.denominator import step_counts, token_weights
from moekit.objectives.sft import SFT

MODEL = replace(preset("tiny"), vocab=23, max_positions=16)
ROUTER = RouterLossConfig(balance=0.1, z=0.01)
CONFIG = LearnerConfig(lr=0.01, router=ROUTER)
F64 = torch.float64


def rows(seed: int, n: int = 1, length: int = 8) -> list[Batch]:
    g = torch.Generator().manual_seed(seed)
    return Batch.make(torch.randint(0, MODEL.vocab, (n, length), generator=g)).split(1)


def made(config=CONFIG, world=None, dtype=F64, model=MODEL, objective=None, frozen=(), seed=0) -> Learner:
    one = Transformer(model, dtype=dtype, seed=seed)
    for name, p in one.named_parameters():
        p.requires_grad_(not name.startswith(tuple(frozen)) if frozen else True)
    return Learner(one, objective or SFT(), config, world)


def unlabelled() -> Batch:
    batch = rows(3)[0]
    return Batch.make(batch.input_ids, labels=torch.full_like(batch.input_ids, -100))


def constant_when_empty(flat, out) -> Terms:
    """What a cell may well contain: no label, no graph."""
    return Terms(-out.logprob_M if flat.label_index_M.numel() else torch.zeros(0, dtype=F64))


def raised(kind, call) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return ""


# ------------------------------------------------------------------ cases; each is called by every rank of 2


def alone_in_a_world(rank: int, folder: Path) -> dict:
    """A learner of one process inside a world of two counts its own rows, and waits for nobody."""
    metrics = made(world=World()).step(rows(0, 1 + 2 * rank))
    return {"tokens": metrics["tokens/supervised"], "want": 7 * (1 + 2 * rank)}


def part_of_a_world(rank: int, folder: Path) -> str:
    both = dist.new_group([0, 1])
    return raised(ConfigError, lambda: Mesh.make(CONFIG, MODEL, World(rank, 2, both)))


def many_learners(rank: int, folder: Path) -> list[int]:
    """Open files after the first and after the tenth mesh."""
    found = []
    for _ in range(10):
        Mesh.make(replace(CONFIG, pp=2), replace(MODEL, tied_head=True))
        Mesh.make(replace(CONFIG, ep=2), MODEL)
        found.append(len(os.listdir("/proc/self/fd")))
    return [found[0], found[-1]]


def bad_batches(rank: int, folder: Path) -> list[str]:
    """A label, and a position, that the model does not have, on rank 1 only."""
    good, one = rows(0)[0], made(replace(CONFIG, ep=2))
    label, position = good.labels.clone(), good.position.clone()
    label[0, 2], position[0, 2] = 99, 77
    bad = [replace(good, labels=label), replace(good, position=position)]
    return [
        raised(DataError, lambda b=b, call=call: call([b if rank else good]))
        for b in bad for call in (one.step, one.evaluate)
    ]  # fmt: skip


def no_graph_on_one_rank(rank: int, folder: Path) -> dict:
    found = {}
    for name, objective in (("sft", SFT()), ("constant", constant_when_empty)):
        one = made(replace(CONFIG, ep=2), objective=objective)
        one.step([unlabelled()] if rank else rows(0))
        found[name] = one.gradient()
    return found


def short_replay(rank: int, folder: Path) -> list[float]:
    """Routes for this rank's own microbatches, of which rank 1 has fewer."""
    one = made(replace(CONFIG, ep=2))
    batches = rows(0, 2 - rank)
    one.step(batches, record=True)
    routes = [[layers[i] for i in MODEL.moe_layers] for layers in one.routes[: len(batches)]]
    again = made(replace(CONFIG, ep=2)).step(batches, replay=routes)
    return [again["loss/total"], made(replace(CONFIG, ep=2)).step(batches)["loss/total"]]


def damaged(rank: int, folder: Path) -> str:
    """A file of which only one rank reads the damaged block."""
    one = made(replace(CONFIG, ep=2))
    path = one.save(folder / "damaged").path
    if rank == 0:
        file = next(path.glob("rank_00001*"))
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)
    one.world.barrier()
    return raised(CheckpointError, lambda: one.restore(path))


def frozen_parts(rank: int, folder: Path) -> dict:
    """Embedding, router and experts frozen in bf16, seeded apart; trained, saved, restored elsewhere and to a model."""
    found = {}
    for at, layout in enumerate((CONFIG, replace(CONFIG, ep=2, zero=1), replace(CONFIG, pp=2, zero=0))):
        frozen = ("embed", "layers.0.moe") if layout.pp == 1 else ("embed", "layers.0.", "layers.1.")
        model = MODEL if layout.pp == 1 else replace(MODEL, layers=4)
        one = made(layout, dtype=torch.bfloat16, frozen=frozen, seed=rank if layout.pp == 1 else 0, model=model)
        before = one.gathered("parameter")
        held = {n: p.detach().clone() for n, p in one.model.named_parameters()}
        for step in range(2):
            one.step(rows(step + 2 * rank if layout.pp == 1 else step))
        path = one.save(folder / f"frozen_{at}").path
        again = made(layout, dtype=torch.bfloat16, frozen=frozen, seed=7, model=model)
        again.restore(path)
        whole = dict(from_checkpoint(path).named_parameters())
        after = one.gathered("parameter")
        equal = lambda a, b: all(torch.equal(a[n], b[n]) for n in a) and a.keys() == b.keys()
        found[at] = {
            "frozen stay": all(torch.equal(p, before[n]) for n, p in after.items() if n.startswith(frozen)),
            "others move": all(not torch.equal(p, before[n]) for n, p in after.items() if not n.startswith(frozen)),
            "sum": float(held["embed.weight"].double().sum()) if "embed.weight" in held else None,
            "restored": equal(again.gathered("parameter"), after),
            "moments": equal(again.gathered("exp_avg"), one.gathered("exp_avg")),
            "model": equal(whole, after),
            "next": again.step(rows(9))["loss/total"] == one.step(rows(9))["loss/total"],
        }
    return found


def not_finite_on_one_rank(rank: int, folder: Path) -> list[tuple]:
    """In the first step what rank 1 says is NaN; a second follows. Against a learner that takes the second only."""
    found, model = [], replace(MODEL, selection_bias=True)
    rowwise = {"ep": 2, "dispatch": "rowwise", "capacity": 0.3}
    for how in ({"ep": 2}, rowwise, {"reduce": "microbatch"}, {"pp": 2, "zero": 0}):
        config, factor = replace(CONFIG, bias_rate=0.01, **how), [float("nan") if rank else 1.0]
        batches = rows(rank * (config.pp == 1), 2)
        one = made(config, model=model, objective=lambda flat, out, by=factor: Terms(-out.logprob_M * by[0]))
        bad = one.step(batches)
        factor[0] = 1.0
        good = one.step(batches)
        fresh = made(config, model=model)
        want, states = fresh.step(batches), [x.gathered("master") | x._buffers() for x in (one, fresh)]
        same = all(torch.equal(states[0][n], t) for n, t in states[1].items())
        told = [m[k] for m in (bad, good) for k in ("step/index", "step/skipped", "lr")]
        found.append((told, bad["loss/total"] != bad["loss/total"], good["loss/total"] == want["loss/total"], same))
    return found


def nothing_to_score(rank: int, folder: Path) -> list[list]:
    """No rank has a batch, in a pipeline and without one."""
    return [made(replace(CONFIG, pp=pp)).score([]) for pp in (1, 2)]


def noisy(flat, out) -> Terms:
    """An objective that uses every random generator."""
    return Terms(-out.logprob_M * (random.random() + float(np.random.rand()) + torch.rand(()).item()))


def redone_with_random_numbers(rank: int, folder: Path) -> list:
    found = []
    for how in ({}, {"dispatch": "rowwise", "capacity": 0.3}):
        random.seed(3), np.random.seed(3), torch.manual_seed(3)
        one = made(replace(CONFIG, ep=2, **how), objective=noisy)
        loss = one.step(rows(0, 2))["loss/total"]
        if one.overflow.rowwise:
            one.overflow.rowwise.capacity = 0.3  # it has grown
        evaluated = one.evaluate(rows(1, 2))["eval/noisy"]
        found.append((one.overflow.redone, loss, evaluated, random.random(), np.random.rand(), torch.rand(1).item()))
    return found


CASES = [
    alone_in_a_world, part_of_a_world, many_learners, bad_batches, no_graph_on_one_rank, short_replay, damaged,
    frozen_parts, redone_with_random_numbers, nothing_to_score, not_finite_on_one_rank,
]  # fmt: skip


@functools.cache
def results() -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(__file__, [(r, 2, folder) for r in range(2)], timeout=200) == [0, 0]
        return [pickle.loads(Path(folder, f"rank_{r}.pkl").read_bytes()) for r in range(2)]


def both(case) -> list:
    return [r[case.__name__] for r in results()]


def test_a_learner_alone_in_a_world_counts_its_own_rows():
    for got in both(alone_in_a_world):
        assert got["tokens"] == got["want"]


def test_a_part_of_the_world_is_refused():
    assert all("all 2 ranks" in text for text in both(part_of_a_world))


def test_process_groups_are_made_once():
    assert all(first == last for first, last in both(many_learners))


def test_a_bad_batch_on_one_rank_is_an_error_on_all():
    for texts in both(bad_batches):
        assert all(texts), texts
    assert "label 99" in both(bad_batches)[1][0] and "position 77" in both(bad_batches)[1][2]


def test_an_objective_without_a_graph_still_gives_router_losses():
    for got in both(no_graph_on_one_rank):
        assert all(torch.equal(got["constant"][n], g) for n, g in got["sft"].items())


def test_replay_where_ranks_have_different_numbers_of_microbatches():
    assert all(a == b for a, b in both(short_replay))


def test_damage_that_one_rank_finds_is_an_error_on_all():
    assert all("damaged" in text for text in both(damaged))


def test_frozen_parameters_start_equal_stay_and_are_in_the_checkpoint():
    first, second = both(frozen_parts)
    for found in (first, second):
        for one in found.values():
            assert all(v for k, v in one.items() if k != "sum"), found
    assert first[0]["sum"] == second[0]["sum"] and first[1]["sum"] == second[1]["sum"]


def test_what_is_not_finite_on_one_rank_moves_nothing_on_any():
    for found in both(not_finite_on_one_rank):
        assert found == [([0, 1, 0.0, 1, 1, CONFIG.lr], True, True, True)] * 4


def test_a_score_of_nothing_is_nothing():
    assert both(nothing_to_score) == [[[], []]] * 2


def test_a_redone_pass_sees_the_random_numbers_of_the_first():
    for sync, redone in both(redone_with_random_numbers):
        assert redone[0] == 2 and redone[1:] == sync[1:]


def test_the_selection_bias_moves_alike_whether_a_prompt_is_shared_or_not():
    """A position of a shared prompt counts once for each child, or the shared batch would move other experts."""
    g = torch.Generator().manual_seed(0)
    prompt, answers = torch.randint(0, 23, (6,), generator=g), torch.randint(0, 23, (5, 2), generator=g)
    segment = torch.tensor([0] * 6 + [s for s in range(1, 6) for _ in range(2)])[None]
    shared = Batch.make(
        torch.cat([prompt, answers.reshape(-1)])[None], segment=segment, parent=torch.where(segment > 0, 0, -1)
    )
    apart = Batch.make(torch.stack([torch.cat([prompt, a]) for a in answers]))
    apart = replace(apart, labels=apart.labels.index_fill(1, torch.arange(6), -100))
    shared = replace(shared, labels=shared.labels.index_fill(1, torch.arange(6), -100))
    model, biases = replace(MODEL, selection_bias=True, max_positions=32), []
    for batch in (shared, apart):
        one = made(replace(CONFIG, bias_rate=0.01), model=model)
        one.step([batch])
        biases.append(torch.stack(list(one._buffers().values())))
    assert torch.equal(*biases) and biases[0].any()


def test_a_failed_save_that_only_some_ranks_were_told_of_ends_the_next_one_at_once(tmp_path):
    """Rank 0 waited for the failed save, rank 1 did not: it is told at the next save, and tells rank 0."""
    (tmp_path / "file").write_text("not a folder")
    ended = {}

    def rank(r: int) -> None:
        entries = {"master": [(Piece("w", (8,), 4 * r, 4 * r + 4), torch.arange(4.0))]}
        world = SimpleNamespace(rank=r, size=2)
        first = save_state(tmp_path / "file" / "a", entries, {}, world=world, token="1", asynchronous=True, patience=1)
        if r == 0:
            raised(MoekitError, first.wait)
        else:
            time.sleep(0.5)
        ended[r] = (
            raised(MoekitError, lambda: save_state(tmp_path / "b", entries, {}, world=world, token="2", patience=30)),
            time.monotonic(),
        )

    began, both_ranks = time.monotonic(), [threading.Thread(target=rank, args=(r,)) for r in (0, 1)]
    for t in both_ranks:
        t.start()
    for t in both_ranks:
        t.join()
    assert all("cannot write" in text and at - began < 25 for text, at in ended.values()), ended


def test_a_second_learner_takes_the_parameters_over():
    """The first one's hooks, and with them its buckets, are gone; the model trains as before."""
    import gc
    import weakref

    one = made()
    bucket = weakref.ref(one.gradients.buckets[0])
    again = Learner(one.model, SFT(), CONFIG)
    del one
    gc.collect()
    assert bucket() is None
    assert again.step(rows(0))["loss/total"] == made().step(rows(0))["loss/total"]


def test_the_gradient_norm_of_a_large_float32_model():
    """torch's own float32 norm of so many numbers is off by 1e-4 and more on a CPU, and the clipped gradient with it,
    by another amount in every layout."""
    one = made(dtype=torch.float32, model=replace(MODEL, vocab=1 << 16))
    want = 0.0
    for bucket in one.gradients.buckets:
        bucket.owned_grad = torch.rand_like(bucket.master)
        want += bucket.owned_grad.double().square().sum().item()
    assert one.gradients.square_norm().item() == pytest.approx(want, rel=1e-7)


@pytest.mark.parametrize(
    "wrong",
    [{"clip_norm": -1.0}, {"clip_norm": 0.0}, {"clip_norm": float("nan")}, {"weight_decay": -0.1}, {"bias_rate": -0.1},
     {"warmup_steps": -1}, {"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"min_lr_ratio": -0.1}, {"min_lr_ratio": 1.5}],
    ids=str,
)  # fmt: skip
def test_settings_that_would_learn_backwards_are_refused(wrong):
    """clip_norm=-1, which elsewhere means no clipping, turned every gradient round; a negative rate does the same."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LearnerConfig(**wrong)


def infinite(flat, out) -> Terms:
    return Terms(-out.logprob_M / 0)


def test_a_loss_that_is_infinite_reads_its_value_and_moves_nothing():
    one = made(objective=infinite)
    before = one.gathered("parameter")
    metrics = one.step(rows(0, 3))
    assert metrics["loss/infinite"] == metrics["loss/total"] == float("inf") and metrics["step/skipped"] == 1
    assert all(torch.equal(p, before[n]) for n, p in one.gathered("parameter").items())


@pytest.mark.parametrize("scope", ["all", "valid", "supervised"])
@pytest.mark.parametrize("granularity", ["sequence", "microbatch"])
def test_router_losses_and_weights_read_nothing_on_the_host(scope, granularity):
    """Between the first forward and the last backward: no mask, no nonzero, no bincount (each would stop a GPU)."""
    segment = torch.tensor([[0, 0, 1, 1, 2, 2, -1, -1]])
    parent = torch.where(segment > 0, 0, -1)
    flat = Batch.make(torch.arange(8)[None], segment=segment, parent=parent).flat
    counts = step_counts([flat])
    with FakeTensorMode() as mode:
        fake = {k: mode.from_tensor(v) for k, v in vars(flat).items() if isinstance(v, torch.Tensor)}
        there = replace(flat, **{k: v for k, v in fake.items() if k != "label_M"})
        logits = torch.randn(8, 4, requires_grad=True)
        route = Route(logits, logits.softmax(-1), torch.zeros(8, 2, dtype=torch.long), torch.randn(8, 2))
        loss = RouterLoss(replace(ROUTER, granularity=granularity, scope=scope), 1.0, lambda x: x)(0, route, there)
        loss.backward()
        assert token_weights(there, counts, "sequence_mean").shape == (3,)


def main(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    only = os.environ.get("ONLY")
    found = {case.__name__: case(rank, Path(folder)) for case in CASES if not only or case.__name__ == only}
    Path(folder, f"rank_{rank}.pkl").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
