"""Log-probabilities of labels with torch, a chunk of logits at a time, and a backward written by hand.

Axis letters: M scored positions, D model width, V vocabulary.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def token_logprobs(
    hidden_MD: Tensor, head_VD: Tensor, label_M: Tensor, *, temperature: float, chunk_bytes: int
) -> Tensor:
    """See `moekit.objectives.logprobs.token_logprobs`."""
    return _TokenLogprobs.apply(hidden_MD, head_VD, label_M, temperature, chunk_bytes)  # type: ignore[no-any-return]


def _logits(hidden: Tensor, head: Tensor, temperature: float, kind: torch.dtype) -> Tensor:
    z = torch.mm(hidden, head.t()).to(kind)
    return z if temperature == 1.0 else z / temperature


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, label, temperature, chunk_bytes):
        kind = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        rows = max(1, chunk_bytes // (head.shape[0] * kind.itemsize))
        wants = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        keep = wants and hidden.shape[0] <= rows
        out = torch.empty(hidden.shape[0], dtype=kind, device=hidden.device)
        lse, prob = torch.empty_like(out), None
        for a in range(0, hidden.shape[0], rows):
            part = slice(a, a + rows)
            z = _logits(hidden[part], head, temperature, kind)
            torch.logsumexp(z, 1, out=lse[part])
            out[part] = z.gather(1, label[part, None])[:, 0] - lse[part]
            if keep:
                prob = z.sub_(lse[part, None]).exp_()
        ctx.save_for_backward(hidden, head, label, lse, prob)
        ctx.temperature, ctx.rows = temperature, rows
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, head, label, lse, prob = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_head = None
        for a in range(0, hidden.shape[0], ctx.rows):
            part = slice(a, a + ctx.rows)
            p = prob
            if p is None:
                p = _logits(hidden[part], head, ctx.temperature, lse.dtype).sub_(lse[part, None]).exp_()
            g = grad[part, None] / ctx.temperature
            dz = p * -g
            dz.scatter_add_(1, label[part, None], g)
            dz = dz.to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(dz, head, out=d_hidden[part])
            if ctx.needs_input_grad[1]:
                piece = torch.mm(dz.t(), hidden[part])
                # chunks add up in float32 at least: in bfloat16 the head's error grows with their number
                d_head = piece if d_head is None else d_head.to(lse.dtype).add_(piece)
        if ctx.needs_input_grad[1]:
            d_head = torch.zeros_like(head) if d_head is None else d_head.to(head.dtype)
        return d_hidden, d_head, None, None, None
