"""A figure that follows a run while it goes on, and is an ordinary saved figure when it has ended.

A background thread reads what is new in `metrics.jsonl` and redraws, at most ten times a second. While the run goes on
the output is a widget; when it ends, the figure with its static twin, so that a saved notebook shows the result.
Without the widget packages it is a static picture that is replaced now and then; it says so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..measure.follow import Columns
from . import curves, series, tables
from .curves import Panel
from .follow import Following, missing_widgets
from .progress import place, put
from .theme import Figure, bundle, headline, need

STATIC_S = 2.0  # a static picture costs more


def live(job_or_folder: Any, *metrics: Panel, interval: float = 0.5) -> "Live":
    """Follow a run's metrics in a figure. Returns at once; show it as the last value of a cell.
    Args:
        job_or_folder: a `Job` (from `submit` or `attach`), or the path of a run folder.
        metrics: names, one panel each; a tuple of names shares a panel. Default: loss, supervised tokens a second,
            busiest expert over the mean. A metric that has not been recorded yet starts when it is.
        interval: seconds between looks, at least 0.1.
    Returns: Live: `figure`, `done`, `wait()`, `close()`.
    Raises ConfigError: no such run folder, or an interval that is not positive; BackendError: plotly is missing."""
    if interval <= 0:
        raise ConfigError(f"interval={interval} must be positive seconds")
    folder, job = find_run(job_or_folder)
    # a run that no launcher started is "running" until it is closed
    shown = Live(folder, lambda: getattr(job, "state", "running"), metrics or curves.DEFAULT, interval)
    shown.start()
    return shown


def find_run(job_or_folder: Any) -> tuple[Path, Any]:
    """Folder and job of a run, given as a job, a `Run` or a path; no job if no launcher started it.
    Raises ConfigError: no such folder."""
    folder = Path(getattr(job_or_folder, "folder", job_or_folder))
    if not folder.is_dir():
        raise ConfigError(f"there is no run folder {folder}; give a job, or the path of a run such as runs/<name>")
    if hasattr(job_or_folder, "done") or not (folder / "state.json").exists():
        return folder, None if isinstance(job_or_folder, (str, Path)) else job_or_folder
    from ..launch.job import attach

    return folder, attach(folder)


class Live(Following):
    """What `live` returns. `figure` is the present figure, `redraws` how often it was drawn."""

    def __init__(self, folder: Path, state: Callable[[], str], panels: tuple[Panel, ...], interval: float):
        super().__init__(folder.name, interval)
        self.folder, self.panels, self.redraws = folder, panels, 0
        self._state, self._handle = state, None
        names = {name for panel in panels for name in curves.names(panel)}
        self._data = Columns(folder / "metrics.jsonl", names.__contains__)
        self.figure: Figure = self._draw(" ")
        self.note = ""  # why the figure is static, if it is
        if place() == "notebook":
            if missing := missing_widgets():
                self.note = f"a static picture, replaced every {STATIC_S:g} s: the live figure needs {missing}"
                self.interval = max(interval, STATIC_S)
            else:
                self.figure = need("plotly.graph_objects", "a live figure").FigureWidget(self.figure)

    def _ended(self) -> None:
        if self.error is not None:
            self.figure.layout.title.text = headline(self.folder.name, f"stopped following: {self.error}")
        if self._handle is not None:
            put(self._handle, bundle(self.figure))  # from now on an ordinary figure with its static twin

    def _look(self, last: bool) -> bool:
        state = self._state()  # before reading: what was written before the end is then surely read
        over = last or state not in ("starting", "running")
        if self._data.read() or over or not self.redraws:
            step = f"step {self._data.table.index[-1]}" if len(self._data.table) else "no step recorded yet"
            now = self._draw(f"{'closed' if last and state == 'running' else state} · {step}")
            with self.figure.batch_update():  # axes stay as the reader has turned them
                for line, new in zip(self.figure.data, now.data):
                    line.update(x=new.x, y=new.y, mode=new.mode)
                self.figure.layout.update(title=now.layout.title, annotations=now.layout.annotations)
            self.redraws += 1
            if self.note and self._handle is not None and not over:
                put(self._handle, bundle(self.figure, interactive=False))
        return over

    def _draw(self, subtitle: str) -> Figure:
        data = [series.pick(self._data.table, *curves.names(panel), optional=True) for panel in self.panels]
        return curves.draw(self.panels, data, title=self.folder.name, subtitle=subtitle)

    def _ipython_display_(self) -> None:
        if place() != "notebook":
            print(self)
            return
        data = bundle(self.figure, interactive=self.done)
        if self.note:
            print(self.note)
        elif not self.done:
            view = self.figure._repr_mimebundle_()
            data |= view[0] if isinstance(view, tuple) else view  # the rest is for viewers without widgets
        self._handle = put(None, data)
        if self.done:  # it ended in between
            put(self._handle, bundle(self.figure))

    def __repr__(self) -> str:
        return tables.text(self.figure)
