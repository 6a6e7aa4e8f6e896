"""Bad input is one clear error, of its kind, before any work, and leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from moekit.config import DataConfig
from moekit.errors import CheckpointError, ConfigError, DataError, NumericsError, RunExistsError, StorageError
from moekit.recipes import setup
from moekit.recipes.sft import train

GOOD = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
LINES = {  # what stands in line 2 of a data file -> what the error must say
    "broken JSON": ('{"messages": [', r"line 2: broken JSON"),
    "no role": ('{"messages": [{"content": "hello"}]}', r"line 2: messages\[0\] has no role"),
    "role unknown to the template": (
        '{"messages": [{"role": "oracle", "content": "hm"}, {"role": "assistant", "content": "b"}]}',
        r"line 2: .*refuses.*oracle",
    ),
    "nothing to learn": ('{"messages": [{"role": "user", "content": "a"}]}', r"line 2: no assistant message"),
    "no usable fields": ('{"text": "hello"}', r"line 2: no usable fields among text"),
}


def refused(config, kind, says):
    """`train` raises, has not made the run folder, and has not taken a step."""
    out = Path(config.out)
    there = out.exists()
    with pytest.raises(kind, match=says) as caught:
        train(config)
    assert type(caught.value) is kind
    assert out.exists() == there


@pytest.mark.parametrize("name", LINES)
def test_a_bad_line_is_named(kit, tmp_path, name):
    line, says = LINES[name]
    data = tmp_path / "data.jsonl"
    data.write_text(GOOD + line + "\n" + GOOD)
    refused(kit.config(tmp_path / "run", data=str(data)), DataError, says)


def test_missing_and_empty_data(kit, tmp_path):
    refused(kit.config(tmp_path / "run", data="gone.jsonl"), DataError, "no such file or folder: gone.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    refused(kit.config(tmp_path / "run", data=str(empty)), DataError, "empty")
    (tmp_path / "data.csv").write_text("a,b\n")
    refused(kit.config(tmp_path / "run", data=str(tmp_path / "data.csv")), DataError, ".csv")


def test_a_template_without_spans(kit, tmp_path):
    """A template whose own text depends on the last answer's length: nothing proves where a turn begins and ends."""
    folder = tmp_path / "tokenizer"
    shutil.copytree(kit.tokenizer, folder)
    template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {{ messages[-1].content | length }} {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    data = tmp_path / "data.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bx"}]
    data.write_text(GOOD + json.dumps({"messages": turns}) + "\n")
    refused(kit.config(tmp_path / "run", tokenizer=str(folder), data=str(data)), DataError, "line 2.*generation")
    (folder / "chat_template.jinja").unlink()
    refused(kit.config(tmp_path / "run", tokenizer=str(folder)), DataError, "no chat template")


def test_a_tokenizer_that_is_not_the_model_s(kit, tmp_path):
    from moekit.data.tokenizer import train_tokenizer

    texts = [" ".join(f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in "lmnrst")]
    larger = train_tokenizer(texts, 340, tmp_path / "larger")
    assert len(larger) > kit.shape.vocab
    refused(kit.config(tmp_path / "run", tokenizer=str(tmp_path / "larger")), ConfigError, "vocab=")


def test_rows_longer_than_the_model(kit, tmp_path):
    refused(kit.config(tmp_path / "run", rows=DataConfig(length=97)), ConfigError, "length=97 .* 96 positions")
    train(kit.config(tmp_path / "run", rows=DataConfig(length=96), steps=1, export=False))


def test_nan_weights_are_refused(kit, tmp_path, broken_model):
    folder, tensor = broken_model
    refused(kit.config(tmp_path / "run", model=str(folder)), NumericsError, tensor)


def test_a_model_that_is_none(kit, tmp_path):
    refused(kit.config(tmp_path / "run", model="huge"), ConfigError, "neither a folder nor a preset.*tiny")
    refused(kit.config(tmp_path / "run", model="tiny"), ConfigError, "preset 'tiny' has no tokenizer")
    (tmp_path / "folder").mkdir()
    refused(kit.config(tmp_path / "run", model=str(tmp_path / "folder")), CheckpointError, "config.json")


def test_a_preset_gets_the_tokenizer_s_special_ids(kit, tmp_path):
    config = kit.config(tmp_path / "run", model="tiny", tokenizer=str(kit.tokenizer), steps=1)
    told = train(config)
    values = json.loads((Path(told["export"]) / "config.json").read_text())
    tokenizer = json.loads((kit.tokenizer / "tokenizer.json").read_text())
    ids = {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    assert values["eos_token_id"] == ids["<|end|>"] and values["pad_token_id"] == ids["<|pad|>"]


def test_run_folders_that_cannot_be(kit, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    refused(kit.config(file), StorageError, "is a file")
    refused(kit.config(file / "run"), StorageError, "cannot write the run folder")
    refused(kit.config(Path("/proc/moekit-run")), StorageError, "cannot write the run folder")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    refused(kit.config(mine), RunExistsError, "exists")
    refused(kit.config(mine, overwrite=True), RunExistsError, "not a run")
    refused(kit.config(mine, resume=True), RunExistsError, "not a run")
    refused(kit.config(tmp_path / "none", resume=True), CheckpointError, "nothing to resume")
    assert (mine / "thesis.tex").read_text() == "years of work"


def test_an_export_that_the_family_cannot_hold_is_refused_at_the_start(kit, tmp_path, monkeypatch):
    shape = replace(kit.shape, selection_bias=True)
    monkeypatch.setattr(setup, "read_config", lambda _: shape)
    refused(kit.config(tmp_path / "run"), ConfigError, "selection_bias")
