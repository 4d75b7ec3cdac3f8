"""A training run as its log tells it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from locater.tracking.records import Record, plain
from locater.version import SCHEMA, __version__

Points = list[tuple[int, float]]  # (step, number), steps rise


@dataclass(frozen=True)
class Run:
    """A log as it stands. Where a resumed run went back, what it left behind is gone: steps rise, and each is there
    once.
    """

    header: Record
    steps: list[Record]  # observed steps
    warnings: list[Record]
    ended: bool
    losses: Points  # of every step whose loss is known, observed or not; NaN and the infinities among them
    resumed: tuple[int, ...] = ()  # first step of each part after the first
    scalars: dict[str, Points] = field(default_factory=dict)  # other numbers of the run by name, such as grad_norm

    @property
    def last(self) -> int:
        """The last step that the log knows of."""
        return max([0, *(record["step"] for record in self.steps[-1:]), *(step for step, _ in self.losses[-1:])])

    def summary(self) -> str:
        """One line: what was observed, how far it got, what was warned of."""
        flags = Counter(
            flag for _, _, flag in {(held["layer"], held["head"], str(held["flag"])) for held in self.warnings}
        )
        raised = (
            ", ".join(f"{flag} at {count} head{'s' * (count > 1)}" for flag, count in flags.most_common())
            or "no warnings"
        )
        state = "ended" if self.ended else "not ended"
        return f"{len(self.header['layers'])} attention layers, {len(self.steps)} steps observed, last step {self.last}, {state}; {raised}"

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of `locater watch --json`."""
        kept = {name: self.header.get(name) for name in ("source", "every", "layers", "columns")}
        return {
            "schema": SCHEMA, "locater": __version__, **kept, "steps": self.steps, "losses": self.losses, "scalars": self.scalars,
            "warnings": self.warnings, "ended": self.ended, "resumed": self.resumed,
        }  # fmt: skip

    def to_json(self) -> str:
        return json.dumps(plain(self.to_dict()), allow_nan=False)
