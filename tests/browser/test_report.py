"""The report of a run in a real browser, on a screen of any width and in print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moekit.measure.card import RunCard
from moekit.measure.record import RunWriter
from moekit.viz.report import write_report

pytestmark = pytest.mark.browser

WIDE = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"  # what is cut off


def test_the_report_in_print_has_the_run_card_and_nothing_is_cut(tmp_path: Path, browser: Any) -> None:
    with RunWriter(tmp_path) as writer:
        writer.card(RunCard("run", base={"path": "a" * 60}, objective={"name": "sft"}, layout={"world": 2}))
        for step in range(5):
            rows = {"rows/supervised": 4e6, "rows/context": 8e6, "rows/dispatched": 12e6, "tokens/supervised": 1e6}
            load = {"policy/layers": torch.tensor([0]), "policy/forward/decided": torch.ones(1, 4, 4).long()}
            writer.write(step, {"loss/sft": 3.0 - step / 2, "time/step_s": 0.5} | rows, load)
    page = browser.new_page(viewport={"width": 420, "height": 900})
    page.goto(f"file://{write_report(tmp_path)}")
    card, numbers = page.locator(".moekit-card table").first, page.get_by_text("the numbers")
    assert page.evaluate(WIDE) == 0 and numbers.first.is_visible() and not card.is_visible()
    page.set_viewport_size({"width": 688, "height": 1000})  # A4 within the margins
    page.emulate_media(media="print")
    assert page.evaluate(WIDE) == 0 and card.is_visible() and not numbers.first.is_visible()
    tables = page.locator(".columns > div")
    assert tables.nth(0).bounding_box()["y"] == tables.nth(1).bounding_box()["y"], "side by side"
    page.close()
