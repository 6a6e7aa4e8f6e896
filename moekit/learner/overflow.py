"""What happens when more rows arrive than a rowwise buffer holds: redo on the synchronized path, drop, or raise.

Nothing is known of it inside a step: the dispatcher keeps the largest need on the device, the learner reads it with
everything else after the last backward (or after a pass without gradient), over all ranks, and asks here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..config import LearnerConfig
from ..errors import CapacityError
from ..model.transformer import Transformer
from .dispatch import ExpertParallel, SyncDispatcher, make_dispatcher
from .mesh import World
from .rowwise import RowwiseDispatcher
from .state import random_state, set_random_state

ROOM = 1.05  # buffers grow to what was needed, and a little more


class Overflow:
    """The dispatcher of a learner's layers, how full its buffers were, and the way round it."""

    def __init__(self, model: Transformer, config: LearnerConfig, ep: World):
        self.model, self.config, self.ep = model, config, ep
        self.dispatcher: Any = make_dispatcher(config, ep, model.config.experts)
        self.redone = 0  # how often work was discarded
        self._use(self.dispatcher)

    @property
    def rowwise(self) -> RowwiseDispatcher | None:
        """The dispatcher, if it has buffers that can overflow."""
        return self.dispatcher if isinstance(self.dispatcher, RowwiseDispatcher) else None

    def reset(self) -> None:
        """Forget how full the buffers were, and remember the random numbers to come, in case of a redo."""
        if self.rowwise is not None:
            self.rowwise.reset()
            self._random = random_state()

    def fullness(self) -> list[Any]:
        """Largest need and use of a buffer since `reset`, as shares of it; on the device, this rank's view."""
        return [self.rowwise.need, self.rowwise.used] if self.rowwise is not None else [0.0, 0.0]

    def must_redo(self, need: float) -> bool:
        """Whether what was just run has to run again; `need` is the largest of all ranks. Later buffers are larger.

        Raises:
            CapacityError: with on_overflow="raise".
        """
        if self.rowwise is None or need <= 1.0 or self.config.on_overflow == "drop":
            return False
        had = self.rowwise.capacity
        if self.config.on_overflow == "raise":
            raise CapacityError(
                f"a rank was sent {need:.2f} times the rows that its buffer holds at capacity={had}; set capacity to "
                f"{had * need:.2f} or more, or on_overflow='redo'"
            )
        self.rowwise.capacity = had * need * ROOM
        self.redone += 1
        return True

    @contextmanager
    def synchronized(self) -> Iterator[None]:
        """Inside, all layers take the synchronized path, with the random numbers that there were at `reset`."""
        set_random_state(self._random)
        self._use(SyncDispatcher(self.ep, self.model.config.experts))
        try:
            yield
        finally:
            self._use(self.dispatcher)

    def metrics(self, need: float, used: float, redone: bool) -> dict[str, float]:
        """For the run's record."""
        if self.rowwise is None:
            return {}
        found = {"buffer_need": need, "buffer_used": used, "capacity": self.rowwise.capacity, "redone": float(redone)}
        return {f"dispatch/{name}": value for name, value in found.items()}

    def close(self) -> None:
        """Free the exchange buffers."""
        if isinstance(self.dispatcher, ExpertParallel):
            self.dispatcher.close()

    def _use(self, dispatcher: Any) -> None:
        for block in self.model.blocks.values():
            if block.routes:
                block.moe.dispatcher = dispatcher
