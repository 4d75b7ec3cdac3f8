"""One call of an attention layer as it was intercepted: queries, keys, and the terms that decide its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from locater.calls.paged_cache import PagedKeys, Part, paged_cache_of
from locater.errors import LocaterError
from locater.kernels.terms import Terms

# an additive mask hides a key at or below this; half precision marks it with its lowest value, -65504
MASKED = -1e9
OLD_MASK = -1e4  # what models of older design add to a key of padding (MarkupLM)
ADD = ("eager", "flex_attention")  # attention functions that add a mask to their logits, whatever its type is
PAGED = "locater_paged_keys"  # of the arguments of a call: what it read from a paged cache
DENSE = 1 << 31  # elements of a block mask that may be written out


@dataclass(frozen=True)
class OtherAttention:
    """Attention that is no plain softmax of a call's terms: `kw["mechanism"]` of a call at the interface.

    Where it is a softmax all the same, `as_softmax` adds its cap or its sink to the terms of the call and its queries.
    """

    name: str
    unmeasurable: str | None = None  # why statistics of its rows cannot be taken, in a line
    signed: bool = False  # its weights may be negative
    as_softmax: Callable[[Terms, Tensor], Terms] | None = None


@dataclass(frozen=True)
class Call:
    """Queries (B, H, T, D) and keys (B, K, S, D) after norms and rotation, as they meet, and the terms of the call.

    `output` (B, T, H, V) is the result of attention before the output map, head by head; or (B, T, E) after that map,
    where heads cannot be told apart. `cut` marks sequences whose first key is no longer in a sliding-window cache.
    `weights` computes the map of `other` attention, for some query heads or for all (None). With `parts`, queries and
    keys are those of several requests one after the other, and the terms are those of each.
    """

    query: Float[Tensor, "B H T D"]
    key: Float[Tensor, "B K S D"]
    terms: Terms
    output: Float[Tensor, "B T H V"] | Float[Tensor, "B T E"] | None = None
    cut: Bool[Tensor, " B"] | None = None
    other: OtherAttention | None = None
    weights: Callable[[Tensor | None], Tensor] | None = None
    statistics: Float[Tensor, "8 B H T"] | None = None  # of all its rows, where the kernel that attended returned them
    parts: tuple[Part, ...] | None = None

    @property
    def why_unmeasurable(self) -> str | None:
        """Why statistics of its rows cannot be taken, in a line; None where they can."""
        return None if self.other is None else self.other.unmeasurable

    def by_request(self) -> list[tuple[str | int, Call]]:
        """A call for each request: its part of a packed call, or a sequence of the batch, by its number."""
        if self.parts is not None:
            return [(part.request, self._part(part)) for part in self.parts]
        (B, H, T, _), S = self.query.shape, self.key.shape[2]
        terms = self.terms.checked(B, H, T, S)
        return [(b, self._sequence(b, terms)) for b in range(B)]

    def _part(self, part: Part) -> Call:
        output = None if self.output is None else self.output[:, part.queries]
        cut = self.query.new_ones(1, dtype=torch.bool) if part.cut else None
        query, key = self.query[:, :, part.queries], self.key[:, :, part.keys]
        return Call(query, key, self.terms, output, cut, self.other)

    def _sequence(self, b: int, terms: Terms) -> Call:
        one = slice(b, b + 1)
        output, cut = (None if x is None else x[one] for x in (self.output, self.cut))
        numbers = None if self.statistics is None else self.statistics[:, one]
        return Call(self.query[one], self.key[one], terms.for_sequence(b), output, cut, self.other, statistics=numbers)

    def with_terms(self, **changes: Any) -> Call:
        """The same with some fields of the terms replaced."""
        return replace(self, terms=replace(self.terms, **changes))

    def masked(self, mask: Tensor | None, added: bool = False) -> Call:
        """With a mask as models pass it: boolean (True = look), additive, or two axes of padding. `added`: as in
        `with_mask`.
        """
        return self if mask is None else replace(self, terms=with_mask(self.terms, mask, self.key.shape[2], added))


def with_mask(terms: Terms, mask: Tensor, keys: int, added: bool = False) -> Terms:
    """Terms with a mask as models pass it: boolean (True = look), additive, or two axes of padding.

    `added`: the model adds a mask of any kind to its logits, so that True is +1 and hides nothing.
    """
    if mask.ndim == 2 and not added:
        return replace(terms, padding=mask[:, -keys:].bool())
    if not mask.is_floating_point():
        if not added:
            return replace(terms, mask=mask.bool())
        mask = mask.to(torch.float32)
    hidden = hidden_by(mask)
    if terms.bias is None and terms.softcap is None:
        return replace(terms, bias=mask.masked_fill(hidden, -torch.inf))
    # a sum with a position bias (1, H, T, S) would be (B, H, T, S), and a soft-cap comes before the mask: a mask that
    # only hides, as nearly all do, is kept apart
    compiling = torch.compiler.is_dynamo_compiling()
    if not compiling and not bool((~hidden & (mask != 0)).any()):
        return replace(terms, mask=~hidden)
    if terms.softcap is not None:
        if compiling:  # a graph does not ask: `_nan_where_refused` takes care of it
            return replace(terms, mask=~hidden)
        raise LocaterError(
            "its mask adds numbers to logits that were capped before, which is not measured: pass an additive mask "
            "that only hides, of 0 and the lowest number of its type"
        )
    assert terms.bias is not None, "without it and without a cap the mask is the bias"
    return replace(terms, bias=terms.bias + mask.masked_fill(hidden, -torch.inf))


def with_dense_mask(terms: Terms, mask: Any, query: Tensor, key: Tensor) -> Terms:
    """Terms with a block mask of FlexAttention, written out."""
    return with_mask(terms, _dense_block_mask(mask, query, key), key.shape[2])


def hidden_by(mask: Tensor) -> Tensor:
    """The keys that an additive mask hides."""
    if not mask.is_floating_point():
        return (mask <= MASKED) | (mask == OLD_MASK)
    floor = MASKED if torch.finfo(mask.dtype).max > -MASKED else torch.finfo(mask.dtype).min / 2
    return (mask <= floor) | (mask == OLD_MASK)


def call_of_interface(
    module: nn.Module, name: str, query: Tensor, key: Tensor, mask: Any, kw: dict[str, Any], output: Tensor
) -> Call:
    """The call that transformers makes of its attention function called `name`, without gradients.

    `kw["mechanism"]` is an `OtherAttention` where it is no plain softmax. Where it is none at all, `kw["weights"]`
    makes its map from queries, keys and the query heads to take (None: all).
    """
    queries, keys = query.shape[2], key.shape[2]
    other: OtherAttention | None = kw.get("mechanism")
    if paged_cache_of(kw) is not None:
        return _call_on_paged_cache(module, query, kw, output, other)
    mask = _with_read_axes(name, mask, kw)
    written_out = mask is not None and (not isinstance(mask, Tensor) or mask.ndim == 4)  # has causality and window
    # these know no causality of their own: without a mask every key is seen
    plain = written_out or (mask is None and name in ADD)
    causal, window = (False, None) if plain else _implied_mask(module, queries, keys, kw)
    window = None if name == "sdpa" else window  # which is in its mask alone
    cut, bias, sinks = _cut_sequences(query, key, kw), kw.get("position_bias"), kw.get("s_aux")
    terms = Terms(
        scale_of(module, query, kw),
        causal,
        window,
        kw.get("softcap"),
        documents=_documents(query, key, kw) if mask is None and "flash" in name else None,
        bias=None if bias is None else bias.detach(),
        sinks=None if sinks is None else sinks.detach(),
    )
    if other is not None and other.unmeasurable is not None:
        weights = partial(kw["weights"], query.detach(), key.detach())
        return Call(query.detach(), key.detach(), terms, output.detach(), cut, other, weights)
    if other is not None and other.as_softmax is not None:
        terms = other.as_softmax(terms, query)
    if isinstance(mask, Tensor):
        added = name in ADD or (bias is not None and mask.dtype != torch.bool)
        terms = with_mask(terms, mask[..., :keys] if written_out else mask, keys, added and written_out)
        if terms.softcap is not None and added and torch.compiler.is_dynamo_compiling():
            query = _nan_where_refused(query, terms, mask)
    elif mask is not None:
        terms = with_dense_mask(terms, mask, query, key)
    if query.shape[0] != key.shape[0] and 1 in (query.shape[0], key.shape[0]):  # learned queries, one for all sequences
        size = max(query.shape[0], key.shape[0])
        query, key = query.expand(size, -1, -1, -1), key.expand(size, -1, -1, -1)
    if causal and keys > queries and "flash" not in name:
        # fused attention counts from the first key: what a cache holds beyond the queries is empty
        key = key[:, :, :queries]
        terms = terms if terms.bias is None else replace(terms, bias=terms.bias[..., :queries])
    return Call(query.detach(), key.detach(), terms, output.detach(), cut)


def _call_on_paged_cache(
    module: nn.Module, query: Tensor, kw: dict[str, Any], output: Tensor, other: OtherAttention | None
) -> Call:
    """Each request sees its own keys, those before its query and in the window of the layer: the mask of the call says
    the same of all of them together.
    """
    read = kw.get(PAGED)
    if not isinstance(read, PagedKeys) or other is not None or kw.get("position_bias") is not None:
        raise LocaterError("attention on a paged cache is measured where it is a plain softmax, by observe() alone")
    parts, window = read.parts(module, kw)
    assert read.key is not None
    sinks = kw.get("s_aux")
    terms = Terms(
        scale_of(module, query, kw), True, window, kw.get("softcap"), sinks=None if sinks is None else sinks.detach()
    )
    return Call(query.detach(), read.key, terms, output.detach(), parts=parts)


def _nan_where_refused(query: Tensor, terms: Terms, mask: Tensor) -> Tensor:
    """Queries, or NaN where a mask adds numbers to capped logits, which `with_mask` refuses outside of a graph."""
    others = (mask != 0) & terms.mask if terms.mask is not None else mask != 0
    return query * torch.where(others.any(), torch.nan, 1.0).to(query.dtype)


def _with_read_axes(name: str, mask: Any, kw: dict[str, Any]) -> Any:
    """A mask with the axes by which the attention function called `name` reads it. Raises where that is not known."""
    if not isinstance(mask, Tensor):
        return mask
    if name not in (*ADD, "sdpa"):
        if mask.ndim == 4 and not mask.is_floating_point() and mask.dtype != torch.bool:
            raise LocaterError(
                f"a mask of {str(mask.dtype).removeprefix('torch.')} may hide or be added, and which of them "
                f"{name!r} attention does is not known: pass a boolean mask, or one that is added"
            )
        return mask
    if mask.ndim < 4:  # (T, S) or (heads, T, S), which broadcast; two axes are padding for FlashAttention alone
        mask = mask[(None,) * (4 - mask.ndim)]
    return mask[:, :1] if name == "flex_attention" else mask


def scale_of(module: nn.Module, query: Tensor, kw: dict[str, Any]) -> float:
    """What multiplies q.k in a call of transformers' attention interface."""
    scale = kw.get("scaling")
    if scale is None:
        scale = getattr(module, "scaling", None)
    return float(query.shape[-1] ** -0.5 if scale is None else scale)


def _cut_sequences(query: Tensor, key: Tensor, kw: dict[str, Any]) -> Tensor | None:
    """Sequences (B,) whose first key is no longer in a full sliding-window cache; None where all keys are there."""
    queries, keys = query.shape[2], key.shape[2]
    window, positions = kw.get("sliding_window"), kw.get("position_ids")
    if window is None or queries == keys or keys < window - 1 + queries:
        return None
    if isinstance(positions, Tensor) and positions.ndim == 2:
        return (positions[:, -1] >= keys).expand(query.shape[0])
    return torch.ones(query.shape[0], dtype=torch.bool, device=query.device)


def _documents(query: Tensor, key: Tensor, kw: dict[str, Any]) -> Tensor | None:
    """The document number of each token of a packed row, which FlashAttention reads from lengths or positions."""
    lengths, positions, tokens = kw.get("cu_seq_lens_k"), kw.get("position_ids"), key.shape[2]
    if query.shape[0] != 1 or query.shape[2] != tokens:
        return None
    if isinstance(lengths, Tensor):
        return torch.searchsorted(
            lengths[1:].contiguous(), torch.arange(tokens, device=key.device, dtype=lengths.dtype), right=True
        )[None]
    if isinstance(positions, Tensor) and tuple(positions.shape) == (1, tokens):
        return (positions == positions.min()).cumsum(-1)
    return None


def _implied_mask(module: nn.Module, queries: int, keys: int, kw: dict[str, Any]) -> tuple[bool, int | None]:
    """Whether the layer is causal, and its window, where no mask says so."""
    causal, window = kw.get("is_causal"), kw.get("sliding_window")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if causal and queries != 1:
        return True, window
    return False, window if queries == keys else None


def _dense_block_mask(mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """A FlexAttention block mask, written out."""
    if not hasattr(mask, "mask_mod"):
        raise LocaterError(
            f"a mask of type {type(mask).__name__} cannot be read: observe under attn_implementation='sdpa'"
        )
    B, T, S = query.shape[0], query.shape[2], key.shape[2]
    if B * T * S > DENSE:
        raise LocaterError(
            f"a block mask over {T} x {S} tokens is too large to write out: observe under attn_implementation='sdpa'"
        )
    at = (torch.arange(n, device=query.device) for n in (B, T, S))
    b, q, k = (x.view(shape) for x, shape in zip(at, ((-1, 1, 1), (1, -1, 1), (1, 1, -1)), strict=True))
    seen = mask.mask_mod(b, torch.zeros_like(b), q, k)  # the masks of transformers are the same for every head
    return seen.expand(B, T, S)[:, None]
