"""Log-probabilities of given tokens from hidden states, without ever holding all logits.

Axis letters: M scored positions, D model width, V vocabulary.
"""

from torch import Tensor

from .. import ops

CHUNK_BYTES = 64 * 2**20  # of float32 logits alive at a time


def token_logprobs(
    hidden_MD: Tensor, head_VD: Tensor, label_M: Tensor, *, temperature: float = 1.0, chunk_bytes: int = CHUNK_BYTES
) -> Tensor:
    r"""Log-probability of each label: :math:`z_{m,y_m} - \log\sum_v e^{z_{mv}}` with :math:`z = h W^\top / \tau`.

    Args:
        hidden_MD: ``[M, D]`` float. Final hidden states of the positions to score.
        head_VD: ``[V, D]`` same dtype. Output embedding.
        label_M: ``[M]`` int64 in ``[0, V)``.
        temperature: tau > 0; divides the logits, as a sampler with that temperature does.
        chunk_bytes: the most that logits may take, forward or backward; rounded up to one row.
    Returns:
        ``[M]`` in float32 (float64 for float64 input).
    Cost:
        One ``M x D x V`` product forward and two backward. When all of M fits in one chunk its probabilities are
        kept; otherwise each chunk's logits are computed again in the backward, one more product. On CUDA in float32
        and bfloat16 logits stay in registers (`moekit.ops.explain()` says so), and are always computed again.
    Gradients:
        To `hidden_MD` and `head_VD`. The log-softmax, its gradient, and the sum of the head's over chunks are in the
        returned dtype.

    >>> import torch
    >>> h, w = torch.tensor([[2.0, 0.0]]), torch.eye(2)
    >>> round(token_logprobs(h, w, torch.tensor([0]), temperature=0.5).item(), 7)
    -0.0181499
    """
    return ops.token_logprobs(hidden_MD, head_VD, label_M, temperature=temperature, chunk_bytes=chunk_bytes)
