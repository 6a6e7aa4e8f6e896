"""The decoder: embedding, blocks of attention and (mixture-of-experts or dense) feed-forward, log-probs of labels.

Everything runs on the flat order of a microbatch (`moekit.data.batch.Flat`): [N, D], never [B, T, D].

Axis letters: B rows, T positions in a row, N positions seen flat, M labelled positions, D width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import ops
from ..config import Elide, ModelConfig, Recompute
from ..data.batch import Batch, Flat
from ..errors import ConfigError, DataError
from ..objectives.logprobs import token_logprobs
from .attention import Attend, Attention, RMSNorm, rope_angles
from .moe import FeedForward, Linear, Memo, MoE
from .router import Route


@dataclass
class Outputs:
    """What a forward pass gives to an objective."""

    hidden_MD: Tensor  # final hidden states at flat.label_index_M
    logprob_M: Tensor  # float32 or float64, log p(label) at flat.label_index_M; empty with a value head
    routes: list[Route] | None  # one per routing layer, in flat order; only with record=True
    flat: Flat
    hidden_ND: Tensor | None = None  # final hidden states everywhere; only with keep_hidden=True
    value_M: Tensor | None = None  # float32 or float64, at flat.label_index_M; only with a value head

    @property
    def score_M(self) -> Tensor:
        """What the head says at the labelled positions: values if it is a value head, else log-probs."""
        return self.logprob_M if self.value_M is None else self.value_M


@dataclass(frozen=True)
class Part:
    """What one process holds of a model: runs of layers, one for each of its pipeline stages, and a slice of experts.

    The first run to start at layer 0 brings the embedding, the one that ends with the last layer the final norm and
    the head. Parameters keep the names that they have in the whole model.
    """

    stages: tuple[tuple[int, int], ...]  # [start, stop) of layers
    experts: tuple[int, int]  # [start, stop)

    @staticmethod
    def whole(config: ModelConfig) -> "Part":
        """Everything."""
        return Part(((0, config.layers),), (0, config.experts))


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(
        self, config: ModelConfig, layer: int, dtype: torch.dtype, device=None, experts: tuple[int, int] | None = None
    ):
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps, dtype, device)
        self.attention = Attention(config, dtype, device)
        self.ffn_norm = RMSNorm(config.width, config.norm_eps, dtype, device)
        if layer in config.dense_layers:
            self.dense = FeedForward(config.width, config.dense_width, dtype, device)
        else:
            self.moe = MoE(config, layer, dtype, device, experts)

    @property
    def routes(self) -> bool:
        """Whether this layer has experts."""
        return hasattr(self, "moe")

    def forward(
        self,
        x_ND: Tensor,
        flat: Flat | None,
        angles: tuple[Tensor, Tensor],
        *,
        attend: Attend | None = None,
        needed_M: Tensor | None = None,
        recompute: Recompute = "none",
        **moe,
    ) -> tuple[Tensor, Route | None]:
        """The block's output, at `needed_M` only if given; `moe` goes to `MoE.forward`, `attend` to `Attention`.

        `recompute="block"` keeps x and the router's choices only, and runs the block again in the backward.
        """
        memo = Memo() if recompute == "block" and torch.is_grad_enabled() else None

        def run(x_ND: Tensor) -> tuple[Tensor, Route | None]:
            x_ND = x_ND + self.attention(self.attention_norm(x_ND), flat, angles, attend)
            x = x_ND if needed_M is None else x_ND[needed_M]
            if not self.routes:
                return x + self.dense(self.ffn_norm(x)), None
            y, route = self.moe(
                self.ffn_norm(x_ND), flat, needed_M=needed_M, memo=memo, recompute=recompute == "moe", **moe
            )  # fmt: skip
            return x + y, route

        if memo is None:
            return run(x_ND)
        routes: list[Route | None] = []

        def kept(x_ND: Tensor) -> Tensor:  # a checkpoint returns tensors; the route of the first run is the route
            y, route = run(x_ND)
            routes.append(route)
            return y

        y = checkpoint(kept, x_ND, use_reentrant=False, preserve_rng_state=False, early_stop=False)
        assert isinstance(y, Tensor)
        return y, routes[0]


class Transformer(nn.Module):
    """Decoder-only mixture-of-experts language model, or the part of one that a process holds.

    Args:
        config: the shape of the whole model.
        dtype: of all parameters; the selection bias stays float32.
        device: where parameters are made.
        seed: matrices are drawn from N(0, init_std) with a generator of their own, in float32, so that the same seed
            gives the same weights in every dtype and in every part, and torch's global random state is left alone.
            None = memory is left uninitialised, for a caller who fills it.
        part: what is held here; None = everything. Only a whole model can be called.

    >>> from moekit.model.presets import preset
    >>> out = Transformer(preset("tiny"))(Batch.make(torch.tensor([[5, 6, 7, 8]])))
    >>> out.logprob_M.shape
    torch.Size([3])
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype = torch.float32, device=None, seed: int | None = 0,
        part: Part | None = None,
    ):  # fmt: skip
        super().__init__()
        self.config, self.part = config, part or Part.whole(config)
        held = [i for start, stop in self.part.stages for i in range(start, stop)]
        last = config.layers - 1 in held
        self.embed: Linear = None  # type: ignore[assignment]  # these three are absent where their layers are not held
        self.final_norm: RMSNorm = None  # type: ignore[assignment]
        self.head: Linear | None = None
        if 0 in held or (last and config.tied_head):
            self.embed = Linear(config.width, config.vocab, dtype, device)  # used as a table: weight is [V, D]
        self.layers = nn.ModuleList()
        for i in held:  # named by their place in the whole model
            self.layers.add_module(str(i), Block(config, i, dtype, device, self.part.experts))
        if last:
            self.final_norm = RMSNorm(config.width, config.norm_eps, dtype, device)
            if not config.tied_head:
                self.head = Linear(config.width, config.outputs, dtype, device)
        if seed is not None:
            self.initialize(seed)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Draw every weight anew: norms one, matrices N(0, init_std), selection bias zero.

        A part draws the whole model's numbers and keeps its own, so that every cut gives the same weights.
        """
        generator = torch.Generator().manual_seed(seed)
        mine = dict(self.named_parameters())
        for parameter in mine.values():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
        for name, whole in Transformer(self.config, device="meta", seed=None).named_parameters():
            if whole.ndim == 1:
                continue
            start = self.part.experts[0]
            for e in range(whole.shape[0] if whole.ndim == 3 else 1):  # expert by expert: little extra memory
                drawn = torch.randn(whole.shape[-2:], generator=generator) * self.config.init_std
                if name in mine and whole.ndim == 2:
                    mine[name].copy_(drawn)
                elif name in mine and 0 <= e - start < mine[name].shape[0]:
                    mine[name][e - start].copy_(drawn)
        for buffer in self.buffers():
            buffer.zero_()

    def keep(self, part: Part) -> "Transformer":
        """Cut a whole model down to a part, in place; returns self. What is left out is freed."""
        if self.part != Part.whole(self.config):
            raise ConfigError(f"this model is a part already ({self.part}); only a whole model can be cut")
        empty = Transformer(self.config, device="meta", seed=None, part=part)
        wanted = {name for name, _ in empty.named_modules()}
        for name in [n for n in self.layers._modules if f"layers.{n}" not in wanted]:
            del self.layers._modules[name]
        for name in ("embed", "final_norm", "head"):
            if name not in wanted:
                setattr(self, name, None)
        start, stop = part.experts
        for block in self.blocks.values():
            if block.routes and (start, stop) != block.moe.experts:
                for weight in (block.moe.gate_up, block.moe.down):
                    weight.data = weight.data[start:stop].clone()
                block.moe.experts = (start, stop)
        self.part = part
        return self

    @property
    def blocks(self) -> dict[int, Block]:
        """The blocks held here, by layer."""
        return {int(name): block for name, block in self.layers.named_children()}  # pyright: ignore[reportReturnType]

    @property
    def head_weight(self) -> Tensor:
        """Output embedding [V, D]; the input embedding when tied."""
        return (self.embed if self.config.tied_head else self.head).weight  # pyright: ignore

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    def forward(
        self, batch: Batch | Flat, *, record: bool = False, keep_hidden: bool = False, temperature: float = 1.0,
        **how: Any,
    ) -> Outputs:  # fmt: skip
        """Run a microbatch and score its labels.

        Args:
            batch: rows, or the same seen flat.
            record: keep what the routers decided.
            keep_hidden: also return the final hidden states of all positions.
            temperature: log-probs are those of logits divided by it.
            elide: which expert rows are skipped because they cannot reach the loss: "none", "padding", or
                "padding+last_layer" (the last layer runs labelled positions only). Loss and gradient are the same.
            router_loss: `(layer, route, flat, again) -> scalar`, already scaled; reaches the gradient through the
                layer's output, so the caller must not add it to the loss. The last layer's sees all N positions too.
            observer: told of every routed row, forward, recomputed and backward.
            replay: expert choices [N, K] to use, one tensor per routing layer, in flat order; -1 = the router's own.
            recompute: activations that are computed again in the backward: of the experts ("moe"), of blocks ("block").

        Raises:
            DataError: a token outside the vocabulary, or a position past `max_positions`.
            ConfigError: an unknown `elide`, `replay` of the wrong length, or `keep_hidden` with rows elided that it
                would need; a part of a model.
        """
        if len(self.part.stages) != 1 or self.part.stages[0] != (0, self.config.layers):
            raise ConfigError(f"only layers {self.part.stages} are here; a Learner runs a model in parts")
        flat = (batch.flat if isinstance(batch, Batch) else batch).to(self.device)
        x, routes = self.stage(0, None, flat, keep_hidden=keep_hidden, **how)
        return self.finish(x, flat, routes if record else None, keep_hidden, temperature)

    def stage(
        self, index: int, x_ND: Tensor | None, flat: Flat, *, elide: Elide = "padding",
        replay: list[Tensor] | None = None, keep_hidden: bool = False, **how: Any,
    ) -> tuple[Tensor, list[Route]]:  # fmt: skip
        """The layers `part.stages[index]`: hidden states of `flat` in (None = embed them), out, and the routes.

        After the last layer with elide="padding+last_layer" only labelled positions are left, [M, D]. Other arguments
        as for `forward`; `replay` has an entry for every routing layer of the whole model.
        """
        self._check(flat, elide, replay, keep_hidden)
        start, stop = self.part.stages[index]
        if start == 0:
            x_ND = ops.embedding(flat.ids_N, self.embed.weight)
        assert x_ND is not None
        angles = rope_angles(flat.position_N, self.config, x_ND.dtype)
        real = flat.positions if elide == "none" else flat.real
        x, blocks, routes = x_ND, self.blocks, list[Route]()
        for i in range(start, stop):
            block = blocks[i]
            last = elide == "padding+last_layer" and i == self.config.layers - 1
            given = replay[self.config.moe_layers.index(i)].to(x.device) if replay and block.routes else None
            x, route = block(
                x,
                flat,
                angles,
                needed_M=flat.label_index_M if last else None,
                real=real,
                sizes=tuple(p.labels if last else p.positions if elide == "none" else p.real for p in flat.peers),
                replay_NK=given,
                **how,
            )
            if route is not None:
                routes.append(route)
        return x, routes

    def finish(
        self, x_ND: Tensor, flat: Flat, routes: list[Route] | None = None, keep_hidden: bool = False,
        temperature: float = 1.0,
    ) -> Outputs:  # fmt: skip
        """Final norm, head, and log-probs (at `temperature`) or values of what the last stage gave."""
        hidden_ND = None
        if keep_hidden:
            hidden_ND = self.final_norm(x_ND)
            hidden_MD = hidden_ND[flat.label_index_M]
        else:
            labelled = x_ND.shape[0] == flat.label_index_M.shape[0]  # the last layer may have left only those
            hidden_MD = self.final_norm(x_ND if labelled else x_ND[flat.label_index_M])
        if self.config.value_head:
            wide = torch.promote_types(hidden_MD.dtype, torch.float32)
            value_M = F.linear(hidden_MD.to(wide), self.head_weight.to(wide))[:, 0]  # bfloat16 would tie close scores
            return Outputs(hidden_MD, value_M.new_zeros(0), routes, flat, hidden_ND, value_M)
        logprob_M = token_logprobs(hidden_MD, self.head_weight, flat.label_M, temperature=temperature)
        return Outputs(hidden_MD, logprob_M, routes, flat, hidden_ND)

    def _check(self, flat: Flat, elide: str, replay: list[Tensor] | None, keep_hidden: bool) -> None:
        if elide not in ("none", "padding", "padding+last_layer"):
            raise ConfigError(f"elide={elide!r} is not one of 'none', 'padding', 'padding+last_layer'")
        if keep_hidden and elide == "padding+last_layer":
            raise ConfigError("keep_hidden needs the last layer at all positions; use elide='padding' or 'none'")
        if replay is not None and len(replay) != len(self.config.moe_layers):
            raise ConfigError(f"replay has {len(replay)} layers of routes, the model {len(self.config.moe_layers)}")
        if flat.ids_N.is_cpu:  # on a GPU this would be a host read
            check(flat, self.config)


def check(flat: Flat, config: ModelConfig) -> None:
    """Raise `DataError` for a token, label or position that the model does not have."""
    _within("token", flat.ids_N, config.vocab, "use the tokenizer that belongs to this model")
    _within("label", flat.label_M, config.vocab, "use the tokenizer that belongs to this model")
    _within("position", flat.position_N, config.max_positions, "make shorter rows, or split documents")


def _within(name: str, values: Tensor, limit: int, remedy: str) -> None:
    low, high = (int(t) for t in values.aminmax()) if values.numel() else (0, 0)
    if low < 0 or high >= limit:
        raise DataError(f"{name} {high if high >= limit else low} is outside 0..{limit - 1}, the model's; {remedy}")


def logits(model: Transformer, batch: Batch, **options) -> Tensor:
    """[B, T, V] in the parameters' dtype, padding included: small inputs, tests and parity only."""
    out = model(batch, keep_hidden=True, **options)
    return out.flat.to_rows(F.linear(out.hidden_ND, model.head_weight))
