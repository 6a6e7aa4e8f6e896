"""What the machine offers, read from files and programs that the tests write."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from moekit.launch.host import Gpu, cpu_count, environment, gpus, port_is_free

AFFINITY = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("max 100000", AFFINITY), ("100000 100000", 1), ("50000 100000", 1), ("6400000 100000", AFFINITY)],
)
def test_cpu_count_honours_a_cgroup_v2_quota(tmp_path: Path, limit: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(limit + "\n")
    assert cpu_count(tmp_path) == cores


def test_cpu_count_honours_a_cgroup_v1_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("150000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_count(tmp_path) == 1
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert cpu_count(tmp_path) == AFFINITY


def test_a_port_with_a_listener_is_not_free() -> None:
    for address in ("127.0.0.1", ""):
        with socket.socket() as s:
            s.bind((address, 0))
            s.listen()
            port = s.getsockname()[1]
            assert not port_is_free(port)
        assert port_is_free(port)


def test_gpus_come_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        "*compute-apps*) echo 'GPU-b, 4242'; echo 'GPU-b, 4243' ;;\n"
        "*) echo '0, GPU-a, NVIDIA H200, 143771, 4'; echo '1, GPU-b, NVIDIA H200, 143771, 90000';"
        " echo '2, GPU-c, Orin, [N/A], [N/A]' ;;\n"
        "esac\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert gpus() == [
        Gpu(0, "GPU-a", "NVIDIA H200", 143771, 4),
        Gpu(1, "GPU-b", "NVIDIA H200", 143771, 90000, (4242, 4243)),
        Gpu(2, "GPU-c", "Orin", 0, 0),
    ]
    fake.write_text("#!/bin/sh\necho no driver; exit 9\n")
    assert gpus() == []
    fake.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == []


def test_environment_leaves_behind_what_belongs_to_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "3",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "old",
        "MOEKIT_RUN_FOLDER": "/old",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "KEPT": "yes",
    }.items():
        monkeypatch.setenv(name, value)
    made = environment({"KEPT_TOO": "1", "MKL_NUM_THREADS": "7"}, threads=3, malloc="keep")
    assert not {"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "MOEKIT_RUN_FOLDER", "MPLBACKEND"} & set(made)
    assert (made["KEPT"], made["KEPT_TOO"]) == ("yes", "1")
    assert (made["OMP_NUM_THREADS"], made["MKL_NUM_THREADS"]) == ("3", "7")
    assert int(made["MALLOC_TRIM_THRESHOLD_"]) >= 1 << 30
    assert int(made["MALLOC_MMAP_THRESHOLD_"]) == 32 << 20
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    made = environment(threads=1)
    assert made["MPLBACKEND"] == "agg"
    assert "MALLOC_TRIM_THRESHOLD_" not in made
