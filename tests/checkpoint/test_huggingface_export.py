"""An exported folder is whole or not there; tokenizer files come along; shards keep to their size."""

from __future__ import annotations

import json
import resource
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from moekit.config import ModelConfig
from moekit.errors import CheckpointError, ConfigError, StorageError
from moekit.learner.weights import export, load
from moekit.model.transformer import Transformer

SHAPE = {"vocab": 32, "width": 16, "layers": 2, "heads": 2, "experts": 4, "top_k": 2, "expert_width": 8}


def small(**changes) -> Transformer:
    return Transformer(ModelConfig(**{**SHAPE, "qk_norm": "head", "family": "qwen3_moe", "eos_id": 3, **changes}))


def tokenizer(tokens: int = 32) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(tokens)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w3", unk_token="w0")
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return made


def contents(folder) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_shards_hold_every_tensor_once_and_keep_to_their_size(tmp_path):
    model = small()
    written = export(model, tmp_path / "model", max_shard_bytes=4000)
    index = json.loads((written / "model.safetensors.index.json").read_text())
    stored = {f.name: load_file(f) for f in written.glob("*.safetensors")}
    assert sorted(stored) == [f"model-{i:05d}-of-{len(stored):05d}.safetensors" for i in range(1, len(stored) + 1)]
    names = [(name, file) for file, tensors in stored.items() for name in tensors]
    assert dict(names) == index["weight_map"]
    assert len(names) == len(dict(names))
    numbers = sum(p.numel() for p in model.parameters())
    assert index["metadata"] == {"total_parameters": numbers, "total_size": 4 * numbers}
    sizes = [sum(t.nbytes for t in tensors.values()) for tensors in stored.values()]
    assert sum(sizes) == 4 * numbers
    assert max(sizes) <= 4000
    one = export(model, tmp_path / "one", max_shard_bytes=1)  # every tensor larger than that: a file of its own each
    assert len(list(one.glob("*.safetensors"))) == len(names)
    assert all(torch.equal(a, b) for a, b in zip(load(one).parameters(), model.parameters(), strict=True))


def test_tokenizer_object_and_folder(tmp_path):
    words = tokenizer()
    first = export(small(), tmp_path / "first", words)
    read = AutoTokenizer.from_pretrained(first)
    assert read("w5 w7")["input_ids"] == [5, 7]
    assert read.chat_template == words.chat_template
    (first / "generation_config.json").write_text('{"eos_token_id": [3, 4], "top_p": 0.9}')
    second = export(small(), tmp_path / "second", first)
    copied = {n: b for n, b in contents(first).items() if n not in ("config.json", "model.safetensors")}
    assert {n: contents(second)[n] for n in copied} == copied
    assert AutoTokenizer.from_pretrained(second)("w5 w7")["input_ids"] == [5, 7]
    assert GenerationConfig.from_pretrained(second).eos_token_id == [3, 4]
    plain = export(small(), tmp_path / "plain")
    assert GenerationConfig.from_pretrained(plain).eos_token_id == 3
    assert not (plain / "tokenizer.json").exists()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    tokenizer(33).save_pretrained(tmp_path / "words")
    for words in (tokenizer(33), tmp_path / "words", str(tmp_path / "words")):
        with pytest.raises(ConfigError, match="33 tokens with ids up to 32, the model vocab=32"):
            export(small(), tmp_path / "model", words)
    assert not (tmp_path / "model").exists()
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        export(small(), tmp_path / "model", tmp_path)
    (tmp_path / "words" / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="tokenizer.json is not a tokenizer"):
        export(small(), tmp_path / "model", tmp_path / "words")


def test_an_existing_folder_is_kept_unless_overwrite(tmp_path):
    first = export(small(), tmp_path / "model", tokenizer())
    before = contents(first)
    with pytest.raises(CheckpointError, match="exists already.*overwrite=True"):
        export(small(vocab=40), first)
    assert contents(first) == before
    export(small(vocab=40), first, first, overwrite=True)  # its own tokenizer files survive
    after = contents(first)
    assert after["tokenizer.json"] == before["tokenizer.json"]
    assert load(first).config.vocab == 40
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_overwrite_replaces_hugging_face_folders_only(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("precious")
    with pytest.raises(CheckpointError, match="no config.json of a Hugging Face model.*not overwritten"):
        export(small(), tmp_path / "thesis", overwrite=True)
    assert contents(tmp_path) == {"thesis/chapter1.tex": b"precious"}
    (tmp_path / "thesis" / "config.json").write_text('{"lr": 0.1}')  # as in a run folder
    with pytest.raises(CheckpointError, match="not overwritten"):
        export(small(), tmp_path / "thesis", overwrite=True)
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "precious"


def test_a_failure_half_way_leaves_nothing_new_and_the_old(tmp_path):
    class Broken:
        def get_vocab(self):
            return {}

        def save_pretrained(self, folder):
            raise RuntimeError("no tokenizer today")

    with pytest.raises(RuntimeError, match="no tokenizer today"):
        export(small(), tmp_path / "model", Broken())
    assert list(tmp_path.iterdir()) == []
    first = export(small(), tmp_path / "model")
    before = contents(tmp_path)
    with pytest.raises(RuntimeError):
        export(small(vocab=40), first, Broken(), overwrite=True)
    assert contents(tmp_path) == before


def test_a_disk_that_fills_up_while_writing(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # the kernel refuses to let a file grow past this
    try:
        with pytest.raises(StorageError, match=r"cannot write .*model"):
            export(small(), tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_seen_before_writing(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(StorageError, match=r"needs [0-9,]+ bytes and .* has 1,000 free; nothing was written"):
        export(small(), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("/proc/moekit-export", tmp_path / "file" / "model"):
        with pytest.raises(StorageError, match="cannot write|nothing was"):
            export(small(), place)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_refusals_come_before_any_work(tmp_path):
    with pytest.raises(ConfigError, match="cannot hold qk_norm='head'"):
        export(small(), tmp_path / "model", family="olmoe")
    with pytest.raises(ConfigError, match="naming='both'"):
        export(small(), tmp_path / "model", naming="both")
    with pytest.raises(ConfigError, match="max_shard_bytes=0"):
        export(small(), tmp_path / "model", max_shard_bytes=0)
    with pytest.raises(ConfigError, match="shared experts"):
        export(small(shared_width=8), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_no_family_is_exported_as_the_one_asked_for(tmp_path):
    written = export(small(family=""), tmp_path / "model", family="qwen3_moe")
    assert load(written).config.family == "qwen3_moe"
