"""`moekit.load` and `moekit.export`: a model from a Hugging Face folder, and back into one."""

from pathlib import Path

import torch
from torch import nn

from ..checkpoint import export as _export
from ..checkpoint import huggingface
from ..checkpoint.intervals import Piece
from ..checkpoint.load import open_checkpoint
from ..config import ModelConfig
from ..errors import ConfigError
from ..model.transformer import Part, Transformer

export = _export.write
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def load(
    path: str | Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    *,
    allow_nonfinite: bool = False,
    part: Part | None = None,
) -> Transformer:
    """A model with the weights of a Hugging Face folder of the family OLMoE, Qwen3-MoE or Mixtral.

    Args:
        path: a local folder with config.json and safetensors, one file or sharded with an index.
        dtype: of the parameters: float32, bfloat16 or float64; None = the narrowest of them that holds every stored
            value exactly.
        device: where the parameters go; None = CPU.
        allow_nonfinite: accept NaN and infinity among the weights.
        part: the layers and experts that this process holds; only they are read. None = everything.
    Returns:
        The model; `model.config.family` says where it came from.
    Raises:
        CheckpointError: not such a folder, a feature that moekit does not have (named, with its value), tensors that
            are missing, unknown or of another shape (all of them in one error).
        NumericsError: NaN or infinity, with the tensor's name.
    Cost: every byte is read once, straight into its parameter; parameters are never initialised first.

    >>> import tempfile
    >>> from moekit.model.presets import preset
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = export(Transformer(preset("demo")), f"{folder}/model")
    ...     load(f"{folder}/model", dtype="bfloat16").embed.weight.dtype
    torch.bfloat16
    """
    config = huggingface.read_config(path)
    model = Transformer(
        config, dtype=_dtype(dtype) or huggingface.stored_dtype(path), device=device, seed=None, part=part
    )
    huggingface.load_into(model, path, allow_nonfinite=allow_nonfinite)
    return model


def from_checkpoint(
    path: str | Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    *,
    part: Part | None = None,
) -> Transformer:
    """A model with the weights of a learner's checkpoint, whatever layout wrote it: masters, rounded to `dtype`.

    Args:
        path: the checkpoint's folder.
        dtype: of the parameters; None = what they were trained in.
        device: where the parameters go; None = CPU.
        part: the layers and experts that are wanted; only they are read. None = everything.
    Raises:
        CheckpointError: not such a folder, a broken file, parameters missing or unknown.
    """
    with open_checkpoint(path) as there:
        shape = ModelConfig.from_dict(there.manifest["model"])
        wide = _dtype(dtype) or _dtype(there.manifest["dtype"]) or torch.float32
        model = Transformer(shape, dtype=wide, device=device, seed=None, part=part)
        whole = Transformer(shape, device="meta", seed=None)
        for kind, list_of in (("master", nn.Module.named_parameters), ("buffer", nn.Module.named_buffers)):
            shapes, targets = {n: tuple(t.shape) for n, t in list_of(whole)}, []
            for name, t in list_of(model):
                start = huggingface.first(model, t)
                targets.append((Piece(name, shapes[name], start, start + t.numel()), t.data.view(-1)))
            there.read(kind, targets, names=shapes, cast=True)
    return model


def _dtype(asked: torch.dtype | str | None) -> torch.dtype | None:
    if asked is None:
        return None
    name = str(asked).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(f"dtype={asked} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[name]
