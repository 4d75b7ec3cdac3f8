"""Numbers that are no weights: not finite, zero, one number everywhere, random bits, few levels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from locater.commands.doctor.places import layers_words, tensors_words
from locater.commands.doctor.reading import Examined
from locater.commands.doctor.tensors import WILD, Facts
from locater.findings.causes import Finding, finding
from locater.layers.layout import AttentionLayout

RANDOM_SPREAD = 6.0  # between quartiles of log2 |x|; weights have 1.9, random bits 16 (float16) to 128
CLAMPED = (65504.0, 57344.0, 3.3895e38, 3.4028e38)  # the largest numbers of types: what is left of an infinite one
FEW_LEVELS, MANY_LEVELS = 4, 8  # distinct values in groups of 32
Kinds = Mapping[tuple[str, str], Mapping[int, Facts]]  # by stack and kind, then by layer


def kinds_of(facts: Iterable[Facts]) -> dict[tuple[str, str], dict[int, Facts]]:
    """Tensors of layers by stack and kind, then by layer."""
    table: dict[tuple[str, str], dict[int, Facts]] = {}
    for fact in facts:
        if fact.place.layer is not None:
            table.setdefault((fact.place.stack, fact.place.kind), {})[fact.place.layer] = fact
    return table


def values(facts: Sequence[Facts], broken: set[str]) -> Iterator[Finding]:
    for cause, words in (("random-bits", ""), ("overflow", ""), ("nonfinite", ""), ("wild", "")):
        some = [fact for fact in facts if fact.name not in broken and _value_cause(fact) == cause]
        if not some:
            continue
        broken |= {fact.name for fact in some}
        if cause == "wild":
            most = max(x.largest for x in some)
            words = f"has numbers of {most:.3g}, which no weight comes near"
            names = [x.name for x in some]
            yield finding("unknown", tensors_words(some), words, severity="fault", tensors=names, largest=most)
            continue
        if cause == "nonfinite":
            nan, inf = sum(x.nan for x in some), sum(x.inf for x in some)
            parts = [f"{count:,} {name}" for count, name in ((nan, "NaN"), (inf, "infinite")) if count]
            words = f"has {' and '.join(parts)} of {sum(x.numbers for x in some):,} numbers"
        spread = max(max(x.spread, x.wild) for x in some)
        evidence: dict[str, Any] = {
            "nan": sum(x.nan for x in some),
            "inf": sum(x.inf for x in some),
            "log2_spread": round(spread, 2),
        }
        yield finding(cause, tensors_words(some), words, tensors=[x.name for x in some], **evidence)


def _value_cause(fact: Facts) -> str:
    """Why numbers of a tensor are no weights; empty where they may be. Rows of other scales spread a map, not a row."""
    spread = fact.wild or (fact.spread if fact.is_map else 0.0)
    if spread > RANDOM_SPREAD and (not fact.finite or fact.largest > WILD):
        return "random-bits"
    if fact.is_map and fact.inner_spread > RANDOM_SPREAD:
        return "random-bits"  # of neighbours in one row: bits that were read as another type
    if fact.is_map and any(math.isclose(fact.largest, x, rel_tol=1e-3) for x in CLAMPED):
        return "overflow"
    if fact.inf and not fact.nan and (fact.dtype == "float16" or fact.largest > 1e37):
        return "overflow"
    if not fact.finite:
        return "nonfinite"
    return "wild" if fact.is_map and fact.largest > WILD else ""


def zeros(facts: Sequence[Facts], kinds: Kinds, broken: set[str], seen: Examined) -> Iterator[Finding]:
    """Maps that are zero. A layer whose values or outputs, or whose every map is zero does nothing."""
    writing = _writing_maps(seen)
    zero = [fact for fact in facts if fact.zero and fact.is_map]
    idle = {name for name in (fact.name for fact in zero) if _zero_everywhere(name, zero, kinds)}
    if idle:
        some = [fact for fact in zero if fact.name in idle]
        yield finding("zero", tensors_words(some), "is zero in every layer, as before training", severity="note")
    by_layer: dict[tuple[str, int | None], list[Facts]] = {}
    for fact in zero:
        if fact.name not in idle:
            by_layer.setdefault((fact.place.stack, fact.place.layer), []).append(fact)
    broken |= {fact.name for fact in zero}
    for (stack, layer), some in by_layer.items():
        names = [fact.name for fact in some]
        in_attention = [name for name in names if of_attention(name)]
        if layer is not None and (len(in_attention) > 1 or len(names) > 2 or writing & {*names}):
            evidence: dict[str, Any] = {"layers": [layer], "tensors": names}
            attention = len(in_attention) == len(names)
            count = (
                f"{len(names)} maps{' of attention' if attention else ''} are" if len(names) > 1 else f"{names[0]} is"
            )
            words = f"{'does nothing' if not attention or len(names) > 1 else 'attends for nothing'}: {count} zero"
            yield finding("zero-layer", layers_words(stack, [layer]), words, **evidence)
        else:
            yield finding("zero", tensors_words(some), tensors=names, layers=[] if layer is None else [layer])
    for (_, kind), layers in kinds.items():
        some = [fact for fact in layers.values() if fact.zero and not fact.is_map and fact.numbers > 1]
        if some and is_norm(kind) and not kind.endswith(("bias", "beta")) and len(some) <= len(layers) / 3:
            broken |= {fact.name for fact in some}
            yield finding("zero", tensors_words(some), "is a gain of zeros", tensors=[fact.name for fact in some])
    for fact in facts:
        start, stop = fact.longest_zeros
        if seen.heads and of_attention(fact.name):
            continue  # said of the head
        same = kinds.get((fact.place.stack, fact.place.kind), {}).values()
        alone = all(other.zero_rows == 0 for other in same if other is not fact)
        if not fact.zero and fact.is_map and stop - start >= max(8, fact.shape[0] // 8) and alone and len(same) > 1:
            words = f"has zeros in rows {start} to {stop - 1} of {fact.shape[0]}"
            yield finding("zero", fact.name, words, rows=[start, stop], tensors=[fact.name])


def _writing_maps(seen: Examined) -> set[str]:
    """Maps of values and outputs: where one of them is zero, what a layer attends to is lost."""
    found = [] if seen.model.reading is None else seen.model.reading.found
    parts = [part for item in found if isinstance(item, AttentionLayout) for part in (item.value, item.out)]
    return {name for part in parts if part is not None for name, _ in part.maps(seen.model.weights)}


def _zero_everywhere(name: str, zero: Sequence[Facts], kinds: Kinds) -> bool:
    fact = next(x for x in zero if x.name == name)
    layers = kinds.get((fact.place.stack, fact.place.kind), {})
    return len(layers) > 1 and all(other.zero for other in layers.values())


def of_attention(name: str) -> bool:
    return any(word in name.lower() for word in ("attn", "attention"))


def constants(facts: Sequence[Facts], kinds: Kinds, broken: set[str]) -> Iterator[Finding]:
    """One number everywhere. Gains of an untrained model are that in all layers, and no fault; nor are those of a last
    norm that an output map of its own may have taken in.
    """
    gains = [x for x in facts if is_norm(x.name) and not x.name.endswith("bias") and not x.is_map and x.numbers > 2]
    trained = len(gains) > 3 and sum(x.constant for x in gains) == 1
    head = any(x.is_map and x.name.endswith(("lm_head.weight", "embed_out.weight", "output.weight")) for x in facts)
    for fact in facts:
        if not fact.constant or fact.name in broken:
            continue
        layers = kinds.get((fact.place.stack, fact.place.kind), {})
        others = [other for other in layers.values() if other is not fact]
        alone = trained and not head and fact in gains and fact.place.layer is None
        apart = alone or (len(others) >= 2 and not any(other.constant for other in others))
        if fact.is_map or (apart and len(fact.shape) == 1 and fact.shape[0] > 1):
            broken.add(fact.name)
            words = f"holds {fact.least:.4g} everywhere"
            yield finding("constant", fact.name, words, value=fact.least, tensors=[fact.name])


def levels(kinds: Kinds, broken: set[str]) -> Iterator[Finding]:
    """Tensors with fewer distinct values than those of their kind in other layers."""
    few: list[Facts] = []
    coarse: list[Facts] = []
    for layers in kinds.values():
        known = [x for x in layers.values() if x.levels and x.is_map and x.name not in broken]
        usual = median(x.levels for x in known) if known else 0.0
        few += [x for x in known if x.levels <= FEW_LEVELS and usual > MANY_LEVELS]
        coarse += [x for x in known if x.levels <= 16 and x not in few]
    if few:
        most = max(x.levels for x in few)
        words = f"has {most:.0f} distinct values among 32 neighbours, other layers more than {MANY_LEVELS}"
        yield finding("low-bits", tensors_words(few), words, tensors=[x.name for x in few], levels=most)
    if coarse:
        levels = median(x.levels for x in coarse)
        words = f"quantised: {levels:.0f} distinct values among 32 neighbours"
        yield finding("quantised", tensors_words(coarse), words, severity="note", levels=levels)


def is_norm(kind: str) -> bool:
    return any(word in kind.lower() for word in ("norm", "ln_"))
