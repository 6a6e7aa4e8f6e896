"""Plans against what real runs held, routed and sent: every workload, storages and counters where the bytes are."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import Any

import cloudpickle
import pytest
import torch
import transformers

import moekit
from moekit.config import DataConfig, LearnerConfig, SFTConfig
from moekit.data.batch import Batch
from moekit.data.chat import load_tokenizer, render_all
from moekit.data.preference import load_pairs
from moekit.data.source import load_examples
from moekit.errors import ConfigError
from moekit.learner.learner import Learner
from moekit.learner.stages import plan_stages
from moekit.measure.cost import Work, step_flops
from moekit.measure.record import open_run
from moekit.model.presets import parameter_counts, preset
from moekit.model.transformer import Transformer
from moekit.objectives.sft import SFT
from moekit.recipes import dpo, grpo, plan_bytes, ppo, sft
from moekit.recipes.plan import PARTS, plan
from moekit.recipes.plan_step import Step
from moekit.recipes.unit_costs import UnitCosts, measure_unit_costs
from moekit.rollout.vllm_engine import VLLMEngine
from moekit.rollout.vllm_http import HTTPLink
from moekit.workloads import DPOConfig, GRPOConfig, PPOConfig, RewardConfig

torch.set_num_threads(1)
SHAPE = replace(preset("tiny"), selection_bias=True, max_positions=256)
HELD = {"parameters": ("parameters",), "gradients": ("gradients",), "optimizer": ("masters", "moments"),
        "caches": ("mxfp8",)}  # fmt: skip
TWO = ("sft, pp 2, mxfp8", "dpo, ep 2, shared memory, bfloat16", "ppo, zero 1, recompute block",
       "grpo, ep 2, recompute moe, in place")  # fmt: skip


@pytest.fixture(scope="module")
def data(kit, tmp_path_factory):
    """Chats of one turn and pairs, of uneven lengths, and a model's config for them."""
    folder = tmp_path_factory.mktemp("plan")
    words = [w for line in kit.data.read_text().split() for w in [line.strip('"{}[],:')] if w.isalpha()]
    say = lambda i, n: " ".join(words[(i + k) % len(words)] for k in range(n))
    chats = [{"messages": [{"role": "user", "content": say(i, 2 + i % 5)},
                           {"role": "assistant", "content": say(2 * i, 1 + i % 7)}]} for i in range(40)]  # fmt: skip
    some = [
        {"prompt": say(i, 1 + i % 4), "chosen": say(i, 1 + i % 5), "rejected": say(3 * i, 2 + i % 3)} for i in range(20)
    ]
    for name, lines in (("chats", chats), ("pairs", some)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    model = folder / "model"
    tokenizer = load_tokenizer(kit.tokenizer)
    shape = replace(SHAPE, vocab=len(tokenizer), selection_bias=False, family="mixtral", eos_id=tokenizer.eos_token_id)
    moekit.export(Transformer(shape, seed=1), model, kit.tokenizer)
    return folder, model, shape, tokenizer


def watched(train: Any, config: Any) -> dict[str, Any]:
    """A run of a recipe on this rank, and what was seen of it: lengths of its first step, and the engine's storages."""
    import torch

    from moekit.measure.memory import held_bytes
    from moekit.recipes import placement, sampler

    torch.set_num_threads(1)
    made, rollout, chunks = sampler.Sampler.__init__, sampler.Sampler.rollout, placement.Weights.chunks
    seen: dict[str, Any] = {"lengths": [], "casts": {}}

    def start(self, *args):
        made(self, *args)
        self.how = replace(self.how, stop_ids=tuple(range(60)))  # so that answers have many lengths

    def sample(self, *args):
        chosen, e = rollout(self, *args)
        seen["lengths"].append([(len(r.prompt), [len(a.ids) for a in r.answers]) for r in e.rollouts])
        seen["engine"] = self.engine
        return chosen, e

    def cut(self):
        own = {t.untyped_storage().data_ptr() for _, t in self._held().values()}
        seen["casts"] = {}  # of the last transfer
        for chunk in chunks(self):
            s = chunk.data.untyped_storage()
            seen["casts"] |= {} if s.data_ptr() in own else {s.data_ptr(): s.nbytes()}
            yield chunk

    sampler.Sampler.__init__, sampler.Sampler.rollout, placement.Weights.chunks = start, sample, cut
    try:
        told = train(config)
    finally:
        sampler.Sampler.__init__, sampler.Sampler.rollout, placement.Weights.chunks = made, rollout, chunks
    engine = seen.pop("engine", None)
    if engine is not None:
        tensors = [] if engine.shared else [*engine.model.parameters(), *engine.model.buffers()]
        spare = [] if engine.shared else list(engine._spare.values())
        found = held_bytes({"serving": tensors, "staging": spare})
        seen |= found | {"casts": sum(seen["casts"].values()), "lengths": seen["lengths"][0]}
    return seen | {"run": told["run"]}


def configs(data: Any, kit: Any) -> dict[str, tuple[Any, Any, int]]:
    """Name -> recipe, config, ranks."""
    folder, model, *_ = data
    own = {"model": str(model), "steps": 2, "export": False}
    layout = lambda **how: LearnerConfig(lr=1e-4, **how)
    rl = own | {"data": str(folder / "chats.jsonl"), "prompts": 5, "group": 4, "max_prompt": 40, "max_new_tokens": 12,
                "length": 64, "microbatch_tokens": 128}  # fmt: skip
    chats, pairs = {"data": str(folder / "chats.jsonl")} | own, {"data": str(folder / "pairs.jsonl")} | own
    rows = {"rows": DataConfig(length=48), "batch_rows": 6}
    return {
        "sft, one rank": (sft, SFTConfig(**chats, **rows, microbatch_rows=4, learner=layout()), 1),
        "grpo, one rank, engine in bfloat16": (
            grpo, GRPOConfig(**rl, kl=0.05, minibatches=2, rollout_dtype="bfloat16", learner=layout()), 1),
        "sft, pp 2, mxfp8": (
            sft, SFTConfig(**chats, **rows, microbatch_rows=1, learner=layout(pp=2, precision="mxfp8")), 2),
        "dpo, ep 2, shared memory, bfloat16": (
            dpo, DPOConfig(**pairs, length=64, batch_pairs=7, microbatch_tokens=128, reference="resident",
                           dtype="bfloat16", learner=layout(ep=2, dispatch="rowwise", capacity=2.0)), 2),
        "ppo, zero 1, recompute block": (
            ppo, PPOConfig(**rl, learner=layout(zero=1, recompute="block"), critic_learner=layout(ep=2, zero=0)), 2),
        "grpo, ep 2, recompute moe, in place": (
            grpo, GRPOConfig(**rl, importance_cap=2.0, update_mode="in_place", dtype="bfloat16",
                             learner=layout(ep=2, recompute="moe")), 2),
    }  # fmt: skip


def check(name: str, data: Any, config: Any, world: int, seen: list[dict[str, Any]]) -> None:
    """What was predicted for the lengths of the first step against what was held, routed and sent in it."""
    _, _, shape, tokenizer = data
    lengths = seen[0]["lengths"]
    if isinstance(config, SFTConfig):
        documents = list(render_all(load_examples(config.data), tokenizer))
        lengths = [(int((~d.supervised).sum()), [int(d.supervised.sum())]) for d in documents]
    elif isinstance(config, DPOConfig):
        found = load_pairs(config.data, tokenizer, config.length).pairs
        lengths = [(len(p.prompt), [len(p.chosen), len(p.rejected)]) for p in found]
    run = open_run(seen[0]["run"])
    first = {k: float(v.iloc[0]) for k, v in run.metrics.items() if v.dtype.kind in "if"}
    c = config.learner
    found = plan(shape, config, world, lengths=lengths, ep=[c.ep], pp=[c.pp], zero=[c.zero], recompute=[c.recompute],
                 device="cpu")  # fmt: skip
    (option,) = found.options
    step, own = Step.of(config, lengths), getattr(config, "critic_learner", None) or c
    critic = plan_bytes.critic_shape(config, shape) if step.scores["critic"] else None
    ranks = [plan_bytes.rank_bytes(shape, critic, step, option.learner, own, world, r, "cpu") for r in range(world)]
    total = lambda *names: sum(r.get(n, 0) for r in ranks for n in names)
    # storage, to the byte
    for component, mark in (("policy", ""), ("critic", "critic/")):
        for kind, parts in HELD.items():
            if (measured := first.get(f"memory/{component}_{kind}_bytes")) is not None:
                assert total(*(mark + p for p in parts)) == measured, (name, component, kind)
        if (saved := first.get(f"memory/{component}_saved_bytes")) is not None:
            print(f"{name}: activations of {component} {total(mark + 'activations')} predicted, {saved:.0f} saved")
            assert total(mark + "activations") == pytest.approx(saved, rel=0.15), (name, component)
    if "memory/reference_parameters_bytes" in first:
        assert total("reference") == first["memory/reference_parameters_bytes"] + first["memory/reference_caches_bytes"]
    # the engine
    if "lengths" in seen[0] and seen[0]["lengths"]:
        engines = [plan_bytes.engine_bytes(shape, step, option.learner, world, r, "cpu") for r in range(world)]
        assert sum(e.get("kv_cache", 0) for e in engines) == first["memory/engine_cache_bytes"], name
        for e, s in zip(engines, seen):
            assert e["serving"] == s["serving"]
            if config.update_mode == "atomic":
                assert (e["staging"], e["transfer"]) == (s["staging"], s["casts"])
        assert option.wire["transfer"] * world == first["wire/transfer_bytes"]
    # routed rows
    for part, n in found.rows.items():
        arrays = [a for a in run.array_names if a == f"{part}/dispatched"]
        counted = int(run.arrays(arrays[0]).values[0].sum()) if arrays else 0
        assert counted == n, (name, part)
    assert found.supervised == first["tokens/supervised"]
    # the wire, without assuming balance where it is none
    for kind in ("gradients", "parameters"):
        dp, dtype = world // c.pp, getattr(torch, config.dtype)
        sends = [plan_bytes.sent_bytes(shape, option.learner, dtype, step.trained(dp)[0], r // dp, True)[kind]
                 for r in range(world)]  # fmt: skip
        sent = sum(sends)
        assert sent * step.updates == pytest.approx(first[f"wire/{kind}_bytes"], rel=1e-6, abs=world * 8), (name, kind)
    assert all(k in PARTS for k in option.memory) and option.total == sum(option.at_peak.values())


@pytest.mark.parametrize("name", ["sft, one rank", "grpo, one rank, engine in bfloat16"])
def test_a_run_of_one_rank_is_what_was_planned(name, data, kit, tmp_path):
    """Storage, keys and values and the staging copy to the byte, rows exactly, activations within 15 %."""
    recipe, config, _ = configs(data, kit)[name]
    check(name, data, config, 1, [watched(recipe.train, replace(config, out=str(tmp_path / "run")))])


@pytest.mark.long
@pytest.mark.parametrize("name", TWO)
def test_a_run_of_two_ranks_is_what_was_planned(name, data, kit, tmp_path):
    """The same, of the sum over both ranks."""
    recipe, config, world = configs(data, kit)[name]

    def work(train=recipe.train, config=config, see=watched):
        return see(train, config)

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    job = moekit.submit(work, nproc=world, name="run", runs=tmp_path, threads=1)
    check(name, data, config, world, job.result(timeout=100))


@pytest.mark.parametrize(
    ("name", "family", "published", "billions"),
    [
        ("OLMoE-1B-7B", "Olmoe", {"hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
                                  "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64,
                                  "num_experts_per_tok": 8, "vocab_size": 50304}, 6.9),
        ("Qwen3-30B-A3B", "Qwen3Moe", {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48,
                                       "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
                                       "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
                                       "decoder_sparse_step": 1, "tie_word_embeddings": False}, 30.5),
        ("Mixtral-8x7B", "Mixtral", {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                                     "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
                                     "num_experts_per_tok": 2, "vocab_size": 32000}, 46.7),
    ],
)  # fmt: skip
def test_presets_have_the_published_number_of_parameters(name, family, published, billions):
    """Transformers' own model of the published config, on the meta device; bytes of the plan's bf16 parameters too."""
    config = getattr(transformers, f"{family}Config")(**published)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    count = sum(p.numel() for p in model.parameters())
    assert parameter_counts(preset(name))["total"] == count and round(count / 1e9, 1) == billions
    found = plan(name, SFTConfig("", "", dtype="bfloat16"), 1, zero=[0], recompute=["none"])
    assert count * 2 <= found.options[0].memory["parameters"] <= count * 2 * 1.0001


def test_a_plan_says_what_fits_and_what_would_help():
    """OLMoE in bf16 with fp32 masters is 2 + 4 + 4 + 8 = 18 bytes a parameter on one rank, 124.5 GB."""
    config = SFTConfig("", "", dtype="bfloat16", batch_rows=16, microbatch_rows=2, rows=DataConfig(length=1024))
    found = plan("OLMoE-1B-7B", config, 1, 80e9)
    assert found.best is None and not found.fitting and "nothing fits in 80 GB" in found.verdict
    held = found.options[0].memory
    assert sum(held[k] for k in plan_bytes.STATE if k in held) == pytest.approx(18 * 6919161856, rel=1e-3)
    helps = dict(found.helps())
    assert helps["world=8"] < 80e9 < helps["microbatch_rows=1"] and "world=8" in found.verdict
    many = found.again(world=8)
    assert many.best is not None and many.best.fits and many.best.total <= 80e9
    assert all(o.fits == (o.total <= 80e9) for o in many.options)
    idle = [round(10 * (o.pp - 1) / (o.microbatches + o.pp - 1)) for o in many.fitting]  # tenths, of 1F1B
    order = [(share, o.wire["total"]) for share, o in zip(idle, many.fitting)]
    assert order == sorted(order) and many.best.recompute == "none" and many.best.pp == 1
    table = many.table()
    assert len(table) == len(many.options) and (table["total, GB"] * 1e9).round().tolist() == [
        o.total for o in many.options
    ]
    assert "give costs=" in repr(many) and many.best.seconds is None


def test_an_engine_that_holds_all_experts_can_share_them():
    """Mixtral's experts are 32 x 8 x 3 x 4096 x 14336 numbers; shared by 8 ranks, a rank holds 7/8 of them less. In
    bfloat16 there is no narrower copy to advise."""
    config = GRPOConfig("", "", dtype="bfloat16", prompts=8, group=2, max_prompt=32, max_new_tokens=32, length=64,
                        microbatch_tokens=64, update_mode="in_place")  # fmt: skip
    found = plan("Mixtral-8x7B", config, 8, 80e9, ep=8, pp=1, zero=2, recompute="none")
    helps, (near,) = dict(found.helps()), found.options
    assert near.total - helps["serve_ep=8"] == pytest.approx(2 * 7 / 8 * 32 * 8 * 3 * 4096 * 14336, rel=1e-3)
    assert "serve_ep=8" in found.verdict and not any(k.startswith("rollout_dtype") for k in helps)


def test_phases_do_not_overlap():
    """What works in one phase is not there in another; a phase is what stays and what works in it."""
    config = PPOConfig("", "", prompts=4, group=2, max_prompt=32, max_new_tokens=32, length=64, microbatch_tokens=64,
                       rollout_dtype="bfloat16")  # fmt: skip
    (o,) = plan("tiny", config, 1, zero=[2], recompute=["none"]).options
    m = o.memory
    stays = sum(n for k, n in m.items() if k.split("/")[-1] in plan_bytes.STATE) + m["reference"] + m["serving"]
    assert o.phases == {
        "train": stays + m["activations"], "critic": stays + m["critic/activations"],
        "rollout": stays + m["kv_cache"] + m["prompts"], "transfer": stays + m["transfer"],
    } and o.total == max(o.phases.values())  # fmt: skip


def test_rows_of_a_step_by_hand():
    """2 prompts of 9 tokens, answers of 4 and 6 tokens to each, shared, top 2, 2 layers: 8 + (1 + 4) + (1 + 6) = 20
    positions a family; prompts are read once, the last layer their last token; an answer's last token is not fed."""
    config = GRPOConfig("", "", prompts=2, group=2, length=64, max_prompt=32, max_new_tokens=32, importance_cap=2.0)
    found = plan("tiny", config, 1, lengths=[(9, [4, 6])] * 2, zero=[2], recompute=["moe"])
    n = 2 * 20 * 2 * 2
    assert found.rows == {
        "policy/forward": n, "policy/recompute": n, "policy/backward": n, "policy/score": n,
        "engine/prefill": 2 * (9 + 1) * 2, "engine/decode": 2 * (3 + 5) * 2 * 2,
    } and found.supervised == 20  # fmt: skip


# width, layers, query and key/value width, experts, top k, expert width, norms of queries and keys, vocabulary
LARGE = {"OLMoE-1B-7B": (2048, 16, 2048, 2048, 64, 8, 1024, 4096, 50304),
         "Qwen3-30B-A3B": (2048, 48, 4096, 512, 128, 8, 768, 256, 151936),
         "Mixtral-8x7B": (4096, 32, 4096, 1024, 8, 2, 14336, 0, 32000)}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize(
    ("world", "ep", "pp", "zero", "recompute"),
    [(8, 8, 1, 2, "none"), (8, 4, 1, 1, "block"), (16, 2, 4, 2, "moe"), (16, 8, 2, 0, "block")],
)
def test_state_rows_and_wire_of_large_models_by_hand(name, world, ep, pp, zero, recompute):
    """From the shapes alone: 2 + 4 + 4 + 8 bytes a parameter, the last two and the reduced gradients divided by those
    who share them; rings; 32 rows of 2048, 2 in a microbatch, of bf16."""
    D, L, q, kv, E, K, F, norms, V = LARGE[name]
    config = SFTConfig("", "", dtype="bfloat16", batch_rows=32, microbatch_rows=2, rows=DataConfig(length=2048))
    (o,) = plan(name, config, world, ep=ep, pp=pp, zero=zero, recompute=recompute).options
    dp, edp, micro, N = world // pp, world // pp // ep, 32 // (world // pp) // 2, 2 * 2048
    held, sent = [], []
    for rank, (start, stop) in enumerate(plan_stages(preset(name), pp)):
        n = stop - start
        dense = (
            n * (D * (q + 2 * kv) + q * D + norms + 2 * D + E * D) + V * D * (start == 0) + (V + 1) * D * (stop == L)
        )
        expert = n * E // ep * 3 * F * D
        shares = [(dense, dp), (expert, edp)]
        own = sum(p / (g if zero else 1) for p, g in shares)
        reduced = sum(p / g for p, g in shares if zero == 2 and g > 1)
        held.append([2 * (dense + expert), 4 * (dense + expert + reduced), 4 * own, 8 * own])
        ring = sum(p * (g - 1) / g for p, g in shares)
        rows = (4 if recompute == "none" else 6) * micro * n * N * K * D * 2 * (ep - 1) / ep
        hidden = ((rank > 0) + (rank < pp - 1)) * max(micro, pp) * N * D * 2
        sent.append([4 * ring * (1 if zero == 2 else 2), 2 * ring * (zero > 0), rows, hidden])
    got = [o.memory[k] for k in ("parameters", "gradients", "masters", "moments")]
    assert any(got == pytest.approx(x, rel=1e-5) for x in held)
    got = [o.wire[k] for k in ("gradients", "parameters", "rows", "pipeline")]
    assert got == pytest.approx(max(sent, key=sum), rel=1e-5)
    assert o.rows["policy/forward"] == 32 * 2048 * K * L


def test_vllm_weights_are_kept_on_rank_0_and_a_stale_engine_works_beside():
    """What `VLLMEngine.model` holds; keys and values of an engine that samples while the learner trains, until it takes
    new weights; sampling on a server counts where it takes longer than the rest."""
    costs = UnitCosts.peak("one", 1e9, 1e9, 1e9, device="cpu")
    how = {"world": 2, "ep": 1, "pp": 1, "zero": 2, "recompute": "none", "device": "cpu", "costs": costs}
    own = {"max_prompt": 32, "max_new_tokens": 32, "length": 64, "importance_cap": 2.0, "prompts": 4, "group": 2}
    server = {"engine": "vllm", "engine_url": "http://127.0.0.1:1", "update_mode": "in_place"}
    config = GRPOConfig("", "", **own, **server)
    now, late = (plan("tiny", replace(config, staleness=n), **how).options[0] for n in (0, 1))
    with VLLMEngine(HTTPLink(config.engine_url), preset("tiny")) as engine:
        kept = sum(t.nbytes for t in (*engine.model.parameters(), *engine.model.buffers()))
    step, at = Step.of(config), (now.learner, 2)
    each = [plan_bytes.engine_bytes(preset("tiny"), step, *at, rank, "cpu") for rank in (0, 1)]
    assert each == [{"staging": kept}, {}] and now.memory["staging"] == late.memory["staging"] == kept
    assert "staging" not in plan("tiny", config, **how | {"device": "cuda"}).options[0].memory
    parts = now.seconds
    assert parts["total"] == pytest.approx(sum(v for k, v in parts.items() if k != "total"))
    assert late.seconds["total"] == pytest.approx(max(parts["rollout"], parts["total"] - parts["rollout"]))
    config = GRPOConfig("", "", **own, engine="process")
    now, late = (plan("tiny", replace(config, staleness=n), **how).options[0] for n in (0, 1))
    cache, kept = now.memory["kv_cache"] + now.memory["prompts"], late.memory["serving"]  # to start the engine again
    assert late.phases == {p: n + kept + cache * (p in ("train", "score")) for p, n in now.phases.items()}
    assert late.total == sum(late.at_peak.values())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"world": 1.5}, "world=1.5"), ({"memory": "80GB"}, "80GB"),
        ({"model": "no such"}, "no such"), ({"world": 0}, "world=0"), ({"memory": 0}, "memory=0"),
        ({"device": "tpu"}, "tpu"), ({"ep": [5]}, "ep="), ({"lengths": (0, 5)}, "0 tokens"),
        ({"lengths": "abc"}, "abc"),
        ({"lengths": [(5, [5, 6])]}, r"\[5, 6\]"), ({"workload": LearnerConfig()}, "workload="),
        ({"workload": RewardConfig("", "", length=64), "lengths": (60, 20)}, "length=64"),
        ({"costs": "none.json"}, "none"),
        ({"workload": SFTConfig("", "", rows=DataConfig(length=5000))}, "5000"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_said(change, says):
    with pytest.raises(ConfigError, match=says):
        plan(**{"model": "tiny", "workload": SFTConfig("", ""), "world": 2, "memory": 1e9} | change)


def test_a_floor_from_peak_figures():
    """At 1 FLOP/s and endless memory and wire the floor is the FLOPs; at 1 byte/s of wire it is what a rank sends. What
    is not a floor adds both up, and does not call itself one."""
    config, how = SFTConfig("", "", batch_rows=2, microbatch_rows=1), {"zero": [2], "recompute": ["none"], "pp": [1]}
    one = plan("tiny", config, 1, costs=UnitCosts.peak("one", 1.0, 1e30), **how)
    work = Work.of(Batch.make(torch.zeros(2, 512)))
    assert one.best.seconds["total"] == pytest.approx(
        step_flops(preset("tiny"), Work(1024, 1024, 1024, work.pairs))["total"], rel=1e-6)  # fmt: skip
    slow = plan("tiny", config, 1, costs=UnitCosts.peak("one", 1e30, 1e-3), **how).best.seconds["total"]
    both = plan("tiny", config, 1, costs=UnitCosts.peak("one", 1.0, 1e-3), **how).best.seconds["total"]
    assert both == pytest.approx(max(slow, one.best.seconds["total"])) and min(slow, both) > 0
    added = plan("tiny", config, 1, costs=replace(UnitCosts.peak("one", 1.0, 1e-3), floor=False), **how)
    assert added.best.seconds["total"] == pytest.approx(slow + one.best.seconds["total"])
    assert "floor" not in added.verdict
    two = plan("tiny", config, 2, costs=UnitCosts.peak("one", 1e30, 1e30, 1.0), ep=[1], **how)
    assert two.best.seconds["total"] == two.best.wire["total"] and "(a floor, from peak figures)" in two.verdict
    assert plan("tiny", config, 2, costs=UnitCosts.peak("one", 1.0, 1.0), **how).best.seconds is None


@pytest.mark.long
def test_predicted_against_measured_seconds(tmp_path, monkeypatch):
    """In CPU seconds of one thread, which other processes hardly change. The ratio is printed; that of a quiet machine
    is near 1 (`unit_costs.predict`). More rows an expert are cheaper."""
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    shape = replace(SHAPE, width=256, heads=4, kv_heads=4, expert_width=256, layers=4, head_dim=64, max_positions=512)
    costs = UnitCosts.load(measure_unit_costs(shape).save(tmp_path / "costs.json"))
    assert costs.experts[-1][1] > costs.experts[0][1] and costs.layer_s > 0 and costs.wire is None
    learner = Learner(Transformer(shape), SFT())
    batches = Batch.make(torch.randint(0, 512, (4, 256))).split(1)
    seconds = min(learner.step(batches)["time/step_s"] for _ in range(4))
    config = SFTConfig("", "", batch_rows=4, microbatch_rows=1, rows=DataConfig(length=256))
    told = plan(shape, config, 1, costs=costs, zero=[2], recompute=["none"]).best.seconds["total"]
    print(f"predicted {told:.3f} s, measured {seconds:.3f} s, ratio {told / seconds:.2f}")
    assert 0.5 < told / seconds < 2
