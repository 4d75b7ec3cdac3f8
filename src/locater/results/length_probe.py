"""`LengthProbe`, the result of `probe_lengths()`: what heads do, and what the loss is, with more and more context.

It is written as JSON and shown by `report/`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from locater.brief import brief
from locater.results.document import Document

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class HeadAtLength:
    """One head with one length of context: means over the rows of the tokens that all lengths share."""

    length: int
    layer: int
    head: int
    entropy: float | None  # nats
    entropy_ratio: float | None  # over the log of the keys in sight
    sink: float | None  # weight on the first token
    reach: float | None  # mean distance of the weight, in tokens
    max_logit: float | None

    __repr__ = brief


@dataclass(frozen=True)
class Length:
    """One length of context: the loss of the tokens that all lengths share, and medians over heads."""

    length: int
    loss: float | None  # nats per token
    rise: float | None  # of the loss, over the shorter length with the lowest
    low: float | None  # 95 % interval over sequences
    high: float | None
    entropy: float | None
    entropy_ratio: float | None
    sink: float | None
    reach: float | None
    max_logit: float | None
    apart: bool  # attention falls apart here

    __repr__ = brief


@dataclass(frozen=True, repr=False)
class LengthProbe(Document):
    """The result of `probe_lengths()`."""

    source: str
    assumptions: dict[str, Any]
    rotary: dict[str, Any]  # what the configuration says of positions
    lengths: list[Length]
    rows: list[HeadAtLength]
    changed: list[dict[str, Any]]  # heads that changed most where attention falls apart

    def __repr__(self) -> str:
        return f"LengthProbe({self.source!r}, {', '.join(str(row.length) for row in self.lengths)} tokens)"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from locater.report.length_probe import lengths_in_notebook

        return lengths_in_notebook(self.to_dict())

    @property
    def apart(self) -> int | None:
        """The shortest of the lengths at which attention falls apart; None where it does at none."""
        return next((row.length for row in self.lengths if row.apart), None)

    def records(self) -> list[dict[str, Any]]:
        """One dictionary per head and length."""
        return [asdict(row) for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """The JSON document: schema, locater, source, assumptions, rotary, lengths, changed, heads."""
        return {
            **self.header(),
            "source": self.source,
            "assumptions": self.assumptions,
            "rotary": self.rotary,
            "lengths": [asdict(row) for row in self.lengths],
            "changed": self.changed,
            "heads": self.records(),
        }

    def page(self) -> str:
        from locater.report.length_probe import lengths_page

        return lengths_page(self.to_dict())

    def show(self, console: Console) -> None:
        """Print the verdict, a line per length, and what the configuration says of positions."""
        from locater.report.length_probe import print_lengths

        print_lengths(self.to_dict(), console)
