"""The widgets of a dashboard: a box of state, buttons, figures, sliders and a log, set from any thread."""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import zip_longest
from typing import Any

from .theme import WIDE, Figure, need

STOP = "Ends the job: SIGTERM to its ranks, SIGKILL to what is left after 5 s. Run folder and checkpoints stay."
RESUME = "Submits the job's call again with resume=True: it goes on from its newest checkpoint, in the same folder."
# in a page where the widget stands, its static twin, the next output of the cell, is not needed
STYLE = "<style>.jp-OutputArea-child:has(.moekit-dashboard) + .jp-OutputArea-child {display: none}</style>"
NOTES = 32  # annotations of a figure; their number must not change
# plotly's script, 5 MB, comes with the first figure, which leaves it on the page (as what it exports by default)
EXPORT = r"export\s*{[^}]*\b(\w+) as default\s*}"
LEAVE, TAKE = ";globalThis[{key!r}] = {name};", """export default async () => {{
  while (!globalThis[{key!r}]) await new Promise(wait => setTimeout(wait, 50));
  const widget = globalThis[{key!r}];
  return typeof widget === "function" ? widget() : widget;
}};"""  # fmt: skip
NO_NOTE = {"text": "", "showarrow": False, "visible": False, "x": 0, "y": 0, "xref": "paper", "yref": "paper"}


class Controls:
    """`box` holds everything; `widgets` by name: run, stop, resume, message, state, layer, step, rank, log.
    Args: `runs`: names to choose from. `act`: called with "stop" or "resume". `changed`: another choice was made."""

    def __init__(self, runs: Sequence[str], act: Callable[[str], None], changed: Callable[[], None]):
        w = need("ipywidgets", "a dashboard's page")
        # A figure that tells the page of itself when it is whole: a page may draw at once what it is told first.
        self._base = need("plotly.graph_objects", "a dashboard's page").FigureWidget
        script, key = str(self._base._esm), f"moekit plotly {need('plotly', 'a page').__version__}"
        names = re.findall(EXPORT, script)
        scripts = [script + LEAVE.format(key=key, name=names[-1]), TAKE.format(key=key)] if names else [script, script]
        self._first, self._later = (
            type("FigureWidget", (self._base,), {"open": lambda _: None, "_esm": script}) for script in scripts
        )
        self.figures: dict[str, Any] = {}
        self._drawn: set[str] = set()  # those that a page has told of
        self.follows = True  # whether the step slider follows the last step
        self._setting = 0  # the thread that sets widgets: what it changes, nobody has chosen
        wide, look = {"width": "auto"}, {"style": {"description_width": "initial"}}
        choose = lambda options, **how: w.Dropdown(options=options, layout={"width": "auto"}, **look, **how)
        button = lambda name: w.Button(description=name, disabled=True, layout={"flex": "0 0 84px"})
        self.widgets = {
            "run": choose([(name, i) for i, name in enumerate(runs)], value=0, description="run"),
            "stop": button("Stop"), "resume": button("Resume"), "message": w.HTML(),
            "state": w.HTML(layout=wide), "layer": w.SelectionSlider(options=["0"], description="layer", **look),
            "step": w.IntSlider(max=0, description="step", layout={"width": "420px"}, **look),
            "rank": choose([("rank 0", 0)], value=0, description="log of"), "log": w.HTML(layout=wide),
        }  # fmt: skip
        at = self.widgets
        self._slots = {name: w.Box(layout=wide) for name in ("progress", "work", "load")}
        row = lambda *names: w.HBox([at[name] for name in names], layout={"align_items": "center", "width": "100%"})
        first = row(*(["run"] if len(runs) > 1 else []), "stop", "resume", "message")
        parts = [w.HTML(STYLE, layout={"display": "none"}), at["state"], first, *self._slots.values()]
        self.sliders = row("layer", "step")
        self.box = w.VBox([*parts, self.sliders, row("rank"), at["log"]], layout={"width": f"{WIDE}px"})
        for part, name in ((self.box, "dashboard"), (at["state"], "state"), (at["log"], "log")):
            part.add_class(f"moekit-{name}")
        for name in ("stop", "resume"):
            at[name].on_click(lambda _, name=name: act(name))
        for name in ("run", "layer", "step", "rank"):
            at[name].observe(lambda change, name=name: self._chosen(name, change["new"], changed), names="value")

    def _chosen(self, name: str, value: Any, changed: Callable[[], None]) -> None:
        if self._setting != threading.get_ident():
            if name == "step":
                self.follows = value == self.widgets["step"].max
            changed()

    def value(self, name: str) -> Any:
        """What is chosen now."""
        return self.widgets[name].value

    @contextmanager
    def setting(self) -> Iterator[None]:
        """What is set inside is not taken for a choice."""
        self._setting = threading.get_ident()
        try:
            yield
        finally:
            self._setting = 0

    def say(self, name: str, **traits: Any) -> None:
        """Set traits of a widget; those that are as before cost no message."""
        for trait, value in traits.items():
            setattr(self.widgets[name], trait, value)

    def options(self, name: str, options: Sequence[Any]) -> None:
        """What there is to choose from; the choice stays where it is still there."""
        widget = self.widgets[name]
        if tuple(widget.options) != tuple(options):
            kept = widget.value
            widget.options = options
            if kept in [one[1] if isinstance(one, tuple) else one for one in options]:
                widget.value = kept

    def steps(self, first: int, last: int) -> None:
        """The range of the step slider, which follows its end until it is moved away from there."""
        slider = self.widgets["step"]
        slider.min, slider.max = min(first, slider.max), max(last, slider.min)
        slider.value = last if self.follows else min(max(slider.value, first), last)
        slider.min, slider.max = first, last

    def draw(self, name: str, now: Figure) -> None:
        """Show a figure: what differs from the one before, in one message; axes stay as the reader has turned them."""
        layout = {key: value for key, value in now.layout.to_plotly_json().items() if key != "template"}
        notes = [note | {"visible": True} for note in layout.get("annotations", ())]
        layout["annotations"] = notes + [NO_NOTE] * (NOTES - len(notes))
        if name not in self.figures:
            widget = (self._later if self.figures else self._first)(now)
            widget.update_layout(**layout)
            widget._config = widget._config | {"displayModeBar": False}
            widget._widget_layout = deepcopy(widget._layout)
            self._base.open(widget)
            if hasattr(widget.comm, "kernel"):  # else there is no page
                widget.observe(lambda _: self._drawn.add(name), "_js2py_traceDeltas")
            else:
                self._drawn.add(name)
            self.figures[name], self._slots[name].children = widget, (widget,)
            return
        shown = self.figures[name]
        if more := now.data[len(shown.data) :]:  # rarely any, and none would cost four messages as well
            shown.add_traces(more)
        with shown.batch_update():
            for old, new in zip_longest(shown.data, now.data):
                old.update(new.to_plotly_json() | {"visible": True} if new else {"visible": False}, overwrite=bool(new))
            # plotly does not know an axis yet that nothing is drawn on
            known = {f"{at[0]}axis{at[1:]}" for line in shown.data for at in (line.xaxis or "x", line.yaxis or "y")}
            shown.layout.update({key: v for key, v in layout.items() if key[1:5] != "axis" or key in known})
        if name not in self._drawn:  # a page that still loads its scripts misses updates; this it draws when it can
            shown._widget_data, shown._widget_layout = deepcopy(shown._data), deepcopy(shown._layout)
