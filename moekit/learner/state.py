"""What a learner is made of, gathered, saved and restored: masters, moments, router bias, step, random state.

Everything is told in pieces, intervals of whole parameters (`moekit.checkpoint.intervals`), so that it does not matter
which layout wrote and which one reads.
"""

from __future__ import annotations

import json
import random
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoint.intervals import Piece
from ..checkpoint.load import open_checkpoint
from ..checkpoint.write import Saving, save_state
from ..errors import CheckpointError
from ..model.transformer import Transformer

if TYPE_CHECKING:
    from .learner import Learner
    from .mesh import World

Pieces = list[tuple[Piece, Tensor]]


def _whole(name: str, tensor: Tensor) -> tuple[Piece, Tensor]:
    return Piece(name, tuple(tensor.shape), 0, tensor.numel()), tensor.reshape(-1)


def owned(learner: Learner, kind: str) -> Pieces:
    """What this rank owns of one kind of state: over the world, every element of every parameter once."""
    if kind in ("gradient", "parameter"):
        out: Pieces = []
        for b in learner.gradients.owned():
            flat = b.owned_grad
            if kind == "parameter":
                flat = b.param if b.zero == 0 else b.param[b.start : b.stop]
            assert flat is not None, "there is no gradient before the first step"
            out.extend(b.pieces(flat))
        return out + (learner.gradients.held(owned=True) if kind == "parameter" else [])
    return learner.optimizer.state(learner.updates).get(kind, [])


def gathered(learner: Learner, kind: str) -> dict[str, Tensor]:
    """One kind of state by parameter name, whole, on every rank. Every rank calls it. For tests and small models."""
    out: dict[str, Tensor] = {}
    own = [(p, t.detach().cpu()) for p, t in owned(learner, kind)]
    learner.world.wire.add("gathered", (learner.world.size - 1) * sum(t.nbytes for _, t in own))
    for rank in learner.world.gather(own):
        for piece, flat in rank:
            whole = out.setdefault(piece.name, torch.zeros(piece.shape, dtype=flat.dtype))
            whole.view(-1)[piece.start : piece.stop] = flat
    return dict(sorted(out.items()))


def random_state() -> dict[str, Any]:
    """Of all generators that this process has, as JSON values."""
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state().tolist(),
        "cuda": torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else None,
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "python": random.getstate(),
    }


def set_random_state(s: dict[str, Any]) -> None:
    """What `random_state` gave."""
    torch.set_rng_state(torch.tensor(s["torch"], dtype=torch.uint8))
    if s["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(torch.tensor(s["cuda"], dtype=torch.uint8))
    np.random.set_state(tuple(s["numpy"]))
    version, keys, gauss = s["python"]
    random.setstate((version, tuple(keys), gauss))


def save(learner: Learner, folder: str | Path, extra: dict[str, Any] | None, *, overwrite: bool, wait: bool) -> Saving:
    """Write one checkpoint; every rank calls it and writes what it owns.

    Args:
        folder: it appears under this name when it is complete on all ranks; a crash leaves what was there before.
        extra: JSON values that go with it; rank 0's are kept.
        overwrite: replace an existing folder, atomically.
        wait: False = return when the state has been copied; it is written behind the next steps. `Saving.wait()`
            raises what went wrong; the next save waits for this one.
    Raises:
        CheckpointError, StorageError: on every rank, whichever rank had the problem.
    """
    learner.check()
    world = learner.world
    entries = learner.optimizer.state(learner.updates)
    first = learner.mesh.dp.rank == 0
    entries["buffer"] = [_whole(n, b) for n, b in learner._buffers().items()] if first else []
    randoms = world.gather(random_state())
    c, pp = learner.config, learner.mesh.pp.size
    manifest = {
        "updates": learner.updates,
        "skipped": learner.skipped,
        "learner": c.to_dict(),
        "model": learner.model.config.to_dict(),
        "layout": {"world": world.size, "dp": learner.mesh.dp.size, "ep": c.ep, "pp": pp, "zero": c.zero},
        "dtype": str(next(learner.model.parameters()).dtype).removeprefix("torch."),
        "random": randoms,
        "extra": extra or {},
    }
    token = world.gather(uuid.uuid4().hex)[0]
    saving, problem = None, None
    try:
        saving = save_state(
            folder, entries, manifest, world=world, token=token, overwrite=overwrite, asynchronous=not wait
        )
    except Exception as e:  # noqa: BLE001 (all ranks must learn of it, or they would wait for ever)
        problem = e
    _agree(world, problem, f"{folder} was not written")
    assert saving is not None
    return saving


def _agree(world: World, problem: Exception | None, what: str) -> None:
    """Raise on all ranks if one has a problem, or the others would wait for it for ever."""
    told = world.gather(None if problem is None else f"rank {world.rank}: {problem}")
    if problem is not None:
        raise problem
    if any(told):
        raise CheckpointError(f"{what}: " + "; ".join(t for t in told if t))


_HALF = "a restore failed while it was reading: restore this learner from a whole checkpoint"


def restore(learner: Learner, folder: str | Path) -> dict[str, Any]:
    """Continue from a checkpoint: at the same layout bitwise the same steps follow; at another, bitwise equal state.

    Masters, moments, router bias, step and schedule; random state where the number of ranks is the same.
    Returns:
        `extra` as it was saved.
    Raises:
        CheckpointError: broken files, parameters missing or unknown, a checkpoint of another model shape. What was
            found while reading leaves a learner of neither state: it refuses steps, passes and saves until a restore
            succeeds.
    """
    problem, manifest = None, {}
    try:
        manifest = _read(learner, folder)
    except Exception as e:  # noqa: BLE001 (a rank reads what it wants, so one alone may find damage)
        problem = e
    if any(learner.world.gather(learner.unfit)):  # also where this rank had not begun
        learner.unfit = _HALF
    _agree(learner.world, problem, f"{folder} was not read")
    learner.unfit = ""
    learner.optimizer.refresh()
    if learner.caches is not None:
        learner.caches.rebuild()
    if len(manifest["random"]) == learner.world.size:
        set_random_state(manifest["random"][learner.world.rank])
    learner.updates, learner.skipped = manifest["updates"], manifest["skipped"]
    return manifest["extra"]


def _read(learner: Learner, folder: str | Path) -> dict[str, Any]:
    """Masters, moments and buffers of this rank, from the files; returns the manifest."""
    with open_checkpoint(folder) as there:
        theirs, ours = there.manifest["model"], json.loads(json.dumps(learner.model.config.to_dict()))
        if theirs != ours:
            differ = [f"{k} is {theirs.get(k)!r} there, {ours[k]!r} here" for k in ours if theirs.get(k) != ours[k]]
            raise CheckpointError(f"{folder} is of another model: {', '.join(differ)}")
        learner.unfit = _HALF
        wanted = learner.optimizer.wanted(there.manifest["updates"])
        wanted["buffer"] = [_whole(n, b) for n, b in learner._buffers().items()]
        whole = Transformer(learner.model.config, device="meta", seed=None)
        every = {n for n, _ in whole.named_parameters()}
        names = {kind: every for kind in wanted} | {"buffer": {n for n, _ in whole.named_buffers()}}
        for kind, targets in wanted.items():  # parameters that another rank holds, or nobody trained, have no moments
            known = names[kind] if kind in ("master", "buffer") else names[kind] & there.names(kind).keys()
            there.read(kind, targets, names=known)
        there.read("master", learner.gradients.held(), names=names["master"], cast=True)
        return there.manifest
