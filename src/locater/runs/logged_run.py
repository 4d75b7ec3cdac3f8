"""A training run as its log tells it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from locater.runs.records import Record, plain
from locater.version import SCHEMA, __version__

Points = list[tuple[int, float]]  # (step, number), steps rise


@dataclass(frozen=True)
class Run:
    """A training run, as far as its log goes. Steps rise and each occurs once: where a resumed run went back to an
    earlier step, the records that it replaced are left out.
    """

    header: Record
    steps: list[Record]  # observed steps
    warnings: list[Record]
    ended: bool
    losses: Points  # of every step whose loss is known, observed or not; may be NaN or infinite
    resumed: tuple[int, ...] = ()  # first step of each part after the first
    scalars: dict[str, Points] = field(default_factory=dict)  # other numbers of the run by name, such as grad_norm
    # reads the numbers of heads from the log, where `steps` only name their columns
    with_heads: Callable[[Sequence[Record]], Sequence[Record]] = field(
        default=lambda records: records, compare=False, repr=False
    )

    @property
    def last(self) -> int:
        """The last step in the log."""
        return max([0, *(record["step"] for record in self.steps[-1:]), *(step for step, _ in self.losses[-1:])])

    def summary(self) -> str:
        """One line: what was observed, how far it got, what was warned of."""
        heads = {(warning["layer"], warning["head"], str(warning["flag"])) for warning in self.warnings}
        flags = Counter(flag for _, _, flag in heads).most_common()
        raised = ", ".join(f"{flag} at {count} head{'s' * (count > 1)}" for flag, count in flags) or "no warnings"
        layers, state = len(self.header["layers"]), "ended" if self.ended else "not ended"
        observed = f"{layers} attention layer{'s' * (layers != 1)}, {len(self.steps)} steps observed"
        return f"{observed}, last step {self.last}, {state}; {raised}"

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of `locater watch --json`."""
        about = {name: self.header.get(name) for name in ("source", "every", "layers", "columns")}
        return {
            "schema": SCHEMA,
            "locater": __version__,
            **about,
            "steps": self.with_heads(self.steps),
            "losses": self.losses,
            "scalars": self.scalars,
            "warnings": self.warnings,
            "ended": self.ended,
            "resumed": self.resumed,
        }

    def to_json(self) -> str:
        return json.dumps(plain(self.to_dict()), allow_nan=False)


@dataclass(frozen=True)
class TwoRuns:
    """A run, and another to compare it with. The document is that of the first, with the second as `other`."""

    first: Run
    other: Run

    def to_json(self) -> str:
        return json.dumps(plain({**self.first.to_dict(), "other": self.other.to_dict()}), allow_nan=False)
