"""A figure that follows a run while it goes on, and is an ordinary saved figure when it has ended.

A background thread reads what is new in `metrics.jsonl` and redraws, at most ten times a second and only when there
is something new. While the run goes on the output is a widget. When it ends the same output turns into the figure with
its static twin, so that a saved notebook shows the result. Without the widget packages the output is a static picture
that is replaced now and then; it says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConfigError
from . import curves
from .curves import Panel
from .progress import place
from .theme import bundle, headline

if TYPE_CHECKING:
    import plotly.graph_objects as go

FASTEST_S = 0.1  # ten redraws a second
STATIC_S = 2.0  # a static picture costs more


def live(job_or_folder: Any, *metrics: Panel, interval: float = 0.5) -> Live:
    """Follow a run's metrics in a figure. Returns at once; show it as the last value of a cell.

    Args:
        job_or_folder: a `Job` (from `submit` or `attach`), or the path of a run folder.
        metrics: names, one panel each; a tuple of names shares a panel. Default: loss, supervised tokens a second,
            busiest expert over the mean. A metric that has not been recorded yet starts when it is.
        interval: seconds between looks, at least 0.1.

    Returns:
        Live: `figure`, `done`, `wait()`, `close()`.

    Raises:
        ConfigError: no such run folder, or an interval that is not positive.
        BackendError: plotly is missing.
    """
    if interval <= 0:
        raise ConfigError(f"interval={interval} must be positive seconds")
    folder = Path(getattr(job_or_folder, "folder", job_or_folder))
    if not folder.is_dir():
        raise ConfigError(f"there is no run folder {folder}; give a job, or the path of a run such as runs/<name>")
    return Live(folder, _state_of(job_or_folder, folder), metrics or curves.DEFAULT, max(interval, FASTEST_S))


def _state_of(job: Any, folder: Path) -> Callable[[], str]:
    """A function that says how the run stands; a run that no launcher started is "running" until it is closed."""
    if isinstance(job, (str, Path)):
        if not (folder / "state.json").exists():
            return lambda: "running"
        from ..launch.job import attach

        job = attach(folder)
    return lambda: str(job.state)


class Live:
    """What `live` returns. `figure` is the present figure, `redraws` how often it was drawn."""

    def __init__(self, folder: Path, state: Callable[[], str], panels: tuple[Panel, ...], interval: float):
        self.folder, self.panels, self.interval = folder, panels, interval
        self.redraws = 0
        self.note = ""  # why the figure is static, if it is
        self.error: Exception | None = None
        self._state = state
        self._data = Follower(folder)
        self._handle: Any = None
        self._stop = threading.Event()
        self.figure: go.Figure = curves.empty(panels, title=folder.name, subtitle=" ")
        if place() == "notebook":
            self.figure, self.note = _widget(self.figure)
        self._over = self._look()
        self._thread = threading.Thread(target=self._follow, name=f"live {folder.name}", daemon=True)
        if self._over:
            self._stop.set()
        else:
            self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has stopped following: the run has ended, or `close` was called."""
        return self._stop.is_set()

    def close(self) -> None:
        """Stop following, with what is recorded now as the last state. Can be called twice."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(10)

    def wait(self, timeout: float | None = None) -> Live:
        """Wait for the end of the run and the last redraw; raises what went wrong while following, if anything."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        if self.error is not None:
            raise self.error
        return self

    def _follow(self) -> None:
        pause = max(self.interval, STATIC_S) if self.note else self.interval
        try:
            while not self._over:
                self._stop.wait(pause)
                self._over = self._look(last=self._stop.is_set())
        except Exception as error:  # noqa: BLE001  a thread has nobody to raise to: kept for wait(), and said in the figure
            self.error = error
            self._headline(f"stopped following: {error}")
        self._stop.set()
        if self._handle is not None:
            self._handle.update(bundle(self.figure), raw=True)  # from now on an ordinary figure with its static twin

    def _look(self, last: bool = False) -> bool:
        """Read what is new and redraw. Returns whether this was the last time."""
        state = self._state()  # before reading: what was written before the end is then surely read
        over = last or state not in ("starting", "running")
        if self._data.read() or over or not self.redraws:
            with self.figure.batch_update():
                curves.fill(self.figure, self.panels, [self._data.pick(curves.names(p)) for p in self.panels])
            steps = f" · step {self._data.steps[-1]}" if self._data.steps else " · no step recorded yet"
            self._headline(("closed" if last and state == "running" else state) + steps)
            self.redraws += 1
            if self.note and self._handle is not None and not over:
                self._handle.update(bundle(self.figure, interactive=False), raw=True)
        return over

    def _headline(self, text: str) -> None:
        self.figure.layout.title.text = headline(self.folder.name, text)

    def _ipython_display_(self) -> None:
        if place() != "notebook":
            print(self)
            return
        from IPython.display import DisplayHandle

        self._handle = DisplayHandle()
        data = bundle(self.figure, interactive=self.done)
        if self.note:
            print(self.note)
        elif not self.done:
            view = self.figure._repr_mimebundle_()
            data |= view[0] if isinstance(view, tuple) else view  # the rest is for viewers without widgets
        self._handle.display(data, raw=True)
        if self.done:  # it ended in between
            self._handle.update(bundle(self.figure), raw=True)

    def __repr__(self) -> str:
        from . import tables

        return tables.text(self.figure)


class Follower:
    """Metrics of a run, read piece by piece. Several records of one step are joined."""

    def __init__(self, folder: Path):
        self.path = folder / "metrics.jsonl"
        self.steps: list[int] = []
        self._values: dict[str, list[float]] = {}
        self._offset = 0

    def read(self) -> bool:
        """Read what was added; returns whether there was anything."""
        from ..measure.record import read_records

        if self._offset and self.path.exists() and self.path.stat().st_size < self._offset:
            self.steps, self._values, self._offset = [], {}, 0  # resumed from an earlier step
        records, self._offset = read_records(self.path, self._offset)
        for record in records:
            step = record["step"]
            if not self.steps or step > self.steps[-1]:
                self.steps.append(step)
            at = len(self.steps) - 1
            for name, value in record.items():
                if isinstance(value, (int, float)) and name != "step":
                    column = self._values.setdefault(name, [])
                    column.extend([float("nan")] * (at + 1 - len(column)))
                    column[at] = float(value)
        return bool(records)

    def pick(self, names: tuple[str, ...]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Steps and columns, as `series.pick` gives them; a metric that was never recorded is left out."""
        found = {}
        for name in names:
            if name in self._values:
                column = np.full(len(self.steps), np.nan)
                column[: len(self._values[name])] = self._values[name]
                found[name] = column
        keep = ~np.isnan([*found.values()]).all(axis=0) if found else np.zeros(len(self.steps), bool)
        return np.array(self.steps, dtype=float)[keep], {name: column[keep] for name, column in found.items()}


def _widget(fig: go.Figure) -> tuple[go.Figure | go.FigureWidget, str]:
    """The figure as a widget, or the figure and why it is none."""
    import plotly.graph_objects as go

    try:
        return go.FigureWidget(fig), ""
    except ImportError as error:
        return fig, (
            f"a static picture, replaced every {STATIC_S:g} s: the live figure needs anywidget and ipywidgets "
            f'({error}); install them with pip install "moekit[notebooks]"'
        )
