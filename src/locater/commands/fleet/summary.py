"""What a fleet shows at one look: the steps of each run, heads with faults, when flags first appear, duplicates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from locater.findings import FLAGS
from locater.version import SCHEMA, __version__

if TYPE_CHECKING:
    from locater.commands.fleet.result import FleetSource

Head = tuple[str, int, int]  # source, where that counts; layer, head


def summary(
    folder: str,
    settings: Mapping[str, Any],
    sources: Sequence[FleetSource],
    rows: Iterable[Mapping[str, Any]],
    damaged: Sequence[str] = (),
) -> dict[str, Any]:
    """The document of a fleet. `rows` need source, layer, head, flags and faults, and come by run and step."""
    runs = {name: _Run(name) for name in dict.fromkeys(entry.run for entry in sources)}
    run_of = {entry.source: runs[entry.run] for entry in sources}
    for entry in sources:
        runs[entry.run].sources.append(entry)
    for row in rows:
        if row["source"] in run_of:  # else it was finished after the sources were listed
            run_of[row["source"]].add(row)
    counts = {status: sum(entry.status == status for entry in sources) for status in ("done", "failed", "to do")}
    return {
        "schema": SCHEMA,
        "locater": __version__,
        "source": folder,
        "settings": dict(settings),
        "checkpoints": {"done": counts["done"], "failed": counts["failed"], "to_do": counts["to do"]},
        "runs": [run.document() for run in runs.values()],
        "damaged": list(damaged),
    }


class _Run:
    """The checkpoints of one run, in the order of their steps."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.sources: list[FleetSource] = []
        self.heads: set[Head] = set()
        self.faulty: set[Head] = set()
        self.at_last: tuple[str, set[Head]] = ("", set())  # faulty heads of the last checkpoint
        self.flags: dict[str, dict[str, Any]] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        # without a run, checkpoints are different models: each has heads of its own
        place = (row["source"] if self.name is None else "", row["layer"], row["head"])
        self.heads.add(place)
        if row["source"] != self.at_last[0]:
            self.at_last = (row["source"], set())
        for flag in row["flags"]:
            at = {"source": row["source"], "step": row["step"]}
            entry = self.flags.setdefault(flag, {"first": at, "first_fault": None, "heads": set()})
            entry["heads"].add(place)
            if flag in row["faults"] and entry["first_fault"] is None:
                entry["first_fault"] = at
        if row["faults"]:
            self.faulty.add(place)
            self.at_last[1].add(place)

    def document(self) -> dict[str, Any]:
        done = [entry for entry in self.sources if entry.status == "done"]
        steps = [entry.step for entry in done if entry.step is not None]
        order = [flag.name for flag in FLAGS]
        flags = sorted(self.flags, key=lambda name: order.index(name) if name in order else len(order))
        return {
            "run": self.name,
            "checkpoints": len(done),
            "steps": {"count": len(set(steps)), "first": min(steps, default=None), "last": max(steps, default=None)},
            "without_step": len(done) - len(steps),
            "heads": len(self.heads),
            "heads_with_faults": len(self.faulty),
            "heads_with_faults_at_last": None if self.name is None else len(self.at_last[1]),
            "flags": {name: {**self.flags[name], "heads": len(self.flags[name]["heads"])} for name in flags},
            "failed": [_failure(entry) for entry in self.sources if entry.status == "failed"],
            "to_do": sum(entry.status == "to do" for entry in self.sources),
            "duplicates": _duplicates(done),
        }


def _failure(entry: FleetSource) -> dict[str, Any]:
    return {"source": entry.source, "step": entry.step, "reason": entry.reason, "tries": entry.tries}


def _duplicates(done: Sequence[FleetSource]) -> list[list[dict[str, Any]]]:
    """Groups of checkpoints whose queries, keys and norms are the same tensors with the same bytes."""
    groups: dict[str | None, list[dict[str, Any]]] = {}
    for entry in done:
        groups.setdefault(entry.digest, []).append({"source": entry.source, "step": entry.step})
    return [group for group in groups.values() if len(group) > 1]
