"""The command line: exit statuses, one line for an error, and one two-process job whose folder several tests read."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import moekit
from moekit.cli import main, parser
from moekit.config import DataConfig, LearnerConfig, SFTConfig
from moekit.data.tokenizer import train_tokenizer
from moekit.launch.processes import is_alive
from moekit.recipes import job
from moekit.recipes.sft import train

WORDS = "red blue green seven cat dog sun moon tree river".split()  # noqa: SIM905
MOEKIT = [sys.executable, "-c", "import sys; from moekit.cli import main; sys.exit(main())"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and chats; the tests' working folder."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("cli")
    lines = []
    for i in range(30):
        text = " ".join(WORDS[(i * k) % len(WORDS)] for k in range(1, 3 + i % 5))
        lines.append(json.dumps({"prompt": f"say {text}", "completion": text}))
    (folder / "chats.jsonl").write_text("\n".join(lines))
    train_tokenizer(lines, 300, folder / "tokenizer")
    return folder


@pytest.fixture(autouse=True)
def _there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


SFT = ["sft", "--model", "tiny", "--tokenizer", "tokenizer", "--data", "chats.jsonl"]
SHORT = ["--steps", "4", "--batch-rows", "3", "--microbatch-rows", "1", "--length", "32", "--lr", "0.01"]


def said(capsys) -> list[str]:
    return capsys.readouterr().err.strip().splitlines()


@pytest.fixture(scope="module")
def run(place: Path) -> tuple[Path, str]:
    """`moekit sft --nproc 2`, in a shell of its own, and what it printed."""
    done = subprocess.run(
        [*MOEKIT, *SFT, *SHORT, "--nproc", "2", "--out", "runs/first", "--save-every", "2", "--balance", "0.01"],
        cwd=place, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return place / "runs" / "first", done.stdout


def test_the_job_is_followed_and_told(run):
    folder, out = run
    assert f"run folder {folder}, 2 processes" in out and "step  4/4" in out
    table = dict(line.split(maxsplit=1) for line in out.splitlines() if not line.startswith(("run folder", "step ")))
    assert table["steps"] == "4" and table["export"] == str(folder / "export")
    assert moekit.attach(folder).state == "finished"


def test_the_folder_holds_a_whole_run(run):
    folder, _ = run
    found = moekit.open_run(folder)
    assert list(found.metrics.index) == [0, 1, 2, 3] and found.state == "finished"
    assert found.card.layout["world"] == 2 and found.card.accounting["steps"] == 4
    assert found.config["nproc"] == 2 and found.config["recipe"]["steps"] == 4
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step_2", "step_4"]
    results = moekit.attach(folder).result()
    assert results[0] == results[1] and results[0]["run"] == str(folder)
    for name in ("card.html", "export/config.json", "export/tokenizer.json", "logs/rank_1.log"):
        assert (folder / name).exists(), name


def test_two_processes_trained_what_one_trains(run, place, tmp_path):
    """Same losses to 1e-5 and same rows, although the rows were shared out over ranks."""
    folder, _ = run
    recipe = SFTConfig.from_dict(moekit.open_run(folder).config["recipe"])
    told = train(replace(recipe, out=str(tmp_path / "alone"), microbatch_rows=3))
    one, two = (moekit.open_run(f).metrics for f in (tmp_path / "alone", folder))
    for name in ("loss/sft", "loss/balance", "grad/norm"):
        assert one[name].tolist() == pytest.approx(two[name].tolist(), rel=1e-5), name
    for name in ("tokens/supervised", "rows/dispatched", "rows/supervised", "data/row"):
        assert one[name].tolist() == two[name].tolist(), name
    assert told["rows_dispatched"] > 0


def test_the_options_reach_the_recipe(run):
    want = SFTConfig(
        model="tiny", data="chats.jsonl", tokenizer="tokenizer", steps=4, batch_rows=3, microbatch_rows=1,
        learner=LearnerConfig(lr=0.01), rows=DataConfig(length=32), save_every=2,
    )  # fmt: skip
    want = replace(want, learner=replace(want.learner, router=replace(want.learner.router, balance=0.01)))
    assert SFTConfig.from_dict(moekit.open_run(run[0]).config["recipe"]) == want


def test_generate_evaluate_and_report_read_the_run(run, capsys):
    assert main(["generate", "--model", str(run[0]), "--prompt", "say red", "--max-new-tokens", "4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["messages"] == [{"role": "user", "content": "say red"}] and isinstance(answer["answer"], str)
    checkpoint = str(run[0] / "checkpoints" / "step_4")
    assert main(["generate", "--model", checkpoint, "--prompt", "say red", "--max-new-tokens", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == answer
    words = ["evaluate", "--model", str(run[0]), "--data", "chats.jsonl", "--items", "5", "--max-new-tokens", "4"]
    assert main(words) == 0
    assert "items       5" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["items"] == 5
    pytest.importorskip("plotly")
    pytest.importorskip("matplotlib")
    assert main(["report", str(run[0])]) == 0
    assert capsys.readouterr().out.strip() == str(run[0] / "report.html")


def test_an_existing_run_is_refused_in_one_line(run, capsys):
    before = sorted((p, p.stat().st_mtime_ns) for p in run[0].rglob("*"))
    assert main([*SFT, *SHORT, "--out", str(run[0])]) == 2
    (line,) = said(capsys)
    assert line.startswith("moekit: error: the run folder") and "overwrite=True" in line
    assert sorted((p, p.stat().st_mtime_ns) for p in run[0].rglob("*")) == before


def test_bad_input_that_only_a_rank_sees(place, capsys, monkeypatch):
    """A broken line: status 2, one line, every rank ends with the same error, and no run folder is left."""
    (place / "bad.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": \n')
    told = []

    def remove(folder, **how):
        told.extend(json.loads(p.read_text()) for p in sorted((folder / "errors").iterdir()))
        real(folder, **how)

    real = job.shutil.rmtree
    monkeypatch.setattr(job.shutil, "rmtree", remove)
    words = ["sft", "--model", "tiny", "--tokenizer", "tokenizer", "--data", "bad.jsonl", "--nproc", "2"]
    assert main([*words, "--out", "runs/bad"]) == 2
    message = "bad.jsonl, line 2: broken JSON, Expecting value at column 1; every line must be one whole JSON object"
    assert said(capsys) == [f"moekit: error: {message}"]
    assert [(e["rank"], e["type"], e["message"]) for e in told] == [(r, "DataError", message) for r in range(2)]
    assert not (place / "runs" / "bad").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*SFT[:-1], "gone.jsonl"], "no such file or folder: gone.jsonl"),
        ([*SFT, "--steps", "0"], "steps=0"),
        ([*SFT, "--nproc", "0"], "nproc=0"),
        ([*SFT, "--length", "5000"], "length=5000"),
        ([*SFT, "--denominator", "constant"], "constant_length"),
        ([*SFT, "--resume"], "--resume needs --out"),
        ([*SFT, "--resume", "--out", "runs/none"], "nothing to resume"),
        (["sft", "--model", "huge", "--data", "chats.jsonl"], "neither a folder nor a preset"),
        (["generate", "--model", "gone", "--prompt", "x"], "no such model folder: gone"),
        (["generate", "--model", "gone"], "nothing to answer"),
        (["evaluate", "--model", "gone"], "--data, a file of held-out chats, or --task"),
        (["evaluate", "--model", "gone", "--data", "gone.jsonl"], "no such file"),
        (["report", "gone"], "no run folder gone"),
    ],
)
def test_bad_input_is_status_2_and_one_line(words, says, capsys):
    assert main(words) == 2
    lines = said(capsys)
    assert len(lines) == 1 and lines[0].startswith("moekit: error: ") and says in lines[0], lines
    assert not Path("runs/none").exists()


def test_debug_shows_the_traceback(capsys):
    assert main(["generate", "--model", "gone", "--prompt", "x", "--debug"]) == 2
    text = capsys.readouterr().err
    assert "Traceback" in text and "open_model" in text


def test_slurm_options_reach_the_batch_script(place, monkeypatch, capsys):
    """`--backend slurm` writes the script with its directives; without sbatch that is one line with what to do."""
    words = [*SFT, *SHORT, "--out", "runs/cluster", "--backend", "slurm", "--nodes", "2", "--nproc", "4"]
    words += ["--slurm", "partition=gpu", "--slurm", "gpus-per-node=4", "--slurm", "exclusive", "--threads", "2"]
    monkeypatch.setenv("PATH", str(place))
    assert main(words) == 2
    (line,) = said(capsys)
    assert "no `sbatch`" in line and str(place / "runs" / "cluster" / "job.sbatch") in line
    script = (place / "runs" / "cluster" / "job.sbatch").read_text().splitlines()
    for option in ("nodes=2", "partition=gpu", "gpus-per-node=4", "exclusive", "cpus-per-task=8"):
        assert f"#SBATCH --{option}" in script
    submitted = moekit.attach("runs/cluster")
    assert (submitted.nproc, submitted.state, submitted.stop()) == (8, "starting", "stopped")
    capsys.readouterr()
    assert main([*words, "--overwrite", "--slurm", "submit=False"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"waits for `sbatch {submitted.folder}/job.sbatch`; moekit.attach(")
    assert moekit.attach("runs/cluster").stop() == "stopped"


def test_nodes_without_a_backend_for_them_are_refused(capsys):
    assert main([*SFT, *SHORT, "--nodes", "2", "--out", "runs/refused"]) == 2
    assert "backend='slurm'" in said(capsys)[0]


@pytest.mark.long
def test_two_torchrun_agents_train_what_the_launcher_trains(run, place):
    """`torchrun --nnodes 2 -m moekit.cli sft`: each process is one rank; the very losses of `moekit sft --nproc 2`."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    command = [*torchrun, "-m", "moekit.cli", *SFT, *SHORT, "--out", "runs/by_hand", "--balance", "0.01"]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    agents = [
        subprocess.Popen([*command, "--threads", "1"], cwd=place, env=env, text=True, stdout=-1, stderr=-1)
        for _ in range(2)
    ]
    told = [agent.communicate(timeout=240) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], told
    assert sum("supervised_tokens_s" in out for out, _ in told) == 1  # rank 0 alone says how it went
    mine, other = moekit.open_run("runs/by_hand"), moekit.open_run(run[0])
    assert mine.card.layout["world"] == 2
    assert list(mine.metrics["loss/sft"]) == pytest.approx(list(other.metrics["loss/sft"]), rel=1e-6)


@pytest.mark.parametrize("words", [[], ["train"], ["sft"], [*SFT, "--rows", "square"], ["sft", "--nproc", "two"]])
def test_bad_usage_is_status_2(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage: moekit" in capsys.readouterr().err


def test_version_and_help(capsys):
    for words, says in [(["--version"], f"moekit {moekit.__version__}"), (["sft", "--help"], "--denominator")]:
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 0 and says in capsys.readouterr().out


def test_every_option_has_help_and_every_default_is_told():
    commands = next(a for a in parser()._actions if a.dest == "command").choices
    names = "sft dpo reward-model grpo ppo generate evaluate report checkpoint doctor layouts check-layouts demo"
    assert set(commands) == set(names.split())
    for name, command in commands.items():
        assert all(a.help for a in command._actions), name
        text = " ".join(command.format_help().split())
        for action in command._actions:
            if (
                isinstance(action.default, int | float | str)
                and not isinstance(action.default, bool)
                and action.option_strings
            ):
                told = f"(default: {action.default})" in text
                assert told or action.dest == "help", f"{name} {action.option_strings}"


def test_a_job_that_fails_on_its_way_is_status_1(run, place):
    """A disk that is full from step 5 on (a limit on the size of files stands for it): what there was stays.

    Checkpoints are written behind the steps, so that of step 6 is reported by the save after it, and never as done.
    """
    folder = place / "runs" / "full"
    shutil.copytree(run[0], folder)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, -1))"  # a checkpoint is larger
    (place / "sitecustomize.py").write_text(f"import os\nif os.environ.get('RANK') == '0':\n    {limit}\n")
    goes_on = ["--save-every", "2", "--balance", "0.01", "--steps", "100", "--resume"]
    done = subprocess.run(
        [*MOEKIT, *SFT, *SHORT, *goes_on, "--out", "runs/full"],
        env={**os.environ, "PYTHONPATH": str(place)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    (place / "sitecustomize.py").unlink()
    assert done.returncode == 1, done.stdout + done.stderr
    assert "moekit: error: job full failed" in done.stderr and "step_6" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert list(moekit.open_run("runs/full").metrics.index) == [*range(8)], "the save of step 8 says it, not the last"
    for step in ("step_2", "step_4"):
        kept, before = (sorted((f / "checkpoints" / step).iterdir()) for f in (folder, run[0]))
        assert [p.read_bytes() for p in kept] == [p.read_bytes() for p in before]
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step_2", "step_4"]


def test_interrupting_stops_the_job(place):
    """Ctrl-C: status 130, the job is stopped, none of its processes is left."""
    words = [*SFT, "--steps", "100000", "--batch-rows", "2", "--length", "32", "--nproc", "2", "--out", "runs/long"]
    shell = subprocess.Popen([*MOEKIT, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    metrics = place / "runs" / "long" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < end:
        assert shell.poll() is None, shell.communicate()
        time.sleep(0.05)
    state = json.loads((place / "runs" / "long" / "state.json").read_text())
    shell.send_signal(signal.SIGINT)
    out, err = shell.communicate(timeout=60)
    assert shell.returncode == 130, out + err
    assert "moekit: interrupted" in err and "Traceback" not in err
    assert moekit.attach("runs/long").state == "stopped"
    assert len(state["stamps"]) >= 2 and not any(is_alive(int(pid), start) for pid, start in state["stamps"].items())
