"""`moekit demo`: a tiny mixture of experts learns to spell backward on two processes, and everything is shown.

From nothing: chats are made from reasoning-gym tasks and joined with our own small chat file, a tokenizer is trained,
random weights are written as a Hugging Face folder (initial/), fine-tuned by the same recipe and launcher that any run
takes, and exported. Held-out questions, none of which was trained on, are answered before and after. The export is
loaded by Transformers, which must give the same logits. Everything is in the run folder."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from ..config import DataConfig, Denominator, LearnerConfig, RouterLossConfig, SFTConfig
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
from .evaluate import evaluate
from .job import follow, table
from .setup import EXPORT
from .sft import train

MARK = "demo.json"  # what only a demo leaves: the folder may be made anew
STEPS = 500  # about 70 s on two cores
HELD_OUT = 50  # questions of each task
TASKS: dict[str, dict[str, Any]] = {  # name -> how many to train on, and the task's own settings
    "spell_backward": {"size": 9000, "min_word_len": 3, "max_word_len": 5},
    "word_sequence_reversal": {"size": 4000, "min_words": 2, "max_words": 2},
}


def demo(out: str | Path = "runs/demo", *, nproc: int = 2, steps: int | None = None) -> dict[str, Any]:
    """Run the demo and print what happens.
    Args:
        out: run folder; made anew if an earlier demo made it, refused if it holds anything else.
        nproc: processes.
        steps: optimizer steps; None = `STEPS`.
    Returns: `scores` (task -> (before, after), shares of held-out questions answered right), `summary` of the run,
        `report`, and `transformers`: the largest difference between its logits and ours.
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

    say("1/6 chats from reasoning-gym tasks and our own file, and a tokenizer")
    held_out = _make_data(folder)
    tokenizer = load_tokenizer(folder / "tokenizer")
    shape = replace(preset("demo"), vocab=len(tokenizer), bos_id=tokenizer.bos_token_id,
                    eos_id=tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id)  # fmt: skip
    count = parameter_counts(shape)
    say(f"2/6 a random mixture of experts: {shape.layers} layers, {shape.experts} experts, {shape.top_k} for a token, "
        f"{count['total']:,} parameters, {count['active']:,} active")  # fmt: skip
    model = Transformer(shape, seed=0)
    export(model, folder / "initial", folder / "tokenizer", overwrite=True)
    before = evaluate(model, tokenizer, held_out, max_new_tokens=24)

    say(f"3/6 fine-tuning on {nproc} processes, {steps} steps")
    config = _config(folder, steps)
    job = submit(train, config, nproc=nproc, name=folder.resolve().name, runs=folder.resolve().parent, overwrite=True,
                 malloc="keep", device="cpu")  # fmt: skip
    try:
        follow(job, steps)
        summary = job.result()[0]
    except KeyboardInterrupt:
        job.stop()
        raise

    say("4/6 held-out questions, and Transformers on the export")
    model = load(folder / EXPORT)
    after = evaluate(model, tokenizer, held_out, max_new_tokens=24)
    difference = check_transformers(folder / EXPORT, model, tokenizer, held_out[0]["messages"][:1])
    say("5/6 one batch under every denominator")
    write_atomic(folder / READINGS, json.dumps(denominators(model, config, tokenizer)).encode())
    say("6/6 the report")
    scores = {"all tasks": (before["exact"], after["exact"])}
    scores |= {name: (t["exact"], after["tasks"][name]["exact"]) for name, t in before["tasks"].items()}
    _write_results(folder, scores, difference, after)
    report = write_report(folder, scores=scores)
    print(_told(folder, scores, summary, after, difference, report, time.monotonic() - began))
    return {"scores": scores, "summary": summary, "report": str(report), "transformers": difference}


def _make_room(folder: Path) -> None:
    """Remove an earlier demo, and nothing else."""
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / MARK).exists():
            raise RunExistsError(f"{folder} exists and no demo made it; nothing was touched, give another --out")
        if (folder / "state.json").exists() and not attach(folder).done:
            raise RunExistsError(f"a demo is still going in {folder}; wait, or use moekit.attach(folder).stop()")
        shutil.rmtree(folder)
    write_atomic(folder / MARK, b"{}\n")


def _make_data(folder: Path) -> list[dict[str, Any]]:
    """data/train.jsonl, data/held_out.jsonl and tokenizer/; returns the held-out items."""
    chats = [{"messages": e.messages} for e in load_examples(CHATS)]
    held_out = []
    for name, settings in TASKS.items():
        chats += [{"messages": item["messages"]} for item in tasks.make_task(name, "train", **settings)]
        held_out += tasks.make_task(name, "heldout", **{**settings, "size": HELD_OUT, "seed": 1})
    for name, items in {"train": chats, "held_out": held_out}.items():
        lines = [json.dumps(item, default=str) for item in items]
        write_atomic(folder / "data" / f"{name}.jsonl", "\n".join([*lines, ""]).encode())
    # Only what a fifth of all questions repeats becomes one token; words that are to be spelled stay letters.
    texts = [m["content"] for chat in chats for m in chat["messages"]]
    train_tokenizer(texts, 512, folder / "tokenizer", min_frequency=len(chats) // 5)
    return held_out


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
    folder: Path, scores: dict[str, tuple[float, float]], difference: float, after: dict[str, Any]
) -> None:
    """Scores into the run card; every answer into results/held_out.json."""
    card = open_run(folder).card
    assert card is not None
    results = {**card.results, "scores": scores, "relative difference of Transformers' logits": difference}
    with RunWriter(folder, resume=1 << 60, rank=0) as writer:
        writer.card(replace(card, results=results))
    write_atomic(folder / "results" / "held_out.json", json.dumps(after, indent=1).encode())


def _told(folder: Path, scores: dict[str, tuple[float, float]], summary: dict[str, Any], after: dict[str, Any],
          difference: float, report: Path, seconds: float) -> str:  # fmt: skip
    width = max(map(len, scores))
    lines = ["", f"{'held-out questions answered right':<{width + 12}}before   after"]
    lines += [f"  {name:<{width + 10}}{a:>6.0%}  {b:>6.0%}" for name, (a, b) in scores.items()]
    said = (f"  {a['question'].splitlines()[-1]}  ->  {a['answer']}" for a in after["answers"][:: HELD_OUT // 2])
    lines += ["", "for example", *said]
    loss = open_run(folder).metrics["loss/sft"]
    facts = {
        "loss, mean of first and last 10 steps": f"{loss[:10].mean():.3f}, {loss[-10:].mean():.3f}",
        "supervised tokens": summary["supervised_tokens"],
        "supervised tokens/s": summary["supervised_tokens_s"],
        "routed rows": summary["rows_dispatched"],
        "routed rows per supervised token": summary["rows_per_supervised_token"],
        "Transformers' logits differ by": f"{difference:.1e}",
        "report": report,
        "checkpoint": summary["checkpoint"],
        "Hugging Face folder": folder / EXPORT,
        "seconds in all": seconds,
    }
    again = f'moekit generate --model {folder} --prompt "Spell this word backward (example: sun -> nus): moe"'
    return "\n".join([*lines, "", table(facts), "", f"ask it: {again}"])
