"""The tap of `nn.MultiheadAttention`, alone or inside PyTorch's own encoders and decoders.

Queries and keys are projected again from the inputs, which costs two of the layer's four maps. No hook is used: a hook
anywhere in nn.TransformerEncoderLayer turns off its fast path, and on padded batches that changes output. The fast path
goes past the attention module to one function, which is replaced while anything listens. It takes a mask of numbers for
a boolean one: whatever is not 0 is hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from locater.calls.call import Call
from locater.calls.listeners import listening
from locater.calls.patching import Undo, argument, instead, tell
from locater.kernels import Terms

FAST = "_transformer_encoder_layer_fwd"
_tapped: list[nn.MultiheadAttention] = []
_plain: list[Callable[..., Tensor]] = []  # the function that is replaced, while it is


def tap(module: nn.Module) -> Iterator[Undo]:
    assert isinstance(module, nn.MultiheadAttention)
    yield instead(module, "forward", _attend)
    if not _tapped:
        _plain.append(getattr(torch, FAST))
        setattr(torch, FAST, _encode)
    _tapped.append(module)

    def undo() -> None:
        _tapped[:] = [m for m in _tapped if m is not module]
        if not _tapped:
            setattr(torch, FAST, _plain.pop())

    yield undo


def _attend(module: nn.MultiheadAttention, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    out = forward(*args, **kwargs)
    sites = listening(module)
    if sites:
        query, key, _, hidden, _, mask = (argument(args, kwargs, at, name) for at, name in enumerate(ARGUMENTS))
        with torch.no_grad():
            q, k, padding = _batched(module, query, key)
            output, _, _ = _batched(module, out[0].detach(), out[0])
            tell(sites, replace(_masked(_met(module, q, k, padding), mask, hidden), output=output))
    return out


ARGUMENTS = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")


def _encode(*args: Any) -> Tensor:
    """A whole encoder layer in one function: the attention in it is known by its weight. What it returns is not
    attention's alone.
    """
    out = _plain[0](*args)
    for module in _tapped:
        if module.in_proj_weight is args[3]:
            sites = listening(module)
            if sites:
                with torch.no_grad():
                    tell(sites, _in_layer(module, *args))
    return out


def _in_layer(module: nn.MultiheadAttention, src: Tensor, *args: Any) -> Call:
    norm_first, eps, weight, bias = args[7:11]
    mask, mask_type = args[-2:]
    x, _, padding = _batched(module, src, src)
    if norm_first:
        x = functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    call = _met(module, x, x, padding)
    if mask is None:
        return call
    return call.with_terms(padding=mask == 0) if mask_type == 1 else call.with_terms(mask=mask == 0)


def _batched(module: nn.MultiheadAttention, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs as (B, T, E), and which keys are real where the input is a nested tensor."""
    if query.is_nested:  # query and key are one, or PyTorch refuses
        lengths = torch.tensor([part.shape[0] for part in query.unbind()], device=query.device)
        whole = torch.nested.to_padded_tensor(query, 0.0)
        return whole, whole, torch.arange(whole.shape[1], device=query.device) < lengths[:, None]
    if query.ndim == 2:
        return query[None], key[None], None
    return (query, key, None) if module.batch_first else (query.transpose(0, 1), key.transpose(0, 1), None)


def _met(module: nn.MultiheadAttention, query: Tensor, key: Tensor, padding: Tensor | None) -> Call:
    q, k = _projected(module, query, 0), _projected(module, key, 1)
    return Call(q, k, Terms(q.shape[-1] ** -0.5, padding=padding))


def _projected(module: nn.MultiheadAttention, x: Tensor, part: int) -> Tensor:
    rows = slice(part * module.embed_dim, (part + 1) * module.embed_dim)
    weight = (
        module.in_proj_weight[rows]
        if module._qkv_same_embed_dim
        else (module.q_proj_weight, module.k_proj_weight)[part]
    )
    bias = None if module.in_proj_bias is None else module.in_proj_bias[rows]
    return functional.linear(x, weight, bias).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)


def _masked(call: Call, mask: Tensor | None, hidden: Tensor | None) -> Call:
    """With masks as PyTorch takes them: True hides, numbers are added. `is_causal` is a hint about `mask` and adds
    nothing.
    """
    B, H, T, _ = call.query.shape
    added = []
    if mask is not None:
        mask = mask[None, None] if mask.ndim == 2 else mask.view(B, H, T, -1)
        if mask.dtype == torch.bool:
            call = call.with_terms(mask=~mask)
        else:
            added.append(mask.detach())
    if hidden is not None:
        hidden = hidden[None] if hidden.ndim == 1 else hidden
        if hidden.dtype == torch.bool:
            call = call.with_terms(padding=~hidden)
        else:
            added.append(hidden.detach()[:, None, None])
    return call.masked(sum(added[1:], added[0])) if added else call
