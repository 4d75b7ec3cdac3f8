"""Which softmax attention a forward pass meets, and where: through transformers' interface, in PyTorch's fused call, or
written out as a softmax of a product.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import FrameType
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
Place = tuple[tuple[str, int], ...]
DEPTH = 12  # frames between a call of PyTorch and the function of the interface that made it


class Met(TorchFunctionMode):
    """Counts attention calls of a pass: `interface`, `fused` beside it, `softmax` beside both."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self._weights: dict[int, tuple[Tensor, Callable[[], None]]] = {}  # of maps that are not used so far
        self._logits: dict[int, Tensor] = {}  # kept alive, so that no other tensor gets the same id

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        inputs = list(_tensors((*args, *kwargs.values())))
        out = func(*args, **kwargs)
        if name in FUSED:
            self.count("fused", tuple(inputs[0].shape), _number_of_heads(name, args, kwargs), self.place())
        elif name == "softmax" and any(id(x) in self._logits for x in inputs):
            self._weights[id(out)] = (out, partial(self.count, "softmax", tuple(inputs[0].shape), None, self.place()))
        elif any(id(x) in self._weights for x in inputs):
            self._used(name, next(id(x) for x in inputs if id(x) in self._weights), out)
        elif self._is_logits(name, inputs):
            result = inputs[0] if name == "__setitem__" else out
            for x in _tensors([result]):
                self._logits[id(x)] = x
        return out

    def _is_logits(self, name: str, inputs: list[Tensor]) -> bool:
        if name in PRODUCTS:
            return sum(id(x) not in self._parameters for x in inputs) > 1 and all(x.ndim > 2 for x in inputs[:2])
        return name in STEPS and any(id(x) in self._logits for x in inputs)

    def _used(self, name: str, weights: int, out: Any) -> None:
        """Weights are counted when values meet them: Sam2 computes a map that it never uses."""
        value, count = self._weights[weights]
        if name not in STEPS:
            del self._weights[weights]
            self._logits[weights] = value  # stays alive
            count()
        elif isinstance(out, Tensor) and out is not value:
            self._weights[id(out)] = (out, self._weights.pop(weights)[1])
            self._logits[weights] = value

    def count(self, kind: str, shape: tuple[int, ...], heads: int | None, place: Place) -> None:
        """Count a call with queries or a map of this shape, and heads where the call says how many."""
        through = any(function in INTERFACE for function, _ in place)
        self.counts["interface" if through else kind] += 1

    def place(self) -> Place:
        """Where in the code of the running module the call is made: functions and lines, up to the module's own."""
        frame, place = sys._getframe(1), []
        while frame is not None and len(place) < DEPTH and not _is_start(frame):
            if frame.f_globals.get("__name__") != __name__:
                place.append((frame.f_code.co_name, frame.f_lineno))
            frame = frame.f_back  # type: ignore[assignment]
        return tuple(place)


def _is_start(frame: FrameType) -> bool:
    """Whether a module of the model's own starts to run here; `nn.Softmax` is a part of the one that uses it."""
    return frame.f_code.co_name == "_call_impl" and not isinstance(frame.f_locals.get("self"), nn.Softmax)


def _number_of_heads(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Heads that a call is told, where its queries do not show them."""
    at = {"multi_head_attention_forward": 4, "_native_multi_head_attention": 4}.get(name)
    if at is None:
        return None
    heads = args[at] if len(args) > at else kwargs.get("num_heads", kwargs.get("num_head"))
    return heads if isinstance(heads, int) else None


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
