"""Loss, gradient and metrics against TRL's own code on the same log-probs.

TRL's trainers are not built: their loss methods are called with a stub in the trainer's place, and where the code is a
block inside a longer method (group advantages, importance weights) that block is cut out of TRL's source and run.

Where TRL's form differs:

- loss_type "grpo" and "bnpo" are means over the microbatch, then over microbatches: compared on one microbatch. "dapo"
  divides by the tokens of the step, as "global_tokens" does, and is compared on two microbatches too.
- TRL adds 1e-4 to the standard deviation, so do the calls here; it divides rounding noise of equal rewards by it,
  hence the comparison has none. An answer that no reward function could score is NaN there and masked here.
- TRL's "sequence_truncate" and "sequence_mask" take the product of the answer's token ratios, our "sequence_sum".
- RewardTrainer's loss is a mean over the microbatch's pairs.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from moekit.data.batch import Batch
from moekit.objectives.advantage import group_advantages
from moekit.objectives.denominator import step_counts, token_weights
from moekit.objectives.grpo import GRPO
from moekit.objectives.ratio import importance_weights
from moekit.objectives.reward_model import RewardModel

pytest.importorskip("trl", reason="TRL is the oracle here")
from trl.trainer import grpo_trainer, reward_trainer, rloo_trainer

WIDTH, LENGTHS = 7, [6, 2, 5, 1]
LONGEST = 9  # max_completion_length


class Accelerator:
    num_processes = 1
    gather = gather_for_metrics = reduce = staticmethod(lambda x, **_: x)


def trl_loss(x, **settings):
    """`GRPOTrainer._compute_loss` on log-probs x["logprob"], with its metrics."""
    options = {
        "loss_type": "grpo", "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0,
        "use_vllm": "weight" in x, "vllm_importance_sampling_correction": True, "max_completion_length": LONGEST,
        "current_gradient_accumulation_steps": 1, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
        "aux_loss_enabled": False, "_entropy_bonus_enabled": False,
    } | settings  # fmt: skip
    stub = SimpleNamespace(
        **options,
        args=SimpleNamespace(
            delta=None,
            use_bias_correction_kl=False,
            steps_per_generation=options["current_gradient_accumulation_steps"],
        ),
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (x["logprob"], torch.zeros_like(x["logprob"]), None),
    )
    nothing = torch.zeros(len(x["logprob"]), 0, dtype=torch.long)
    inputs = {
        "prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": x["mask"].long(), "completion_mask": x["mask"],
        "advantages": x["advantage"], "old_per_token_logps": x.get("old_logprob"),
        "ref_per_token_logps": x.get("ref_logprob"), "importance_sampling_ratio": x.get("weight"),
        "num_items_in_batch": x.get("items", x["mask"].sum()),
    }  # fmt: skip
    loss = grpo_trainer.GRPOTrainer._compute_loss(stub, None, inputs)
    return loss, {name: values[0] for name, values in stub._metrics["train"].items()}


def sampled(dtype, seed=0):
    """Four ragged answers whose log-probs have moved since they were sampled: some tokens past every bound."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda scale: torch.randn(4, WIDTH, generator=g, dtype=torch.float64).mul(scale).to(dtype)
    logprob = -draw(1.0).abs() - 0.1
    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).to(dtype)
    old, ref = logprob + draw(0.4), logprob + draw(0.5)
    advantage = torch.tensor([1.3, -0.7, -1.1, 0.5], dtype=dtype)
    weight = draw(1.0).abs()
    return {"logprob": logprob.requires_grad_(), "mask": mask, "old_logprob": old, "ref_logprob": ref,
            "advantage": advantage, "weight": weight}  # fmt: skip


def our_loss(objective, x, rows=4):
    """The same through a batch of packed-off rows: position t predicts answer token t."""
    segment = torch.where(torch.arange(WIDTH + 1) <= torch.tensor(LENGTHS)[:, None], 0, -1)
    pad = lambda v: torch.nn.functional.pad(v, (0, 1), value=math.nan)
    extra = {name: pad(x[name]) for name in ("old_logprob", "ref_logprob", "weight") if name in x}
    extra["advantage"] = x["advantage"][:, None].expand(-1, WIDTH + 1).clone()
    batch = Batch.make(torch.zeros_like(segment), segment=segment, extra=extra)
    parts = batch.split(rows)
    counts = step_counts([b.flat for b in parts])
    loss, sums = 0.0, defaultdict(float)
    for part, logprob in zip(parts, x["logprob"].split(rows)):
        flat = part.flat
        terms = objective(flat, SimpleNamespace(logprob_M=pad(logprob).reshape(-1)[flat.order_N][flat.label_index_M]))
        weight = token_weights(flat, counts, objective.denominator, objective.constant_length)
        loss = loss + (terms.loss_M * weight.to(terms.loss_M.dtype)).sum()
        for name, value in terms.sums.items():
            sums[name] += value.item() / counts.supervised
    return loss, sums


def same(ours, theirs, x, tolerance):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    mine, other = (torch.autograd.grad(loss, x["logprob"])[0] for loss in (ours, theirs))
    assert other.abs().max() > 1e-3 and not other[x["mask"] == 0].any()
    torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=["fp32", "fp64"])
@pytest.mark.parametrize("old", [True, False], ids=["old", "first-update"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.2, 0.28), (0.05, 0.1)], ids=["symmetric", "dapo", "tight"])
@pytest.mark.parametrize(
    "theirs,ours",
    [("grpo", "sequence_mean"), ("bnpo", "global_tokens"), ("dapo", "global_tokens"), ("dr_grpo", "constant")],
)
def test_loss_and_gradient(theirs, ours, clip, level, old, dtype, tolerance):
    """Four normalisations, three clips, both ratios, KL in the loss and importance weights.

    TRL's sequence ratio with "dapo", "bnpo" and "dr_grpo" does not repeat an answer's one value for each of its tokens
    without a KL or a weight, so those are always on here.
    """
    x = sampled(dtype)
    if not old:
        del x["old_logprob"]
    objective = GRPO(clip_low=clip[0], clip_high=clip[1], ratio=level, beta=0.04, denominator=ours,
                     constant_length=LONGEST if ours == "constant" else None)  # fmt: skip
    want, metrics = trl_loss(x, loss_type=theirs, importance_sampling_level=level, beta=0.04, epsilon_low=clip[0],
                             epsilon_high=clip[1])  # fmt: skip
    got, sums = our_loss(objective, x)
    same(got, want, x, tolerance)
    assert sums["kl_ref"] == pytest.approx(metrics["kl"], abs=1e-6)
    if level == "token":
        for mine, other in (("clip_low", "low_mean"), ("clip_high", "high_mean")):
            assert sums[mine] == pytest.approx(metrics[f"clip_ratio/{other}"], abs=1e-6)
            assert (sums[mine] > 0) == old
    assert abs(got.item() - our_loss(objective, x, rows=1)[0].item()) < 1e-6  # however it is cut


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_gspo_is_trls_grpo_loss_at_sequence_level(beta):
    x = sampled(torch.float64, seed=3)
    del x["weight"]
    want, _ = trl_loss(x, importance_sampling_level="sequence", beta=beta, epsilon_low=3e-4, epsilon_high=4e-4)
    objective = GRPO(ratio="sequence", clip_low=3e-4, clip_high=4e-4, beta=beta, denominator="sequence_mean")
    if beta == 0.0:  # every ratio is past so small a bound; put two answers back within it
        x["old_logprob"][:2] = x["logprob"].detach()[:2]
        want, _ = trl_loss(x, importance_sampling_level="sequence", epsilon_low=3e-4, epsilon_high=4e-4)
    same(our_loss(objective, x)[0], want, x, 1e-12)


def test_two_microbatches_of_dapo():
    """TRL's sum over two microbatches with the step's token count is the global token mean."""
    x = sampled(torch.float64, seed=1)
    halves = [{k: v[i : i + 2] for k, v in x.items()} | {"items": x["mask"].sum()} for i in (0, 2)]
    want = sum(trl_loss(h, loss_type="dapo", beta=0.1, current_gradient_accumulation_steps=2)[0] for h in halves)
    for rows in (1, 3, 4):
        assert our_loss(GRPO(beta=0.1), x, rows)[0].item() == pytest.approx(want.item(), abs=1e-12)
    same(our_loss(GRPO(beta=0.1), x, rows=2)[0], want, x, 1e-12)


# ------------------------------------------------------------------ blocks of TRL's longer methods
def run_block(cls, method, first, last=None, **names):
    """Run statements of a method of TRL's, from the one whose source starts with `first` to that of `last`.

    Returns the names that are then defined: the module's, those given, and what the statements made.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(cls, method))))
    for node in ast.walk(tree):
        for body in (getattr(node, "body", []), getattr(node, "orelse", [])):
            starts = [ast.unparse(s) for s in body] if isinstance(body, list) else []
            found = [i for i, text in enumerate(starts) if text.startswith(first)]
            if found:
                stop = found[0] if last is None else next(i for i, t in enumerate(starts) if t.startswith(last))
                space = vars(inspect.getmodule(cls)) | names
                exec(compile(ast.Module(body[found[0] : stop + 1], []), f"<{cls.__name__}>", "exec"), space)  # noqa: S102
                return space
    raise AssertionError(f"TRL has no {first!r} in {cls.__name__}.{method} any more")


REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.2, 0.9, -3.0, 0.4], [5.0, math.nan, 4.0, 4.5], [0.0, 0.0, 0.0, 1.0]]


@pytest.mark.parametrize("scale", ["std", "none"])
def test_group_advantages(scale):
    reward = torch.tensor(REWARDS).reshape(-1)
    trainer = SimpleNamespace(
        multi_objective_aggregation="sum_then_normalize", reward_weights=torch.ones(1),
        scale_rewards={"std": "group", "none": "none"}[scale],
    )  # fmt: skip
    space = run_block(
        grpo_trainer.GRPOTrainer, "_generate_and_score_completions",
        "if self.multi_objective_aggregation ==", "advantages = torch.nan_to_num",
        self=trainer, rewards_per_func=reward[:, None], unscorable_mask=reward.isnan(), device="cpu", num_generations=4,
    )  # fmt: skip
    got = group_advantages(reward, torch.arange(4).repeat_interleave(4), scale=scale, eps=1e-4)
    torch.testing.assert_close(got.advantage_A, space["advantages"], rtol=1e-6, atol=1e-6)
    assert got.masked == got.not_finite == 1 and space["advantages"].abs().max() > 1


def test_leave_one_out_is_rloo():
    reward = torch.tensor(REWARDS).reshape(-1)
    space = run_block(
        rloo_trainer.RLOOTrainer, "_generate_and_score_completions",
        "grouped_rewards = rewards.view", "advantages = torch.nan_to_num",
        self=SimpleNamespace(normalize_advantages=False), rewards=reward, num_generations=4,
    )  # fmt: skip
    got = group_advantages(reward, torch.arange(4).repeat_interleave(4), scale="none", leave_one_out=True)
    torch.testing.assert_close(got.advantage_A, space["advantages"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("low", [None, 0.7])
def test_importance_weights(mode, low):
    x = sampled(torch.float64, seed=2)
    learner, engine = x["logprob"].detach(), x["old_logprob"]
    trainer = SimpleNamespace(
        use_vllm=True, vllm_importance_sampling_correction=True, vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low, vllm_importance_sampling_clip_max=1.5,
    )  # fmt: skip
    space = run_block(
        grpo_trainer.GRPOTrainer, "_generate_and_score_completions",
        "if self.use_vllm and self.vllm_importance_sampling_correction:\n    mask =",
        self=trainer, completion_mask=x["mask"], tool_mask=None, old_per_token_logps=learner,
        sampling_per_token_logps=engine,
    )  # fmt: skip
    valid = x["mask"] > 0
    want = space["vllm_importance_sampling_ratio"].expand(-1, WIDTH)[valid]
    level, form = mode.split("_")
    got = importance_weights(
        learner[valid], engine[valid], form=form, low=low or 0.0, high=1.5,
        level={"token": "token", "sequence": "sequence_sum"}[level],
        answer_M=torch.arange(4)[:, None].expand(-1, WIDTH)[valid],
    )  # fmt: skip
    torch.testing.assert_close(got.weight_M, want, rtol=1e-12, atol=1e-12)
    assert got.above > 0 and (got.below > 0) == (low is not None)


@pytest.mark.parametrize("center", [0.0, 0.01])
@pytest.mark.parametrize("margin", [None, [0.5, 0.0, -0.2]])
def test_reward_model(margin, center):
    """`RewardTrainer.compute_loss`: TRL has the chosen answers first, then the rejected ones."""
    score = torch.tensor([0.3, -1.0, 2.0, 0.1, 0.5, 2.0], dtype=torch.float64, requires_grad=True)
    inputs = {"attention_mask": torch.ones(6, 4, dtype=torch.long)}
    if margin:
        inputs["margin"] = torch.tensor(margin, dtype=torch.float64)
    stub = SimpleNamespace(
        model=SimpleNamespace(training=True), args=SimpleNamespace(center_rewards_coefficient=center or None),
        accelerator=Accelerator(), _total_train_tokens=0, _tp_size=1, _metrics={"train": defaultdict(list)},
    )  # fmt: skip

    def network(margin=None, **_):
        return SimpleNamespace(logits=score[:, None])

    want = reward_trainer.RewardTrainer.compute_loss(stub, network, inputs)
    column = lambda values: torch.tensor(values)[:, None].expand(-1, 3).clone()
    extra = {"family": column([0, 1, 2] * 2), "chosen": column([1] * 3 + [0] * 3)}
    if margin:
        extra["margin"] = column(margin * 2)
    labels = torch.tensor([[-100, -100, 0]]).expand(6, -1)
    flat = Batch.make(torch.zeros(6, 3, dtype=torch.long), labels=labels, extra=extra).flat
    value_M = score[flat.order_N[flat.label_index_M] // 3]
    terms = RewardModel(center=center)(flat, SimpleNamespace(value_M=value_M))
    got = terms.loss_M.sum() / 3
    torch.testing.assert_close(got, want, rtol=1e-6 if margin else 1e-12, atol=1e-7)  # 0.2 in float32
    torch.testing.assert_close(*(torch.autograd.grad(x, score)[0] for x in (got, want)), rtol=1e-6, atol=1e-7)
    metrics = {name: values[0] for name, values in stub._metrics["train"].items()}
    for name in ("accuracy", "margin"):
        assert terms.sums[name].item() / 3 == pytest.approx(metrics[name])
