"""Flags and faults of heads over the steps of a run: when each is first raised, and from when to when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def findings_over_steps(checkpoints: Sequence[Sequence[Row]], steps: Sequence[int]) -> list[dict[str, Any]]:
    """One entry per head and flag: at which steps it is raised, and at which it is a fault.

    `checkpoints` are the rows of each. `spans` are pairs of steps, from and to, over all checkpoints between them.
    """
    raised: dict[tuple[int, int, str], tuple[list[int], list[int]]] = {}
    for at, rows in enumerate(checkpoints):
        for row in rows:
            faults = _texts(row, "faults")
            for flag in _texts(row, "flags"):
                flagged, faulty = raised.setdefault((row["layer"], row["head"], flag), ([], []))
                flagged.append(at)
                if flag in faults:
                    faulty.append(at)
    return [
        {
            "layer": layer,
            "head": head,
            "flag": flag,
            "first": steps[flagged[0]],
            "first_fault": steps[faulty[0]] if faulty else None,
            "spans": _spans(flagged, steps),
            "fault_spans": _spans(faulty, steps),
        }
        for (layer, head, flag), (flagged, faulty) in raised.items()
    ]


def _texts(row: Row, column: str) -> list[str]:
    texts = row.get(column)
    return [] if texts is None else [str(text) for text in texts]


def _spans(places: Sequence[int], steps: Sequence[int]) -> list[list[int]]:
    """Neighbouring places as pairs of steps.

    >>> _spans([0, 1, 3], [100, 200, 300, 400])
    [[100, 200], [400, 400]]
    """
    spans: list[list[int]] = []
    before = -2
    for at in places:
        if at == before + 1:
            spans[-1][1] = steps[at]
        else:
            spans.append([steps[at], steps[at]])
        before = at
    return spans


def first_of_each_flag(findings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each flag of a run: the first step that raises it, the head that does, and how many heads ever do."""
    first: dict[str, dict[str, Any]] = {}
    for x in findings:
        best = first.setdefault(x["flag"], {"flag": x["flag"], "step": None, "heads": 0, "fault_step": None})
        best["heads"] += 1
        if best["step"] is None or x["first"] < best["step"]:
            best |= {"step": x["first"], "layer": x["layer"], "head": x["head"]}
        if x["first_fault"] is not None and (best["fault_step"] is None or x["first_fault"] < best["fault_step"]):
            best["fault_step"] = x["first_fault"]
    return sorted(first.values(), key=lambda x: (x["step"], x["flag"]))
