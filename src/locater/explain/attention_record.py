"""One run of a model, recorded call by call: queries, keys and terms of each attention call, its values and its output.

The model runs under its own attention backend. The gradient of a target with respect to an attention map A needs no map
in the graph: attention is O = A V, so dA = dO V^T, from the gradient of its output O and its values V.

Axes: B sequences, T queries, S keys, H query heads, K key heads, V size of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.calls.call import Call
from locater.calls.changes import AttentionChange, AttentionRequest, put, take
from locater.calls.listeners import Switch
from locater.calls.patching import instead
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.families.registry import family_of
from locater.families.taps import is_tapped
from locater.layers import AttentionLayer
from locater.numerics import upcast
from locater.observing.inputs import Read, as_keywords, attention_input, run_checked
from locater.observing.listen import heard
from locater.observing.map_of_heads import attention_maps, without_autocast
from locater.observing.stream import time_first
from locater.sources.weights import ModuleWeights
from locater.torch_private import unwrap_compiled

# Values of attention that announces none: computed again from the input of its module, and checked by its output.


class Values(NamedTuple):
    """Values, and how the gradient of what the module returned becomes that of attention's output O = A V."""

    value: Float[Tensor, "B K S V"]
    to_heads: Callable[[Tensor], Float[Tensor, "B T H V"]]


@torch.no_grad()
def values_behind(layer: AttentionLayer, call: Call, module: nn.Module, read: Read, y: Tensor) -> Values | None:
    """Values of the stream that keys read. None unless O = A V, or O behind the output map, is what the module
    returned: a module that norms its input, adds a skip or has another layout is not guessed at.
    """
    tokens_first = time_first(module)
    if layer.value is None or not isinstance(y, Tensor) or y.ndim != 3:
        return None
    source = upcast(read.x if read.memory is None else read.memory)
    if source.shape[1] != call.key.shape[2] or source.shape[-1] != layer.value.shape[1]:
        return None
    value = layer.value(source).unflatten(-1, (layer.kv_heads, -1)).transpose(1, 2)
    mixed = (attention_maps(call) @ value.repeat_interleave(layer.group, 1)).transpose(1, 2).flatten(2)  # (B, T, H V)
    returned = upcast((y.transpose(0, 1) if tokens_first else y).detach())
    if _equal(mixed, returned, y.dtype):
        return Values(value, partial(_heads, layer.heads, None, tokens_first))
    for W_O, bias in _output_maps(layer, module):
        b = None if bias is None else bias.to(mixed)
        if _equal(nn.functional.linear(mixed, W_O.to(mixed), b), returned, y.dtype):
            return Values(value, partial(_heads, layer.heads, W_O, tokens_first))
    return None


def _output_maps(layer: AttentionLayer, module: nn.Module) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Maps (d, H V) that may be the last one of the module. A layer's record has layer scale in it, which is applied
    outside.
    """
    width = 0 if layer.value is None else layer.group * layer.value.shape[0]
    for part in module.children():
        if isinstance(part, nn.Linear) and part.in_features == width:
            yield part.weight.detach(), None if part.bias is None else part.bias.detach()
    if layer.out is not None:
        yield layer.out.weight().detach(), None if layer.out.bias is None else layer.out.bias.detach()


def _heads(heads: int, W_O: Tensor | None, tokens_first: bool, slope: Tensor) -> Tensor:
    slope = upcast(slope.transpose(0, 1) if tokens_first else slope)
    return (slope if W_O is None else slope @ W_O.to(slope)).unflatten(-1, (heads, -1))


def _equal(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    """Within the precision of the model, or of float32 where models compute their softmax in it."""
    if ours.shape != theirs.shape:
        return False
    most = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) ** 0.5 * float(theirs.abs().max())
    return bool((ours - theirs).abs().max() <= most)


AT_ONCE = 1 << 26  # numbers of the maps that are built at a time


@dataclass(frozen=True, eq=False)
class AttentionEvent:
    """One attention call of a run. `value` and `output` are None where they were not seen."""

    layer: AttentionLayer
    call: Call
    value: Float[Tensor, "B K S V"] | None
    output: Tensor | None  # in the graph: (B, T, H, V), or what `to_heads` takes the gradient of
    to_heads: Callable[[Tensor], Float[Tensor, "B T H V"]] | None = None  # gradient of `output` -> dO

    def mean_map(self, row: int = 0) -> Float[Tensor, "T S"]:
        """The mean over heads of one sequence's maps."""
        return self._summed(lambda maps, heads: maps, row) / self.layer.heads

    def relevance(self, gradient: Tensor | None, row: int = 0) -> Float[Tensor, "T S"]:
        """mean over heads of max(dA * A, 0), with dA = dO V^T; `gradient` is dO, None for zero."""
        if gradient is None:
            return upcast(self.call.query).new_zeros(self.call.query.shape[2], self.call.key.shape[2])
        assert self.value is not None
        values, slope = upcast(self.value[row]), upcast(gradient[row]).transpose(0, 1)  # (K, S, V), (H, T, V)
        group = slope.shape[0] // values.shape[0]

        def weighted(maps: Tensor, heads: Tensor) -> Tensor:
            return (slope[heads] @ values[heads // group].mT * maps).clamp_min(0)

        return self._summed(weighted, row) / self.layer.heads

    def _summed(self, of: Callable[[Tensor, Tensor], Tensor], row: int) -> Tensor:
        """The sum over heads of a function of their maps (h, T, S), some heads at a time."""
        query = self.call.query
        (B, H, T, _), S = query.shape, self.call.key.shape[2]
        many = max(1, AT_ONCE // (B * T * S))
        parts = torch.arange(H, device=query.device).split(many)
        with torch.no_grad(), without_autocast(query.device):
            return torch.stack([of(attention_maps(self.call, heads)[row], heads).sum(0) for heads in parts]).sum(0)


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """What a model returned, and its attention calls in the order of the forward pass."""

    name: str
    output: Any
    events: Sequence[AttentionEvent]

    def check_values(self, method: str) -> None:
        """Refuse attention whose values were not seen, in one line."""
        for event in self.events:
            if event.value is None:
                raise LocaterError(
                    f"{event.layer.name}: {method} needs the values of attention, and those of this module are not "
                    "known: use rollout, raw_attention or gradient_input"
                )


def recorded_attention(model: nn.Module, inputs: Mapping[str, Any] | Tensor, gradients: bool = False) -> RecordedRun:
    """Run `model` once. With `gradients`, its output and the outputs of its attention are in one graph."""
    model = unwrap_compiled(model)
    keywords = as_keywords(model, inputs)
    with recorded(model, gradients) as events:
        output = run_checked(model, keywords, gradients)
    if not events:
        raise LocaterError(
            f"{type(model).__name__}: no attention call was observed: "
            "load it with attn_implementation='sdpa' or 'eager'"
        )
    return RecordedRun(type(model).__name__, output, events)


@contextmanager
def recorded(model: nn.Module, gradients: bool) -> Iterator[list[AttentionEvent]]:
    """Record every attention call inside the `with` block. Parameters need no gradient meanwhile."""
    weights, events = ModuleWeights(model), list[AttentionEvent]()
    sites: dict[int, _EventSite] = {}
    for layer in attention_layers(model):
        module = weights.submodule(layer.name)
        if id(module) not in sites:  # one module may be several layers
            sites[id(module)] = _EventSite(layer.name, module, Switch(), layer, events, gradients)
    with ExitStack() as stack:
        family = family_of(model)
        tapped = {key for key, site in sites.items() if is_tapped(site.module, family)}
        if gradients and not tapped:  # PyTorch's encoder goes past its attention where nothing needs a gradient
            stack.enter_context(frozen(model))
        stack.enter_context(heard(model, list(sites.values())))
        for key, site in sites.items():
            if key in tapped:
                stack.callback(instead(site.module, "forward", site.around))
                continue
            put(site.module, site.keeper)
            stack.callback(take, site.module, site.keeper)
        yield events


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter needs a gradient, then as before: activations that only weights would need are not stored."""
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        for p in trained:
            p.requires_grad_(False)
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


class _Keeper(AttentionChange):
    """Keeps the values and the output of a call, until the call is announced. After all other changes."""

    order = 1000

    def __init__(self, gradients: bool) -> None:
        self.gradients = gradients
        self.kept: tuple[Tensor | None, Tensor | None] = (None, None)

    def __call__(self, request: AttentionRequest) -> AttentionRequest:
        return replace(request, attend=partial(self._attend, request.attend))

    def _attend(
        self, attend: Callable[..., Any], module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kw: Any
    ) -> Any:
        out = attend(module, q, k, v, *args, **kw)
        if self.gradients and not out[0].requires_grad:
            out[0].requires_grad_(True)  # nothing before it needs a gradient
        self.kept = (v.detach(), out[0])
        return out


@dataclass(eq=False)
class _EventSite:
    """A listener that adds each call of its module to the events of the run."""

    name: str
    module: nn.Module
    switch: Switch
    layer: AttentionLayer
    events: list[AttentionEvent]
    gradients: bool
    keeper: _Keeper = field(init=False)

    def __post_init__(self) -> None:
        self.keeper = _Keeper(self.gradients)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Nothing, in a copy of a model or in a saved one."""
        return type(None), ()

    def around(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        """In the place of the forward of a module that does not pass the interface: its values, from its input."""
        before = len(self.events)
        out = forward(*args, **kw)
        read = attention_input(module, args, kw)
        if len(self.events) == before + 1 and read is not None:
            event, y = self.events[-1], out[0] if isinstance(out, tuple) else out
            values = values_behind(event.layer, event.call, module, read, y)
            if values is not None:
                if self.gradients and not y.requires_grad:
                    y.requires_grad_(True)
                output = y if self.gradients else None
                self.events[-1] = AttentionEvent(event.layer, event.call, values.value, output, values.to_heads)
        return out

    def see(self, call: Call) -> None:
        value, output = self.keeper.kept
        self.keeper.kept = (None, None)
        if value is not None:  # keys beyond those of the call are empty places of a cache
            value = value[:, :, : call.key.shape[2]]
        self.events.append(AttentionEvent(self.layer, call, value, output if self.gradients else None))
