"""What can be told from a model alone: values, heads and layers beside their neighbours, and config.json.

Every threshold here is far from what trained models show; the bench of faults says how far (`make verdicts`).
"""

from __future__ import annotations

from locater.commands.doctor.heads_alone import copied_heads, dead_or_scaled_heads, gains, logits, rotary_order
from locater.commands.doctor.layers_alone import biases, copies, missing, own_settings, sizes, tied_outputs
from locater.commands.doctor.reading import Examined
from locater.commands.doctor.values_alone import constants, kinds_of, levels, values, zeros
from locater.findings.causes import Finding


def findings_alone(seen: Examined) -> list[Finding]:
    """Everything that the file of a model says against it."""
    facts, kinds = [*seen.facts.values()], kinds_of(seen.facts.values())
    broken: set[str] = set()  # tensors whose numbers are no weights: nothing else is said of them
    found = [
        *values(facts, broken),
        *zeros(facts, kinds, broken, seen),
        *constants(facts, kinds, broken),
    ]
    found += [*missing(kinds), *own_settings(seen), *tied_outputs(seen), *biases(seen, kinds)]
    found += [*copies(kinds, broken), *levels(kinds, broken)]
    of_heads = [*dead_or_scaled_heads(seen, broken), *copied_heads(seen)]
    layers = {seen.heads_layer(layer) for item in of_heads for layer, _ in item.evidence.get("heads", ())}
    found += [*sizes(kinds, broken, layers), *of_heads, *logits(seen), *gains(seen), *rotary_order(seen)]
    return found
