"""`discover`: the attention layers of a model without a record, found in a forward pass and verified in another.

A copy of the model runs twice in float64, each time with all its parameters redrawn. From the first pass follows a
layout (`layout_of_call`): names of tensors, rows, norms, frequencies. On the second pass the layers of that layout
must give the logits and the output that the copy computed, every number within 1e-6 of their standard deviation. What
does not is refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from locater.brief import brief
from locater.calls.attention_like import attention_like, folded_paths, unread
from locater.calls.recognise import NO_SOFTMAX
from locater.discovery.attention_site import AttentionSite, call_logits, site_of, trace_projection
from locater.discovery.example_inputs import CONTENT, check_example, left_out
from locater.discovery.layout_json import nearly_equal, tensor_names
from locater.discovery.layout_of_call import read_layout
from locater.discovery.logits import centred_logits
from locater.discovery.masks import VisibleKeys, read_mask, visible_keys
from locater.discovery.norm_and_rotary_fit import relative_difference, unwrapped_path
from locater.discovery.output_map import output_map_of
from locater.discovery.redrawn_copy import NoInputsError, RedrawnCopy, TapedPass, preserve_process_state
from locater.discovery.search_cache import SearchCache, example_signature, facts_of
from locater.discovery.taped_calls import TapedCall, mixed_values
from locater.discovery.windows import window_settings, with_windows
from locater.errors import LocaterError, UnreadableError, first_line
from locater.layers.layer import AttentionLayer
from locater.layers.layout import AlibiLayout, AttentionLayout, LogitsLayout
from locater.sources.weights import ModuleWeights, Weights

# A layout against a forward pass with other parameters: the layer that it gives must compute what the model
# computed.


TOLERANCE = 1e-6  # of the standard deviation of what the model computed


def verify_layout(layout: AttentionLayout, run: TapedPass, call: TapedCall) -> AttentionLayout:
    """`layout` as far as it holds on another pass; refused where not even its queries and keys do."""
    site = site_of(run.tape, call)
    weights = ModuleWeights(run.model)
    difference = _products_apart(layout, weights, site)
    if not difference < TOLERANCE:
        raise UnreadableError(f"its queries and keys differ by {difference:.0e} of their spread with other weights")
    if layout.unknown_scale is not None:
        return _maps_only(layout, layout.unknown_scale)
    _, logits, constant = call_logits(site)
    view = visible_keys(constant)
    layout = _with_mask_of(layout, constant)
    layer = layout.build(weights)
    if layout.unknown_logits is None:
        difference = _logits_apart(layout, layer, site, logits, view.seen)
        if not difference < TOLERANCE:
            why = f"its logits differ by {difference:.0e} of their spread with other weights"
            layout = replace(layout, unknown_logits=why)
    if layout.unknown_logits is not None:
        layout = _without_output(layout, layout.unknown_logits)
        difference = _scale_apart(layout, site, logits - constant, view.seen)
        if not difference < TOLERANCE:
            return _maps_only(layout, f"its scale differs by {difference:.0e} with other weights")
        return layout
    return _with_verified_output(layout, layer, run, call, site, view)


def _with_verified_output(
    layout: AttentionLayout,
    layer: AttentionLayer,
    run: TapedPass,
    call: TapedCall,
    site: AttentionSite,
    view: VisibleKeys,
) -> AttentionLayout:
    if layout.unknown_output is not None:
        return _without_output(layout, layout.unknown_output)
    try:
        mixed = mixed_values(run.tape, call)
        out = output_map_of(run.tape, mixed.result, site)
        stream = None
        if layout.value_stream_norm is not None:
            part = trace_projection(run.tape, mixed.values, "values", call.path, mixed.values_transposed)
            stream = part.stream[site.grid.value_places(part.rows, part.lead)[1]]
    except UnreadableError as error:
        return _without_output(layout, str(error))
    mask = None if layout.unknown_mask is None else view.seen
    ours = layer.output(site.x, site.memory, stream, padding=view.padding, mask=mask)
    counted = out.rows_of(view.rows[..., None])[:, 0]  # queries that are no padding
    difference = relative_difference(out.rows_of(ours)[counted], out.value[counted])
    if not difference < TOLERANCE:
        return _without_output(layout, f"its output differs by {difference:.0e} of its spread with other weights")
    return layout


def _products_apart(layout: AttentionLayout, weights: ModuleWeights, site: AttentionSite) -> float:
    """Products of queries and keys, before scale, bias and cap; the scale is that of the queries and keys alone."""
    unscaled = replace(layout, logits=LogitsLayout(layout.product_scale), unknown_logits=None, unknown_scale=None)
    return relative_difference(unscaled.build(weights).logits(site.x, site.memory), site.queries @ site.keys.mT)


def _logits_apart(
    layout: AttentionLayout, layer: AttentionLayer, site: AttentionSite, logits: Tensor, seen: Tensor
) -> float:
    ours = layer.logits(site.x, site.memory)
    shift_free = layout.logits.sinks is None  # a sink sees what is added to a whole row
    if shift_free and (isinstance(layout.logits.bias, AlibiLayout) or layout.logits.shifted):
        ours, logits = centred_logits(ours, seen), centred_logits(logits, seen)
    return relative_difference(ours, logits, seen)


def _scale_apart(layout: AttentionLayout, site: AttentionSite, varying: Tensor, seen: Tensor) -> float:
    """The part of the logits that varies with products, against the scale times products."""
    if layout.logits.softcap is not None:
        return float("inf")
    ours = layout.logits.scale / layout.product_scale * (site.queries @ site.keys.mT)
    if layout.logits.shifted:
        ours, varying = centred_logits(ours, seen), centred_logits(varying, seen)
    return relative_difference(ours, varying, seen)


def _with_mask_of(layout: AttentionLayout, constant: Tensor) -> AttentionLayout:
    """The layout, with its mask unknown where this pass has another one."""
    if layout.unknown_mask is not None:
        return layout
    how = layout.logits
    try:
        now = read_mask(how, constant, () if how.chunk is None else (how.chunk,))
    except UnreadableError as error:
        return replace(layout, unknown_mask=str(error))
    return layout if now == how else replace(layout, unknown_mask="its mask changes with the weights")


def _maps_only(layout: AttentionLayout, why: str) -> AttentionLayout:
    return replace(_without_output(layout, why), unknown_scale=why, unknown_logits=why)


def _without_output(layout: AttentionLayout, why: str) -> AttentionLayout:
    return replace(layout, value=None, out=None, value_stream_norm=None, unknown_output=why)


DRAWS = " (its forward pass draws random numbers)"


@dataclass(frozen=True)
class Refusal:
    """An attention call that could not be read or verified."""

    name: str  # path of its module
    reason: str


@dataclass(frozen=True)
class Discovered:
    """Attention layers that were verified, those that were refused, and modules that look like attention and did not
    run."""

    layouts: list[AttentionLayout]
    refused: list[Refusal]
    unreached: list[str]
    weights: Weights = field(repr=False)  # that the names in the layouts are of

    __repr__ = brief

    @cached_property
    def layers(self) -> list[AttentionLayer]:
        return [layout.build(self.weights) for layout in self.layouts]

    @property
    def gaps(self) -> list[str]:
        """A line for each reason why attention is missing, or known in part only."""
        reasons: dict[str, list[str]] = {}
        for refusal in self.refused:
            reasons.setdefault(f"not read, because {refusal.reason}", []).append(refusal.name)
        for layout in self.layouts:
            for gap in _gaps_of(layout):
                reasons.setdefault(gap, []).append(layout.name)
        if self.unreached:
            reasons["not read, because the example did not reach it"] = self.unreached
        return [f"{folded_paths(names, most=None)}: {reason}" for reason, names in reasons.items()]

    @property
    def whole(self) -> bool:
        """Whether every attention that ran, and every module that looks like attention, is among the layers."""
        return not self.refused and not self.unreached


def _gaps_of(layer: AttentionLayout) -> Iterator[str]:
    """What of a layer is not known, in words."""
    if layer.inputs_matter is not None:
        yield f"its norm in front is that of the guessed inputs ({layer.inputs_matter}: give yours as example={{...}})"
    if layer.unknown_scale is not None:
        yield f"maps of queries and keys only, without numbers in units of logits, because {layer.unknown_scale}"
        return
    if layer.unknown_logits is not None:
        yield f"queries and keys only, because {layer.unknown_logits}"
    elif layer.unknown_output is not None:
        yield f"logits only, because {layer.unknown_output}"
    if layer.unknown_mask is not None:
        yield f"its mask has to be given, because {layer.unknown_mask}"


def discover(model: nn.Module, example: Mapping[str, Any] | None = None) -> Discovered:
    """Find and verify every softmax attention of a live model. `example` holds arguments of its forward pass: small
    inputs of any content, guessed where they are not given.

    The model is not changed: a copy of it runs, on the CPU in float64. What was found with an example, or without one,
    is kept with the model and used again while its shapes, configuration, buffers and settings stay the same.
    """
    if not isinstance(model, nn.Module):
        raise LocaterError(f"{model!r:.60} is not a live model: discovery runs an nn.Module, so load the model first")
    return discovered_in(ModuleWeights(model), example)


def discovered_in(weights: ModuleWeights, example: Mapping[str, Any] | None = None) -> Discovered:
    """The same for an opened model: layers read their tensors from `weights`."""
    layouts, refused, unreached = _cached_search(weights, example)
    numbered = [replace(layout, index=index) for index, layout in enumerate(layouts)]
    return Discovered(numbered, list(refused), list(unreached), weights)


# layouts, refusals, modules that look like attention and did not run
Search = tuple[list[AttentionLayout], list[Refusal], list[str]]
_MEMORY: SearchCache[Search] = SearchCache()


def _cached_search(weights: ModuleWeights, example: Mapping[str, Any] | None) -> Search:
    """A search, or one from before that still holds. Where no example is given and none can be guessed, an earlier one
    of the user's serves.
    """
    check_example(example)
    model, key, facts = weights.module, example_signature(example), facts_of(weights.module)
    result = _MEMORY.get(model, key, facts)
    if result is None:
        result, volatile = _search_or_failure(model, weights, example)
        _MEMORY.put(model, key, facts, result, volatile)
    if isinstance(result, NoInputsError):
        earlier = _MEMORY.with_any_example(model, facts)
        if earlier is not None:
            return earlier
    if isinstance(result, LocaterError):
        raise type(result)(str(result))
    return result


def _search_or_failure(
    model: nn.Module, weights: ModuleWeights, example: Mapping[str, Any] | None
) -> tuple[Search | LocaterError, frozenset[str]]:
    """(what a search finds, or why its passes do not run, names of facts that these change). The error is without its
    traceback, which would keep the model alive.
    """
    try:
        copied = RedrawnCopy(model, example)
    except NoInputsError as error:
        return NoInputsError(str(error)), frozenset()
    try:
        with preserve_process_state():
            return _search_copy(copied, weights), copied.volatile
    except LocaterError as error:
        return LocaterError(str(error)), copied.volatile


def search(model: nn.Module, weights: ModuleWeights, example: Mapping[str, Any] | None) -> Search:
    """(layouts, refusals, modules that look like attention and did not run)."""
    copied = RedrawnCopy(model, example)
    with preserve_process_state():
        return _search_copy(copied, weights)


@preserve_process_state()
@torch.no_grad()
def _search_copy(copied: RedrawnCopy, weights: ModuleWeights) -> Search:
    first = copied.run(0)
    readings = [_layout_or_reason(partial(read_layout, first.tape, call)) for call in first.calls]
    names = [unwrapped_path(call.path) for call in first.calls]
    ran = {unwrapped_path(path) for path in first.tape.called}
    length, draws = first.length, first.draws
    del first  # a tape holds all that a pass computes: one at a time
    second = copied.run(1)
    again = [unwrapped_path(call.path) for call in second.calls]
    if names != again:
        one = next((one or other for one, other in zip_longest(names, again) if one != other), "")
        raise LocaterError(f"{weights.where}: it runs other attention when its parameters are redrawn, first in {one}")
    layouts: dict[int, AttentionLayout] = {}  # by number of the call
    refused: list[Refusal] = []
    for number, (reading, name, call) in enumerate(zip(readings, names, second.calls, strict=True)):
        if isinstance(reading, AttentionLayout):
            reading = _layout_or_reason(partial(verify_layout, reading, second, call))
        if isinstance(reading, str):
            refused.append(Refusal(name, reading))
        else:
            layouts[number] = reading
    layouts = with_windows(copied, layouts, window_settings(copied.model, length), length)
    if copied.guessed:
        layouts = _with_other_inputs(copied, layouts)
    if draws:
        refused = [replace(refusal, reason=f"{refusal.reason}{DRAWS}") for refusal in refused]
        layouts = {number: _noting_random_draws(layout) for number, layout in layouts.items()}
    silent = [*unread(weights, names), *_unread_inside(weights, names, layouts.values(), ran)]
    refused += [Refusal(path, NO_SOFTMAX) for path in silent if path in ran]
    unreached = [path for path in silent if path not in ran]
    return _each_once(layouts.values()), refused, unreached


def _with_other_inputs(copied: RedrawnCopy, layouts: dict[int, AttentionLayout]) -> dict[int, AttentionLayout]:
    """The layouts, with a line where the guessed inputs decide which norm is in front: each is left out once, and what
    the model takes beside them is named.
    """
    contents = [name for name in copied.inputs if name in CONTENT or name == "encoder_hidden_states"]
    shown = ", ".join(name for name, x in copied.inputs.items() if isinstance(x, Tensor))
    fronts: dict[str, list[str]] = {}
    for name in contents if len(contents) > 1 else ():
        other = copied.run_without(name)
        if other is None:
            continue
        calls: dict[str, list[AttentionLayout | str]] = {}
        for call in other.calls:
            calls.setdefault(unwrapped_path(call.path), []).append(
                _layout_or_reason(partial(read_layout, other.tape, call))
            )
        for layout in layouts.values():
            read = [found for found in calls.get(layout.name, []) if isinstance(found, AttentionLayout)]
            if read and all(_front_of(found) != _front_of(layout) for found in read):
                fronts.setdefault(layout.name, []).append(name)
    missing = left_out(copied.model, copied.inputs)
    matter = {name: f"without {' or '.join(names)} it reads another norm" for name, names in fronts.items()}
    others = f"with {' or '.join(missing)}, which the model takes too, it may read another norm" if missing else None
    said = {number: matter.get(layout.name, others) for number, layout in layouts.items()}
    return {
        number: replace(layout, inputs_matter=said[number] and f"found with {shown}: {said[number]}")
        for number, layout in layouts.items()
    }


def _front_of(layout: AttentionLayout) -> tuple[object, ...]:
    return layout.kind, layout.norm, layout.memory_norm


def _noting_random_draws(layout: AttentionLayout) -> AttentionLayout:
    """A layout of a pass that drew random numbers: what is not known of it may be for that."""
    logits, output = (why and f"{why}{DRAWS}" for why in (layout.unknown_logits, layout.unknown_output))
    return replace(layout, unknown_logits=logits, unknown_output=output)


def _unread_inside(
    weights: ModuleWeights, names: Sequence[str], layouts: Iterable[AttentionLayout], ran: set[str]
) -> list[str]:
    """Modules that look like attention inside modules that attend themselves, and of which these read no tensor. One
    that runs as a direct part of an attention, such as an index of keys, belongs to it.
    """
    read = {name for layout in layouts for name in tensor_names(layout, set(weights.names()))}
    attending = set(names)
    return [
        path
        for path in attention_like(weights)
        if path not in attending
        and not any(name.startswith(f"{path}.") for name in attending)
        and any(path.startswith(f"{name}." if name else "") for name in attending)
        and not any(name.startswith(f"{path}.") for name in read)
        and not (path in ran and path.rpartition(".")[0] in attending - {""})
    ]


def _each_once(layouts: Iterable[AttentionLayout]) -> list[AttentionLayout]:
    """A module that runs several times is one layer. Of tables of angles, one for each picture, the longest is kept."""
    layers: list[AttentionLayout] = []
    for layout in layouts:
        same = [n for n, x in enumerate(layers) if x.name == layout.name]
        bare = replace(layout, angles=())
        known = next((n for n in same if nearly_equal(replace(layers[n], angles=()), bare)), None)
        if known is None:
            layers.append(layout)
        elif len(layout.angles) > len(layers[known].angles):
            layers[known] = layout
    return layers


def _layout_or_reason(read: Callable[[], AttentionLayout]) -> AttentionLayout | str:
    """A layout, or the reason why there is none."""
    try:
        return read()
    except UnreadableError as error:
        return str(error)
    except (LocaterError, RuntimeError, ValueError, TypeError, LookupError, AssertionError) as error:
        return f"reading it failed ({type(error).__name__}: {first_line(error)})"
