"""A model beside its base: the order in which causes are looked for, and what is said where nothing changed."""

from __future__ import annotations

from typing import Any

from locater.commands.doctor.alone import findings_alone
from locater.commands.doctor.elsewhere import moved_tensors
from locater.commands.doctor.heads_beside_base import findings_of_heads
from locater.commands.doctor.maps_beside import changed_maps, leftovers
from locater.commands.doctor.merge import findings_of_merge
from locater.commands.doctor.pairs import Beside, Pair, Paired
from locater.commands.doctor.places import heads_words
from locater.commands.doctor.reading import Examined
from locater.commands.doctor.settings_beside import other_settings
from locater.commands.doctor.tensors import place_of
from locater.commands.doctor.tensors_beside import (
    another_model,
    missing_tensors,
    other_shapes,
    scaled_model,
    tied_head,
    untied,
)
from locater.commands.doctor.undoing import Undone
from locater.commands.doctor.vectors_beside import changed_vectors, lost_biases, shifted_gains
from locater.findings.causes import Finding, finding

# what the base may tell better than the file alone, which then is silent unless the base tells nothing
BETTER_BESIDE = (
    *("duplicated-layer", "copied-head", "scaled-head", "scaled-queries", "unknown", "lost-scales", "lost-zero-points"),
    *("shifted-gain", "rotary-order", "quantised", "dtype"),
)


def findings_beside(
    paired: Paired, with_adapter: bool = False, undone: Undone | None = None, stored: Examined | None = None
) -> list[Finding]:
    """Everything that sets a model apart from its base; `stored` is the model as it is stored, where `paired` has it
    with what was `undone`.
    """
    beside = Beside(paired)
    alone = _of_the_file(beside, stored or paired.own)
    if with_adapter:
        beside.found += findings_of_merge(paired, beside.explain)
    _rewritten(beside, undone)
    other_settings(beside)
    missing_tensors(beside)
    untied(beside)
    other_shapes(beside)
    if not scaled_model(beside) and not another_model(beside):
        moved_tensors(beside)
        shifted_gains(beside)
        findings_of_heads(beside)
        lost_biases(beside)
        changed_vectors(beside)
        changed_maps(beside)
        leftovers(beside)
    _kept(beside, alone)
    _agreement(beside, undone)
    return beside.found


def _of_the_file(beside: Beside, stored: Examined) -> list[Finding]:
    """What the file of the model says alone, and the base does not say of itself; returns what BASE may tell better."""
    of_base = {(x.cause, x.where) for x in findings_alone(beside.paired.base)}
    biased = any(name.endswith("bias") and "norm" not in name for name in beside.paired.base.model.names)
    later = []
    for item in findings_alone(stored):
        if (item.cause, item.where) in of_base or (item.cause == "lost-biases" and not biased):
            continue
        if item.cause in BETTER_BESIDE:
            later.append(item)
            continue
        beside.found.append(item)
        beside.explain(item.evidence.get("tensors", ()), item.cause)
    return later


def _kept(beside: Beside, alone: list[Finding]) -> None:
    """Faults of the file alone stay where no fault was found beside the base, and nothing shows that they are none."""
    if any(x.severity == "fault" for x in beside.found):
        return
    for item in alone:
        pairs = _pairs_of(beside, item)
        if item.severity == "fault" and any(x.changed and x.explained != "equivalent" for x in pairs):
            beside.found.append(item)


def _pairs_of(beside: Beside, item: Finding) -> list[Pair]:
    """The tensors that a finding is about."""
    names = item.evidence.get("tensors") or ([item.where] if item.where in beside.pairs else [])
    layers = {*item.evidence.get("layers", ()), *(layer for layer, _ in item.evidence.get("heads", ()))}
    if not isinstance(names, int) and names:
        return [beside.pairs[name] for name in names if name in beside.pairs]
    return [x for name, x in beside.pairs.items() if not layers or place_of(name).layer in layers]


def _rewritten(beside: Beside, undone: Undone | None) -> None:
    """What was undone before both were compared."""
    if undone is None:
        return
    if undone.steps:
        words = f"is stored otherwise, and compared without that: {'; '.join(undone.steps)}"
        beside.found.append(finding("equivalent", "the model", words, steps=list(undone.steps)))
    for layer, acts in undone.wrong:
        right = beside.paired.base.model.reading
        heads = len(acts) if right is None else len({*acts})
        at = [(layer, head) for head, source in enumerate(acts) if source != head // (len(acts) // heads)]
        words = "meet keys and values of other heads than in BASE: these were repeated in turn, and not in place"
        evidence: dict[str, Any] = {"heads": at, "source": list(acts)}
        beside.found.append(finding("permuted-heads", heads_words(at), words, **evidence))


def _agreement(beside: Beside, undone: Undone | None) -> None:
    """Where nothing changed."""
    pairs = beside.pairs.values()
    rewritten = undone is not None
    if any(x.severity != "note" for x in beside.found) or any(pair.changed for pair in pairs) or not pairs:
        return
    alone = [*beside.paired.missing, *beside.paired.extra]
    if rewritten or any(not tied_head(name, beside.paired) for name in alone):
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
