"""Serving costs of the embedded engine by request batch size: `serving_costs` on random weights, shapes A and B.

    python benchmarks/serving.py
    python benchmarks/serving.py --shapes B --figure costs.png

A line of JSON for each shape and batch size. Prompts of 64 random tokens, answers of 8 to 64 tokens, evenly spread.
"""

import argparse
import json
from pathlib import Path

import torch

from moekit.config import ModelConfig
from moekit.model.transformer import Transformer
from moekit.rollout.embedded import EmbeddedEngine
from moekit.rollout.serving_costs import serving_costs

SHAPES = {
    "A": ModelConfig(vocab=4096, width=256, layers=4, heads=4, kv_heads=4, experts=16, top_k=4, expert_width=128,
                     qk_norm="full", max_positions=2048),
    "B": ModelConfig(vocab=8192, width=512, layers=8, heads=8, kv_heads=8, experts=64, top_k=8, expert_width=256,
                     qk_norm="full", max_positions=2048),
}  # fmt: skip
COLUMNS = ("tokens_per_s", "decode_step_s", "rows_per_expert", "rows_per_expert_max", "expert_imbalance",
           "below_crossover", "route_bytes_per_token", "idle_slots")  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shapes", nargs="+", default=["A", "B"], choices=SHAPES)
    p.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 64, 128])
    p.add_argument("--dtype", default="float32")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--figure", type=Path, help="a PNG of the last shape")
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    for shape in args.shapes:
        engine = EmbeddedEngine(Transformer(SHAPES[shape]), dtype=args.dtype, slots=max(args.batches), ahead=8192)
        costs = serving_costs(engine, args.batches)
        for batch, row in costs.to_dict("index").items():
            told = {
                n: round(v, 5) for n, v in row.items() if n.removesuffix("_decode").removesuffix("_prefill") in COLUMNS
            }
            print(json.dumps({"shape": shape, "batch": batch, "dtype": args.dtype, "threads": args.threads} | told))
        if args.figure:
            from moekit.viz import static
            from moekit.viz.serving import costs_by_batch

            words = f"Shape {shape}, {args.dtype}, prompts of 64 tokens, answers of 8 to 64"
            args.figure.write_bytes(static.render(costs_by_batch(costs, subtitle=words)))


if __name__ == "__main__":
    main()
