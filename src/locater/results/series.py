"""More than two scans in a row: what changed along the series, and between which of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from locater.errors import LocaterError
from locater.markup import quantile
from locater.numerics import known_median
from locater.report.verdict_sentences import letters
from locater.results.comparison import (
    MEDIANS,
    MOST_LISTED,
    Comparison,
    changes,
    compare_scans,
    head_shapes,
    largest,
    ranges,
)
from locater.results.document import Document
from locater.results.run_names import label_source
from locater.results.scan import Scan, recompute_mixed
from locater.results.trajectory import trajectory
from locater.version import SCAN_SCHEMA

if TYPE_CHECKING:
    from rich.console import Console


class StepChange(NamedTuple):
    """One number of one head that changed between two neighbours of a series, `start` and `end` as their indices.

    `size` is the change over the range that the number has in the whole series.
    """

    layer: int
    head: int
    column: str
    start: int
    end: int
    before: float
    after: float
    size: float


@dataclass(frozen=True, repr=False)
class ComparisonSeries(Document):
    """Scans of the same heads in the order given. `pairs` are the comparisons of neighbours, `ends` that of the first
    and the last.
    """

    scans: list[Scan]
    pairs: list[Comparison]
    ends: Comparison
    from_first: list[list[float | None] | None] | None = None  # of each scan but the first, the difference of each head

    schema = SCAN_SCHEMA

    def __repr__(self) -> str:
        first, last = self.scans[0], self.scans[-1]
        return (
            f"ComparisonSeries({len(self.scans)} scans of {len(first.rows)} heads, {first.source!r} to {last.source!r})"
        )

    def with_heads(
        self,
        steps: Sequence[Sequence[dict[str, float | None]] | None],
        from_first: Sequence[Sequence[dict[str, float | None]] | None],
    ) -> ComparisonSeries:
        """This series with the differences of the maps of each head: of neighbours, and of each scan from the first."""
        pairs = [pair if x is None else pair.with_heads(x, {}) for pair, x in zip(self.pairs, steps, strict=True)]
        ends = self.ends if from_first[-1] is None else self.ends.with_heads(from_first[-1], {})
        totals = [None if x is None else [largest(one) for one in x] for x in from_first]
        return replace(self, pairs=pairs, ends=ends, from_first=totals)

    @property
    def labels(self) -> list[str]:
        """A letter for each scan, or a number where there are more scans than letters."""
        return letters(len(self.scans))

    @cached_property
    def changes(self) -> list[StepChange]:
        """Every quantity of every head between neighbours, the largest change first."""
        length = self.scans[0].assumptions["length"]
        within = ranges([row for scan in self.scans for row in scan.rows], length)
        table = [
            StepChange(x.layer, x.head, x.column, at, at + 1, x.before, x.after, x.size)
            for at, pair in enumerate(self.pairs)
            for x in changes(pair.a.rows, pair.b.rows, length, within)
        ]
        return sorted(table, key=lambda change: -change.size)

    def head_changes(self) -> list[StepChange]:
        """The largest change of each head between neighbours, the largest first."""
        best: dict[tuple[int, int], StepChange] = {}
        for change in self.changes:
            best.setdefault((change.layer, change.head), change)
        return list(best.values())

    def column_changes(self) -> dict[str, list[float]]:
        """Size of the change of each quantity between neighbours (98th percentile over heads), by pair; the quantity
        that changed most comes first.
        """
        sizes: dict[str, list[list[float]]] = {}
        for x in self.changes:
            sizes.setdefault(x.column, [[] for _ in self.pairs])[x.start].append(x.size)
        table = {name: [quantile(numbers, 0.98) for numbers in pairs] for name, pairs in sizes.items()}
        return dict(sorted(table.items(), key=lambda item: -max(item[1])))

    def medians(self) -> dict[str, list[float | None]]:
        """Median over heads of the main columns, in each scan."""
        return {name: [known_median(row[name] for row in scan.rows) for scan in self.scans] for name in MEDIANS}

    def condition_rows(self) -> list[dict[str, Any]]:
        """What conditions of --fail-on are tested on: the rows of each pair of neighbours, and of the first and the
        last, because many small changes can add up. `where` names the two.
        """
        labels = self.labels
        rows = []
        for at, pair in enumerate(self.pairs):
            rows += [{**row, "where": f"{labels[at]} to {labels[at + 1]}"} for row in pair.condition_rows()]
        return rows + [{**row, "where": f"{labels[0]} to {labels[-1]}"} for row in self.ends.condition_rows()]

    def to_dict(self) -> dict[str, Any]:
        """The keys of a comparison of two. `difference`, `gained` and `lost` of a head are those of the last scan
        against the first; `between` has them for each pair of neighbours.
        """
        return {
            **self.header(),
            "source": [scan.source for scan in self.scans],
            "assumptions": self.scans[0].assumptions,
            "aligned": True,
            "equal": all(pair.equal for pair in self.pairs),
            "tensors": None,
            "weights": None,
            "verdict": None,
            "medians": self.medians(),
            "changes": {
                "columns": {name: max(sizes) for name, sizes in self.column_changes().items()},
                "between": self.column_changes(),
                "heads": [change._asdict() for change in self.head_changes()[:MOST_LISTED]],
            },
            "layers": [scan.layers for scan in self.scans],
            "heads": self.records(),
        }

    def records(self) -> list[dict[str, Any]]:
        """A dictionary per head: the last scan against the first, and `between` neighbours."""
        parts = ("difference", "gained", "lost", "weights")
        heads = []
        for at, row in enumerate(self.ends.rows):
            steps = [vars(pair.rows[at]) for pair in self.pairs]
            heads.append({**vars(row), "between": [{key: step[key] for key in parts} for step in steps]})
        return heads

    def trajectory(self) -> dict[str, Any]:
        """The document of `trajectory()`, with the scans as steps: those that their names say (`step-200`), if all do
        and they increase; else counted in the order given.
        """
        folder, names = _short_names([scan.source for scan in self.scans])
        steps = _steps_in(names)
        rows = []
        zeros: list[float | None] = [0.0] * len(self.scans[0].rows)
        totals = [None] * len(self.scans) if self.from_first is None else [zeros, *self.from_first]
        for label, scan, name, step, total in zip(self.labels, self.scans, names, steps, totals, strict=True):
            source = name if names.count(name) == 1 else f"{name} ({label})"
            layers = {entry["layer"]: entry["name"] for entry in scan.layers}
            more = {"source": source, "run": folder, "step": step}
            changed = [{}] * len(scan.rows) if total is None else [{"difference": x} for x in total]
            rows += [
                {**row, **change, **more, "layer_name": layers[row["layer"]]}
                for row, change in zip(scan.records(), changed, strict=True)
            ]
        return trajectory(rows, {}, length=self.scans[0].assumptions["length"])

    def page(self) -> str:
        """The HTML page of checkpoints: every number over the series, heads on a slider."""
        from locater.report.trajectory import trajectory_page

        return trajectory_page(self.trajectory())

    def show(self, console: Console) -> None:
        """Print what changed between which scans, medians, and the heads that changed most."""
        from locater.report.comparison import print_series

        print_series(self.to_dict(), [scan.to_dict() for scan in self.scans], console)


def compare_series(scans: list[Scan]) -> ComparisonSeries:
    """Compare a series of scans of models of one shape that were made with the same settings."""
    scans = recompute_mixed(scans)
    if not all(scan.has_values for scan in scans):
        scans = [scan.without_values() for scan in scans]
    first = scans[0]
    for other in scans[1:]:
        if head_shapes(other) != head_shapes(first):
            raise LocaterError(
                f"{other.source} has other heads than {first.source} ({_heads(other)}; {_heads(first)}): more than two "
                "models are compared head by head, so give models of one shape, or compare two at a time"
            )
    pairs = [compare_scans(a, b) for a, b in pairwise(scans)]
    return ComparisonSeries(scans, pairs, compare_scans(first, scans[-1]))


def _heads(scan: Scan) -> str:
    return f"{len(scan.rows)} heads in {len(scan.layers)} layers"


def _short_names(sources: Sequence[str]) -> tuple[str, list[str]]:
    """The folder that all sources are in, and what tells them apart within it.

    >>> _short_names(["runs/a/step-1", "runs/a/step-2"])
    ('a', ['step-1', 'step-2'])
    """
    parts = [[x for x in source.split("/") if x] for source in sources]
    folders = zip(*(x[:-1] for x in parts), strict=False)
    shared = sum(1 for _ in takewhile(lambda names: len({*names}) == 1, folders))
    return (parts[0][shared - 1] if shared else "compared"), ["/".join(x[shared:]) for x in parts]


def _steps_in(names: Sequence[str]) -> list[int] | list[None]:
    """The steps that names say, such as 200 for `step-200`; None for all unless every name has one and they increase.

    >>> _steps_in(["step-20", "ckpt1-step-400"]), _steps_in(["base", "step-400"])
    ([20, 400], [None, None])
    """
    steps = [step for name in names if (step := label_source(name).step) is not None]
    rising = len(steps) == len(names) and all(a < b for a, b in pairwise(steps))
    return steps if rising else [None] * len(names)
