"""`Comparison`, the result of `compare()` for two scans: side by side, head by head where their shapes agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from locater.brief import brief
from locater.errors import LocaterError
from locater.findings import Verdict, key_variance
from locater.markup import quantile
from locater.numerics import known_median
from locater.report.columns import known_numbers, quantities, range_of
from locater.results.document import Document
from locater.results.scan import NUMERIC_COLUMNS, HeadRow, Scan, recompute_mixed
from locater.version import SCAN_SCHEMA

if TYPE_CHECKING:
    from rich.console import Console

MEDIANS = (
    *("M", "F", "concentration", "localization", "expected_entropy", "residual_kept"),
    *("stable_rank", "effective_rank", "key_bias"),
)
MOST_LISTED = 20  # heads that the document lists as those that changed most
DIFFERENCES = tuple(name for name in NUMERIC_COLUMNS if name != "scale")

FAULT = "fault"  # a condition of --fail-on: any fault that is new, or grew by GROWN
IDENTICAL, CHANGED_AT_ALL = "identical", "changed"  # conditions on two models as a whole
WHOLE = (IDENTICAL, CHANGED_AT_ALL)
GROWN = 10.0  # times the spread of logits of a sharp head, or one over it of a uniform one
CHANGED = 0.01  # relative difference above which a head counts as changed
WEIGHT_COLUMNS = ("difference", "difference_qk", "difference_qk_rotated", "difference_ov")
CHANGE_COLUMNS = (*(f"change_{name}" for name in DIFFERENCES), *WEIGHT_COLUMNS)


class Change(NamedTuple):
    """One number of one head in both scans. `size` is the change over the range that the number has in both."""

    layer: int
    head: int
    column: str
    before: float
    after: float
    size: float


def ranges(rows: Sequence[HeadRow], length: int) -> dict[str, float]:
    """The range of each quantity over rows: what a change of it is divided by."""
    return {name: range_of(known_numbers(rows, quantity), quantity) for name, quantity in quantities(length).items()}


def changes(
    a: Sequence[HeadRow], b: Sequence[HeadRow], length: int, within: Mapping[str, float] | None = None
) -> list[Change]:
    """How much each quantity of each head changed from `a` to `b`, which are rows of the same heads; largest first.

    `within` are the ranges to measure by, for scans of a longer series; without it those of `a` and `b`.
    """
    table = []
    scales = within or ranges([*a, *b], length)
    for name, quantity in quantities(length).items():
        scale = scales[name]
        for x, y in zip(a, b, strict=True):
            before, after = quantity.read(x), quantity.read(y)
            if before is not None and after is not None:
                table.append(Change(x.layer, x.head, name, before, after, abs(after - before) / scale))
    return sorted(table, key=lambda change: -change.size)


def by_column(table: Sequence[Change]) -> dict[str, float]:
    """Size of the change of each column (98th percentile over heads), largest first."""
    sizes: dict[str, list[float]] = {}
    for change in table:
        sizes.setdefault(change.column, []).append(change.size)
    ranked = {name: quantile(numbers, 0.98) for name, numbers in sizes.items()}
    return dict(sorted(ranked.items(), key=lambda item: -item[1]))


def by_head(table: Sequence[Change]) -> list[Change]:
    """The largest change of each head, largest first."""
    best: dict[tuple[int, int], Change] = {}
    for change in table:
        best.setdefault((change.layer, change.head), change)
    return list(best.values())


def largest(differences: Mapping[str, float | None] | None) -> float | None:
    """The largest difference of a head; None where none is known."""
    return max((x for x in (differences or {}).values() if x is not None), default=None)


@dataclass(frozen=True)
class HeadChange:
    """One head in both scans: `difference[column]` is b minus a, None where either has no number."""

    layer: int
    head: int
    difference: dict[str, float | None]
    gained: tuple[str, ...]  # flags that only b raises
    lost: tuple[str, ...]
    # relative differences of the maps themselves: `qk`, `qk_rotated`, `ov`; None where they were not read
    weights: dict[str, float | None] | None = None
    moved: dict[str, Any] | None = None  # `part`, and the `layer` and `head` of a where b has it from

    __repr__ = brief

    @property
    def largest(self) -> float | None:
        """The largest of `weights`; None where none is known."""
        return largest(self.weights)


@dataclass(frozen=True)
class ComparedTensors:
    """Every tensor of two sources, with all that a scan does not read."""

    compared: int
    different: list[str]  # names of tensors with another shape, type or number
    only_a: list[str]
    only_b: list[str]

    __repr__ = brief


@dataclass(frozen=True)
class ModuleChange:
    """The tensors of one kind, such as all `q_proj.weight`, that changed: by what share of their norm, at what rank."""

    module: str  # their name with the number of the layer left open
    changed: int
    of: int
    relative: float | None  # norm of the difference over that in a, median
    largest: float | None
    rank: int | None  # the largest of any; None where one is full, or none is a matrix
    attention: bool  # whether they lie in attention modules

    __repr__ = brief


@dataclass(frozen=True)
class WeightChanges:
    """Every tensor of two sources on this machine."""

    whole: bool  # False where one shows the tensors of attention alone
    compared: int  # in both
    equal: int  # in bytes
    dtype: int  # equal once rounded to the type of the other
    different: list[str]  # with another shape, type or number
    only_a: list[str]
    only_b: list[str]
    nonfinite: list[str]  # with NaN or infinite numbers in b where a has finite ones
    config: list[str]  # settings of config.json that differ
    modules: list[ModuleChange]

    __repr__ = brief

    @property
    def identical(self) -> bool:
        return self.equal == self.compared > 0 and not (self.only_a or self.only_b or self.config)

    def as_tensors(self) -> ComparedTensors:
        return ComparedTensors(self.compared, self.different, self.only_a, self.only_b)


@dataclass(frozen=True, repr=False)
class Comparison(Document):
    """Two scans side by side. `rows` is empty unless they are `aligned`: the same layers with the same heads."""

    a: Scan
    b: Scan
    aligned: bool
    rows: list[HeadChange]
    tensors: ComparedTensors | None = None  # of sources with equal heads, where all their tensors could be read
    weights: WeightChanges | None = None  # of two sources on this machine, where all their tensors could be read

    schema = SCAN_SCHEMA

    def __repr__(self) -> str:
        heads = f"{len(self.rows)} heads" if self.aligned else f"{len(self.a.rows)} and {len(self.b.rows)} heads"
        return f"Comparison({self.a.source!r}, {self.b.source!r}, {heads}, aligned={self.aligned})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from locater.report.comparison import comparison_in_notebook

        return comparison_in_notebook(self.to_dict(), self.a.to_dict(), self.b.to_dict())

    def plot(self, column: str | None = None) -> Any:
        """The difference B - A of one column, heads by layers; without a name the quantity that changed most.

        A matplotlib Figure, or an altair Chart where only altair is installed.
        """
        from locater.report.plots import map_of_comparison, plot

        return plot(map_of_comparison(self.to_dict(), self.a.to_dict(), self.b.to_dict(), column))

    def with_heads(
        self, differences: Sequence[dict[str, float | None]], moves: Mapping[tuple[int, int], dict[str, Any]]
    ) -> Comparison:
        """This comparison with the differences of the maps of each head, in the order of its rows."""
        rows = [
            replace(row, weights=x, moved=moves.get((row.layer, row.head)))
            for row, x in zip(self.rows, differences, strict=True)
        ]
        return replace(self, rows=rows)

    @property
    def verdict(self) -> str:
        """What differs, in one sentence."""
        from locater.report.change_verdict import change_verdict

        return change_verdict(self.to_dict()).sentence

    def whole_conditions(self) -> dict[str, str]:
        """The conditions of --fail-on that hold of two models as a whole, and what there is to say: `identical` or
        `changed`, and `nonfinite` and `fault` where any tensor has lost its numbers. Of scans alone only what they read
        is known.
        """
        from locater.report.change_verdict import lost_words

        same = self.equal if self.weights is None else self.weights.identical
        name = IDENTICAL if same else CHANGED_AT_ALL
        lost = "" if self.weights is None else lost_words(asdict(self.weights))
        return {
            name: f"{name}: {self.verdict.rstrip('.')}",
            **(dict.fromkeys(("nonfinite", FAULT), lost) if lost else {}),
        }

    @property
    def equal(self) -> bool:
        """Whether every number and flag of every head is equal in both: those of queries, keys and norms."""
        return self.aligned and all(
            not (row.gained or row.lost) and all(a[name] == b[name] for name in DIFFERENCES)
            for row, a, b in zip(self.rows, self.a.rows, self.b.rows, strict=True)
        )

    @cached_property
    def changes(self) -> list[Change]:
        """Every quantity of every head in both scans, the largest change first; empty unless aligned.

        Sizes of different quantities can be compared: each is the change over the range of that quantity.
        """
        return changes(self.a.rows, self.b.rows, self.a.assumptions["length"]) if self.aligned else []

    def column_changes(self) -> dict[str, float]:
        """Size of the change of each quantity (98th percentile over heads), the largest first."""
        return by_column(self.changes)

    def head_changes(self) -> list[Change]:
        """The largest change of each head, the largest first."""
        return by_head(self.changes)

    def condition_rows(self) -> list[dict[str, Any]]:
        """What conditions of --fail-on are tested on: for each head `change_COLUMN`, B minus A, and as `flags` those
        that B raises and A does not, with "fault" among them where one is a fault in B and was none in A, or
        was one a tenth as bad; `difference` and its parts, unless heads only changed places in their layers; and the
        columns of B.
        """
        if not self.aligned:
            raise LocaterError(
                "--fail-on compares head by head, and these two have different heads: "
                "give two models of one shape, or use locater scan B --fail-on"
            )
        from locater.report.change_verdict import PERMUTED, change_verdict

        rows = []
        permuted = change_verdict(self._numbers()).name == PERMUTED
        pairs = zip(self.rows, self.a.rows, self.b.rows, self.a.verdicts, self.b.verdicts, strict=True)
        for change, was, row, before, after in pairs:
            new_fault = bool({*after.faults} - {*before.faults}) or fault_grew(was, row, before, after)
            differences = {f"change_{name}": x for name, x in change.difference.items()}
            if change.weights is not None and not permuted:
                differences |= {"difference": change.largest}
                differences |= {f"difference_{name}": x for name, x in change.weights.items()}
            flags = (*change.gained, *((FAULT,) if new_fault else ()))
            rows.append({**vars(row), "flags": flags, "new": True, **differences})
        return rows

    def medians(self) -> dict[str, tuple[float | None, float | None]]:
        """Median over heads of the main columns, in a and in b."""
        return {
            name: (known_median(row[name] for row in self.a.rows), known_median(row[name] for row in self.b.rows))
            for name in MEDIANS
        }

    def to_dict(self) -> dict[str, Any]:
        from locater.report.change_verdict import change_verdict

        document = self._numbers()
        return {**document, "verdict": change_verdict(document)._asdict()}

    def _numbers(self) -> dict[str, Any]:
        return {
            **self.header(),
            "source": [self.a.source, self.b.source],
            "assumptions": self.a.assumptions,
            "aligned": self.aligned,
            "equal": self.equal,
            "tensors": None if self.tensors is None else asdict(self.tensors),
            "weights": None if self.weights is None else asdict(self.weights),
            "medians": {name: list(pair) for name, pair in self.medians().items()},
            "changes": {
                "columns": self.column_changes(),
                "heads": [change._asdict() for change in self.head_changes()[:MOST_LISTED]],
            },
            "layers": [self.a.layers, self.b.layers],
            "heads": self.records(),
        }

    def records(self) -> list[dict[str, Any]]:
        """Rows as dictionaries; empty unless `aligned`."""
        return [dict(vars(row)) for row in self.rows]

    def page(self) -> str:
        """The HTML page of both scans, with differences where their shapes agree."""
        from locater.report.comparison import comparison_page

        return comparison_page(self.to_dict(), *(scan.with_details().to_dict() for scan in (self.a, self.b)))

    def show(self, console: Console) -> None:
        """Print what changed most, medians of both, and the heads that changed most."""
        from locater.report.comparison import print_comparison

        print_comparison(self.to_dict(), self.a.to_dict(), self.b.to_dict(), console)


def compare_scans(first: Scan, second: Scan) -> Comparison:
    """Compare two scans that were made with the same settings."""
    for setting in ("length", "weights"):
        one, other = (x.assumptions.get(setting) for x in (first, second))
        if one != other:
            raise LocaterError(
                f"these two cannot be compared: {setting} is {one!r} in the first and {other!r} in the second; "
                "scan them alike"
            )
    first, second = recompute_mixed((first, second))
    if not (first.has_values and second.has_values):
        first, second = first.without_values(), second.without_values()
    aligned = head_shapes(first) == head_shapes(second)
    rows = [_head_change(x, y) for x, y in zip(first.rows, second.rows, strict=True)] if aligned else []
    return Comparison(first, second, aligned, rows)


def fault_grew(a: HeadRow, b: HeadRow, before: Verdict, after: Verdict) -> bool:
    """Whether a head that is sharp in both has GROWN times the spread in b, or one that is uniform a tenth of it."""
    if None in (a.F, a.key_bias, b.F, b.key_bias):
        return False
    small, large = (key_variance(row.F, row.key_bias) for row in (a, b))
    both = {*before.faults} & {*after.faults}
    return ("sharp" in both and large >= GROWN**2 * small) or ("uniform" in both and 0 < large * GROWN**2 <= small)


def head_shapes(result: Scan) -> list[tuple[int, int, str]]:
    return [(row.layer, row.head, row.kind) for row in result.rows]


def _head_change(a: HeadRow, b: HeadRow) -> HeadChange:
    pairs = {name: (a[name], b[name]) for name in DIFFERENCES}
    difference = {name: None if x is None or y is None else y - x for name, (x, y) in pairs.items()}
    gained, lost = (tuple(f for f in x.flags if f not in y.flags) for x, y in ((b, a), (a, b)))
    return HeadChange(a.layer, a.head, difference, gained, lost)
