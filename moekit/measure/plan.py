"""What a layout will take, from shapes alone: storage and saved activations of a rank, bytes on its wire in a step.

Storage is computed as the learner lays it out, padding included: exact. Activations are what autograd saves, tensor by
tensor (`measure.memory.saved_bytes` counts them on a real model); where torch's form of the experts runs on a CPU in
bfloat16 (`moekit.ops.explain` says so), up to 15 rows of padding an expert come on top. Wire bytes assume balanced
routing.

Axis letters: N positions of a microbatch, P positions whose expert rows run, M labelled positions, R expert rows,
D width, H query heads, G key/value heads, d head width, E experts, K experts per position, F expert width, V tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple

import torch

from ..config import Elide, LearnerConfig, ModelConfig
from ..data.batch import Flat

ALIGN = 64  # elements: spans of a bucket, and shards of it, start at multiples of this
LARGEST = {"step": 1 << 25, "microbatch": 1 << 22}  # elements after which a bucket takes no further parameter
CHUNK_BYTES = 64 * 2**20  # of logits: more than this is computed again in the backward, not kept
SHORT = 512  # positions: CPU attention in bfloat16 keeps the probabilities of documents up to this long
INDEX = 8  # bytes of an int64


@dataclass(frozen=True)
class Held:
    """One parameter as a rank holds it."""

    name: str
    shape: tuple[int, ...]
    expert: bool = False  # split over ep, replicated over expert_dp; others are replicated over dp
    tied: bool = False  # held by the first and the last pipeline rank


@dataclass(frozen=True)
class Microbatch:
    """What activations and wire bytes depend on, of one microbatch on one rank."""

    positions: int  # N
    real: int  # without padding
    labels: int  # M
    runs: tuple[tuple[int, int], ...]  # (documents, their length): neighbours that attention takes together
    children: tuple[tuple[int, int], ...] = ()  # (positions of the shared prompt, own positions)

    @staticmethod
    def of(flat: Flat) -> Microbatch:
        """Of a real one."""
        runs = tuple((r.documents, r.length) for r in flat.runs)
        children = tuple((c.parent_length, c.length) for c in flat.children)
        return Microbatch(flat.positions, flat.real, flat.label_index_M.shape[0], runs, children)

    @staticmethod
    def full(rows: int, length: int) -> Microbatch:
        """Rows that are one document each, without padding, every position labelled: the most they can take."""
        return Microbatch(rows * length, rows * length, rows * length, ((rows, length),))

    @staticmethod
    def family(prompt: int, answers: Sequence[int], share: bool) -> Microbatch:
        """One prompt and its answers, by their lengths, as `moekit.data.families` lays them out without padding."""
        shared = prompt - 1 if share and len(answers) > 1 else 0
        runs = ((1, shared),) if shared else tuple((1, prompt + n) for n in answers)
        children = tuple((shared, prompt - shared + n) for n in answers) if shared else ()
        positions = sum(n for _, n in (*runs, *children))
        return Microbatch(positions, positions, sum(answers), runs, children)

    @property
    def pairs(self) -> int:
        """(query, key) pairs of causal attention: inside documents, and of children with their prompt."""
        own = sum(s * n * (n + 1) // 2 for s, n in self.runs)
        return own + sum(n * (n + 1) // 2 + up * n for up, n in self.children)

    def routed(self, elide: Elide, last: bool) -> int:
        """P, in the last layer or in another."""
        labelled = last and elide == "padding+last_layer"
        return self.labels if labelled else self.positions if elide == "none" else self.real


class Bucket(NamedTuple):
    """A flat bucket of a rank: its elements with all padding, the ranks that share it equally, what is in it."""

    elements: int
    ranks: int
    names: list[str]
    tied: bool


def buckets(held: Sequence[Held], config: LearnerConfig, dp: int) -> list[Bucket]:
    """A rank's buckets as `moekit.learner.gradients` fills them: families, last parameters first, in backward order."""
    groups, going, order = list[list[Held]](), dict[tuple, list[Held]](), {h.name: -i for i, h in enumerate(held)}
    size = Counter[tuple]()
    for h in reversed(held):
        going.setdefault(family := (h.expert, len(h.shape) >= 2, h.tied), []).append(h)
        size[family] += prod(h.shape)
        if size[family] >= LARGEST[config.reduce]:
            groups.append(going.pop(family))
            size[family] = 0
    out = []
    for group in sorted([*groups, *going.values()], key=lambda g: order[g[-1].name]):
        ranks = dp // config.ep if group[0].expert else dp
        spans = sum(-(-prod(h.shape) // ALIGN) * ALIGN for h in group)
        elements = -(-spans // (ALIGN * ranks)) * ALIGN * ranks
        out.append(Bucket(elements, ranks, [h.name for h in group], group[0].tied))
    return out


def cache_bytes(held: Sequence[Held], backward: bool = True) -> int:
    """Bytes of the MXFP8 copies of a rank's routed experts: 33/32 an element, and as much again for the backward's."""
    return sum(prod(h.shape) * 33 // 32 * (1 + backward) for h in held if h.expert)


def storage_bytes(held: Sequence[Held], config: LearnerConfig, dtype: torch.dtype, dp: int) -> dict[str, int]:
    """Bytes of a rank's buckets: with n elements, g ranks, b bytes an element and w = max(4, b),

    parameters n b, masters n/g w (none where b = w), moments 2 n/g w, gradients n w; with zero=0 masters and moments
    are not divided by g; with zero=2 and g > 1 the reduced gradients, n/g w, stand beside the full ones, or with
    reduce="microbatch" in their place. Also their total, and gradients_peak: with reduce="microbatch" full buckets
    wait until the backward has completed them (one more than predicted may, if gradients come in another order).
    caches: `cache_bytes`, with precision="mxfp8".
    """
    b, w = dtype.itemsize, max(4, dtype.itemsize)
    out = dict.fromkeys(("parameters", "gradients", "masters", "moments", "caches"), 0)
    out["caches"] = cache_bytes(held) if config.precision == "mxfp8" else 0
    waiting = buckets(held, config, dp)
    for n, ranks, *_ in waiting:
        own = n // ranks if config.zero else n
        both = n + own if config.zero == 2 and ranks > 1 else n
        out["parameters"] += n * b
        out["gradients"] += (own if config.reduce == "microbatch" else both) * w
        out["masters"] += own * w if b < w else 0
        out["moments"] += 2 * own * w
    home, begun, seen, most = {name: x for x in waiting for name in x.names}, list[Bucket](), set[str](), 0
    for h in reversed(held) if config.reduce == "microbatch" else ():
        seen.add(h.name)
        begun += [home[h.name]] if home[h.name] not in begun else []
        most = max(most, sum(x.elements for x in begun))
        while waiting and seen.issuperset(waiting[0].names):
            begun.remove(waiting.pop(0))
    return out | {"total": sum(out.values()), "gradients_peak": out["gradients"] + most * w}


def layer_bytes(
    shape: ModelConfig, layer: int, work: Microbatch, dtype: torch.dtype, config: LearnerConfig, device: str = "cpu"
) -> dict[str, int]:
    """Bytes that one layer saves for its backward when nothing is recomputed, by part; one term for each tensor."""
    b, w = dtype.itemsize, max(4, dtype.itemsize)
    N, M, D, H, G, d = work.positions, work.labels, shape.width, shape.heads, shape.kv_heads, shape.head_dim
    E, K, F, q, kv = shape.experts, shape.top_k, shape.expert_width, H * d, G * d
    low = device == "cpu" and b == 2
    short = [(s, n) for s, n in work.runs if low and n <= SHORT]  # documents whose probabilities are kept
    long = sum(s * n for s, n in work.runs) - sum(s * n for s, n in short) + sum(n for _, n in work.children)
    last = config.elide == "padding+last_layer" and layer == shape.layers - 1
    dense, at = layer in shape.dense_layers, M if last else N
    out = {"input": N * D * b}  # x, kept by the first norm
    out["norms"] = (
        N * D * b  # x + attention, kept by the second norm
        + 2 * N * w  # 1 / rms
        + (at if dense else N) * D * b  # the second norm's output
        + (M * D * b if last else 0)  # that, or its input, at labelled positions
    )
    viewed = long or any(s == 1 for s, _ in short) or shape.qk_norm != "none"
    out["attention"] = (
        N * D * b  # the first norm's output
        + (N * (q + 2 * kv) * b if viewed else 0)  # queries, keys and values as projected: values are a view of it
        + {"none": 0, "full": 2 * N, "head": N * (H + G)}[shape.qk_norm] * w  # 1 / rms of queries and keys
        + 4 * N * d * b  # cos and sin, once for queries and once for keys
        + N * (q + kv) * b  # rotated queries and keys
        + sum(s * n * (kv * (s > 1) + H * n) for s, n in short) * b  # values in another order, probabilities
        + long * (q * b + H * w)  # outputs by document, log-sum-exp
        + sum((up + n) * (2 * kv + n) for up, n in work.children) * b  # keys and values with the prompt's, the mask
        + N * q * b  # all outputs, joined
    )
    if dense:
        return out | {"dense": at * 3 * shape.dense_width * b}  # gate and up, their product
    out["router"] = (
        N * E * w  # probabilities (scores, of sigmoid gates)
        + N * K * (w + INDEX)  # gates, choices
        + (N * (K + 2) * w if shape.normalize_gates else 0)  # gates before they were normalised, their sum
        + (2 * N * w if shape.gate == "sigmoid" else 0)  # sums of scores
        + ((N + E) * D * w if b < w else 0)  # input and weight in float32
        + (M * K * w if last else 0)  # gates at labelled positions
        + (N * (E + 3) * w if config.router.z else 0)  # logits in scope, log-sum-exp and its square
        + (3 * N * INDEX if config.router.balance else 0)  # positions in scope, documents
    )
    R = work.routed(config.elide, last) * K
    mx = config.precision == "mxfp8"
    out["experts"] = R * (2 * F * b + (2 if config.ep == 1 else 1) * INDEX)  # gate, up; their places
    if config.ep > 1:
        room = ceil(config.capacity * R) if config.dispatch == "rowwise" else R
        out["experts"] += (room + R) * D * b + R * INDEX  # rows that came, and that came home
        out["experts"] += R * D * b if mx and config.dispatch == "sync" else 0  # those that came, in expert order
    elif mx:
        out["experts"] += R * (2 * D * b + 4) + E * INDEX  # rows before and after the experts, gates; offsets
    if mx and config.recompute == "none" and not last:  # what stands elsewhere: gates by row, the output of the norm
        out["router"] -= N * K * w if config.ep == 1 else 0
        out["norms"] -= N * D * b if b < w and config.ep == 1 and not shape.shared_width else 0
    return out | ({"shared": at * 3 * shape.shared_width * b} if shape.shared_width else {})


def activation_bytes(
    shape: ModelConfig, work: Microbatch, dtype: torch.dtype, config: LearnerConfig,
    layers: tuple[int, int] | None = None, device: str = "cpu",
) -> dict[str, int]:  # fmt: skip
    """Bytes that one microbatch keeps on a rank between its forward and its backward, by part.

    Args:
        layers: [start, stop) of one pipeline stage; None = all. Layer 0 brings the embedding, the last the head.
        device: "cpu" or "cuda"; CPU kernels keep more in bfloat16.
    Returns:
        Parts (of `layer_bytes`, embedding, head), total, and again: what the largest recomputation holds besides.
    """
    start, stop = layers or (0, shape.layers)
    out, again, w = Counter[str](), 0, max(4, dtype.itemsize)
    kinds: dict[tuple[bool, bool], dict[str, int]] = {}  # layers are alike but for the last, and dense ones
    for i in range(start, stop):
        kind = (i in shape.dense_layers, i == shape.layers - 1)
        parts = kinds[kind] = kinds.get(kind) or layer_bytes(shape, i, work, dtype, config, device)
        kept = {k: v for k, v in parts.items() if config.recompute == "none" or k != "experts"}
        if config.recompute == "block":  # the input, and what the router chose
            kept = {"input": parts["input"], "router": work.positions * shape.top_k * INDEX * ("router" in parts)}
        out.update(kept)
        again = max(again, sum(parts.values()) - sum(kept.values()))
    if start == 0:
        out["embedding"] = work.positions * INDEX
    if stop == shape.layers:
        M, V = work.labels, 0 if shape.value_head else shape.vocab
        out["head"] = (
            M * shape.width * (dtype.itemsize + (w if shape.value_head else dtype.itemsize))  # before, after the norm
            + M * (w + INDEX) * (1 if shape.value_head else 2)  # 1 / rms, log-sum-exp; where the labels are, and what
            + (M * V * w if M <= max(1, CHUNK_BYTES // max(1, V * w)) else 0)  # probabilities
        )
    return {**out, "total": sum(out.values()), "again": again}


def exchange_bytes(
    shape: ModelConfig, config: LearnerConfig, sizes: Sequence[int], dtype: torch.dtype, device: str = "cpu"
) -> int:
    """Bytes a rank holds of the buffers that expert rows travel in; what arrives and is kept is among the activations.

    With P positions of a rank, S of all, and room = ceil(capacity K S / ep): sync, the rows on their way out; padded,
    two lots of ep blocks; in memory that ranks share (auto, on a host of CPUs: this rank's part of it) or symmetric
    memory (on GPUs), two windows of room rows and their classes.

    Args:
        sizes: positions whose expert rows run, of each of the ep ranks.
    """
    ep, row, most = config.ep, shape.width * dtype.itemsize, shape.top_k * max(sizes)
    if ep == 1:
        return 0
    if config.dispatch == "sync":
        return most * row
    room = max(1, ceil(config.capacity * shape.top_k * sum(sizes) / ep))
    if config.transport == "padded":
        return 2 * (ep * max(1, min(room, most)) + 1) * row
    shared = config.transport == "shared_memory" or (config.transport == "auto" and device == "cpu")
    rows = ep * (room + 1) if shared else room
    return 2 * sum(-(-rows * wide // 4096) * 4096 for wide in (row, 1)) // (ep if shared else 1)


def kv_cache_bytes(shape: ModelConfig, slots: int, room: int, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of `slots` sequences with room for `room` tokens each."""
    return 2 * shape.layers * slots * shape.kv_heads * room * shape.head_dim * dtype.itemsize


def wire_bytes(
    held: Sequence[Held], shape: ModelConfig, config: LearnerConfig, work: Microbatch, dtype: torch.dtype, dp: int, *,
    microbatches: int, layers: Iterable[int], transfers: int = 0,
) -> dict[str, float]:  # fmt: skip
    """Bytes that one rank sends in one training step, by kind, with balanced routing and equal microbatches.

    gradients   2 (g-1)/g n w (a ring all-reduce), with zero=2 (g-1)/g n w, once or for every microbatch;
                and n w for a tied embedding's other copy           (letters as for `storage_bytes`)
    parameters  (g-1)/g n b with zero > 0
    rows        (ep-1)/ep K P D b out and as much back, forward and backward, and again with recompute; ep times
                as much where the transport sends padded blocks
    pipeline    N D b for each of `transfers`: sends of the schedule to other ranks, idle microbatches' too
    """
    b, w = dtype.itemsize, max(4, dtype.itemsize)
    out: dict[str, float] = {"gradients": 0.0, "parameters": 0.0}
    for n, ranks, _, tied in buckets(held, config, dp):
        share = (ranks - 1) / ranks * n
        times = 2 if config.zero < 2 else microbatches if config.reduce == "microbatch" else 1
        out["gradients"] += times * share * w + (n * w if tied else 0)
        out["parameters"] += share * b if config.zero else 0
    passes = microbatches * (4 if config.recompute == "none" else 6)
    rows = sum(work.routed(config.elide, i == shape.layers - 1) for i in layers if i not in shape.dense_layers)
    padded = config.dispatch == "rowwise" and config.transport == "padded"
    blocks = config.ep * min(1.0, config.capacity) if padded else 1
    out["rows"] = passes * (config.ep - 1) / config.ep * rows * blocks * shape.top_k * shape.width * b
    out["pipeline"] = float(transfers * work.positions * shape.width * b)
    return out | {"total": sum(out.values())}
