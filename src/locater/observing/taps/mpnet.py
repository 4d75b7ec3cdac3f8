"""MPNet: queries and keys where they are made, its bias and mask from the arguments of the call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from locater.attention.call import Call
from locater.attention.stand_ins import Passage, Undo, along
from locater.kernels import Terms


def tap(module: nn.Module) -> Iterator[Undo]:
    yield from along(module, _described, outputs=["q", "k"], inputs=["o"])


def _described(module: Any, passage: Passage) -> Call:
    q, k = (
        passage.tensors[name].unflatten(-1, (module.num_attention_heads, -1)).transpose(1, 2) for name in ("q", "k")
    )
    mask, bias = passage.argument(1, "attention_mask"), passage.argument(2, "position_bias")
    terms = Terms(module.attention_head_size**-0.5, bias=None if bias is None else bias.detach())
    call = Call(q, k, terms, passage.heads("o", module.num_attention_heads))
    return call if mask is None else call.masked(mask.detach())
