"""A run as one page: what came out, what it cost, where the rows went. Nothing outside the file is needed to read it.

Figures are the static twins as SVG, with their numbers in a table under each; no script, no font, no network."""

import base64
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from ..data.batch import CLASSES
from ..errors import DataError
from ..measure.card import losses, token_accounting
from ..measure.files import write_atomic
from ..measure.headline import headline, in_units
from ..measure.record import open_run
from . import curves, denominators, masking, routing, static, tables, theme
from .headline import headline_figure
from .series import counts
from .theme import Figure, need, number

REPORT = "report.html"
READINGS = "denominators.json"
LOAD_TIME = "How the busiest expert of a layer compares with the mean, step by step."
TOOK = {"routed rows": "{} routed rows in all passes", "wire, kB": "{} kB on the wire", "time, ms": "{} ms",
        "memory, kB": "{} kB of memory"}  # fmt: skip
SIDE_BY_SIDE = (
    "The same batch, the same weights: what each convention would have done. Conventions that divide by something "
    "else than the supervised tokens of the whole step change the length of the gradient, its direction, or both."
)


def write_report(
    run_folder: str | Path, *, scores: Mapping[str, Sequence[float]] | None = None, readings: Any = None,
    interactive: bool = False,
) -> Path:  # fmt: skip
    """Write `report.html` into a run folder and return its path.
    Args:
        run_folder: a folder that `open_run` reads.
        scores: task -> (before, after), or a score for each of the run card's results["stages"]; None = the run card's
            results["scores"], if it has any.
        readings: the denominators side by side (`viz.denominators.side_by_side`); None = `denominators.json` in the
            folder, if there is one.
        interactive: plotly figures instead of pictures; the page then carries plotly's script (about 5 MB).
    Raises:
        RunError, DataError: no such run, or it has not recorded a single step.
        BackendError: plotly or matplotlib is missing.
        StorageError: the folder cannot be written; an older report stays."""
    for module in ("plotly.graph_objects", "matplotlib"):
        need(module, "a run's report")
    run = open_run(run_folder)
    if not len(run.metrics):
        raise DataError(f"{run.folder} has no recorded step yet, so there is nothing to report")
    card = run.card.to_dict() if run.card is not None else {}
    told = card.get("results", {}).get("scores", {}) if scores is None else scores
    stages = card.get("results", {}).get("stages", ("before", "after"))
    if readings is None and (run.folder / READINGS).exists():
        readings = json.loads((run.folder / READINGS).read_text())
    sums, found, sections, missing = token_accounting(run.metrics), losses(run.metrics), [], []
    for title, make in (
        ("Loss", lambda: _loss(run, found)),
        ("Routed work by class", lambda: _work(run, sums)),
        ("What a supervised token costs", lambda: _cost(run)),
        ("Expert load", lambda: _load(run)),
        ("Expert load over time", lambda: (LOAD_TIME, routing.load_over_time(run))),
        ("Loss denominators side by side", lambda: (SIDE_BY_SIDE, denominators.side_by_side(readings or {}))),
    ):
        try:
            if readings or "denominators" not in title:
                text, *figures = make()
                drawn = [_figure(f, interactive, not sections and i == 0) for i, f in enumerate(figures)]
                sections.append((title, text, drawn))
        except DataError as error:
            missing.append(str(error))
    shut = run.card._repr_html_().replace("<details open>", "<details>") if run.card else "This run has no card."
    page = theme.page(
        "report.html.jinja", run=run, run_card=card, sums=sums, losses=found, scores=told, stages=stages, number=number,
        short=_short, sections=sections, missing=missing, card=Markup(shut), filename=lambda path: Path(path).name,
        date=lambda stamp: datetime.fromisoformat(stamp).strftime("%d %B %Y, %H:%M UTC"),
    )  # fmt: skip
    return write_atomic(run.folder / REPORT, page.encode())


def _figure(fig: Figure, interactive: bool, first: bool) -> tuple[str, str, Markup, Markup]:
    """Title, how to read it, the figure without its title (which the page says) and the room for it, its numbers."""
    title, how = theme.heading(fig)
    numbers, words = Markup(tables.to_html(fig)), " ".join(tables.text(fig, 4).split())
    above = any(n.yref == "paper" and n.yanchor == "bottom" and n.y > 0.99 for n in fig.layout.annotations)
    room = fig.layout.margin.t - (44 if above else 14)
    fig.update_layout(title=None, margin_t=fig.layout.margin.t - room, height=fig.layout.height - room)
    if interactive:  # the script goes in once
        return title, how, Markup(fig.to_html(full_html=False, include_plotlyjs=first)), numbers
    data = base64.b64encode(static.render(fig, "svg")).decode()
    return title, how, Markup('<img alt="{}" src="data:image/svg+xml;base64,{}">').format(words, data), numbers


def _loss(run: Any, found: dict[str, Any]) -> tuple[Any, ...]:
    name = next((n for n in ("loss/sft", "loss/total", *found) if n in found), None)
    if name is None:
        raise DataError("no loss was recorded")
    seen, loss = int(run.metrics[name].notna().sum()), found[name]
    panel = (name, "eval/sft") if "eval/sft" in found and name != "eval/sft" else name
    first, last, smallest = (number(loss[which]) for which in ("first", "last", "smallest"))
    text = f"{name} went from {first} to {last} nats a token over {seen:,} steps; the smallest was {smallest}."
    return text, curves.curves(run, panel, title="Loss", smooth=max(1, min(seen // 12, 50)))


def _work(run: Any, sums: dict[str, Any]) -> tuple[Any, ...]:
    cost, rows = masking.per_supervised(run), sums["routed rows"]
    parts = ", ".join(f"{number(cost[f'rows/{c}'])} {c}" for c in CLASSES if cost[f"rows/{c}"])
    text = f"One supervised token took {number(cost['rows'])} routed rows: {parts}."
    if elided := rows.get("elided"):
        text += f" Another {elided:,} rows were elided: they were proved not to reach the loss."
    text += f" {rows['dropped']:,} rows were dropped." if rows.get("dropped") else ""
    return text, masking.routed_work(run)


def _cost(run: Any) -> tuple[Any, ...]:
    table: Any = headline(run)
    some: Any = in_units(table, ("component",))
    told = [TOOK[what].format(number(float(some[what].sum()))) for what in TOOK if some[what].any()]
    most = some["time, ms"].dropna()
    text = f"One supervised token took {', '.join(told)}."
    if len(most) > 1:
        text += f" {100 * most.max() / most.sum():.0f} % of the time went to the {most.idxmax()}."
    return text, headline_figure(table, title="What one supervised token costs")


def _load(run: Any) -> tuple[Any, ...]:
    figures, words, when = [], [], ""
    for scope in ("all", "supervised"):
        count_LE, layers, when = counts(run, None, scope)
        load_LE = routing.balanced_share(count_LE)
        if np.isfinite(load_LE).any():
            i, e = np.unravel_index(np.nanargmax(load_LE), load_LE.shape)
            dead = int((load_LE == 0).sum())
            none = f"{dead} expert{'s' * (dead > 1)} received no row" if dead else "no expert went without rows"
            most = f"expert {e} of layer {layers[i]} with {load_LE[i, e]:.2f} times its balanced share, and {none}"
            words.append(f"over {routing.SCOPE[scope]} the busiest is {most}")
            figures.append(routing.load_heatmap(run, scope=scope))
    text = "; ".join(words)
    return f"{text[:1].upper()}{text[1:]} ({when}).", *figures


def _short(value: float | None) -> str:
    return f"{value:.2f}" if value is not None and 0.01 <= abs(value) < 100 else number(value)
