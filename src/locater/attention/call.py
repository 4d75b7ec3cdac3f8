"""One call of an attention layer, as it was intercepted: queries, keys, and everything else that decides its
weights.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from locater.attention import mechanism
from locater.errors import LocaterError

# additive masks: at or below, a key is out of sight. Half precision marks it with its lowest value, -65504
MASKED = -1e9
DEFAULT_CAP = float(inspect.signature(mechanism("softcap").attend).parameters["cap"].default)
DENSE = 1 << 31  # elements of a block mask that may be written out


@dataclass(frozen=True)
class Call:
    """Queries (B, H, T, D) and keys (B, K, S, D) after norms and rotation, as they meet.

    `mask` is True where a query may look. `bias` is added to scaled logits. `documents` numbers sequences that are
    packed one after another. `output` (B, T, H, V) is what the layer made of its values, before the output map; or (B,
    T, E) after it, where heads are not handed over one by one. `cut` marks sequences whose first key is gone from a
    cache that holds a window.
    """

    query: Float[Tensor, "B H T D"]
    key: Float[Tensor, "B K S D"]
    scale: float
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    padding: Bool[Tensor, "B S"] | None = None
    documents: Int[Tensor, "B S"] | None = None
    mask: Bool[Tensor, "b h t S"] | None = None
    bias: Float[Tensor, "b h t S"] | None = None
    alibi: Float[Tensor, " H"] | None = None
    sinks: Float[Tensor, " H"] | None = None
    output: Float[Tensor, "B T H V"] | Float[Tensor, "B T E"] | None = None
    cut: Bool[Tensor, " B"] | None = None

    def masked(self, given: Tensor | None) -> Call:
        """With a mask as models pass it: boolean (True = look), additive, or two axes of padding."""
        if given is None:
            return self
        if given.ndim == 2:
            return replace(self, padding=given[:, -self.key.shape[2] :].bool())
        if given.dtype == torch.bool or not given.is_floating_point():
            return replace(self, mask=given.bool())
        # a sum with a position bias (1, H, T, S) would be (B, H, T, S), and a soft-cap comes before the mask: there it
        # only hides
        floor = MASKED if torch.finfo(given.dtype).max > -MASKED else torch.finfo(given.dtype).min / 2
        if self.bias is not None or self.softcap is not None:
            return replace(self, mask=given > floor)
        return replace(self, bias=given.masked_fill(given <= floor, -torch.inf))


def from_interface(
    module: nn.Module, name: str, query: Tensor, key: Tensor, mask: Any, kw: dict[str, Any], output: Tensor
) -> Call:
    """What transformers hands to an attention function called `name`; `kw["mechanism"]` says where it is no plain
    softmax.
    """
    scale = kw.get("scaling")
    if scale is None:
        scale = getattr(module, "scaling", None)
    call = Call(
        query.detach(), key.detach(), float(query.shape[-1] ** -0.5 if scale is None else scale), softcap=kw.get("softcap"),
        sinks=None if kw.get("s_aux") is None else kw["s_aux"].detach(),
        bias=None if kw.get("position_bias") is None else kw["position_bias"].detach(),
        output=output.detach(), cut=_cut(query, key, kw),
    )  # fmt: skip
    if kw.get("mechanism") is not None:
        call = _as_softmax(call, kw["mechanism"], kw.get("cap") or DEFAULT_CAP)
    if mask is not None and not isinstance(mask, Tensor):
        return call.masked(_dense(mask, query, key))
    if mask is not None and mask.ndim == 4:  # holds causality and window
        return call.masked(mask[..., : key.shape[2]])
    if mask is None and "flash" in name:
        call = replace(call, documents=_documents(query, key, kw))
    return _causal_alone(call.masked(mask), module, name, kw)


def _as_softmax(call: Call, name: str, cap: float) -> Call:
    """The call of a mechanism that is a softmax of other logits, or with a sink; refuses others, whose numbers would be
    wrong.
    """
    why = why_unmeasurable(name)
    if why is not None:
        raise LocaterError(why)
    if name in ("softmax", "learned_sink"):  # the sinks came with the call
        return call
    if (call.sinks if name == "softmax_plus_one" else call.softcap) is not None:
        raise LocaterError(f"{name} attention: its logits have another cap or sink besides, and two are not one")
    if name == "softmax_plus_one":
        return replace(call, sinks=call.query.new_zeros(call.query.shape[1]))
    return replace(call, softcap=cap)


def why_unmeasurable(name: str) -> str | None:
    """Why attention by the mechanism called `name` cannot be measured, in a line; None where it can.

    >>> why_unmeasurable("softcap"), why_unmeasurable("fastmax").partition(":")[0]
    (None, 'fastmax attention cannot be measured')
    """
    if name in ("softmax", "softcap", "softmax_plus_one", "learned_sink"):
        return None
    held = mechanism(name)
    given = ", ".join(["q", "k", *(f"{need}={need}" for need in held.needs or held.learned[:1])])
    kind, of_map = held.kind, f"locater.attention.mechanism({name!r}).map({given})"
    said = f"{name} attention cannot be measured"
    if kind in ("signed", "non-negative"):
        return f"{said}: rows of {kind} weights do not sum to 1 and have no entropy; their mass is {of_map}.sum(-1)"
    return f"{said}: its weights are no softmax of q.k, of which entropy and the rest are read; its map is {of_map}"


def _cut(query: Tensor, key: Tensor, kw: dict[str, Any]) -> Tensor | None:
    """Which sequences have left their first key behind, where a cache holds a window and is full; None where it is
    not.
    """
    queries, keys = query.shape[2], key.shape[2]
    window, positions = kw.get("sliding_window"), kw.get("position_ids")
    if window is None or queries == keys or keys < window - 1 + queries:
        return None
    if isinstance(positions, Tensor) and positions.ndim == 2:
        return (positions[:, -1] >= keys).expand(query.shape[0])
    return torch.ones(query.shape[0], dtype=torch.bool, device=query.device)


def _documents(query: Tensor, key: Tensor, kw: dict[str, Any]) -> Tensor | None:
    """Which document each token of a packed row belongs to: FlashAttention is told by lengths or positions, not by a
    mask.
    """
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


def _causal_alone(call: Call, module: nn.Module, name: str, kw: dict[str, Any]) -> Call:
    """No mask but the one that a causal layer implies."""
    causal = kw.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    queries, keys = call.query.shape[2], call.key.shape[2]
    if not causal or queries == 1:
        return replace(call, window=kw.get("sliding_window") if queries == keys else None)
    if keys > queries and "flash" not in name:
        # fused attention counts from the first key: what a cache holds beyond the queries is empty
        call = replace(call, key=call.key[:, :, :queries], bias=None if call.bias is None else call.bias[..., :queries])
    return replace(call, causal=True, window=kw.get("sliding_window"))


def _dense(mask: Any, query: Tensor, key: Tensor) -> Tensor:
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
