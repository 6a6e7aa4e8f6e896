"""`dashboard`: a page in a cell that shows runs while they go on and when they have ended, and stops and resumes them.

    moekit.dashboard(job)                        a job, or the path of a run folder
    moekit.dashboard(["runs/a", "runs/b"])       several runs over each other
    moekit.dashboard("runs")                     all runs of a folder

From the top: what each run and each rank of the chosen run does (CSS class `moekit-state`); the buttons "Stop" and
"Resume"; loss and rates of all runs; routed work of the chosen run by class and by pass; its expert load, with a
slider for the layer and one for the step, which follows the last step until it is moved; the end of a rank's log
(`moekit-log`). All of it stands in one box, `moekit-dashboard`.

A background thread reads what is new, at most ten times a second, and sends a message for each part that changed. Where
widgets are missing, and below the widget in a saved notebook, stands the static twin: pictures and numbers.
Axis letters: S steps, L layers that route, E experts."""

import base64
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..data.batch import CLASSES
from ..errors import ConfigError, MoekitError
from ..measure import chunks
from ..measure.follow import Columns
from ..measure.record import ARRAYS, METRICS
from . import controls, overview, static, tables
from .follow import Following, missing_widgets
from .live import STATIC_S, find_run
from .progress import place, put
from .series import ARRAY
from .theme import MUTED, SERIES, Figure, headline, need, page

GOING = ("starting", "running", "recorded")  # the last: no launcher says when it ends
SIGNS = {"starting": ("○", MUTED), "running": ("●", SERIES[0]), "recorded": ("○", MUTED), "finished": ("✓", SERIES[2]),
         "stopped": ("■", MUTED), "failed": ("✕", "#B33A00"), "gone": ("✕", MUTED)}  # fmt: skip
LINES = 200  # of a log
RANKS = 64  # shown


def dashboard(job_or_runs: Any, *, metric: str | None = None, interval: float = 0.5) -> "Dashboard":
    """Show runs in a page of live figures, with buttons that stop and resume them. Returns at once.
    Args:
        job_or_runs: a `Job`, a `Run` or the path of a run folder; several of them in a list; or a folder of run
            folders. They may be running, ended, of an earlier kernel, without any metric yet, or without a launcher.
        metric: drawn in place of the loss, for example "reward/mean".
        interval: seconds between looks, at least 0.1.
    Returns: Dashboard, which shows itself as the last value of a cell.
    Raises ConfigError: no such folder or no run in it, or an interval that is not positive; BackendError: no plotly.
    Cost: opening a run of 100,000 steps of 40 metrics 1 s; then what is new."""
    if interval <= 0:
        raise ConfigError(f"interval={interval} must be positive seconds")
    several = isinstance(job_or_runs, Sequence) and not isinstance(job_or_runs, str)
    given = list(job_or_runs) if several else [job_or_runs]
    if not several and isinstance(job_or_runs, (str, Path)) and not _is_run(Path(job_or_runs)):
        given = [path for path in sorted(Path(job_or_runs).glob("*/")) if _is_run(path)] or given
    if not given:
        raise ConfigError("there is no run to show; give a job, the path of a run folder, or a list of them")
    sources = {source.folder.resolve(): source for source in map(Source, given)}  # one that is given twice is one
    shown = Dashboard(list(sources.values()), metric, interval)
    shown.start()
    return shown


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (METRICS, ARRAYS, "state.json"))


class Source:
    """One run, as a dashboard reads it: `table` holds its metrics, `version` counts how often they changed."""

    def __init__(self, run: Any):
        self.folder, self.job = find_run(run)
        self.name, self.version = self.folder.name, 0
        self._columns = Columns(self.folder / METRICS, lambda name: True)
        self._marks = [mark for mark in (self.folder, self.folder / "state.json") if mark.exists()]

    @property
    def state(self) -> str:
        """Of the job; "recorded" where no launcher wrote one, "gone" if its folder was deleted."""
        return getattr(self.job, "state", "recorded") if not self.gone else "gone"

    @property
    def gone(self) -> bool:
        """Whether its folder was deleted, or is about to be."""
        return not all(mark.exists() for mark in self._marks)

    @property
    def table(self) -> Any:
        """Metrics by step."""
        return self._columns.table

    def read(self) -> None:
        """Take in what is new."""
        self.version += self._columns.read()

    def load(self, at: int, layer: str, steps: np.ndarray) -> tuple[Any, ...]:
        """What `overview.load` draws: counts of the step at or before `at`, and of `layer` over `steps`."""
        if not len(steps):
            return np.zeros((0, 0)), [], 0, np.zeros((0, 0)), steps, ""
        step = int(steps[max(np.searchsorted(steps, at, "right") - 1, 0)])
        some = np.union1d(steps[:: overview.stride(len(steps), overview.BINS)], steps[-1:])
        found = chunks.series(self.folder / ARRAYS, f"{ARRAY}/decided", {step, *some.tolist()})
        count_SLE = found.values[:, :, [i for i, name in enumerate(CLASSES) if name != "padding"]].sum(2)
        layers = [str(i) for i in chunks.series(self.folder / ARRAYS, "policy/layers", [step]).values[0]]
        i = layers.index(layer) if layer in layers else 0
        chosen = np.isin(found.steps, some)
        return count_SLE[found.steps == step][0], layers, step, count_SLE[chosen, i], found.steps[chosen], layers[i]

    def facts(self, state: str) -> list[str]:
        """What a line says about it."""
        facts = [f"step {self.table.index[-1]:,}" if len(self.table) else "no step recorded yet"]
        if self.job is None or state == "gone":
            return [*facts, "its folder was deleted" if state == "gone" else "no launcher wrote its state"]
        facts.append(f"{self.job.nproc} rank{'s' * (self.job.nproc != 1)}")
        return [*facts, str(timedelta(seconds=int(self.job.elapsed))), self.job.reason[:300]]


class Dashboard(Following):
    """What `dashboard` returns: `figures` by name (progress, work, load), `stop()`, `resume()`, `wait()`, `close()`.

    `widgets` are its controls by name (run, stop, resume, step, layer, rank, state, log, message), where there are
    widgets; `updates` counts the looks that found something new; `note` says why there are no widgets."""

    def __init__(self, sources: list[Source], metric: str | None, interval: float):
        super().__init__(sources[0].name, interval)
        self.sources, self.metric, self.updates = sources, metric, 0
        for source, name in zip(sources, _names([source.folder for source in sources])):
            source.name = name
        self.note = missing_widgets()
        self._drawn: dict[str, tuple[Any, Figure]] = {}  # part -> what it was drawn from, and the figure
        self._handle, self._message, self._busy, self._page = None, "", False, None
        if not self.note:
            self._page = controls.Controls([source.name for source in sources], self._act, self._nudge)
        elif place() == "notebook":
            self.interval = max(self.interval, STATIC_S)

    @property
    def figures(self) -> dict[str, Figure]:
        """The figures as they are now."""
        return dict(self._page.figures) if self._page else {name: fig for name, (_, fig) in self._drawn.items()}

    @property
    def widgets(self) -> dict[str, Any]:
        """The controls by name; none where widgets are missing."""
        return self._page.widgets if self._page else {}

    @property
    def source(self) -> Source:
        """The chosen run."""
        return self.sources[self._page.value("run") if self._page else 0]

    def stop(self) -> str:
        """Stop the chosen run's job. Returns the state, once no process is left."""
        return self._do("stop", self.source)

    def resume(self) -> Any:
        """Submit the chosen run's job again, to go on from its newest checkpoint (`Job.resume`), and follow it."""
        return self._do("resume", self.source)

    def _do(self, what: str, source: Source) -> Any:
        if source.job is None:
            raise ConfigError(f"{source.name} was started by no launcher: there is no job to stop or to resume")
        if what == "resume":
            self._closed.clear()
        try:
            return getattr(source.job, what)()
        finally:
            self._nudge()

    def _act(self, name: str) -> None:
        """A button: in a thread, for the kernel has other things to do."""
        source = self.source  # when it was pressed

        def run() -> None:
            try:
                self._do(name, source)
                self._message = ""
            except Exception as error:  # noqa: BLE001  nobody sees a thread's traceback: it is said in the page
                self._message = f"{name} failed: {error}"
            self._busy = False
            self._nudge()

        if not self._busy:
            self._busy, self._message = True, f"{'stopping' if name == 'stop' else 'resuming'} {source.name} …"
            threading.Thread(target=run, name=f"{name} {source.name}", daemon=True).start()
            self._nudge()

    # Looking

    def _look(self, last: bool) -> bool:
        with self._page.setting() if self._page else nullcontext():
            gone = [source.gone for source in self.sources]
            try:
                return self._show(last)
            except (OSError, MoekitError):
                if gone == [source.gone for source in self.sources]:
                    raise
                return False  # a folder was deleted meanwhile: next time

    def _show(self, last: bool) -> bool:
        states = [source.state for source in self.sources]  # before reading: what came before an end is then read
        for source in self.sources:
            source.read()
        over = last or not set(states) & set(GOING)
        chosen, state = self.source, states[self.sources.index(self.source)]
        versions = tuple(source.version for source in self.sources)
        runs = {source.name: source.table for source in self.sources}
        drawn = [self._draw("progress", versions, lambda: overview.progress(runs, self.metric)),
                 self._draw("work", (chosen, chosen.version), lambda: overview.work(chosen.table)),
                 self._look_at_load(chosen)]  # fmt: skip
        self.updates += any(drawn)
        if self._page:
            self._say(states, chosen, state)
        elif self._handle is not None and any(drawn) and not over:
            put(self._handle, self._twin())
        return over

    def _draw(self, name: str, key: Any, draw: Callable[[], Figure]) -> bool:
        if name in self._drawn and self._drawn[name][0] == key:
            return False
        self._drawn[name] = key, draw()
        if self._page:
            self._page.draw(name, self._drawn[name][1])
        return True

    def _look_at_load(self, chosen: Source) -> bool:
        try:
            steps = chunks.steps(chosen.folder / ARRAYS, f"{ARRAY}/decided")
            if self._page and len(steps):
                self._page.steps(int(steps[0]), int(steps[-1]))
            at = self._page.value("step") if self._page else int(steps[-1]) if len(steps) else 0
            layer = self._page.value("layer") if self._page else ""
            key = (chosen, at, layer, len(steps), steps[-1:].tolist())
            if "load" in self._drawn and self._drawn["load"][0] == key:
                return False
            found = chosen.load(at, layer, steps)
        except (OSError, MoekitError):  # a chunk was replaced while it was read: next time
            return False
        if self._page and len(steps):
            self._page.options("layer", found[1])
        return self._draw("load", key, lambda: overview.load(*found))

    def _say(self, states: list[str], chosen: Source, state: str) -> None:
        page_, job = self._page, chosen.job if state != "gone" else None
        assert page_ is not None
        runs = []
        for source, now, look in zip(self.sources, states, overview.looks(len(states))):
            sign, ink = SIGNS[now]
            runs.append({"name": source.name, "state": now, "sign": sign, "ink": ink, "facts": source.facts(now),
                         "chosen": source is chosen, **look})  # fmt: skip
        every = job.ranks if job is not None else []
        ranks = [rank | _rank_words(rank) for rank in every[:RANKS]]
        page_.say("state", value=page("dashboard.html.jinja", runs=runs, ranks=ranks, more=len(every) - len(ranks)))
        none = "its folder was deleted" if state == "gone" else "no launcher started this run: there is no job here"
        why = none if job is None else ""
        cannot = job.cannot_resume if job is not None else why
        page_.say("stop", disabled=self._busy or bool(why) or state not in GOING, tooltip=why or controls.STOP)
        page_.say("resume", disabled=self._busy or bool(cannot), tooltip=cannot or controls.RESUME)
        told = self._message or (f"resume: {cannot}" if cannot and state not in GOING else why)
        page_.say("message", value=page("message.html.jinja", text=told))
        if job is not None:
            page_.options("rank", [*((f"rank {r}", r) for r in range(job.nproc)), ("the supervisor", "supervisor")])
            rank = page_.value("rank")
            title = f"rank {rank}" if isinstance(rank, int) else rank
            panel = SimpleNamespace(title=f"{title}, last {LINES} lines", dropped=0, height=12, width="100%")
            page_.say("log", value=page("panel.html.jinja", panel=panel, text=job.logs(rank, LINES)))

    def _ended(self) -> None:
        if self.error is not None and self._page:
            self._page.say("message", value=page("message.html.jinja", text=f"stopped following: {self.error}"))
        if self._handle is not None:
            put(self._handle, self._twin())

    # Showing

    def _twin(self) -> dict[str, Any]:
        """Pictures and numbers of the figures as they are."""
        figures = [need("plotly.graph_objects", "a dashboard's twin").Figure(fig) for _, fig in self._drawn.values()]
        states = ", ".join(f"{s.name} {s.state}" for s in self.sources)
        first = figures[0].layout
        figures[0].update_layout(title_text=headline("Runs" if len(self.sources) > 1 else self.sources[0].name, states))
        figures[0].update_layout(height=first.height + 50, margin_t=first.margin.t + 50)
        data = {"text/plain": "\n\n".join(map(tables.text, figures))}
        try:
            picture = static.stacked(figures)
        except MoekitError as error:
            return data | {"text/plain": f"{data['text/plain']}\n(no picture: {error})"}
        return data | {"image/png": base64.b64encode(picture).decode()}

    def _ipython_display_(self) -> None:
        if place() != "notebook":
            print(self)
            return
        if self._page is None:
            print(f"a static picture, replaced every {STATIC_S:g} s: a dashboard needs {self.note}")
        else:
            view = self._page.box._repr_mimebundle_()
            put(
                None,
                (view[0] if isinstance(view, tuple) else view) | {"text/plain": "the picture below, as a live page"},
            )
        self._handle = put(None, self._twin())

    def __repr__(self) -> str:
        return self._twin()["text/plain"]


def _names(folders: list[Path]) -> list[str]:
    """Names of different folders, with as many folders above as it takes to tell them apart.
    >>> _names([Path("/runs/a/first"), Path("/runs/b/first")]), _names([Path("/runs/a"), Path("/runs/b")])
    (['a/first', 'b/first'], ['a', 'b'])
    """
    parts = [folder.resolve().parts for folder in folders]
    cut = (["/".join(part[-count:]) for part in parts] for count in range(1, 1 + max(map(len, parts))))
    return next(names for names in cut if len(set(names)) == len(names))


def _rank_words(rank: dict[str, Any]) -> dict[str, str]:
    code = rank["exit"]
    if code is not None:
        words = "exit 0" if code == 0 else f"signal {-code}" if code < 0 else f"exit {code}"
        sign, ink = SIGNS["finished" if code == 0 else "stopped" if code == -15 else "failed"]
    elif rank["alive"]:
        words, (sign, ink) = "alive", SIGNS["running"]
    else:
        words, (sign, ink) = "not started" if rank["pid"] is None else "gone", SIGNS["starting"]
        words = "on another host" if rank["alive"] is None and rank["pid"] is not None else words
    return {"words": words, "sign": sign, "ink": ink}
