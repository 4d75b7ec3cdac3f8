"""What was done to the base: the cause of each difference, where the evidence tells it from its rivals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from locater.commands.doctor.alone import findings_alone
from locater.commands.doctor.heads_beside_base import findings_of_heads
from locater.commands.doctor.merge import findings_of_merge
from locater.commands.doctor.pairs import STRUCTURE, TRAINED, Beside, Pair, Paired, by_place
from locater.commands.doctor.places import layers_words, tensors_words
from locater.commands.doctor.tensors import place_of
from locater.findings.causes import Finding, Severity, finding
from locater.layers.layer import AttentionLayer

# what the base tells better than the file alone
BETTER_BESIDE = (
    *("duplicated-layer", "copied-head", "scaled-head", "scaled-queries", "unknown", "lost-scales", "lost-zero-points"),
    *("shifted-gain", "rotary-order", "quantised", "dtype"),
)
NO_RELATION = 0.3  # cosine below which two maps have none
MOST = 0.5  # share of maps
FEW_NAMES = 0.3  # share of names that both have, below which the architecture is another
MADE_BY = 0.8  # share of the squares of a difference that makes a cause of it
STEPS = (1.6, 2.45)  # kurtosis of errors of rounding to steps (1.8 if exact); normal numbers have 2.8 in groups of 32


def findings_beside(paired: Paired, with_adapter: bool = False) -> list[Finding]:
    """Everything that sets a model apart from its base."""
    beside = Beside(paired)
    _of_the_file(beside)
    if with_adapter:
        beside.found += findings_of_merge(paired, beside.explain)
    _settings(beside)
    _missing(beside)
    _untied(beside)
    _shapes(beside)
    if not _another_model(beside):
        _moved_layers(beside)
        _vectors(beside)
        findings_of_heads(beside)
        _maps(beside)
        _leftovers(beside)
    _agreement(beside)
    return beside.found


def _of_the_file(beside: Beside) -> None:
    """What the file of the model says alone, and the base does not say of itself."""
    own = findings_alone(beside.paired.own)
    of_base = {(x.cause, x.where) for x in findings_alone(beside.paired.base)}
    for item in own:
        if item.cause in BETTER_BESIDE or (item.cause, item.where) in of_base:
            continue
        beside.found.append(item)
        beside.explain(item.evidence.get("tensors", ()), item.cause)


# ---- configuration ----


def _settings(beside: Beside) -> None:
    """What the two configurations say otherwise of attention, whatever format they are in."""
    paired = beside.paired
    differ: dict[str, tuple[Any, Any]] = {}
    for own, base in zip(paired.own.layers, paired.base.layers, strict=False):
        for name, a, b in _numbers_of(own, base):
            differ.setdefault(name, (a, b))
    config, other = paired.own.model.config, paired.base.model.config
    for key in ("hidden_act", "hidden_activation", "num_hidden_layers", "final_logit_softcapping"):
        if key in config and key in other and config[key] != other[key]:
            differ[key] = (config[key], other[key])
    trained = _share_changed(beside) > MOST
    for name, (a, b) in differ.items():
        words = f"says {name} {a}, BASE {b}"
        severity: Severity | None = "change" if trained and name == "rotary base" else None
        evidence: dict[str, Any] = {"setting": name, "said": a, "base": b}
        beside.found.append(finding("config", "config.json", words, severity=severity, **evidence))


def _numbers_of(own: AttentionLayer, base: AttentionLayer) -> Iterator[tuple[str, Any, Any]]:
    """Numbers of a layer that come from its configuration, where they differ."""
    for name in ("heads", "kv_heads", "head_dim", "window", "chunk", "causal", "softcap"):
        a, b = getattr(own, name), getattr(base, name)
        if a != b:
            yield name, a, b
    if own.head_dim == base.head_dim and not math.isclose(own.scale, base.scale, rel_tol=1e-3):
        yield "scale of logits", round(own.scale, 6), round(base.scale, 6)
    a, b = own.rotary, base.rotary
    if (a is None) != (b is None):
        yield "rotary positions", a is not None, b is not None
    elif a is not None and b is not None:
        x, y = a.frequencies, b.frequencies
        if x.shape != y.shape or not torch.allclose(x, y, rtol=1e-3, atol=0):
            yield "rotary base", _rotary_base(x), _rotary_base(y)
    if own.norm.eps and base.norm.eps and not 0.1 < own.norm.eps / base.norm.eps < 10:
        yield "epsilon of norms", own.norm.eps, base.norm.eps


def _rotary_base(frequencies: Tensor) -> float:
    """The theta of frequencies theta^(-i / pairs)."""
    if len(frequencies) < 2 or not float(frequencies[1]):
        return float(frequencies[0])
    return float(f"{float((frequencies[0] / frequencies[1]).double() ** len(frequencies)):.4g}")


def _share_changed(beside: Beside) -> float:
    maps = [pair for pair in beside.pairs.values() if pair.is_map]
    return sum(pair.changed for pair in maps) / len(maps) if maps else 0.0


# ---- tensors that only one has ----


def _missing(beside: Beside) -> None:
    paired = beside.paired
    missing = [name for name in paired.missing if not _tied_head(name, paired)]
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
        extra = [name for name in paired.extra if not _tied_head(name, paired)]
        if extra:
            words = "is not in BASE" if len(extra) == 1 else f"are not in BASE ({len(extra)} tensors)"
            beside.found.append(finding("unknown", tensors_words(extra), words, severity="note", tensors=extra))


def _renamed(paired: Paired, missing: list[str]) -> bool:
    """Whether tensors that only one of the two has hold as many numbers: transformers saves some under other names."""
    extra = sum(paired.own.facts[name].numbers for name in paired.extra if name in paired.own.facts)
    return extra == sum(math.prod(paired.base.model.weights.shape(name)) for name in missing)


def _quantised_sources(paired: Paired) -> bool:
    return any(getattr(x.model.weights, "quantised", None) is not None for x in (paired.own, paired.base))


def _tied_head(name: str, paired: Paired) -> bool:
    """Whether a tensor is an output layer that config.json ties to the embeddings, so that a file may leave it out."""
    return name.endswith(("lm_head.weight", "decoder.weight", "embed_out.weight")) and any(
        x.model.config.get("tie_word_embeddings", True) is not False for x in (paired.own, paired.base)
    )


def _shapes(beside: Beside) -> None:
    """Maps of another shape: transposed, or of another size."""
    turned: list[Pair] = []
    other: list[Pair] = []
    for pair in beside.pairs.values():
        if not pair.other_shape:
            continue
        pair.explained = "shape"
        (turned if _transposed(pair) else other).append(pair)
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


def _transposed(pair: Pair) -> bool:
    """Whether a map is the transposed one of the base: R^T W R is that of the other, transposed."""
    assert pair.facts is not None
    assert pair.base_facts is not None
    a, b = pair.facts.signature, pair.base_facts.signature
    if a is None or b is None or pair.facts.shape != pair.base_facts.shape[::-1]:
        return False
    turned = b.view(math.isqrt(len(b)), -1).mT.flatten()
    return float((a - turned).norm()) < STRUCTURE * float(b.norm())


def _another_model(beside: Beside) -> bool:
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
    if len(apart) / count <= 0.7 or _moved_share(maps) > 0.3:
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
            reordered = pair.base_facts is not None and math.isclose(pair.facts.rms, pair.base_facts.rms, rel_tol=1e-6)
            count += bool((near < STRUCTURE).any()) or reordered
    return count / len(maps)


# ---- layers ----


def _moved_layers(beside: Beside) -> None:
    """Layers whose maps are those of another layer of the base."""
    places = by_place(beside.pairs)
    bases: dict[tuple[str, str], list[tuple[int, Tensor]]] = {}
    for pair in beside.pairs.values():
        place = place_of(pair.name)
        if (
            place.layer is not None
            and pair.is_map
            and pair.base_facts is not None
            and pair.base_facts.signature is not None
        ):
            bases.setdefault((place.stack, place.kind), []).append((place.layer, pair.base_facts.signature))
    moved: dict[str, dict[int, tuple[int, list[str]]]] = {}
    for (stack, layer), pairs in places.items():
        sources: dict[int, list[str]] = {}
        changed = [pair for pair in pairs if pair.is_map and pair.changed and not pair.explained]
        for pair in changed:
            for source in _equal_layers(pair, bases.get((stack, place_of(pair.name).kind), [])):
                sources.setdefault(source, []).append(pair.name)
        sources.pop(layer, None)
        if sources:
            source, names = max(sources.items(), key=lambda item: len(item[1]))
            if len(names) >= 2 or len(changed) == 1:
                moved.setdefault(stack, {})[layer] = (source, names)
    for stack, layers in moved.items():
        _name_moves(beside, stack, layers)


def _equal_layers(pair: Pair, bases: list[tuple[int, Tensor]]) -> list[int]:
    assert pair.facts is not None
    own = pair.facts.signature
    if own is None or not float(own.norm()):
        return []
    return [at for at, other in bases if float((own - other).norm()) < STRUCTURE * float(own.norm())]


def _name_moves(beside: Beside, stack: str, layers: dict[int, tuple[int, list[str]]]) -> None:
    kinds = {place_of(name).kind for _, names in layers.values() for name in names}
    of = f" ({len(kinds)} kinds of maps)"
    swapped = [(a, source) for a, (source, _) in layers.items() if layers.get(source, (None,))[0] == a and a < source]
    for a, b in swapped:
        words = f"exchanged places{of}"
        beside.found.append(finding("swapped-layers", layers_words(stack, [a, b]), words, layers=[a, b]))
    rest = {a: x for a, x in layers.items() if not any(a in pair for pair in swapped)}
    offsets: dict[int, list[int]] = {}
    for at, (source, _) in rest.items():
        offsets.setdefault(source - at, []).append(at)
    for offset, ats in sorted(offsets.items()):
        runs = len(ats) >= 2 and any(y - x == 1 for x, y in pairwise(sorted(ats)))
        if runs and abs(offset) <= 4:
            words = f"holds the weights of the layer {abs(offset)} {'after' if offset > 0 else 'before'} it in BASE{of}"
            found = finding("shifted-layers", layers_words(stack, ats), words, layers=sorted(ats), offset=offset)
            beside.found.append(found)
            continue
        for at in ats:
            source = rest[at][0]
            words = f"holds the weights of layer {source} of BASE ({len(rest[at][1])} maps)"
            found = finding("duplicated-layer", layers_words(stack, [at]), words, layers=[at], source=source)
            beside.found.append(found)
    for at, (_, names) in layers.items():
        beside.explain(names, "moved")
        others = [n for n in beside.pairs if place_of(n)[:2] == (stack, at) and not beside.pairs[n].is_map]
        beside.explain(others, "moved")  # their vectors went along, or are too few to say


# ---- vectors ----


def _vectors(beside: Beside) -> None:
    """Gains that are off by one, and biases that became zero."""
    off: dict[int, list[str]] = {}
    zero: list[str] = []
    scaled: dict[float, list[str]] = {}
    for pair in beside.left():
        if pair.facts is None or pair.base_facts is None:
            continue
        a, b = pair.facts.values, pair.base_facts.values
        if a is None or b is None or len(a) < 2 or a.shape != b.shape:
            continue
        d = a - b
        shift, beside_shift = float(d.mean()), float(d.std())
        rounding = pair.rounding * pair.facts.rms  # large gains of 16 bits lose the last of what was added
        if abs(abs(shift) - 1) < 0.02 + rounding and beside_shift < 0.02 + rounding:
            off.setdefault(round(shift), []).append(pair.name)
        elif not float(a.norm()) and float(b.norm()) and pair.name.endswith("bias"):
            zero.append(pair.name)
        elif pair.beside_factor < STRUCTURE and abs(pair.factor - 1) > STRUCTURE:
            scaled.setdefault(round(pair.factor, 2), []).append(pair.name)
    for shift, names in off.items():
        beside.explain(names, "shifted-gain")
        words = f"has one {'added to' if shift > 0 else 'subtracted from'} each of {len(names)} gains"
        found = finding("shifted-gain", tensors_words(names), words, tensors=names, shift=shift)
        beside.found.append(found)
    if zero:
        beside.explain(zero, "lost-biases")
        beside.found = [x for x in beside.found if x.cause != "lost-biases" or "tensors" in x.evidence]
        words = (
            "is zero, and is not in BASE" if len(zero) == 1 else f"are zero, and are not in BASE ({len(zero)} biases)"
        )
        beside.found.append(finding("lost-biases", tensors_words(zero), words, tensors=zero))


# ---- whole maps ----


def _maps(beside: Beside) -> None:
    """Maps that are transposed, and maps with blocks of another scale or shift."""
    turned = [x.name for x in beside.left() if x.is_map and x.cosine < TRAINED and _transposed(x)]
    if turned:
        beside.explain(turned, "transposed")
        beside.found.append(finding("transposed", tensors_words(turned), tensors=turned))
    scaled: dict[float, list[str]] = {}
    for pair in beside.left():
        if pair.is_map and pair.beside_factor < STRUCTURE and abs(pair.factor - 1) > 2 * STRUCTURE:
            scaled.setdefault(float(f"{pair.factor:.3g}"), []).append(pair.name)
    for factor, names in scaled.items():
        beside.explain(names, "scaled")
        words = f"{'is' if len(names) == 1 else 'are'} {factor:.4g} times that of BASE"
        beside.found.append(
            finding("unknown", tensors_words(names), words, severity="fault", factor=factor, tensors=names)
        )
    for cause, of in (("lost-scales", "odd"), ("lost-zero-points", "shifted")):
        some = [pair for pair in beside.left() if pair.is_map and _made_by(pair, of)]
        of = f"{of}_groups"
        if some:
            beside.explain([pair.name for pair in some], cause)
            count = sum(getattr(pair, of) for pair in some)
            what = "another scale" if cause == "lost-scales" else "a constant added"
            words = f"has {what} in {count:,} of {sum(x.groups for x in some):,} groups of 32 numbers"
            evidence: dict[str, Any] = {"tensors": [x.name for x in some], "groups": count}
            beside.found.append(finding(cause, tensors_words([x.name for x in some]), words, **evidence))


def _made_by(pair: Pair, of: str) -> bool:
    """Whether nearly all of the difference is in groups with another scale, or with a constant added."""
    return pair.difference > STRUCTURE and getattr(pair, f"{of}_delta") > MADE_BY * pair.delta**2


def _leftovers(beside: Beside) -> None:
    """What is left: quantised, a low-rank delta, another step, training, or not known."""
    left = beside.left()
    if not left:
        return
    maps = [pair for pair in left if pair.is_map]
    all_maps = [pair for pair in beside.pairs.values() if pair.is_map]
    coarse = [pair for pair in maps if _coarse(pair, beside)]
    if coarse:
        usual = median(pair.difference for pair in coarse)  # a base that is in steps itself hides those of some maps
        alike = [x for x in maps if x not in coarse and x.rank is None and usual / 5 < x.difference < 3 * usual]
        coarse += alike if len(coarse) > len(alike) else []
        _quantised(beside, coarse, all_maps)
        left = beside.left()
        maps = [pair for pair in left if pair.is_map]
        if not left:
            return
    low = [pair for pair in maps if pair.rank is not None]
    if low and len(low) >= 0.8 * len(maps):
        _low_rank(beside, low)
        beside.explain([pair.name for pair in left], "low-rank")
        return
    files = _whole_files(beside, left)
    if files and all(pair.rank is None for pair in maps):
        words = f"{'comes' if len(files) == 1 else 'come'} from another checkpoint: all maps in there differ "
        words += f"({len(left)} tensors), and none elsewhere"
        difference = round(median(pair.difference for pair in maps or left), 4)
        where = files[0] if len(files) == 1 else f"{len(files)} shards: {', '.join(files[:2])}"
        beside.found.append(finding("another-step", where, words, tensors=len(left), difference=difference))
        return
    _vocabulary(beside, maps)
    left, maps = beside.left(), [pair for pair in beside.left() if pair.is_map]
    if not left:
        return
    strange = [pair for pair in maps if pair.cosine < NO_RELATION]
    if strange:
        names = [pair.name for pair in strange]
        cosine = median(x.cosine for x in strange)
        words = f"{'has' if len(names) == 1 else 'have'} no relation to BASE's (cosine {cosine:.2f})"
        evidence: dict[str, Any] = {"tensors": names, "cosine": round(cosine, 4)}
        beside.found.append(finding("unknown", tensors_words(names), words, severity="fault", **evidence))
        beside.explain(names, "unknown")
        left, maps = beside.left(), [pair for pair in beside.left() if pair.is_map]
        if not left:
            return
    difference = median(pair.difference for pair in maps or left)
    cosine = median(pair.cosine for pair in maps) if maps else 1.0
    share = len(maps) / max(len(all_maps), 1)
    kinds = {place_of(pair.name).kind for pair in maps}
    everywhere = share > MOST or all(
        sum(place_of(x.name).kind == kind for x in maps) >= 0.9 * sum(place_of(x.name).kind == kind for x in all_maps)
        for kind in kinds
    )
    evidence = {"difference": round(difference, 5), "cosine": round(cosine, 5), "tensors": len(left)}
    if (
        maps
        and cosine > TRAINED
        and (everywhere or difference < 0.01)
        and max(x.difference for x in maps) < 30 * difference
    ):
        words = f"trained further: {len(maps)} of {len(all_maps)} maps differ by {difference:.2g} of their norm, "
        words += "of full rank"
        beside.found.append(finding("fine-tune", _some(left, beside), words, **evidence))
        return
    severity: Severity | None = "fault" if maps and min(pair.cosine for pair in maps) < 0.7 else None
    words = f"changed by {difference:.2g} of {'its' if len(left) == 1 else 'their'} norm, and the cause is not known"
    beside.found.append(finding("unknown", _some(left, beside), words, severity=severity, **evidence))


EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight", "embed_in.weight")


def _vocabulary(beside: Beside, maps: list[Pair]) -> None:
    """Embeddings that have no relation to the base's, while the rest has: those of another model, or tokenizer."""
    for pair in maps:
        if not pair.name.endswith(EMBEDDINGS):
            continue
        moved = _other_order(pair)
        if not moved and pair.cosine >= NO_RELATION:
            continue
        words = "has the rows of BASE in another order: the vocabulary of another tokenizer"
        words = words if moved else f"has no relation to BASE's (cosine {pair.cosine:.2f}): embeddings of another model"
        beside.found.append(finding("another-model", pair.name, words, cosine=round(pair.cosine, 4), moved=moved))
        beside.explain([pair.name], "another-model")


def _other_order(pair: Pair) -> bool:
    """Whether a tensor has the base's numbers in other places."""
    a, b = pair.facts, pair.base_facts
    if a is None or b is None or pair.difference < STRUCTURE or (a.least, a.most) != (b.least, b.most):
        return False
    same = math.isclose(a.rms, b.rms, rel_tol=1e-6) and math.isclose(a.row_ratio, b.row_ratio, rel_tol=1e-5)
    return same and math.isclose(a.mean, b.mean, rel_tol=1e-6, abs_tol=1e-6 * b.rms)


def _untied(beside: Beside) -> None:
    """An output layer of its own, where the base ties it to the embeddings."""
    own, base = beside.paired.own, beside.paired.base
    if base.model.config.get("tie_word_embeddings") is not True or own.model.live or base.model.live:
        return
    inputs = [x for name, x in own.facts.items() if name.endswith(EMBEDDINGS)]
    for name in beside.paired.extra:
        fact = own.facts.get(name)
        if fact is None or len(inputs) != 1 or not _tied_head(name, beside.paired) or fact.shape != inputs[0].shape:
            continue
        a, b = fact.signature, inputs[0].signature
        if a is not None and b is not None and float((a - b).norm()) > STRUCTURE * float(b.norm()):
            words = "differs from the embeddings that BASE ties it to"
            difference = round(float((a - b).norm() / b.norm()), 4)
            beside.found = [x for x in beside.found if x.cause != "untied"]
            beside.found.append(finding("untied", name, words, difference=difference))


def _some(pairs: list[Pair], beside: Beside) -> str:
    return "the model" if len(pairs) > 0.8 * len(beside.pairs) else tensors_words([pair.name for pair in pairs])


def _coarse(pair: Pair, beside: Beside) -> bool:
    """Whether a map has far fewer distinct values than that of the base, and is near it."""
    assert pair.facts is not None
    assert pair.base_facts is not None
    formats = getattr(beside.paired.own.model.weights, "quantised", None) or {}
    near = pair.cosine > 0.8 and pair.rank is None
    own, base = pair.facts.levels, pair.base_facts.levels
    in_steps = pair.changed_groups > 0 and STEPS[0] < pair.kurtosis / pair.changed_groups < STEPS[1]
    few = 0 < own <= 20 and own < 0.8 * base
    return near and (pair.name in formats or few or (in_steps and pair.changed_groups > 0.9 * pair.groups))


def _quantised(beside: Beside, coarse: list[Pair], all_maps: list[Pair]) -> None:
    """A quantisation; maps that lost far more than the others did were given too few bits."""
    usual = median(pair.difference for pair in coarse)
    bad = [pair for pair in coarse if pair.difference > max(3 * usual, 0.2) and (pair.facts and pair.facts.levels <= 5)]
    if len(bad) > len(coarse) / 2 or (len(coarse) < 3 and all(x.facts and x.facts.levels <= 4 for x in coarse)):
        bad = coarse if len(coarse) < len(all_maps) / 2 else []
    said = {name for x in beside.found if x.cause == "low-bits" for name in x.evidence.get("tensors", ())}
    fine = [pair for pair in coarse if pair not in bad and pair.name not in said]
    bad = [pair for pair in bad if pair.name not in said]
    if fine:
        levels = median(pair.facts.levels for pair in fine if pair.facts is not None)
        apart = median(pair.difference for pair in fine)
        words = f"quantised: {len(fine)} of {len(all_maps)} maps differ by {apart:.2g} of their norm"
        beside.found.append(
            finding(
                "quantised", _some(fine, beside), words, difference=round(usual, 5), levels=levels, tensors=len(fine)
            )
        )
    if bad:
        names = [pair.name for pair in bad]
        most = max(x.difference for x in bad)
        words = f"has few levels left: it differs by {most:.2g} of its norm, the others by {usual:.2g}"
        beside.found.append(finding("low-bits", tensors_words(names), words, tensors=names, usual=round(usual, 5)))
    beside.explain([pair.name for pair in coarse], "quantised")


def _low_rank(beside: Beside, low: list[Pair]) -> None:
    ranks = sorted({pair.rank for pair in low if pair.rank is not None})
    kinds = sorted({place_of(pair.name).kind.removesuffix(".weight").rpartition(".")[2] for pair in low})
    rank = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    words = f"a delta of rank {rank} was added to {len(low)} maps ({', '.join(kinds[:6])})"
    evidence: dict[str, Any] = {
        "ranks": ranks,
        "difference": round(median(pair.difference for pair in low), 5),
        "tensors": [pair.name for pair in low],
    }
    beside.found.append(finding("low-rank", tensors_words([pair.name for pair in low]), words, **evidence))


def _whole_files(beside: Beside, left: list[Pair]) -> list[str]:
    """The files that hold all maps that differ, and none that does not; empty where there are no such files."""
    maps: dict[str, list[Pair]] = {}
    for pair in beside.pairs.values():
        if pair.is_map and pair.facts is not None:
            maps.setdefault(pair.facts.file, []).append(pair)
    changed = sorted({pair.facts.file for pair in left if pair.facts is not None})
    whole = all(len(maps.get(x, ())) > 2 and sum(p in left for p in maps[x]) >= 0.9 * len(maps[x]) for x in changed)
    return changed if whole and len(changed) < len(maps) else []


def _agreement(beside: Beside) -> None:
    """Where nothing changed."""
    pairs = beside.pairs.values()
    if any(x.severity != "note" for x in beside.found) or any(pair.changed for pair in pairs) or not pairs:
        return
    alone = [*beside.paired.missing, *beside.paired.extra]
    if any(not _tied_head(name, beside.paired) for name in alone):
        return  # what both have is equal, and that is not all
    if all(pair.equal and pair.same_dtype for pair in pairs):
        words = f"all {len(pairs)} tensors have equal numbers"
        beside.found.append(finding("identical", "the model", words, tensors=len(pairs)))
        return
    rounded = [pair for pair in pairs if pair.rounded or not pair.same_dtype]
    most = max(pair.difference for pair in pairs)
    kinds = sorted({_cast_words(x.base_facts.dtype, x.facts.dtype) for x in rounded if x.facts and x.base_facts})
    words = f"differs by rounding alone ({', '.join(kinds[:3])}): at most {most:.2g} of the norm of a tensor"
    beside.found.append(finding("dtype", "the model", words, difference=most, tensors=len(rounded)))


def _cast_words(before: str, after: str) -> str:
    return f"{before} to {after}" if before != after else f"to 16 bits, stored as {after}"
