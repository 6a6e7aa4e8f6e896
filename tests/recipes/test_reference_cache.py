"""The reference cache: equal to the model that it was made with, or not used; resumed, checked, on any layout."""

import importlib.util
import os
import pickle
import random
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import run_ranks

from moekit.config import LearnerConfig, RouterLossConfig
from moekit.data.preference import Pair
from moekit.data.stream import RowStream
from moekit.errors import CheckpointError, NumericsError
from moekit.learner.learner import Learner
from moekit.model.transformer import Transformer
from moekit.objectives.dpo import DPO
from moekit.objectives.reference import read_shard, shard_path, write_shard
from moekit.recipes import reference_cache
from moekit.recipes.reference_cache import cached, check, resident

HERE = Path(__file__).parent / "caching.py"
spec = importlib.util.spec_from_file_location("caching", HERE)
caching = importlib.util.module_from_spec(spec)
spec.loader.exec_module(caching)
ENV = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def only(root):
    """The one cache below a folder."""
    (key,) = root.glob("*/key.json")
    return key.parent


def test_cached_is_resident_bitwise(tmp_path):
    """Identical microbatches on one process: log-probs, loss and three steps of training are the same bits."""
    found = caching.build(tmp_path, shard_pairs=64, microbatch_tokens=200)
    where = caching.layout()
    each = 200 // max(map(found.size, range(len(found))))
    runs = []
    for kind in ("cached", "resident"):
        learner = Learner(Transformer(caching.MODEL, seed=1), DPO(reference=kind), LearnerConfig(lr=1e-2))
        told = []
        for _ in range(3):
            data = found if kind == "cached" else replace(found, reference=None)
            parts = [data.batch(range(at, min(at + each, len(found)))).trim() for at in range(0, len(found), each)]
            parts = parts if kind == "cached" else resident(where, parts)
            told.append({k: v for k, v in learner.step(parts).items() if k.startswith(("loss", "dpo", "grad"))})
        runs.append((told, [b.flat.at_labels("ref_logprob") for b in parts], learner.gathered("parameter")))
    (a, x, p), (b, y, q) = runs
    assert a == b and all(torch.equal(i, j) for i, j in zip(x, y)) and all(torch.equal(p[n], q[n]) for n in p)
    assert a[0]["loss/dpo"] == pytest.approx(np.log(2), abs=1e-6) and a[0]["dpo/margin"] == pytest.approx(0, abs=1e-6)
    assert a[0]["loss/dpo"] > a[1]["loss/dpo"] > a[2]["loss/dpo"]
    assert where.collect()[0]["rows/reference_score"] > 0


def test_other_microbatches_give_equal_log_probs(tmp_path):
    """Another cut, and unshared prompts: 1e-5 per token; float64: 1e-9. The spot check sees the same."""
    found = caching.build(tmp_path)
    for changed in (replace(found, share=False), found):
        where = caching.layout()
        assert check(where, changed, found.reference, count=23, tolerance=1e-5, microbatch_tokens=1) <= 1e-5
    double = caching.build(tmp_path / "double", layout=(where := caching.layout(dtype=torch.float64)))
    assert next(iter(caching.values(double).values())).dtype == torch.float64
    assert check(where, replace(double, share=False), double.reference, 23, 1e-9, 1) <= 1e-9


def test_a_change_of_anything_makes_it_miss(tmp_path):
    """A row, the template, one bit of a weight, the model's shape, dtype or truncation: another cache each."""
    caching.build(tmp_path)

    def missed(**changes):
        before = {*tmp_path.iterdir()}
        caching.build(tmp_path, **changes)
        return len({*tmp_path.iterdir()} - before) == 1

    assert not missed()
    data = caching.pairs()
    row = replace(data, pairs=[*data.pairs[:-1], Pair(data.pairs[-1].prompt, data.pairs[-1].chosen, [1, 2])])
    assert missed(pairs=row)
    assert missed(tokenizer=caching.tokenizer("{{ messages }} "))
    assert missed(truncation="length=39")
    assert missed(layout=caching.layout(dtype=torch.bfloat16))
    assert missed(layout=caching.layout(seed=2))
    bit = caching.layout()
    bit.model.layers[3].moe.down.data.view(torch.int32)[5, 3, 2] ^= 1  # the last bit of one expert's weight
    assert missed(layout=bit)
    moved = caching.layout()
    moved.model.layers[0].moe.router.selection_bias[3] += 1e-3
    assert missed(layout=moved)
    gate = Transformer(replace(caching.MODEL, gate="sigmoid"), seed=1)  # the same weights, another use of them
    assert missed(layout=reference_cache.Forward(gate))


def test_a_killed_build_resumes(tmp_path):
    """SIGKILL after 12 of 23 pairs: what is whole is kept and not scored again, and the end is that of one build."""
    process = subprocess.run([sys.executable, HERE, "kill", tmp_path / "a", "12"], check=False, env=ENV, timeout=100)
    assert process.returncode == -signal.SIGKILL
    folder = only(tmp_path / "a")
    assert len(list(folder.glob("shard_*"))) == 3 and not list(folder.glob(".*partial"))
    kept = {p.name: p.stat().st_mtime_ns for p in folder.glob("shard_*")}
    (folder / ".shard_00003.safetensors.99.partial").write_bytes(b"cut off")
    where, whole = caching.layout(), caching.layout()
    found = caching.build(tmp_path / "a", layout=where, spot=0)
    want = caching.build(tmp_path / "b", layout=whole)
    assert {n: shard_path(folder, i).stat().st_mtime_ns for i, n in enumerate(sorted(kept))} == kept
    a, b = caching.values(found), caching.values(want)
    assert a.keys() == b.keys() and len(a) == 46 and all(torch.equal(a[k], b[k]) for k in a)
    rows = [w.collect()[0]["rows/reference_score"] for w in (where, whole)]
    assert 0.3 < rows[0] / rows[1] < 0.7
    again = caching.layout()
    caching.build(tmp_path / "a", shard_pairs=7, layout=again, spot=0)  # the cache's own shards, nothing is scored
    assert "rows/reference_score" not in again.collect()[0]


def test_tampering_is_found(tmp_path):
    """A file that was altered is made again, with a warning; one altered with its sum fails the spot check."""
    found = caching.build(tmp_path)
    folder = only(tmp_path)
    key = reference_cache.cache_key(caching.layout(), found, caching.tokenizer(), "length=40")
    path = shard_path(folder, 2)
    data = bytearray(path.read_bytes())
    data[-30] ^= 1
    path.write_bytes(data)
    with pytest.warns(UserWarning, match="shard_00002.safetensors was altered .*made again now"):
        again = caching.build(tmp_path)
    a, b = caching.values(found), caching.values(again)
    assert all(torch.equal(a[k], b[k]) for k in a)
    for number in range(6):  # whoever does this knows the format
        shard = read_shard(folder, number, key)
        write_shard(folder, number, {k: v + 0.01 for k, v in shard.items()}, key)
    with pytest.raises(CheckpointError, match=r"differs by 0.01, allowed are 0.0001; delete the folder"):
        caching.build(tmp_path)
    for number in range(6):
        values = {k: a[k].clone() for k in read_shard(folder, number, key)}
        if number == 1:
            next(iter(values.values()))[0] -= 0.5
        write_shard(folder, number, values, key)
    with pytest.raises(CheckpointError, match=r"the answers to made, [4-7] differs by 0.5"):
        caching.build(tmp_path, spot=23)  # one entry of 46
    assert caching.build(tmp_path, spot=23, tolerance=1.0).reference is not None


def test_bc_102_no_random_state_is_touched(tmp_path):
    """BC-102: the states before and after are the same, and so are the first three batches of training."""
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    orders = []
    for score in (False, True):
        data = caching.pairs()
        before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
        if score:
            data = caching.build(tmp_path)
            data = caching.build(tmp_path)  # with a spot check
        assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
        assert before[2] == str(np.random.get_state())
        stream = RowStream(data, 4, seed=0)
        orders.append([stream.next()[0] for _ in range(3)])
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(*orders))


def test_a_reference_that_is_not_finite(tmp_path):
    where = caching.layout()
    with torch.no_grad():
        next(where.model.parameters())[7] = torch.nan
    with pytest.raises(NumericsError, match="not finite"):
        caching.build(tmp_path, layout=where)
    assert not list(only(tmp_path).glob("shard_*"))


def test_the_learner_scores_before_its_first_step(tmp_path):
    """The policy is its own reference until it moves: no second model; after a step the cache is not its any more."""
    config = LearnerConfig(lr=1e-2, router=RouterLossConfig(balance=0.01))
    learner = Learner(Transformer(caching.MODEL, seed=1), DPO(reference="cached"), config)
    found = caching.build(tmp_path, layout=learner)
    a, b = caching.values(found), caching.values(caching.build(tmp_path / "other"))
    assert all(torch.equal(a[k], b[k]) for k in b)  # the same key, and the same values
    assert only(tmp_path / "other").name in {p.name for p in tmp_path.iterdir()}
    metrics = learner.step([found.batch(range(5))])
    assert metrics["loss/dpo"] == pytest.approx(np.log(2), abs=1e-5) and metrics["dpo/accuracy"] < 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cached(learner, found, caching.tokenizer(), tmp_path / "moved", truncation="length=40")
    assert only(tmp_path / "moved").name != only(tmp_path / "other").name


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    assert run_ranks(HERE, [(r, 2, folder) for r in range(2)], timeout=200) == [0, 0]
    return [pickle.loads((folder / f"rank_{r}.pkl").read_bytes()) for r in range(2)]


@pytest.mark.parametrize("name", ["dp2", "ep2", "pp2"])
def test_two_ranks_build_one_cache(two_ranks, name, tmp_path):
    """The key is the one process's, values are equal to 1e-5 on both ranks, and a second run scores nothing."""
    want = caching.values(caching.build(tmp_path))
    for got in (rank[name] for rank in two_ranks):
        assert got["folders"] == [only(tmp_path).name] and got["values"].keys() == want.keys()
        assert max(float((got["values"][k] - want[k]).abs().max()) for k in want) <= 1e-5
        assert all(torch.equal(got["again"][k], got["values"][k]) for k in want)
        assert not got["rebuilt"] and got["spots"]["rows/reference_score"] > 0
        assert got["digest"] == reference_cache.weights_digest(caching.layout())


def test_replicas_that_differ_are_found(two_ranks):
    for rank in two_ranks:
        assert rank["differ"].startswith("CheckpointError: rank 1 holds another embed.weight 0 than the ranks before")
