"""Which softmax attention a forward pass meets, and where: through transformers' interface, in PyTorch's fused call, or
written out as a softmax of a product.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

FUSED = {
    "scaled_dot_product_attention",
    "flex_attention",
    "multi_head_attention_forward",
    "_native_multi_head_attention",
}
PRODUCTS = {"matmul", "__matmul__", "bmm", "baddbmm", "einsum"}
# steps between the product of queries and keys and its softmax
STEPS = set(
    """view reshape contiguous transpose permute flatten unflatten squeeze unsqueeze __getitem__ to type float double
    expand clone type_as mul __mul__ __rmul__ __imul__ mul_ div __truediv__ __itruediv__ div_ add __add__ __radd__
    __iadd__ add_ sub __sub__ sub_ __isub__ __rsub__ masked_fill masked_fill_ where clamp clamp_min max maximum tanh
    nan_to_num cat pad dropout half bfloat16 __setitem__ as_strided chunk split transpose_ new_tensor""".split()
)
INTERFACE = ("eager_attention_forward", "sdpa_attention_forward", "flex_attention_forward", "flash_attention_forward")
DEPTH = 12  # frames between a call of PyTorch and the function of the interface that made it


class Met(TorchFunctionMode):
    """Counts attention calls of a pass: `interface`, `fused` beside it, `softmax` beside both."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self._logits: dict[int, Tensor] = {}  # kept alive, so that no other tensor gets the same id

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        inputs = list(_tensors((*args, *kwargs.values())))
        out = func(*args, **kwargs)
        if name in FUSED:
            self._count("fused")
        elif name == "softmax" and any(id(x) in self._logits for x in inputs):
            self._count("softmax")
        elif self._is_logits(name, inputs):
            result = inputs[0] if name == "__setitem__" else out
            for x in _tensors([result]):
                self._logits[id(x)] = x
        return out

    def _is_logits(self, name: str, inputs: list[Tensor]) -> bool:
        if name in PRODUCTS:
            return sum(id(x) not in self._parameters for x in inputs) > 1 and all(x.ndim > 2 for x in inputs[:2])
        return name in STEPS and any(id(x) in self._logits for x in inputs)

    def _count(self, kind: str) -> None:
        frame, depth = sys._getframe(2), 0
        while frame is not None and depth < DEPTH:
            if frame.f_code.co_name in INTERFACE:
                kind = "interface"
            frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]
        self.counts[kind] += 1


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (x for x in value if isinstance(x, Tensor))


def attention_met(model: nn.Module, inputs: Mapping[str, Tensor], part: str = "") -> dict[str, int]:
    """How many attention calls of each kind one pass makes, in the whole model or in a part of it."""
    import torch

    module, inside = model.get_submodule(part), Counter[str]()
    with torch.no_grad(), Met(model) as met:
        enter = module.register_forward_pre_hook(lambda *_: inside.subtract(met.counts))
        leave = module.register_forward_hook(lambda *_: inside.update(met.counts))
        try:
            model(**inputs)
        finally:
            enter.remove()
            leave.remove()
    return {kind: count for kind, count in inside.items() if count}
