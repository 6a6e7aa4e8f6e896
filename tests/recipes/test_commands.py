"""`moekit dpo|reward-model|grpo|ppo` from the shell on two processes: the run folder is complete, and bad input is one
line and exit status 2 before anything is written."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import pytest
import torch

from moekit.cli import main
from moekit.learner.weights import from_checkpoint, load
from moekit.measure.record import open_run
from moekit.recipes.reward_model import scorer

WORDS = ["red", "blue", "green", "seven", "cat", "dog", "sun", "moon", "tree", "river"]
SMALL = ["--lr", "0.01", "--length", "64", "--microbatch-tokens", "128", "--balance", "0.02", "--threads", "1"]
SAMPLED = ["--max-prompt", "32", "--max-new-tokens", "8", "--prompts", "4", "--group", "3", "--steps", "3",
           "--save-every", "2", "--eval-items", "4"]  # fmt: skip


def pairs(path: Path, count: int) -> Path:
    lines = []
    for i in range(count):
        some = [WORDS[(i * 3 + k) % 10] for k in range(1 + i % 3)]
        lines.append({"prompt": "say " + " ".join(some), "chosen": " ".join(reversed(some)), "rejected": WORDS[i % 7]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def commands(kit, tmp_path_factory):
    """`commands(name)`: exit status and run folder of a command; each is run once."""
    folder = tmp_path_factory.mktemp("commands")
    data, held = pairs(folder / "pairs.jsonl", 14), pairs(folder / "held.jsonl", 5)
    two = [*SMALL, "--nproc", "2", "--model", str(kit.model)]
    preferred = [*two, "--data", str(data), "--eval-data", str(held), "--steps", "3", "--batch-pairs", "5"]
    asked = [*two, *SAMPLED, "--data", str(kit.data), "--eval-data", str(kit.data)]

    @functools.cache
    def run(name: str) -> tuple[int, Path]:
        out = folder / name
        how = {
            "dpo": [*preferred, "--ep", "2"],
            "dpo resident": [*preferred, "--reference", "resident", "--pp", "2", "--update-every", "2"],
            "reward-model": [*preferred, "--pp", "2"],
            "grpo": [*asked, "--pp", "2", "--kl", "0.05", "--epochs", "2", "--importance-cap", "2", "--replay"],
        }
        if name == "ppo":
            critic = run("reward-model")[1] / "checkpoints" / "step_3"
            how["ppo"] = [*asked, "--ep", "2", "--minibatches", "2", "--critic", str(critic)]
        return main([name.split()[0], *how[name], "--out", str(out)]), out

    return run


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def complete(folder: Path, name: str, steps: int = 3) -> list[dict]:
    """What every run folder has; its records."""
    found = records(folder)
    assert [r["step"] for r in found] == list(range(steps))
    assert all(isinstance(v, (int, float)) and math.isfinite(v) for r in found for v in r.values())
    run = open_run(folder)
    assert run.card.objective["name"] == name and run.card.layout["world"] == 2 and len(run.metrics) == steps
    assert (folder / "card.html").exists() and run.config["recipe"]["steps"] == steps
    assert json.loads((folder / "state.json").read_text())["state"] == "finished"
    assert (folder / "checkpoints" / f"step_{steps}").exists()
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert len(page) > 10_000 and "nan" not in page.lower().split("<script")[0]
    return found


def passes(run, component: str) -> set[str]:
    """Passes of a component in which rows were dispatched, from the arrays."""
    found = run.rows(("component", "pass"), component=component)
    return {str(p) for p in found[found["rows"] > 0]["pass"]}


@pytest.mark.long
def test_dpo(commands):
    code, folder = commands("dpo")
    assert code == 0
    found, run = complete(folder, "dpo"), open_run(folder)
    assert {"loss/dpo", "dpo/accuracy", "dpo/margin", "time/step_s", "rows/dispatched"} <= found[0].keys()
    assert found[0]["dpo/margin"] == pytest.approx(0, abs=1e-5) and found[0]["loss/dpo"] == pytest.approx(math.log(2))
    assert "rows/reference_score" in found[0] and "rows/reference_score" not in found[1]
    assert {"eval/dpo", "eval/accuracy"} <= found[0].keys() and "eval/dpo" not in found[1]
    assert (
        run.card.results["before"]["eval/units"] == 4 and run.card.results["after"]["eval/units"] == 4
    )  # one has two equal answers
    assert any((folder / "reference").iterdir())
    assert passes(run, "policy") == {"forward", "backward"}
    load(folder / "export")


@pytest.mark.long
def test_dpo_with_a_resident_reference_that_follows(commands):
    code, folder = commands("dpo resident")
    assert code == 0
    found, run = complete(folder, "dpo"), open_run(folder)
    assert all(r["rows/reference_score"] > 0 and r["time/reference_s"] > 0 for r in found)
    assert [abs(r["dpo/margin"]) < 1e-5 for r in found] == [True, False, True]  # it is the policy again at step 2
    assert passes(run, "reference") == {"score"}


@pytest.mark.long
def test_reward_model_and_its_scorer(commands):
    code, folder = commands("reward-model")
    assert code == 0
    found = complete(folder, "reward_model")
    assert found[0]["loss/reward_model"] == pytest.approx(math.log(2)) and not (folder / "export").exists()
    assert found[2]["reward_model/chosen"] != 0 and "eval/accuracy" in found[2]
    assert from_checkpoint(folder / "checkpoints" / "step_3").config.value_head
    sequences = [[1, 4, 9, 30, 2], [1, 4], [1, 4, 9, 31, 32, 2]]
    together, alone = scorer(folder)(sequences), [scorer(folder)([s])[0] for s in sequences]
    assert together == pytest.approx(alone, abs=1e-6) and len(set(together)) == 3
    assert scorer(folder)([]) == []


@pytest.mark.long
def test_grpo(commands, kit):
    code, folder = commands("grpo")
    assert code == 0
    found, run = complete(folder, "grpo"), open_run(folder)
    for r in found:
        assert all(
            r[f"time/{part}_s"] >= 0 for part in ("rollout", "reward", "score", "reference", "train", "transfer")
        )
        for name in ("policy_score", "reference_score", "engine_prefill", "engine_decode"):
            assert r[f"rows/{name}"] > 0 and r[f"positions/{name}"] > 0, name
        assert {"loss/grpo", "grpo/ratio", "grpo/kl_ref", "reward/mean", "rollout/length", "group/equal"} <= r.keys()
        assert r["rollout/answers"] == 12 or r["step"] == 2
    assert [r["step/index"] + r["step/skipped"] for r in found] == [2, 4, 6]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert {s["step"] for s in samples} == {0, 1, 2} and {"question", "answer", "reward", "advantage"} <= samples[
        0
    ].keys()
    assert sorted(p.name for p in (folder / "checkpoints").glob("step_*")) == ["step_2", "step_3"]
    assert "eval/score" in found[0] and "eval/score" in found[2] and "eval/score" not in found[1]
    assert passes(run, "engine") == {"prefill", "decode"} and passes(run, "policy") == {"score", "forward", "backward"}
    exported, kept = load(folder / "export"), from_checkpoint(folder / "checkpoints" / "step_3")
    assert all(torch.equal(p, q) for p, q in zip(exported.parameters(), kept.parameters()))


def test_ppo_with_a_reward_model_as_critic(commands):
    code, folder = commands("ppo")
    assert code == 0
    found, run = complete(folder, "ppo"), open_run(folder)
    for r in found:
        parts = ("rollout", "reward", "score", "reference", "critic_score", "critic_train", "train", "transfer")
        assert all(r[f"time/{part}_s"] >= 0 for part in parts)
        for name in ("policy_score", "reference_score", "critic_score", "engine_prefill", "engine_decode"):
            assert r[f"rows/{name}"] > 0, name
        assert {"loss/ppo", "loss/critic", "critic/explained", "critic_grad/norm", "ppo/kl_reference"} <= r.keys()
        assert r["critic_rows/dispatched"] > 0
    assert found[0]["critic/value"] != 0  # it is the reward model's head, not a new one
    assert sorted(p.name for p in (folder / "critic").glob("step_*")) == ["step_2", "step_3"]
    assert from_checkpoint(folder / "critic" / "step_3").config.value_head
    assert passes(run, "critic") == {"score", "forward", "backward"}
    load(folder / "export")


# ------------------------------------------------------------------ bad input
def refused(capfd, out: Path, *options: str) -> str:
    """The one line that a command says before it ends with 2; nothing was written."""
    assert main([*options, "--out", str(out)]) == 2
    said = capfd.readouterr().err.strip().splitlines()
    assert len(said) == 1 and said[0].startswith("moekit: error: "), said
    assert not out.exists()
    return said[0]


def test_bad_input_is_one_line_and_leaves_nothing(kit, tmp_path, capfd):
    data = pairs(tmp_path / "pairs.jsonl", 4)
    model, out = ["--model", str(kit.model), "--length", "64"], tmp_path / "run"
    bad = functools.partial(refused, capfd, out)
    chats = ["--data", str(kit.data), *SAMPLED]
    assert "no such file" in bad("grpo", *model, *chats, "--data", "gone.jsonl")
    assert "temperature=0" in bad("grpo", *model, *chats, "--temperature", "0")
    assert "importance_cap" in bad("ppo", *model, *chats, "--top-k", "5")
    assert "minibatches=9" in bad("ppo", *model, *chats, "--minibatches", "9")
    assert "do not fit" in bad("grpo", *model, *chats, "--max-prompt", "60")
    assert "of the model" in bad("grpo", *model, *chats, "--length", "128")
    assert "no such file" in bad("dpo", *model, "--data", "gone.jsonl")
    assert "ep=3" in bad("reward-model", *model, "--data", str(data), "--nproc", "3", "--ep", "3")
    assert "multiple" in bad("dpo", *model, "--data", str(data), "--update-every", "2", "--save-every", "3")


@pytest.mark.parametrize("case", ["verifier", "critic", "eval", "pair", "reference"])
@pytest.mark.long
def test_bad_input_that_a_rank_finds(kit, tmp_path, capfd, case):
    """The job has begun, but not its first step: its folder goes again."""
    bad = functools.partial(refused, capfd, tmp_path / "run")
    model, chats = ["--model", str(kit.model), "--threads", "1"], ["--data", str(kit.data), *SAMPLED, "--length", "64"]
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "say"}\n')
    if case == "verifier":
        assert "nowhere:judge" in bad("grpo", *model, *chats, "--verifier", "nowhere:judge")
    elif case == "critic":
        assert "gone" in bad("ppo", *model, *chats, "--critic", "gone")
    elif case == "eval":
        assert "gone.jsonl" in bad("ppo", *model, *chats, "--eval-data", "gone.jsonl")
    elif case == "reference":
        data = pairs(tmp_path / "pairs.jsonl", 4)
        assert "resident" in bad("dpo", *model, "--length", "64", "--data", str(data), "--update-every", "2")
    else:
        assert "broken.jsonl" in bad("dpo", *model, "--length", "64", "--data", str(broken))
