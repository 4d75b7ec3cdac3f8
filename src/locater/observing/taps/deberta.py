"""DeBERTa-v2 and v3: content terms from queries and keys, terms of place as they come out of the module's own method.

They are kept rather than computed again: in training the table of places passes a dropout on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from locater.attention.call import Call
from locater.attention.listeners import listening
from locater.attention.stand_ins import Passage, Undo, along, instead
from locater.kernels import Terms


def tap(module: nn.Module) -> Iterator[Undo]:
    places: dict[str, Tensor] = {}
    yield from along(module, partial(_described, places), outputs=["query_proj", "key_proj"])
    yield instead(module, "disentangled_attention_bias", partial(_placed, places))


def _placed(places: dict[str, Tensor], module: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    found = method(*args, **kwargs)
    if isinstance(found, Tensor) and listening(module):  # the number 0 where no kind of term is configured
        places["bias"] = found.detach()
    return found


def _described(places: dict[str, Tensor], module: Any, passage: Passage) -> Call:
    heads = module.num_attention_heads
    q, k = (passage.tensors[name].unflatten(-1, (heads, -1)).transpose(1, 2) for name in ("query_proj", "key_proj"))
    parts = 1 + ("c2p" in module.pos_att_type) + ("p2c" in module.pos_att_type)
    bias = places.pop("bias", None)
    terms = Terms(
        (q.shape[-1] * parts) ** -0.5,
        bias=None if bias is None else bias.unflatten(0, (-1, heads)),
        mask=passage.argument(1, "attention_mask").bool(),
    )
    return Call(q, k, terms, passage.returned[0].detach().unflatten(-1, (heads, -1)))
