"""A figure that follows a run while it goes on, and is an ordinary saved figure when it has ended.

A background thread reads what is new in `metrics.jsonl` and redraws, at most ten times a second. While the run goes on
the output is a widget; when it ends, the figure with its static twin, so that a saved notebook shows the result.
Without the widget packages it is a static picture that is replaced now and then; it says so."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..measure.record import read_records
from . import curves, series, tables
from .curves import Panel
from .progress import place, put
from .theme import Figure, bundle, headline, need

FASTEST_S = 0.1  # ten redraws a second
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
    folder = Path(getattr(job_or_folder, "folder", job_or_folder))
    if not folder.is_dir():
        raise ConfigError(f"there is no run folder {folder}; give a job, or the path of a run such as runs/<name>")
    job = job_or_folder
    if isinstance(job, (str, Path)) and (folder / "state.json").exists():
        from ..launch.job import attach

        job = attach(folder)
    # a run that no launcher started is "running" until it is closed
    return Live(folder, lambda: getattr(job, "state", "running"), metrics or curves.DEFAULT, max(interval, FASTEST_S))


class Live:
    """What `live` returns. `figure` is the present figure, `redraws` how often it was drawn."""

    def __init__(self, folder: Path, state: Callable[[], str], panels: tuple[Panel, ...], interval: float):
        self.folder, self.panels, self.interval, self.redraws = folder, panels, interval, 0
        self.note = ""  # why the figure is static, if it is
        self.error: Exception | None = None
        self._state, self._handle = state, None
        self._data = Follower(folder, {name for panel in panels for name in curves.names(panel)})
        self._stop = threading.Event()
        self.figure: Figure = self._draw(" ")
        if place() == "notebook":
            try:
                self.figure = need("plotly.graph_objects", "a live figure").FigureWidget(self.figure)
            except ImportError as error:
                self.note = f"a static picture, replaced every {STATIC_S:g} s: the live figure needs anywidget and "
                self.note += f'ipywidgets ({error}); install them with pip install "moekit[notebooks]"'
        self._over = self._look()
        self._thread = threading.Thread(target=self._follow, name=f"live {folder.name}", daemon=True)
        (self._stop.set if self._over else self._thread.start)()

    @property
    def done(self) -> bool:
        """Whether it has stopped following: the run has ended, or `close` was called."""
        return self._stop.is_set()

    def close(self) -> None:
        """Stop following, with what is recorded now as the last state. Can be called twice."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def wait(self, timeout: float | None = None) -> "Live":
        """Wait for the end of the run and the last redraw; raises what went wrong while following, if anything."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        if self.error is not None:
            raise self.error
        return self

    def _follow(self) -> None:
        try:
            while not self._over:
                self._stop.wait(max(self.interval, STATIC_S) if self.note else self.interval)
                self._over = self._look(last=self._stop.is_set())
        except Exception as error:  # noqa: BLE001  a thread has nobody to raise to: kept for wait(), and said in the figure
            self.error = error
            self.figure.layout.title.text = headline(self.folder.name, f"stopped following: {error}")
        self._stop.set()
        if self._handle is not None:
            put(self._handle, bundle(self.figure))  # from now on an ordinary figure with its static twin

    def _look(self, last: bool = False) -> bool:
        """Read what is new and redraw. Returns whether this was the last time."""
        state = self._state()  # before reading: what was written before the end is then surely read
        over = last or state not in ("starting", "running")
        if self._data.read() or over or not self.redraws:
            step = f"step {max(self._data.rows)}" if self._data.rows else "no step recorded yet"
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
        rows = list(self._data.rows.values())
        data = [series.pick(rows, *curves.names(panel), optional=True) for panel in self.panels]
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


class Follower:
    """Some metrics of a run, read piece by piece: `rows` holds them by step, several records of one step joined."""

    def __init__(self, folder: Path, names: set[str]):
        self.path, self.names = folder / "metrics.jsonl", names
        self.rows: dict[int, dict[str, float]] = {}
        self._offset = 0

    def read(self) -> bool:
        """Read what was added; returns whether there was anything."""
        if self._offset and self.path.exists() and self.path.stat().st_size < self._offset:
            self.rows, self._offset = {}, 0  # resumed from an earlier step
        records, self._offset = read_records(self.path, self._offset)
        for record in records:
            row = self.rows.setdefault(record["step"], {"step": record["step"]})
            row.update({name: record[name] for name in self.names & record.keys()})
        return bool(records)
