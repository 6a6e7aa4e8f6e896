"""GRPO's and PPO's updates of hand-made answers: one gradient in every layout, and defined results for odd answers."""

import functools
import importlib.util
import math
import pickle
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forked import run_ranks

from moekit.errors import DataError
from moekit.learner.mesh import World
from moekit.recipes import rl

HERE = Path(__file__).parent / "updating.py"
spec = importlib.util.spec_from_file_location("updating", HERE)
updating = importlib.util.module_from_spec(spec)
sys.modules["updating"] = updating
spec.loader.exec_module(updating)
CASES = updating.CASES
NAMES = [pytest.param(n, marks=pytest.mark.long if c.world > 2 else ()) for n, c in CASES.items()]
LEARNS = [p for p in NAMES if CASES[p.values[0]].kind != "by_answer"]
SKIP = ("time/", "rate/", "flops/", "wire/", "dispatch/", "critic_time/", "critic_rate/", "critic_flops/",
        "critic_wire/", "critic_dispatch/")  # fmt: skip
CUT = ("tokens/padding", "tokens/context", "positions/", "rows/", "load", "critic_tokens", "critic_rows", "critic_load")


@functools.cache
def world(size: int) -> list[dict]:
    """Results of every case of that many ranks: one start of processes a world size."""
    if size == 1:
        return [{n: c.run(World()) for n, c in CASES.items() if c.world == 1}]
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(HERE, [(r, size, folder) for r in range(size)], timeout=280) == [0] * size
        return [pickle.loads(Path(folder, f"rank_{r}.pkl").read_bytes()) for r in range(size)]


@functools.cache
def one(name: str) -> dict:
    """The same on one process in one microbatch."""
    return _plain(CASES[name].kind, tuple(sorted(CASES[name].config.items())))


@functools.cache
def _plain(kind: str, config: tuple) -> dict:
    return updating.Case(1, kind, config=dict(config)).plain.run(World())


def difference(a: dict, b: dict) -> float:
    """max over tensors of |a - b| / |b|; where b is zero, a must be exactly zero."""
    assert a.keys() == b.keys()
    worst = 0.0
    for name, want in b.items():
        if want.norm() == 0:
            assert not a[name].any(), name
        else:
            worst = max(worst, float((a[name] - want).norm() / want.norm()))
    return worst


@pytest.mark.parametrize("name", LEARNS)
def test_one_gradient_in_every_layout(name):
    want = one(name)
    assert want["metrics"]["grad/norm"] > 0
    assert want["metrics"]["step/skipped"] == (1 if "grpo, many" in name else 0)  # a minibatch that is all masked
    for got in (r[name] for r in world(CASES[name].world)):
        assert difference(got["gradient"], want["gradient"]) <= 1e-9
        assert difference(got["parameters"], want["parameters"]) <= 1e-9
        told = {k: v for k, v in want["metrics"].items() if not k.startswith(SKIP)}
        assert {k for k in got["metrics"] if not k.startswith(SKIP)} == told.keys()
        for key, value in told.items():
            assert math.isfinite(got["metrics"][key]), key
            if not key.startswith(CUT) or key == "tokens/supervised":
                assert got["metrics"][key] == pytest.approx(value, rel=1e-8, abs=1e-12), key
        if CASES[name].kind == "grpo":
            torch.testing.assert_close(got["advantage"], want["advantage"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [p for p in NAMES if CASES[p.values[0]].kind == "by_answer"])
def test_values_come_back_in_order(name):
    """On every rank, for answers of shared and of separate prompts, one of them split over two rows."""
    told = updating.experience()
    for got in (r[name] for r in world(CASES[name].world)):
        for share in (True, False):
            assert len(got[share]) == len(told.answers)
            for a, (values, answer) in enumerate(zip(got[share], told.answers)):
                assert values.tolist() == [100 * a + j for j in range(len(answer.ids))], (share, a)


@pytest.mark.parametrize("share", [True, False])
def test_replayed_routes_are_each_tokens_own(share):
    """Against a walk over rows and positions; the ids that stand there say that the place is the right one."""
    told = updating.experience()
    config = updating.GRPOConfig("", "", max_prompt=8, max_new_tokens=9, length=24, microbatch_tokens=48,
                                 share_prompt=share)  # fmt: skip
    layout = updating.Forward(updating.seeded())
    report = rl.Report()
    batches = rl.microbatches(told.samples([{} for _ in told.answers]), config, layout, report)
    assert share == any(e.reason == "split" for e in report.events) and len(batches) > 2
    tokens = [(p := r.prompt) and (p, a) for r in told.rollouts for a in r.answers]
    routes = [(r.prompt_experts, a.experts) for r in told.rollouts for a in r.answers]
    seen = 0
    for batch, layers in zip(batches, rl.replayed(batches, told.rollouts)):
        back = [batch.flat.to_rows(x) for x in layers]
        assert len(back) == 3 and back[0].shape == (batch.rows, batch.length, 2)
        for row in range(batch.rows):
            for t in range(batch.length):
                got = torch.stack([x[row, t] for x in back])
                f, a, p = (int(x[row, t]) for x in (batch.extra["family"], batch.extra["answer"], batch.position))
                if batch.segment[row, t] < 0:
                    assert (got == -1).all()
                    continue
                prompt = told.rollouts[f].prompt
                if p < len(prompt):
                    token, want = prompt[p], told.rollouts[f].prompt_experts[p]
                else:
                    answer = tokens[a][1]
                    token, want = answer.ids[p - len(prompt)], routes[a][1][p - len(prompt)]
                    seen += 1
                assert batch.input_ids[row, t] == token and torch.equal(got, want.long()), (row, t)
    assert seen == sum(len(a.ids) for a in told.answers)


@pytest.mark.parametrize("share", [True, False])
def test_rows_are_the_sampled_ids_and_what_was_known_of_them(share):
    """BC-104: [4, 1, 2] reads "xab" and would be encoded again as [4, 3]; it is trained on as it was sampled, and the
    next turn's prompt begins with it. BC-106: the stop token 2 that was sampled is a label, and none is added to what
    was cut.
    """
    words = {4: "x", 1: "a", 2: "b", 3: "ab", 8: "8", 9: "9", 10: "ten"}
    told = [(-1.0, -2.0, -3.0), (-4.0, -5.0, -6.0), (-7.0, -8.0, -9.0)]
    sampled = [([4, 1, 2], "length"), ([8, 9, 2], "stop"), ([8, 9, 10], "length")]
    answers = [updating.Answer(ids, torch.tensor(x), None, torch.zeros(3), finish)
               for (ids, finish), x in zip(sampled, told)]  # fmt: skip
    asked = {}
    made = updating.sampler(updating.GRPOConfig("", "", max_prompt=8, max_new_tokens=4, length=24, share_prompt=share))
    made.world = made.waits = World()
    made.engine = None
    made.tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join(words[i] for i in ids))
    made.pool = SimpleNamespace(score=lambda items, texts, ids: asked.update(texts=texts, ids=ids) or [
        updating.Reward(1.0, {}) for _ in texts])  # fmt: skip
    prompts = rl.Prompts([[7, 5]], [{}], rl.Report())
    found = made._answer(
        prompts, np.arange(1), lambda: [updating.Rollout([7, 5], None, answers)], updating.Stopwatch()
    )  # fmt: skip
    assert found.texts == asked["texts"] == ["xab", "89b", "89ten"]
    assert asked["ids"] == [[7, 5, *ids] for ids, _ in sampled]
    fields = [{"old_logprob": a.logprobs} for a in found.answers]
    (batch,) = rl.microbatches(found.samples(fields), made.config, updating.Forward(updating.seeded()))
    flat = batch.flat
    for i, (ids, _) in enumerate(sampled):
        here = flat.at_labels("answer") == i
        assert flat.label_M[here].tolist() == ids and flat.at_labels("old_logprob")[here].tolist() == list(told[i])
        assert flat.ids_N[flat.label_index_M[here]].tolist() == [5, *ids[:-1]]  # each predicted from the one before
    assert len(flat.label_M) == 9 and [a.terminated for a in found.answers] == [False, True, False]
    with pytest.raises(DataError, match="2 values of 'old_logprob' for 3 labels"):
        rl.microbatches(found.samples([{"old_logprob": a.logprobs[:2]} for a in answers]), made.config, None)


# ------------------------------------------------------------------ odd answers
def test_grpo_counts_what_teaches_nothing():
    got = one("2, dp2, grpo")
    m = got["metrics"]
    # group 2 is equal; groups 1 and, NaN and abort left out, none else are single; group 5 has nothing valid
    assert (m["group/equal"], m["group/single"], m["group/empty"]) == (1, 1, 1)
    assert m["rollout/masked"] == 5 and m["reward/not_finite"] == 2
    want = [0.866025, -0.866025, -0.866025, 0.866025, 0, 0, 0, 0]
    assert got["advantage"][:8].tolist() == pytest.approx(want, abs=1e-5)
    assert got["advantage"][11:].tolist() == pytest.approx([0, 0, 0, -0.707105, 0.707105, 0, 0] + want[:4], abs=1e-5)
    trained = sum(len(a.ids) for a in updating.experience().answers) - 5 - 2 - 2  # without NaN's and the aborted one's
    assert m["tokens/supervised"] == trained
    masked = one("2, ep2, grpo, many")["metrics"]
    assert masked["group/empty"] == 2 and masked["rollout/masked"] == 5 + 6  # the third group is all cut
    assert masked["tokens/supervised"] == 2 * (trained - 9 - 2 - 27 - 8)  # in two epochs
    assert masked["rollout/weight_capped"] > 0 and 0 < masked["grpo/weight"] < 1.1
    dropped = one("2, pp2, grpo, equal")["metrics"]
    assert dropped["tokens/supervised"] == trained - 7 - 10  # without the single and the equal group
    assert dropped["rows/saved_positions"] > 0 == one("2, dp2, grpo, sequence")["metrics"]["rows/saved_positions"]


ODD = {
    "all cut": ([(3, [(4, "length", 1.0), (2, "length", 0.0)])] * 2, {"mask_truncated": True}),
    "all empty": ([(3, [(0, "stop", 1.0), (0, "stop", 0.0)])] * 2, {}),
    "all NaN": ([(3, [(4, "stop", updating.NAN), (2, "stop", updating.NAN)])] * 2, {}),
    "all aborted": ([(3, [(4, "abort", 1.0), (2, "abort", 0.0)])] * 2, {}),
    "all equal, dropped": ([(3, [(4, "stop", 1.0), (2, "stop", 1.0)])] * 2, {"drop_equal_groups": True}),
    "fewer families than minibatches": ([(3, [(4, "stop", 1.0), (2, "stop", 0.0)])], {"minibatches": 3}),
    "a full row": (
        [(3, [(9, "length", 1.0), (4, "stop", 0.0)])],
        {"max_prompt": 3, "length": 12, "microbatch_tokens": 12},
    ),
    "one token": ([(1, [(1, "stop", 1.0), (1, "length", 0.0)])], {}),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_odd_steps_are_defined(kind, odd):
    """No NaN; where nothing can be learned nothing moves, and the step is counted as skipped."""
    groups, config = ODD[odd]
    if kind == "ppo":
        config = {k: v for k, v in config.items() if k != "drop_equal_groups"}
    how = {"max_prompt": 8, "max_new_tokens": 9, "length": 24, "microbatch_tokens": 48, "prompts": 4, "kl": 0.1,
           "importance_cap": 2.0, "replay": True}  # fmt: skip
    cls, do = (updating.GRPOConfig, updating.do_grpo) if kind == "grpo" else (updating.PPOConfig, updating.do_ppo)
    got = do(cls("", "", learner=updating.LEARNER, **(how | config)), World(), updating.experience(groups))
    assert all(math.isfinite(x) for x in got["metrics"].values())
    assert all(torch.isfinite(x).all() for x in got["parameters"].values())
    nothing = odd.startswith("all") and not (kind == "ppo" and odd == "all equal, dropped")
    assert (got["metrics"]["step/skipped"] > 0) == (nothing or odd.startswith("fewer"))
    if nothing:
        before = updating.seeded().state_dict()
        mine = {n.removeprefix("policy."): x for n, x in got["parameters"].items() if not n.startswith("critic.")}
        assert all(torch.equal(x, before[n]) for n, x in mine.items())
        assert got["metrics"]["tokens/supervised"] == 0


def test_minibatches_are_all_families_once_and_the_same_everywhere():
    for families, parts in ((5, 2), (7, 3), (2, 3), (1, 1)):
        cuts = [rl.minibatches(families, parts, seed=4, step=2, epoch=e) for e in range(3)]
        for cut in cuts:
            assert sorted(f for part in cut for f in part) == list(range(families)) and len(cut) == parts
        assert families < 5 or len({str(cut) for cut in cuts}) == 3  # another order in each epoch
        assert cuts[0] == rl.minibatches(families, parts, seed=4, step=2, epoch=0)


def test_an_update_is_one_on_each_part_in_turn():
    """Two epochs of three minibatches: the parameters of six learner steps by hand, old log-probs from before them."""
    name = "1, grpo, many"
    config = updating.GRPOConfig("", "", max_prompt=8, max_new_tokens=9, length=24, microbatch_tokens=4800,
                                 prompts=len(updating.GROUPS), learner=updating.LEARNER, **updating.MANY)  # fmt: skip
    told = updating.experience()
    learner = updating.Learner(updating.seeded(), updating.grpo.objective(config), config.learner)
    reference = updating.Forward(updating.seeded(seed=2))
    advantage_A = one(name)["advantage"]
    valid = [(a.finish == "stop" and r.valid and len(a.ids) > 0) for a, r in zip(told.answers, told.rewards)]
    rows = lambda samples: rl.family_rows(samples, 24, share=False)
    fields = [{"advantage": advantage_A[i].float().expand(len(a.ids))} for i, a in enumerate(told.answers)]
    for key, layout in (("old_logprob", learner), ("ref_logprob", reference)):
        for i, a in enumerate(told.answers):  # one sequence at a time
            f = int(told.group_A[i])
            fields[i][key] = torch.zeros(0, dtype=torch.float64)
            if a.ids:
                fields[i][key] = layout.score([rows([rl.Sample(told.rollouts[f].prompt, [a.ids])])])[0]
    for field, a in zip(fields, told.answers):
        field["weight"] = (field["old_logprob"] - a.logprobs).exp().clamp(max=1.1)
    for epoch in range(2):
        for part in rl.minibatches(len(told.rollouts), 3, config.seed, 0, epoch):
            samples = [
                rl.Sample(told.rollouts[int(told.group_A[i])].prompt, [a.ids], [fields[i]])
                for i, a in enumerate(told.answers)
                if valid[i] and int(told.group_A[i]) in part
            ]
            learner.step([rows(samples)] if samples else [])
    assert difference(learner.gathered("parameter"), one(name)["parameters"]) < 1e-9


def test_a_longer_prompt_than_the_limit_is_left_out_and_reported(kit, tmp_path):
    from moekit.data.chat import load_tokenizer

    tokenizer = load_tokenizer(kit.tokenizer)
    config = updating.GRPOConfig("", str(kit.data), max_prompt=90, max_new_tokens=4, length=96)
    found = rl.load_prompts(str(kit.data), tokenizer, config)
    sizes = sorted(map(len, found.ids))
    config = replace(config, max_prompt=sizes[5])
    some = rl.load_prompts(str(kit.data), tokenizer, config)
    assert len(some) < len(found) and max(map(len, some.ids)) == sizes[5] and len(some.items) == len(some)
    assert some.report.counts["documents"] == len(some)
    assert sum("longer than" in e.why for e in some.report.events) == len(found) - len(some)
    with pytest.raises(DataError, match="max_prompt=1 "):
        rl.load_prompts(str(kit.data), tokenizer, replace(config, max_prompt=1))
