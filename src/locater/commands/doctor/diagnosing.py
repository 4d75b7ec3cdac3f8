"""`doctor()`: what is wrong with a model, alone, beside its base, and with an adapter that should be in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from locater.commands.doctor.alone import findings_alone
from locater.commands.doctor.reading import Examined, Model, examine, find_attention, open_model, source_name
from locater.commands.doctor.tensors import Facts
from locater.errors import DamagedError, LocaterError
from locater.findings.causes import Finding, finding
from locater.numerics import finite_or_none
from locater.results.diagnosis import Diagnosis
from locater.sources.open_source import Source
from locater.sources.remote import session

Progress = Callable[[Iterable[Any], int], Iterable[Any]]
WITHOUT_BASE = (
    "give --base: rotary order, shifted gains, moved layers, a lost scale, a wrong merge and another model show only "
    "beside BASE"
)


def doctor(
    source: Source,
    base: Source | None = None,
    adapter: str | None = None,
    *,
    progress: Progress | None = None,
    download: bool = False,
    **names: Any,
) -> Diagnosis:
    """Is this checkpoint what it should be? Every tensor of `source` is read once, and nothing is run.

    `source` and `base` are an nn.Module, a folder, a weights file, a hub id or an address. With `base`, doctor says
    what was done to it; with `adapter`, a folder of peft that should be merged into it, whether it was, once, and into
    the right base.

    >>> from torch import nn
    >>> doctor(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2)).broken
    False
    """
    start = time.perf_counter()
    shown = source_name(source)
    with session():
        try:
            model = open_model(source, shown, download)
            find_attention(model, **names)
            seen = examine(model, progress)
        except DamagedError as error:  # the files contradict themselves, so nothing more is known of them
            damaged = finding(error.cause, "files", str(error).removeprefix(f"{shown}: "))
            return Diagnosis(shown, [damaged])
    found = findings_alone(seen)
    found += unread_notes(seen)
    return Diagnosis(
        shown,
        sorted(found, key=lambda item: ("fault", "change", "note").index(item.severity)),
        [tensor_row(fact) for fact in seen.facts.values()],
        head_rows(seen),
        {
            "tensors": len(seen.facts),
            "of": len(model.names),
            "bytes": seen.bytes,
            "seconds": round(time.perf_counter() - start, 3),
        },
        needs=[WITHOUT_BASE],
    )


def unread_notes(seen: Examined) -> list[Finding]:
    """What was not read, and why."""
    found = []
    if seen.model.unread:
        found.append(finding("unknown", "heads", f"were not read: {seen.model.unread}", severity="note"))
    if seen.refused:
        name, why = next(iter(seen.refused.items()))
        why = why.removeprefix(f"{seen.model.weights.where}: ")
        words = f"{len(seen.refused)} were not read: {why}" if len(seen.refused) > 1 else f"was not read: {why}"
        found.append(finding("unknown", "tensors" if len(seen.refused) > 1 else name, words, severity="note"))
    return found


def tensor_row(fact: Facts) -> dict[str, Any]:
    """A tensor as the document has it."""
    place = fact.place
    return {
        "name": fact.name,
        "stack": place.stack,
        "layer": place.layer,
        "kind": place.kind,
        "shape": list(fact.shape),
        "dtype": fact.dtype,
        "finite": fact.finite,
        "rms": finite_or_none(fact.rms),
        "largest": finite_or_none(fact.largest),
        "mean": finite_or_none(fact.mean),
    }


def head_rows(seen: Examined) -> list[dict[str, Any]]:
    """Heads as the document has them: the spread of their logits, and what they write."""
    rows = []
    for heads in seen.heads:
        for head in range(heads.heads):
            written = None if heads.written is None else finite_or_none(float(heads.written[head]))
            spread = finite_or_none(float(heads.spread[head]))
            rows.append({"layer": heads.number, "head": head, "spread": spread, "written": written})
    return rows


__all__ = ["LocaterError", "Model", "doctor"]
