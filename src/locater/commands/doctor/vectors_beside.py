"""Gains and biases beside those of the base: shifted, lost, scaled, one number everywhere, changed out of proportion.

Training moves every number of a model about as far, by its learning rate; so gains, which are near 1, change by less of
their size than maps do. A gain that moved much further than the maps was not trained.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from torch import Tensor

from locater.commands.doctor.pairs import STRUCTURE, Beside, Pair
from locater.commands.doctor.places import tensors_words
from locater.findings.causes import finding

GAINS_CHANGED = 0.1  # of their norm
BIASES_CHANGED = 0.7  # of theirs, which is small, so that training changes more of it
FURTHER = 4.0  # times as far as the numbers of maps moved


def _values(pair: Pair) -> tuple[Tensor, Tensor] | None:
    if pair.facts is None or pair.base_facts is None or pair.other_shape:
        return None
    a, b = pair.facts.values, pair.base_facts.values
    return None if a is None or b is None or len(a) < 2 or a.shape != b.shape else (a, b)


def is_bias(name: str) -> bool:
    return name.endswith(("bias", "beta", "shift"))


def shifted_gains(beside: Beside) -> None:
    """Gains that are off by one."""
    off: dict[int, list[str]] = {}
    for pair in beside.left():
        values = _values(pair)
        if values is None or pair.facts is None:
            continue
        a, b = values
        d = a - b
        shift, beside_shift = float(d.mean()), float(d.std())
        rounding = pair.rounding * pair.facts.rms  # large gains of 16 bits lose the last of what was added
        if abs(abs(shift) - 1) < 0.02 + rounding and beside_shift < 0.02 + rounding and not is_bias(pair.name):
            off.setdefault(round(shift), []).append(pair.name)
    for shift, names in off.items():
        beside.explain(names, "shifted-gain")
        words = f"has one {'added to' if shift > 0 else 'subtracted from'} each of {len(names)} gains"
        found = finding("shifted-gain", tensors_words(names), words, tensors=names, shift=shift)
        beside.found.append(found)


def lost_biases(beside: Beside) -> None:
    """Biases that became zero, where that changes what is computed."""
    zero: list[str] = []
    for pair in beside.left():
        values = _values(pair)
        if values is not None and is_bias(pair.name) and not float(values[0].norm()) and float(values[1].norm()):
            zero.append(pair.name)
    if zero:
        beside.explain(zero, "lost-biases")
        beside.found = [x for x in beside.found if x.cause != "lost-biases" or "tensors" in x.evidence]
        words = (
            "is zero, and is not in BASE" if len(zero) == 1 else f"are zero, and are not in BASE ({len(zero)} biases)"
        )
        beside.found.append(finding("lost-biases", tensors_words(zero), words, tensors=zero))


def changed_vectors(beside: Beside) -> None:
    """Vectors that no training of this model's maps changes so."""
    constant: list[Pair] = []
    scaled: dict[float, list[str]] = {}
    strange: list[Pair] = []
    usual = _usual_movement(beside)
    for pair in beside.left():
        values = _values(pair)
        if values is None or pair.is_map or pair.facts is None:
            continue
        _, b = values
        limit = BIASES_CHANGED if is_bias(pair.name) else GAINS_CHANGED
        if pair.facts.constant and float(b.std()) > STRUCTURE * float(b.norm()) / len(b) ** 0.5:
            constant.append(pair)
        elif pair.beside_factor < STRUCTURE and abs(pair.factor - 1) > 2 * STRUCTURE and _further(pair, usual):
            scaled.setdefault(float(f"{pair.factor:.2g}"), []).append(pair.name)
        elif pair.difference > limit and _further(pair, usual):
            strange.append(pair)
    if constant:
        names = [x.name for x in constant]
        beside.explain(names, "constant")
        numbers = sorted({x.facts.least for x in constant if x.facts})
        words = f"holds {numbers[0]:.4g} everywhere, and does not in BASE"
        said = {n for x in beside.found if x.cause == "constant" for n in x.evidence.get("tensors", ())}
        if not {*names} <= said:
            beside.found.append(finding("constant", tensors_words(names), words, tensors=names, value=numbers[0]))
    for factor, names in scaled.items():
        words = f"{'is' if len(names) == 1 else 'are'} {factor:.4g} times that of BASE, and the maps are not"
        _fault(beside, names, words, factor=factor)
    if strange:
        apart = median(x.difference for x in strange)
        words = f"changed by {apart:.2g} of their norm, {_beside_maps(usual)}: no training does that"
        _fault(beside, [x.name for x in strange], words, difference=round(apart, 4))


def _usual_movement(beside: Beside) -> float:
    """How far the numbers of maps moved that training may have moved."""
    maps = [x for x in beside.pairs.values() if x.is_map and not x.explained and not x.other_shape]
    return median(x.movement if x.changed else 0.0 for x in maps) if maps else 0.0


def _further(pair: Pair, usual: float) -> bool:
    return pair.movement > FURTHER * usual


def _beside_maps(usual: float) -> str:
    return "much further than maps did" if usual else "and the maps did not"


def _fault(beside: Beside, names: list[str], words: str, **evidence: Any) -> None:
    beside.explain(names, "unknown")
    beside.found.append(finding("unknown", tensors_words(names), words, severity="fault", tensors=names, **evidence))
