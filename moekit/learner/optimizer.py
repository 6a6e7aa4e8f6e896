"""AdamW on flat masters, the learning-rate schedule, and clipping. The update rule itself is torch's."""

import math

import torch
from torch import Tensor

from ..checkpoint.intervals import Piece
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


KINDS = ("master", "exp_avg", "exp_avg_sq")


class FlatAdamW:
    """torch.optim.AdamW over the buckets' masters: flat, in the accumulator's dtype, and only what this rank owns."""

    def __init__(self, gradients: Gradients, config: LearnerConfig):
        self.config, self.gradients = config, gradients
        self.masters: list[tuple[Bucket, torch.nn.Parameter]] = []
        groups = []
        for bucket in gradients.buckets:
            master = torch.nn.Parameter(bucket.master, requires_grad=True)  # shares storage
            self.masters.append((bucket, master))
            groups.append({"params": [master], "weight_decay": config.weight_decay if bucket.family.decay else 0.0})
        groups = groups or [{"params": []}]  # of a stage without anything to train
        self.adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        self.lr = 0.0

    def step(self, index: int, norm: float) -> bool:
        """Clip, update masters and moments, refresh the parameters everywhere. Returns whether clipping was active.

        Args:
            index: number of committed steps so far; sets the learning rate.
            norm: global gradient norm before clipping.
        """
        limit = math.inf if self.config.clip_norm is None else self.config.clip_norm
        clip = norm > limit
        self.lr = learning_rate(index, self.config)
        for group in self.adamw.param_groups:
            group["lr"] = self.lr
        for bucket, master in self.masters:
            assert bucket.owned_grad is not None
            master.grad = bucket.owned_grad.mul_(limit / norm) if clip else bucket.owned_grad
        self.adamw.step()
        for bucket, master in self.masters:
            master.grad = None
            bucket.refresh()
        return clip

    def state(self, updates: int) -> dict[str, list[tuple[Piece, Tensor]]]:
        """What this rank owns of masters and moments, by kind: pieces of parameters with their flat values (views)."""
        out: dict[str, list[tuple[Piece, Tensor]]] = {kind: [] for kind in (KINDS if updates else KINDS[:1])}
        owned = self.gradients.owned()
        for bucket, master in self.masters:
            if any(bucket is b for b in owned):
                for kind, pieces in out.items():
                    flat = bucket.master if kind == "master" else self.adamw.state[master][kind]
                    pieces.extend(bucket.pieces(flat))
        held = self.gradients.held(owned=True)  # a frozen parameter is its own master
        out["master"] += [(piece, t.to(torch.promote_types(t.dtype, torch.float32))) for piece, t in held]
        return out

    def wanted(self, updates: int) -> dict[str, list[tuple[Piece, Tensor]]]:
        """Everything that this rank keeps of masters and moments, to be filled; then call `refresh`.

        Args:
            updates: AdamW's step count; 0 = there are no moments yet.
        """
        out: dict[str, list[tuple[Piece, Tensor]]] = {kind: [] for kind in (KINDS if updates else KINDS[:1])}
        self.adamw.state.clear()
        for bucket, master in self.masters:
            if updates:
                self.adamw.state[master] = {
                    "step": torch.tensor(float(updates), device=master.device),
                    "exp_avg": torch.zeros_like(bucket.master),
                    "exp_avg_sq": torch.zeros_like(bucket.master),
                }
            for kind, pieces in out.items():
                flat = bucket.master if kind == "master" else self.adamw.state[master][kind]
                low, high = (0, bucket.param.shape[0]) if bucket.zero == 0 else (bucket.start, bucket.stop)
                pieces.extend(bucket.cover(flat, low, high))
        return out

    def refresh(self) -> None:
        """Parameters from masters, on all ranks."""
        for bucket in self.gradients.buckets:
            bucket.refresh()
