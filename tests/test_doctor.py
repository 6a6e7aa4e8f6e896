"""`moekit doctor`: what it finds, what it warns of, and when it says that something required is missing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from moekit import doctor
from moekit.launch.processes import host_id

ROOT = Path(__file__).resolve().parent.parent
Usage = namedtuple("Usage", "total used free")


def section(report: doctor.Report, title: str) -> dict[str, str]:
    return dict(report.sections[title])


def test_tested_versions_are_those_of_the_constraints() -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if line.count("==") == 1)
    assert {name: pinned[name] for name in doctor.TESTED} == doctor.TESTED


def test_report_of_this_machine(tmp_path: Path) -> None:
    import torch

    report = doctor.report(tmp_path / "none")
    assert report.exit_code == 0 and not report.missing, report.missing
    assert section(report, "Versions")["torch"].startswith(torch.__version__.split("+")[0])
    assert "moe_ffn" in str(section(report, "Backends")), "the form of the expert layer and why"
    assert "gloo" in section(report, "Backends")
    assert not any("could not be read" in rows for rows in map(dict, report.sections.values())), str(report)
    assert not torch.cuda.is_initialized()


def test_missing_and_too_old_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("cloudpickle", "plotly"):
            raise importlib.metadata.PackageNotFoundError(name)
        return {"transformers": "4.50.0"}.get(name) or real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    report = doctor.report()
    assert report.exit_code == 1
    assert sorted(m.split(":")[0] for m in report.missing) == ["package cloudpickle>=3.0", "package transformers>=5.16"]
    assert "figures" in section(report, "Versions")["plotly"], "optional: said, not required"
    assert "tested with 5.24.0" in section(report, "Versions")["transformers"]
    assert "MISSING: package cloudpickle>=3.0" in str(report)


def test_broken_torch_is_missing_and_the_rest_is_still_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # `import torch` raises
    report = doctor.report()
    assert report.exit_code == 1 and "torch cannot be imported" in report.missing[0]
    assert section(report, "CPU and memory")["memory"]


@pytest.mark.parametrize(("total", "warned"), [(64 << 20, True), (1 << 30, False)])
def test_small_shared_memory_is_warned_of(monkeypatch: pytest.MonkeyPatch, total: int, warned: bool) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm here")
    usage = lambda place: Usage(total if str(place) == "/dev/shm" else 1 << 40, 0, 1 << 40)
    monkeypatch.setattr(doctor.shutil, "disk_usage", usage)
    report = doctor.report()
    assert any("64.0 MB" in w and "--shm-size" in w for w in report.warnings) is warned
    assert report.exit_code == 0, "a warning, not an error"


def test_runs_are_listed_with_state_and_size(tmp_path: Path) -> None:
    (tmp_path / "first" / "checkpoints").mkdir(parents=True)
    for name, supervisor in (("first", os.getpid()), ("second", 999_999_999)):
        (tmp_path / name).mkdir(exist_ok=True)
        state = {"host": host_id(), "pids": {"supervisor": supervisor}, "stamps": {}}
        state["state"] = "finished" if name == "first" else "running"
        (tmp_path / name / "state.json").write_text(json.dumps(state))
    (tmp_path / "first" / "checkpoints" / "w.safetensors").write_bytes(b"0" * 3_000_000)
    (tmp_path / "third").mkdir()
    rows = section(doctor.report(tmp_path), "Runs")
    assert "2.9 MB" in rows["first"] and "finished" in rows["first"]
    assert "failed" in rows["second"], "it says running, but nothing runs it"
    assert "holds no run" in rows["third"]
    assert "3 run folders" in rows["all"]


def test_gpus_and_their_users_come_from_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\ncase $1 in\n"
        "--query-gpu=*) echo '0, GPU-a, NVIDIA H200, 143771, 1200'; "
        "echo '1, GPU-b, NVIDIA H200, 143771, 0';;\n"
        f"*) echo 'GPU-a, {os.getpid()}'; echo 'GPU-a, 999999999';;\nesac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    rows = doctor.report().sections["GPUs"]
    assert [k for k, _ in rows] == ["gpu 0", "  used by", "  used by", "gpu 1"]
    assert "NVIDIA H200, 1200 of 143771 MB used" in rows[0][1]
    assert f"(pid {os.getpid()})" in rows[1][1] and "unknown process" in rows[2][1]
    tool.write_text("#!/bin/sh\nexit 9\n")  # a driver that does not answer is said, and hides nothing else
    report = doctor.report()
    assert "reports no GPU" in section(report, "GPUs")["none found"] and report.sections["Storage"]
