"""Loss denominators side by side: how long the gradient is, and where it points, under each convention.

A reading is what `moekit.learner.lab` measures for one convention: the loss it would report, the norm of its gradient
over the exact one's, and the cosine between the two. Exact means the global token mean of the same step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import BackendError, DataError
from .theme import INK, MUTED, RULE, SERIES, SIZE, bundle, figure, need, number

if TYPE_CHECKING:
    import plotly.graph_objects as go

MODES = ("global_tokens", "sequence_mean", "rank_mean", "microbatch_mean", "constant", "kept_plus_filtered")
FLOOR = 1e-12  # a smaller 1 - cosine is rounding, and is drawn as exact
SAME = 1e-6


def side_by_side(
    readings: Mapping[str, Any] | Iterable[Any],
    *,
    title: str = "One batch, every denominator",
    subtitle: str = "",
    norm_range: tuple[float, float] | None = None,
) -> go.Figure:
    """Norm ratio, 1 - cosine and reported loss of each convention against the exact gradient.

    Args:
        readings: mode -> reading, or readings with a `mode`; a reading is a dictionary or an object with loss,
            norm_ratio and cosine.
        norm_range: range of the norm axis; None = what the readings need.

    Raises:
        DataError: no reading, or one without norm_ratio and cosine.
    """
    go = need("plotly.graph_objects", "drawing denominators")
    table = _table(readings)
    modes = list(table)
    fig = figure(
        title,
        subtitle or "Gradient of each convention against the exact token mean of the same step",
        height=112 + 36 * len(modes) + 56,
        margin={"l": 166, "t": 112, "r": 24},
        hovermode="closest",
    )
    ratios = [r["norm_ratio"] for r in table.values()]
    known = [v for v in ratios if math.isfinite(v)] + [1.0]
    reach = max(max(known) - 1, 1 - min(known), 0.02)
    low, high = norm_range or (1 - 1.85 * reach, 1 + 1.85 * reach)
    low = max(low, 0.0)  # a norm is never negative
    bent = [SERIES[1] if not abs(v - 1) < SAME else RULE for v in ratios]  # grey: as the exact gradient
    fig.add_trace(
        go.Bar(
            y=modes, x=[v - 1 if math.isfinite(v) else None for v in ratios], base=1, orientation="h", width=0.52,
            marker={"color": bent}, name="norm ratio − 1", xaxis="x", yaxis="y", hoverinfo="skip",
        )
    )  # fmt: skip
    turned = [1 - r["cosine"] for r in table.values()]
    drawn = [max(v, FLOOR) if math.isfinite(v) else None for v in turned]
    least = min([v for v in turned if v > FLOOR] + [1e-2])
    floor = 10.0 ** (math.floor(math.log10(least)) - 1)
    drawn = [None if v is None else max(v, floor) for v in drawn]
    colours = [SERIES[1] if not v < SAME else RULE for v in turned]
    for mode, value, colour in zip(modes, drawn, colours):
        if value is not None:
            fig.add_shape(type="line", xref="x2", x0=floor, x1=value, yref="y2", y0=mode, y1=mode,
                          line={"color": colour, "width": 2})  # fmt: skip
    fig.add_trace(
        go.Scatter(x=drawn, y=modes, mode="markers", marker={"size": 11, "color": colours, "symbol": "circle"},
                   name="1 − cosine", cliponaxis=False, xaxis="x2", yaxis="y2", hoverinfo="skip")
    )  # fmt: skip
    for mode, reading, ratio, turn in zip(modes, table.values(), ratios, turned):
        left = math.isfinite(ratio) and ratio < 1
        right = not left or (ratio - low) / (high - low) < 0.25  # no room for the words on the left of a short norm
        inside = max(ratio, 1.0) if right and math.isfinite(ratio) else ratio if left else 1.0
        _say(fig, min(max(inside, low), high), "x", mode, "y", f"{ratio:.3f}×" if math.isfinite(ratio) else "–", right)
        place = None if not math.isfinite(turn) else math.log10(max(turn, floor))
        if place is not None:
            _say(fig, place, "x2", mode, "y2", number(turn) if turn > FLOOR else "same direction", True, shift=11)
        _say(fig, 0.9, "paper", mode, "y", number(reading["loss"]), True, shift=0)
    fig.add_shape(type="line", xref="x", x0=1, x1=1, yref="y domain", y0=0, y1=1, line={"color": INK, "width": 1})
    heads = (
        (0.0, "gradient norm", "over the exact norm"),
        (0.47, "1 − cosine", "logarithmic"),
        (0.9, "loss", "reported"),
    )
    for x, head, note in heads:
        fig.add_annotation(x=x, xref="paper", y=1, yref="paper", yanchor="bottom", yshift=6, xanchor="left",
                           showarrow=False, text=f"<b>{head}</b>", font={"size": SIZE["label"]})  # fmt: skip
        fig.add_annotation(x=x, xref="paper", y=0, yref="paper", yanchor="top", yshift=-26, xanchor="left",
                           showarrow=False, text=note, font={"size": SIZE["tick"], "color": MUTED})  # fmt: skip
    category = {"type": "category", "autorange": "reversed", "categoryarray": modes, "categoryorder": "array",
                "showgrid": False}  # fmt: skip
    ends = sorted({math.ceil(math.log10(floor)) + 1, -1})
    ticks = [10.0**e for e in range(0, ends[0] - 1, -max(1, math.ceil(-ends[0] / 3)))]
    fig.update_layout(
        xaxis={"domain": [0, 0.4], "range": [low, high], "showline": False, "showgrid": True, "nticks": 4},
        yaxis={**category, "tickfont": {"size": SIZE["label"], "color": INK}},
        xaxis2={"domain": [0.47, 0.86], "type": "log", "range": [math.log10(floor), 1.6], "anchor": "y2",
                "showgrid": True, "tickvals": ticks, "ticktext": [_power(t) for t in ticks], "showline": False},
        yaxis2={**category, "anchor": "x2", "showticklabels": False},
    )  # fmt: skip
    return fig


class Lab:
    """What `lab` returns: `figure` for the present setting, `value` (the setting), `readings`, `set(**setting)`."""

    def __init__(self, measure: Callable[..., Any], modes: Sequence[str], controls: Mapping[str, Sequence[Any]]):
        self.measure, self.modes = measure, tuple(modes)
        self.controls = {name: tuple(options) for name, options in controls.items()}
        empty = [name for name, options in self.controls.items() if not options]
        if empty or not self.modes:
            raise DataError(f"the lab needs at least one value for {', '.join(empty) or 'modes'}")
        self.value = {name: options[0] for name, options in self.controls.items()}
        self.sliders: dict[str, Any] = {}
        self._known: dict[tuple[Any, ...], dict[str, dict[str, float]]] = {}
        self._widget: Any = None
        self._handle: Any = None

    @property
    def readings(self) -> dict[str, dict[str, float]]:
        """Mode -> reading at the present setting; measured once for each setting."""
        key = tuple(self.value.values())
        if key not in self._known:
            self._known[key] = _table({mode: self.measure(mode, **self.value) for mode in self.modes})
        return self._known[key]

    @property
    def figure(self) -> go.Figure:
        """The figure at the present setting. Its norm axis keeps the widest range seen, so that bars compare."""
        now = self.readings
        known = [r["norm_ratio"] for table in self._known.values() for r in table.values()]
        reach = 1.85 * max([abs(v - 1) for v in known if math.isfinite(v)] + [0.02])
        words = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self.value.items())
        return side_by_side(now, subtitle=words, norm_range=(1 - reach, 1 + reach))

    def set(self, **setting: Any) -> Lab:
        """Move the lab to another setting and redraw.

        Raises:
            DataError: an unknown control, or a value that is not among its options.
        """
        for name, value in setting.items():
            if name not in self.controls or value not in self.controls[name]:
                choices = self.controls.get(name)
                raise DataError(
                    f"the lab has no control {name!r}; it has {', '.join(self.controls)}" if choices is None else
                    f"{name}={value!r} is not one of {', '.join(map(repr, choices))}"
                )  # fmt: skip
        self.value.update(setting)
        for name, value in setting.items():
            if name in self.sliders and self.sliders[name].value != value:
                self.sliders[name].value = value
        if self._handle is not None:
            self._redraw()
        return self

    def _redraw(self) -> None:
        now = self.figure
        if self._widget is not None:
            with self._widget.batch_update():
                for drawn, new in zip(self._widget.data, now.data):
                    drawn.update(new.to_plotly_json(), overwrite=True)
                self._widget.layout.update(now.layout.to_plotly_json(), overwrite=True)
        self._handle.update(self._twin(now), raw=True)

    def _twin(self, fig: go.Figure) -> dict[str, Any]:
        """The static twin: folded away below the widget, and what a saved notebook has of the last setting."""
        from . import tables

        data = bundle(fig, interactive=False)
        picture = f"<img src='data:image/png;base64,{data['image/png']}'>" if "image/png" in data else ""
        fold = "" if self._widget is not None else " open"
        data["text/html"] = (
            f"<details{fold}><summary>this setting as a picture and as numbers</summary>{picture}{tables.to_html(fig)}"
            "</details>"
        )
        return data

    def _ipython_display_(self) -> None:
        from IPython.display import DisplayHandle
        from IPython.display import display as show

        now = self.figure
        try:
            show(self._controls(now))
        except (BackendError, ImportError) as error:
            print(f"no sliders here ({error}); move the lab with .set({', '.join(f'{n}=...' for n in self.controls)})")
        self._handle = DisplayHandle()
        self._handle.display(self._twin(now), raw=True)

    def _controls(self, now: go.Figure) -> Any:
        widgets = need("ipywidgets", "the sliders of the denominator lab")
        figure = need("plotly.graph_objects", "the denominator lab").FigureWidget(now)
        for name, options in self.controls.items():
            slider = widgets.SelectionSlider(
                options=options, value=self.value[name], description=name.replace("_", " "), continuous_update=False,
                style={"description_width": "120px"}, layout={"width": "420px"},
            )  # fmt: skip
            slider.observe(lambda change, name=name: self._moved(name, change["new"]), names="value")
            self.sliders[name] = slider
        self._widget = figure
        return widgets.VBox([*(s for n, s in self.sliders.items() if len(self.controls[n]) > 1), figure])

    def _moved(self, name: str, value: Any) -> None:
        if self.value[name] != value:
            self.set(**{name: value})

    def __repr__(self) -> str:
        from . import tables

        return tables.text(self.figure)


def lab(
    measure: Callable[..., Any],
    *,
    modes: Sequence[str] = MODES,
    ranks: Sequence[int] = (1, 2, 4),
    microbatches: Sequence[int] = (1, 2, 4),
    **controls: Sequence[Any],
) -> Lab:
    """The denominator lab in a cell: sliders for how the step is cut, and the side-by-side figure that follows them.

    Args:
        measure: pure function ``measure(mode, ranks=..., microbatches=..., **controls)`` that returns a reading, for
            example `moekit.learner.lab.DenominatorLab.measure`.
        modes: conventions to draw.
        ranks, microbatches: the values to offer.
        controls: further keyword arguments of `measure`, with the values to offer.

    Returns:
        Lab; it displays itself as the last value of a cell. Below sliders and figure its static twin is folded away,
        so that a saved notebook keeps the last setting.
    """
    return Lab(measure, modes, {"ranks": ranks, "microbatches": microbatches, **controls})


def _table(readings: Mapping[str, Any] | Iterable[Any]) -> dict[str, dict[str, float]]:
    if isinstance(readings, Mapping):
        pairs = list(readings.items())
    else:
        pairs = [(str(_get(r, "mode", i)), r) for i, r in enumerate(readings)]
    if not pairs:
        raise DataError("no reading to draw; give mode -> {loss, norm_ratio, cosine}")
    out = {}
    for mode, reading in pairs:
        row = {key: _get(reading, key, None) for key in ("loss", "norm_ratio", "cosine")}
        missing = [key for key in ("norm_ratio", "cosine") if row[key] is None]
        if missing:
            raise DataError(f"the reading of {mode!r} has no {' and no '.join(missing)}")
        out[mode] = {key: math.nan if value is None else float(value) for key, value in row.items()}
    return out


def _get(reading: Any, key: str, default: Any) -> Any:
    return reading.get(key, default) if isinstance(reading, Mapping) else getattr(reading, key, default)


def _say(fig: go.Figure, x: float, xref: str, mode: str, yref: str, text: str, right: bool, shift: int = 6) -> None:
    fig.add_annotation(x=x, xref=xref, y=mode, yref=yref, text=text, showarrow=False, yanchor="middle",
                       xanchor="left" if right else "right", xshift=shift if right else -shift,
                       font={"size": SIZE["tick"], "color": INK})  # fmt: skip


def _power(value: float) -> str:
    exponent = round(math.log10(value))
    return "1" if exponent == 0 else "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
