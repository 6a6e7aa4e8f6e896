"""What a layout will take, from shapes alone: storage and saved activations of a rank, bytes on its wire in a step.

Storage is exact: it is computed as the learner lays it out, padding included. Activations are what autograd saves
(`measure.memory.saved_bytes` counts the same on a real model), tensor by tensor. Wire bytes assume balanced routing.

Axis letters: N positions of a microbatch, P positions whose expert rows run, M labelled positions, R expert rows,
D width, H query heads, G key/value heads, d head width, E experts, K experts per position, F expert width,
V vocabulary, S documents, L their length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch

from ..config import Elide, LearnerConfig, ModelConfig
from ..data.batch import Flat

ALIGN = 64  # elements: spans of a bucket, and shards of it, start at multiples of this
CHUNK_BYTES = 64 * 2**20  # of logits: more than this is computed again in the backward, not kept
SHORT = 512  # positions: CPU attention in bfloat16 keeps the probabilities of documents up to this long
PAD = 16  # rows: CPU experts in bfloat16 run multiples of this
INDEX = 8  # bytes of an int64


@dataclass(frozen=True)
class Held:
    """One parameter as a rank holds it."""

    name: str
    shape: tuple[int, ...]
    expert: bool = False  # split over ep, replicated over expert_dp; others are replicated over dp
    tied: bool = False  # held by the first and the last pipeline rank

    @property
    def family(self) -> tuple[bool, bool, bool]:
        """Parameters of one family share a bucket: (expert, decayed, tied)."""
        return self.expert, len(self.shape) >= 2, self.tied


@dataclass(frozen=True)
class Bucket:
    """One flat bucket of a rank: its elements, padding included, and the ranks that share it."""

    elements: int
    ranks: int
    tied: bool

    @staticmethod
    def of(held: Iterable[Held], dp: int, ep: int) -> list[Bucket]:
        """The buckets of a rank that holds these parameters: spans at multiples of `ALIGN`, equal shards."""
        sizes: Counter[tuple[bool, bool, bool]] = Counter()
        for h in held:
            sizes[h.family] += _up(prod(h.shape), ALIGN)
        ranks = {True: dp // ep, False: dp}
        return [Bucket(_up(n, ALIGN * ranks[e]), ranks[e], tied) for (e, _, tied), n in sizes.items()]


@dataclass(frozen=True)
class Microbatch:
    """What saved activations and wire bytes depend on, of one microbatch on one rank."""

    positions: int  # N, padding included
    real: int  # not padding
    labels: int  # M
    runs: tuple[tuple[int, int], ...]  # (documents, their length L): neighbours that attention takes together

    @staticmethod
    def of(flat: Flat) -> Microbatch:
        """Of a real one. Children of shared prompts are taken as documents: their copies of keys are not counted."""
        runs = [(r.documents, r.length) for r in flat.runs] + [(1, c.length) for c in flat.children]
        return Microbatch(flat.positions, flat.real, flat.label_index_M.shape[0], tuple(runs))

    @staticmethod
    def full(rows: int, length: int) -> Microbatch:
        """Rows that are one document each, without padding, every position labelled: the most they can take."""
        return Microbatch(rows * length, rows * length, rows * length, ((rows, length),))

    def run(self, elide: Elide, last: bool = False) -> int:
        """P: positions whose expert rows run."""
        if elide == "padding+last_layer" and last:
            return self.labels
        return self.positions if elide == "none" else self.real


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _wide(dtype: torch.dtype) -> int:
    return max(4, dtype.itemsize)


# ------------------------------------------------------------------ storage


def storage_bytes(held: Iterable[Held], config: LearnerConfig, dtype: torch.dtype, dp: int) -> dict[str, int]:
    """Bytes of a rank's buckets, exact, padding included.

    For a bucket of n elements shared by g ranks, b bytes an element and w = max(4, b) wide:

        parameters  n b                                     (the last shards' padding included)
        gradients   n w;  n/g w with reduce="microbatch"
        masters     0 where b = w, else n/g w (n w with zero=0)
        moments     2 n/g w (2 n w with zero=0)

    Args:
        held: the rank's trainable parameters.
        config: ep, zero and reduce.
        dtype: of the parameters.
        dp: data-parallel ranks.

    Returns:
        parameters, gradients, masters, moments, total; and gradients_peak, the most that gradients take during a
        step: with reduce="microbatch" the full buckets of a microbatch stand beside the shards.
    """
    b, w = dtype.itemsize, _wide(dtype)
    out = dict.fromkeys(("parameters", "gradients", "masters", "moments", "total", "gradients_peak"), 0)
    for bucket in Bucket.of(held, dp, config.ep):
        n = bucket.elements
        own = n // bucket.ranks if config.zero else n
        sharded = config.reduce == "microbatch" and config.zero == 2
        out["parameters"] += n * b
        out["gradients"] += (own if sharded else n) * w
        out["masters"] += own * w if b < w else 0
        out["moments"] += 2 * own * w
        out["gradients_peak"] += (n + own if sharded else n) * w
    out["total"] = sum(out[k] for k in ("parameters", "gradients", "masters", "moments"))
    return out


# ------------------------------------------------------------------ activations


def layer_bytes(
    shape: ModelConfig, layer: int, work: Microbatch, dtype: torch.dtype, config: LearnerConfig, device: str = "cpu"
) -> dict[str, int]:
    """Bytes that one layer saves for its backward when nothing is recomputed, by part; one term for each tensor."""
    b, w = dtype.itemsize, _wide(dtype)
    N, M, D, H, G, d = work.positions, work.labels, shape.width, shape.heads, shape.kv_heads, shape.head_dim
    E, K, F, q, kv = shape.experts, shape.top_k, shape.expert_width, H * d, G * d
    low = device == "cpu" and dtype.itemsize == 2
    short = [(s, n) for s, n in work.runs if low and n <= SHORT]  # documents whose probabilities are kept
    long = sum(s * n for s, n in work.runs) - sum(s * n for s, n in short)
    last = config.elide == "padding+last_layer" and layer == shape.layers - 1
    P, at = work.run(config.elide, last), M if last else N  # positions that route rows; that the rest of the layer sees
    out = {"input": N * D * b}  # x, kept by the first norm
    out["norms"] = (
        N * D * b  # x + attention, kept by the second norm
        + 2 * N * w  # 1 / rms
        + (N if layer not in shape.dense_layers else at) * D * b  # the second norm's output
        + (M * D * b if last else 0)  # x, or the second norm's output, at labelled positions
    )
    kept = long or any(s == 1 for s, _ in short) or shape.qk_norm != "none"
    out["attention"] = (
        N * D * b  # the first norm's output
        + (N * (q + 2 * kv) * b if kept else 0)  # queries, keys and values as projected; values are a view of it
        + {"none": 0, "full": 2 * N, "head": N * (H + G)}[shape.qk_norm] * w  # 1 / rms of queries and keys
        + 4 * N * d * b  # cos and sin, once for queries and once for keys
        + N * (q + kv) * b  # rotated queries and keys
        + sum(s * n * (kv * (s > 1) + H * n) for s, n in short) * b  # values in another order, probabilities
        + long * (q * b + H * w)  # outputs by document, log-sum-exp
        + N * q * b  # all outputs, joined
    )
    if layer in shape.dense_layers:
        return out | {"dense": at * 3 * shape.dense_width * b}  # gate and up, their product
    out["router"] = (
        N * E * w  # probabilities (with sigmoid gates the scores)
        + N * K * (w + INDEX)  # gates, choices
        + (N * (K + 2) * w if shape.normalize_gates else 0)  # gates before they were normalised, their sum
        + (2 * N * w if shape.gate == "sigmoid" else 0)  # sums of scores
        + ((N + E) * D * w if b < w else 0)  # input and weight in float32
        + (M * K * w if last else 0)  # gates at labelled positions
        + (N * (E + 3) * w if config.router.z else 0)  # logits in scope, log-sum-exp and its square
        + (3 * N * INDEX if config.router.balance else 0)  # positions in scope, documents
    )
    R = P * K
    if low and R >= PAD * E:
        R += E * (PAD - 1) // 2  # on average, to make every expert's rows a multiple of PAD
    out["experts"] = R * (2 * F * b + 2 * INDEX)  # gate and up, the row and the choice that each comes from
    if config.ep > 1:
        out["experts"] += R * 2 * D * b + R * INDEX  # rows as received, rows as returned, their places
    if shape.shared_width:
        out["shared"] = at * 3 * shape.shared_width * b
    return out


def activation_bytes(
    shape: ModelConfig,
    work: Microbatch,
    dtype: torch.dtype,
    config: LearnerConfig,
    layers: tuple[int, int] | None = None,
    device: str = "cpu",
) -> dict[str, int]:
    """Bytes that one microbatch keeps on a rank between its forward and its backward, by part.

    Args:
        shape: the whole model's.
        work: positions, labels and documents of the microbatch.
        dtype: of the parameters.
        config: recompute, elide, ep and router losses.
        layers: [start, stop) of one pipeline stage; None = all. Layer 0 brings the embedding, the last the head.
        device: "cpu" or "cuda": CPU kernels keep more in bfloat16 (probabilities of short documents, padded rows).

    Returns:
        embedding, input, norms, attention, router, experts, shared, dense, head: what there is of them; total; and
        again, what the largest recomputation holds on top of that while its backward runs.

    Source: read off the operations of `moekit.model`; held to `saved_bytes` within 15 % by tests.
    """
    start, stop = layers or (0, shape.layers)
    out: Counter[str] = Counter()
    again = 0
    for i in range(start, stop):
        parts = layer_bytes(shape, i, work, dtype, config, device)
        kept = dict(parts)
        if config.recompute == "block":
            choices = work.positions * shape.top_k * INDEX if i not in shape.dense_layers else 0
            kept = {"input": parts["input"], "router": choices}
        elif config.recompute == "moe":
            kept.pop("experts", None)
        out.update(kept)
        again = max(again, sum(parts.values()) - sum(kept.values()))
    if start == 0:
        out["embedding"] = work.positions * INDEX
    if stop == shape.layers:
        M, w = work.labels, _wide(dtype)
        logits = M * shape.vocab * w
        out["head"] = (
            2 * M * shape.width * dtype.itemsize  # hidden states before and after the final norm
            + 2 * M * (w + INDEX)  # 1 / rms, log-sum-exp; where the labels are, and what
            + (logits if M <= max(1, CHUNK_BYTES // (shape.vocab * w)) else 0)  # probabilities
        )
    return dict(out) | {"total": sum(out.values()), "again": again}


# ------------------------------------------------------------------ wire


def wire_bytes(
    held: Iterable[Held],
    shape: ModelConfig,
    config: LearnerConfig,
    work: Microbatch,
    dtype: torch.dtype,
    dp: int,
    *,
    microbatches: int,
    layers: Iterable[int],
    boundaries: int = 0,
) -> dict[str, float]:
    """Bytes that one rank sends in one training step, by kind, with balanced routing and equal microbatches.

    With g ranks sharing a bucket of n elements, b bytes an element and w = max(4, b):

        gradients   2 (g-1)/g n w (a ring all-reduce), with zero=2 (g-1)/g n w, once or for every microbatch;
                    and n w for a tied embedding's other copy
        parameters  (g-1)/g n b with zero > 0
        rows        (ep-1)/ep K P D b out and as much back, forward and backward, and again with recompute
        pipeline    N D b for every boundary of a stage that lies between two ranks

    Args:
        held: the rank's parameters.
        shape, config, dtype, dp: as for `storage_bytes` and `activation_bytes`.
        work: one microbatch.
        microbatches: of a step, on this rank.
        layers: those that the rank holds.
        boundaries: transfers of one microbatch to another pipeline rank, forward and backward.
    """
    b, w = dtype.itemsize, _wide(dtype)
    out = dict.fromkeys(("gradients", "parameters", "rows", "pipeline"), 0.0)
    for bucket in Bucket.of(held, dp, config.ep):
        share = (bucket.ranks - 1) / bucket.ranks * bucket.elements
        times = {0: 2, 1: 2, 2: microbatches if config.reduce == "microbatch" else 1}[config.zero]
        out["gradients"] += times * share * w + (bucket.elements * w if bucket.tied else 0)
        out["parameters"] += share * b if config.zero else 0
    passes = 4 + (2 if config.recompute != "none" else 0)
    for i in layers:
        if i not in shape.dense_layers:
            rows = work.run(config.elide, i == shape.layers - 1) * shape.top_k
            out["rows"] += passes * microbatches * (config.ep - 1) / config.ep * rows * shape.width * b
    out["pipeline"] = float(microbatches * boundaries * work.positions * shape.width * b)
    return out | {"total": sum(out.values())}
