"""Weights on their way to vLLM: safetensors files in a folder that both see, each there until it was read.

The other end is `moekit.rollout.vllm_plugin`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ..checkpoint.names import Piece
from ..errors import EngineError
from ..model.transformer import Transformer
from .transports import put_file
from .vllm_messages import Link
from .weight_transfer import Sent


def send(
    link: Link, model: Transformer, pieces: Sequence[Piece], version: int, folder: Path, chunk_bytes: int, torn: bool
) -> Sent:
    """A whole update, up to where it has its version; then vLLM is still paused, with an empty prefix cache.

    Args:
        pieces: `moekit.checkpoint.names.pieces`: what goes under which name.
        chunk_bytes: of one file.
        torn: an update was begun there and not finished; its answers under way are of no use, and it ends.

    Raises:
        EngineError: vLLM refused, or kept keys of the old weights.
        StorageError: no room in the folder.
    """
    seconds, size, own = {"wire": 0.0, "load": 0.0}, 0, dict(model.named_parameters())
    link.control("pause", mode="abort" if torn else "wait")
    link.control("init", init_info={"root": str(folder)})
    if torn:
        abandon(link)
    link.control("start")
    for at, some in enumerate(_files(pieces, model.head_weight.itemsize, chunk_bytes)):
        began, path = time.perf_counter(), folder / f"{version}-{at}.safetensors"
        values = {p.name: own[p.parameter].detach().view(-1)[p.start : p.stop].view(p.shape).cpu() for p in some}
        put_file(path, values)
        wrote = time.perf_counter()
        try:
            info = {"file": path.name, "bytes": path.stat().st_size, "tensors": len(pieces)}
            link.control("update", update_info=info)
        finally:
            path.unlink(missing_ok=True)
        size, seconds["wire"] = size + sum(v.nbytes for v in values.values()), seconds["wire"] + wrote - began
        seconds["load"] += time.perf_counter() - wrote
    began = time.perf_counter()
    link.control("finish", weight_version=str(version))
    if link.control("reset").get("success") is not True:  # after the last tensor: keys of old weights help nobody
        raise EngineError("vLLM did not empty its prefix cache: it still holds keys of the old weights")
    seconds["load"] += time.perf_counter() - began
    return Sent(size, seconds)


def abandon(link: Link) -> None:
    """End the update that is open, if there is one."""
    with suppress(EngineError):  # which is what vLLM answers either way
        link.control("update", update_info={"abandon": True})


def _files(pieces: Sequence[Piece], width: int, chunk_bytes: int) -> Iterator[list[Piece]]:
    part, size = list[Piece](), 0
    for piece in pieces:
        more = (piece.stop - piece.start) * width
        if part and size + more > chunk_bytes:
            yield part
            part, size = [], 0
        part, size = [*part, piece], size + more
    yield part
