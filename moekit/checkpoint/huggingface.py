"""Read a Hugging Face folder: its config.json, and its safetensors streamed into parameters that exist already.

Names and shapes are compared first, for the whole folder, and everything that is wrong is named in one error. Then
each tensor is copied, slice by slice out of the mapped file, into its run of a parameter (`names.Piece`): a rank's
memory holds its parameters and nothing else worth counting."""

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..config import ModelConfig
from ..errors import CheckpointError, ConfigError, NumericsError
from .families import Family, config_from_hf, family_of
from .names import Piece, pieces, spellings

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
_SLICE = 2**24  # elements copied at a time
_LISTED = 40  # names written out in full in an error
_FREQUENCIES = "rotary_emb.inv_freq"  # in old files; they follow from the config


@dataclass(frozen=True)
class Stored:
    """One tensor in a folder's files."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors calls it: "F32", "BF16", ...


def read_config(path: str | Path) -> ModelConfig:
    """The `ModelConfig` of a Hugging Face folder. See `families.config_from_hf` for what is refused."""
    file = _folder(path) / CONFIG
    return config_from_hf(read_json(file), str(file))


def stored_tensors(path: str | Path) -> dict[str, Stored]:
    """Every tensor in a folder's safetensors files, by name, from the files' headers alone.
    Raises:
        CheckpointError: no safetensors in the folder, a file of the index that is missing, damaged, or lacks a tensor
            that the index says it has."""
    folder = _folder(path)
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() and index.exists():
        raise CheckpointError(f"{folder} has both {SINGLE} and {INDEX}; remove the one that is out of date")
    if not (single.exists() or index.exists()):
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}; moekit reads safetensors only")
    listed: Any = read_json(index).get("weight_map") if index.exists() else {}
    shards = sorted(set(listed.values())) if isinstance(listed, dict) else []
    if index.exists() and (not shards or any(shard != Path(shard).name for shard in shards)):
        raise CheckpointError(f"{index} has no usable weight_map of tensor names to files of this folder")
    found: dict[str, Stored] = {}
    for file in [folder / shard for shard in shards] or [single]:
        try:
            with safe_open(file, framework="pt") as f:
                for name in f.keys():  # noqa: SIM118 (it is no dictionary)
                    if name in found:
                        raise CheckpointError(f"the tensor {name!r} is in {found[name].file.name} and in {file.name}")
                    part = f.get_slice(name)
                    found[name] = Stored(file, tuple(part.get_shape()), str(part.get_dtype()))
        except FileNotFoundError:
            raise CheckpointError(f"{file} is missing, and {INDEX} names it") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from None
    lost = [n for n, file in listed.items() if n not in found or found[n].file.name != file]
    if lost:
        raise CheckpointError(f"{INDEX} names tensors that are not in the files it says: {_names(lost)}")
    return found


def stored_dtype(path: str | Path) -> torch.dtype:
    """The narrowest dtype of moekit's models that holds every stored value exactly.

    bfloat16 where all tensors are; float64 where one is; else float32, so float16 becomes float32."""
    kinds = {stored.dtype for name, stored in stored_tensors(path).items() if not name.endswith(_FREQUENCIES)}
    return torch.bfloat16 if kinds == {"BF16"} else torch.float64 if "F64" in kinds else torch.float32


@torch.no_grad()
def load_into(model: nn.Module, path: str | Path, *, allow_nonfinite: bool = False) -> None:
    """Copy a Hugging Face folder's weights into `model`, whose parameters are all written exactly once.

    A part of a model (`Transformer.part`) reads the slices that it holds and nothing else. Either naming of experts is
    read (one tensor per expert, or all experts fused), in each layer by itself.
    Args:
        model: a `Transformer` (anything with `config` and its parameter names); values are cast to its dtype.
        path: the folder. Its config.json says the family; the tensors decide whether the model has the right shape.
        allow_nonfinite: take NaN and infinity as they are.
    Raises:
        CheckpointError: tensors that are missing, not expected, of another shape or of a dtype that is not a float;
            all named in one error, before anything is copied.
        NumericsError: a tensor with NaN or infinity, named. The model is then partly written: throw it away.
    Cost: reads each byte once. Extra memory: a slice at most, mapped from the file."""
    folder = _folder(path)
    family = family_of(read_json(folder / CONFIG), str(folder / CONFIG))
    stored = stored_tensors(folder)
    plan = _plan(model.config, family, stored)  # type: ignore[arg-type]
    parameters = check_parameters(model, list(plan.values()))
    _check_tied(model.config, stored)  # type: ignore[arg-type]
    by_file: dict[Path, list[str]] = {}
    for name in plan:
        by_file.setdefault(stored[name].file, []).append(name)
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as f:
            for name in names:
                piece = plan[name]
                if piece.parameter in parameters:
                    held, at = parameters[piece.parameter], first(model, parameters[piece.parameter])
                    low, high = max(piece.start, at), min(piece.stop, at + held.numel())
                    row = math.prod(piece.shape[1:])  # a slice of experts is cut along the first axis
                    if low < high:
                        run = held.view(-1)[low - at : high - at].view(-1, *piece.shape[1:])
                        _copy(f.get_slice(name), run, (low - piece.start) // row, name, file, allow_nonfinite)


def check_tokenizer(config: ModelConfig, tokenizer: Any) -> None:
    """Raise an error if `tokenizer` can produce an id that the model has no row for.
    Args:
        config: of the model. A vocabulary larger than the tokenizer's is fine: many are padded.
        tokenizer: a Transformers tokenizer, or a folder that holds one.
    Raises:
        ConfigError: it can; both numbers are named.
        CheckpointError: the folder holds no tokenizer."""
    if isinstance(tokenizer, (str, Path)):
        tokenizer = _tokenizer_of(Path(tokenizer).expanduser())
    ids = tokenizer.get_vocab().values()
    if max(ids, default=-1) >= config.vocab:
        what = f"the tokenizer has {len(ids)} tokens with ids up to {max(ids)}, the model vocab={config.vocab}"
        raise ConfigError(f"{what}: use the tokenizer that belongs to this model")


def check_parameters(model: nn.Module, table: list[Piece]) -> dict[str, Tensor]:
    """The model's parameters by name, each of them covered exactly by `table`. Raises `CheckpointError` if not."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    covered: dict[str, int] = {}
    for piece in sorted(table, key=lambda p: (p.parameter, p.start)):
        if piece.start != covered.setdefault(piece.parameter, 0):
            raise CheckpointError(f"{piece.parameter} has a gap or an overlap before {piece.name}")
        covered[piece.parameter] = piece.stop
    part: Any = getattr(model, "part", None)
    config: Any = model.config
    whole = part is None or part == type(part).whole(config)
    wrong = [n for n in parameters.keys() | covered.keys() if n not in covered or (whole and n not in parameters)]
    if wrong:
        raise CheckpointError(f"the Hugging Face family has no place for, or the model lacks: {_names(wrong)}")
    for name, p in parameters.items():
        if p.is_meta:
            raise CheckpointError(f"{name} is on the meta device and holds no memory; call to_empty first")
        experts = part.experts[1] - part.experts[0] if part is not None and p.ndim == 3 else None
        if p.numel() * (config.experts if experts else 1) != covered[name] * (experts or 1):
            raise CheckpointError(f"{name} has shape {tuple(p.shape)}, model.config says {covered[name]} numbers")
    return parameters


def _plan(config: ModelConfig, family: Family, stored: dict[str, Stored]) -> dict[str, Piece]:
    """Which stored tensor goes where, by its name in the folder. Raises one error with all that does not fit."""

    def find(piece: Piece) -> str | None:
        return next((name for name in spellings(piece.name, family) if name in stored), None)

    fused = {p.parameter: p for p in pieces(config, family, "fused") if p.parameter.endswith((".gate_up", ".down"))}
    plan: dict[str, Piece] = {}
    problems: dict[str, list[str]] = {"missing": [], "not expected": [], "of another shape": [], "of another kind": []}
    for piece in pieces(config, family):
        if piece.parameter in fused and find(fused[piece.parameter]):
            piece = fused[piece.parameter]
        if (name := find(piece)) is None:
            problems["missing"].append(piece.name)
        else:
            plan[name] = piece
    for name, tensor in stored.items():
        if name not in plan:
            # a tied head stored once more is compared with the embedding
            if not (name.endswith(_FREQUENCIES) or (config.tied_head and name == "lm_head.weight")):
                problems["not expected"].append(name)
        elif tensor.shape != plan[name].shape:
            problems["of another shape"].append(f"{name} {tensor.shape} where the model has {plan[name].shape}")
        elif tensor.dtype not in _DTYPES:
            problems["of another kind"].append(f"{name} {tensor.dtype} where moekit reads {', '.join(_DTYPES)}")
    wrong = [f"{len(names)} {what}: {_names(names)}" for what, names in problems.items() if names]
    if wrong:
        where = next(iter(stored.values())).file.parent if stored else "the folder"
        raise CheckpointError(f"the tensors in {where} do not fit the model; " + "; ".join(wrong))
    return plan


def first(model: Any, parameter: Tensor) -> int:
    """Where what `model` holds of a parameter begins in the whole one, seen flat: parts hold a slice of the experts."""
    return model.part.experts[0] * parameter[0].numel() if parameter.ndim == 3 and hasattr(model, "part") else 0


def _copy(source, run: Tensor, first: int, name: str, file: Path, allow_nonfinite: bool) -> None:
    rows = max(1, _SLICE // max(1, math.prod(run.shape[1:])))
    for start in range(0, run.shape[0], rows):
        part = run[start : start + rows]
        part.copy_(source[first + start : first + start + part.shape[0]])
        if allow_nonfinite or not part.numel():
            continue
        low, high = part.aminmax()  # one pass without a temporary; both are NaN where one number is
        if not (math.isfinite(low) and math.isfinite(high)):
            how = "pass allow_nonfinite=True to read it anyway"
            raise NumericsError(f"{name} in {file} holds NaN or infinity (as {run.dtype}); {how}")


def _check_tied(config: ModelConfig, stored: dict[str, Stored]) -> None:
    if not config.tied_head or "lm_head.weight" not in stored:
        return

    def read(name: str) -> Tensor:
        with safe_open(stored[name].file, framework="pt") as f:
            return f.get_tensor(name)

    if not torch.equal(read("lm_head.weight"), read("model.embed_tokens.weight")):
        what = "has an lm_head.weight of its own although tie_word_embeddings is true"
        how = "set it to false in config.json, or remove the tensor"
        raise CheckpointError(f"{stored['lm_head.weight'].file} {what}; {how}")


def _tokenizer_of(folder: Path) -> Any:
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    if not any((folder / name).is_file() for name in files):
        raise CheckpointError(f"{folder} holds no tokenizer (no {', '.join(files)})")
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # noqa: BLE001 (the library raises nothing narrower)
            raise CheckpointError(f"{folder / 'tokenizer.json'} is not a tokenizer: {error}") from None
    from transformers import AutoTokenizer  # slow to import, and only older tokenizers need it

    return AutoTokenizer.from_pretrained(str(folder))


def _folder(path: str | Path) -> Path:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; moekit reads a local Hugging Face folder: download it first")
    return folder


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; `CheckpointError` if there is none."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} is not a Hugging Face folder: it has no {file.name}") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    return values


def _names(names: list[str]) -> str:
    """All names; where there are very many, those that differ in numbers only as one pattern with its count."""
    if len(names) <= _LISTED:
        return ", ".join(sorted(names))
    patterns = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    return ", ".join(f"{pattern} ({count} of them)" for pattern, count in sorted(patterns.items()))
