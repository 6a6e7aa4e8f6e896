"""A plan of a run: memory of each layout by component against the limit, and the same with sliders.

Colours are of components (policy, critic, reference, engine, as in the headline figure), tints of what they hold.
"""

from __future__ import annotations

import html
from dataclasses import replace
from typing import Any

from ..errors import BackendError, ConfigError
from .headline import COLOUR
from .progress import place, put
from .theme import INK, MUTED, PAPER, SERIES, SIZE, WIDE, Figure, bundle, figure, names_axis, need, note, tint

STATE = {"parameters": 1.0, "gradients": 0.8, "masters": 0.66, "moments": 0.52, "mxfp8": 0.42, "activations": 0.3,
         "recomputed": 0.2, "dispatch": 0.12}  # fmt: skip
ENGINE = {"serving": 1.0, "staging": 0.8, "transfer": 0.62, "kv_cache": 0.42, "prompts": 0.22}
LOOK: dict[str, tuple[str, str]] = {  # component -> colour, and whose it is
    **{k: (tint(COLOUR["policy"], t), "policy") for k, t in STATE.items()},
    "reference": (COLOUR["reference"], "reference"),
    **{f"critic/{k}": (tint(COLOUR["critic"], t), "critic") for k, t in STATE.items()},
    **{k: (tint(COLOUR["engine"], t), "rollout engine") for k, t in ENGINE.items()},
}  # fmt: skip
AGAIN = {"none": "", "moe": ", recompute moe", "block": ", recompute block"}
RECOMPUTE = ("none", "moe", "block")
ROWS = ("batch_rows", "batch_pairs", "prompts")
MEMORIES = (16.0, 24.0, 40.0, 48.0, 80.0, 96.0, 141.0, 192.0)  # GB of common accelerators
MARGINS = {"t": 92, "b": 64, "r": 130}
LINE, EDGE = 19, 24  # pixels: of a line of the legend, left of everything


def plan_figure(plan: Any, most: int = 12) -> Figure:
    """Bars of what a rank holds in the phase that takes most, the best option of each dp, ep, pp, best first.

    Args:
        plan: of `moekit.plan`.
        most: layouts that are drawn.
    """
    best: dict[Any, Any] = {}
    for o in plan.options:
        best.setdefault((o.dp, o.ep, o.pp), o)
    shown = list(best.values())[:most]
    names = [f"dp {o.dp}, ep {o.ep}, pp {o.pp}, zero {o.zero}{AGAIN[o.recompute]}" for o in shown]
    parts = [p for p in LOOK if any(p in o.at_peak for o in shown)]
    owners = list(dict.fromkeys(LOOK[p][1] for p in parts))
    limit, largest = plan.memory, max(o.total for o in shown)
    near = limit if limit and limit < 2.5 * largest else None  # a limit far away would leave no room for the bars
    unit, word = (1e9, "GB") if max(largest, near or 0) >= 1e9 else (1e6, "MB")
    of = f" of {len(best)}" if len(best) > len(shown) else ""
    title = f"{type(plan.step.config).__name__.removesuffix('Config')} of {plan.name} on {plan.world} ranks"
    how = f"The fullest rank, in the phase that takes most; {len(shown)}{of} layouts, the best first"
    margin = MARGINS | {"l": EDGE + 6.9 * max(map(len, names)), "t": MARGINS["t"] + LINE * len(owners)}
    fig = figure(title, how, width=WIDE, height=margin["t"] + 26 * len(shown) + margin["b"], barmode="stack",
                 bargap=0.3, margin=margin, hovermode="closest")  # fmt: skip
    for part in parts:
        x = [o.at_peak.get(part, 0) / unit for o in shown]
        look = {"color": LOOK[part][0], "line": {"width": 0.5, "color": PAPER}}
        fig.add_bar(x=x, y=names, orientation="h", name=part, marker=look,
                    hovertemplate=f"%{{y}}<br>{part}: %{{x:.4g}} {word}<extra></extra>")  # fmt: skip
    for o, name in zip(shown, names):
        colour = INK if o.fits else SERIES[1]
        words = f"{o.total / unit:.3g} {word} · {o.peak}"
        note(fig, words, 1, name, axes=("paper", "y"), shift=(8, 0), size=SIZE["tick"], colour=colour)
    for row, owner in enumerate(owners):
        _legend(fig, owner, [p for p in parts if LOOK[p][1] == owner], 24 + LINE * (len(owners) - 1 - row))
    reach = 1.03 * max(largest, near or 0) / unit
    axis = names_axis(names) | {"autorange": False, "range": [len(names) - 0.5, -0.5]}
    fig.update_layout(yaxis=axis, xaxis={"title": f"bytes of a rank, {word}", "range": [0, reach], "showgrid": True})
    if near:
        line = {"color": INK, "width": 2}
        fig.add_shape(type="line", x0=near / unit, x1=near / unit, y0=0, y1=1, xref="x", yref="paper", line=line)
        words = f"memory of a rank, {near / unit:.4g} {word}"
        note(fig, words, near / unit / reach, 1, stand="right bottom", shift=(4, 3))
    return fig


def _legend(fig: Figure, owner: str, parts: list[str], up: float) -> None:
    """An owner's components in their colours, in one line above the bars that begins where the names do."""
    colour, left = COLOUR.get(owner, COLOUR["engine"]), EDGE - fig.layout.margin.l
    note(fig, f"<b>{owner}</b>", 0, 1, shift=(left, up + 9), colour=colour)
    x = left + 116.0
    for part in parts:
        words = part.split("/")[-1].replace("_", " ") if part != owner else "parameters"
        note(fig, "■", 0, 1, shift=(x, up + 9), colour=LOOK[part][0], size=SIZE["title"])
        note(fig, words, 0, 1, shift=(x + 17, up + 9), colour=MUTED, size=SIZE["tick"])
        x += 33 + 6.3 * len(words)


class Planner:
    """A plan with sliders: each move plans again and redraws. `plan` is the present one, `set(...)` moves it."""

    def __init__(self, plan: Any):
        self.plan, self.note = plan, ""
        self.controls = self._controls()
        self.value = {name: now for name, (_, now) in self.controls.items()}
        self._sliders: dict[str, Any] = {}
        self._widget: Any = None
        self._handle: Any = None

    @property
    def figure(self) -> Figure:
        """Of the present plan."""
        return plan_figure(self.plan)

    def _controls(self) -> dict[str, tuple[list[Any], Any]]:
        """Control -> the values that it offers, and its present one."""
        p, c, how = self.plan, self.plan.step.config, self.plan.how
        around = lambda n: sorted({max(1, n * 2**k // 16) for k in range(9)} | {n})
        found: dict[str, tuple[list[Any], Any]] = {"world": (around(p.world), p.world)}
        if p.memory is not None:
            found["memory"] = (sorted({*MEMORIES, p.memory / 1e9}), p.memory / 1e9)
        if how["lengths"] is None:  # else lengths say it
            now = getattr(c, "max_new_tokens", c.row_length)
            found["tokens"] = ([n for n in around(now) if 1 < n <= p.shape.max_positions], now)
        if how["lengths"] is None or isinstance(how["lengths"][0], int):
            rows = next(k for k in ROWS if hasattr(c, k))
            found[rows] = (around(getattr(c, rows)), getattr(c, rows))
            if hasattr(c, "group"):
                found["group"] = (around(c.group), c.group)
        for name in ("ep", "pp", "recompute"):
            values = RECOMPUTE if name == "recompute" else sorted({getattr(o, name) for o in p.options})
            found[name] = (["all", *values], "all")
        return found

    def set(self, **setting: Any) -> Planner:
        """Move to another setting, plan again and redraw; what cannot be is said, and the figure stays.

        Args:
            setting: world, memory (GB), tokens (of a row, or of an answer that is sampled), batch_rows, batch_pairs or
                prompts, group, ep, pp, recompute ("all" or one), as `controls` lists them.
        Raises:
            ConfigError: an unknown control, or a value that its slider does not have.
        """
        if unknown := setting.keys() - self.controls.keys():
            raise ConfigError(f"the planner has no control {', '.join(unknown)}; it has {', '.join(self.controls)}")
        for name, value in setting.items():
            if value not in (values := self.controls[name][0]):
                offered = ", ".join(map(str, values))
                raise ConfigError(f"{name}={value!r} is not on its slider ({offered}); plan.again(...) takes any")
        if setting.items() <= self.value.items():
            return self  # a slider that was moved to where the plan is
        self.value |= setting
        for name in setting.keys() & self._sliders.keys():
            self._sliders[name].value = setting[name]
        v, self.note = self.value, ""
        try:
            change: dict[str, Any] = {"world": v["world"], "workload": self._workload()}
            change |= {"memory": v["memory"] * 1e9} if "memory" in v else {}
            for name, every in (("ep", None), ("pp", None), ("recompute", RECOMPUTE)):
                change[name] = every if v[name] == "all" else (v[name],)
            self.plan = self.plan.again(**change)
        except ConfigError as error:
            self.note = str(error)
        if self._handle is not None:
            now = self.figure
            if self._widget is not None:
                self._says.value = self._words()
                with self._widget.batch_update():
                    self._widget.data = ()
                    self._widget.add_traces([t.to_plotly_json() for t in now.data])
                    self._widget.layout.update(now.layout.to_plotly_json(), overwrite=True)
            put(self._handle, self._twin(now))
        return self

    def _workload(self) -> Any:
        """The config with what the sliders say of it, its rows as long as they need to be."""
        v, c = self.value, self.plan.step.config
        change = {k: v[k] for k in (*ROWS, "group") if k in v}
        if "tokens" in v and hasattr(c, "max_new_tokens"):
            change |= {"max_new_tokens": v["tokens"], "length": max(c.length, c.max_prompt + v["tokens"])}
        elif "tokens" in v:
            change |= {"rows": replace(c.rows, length=v["tokens"])} if hasattr(c, "rows") else {"length": v["tokens"]}
        if "length" in change:
            change["microbatch_tokens"] = max(c.microbatch_tokens, change["length"])
        return replace(c, **change)

    def _words(self) -> str:
        colour = SERIES[1] if self.note or not self.plan.best else INK
        return f"<p style='color:{colour}'>{html.escape(self.note or self.plan.verdict)}</p>"

    def _twin(self, fig: Figure) -> dict[str, Any]:
        """What a saved notebook has of the present setting, folded away below the sliders."""
        data = bundle(fig, interactive=False)
        picture = f"<img src='data:image/png;base64,{data['image/png']}'>" if "image/png" in data else ""
        fold = "<details>" if self._widget is not None else "<details open>"
        words = "<summary>this plan as a picture and as numbers</summary>"
        text = f"<pre>{html.escape(repr(self.plan))}</pre>"
        return data | {"text/html": f"{fold}{words}{picture}{text}</details>", "text/plain": repr(self.plan)}

    def _ipython_display_(self) -> None:
        if place() != "notebook":
            print(self)
            return
        from IPython.display import display

        now = self.figure
        try:
            w = need("ipywidgets", "the sliders of a plan")
            self._widget = need("plotly.graph_objects", "the sliders of a plan").FigureWidget(now)
            self._says = w.HTML(self._words())
            look = {"style": {"description_width": "110px"}, "layout": {"width": "400px"}, "continuous_update": False}
            for name, (values, _) in self.controls.items():
                words = {"memory": "memory, GB"}.get(name, name.replace("_", " "))
                slider = w.SelectionSlider(options=values, value=self.value[name], description=words, **look)
                slider.observe(lambda change, name=name: self.set(**{name: change["new"]}), names="value")
                self._sliders[name] = slider
            columns = [w.VBox(list(self._sliders.values())[at::2]) for at in (0, 1)]
            display(w.VBox([w.HBox(columns), self._says, self._widget]))
        except (BackendError, ImportError) as error:
            print(f"no sliders here ({error}); move the plan with .set({', '.join(f'{n}=...' for n in self.controls)})")
        self._handle = put(None, self._twin(now))

    def __repr__(self) -> str:
        return repr(self.plan)
