"""`moekit ...`: the recipes from a shell. A thin layer; everything it does is a function that a notebook can call.

Exit status: 0 fine; 2 bad usage or bad input, said in one line; 1 a job that failed on its way, or layouts that
differ; 130 interrupted.

Each command's help ends with what stands below under its name.

== moekit
examples:
  moekit demo                                           a few minutes that show everything
  moekit sft --model path/to/olmoe --data chats.jsonl --nproc 2 --out runs/first
  moekit generate --model runs/first --prompt "What is 3 + 4?"

`moekit COMMAND --help` explains each. A line of chats.jsonl is {"messages": [{"role": "user", "content": "..."},
{"role": "assistant", "content": "..."}]}; {"prompt": "...", "completion": "..."} works as well.

== sft
examples:
  moekit sft --model path/to/olmoe --data chats.jsonl --nproc 2 --out runs/first
  moekit sft --model path/to/olmoe --data chats.jsonl --nproc 2 --out runs/first --steps 200 --resume
  moekit sft --model tiny --tokenizer path/to/tokenizer --data chats.jsonl --steps 20     a small random model
  moekit sft --model path/to/olmoe --data chats.jsonl --backend slurm --nodes 2 --nproc 4 --slurm partition=gpu

Everything about the run is in its folder: metrics.jsonl, logs/, checkpoints/, export/ (a Hugging Face folder),
card.html (what a comparison must state). `moekit report RUN` draws it; moekit.open_run(RUN) reads it in a notebook.

== dpo
examples:
  moekit dpo --model runs/first/export --data pairs.jsonl --nproc 2 --out runs/dpo
  moekit dpo --model runs/first/export --data pairs.jsonl --reference resident --kind ipo --no-share-prompt

A line of pairs.jsonl is {"prompt": "...", "chosen": "...", "rejected": "..."}; each may be a list of messages.

== reward-model
example:
  moekit reward-model --model runs/first/export --data pairs.jsonl --out runs/reward

== grpo
examples:
  moekit grpo --model runs/first/export --data spell_backward --nproc 2 --out runs/grpo
  moekit grpo --model runs/first/export --data questions.jsonl --verifier math --epochs 2 --importance-cap 2

== ppo
examples:
  moekit ppo --model runs/first/export --data spell_backward --nproc 2 --out runs/ppo
  moekit ppo --model runs/first/export --data spell_backward --critic runs/reward/checkpoints/step_100

== generate
examples:
  moekit generate --model runs/first --prompt "What is 3 + 4?" --max-new-tokens 32
  moekit generate --model path/to/olmoe --data questions.jsonl --json --temperature 0.8 --seed 1

== evaluate
examples:
  moekit evaluate --model runs/first --data held_out.jsonl
  moekit evaluate --model runs/first --task spell_backward --items 50
"""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, get_args

from . import __version__
from .config import Dtype, LearnerConfig, Recompute, Zero
from .errors import ConfigError, JobError, MoekitError
from .recipes.options import COMMANDS, add_options, read

_EPILOGS = dict(part.split("\n", 1) for part in (__doc__ or "").split("\n== ")[1:])


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Examples as they are written, and the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default is argparse.SUPPRESS:
            return action.help
        return super()._get_help_string(action)


def parser() -> argparse.ArgumentParser:
    """All commands and options."""
    whole = argparse.ArgumentParser(
        "moekit", description="Post-training of sparse mixture-of-experts language models.", formatter_class=_Help,
        epilog=_EPILOGS.get("moekit"),
    )  # fmt: skip
    whole.add_argument("--version", action="version", version=f"moekit {__version__}")
    commands = whole.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[..., int | None], short: str, use: str) -> Any:
        p = commands.add_parser(
            name, help=short, description=f"{short[:1].upper()}{short[1:]}.", formatter_class=_Help,
            usage=f"moekit {name} {use}", epilog=_EPILOGS.get(name),
        )  # fmt: skip
        p.add_argument("--debug", action="store_true", help="show the traceback of an error")
        p.set_defaults(run=run)
        return p

    for train in COMMANDS.values():
        use = "--model MODEL --data DATA [--out RUN] [--nproc N] [options]"
        add_options(command(train.name, _train, train.short, use), train)
    p = command("generate", _generate, "let a model answer", "--model MODEL --prompt TEXT [options]")
    g = _answer_options(p, "prompts", 128)
    g.add_argument("--prompt", action="append", default=[], help="a user's message; may be given several times")
    g.add_argument("--data", help="chats to answer, as for `moekit sft`; their last answer is left out")
    g.add_argument("--system", help="a system message to begin with")
    g.add_argument("--json", action="store_true", help="one JSON object a line: messages and answer")
    p = command("evaluate", _evaluate, "score a model on held-out chats",
                "--model MODEL (--data DATA | --task TASK) [options]")  # fmt: skip
    g = _answer_options(p, "questions", 64)
    g.add_argument("--data", help="held-out chats, as for `moekit sft`; the last answer of each is the right one")
    g.add_argument("--task", help="held-out questions of a reasoning-gym task instead")
    g.add_argument("--items", type=int, help="at most so many (default: all of --data, 100 of --task)")
    g.add_argument("--show", type=int, default=3, help="answers to print")
    g.add_argument("--json", action="store_true", help="everything as one JSON object")
    p = command("report", _report, "draw a run as one HTML page in its folder", "RUN [--interactive]")
    p.add_argument("run_folder", metavar="RUN", help="a run folder, such as runs/first")
    p.add_argument("--interactive", action="store_true", help="figures that zoom; the page grows by 5 MB")
    p = command("checkpoint", _checkpoint, "say what a checkpoint holds, or check every byte of it", "show|verify PATH")
    p.add_argument("what", choices=("show", "verify"), help="a table, or a comparison with the checksums")
    p.add_argument("path", metavar="PATH", help="a checkpoint, or a folder with some: the newest is taken")
    p = command("doctor", _doctor, "say what this machine has and what will run on it", "[--runs RUNS]")
    p.add_argument("--runs", default="runs", help="the folder of the runs to list")
    p = command("layouts", _layouts, "list the layouts that a model and a number of processes allow, with predicted "
                "memory and wire bytes", "--world N --model MODEL [options]")  # fmt: skip
    p.add_argument("--world", type=int, required=True, help="processes, on all nodes together")
    p.add_argument("--model", required=True, help="a Hugging Face folder (its config.json is read), or a preset")
    p.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16", help="of the weights")
    p.add_argument("--zero", type=int, choices=get_args(Zero), default=2, help="as for `moekit sft`")
    p.add_argument("--precision", choices=("model", "mxfp8"), default="model", help="of the routed experts' matmuls")
    p.add_argument("--recompute", choices=get_args(Recompute), default="none", help="activations given up")
    p.add_argument("--length", type=int, help="tokens of a row (default: 4096, or the model's longest if less)")
    p.add_argument("--microbatch-rows", type=int, default=1, help="rows of one forward pass of a process")
    p.add_argument("--batch-rows", type=int, help="rows of one step (default: one microbatch for each process)")
    p.add_argument("--json", action="store_true", help="the table as JSON, in bytes")
    p = command("check-layouts", _check_layouts, "prove that every layout gives one gradient, of a tiny model or "
                "of your own weights and rows", "[--model MODEL [--data DATA]] [--world 2,4] [options]")  # fmt: skip
    p.add_argument("--model", help="a Hugging Face folder, or a preset (default: a tiny model made for this)")
    p.add_argument("--data", help="chats, as for `moekit sft`: the first rows are used, cut short")
    says = "numbers of processes (default: 2,4,8 if memory allows)"
    p.add_argument("--world", type=_counts, metavar="N,N", help=says)
    p.add_argument("--dtype", choices=("float64", "float32"), default="float64", help="of weights and arithmetic")
    p.add_argument("--steps", type=int, default=3, help="optimizer steps")
    p.add_argument("--figure", metavar="PATH.html", help="draw differences and bytes on the wire into a page")
    p.add_argument("--json", action="store_true", help="the table as JSON")
    p = command("demo", _demo, "a tiny mixture of experts on two processes: SFT, DPO, GRPO; under five minutes",
                "[--out RUN] [--nproc N] [--steps N]")  # fmt: skip
    p.add_argument("--out", default="runs/demo", help="run folder; one that an earlier demo made is replaced")
    p.add_argument("--nproc", type=int, default=2, help="processes")
    p.add_argument("--steps", type=int, default=None, help="of fine-tuning; the most of the others (default: 400)")
    return whole


def _answer_options(p: argparse.ArgumentParser, title: str, most: int) -> Any:
    """What all commands that let a model answer share; returns the group `title`, for what is to be answered."""
    g = p.add_argument_group("model")
    g.add_argument("--model", required=True, help="a Hugging Face folder, a checkpoint, or a run folder")
    g.add_argument("--tokenizer", help="a tokenizer folder with a chat template (default: the model's)")
    g.add_argument("--dtype", choices=get_args(Dtype), help="of the weights (default: as stored)")
    g.add_argument("--device", default="cpu", help="where to compute: cpu, cuda, cuda:1, ...")
    asked, g = p.add_argument_group(title), p.add_argument_group("answers")
    g.add_argument("--max-new-tokens", type=int, default=most, help="the most tokens of an answer")
    g.add_argument("--temperature", type=float, default=0.0, help="0 = always the most likely token")
    g.add_argument("--seed", type=int, default=0, help="of the sampling")
    g.add_argument("--batch", type=int, default=32, help="prompts answered together")
    return asked


def _train(o: argparse.Namespace) -> None:
    from .recipes import options
    from .recipes.job import run_job, run_rank, table

    command = options.COMMANDS[o.command]
    config = options.run_config(command, o)
    if "TORCHELASTIC_RUN_ID" in os.environ and "MOEKIT_RUN_FOLDER" not in os.environ:  # torchrun ... -m moekit.cli sft
        summary = run_rank(command.train, config, o.out, threads=o.threads, device=o.device)
        if os.environ["RANK"] == "0":
            print(table(summary))
        return
    pairs = [text.partition("=") for text in o.slurm]
    slurm = {key.replace("-", "_"): {"": not equals, "False": False}.get(value, value) for key, equals, value in pairs}
    summary, job = run_job(command.train, config, out=o.out, nproc=o.nproc, threads=o.threads, device=o.device,
                           detach=o.detach, backend=o.backend, nodes=o.nodes, slurm=slurm)  # fmt: skip
    if summary is None:
        told = job.reason or f"started {job.folder}"
        print(f"{told}; moekit.attach({str(job.folder)!r}) follows, stops or reads it")
    else:
        print(table(summary))


def _generate(o: argparse.Namespace) -> None:
    from .recipes.evaluate import generate, open_model, read_items

    if not o.prompt and not o.data:
        raise ConfigError("nothing to answer: give --prompt or --data")
    chats: list[list[dict[str, Any]]] = [[{"role": "user", "content": p}] for p in o.prompt]
    for item in read_items(o.data) if o.data else []:
        messages = item["messages"]
        chats.append(messages[:-1] if messages[-1]["role"] == "assistant" else messages)
    model, tokenizer = open_model(o.model, o.tokenizer, dtype=o.dtype, device=o.device)
    answers = generate(
        model, tokenizer, chats, system=o.system, max_new_tokens=o.max_new_tokens, temperature=o.temperature,
        seed=o.seed, batch=o.batch,
    )  # fmt: skip
    for chat, answer in zip(chats, answers):
        if o.json:
            print(json.dumps({"messages": chat, "answer": answer}, ensure_ascii=False))
        elif len(chats) == 1:
            print(answer)
        else:
            print(f"> {chat[-1]['content']}\n{answer}\n")


def _evaluate(o: argparse.Namespace) -> None:
    from .data.tasks import make_task
    from .recipes.evaluate import evaluate, open_model, read_items
    from .recipes.job import table

    if bool(o.data) == bool(o.task):
        raise ConfigError("give either --data, a file of held-out chats, or --task, the name of a task")
    items = read_items(o.data)[: o.items] if o.data else make_task(o.task, "heldout", o.items or 100)
    model, tokenizer = open_model(o.model, o.tokenizer, dtype=o.dtype, device=o.device)
    with _progress(len(items), "answered") as progress:
        found = evaluate(
            model, tokenizer, items, max_new_tokens=o.max_new_tokens, temperature=o.temperature, seed=o.seed,
            batch=o.batch, told=lambda done, total: progress.update(done),
        )  # fmt: skip
    if o.json:
        print(json.dumps(found, ensure_ascii=False))
        return
    for a in found["answers"][: o.show]:
        print(f"> {a['question']}\n{a['answer']}\n  wanted: {a['wanted']}  score: {a['score']:g}\n")
    told = {"items": found["items"], "right": f"{found['exact']:.1%}", "mean score": f"{found['score']:.3f}"}
    if len(found["tasks"]) > 1:
        told |= {f"  {name}": f"{t['exact']:.1%} of {t['items']} right" for name, t in found["tasks"].items()}
    print(table(told))


def _report(o: argparse.Namespace) -> None:
    from .viz.report import write_report

    print(write_report(o.run_folder, interactive=o.interactive))


def _checkpoint(o: argparse.Namespace) -> None:
    from .checkpoint.load import show, verify

    print((show if o.what == "show" else verify)(o.path))


def _doctor(o: argparse.Namespace) -> int:
    from .doctor import report

    found = report(o.runs)
    print(found)
    return found.exit_code


def _layouts(o: argparse.Namespace) -> None:
    from .learner.layouts import layout_table, render
    from .recipes.setup import DTYPES, model_shape

    table = layout_table(
        model_shape(o.model), o.world, dtype=DTYPES[o.dtype], microbatch_rows=o.microbatch_rows, length=o.length,
        config=read(LearnerConfig, o), batch_rows=o.batch_rows,
    )  # fmt: skip
    print(json.dumps(table) if o.json else render(table))


def _check_layouts(o: argparse.Namespace) -> int:
    from .recipes.layouts import check_layouts

    with _progress(None, "layouts") as line:
        report = check_layouts(
            o.model, o.data, world_sizes=o.world, dtype=o.dtype, steps=o.steps,
            told=lambda done, total, name: line.update(done, of=total, last=name),
        )  # fmt: skip
    if o.figure:
        report.figure().write_html(o.figure)
    print(json.dumps(report.to_dict()) if o.json else report.text())
    return 0 if report.verdict else 1


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _demo(o: argparse.Namespace) -> None:
    from .recipes.demo import demo

    demo(o.out, nproc=o.nproc, steps=o.steps)


def _progress(total: int | None, label: str) -> Any:
    from .viz.progress import Progress

    return Progress(total, label, stream=sys.stderr, mode="terminal" if sys.stderr.isatty() else "log")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status (bad usage exits with 2 from argparse)."""
    for name in ("TRANSFORMERS_VERBOSITY", "HF_DATASETS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    options = parser().parse_args(arguments)
    try:
        return options.run(options) or 0
    except KeyboardInterrupt:
        print("\nmoekit: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `moekit ... | head`: nobody reads on, which is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MoekitError as error:
        if options.debug:
            traceback.print_exc()
        lines = str(error).splitlines() or [type(error).__name__]
        print(f"moekit: error: {lines[0] if not options.debug else error}", file=sys.stderr)
        if isinstance(error, JobError) and len(lines) > 1 and not options.debug:
            print(f"moekit: {lines[-1]} (--debug shows the traceback)", file=sys.stderr)
        return 1 if isinstance(error, JobError) else 2


if __name__ == "__main__":
    sys.exit(main())
