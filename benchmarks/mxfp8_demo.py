"""The demo's fine-tune in MXFP8 against bfloat16: its data, model, schedule and all its steps, in one process.

    python benchmarks/mxfp8_demo.py runs/mxfp8_demo --seed 0 --precision model      one run
    python benchmarks/mxfp8_demo.py runs/mxfp8_demo                                 the table of the runs that are there

Parameters are bfloat16, masters and moments float32 in both; a seed draws the weights and the order of rows. A final
loss is the mean of the last 20 steps.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from moekit.data.chat import load_tokenizer
from moekit.learner.weights import export
from moekit.model.presets import preset
from moekit.model.transformer import Transformer
from moekit.recipes import demo, sft

LAST = 20
# bfloat16 parameters; with MXFP8 experts; two controls, which round elsewhere: float32 parameters, and bfloat16 ones
# with each step's rows cut in two (the same mathematics)
RUNS = ("model", "mxfp8", "float32", "cut")


def run(folder: Path, seed: int, precision: str, steps: int) -> None:
    """One fine-tune; data and tokenizer are made once, the initial weights for every run."""
    if not (folder / "tokenizer").exists():
        demo._make_data(folder)
    tokenizer = load_tokenizer(folder / "tokenizer")
    shape = replace(preset("demo"), vocab=len(tokenizer), bos_id=tokenizer.bos_token_id,
                    eos_id=tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id)  # fmt: skip
    initial = folder / f"initial_{seed}"
    export(Transformer(shape, seed=seed), initial, folder / "tokenizer", overwrite=True)
    base = demo._config(folder, steps)
    if precision == "cut":
        base = replace(base, microbatch_rows=base.microbatch_rows // 2)
    dtype = "float32" if precision == "float32" else "bfloat16"
    learner = replace(base.learner, precision="mxfp8" if precision == "mxfp8" else "model")
    out = str(folder / f"{precision}_{seed}")
    sft.train(replace(base, model=str(initial), out=out, dtype=dtype, seed=seed, export=False, save_every=None,
                      rows=replace(base.rows, seed=seed), learner=learner, overwrite=True))  # fmt: skip


def final(path: Path) -> tuple[int, float, float]:
    """Steps, final loss, median seconds of a step."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss/sft" in line]
    seconds = sorted(line["time/step_s"] for line in lines)
    return len(lines), sum(line["loss/sft"] for line in lines[-LAST:]) / LAST, seconds[len(seconds) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", choices=RUNS)
    parser.add_argument("--steps", type=int, default=demo.STEPS)
    args = parser.parse_args()
    if args.precision:
        torch.set_num_threads(1)
        return run(args.folder, args.seed, args.precision, args.steps)
    print("seed  run      steps  final loss  to bfloat16  seconds a step")
    for seed in range(100):
        found = {p: final(args.folder / f"{p}_{seed}") for p in RUNS if (args.folder / f"{p}_{seed}").is_dir()}
        for precision, (steps, loss, seconds) in found.items():
            ratio = loss / found["model"][1] if "model" in found else float("nan")
            print(f"{seed:4d}  {precision:<7}  {steps:5d}  {loss:10.4f}  {ratio:11.3f}  {seconds:14.2f}")


if __name__ == "__main__":
    main()
