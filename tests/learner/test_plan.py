"""Predicted bytes against the storages of real buckets and optimizers, every rank of several layouts; the table."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from forked import run_ranks
from torch import Tensor

from moekit.cli import main
from moekit.config import LearnerConfig, ModelConfig
from moekit.data.batch import Batch
from moekit.errors import ConfigError
from moekit.learner import gradients
from moekit.learner.gradients import Gradients
from moekit.learner.layouts import CONVENTION, held, in_flight, layout_table, plan_rank, render
from moekit.learner.mesh import Mesh, World
from moekit.learner.optimizer import FlatAdamW
from moekit.learner.precision import ExpertCaches
from moekit.learner.stages import part_of, plan_stages
from moekit.measure import plan
from moekit.measure.plan import Microbatch, activation_bytes, cache_bytes, storage_bytes
from moekit.model.presets import preset
from moekit.model.transformer import Transformer

torch.set_num_threads(1)
HERE = Path(__file__).parent / "planning.py"
SHAPE = ModelConfig(
    vocab=37, width=16, layers=5, heads=4, kv_heads=2, experts=6, top_k=2, expert_width=12, dense_layers=(1,),
    dense_width=20, shared_width=8, qk_norm="head", tied_head=True,
)  # fmt: skip


@dataclass(frozen=True)
class Alone(World):
    """One rank of a group whose other ranks are not there: sums are its own values."""

    def sum(self, x: Tensor, kind: str = "counts") -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor, kind: str = "gradients") -> Tensor:
        return x if self.size == 1 else x.view(self.size, -1)[self.rank].clone()

    def all_gather(self, out: Tensor, part: Tensor, kind: str = "parameters") -> Tensor:
        return out


def mesh_of(c: LearnerConfig, rank: int, world: int) -> Mesh:
    dp = world // c.pp
    pp_rank, at = divmod(rank, dp)
    tie = SHAPE.tied_head and c.pp > 1 and c.pipeline != "zbv" and pp_rank in (0, c.pp - 1)
    return Mesh(
        Alone(rank, world), Alone(pp_rank, c.pp), Alone(at, dp), Alone(at // c.ep, dp // c.ep), Alone(at % c.ep, c.ep),
        Alone(int(pp_rank > 0), 2) if tie else Alone(),
    )  # fmt: skip


def stored(c: LearnerConfig, rank: int, world: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of the real storages after one optimizer step, each storage once: what is a master and a parameter is a
    parameter."""
    mesh = mesh_of(c, rank, world)
    part = part_of(c, SHAPE, mesh.pp.rank, mesh.ep.rank)
    made = Gradients(Transformer(SHAPE, dtype=dtype, part=part), c, mesh)
    adamw = FlatAdamW(made, c)
    made.start()
    made.finish_microbatch()
    made.finish()
    assert adamw.step(0, 1.0) is False
    seen: set[int] = set()

    def size(tensors) -> int:
        new = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
        total = sum(n for at, n in new.items() if at not in seen)
        seen.update(new)
        return total

    model = {name: p for b in made.buckets for name, p in b.params.items()}
    assert set(model) == {h.name for h in held(SHAPE, c, mesh.pp.rank, mesh.ep.rank)}
    return {
        "parameters": size(model.values()),
        "gradients": size([t for b in made.buckets for t in (b.grad, b.owned_grad)]),
        "masters": size([master.data for _, master in adamw.masters]),
        "moments": size([s[k] for s in adamw.adamw.state.values() for k in ("exp_avg", "exp_avg_sq")]),
    }


LAYOUTS = {
    "one process": (LearnerConfig(), 1),
    "dp 3, zero 0": (LearnerConfig(zero=0), 3),
    "dp 3, zero 1": (LearnerConfig(zero=1), 3),
    "dp 3, zero 2": (LearnerConfig(), 3),
    "dp 4, ep 2, every microbatch": (LearnerConfig(ep=2, reduce="microbatch"), 4),
    "one process, every microbatch": (LearnerConfig(reduce="microbatch"), 1),
    "dp 6, ep 3, zero 1": (LearnerConfig(ep=3, zero=1), 6),
    "dp 2, ep 2, pp 3": (LearnerConfig(ep=2, pp=3), 6),
    "pp 2, tied, zero 0": (LearnerConfig(pp=2, zero=0), 4),
    "interleaved": (LearnerConfig(pp=2, pipeline="interleaved", stages_per_rank=2, ep=2), 4),
    "zbv": (LearnerConfig(pp=2, pipeline="zbv", stages_per_rank=2, zero=1), 4),
}


@pytest.mark.parametrize("cut", (False, True), ids=("one bucket a family", "many buckets"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_storage_is_what_was_predicted(name, dtype, cut, monkeypatch):
    """Equal to the byte on every rank: parameters, gradients, masters, moments."""
    if cut:
        for module in (gradients, plan):
            monkeypatch.setattr(module, "LARGEST", {"step": 900, "microbatch": 500})
    c, world = LAYOUTS[name]
    dp = world // c.pp
    for rank in range(world):
        want = storage_bytes(held(SHAPE, c, rank // dp, rank % dp % c.ep), c, dtype, dp)
        got = stored(c, rank, world, dtype)
        assert got == {k: want[k] for k in got}, rank
        assert sum(got.values()) == want["total"]


MXFP8 = replace(SHAPE, width=32, expert_width=64)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_mxfp8_copies_are_what_was_predicted(name, dtype):
    """Storages of codes and scales on every rank, both ways, and the forward's of a frozen model; to the byte."""
    c, world = replace(LAYOUTS[name][0], precision="mxfp8"), LAYOUTS[name][1]
    dp = world // c.pp
    for rank in range(world):
        mine = held(MXFP8, c, rank // dp, rank % dp % c.ep)
        part = part_of(c, MXFP8, rank // dp, rank % dp % c.ep)
        for backward in (True, False):
            made = ExpertCaches(Transformer(MXFP8, dtype=dtype, part=part), backward=backward)
            sides = [q for x in made.caches.values() for q in (x.operands.forward, x.operands.transposed) if q]
            stores = {
                t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for q in sides for t in (q.code, q.scale)
            }
            assert len(stores) == 2 * len(sides) and sum(stores.values()) == cache_bytes(mine, backward) > 0
        assert storage_bytes(mine, c, dtype, dp)["caches"] == cache_bytes(mine)
        assert storage_bytes(mine, replace(c, precision="model"), dtype, dp)["caches"] == 0


def test_the_table_counts_mxfp8_copies_and_refuses_odd_widths():
    plain, mx = (
        {(x["dp"], x["ep"], x["pp"]): x["memory"] for x in layout_table(MXFP8, 4, config=LearnerConfig(precision=p))}
        for p in ("model", "mxfp8")
    )
    experts = 4 * 6 * 3 * 32 * 64  # layers that route, experts, matrices, D, F
    assert "mxfp8" not in plain[4, 1, 1] and mx[4, 1, 1]["mxfp8"] == experts * 66 // 32
    assert mx[4, 2, 1]["mxfp8"] == experts * 33 // 32
    assert all(m["total"] == sum(v for k, v in m.items() if k != "total") for m in mx.values())
    assert "mxfp8" in render(layout_table(MXFP8, 4, config=LearnerConfig(precision="mxfp8"))).splitlines()[1]
    with pytest.raises(ConfigError, match="width=16 and expert_width=12"):
        layout_table(SHAPE, 2, config=LearnerConfig(precision="mxfp8"))


def test_the_constants_are_those_of_the_buckets():
    assert (plan.ALIGN, plan.LARGEST) == (gradients.ALIGN, gradients.LARGEST)


@pytest.mark.parametrize("largest", (1 << 22, 500))
@pytest.mark.parametrize("world", (1, 4))
def test_peak_of_gradients_reduced_after_every_microbatch(world, largest, monkeypatch):
    """Counted at every reduction of a real second backward: buckets that are open, and the shards of the first. One
    bucket a family: exact. Many: within one bucket, as gradients do not come in the exact order of the names."""
    for module in (gradients, plan):
        monkeypatch.setattr(module, "LARGEST", {"microbatch": largest})
    c = LearnerConfig(reduce="microbatch")
    model = Transformer(SHAPE)
    made = Gradients(model, c, mesh_of(c, 0, world))
    flat = Batch.make(torch.arange(24).view(2, 12)).flat
    peaks = []
    reduce = gradients.Bucket.reduce

    def watched(bucket):
        open_now = sum(b.grad.nbytes for b in made.buckets if b.grad is not None)
        peaks[-1] = max(
            peaks[-1], open_now + sum(b.owned_grad.nbytes for b in made.buckets if b.owned_grad is not None)
        )
        reduce(bucket)

    monkeypatch.setattr(gradients.Bucket, "reduce", watched)
    made.start()
    for _ in range(3):
        peaks.append(0)
        model(flat).logprob_M.sum().backward()
        made.finish_microbatch()
    made.finish()
    predicted = storage_bytes(held(SHAPE, c), c, torch.float32, world)["gradients_peak"]
    most = max(b.param.nbytes for b in made.buckets)
    assert peaks[0] < peaks[1] == peaks[2]
    assert 0 <= peaks[1] - predicted <= (0 if largest > 500 else most)


# ------------------------------------------------------------------ real steps on four processes


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> list[dict]:
    """What `planning.py` counted and predicted on every rank."""
    folder = tmp_path_factory.mktemp("planning")
    assert run_ranks(HERE, [(r, 4, folder) for r in range(4)], timeout=300) == [0] * 4
    return [pickle.loads((folder / f"rank_{r}.pkl").read_bytes()) for r in range(4)]


def test_wire_bytes_are_what_was_predicted(four):
    """Equal to the byte on every rank for balanced routes: gradients, parameters, expert rows, hidden states."""
    for name in four[0]:
        for rank, found in enumerate(four):
            assert found[name]["sent"] == found[name]["wire"], (name, rank)
    for kind in ("gradients", "parameters", "rows", "pipeline"):
        assert any(rank[name]["sent"][kind] for rank in four for name in rank), kind


def test_activations_under_expert_parallelism(four):
    """Rows that came and rows that came home included, by dispatch and recompute; within 15 %, fp32 within 5 %."""
    counted = [(name, rank[name]) for rank in four for name in rank if "saved" in rank[name]]
    assert len(counted) == 4 * (12 + 2)
    for (name, dtype), found in counted:
        close = 0.05 if dtype == torch.float32 else 0.15
        assert found["activations"] == pytest.approx(found["saved"], rel=close), name


# ------------------------------------------------------------------ the table


def test_activations_in_flight():
    """1F1B with 4 ranks: 4, 3, 2, 1 microbatches, never more than there are; interleaved as torch warms up."""
    c = LearnerConfig(pp=4)
    assert [in_flight(c, r, 9) for r in range(4)] == [4, 3, 2, 1]
    assert [in_flight(c, r, 2) for r in range(4)] == [2, 2, 2, 1]
    assert in_flight(LearnerConfig(), 0, 9) == 1
    c = LearnerConfig(pp=2, pipeline="interleaved", stages_per_rank=3)
    assert [in_flight(c, r, 8) for r in range(2)] == [7, 5]
    assert in_flight(LearnerConfig(pp=2, pipeline="zbv", stages_per_rank=2), 1, 8) == 4


def test_what_crosses_between_pipeline_ranks():
    """1f1b sends forward and back over every inner boundary; zbv turns round on the last rank, which sends nothing
    there. 2 microbatches of 8 positions in float32; 1f1b on 3 ranks runs an idle third one, which is sent too."""
    work, one = Microbatch.full(1, 8), 8 * 16 * 4

    def sent(c):
        return [plan_rank(SHAPE, c, c.pp, torch.float32, work, 2, r)["wire"]["pipeline"] / one for r in range(c.pp)]

    assert sent(LearnerConfig(pp=3)) == [3, 6, 3]
    assert sent(LearnerConfig(pp=2)) == [2, 2]
    assert sent(LearnerConfig(pp=2, pipeline="interleaved", stages_per_rank=2)) == [6, 6]
    assert sent(LearnerConfig(pp=2, pipeline="zbv", stages_per_rank=2)) == [4, 4]
    assert sent(LearnerConfig()) == [0]


def test_the_table_of_a_published_model():
    """OLMoE-1B-7B on 64 ranks: parameters of one rank in closed form at both ends of the table."""
    shape = preset("OLMoE-1B-7B")
    table = layout_table(shape, 64)
    assert len(table) == len({(x["dp"], x["ep"], x["pp"]) for x in table}) == 7 + 6 + 5 + 4 + 3
    assert [x["memory"]["total"] for x in table] == sorted(x["memory"]["total"] for x in table)
    by = {(x["dp"], x["ep"], x["pp"]): x for x in table}
    whole = by[64, 1, 1]
    assert whole["memory"]["parameters"] == pytest.approx(2 * 6919161856, rel=1e-4)
    assert whole["memory"]["optimizer"] == pytest.approx(12 * 6919161856 / 64, rel=1e-3)
    assert whole["wire"]["rows"] == 0 and whole["layers"] == [16]
    experts = 16 * 64 * 3 * 1024 * 2048
    assert by[64, 64, 1]["memory"]["parameters"] == pytest.approx(2 * (6919161856 - experts + experts / 64), rel=1e-4)
    assert by[64, 64, 1]["wire"]["rows"] == 4 * 16 * 63 / 64 * 8 * 4096 * 2048 * 2
    for row in table:
        assert sum(row["layers"]) == 16 and row["microbatches"] == row["pp"] and row["experts"] == 64 // row["ep"]
        for part in ("memory", "wire"):
            assert row[part]["total"] == sum(v for k, v in row[part].items() if k != "total")


@pytest.mark.parametrize("recompute", ("none", "moe", "block"))
def test_memory_of_a_pipeline_rank_adds_up(recompute):
    """Two microbatches in flight on the first of two ranks, one on the last, and one recomputation each."""
    c, work = LearnerConfig(pp=2, recompute=recompute), Microbatch.full(1, 32)
    for rank, flying in ((0, 2), (1, 1)):
        kept = activation_bytes(SHAPE, work, torch.bfloat16, c, plan_stages(SHAPE, 2)[rank], "cuda")
        stored = storage_bytes(held(SHAPE, c, rank), c, torch.bfloat16, 2)
        got = plan_rank(SHAPE, c, 4, torch.bfloat16, work, 5, rank)["memory"]
        assert (kept["again"] > 0) == (recompute != "none")
        assert got == {
            "parameters": stored["parameters"], "gradients": stored["gradients"],
            "optimizer": stored["masters"] + stored["moments"], "activations": flying * kept["total"] + kept["again"],
            "total": stored["total"] + flying * kept["total"] + kept["again"],
        }  # fmt: skip


def test_recompute_and_zero_change_what_they_should():
    shape, many = preset("tiny"), {"length": 64, "batch_rows": 8, "dtype": torch.float32}
    by = {
        (zero, r): layout_table(shape, 2, config=LearnerConfig(zero=zero, recompute=r), **many)[-1]
        for zero, r in ((0, "none"), (2, "none"), (2, "moe"), (2, "block"))
    }
    none, moe, block = (by[2, r]["memory"]["activations"] for r in ("none", "moe", "block"))
    assert none > moe > block
    assert by[0, "none"]["memory"]["optimizer"] == 2 * by[2, "none"]["memory"]["optimizer"]


def test_moekit_layouts(capsys, tmp_path):
    words = ["layouts", "--world", "4", "--model", "tiny", "--dtype", "float32"]
    assert main([*words, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table == json.loads(json.dumps(layout_table(preset("tiny"), 4, dtype=torch.float32)))
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.strip() == render(table) and "MiB" in text and "balanced routing" in text
    assert main([*words, "--json", "--precision", "mxfp8"]) == 0
    assert all(x["memory"]["mxfp8"] > 0 for x in json.loads(capsys.readouterr().out))
    rows = [line.split() for line in text.splitlines()[2 : 2 + len(table)]]
    assert [row[:3] for row in rows] == [[str(x[k]) for k in ("dp", "ep", "pp")] for x in table]
    assert float(rows[0][11]) == round(table[0]["memory"]["total"] / 2**20, 2)
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "vocab_size": 128, "hidden_size": 32,
             "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 8,
             "num_experts_per_tok": 2, "intermediate_size": 16, "max_position_embeddings": 64}
        )
    )  # fmt: skip
    assert main(["layouts", "--world", "2", "--model", str(tmp_path), "--zero", "1", "--recompute", "moe"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 3 + 1 + len(CONVENTION.splitlines())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--world", "0", "--model", "tiny"], "world=0"),
        (["--world", "-3", "--model", "tiny"], "world=-3"),
        (["--world", "4", "--model", "gone/model"], "neither a folder nor a preset"),
        (["--world", "4", "--model", "tiny", "--length", "5000"], "length=5000"),
        (["--world", "4", "--model", "tiny", "--microbatch-rows", "0"], "microbatch_rows=0"),
        (["--world", "4", "--model", "tiny", "--batch-rows", "0"], "batch_rows=0"),
    ],
)
def test_impossible_layouts_are_one_line_and_status_2(words, says, capsys):
    assert main(["layouts", *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("moekit: error: ") and says in lines[0]


def test_a_folder_without_a_model_is_one_line_too(tmp_path, capsys):
    assert main(["layouts", "--world", "4", "--model", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="batch_rows=-1"):
        layout_table(preset("tiny"), 4, batch_rows=-1)
