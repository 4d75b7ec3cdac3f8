"""`AttentionLayer`: everything about one attention layer that decides its logits and its output, in one record.

Axes: B batch, T queries, S keys, H query heads, K key heads, h head size, d width. `x` is the residual stream as it
enters the norm in front of attention (for a post-norm model, the norm that produced the layer's input). With
`normalized=True`, `x` is the standardised stream z, before gain and bias: the theory's unit token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from locater.brief import brief
from locater.errors import LocaterError
from locater.layers.norm import Norm
from locater.layers.position_biases import PairTerms, PositionBias, PositionsError, RelativeTerms
from locater.layers.rotary import Rotary, RotaryTable

Kind = Literal["self", "cross"]
Provenance = Literal["family", "discovered"]  # a record of the package or of the user; found and verified by `discover`
# (weight (blocks, rows, d), the projection it is of) -> (what acts on unit tokens (blocks, rows, d), the constant part
# (blocks, rows))
Fold = Callable[[Tensor, "Projection"], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Projection:
    """A linear map, read when it is needed. `weight()` is (out, in), rows ordered head by head."""

    weight: Callable[[], Tensor]
    shape: tuple[int, int]
    bias: Tensor | None = None

    __repr__ = brief

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight().to(x), None if self.bias is None else self.bias.to(x))

    def linear(self, fold: Fold) -> Projection:
        """The linear map that replaces this one on the tokens of `fold`; only a map with a norm inside differs from
        itself.
        """
        return self


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a live model or of a checkpoint.

    Big tensors are read when a method needs them: a scan touches only `query` and `key`. `value` and `out` are None
    where only queries and keys were named; then `output` says so.
    """

    name: str  # path of the attention module, or of its tensors' common prefix
    index: int
    heads: int
    kv_heads: int
    head_dim: int  # of queries and keys
    query: Projection
    key: Projection
    scale: float
    value: Projection | None = None
    out: Projection | None = None
    norm: Norm = field(default_factory=Norm)
    memory_norm: Norm | None = None  # cross-attention: the norm of the stream that keys and values read
    value_stream_norm: Norm | None = None  # the norm of a stream that values alone read (keys of DETR know positions)
    head_value_norm: Norm | None = None  # of the values of each head
    mixed_norm: Norm | None = None  # of the mixed values, in front of the output map
    mixed_norm_apart: bool = False  # it acts on each head, and not on all of them together
    # factors (B, T, H v) of the mixed values, from the normed stream that queries read
    gate: Callable[[Tensor], Tensor] | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    rotary: Rotary | None = None
    rotary_table: RotaryTable | None = None  # in place of `rotary`: angles that are not position times frequency
    relative: RelativeTerms | PairTerms | None = None  # content meets distance: added before the scale
    bias: PositionBias | None = None  # added to the scaled logits
    softcap: float | None = None  # logits become cap * tanh(logits / cap)
    sinks: Float[Tensor, " H"] | None = None  # logits of a key that takes weight and gives no value
    causal: bool = False
    window: int | None = None  # keys at distance < window are visible
    chunk: int | None = None  # keys of the same run of this many tokens are visible
    kind: Kind = "self"
    mechanism: str = "softmax"  # how logits become weights; the theory is that of softmax
    norm_last: bool = False  # query and key norms act after the rotation, not before it
    provenance: Provenance = "family"
    quantised: str | None = None  # how its maps are stored where they are seen through: "fp8", "nf4"
    # why a part of a discovered layer is not known
    unknown_scale: str | None = None  # only its maps are known: `scale` is NaN, and so nothing in units of logits
    unknown_logits: str | None = None  # its maps and, without the line above, its scale are known
    unknown_mask: str | None = None  # `visible` is refused; `attention` and `output` need `mask`
    unknown_output: str | None = None
    inputs_matter: str | None = None  # with other inputs than the guessed ones another norm is, or may be, in front
    # why the norm in front is not known, of a layer of a record; `norm` is a guess then
    unknown_norm: str | None = None

    __repr__ = brief

    @property
    def width(self) -> int:
        return self.query.shape[1]

    @property
    def group(self) -> int:
        """Query heads per key head; query head h uses key head h // group."""
        return self.heads // self.kv_heads

    def queries(
        self, x: Float[Tensor, "B T d"], positions: Tensor | None = None, normalized: bool = False
    ) -> Float[Tensor, "B H T h"]:
        """Queries as they meet the keys: after norm, bias, query norm and rotation, before the scale."""
        norm = self.norm.affine if normalized else self.norm
        return self._placed(self._heads(self.query(norm(x)), self.heads), self.query_norm, positions)

    def keys(
        self, x: Float[Tensor, "B S d"], positions: Tensor | None = None, normalized: bool = False
    ) -> Float[Tensor, "B K S h"]:
        """Keys as the queries meet them; one per key head, not repeated for its group."""
        norm = self.key_side_norm
        return self._placed(
            self._heads(self.key((norm.affine if normalized else norm)(x)), self.kv_heads), self.key_norm, positions
        )

    def logits(
        self,
        x_q: Float[Tensor, "B T d"],
        x_k: Float[Tensor, "B S d"] | None = None,
        *,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        normalized: bool = False,
    ) -> Float[Tensor, "B H T S"]:
        """Pre-softmax logits, before any mask. Positions are 0, 1, 2, ... unless given."""
        if self.unknown_logits is not None:
            raise LocaterError(f"{self.name}: only its queries and keys are known: {self.unknown_logits}")
        x_k = x_q if x_k is None else x_k
        q_at = torch.arange(x_q.shape[1]) if query_positions is None else query_positions
        k_at = torch.arange(x_k.shape[1]) if key_positions is None else key_positions
        try:
            q = self.queries(x_q, q_at, normalized)
            k = self.keys(x_k, k_at, normalized).repeat_interleave(self.group, 1)
            met = q @ k.mT
            if self.relative is not None:
                met = met + self.relative(q, k, q_at, k_at)
            logits = self.scale * met
            if self.bias is not None:
                logits = logits + self.bias(q_at, k_at).to(logits)
        except PositionsError as error:
            raise LocaterError(f"{self.name}: {error}") from None
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def visible(self, queries: int, keys: int, padding: Bool[Tensor, "B S"] | None = None) -> Bool[Tensor, "b 1 T S"]:
        """True where a query may look: causal, window and chunk masks, and `padding` (True = a real token)."""
        if self.unknown_mask is not None:
            raise LocaterError(
                f"{self.name}: which keys a query sees is not known ({self.unknown_mask}): give mask=, True where a "
                "query may look"
            )
        distance = torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)  # last query meets last key
        seen = torch.ones(queries, keys, dtype=torch.bool)
        if self.kind == "self" and self.causal:
            seen &= distance >= 0
        if self.kind == "self" and self.window is not None:
            seen &= distance.abs() < self.window
        if self.kind == "self" and self.chunk is not None:
            run = torch.arange(keys) // self.chunk
            seen &= run[keys - queries :, None] == run
        if padding is None:
            return seen[None, None]
        return seen.to(padding.device) & padding[:, None, None, :]

    def attention(
        self,
        x: Float[Tensor, "B T d"],
        x_k: Float[Tensor, "B S d"] | None = None,
        *,
        padding: Bool[Tensor, "B S"] | None = None,
        mask: Bool[Tensor, "b heads T S"] | None = None,
        normalized: bool = False,
    ) -> Float[Tensor, "B H T S"]:
        """Attention weights. A row that sees no key is zero; with sinks a row sums to less than 1. `mask`, True where a
        query may look, stands in place of the layer's own rules and of `padding`.
        """
        logits = self.logits(x, x_k, normalized=normalized)
        seen = self.visible(logits.shape[-2], logits.shape[-1], padding) if mask is None else mask
        seen = seen.to(logits.device)
        keys = logits.shape[-1]
        if self.sinks is not None:
            logits = torch.cat([logits, self.sinks.to(logits).view(-1, 1, 1).expand(*logits.shape[:-1], 1)], -1)
            seen = torch.nn.functional.pad(seen, (0, 1), value=True)
        return logits.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0.0)[..., :keys]

    def output(
        self,
        x: Float[Tensor, "B T d"],
        x_k: Float[Tensor, "B S d"] | None = None,
        x_v: Float[Tensor, "B S d"] | None = None,
        *,
        padding: Bool[Tensor, "B S"] | None = None,
        mask: Bool[Tensor, "b heads T S"] | None = None,
        normalized: bool = False,
    ) -> Float[Tensor, "B T d"]:
        """The layer's contribution to the residual stream: attention, values, output projection. `x_v` is the stream of
        the values, where it is not that of the keys.
        """
        if self.value is None or self.out is None:
            reason = "" if self.unknown_output is None else f" ({self.unknown_output})"
            raise LocaterError(
                f"{self.name}: its value and output maps are not known, so its output cannot be computed{reason}"
            )
        if (self.value_stream_norm is None) != (x_v is None):
            stream = "the stream of its keys: leave out x_v" if x_v is not None else "a stream of their own: give x_v"
            raise LocaterError(f"{self.name}: its values read {stream}")
        weights = self.attention(x, x_k, padding=padding, mask=mask, normalized=normalized)
        norm = self.value_stream_norm or self.key_side_norm
        source = x_v if x_v is not None else x if x_k is None else x_k
        v = self._heads(self.value((norm.affine if normalized else norm)(source)), self.kv_heads)
        if self.head_value_norm is not None:
            v = self.head_value_norm(v)
        mixed = (weights @ v.repeat_interleave(self.group, 1)).transpose(1, 2).flatten(2)
        if self.mixed_norm is not None:
            apart = mixed.unflatten(-1, (self.heads, -1)) if self.mixed_norm_apart else mixed
            mixed = self.mixed_norm(apart).view_as(mixed)
        if self.gate is not None:
            mixed = mixed * self.gate((self.norm.affine if normalized else self.norm)(x))
        return self.out(mixed)

    @property
    def key_side_norm(self) -> Norm:
        """The norm of the stream that keys and values read."""
        if self.kind == "self":
            return self.norm
        return self.memory_norm or Norm()

    @staticmethod
    def _heads(x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    def _placed(self, x: Tensor, norm: Norm | None, positions: Tensor | None) -> Tensor:
        if norm is not None and not self.norm_last:
            x = norm(x)
        rotation = self.rotary or self.rotary_table
        if rotation is not None:
            x = rotation.rotate(x, torch.arange(x.shape[-2]) if positions is None else positions)
        return norm(x) if norm is not None and self.norm_last else x


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
    "softplus": torch.nn.functional.softplus,
    "relu": torch.relu,
    "identity": lambda x: x,
}


@dataclass(frozen=True)
class Gate:
    """function(map(x)), one factor for each channel of each head."""

    map: Projection
    function: str

    def __call__(self, x: Tensor) -> Tensor:
        return FUNCTIONS[self.function](self.map(x))
