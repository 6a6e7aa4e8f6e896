"""`moekit demo`: a tiny mixture of experts learns to spell backward on two processes, and everything is shown.

From nothing: chats are made from reasoning-gym tasks and joined with our own small chat file, a tokenizer is trained,
random weights are written as a Hugging Face folder (initial/), fine-tuned by the same recipe and launcher that any run
takes, and exported. The export learns from preferences (a run of its own in dpo/), and what comes out from verified
rewards (grpo/). Half of the demonstrations are careless, the last letter of the answer is missing: fine-tuning teaches
the tasks and this habit with them; the stages after it, which are told what is right, take the habit away. Held-out
questions, none of which was trained on, are answered before and after each stage. The exports are loaded by
Transformers, which must give the same logits. Everything is in the run folder."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from ..config import DataConfig, Denominator, LearnerConfig, RouterLossConfig, RunConfig, SFTConfig
from ..data import tasks
from ..data.batch import Batch
from ..data.chat import load_tokenizer
from ..data.dataset import build
from ..data.source import CHATS, load_examples
from ..data.stream import RowStream
from ..data.tokenizer import train_tokenizer
from ..errors import CheckpointError, RunExistsError
from ..launch.job import attach
from ..launch.submit import submit
from ..learner.lab import DenominatorLab
from ..learner.weights import export, load
from ..measure.files import write_atomic
from ..measure.record import RunWriter, open_run
from ..model.presets import parameter_counts, preset
from ..model.transformer import Transformer, logits
from ..objectives.sft import SFT
from ..viz.report import READINGS, write_report
from ..viz.theme import need
from ..workloads import DPOConfig, GRPOConfig
from . import dpo, grpo, sft
from .evaluate import evaluate
from .job import Train, follow, table
from .setup import EXPORT

MARK = "demo.json"  # what only a demo leaves: the folder may be made anew
STEPS = 400  # of fine-tuning, about a minute on two cores
DPO_STEPS, GRPO_STEPS = 40, 60
HELD_OUT = 100  # questions of each task
TASKS: dict[str, dict[str, Any]] = {  # name -> how many to train on, and the task's own settings
    "spell_backward": {"size": 9000, "min_word_len": 3, "max_word_len": 5},
    "word_sequence_reversal": {"size": 4000, "min_words": 2, "max_words": 2},
}


def demo(out: str | Path = "runs/demo", *, nproc: int = 2, steps: int | None = None) -> dict[str, Any]:
    """Run the demo and print what happens.
    Args:
        out: run folder; made anew if an earlier demo made it, refused if it holds anything else.
        nproc: processes.
        steps: optimizer steps of fine-tuning, and the most of the other stages; None = `STEPS`.
    Returns: `scores` (task -> shares of held-out questions answered right, before and after each stage), `summary` (of
        each stage's run), `report`, and `transformers`: the largest difference between its logits and ours.
    Raises:
        RunExistsError: the folder holds something that no demo made, or a demo that is still going.
        JobError: the training failed."""
    for module in ("plotly.graph_objects", "matplotlib"):
        need(module, "the demo's report")  # said now, not after the training
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices of this size are faster so, and far faster on a busy machine
    try:
        return _demo(Path(out), nproc, steps or STEPS)
    finally:
        torch.set_num_threads(threads)


def _demo(folder: Path, nproc: int, steps: int) -> dict[str, Any]:
    began = time.monotonic()
    _make_room(folder)
    say = lambda text: print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True)

    say("1/7 chats and preferences from reasoning-gym tasks, our own chats, and a tokenizer")
    held_out = _make_data(folder)
    tokenizer = load_tokenizer(folder / "tokenizer")
    shape = replace(preset("demo"), vocab=len(tokenizer), bos_id=tokenizer.bos_token_id,
                    eos_id=tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id)  # fmt: skip
    count = parameter_counts(shape)
    say(f"2/7 a random mixture of experts: {shape.layers} layers, {shape.experts} experts, {shape.top_k} for a token, "
        f"{count['total']:,} parameters, {count['active']:,} active")  # fmt: skip
    model = Transformer(shape, seed=0)
    export(model, folder / "initial", folder / "tokenizer", overwrite=True)
    answers = {"before": evaluate(model, tokenizer, held_out, max_new_tokens=24)}
    summary: dict[str, dict[str, Any]] = {}
    difference = 0.0
    for n, (name, (train, out, config, what)) in enumerate(_stages(folder, steps).items()):
        say(f"{3 + n}/7 {name}: {what}, {config.steps} steps on {nproc} processes")
        job = submit(train, config, nproc=nproc, name=out.resolve().name, runs=out.resolve().parent,
                     overwrite=out == folder, malloc="keep", device="cpu")  # fmt: skip
        try:
            follow(job, config.steps)
            summary[name] = job.result()[0]
        except KeyboardInterrupt:
            job.stop()
            raise
        model = load(out / EXPORT)
        answers[name] = evaluate(model, tokenizer, held_out, max_new_tokens=24)
        say(f"    {answers[name]['exact']:.0%} of {len(held_out)} held-out questions answered right")
        off = check_transformers(out / EXPORT, model, tokenizer, held_out[0]["messages"][:1])
        difference = max(difference, off)

    say("6/7 one batch under every denominator")
    readings = denominators(load(folder / EXPORT), _config(folder, steps), tokenizer)
    write_atomic(folder / READINGS, json.dumps(readings).encode())
    say("7/7 the report")
    scores = {"all tasks": tuple(a["exact"] for a in answers.values())}
    scores |= {name: tuple(a["tasks"][name]["exact"] for a in answers.values()) for name in TASKS}
    _write_results(folder, scores, difference, answers)
    report = write_report(folder, scores=scores)
    print(_told(folder, scores, summary, answers, difference, report, time.monotonic() - began))
    return {"scores": scores, "summary": summary, "report": str(report), "transformers": difference}


def _make_room(folder: Path) -> None:
    """Remove an earlier demo, and nothing else."""
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / MARK).exists():
            raise RunExistsError(f"{folder} exists and no demo made it; nothing was touched, give another --out")
        for run in (folder, folder / "dpo", folder / "grpo"):
            if (run / "state.json").exists() and not attach(run).done:
                raise RunExistsError(f"a demo is still going in {run}; wait, or use moekit.attach({str(run)!r}).stop()")
        shutil.rmtree(folder)
    write_atomic(folder / MARK, b"{}\n")


def _make_data(folder: Path) -> list[dict[str, Any]]:
    """The files of data/, and tokenizer/; returns the held-out items."""
    held_out, asked, pairs, kept_pairs = list[Any](), list[Any](), list[Any](), list[Any]()
    for name, settings in TASKS.items():
        held = {**settings, "size": HELD_OUT, "seed": 1}
        asked += [{"messages": item["messages"]} for item in tasks.make_task(name, "train", **settings)]
        held_out += tasks.make_task(name, "heldout", **held)
        pairs += tasks.make_pairs(name, "train", **{**settings, "size": settings["size"] // 10})
        kept_pairs += tasks.make_pairs(name, "heldout", **held)
    shown = [_careless(item) if n % 2 else item for n, item in enumerate(asked)]
    chats = [{"messages": e.messages} for e in load_examples(CHATS)] + shown
    # In prompts.jsonl a task's own data is left out: answers are right to the letter, or not at all.
    files = {"train": chats, "prompts": asked, "held_out": held_out, "pairs": pairs, "held_out_pairs": kept_pairs}
    for name, items in files.items():
        lines = [json.dumps(item, default=str) for item in items]
        write_atomic(folder / "data" / f"{name}.jsonl", "\n".join([*lines, ""]).encode())
    # Only what a fifth of all questions repeats becomes one token; words that are to be spelled stay letters.
    texts = [m["content"] for chat in chats for m in chat["messages"]]
    train_tokenizer(texts, 512, folder / "tokenizer", min_frequency=len(chats) // 5)
    return held_out


def _careless(item: dict[str, Any]) -> dict[str, Any]:
    """The item, and the last letter of its answer missing."""
    question, answer = item["messages"]
    return {"messages": [question, {**answer, "content": answer["content"][:-1]}]}


def _stages(folder: Path, steps: int) -> dict[str, tuple[Train, Path, RunConfig, str]]:
    """Name -> recipe, run folder, config (each starts from the export of the one before), and what is said of it."""
    router, data = RouterLossConfig(balance=0.01), folder / "data"
    preferences = DPOConfig(
        model=str(folder / EXPORT), data=str(data / "pairs.jsonl"), eval_data=str(data / "held_out_pairs.jsonl"),
        steps=min(DPO_STEPS, steps), batch_pairs=32, length=256, reference="resident",
        learner=LearnerConfig(lr=2e-5, warmup_steps=5, router=router),
    )  # fmt: skip
    rewards = GRPOConfig(
        model=str(folder / "dpo" / EXPORT), data=str(data / "prompts.jsonl"), steps=min(GRPO_STEPS, steps), prompts=96,
        group=8, drop_equal_groups=True, max_prompt=96, max_new_tokens=24, length=256, slots=384,
        learner=LearnerConfig(lr=2e-4, warmup_steps=10, betas=(0.9, 0.99), router=router),
    )  # fmt: skip
    return {
        "SFT": (sft.train, folder, _config(folder, steps), "fine-tuning on the demonstrations, half of them careless"),
        "DPO": (dpo.train, folder / "dpo", preferences, "right answers are preferred to those to other questions"),
        "GRPO": (grpo.train, folder / "grpo", rewards, "answers are sampled, and the right ones rewarded"),
    }


def _config(folder: Path, steps: int) -> SFTConfig:
    learner = LearnerConfig(lr=3e-3, schedule="cosine", total_steps=steps, warmup_steps=20, min_lr_ratio=0.05,
                            weight_decay=0.01, router=RouterLossConfig(balance=0.01))  # fmt: skip
    return SFTConfig(
        model=str(folder / "initial"), data=str(folder / "data" / "train.jsonl"), rows=DataConfig(length=256),
        steps=steps, batch_rows=16, microbatch_rows=8, learner=learner, save_every=max(1, steps // 2),
    )  # fmt: skip


@torch.no_grad()
def check_transformers(folder: Path, model: Transformer, tokenizer: Any, chat: list[dict[str, Any]]) -> float:
    """Load `folder` with Transformers and compare logits on a chat; returns the largest relative difference.
    Raises CheckpointError: it differs by more than 1e-4."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    theirs = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    ids = torch.tensor([tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)])
    ours, want = logits(model, Batch.make(ids)), theirs(ids).logits
    difference = float((ours - want).abs().max() / want.abs().max())
    if not difference <= 1e-4:
        raise CheckpointError(f"Transformers' logits of {folder} differ from ours by {difference:.1e} of the largest")
    return difference


def denominators(model: Transformer, config: SFTConfig, tokenizer: Any, rows: int = 4) -> dict[str, dict[str, Any]]:
    """What each denominator makes of one batch, cut into two ranks with two microbatches each: mode -> reading."""
    found = build(config.data, tokenizer, config.rows)
    lab = DenominatorLab(model, found.batch(RowStream(found, rows).take()), SFT())
    return {mode: lab.measure(mode, ranks=2, microbatches=2).as_dict() for mode in get_args(Denominator)}


def _write_results(
    folder: Path, scores: dict[str, tuple[float, ...]], difference: float, answers: dict[str, dict[str, Any]]
) -> None:
    """Scores into the run card; every answer after the last stage into results/held_out.json."""
    card = open_run(folder).card
    assert card is not None
    results = {**card.results, "scores": scores, "stages": list(answers),
               "relative difference of Transformers' logits": difference}  # fmt: skip
    with RunWriter(folder, resume=1 << 60, rank=0) as writer:
        writer.card(replace(card, results=results))
    last = list(answers.values())[-1]
    write_atomic(folder / "results" / "held_out.json", json.dumps(last, indent=1).encode())


def _told(folder: Path, scores: dict[str, tuple[float, ...]], summary: dict[str, Any], answers: dict[str, Any],
          difference: float, report: Path, seconds: float) -> str:  # fmt: skip
    width = max(map(len, scores))
    head = "held-out questions answered right"
    lines = ["", f"{head:<{width + 12}}" + "".join(f"{stage:>8}" for stage in answers)]
    lines += [f"  {name:<{width + 10}}" + "".join(f"{x:>8.0%}" for x in found) for name, found in scores.items()]
    last = answers["GRPO"]["answers"][:: HELD_OUT // 2]
    lines += ["", "for example", *(f"  {a['question'].splitlines()[-1]}  ->  {a['answer']}" for a in last)]
    fine, pairs, rewarded = summary["SFT"], summary["DPO"], open_run(folder / "grpo").metrics["reward/mean"]
    loss = open_run(folder).metrics["loss/sft"]
    facts = {
        "SFT: loss, mean of first and last 10 steps": f"{loss[:10].mean():.3f}, {loss[-10:].mean():.3f}",
        "SFT: supervised tokens": fine["supervised_tokens"],
        "SFT: supervised tokens/s": fine["supervised_tokens_s"],
        "SFT: routed rows per supervised token": fine["rows_per_supervised_token"],
        "DPO: held-out pairs told apart": f"{pairs['after']['eval/accuracy']:.0%}",
        "DPO: routed rows per supervised token": pairs["rows_per_supervised_token"],
        "GRPO: reward, mean of first and last 10 steps": f"{rewarded[:10].mean():.3f}, {rewarded[-10:].mean():.3f}",
        "GRPO: routed rows per supervised token": summary["GRPO"]["rows_per_supervised_token"],
        "Transformers' logits differ by": f"{difference:.1e}",
        "report": report,
        "runs": f"{folder}, {folder / 'dpo'}, {folder / 'grpo'}",
        "checkpoint": summary["GRPO"]["checkpoint"],
        "Hugging Face folder": folder / "grpo" / EXPORT,
        "seconds in all": seconds,
    }
    again = f'moekit generate --model {folder / "grpo"} --prompt "Spell this word backward (example: sun -> nus): moe"'
    return "\n".join([*lines, "", table(facts), "", f"ask it: {again}"])
