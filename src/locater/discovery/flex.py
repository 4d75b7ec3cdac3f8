"""Direct calls of FlexAttention while a model runs on tape: it compiles itself, which no tape records."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from locater.calls.direct import at_each_place
from locater.errors import LocaterError

HOME = "torch.nn.attention.flex_attention"


@contextlib.contextmanager
def flex_attention_written_out() -> Iterator[None]:
    """Inside, calls of FlexAttention are fused attention with their block mask written out: the same numbers. Block
    masks are made unrecorded.

    What transformers calls stays: its models are read under another attention function.
    """
    home: Any = sys.modules.get(HOME)
    replaced: list[tuple[Any, str, Any, Any]] = []
    if home is not None:
        ours = {"flex_attention": _written_out, "create_block_mask": partial(_unrecorded, home.create_block_mask)}
        modules: list[tuple[str, Any]] = [
            (n, m) for n, m in list(sys.modules.items()) if not n.startswith("transformers.")
        ]
        replaced = [
            (module, name, getattr(home, name), mine)
            for _, module in modules
            for name, mine in ours.items()
            if getattr(module, "__dict__", {}).get(name) is getattr(home, name)
        ]
    for module, name, _, mine in replaced:
        setattr(module, name, mine)
    try:
        yield
    finally:
        for module, name, original, mine in replaced:
            if getattr(module, name) is mine:
                setattr(module, name, original)


def _unrecorded(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What a mask is made of is no part of what the model computes."""
    with torch._C.DisableTorchFunction():
        return function(*args, **kwargs)


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Tensor:
    if score_mod is not None:
        raise LocaterError(
            "it calls FlexAttention with a score_mod, a function of single logits, which is not read from a pass"
        )
    if return_lse or return_aux is not None:
        raise LocaterError("it asks FlexAttention for the log-sum-exp of its rows, which is not read from a pass")
    mask = None
    if block_mask is not None:
        B, H, T, S = *query.shape[:3], key.shape[2]
        mask = _unrecorded(at_each_place, block_mask.mask_mod, B, H, T, S, query.device)
    return scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)
