"""What a `Job` reads from its folder, on folders written by hand; `test_life.py` has the real processes."""

from __future__ import annotations

import json
import pickle
import signal
import threading
import time
from pathlib import Path

import pytest

from moekit.errors import JobError
from moekit.launch.folder import create, read_json, write_json
from moekit.launch.job import Job, attach
from moekit.launch.outcome import failure, first_failure
from moekit.launch.worker import describe_error


@pytest.fixture
def folder(runs: Path) -> Path:
    return create(runs, "a<b>", "module.train", {"nproc": 2}, b"")


def end(folder: Path, state: str, **changes) -> Job:
    values = read_json(folder / "state.json")
    assert values is not None
    write_json(folder / "state.json", values | {"state": state, "ended": values["created"] + 65} | changes)
    return attach(folder)


def test_metrics_are_read_line_by_line_as_they_come(folder: Path) -> None:
    job = Job(folder)
    assert job.metrics() == []
    with (folder / "metrics.jsonl").open("w") as file:
        file.write('{"step/index": 1, "loss/total": 2.5}\n{"step/ind')
        file.flush()
        assert job.metrics() == [{"step/index": 1, "loss/total": 2.5}]
        assert job.metrics() == [{"step/index": 1, "loss/total": 2.5}]
        file.write('ex": 2}\n')
        file.flush()
        assert [m["step/index"] for m in job.metrics()] == [1, 2]
        file.write('{"broken\n{"step/index": 3}\n')
        file.flush()
        with pytest.warns(UserWarning, match="not JSON"):
            assert [m["step/index"] for m in job.metrics()] == [1, 2, 3]
    (folder / "metrics.jsonl").write_text('{"step/index": 9}\n')  # written anew
    assert [m["step/index"] for m in job.metrics()] == [9]
    lines = "".join(f'{{"step/index": {i}}}\n' for i in range(4))
    (folder / "metrics.jsonl").write_text(lines)  # by another run, which is further by now
    assert [m["step/index"] for m in job.metrics()] == [0, 1, 2, 3]


def test_reading_metrics_again_reads_only_what_is_new(folder: Path) -> None:
    line = json.dumps({"loss/total": 1.0, "pad": "x" * 1000}) + "\n"
    (folder / "metrics.jsonl").write_text(line * 20_000)
    job = Job(folder)
    assert len(job.metrics()) == 20_000
    begin = time.perf_counter()
    for _ in range(20):
        job.metrics()
    assert time.perf_counter() - begin < 0.5  # 20 MB read and parsed 20 times takes far longer


def test_logs_are_the_last_lines(folder: Path) -> None:
    job = Job(folder)
    assert job.logs() == ""
    text = "".join(f"line {i} {'x' * 100}\n" for i in range(5000))
    (folder / "logs" / "rank_1.log").write_text(text + "no newline yet")
    assert job.logs(1, 2).splitlines() == [f"line 4999 {'x' * 100}", "no newline yet"]
    assert job.logs(1, 2000).splitlines() == text.splitlines()[-1999:] + ["no newline yet"]
    assert job.logs(1, 10_000) == text + "no newline yet"
    assert repr(job.logs(1, 1)) == "no newline yet"  # a notebook shows the lines, not their quotes
    (folder / "logs" / "rank_0.log").write_bytes(b"\xff\xfe bytes\n")
    assert job.logs(0) == "\\xff\\xfe bytes"


def test_tail_prints_the_last_lines_and_what_follows(folder: Path, capsys: pytest.CaptureFixture) -> None:
    log = folder / "logs" / "rank_1.log"
    log.write_text("first\nsecond\nthird\n")

    def go_on() -> None:
        with log.open("a") as file:
            file.write("fourth\n")
        end(folder, "finished")

    threading.Timer(0.4, go_on).start()
    Job(folder).tail(1, lines=2)
    assert capsys.readouterr().out == "second\nthird\nfourth\n"


def test_results_are_a_list_by_rank(folder: Path) -> None:
    for rank in range(2):
        (folder / "results" / f"rank_{rank}.pkl").write_bytes(pickle.dumps({"rank": rank}))
    job = end(folder, "finished")
    assert job.result() == [{"rank": 0}, {"rank": 1}]
    assert job.result()[1]["rank"] == 1
    (folder / "results" / "rank_1.pkl").unlink()
    with pytest.raises(JobError, match=r"rank_1\.pkl is gone"):
        job.result()


def test_a_stopped_job_has_no_result(folder: Path) -> None:
    job = end(folder, "stopped", reason="stopped on request (SIGTERM)")
    with pytest.raises(JobError, match="was stopped: stopped on request"):
        job.result()
    assert job.stop() == "stopped"


def test_the_display_is_short_and_escaped(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"step/index": 12, "loss/total": 1.23456, "lr": 0.001, "note": "<i>"}\n')
    job = end(folder, "failed", reason="rank 1: ValueError: <script>alert(1)</script>")
    assert repr(job).startswith("Job(a<b>: state failed, step 12, ranks 2, elapsed 0:01:05, loss/total 1.235, lr 0.001")
    page = job._repr_html_()
    assert "a&lt;b&gt;" in page and "&lt;script&gt;" in page
    assert "<script>" not in page and "a<b>" not in page
    assert len(page) < 2000
    assert len(repr(end(folder, "failed", reason="x" * 5000))) < 700


# Which of several failures was first. Times in seconds; `own` = an error of the rank's own, else a collective's.


def outcome(folder: Path, errors: dict[int, tuple[bool, float]], deaths: dict[int, tuple[int, float]]) -> int | None:
    for rank, (own, when) in errors.items():
        error = {"rank": rank, "type": "E", "message": "", "traceback": "", "time": when, "knock_on": not own}
        write_json(folder / "errors" / f"rank_{rank}.json", error)
    noticed = {rank: {"exit_code": code, "time": when} for rank, (code, when) in deaths.items()}
    first = first_failure(folder, 2, noticed)
    return None if first is None else first["rank"]


TERM, KILL, SEGV = -signal.SIGTERM, -signal.SIGKILL, -signal.SIGSEGV


@pytest.mark.parametrize(
    ("errors", "deaths", "rank"),
    [
        ({1: (True, 5.0)}, {1: (1, 5.0), 0: (TERM, 5.0)}, 1),
        ({0: (False, 5.1), 1: (True, 5.0)}, {0: (1, 5.0), 1: (1, 5.0)}, 1),
        ({0: (False, 4.9), 1: (True, 5.0)}, {0: (1, 5.0), 1: (1, 5.0)}, 1),  # clocks of two processes differ a bit
        ({0: (True, 5.0), 1: (True, 5.2)}, {0: (1, 5.0), 1: (1, 5.0)}, 0),
        ({0: (False, 5.0)}, {0: (1, 5.0), 1: (KILL, 5.0)}, 1),  # rank 1 was killed, rank 0 lost its connection
        ({}, {1: (KILL, 5.0), 0: (TERM, 5.0)}, 1),
        ({0: (False, 5.0)}, {0: (1, 5.0), 1: (KILL, 35.0)}, 0),  # rank 1 hung and would not go by SIGTERM
        ({0: (False, 5.0)}, {0: (1, 5.0), 1: (TERM, 5.0)}, 0),
        ({}, {1: (TERM, 5.0)}, 1),  # somebody else's SIGTERM
        ({0: (False, 5.0)}, {0: (1, 5.0), 1: (SEGV, 5.0)}, 1),
        ({}, {0: (3, 5.0), 1: (TERM, 5.0)}, 0),  # os._exit(3)
    ],
)
def test_the_first_failure_is_found(folder: Path, errors: dict, deaths: dict, rank: int) -> None:
    assert outcome(folder, errors, deaths) == rank
    assert (folder / "errors" / f"rank_{rank}.json").exists()


def test_a_rank_that_left_a_collective_without_a_word_is_named(folder: Path) -> None:
    """By os._exit(0), which torch elastic takes for success; another was ended by SIGTERM, and one had returned."""
    error = {"rank": 0, "type": "RuntimeError", "message": "connection closed", "time": 1.0, "knock_on": True}
    write_json(folder / "errors" / "rank_0.json", error)
    (folder / "ranks" / "rank_2.stack").write_text('  File "/x/torch/distributed/c10d.py", line 5 in all_reduce\n')
    (folder / "results" / "rank_3.pkl").touch()
    reason = failure(folder, 4, error)["reason"]
    assert reason == "rank 0: RuntimeError: connection closed; rank 1 ended before its function returned"


def test_an_error_whose_text_raises_is_still_told() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    said = describe_error(1, Mute())
    assert (said["rank"], said["type"], said["message"]) == (1, "Mute", "") and "Mute" in said["traceback"]


def test_ranks_that_left_by_os_exit_without_a_result_failed(folder: Path) -> None:
    (folder / "results" / "rank_0.pkl").write_bytes(b"")
    first = first_failure(folder, 2, {}, clean=True)
    assert first is not None and first["rank"] == 1
    assert "exit code 0 before its function returned" in first["message"]
    (folder / "results" / "rank_1.pkl").write_bytes(b"")
    (folder / "errors" / "rank_1.json").unlink()
    assert first_failure(folder, 2, {}, clean=True) is None
