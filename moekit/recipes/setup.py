"""Before the first step: what a recipe checks and makes, so that bad input is one clear error on every rank.

The order matters. First everything that costs nothing (paths, shapes, lengths, room on the disk), then the data, then
the weights, and only then is anything written. Nothing of an earlier run is removed before the new one is known to
start."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .. import errors, ops
from ..checkpoint.export import choose_family
from ..checkpoint.huggingface import check_tokenizer, read_config
from ..checkpoint.save import latest, read_manifest, retain
from ..config import LearnerConfig, ModelConfig, RunConfig
from ..data.chat import load_tokenizer
from ..errors import BackendError, CheckpointError, ConfigError, DataError, RunExistsError, StorageError
from ..launch.folder import OWNED
from ..launch.worker import Here
from ..learner.learner import Learner
from ..learner.mesh import World, check_layout, place
from ..learner.stages import part_of
from ..learner.weights import load
from ..measure.files import existing
from ..model.presets import PRESETS, parameter_counts, preset
from ..model.transformer import Transformer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
CHECKPOINTS = "checkpoints"
CRITIC = "critic"
EXPORT = "export"
# what may differ when a run is resumed: none of it changes a step that both would take
FREE = ("steps", "out", "microbatch_rows", "microbatch_tokens", "save_every", "keep_checkpoints", "export", "overwrite",
        "resume", "slots", "reward_seconds", "reward_workers", "eval_every", "eval_items", "cache", "engine_url",
        "update_mode")  # fmt: skip
LAYOUT = ("ep", "pp", "pipeline", "stages_per_rank", "zero", "reduce", "dispatch", "transport", "capacity",
          "on_overflow", "recompute")  # of `LearnerConfig`: the same  # fmt: skip
_SCORED = "reference/*/*.json"  # what DPO leaves before its first step
_MARKS = ("metrics.jsonl", "state.json", "card.json")  # a folder that holds one of them is a run

Value = TypeVar("Value")


def patient(world: World) -> World:
    """The same ranks with collectives that wait for a day: rank 0 may tokenize or write for long."""
    if world.size == 1:
        return world
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    return World(world.rank, world.size, group)


@contextmanager
def together(world: World) -> Iterator[None]:
    """Run a block on every rank; if it raises on any, it raises on all, with the same message, and none waits for ever
    in its next collective. No collective may be inside the block."""
    error: Exception | None = None
    try:
        yield
    except Exception as e:  # noqa: BLE001 (whatever it is, the other ranks must learn of it)
        error = e
    if world.size > 1:
        told: list[tuple[str, str] | None] = [None] * world.size
        dist.all_gather_object(told, (type(error).__name__, str(error)) if error else None, group=world.group)
        for rank, problem in enumerate(told):
            if problem and error is None:
                kind = getattr(errors, problem[0], errors.MoekitError)
                error = kind(problem[1] if kind is not errors.MoekitError else f"rank {rank}: {': '.join(problem)}")
    if error is not None:
        raise error


def share(world: World, value: Value) -> Value:
    """Rank 0's `value`, on every rank."""
    if world.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=world.group)
    return box[0]


def run_folder(config: RunConfig, here: Here, recipe: str = "sft") -> Path:
    """Where the run goes: the launcher's folder, or `config.out` inside it (a job of several runs); without a launcher
    `config.out`, or a new one under runs/. Looks, and writes nothing.
    Raises:
        ConfigError: the launcher and `config.out` name two folders.
        RunExistsError: the folder holds something, and neither `overwrite` nor `resume` says what to do with it.
        CheckpointError: `resume` without a checkpoint.
        StorageError: it cannot be written."""
    out = None if config.out is None else Path(config.out)
    if here.folder is not None and out is not None and here.folder.resolve() in out.resolve().parents:
        folder = out  # one of several runs of a job, in a folder of its own inside the job's
        _look(folder, config)
    elif here.folder is not None:
        if out is not None and out.resolve() != here.folder.resolve():
            how = f"leave out=None and name the job, as in moekit.submit(train, config, name={out.name!r})"
            raise ConfigError(f"out={config.out!r}, but this job's run folder is {here.folder}: {how}")
        folder = here.folder
    else:
        name = f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{recipe}"
        names = [config.out] if config.out is not None else [name, *(f"{name}-{i}" for i in range(2, 1000))]
        folder = next((f for f in map(Path, names) if not f.exists()), Path(names[0]))
        _look(folder, config)
    if config.resume and not any((*(folder / CHECKPOINTS).glob("step_*"), *folder.glob(_SCORED))):
        raise CheckpointError(f"nothing to resume: {folder / CHECKPOINTS} holds no checkpoint; start without resume")
    return folder


def _look(folder: Path, config: RunConfig) -> None:
    if config.overwrite and config.resume:
        raise ConfigError("overwrite=True would delete the run that resume=True is to continue; choose one")
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"out={str(folder)!r} is a file; give the name of a folder")
    if folder.exists() and any(folder.iterdir()):
        if not (config.overwrite or config.resume):
            how = "give another one, resume=True to go on in it, or overwrite=True to replace the run in it"
            raise RunExistsError(f"the run folder {folder} exists; {how}")
        if not any((*((folder / mark).exists() for mark in _MARKS), *folder.glob(_SCORED))):
            raise RunExistsError(f"{folder} holds what is not a run; nothing was touched, give another folder")
    place = existing(folder)
    probe = place / f".moekit-{time.time_ns()}"
    try:  # permission bits do not tell: not root's, not a read-only disk's
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        why = f"{error.strerror} ({place}); nothing was started, give a folder that can be written"
        raise StorageError(f"cannot write the run folder {folder}: {why}") from None


def clear(folder: Path) -> None:
    """Remove what an earlier run left in a folder, and nothing else that is in it."""
    for name in OWNED:
        old = folder / name
        shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink(missing_ok=True)


def check_room(folder: Path, shape: ModelConfig, config: RunConfig) -> None:
    """Raise `StorageError` if the disk has no room for the checkpoints and the export that the run will write."""
    item = DTYPES[config.dtype].itemsize
    saves = 1 if config.save_every is None else min(config.keep_checkpoints + 1, 1 + config.steps // config.save_every)
    need = parameter_counts(shape)["total"] * (3 * max(4, item) * saves + item * config.export)  # master, two moments
    place = existing(folder)
    free = shutil.disk_usage(place).free
    if free < need:
        take = f"{saves} checkpoints and the export of this run take {need / 1e9:.2f} GB"
        how = "free some space, give another out=, or keep fewer checkpoints"
        raise StorageError(f"the disk at {place} has {free / 1e9:.2f} GB free, {take}; {how}")


def tokenizer_folder(config: RunConfig) -> str:
    """The folder whose tokenizer the run uses."""
    if config.tokenizer is not None:
        return config.tokenizer
    if not Path(config.model).is_dir() and config.model in PRESETS:
        raise ConfigError(f"the preset {config.model!r} has no tokenizer; give tokenizer= the folder of one")
    return config.model


def model_shape(name: str, tokenizer: Any = None) -> ModelConfig:
    """The shape of a Hugging Face folder, or of a preset with the tokenizer's special ids. Reads no weights.
    Raises:
        ConfigError: neither a folder nor a preset.
        CheckpointError: a folder that is not a model moekit reads."""
    if Path(name).is_dir():
        return read_config(name)
    if name not in PRESETS:
        raise ConfigError(f"model={name!r} is neither a folder nor a preset; presets: {', '.join(PRESETS)}")
    ids = {f"{which}_id": getattr(tokenizer, f"{which}_token_id", None) for which in ("bos", "eos", "pad")}
    return replace(preset(name), **ids)


def check(config: RunConfig, here: Here, recipe: str = "sft", task: bool = False) -> tuple[Path, ModelConfig, Any]:
    """Everything that can be known without reading data or weights: (run folder, shape, tokenizer).

    `task`: `config.data` may be the name of a task, which is looked for when its items are made."""
    folder = run_folder(config, here, recipe)
    if isinstance(config.data, str) and not Path(config.data).exists() and not (task and config.data.isidentifier()):
        raise DataError(f"no such file or folder: {config.data} (the data to train on)")
    model_shape(config.model)  # a wrong name is said before the tokenizer is looked for
    tokenizer = load_tokenizer(tokenizer_folder(config))
    shape = model_shape(config.model, tokenizer)
    check_tokenizer(shape, tokenizer)
    if config.row_length > shape.max_positions:
        most = f"the {shape.max_positions} positions of the model {config.model!r}"
        raise ConfigError(f"rows of length={config.row_length} are longer than {most}; set length to at most that")
    check_layout(config.learner, shape, here.world)
    if config.export:
        choose_family(shape)
    check_room(folder, shape, config)
    return folder, shape, tokenizer


def make_model(
    config: RunConfig, shape: ModelConfig, here: Here, model: str | None = None, learner: LearnerConfig | None = None
) -> Transformer:
    """This rank's part of the weights of a folder, or of a preset drawn from the seed; NaN and infinity are refused.

    `model` and `learner` in place of the config's, for a second model of the run."""
    name, layout = model or config.model, learner or config.learner
    part = part_of(layout, shape, *place(layout, here.rank, here.world))
    how: dict[str, Any] = {"dtype": DTYPES[config.dtype], "device": here.device, "part": part}
    if Path(name).is_dir():
        return load(name, **how)
    return Transformer(replace(shape, value_head=False), seed=config.seed, **how)


def save(
    learner: Learner, state: dict[str, Any], folder: Path, config: RunConfig, done: int, critic: Learner | None = None
) -> None:
    """Write ``checkpoints/step_<done>``: the learner, what else the recipe must remember, and the config. Old ones go.

    It is written behind the next steps; only the last step waits for the disk. A critic goes to a folder of its own,
    before: a step whose policy is there has its critic too."""
    extra = {"done": done, "state": state, "config": config.to_dict(), "kernels": learner.world.gather(ops.choices())}
    if critic is not None:
        critic.save(folder / CRITIC / f"step_{done}", {"done": done}, overwrite=True, wait=True)
    learner.save(folder / CHECKPOINTS / f"step_{done}", extra, overwrite=True, wait=done == config.steps)
    if learner.world.rank == 0:
        retain(folder / CHECKPOINTS, config.keep_checkpoints)
        if critic is not None:
            retain(folder / CRITIC, config.keep_checkpoints + 1)  # the policy's is still being written


def restore(
    learner: Learner, folder: Path, config: RunConfig, critic: Learner | None = None
) -> tuple[int, dict[str, Any]]:
    """Continue from the newest checkpoint: weights, moments, random state. Returns the steps done, and `state`.
    Raises:
        ConfigError: a setting that would make it another run, with its old and new value.
        CheckpointError: a broken checkpoint."""
    found = latest(folder / CHECKPOINTS)
    if found is None:  # it ended while a reference was scored; `run_folder` has looked
        return 0, {}
    extra = read_manifest(found)["extra"]
    old, new = _fixed(type(config).from_dict(extra["config"])), _fixed(config)
    told = [f"{name} was {old[name]!r}, is {new[name]!r}" for name in old if old[name] != new[name]]
    if told:
        raise ConfigError(f"resume continues the same run, but {'; '.join(told)}. For other settings start a new run")
    if extra["done"] > config.steps:
        raise ConfigError(f"{found} is {extra['done']} steps on, but steps={config.steps}; ask for more, or a new run")
    learner.restore(found)
    try:
        each = extra.get("kernels", [{}])  # every rank has measured for itself
        ops.replay_choices(each[learner.world.rank % len(each)])
    except BackendError as e:
        print(f"resumed, but not bitwise: {e}", flush=True)
    if critic is not None:
        critic.restore(folder / CRITIC / found.name)
    return extra["done"], extra["state"]


def _fixed(config: RunConfig) -> dict[str, Any]:
    """What must not change on resume."""
    values = {name: value for name, value in config.to_dict().items() if name not in FREE}
    for name, value in values.items():
        if isinstance(value, dict) and "ep" in value and "pp" in value:  # a learner's: it may change its layout
            values[name] = {key: v for key, v in value.items() if key not in LAYOUT}
    return values
