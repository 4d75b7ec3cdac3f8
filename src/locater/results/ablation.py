"""`Ablation`, the result of `ablate()`: what changes when heads are taken away.

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
class Removed:
    """One removal: a head, or several at once."""

    name: str  # 17.3; of several 17.3+18.6; of all heads of a layer "layer 17", of every head "all heads"
    heads: list[tuple[int, int]]  # (layer, head)
    change: float | None  # of the loss in nats, or the cosine distance of outputs; the mean over sequences
    low: float | None  # 95 % interval over sequences; None for a single one
    high: float | None
    sequences: int

    __repr__ = brief


@dataclass(frozen=True, repr=False)
class Ablation(Document):
    """The result of `ablate()`."""

    source: str
    assumptions: dict[str, Any]
    measure: str  # "loss" or "distance"
    loss: float | None  # with every head; None where outputs were compared
    cost: dict[str, float | None]  # seconds of a pass and of a removal
    layers: list[dict[str, Any]]
    rows: list[Removed]

    def __repr__(self) -> str:
        return f"Ablation({self.source!r}, {len(self.rows)} removals ({self.assumptions['how']}), by {self.measure})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from locater.report.ablation import ablation_in_notebook

        return ablation_in_notebook(self.to_dict())

    @property
    def by_head(self) -> dict[tuple[int, int], float | None]:
        """The change of each head that was removed alone."""
        return {row.heads[0]: row.change for row in self.rows if len(row.heads) == 1}

    def plot(self) -> Any:
        """The change of every head, heads by layers: a matplotlib Figure, or an altair Chart."""
        from locater.report.ablation import map_of_changes
        from locater.report.plots import plot

        return plot(map_of_changes(self.to_dict()))

    def records(self) -> list[dict[str, Any]]:
        """One dictionary per removal."""
        return [asdict(row) for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """The JSON document: schema, locater, source, assumptions, measure, loss, cost, layers, removals."""
        return {
            **self.header(),
            "source": self.source,
            "assumptions": self.assumptions,
            "measure": self.measure,
            "loss": self.loss,
            "cost": self.cost,
            "layers": self.layers,
            "removals": self.records(),
        }

    def page(self) -> str:
        from locater.report.ablation import ablation_page

        return ablation_page(self.to_dict())

    def show(self, console: Console) -> None:
        """Print what was measured, the removals that matter most and least, and the cost."""
        from locater.report.ablation import print_ablation

        print_ablation(self.to_dict(), console)
