"""Progress and log panels outside a notebook: few messages, an exact last one, each line in the panel that owns it."""

from __future__ import annotations

import io
import threading
import time

import pytest

from moekit.errors import ConfigError
from moekit.viz.panels import LogPanel
from moekit.viz.progress import Progress


def test_bc_122_ten_thousand_updates_make_few_messages_and_the_last_is_whole() -> None:
    messages: list[str] = []
    start = time.monotonic()
    with Progress(10_000, "steps", show=messages.append) as progress:
        for i in range(10_000):
            progress.update(loss=1 / (i + 1))
    elapsed = time.monotonic() - start
    assert 1 <= len(messages) <= 1 + elapsed / 0.1
    assert "10000/10000" in messages[-1] and "loss 1e-04" in messages[-1].replace("0.0001", "1e-04")


def test_bc_122_holds_for_slow_loops_too() -> None:
    messages: list[str] = []
    start = time.monotonic()
    with Progress(12, show=messages.append) as progress:
        for _ in range(12):
            time.sleep(0.03)
            progress.update()
    assert 2 <= len(messages) <= 1 + (time.monotonic() - start) / 0.1
    assert messages[-1].startswith("12/12")


def test_the_last_state_is_said_once_and_also_after_an_error() -> None:
    messages: list[str] = []
    progress = Progress(2, show=messages.append)
    progress.update()
    progress.close()
    progress.close()
    assert len(messages) == 1
    with pytest.raises(ZeroDivisionError), Progress(9, show=messages.append) as progress:
        progress.update(5)
        raise ZeroDivisionError
    assert messages[-1].startswith("5/9")


def test_a_terminal_line_is_rewritten_in_place() -> None:
    out = io.StringIO()
    with Progress(3, "steps", mode="terminal", interval=0.0, stream=out) as progress:
        progress.update(note="a long word")
        progress.update(note="b")
        progress.update()
    lines = out.getvalue()
    assert lines.count("\n") == 1 and lines.endswith("\n") and lines.count("\r") == 3
    first, second = lines.split("\r")[1:3]
    assert len(second) >= len(first), "what was longer before is wiped out"


def test_a_log_file_gets_few_lines() -> None:
    out = io.StringIO()
    with Progress(1000, "steps", mode="log", interval=0.0, stream=out) as progress:
        for _ in range(1000):
            progress.update()
    lines = out.getvalue().splitlines()
    assert len(lines) == 10 and "1000/1000" in lines[-1] and "\r" not in out.getvalue()


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="mode='loud'"):
        Progress(3, mode="loud")


def test_bc_124_each_line_has_one_owner(capsys: pytest.CaptureFixture[str]) -> None:
    panels = LogPanel("a"), LogPanel("b")
    turn = threading.Barrier(2)

    def work(panel: LogPanel, name: str) -> None:
        for i in range(5):
            turn.wait(10)  # interleaved
            panel.write(name)
            turn.wait(10)
            panel.write(f"{i}\n")

    threads = [threading.Thread(target=work, args=pair) for pair in zip(panels, "ab")]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert panels[0].lines == ["a0", "a1", "a2", "a3", "a4"]
    assert panels[1].lines == ["b0", "b1", "b2", "b3", "b4"]
    assert capsys.readouterr() == ("", "")


def test_threads_that_share_a_panel_do_not_cut_each_others_lines() -> None:
    """BC-124, in one panel: a line belongs to the thread that writes it."""
    panel = LogPanel("both")
    turn = threading.Barrier(2)

    def work(name: str) -> None:
        turn.wait(10)
        print(name, "begins", end=" ", file=panel)
        turn.wait(10)
        print("and ends", file=panel)

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(panel.lines) == ["a begins and ends", "b begins and ends"]


def test_a_panel_keeps_the_newest_lines_and_says_how_many_went() -> None:
    panel = LogPanel("log", keep=3)
    for i in range(5):
        print("<line>", i, file=panel)
    panel.write("not ended")
    assert panel.lines == ["<line> 2", "<line> 3", "<line> 4"] and panel.dropped == 2
    panel.close()
    assert panel.lines[-1] == "not ended"
    assert "2 earlier lines" in repr(panel) and "&lt;line&gt; 4" in panel._data()["text/html"]
