"""XLNet: everything meets in `rel_attn_core`, time first. Terms of place and segment are computed again and become a
bias.

In two-stream attention the content stream is counted. The query stream asks from other places with the same keys, often
from a few of them only, and is left out. Every token sees itself in the content stream, padding too, so which tokens
are real is read from the mask of the query stream, which is passed along with or without that stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from locater.attention.call import Call
from locater.attention.listeners import listening
from locater.attention.stand_ins import Undo, argument, instead, tell
from locater.kernels import Terms


def tap(module: nn.Module) -> Iterator[Undo]:
    # the query stream's mask, from the start of a call until its first stream is seen
    under_way: dict[str, Tensor | None] = {}
    yield instead(module, "forward", partial(_whole, under_way))
    yield instead(module, "rel_attn_core", partial(_attend, under_way))


def _whole(
    under_way: dict[str, Tensor | None], module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if listening(module):
        under_way["mask"] = argument(args, kwargs, 3, "attn_mask_g")
    return forward(*args, **kwargs)


def _attend(
    under_way: dict[str, Tensor | None], module: Any, attend: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    out = attend(*args, **kwargs)
    sites = listening(module)
    if sites and "mask" in under_way:
        mask = under_way.pop("mask")
        with torch.no_grad():
            call = _described(module, args, kwargs, out[0] if isinstance(out, tuple) else out)
            if mask is not None:  # (T, S, B, 1)
                real = (mask == 0).any(0).any(-1).T
                call = call.with_terms(padding=real.expand(call.query.shape[0], -1))
            tell(sites, call)
    return out


def _described(module: Any, args: Any, kwargs: Any, out: Tensor) -> Call:
    names = ("q_head", "k_head_h", "v_head_h", "k_head_r", "seg_mat", "attn_mask")
    q, k, _, k_r, segments, mask = (argument(args, kwargs, at, name) for at, name in enumerate(names))
    place = torch.einsum("ibnd,jbnd->bnij", q + module.r_r_bias, k_r)
    bias = module.rel_shift_bnij(place, klen=k.shape[0])
    if segments is not None:
        of_query = torch.einsum("ibnd,snd->ibns", q + module.r_s_bias, module.seg_embed)
        bias = bias + torch.einsum("ijbs,ibns->bnij", segments, of_query)
    terms = Terms(
        float(module.scale),
        bias=bias * module.scale,
        mask=None if mask is None else mask.permute(2, 3, 0, 1) == 0,
    )
    query = (q + module.r_w_bias).permute(1, 2, 0, 3)
    return Call(query, k.detach().permute(1, 2, 0, 3), terms, out.detach().transpose(0, 1))
