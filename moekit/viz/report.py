"""A run as one page: what came out, what it cost, where the rows went. Nothing outside the file is needed to read it.

Figures are the static twins as SVG, with their numbers in a table under each; no script, no font, no network.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.batch import CLASSES
from ..errors import DataError
from ..measure.card import losses, token_accounting
from ..measure.files import write_atomic
from ..measure.record import open_run
from . import curves, denominators, masking, routing, static, tables
from .series import counts
from .theme import CLASS, heading, need, number

if TYPE_CHECKING:
    import plotly.graph_objects as go

REPORT = "report.html"
READINGS = "denominators.json"


def write_report(
    run_folder: str | Path,
    *,
    scores: Mapping[str, Any] | None = None,
    readings: Any = None,
    interactive: bool = False,
) -> Path:
    """Write `report.html` into a run folder and return its path.

    Args:
        run_folder: a folder that `open_run` reads.
        scores: task -> (before, after), or one number; None = the run card's results["scores"], if it has any.
        readings: the denominators side by side (`viz.denominators.side_by_side`); None = `denominators.json` in the
            folder, if there is one.
        interactive: plotly figures instead of pictures; the page then carries plotly's script (about 5 MB).

    Raises:
        RunError: no such run.
        DataError: the run has not recorded a single step.
        BackendError: plotly or matplotlib is missing.
        StorageError: the folder cannot be written; an older report stays.
    """
    need("plotly.graph_objects", "a run's report")
    need("matplotlib", "a run's report")
    run = open_run(run_folder)
    metrics = run.metrics
    if not len(metrics):
        raise DataError(f"{run.folder} has no recorded step yet, so there is nothing to report")
    card = run.card.to_dict() if run.card is not None else {}
    scores = scores if scores is not None else card.get("results", {}).get("scores")
    if readings is None and (run.folder / READINGS).exists():
        readings = json.loads((run.folder / READINGS).read_text())
    sums = token_accounting(metrics)
    page = _Page(interactive)
    missing = []
    for make in (_loss, _work, _load, _load_time):
        try:
            make(page, run, sums)
        except DataError as error:
            missing.append(str(error))
    if readings:
        _denominators(page, readings)
    note = f"<p class='note'>Not shown: {html.escape('; '.join(missing))}.</p>" if missing else ""
    whole = _frame(
        run.folder.name,
        _header(run, card, sums) + _tiles(metrics, sums, scores) + _numbers(metrics, sums, scores)
        + "".join(page.parts) + note + _card(run) + _footer(run),
    )  # fmt: skip
    return write_atomic(run.folder / REPORT, whole.encode())


class _Page:
    """Sections in order; the script of interactive figures goes in once."""

    def __init__(self, interactive: bool):
        self.parts: list[str] = []
        self.interactive = interactive
        self._script = False

    def section(self, title: str, text: str, *figures: go.Figure) -> None:
        """A heading, what was found, and figures. With several figures each gets its own title as a smaller heading."""
        self.parts.append(f"<section><h2>{html.escape(title)}</h2><p class='found'>{text}</p>")
        for fig in figures:
            name, how = heading(fig)
            numbers = tables.to_html(fig)
            if len(figures) > 1:
                self.parts.append(f"<h3>{html.escape(name)}</h3>")
            self.parts.append(
                f"<figure>{self._draw(_without_title(fig))}<figcaption>{html.escape(how)}</figcaption></figure>"
                f"<details><summary>the numbers</summary><div class='scroll'>{numbers}</div></details>"
            )
        self.parts.append("</section>")

    def _draw(self, fig: go.Figure) -> str:
        if self.interactive:
            drawn = fig.to_html(full_html=False, include_plotlyjs=not self._script)
            self._script = True
            return drawn
        data = base64.b64encode(static.render(fig, "svg")).decode()
        words = html.escape(" ".join(tables.text(fig, 4).split()), quote=True)
        return f'<img alt="{words}" src="data:image/svg+xml;base64,{data}">'


def _without_title(fig: go.Figure) -> go.Figure:
    """The figure without its title, which the page says, and without the room for it."""
    above = any(note.yref == "paper" and note.yanchor == "bottom" and note.y > 0.99 for note in fig.layout.annotations)
    room = fig.layout.margin.t - (44 if above else 14)
    fig.layout.title = None
    fig.layout.margin.t -= room
    fig.layout.height -= room
    return fig


def _loss(page: _Page, run: Any, sums: dict[str, Any]) -> None:
    found = losses(run.metrics)
    name = next((n for n in ("loss/sft", "loss/total", *found) if n in found), None)
    if name is None:
        raise DataError("no loss was recorded")
    seen, first = int(run.metrics[name].notna().sum()), found[name]
    smooth = max(1, min(seen // 12, 50))
    panel = (name, "eval/sft") if "eval/sft" in found and name != "eval/sft" else name
    text = (
        f"<code>{name}</code> went from {number(first['first'])} to {number(first['last'])} nats a token over {seen:,} "
        f"steps; the smallest was {number(first['smallest'])}."
    )
    page.section("Loss", text, curves.curves(run, panel, title="Loss", smooth=smooth))


def _work(page: _Page, run: Any, sums: dict[str, Any]) -> None:
    fig = masking.routed_work(run)
    cost, rows = masking.per_supervised(run), sums["routed rows"]
    parts = [f"{number(cost[f'rows/{c}'])} {c}" for c in CLASSES if cost[f"rows/{c}"]]
    elided = rows.get("elided", 0)
    text = (
        f"One supervised token took <b>{number(cost['rows'])} routed rows</b>: {', '.join(parts)}. "
        + (f"Another {elided:,} rows were elided: they were proved not to reach the loss." if elided else "")
        + (f" {rows['dropped']:,} rows were dropped." if rows.get("dropped") else "")
    )
    page.section("Routed work by class", text, fig)


def _load(page: _Page, run: Any, sums: dict[str, Any]) -> None:
    figures, words = [], []
    for scope in ("all", "supervised"):
        figures.append(routing.load_heatmap(run, scope=scope))
        count_LE, layers, when = counts(run, None, scope)
        load_LE = routing.balanced_share(count_LE)
        if not np.isfinite(load_LE).any():
            figures.pop()
            continue
        i, e = np.unravel_index(np.nanargmax(load_LE), load_LE.shape)
        dead = int((load_LE == 0).sum())
        words.append(
            f"over {routing.SCOPE[scope]} the busiest is expert {e} of layer {layers[i]} with "
            f"{load_LE[i, e]:.2f} times its balanced share, and "
            + (f"{dead} expert{'s' if dead > 1 else ''} received no row" if dead else "no expert went without rows")
        )
    text = "; ".join(words)
    page.section("Expert load", html.escape(text[:1].upper() + text[1:] + f" ({when})."), *figures)


def _load_time(page: _Page, run: Any, sums: dict[str, Any]) -> None:
    fig = routing.load_over_time(run)
    page.section(
        "Expert load over time", "How the busiest expert of a layer compares with the mean, step by step.", fig
    )


def _denominators(page: _Page, readings: Any) -> None:
    fig = denominators.side_by_side(readings)
    text = (
        "The same batch, the same weights: what each convention would have done. Conventions that divide by something "
        "else than the supervised tokens of the whole step change the length of the gradient, its direction, or both."
    )
    page.section("Loss denominators side by side", text, fig)


def _header(run: Any, card: dict[str, Any], sums: dict[str, Any]) -> str:
    base, layout, batch = card.get("base", {}), card.get("layout", {}), card.get("batch", {})
    facts = [str(card.get("objective", {}).get("name", "")).upper()]
    facts.append(f"from {base.get('path') or base.get('preset')}" if base else "")
    facts.append(f"on {Path(str(batch['data'])).name}" if batch.get("data") else "")
    world = layout.get("world")
    facts.append(f"{world} process{'es' if world != 1 else ''}" if world else "")
    facts.append(f"{sums['steps']:,} steps")
    if card.get("seconds"):
        facts.append(f"{number(card['seconds'])} s")
    if card.get("started"):
        facts.append(datetime.fromisoformat(card["started"]).strftime("%d %B %Y, %H:%M UTC"))
    state = run.state
    return (
        f"<header><h1>{html.escape(run.folder.name)}<span class='state {state}'>{html.escape(state)}</span></h1>"
        f"<p class='by'>{html.escape(' · '.join(f for f in facts if f))}</p></header>"
    )


def _tiles(metrics: Any, sums: dict[str, Any], scores: Any) -> str:
    tiles = []
    found = losses(metrics)
    loss = found.get("loss/sft") or found.get("loss/total")
    if loss:
        tiles.append(_tile("loss", loss["last"], "nats a token, first and last step", loss["first"]))
    for task, value in _scores(scores)[:1]:
        before, after = value
        tiles.append(_tile(f"score, {task}" if task != "score" else "score", after, "before and after", before))
    rates = sums.get("rates over the run", {})
    if rates:
        tiles.append(
            _tile("supervised tokens/s", rates["supervised tokens/s"], f"of {rates['tokens/s']:,.0f} tokens/s")
        )
    per = sums["per supervised token"]
    if per["rows dispatched"]:
        share = sums["routed rows"].get("supervised", 0) / max(1, sums["routed rows"].get("dispatched", 0))
        tiles.append(
            _tile("rows / supervised token", per["rows dispatched"], f"{100 * share:.0f} % of rows are supervised")
        )
    return f"<div class='tiles'>{''.join(tiles)}</div>"


def _tile(what: str, value: float | None, more: str, before: float | None = None) -> str:
    come = f"<span class='from'>{_short(before)} → </span>" if before is not None else ""
    return (
        f"<div class='tile'><div class='what'>{html.escape(what)}</div><div class='value'>{come}{_short(value)}</div>"
        f"<div class='more'>{html.escape(more)}</div></div>"
    )


def _short(value: float | None) -> str:
    return f"{value:.2f}" if value is not None and 0.01 <= abs(value) < 100 else number(value)


def _numbers(metrics: Any, sums: dict[str, Any], scores: Any) -> str:
    rates = sums.get("rates over the run", {})
    left = [_table("Rates over the run", [(k, f"{v:,.1f}") for k, v in rates.items()])] if rates else []
    found = losses(metrics)
    if found:
        rows = [(n, f"{number(v['first'])} → {number(v['last'])}") for n, v in found.items()]
        left.append(_table("Losses, first → last step", rows))
    told = _scores(scores)
    if told:
        rows = [
            (t, number(b) if a is None else f"{number(b) if b is not None else '–'} → {number(a)}")
            for t, (b, a) in told
        ]
        left.append(_table("Scores, before → after", rows))
    positions, routed, per = sums["positions"], sums["routed rows"], sums["per supervised token"]
    heads = "".join(f"<th class=n>{word}</th>" for word in ("positions", "routed rows", "rows / sup."))
    head = f"<thead><tr><th>class</th>{heads}</tr></thead>"
    body = "".join(
        f"<tr><td><span class='swatch' style='background:{CLASS[c]}'></span>{c}</td><td class=n>{positions[c]:,}</td>"
        f"<td class=n>{routed.get(c, 0):,}</td><td class=n>{number(per[f'rows of {c} positions'])}</td></tr>"
        for c in CLASSES
    )
    cells = f"{positions['total']:,}", f"{routed.get('dispatched', 0):,}", number(per["rows dispatched"])
    total = "<tr class='total'><td>total</td>" + "".join(f"<td class=n>{cell}</td>" for cell in cells) + "</tr>"
    right = f"<table><caption>Positions and forward rows</caption>{head}<tbody>{body}{total}</tbody></table>"
    other = [(n, f"{routed[n]:,}") for n in ("elided", "dropped", "shared", "backward") if n in routed]
    if "skipped steps" in sums:
        other.append(("skipped steps", f"{sums['skipped steps']:,}"))
    return (
        f"<div class='columns'><div>{''.join(left)}</div>"
        f"<div>{right}{_table('Other rows, and steps', other) if other else ''}</div></div>"
    )


def _table(caption: str, rows: list[tuple[str, str]]) -> str:
    body = "".join(f"<tr><th>{html.escape(k)}</th><td class=n>{html.escape(v)}</td></tr>" for k, v in rows)
    return f"<table><caption>{html.escape(caption)}</caption><tbody>{body}</tbody></table>"


def _scores(scores: Any) -> list[tuple[str, tuple[float | None, float | None]]]:
    """Task -> (before, after) in whichever of the plain forms it was given."""
    if not isinstance(scores, Mapping):
        return []
    if set(scores) <= {"before", "after", "start", "end"} and scores:
        scores = {"score": scores}
    out = []
    for task, value in scores.items():
        if isinstance(value, Mapping):
            out.append((str(task), (value.get("before", value.get("start")), value.get("after", value.get("end")))))
        elif isinstance(value, (list, tuple)) and len(value) == 2:
            out.append((str(task), (value[0], value[1])))
        elif isinstance(value, (int, float)):
            out.append((str(task), (None, value)))
    return out


def _card(run: Any) -> str:
    if run.card is None:
        return "<p class='note'>This run has no card.</p>"
    what = "<p class='found'>What a comparison with this run must state.</p>"
    shut = run.card._repr_html_().replace("<details open>", "<details>")
    return f"<section><h2>Run card</h2>{what}{shut}</section>"


def _footer(run: Any) -> str:
    return (
        f"<footer>Made by moekit from <code>{html.escape(run.folder.name)}/metrics.jsonl</code> and its arrays. "
        "Rows are counted where they enter the experts' matrix multiplication. Read the run again: "
        "<code>moekit.open_run(...)</code>.</footer>"
    )


def _frame(title: str, body: str) -> str:
    style = Path(__file__).with_name("report.css").read_text()
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>{html.escape(title)} · moekit report</title>"
        f"<meta name='viewport' content='width=device-width, initial-scale=1'><style>{style}</style></head>"
        f"<body>{body}</body></html>"
    )
