"""The report: one page that needs nothing else, with the numbers of the run."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from moekit.errors import DataError, RunError
from moekit.measure.card import RunCard
from moekit.measure.record import RunWriter, open_run
from moekit.viz.report import write_report

READINGS = {
    "global_tokens": {"loss": 2.0, "norm_ratio": 1.0, "cosine": 1.0},
    "microbatch_mean": {"loss": 2.5, "norm_ratio": 0.75, "cosine": 0.99},
}


def record(folder: Path, steps: int = 5, arrays: bool = True) -> Path:
    """A run of two layers, four experts, top 2; ten supervised and twenty context positions a step."""
    decided = torch.zeros(2, 4, 4, dtype=torch.int64)
    decided[0, 0] = torch.tensor([10, 6, 4, 0])
    decided[:, 1] = 10
    decided[1, 0] = 5
    with RunWriter(folder) as writer:
        writer.card(RunCard(folder.name, base={"preset": "tiny"}, objective={"name": "sft"}, layout={"world": 2}))
        for step in range(steps):
            writer.write(
                step,
                {
                    "loss/sft": 3.0 - step / 2, "tokens/supervised": 10, "tokens/context": 20, "tokens/filtered": 0,
                    "tokens/padding": 2, "rows/dispatched": 120, "rows/supervised": 40, "rows/context": 80,
                    "rows/filtered": 0, "rows/padding": 0, "rows/elided": 8, "load/max_over_mean": 1.5,
                    "time/step_s": 0.5, "step/skipped": 0, "wire/rows_bytes": 1e4,
                },
                {"policy/layers": torch.tensor([0, 2]), "policy/forward/decided": decided} if arrays else None,
            )  # fmt: skip
        writer.flush()
        card = open_run(folder).card
        assert card is not None
        writer.card(card.finish(open_run(folder).metrics, scores={"held-out": [0.125, 0.75]}))
    return folder


class Page(HTMLParser):
    """Text of a page, its images' sources, and whatever it would load from outside."""

    def __init__(self, page: str):
        super().__init__()
        self.text, self.images, self.outside, self.tags = [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if tag == "img" and name == "src":
                self.images.append(value)
            elif name in ("src", "href"):
                self.outside.append((tag, value))

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_stands_alone_and_has_the_numbers(tmp_path: Path) -> None:
    folder = record(tmp_path / "my <b>run")
    (folder / "denominators.json").write_text(json.dumps(READINGS))
    path = write_report(folder)
    assert path == folder / "report.html"
    source = path.read_text()
    page = Page(source)
    assert not page.outside and "script" not in page.tags and "link" not in page.tags
    assert not re.search(r"url\(|@import", source) and "my <b>" not in source
    assert len(page.images) == 7 and all(i.startswith("data:image/svg+xml;base64,") for i in page.images)
    assert len(source) < 1_500_000
    text = " ".join(" ".join(page.text).split())
    for said in (
        "my <b>run",
        "SFT · from tiny · 2 processes · 5 steps",
        "loss/sft went from 3 to 1 nats a token over 5 steps",
        "One supervised token took 12 routed rows: 4 supervised, 8 context. Another 40 rows were elided",
        "One supervised token took 1 kB on the wire, 50 ms.",
        "expert 0 of layer 0 with 1.33 times its balanced share, and no expert",  # 20 of 60 rows, 4 experts
        "expert 0 of layer 0 with 2.00 times its balanced share, and 1 expert received no row",  # 10 of 20
        "held-out 0.125 → 0.75",
        "supervised tokens/s 20.0",
        "tokens/s 60.0",
        "positions/s 64.0",
        "routed rows/s 240.0",
        "total 160 600 12",
        "Loss denominators side by side",
        "Run card",
    ):
        assert said in text, said


def test_what_was_not_recorded_is_said(tmp_path: Path) -> None:
    text = write_report(record(tmp_path, arrays=False)).read_text()
    assert "Not shown: " in text and "Expert load, all tokens" not in text and "side by side" not in text


def test_scores_and_readings_can_be_given_and_an_interactive_page_needs_no_network(tmp_path: Path) -> None:
    path = write_report(record(tmp_path), scores={"held-out": (0.5, 1.0)}, readings=READINGS, interactive=True)
    source = path.read_text()
    assert source.count("Plotly.newPlot(") == 7 and "<img" not in source
    assert not re.search(r"<script[^>]+src=", source)
    assert "0.50 → </span>1.00" in source


def test_no_report_without_a_run_or_a_step(tmp_path: Path) -> None:
    with pytest.raises(RunError):
        write_report(tmp_path / "absent")
    RunWriter(tmp_path).close()
    with pytest.raises(DataError, match="no recorded step"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()
