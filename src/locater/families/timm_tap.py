"""The tap of timm's attention: queries and keys are the output of `qkv`, after norms per head where it has them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from locater.calls.call import Call
from locater.calls.patching import Passage, Undo, along, name_of
from locater.errors import LocaterError
from locater.kernels import Terms

KNOWN = ("attn_mask", "is_causal")


def tap(module: nn.Module) -> Iterator[Undo]:
    norms = [name for name in ("q_norm", "k_norm") if isinstance(getattr(module, name, None), nn.Module)]
    names = list(inspect.signature(module.forward).parameters)
    yield from along(module, partial(_described, names), outputs=["qkv", *norms], inputs=["proj"])


def _described(names: Sequence[str], module: Any, passage: Passage) -> Call:
    fused = passage.tensors["qkv"].unflatten(-1, (3, module.num_heads, -1))  # (B, T, 3, H, D)
    q, k = (
        fused[:, :, part].transpose(1, 2)
        if name not in passage.tensors
        else _heads_first(module, passage.tensors[name], fused)
        for part, name in enumerate(("q_norm", "k_norm"))
    )
    call = Call(q, k, Terms(float(module.scale)), passage.heads("proj", module.num_heads))
    arguments = {**dict(zip(names, passage.args, strict=False)), **passage.kwargs}
    for name in names[1:]:
        if arguments.get(name) is not None and name not in KNOWN:
            raise LocaterError(
                f"{name_of(module)}: what its argument {name!r} does to attention is not known: pass attn_mask instead"
            )
    if arguments.get("is_causal"):
        call = call.with_terms(causal=True)
    return _masked(call, module, arguments.get("attn_mask"))


def _heads_first(module: nn.Module, normed: Tensor, fused: Tensor) -> Tensor:
    B, T, _, H, D = fused.shape
    if tuple(normed.shape) not in ((B, H, T, D), (B, T, H, D)):
        raise LocaterError(
            f"{name_of(module)}: its norms give {list(normed.shape)}, no heads: describe it with locater.register()"
        )
    return normed if normed.shape[1] == H else normed.transpose(1, 2)


def _masked(call: Call, module: Any, mask: Tensor | None) -> Call:
    if mask is None:
        return call
    if not mask.is_floating_point() and not getattr(module, "fused_attn", False):
        # the plain way adds its mask, so True and False would be 1 and 0
        raise LocaterError(
            f"{name_of(module)}: a boolean attn_mask hides nothing unless fused_attn is set: "
            "set it, or pass an additive mask"
        )
    while mask.ndim < 4:
        mask = mask[None]
    return call.masked(mask.detach())
