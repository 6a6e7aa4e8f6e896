"""Keys and values of running sequences in slots, prompts read once, then one token for every slot and call.

Running sequences fill slots 0..n-1 without holes, so that their keys are a view and never gathered. Attention reads
neighbouring slots of similar length together, up to the longest of them; when the slots are too mixed for that, they
are sorted by length, once the reads that were wasted have paid for the copy.

Axis letters: L layers, S slots, N positions of prompts seen flat, P positions of one prompt, H query heads, G key/value
heads, R = H / G, T room of a slot, d head width, V vocabulary, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ModelConfig
from ..data.batch import Batch, Flat
from ..measure.tokens import RowCounter
from ..model.attention import document_attention, rope_angles
from ..model.transformer import Transformer

Sizes = tuple[tuple[int, ...], tuple[int, ...]]  # rows of every rank in all layers, and in the last; () = one process
ALONE: Sizes = (), ()
WORTH = 256  # wasted (slot, position) reads that cost about as much as another call


@dataclass(frozen=True)
class Prefix:
    """A prompt that was read: its span of the keys and values of the prompts read with it, and what follows it."""

    keys_LNGd: Tensor
    values_LNGd: Tensor
    span: slice
    logits_V: Tensor
    experts_PLK: Tensor | None  # int16


class KVCache:
    """Room for `slots` sequences of `room` tokens: 2 * layers * slots * G * room * d numbers."""

    def __init__(self, config: ModelConfig, slots: int, room: int, dtype: torch.dtype, device: torch.device):
        shape = (config.layers, slots, config.kv_heads, room, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)  # what is masked is read too: it must not be NaN
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.slots, self.heads, self.room = slots, config.kv_heads, room
        position = torch.arange(room, device=device)
        self.cos, self.sin = rope_angles(position, config, dtype)
        self.head_SG = torch.arange(slots * config.kv_heads, device=device).view(slots, -1) * room
        self.groups: list[tuple[int, int, int]] | None = None  # (first slot, last + 1, lead over the shortest)
        self.wasted = 0

    def fill(self, slot: int, prefix: Prefix) -> None:
        """Copy a prompt into a slot."""
        length = prefix.span.stop - prefix.span.start
        for to, of in ((self.keys, prefix.keys_LNGd), (self.values, prefix.values_LNGd)):
            to[:, slot, :, :length] = of[:, prefix.span].transpose(1, 2)
        self.groups = None

    def move(self, to: int | np.ndarray, of: int | np.ndarray, length: int) -> None:
        """Copy the first `length` positions of slots to other slots; layer by layer, so that little is held twice."""
        for layer in (*self.keys, *self.values):
            layer[to, :, :length] = layer[of, :, :length]
        self.groups = None

    def plan(self, length_S: np.ndarray) -> Step:
        """What one decoding step of slots 0..n-1, which hold `length_S` tokens each, needs in every layer."""
        shortest = int(length_S.min())
        if self.groups is None:  # lengths grow alike, so that groups last until a slot changes hands
            self.groups = [(a, b, top - shortest) for a, b, top in _similar(length_S.tolist())]
        at_S = torch.from_numpy(length_S).to(self.keys.device)
        masks = []
        for first, stop, lead in self.groups:
            seen = torch.arange(shortest + lead + 1, device=at_S.device) <= at_S[first:stop, None]
            masks.append(torch.zeros_like(seen, dtype=self.keys.dtype).masked_fill_(~seen, -torch.inf)[:, None, None])
        self.wasted += sum((b - a) * (shortest + lead) for a, b, lead in self.groups) - int(length_S.sum())
        row_SG = self.head_SG[: len(at_S)] + at_S[:, None]
        return Step(row_SG.view(-1), (self.cos[at_S], self.sin[at_S]), [g[:2] for g in self.groups], masks)

    def attend(self, layer: int, step: Step, q_SHd: Tensor, k_SGd: Tensor, v_SGd: Tensor) -> Tensor:
        """Append a key and a value to every slot; attention of one query a slot over what the slot holds, [S, H, d].

        The query heads of a key head stand as the queries of one head: no key is repeated.
        """
        n, H, d = q_SHd.shape
        keys, values = self.keys[layer], self.values[layer]
        keys.view(-1, d).index_copy_(0, step.row_R, k_SGd.reshape(-1, d))
        values.view(-1, d).index_copy_(0, step.row_R, v_SGd.reshape(-1, d))
        q_SGRd, out = q_SHd.reshape(n, self.heads, H // self.heads, d), []
        for (first, stop), mask in zip(step.groups, step.masks):
            part, reach = slice(first, stop), mask.shape[-1]
            out.append(
                F.scaled_dot_product_attention(q_SGRd[part], keys[part, :, :reach], values[part, :, :reach], mask)
            )
        return (out[0] if len(out) == 1 else torch.cat(out)).reshape(n, H, d)


@dataclass(frozen=True)
class Step:
    """What all layers of one decoding step share."""

    row_R: Tensor  # int64, where the new keys go among [slots * G * T]
    angles: tuple[Tensor, Tensor]
    groups: list[tuple[int, int]]  # slots that are read together
    masks: list[Tensor]  # [slots, 1, 1, reach], 0 or -inf


def _similar(lengths: list[int]) -> list[tuple[int, int, int]]:
    """Cut slots into runs (first, last + 1, longest) such that joining none of them would waste fewer than WORTH reads.

    >>> _similar([900, 880, 20, 20]), _similar([30, 20, 25])
    ([(0, 2, 900), (2, 4, 20)], [(0, 3, 30)])
    """
    out, first, top, total = [], 0, lengths[0], 0
    for i, length in enumerate(lengths):
        top_with = max(top, length)
        if top_with * (i + 1 - first) - total - length > WORTH and i > first:
            out.append((first, i, top))
            first, top_with, total = i, length, 0
        top, total = top_with, total + length
    return [*out, (first, len(lengths), top)]


def _experts(routes: list) -> Tensor | None:
    """[positions, L, K] int16."""
    found = [r.expert_NK for r in routes if r is not None]
    return torch.stack(found, 1).to(torch.int16) if found else None


def prefill(
    model: Transformer, prompts: Sequence[Sequence[int]], counter: RowCounter | None = None, peers: Sizes = ALONE
) -> list[Prefix]:
    """Read prompts, together and without padding; the last layer runs experts at their last positions only.

    Without prompts a pass of no rows, which other ranks' rows need where experts are spread (`peers`).
    """
    sizes = torch.tensor([len(p) for p in prompts], dtype=torch.int64)
    ids_1N = torch.tensor([[i for p in prompts for i in p]], dtype=torch.int64)
    segment = torch.repeat_interleave(torch.arange(len(sizes)), sizes)[None]
    host = Batch.make(ids_1N, labels=torch.full_like(ids_1N, -100), segment=segment).flat
    start_S = host.order_N.argsort()[sizes.cumsum(0) - sizes]
    flat, last_S = host.to(model.device), (start_S + sizes - 1).to(model.device)
    x_ND = F.embedding(flat.ids_N, model.embed.weight)
    angles = rope_angles(flat.position_N, model.config, x_ND.dtype)
    kept: list[tuple[Tensor, Tensor]] = []
    routes = []

    def attend(q_NHd: Tensor, k_NGd: Tensor, v_NGd: Tensor) -> Tensor:
        kept.append((k_NGd, v_NGd))
        return document_attention(q_NHd, k_NGd, v_NGd, flat)

    for i, block in model.blocks.items():
        last = i == model.config.layers - 1
        how = {"needed_M": last_S if last else None, "sizes": peers[last], "real": flat.real, "observer": counter}
        x_ND, route = block(x_ND, flat, angles, attend=attend, **how)
        routes.append(route)
    if counter is not None:
        counter.positions(flat)
    logits_SV, experts_NLK = F.linear(model.final_norm(x_ND), model.head_weight), _experts(routes)
    keys, values = (torch.stack(t) for t in zip(*kept))
    spans = [slice(a, a + n) for a, n in zip(start_S.tolist(), sizes.tolist())]
    return [
        Prefix(keys, values, span, logits_V, None if experts_NLK is None else experts_NLK[span])
        for span, logits_V in zip(spans, logits_SV)
    ]


@lru_cache(maxsize=1024)
def _ones(slots: int, device: torch.device) -> Flat:
    """The microbatch of a decoding step, as counters see it: context positions."""
    return Batch.make(torch.zeros(slots, 1)).flat.to(device)


def decode(
    model: Transformer,
    cache: KVCache,
    token_S: Tensor,
    length_S: np.ndarray,
    counter: RowCounter | None = None,
    sizes: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor | None]:
    """Append a token to slots 0..n-1, which hold `length_S` tokens each. Logits [S, V] of the next one, and the experts
    chosen at this one [S, L, K] int16."""
    step, flat = cache.plan(length_S), _ones(len(length_S), model.device)
    x_SD, routes = F.embedding(token_S, model.embed.weight), []
    for i, block in model.blocks.items():
        attend = partial(cache.attend, i, step)
        x_SD, route = block(x_SD, flat, step.angles, attend=attend, real=len(length_S), sizes=sizes, observer=counter)
        routes.append(route)
    if counter is not None:
        counter.positions(flat)
        counter.measures[counter.component, counter.pass_name].pairs += int(length_S.sum())
    return F.linear(model.final_norm(x_SD), model.head_weight), _experts(routes)


def ordinary(x: Tensor | None) -> Tensor | None:
    """A copy on the host of what was made in inference mode, which autograd takes and which may be written to."""
    with torch.inference_mode(False):
        return None if x is None else x.cpu().clone()
