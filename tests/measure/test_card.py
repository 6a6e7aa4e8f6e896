"""The run card: what it states, its three forms, and the hash of a model folder."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# (pandas annotates a column as anything that a column can be)

from __future__ import annotations

import hashlib
import json
from html.parser import HTMLParser

import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from moekit.config import DataConfig, LearnerConfig
from moekit.errors import CheckpointError, RunError
from moekit.measure.card import RunCard, base_checkpoint, hash_folder, losses, token_accounting
from moekit.measure.cost import CONVENTION
from moekit.measure.machine import environment
from moekit.measure.record import RunWriter, open_run

METRICS = pd.DataFrame(
    {
        "step/index": [1, 2, 2],
        "step/skipped": [0, 0, 1],
        "loss/total": [3.0, 1.0, float("nan")],
        "eval/sft": [None, 4.0, None],
        "tokens/supervised": [10, 20, 0],
        "tokens/context": [30, 40, 5],
        "tokens/filtered": [0, 0, 0],
        "tokens/padding": [20, 0, 0],
        "rows/dispatched": [160, 240, 0],
        "rows/supervised": [40, 80, 0],
        "rows/context": [120, 160, 0],
        "rows/backward": [160, 240, 0],
        "time/step_s": [1.0, 0.5, 0.5],
    }
)


def test_accounting_by_hand():
    got = token_accounting(METRICS)
    assert got["steps"] == 3 and got["skipped steps"] == 1
    assert got["positions"] == {"supervised": 30, "context": 75, "filtered": 0, "padding": 20, "total": 125}
    assert got["routed rows"] == {"dispatched": 400, "supervised": 120, "context": 280, "backward": 400}
    assert got["per supervised token"]["rows dispatched"] == pytest.approx(400 / 30)
    assert got["per supervised token"]["positions"] == pytest.approx(125 / 30)
    assert got["rates over the run"] == {
        "supervised tokens/s": 15.0, "tokens/s": 52.5, "positions/s": 62.5, "routed rows/s": 200.0,
    }  # fmt: skip
    empty = token_accounting(METRICS[:0])
    assert empty["per supervised token"]["positions"] == 0 and "skipped steps" not in empty


def test_losses_do_not_hide_a_nan():
    got = losses(METRICS)
    assert got["loss/total"]["first"] == 3 and got["loss/total"]["smallest"] == 1
    assert got["loss/total"]["last"] != got["loss/total"]["last"], "the last loss is NaN and is said to be"
    assert got["loss/total"]["not finite"] == 1
    assert got["eval/sft"] == {"first": 4.0, "last": 4.0, "smallest": 4.0, "not finite": 0}


def test_round_trip_through_a_run_folder(tmp_path):
    card = RunCard(
        "first",
        base=base_checkpoint("tiny", seed=3),
        objective={"name": "sft", "denominator": "global_tokens"},
        learner=LearnerConfig().to_dict(),
        layout={"world": 2, "dp": 2},
        batch={"batch_rows": 8, **DataConfig().to_dict()},
    )
    with RunWriter(tmp_path) as writer:
        writer.write(0, {"loss/total": 1.0})
        writer.card(card)
        started = open_run(tmp_path).card
        assert started is not None and started.ended is None
        writer.card(card.finish(METRICS, score={"before": 0.0, "after": 0.75}))
    got = open_run(tmp_path).card
    assert got is not None and got.ended is not None and got.seconds is not None
    assert got.base == {"preset": "tiny", "weights": "drawn at random", "seed": 3}
    assert got.results["score"]["after"] == 0.75 and got.accounting["positions"]["total"] == 125
    assert got.results["losses"]["loss/total"]["last"] == "nan", "strict JSON has no NaN"
    assert got.learner["betas"] == [0.9, 0.95] and got.seconds >= 0 and got.ended >= got.started
    assert RunCard.from_dict(json.loads(got.to_json())) == got
    text = repr(got)
    for fact in ("Token accounting", "global_tokens", "Batch construction", "torch", "score", "125", "Layout"):
        assert fact in text
    with pytest.raises(RunError, match="format=7"):
        RunCard.from_dict({"format": 7, "name": "x"})


class Page(HTMLParser):
    """Collects tags, addresses and text; notices a tag that is closed in the wrong order."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.links, self.text, self.open = [], [], "", []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_page_is_self_contained_and_escaped():
    card = RunCard("<b>&name", base={"path": "<script>alert(1)</script>"}, environment={}).finish(METRICS)
    page = Page(card.to_html())
    assert page.open == [] and page.links == [] and "script" not in page.tags
    assert "<script>alert(1)</script>" in page.text and "Run card: <b>&name" in page.text
    assert "125" in page.text and CONVENTION.splitlines()[0] in page.text
    cell = Page(card._repr_html_())
    assert cell.open == [] and "Token accounting" in cell.text


def test_environment_states_what_a_comparison_needs(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "123")
    got = environment()
    assert got["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert got["threads"]["torch"] == torch.get_num_threads()
    assert got["settings"]["MALLOC_TRIM_THRESHOLD_"] == "123" and got["allocator"] == "see settings"
    assert got["hardware"]["memory bytes"] > 2**20 and got["hardware"]["usable by this process"] >= 1
    assert not torch.cuda.is_initialized()
    json.dumps(got, allow_nan=False)


def test_hash_of_a_folder(tmp_path):
    """By its definition; it changes with content and name, not with the place or with other files."""
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        save_file({"w": torch.arange(6.0)}, folder / "model-00002.safetensors")
        save_file({"v": torch.arange(3.0)}, folder / "model-00001.safetensors")
        (folder / "config.json").write_text("{}")
    one, two = tmp_path / "one", tmp_path / "two"
    names = ["config.json", "model-00001.safetensors", "model-00002.safetensors"]
    lines = "".join(f"{n}\0{hashlib.sha256((one / n).read_bytes()).hexdigest()}\n" for n in names)
    assert hash_folder(one) == hash_folder(two) == hashlib.sha256(lines.encode()).hexdigest()
    assert base_checkpoint(one)["sha256"] == hash_folder(one)
    (two / "tokenizer.json").write_text("{}")
    assert hash_folder(one) == hash_folder(two)
    (two / "config.json").write_text('{"a": 1}')
    assert hash_folder(one) != hash_folder(two)
    (one / "model-00002.safetensors").rename(one / "model-00003.safetensors")
    assert hash_folder(one) not in (hash_folder(two), hashlib.sha256(lines.encode()).hexdigest())
    with pytest.raises(CheckpointError, match="no .safetensors"):
        (tmp_path / "empty").mkdir()
        hash_folder(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="there is no model folder"):
        hash_folder(tmp_path / "nope")
