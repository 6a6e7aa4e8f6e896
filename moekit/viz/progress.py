"""A progress line that stays cheap: few messages, whatever the number of updates, and the last one always arrives.

In a terminal the line is rewritten in place, in a notebook one output is updated, in a log file a line is added now
and then. A browser that gets thousands of messages a second stops answering; ten are enough for the eye."""

import html
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Self, TextIO

from ..errors import ConfigError
from .theme import CLASS, MUTED, number

INTERVAL_S = 0.1
LOG_SHARE, LOG_S = 0.1, 30.0  # a log file gets a line at every tenth of the way, or after half a minute


def place() -> str:
    """Where output goes: "notebook" (a Jupyter kernel), "terminal" or "log"."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and getattr(shell, "kernel", None) is not None:
        return "notebook"
    return "terminal" if sys.stdout is not None and sys.stdout.isatty() else "log"


def put(handle: Any, data: dict[str, Any]) -> Any:
    """Show a MIME bundle as a new output (handle None) or in the place of an old one; returns the handle."""
    from IPython.display import DisplayHandle

    if handle is None:
        handle = DisplayHandle()
        handle.display(data, raw=True)
    else:
        handle.update(data, raw=True)
    return handle


class Progress:
    """How far a loop is: at most 1 + elapsed / interval messages, the last of them exactly the final state.

    Use it as a context manager, or call `close` at the end.
    Args:
        total: how many units there are; None = unknown. label: what is counted.
        mode: "notebook", "terminal", "log", or "auto". interval: seconds between messages, at least.
        stream: where terminal and log lines go; None = standard output.
        show: takes the text of each message instead of the notebook, the terminal or the stream.
    >>> lines = []
    >>> with Progress(3, "steps", show=lines.append) as progress:
    ...     for loss in (2.0, 1.5, 1.25):
    ...         progress.update(loss=loss)
    >>> "3/3" in lines[-1], "loss 1.25" in lines[-1]
    (True, True)
    """

    def __init__(
        self, total: int | None = None, label: str = "", *, mode: str = "auto", interval: float = INTERVAL_S,
        stream: TextIO | None = None, show: Callable[[str], None] | None = None,
    ):  # fmt: skip
        if mode not in ("auto", "notebook", "terminal", "log"):
            raise ConfigError(f"mode={mode!r} is not one of 'auto', 'notebook', 'terminal', 'log'")
        self.total, self.label, self.interval = total, label, interval
        self.mode = place() if mode == "auto" else mode
        self.done, self.facts = 0, {}
        self._stream, self._show = stream, show
        self._start = self._last = time.monotonic()  # the first message waits for one interval, the last for none
        self._said: tuple[int, Any] = (0, None)
        self._width, self._handle = 0, None
        self._lock = threading.Lock()

    def update(self, done: int | None = None, **facts: float | str) -> None:
        """Record progress, and show it if it is time: `done` units so far (None = one more), and what to say beside,
        such as ``loss=1.25``; later values replace earlier ones."""
        with self._lock:
            self.done = self.done + 1 if done is None else done
            self.facts.update(facts)
            if self._due():
                self._say()

    def close(self) -> None:
        """Show the final state if the last message was not it, and end the line. Can be called twice."""
        with self._lock:
            if (self.done, self.facts) != self._said:
                self._say()
            if self._width:
                self._write("\n")
                self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        elapsed, total = time.monotonic() - self._start, self.total or 0
        count = f"{self.done}/{total}" if total else str(self.done)
        facts = [f"{k.replace('_', ' ')} {v if isinstance(v, str) else number(v)}" for k, v in self.facts.items()]
        going = 0 < self.done < total
        clock = f"{_clock(elapsed * (total - self.done) / self.done)} left" if going else _clock(elapsed)
        return "  ".join(filter(None, [self.label, count, *facts, clock]))

    def _due(self) -> bool:
        """Whether it is time for a message: a log file gets fewer."""
        since, new = time.monotonic() - self._last, self.done - self._said[0]
        often = self.mode != "log" or self._show or since >= LOG_S
        return since >= self.interval and bool(often or (self.total and new >= LOG_SHARE * self.total))

    def _say(self) -> None:
        text = str(self)
        self._last, self._said = time.monotonic(), (self.done, dict(self.facts))
        if self._show is not None:
            self._show(text)
        elif self.mode == "notebook":
            self._handle = put(self._handle, {"text/plain": text, "text/html": self._html(text)})
        elif self.mode == "terminal":
            self._write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._write(text + "\n")

    def _write(self, text: str) -> None:
        print(text, end="", file=self._stream or sys.stdout, flush=True)

    def _html(self, text: str) -> str:
        share = 100 * min(self.done / self.total, 1.0) if self.total else 0.0
        line = "display:inline-block;height:8px;border-radius:4px;vertical-align:middle;"
        full = f"<span style='{line}width:{share:.1f}%;background:{CLASS['supervised']}'></span>"
        bar = f"<span style='{line}width:160px;background:{MUTED}33;margin-right:10px;line-height:5px'>{full}</span>"
        words = html.escape(text).replace("  ", " ", 1 if self.label else 0).replace("  ", " · ")
        return f"<div style='font-variant-numeric:tabular-nums'>{bar if self.total else ''}{words}</div>"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
