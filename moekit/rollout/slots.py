"""Continuous batching: a fixed number of slots decode together; one whose answer ends takes the next answer at once.

The prompt of a group is read once, and its keys are copied to the slot of each answer. Prompts that wait are read
together and ahead, up to `ahead` tokens, so that a single freed slot does not cost a call for a single prompt. Tokens
stay on the device for the next step; one read to the host a step brings tokens and log-probs, and stops are looked for
there, for all slots at once.

Axis letters: S slots, L layers that route, K experts per token.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..config import ModelConfig
from ..errors import ConfigError
from .engine import Answer, Finish, Sampling
from .kv_cache import KVCache, Prefix, ordinary
from .passes import Passes
from .sampling import choose, draw_key, uniform

SORT = 3  # slots are sorted by length when this many times what they hold was read in vain


@dataclass
class Group:
    """A prompt, the answers that are still to be started, and what was read of it."""

    index: int
    prompt: list[int]
    key: list[int]  # of the draws of each sample
    limit: int  # most new tokens
    started: int = 0
    prefix: Prefix | None = None
    experts: Tensor | None = None  # [P, L, K] int16, of the first reading


def requests(config: ModelConfig, prompts, sampling: Sampling, prompt_ids, limits) -> list[Group]:
    """Checked requests, with arguments and errors of `EmbeddedEngine.generate`."""
    groups = []
    for name, given in (("prompt_ids", prompt_ids), ("limits", limits)):
        if given is not None and len(given) != len(prompts):
            raise ConfigError(f"{len(prompts)} prompts, but {len(given)} {name}; give one for each")
    for i, prompt in enumerate(prompts):
        limit = sampling.max_new_tokens if limits is None else min(limits[i], sampling.max_new_tokens)
        if limit < 1 or not 0 < len(prompt) <= config.max_positions - limit:
            raise ConfigError(
                f"prompt {i} has {len(prompt)} tokens; with max_new_tokens={limit} (at least 1) and the model's "
                f"{config.max_positions} positions it needs 1 to {config.max_positions - max(limit, 1)}"
            )
        if not 0 <= min(prompt) <= max(prompt) < config.vocab:
            raise ConfigError(f"prompt {i} holds a token outside 0..{config.vocab - 1}: {min(prompt)} or {max(prompt)}")
        name = i if prompt_ids is None else int(prompt_ids[i])
        keys = [draw_key(sampling.seed, name, sample) for sample in range(sampling.n)]
        groups.append(Group(i, list(prompt), keys, limit))
    return groups


@dataclass
class Slots:
    """Answers in the making. Slots 0..n-1 are taken; `step` moves each of them by one token."""

    passes: Passes
    sampling: Sampling
    groups: list[Group]
    slots: int
    ahead: int
    n: int = 0
    done: deque[tuple[Group, int, Answer]] = field(default_factory=deque)  # finished, not yet handed out

    def __post_init__(self) -> None:
        self.model, self.version = self.passes.model, self.passes.version
        config, device = self.model.config, self.model.device
        most = max(g.limit for g in self.groups)
        room = max(len(g.prompt) + g.limit for g in self.groups)
        self.cache = KVCache(config, self.slots, room, self.model.head_weight.dtype, device)
        self.passes.stats.cache_bytes = max(
            self.passes.stats.cache_bytes, self.cache.keys.nbytes + self.cache.values.nbytes
        )
        self.waiting = deque(self.groups)
        self.owner = np.full((self.slots, 2), -1)  # group's place in `groups`, and sample
        self.length, self.count = np.zeros((2, self.slots), np.int64)  # tokens in the cache, tokens of the answer
        self.limit, self.key = np.zeros(self.slots, np.int64), np.zeros(self.slots, np.uint64)
        self.ids, self.versions = np.zeros((2, self.slots, most), np.int64)
        self.logprobs = np.zeros((self.slots, most), np.float32)
        shape = (self.slots, most, len(config.moe_layers), config.top_k)
        self.experts = torch.full(shape, -1, dtype=torch.int16, device=device)
        self.kept = (
            self.owner, self.length, self.count, self.limit, self.key, self.ids, self.versions, self.logprobs,
            self.experts,
        )  # fmt: skip
        self.stops = np.array(self.sampling.stop_ids, np.int64)
        self.sequences = [np.array(s) for s in self.sampling.stop_sequences]
        self.weights, self.stale = self.version(), False  # what the keys in the cache are of; they are others now

    def step(self, admit: bool = True) -> None:
        """Start what there is room for, then one token more for every slot."""
        if admit:
            self._admit()
        if not self.n:
            return
        began, n = time.perf_counter(), self.n
        if self.cache.wasted > SORT * int(self.length[:n].sum()):
            self._move(np.arange(n), np.argsort(-self.length[:n], kind="stable"))
            self.cache.wasted = 0
        rows, last = np.arange(n), self.count[:n] - 1
        token_S = torch.from_numpy(self.ids[rows, last]).to(self.model.device)
        logits_SV, experts_SLK = self.passes.decode(self.cache, token_S, self.length[:n])
        if experts_SLK is not None:
            self.experts[torch.from_numpy(rows), torch.from_numpy(last)] = experts_SLK
        self.length[:n] += 1
        stats = self.passes.stats
        stats.steps, stats.slot_steps = stats.steps + 1, stats.slot_steps + n
        stats.slots = max(stats.slots, min(self.slots, sum(len(g.key) for g in self.groups)))
        self._close(self._sample(rows, logits_SV))
        self.passes.stats.decode_seconds += time.perf_counter() - began

    def _admit(self) -> None:
        """Fill free slots; an answer may end with its first token, and frees its slot again."""
        while self.n < self.slots and self.waiting:
            began = time.perf_counter()
            logits, first = [], self.n
            while self.n < self.slots and self.waiting:
                group = self.waiting[0]
                if group.prefix is None:
                    self._read()
                assert group.prefix is not None
                self._start(group, group.prefix)
                logits.append(group.prefix.logits_V)
                if group.started == len(group.key):
                    self.waiting.popleft().prefix = None
            self.passes.stats.prefill_seconds += time.perf_counter() - began
            self._close(self._sample(np.arange(first, self.n), torch.stack(logits)))

    def _read(self) -> None:
        """Read the first waiting prompts, `ahead` tokens of them or one."""
        chosen, tokens = [], 0
        for group in self.waiting:
            if chosen and tokens + len(group.prompt) > self.ahead:
                break
            tokens += len(group.prompt)
            chosen.append(group)
        for group, prefix in zip(chosen, self.passes.prefill([g.prompt for g in chosen])):
            group.prefix = prefix
            if group.experts is None and prefix.experts_PLK is not None:
                group.experts = prefix.experts_PLK
        self.passes.stats.prompts_read += len(chosen)
        self.passes.stats.prompt_tokens += tokens

    def _start(self, group: Group, prefix: Prefix) -> None:
        """Give the next slot to the next sample of a group."""
        s, self.n = self.n, self.n + 1
        self.cache.fill(s, prefix)
        self.owner[s] = group.index, group.started
        self.length[s], self.count[s], self.limit[s] = len(group.prompt), 0, group.limit
        self.key[s] = group.key[group.started]
        self.experts[s] = -1
        group.started += 1

    def _sample(self, rows: np.ndarray, logits_SV: Tensor) -> np.ndarray:
        """Draw a token for each row and note it; returns the finish of each row: 0 none, 1 stop, 2 length."""
        number = uniform(self.key[rows], self.count[rows])
        token_S, logprob_S = choose(logits_SV, self.sampling, torch.from_numpy(number).to(logits_SV.device))
        token, logprob = torch.stack((token_S.double(), logprob_S.double())).cpu().numpy()  # the step's one host read
        at = self.count[rows]
        self.ids[rows, at], self.logprobs[rows, at], self.versions[rows, at] = token, logprob, self.weights
        self.count[rows] = at + 1
        self.passes.stats.answer_tokens += len(rows)
        stop = np.isin(token, self.stops)
        for sequence in self.sequences:
            back = np.maximum(at[:, None] + np.arange(1 - len(sequence), 1), 0)
            stop |= (at >= len(sequence) - 1) & (self.ids[rows[:, None], back] == sequence).all(1)
        finish = np.zeros(self.n, np.int64)
        finish[rows] = np.where(stop, 1, 2 * (at + 1 >= self.limit[rows]))
        return finish

    def _close(self, finish: np.ndarray) -> None:
        """Hand out finished answers; the last slots move into the holes."""
        for s in np.flatnonzero(finish)[::-1].tolist():
            self._hand_out(s, "stop" if finish[s] == 1 else "length")

    def _hand_out(self, s: int, finish: Finish) -> None:
        (g, sample), count = self.owner[s].tolist(), int(self.count[s])
        experts = self._experts(s, count)
        with torch.inference_mode(False):
            logprobs, versions = (torch.from_numpy(x[s, :count].copy()) for x in (self.logprobs, self.versions))
        answer = Answer(self.ids[s, :count].tolist(), logprobs, experts, versions, finish)
        self.done.append((self.groups[g], sample, answer))
        self.n -= 1
        if s < self.n:
            self._move(s, self.n)
        self.cache.groups = None

    def _experts(self, s: int, count: int) -> Tensor | None:
        return ordinary(self.experts[s, :count]) if self.experts.shape[2] else None

    def _move(self, to: int | np.ndarray, of: int | np.ndarray) -> None:
        """Slots `of` become slots `to`."""
        self.cache.move(to, of, int(np.max(self.length[of])))
        for kept in self.kept:
            kept[to] = kept[of]

    def renew(self, abort: bool) -> None:
        """The weights are others now: what was read with the old ones is read again, or running answers end here."""
        self.weights, self.stale = self.version(), False
        for group in self.waiting:
            group.prefix = None
        if abort:
            self.abort()
        began, at = time.perf_counter(), 0
        held = [self.groups[self.owner[s, 0]].prompt + self.ids[s, : self.count[s] - 1].tolist() for s in range(self.n)]
        while at < self.n:
            stop = at + 1
            while stop < self.n and sum(map(len, held[at : stop + 1])) <= self.ahead:
                stop += 1
            for s, prefix in enumerate(self.passes.prefill(held[at:stop]), at):
                self.cache.fill(s, prefix)
            self.passes.stats.recomputed_tokens += sum(map(len, held[at:stop]))
            at = stop
        self.passes.stats.prefill_seconds += time.perf_counter() - began

    def abort(self, waiting: bool = False) -> None:
        """End running answers where they are; with `waiting` those too that have not begun."""
        for s in range(self.n - 1, -1, -1):
            self._hand_out(s, "abort")
        while waiting and self.waiting:
            group = self.waiting.popleft()
            with torch.inference_mode(False):
                none = Answer([], torch.zeros(0), self._experts(0, 0), torch.zeros(0, dtype=torch.int64), "abort")
            self.done.extend((group, sample, none) for sample in range(group.started, len(group.key)))
