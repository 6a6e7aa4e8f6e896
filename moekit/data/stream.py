"""The order in which rows are trained on: shuffled by epoch, cut into steps, shared out over ranks, resumable.

The order of an epoch depends on seed and epoch alone, never on the number of ranks, so a run can be resumed on
another number of ranks and sees what it would have seen. Every row comes exactly once an epoch: a last step that is
short of rows is a smaller step, nothing is repeated and nothing is left out."""

from typing import Any, Protocol

import numpy as np

from ..errors import ConfigError, DataError
from .batch import Batch


class Indexed(Protocol):
    """What a stream takes its batches from: rows of documents (`pack.Rows`), or pairs (`preference.Pairs`)."""

    def __len__(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Hash of all that the batches depend on."""
        ...

    def batch(self, indices: Any) -> Batch:
        """The rows, or pairs, of these numbers."""
        ...


def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of 0..rows - 1 that depends on nothing but its arguments, whatever numpy's version.

    Rows are sorted by a hash of (seed, epoch, row): the finalizer of splitmix64 (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        key = _mix(_mix(np.uint64(seed % 2**64)) + np.uint64(epoch))
        return np.argsort(_mix(key + np.arange(rows, dtype=np.uint64)), kind="stable")


def _mix(x: Any) -> Any:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class RowStream:
    """Steps of `batch_rows` rows, epoch after epoch; the same on all ranks, each of which takes its share.
    Args:
        rows: an `Indexed`.
        batch_rows: rows of one optimizer step over all ranks; an epoch's last step may have fewer.
        seed: of the order. shuffle: False = rows in their own order, every epoch.
    >>> from moekit.config import DataConfig
    >>> from moekit.data.chat import Document
    >>> from moekit.data.pack import build_rows
    >>> rows = build_rows([Document([i, i], [True] * 2) for i in range(5)], DataConfig(length=2, rows="padded"))
    >>> stream = RowStream(rows, batch_rows=4, shuffle=False)
    >>> [[b.input_ids[:, 0].tolist() for b in stream.next(rank=0, world=2, microbatch_rows=1)] for _ in range(3)]
    [[[0], [1]], [[4]], [[0], [1]]]
    """

    def __init__(self, rows: Any, batch_rows: int, seed: int = 0, shuffle: bool = True):
        if batch_rows < 1:
            raise ConfigError(f"batch_rows={batch_rows} must be at least 1")
        if not len(rows):
            raise DataError("there are no rows to train on")
        self.rows, self.batch_rows, self.seed, self.shuffle = rows, batch_rows, seed, shuffle
        self.epoch = 0
        self.position = 0  # rows of this epoch that have been taken
        self._order = self._make_order()

    def take(self) -> np.ndarray:
        """Row indices of the next step, over all ranks; moves on. All ranks must call it (or `next`) alike."""
        if self.position >= len(self.rows):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._make_order()
        chosen = self._order[self.position : self.position + self.batch_rows]
        self.position += len(chosen)
        return chosen

    def next(self, rank: int = 0, world: int = 1, microbatch_rows: int | None = None) -> list[Batch]:
        """This rank's microbatches of the next step: as many on every rank, so that ranks that synchronize in each stay
        in step. Ranks differ by at most one row; one that runs out gets batches of no rows, which route nothing."""
        return [self.rows.batch(part) for part in share(self.take(), rank, world, microbatch_rows)]

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold to continue here: plain numbers and strings."""
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed, "shuffle": self.shuffle,
                "rows": len(self.rows), "fingerprint": self.rows.fingerprint}  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Continue at a saved position, on any number of ranks and with any `batch_rows`.
        Raises DataError: the state was saved on other rows, or with another seed or order."""
        now = self.state()
        for name in ("rows", "fingerprint", "seed", "shuffle"):
            if (saved := state.get(name)) != now[name]:
                how = "use the same data, tokenizer, row settings and seed, or start a new run"
                raise DataError(
                    f"cannot continue: the saved position has {name}={saved!r}, this is {now[name]!r}; {how}"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._order = self._make_order()

    def _make_order(self) -> np.ndarray:
        rows = len(self.rows)
        return epoch_order(rows, self.seed, self.epoch) if self.shuffle else np.arange(rows)


def share(chosen: np.ndarray, rank: int, world: int, microbatch_rows: int | None = None) -> list[np.ndarray]:
    """One rank's part of a step's rows, in microbatches; the same number of microbatches on every rank.
    >>> [[part.tolist() for part in share(np.arange(5), rank, 2, 2)] for rank in range(2)]
    [[[0, 1], [2]], [[3, 4], []]]
    """
    if not 0 <= rank < world:
        raise ConfigError(f"rank={rank} is not in 0..{world - 1}")
    if microbatch_rows is not None and microbatch_rows < 1:
        raise ConfigError(f"microbatch_rows={microbatch_rows} must be at least 1")
    mine = np.array_split(chosen, world)[rank]
    most = -(-len(chosen) // world)  # the first rank's share is never the smaller one
    cut = microbatch_rows or max(most, 1)
    return [mine[at : at + cut] for at in range(0, max(most, 1), cut)]
