"""`CachePlan`, the result of `cache_plan()`: which key heads need the whole cache, and which can do with a window.

It is written as JSON, shown by `report/`, and exported in the form that DuoAttention and kvpress read.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locater.brief import brief
from locater.errors import LocaterError
from locater.files import write_whole
from locater.results.document import Document

if TYPE_CHECKING:
    from rich.console import Console

PATTERN, CONFIG = "full_attention_heads.tsv", "config.json"


@dataclass(frozen=True)
class KeyHead:
    """One key head with the query heads that share it: the unit of a cache."""

    layer: int
    kv_head: int
    heads: list[int]  # query heads
    beyond: float | None  # share of their weight on keys that the window would not keep
    predicted: float | None  # change of the loss with the window, to first order, in nats
    change: float | None  # measured with this window alone; None where that was not asked for
    low: float | None  # 95 % interval over sequences
    high: float | None
    windowed: bool  # in the list of those that can do with the window
    bounded: bool  # its layer has no longer window of its own, so there is nothing to gain

    __repr__ = brief

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.kv_head}"


@dataclass(frozen=True, repr=False)
class CachePlan(Document):
    """The result of `cache_plan()`."""

    source: str
    assumptions: dict[str, Any]
    loss: float  # with the whole cache, on the text that the list was judged on
    budget: float  # nats that the list may cost
    holds: bool  # whether there is a list that was judged to cost no more
    judged: dict[str, Any] | None  # of the list: heads, change, low, high, sum of single effects
    tried: list[dict[str, Any]]  # every list: heads, text ("choose", "judge"), change, low, high, holds
    other: dict[str, Any] | None  # the list where each text stands twice (or, with `copies`, once): loss and change
    keys: dict[str, Any]  # what sinks do to keys of few bits
    sinks: list[dict[str, Any]]  # by layer
    massive: list[dict[str, Any]]  # by block
    layers: list[dict[str, Any]]
    rows: list[KeyHead]

    def __repr__(self) -> str:
        windowed = sum(row.windowed for row in self.rows)
        return f"CachePlan({self.source!r}, {windowed} of {len(self.rows)} key heads can do with a window)"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from locater.report.cache_plan import plan_in_notebook

        return plan_in_notebook(self.to_dict())

    @property
    def windowed(self) -> list[tuple[int, int]]:
        """(layer, key head) of those that can do with the window, all at once."""
        return [(row.layer, row.kv_head) for row in self.rows if row.windowed]

    @property
    def whole(self) -> list[tuple[int, int]]:
        """(layer, key head) of those that keep the whole cache."""
        return [(row.layer, row.kv_head) for row in self.rows if not row.windowed]

    def plot(self) -> Any:
        """What each key head costs with the window alone: a matplotlib Figure, or an altair Chart."""
        from locater.report.cache_plan import map_of_plan
        from locater.report.plots import plot

        return plot(map_of_plan(self.to_dict()))

    def scores(self) -> list[list[float]]:
        """Layers x key heads, from 0 to 1: under 0.5 a window is enough, and the lower, the less it costs."""
        sizes = {layer["kv_heads"] for layer in self.layers}
        if len(sizes) > 1:
            few, many = min(sizes), max(sizes)
            raise LocaterError(
                f"layers have {few} to {many} key heads, and this format is a table of layers by heads: take the list "
                "from the JSON"
            )
        order = sorted(self.rows, key=lambda row: (not row.windowed, row.bounded, _cost(row)))
        count = sum(row.windowed for row in order)
        of_row = {}
        for at, row in enumerate(order):
            share = (at + 0.5) / count / 2 if at < count else 0.5 + (at - count + 0.5) / (len(order) - count) / 2
            of_row[row.layer, row.kv_head] = round(share, 6)
        return [[of_row[layer["layer"], head] for head in range(layer["kv_heads"])] for layer in self.layers]

    def export(self, folder: str | os.PathLike[str]) -> None:
        """Write `full_attention_heads.tsv` and `config.json` into `folder`, as DuoAttention writes its patterns."""
        scores, to = self.scores(), Path(folder)
        if to.exists() and not to.is_dir():
            raise LocaterError(f"{to}: is a file: name a folder")
        to.mkdir(parents=True, exist_ok=True)
        settings = {
            "sink_size": self.assumptions["sinks"],
            "recent_size": self.assumptions["window"],
            "head_compression_ratio": len(self.windowed) / len(self.rows),
        }
        write_whole(to / PATTERN, "".join("\t".join(f"{x:.6f}" for x in row) + "\n" for row in scores))
        write_whole(to / CONFIG, json.dumps(settings, indent=1) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """One dictionary per key head."""
        return [asdict(row) for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        parts = ("source", "assumptions", "loss", "budget", "holds", "judged", "tried", "other", "keys", "sinks")
        return {
            **self.header(),
            **{name: getattr(self, name) for name in (*parts, "massive", "layers")},
            "key_heads": self.records(),
        }

    def page(self) -> str:
        from locater.report.cache_plan import plan_page

        return plan_page(self.to_dict())

    def show(self, console: Console) -> None:
        """Print the two lists, what they cost, and what is known of sinks."""
        from locater.report.cache_plan import print_plan

        print_plan(self.to_dict(), console)


def _cost(row: KeyHead) -> float:
    known = row.change if row.change is not None else row.predicted
    return 0.0 if known is None else known
