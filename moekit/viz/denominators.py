"""Loss denominators side by side: how long the gradient is, and where it points, under each convention.

A reading is what `moekit.learner.lab` measures for one convention: the loss it would report, the norm of its gradient
over the exact one's, and the cosine between the two. Exact means the global token mean of the same step."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import BackendError, DataError
from . import tables
from .progress import put
from .theme import INK, MUTED, RULE, SERIES, SIZE, Figure, bundle, figure, names_axis, need, note, number

MODES = ("global_tokens", "sequence_mean", "rank_mean", "microbatch_mean", "constant", "kept_plus_filtered")
FLOOR = 1e-12  # a smaller 1 - cosine is rounding, and is drawn as exact
SAME = 1e-6
POWER = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
HEADS = ((0.0, "gradient norm", "over the exact norm"), (0.47, "1 − cosine", "logarithmic"), (0.9, "loss", "reported"))


def side_by_side(
    readings: Mapping[str, Any] | Iterable[Any], *, subtitle: str = "", norm_range: tuple[float, float] | None = None
) -> Figure:
    """Norm ratio, 1 - cosine and reported loss of each convention against the exact gradient.
    Args:
        readings: mode -> reading, or readings with a `mode`; a reading is a dictionary or an object with loss,
            norm_ratio and cosine.
        norm_range: range of the norm axis; None = what the readings need.
    Raises DataError: no reading, or one without norm_ratio and cosine."""
    table = _table(readings)
    modes, finite = list(table), math.isfinite
    ratios, turned = [r["norm_ratio"] for r in table.values()], [1 - r["cosine"] for r in table.values()]
    how = subtitle or "Gradient of each convention against the exact token mean of the same step"
    size = {"height": 112 + 36 * len(modes) + 56, "margin": {"l": 166, "t": 112, "r": 24}, "hovermode": "closest"}
    fig = figure("One batch, every denominator", how, **size)
    low, high = norm_range or _norm_range(ratios)
    low = max(low, 0.0)  # a norm is never negative
    grey = lambda same: RULE if same else SERIES[1]  # as the exact gradient
    norms = [v - 1 if finite(v) else None for v in ratios]
    fig.add_bar(y=modes, x=norms, base=1, orientation="h", width=0.52, name="norm ratio − 1", hoverinfo="skip",
                xaxis="x", yaxis="y", marker={"color": [grey(abs(v - 1) < SAME) for v in ratios]})  # fmt: skip
    floor = 10.0 ** (math.floor(math.log10(min([v for v in turned if v > FLOOR] + [1e-2]))) - 1)
    drawn = [max(v, floor) if finite(v) else None for v in turned]
    colours = [grey(v < SAME) for v in turned]
    fig.add_scatter(x=drawn, y=modes, mode="markers", marker={"size": 11, "color": colours}, name="1 − cosine",
                    cliponaxis=False, xaxis="x2", yaxis="y2", hoverinfo="skip")  # fmt: skip
    for mode, ratio, turn, spot, colour in zip(modes, ratios, turned, drawn, colours):
        say = partial(note, fig, y=mode, size=SIZE["tick"])
        left = finite(ratio) and ratio < 1 and (ratio - low) / (high - low) >= 0.25  # else there is no room for it
        edge = min(max(ratio if left else max(ratio, 1.0), low), high) if finite(ratio) else 1.0
        stand, shift = ("right middle", (-6, 0)) if left else ("left middle", (6, 0))
        say(f"{ratio:.3f}×" if finite(ratio) else "–", x=edge, axes=("x", "y"), stand=stand, shift=shift)
        if spot is not None:
            fig.add_shape(type="line", xref="x2", x0=floor, x1=spot, yref="y2", y0=mode, y1=mode,
                          line={"color": colour, "width": 2})  # fmt: skip
            words = number(turn) if turn > FLOOR else "same direction"
            say(words, x=math.log10(spot), axes=("x2", "y2"), shift=(11, 0))
        say(number(table[mode]["loss"]), x=HEADS[2][0], axes=("paper", "y"))
    fig.add_shape(type="line", xref="x", x0=1, x1=1, yref="y domain", y0=0, y1=1, line={"color": INK, "width": 1})
    for x, words, below in HEADS:
        note(fig, f"<b>{words}</b>", x, 1, stand="left bottom", shift=(0, 6))
        note(fig, below, x, 0, stand="left top", shift=(0, -26), colour=MUTED, size=SIZE["tick"])
    first = min(round(math.log10(floor)) + 1, -1)
    powers = range(0, first - 1, -math.ceil(-first / 3))
    words = ["10" + str(e).translate(POWER) if e else "1" for e in powers]
    log = {"domain": [0.47, 0.86], "type": "log", "range": [math.log10(floor), 1.6], "anchor": "y2",
           "tickvals": [10.0**e for e in powers], "ticktext": words}  # fmt: skip
    linear, grid = {"domain": [0, 0.4], "range": [low, high], "nticks": 4}, {"showline": False, "showgrid": True}
    second = {**names_axis(modes), "anchor": "x2", "showticklabels": False}
    return fig.update_layout(xaxis=linear | grid, yaxis=names_axis(modes), xaxis2=log | grid, yaxis2=second)


def _norm_range(ratios: Iterable[float]) -> tuple[float, float]:
    """A range around 1 with room for what is written beside the bars."""
    reach = 1.85 * max([abs(v - 1) for v in ratios if math.isfinite(v)] + [0.02])
    return 1 - reach, 1 + reach


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
        self._widget, self._handle = None, None

    @property
    def readings(self) -> dict[str, dict[str, float]]:
        """Mode -> reading at the present setting; measured once for each setting."""
        key = tuple(self.value.values())
        if key not in self._known:
            self._known[key] = _table({mode: self.measure(mode, **self.value) for mode in self.modes})
        return self._known[key]

    @property
    def figure(self) -> Figure:
        """The figure at the present setting. Its norm axis keeps the widest range seen, so that bars compare."""
        now = self.readings
        seen = _norm_range(r["norm_ratio"] for table in self._known.values() for r in table.values())
        words = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self.value.items())
        return side_by_side(now, subtitle=words, norm_range=seen)

    def set(self, **setting: Any) -> "Lab":
        """Move the lab to another setting and redraw.
        Raises DataError: an unknown control, or a value that is not among its options."""
        for name, value in setting.items():
            if name not in self.controls:
                raise DataError(f"the lab has no control {name!r}; it has {', '.join(self.controls)}")
            if value not in self.controls[name]:
                raise DataError(f"{name}={value!r} is not one of {', '.join(map(repr, self.controls[name]))}")
        if setting.items() <= self.value.items():
            return self  # a slider that was moved to where the lab is
        self.value.update(setting)
        for name in setting.keys() & self.sliders.keys():
            self.sliders[name].value = setting[name]
        if self._handle is not None:
            now = self.figure
            if self._widget is not None:
                with self._widget.batch_update():
                    for drawn, new in zip(self._widget.data, now.data):
                        drawn.update(new.to_plotly_json(), overwrite=True)
                    self._widget.layout.update(now.layout.to_plotly_json(), overwrite=True)
            put(self._handle, self._twin(now))
        return self

    def _twin(self, fig: Figure) -> dict[str, Any]:
        """The static twin: folded away below the widget, and what a saved notebook has of the last setting."""
        data = bundle(fig, interactive=False)
        picture = f"<img src='data:image/png;base64,{data['image/png']}'>" if "image/png" in data else ""
        fold = "<details>" if self._widget is not None else "<details open>"
        words = "<summary>this setting as a picture and as numbers</summary>"
        return data | {"text/html": f"{fold}{words}{picture}{tables.to_html(fig)}</details>"}

    def _ipython_display_(self) -> None:
        from IPython.display import display

        now = self.figure
        try:
            widgets = need("ipywidgets", "the sliders of the denominator lab")
            self._widget = need("plotly.graph_objects", "the denominator lab").FigureWidget(now)
            look = {"style": {"description_width": "120px"}, "layout": {"width": "420px"}, "continuous_update": False}
            for name, options in self.controls.items():
                words = name.replace("_", " ")
                slider = widgets.SelectionSlider(options=options, value=self.value[name], description=words, **look)
                slider.observe(lambda change, name=name: self.set(**{name: change["new"]}), names="value")
                self.sliders[name] = slider
            moving = [s for name, s in self.sliders.items() if len(self.controls[name]) > 1]
            display(widgets.VBox([*moving, self._widget]))
        except (BackendError, ImportError) as error:
            print(f"no sliders here ({error}); move the lab with .set({', '.join(f'{n}=...' for n in self.controls)})")
        self._handle = put(None, self._twin(now))

    def __repr__(self) -> str:
        return tables.text(self.figure)


def lab(
    measure: Callable[..., Any], *, modes: Sequence[str] = MODES, ranks: Sequence[int] = (1, 2, 4),
    microbatches: Sequence[int] = (1, 2, 4), **controls: Sequence[Any],
) -> Lab:  # fmt: skip
    """The denominator lab in a cell: sliders for how the step is cut, and the side-by-side figure that follows them.
    Args:
        measure: pure function ``measure(mode, ranks=..., microbatches=..., **controls)`` that returns a reading, for
            example `moekit.learner.lab.DenominatorLab.measure`.
        modes: conventions to draw.
        ranks, microbatches: the values to offer.
        controls: further keyword arguments of `measure`, with the values to offer.
    Returns: Lab, the last value of a cell. Its static twin is folded away below, so that a saved notebook keeps the
        last setting."""
    return Lab(measure, modes, {"ranks": ranks, "microbatches": microbatches, **controls})


def _table(readings: Mapping[str, Any] | Iterable[Any]) -> dict[str, dict[str, float]]:
    """Mode -> loss, norm ratio and cosine as numbers, from whichever form they were given in."""
    get = lambda r, key: r.get(key) if isinstance(r, Mapping) else getattr(r, key, None)
    pairs = readings.items() if isinstance(readings, Mapping) else [(get(r, "mode"), r) for r in readings]
    out = {}
    for mode, reading in pairs:
        row = {key: get(reading, key) for key in ("loss", "norm_ratio", "cosine")}
        if missing := [key for key in ("norm_ratio", "cosine") if row[key] is None]:
            raise DataError(f"the reading of {mode!r} has no {' and no '.join(missing)}")
        out[mode] = {key: math.nan if value is None else float(value) for key, value in row.items()}
    if not out:
        raise DataError("no reading to draw; give mode -> {loss, norm_ratio, cosine}")
    return out
