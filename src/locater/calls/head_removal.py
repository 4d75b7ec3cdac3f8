"""Heads taken out of the attention calls of a module: what they would have given to the output map is replaced.

    zero      the output of the head is zero, as if its columns of the output map were zero
    mean      it is its mean over the tokens of the call
    uniform   its weights are even over the keys that each query sees
    window    it sees the last `window` keys and the first `sinks` of those that it saw (without causality: keys nearer
              than `window` on both sides)
    bits      its keys are rounded: each channel to 2^bits even steps between its smallest and its largest number over
              the keys of the sequence that any query sees

A module that passes the interface of transformers is intercepted there. What another module computes is intercepted
among the functions that it calls: fused attention, PyTorch's multi-head function, and a softmax written by hand with
the product behind it. No weights are touched or copied.

Axes: B sequences, T queries, S keys, H query heads, K key heads, V size of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from locater.calls import attention_interface
from locater.calls.attention_interface import always_uses_interface
from locater.calls.call_and_masks import Call
from locater.calls.function_listener import MULTI_HEAD_SIGNATURE, CallingModule, DirectCall, FunctionListener
from locater.calls.function_table import FUSED, MULTI_HEAD, PRODUCTS, fused_arguments, name_of
from locater.calls.head_axes import HeadAxes
from locater.calls.interceptors import (
    AttentionRequest,
    Interceptor,
    add_interceptor,
    remove_interceptor,
    renumber,
)
from locater.calls.patching import Undo, force_retrace, replace_method
from locater.calls.recognise import flat_arguments
from locater.calls.torch_calls import call_of_fused
from locater.errors import LocaterError
from locater.numerics import upcast

Mode = Literal["zero", "mean", "uniform", "window", "bits"]
MODES: tuple[str, ...] = get_args(Mode)
OF_OUTPUTS = ("zero", "mean")  # need the output of a head alone; the others need its weights
FUSED_ENCODERS = (nn.Transformer, nn.TransformerEncoder, nn.TransformerEncoderLayer)
LAST = 8  # among the interceptors of a module: after all that controls change
Outputs = Float[Tensor, "B T H V"]


@dataclass(frozen=True)
class Removal:
    """What stands in place of a head."""

    mode: str = "zero"
    window: int = 128
    sinks: int = 4
    bits: int = 4
    whole: int = 0  # with mode "bits": the first keys that are left as they are, and out of the range of the others

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise LocaterError(f"mode={self.mode!r}: must be one of {', '.join(MODES)}")
        if self.window < 1 or self.sinks < 0:
            raise LocaterError(f"window={self.window}, sinks={self.sinks}: give 1 key or more, and 0 sinks or more")
        if not 1 <= self.bits <= 16:
            raise LocaterError(f"bits={self.bits}: must be 1 to 16")

    def __str__(self) -> str:
        return {"window": f"window {self.window}, {self.sinks} sinks", "bits": f"{self.bits} bits"}.get(
            self.mode, self.mode
        )


@dataclass
class HeadRemoval:
    """The heads that are removed from the calls of one module.

    `heads` are removed in all rows of a call. Where several removals share a batch, `shared` has those of each of its
    equal parts. `turn`: which call of a pass it is, of a module that a pass calls `turns` times (ALBERT).
    """

    name: str
    count: int  # query heads of the module
    how: Removal
    heads: Mapping[int, Sequence[int]] = field(default_factory=dict)  # by turn
    shared: Mapping[int, Sequence[Sequence[int]]] = field(default_factory=dict)  # by turn, of each part of the batch
    turns: int = 1
    tokens: Tensor | None = None  # (B, T), True for those that a mean is of; None: all
    turn: int = 0
    which_turn: Callable[[], int] | None = None  # in place of counting them, where calls are left out
    calls: int = 0  # that were changed

    def parts(self) -> list[Sequence[int]]:
        """The heads to remove in the equal parts of the batch of this call; counts the call."""
        turn = self.turn if self.which_turn is None else self.which_turn()
        if self.turns > 1:
            self.turn = (turn + 1) % self.turns
        if turn in self.shared:
            return list(self.shared[turn])
        return [self.heads[turn]] if self.heads.get(turn) else []

    def change(
        self, outputs: Outputs, parts: Sequence[Sequence[int]], parts_of_call: Callable[[], tuple[Call, Tensor]]
    ) -> Outputs:
        """Outputs of all heads with those of the removed ones replaced."""
        if outputs.shape[2] != self.count:
            raise LocaterError(
                f"{self.name}: {outputs.shape[2]} query heads arrived, and {self.count} were expected: heads are "
                "removed from a whole model, in one process"
            )
        self._count_call()
        if self.how.mode == "zero":
            return outputs.masked_fill(self._mask(parts, outputs), 0.0)
        size, new = len(outputs) // len(parts), outputs.clone()
        call, value = (None, None) if self.how.mode in OF_OUTPUTS else parts_of_call()
        for at, heads in enumerate(parts):
            rows = slice(at * size, (at + 1) * size)
            for head in heads:
                if call is None or value is None:
                    new[rows, :, head] = self._mean(outputs[rows, :, head])
                else:
                    new[rows, :, head] = changed_head(call, value, rows, head, self.how).to(new.dtype)
        return new

    def _count_call(self) -> None:
        if not torch.compiler.is_dynamo_compiling():  # a graph would be compiled again at each count
            self.calls += 1

    def _mask(self, parts: Sequence[Sequence[int]], outputs: Outputs) -> Tensor:
        """(B, 1, H, 1): True for the heads that are removed from a sequence."""
        table = [[head in heads for head in range(self.count)] for heads in parts]
        mask = torch.tensor(table, device=outputs.device).repeat_interleave(len(outputs) // len(parts), 0)
        return mask[:, None, :, None]

    def _mean(self, z: Float[Tensor, "b T V"]) -> Float[Tensor, " V"]:
        if self.tokens is None or self.tokens.shape != z.shape[:2]:
            return upcast(z).mean((0, 1)).to(z.dtype)
        return upcast(z)[self.tokens.to(z.device)].mean(0).to(z.dtype)


def changed_head(
    call: Call, value: Float[Tensor, "B K S V"], rows: slice, head: int, how: Removal
) -> Float[Tensor, "b T V"]:
    """The output of one query head in some sequences of a call, with other weights."""
    if call.why_unmeasurable is not None:
        raise LocaterError(f"mode={how.mode!r} needs softmax attention: {call.why_unmeasurable}")
    (B, H, T, _), S = call.query.shape, call.key.shape[2]
    group = H // call.key.shape[1]
    own = slice(head, head + 1)
    terms = _of_sequences(call.terms.checked(B, H, T, S), rows, B)
    terms = terms.for_heads(torch.tensor([head], device=call.query.device))
    q = upcast(call.query[rows, own])
    k, v = (upcast(x[rows, head // group, None, :S]) for x in (call.key, value))
    seen = terms.visible(slice(0, T), T, S, q.device)
    logits = terms.logits(q, k, slice(0, T), T)
    seen = (seen & (logits > -torch.inf)).expand(logits.shape)
    if how.mode == "uniform":
        return (_even(seen).to(v) @ v)[:, 0]
    if how.mode == "bits":
        real = seen.any(-2)
        logits = terms.logits(q, rounded_keys(k, real & (real.cumsum(-1) > how.whole), how.bits), slice(0, T), T)
    if how.mode == "window":
        near = terms.distance(slice(0, T), T, S, q.device).abs() < how.window
        seen = within_window(seen, near, how.sinks)
    logits = logits.masked_fill(~seen, -torch.inf)
    if terms.sinks is not None:
        logits = torch.cat([logits, terms.sinks.to(logits).view(1, 1, 1, 1).expand(*logits.shape[:-1], 1)], -1)
    return (logits.softmax(-1)[..., :S].masked_fill(~seen, 0.0).to(v) @ v)[:, 0]


def _even(seen: Tensor) -> Tensor:
    return seen / seen.sum(-1, keepdim=True).clamp_min(1)


def within_window(seen: Tensor, near: Tensor, sinks: int) -> Tensor:
    """Keys that are near, or among the first that the query sees."""
    return seen & (near | (seen.cumsum(-1) <= sinks))


def rounded_keys(k: Float[Tensor, "b h S D"], real: Tensor, bits: int) -> Float[Tensor, "b h S D"]:
    """Keys whose channels are rounded to 2^bits even steps from the smallest to the largest of the `real` keys; the
    others stay as they are.

    >>> k, real = torch.tensor([0.0, 0.3, 0.8, 1.0]), torch.ones(1, 1, 4, dtype=torch.bool)
    >>> rounded_keys(k.view(1, 1, 4, 1), real, bits=1).flatten()
    tensor([0., 0., 1., 1.])
    """
    real = real[..., None]
    low = k.masked_fill(~real, torch.inf).amin(-2, keepdim=True)
    high = k.masked_fill(~real, -torch.inf).amax(-2, keepdim=True)
    step = (high - low) / (2**bits - 1)
    rounded = low + ((k - low) / step.where(step > 0, 1.0)).round().clamp(0, 2**bits - 1) * step
    return rounded.where(real, k)


def _of_sequences(terms: Any, rows: slice, B: int) -> Any:
    """Terms of some of the B sequences of a call."""
    shared = ("positions", "alibi", "sinks")
    tensors = {f.name: getattr(terms, f.name) for f in fields(terms) if f.name not in shared}
    cut = {name: x[rows] for name, x in tensors.items() if isinstance(x, Tensor) and x.ndim and len(x) == B and B > 1}
    return replace(terms, **cut)


# At the interface of transformers.


class InterceptedHeads(Interceptor):
    """Removes heads where a module calls its attention function."""

    order = LAST

    def __init__(self, removal: HeadRemoval, control: str | None = None) -> None:
        self.removal, self.control = removal, control

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A copy of the model has a copy of what a control removed."""
        return super().__reduce__() if self.control is None else (_rebuild, (self.removal, self.control))

    def __call__(self, request: AttentionRequest) -> AttentionRequest:
        parts = self.removal.parts()
        if not any(parts):
            return request
        return replace(request, attend=partial(_attend_without_heads, self.removal, parts, request))


def _rebuild(removal: HeadRemoval, control: str) -> InterceptedHeads:
    change = InterceptedHeads(removal, control)
    attention_interface.keep_installed(renumber(change))
    return change


def _attend_without_heads(
    removal: HeadRemoval,
    parts: Sequence[Sequence[int]],
    request: AttentionRequest,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    *args: Any,
    **kw: Any,
) -> Any:
    out = request.attend(module, query, key, value, mask, *args, **kw)
    return (removal.change(out[0], parts, lambda: (request.call(), value)), *out[1:])


# Among the functions that a module calls.


def run_without_heads(
    removal: HeadRemoval, module: nn.Module, forward: Callable[..., Any], *args: Any, **kw: Any
) -> Any:
    """Stands in for the forward of a module that computes its attention itself."""
    parts = removal.parts()
    if not any(parts):
        return forward(*args, **kw)
    before = removal.calls
    with FunctionInterceptor(removal, parts) as functions:
        out = forward(*args, **kw)
    if removal.calls != before + 1:
        if removal.calls == before:
            why = f" ({functions.error})" if functions.error is not None else ""
            raise LocaterError(f"{removal.name}: heads cannot be removed: its attention call was not found{why}")
        raise LocaterError(f"{removal.name}: heads cannot be removed: it attends {removal.calls - before} times a call")
    return out


class WithoutFastPath(TorchFunctionMode):
    """Changes nothing: PyTorch's encoder goes past its attention modules only where no function mode is active."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def run_without_fast_path(module: nn.Module, forward: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Stands in for the forward of an encoder of PyTorch around attention that has to be called."""
    with WithoutFastPath():
        return forward(*args, **kw)


def turn_fast_path_off(model: nn.Module, control: str | None = None) -> list[Undo]:
    """Let PyTorch's encoders call their attention modules, also where nothing needs a gradient."""
    encoders = [part for part in model.modules() if isinstance(part, FUSED_ENCODERS)]
    return [replace_method(part, "forward", run_without_fast_path, control) for part in encoders]


class FunctionInterceptor(FunctionListener):
    """Changes the attention call among the functions that run."""

    def __init__(self, removal: HeadRemoval, parts: Sequence[Sequence[int]]) -> None:
        super().__init__(self._note_call, self._note_error)
        self.removal, self.parts = removal, parts
        self.caller = CallingModule(removal.count)
        self.error: Exception | None = None
        self._found: DirectCall | None = None
        self._weights = WeakTensorKeyDictionary()  # weights of the attention call and what was made of them: their axes

    def _note_call(self, call: DirectCall) -> None:
        self._found = call

    def _note_error(self, error: Exception) -> None:
        self.error = error

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name, self._found = kwargs or {}, name_of(func), None
        if name == MULTI_HEAD:
            return self._change_multi_head(func, args, kwargs)
        out = super().__torch_function__(func, types, args, kwargs)
        found, self._found = self._found, None
        if found is None:
            return self._follow(name, out, args, kwargs) if isinstance(out, Tensor) and len(self._weights) else out
        if name == FUSED:
            return self._change_fused(found, out, fused_arguments(args, kwargs))
        axes = self.caller.axes(found.query, out.shape[:-1])
        if self.removal.how.mode not in OF_OUTPUTS:
            return self._change_weights(out, axes)
        self._weights[out] = axes
        return out

    def _change_fused(self, found: DirectCall, out: Tensor, given: Mapping[str, Any]) -> Tensor:
        step = found.query if given["query"].shape[:-1] == out.shape[:-1] else None
        axes = self.caller.axes(step, out.shape[:-1], fused=True)
        named = {name: given[name] for name in ("attn_mask", "is_causal", "scale", "enable_gqa") if name in given}

        def call() -> tuple[Call, Tensor]:
            value, lead = given["value"], out.shape[:-2]
            heads = value.shape[-3] if given.get("enable_gqa") else lead[-1]
            return call_of_fused(out, given["query"], given["key"], axes, **named), axes.rows(
                value.expand(*lead[:-1], heads, *value.shape[-2:])
            )

        new = self.removal.change(axes.rows(out).transpose(1, 2), self.parts, call)
        return _put_back(out, axes, new.transpose(1, 2))

    def _change_weights(self, weights: Tensor, axes: HeadAxes) -> Tensor:
        """Other weights in place of those of a softmax written by hand."""
        how, rows = self.removal.how, axes.rows(weights).clone()
        if how.mode == "bits":
            raise LocaterError(
                f"{self.removal.name}: it computes its own softmax, so its keys are not known: use another mode"
            )
        T, S = rows.shape[-2:]
        near = (torch.arange(S - T, S)[:, None] - torch.arange(S)).abs().to(rows.device) < how.window
        self.removal.calls += 1
        for at, heads in enumerate(self.parts):
            size = len(rows) // len(self.parts)
            for head in heads:
                own = rows[at * size : (at + 1) * size, head]
                seen = own > 0
                if how.mode == "window":
                    left = own * within_window(seen, near, how.sinks)
                    own.copy_(left * (own.sum(-1, keepdim=True) / left.sum(-1, keepdim=True).clamp_min(1e-30)))
                else:
                    own.copy_(_even(seen))
        return _put_back(weights, axes, rows)

    def _follow(self, name: str, out: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Weights in another form are weights; their product with values is the output of the heads."""
        given = [x for x in flat_arguments((*args, *kwargs.values())) if isinstance(x, Tensor)]
        weights = next((x for x in given if x in self._weights), None)
        if weights is None or out is weights:
            return out
        axes: HeadAxes = self._weights[weights]
        if name not in PRODUCTS:
            if out.shape[:-1] == weights.shape[:-1]:
                self._weights[out] = axes
            elif axes.is_usual and out.ndim == 3 and out.shape[1:] == weights.shape[2:]:  # (B * H, T, S)
                self._weights[out] = HeadAxes(split=(0, weights.shape[1], True))
            return out
        if name == "einsum":
            return self._change_einsum(out, weights, axes, args)
        if out.shape[:-1] != weights.shape[:-1]:
            raise LocaterError(
                f"{self.removal.name}: heads cannot be removed: its weights meet its values in another order"
            )
        new = self.removal.change(axes.rows(out).transpose(1, 2), self.parts, _refuse_call)
        return _put_back(out, axes, new.transpose(1, 2))

    def _change_einsum(self, out: Tensor, weights: Tensor, axes: HeadAxes, args: tuple[Any, ...]) -> Tensor:
        """The output with its axes in any order, named by the equation."""
        left, _, right = str(args[0]).replace(" ", "").partition("->")
        operands = [x for x in flat_arguments(args[1:]) if isinstance(x, Tensor)]
        labels = left.split(",")[next(at for at, x in enumerate(operands) if x is weights)]
        if not axes.is_usual or len(labels) != 4 or not set(labels[:3]) < set(right) or len(right) != 4:
            raise LocaterError(f"{self.removal.name}: heads cannot be removed: its values are mixed by {args[0]!r}")
        batch, head, query = labels[0], labels[1], labels[2]
        size = next(label for label in right if label not in labels)
        order = [right.index(label) for label in (batch, query, head, size)]
        new = self.removal.change(out.permute(order), self.parts, _refuse_call)
        return new.permute([order.index(at) for at in range(4)])

    def _change_multi_head(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """PyTorch's function with the identity as its output map; then the map."""
        bound = MULTI_HEAD_SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        weight, bias = given["out_proj_weight"], given["out_proj_bias"]
        given |= {"out_proj_weight": torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)}
        z, maps = func(**{**given, "out_proj_bias": None})
        batched = z if z.ndim == 3 else z[:, None]
        outputs = batched.unflatten(-1, (given["num_heads"], -1)).transpose(0, 1)
        new = self.removal.change(outputs, self.parts, _refuse_call).transpose(0, 1).flatten(2)
        return functional.linear(new.view_as(z), weight, bias), maps


def _refuse_call() -> tuple[Call, Tensor]:
    raise LocaterError("PyTorch's multi-head attention does not show the weights of its heads: use mode zero or mean")


def _put_back(x: Tensor, axes: HeadAxes, rows: Tensor) -> Tensor:
    """Rows (B, H, T, n) in the axes of x."""
    if axes.is_usual and x.ndim == 4:
        return rows
    places = axes.rows(torch.arange(x.numel(), device=x.device).view(x.shape)).flatten()
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format)
        .flatten()
        .index_put((places,), rows.flatten())
        .view(x.shape)
    )


# In a model.


def removals_of(
    layers: Sequence[tuple[str, int]], chosen: Mapping[int, Sequence[int]], how: Removal
) -> dict[str, HeadRemoval]:
    """The removal of each module, by its path, for `chosen` heads by number of layer. `layers` are the path and the
    query heads of each layer; layers that share a module take turns.

    >>> removals_of([("a", 4), ("b", 4), ("a", 4)], {2: [1]}, Removal())["a"].heads
    {1: [1]}
    """
    turns: dict[str, list[int]] = {}
    for number, (name, _) in enumerate(layers):
        turns.setdefault(name, []).append(number)
    removals = {}
    for name, numbers in turns.items():
        heads = {turn: list(chosen[number]) for turn, number in enumerate(numbers) if number in chosen}
        if heads:
            removals[name] = HeadRemoval(name, layers[numbers[0]][1], how, heads, turns=len(numbers))
    return removals


def remove_heads(
    model: nn.Module, removals: Iterable[tuple[nn.Module, HeadRemoval]], control: str | None = None
) -> list[Undo]:
    """Remove heads from the attention modules of `model`; returns what puts them back, the last first. Where a
    `control` is named, a copy of the model that is made meanwhile lacks them too.
    """
    attention_interface.install()
    changes: list[InterceptedHeads] = []
    undo: list[Undo] = [partial(attention_interface.remove, changes)]
    inside = False
    for module, removal in removals:
        if always_uses_interface(module):
            change = InterceptedHeads(removal, control)
            changes.append(change)
            add_interceptor(module, change)
            undo.append(partial(remove_interceptor, module, change))
            undo.append(replace_method(module, "forward", force_retrace))
        else:
            inside = True
            undo.append(replace_method(module, "forward", partial(run_without_heads, removal), control))
    return [*undo, *(turn_fast_path_off(model, control) if inside else ())]


@contextmanager
def heads_removed(model: nn.Module, removals: Iterable[tuple[nn.Module, HeadRemoval]]) -> Iterator[None]:
    """Remove heads inside of the block."""
    with ExitStack() as stack:
        for undo in remove_heads(model, removals):
            stack.callback(undo)
        yield
