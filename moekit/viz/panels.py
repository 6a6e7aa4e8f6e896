"""Log panels: text from threads or ranks, each line in the panel that owns it and nowhere else.

A notebook sends what is printed to the cell that runs, whichever thread printed it. A panel captures nothing: it is
written to (`print(..., file=panel)`) and shows its own lines in its own output."""

import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from ..errors import DataError
from .progress import INTERVAL_S, place, put
from .theme import page

LINES = 1000  # kept; older ones are dropped and counted


class LogPanel:
    """Lines under a title, safe to write to from several threads. Shows itself as the last value of a cell.
    Args: `title`: said above the lines. `height`: lines visible at once. `keep`: lines that are kept.
    >>> panel = LogPanel("rank 0")
    >>> print("loss", 1.5, file=panel)
    >>> panel.lines
    ['loss 1.5']
    """

    def __init__(self, title: str = "log", *, height: int = 8, keep: int = LINES):
        self.title, self.height, self.dropped = title, height, 0
        self._lines: deque[str] = deque(maxlen=keep)
        self._open: dict[int, str] = {}  # what each thread has written of a line that it has not ended
        self._lock = threading.Lock()
        self._handle, self._last = None, 0.0
        self._timer: threading.Timer | None = None

    @property
    def lines(self) -> list[str]:
        """The lines, oldest first."""
        with self._lock:
            return list(self._lines)

    def write(self, text: str) -> int:
        """Add text; a line appears once it has ended. What two threads write of one line each stays two lines."""
        me = threading.get_ident()
        with self._lock:
            *whole, rest = (self._open.pop(me, "") + text).split("\n")
            if rest:
                self._open[me] = rest
            for line in whole:
                self.dropped += len(self._lines) == self._lines.maxlen
                self._lines.append(line.rsplit("\r", 1)[-1])
            if whole and self._handle is not None and self._timer is None:  # shown when an interval has passed
                self._timer = threading.Timer(max(0.0, self._last + INTERVAL_S - time.monotonic()), self.flush)
                self._timer.daemon = True
                self._timer.start()
        return len(text)

    def flush(self) -> None:
        """Show what is there now."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._handle is not None:
                self._last = time.monotonic()
                put(self._handle, self._data())

    def close(self) -> None:
        """Show everything, lines that were not ended too."""
        with self._lock:
            self._lines.extend(self._open.values())
            self._open.clear()
        self.flush()

    def _data(self) -> dict[str, str]:
        text = "\n".join(self._lines)
        dropped = f"... {self.dropped} earlier lines\n" * bool(self.dropped)
        plain = f"{self.title}\n{dropped}{text}".strip("\n")
        return {"text/plain": plain, "text/html": page("panel.html.jinja", panel=self, text=text)}

    def __repr__(self) -> str:
        with self._lock:
            return self._data()["text/plain"]

    def _ipython_display_(self) -> None:
        if place() != "notebook":
            print(self)
            return
        with self._lock:
            self._handle, self._last = put(None, self._data()), time.monotonic()


def rank_logs(job: Any, ranks: list[int] | None = None) -> "RankLogs":
    """What the ranks of a job (a `Job`, or the path of a run folder) print, one panel for each, until the job ends.
    Args: `ranks`: which ones; None = the first eight."""
    if isinstance(job, (str, Path)):
        from ..launch.job import attach

        job = attach(job)
    chosen = range(min(job.nproc, 8)) if ranks is None else ranks
    if wrong := [rank for rank in chosen if not 0 <= rank < job.nproc]:
        raise DataError(f"rank {wrong[0]} is not one of the job's {job.nproc} ranks")
    return RankLogs(job, {rank: LogPanel(f"rank {rank}") for rank in chosen})


class RankLogs:
    """The `panels` of `rank_logs`, rank -> panel, filled by a thread that reads the log files."""

    def __init__(self, job: Any, panels: dict[int, LogPanel]):
        self.panels, self._job, self._offset = panels, job, dict.fromkeys(panels, 0)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        over = False
        while not over:
            over = self._job.done  # before reading, so that no line is missed
            for rank, panel in self.panels.items():
                path = Path(self._job.folder) / "logs" / f"rank_{rank}.log"
                if path.exists():
                    with path.open("rb") as file:
                        file.seek(self._offset[rank])
                        data = file.read()
                    data = data if over else data[: data.rfind(b"\n") + 1]
                    self._offset[rank] += len(data)
                    panel.write(data.decode(errors="backslashreplace"))
            time.sleep(0 if over else 3 * INTERVAL_S)
        for panel in self.panels.values():
            panel.close()

    def wait(self, timeout: float | None = None) -> None:
        """Until the job has ended and every line is shown."""
        self._thread.join(timeout)

    def _ipython_display_(self) -> None:
        for panel in self.panels.values():
            panel._ipython_display_()

    def __repr__(self) -> str:
        return "\n\n".join(map(repr, self.panels.values()))
