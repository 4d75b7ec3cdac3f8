"""What the lines of the bench say together: shares found and rightly named, with 95 % intervals of Wilson."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from locater_lab.studies.flags import share_text
from locater_lab.studies.verdicts.models import SMALLEST

Line = Mapping[str, Any]
FOUND, NAMED = 0.9, 0.8  # what doctor has to reach on models that judge


@dataclass(frozen=True)
class Count:
    """Of `of` planted models `found` were found and `right` named rightly."""

    found: int
    right: int
    of: int

    def found_text(self) -> str:
        return share_text(self.found, self.of)

    def right_text(self) -> str:
        return share_text(self.right, self.of)


def change(line: Line) -> float | None:
    """Of the loss; None where it is NaN, or where there is none."""
    loss, reference = line["loss"], line["reference"]
    return None if not isinstance(loss, float) or not isinstance(reference, float) else loss - reference


def does_harm(line: Line) -> bool:
    """A fault that moves the loss by SMALLEST or more, gives NaN, or leaves a file that cannot be run."""
    if line["group"] == "harmless" or line["reference"] is None:
        return False
    moved = change(line)
    return moved is None or abs(moved) >= SMALLEST


def is_fault(line: Line) -> bool:
    return bool(line["group"] != "harmless")


def best_call(line: Line) -> str:
    """The way to ask doctor that can know a fault: with the adapter where one was merged, else with the base."""
    return "doctor --adapter" if line["group"] == "merging" else "doctor --base"


def count(lines: Iterable[Line], call: str | Callable[[Line], str]) -> Count:
    """Over the lines on which this command was asked."""
    asked = [
        line["said"][name] for line in lines if (name := call if isinstance(call, str) else call(line)) in line["said"]
    ]
    found = [said for said in asked if said["status"]]
    return Count(len(found), sum(said["right"] for said in found), len(asked))


def alarms(lines: Iterable[Line], call: str) -> Count:
    """False alarms on harmless changes; `right` counts those that are called by their name."""
    asked = [line["said"][call] for line in lines if not is_fault(line) and call in line["said"]]
    return Count(sum(bool(said["status"]) for said in asked), sum(said["right"] for said in asked), len(asked))


def of_text(lines: Iterable[Line]) -> str:
    """What `doctor --text` adds: how often the loss is called a fault, by how far it moved."""
    parts: dict[str, list[int]] = {}
    for line in lines:
        said = line["said"].get("text")
        if said is None or line["reference"] is None:
            continue
        moved = change(line)
        harmless = "harmless, " if not is_fault(line) else ""
        size = "NaN or not run" if moved is None else "from 0.5 nats" if moved >= 0.5 else "0.05 to 0.5" if moved >= SMALLEST else "less"  # fmt: skip
        told = 2 if said["status"] else int(any(severity == "change" for severity, _ in said["causes"]))
        parts.setdefault(harmless + size, []).append(told)
    return "\n".join(
        f"{name}: fault {share_text(told.count(2), len(told))}, changed {told.count(1)}, nothing {told.count(0)}"
        for name, told in sorted(parts.items())
    )


def of_role(lines: Sequence[Line], role: str) -> list[Line]:
    return [line for line in lines if line["role"] == role]


def models_of(lines: Iterable[Line]) -> list[str]:
    order = {"chosen on": 0, "judged": 1, "tiny": 2}
    found = {line["model"]: order[line["role"]] for line in lines}
    return sorted(found, key=lambda name: (found[name], name != "demo"))


def goal(lines: Sequence[Line]) -> dict[str, Any]:
    """What issue and plan ask of doctor: on judged models, by faults that do harm."""
    judged = of_role(lines, "judged")
    harmful = count([line for line in judged if does_harm(line)], best_call)
    calls = ("doctor", "doctor --base", "doctor --adapter")
    false = [alarms(judged, call) for call in calls]
    alarm = Count(sum(x.found for x in false), sum(x.right for x in false), sum(x.of for x in false))
    reached = bool(harmful.of) and harmful.found >= FOUND * harmful.of and harmful.right >= NAMED * harmful.of
    return {"harmful": harmful, "alarms": alarm, "reached": reached and not alarm.found}
