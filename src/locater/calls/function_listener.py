"""Listening to attention that a module computes itself, beside the interface of transformers.

While a module runs, a `TorchFunctionMode` sees each function of PyTorch that it calls. Attention is a call of fused
attention, or a softmax over the last axis of numbers that come from a product of two activations and were only moved,
scaled, capped or masked since. Nothing that the model computes is changed, and nothing that fails here ends its run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from locater.calls.call_and_masks import Call
from locater.calls.function_table import (
    FUSED,
    JOINS,
    MULTI_HEAD,
    MULTIPLIES,
    PRODUCTS,
    axis_of,
    fused_arguments,
    name_of,
)
from locater.calls.head_axes import (
    HeadAxes,
    TensorStep,
    TensorTrace,
    axes_by_count,
    axes_by_labels,
    key_step,
    labels_of,
    step_signature,
)
from locater.calls.recognise import (
    PLAIN,
    LogitsTracker,
    Product,
    broadcast_contraction,
    contraction,
    flat_arguments,
    in_order,
    is_of_queries_and_keys,
    part_name,
    softmax_axis,
)
from locater.calls.torch_calls import call_of_fused, call_of_multi_head, call_of_softmax
from locater.errors import LocaterError
from locater.torch_private import write_count


@dataclass(frozen=True)
class CallingModule:
    """What is known of the module that makes a call: its heads and tokens, and the axes of its calls so far."""

    heads: int | None = None  # as it says
    tokens: int | None = None  # that it was given
    known: dict[Any, HeadAxes | LocaterError] = field(default_factory=dict)  # or why they are not known

    def axes(self, step: TensorStep | None, shape: torch.Size, fused: bool = False) -> HeadAxes:
        """The axes of heads of a call with rows (..., T), whose queries or logits were made by `step`."""
        key = (step_signature(step), shape if step is None else len(shape))
        if key not in self.known:
            try:
                self.known[key] = self._axes(step, shape, fused)
            except LocaterError as error:
                self.known[key] = error
        axes = self.known[key]
        if isinstance(axes, LocaterError):
            raise axes
        return axes

    def _axes(self, step: TensorStep | None, shape: torch.Size, fused: bool) -> HeadAxes:
        labels = None if step is None else _labels(step, shape)
        if labels is not None:
            return axes_by_labels(labels)
        if fused and self.heads is None and len(shape) >= 3:  # (..., H, T, D) by definition
            return HeadAxes((len(shape) - 2,))
        return axes_by_count(shape, self.heads, self.tokens)


@dataclass(frozen=True)
class DirectCall:
    """A call that a module made itself: how to describe it, and the steps behind its queries (or logits) and keys."""

    describe: Callable[[CallingModule], Call]
    query: TensorStep | None = None
    key: TensorStep | None = None


class FunctionListener(TorchFunctionMode):
    """Hands each attention call among the functions that run to `report`, and what went wrong to `fail(error)`."""

    def __init__(self, report: Callable[[DirectCall], None], fail: Callable[[Exception], None]) -> None:
        super().__init__()
        self.report, self.fail = report, fail
        self._logits = LogitsTracker()
        self._trace = TensorTrace()
        self._outer = WeakTensorKeyDictionary()  # products of tensors that are repeated along axes of each other

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return out
        name = name_of(func)
        if name == "__iter__":
            out = list(out)
        try:
            self._dispatch(name, func, args, kwargs, out)
        except Exception as error:  # whatever it is, the model's own call went well and has to return
            self.fail(error)
        return iter(out) if name == "__iter__" else out

    def _dispatch(self, name: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        if name == MULTI_HEAD:
            self._on_multi_head(out[0], args, kwargs)
        elif name == FUSED:
            self._on_fused(out, args, kwargs)
        elif name == "softmax":
            self._on_softmax(out, args[0] if args else kwargs["input"], axis_of(args, kwargs))
        elif name == "softmin":
            self._on_softmin(out, args[0] if args else kwargs["input"], axis_of(args, kwargs))
        elif name == "__setitem__":
            self._logits.note_assignment(args[0], args[2])
        elif not self._note_product(name, args, kwargs, out):
            self._trace.record(name, func, args, kwargs, out)
            self._follow_logits(name, out, args, kwargs)

    def _note_product(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Tensor) -> bool:
        """Remember a product of queries and keys; False where it is another, or none."""
        if name == "sum":
            return self._note_broadcast_sum(out, args, kwargs)
        if name not in PRODUCTS:
            return False
        tensors = [x for x in flat_arguments((*args, *kwargs.values())) if isinstance(x, Tensor)][-2:]
        if len(tensors) < 2 or not isinstance(out, Tensor):
            return False
        if (written := contraction(name, args, kwargs)) is not None:
            return self._note_contraction(in_order(written), out)
        left, right = tensors[::-1] if name == "rmatmul" else tensors
        if not is_of_queries_and_keys(left, right, self._is_traced):
            return False
        self._logits.add_product(out)
        self._trace.record_product(left, right, out)
        return True

    def _note_contraction(self, written: Product, out: Tensor) -> bool:
        """The same of a product in the words of einsum."""
        left, right = written.factors
        for x, part in ((written.one, left), (written.two, right)):
            if part is not x:
                self._trace.record("reshape", Tensor.reshape, (x, part.shape), {}, part)
        if not is_of_queries_and_keys(left, right, self._is_traced):
            return False
        self._logits.add_product(out)
        self._trace.record_product(left, right, out, written.equation)
        return True

    def _is_traced(self, x: Tensor) -> bool:
        return self._trace.of(x) is not None

    def _note_broadcast_sum(self, total: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Remember a product of queries and keys that is a sum of broadcast products; False where it is none."""
        input, axis = args[0] if args else kwargs["input"], axis_of(args, kwargs)
        factors = self._outer.get(input)
        axis = axis[0] if isinstance(axis, list | tuple) and len(axis) == 1 else axis
        if factors is None or not isinstance(axis, int):
            return False
        written = broadcast_contraction(factors[0], factors[1], axis)
        return written is not None and total.ndim < input.ndim and self._note_contraction(in_order(written), total)

    def _follow_logits(self, name: str, out: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Logits in another place or form are logits."""
        parts = out if isinstance(out, list | tuple) else (out,)
        numbers = [x for x in parts if isinstance(x, Tensor) and x.is_floating_point()]
        if not numbers:
            return
        tensors = [x for x in flat_arguments((*args, *kwargs.values())) if isinstance(x, Tensor)]
        if name in MULTIPLIES and len(tensors) == 2 and all(x.shape != numbers[0].shape for x in tensors):
            self._outer[numbers[0]] = tuple(tensors)
        if name == "log_softmax" and softmax_axis(args, kwargs, numbers[0].ndim) == numbers[0].ndim - 1:
            self._logits.note_log_softmax(tensors[0], numbers[0])
            return
        logits = self._logits.softmax_written_out(name, tensors, numbers[0])
        if logits is not None:
            self._on_softmax(numbers[0], logits, -1)
            return
        part = part_name(name, args, kwargs, tensors[0].ndim) if tensors else name
        for x in numbers:
            before = self._logits.follow(name, tensors, x, part)
            if before is not None and name in JOINS and self._trace.of(x) is None:
                self._trace.record_same_rows(before, x)

    def _on_softmax(self, weights: Tensor, input: Tensor, dim: int | None) -> None:
        known, axis = self._logits.of(input), softmax_axis((input, dim), {}, input.ndim)
        if known is None or axis is None:
            return
        if axis != input.ndim - 1:
            moved = input.movedim(axis, -1)
            self._trace.record("movedim", torch.movedim, (input, axis, -1), {}, moved)
            if known is PLAIN and not self._rows_are_queries(moved):
                return
            input, known = moved, self._logits.after_move(known)
        step, saved = self._trace.of(input), SavedTensors(input, *(() if known.taken is None else (known.taken,)))

        def describe(caller: CallingModule) -> Call:
            logits, axes = known.as_before(*saved.tensors), caller.axes(step, input.shape[:-1])
            return call_of_softmax(logits, axes, known.keys)

        self.report(DirectCall(describe, step, None if step is None else key_step(step)))

    def _on_softmin(self, weights: Tensor, input: Tensor, dim: int | None) -> None:
        logits = -input
        self._trace.record("neg", torch.neg, (input,), {}, logits)
        self._logits.follow("neg", [input], logits)
        self._on_softmax(weights, logits, dim)

    def _rows_are_queries(self, logits: Tensor) -> bool:
        """Whether the last axis of logits is that of keys: along it, the token that a row comes from stays."""
        step = self._trace.of(logits)
        labels = None if step is None else _labels(step, logits.shape[:-1], (False,))
        return labels is not None and bool((labels == labels[..., :1]).all())

    def _on_fused(self, out: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = fused_arguments(args, kwargs)
        query, mask = given["query"], given.get("attn_mask")
        step = self._trace.of(query) if query.shape[:-1] == out.shape[:-1] else None
        saved, masks = SavedTensors(out, query, given["key"]), SavedTensors(*(() if mask is None else (mask,)))
        terms = {name: given[name] for name in ("is_causal", "scale", "enable_gqa") if name in given}

        def describe(caller: CallingModule) -> Call:
            axes = caller.axes(step, out.shape[:-1], fused=True)
            output, query, key = saved.tensors
            return call_of_fused(output, query, key, axes, attn_mask=next(iter(masks.tensors), None), **terms)

        self.report(DirectCall(describe, self._trace.of(query), self._trace.of(given["key"])))

    def _on_multi_head(self, out: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = MULTI_HEAD_SIGNATURE.bind(*args, **kwargs)
        given.apply_defaults()
        query, key = given.arguments["query"], given.arguments["key"]
        saved = SavedTensors(out, query, key)
        weights = [given.arguments[name] for name in PROJECTIONS if given.arguments[name] is not None]
        self.report(
            DirectCall(
                lambda caller: _projected_again(given.arguments, *saved.tensors),
                self._trace.map_step(query, query, weights),
                self._trace.map_step(key, key, weights),
            )
        )

    def steps(self, call: Call) -> tuple[TensorStep | None, TensorStep | None]:
        """The steps that made the queries and keys of a call."""
        return self._trace.of(call.query), self._trace.of(call.key)


PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight")
MULTI_HEAD_SIGNATURE = inspect.signature(functional.multi_head_attention_forward)


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
    return call_of_multi_head(out.detach(), query, key, given["num_heads"], weights, biases, *masks)


class SavedTensors:
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


def _labels(step: TensorStep, shape: torch.Size, ways: tuple[bool, ...] = (True, False)) -> Tensor | None:
    """Labels of rows of this shape; None where they cannot be told."""
    for thin in ways:
        try:
            labels = labels_of(step, thin)
        except Exception:  # a step may not fit labels: whole numbers, on the CPU, of one key
            continue
        if labels.shape[:-1] == shape:
            return labels
    return None
