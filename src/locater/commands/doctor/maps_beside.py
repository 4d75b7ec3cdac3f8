"""What was done to maps as a whole: transposed, scaled, quantised, added to, trained, or replaced.

A cause is named where its rivals would leave other numbers. Training moves all numbers of a map, a little, and all maps
of its kind; an adapter adds something dense and small; rounding leaves errors of one size that do not lean either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from locater.commands.doctor.differences import FEW_PROBES, MANY_ROWS, RANK_PROBES
from locater.commands.doctor.other_places import moved_rows, other_order, rows_of_others, same_numbers
from locater.commands.doctor.pairs import STRUCTURE, TRAINED, Beside, Pair
from locater.commands.doctor.places import layers_words, tensors_words
from locater.commands.doctor.tensors import EMBEDDINGS, GROUP, place_of
from locater.commands.doctor.tensors_beside import NO_RELATION, transposed
from locater.findings.causes import Severity, finding

MOST = 0.5  # share of maps
MADE_BY = 0.8  # share of the squares of a difference that makes a cause of it
STEPS = (1.6, 2.45)  # kurtosis of errors of rounding to steps (1.8 if exact); normal numbers have 2.8 in groups of 32
ADDED = 0.5  # of the norm of a map: what an adapter adds at most
DENSE = 0.5  # share of groups of numbers that a delta of low rank changes at least
REPLACED = 0.5  # difference of those groups of numbers that changed, where most did not
FEW_GROUPS = 0.3  # share of groups
SOME_MAPS = 0.15  # difference from which on a change of some maps alone is none of training
NOISE = 0.1  # difference from which on noise is no training
FLAT = 1.6  # times the largest share that a direction of noise has
MANY_LEVELS = 0.8  # share of numbers that differ from each other
FEW_NUMBERS = 4.0  # kurtosis of a change of few numbers of each group
PRUNED = 0.3  # share of zeros
LOSSY = 0.12  # difference of a rounding that loses much of a map
CUT = 4.0  # times the square of its difference that a map becomes smaller where numbers are cut off, not rounded
NEAR = 0.6  # cosine of a map with what rounding leaves of it: 0.8 for signs alone
FEW_LEVELS = 20  # distinct values among 32 neighbours, of a map that was quantised
FEW_BITS, MANY_BITS = 3, 6  # of mantissa


def changed_maps(beside: Beside) -> None:
    """Maps that are transposed, scaled, or have blocks of another scale or shift."""
    turned = [x.name for x in beside.left() if x.is_map and x.cosine < TRAINED and transposed(x)]
    if turned:
        beside.explain(turned, "transposed")
        beside.found.append(finding("transposed", tensors_words(turned), tensors=turned))
    scaled: dict[float, list[str]] = {}
    for pair in beside.left():
        if pair.is_map and pair.beside_factor < STRUCTURE and abs(pair.factor - 1) > 2 * STRUCTURE:
            scaled.setdefault(float(f"{pair.factor:.3g}"), []).append(pair.name)
    for factor, names in scaled.items():
        _fault(beside, names, f"{'is' if len(names) == 1 else 'are'} {factor:.4g} times that of BASE", factor=factor)
    _blocks_of_maps(beside)
    _replaced(beside)
    count = sum(x.is_map for x in beside.pairs.values())
    for words, test in CUTS.items():
        _of_kind(beside, [x for x in beside.left() if x.is_map and test(x)], words, count)


def _fault(beside: Beside, names: list[str], words: str, cause: str = "unknown", **evidence: Any) -> None:
    beside.explain(names, cause)
    beside.found.append(finding(cause, tensors_words(names), words, severity="fault", tensors=names, **evidence))


def _blocks_of_maps(beside: Beside) -> None:
    """Blocks of 32 numbers with another scale, or with a constant added. A file has these in some maps; where most
    maps have them, rows or columns were scaled.
    """
    count_of_maps = sum(x.is_map for x in beside.pairs.values())
    for cause, of in (("lost-scales", "odd"), ("lost-zero-points", "shifted")):
        some = [pair for pair in beside.left() if pair.is_map and _made_by(pair, of)]
        if not some:
            continue
        empty = [x for x in some if of == "odd" and x.zero_groups > MOST * x.odd_groups]
        if empty:
            count = sum(x.zero_groups for x in empty)
            words = (
                f"has zeros in {count:,} of {sum(x.groups for x in empty):,} groups of 32 numbers, which BASE has not"
            )
            _fault(beside, [x.name for x in empty], words, "zero", groups=count)
            some = [x for x in some if x not in empty]
            if not some:
                continue
        count = sum(getattr(pair, f"{of}_groups") for pair in some)
        what = "another scale" if cause == "lost-scales" else "a constant added"
        words = f"has {what} in {count:,} of {sum(x.groups for x in some):,} groups of 32 numbers"
        named = cause if len(some) <= max(2, MOST * count_of_maps) or of == "shifted" else "unknown"
        _fault(beside, [x.name for x in some], words, named, groups=count)


def _made_by(pair: Pair, of: str) -> bool:
    """Whether nearly all of the difference is in groups with another scale, or with a constant added."""
    return pair.difference > STRUCTURE and getattr(pair, f"{of}_delta") > MADE_BY * pair.delta**2


def _replaced(beside: Beside) -> None:
    """Numbers of a few places that are others: training and adapters change all places. Tokens may be added."""
    for pair in beside.left():
        if not pair.is_map or not pair.groups or pair.name.endswith(EMBEDDINGS) or not pair.base_size:
            continue
        share = pair.changed_groups / pair.groups
        local = pair.difference / share**0.5 if share else 0.0
        if 0 < share < FEW_GROUPS and local > REPLACED:
            words = f"has other numbers in {pair.changed_groups:,} of {pair.groups:,} groups of 32, and none elsewhere"
            _fault(beside, [pair.name], words, groups=pair.changed_groups, difference=round(pair.difference, 5))


def leftovers(beside: Beside) -> None:
    """What is left: quantised, a low-rank delta, another step, training, or not known."""
    maps = [pair for pair in beside.left() if pair.is_map]
    all_maps = [pair for pair in beside.pairs.values() if pair.is_map]
    coarse = [pair for pair in maps if _coarse(pair, beside)]
    if coarse:
        usual = median(pair.difference for pair in coarse)  # a base that is in steps itself hides those of some maps
        alike = [x for x in maps if x not in coarse and x.rank is None and usual / 5 < x.difference < 3 * usual]
        coarse += alike if len(coarse) > len(alike) else []
        _quantised(beside, coarse, all_maps)
        maps = [pair for pair in beside.left() if pair.is_map]
    low = [pair for pair in maps if pair.rank is not None]
    if low and len(low) >= 0.8 * len(maps) and _low_rank(beside, low):
        beside.explain([pair.name for pair in beside.left()], "low-rank")
    left, maps = beside.left(), [pair for pair in beside.left() if pair.is_map]
    files = _whole_files(beside, left) if maps else []
    if files and all(pair.rank is None for pair in maps) and median(x.cosine for x in maps) > NO_RELATION:
        words = f"{'comes' if len(files) == 1 else 'come'} from another checkpoint: all maps in there differ "
        words += f"({len(left)} tensors), and none elsewhere"
        difference = round(median(pair.difference for pair in maps), 4)
        where = files[0] if len(files) == 1 else f"{len(files)} shards: {', '.join(files[:2])}"
        beside.found.append(finding("another-step", where, words, tensors=len(left), difference=difference))
        return
    _vocabulary(beside)
    _without_relation(beside)
    _averaged(beside, all_maps)
    _noise(beside, all_maps)
    _trained_or_not(beside, all_maps)


def _of_kind(beside: Beside, some: list[Pair], words: str, count: int) -> None:
    if some:
        apart = median(x.difference for x in some)
        words = f"{words} ({apart:.2g} of the norm of {len(some)} of {count} maps)"
        _fault(beside, [x.name for x in some], words, difference=round(apart, 4))


def _noise(beside: Beside, all_maps: list[Pair]) -> None:
    """Large changes that have no direction: those of training have some."""
    large = [x for x in beside.left() if x.is_map and x.difference > NOISE]
    if large and sum(map(_noisy, large)) > MOST * len(large):
        words = "differs by what has no direction, as noise has none, and training has"
        _of_kind(beside, large, words, len(all_maps))


def _clipped(pair: Pair) -> bool:
    a, b = pair.facts, pair.base_facts
    if a is None or b is None or pair.difference < STRUCTURE:
        return False
    few = pair.kurtosis > FEW_NUMBERS * max(pair.changed_groups, 1)  # most numbers are as they were
    if not few or 0 < a.levels < MANY_LEVELS * GROUP:
        return False
    return a.most == -a.least != 0 and a.most < 0.95 * min(b.most, -b.least)


def _pruned(pair: Pair) -> bool:
    a, b = pair.facts, pair.base_facts
    if a is None or b is None or pair.difference < LOSSY or a.zeros < max(PRUNED, 2 * b.zeros):
        return False
    return a.levels > MANY_LEVELS * (1 - a.zeros) * GROUP  # those that are left are as they were, and not in steps


CUTS = {
    "was clipped: its largest and smallest number are opposites, and nearer to zero than in BASE": _clipped,
    "was pruned: far more numbers are zero than in BASE": _pruned,
}


def _noisy(pair: Pair) -> bool:
    """Whether the largest direction of D has no more than that of white noise has, by the same number of probes."""
    if pair.difference < NOISE or not pair.shares or pair.facts is None:
        return False
    rows, columns = pair.facts.shape[0], pair.numbers // pair.facts.shape[0]
    probes_ = RANK_PROBES if rows <= MANY_ROWS else FEW_PROBES
    flat = (1 + (probes_ / min(rows, columns)) ** 0.5) ** 2 / probes_
    return pair.shares[0] < FLAT * flat


def _trained_or_not(beside: Beside, all_maps: list[Pair]) -> None:
    left = beside.left()
    maps = [pair for pair in left if pair.is_map]
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
    evidence: dict[str, Any] = {"difference": round(difference, 5), "cosine": round(cosine, 5), "tensors": len(left)}
    far = [x for x in maps if x.cosine < TRAINED or x.difference > max(30 * difference, 2 * SOME_MAPS)]
    if maps and not far and (everywhere or difference < 0.01) and max(x.difference for x in maps) < 30 * difference:
        words = f"trained further: {len(maps)} of {len(all_maps)} maps differ by {difference:.2g} of their norm, "
        words += "of full rank"
        beside.found.append(finding("fine-tune", _some(left, beside), words, **evidence))
        return
    vocabulary = [x for x in maps if x.name.endswith(EMBEDDINGS)]
    apart = not everywhere and any(x.difference > SOME_MAPS for x in maps if x not in vocabulary)
    severity: Severity | None = "fault" if far or apart else None
    words = f"changed by {difference:.2g} of {'its' if len(left) == 1 else 'their'} norm, and the cause is not known"
    beside.found.append(finding("unknown", _some(left, beside), words, severity=severity, **evidence))


# ---- no relation to the base ----


def _vocabulary(beside: Beside) -> None:
    """Embeddings that have no relation to the base's, while the rest has: those of another model, or tokenizer."""
    for pair in beside.left():
        few = 0 < pair.changed_groups < FEW_GROUPS * pair.groups
        if not pair.is_map or not pair.name.endswith(EMBEDDINGS) or not (few or pair.cosine < TRAINED):
            continue
        rows = moved_rows(beside.paired, pair)
        if rows < MOST and pair.cosine >= NO_RELATION:
            continue
        if few and pair.cosine >= TRAINED:
            _fault(beside, [pair.name], f"has rows of BASE in other places ({rows:.0%} of those that changed)")
            continue
        words = f"has rows of BASE in other places ({rows:.0%} of them): the vocabulary of another tokenizer"
        if rows < MOST:
            words = f"has no relation to BASE's (cosine {pair.cosine:.2f}): embeddings of another model"
        evidence: dict[str, Any] = {"cosine": round(pair.cosine, 4), "moved": round(rows, 3), "tensors": [pair.name]}
        beside.found.append(finding("another-model", pair.name, words, **evidence))
        beside.explain([pair.name], "another-model")


def _without_relation(beside: Beside) -> None:
    """Maps that have nothing of the base's: its numbers in other places, or other numbers."""
    strange = [pair for pair in beside.left() if pair.is_map and pair.cosine < NO_RELATION]
    orders: dict[tuple[str, str], list[str]] = {}
    for pair in [x for x in strange if same_numbers(x)]:
        cause, words = other_order(beside.paired, pair)
        orders.setdefault((cause or "unknown", words or "has the numbers of BASE in other places"), []).append(
            pair.name
        )
    for (cause, words), names in orders.items():
        _fault(beside, names, words, cause)
    strange = [pair for pair in strange if not pair.explained]
    foreign: dict[str, list[str]] = {}
    for pair in strange:
        if other := rows_of_others(beside.paired, pair):
            foreign.setdefault(place_of(other).kind, []).append(pair.name)
    for kind, names in foreign.items():
        _fault(beside, names, f"has rows of {kind} in BASE: parts of maps were cut in the wrong order", "fused-order")
    strange = [pair for pair in strange if not pair.explained]
    by_layer: dict[tuple[str, int | None], list[Pair]] = {}
    for pair in strange:
        place = place_of(pair.name)
        by_layer.setdefault((place.stack, place.layer), []).append(pair)
    drawn = {key: some for key, some in by_layer.items() if len(some) > 1 and all(map(_other_numbers, some))}
    if drawn:
        names = [x.name for some in drawn.values() for x in some]
        cosine = max(abs(beside.pairs[n].cosine) for n in names)
        words = (
            f"{len(names)} maps have no relation to BASE's (cosine at most {cosine:.2f}): of another model, or drawn"
        )
        layers = sorted({layer for _, layer in drawn if layer is not None})
        where = layers_words("", layers) if layers else tensors_words(names)
        beside.explain(names, "another-model")
        beside.found.append(
            finding("another-model", where, words, tensors=names, layers=layers, cosine=round(cosine, 4))
        )
    names = [x.name for x in strange if not x.explained]
    if names:
        cosine = median(beside.pairs[n].cosine for n in names)
        words = f"{'has' if len(names) == 1 else 'have'} no relation to BASE's (cosine {cosine:.2f})"
        _fault(beside, names, words, cosine=round(cosine, 4))


def _other_numbers(pair: Pair) -> bool:
    """Whether a map has numbers of its own, of a size that weights have, and not a few values in other places."""
    if pair.facts is None or pair.base_facts is None or same_numbers(pair) or 0 < pair.facts.levels <= FEW_LEVELS:
        return False
    alike = 0.1 < pair.facts.rms / max(pair.base_facts.rms, 1e-30) < 10
    return alike and abs(pair.cosine) < 0.1 and abs(pair.facts.rms / pair.base_facts.rms - 1) > 1e-3


def _averaged(beside: Beside, all_maps: list[Pair]) -> None:
    """Where all maps are the same share of the base's, and the rest of each has no relation to it, two models were
    averaged: noise, or training, is added to the whole of a map.
    """
    maps = [x for x in beside.left() if x.is_map and not x.name.endswith(EMBEDDINGS)]
    if len(maps) < MOST * len(all_maps) or len(maps) < 4:
        return
    factors = sorted(x.factor for x in maps)
    low, middle, high = factors[len(factors) // 10], median(factors), factors[-1 - len(factors) // 10]
    if 0.1 < middle < 0.9 and high - low < 0.05 and median(x.cosine for x in maps) < TRAINED:
        words = (
            f"is {middle:.2g} of BASE and the rest has no relation to it, in {len(maps)} maps: an average with another"
        )
        beside.explain([x.name for x in beside.left()], "another-model")
        beside.found.append(finding("another-model", "the model", words, share=round(middle, 3), maps=len(maps)))


def _some(pairs: Sequence[Pair], beside: Beside) -> str:
    return "the model" if len(pairs) > 0.8 * len(beside.pairs) else tensors_words([pair.name for pair in pairs])


# ---- rounding ----


def _coarse(pair: Pair, beside: Beside) -> bool:
    """Whether a map has far fewer distinct values than that of the base, and is near it."""
    assert pair.facts is not None
    assert pair.base_facts is not None
    near = pair.cosine > NEAR and pair.rank is None
    own, base = pair.facts.levels, pair.base_facts.levels
    in_steps = pair.changed_groups > 0 and STEPS[0] < pair.kurtosis / pair.changed_groups < STEPS[1]
    in_steps = in_steps and pair.difference <= LOSSY  # larger steps leave few values; first steps of AdamW are as even
    few = 0 < own <= FEW_LEVELS and own < 0.8 * base
    few = few or (pair.facts.mantissa <= FEW_BITS and pair.base_facts.mantissa >= MANY_BITS)
    return near and (_in_few_bits(pair, beside) or few or (in_steps and pair.changed_groups > 0.9 * pair.groups))


def _in_few_bits(pair: Pair, beside: Beside) -> bool:
    """Whether a map is stored in a quantised format."""
    return pair.name in (getattr(beside.paired.own.model.weights, "quantised", None) or {})


def _quantised(beside: Beside, coarse: list[Pair], all_maps: list[Pair]) -> None:
    """A quantisation; maps that lost far more than the others did, or than rounding loses, were given too few bits."""
    usual = median(pair.difference for pair in coarse)
    bad = [pair for pair in coarse if pair.difference > max(3 * usual, 0.2) and (pair.facts and pair.facts.levels <= 5)]
    if len(bad) > len(coarse) / 2 or (len(coarse) < 3 and all(x.facts and x.facts.levels <= 4 for x in coarse)):
        bad = coarse if len(coarse) < len(all_maps) / 2 else []
    said = {name for x in beside.found if x.cause == "low-bits" for name in x.evidence.get("tensors", ())}
    bad = [pair for pair in bad if pair.name not in said]
    rough = [x for x in coarse if x not in bad and x.name not in said and not _in_few_bits(x, beside)]
    rough = rough if rough and _rough(rough) else []
    fine = [pair for pair in coarse if pair not in bad and pair not in rough and pair.name not in said]
    if fine:
        levels = median(pair.facts.levels for pair in fine if pair.facts is not None)
        apart = median(pair.difference for pair in fine)
        words = f"quantised: {len(fine)} of {len(all_maps)} maps differ by {apart:.2g} of their norm"
        evidence: dict[str, Any] = {"difference": round(usual, 5), "levels": levels, "tensors": len(fine)}
        beside.found.append(finding("quantised", _some(fine, beside), words, **evidence))
    if bad:
        names = [pair.name for pair in bad]
        most = max(x.difference for x in bad)
        words = f"has few levels left: it differs by {most:.2g} of its norm, the others by {usual:.2g}"
        beside.found.append(finding("low-bits", tensors_words(names), words, tensors=names, usual=round(usual, 5)))
    if rough:
        apart, factor = median(x.difference for x in rough), median(x.factor for x in rough)
        words = f"lost {apart:.2g} of the norm of {len(rough)} of {len(all_maps)} maps to rounding"
        words += f", which made them {1 - factor:.0%} smaller: numbers were cut off" if factor < 0.97 else ""
        names = [x.name for x in rough]
        more: dict[str, Any] = {"difference": round(apart, 4), "factor": round(factor, 4)}
        beside.found.append(finding("low-bits", _some(rough, beside), words, tensors=names, **more))
    beside.explain([pair.name for pair in coarse], "quantised")


def _rough(pairs: Sequence[Pair]) -> bool:
    """Whether rounding cost more than it does with 4 bits, or leans one way: numbers were cut off, or lost."""
    apart, smaller = median(x.difference for x in pairs), 1 - median(x.factor for x in pairs)
    return apart > LOSSY or smaller > max(CUT * apart**2, STRUCTURE)


def _low_rank(beside: Beside, low: list[Pair]) -> bool:
    """A delta of low rank, where it is one that an adapter adds: dense, and smaller than the map."""
    wrong = [x for x in low if x.difference > ADDED or x.changed_groups < DENSE * x.groups]
    for pair in wrong:
        spot = f"in {pair.changed_groups:,} of {pair.groups:,} groups of 32 numbers" if pair.groups else ""
        words = f"differs by {pair.difference:.2g} of its norm, of rank {pair.rank} {spot}: no adapter adds that"
        _fault(beside, [pair.name], words, difference=round(pair.difference, 4), rank=pair.rank)
    low = [x for x in low if x not in wrong]
    if not low:
        return False
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
    return True


def _whole_files(beside: Beside, left: Sequence[Pair]) -> list[str]:
    """The files that hold all maps that differ, and none that does not; empty where there are no such files."""
    maps: dict[str, list[Pair]] = {}
    for pair in beside.pairs.values():
        if pair.is_map and pair.facts is not None:
            maps.setdefault(pair.facts.file, []).append(pair)
    changed = sorted({pair.facts.file for pair in left if pair.facts is not None})
    whole = all(len(maps.get(x, ())) > 2 and sum(p in left for p in maps[x]) >= 0.9 * len(maps[x]) for x in changed)
    return changed if whole and len(changed) < len(maps) else []
