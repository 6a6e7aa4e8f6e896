"""The embedded engine on several processes: each holds a slice of the experts and answers requests of its own."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..config import LearnerConfig, ModelConfig
from ..learner.dispatch import make_dispatcher
from ..learner.mesh import Mesh, World
from ..model.transformer import Part, Transformer
from ..rollout.embedded import EmbeddedEngine


def serving_engine(
    model: Transformer | ModelConfig, layout: LearnerConfig, world: World | None = None, **how: Any
) -> EmbeddedEngine:
    """This rank's engine of those that serve together. A collective over `world`.

    `layout.ep` ranks share the experts, whatever layout trained them; a world of more ranks has several such groups,
    which know nothing of each other. Dense parts are on every rank. `generate`, `stream`, `score` and updates are then
    calls of all ranks of a group, with requests of its own for each, or none; draws are keyed by `prompt_ids`, so that
    answers do not depend on the rank that gives them.

    Args:
        model: a whole model, of which this rank's part is copied, or a shape, for weights that come by an update.
        layout: `ep`, `dispatch` and `transport` count. The rowwise buffer has room for all rows of the group
            (capacity = ep), so that no row is ever dropped.
        world: None = the world that torch.distributed was initialised with.
        how: as for `EmbeddedEngine`.

    Raises:
        ConfigError: ranks or experts that `ep` does not divide.
        EngineError: in a call, on all ranks: one of them left it with an error, or serves another version.

    Cost: a pass takes as long as the fullest rank's; beside the rows, 32 bytes of every rank are gathered before it.
    """
    shape = model if isinstance(model, ModelConfig) else model.config
    ep = Mesh.make(replace(layout, pp=1), shape, world).ep
    if ep.size == 1:
        return EmbeddedEngine(model, **how)
    held = shape.experts // ep.size
    part = Part(((0, shape.layers),), (ep.rank * held, (ep.rank + 1) * held))
    dispatcher = make_dispatcher(replace(layout, capacity=float(ep.size)), ep, shape.experts)

    def gather(numbers: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, device=ep.device)
        return ep.all_gather(mine.new_empty(ep.size * len(mine)), mine, "metadata").view(ep.size, -1).tolist()

    return EmbeddedEngine(model, part=part, dispatcher=dispatcher, gather=gather, **how)
