"""moekit's columns in dpo.py and grpo.py: the recipes' own functions on the peers' weights, pairs and prompts."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import peers
import torch

from moekit import Learner, LearnerConfig, load
from moekit.data.preference import Pair, Pairs
from moekit.learner.forward import Forward
from moekit.objectives.dpo import DPO
from moekit.recipes import grpo as recipe
from moekit.recipes import pairs as pair_rows
from moekit.recipes.reference_cache import cached, resident
from moekit.recipes.rl import Experience
from moekit.recipes.sampler import Stopwatch
from moekit.rollout.embedded import EmbeddedEngine
from moekit.rollout.engine import Sampling
from moekit.rollout.rewards import RewardPool, Verifier
from moekit.workloads import DPOConfig, GRPOConfig

SETTINGS = {"betas": (0.9, 0.999), "elide": "padding+last_layer"}
ROW = 4096  # positions of a row: a microbatch is one row, and has no padding


def ours(model):
    """moekit's model with a Transformers model's weights."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load(folder, dtype="float32")


def dpo(config, pairs, batch, steps, beta, lr, first_loss, reference, folder):
    """A step: rows of the pairs, the reference's log-probs (scored, or read from its cache), the update."""
    tokenizer, out = peers.tokenizer(peers.CONFIGS[config]["vocab_size"]), {}
    tokenizer.chat_template = "{{ messages }}"  # part of the cache's key
    frozen = Forward(ours(reference))

    def case(where, share):
        how = DPOConfig("", "", length=ROW, microbatch_tokens=ROW, share_prompt=share, batch_pairs=batch)
        mine = Learner(ours(peers.olmoe(config)), DPO(beta=beta), LearnerConfig(lr=lr, **SETTINGS))
        data = Pairs([Pair(*p, index=i) for i, p in enumerate(pairs)], ROW, share)
        name = f"moekit {where}, {'shared' if share else 'unshared'}"
        if where == "cached":
            seconds, others, data = peers.once(lambda: cached(frozen, data, tokenizer, Path(folder) / str(share)))
            peers.emit("dpo", f"{name}: reference pass", "pairs/s", [(seconds, others)], len(pairs), config=config)

        def step(k):
            rows = pair_rows.microbatches(data, np.arange(k * batch, (k + 1) * batch), how, mine)
            return mine.step(rows if where == "cached" else resident(frozen, rows))

        def run():
            for k in range(steps + 1):
                if k == 1:
                    began = peers.clock()
                step(k)
            return (peers.clock() - began) / steps

        told = step(0)
        rows = told["rows/dispatched"]
        peers.note(f"{name}: first loss {told['loss/dpo']:.7f}, TRL {first_loss:.7f}, {rows} routed rows")
        if abs(told["loss/dpo"] - first_loss) > 1e-4:
            raise ValueError(f"{name}: losses differ, {told['loss/dpo']} and TRL's {first_loss}")
        out[name] = run

    for where in ("cached", "resident"):
        for share in (True, False):
            case(where, share)
    return out


def _judge(item, answer):
    """What TRL is given as a reward too; picklable for the pool's processes."""
    return float(len(answer) % 7)


def grpo(config, prompts, per_step, group, new, lr, check, parts):
    """Whole steps through engine, pool and recipe; and the training part alone of 8 answers, shared and unshared."""
    tokenizer = peers.tokenizer(peers.CONFIGS[config]["vocab_size"])
    pool, out = RewardPool([Verifier("length", _judge)]), {}

    def learner():
        loss = recipe.objective(GRPOConfig("", ""))
        return Learner(ours(peers.olmoe(config)), loss, LearnerConfig(lr=lr, **SETTINGS))

    def host(share, n):
        settings = GRPOConfig("", "", length=ROW, microbatch_tokens=ROW, share_prompt=share, prompts=per_step, group=n,
                              max_new_tokens=new, max_prompt=512)  # fmt: skip
        return SimpleNamespace(config=settings, watch=Stopwatch())

    def sample(engine, asked, n, seed):
        return engine.generate(asked, Sampling(max_new_tokens=new, n=n, stop_ids=(), seed=seed))

    def judged(rollouts):
        answers = [a for r in rollouts for a in r.answers]
        texts = [tokenizer.decode(a.ids, skip_special_tokens=True) for a in answers]
        return Experience(rollouts, pool.score([{}] * len(texts), texts), texts)

    mine, at, seeds = learner(), host(True, group), iter(range(10**6))
    engine = EmbeddedEngine.of(mine.model, lambda: mine.updates)
    parts["moekit"] = []

    def step():
        seed = next(seeds)
        asked = [prompts[(seed * per_step + i) % len(prompts)] for i in range(per_step)]
        began = peers.clock()
        rollouts = sample(engine, asked, group, seed)
        sampled = peers.clock()
        told = recipe.update(mine, None, judged(rollouts), at, seed)
        ended = peers.clock()
        parts["moekit"].append((sampled - began, ended - sampled))
        return rollouts, told, ended - began

    rollouts, (metrics, _, advantage_A), _ = step()
    answers = [a for r in rollouts for a in r.answers]
    asked = [r.prompt for r in rollouts for _ in r.answers]
    logprobs, norm = check(asked, [a.ids for a in answers], advantage_A)
    off = (torch.stack([a.logprobs for a in answers]) - logprobs).abs().max().item()
    gradient = mine.gradient()  # Transformers' embedding gives its padding token, 0, no gradient; an answer may hold it
    unseen = gradient["embed.weight"][0].norm() / torch.nn.utils.get_total_norm(gradient.values())
    got = metrics["grad/norm"] * (1 - unseen.item() ** 2) ** 0.5
    peers.note(f"engine's log-probs {off:.2g} from TRL's; gradient norm {got:.7f}, TRL {norm:.7f}")
    if off > 1e-4 or abs(got - norm) > 1e-4 * norm:
        raise ValueError("moekit's log-probs or gradient are not TRL's")
    out["moekit"] = lambda: step()[2]
    parts["moekit"].clear()

    for length in (len(prompts[0]), 128):
        g = torch.Generator().manual_seed(length)
        longer = torch.randint(2, peers.CONFIGS[config]["vocab_size"], (per_step, length), generator=g).tolist()
        fixed = judged(sample(engine, longer, 8, length))
        rows = {}
        for share in (True, False):
            name = f"moekit, training on {per_step} x 8, prompts of {length}, {'shared' if share else 'unshared'}"
            out[name], rows[share] = training(learner(), fixed, host(share, 8))
        removed, predicted = 1 - rows[True] / rows[False], share_removed(peers.CONFIGS[config], 8, length, new)
        told = {"unit": "share of routed rows", "counted": round(removed, 6), "predicted": round(predicted, 6)}
        peers.out({"bench": "grpo", "peer": f"moekit, {per_step} x 8, prompts of {length}", **told, "rows": rows})
        if abs(removed - predicted) > 1e-9:
            raise ValueError(f"sharing removed {removed} of the routed rows, not {predicted}")
    return out


def training(mine, experience, at):
    """A callable that trains on given answers once more, and the rows that it routes."""
    rows = recipe.update(mine, None, experience, at, 0)[0]["rows/dispatched"]
    return lambda: recipe.update(mine, None, experience, at, 0) and None, rows


def share_removed(c, group, prompt, new):
    """The share of routed rows that one copy of the prompt saves; the last layer routes labelled positions only."""
    layers, positions = c["num_hidden_layers"] - 1, group * (prompt + new)
    return layers * (group - 1) * (prompt - 1) / (layers * positions + group * new)
