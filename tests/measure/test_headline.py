"""The headline against recounts by hand: rows, bytes, seconds and memory of a supervised token, from run folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import moekit
from moekit.config import DataConfig, LearnerConfig, SFTConfig
from moekit.data.families import family_size
from moekit.data.preference import load_pairs
from moekit.data.stream import RowStream
from moekit.errors import DataError
from moekit.learner.learner import Learner
from moekit.measure.headline import in_units
from moekit.measure.memory import held_bytes
from moekit.measure.record import RunWriter, open_run
from moekit.model.transformer import Transformer
from moekit.objectives.sft import SFT
from moekit.recipes import dpo, grpo, ppo, sft
from moekit.recipes.small import Start, small_start
from moekit.viz import static
from moekit.viz.headline import headline_figure
from moekit.viz.report import write_report
from moekit.workloads import DPOConfig, GRPOConfig, PPOConfig

LAYERS, TOP_K, STEPS = 2, 2, 2
RL = {"prompts": 3, "group": 4, "max_prompt": 40, "max_new_tokens": 8, "length": 128, "microbatch_tokens": 256,
      "eval_items": 3, "items": 30, "kl": 0.05}  # fmt: skip


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    torch.set_num_threads(1)
    return small_start(tmp_path_factory.mktemp("start"), steps=2, size=60, held_out=6)


@pytest.fixture(scope="module")
def runs(start: Start, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("six")
    every: dict[str, Any] = {"model": start.model, "steps": STEPS, "export": False}
    rows, whole = DataConfig(length=96), LearnerConfig(lr=1e-3, elide="none")
    pairs = {"data": start.pairs, "reference": "resident", "length": 96, "microbatch_tokens": 384, "batch_pairs": 6,
             "eval_data": start.held_out_pairs}  # fmt: skip
    rl = {"data": start.chats, "eval_data": start.held_out, **RL}
    one = LearnerConfig(lr=1e-3)
    plan: dict[str, tuple[Any, Any]] = {
        "padded": (sft, SFTConfig(data=start.chats, rows=replace(rows, rows="padded"), batch_rows=20,
                                  microbatch_rows=10, learner=whole, **every)),
        "packed": (sft, SFTConfig(data=start.chats, rows=rows, batch_rows=5, learner=whole, **every)),
        "unshared": (dpo, DPOConfig(share_prompt=False, learner=one, **pairs, **every)),
        "shared": (dpo, DPOConfig(learner=one, **pairs, **every)),
        "grpo": (grpo, GRPOConfig(learner=replace(one, recompute="moe"), importance_cap=2.0, **rl, **every)),
        "ppo": (ppo, PPOConfig(learner=one, **rl, **every)),
    }  # fmt: skip
    for name, (recipe, config) in plan.items():
        recipe.train(replace(config, out=str(folder / name)))
    return {name: folder / name for name in plan}


def total(run: Path, name: str) -> float:
    return float(open_run(run).metrics[name].sum())


def test_by_hand_on_a_record_that_was_written_by_hand(tmp_path: Path) -> None:
    """Two steps of five supervised tokens; 40 rows forward, 60 of the reference; bytes, seconds, memory as written."""
    count = torch.zeros(1, 4, 2, dtype=torch.int64)
    count[0, 0, 0], count[0, 1, 1] = 12, 8
    with RunWriter(tmp_path) as writer:
        for step in range(2):
            metrics = {"tokens/supervised": 5, "wire/rows_bytes": 30, "wire/gradients_bytes": 10, "time/step_s": 0.5,
                       "wire/reference_score_bytes": 5, "time/reference_s": 0.25, "time/evaluate_s": 9.0,
                       "critic_wire/rows_bytes": 15, "memory/policy_parameters_bytes": 100 + step,
                       "wire/transfer_bytes": 20, "time/rollout_s": 1.0, "time/prefill_s": 0.25}  # fmt: skip
            arrays = {"policy/layers": torch.tensor([0]), "reference/layers": torch.tensor([0]),
                      "policy/forward/dispatched": count, "reference/score/dispatched": 3 * count // 2,
                      "policy/evaluate/dispatched": 99 * count}  # fmt: skip
            writer.write(step, metrics, arrays)
    table = moekit.headline({"one": tmp_path})
    of = lambda component, part: table.loc[("one", component, part)]
    assert table.attrs["supervised"] == {"one": 10} and ("one", "policy", "evaluate") not in table.index
    assert of("policy", "forward").rows == 4 and of("reference", "score").rows == 6
    assert of("policy", "train").wire_bytes == 8 and of("reference", "score").wire_bytes == 1
    assert of("critic", "train").wire_bytes == 3 and of("transfer", "weights").wire_bytes == 4
    assert of("policy", "train").seconds == pytest.approx(0.1) and of("reference", "score").seconds == 0.05
    assert of("engine", "prefill").seconds == 0.05 and of("engine", "decode").seconds == pytest.approx(0.15)
    assert of("policy", "parameters").memory_bytes == 101 / 5
    read = in_units(table)
    assert list(read.columns) == ["routed rows", "wire, kB", "time, ms", "memory, kB"]
    assert read.loc["one", "time, ms"] == pytest.approx(350) and read.loc["one", "routed rows"] == 10


def test_without_supervised_tokens_it_says_so(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.write(0, {"loss/sft": 1.0})
    with pytest.raises(DataError, match="no supervised token"):
        moekit.headline(tmp_path)
    with pytest.raises(DataError, match="at least one run"):
        moekit.headline({})


def test_rows_of_sft_are_those_of_its_batches(runs: dict[str, Path]) -> None:
    """Without elision every position of every row is routed: 20 x 96 padded, 5 x 96 packed, in each of two layers."""
    table = moekit.headline({n: runs[n] for n in ("padded", "packed")})
    for name, rows in (("padded", 20), ("packed", 5)):
        supervised = total(runs[name], "tokens/supervised")
        want = STEPS * rows * 96 * LAYERS * TOP_K / supervised
        for part in ("forward", "backward"):
            assert table.loc[(name, "policy", part), "rows"] == pytest.approx(want, rel=1e-12)


def test_a_shared_prompt_saves_the_predicted_rows_of_policy_and_reference(runs: dict[str, Path], start: Start) -> None:
    """Of a pair with a prompt of P tokens P - 1 positions, in each layer, in each pass."""
    table = moekit.headline({n: runs[n] for n in ("unshared", "shared")})
    pairs = load_pairs(start.pairs, start.tokenizer, 96)

    stream, saved, labels = RowStream(pairs, 6, 0), 0, 0
    for _ in range(STEPS):
        for i in stream.take():
            pair = pairs.pairs[int(i)]
            prompt, chosen, rejected = len(pair.prompt), len(pair.chosen), len(pair.rejected)
            both = prompt, (chosen, rejected)
            assert family_size(*both, False) - family_size(*both, True) == prompt - 1
            saved, labels = saved + prompt - 1, labels + chosen + rejected
    assert saved > 0 and labels == table.attrs["supervised"]["shared"] == table.attrs["supervised"]["unshared"]
    for component, part in (("policy", "forward"), ("policy", "backward"), ("reference", "score")):
        less = [table.loc[(name, component, part), "rows"] for name in ("unshared", "shared")]
        assert less[0] - less[1] == pytest.approx(saved * LAYERS * TOP_K / labels, rel=1e-9), (component, part)


def test_every_component_of_grpo_and_ppo_is_there_and_parts_sum_to_the_whole(runs: dict[str, Path]) -> None:
    table = moekit.headline({n: runs[n] for n in ("grpo", "ppo")})
    of = lambda run: {c for c in table.loc[run].index.get_level_values("component")}
    assert of("grpo") == {"policy", "reference", "reward", "engine", "transfer"} and of("ppo") == of("grpo") | {
        "critic"
    }
    rows = table["rows"]
    assert (
        rows["grpo", "policy", "recompute"] == rows["grpo", "policy", "forward"] == rows["grpo", "policy", "backward"]
    )
    assert rows["ppo", "critic", "forward"] == rows["ppo", "policy", "forward"] == rows["ppo", "reference", "score"]
    for name in ("grpo", "ppo"):
        supervised, run = total(runs[name], "tokens/supervised"), open_run(runs[name])
        everything = run.rows(by=("component", "pass"))
        everything = everything[everything["pass"] != "evaluate"].rows.sum()
        assert table.loc[name].rows.sum() * supervised == pytest.approx(everything)
        told = {n for n in run.metrics if n.startswith("time/") and n not in ("time/step_s", "time/evaluate_s")}
        told -= {"time/learner_idle_s", "time/engine_idle_s"}  # beside the others, not among them
        seconds = sum(total(runs[name], n) for n in told - {"time/prefill_s"})
        assert table.loc[name].seconds.sum() * supervised == pytest.approx(seconds)
        assert table.loc[name].wire_bytes.sum() == 0  # one process sends nothing
    # an engine reads a prompt of P tokens once (its last layer at the last position only) and decodes all but the last
    text = (runs["grpo"] / "samples.jsonl").read_text().splitlines()
    assert text and all(json.loads(line)["tokens"] for line in text)
    decoded = total(runs["grpo"], "positions/engine_decode")
    assert decoded == total(runs["grpo"], "rollout/tokens") - total(runs["grpo"], "rollout/answers")
    per = total(runs["grpo"], "tokens/supervised")
    assert rows["grpo", "engine", "decode"] == pytest.approx(decoded * LAYERS * TOP_K / per)


def test_memory_is_that_of_the_storages(runs: dict[str, Path], start: Start) -> None:
    """Elements of float32: parameters, as many gradients, twice as many moments; the critic has another head."""
    metrics, memory = open_run(runs["ppo"]).metrics, {}
    for name in metrics:
        if name.startswith("memory/"):
            memory[name.split("/")[1].removesuffix("_bytes")] = metrics[name].max()
    n = sum(p.numel() for p in Transformer(start.shape).parameters())
    head = start.shape.vocab * start.shape.width
    pads = 64 * 60  # elements between the spans of a bucket
    assert 4 * n <= memory["policy_parameters"] <= 4 * (n + pads) and memory["reference_parameters"] == 4 * n
    assert memory["policy_gradients"] == memory["policy_parameters"]
    assert memory["policy_optimizer"] == 2 * memory["policy_parameters"]
    assert memory["policy_parameters"] - memory["critic_parameters"] == pytest.approx(4 * head, rel=0.1)
    assert memory["engine_parameters"] == 0  # the learner's own
    shape = start.shape
    room = memory["engine_cache"] / (
        2 * 4 * LAYERS * 12 * shape.kv_heads * shape.head_dim
    )  # 3 prompts, 4 answers: 12 slots
    assert room == int(room) and RL["max_new_tokens"] < room <= RL["max_prompt"] + RL["max_new_tokens"]
    assert memory["policy_saved"] > 0 and memory["critic_saved"] > 0


def test_what_backwards_keep_is_that_of_one_microbatch(start: Start) -> None:
    """Two equal microbatches one after the other keep no more than one of them."""
    from moekit.data.dataset import build

    data = build(start.chats, start.tokenizer, DataConfig(length=96))
    found = []
    for times in (1, 3):
        learner = Learner(Transformer(start.shape, seed=0), SFT(), LearnerConfig(lr=0.0))
        learner.watch = True
        learner.step([data.batch([0])] * times)
        assert not learner.watch
        found.append(learner.memory()["memory/policy_saved_bytes"])
    assert 0 < found[0] <= found[1] < 1.01 * found[0]
    w = torch.zeros(4)
    assert held_bytes({"a": [w, w[1:], None], "b": [w.view(2, 2)]}) == {"a": 16, "b": 0}


def test_figure_and_report_show_it(runs: dict[str, Path]) -> None:
    fig = headline_figure(runs)
    titles = {"<b>routed rows</b>", "<b>time, ms</b>", "<b>memory, kB</b>"}
    said = {n.text for n in fig.layout.annotations}
    assert titles <= said and "<b>wire, kB</b>" not in said  # nothing was sent, so there is no panel
    table = moekit.headline(runs)
    assert f"{table.loc['ppo'].rows.sum():.3g}" in said
    drawn = sum(sum(t.x) for t in fig.data if "routed rows" in t.name)
    assert drawn == pytest.approx(table.rows.sum())
    assert static.render(fig, scale=1)[:4] == b"\x89PNG"
    assert "What a supervised token costs" in write_report(runs["grpo"]).read_text()
