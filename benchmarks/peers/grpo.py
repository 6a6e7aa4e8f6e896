"""GRPO: seconds of a whole step (sample, reward, update), of TRL's trainer and of moekit's recipe; 4 prompts of 32
tokens, 4 answers to each, every one of 64 tokens; split into generation and training (all that is not generation).

Before anything is timed, moekit's answers and advantages go to `check`: TRL's log-probs of those answers and the
gradient norm of TRL's loss are what moekit's have to be.

Extra cases get: config, prompts (ids), per_step, group, new, lr, check, and parts to fill with {name: [(generation,
training)]}. A callable returns the seconds of a step.
"""

import tempfile

import peers
import torch

BENCH, PROMPTS, GROUP, NEW, LENGTH, LR = "grpo", 4, 4, 64, 32, 1e-6
PLAIN = {"bf16": False, "gradient_checkpointing": False}
VARIANTS = {"trl, fp32": PLAIN, "trl, default": {}}


def trl(config, prompts, settings, folder, parts):
    """(run, check)."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(output_dir=folder, per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP,
                      max_completion_length=NEW, generation_kwargs={"min_new_tokens": NEW}, max_steps=2, use_cpu=True,
                      save_strategy="no", report_to="none", logging_steps=1000, disable_tqdm=True, learning_rate=LR,
                      lr_scheduler_type="constant", dataloader_pin_memory=False, **settings)  # fmt: skip
    ends, sampled = [], []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            ends.append(peers.clock())

    class Trainer(GRPOTrainer):
        def log(self, *_, **__):
            pass

        def _generate(self, *a, **kw):
            began = peers.clock()
            found = super()._generate(*a, **kw)
            sampled.append(peers.clock() - began)
            return found

    trainer = Trainer(
        model=peers.olmoe(config), reward_funcs=lambda completions, **_: [float(len(c) % 7) for c in completions],
        args=args, callbacks=[Clock()], processing_class=peers.tokenizer(peers.CONFIGS[config]["vocab_size"]),
        train_dataset=Dataset.from_list([{"prompt": " ".join(f"w{i}" for i in p)} for p in prompts]),
    )  # fmt: skip

    def run():
        ends.clear(), sampled.clear()
        trainer.train()
        step = ends[1] - ends[0]  # the second one: the first has what only happens once
        parts.append((sampled[-1], step - sampled[-1]))
        return step

    def check(prompt_ids, answers, advantages):
        """TRL's log-probs [A, new] of one step's answers and the norm of its loss's gradient; nothing is trained."""
        prompt, answer = torch.tensor(prompt_ids), torch.tensor(answers)
        given = {"prompt_ids": prompt, "prompt_mask": torch.ones_like(prompt), "completion_ids": answer,
                 "completion_mask": torch.ones_like(answer), "advantages": torch.as_tensor(advantages).float(),
                 "num_items_in_batch": torch.tensor(float(answer.numel()))}  # fmt: skip
        trainer.current_gradient_accumulation_steps = 1
        trainer.compute_loss(trainer.model, given).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters() if p.grad is not None]).item()
        trainer.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            ids = torch.cat([prompt, answer], 1)
            logprobs = trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), NEW)[0]
        trainer._metrics["train"].clear()
        return logprobs, norm

    return run, check


def main():
    p = peers.parser(__doc__, rounds=3, configs=["A"], variants=list(VARIANTS)[:1], budget=100.0)
    args = p.parse_args()
    peers.start(BENCH, args)
    for config in args.configs:
        cell(args, config)


def cell(args, config):
    g = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, peers.CONFIGS[config]["vocab_size"], (16, LENGTH), generator=g).tolist()
    cases, parts, check = {}, {name: [] for name in args.variants}, None
    with tempfile.TemporaryDirectory() as folder:
        for name in args.variants:
            cases[name], found = trl(config, prompts, VARIANTS[name], folder, parts[name])
            check = check or found  # of the first variant: float32
        cases |= peers.extra_cases(args, BENCH, config=config, prompts=prompts, per_step=PROMPTS, group=GROUP,
                                   new=NEW, lr=LR, check=check, parts=parts)  # fmt: skip
        reps = peers.interleave(cases, args.rounds, args.max_rounds, warmup=1, budget=args.budget,
                                on_error=lambda n, e: peers.emit_error(BENCH, n, e, config=config))  # fmt: skip
    for name, r in reps.items():
        peers.emit(BENCH, name, "s/step", r, config=config)
        for k, what in enumerate(("generation", "training")) if name in parts else ():
            split = [(part[k], rep[1]) for part, rep in zip(parts[name][-len(r) :], r)]
            peers.emit(BENCH, name, f"s {what}", split, config=config)


if __name__ == "__main__":
    main()
