"""A layout against a forward pass with other parameters: the layer that it gives must compute what the model computed.

Products of queries and keys first, then logits, then the output. Each is compared in full. A layout is cut down to what
was verified, with the reason; one whose products differ is refused.
"""

from __future__ import annotations

from dataclasses import replace

from locater.checkpoints.weights import ModuleWeights
from locater.families.discovered_calls import MASKED, Call, mixed_values
from locater.families.discovered_errors import UnreadableError
from locater.families.discovered_layout import AttentionLayout, LogitsLayout
from locater.families.discovered_logits import centred
from locater.families.discovered_norms import apart
from locater.families.discovered_outputs import output_of
from locater.families.discovered_passes import Pass
from locater.families.discovered_place import Place, captured_logits, place_of

TOLERANCE = 1e-6  # of the standard deviation of what the model computed


def verified(layout: AttentionLayout, run: Pass, call: Call) -> AttentionLayout:
    """`layout` as far as it holds on another pass; refused where not even its queries and keys do."""
    place = place_of(run.tape, call)
    weights = ModuleWeights(run.model)
    _, logits, constant = captured_logits(place)
    seen = constant > MASKED
    difference = _products_apart(layout, weights, place)
    if not difference < TOLERANCE:
        raise UnreadableError(f"its queries and keys differ by {difference:.0e} of their spread with other weights")
    if layout.unknown_logits is not None:
        return layout
    layer = layout.build(weights)
    ours = layer.logits(place.x, place.memory)
    if layout.logits.alibi is not None:
        ours, logits = centred(ours, seen), centred(logits, seen)
    difference = apart(ours, logits, seen)
    if not difference < TOLERANCE:
        why = f"its logits differ by {difference:.0e} of their spread with other weights"
        return replace(_without_output(layout, why), unknown_logits=why)
    if layout.unknown_output is not None:
        return _without_output(layout, layout.unknown_output)
    try:
        out = output_of(run.tape, mixed_values(run.tape, call)[0], place)
    except UnreadableError as error:
        return _without_output(layout, str(error))
    difference = apart(out.rows_of(layer.output(place.x, place.memory)), out.value)
    if not difference < TOLERANCE:
        return _without_output(layout, f"its output differs by {difference:.0e} of its spread with other weights")
    return layout


def _products_apart(layout: AttentionLayout, weights: ModuleWeights, place: Place) -> float:
    """Products of queries and keys, before scale, bias and cap; the scale is that of the queries and keys alone."""
    plain = replace(layout, logits=LogitsLayout(layout.product_scale), unknown_logits=None).build(weights)
    return apart(plain.logits(place.x, place.memory), place.queries @ place.keys.mT)


def _without_output(layout: AttentionLayout, why: str) -> AttentionLayout:
    return replace(layout, value=None, out=None, unknown_output=why)
