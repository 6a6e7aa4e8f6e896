"""Reference log-probs on disk: found by content, whole or not there, never of another key."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from moekit.data.preference import Pair, Pairs
from moekit.errors import CheckpointError, ConfigError, DataError, StorageError
from moekit.objectives.dpo import DPO
from moekit.objectives.reference import (
    CacheKey,
    ReferenceCache,
    answer_hash,
    read_shard,
    shard_path,
    write_key,
    write_shard,
)  # fmt: skip

KEY = CacheKey("data", "tokenizer", "weights", "float32", "model", "cpu", "length=8")


def values(*ids):
    return {answer_hash([1, 2], [i]): torch.tensor([-float(i)]) for i in ids}


def test_bc_100_scores_belong_to_the_answer():
    """BC-100: ids 7, 3, 9 have sums -1, -2, -3. Order [9, 7], and one each on two ranks, serve theirs; others raise."""
    scores = {7: -1.0, 3: -2.0, 9: -3.0}
    cache = ReferenceCache({answer_hash([1], [i]): torch.tensor([s]) for i, s in scores.items()})
    pairs = Pairs([Pair([1], [i], [i]) for i in scores], 4, reference=cache)

    def served(pairs, indices):
        batch = pairs.batch(indices)
        return batch.flat.at_labels("ref_logprob")[batch.flat.at_labels("chosen") == 1].tolist()

    chosen = replace(pairs, pairs=[pairs.pairs[2], pairs.pairs[0]])  # shuffled and selected
    assert served(chosen, [0, 1]) == [-3, -1]
    assert [served(chosen, part) for part in ([0], [1])] == [[-3], [-1]]
    assert served(replace(pairs, share=False), [0, 2]) == [-1, -3]
    with pytest.raises(DataError, match="no scores of an answer of 1 tokens to a prompt of 1"):
        replace(pairs, pairs=[Pair([1], [8], [7])]).batch()
    with pytest.raises(ConfigError, match="update_every=5 with reference='cached'"):
        DPO(reference="cached", update_every=5)


def test_hashes_tell_prompt_from_answer():
    assert answer_hash([1, 2], [3]) != answer_hash([1], [2, 3]) != answer_hash([1, 2, 3], [])
    assert answer_hash([256], [1]) != answer_hash([0], [1]) and len(answer_hash([], [1])) == 16


def test_written_and_read(tmp_path):
    folder = tmp_path / "a" / "b"
    write_key(folder, KEY, 2, 3, {"by": "test"})
    write_shard(folder, 0, values(1, 2, 3), KEY)
    with pytest.raises(CheckpointError, match="shard_00001.safetensors is missing or broken"):
        ReferenceCache.open(folder, KEY)
    write_shard(folder, 1, {answer_hash([5], [6, 7]): torch.tensor([-0.5, -1.5], dtype=torch.float32)}, KEY)
    cache = ReferenceCache.open(folder, KEY)
    assert (
        len(cache.values) == 4 and cache([5], [6, 7]).tolist() == [-0.5, -1.5] and cache([1, 2], [3]).tolist() == [-3]
    )
    assert sorted(p.name for p in folder.iterdir()) == [
        "key.json",
        "shard_00000.safetensors",
        "shard_00001.safetensors",
    ]
    assert load_file(shard_path(folder, 1))["logprob"].tolist() == [-0.5, -1.5]  # plain safetensors, no pickle


@pytest.mark.parametrize("field", [*KEY.to_dict()])
def test_any_field_of_the_key_makes_another_cache(tmp_path, field):
    write_key(tmp_path, KEY, 1, 3, {})
    write_shard(tmp_path, 0, values(1), KEY)
    other = replace(KEY, **{field: "other"})
    assert other.digest != KEY.digest
    with pytest.raises(CheckpointError, match=f"not of this run: {field} is {getattr(KEY, field)}, wanted other"):
        ReferenceCache.open(tmp_path, other)
    with pytest.raises(CheckpointError, match=f"belongs to the cache {KEY.digest}, not to {other.digest}"):
        read_shard(tmp_path, 0, other)


def test_damage_is_found(tmp_path):
    """A changed value, a swapped pair of hashes, a cut file, a broken or edited key."""
    write_key(tmp_path, KEY, 1, 3, {})
    write_shard(tmp_path, 0, values(1, 2, 3), KEY)
    path, whole = shard_path(tmp_path, 0), shard_path(tmp_path, 0).read_bytes()
    told = {"key": KEY.digest, "sum": "0" * 64}
    for name in ("logprob", "answer", "offset"):
        tensors = load_file(path)
        tensors[name] = tensors[name].flip(0)
        save_file(tensors, path, told)
        with pytest.raises(CheckpointError, match=r"shard_00000.safetensors was altered"):
            read_shard(tmp_path, 0, KEY)
        path.write_bytes(whole)
    for at in (len(whole) - 1, len(whole) - 20):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match="shard_00000.safetensors was altered"):
            read_shard(tmp_path, 0, KEY)
    path.write_bytes(whole[:-3])
    with pytest.raises(CheckpointError, match="shard_00000.safetensors is missing or broken"):
        read_shard(tmp_path, 0, KEY)
    path.write_bytes(whole)
    text = (tmp_path / "key.json").read_text()
    (tmp_path / "key.json").write_text(text.replace(KEY.digest, "0" * 32))
    with pytest.raises(CheckpointError, match=r"key.json was altered"):
        ReferenceCache.open(tmp_path, KEY)
    (tmp_path / "key.json").write_text(text[:-9])
    with pytest.raises(CheckpointError, match=r"key.json is missing or broken"):
        ReferenceCache.open(tmp_path, KEY)
    (tmp_path / "key.json").unlink()
    with pytest.raises(CheckpointError, match=r"key.json is missing or broken .*No such file"):
        ReferenceCache.open(tmp_path, KEY)


def test_what_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        write_key(tmp_path / "file", KEY, 1, 3, {})
    with pytest.raises(StorageError, match="cannot write"):
        write_shard(tmp_path / "file", 0, values(1), KEY)
