"""Reference log-probs on disk: what a cache is keyed by, its files, and how an answer's values are found in it.

A cache is a folder with a name made from its key. `key.json` says what was scored and how; shards in the safetensors
format hold, for a run of answers, their hashes, and the log-prob of each of their tokens. Values are found by a hash of
the ids of prompt and answer, never by a row number, so no order, selection or sharding of the data can confuse them.

A shard is written under another name, synced and renamed: it is whole or not there, and a build that was killed goes
on with those that are missing. It carries the key's digest and a SHA-256 of its contents.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..config import Config
from ..errors import CheckpointError, DataError, StorageError

FORMAT = 1
KEY = "key.json"


@dataclass(frozen=True)
class CacheKey(Config):
    """Everything that the values depend on: a cache with another key is another cache."""

    dataset: str  # hash of the token ids of every pair
    tokenizer: str  # hash of the tokenizer, its chat template included
    weights: str  # hash of every parameter and buffer, and of the model's shape
    dtype: str  # of the weights
    precision: str  # of the routed experts' matmuls
    kernels: str  # the form of each operation, and the device
    truncation: str  # how long examples were cut

    @property
    def digest(self) -> str:
        """32 hexadecimal digits."""
        text = json.dumps({"format": FORMAT, **self.to_dict()}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def answer_hash(prompt: Sequence[int], answer: Sequence[int]) -> bytes:
    """16 bytes that stand for an answer to a prompt.
    >>> answer_hash([1, 2], [3]) == answer_hash([1], [2, 3])
    False
    """
    return hashlib.blake2b(np.array([len(prompt), *prompt, *answer], np.int64).tobytes(), digest_size=16).digest()


def shard_path(folder: Path, number: int) -> Path:
    """Where a shard is."""
    return folder / f"shard_{number:05d}.safetensors"


def write_file(path: Path, data: bytes) -> None:
    """Write a file that others see whole or not at all, and that is on the disk when this returns.
    Raises StorageError: it cannot be written."""
    half = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with half.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        half.rename(path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error}; free some space or choose another folder") from None
    finally:
        if half.exists():
            half.unlink()


def write_shard(folder: Path, number: int, values: Mapping[bytes, Tensor], key: CacheKey) -> None:
    """Write the log-probs of some answers, by hash, each [len(answer)]."""
    tensors = {
        "answer": torch.from_numpy(np.frombuffer(b"".join(values), np.uint8).reshape(-1, 16).copy()),
        "offset": torch.tensor([0, *(len(v) for v in values.values())]).cumsum(0),
        "logprob": torch.cat(list(values.values())),
    }
    write_file(shard_path(folder, number), save(tensors, {"key": key.digest, "sum": _sum(tensors)}))


def read_shard(folder: Path, number: int, key: CacheKey) -> dict[bytes, Tensor]:
    """What `write_shard` wrote.

    Raises:
        CheckpointError: missing, broken, altered, or of another key; names the file.
    """
    path = shard_path(folder, number)
    try:
        with safe_open(path, framework="pt") as f:
            told = f.metadata() or {}
            tensors = {name: f.get_tensor(name) for name in ("answer", "offset", "logprob")}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is missing or broken ({error}); the cache must be completed again") from None
    if told.get("key") != key.digest:
        raise CheckpointError(f"{path} belongs to the cache {told.get('key')}, not to {key.digest}; delete it")
    if told.get("sum") != _sum(tensors):
        raise CheckpointError(f"{path} was altered after it was written; delete it, and the cache is completed again")
    names = tensors["answer"].numpy().tobytes()
    parts = tensors["logprob"].split(tensors["offset"].diff().tolist())
    return {names[16 * i : 16 * i + 16]: part for i, part in enumerate(parts)}


def _sum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_key(folder: Path, key: CacheKey, shards: int, shard_pairs: int, made: Mapping[str, Any]) -> None:
    """Say in a folder what it is for, how many shards of how many pairs it will have, and how it is `made`."""
    told = {"format": FORMAT, "digest": key.digest, "shards": shards, "shard_pairs": shard_pairs, "key": key.to_dict()}
    write_file(folder / KEY, json.dumps({**told, "made": dict(made)}, indent=1).encode())


def read_key(folder: Path, wanted: CacheKey) -> tuple[int, int]:
    """A cache's number of shards, and of pairs in each.

    Raises:
        CheckpointError: there is none, it is broken or of another format, or for something else: what differs is named.
    """
    try:
        told = json.loads((folder / KEY).read_text())
        key, counts = CacheKey.from_dict(told["key"]), (int(told["shards"]), int(told["shard_pairs"]))
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(f"{folder / KEY} is missing or broken ({error}); delete the folder") from None
    both = [(f.name, getattr(key, f.name), getattr(wanted, f.name)) for f in fields(key)]
    if differ := [f"{name} is {there}, wanted {here}" for name, there, here in both if there != here]:
        raise CheckpointError(f"the reference cache {folder} is not of this run: {'; '.join(differ)}")
    if told.get("format") != FORMAT or told.get("digest") != key.digest:
        raise CheckpointError(f"{folder / KEY} was altered or is of another format; delete the folder")
    return counts


class ReferenceCache:
    """A cache in memory: ``cache(prompt, answer)`` is what `moekit.data.preference.Pairs` takes as `reference`.

    Args:
        values: log-probs of an answer's tokens, by `answer_hash`.
    """

    def __init__(self, values: Mapping[bytes, Tensor], folder: Path | str = "memory"):
        self.values, self.folder = values, folder

    @classmethod
    def open(cls, folder: str | Path, key: CacheKey) -> "ReferenceCache":
        """Read a whole cache.

        Raises:
            CheckpointError: it was made for something else (what differs is named), it is not complete, or a file of
                it is broken or altered.
        """
        folder, values = Path(folder), dict[bytes, Tensor]()
        for number in range(read_key(folder, key)[0]):
            values |= read_shard(folder, number, key)
        return cls(values, folder)

    def __call__(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        """[len(answer)] log-probs of an answer's tokens.

        Raises:
            DataError: the cache does not have it.
        """
        found = self.values.get(answer_hash(prompt, answer))
        if found is None:
            raise DataError(
                f"the reference cache {self.folder} has no scores of an answer of {len(answer)} tokens to a prompt of "
                f"{len(prompt)}; it was built on other data: build it on this"
            )
        return found
