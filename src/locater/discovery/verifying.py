"""A layout against a forward pass with other parameters: the layer that it gives must compute what the model computed.

Products of queries and keys first, then the factor from products to logits, the logits, the mask, the output. Each is
compared in full. A layout is cut down to what was verified, with the reason; one whose products differ is refused.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from locater.discovery.calls import Call, mixed_values
from locater.discovery.errors import UnreadableError
from locater.discovery.logits import centred
from locater.discovery.masks import Visible, read_mask, visible_in
from locater.discovery.norms import apart
from locater.discovery.outputs import output_of
from locater.discovery.passes import Pass
from locater.discovery.place import Place, captured_logits, place_of, side
from locater.layers.layer import AttentionLayer
from locater.layers.layout import AttentionLayout, LogitsLayout
from locater.sources.weights import ModuleWeights

TOLERANCE = 1e-6  # of the standard deviation of what the model computed


def verified(layout: AttentionLayout, run: Pass, call: Call) -> AttentionLayout:
    """`layout` as far as it holds on another pass; refused where not even its queries and keys do."""
    place = place_of(run.tape, call)
    weights = ModuleWeights(run.model)
    difference = _products_apart(layout, weights, place)
    if not difference < TOLERANCE:
        raise UnreadableError(f"its queries and keys differ by {difference:.0e} of their spread with other weights")
    if layout.unknown_scale is not None:
        return _maps_only(layout, layout.unknown_scale)
    _, logits, constant = captured_logits(place)
    view = visible_in(constant)
    layout = _with_mask_of(layout, constant)
    layer = layout.build(weights)
    if layout.unknown_logits is None:
        difference = _logits_apart(layout, layer, place, logits, view.seen)
        if not difference < TOLERANCE:
            why = f"its logits differ by {difference:.0e} of their spread with other weights"
            layout = replace(layout, unknown_logits=why)
    if layout.unknown_logits is not None:
        layout = _without_output(layout, layout.unknown_logits)
        difference = _scale_apart(layout, place, logits - constant, view.seen)
        if not difference < TOLERANCE:
            return _maps_only(layout, f"its scale differs by {difference:.0e} with other weights")
        return layout
    return _with_verified_output(layout, layer, run, call, place, view)


def _with_verified_output(
    layout: AttentionLayout, layer: AttentionLayer, run: Pass, call: Call, place: Place, view: Visible
) -> AttentionLayout:
    if layout.unknown_output is not None:
        return _without_output(layout, layout.unknown_output)
    try:
        mixed, values = mixed_values(run.tape, call)
        out = output_of(run.tape, mixed, place)
        stream = None
        if layout.value_stream_norm is not None:
            part = side(run.tape, values, "values", call.path)
            stream = part.stream[place.grid.others(part.rows, part.lead)[1]]
    except UnreadableError as error:
        return _without_output(layout, str(error))
    mask = None if layout.unknown_mask is None else view.seen
    ours = layer.output(place.x, place.memory, stream, padding=view.padding, mask=mask)
    counted = out.rows_of(view.rows[..., None])[:, 0]  # queries that are no padding
    difference = apart(out.rows_of(ours)[counted], out.value[counted])
    if not difference < TOLERANCE:
        return _without_output(layout, f"its output differs by {difference:.0e} of its spread with other weights")
    return layout


def _products_apart(layout: AttentionLayout, weights: ModuleWeights, place: Place) -> float:
    """Products of queries and keys, before scale, bias and cap; the scale is that of the queries and keys alone."""
    plain = replace(layout, logits=LogitsLayout(layout.product_scale), unknown_logits=None, unknown_scale=None)
    return apart(plain.build(weights).logits(place.x, place.memory), place.queries @ place.keys.mT)


def _logits_apart(layout: AttentionLayout, layer: AttentionLayer, place: Place, logits: Tensor, seen: Tensor) -> float:
    ours = layer.logits(place.x, place.memory)
    shift_free = layout.logits.sinks is None  # a sink sees what is added to a whole row
    if shift_free and (layout.logits.alibi is not None or layout.logits.shifted):
        ours, logits = centred(ours, seen), centred(logits, seen)
    return apart(ours, logits, seen)


def _scale_apart(layout: AttentionLayout, place: Place, varying: Tensor, seen: Tensor) -> float:
    """The part of the logits that varies with products, against the scale times products."""
    if layout.logits.softcap is not None:
        return float("inf")
    ours = layout.logits.scale / layout.product_scale * (place.queries @ place.keys.mT)
    if layout.logits.shifted:
        ours, varying = centred(ours, seen), centred(varying, seen)
    return apart(ours, varying, seen)


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
