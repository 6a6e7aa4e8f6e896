"""(e) Generating answers: Transformers `generate` and moekit's embedded engine on the same weights and prompts.

equal: every answer has --new tokens. ragged: 64 answers of 8 to 256 tokens, evenly spread and shuffled; `generate` runs
until the longest is done, each row told to stop at its length (a StoppingCriteria per row), the engine refills or drops
a slot at once. Both are greedy; the tokens counted are those of the answers. Before timing, greedy answers must agree
up to near-ties (at least 0.99 of the tokens before the first difference).

The engine also gives log-probs, routed experts and versions of every token, and counts its rows; `generate` gives none.
"""

import argparse
import tempfile

import peers
import torch

from moekit import load
from moekit.rollout.embedded import EmbeddedEngine
from moekit.rollout.engine import Sampling

BENCH, PROMPT, LOW, HIGH = "generate", 64, 8, 256


def stop_at(lengths):
    """Each row is done when it has as many new tokens as it should."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Row(StoppingCriteria):
        def __call__(self, ids, scores, **_):
            return lengths + PROMPT <= ids.shape[1]

    return StoppingCriteriaList([Row()])


def theirs(model, impl, ids, lengths):
    most = int(lengths.max())

    def run():
        model.set_experts_implementation(impl)
        with torch.no_grad():
            got = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=most, pad_token_id=0,
                eos_token_id=None, stopping_criteria=stop_at(lengths),
            )  # fmt: skip
        assert got.shape[1] == PROMPT + most
        return [row[PROMPT : PROMPT + n] for row, n in zip(got.tolist(), lengths.tolist())]

    return run


def ours(engine, ids, lengths):
    how = Sampling(max_new_tokens=int(lengths.max()), temperature=0)

    def run():
        found = engine.generate(ids.tolist(), how, limits=lengths.tolist())
        return [r.answers[0].ids for r in found]

    return run


def agree(a, b):
    """The share of tokens that agree, each answer up to its first difference and that one token."""
    same = total = 0
    for x, y in zip(a, b):
        first = next((i for i, (p, q) in enumerate(zip(x, y)) if p != q), len(x))
        same, total = same + first, total + min(first + 1, len(x))
    return same / total


def main():
    p = peers.parser(__doc__, rounds=3, configs=["A"], batches=[64], new=64, kinds=["equal", "ragged"],
                     impls=["grouped_mm"], budget=80.0, sampled=1)  # fmt: skip
    args: argparse.Namespace = p.parse_args()
    peers.start(BENCH, args)
    for config in args.configs:
        model = peers.olmoe(config, torch.float32).eval()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            engine = EmbeddedEngine.of(load(folder, dtype="float32"), lambda: 0)
        for batch in args.batches:
            for kind in args.kinds:
                cell(args, config, model, engine, batch, kind)


def cell(args, config, model, engine, batch, kind):
    g = torch.Generator().manual_seed(batch)
    ids = torch.randint(2, peers.CONFIGS[config]["vocab_size"], (batch, PROMPT), generator=g)
    spread = torch.linspace(LOW, HIGH, batch).round().long()[torch.randperm(batch, generator=g)]
    lengths = spread if kind == "ragged" else torch.full((batch,), args.new)
    cases = {f"hf generate, {i}": theirs(model, i, ids, lengths) for i in args.impls}
    cases["moekit"] = ours(engine, ids, lengths)
    share = agree(cases[f"hf generate, {args.impls[0]}"](), cases["moekit"]())
    assert share > 0.99, f"answers agree in {share:.4f} of their tokens"
    if args.sampled:
        drawn = Sampling(max_new_tokens=int(lengths.max()))
        cases["moekit, sampled"] = lambda: engine.generate(ids.tolist(), drawn, limits=lengths.tolist())
    reps = peers.interleave(cases, args.rounds, args.max_rounds, warmup=0, budget=args.budget,
                            on_error=lambda n, e: peers.emit_error(BENCH, n, e, config=config, kind=kind))  # fmt: skip
    for name, r in reps.items():
        tokens = int(lengths.sum())
        peers.emit(BENCH, name, "tokens/s", r, tokens, config=config, batch=batch, kind=kind, agree=round(share, 4))


if __name__ == "__main__":
    main()
