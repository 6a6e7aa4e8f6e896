"""AdamW on flat masters, the learning-rate schedule, and clipping. The update rule itself is torch's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..config import LearnerConfig
from .gradients import Bucket, Gradients


def learning_rate(step: int, c: LearnerConfig) -> float:
    """The rate of optimizer step `step` (0 for the first): linear warm-up, then the schedule.

    >>> c = LearnerConfig(lr=1.0, warmup_steps=2, schedule="linear", total_steps=6)
    >>> [round(learning_rate(s, c), 3) for s in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if step < c.warmup_steps:
        return c.lr * (step + 1) / c.warmup_steps
    if c.schedule == "constant":
        return c.lr
    assert c.total_steps is not None
    done = min(1.0, (step - c.warmup_steps) / max(1, c.total_steps - c.warmup_steps))
    shape = 1.0 - done if c.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return c.lr * (c.min_lr_ratio + (1.0 - c.min_lr_ratio) * shape)


class FlatAdamW:
    """torch.optim.AdamW over the buckets' masters: masters and moments are flat and in the accumulator's dtype."""

    def __init__(self, gradients: Gradients, config: LearnerConfig):
        self.config, self.gradients = config, gradients
        self.masters: list[tuple[Bucket, Tensor]] = []
        groups = []
        for bucket in gradients.buckets:
            master = torch.nn.Parameter(bucket.master, requires_grad=True)  # shares storage
            master.grad = bucket.grad
            self.masters.append((bucket, master))
            groups.append({"params": [master], "weight_decay": config.weight_decay if bucket.decay else 0.0})
        self.adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        self.lr = 0.0

    def step(self, index: int, norm: float) -> bool:
        """Clip, update masters and moments, refresh the parameters. Returns whether clipping was active.

        Args:
            index: number of committed steps so far; sets the learning rate.
            norm: global gradient norm before clipping.
        """
        limit = math.inf if self.config.clip_norm is None else self.config.clip_norm
        clip = norm > limit
        if clip:
            for bucket in self.gradients.buckets:
                bucket.grad.mul_(limit / norm)
        self.lr = learning_rate(index, self.config)
        for group in self.adamw.param_groups:
            group["lr"] = self.lr
        self.adamw.step()
        for bucket in self.gradients.buckets:
            bucket.refresh()
        return clip

    def state(self) -> dict[str, Tensor]:
        """Masters and moments as parameter-shaped views: ``NAME.master``, ``NAME.exp_avg``, ``NAME.exp_avg_sq``."""
        out = {}
        for bucket, master in self.masters:
            moments = self.adamw.state.get(master, {})
            for span in bucket.spans:
                out[f"{span.name}.master"] = bucket.view(bucket.master, span)
                for key in ("exp_avg", "exp_avg_sq"):
                    if key in moments:
                        out[f"{span.name}.{key}"] = bucket.view(moments[key], span)
        return out

    def load(self, read, updates: int) -> None:
        """Fill masters and moments. `read(name) -> Tensor` gives each entry of `state`; `updates` = AdamW's count."""
        for bucket, master in self.masters:
            if updates:
                self.adamw.state[master] = {
                    "step": torch.tensor(float(updates), device=master.device),
                    "exp_avg": torch.zeros_like(bucket.master),
                    "exp_avg_sq": torch.zeros_like(bucket.master),
                }
            for span in bucket.spans:
                bucket.view(bucket.master, span).copy_(read(f"{span.name}.master"))
                if updates:
                    for key in ("exp_avg", "exp_avg_sq"):
                        bucket.view(self.adamw.state[master][key], span).copy_(read(f"{span.name}.{key}"))
            bucket.refresh()
