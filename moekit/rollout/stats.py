"""What an engine did: tokens, seconds, slots, and how many rows each expert got in each pass.

Loads are added up on the device, one entry for each pass and layer that ran rows, and read by `Stats.metrics` alone.

Axis letters: L layers that route, E experts held here.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..measure.routing import max_over_mean

NAMES = ("rows_per_expert", "expert_imbalance", "below_crossover", "rows_per_expert_max", "route_bytes")


@dataclass
class Loads:
    """Of all passes of one kind: sums over (pass, layer), and the most rows that an expert had in one of them."""

    sums: Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.float64))
    most: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    route_bytes: int = 0  # choices that are kept for answers, and counts that the host reads to run the experts

    def add(self, rows_LE: Tensor, crossover: float) -> None:
        """One pass. Cost: about 15 operations on [L, E] numbers, no host read."""
        rows_LE = rows_LE.double()
        total_L, busy_L = rows_LE.sum(1), (rows_LE > 0).sum(1)
        found = (total_L, busy_L, max_over_mean(rows_LE), busy_L > 0, total_L < crossover * busy_L)  # none: not below
        self.sums = self.sums.to(rows_LE.device) + torch.stack([x.double() for x in found]).sum(1)
        self.most = torch.cat((self.most.to(rows_LE.device).view(1), rows_LE.view(-1))).max()

    def metrics(self, kind: str) -> dict[str, float]:
        """Means over passes and layers that had rows; the host reads here."""
        rows, busy, over, ran, below = self.sums.tolist()
        means = rows / max(busy, 1), over / max(ran, 1), below / max(ran, 1)
        values = (*means, float(self.most), float(self.route_bytes))
        return {f"engine/{name}_{kind}": value for name, value in zip(NAMES, values)}


@dataclass
class Stats:
    """What the engine did since it was last asked; `metrics` in words."""

    prompts_read: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    recomputed_tokens: int = 0  # read again because the weights changed under a running answer
    steps: int = 0
    idle_steps: int = 0  # decoding steps of other ranks, with no row of this one
    slot_steps: int = 0
    slots: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    cache_bytes: int = 0  # of keys and values, the most at one time
    loads: defaultdict[str, Loads] = field(default_factory=lambda: defaultdict(Loads))  # by pass

    def metrics(self) -> dict[str, float]:
        """By moekit's names.

        tokens_per_s: of answers. occupancy: the mean share of slots that a decoding step filled. idle_slots: the share
        that stood empty, steps of other ranks included. By pass (_decode, _prefill, _score), over this process's
        experts: rows_per_expert: mean rows of an expert that has any, in a layer of a pass. rows_per_expert_max: the
        most of one. expert_imbalance: most over mean (`moekit.measure.routing.max_over_mean`), mean over layers and
        passes. below_crossover: share of layers and passes whose mean is under the crossover. route_bytes: routed
        experts kept for answers and prompts, and row counts that the host read to run experts.
        """
        seconds, rounds = self.prefill_seconds + self.decode_seconds, self.steps + self.idle_steps
        return {
            "engine/tokens_per_s": self.answer_tokens / seconds if seconds else 0.0,
            "engine/occupancy": self.slot_steps / (self.steps * self.slots) if self.steps else 0.0,
            "engine/idle_slots": 1 - self.slot_steps / max(1, rounds * self.slots) if rounds else 0.0,
            **{f"engine/{n}": float(v) for n, v in vars(self).items() if n not in ("slots", "slot_steps", "loads")},
            **{name: v for kind, loads in self.loads.items() for name, v in loads.metrics(kind).items()},
        }
