"""Hearing attention that a module computes itself, beside the interface of transformers.

While a module runs, a `TorchFunctionMode` sees each function of PyTorch that it calls. Attention is a call of fused
attention, or a softmax over the last axis of numbers that come from a product of two activations and were only moved,
scaled, capped or masked since. Nothing that the model computes is changed, and nothing that fails here ends its run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from locater.calls.call import Call
from locater.calls.direct import from_fused, from_multi_head, from_softmax
from locater.calls.head_axes import HeadAxes, axes_by_count, axes_by_labels
from locater.calls.origins import Origins, Step, factors, flat, labels_of, right_of, signature
from locater.errors import LocaterError
from locater.torch_private import base_of_view, write_count

# The logits of softmaxes that modules compute themselves: products of two activations, and what was made of them.


LARGEST = frozenset({"amax", "max"})
SUBTRACTING = frozenset("sub __sub__ sub_ __isub__ subtract".split())
JOINING = frozenset({"cat", "concat", "concatenate"})
# calls after which a row that something was taken off is still that row, with other keys hidden
PASSING = frozenset(
    """masked_fill masked_fill_ where add add_ __add__ __radd__ __iadd__ to type type_as float double half bfloat16
    contiguous clone detach dropout""".split()
)
CHANGED = "what was taken off each row of its logits is not known any more"
IN_FRONT = "numbers that belong to no key stand in front of its logits"


@dataclass(frozen=True)
class Written:
    """What is known of logits."""

    keys: int | None = None  # logits of keys, where others stand behind them
    taken: Tensor | None = None  # (..., T, 1): what was taken off each row
    unclear: str | None = None  # why they cannot be told

    def logits(self, x: Tensor, *taken: Tensor) -> Tensor:
        """The model's own logits, of the input `x` of a softmax."""
        if self.unclear is not None:
            raise LocaterError(self.unclear)
        return x if not taken else x + taken[0]


PLAIN = Written()


class WrittenLogits:
    """The logits of a pass, as long as these tensors live."""

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()
        self._largest = WeakTensorKeyDictionary()  # largest numbers of rows of logits

    def of(self, x: Tensor) -> Written | None:
        """What is known of a tensor as logits; None where it is something else."""
        return self._known.get(x)

    def product(self, out: Tensor) -> None:
        """Remember a product of two activations."""
        self._known[out] = PLAIN

    def largest(self, x: Any, out: Any) -> None:
        """Remember the largest numbers of rows, if these are logits."""
        numbers = out if isinstance(out, Tensor) else out[0]
        if isinstance(x, Tensor) and x in self._known and numbers.shape == (*x.shape[:-1], 1):
            self._largest[numbers] = True

    def follow(self, name: str, tensors: list[Tensor], out: Tensor) -> Tensor | None:
        """Remember what the function called `name` made: logits in another place or form are logits. Returns them as
        they were before.
        """
        before = next((x for x in tensors if x.numel() <= out.numel() and x in self._known), None)
        if before is not None:
            self._known[out] = self._made(name, tensors, before, out)
        elif out.shape[-1] == 1 and any(x in self._largest for x in tensors):
            self._largest[out] = True
        return before

    def _made(self, name: str, tensors: list[Tensor], before: Tensor, out: Tensor) -> Written:
        known: Written = self._known[before]
        if name in SUBTRACTING and before is tensors[0] and tensors[-1] in self._largest:
            return known if known.taken is not None else replace(known, taken=tensors[-1].detach())
        if name in JOINING and out.shape[:-1] == before.shape[:-1] and not all(x in self._known for x in tensors):
            return replace(known, keys=before.shape[-1]) if before is tensors[0] else Written(unclear=IN_FRONT)
        if known is PLAIN or (name in PASSING and out.shape == before.shape):
            return known
        if known.taken is not None:
            return Written(unclear=CHANGED)
        return known if out.shape[-1] == before.shape[-1] else PLAIN


FUSED = functional.scaled_dot_product_attention
MULTI_HEAD = functional.multi_head_attention_forward
PRODUCTS = {
    *(torch.matmul, torch.bmm, torch.baddbmm, torch.einsum, functional.bilinear),
    *(Tensor.matmul, Tensor.bmm, Tensor.baddbmm, Tensor.__matmul__, Tensor.__rmatmul__),
}
SOFTMAXES = {torch.softmax, functional.softmax, Tensor.softmax, torch.special.softmax}
# what follows is not a logit of this product any more
ENDS = {functional.linear, functional.layer_norm, functional.conv1d, functional.conv2d, functional.embedding}


@dataclass(frozen=True)
class Caller:
    """What is known of the module that makes a call: its heads and tokens, and the axes of its calls so far."""

    heads: int | None = None  # as it says
    tokens: int | None = None  # that it was given
    known: dict[Any, HeadAxes | LocaterError] = field(default_factory=dict)  # or why they are not known

    def axes(self, step: Step | None, shape: torch.Size, fused: bool = False) -> HeadAxes:
        """The axes of heads of a call with rows (..., T), whose queries or logits were made by `step`."""
        key = (signature(step), shape if step is None else len(shape))
        if key not in self.known:
            try:
                self.known[key] = self._axes(step, shape, fused)
            except LocaterError as error:
                self.known[key] = error
        axes = self.known[key]
        if isinstance(axes, LocaterError):
            raise axes
        return axes

    def _axes(self, step: Step | None, shape: torch.Size, fused: bool) -> HeadAxes:
        labels = None if step is None else _labels(step, shape)
        if labels is not None:
            return axes_by_labels(labels)
        if fused and self.heads is None and len(shape) >= 3:  # (..., H, T, D) by definition
            return HeadAxes((len(shape) - 2,))
        return axes_by_count(shape, self.heads, self.tokens)


@dataclass(frozen=True)
class Heard:
    """A call that was heard: how to describe it, and the steps that made its queries (or logits) and its keys."""

    describe: Callable[[Caller], Call]
    query: Step | None = None
    key: Step | None = None


class DirectCalls(TorchFunctionMode):
    """Hands each attention call that it sees to `report(heard)`, and what went wrong to `fail(error)`."""

    def __init__(self, report: Callable[[Heard], None], fail: Callable[[Exception], None]) -> None:
        super().__init__()
        self.report, self.fail = report, fail
        self._logits = WrittenLogits()
        self._origins = Origins()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return out
        name = getattr(func, "__name__", "")
        if name == "__iter__":
            out = list(out)
        try:
            self._hear(name, func, args, kwargs, out)
        except Exception as error:
            self.fail(error)
        return iter(out) if name == "__iter__" else out

    def _hear(self, name: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        if func is MULTI_HEAD:
            self._multi_head(out[0], args, kwargs)
        elif func is FUSED:
            self._fused(out, args, kwargs)
        elif func in SOFTMAXES:
            self._softmax(out, *args, **kwargs)
        elif func in PRODUCTS and self._of_activations(args, kwargs):
            self._logits.product(out)
            self._origins.product(args, kwargs, out)
        else:
            self._origins.note(name, func, args, kwargs, out)
            if name in LARGEST:
                self._logits.largest(args[0] if args else kwargs.get("input"), out)
            if isinstance(out, Tensor) and func not in ENDS and func not in PRODUCTS:
                self._continue(name, out, args, kwargs)

    def _of_activations(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a product is of queries and keys: the left factor may be learned, the right one is no weight."""
        tensors = [x for x in flat((*args, *kwargs.values())) if isinstance(x, Tensor)]
        if len(tensors) < 2:
            return False
        both = factors(args, kwargs)
        if isinstance(both[1], nn.Parameter) or isinstance(base_of_view(both[1]), nn.Parameter):
            return False
        return all(x.ndim >= 3 for x in both) or all(self._origins.of(x) is not None for x in both)

    def _continue(self, name: str, out: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Logits in another place or form are logits."""
        if out.is_floating_point() and out.ndim >= 2:
            tensors = [x for x in flat((*args, *kwargs.values())) if isinstance(x, Tensor)]
            before = self._logits.follow(name, tensors, out)
            if before is not None and name in JOINING and self._origins.of(out) is None:
                self._origins.same_rows(before, out)

    def _softmax(self, out: Tensor, input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> None:
        written = self._logits.of(input)
        if written is not None and dim in (-1, input.ndim - 1):
            step, kept = self._origins.of(input), Kept(input, *(() if written.taken is None else (written.taken,)))

            def describe(caller: Caller) -> Call:
                logits, axes = written.logits(*kept.tensors), caller.axes(step, input.shape[:-1])
                return from_softmax(logits, axes, written.keys)

            self.report(Heard(describe, step, None if step is None else right_of(step)))

    def _fused(self, out: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = {**dict(zip(FUSED_ARGUMENTS, args, strict=False)), **kwargs}
        query, mask = given["query"], given.get("attn_mask")
        step = self._origins.of(query) if query.shape[:-1] == out.shape[:-1] else None
        kept, masks = Kept(out, query, given["key"]), Kept(*(() if mask is None else (mask,)))
        terms = {name: given[name] for name in ("is_causal", "scale", "enable_gqa") if name in given}

        def describe(caller: Caller) -> Call:
            axes = caller.axes(step, out.shape[:-1], fused=True)
            output, query, key = kept.tensors
            return from_fused(output, query, key, axes, attn_mask=next(iter(masks.tensors), None), **terms)

        self.report(Heard(describe, self._origins.of(query), self._origins.of(given["key"])))

    def _multi_head(self, out: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = MULTI_HEAD_SIGNATURE.bind(*args, **kwargs)
        given.apply_defaults()
        query, key = given.arguments["query"], given.arguments["key"]
        kept = Kept(out, query, key)
        weights = [given.arguments[name] for name in PROJECTIONS if given.arguments[name] is not None]
        self.report(
            Heard(
                lambda caller: _projected_again(given.arguments, *kept.tensors),
                self._origins.mapped(query, query, weights),
                self._origins.mapped(key, key, weights),
            )
        )

    def steps(self, call: Call) -> tuple[Step | None, Step | None]:
        """The steps that made the queries and keys of a call."""
        return self._origins.of(call.query), self._origins.of(call.key)


FUSED_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight")
MULTI_HEAD_SIGNATURE = inspect.signature(MULTI_HEAD)


def _projected_again(given: Mapping[str, Any], out: Tensor, query: Tensor, key: Tensor) -> Call:
    if any(given[name] is not None for name in ("bias_k", "bias_v", "static_k", "static_v")) or given["add_zero_attn"]:
        raise LocaterError("multi_head_attention_forward with keys of its own (bias_k, static_k, add_zero_attn)")
    width = query.shape[-1]
    parts = (slice(0, width), slice(width, 2 * width))
    bias = given["in_proj_bias"]
    weights = (
        (given["q_proj_weight"], given["k_proj_weight"])
        if given["use_separate_proj_weight"]
        else tuple(given["in_proj_weight"][part] for part in parts)
    )
    biases = (None, None) if bias is None else (bias[parts[0]], bias[parts[1]])
    masks = given["key_padding_mask"], given["attn_mask"]
    return from_multi_head(out.detach(), query, key, given["num_heads"], weights, biases, *masks)


class Kept:
    """Tensors that are read later, as they were: refused where the model has written to them meanwhile."""

    def __init__(self, *tensors: Tensor) -> None:
        # tensors of inference mode do not count how often they are written to
        self._tensors = [x.clone() if x.is_inference() else x for x in tensors]
        self._versions = [None if x.is_inference() else write_count(x) for x in self._tensors]

    @property
    def tensors(self) -> list[Tensor]:
        for x, version in zip(self._tensors, self._versions, strict=True):
            if version is not None and write_count(x) != version:
                raise LocaterError("its attention was overwritten in place before the module returned")
        return self._tensors


def _labels(step: Step, shape: torch.Size) -> Tensor | None:
    """Labels of rows of this shape; None where they cannot be told."""
    for thin in (True, False):
        try:
            labels = labels_of(step, thin)
        except Exception:  # a step may not fit labels: whole numbers, on the CPU, of one key
            continue
        if labels.shape[:-1] == shape:
            return labels
    return None
