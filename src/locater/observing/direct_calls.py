"""Hearing attention that a module computes itself, beside the interface of transformers.

While a module runs, a `TorchFunctionMode` sees each function of PyTorch that it calls. Attention is a call of fused
attention, or a softmax over the last axis of numbers that come from a product of two activations and were only moved,
scaled, capped or masked since. Nothing that the model computes is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from locater.attention.call import Call
from locater.attention.direct import from_fused, from_softmax
from locater.errors import LocaterError

FUSED = functional.scaled_dot_product_attention
PRODUCTS = {
    *(torch.matmul, torch.bmm, torch.baddbmm, torch.einsum, functional.bilinear),
    *(Tensor.matmul, Tensor.bmm, Tensor.baddbmm, Tensor.__matmul__, Tensor.__rmatmul__),
}
SOFTMAXES = {torch.softmax, functional.softmax, Tensor.softmax, torch.special.softmax}
# what follows is not a logit of this product any more
ENDS = {functional.linear, functional.layer_norm, functional.conv1d, functional.conv2d, functional.embedding}

Describe = Callable[[int | None], Call]  # number of heads, where the module tells it -> the call


class DirectCalls(TorchFunctionMode):
    """Hands each attention call that it sees to `report(describe)`."""

    def __init__(self, report: Callable[[Describe], None]) -> None:
        super().__init__()
        self.report = report
        self._logits = WeakTensorKeyDictionary()  # results of products of two activations, and what was made of them

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is functional.multi_head_attention_forward:
            self.report(_inside_one_function)
        if not isinstance(out, Tensor) or torch.compiler.is_compiling():
            return out
        if func is FUSED:
            self.report(lambda heads: from_fused(out, *args, **kwargs, heads=heads))
        elif func in SOFTMAXES:
            self._softmax(out, *args, **kwargs)
        elif func in PRODUCTS:
            if _of_activations(args):
                self._logits[out] = True
        elif func not in ENDS and out.is_floating_point() and out.ndim >= 3 and self._continues(out, args):
            self._logits[out] = True
        return out

    def _softmax(self, out: Tensor, x: Tensor, dim: int | None = None, *_: Any, **__: Any) -> None:
        if x in self._logits and dim in (-1, x.ndim - 1):
            self.report(lambda heads: from_softmax(out, x, heads))

    def _continues(self, out: Tensor, args: tuple[Any, ...]) -> bool:
        """Whether a result has the numbers of logits, in another place or form."""
        return any(isinstance(x, Tensor) and x.numel() <= out.numel() and x in self._logits for x in _flat(args))


def _inside_one_function(heads: int | None) -> Call:
    raise LocaterError("it calls torch.nn.functional.multi_head_attention_forward itself, whose queries are not seen")


def _of_activations(args: tuple[Any, ...]) -> bool:
    """Whether a product has two factors of three axes or more: maps of weights have two."""
    factors = [x for x in _flat(args) if isinstance(x, Tensor)][-2:]
    return len(factors) == 2 and all(x.ndim >= 3 for x in factors)


def _flat(args: tuple[Any, ...]) -> list[Any]:
    """Arguments, those in lists too: einsum and cat take either."""
    return [x for argument in args for x in (argument if isinstance(argument, list | tuple) else (argument,))]
