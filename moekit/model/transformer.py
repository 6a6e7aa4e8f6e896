"""The decoder: embedding, blocks of attention and (mixture-of-experts or dense) feed-forward, log-probs of labels.

Everything runs on the flat order of a microbatch (`moekit.data.batch.Flat`): [N, D], never [B, T, D].

Axis letters: B rows, T positions in a row, N positions seen flat, M labelled positions, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import Elide, ModelConfig
from ..data.batch import Batch, Flat
from ..errors import ConfigError, DataError
from ..objectives.logprobs import token_logprobs
from .attention import Attend, Attention, RMSNorm, rope_angles
from .decode import Cache, decode, prefill
from .moe import FeedForward, Linear, MoE, Observer, RouterLoss
from .router import Route


@dataclass
class Outputs:
    """What a forward pass gives to an objective."""

    hidden_MD: Tensor  # final hidden states at flat.label_index_M
    logprob_M: Tensor  # float32 or float64, log p(label) at flat.label_index_M
    routes: list[Route] | None  # one per routing layer, in flat order; only with record=True
    flat: Flat
    hidden_ND: Tensor | None = None  # final hidden states everywhere; only with keep_hidden=True


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, device=None):
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps, dtype, device)
        self.attention = Attention(config, dtype, device)
        self.ffn_norm = RMSNorm(config.width, config.norm_eps, dtype, device)
        if layer in config.dense_layers:
            self.dense = FeedForward(config.width, config.dense_width, dtype, device)
        else:
            self.moe = MoE(config, layer, dtype, device)

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
        **moe,
    ) -> tuple[Tensor, Route | None]:
        """The block's output, at `needed_M` only if given; `moe` goes to `MoE.forward`, `attend` to `Attention`."""
        x_ND = x_ND + self.attention(self.attention_norm(x_ND), flat, angles, attend)
        if self.routes:
            y, route = self.moe(self.ffn_norm(x_ND), flat, needed_M=needed_M, **moe)
            return (x_ND if needed_M is None else x_ND[needed_M]) + y, route
        x = x_ND if needed_M is None else x_ND[needed_M]
        return x + self.dense(self.ffn_norm(x)), None


class Transformer(nn.Module):
    """Decoder-only mixture-of-experts language model.

    Args:
        config: the shape.
        dtype: of all parameters; the selection bias stays float32.
        device: where parameters are made.
        seed: matrices are drawn from N(0, init_std) with a generator of their own, in float32, so that the same seed
            gives the same weights in every dtype and torch's global random state is left alone. None = memory is left
            uninitialised, for a caller who fills it.

    >>> from moekit.model.presets import preset
    >>> out = Transformer(preset("tiny"))(Batch.make(torch.tensor([[5, 6, 7, 8]])))
    >>> out.logprob_M.shape
    torch.Size([3])
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype = torch.float32, device=None, seed: int | None = 0):
        super().__init__()
        self.config = config
        self.embed = Linear(config.width, config.vocab, dtype, device)  # used as a table: weight is [V, D]
        self.layers = nn.ModuleList(Block(config, i, dtype, device) for i in range(config.layers))
        self.final_norm = RMSNorm(config.width, config.norm_eps, dtype, device)
        self.head = None if config.tied_head else Linear(config.width, config.vocab, dtype, device)
        if seed is not None:
            self.initialize(seed)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Draw every weight anew: norms one, matrices N(0, init_std), selection bias zero."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            for part in parameter if parameter.ndim == 3 else (parameter,):  # expert by expert: little extra memory
                part.copy_(torch.randn(part.shape, generator=generator) * self.config.init_std)
        for buffer in self.buffers():
            buffer.zero_()

    @property
    def head_weight(self) -> Tensor:
        """Output embedding [V, D]; the input embedding when tied."""
        return self.embed.weight if self.head is None else self.head.weight

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.embed.weight.device

    def forward(
        self,
        batch: Batch | Flat,
        *,
        elide: Elide = "padding",
        router_loss: RouterLoss | None = None,
        observer: Observer | None = None,
        replay: list[Tensor] | None = None,
        record: bool = False,
        keep_hidden: bool = False,
    ) -> Outputs:
        """Run a microbatch and score its labels.

        Args:
            batch: rows, or the same seen flat.
            elide: which expert rows are skipped because they cannot reach the loss: "none", "padding", or
                "padding+last_layer" (the last layer runs labelled positions only). Loss and gradient are the same.
            router_loss: `(layer, route, flat) -> scalar`, already scaled; reaches the gradient through the layer's
                output, so the caller must not add it to the loss. In the last layer it sees all N positions too.
            observer: told of every routed row, forward and backward.
            replay: expert choices [N, K] to use, one tensor per routing layer, in flat order.
            record: keep what the routers decided.
            keep_hidden: also return the final hidden states of all positions.

        Raises:
            DataError: a token outside the vocabulary, or a position past `max_positions`.
            ConfigError: an unknown `elide`, `replay` of the wrong length, or `keep_hidden` with rows elided that it
                would need.
        """
        flat = batch.flat if isinstance(batch, Batch) else batch
        self._check(flat, elide, replay, keep_hidden)
        flat = flat.to(self.device)
        x_ND = F.embedding(flat.ids_N, self.embed.weight)
        angles = rope_angles(flat.position_N, self.config, x_ND.dtype)
        real = flat.positions if elide == "none" else flat.real
        given = iter(replay or ())
        routes: list[Route] = []
        for i, block in enumerate(self.layers):
            last = elide == "padding+last_layer" and i == self.config.layers - 1
            x_ND, route = block(
                x_ND,
                flat,
                angles,
                needed_M=flat.label_index_M if last else None,
                real=real,
                replay_NK=next(given).to(self.device) if replay is not None and block.routes else None,
                router_loss=router_loss,
                observer=observer,
            )
            if record and route is not None:
                routes.append(route)
        hidden_ND = None
        if keep_hidden:
            hidden_ND = self.final_norm(x_ND)
            hidden_MD = hidden_ND[flat.label_index_M]
        else:
            labelled = x_ND.shape[0] == flat.label_index_M.shape[0]  # the last layer may have left only those
            hidden_MD = self.final_norm(x_ND if labelled else x_ND[flat.label_index_M])
        logprob_M = token_logprobs(hidden_MD, self.head_weight, flat.label_M)
        return Outputs(hidden_MD, logprob_M, routes if record else None, flat, hidden_ND)

    def prefill(self, prompts: list[list[int]], room: int) -> tuple[Tensor, Cache]:
        """See `moekit.model.decode.prefill`."""
        return prefill(self, prompts, room)

    def decode(self, token_B: Tensor, cache: Cache) -> Tensor:
        """See `moekit.model.decode.decode`."""
        return decode(self, token_B, cache)

    def _check(self, flat: Flat, elide: str, replay: list[Tensor] | None, keep_hidden: bool) -> None:
        if elide not in ("none", "padding", "padding+last_layer"):
            raise ConfigError(f"elide={elide!r} is not one of 'none', 'padding', 'padding+last_layer'")
        if keep_hidden and elide == "padding+last_layer":
            raise ConfigError("keep_hidden needs the last layer at all positions; use elide='padding' or 'none'")
        if replay is not None and len(replay) != len(self.config.moe_layers):
            raise ConfigError(f"replay has {len(replay)} layers of routes, the model {len(self.config.moe_layers)}")
        if flat.ids_N.is_cpu:  # on a GPU this would be a host read
            vocab = self.config.vocab
            _within("token", flat.ids_N, vocab, "use the tokenizer that belongs to this model")
            _within("label", flat.label_M, vocab, "use the tokenizer that belongs to this model")
            _within("position", flat.position_N, self.config.max_positions, "make shorter rows, or split documents")


def _within(name: str, values: Tensor, limit: int, remedy: str) -> None:
    low, high = (int(t) for t in values.aminmax()) if values.numel() else (0, 0)
    if low < 0 or high >= limit:
        raise DataError(f"{name} {high if high >= limit else low} is outside 0..{limit - 1}, the model's; {remedy}")


def logits(model: Transformer, batch: Batch, **options) -> Tensor:
    """[B, T, V] in the parameters' dtype, padding included: small inputs, tests and parity only."""
    out = model(batch, keep_hidden=True, **options)
    return out.flat.to_rows(F.linear(out.hidden_ND, model.head_weight))
