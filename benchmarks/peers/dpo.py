"""DPO: steps a second of TRL's trainer and of moekit's recipe, whole optimizer steps on 4 pairs, the same pairs in the
same order for both. Prompts and answers have log-normal lengths (medians 64 and 128 tokens, the end token included).

The reference has other weights than the policy: with equal ones every first loss is log 2, and comparing them proves
nothing. TRL's first loss goes to the other cases, which compare theirs with it before anything is timed.

Extra cases get: config, pairs (prompt, chosen, rejected, as ids), batch, steps, first_loss, reference (a model). A
callable returns the seconds of a step.
"""

import tempfile

import peers
import torch

BENCH, PAIRS, BETA, LR = "dpo", 4, 0.1, 1e-6
PLAIN = {"bf16": False, "gradient_checkpointing": False}
VARIANTS = {
    "trl resident, fp32": {"precompute_ref_log_probs": False, **PLAIN},
    "trl cached, fp32": {"precompute_ref_log_probs": True, **PLAIN},
    "trl cached, default": {"precompute_ref_log_probs": True},
}


def make_pairs(config, n, seed=0):
    """Ids of n pairs, without the end token, which TRL adds."""
    g = torch.Generator().manual_seed(seed)
    some = lambda k: torch.randint(2, peers.CONFIGS[config]["vocab_size"], (k,), generator=g).tolist()
    sizes = [peers.lengths(n, 64, 0.4, 16, 128, seed)]
    sizes += [peers.lengths(n, 127, 0.5, 16, 319, seed + k) for k in (1, 2)]
    return [tuple(some(k) for k in of_pair) for of_pair in zip(*sizes)]


def trl(config, pairs, settings, steps, folder, name):
    """(run, first loss, pairs as TRL tokenized them)."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    say = lambda ids: "".join(f"w{i} " for i in ids)
    rows = [{"prompt": say(p), "chosen": say(a), "rejected": say(b)} for p, a, b in pairs]
    args = DPOConfig(output_dir=folder, max_length=2 * peers.SEQ, per_device_train_batch_size=PAIRS, use_cpu=True,
                     train_sampling_strategy="sequential", max_steps=steps + 1, save_strategy="no", report_to="none",
                     logging_steps=1000, disable_tqdm=True, dataloader_pin_memory=False, beta=BETA, learning_rate=LR,
                     lr_scheduler_type="constant", **settings)  # fmt: skip
    ends = []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            ends.append(peers.clock())

    class Trainer(DPOTrainer):
        def log(self, *_, **__):
            pass

        def _precompute_ref_logps(self, *a, **kw):
            seconds, others, found = peers.once(lambda: super(Trainer, self)._precompute_ref_logps(*a, **kw))
            peers.emit(BENCH, f"{name}: reference pass", "pairs/s", [(seconds, others)], len(pairs), config=config)
            return found

    trainer = Trainer(
        model=peers.olmoe(config), ref_model=peers.olmoe(config, seed=1), args=args, callbacks=[Clock()],
        train_dataset=Dataset.from_list(rows), processing_class=peers.tokenizer(peers.CONFIGS[config]["vocab_size"]),
    )  # fmt: skip
    found = [(r["prompt_ids"], r["chosen_ids"], r["rejected_ids"]) for r in trainer.train_dataset]
    assert found == [(p, [*a, 1], [*b, 1]) for p, a, b in pairs], "TRL's tokens are not the pairs' ids"
    with torch.no_grad():
        first = trainer.data_collator([trainer.train_dataset[i] for i in range(PAIRS)])
        loss = trainer.compute_loss(trainer.model, first).item()
    trainer._metrics["train"].clear()

    def run():
        ends.clear()
        trainer.train()
        return (ends[-1] - ends[0]) / steps

    return run, loss, found


def main():
    p = peers.parser(__doc__, rounds=3, configs=["A"], steps=5, pairs=24, variants=list(VARIANTS)[:2], budget=100.0)
    args = p.parse_args()
    peers.start(BENCH, args)
    for config in args.configs:
        cell(args, config)


def cell(args, config):
    cases, losses, pairs = {}, {}, make_pairs(config, args.pairs)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.variants:
            cases[name], losses[name], ids = trl(config, pairs, VARIANTS[name], args.steps, folder, name)
        peers.note(f"first losses: {losses}")
        cases |= peers.extra_cases(args, BENCH, config=config, pairs=ids, batch=PAIRS, steps=args.steps, beta=BETA,
                                   lr=LR, first_loss=losses[args.variants[0]],
                                   reference=peers.olmoe(config, seed=1), folder=folder)  # fmt: skip
        reps = peers.interleave(cases, args.rounds, args.max_rounds, warmup=1, budget=args.budget,
                                on_error=lambda n, e: peers.emit_error(BENCH, n, e, config=config))  # fmt: skip
    for name, r in reps.items():
        peers.emit(BENCH, name, "steps/s", r, 1.0, config=config)


if __name__ == "__main__":
    main()
