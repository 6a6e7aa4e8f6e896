"""Pipeline parallelism: one step's microbatches through the stages, by the schedules of torch.distributed.pipelining.

moekit writes no schedule. It makes the stages that torch's schedules drive, and keeps to four rules:

- Nothing but hidden states and their gradients crosses the wire: every rank of a pipeline has the batches, so a stage
  is told the number of its microbatch and nothing else.
- Shapes on the wire are static: hidden states are padded to the step's largest microbatch, and cut back on arrival.
- The last stage's output is its microbatch's weighted loss: no division by microbatches, ranks or anything else.
- A schedule that does not take n microbatches (1f1b needs one a stage, interleaved whole rounds) gets idle ones after
  them: no stage computes anything for those, and they have neither a loss nor a gradient.

Schedules: `1f1b`, `interleaved`, and `zbv`, which leads the stages down the ranks and back up, so that first and last
stage share a rank. torch's own split of zbv's backward runs every autograd Function that takes weights twice, and
writes `.grad` past the hooks; here a stage's whole backward runs where the schedule puts its input gradients, and the
schedule's weight slots are empty. Hooks, `GradSlot`s and recompute then work as in the other schedules; the price is
the part of the bubble that weight gradients would have filled.

Axis letters: N positions of a microbatch, L positions of the step's largest one, D width.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from ..config import LearnerConfig, ModelConfig
from ..data.batch import Flat
from ..errors import ConfigError, MoekitError
from .loop import StageFn
from .mesh import Wire, World
from .stages import chunks, stages_of


class Part(nn.Module):
    """One stage, as a schedule calls it: padded hidden states in (none for the first), padded ones or a loss out."""

    def __init__(self, place: int, first: bool, last: bool, wire_LD: Tensor):
        super().__init__()
        self.place, self.first, self.last, self.wire_LD = place, first, last, wire_LD
        self.work: tuple[list[Flat], StageFn]  # of the `run` that is going on

    def forward(self, *x_LD: Tensor, i: Tensor) -> Tensor:
        """Microbatch `i`, an int64 on the host."""
        (flats, fn), at, like = self.work, int(i), self.wire_LD
        if at >= len(flats):  # idle
            return like.new_zeros(() if self.last else like.shape)
        rows = flats[at].positions
        x_ND = None if self.first else x_LD[0][:rows]
        y = fn(self.place, x_ND, at)
        want = () if self.last else (rows, like.shape[1])
        if y.shape != want or (y.dtype != like.dtype and not self.last):
            raise ConfigError(
                f"stage {self.place} of this rank gave {tuple(y.shape)} {y.dtype} for microbatch {at}, "
                f"but the {'loss is a scalar' if self.last else f'next stage takes {want} {like.dtype}'}"
            )
        return y if self.last or rows == like.shape[0] else F.pad(y, (0, 0, 0, like.shape[0] - rows))


class Stage(PipelineStage):
    """torch's stage, except that its buffers live from receive to use only, and that it counts the bytes it sends.

    torch keeps buffers for every microbatch of a step, both ways; these are as many as are on their way.
    """

    def __init__(self, part: Part, index: int, stages: int, pp: World, zbv: bool):
        like = part.wire_LD
        meta = torch.empty(like.shape, dtype=like.dtype, device="meta", requires_grad=True)
        super().__init__(
            part, index, stages, like.device, () if part.first else (meta,), (meta.sum() if part.last else meta,),
            group=pp.group, dw_builder=(lambda: lambda: None) if zbv else None,
        )  # fmt: skip
        self.wire: Wire = pp.wire
        self._runtime_validate = False  # torch's debug check takes a loss without a graph for an error; Part checks

    def _fill(self, infos: tuple) -> None:
        for info in infos:
            if not info.is_root_arg:
                info.buffer = torch.empty(info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=self.device)

    def _drop(self, infos: tuple) -> None:
        for info in infos:
            info.buffer = None

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        for infos in self.args_recv_info.values():
            self._drop(infos)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        for infos in self.grad_recv_info.values():
            self._drop(infos)

    def _count(self, ops: list) -> list:
        for op in ops:
            op.tensor = op.tensor.contiguous()
            self.wire.add("pipeline", op.tensor.nbytes)
        return ops

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list:
        """Room for the hidden states of a microbatch, and the receives."""
        self._fill(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list:
        """Room for the gradients of a microbatch, and the receives."""
        if self.has_backward:
            self._fill(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list:
        """The sends of a microbatch's hidden states, counted."""
        return self._count(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list:
        """The sends of a microbatch's gradients, counted."""
        return self._count(super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, *args, **kwargs):
        """The forward of one microbatch; its input now belongs to the graph."""
        out = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._drop(self.args_recv_info[fwd_chunk_id])
        return out

    def backward_one_chunk(self, bwd_chunk_id: int, *args, **kwargs) -> None:
        """The backward of one microbatch; without backward, the place where its hidden states are let go."""
        if not self.has_backward:
            self.fwd_cache.pop(bwd_chunk_id, None)
            return
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._drop(self.grad_recv_info[bwd_chunk_id])

    def get_local_bwd_output(self, mb_index: int):
        """Gradients for the stage before, on this rank. torch refuses to be asked without backward."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple, mb_index: int) -> None:
        """Gradients from the stage after, on this rank."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


class Pipeline:
    """Runs a step's microbatches through the pipeline that this rank is part of.

    Args:
        config: pp, pipeline and stages_per_rank.
        shape: of the model; its width is the width of the wire.
        pp: this rank's pipeline; its group must be of ranks in stage order.
        dtype: of hidden states.
        device: where they live.
    """

    def __init__(self, config: LearnerConfig, shape: ModelConfig, pp: World, dtype: torch.dtype, device):
        if pp.size != config.pp:
            raise ConfigError(f"pp={config.pp}, but the pipeline's group has {pp.size} ranks; make it with Mesh.make")
        self.config, self.pp = config, pp
        self.width, self.one = shape.width, torch.empty((), dtype=dtype, device=device)
        self.indices = stages_of(config, pp.rank)
        self.stages = config.pp * (config.stages_per_rank if config.pp > 1 else 1)
        self._made: dict[bool, tuple[tuple[int, int], list[Part], Callable]] = {}

    def run(self, flats: list[Flat], fn: StageFn, *, backward: bool = True) -> list[Tensor]:
        """Forward, and backward unless told otherwise, of every microbatch, in the order of the schedule.

        Args:
            flats: the microbatches, the same on every rank of the pipeline and as many on every pipeline; sizes may
                differ, down to none.
            fn: see `StageFn`. Gradients arrive where autograd puts them: hooks and `GradSlot`s work.
            backward: False = forward only, without a graph.
        Returns:
            The losses, detached, one a microbatch, on the rank of the last stage; [] on others.
        Raises:
            ConfigError: `fn` gave a wrong shape or dtype; whatever else of moekit's `fn` raises.
        Cost: sends L * D numbers for each of `chunks(config, n)` microbatches, from every stage but the last forward
            and from every stage but the first backward (none between two stages of one rank). Each new number or
            largest size of microbatches costs a round of 4-byte messages in which torch's stages agree.
        """
        with torch.set_grad_enabled(backward):
            if not flats:
                return []
            n, rows = chunks(self.config, len(flats)), max(1, max(f.positions for f in flats))
            parts, call = self._schedule(n, rows, backward)
            for part in parts:
                part.work = flats, fn
            losses: list[Tensor] = []
            index = torch.arange(n)
            try:
                call(i=index, target=index, losses=losses, return_outputs=False)
            except BaseException as error:
                self._made.clear()  # a schedule that stopped half-way cannot be run again
                if isinstance(error.__cause__, MoekitError):  # torch wraps what a stage raises
                    raise error.__cause__ from None
                raise
            finally:
                for part in parts:
                    del part.work
            return [x.detach() for x in losses[: len(flats)]]

    def _schedule(self, n: int, rows: int, backward: bool) -> tuple[list[Part], Callable]:
        """The stages and schedule for n microbatches of at most `rows` positions, made anew only when these change."""
        key, parts, call = self._made.get(backward, ((0, 0), [], None))
        if key != (n, rows) or call is None:
            wire_LD = self.one.expand(rows, self.width)  # a shape: no memory
            parts = [Part(k, s == 0, s == self.stages - 1, wire_LD) for k, s in enumerate(self.indices)]
            zbv = self.config.pipeline == "zbv"
            stages = [Stage(p, s, self.stages, self.pp, zbv) for p, s in zip(parts, self.indices)]
            kind = {"1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B, "zbv": ScheduleZBVZeroBubble}
            schedule = kind[self.config.pipeline](
                stages[0] if self.config.pipeline == "1f1b" else stages, n, loss_fn=lambda loss, _: loss,
                scale_grads=False,
            )  # fmt: skip
            call = schedule.step if backward else schedule.eval
            self._made[backward] = ((n, rows), parts, call)
        return parts, call
