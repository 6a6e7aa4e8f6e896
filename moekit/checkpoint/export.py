"""Write a model as a Hugging Face folder that Transformers, and engines that read its files, load with equal logits.

What the chosen family cannot hold is refused by name before anything is written. The folder appears under its name
when it is complete: it is written beside it, synced and renamed."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from ..config import ModelConfig
from ..errors import CheckpointError, ConfigError, StorageError
from .families import FAMILIES, Family, config_to_hf
from .huggingface import CONFIG, INDEX, SINGLE, check_parameters, check_tokenizer, read_json
from .names import Naming, Piece, pieces
from .save import new_folder

# what a tokenizer folder may hold; everything else in a base checkpoint's folder belongs to its weights
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
_GENERATION = "generation_config.json"


def write(
    model: nn.Module, path: str | Path, tokenizer: Any = None, *, family: str | None = None,
    naming: Naming = "per_expert", max_shard_bytes: int = 5 * 10**9, overwrite: bool = False,
) -> Path:  # fmt: skip
    """Write a Hugging Face folder, which Transformers' `AutoModelForCausalLM` loads with equal logits: config.json,
    generation_config.json, safetensors (with an index when sharded) and the tokenizer.

    Args:
        model: a `Transformer` (anything with `config` and its parameter names); weights keep their dtype.
        path: the folder to make.
        tokenizer: a folder whose tokenizer files (and generation_config.json) are copied, or an object with
            `save_pretrained`; None = no tokenizer files.
        family: "olmoe", "qwen3_moe" or "mixtral"; None = the model's own.
        naming: "per_expert" as released checkpoints have it, or "fused".
        max_shard_bytes: largest file of weights; a tensor larger than that has a file of its own.
        overwrite: replace an existing Hugging Face folder at `path`.
    Returns: The folder's absolute path.
    Raises:
        ConfigError: the family cannot hold the model, or the tokenizer has more tokens than the model.
        CheckpointError: `path` exists, or `tokenizer` is not one.
        StorageError: no room, or the place cannot be written. Nothing half-written stays.
    Cost: extra memory of at most one shard where parameters are on another device, none to speak of on CPU."""
    config: ModelConfig = model.config  # type: ignore[assignment]
    if naming not in ("per_expert", "fused"):
        raise ConfigError(f"naming={naming!r} is not one of 'per_expert', 'fused'")
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes={max_shard_bytes} must be at least 1")
    chosen = choose_family(config, family)
    table = pieces(config, chosen, naming)
    parameters = check_parameters(model, table)
    if tokenizer is not None:
        check_tokenizer(config, tokenizer)
    path = Path(path).expanduser().resolve()
    if overwrite and path.exists() and not ((path / CONFIG).is_file() and "model_type" in read_json(path / CONFIG)):
        raise CheckpointError(f"{path} has no {CONFIG} of a Hugging Face model, so it is not overwritten")
    size = {p.name: math.prod(p.shape) * parameters[p.parameter].element_size() for p in table}
    _check_room(path, sum(size.values()))
    shards = _shards(table, size, max_shard_bytes)
    with new_folder(path, overwrite=overwrite) as folder:
        n = len(shards)
        files = [SINGLE] if n == 1 else [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
        for file, shard in zip(files, shards):
            save_file({p.name: _part(parameters[p.parameter], p) for p in shard}, folder / file, {"format": "pt"})
        if n > 1:
            total = {"total_parameters": sum(math.prod(p.shape) for p in table), "total_size": sum(size.values())}
            where = {p.name: file for file, shard in zip(files, shards) for p in shard}
            _dump(folder / INDEX, {"metadata": total, "weight_map": dict(sorted(where.items()))})
        dtype = str(parameters["embed.weight"].dtype).removeprefix("torch.")
        _dump(folder / CONFIG, config_to_hf(config, chosen, dtype))
        ids = {"bos_token_id": config.bos_id, "eos_token_id": config.eos_id, "pad_token_id": config.pad_id}
        _dump(folder / _GENERATION, {"_from_model_config": True, **ids})
        if isinstance(tokenizer, (str, Path)):
            source = Path(tokenizer).expanduser()
            for name in (*_TOKENIZER_FILES, _GENERATION):
                if (source / name).is_file():
                    shutil.copyfile(source / name, folder / name)
        elif tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
    return path


def choose_family(config: ModelConfig, family: str | None = None) -> Family:
    """The family to write `config` as: the one asked for, else the one that it came from.
    Raises `ConfigError` if there is none, or if it cannot hold the model; then all that it cannot hold is named."""
    name = family or config.family
    able = [f.name for f in FAMILIES.values() if not _cannot_hold(config, f)]
    hint = f"families that can hold this model: {', '.join(able) or 'none of ' + ', '.join(FAMILIES)}"
    if name not in FAMILIES:
        raise ConfigError(f"export needs a Hugging Face family, not family={family!r}, {config.family!r}; {hint}")
    problems = _cannot_hold(config, FAMILIES[name])
    if problems:
        raise ConfigError(f"the family {name!r} cannot hold {'; '.join(problems)}; {hint}")
    return FAMILIES[name]


def _cannot_hold(config: ModelConfig, family: Family) -> list[str]:
    always = family.normalizes is None or family.normalizes == (config.normalize_gates or config.gate == "topk_softmax")
    square = config.head_dim * config.heads == config.width
    checks = {
        "selection_bias=True": not config.selection_bias,
        "a value head (value_head=True)": not config.value_head,
        f"shared experts (shared_width={config.shared_width})": not config.shared_width,
        "gate='sigmoid'": config.gate != "sigmoid",
        f"dense_layers={config.dense_layers}": not config.dense_layers or family.dense_layers,
        f"qk_norm={config.qk_norm!r} (it has {family.qk_norm!r})": config.qk_norm == family.qk_norm,
        f"normalize_gates={config.normalize_gates} (it always normalises)": always,
        f"head_dim={config.head_dim} (it has width / heads = {config.width / config.heads:g})": family.free_head_dim
        or square,
    }
    return [what for what, holds in checks.items() if not holds]


def _part(parameter: Tensor, piece: Piece) -> Tensor:
    part = parameter.detach().reshape(-1)[piece.start : piece.stop].view(piece.shape).cpu()
    # safetensors writes memory as it lies. Of a parameter that lies otherwise, reshape has made a copy of the whole:
    # the clone lets go of it
    return part if parameter.is_contiguous() else part.clone()


def _shards(table: list[Piece], size: dict[str, int], limit: int) -> list[list[Piece]]:
    shards, room = [[]], limit
    for piece in table:
        if shards[-1] and size[piece.name] > room:
            shards, room = [*shards, []], limit
        shards[-1].append(piece)
        room -= size[piece.name]
    return shards


def _check_room(path: Path, need: int) -> None:
    parent = next(p for p in path.parents if os.path.exists(p))
    free = shutil.disk_usage(parent).free
    if need > free:
        raise StorageError(f"{path} needs {need:,} bytes and {parent} has {free:,} free; nothing was written")


def _dump(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
