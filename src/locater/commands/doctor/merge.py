"""Whether an adapter is in a model: the difference D of each map from the base, regressed on what the adapter adds, E.

D = c E + rest. Merged once c is 1, not merged 0, subtracted -1, merged twice 2 (as with twice the alpha: the weights
are the same). On another base the rest is that base's difference, also in maps that the adapter leaves alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from locater.commands.doctor.differences import ROUNDING_NOISE
from locater.commands.doctor.pairs import Pair, Paired
from locater.commands.doctor.places import tensors_words
from locater.commands.doctor.reading import Model
from locater.errors import LocaterError
from locater.findings.causes import Finding, finding
from locater.sources.adapter_folder import AdaptedWeights, open_adapter
from locater.sources.open_source import open_source

ABSENT = 0.1  # a dose that is none
EXACT = 0.1  # what a dose may be off 1
OTHER_BASE = 0.2  # share of the squares of D that neither the adapter nor rounding explains
ALIKE = 0.7  # cosine of two sketches of 64 numbers: by chance it is 0.1
SURE = 4.0  # standard errors


@dataclass(frozen=True)
class Dose:
    """How much of the adapter one map has; `rest` is the share of the squares of D that is neither it nor rounding."""

    pair: Pair
    dose: float
    error: float
    rest: float

    @property
    def absent(self) -> bool:
        return abs(self.dose) < ABSENT + SURE * self.error

    @property
    def right(self) -> bool:
        return abs(self.dose - 1) < EXACT + SURE * self.error


def open_adapter_on(adapter: str, base: Model) -> AdaptedWeights:
    """The adapter on the base that was given, whatever base it names."""
    if Path(adapter).is_dir():
        weights, _ = open_adapter(Path(adapter), lambda settings, where, folder: (base.weights, base.config, base.name))
    else:
        weights, _ = open_source(adapter, base=base.name)
    if not isinstance(weights, AdaptedWeights):
        raise LocaterError(f"{adapter}: not an adapter of peft: give the folder with its adapter_config.json")
    return weights


def dose_of(pair: Pair) -> Dose:
    """The regression of D on E for one map."""
    assert pair.facts is not None
    assert pair.base_facts is not None
    square = pair.expected**2
    dose = pair.expected_dot / square
    noise = max(ROUNDING_NOISE.get(x.dtype, 1e-12) for x in (pair.facts, pair.base_facts)) * pair.size**2
    rest = max(0.0, pair.delta**2 - dose**2 * square)
    error = math.sqrt(max(rest, noise) / max(pair.numbers, 1)) / pair.expected
    beyond = max(0.0, rest - 3 * noise) / (pair.delta**2 or 1.0)
    return Dose(pair, dose, error, beyond)


def findings_of_merge(paired: Paired, explain: Callable[[Sequence[str], str], None]) -> list[Finding]:
    """Whether the adapter is in the model as it should be. Maps that it accounts for are explained."""
    pairs = [pair for pair in paired.pairs.values() if pair.of_adapter]
    doses = [dose_of(pair) for pair in pairs if pair.expected > 0 and not pair.other_shape]
    if not doses:
        return [finding("unknown", "the adapter", "changes no tensor of MODEL", severity="fault")]
    names = [x.pair.name for x in doses]
    absent, present = [x for x in doses if x.absent and not x.right], [x for x in doses if not x.absent]
    dose = sum(x.pair.expected_dot for x in doses) / sum(x.pair.expected**2 for x in doses)
    usual = median(x.dose for x in present) if present else dose
    evidence: dict[str, Any] = {"dose": round(usual, 4), "maps": len(doses), "with": len(present)}
    moved = _moved_base(paired, doses)
    if moved and abs(dose - 1) < 0.25:
        explain([*paired.pairs], "wrong-base")
        words = f"has the adapter with dose {dose:.2f}, and differs from BASE beside it: {moved}"
        return [finding("wrong-base", "the model", words, dose=round(dose, 4), maps=len(doses), beside=moved)]
    elsewhere = _elsewhere(paired, absent)
    if elsewhere is not None:
        explain([x.pair.name for x in doses], "adapter")
        cause, where, words = elsewhere
        return [finding(cause, where, words, severity="fault", **evidence)]
    if not present:
        others = [x for x in absent if x.pair.rank is not None]
        if len(others) > len(absent) / 2:
            explain([x.pair.name for x in others], "adapter")
            words = f"was added to {len(others)} maps of the adapter, and nothing of the adapter: another one?"
            ranks = sorted({x.pair.rank for x in others if x.pair.rank is not None})
            words = f"a delta of rank {' or '.join(map(str, ranks[:3]))} {words}"
            return [finding("unknown", tensors_words(names), words, severity="fault", **evidence)]
        unchanged = all(not x.pair.changed for x in doses)
        words = f"has nothing of the adapter in any of {len(doses)} maps"
        words += " (they are as in BASE)" if unchanged else f" (dose {dose:.2f}; they differ from BASE otherwise)"
        return [finding("not-merged", tensors_words(names), words, **evidence)]
    explain([x.pair.name for x in present if x.rest < OTHER_BASE], "adapter")
    explain([x.pair.name for x in doses if not x.pair.is_map], "adapter")
    if absent and len(absent) + len(present) == len(doses):
        lost = [x.pair.name for x in absent]
        words = f"{'lacks' if len(lost) == 1 else 'lack'} the adapter, which {len(present)} of {len(doses)} maps have"
        words += f" with dose {usual:.2f}" if abs(usual - 1) > EXACT else ""
        return [finding("half-merged", tensors_words(lost), words, **evidence)]
    if all(x.right for x in doses):
        words = f"has the adapter in all {len(doses)} maps, once (dose {usual:.3f})"
        return [finding("adapter", tensors_words(names), words, **evidence)]
    wrong = [x for x in present if not x.right]
    where = tensors_words([x.pair.name for x in wrong])
    if usual < 0:
        return [finding("wrong-sign", where, f"have the adapter with dose {usual:.2f}: it was subtracted", **evidence)]
    times = "merged twice, or with twice the alpha" if abs(usual - 2) < 0.1 else "another alpha, rank or scale"
    words = f"have the adapter with dose {usual:.3g} in {len(wrong)} of {len(doses)} maps: {times}"
    return [finding("wrong-dose", where, words, **evidence)]


def _elsewhere(paired: Paired, absent: Sequence[Dose]) -> tuple[str, str, str] | None:
    """(cause, where, words) where maps that lack what the adapter adds to them have it the other way round, or have
    what it adds to another map; both are known by the sketch R^T D R.
    """
    turned: list[str] = []
    moved: dict[str, str] = {}
    expected = {
        x.name: x.expected_signature
        for x in paired.pairs.values()
        if x.of_adapter and x.expected_signature is not None and x.expected > 0
    }
    for pair in (x.pair for x in absent):
        d = _signature_of(pair)
        own = expected.get(pair.name)
        if d is None or own is None or not pair.changed:
            continue
        side = math.isqrt(len(own))
        if pair.facts is not None and len({*pair.facts.shape}) == 1 and _alike(d, own.view(side, side).mT.flatten()):
            turned.append(pair.name)
            continue
        others = {name: x for name, x in expected.items() if name != pair.name and _same_shape(paired, name, pair)}
        found = next((name for name, x in others.items() if _alike(d, x)), None)
        if found is not None:
            moved[pair.name] = found
    if len(turned) > len(absent) / 3:
        return "transposed", tensors_words(turned), "have what the adapter adds to them the other way round"
    if len(moved) > len(absent) / 3:
        name, source = next(iter(moved.items()))
        words = f"have what the adapter adds to other maps ({name}: that of {source})"
        return "unknown", tensors_words([*moved]), words
    return None


def _signature_of(pair: Pair) -> Tensor | None:
    a, b = (None if x is None else x.signature for x in (pair.facts, pair.base_facts))
    return None if a is None or b is None else a - b


def _same_shape(paired: Paired, name: str, pair: Pair) -> bool:
    other = paired.pairs[name].facts
    return other is not None and pair.facts is not None and other.shape == pair.facts.shape


def _alike(d: Tensor, e: Tensor) -> bool:
    return float((d.double() * e.double()).sum()) > ALIKE * float(d.double().norm() * e.double().norm())


def _moved_base(paired: Paired, doses: Sequence[Dose]) -> str:
    """What shows that the base of the model is another one; empty where nothing does."""
    others = [pair for pair in paired.pairs.values() if pair.is_map and not pair.of_adapter]
    changed = [pair for pair in others if pair.changed]
    rest = [x for x in doses if x.rest > OTHER_BASE and x.pair.is_map]
    maps = [x for x in doses if x.pair.is_map]
    if len(rest) > len(maps) / 2 and (not others or len(changed) > len(others) / 2):
        apart = median(pair.difference for pair in changed) if changed else median(x.rest for x in rest)
        return f"{len(changed)} of {len(others)} maps without adapter differ by {apart:.2g} of their norm"
    return ""
