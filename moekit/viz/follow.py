"""Following something that goes on: a background thread that looks now and then, at most ten times a second."""

import importlib
import threading
from abc import ABC, abstractmethod
from typing import Self

FASTEST_S = 0.1  # ten looks a second


def missing_widgets() -> str:
    """What a live widget lacks here, and how to get it; empty where nothing is missing."""
    try:
        importlib.import_module("ipywidgets")
        importlib.import_module("plotly.graph_objects").FigureWidget()
    except ImportError as error:
        return f'anywidget and ipywidgets ({error}); install them with pip install "moekit[notebooks]"'
    return ""


class Following(ABC):
    """Looks at once, then every `interval` seconds in a thread, until a look says that there is nothing more to see.

    What a look raises ends the following; `wait` raises it."""

    def __init__(self, name: str, interval: float):
        self.interval = max(interval, FASTEST_S)
        self._name, self._over = f"following {name}", False
        self._closed, self._nudged = threading.Event(), threading.Event()
        self._lock, self._looking = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None

    @abstractmethod
    def _look(self, last: bool) -> bool:
        """Take in what is new and show it; `last`: it was closed. Returns whether this was the last time."""

    @abstractmethod
    def _ended(self) -> None:
        """The last look was taken, or one raised `error`."""

    @property
    def done(self) -> bool:
        """Whether it has stopped following: what it follows has ended, or `close` was called."""
        return self._over and self._thread is None

    def start(self) -> None:
        """The first look, in the caller; then the thread, if there is more to see."""
        with self._looking:
            self._over = self._look(False)
        if not self._over:
            self._nudge()

    def close(self) -> None:
        """Stop following, with what is there now as the last state. Can be called twice."""
        self._closed.set()
        if not self.done:
            self._nudge()
            self.wait(10)

    def wait(self, timeout: float | None = None) -> Self:
        """Wait for the end of what is followed and the last look; raises what went wrong meanwhile, if anything."""
        if (thread := self._thread) is not None:
            thread.join(timeout)
        if self.error is not None:
            raise self.error
        return self

    def _nudge(self) -> None:
        """Look soon, also after the end."""
        with self._lock:
            self._nudged.set()
            if self._thread is None:
                self._over = False
                self._thread = threading.Thread(target=self._follow, name=self._name, daemon=True)
                self._thread.start()

    def _follow(self) -> None:
        while True:
            self._nudged.wait(self.interval - FASTEST_S)
            self._nudged.clear()
            with self._looking:
                try:
                    self._over = self._look(self._closed.is_set())
                except Exception as error:  # noqa: BLE001  a thread has nobody to raise to: kept for wait(), and shown
                    self.error, self._over = error, True
                if self._over:
                    self._ended()
            with self._lock:
                if self._over and not self._nudged.is_set():
                    self._thread = None
                    return
            self._closed.wait(FASTEST_S)
