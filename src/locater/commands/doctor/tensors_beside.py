"""Which tensors both have: lost ones, other shapes, other names, another model altogether."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

import torch

from locater.commands.doctor.other_places import same_numbers
from locater.commands.doctor.pairs import STRUCTURE, TRAINED, Beside, Pair, Paired
from locater.commands.doctor.places import layers_words, tensors_words
from locater.commands.doctor.tensors import EMBEDDINGS, place_of
from locater.findings.causes import Severity, finding
from locater.sources.weights import WRAPPERS, without_wrappers

NO_RELATION = 0.3  # cosine below which two maps have none
MOST_VECTORS = 0.8  # share of gains and biases that are the base's, from which on it is not another model
FEW_NAMES = 0.3  # share of names that both have, below which the architecture is another


def missing_tensors(beside: Beside) -> None:
    paired = beside.paired
    _wrapped_names(beside)
    missing = [name for name in paired.missing if not tied_head(name, paired)]
    if paired.base.model.live or paired.own.model.live or _quantised_sources(paired):
        missing = [name for name in missing if not name.endswith(("lm_head.weight", "decoder.weight"))]
    if missing and _renamed(paired, missing):
        beside.renamed = True
        words = f"have other names than in BASE ({len(missing)} there, {len(paired.extra)} here) and were not compared"
        beside.found.append(finding("unknown", tensors_words(paired.extra), words, severity="note"))
        return
    biases = [name for name in missing if name.endswith("bias") and "norm" not in name.lower()]
    others = [name for name in missing if name not in biases]
    if biases:
        beside.found = [x for x in beside.found if x.cause != "lost-biases"]
        words = f"lost {len(biases)} biases that BASE has"
        beside.found.append(finding("lost-biases", tensors_words(biases), words, tensors=biases))
    said = {layer for x in beside.found if x.cause == "missing-layer" for layer in x.evidence.get("layers", ())}
    others = [name for name in others if place_of(name).layer not in said or place_of(name).layer is None]
    if others:
        there = {place_of(x).layer for x in paired.own.facts}
        whole = sorted({at for x in others if (at := place_of(x).layer) is not None and at not in there})
        words = f"{'is' if len(others) == 1 else 'are'} missing, and BASE has {'it' if len(others) == 1 else 'them'}"
        where = layers_words("", whole) if whole else tensors_words(others)
        if not paired.own.model.names or len(others) < len(paired.base.model.names) / 2:
            evidence: dict[str, Any] = {"tensors": others, "layers": whole}
            beside.found.append(finding("missing-layer", where, words, **evidence))
    if paired.extra:
        extra = [name for name in paired.extra if not tied_head(name, paired)]
        if extra:
            words = "is not in BASE" if len(extra) == 1 else f"are not in BASE ({len(extra)} tensors)"
            beside.found.append(finding("unknown", tensors_words(extra), words, severity="note", tensors=extra))


def _has_vectors_of_base(beside: Beside) -> bool:
    """Whether gains, biases and embeddings are the base's, which those of another model are not: then maps were read
    wrongly. A vector that is constant in BASE says nothing.
    """
    vocabulary = [x for x in beside.pairs.values() if x.is_map and x.name.endswith(EMBEDDINGS) and not x.other_shape]
    if not vocabulary or min(x.cosine for x in vocabulary) < TRAINED:
        return False
    vectors = [x for x in beside.pairs.values() if not x.is_map and not x.other_shape and x.numbers > 2]
    telling = [x for x in vectors if x.base_facts is not None and not x.base_facts.constant]
    return len(telling) > 2 and sum(not x.changed for x in telling) > MOST_VECTORS * len(telling)


def scaled_model(beside: Beside) -> bool:
    """Whether all maps are those of the base times one factor: a sum that was not divided, or a scale for all."""
    maps = [x for x in beside.pairs.values() if x.is_map and not x.other_shape]
    scaled = [x for x in maps if x.changed and x.beside_factor < STRUCTURE and abs(x.factor - 1) > STRUCTURE]
    if len(maps) < 4 or len(scaled) < 0.9 * len(maps):
        return False
    usual = median(x.factor for x in scaled)
    if any(abs(x.factor - usual) > STRUCTURE * abs(usual) for x in scaled):
        return False
    words = (
        f"has {len(scaled)} of {len(maps)} maps times {usual:.3g}: all numbers were scaled, and the cause is not known"
    )
    beside.found.append(finding("unknown", "the model", words, severity="fault", factor=round(usual, 4)))
    beside.explain([x.name for x in beside.left()], "unknown")
    return True


def _wrapped_names(beside: Beside) -> None:
    """Names with that of a wrapper in them, which a training loop added and no loader takes off: none is found."""
    own, base = (x.model for x in (beside.paired.own, beside.paired.base))
    wrapped = [name for name in own.names if without_wrappers(name) != name]
    if own.live or len(wrapped) < len(own.names) / 2 or any(without_wrappers(name) != name for name in base.names):
        return
    found = WRAPPERS.search(wrapped[0])
    wrapper = found[0] if found else ""
    words = f"has {wrapper} in the names of {len(wrapped)} tensors, which no loader takes off: it finds none of them"
    beside.found.append(finding("missing-layer", "the model", words, names=len(wrapped), wrapper=wrapper))


def _renamed(paired: Paired, missing: list[str]) -> bool:
    """Whether tensors that only one of the two has hold as many numbers: transformers saves some under other names."""
    extra = sum(paired.own.facts[name].numbers for name in paired.extra if name in paired.own.facts)
    return extra == sum(math.prod(paired.base.model.weights.shape(name)) for name in missing)


def _quantised_sources(paired: Paired) -> bool:
    return any(getattr(x.model.weights, "quantised", None) is not None for x in (paired.own, paired.base))


def tied_head(name: str, paired: Paired) -> bool:
    """Whether a tensor is an output layer that config.json ties to the embeddings, so that a file may leave it out."""
    return name.endswith(("lm_head.weight", "decoder.weight", "embed_out.weight")) and any(
        x.model.config.get("tie_word_embeddings", True) is not False for x in (paired.own, paired.base)
    )


def other_shapes(beside: Beside) -> None:
    """Maps of another shape: transposed, or of another size."""
    turned: list[Pair] = []
    other: list[Pair] = []
    for pair in beside.pairs.values():
        if not pair.other_shape:
            continue
        pair.explained = "shape"
        (turned if transposed(pair) else other).append(pair)
    if turned:
        names = [pair.name for pair in turned]
        beside.explain(names, "transposed")
        beside.found.append(finding("transposed", tensors_words(names), tensors=names))
    if other and len(other) < len(beside.pairs) / 2:
        for pair in other:
            assert pair.facts is not None
            assert pair.base_facts is not None
            words = f"has the shape {list(pair.facts.shape)}, in BASE {list(pair.base_facts.shape)}"
            vocabulary = any(word in pair.name for word in ("embed", "lm_head", "wte", "decoder"))
            severity: Severity = "change" if vocabulary else "fault"
            beside.found.append(finding("unknown", pair.name, words, severity=severity))


def transposed(pair: Pair) -> bool:
    """Whether a map is the transposed one of the base: R^T W R is that of the other, transposed."""
    assert pair.facts is not None
    assert pair.base_facts is not None
    a, b = pair.facts.signature, pair.base_facts.signature
    if a is None or b is None or pair.facts.shape != pair.base_facts.shape[::-1]:
        return False
    turned = b.view(math.isqrt(len(b)), -1).mT.flatten()
    return float((a - turned).norm()) < STRUCTURE * float(b.norm())


def another_model(beside: Beside) -> bool:
    """Whether most maps have no relation to the base's."""
    maps = [pair for pair in beside.pairs.values() if pair.is_map]
    count = max(len(maps), 1)
    apart = [x for x in maps if x.other_shape or (x.changed and not x.explained and x.cosine < NO_RELATION)]
    layers = beside.paired.own.model.names
    if not beside.renamed and len(beside.pairs) < FEW_NAMES * min(len(layers), len(beside.paired.base.model.names)):
        beside.found = [x for x in beside.found if x.cause not in ("missing-layer", "lost-biases", "config", "unknown")]
        words = f"has {len(beside.pairs)} of {len(layers)} tensors under a name that BASE has"
        beside.found.append(finding("another-model", "the model", words, tensors=len(beside.pairs)))
        beside.explain([*beside.pairs], "another-model")
        return True
    cosine = median(pair.cosine for pair in maps) if maps else 0.0
    if len(apart) / count <= 0.7 or _moved_share(maps) > 0.3 or _has_vectors_of_base(beside):
        return False
    other = sum(pair.other_shape for pair in maps)
    words = f"has no relation to BASE: {len(apart)} of {len(maps)} maps are others"
    settings = [x.words for x in beside.found if x.cause == "config" and "base" in x.evidence]
    words += f"; config.json {settings[0]}" if settings else ""
    beside.found = [
        x
        for x in beside.found
        if x.cause not in ("unknown", "transposed") and not (x.cause == "config" and "base" in x.evidence)
    ]
    beside.found.append(
        finding("another-model", "the model", words, cosine=round(cosine, 4), other_shapes=other, maps=len(maps))
    )
    beside.explain([pair.name for pair in beside.pairs.values()], "another-model")
    return True


def _moved_share(maps: list[Pair]) -> float:
    """Share of maps that equal those of another layer, or are reordered: these do not make another model."""
    bases = [x.base_facts.signature for x in maps if x.base_facts is not None and x.base_facts.signature is not None]
    if not bases:
        return 0.0
    count = 0
    table = torch.stack(bases)
    for pair in maps:
        if pair.changed and pair.facts is not None and pair.facts.signature is not None:
            own = pair.facts.signature
            near = (table - own).norm(dim=1) / own.norm().clamp_min(1e-30)
            count += bool((near < STRUCTURE).any()) or same_numbers(pair)
    return count / len(maps)


def untied(beside: Beside) -> None:
    """An output layer of its own, where the base ties it to the embeddings."""
    own, base = beside.paired.own, beside.paired.base
    if base.model.config.get("tie_word_embeddings") is not True or own.model.live or base.model.live:
        return
    inputs = [x for name, x in own.facts.items() if name.endswith(EMBEDDINGS)]
    for name in beside.paired.extra:
        fact = own.facts.get(name)
        if fact is None or len(inputs) != 1 or not tied_head(name, beside.paired) or fact.shape != inputs[0].shape:
            continue
        a, b = fact.signature, inputs[0].signature
        if a is not None and b is not None and float((a - b).norm()) > STRUCTURE * float(b.norm()):
            words = "differs from the embeddings that BASE ties it to"
            difference = round(float((a - b).norm() / b.norm()), 4)
            beside.found = [x for x in beside.found if x.cause != "untied"]
            beside.found.append(finding("untied", name, words, difference=difference))
