"""GPT-J: everything meets in `_attn`, after rotation and cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from locater.attention.call import Call
from locater.attention.listeners import listening
from locater.attention.stand_ins import Undo, argument, instead, tell
from locater.kernels import Terms


def tap(module: nn.Module) -> Iterator[Undo]:
    yield instead(module, "_attn", _attend)


def _attend(module: Any, attend: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    out = attend(*args, **kwargs)
    sites = listening(module)
    if sites:
        q, k, mask = (
            argument(args, kwargs, at, name) for at, name in ((0, "query"), (1, "key"), (3, "attention_mask"))
        )
        terms = Terms(1 / float(module.scale_attn))
        call = Call(q.detach(), k.detach(), terms, out[0].detach().transpose(1, 2))
        tell(sites, call if mask is None else call.masked(mask.detach()))
    return out
