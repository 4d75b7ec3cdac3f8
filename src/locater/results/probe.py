"""`Probe`, the result of `probe()`: each head measured, beside predictions from statistics and from weights alone.

It is written as JSON and shown by `report/`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from locater.brief import brief
from locater.findings import FLAGS, Verdict, heads_by_role, judge
from locater.observing.residual_stream import SeenLayer
from locater.observing.seen_heads import MeasuredHead
from locater.predict.statistics_file import Statistics
from locater.results.document import Document
from locater.version import PROBE_SCHEMA

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class ProbeRow(MeasuredHead):
    """One head. A column's name says what kind of number it is.

    `predicted_...` comes from statistics of another part of the text, `prior_...` from weights alone, `logit_bound`
    bounds every input, and all other columns are measured. None is a number that was not requested or has no meaning.
    """

    typical_kept: float | None = None
    distance: float | None = None
    self_mass: float | None = None
    sink: float | None = None
    rest_entropy: float | None = None
    output_stable_rank: float | None = None
    output_effective_rank: float | None = None
    previous: float | None = None
    duplicate: float | None = None
    induction: float | None = None
    skip_induction: float | None = None
    pair_induction: float | None = None
    predicted_entropy: float | None = None
    predicted_sink: float | None = None
    predicted_rest_entropy: float | None = None
    predicted_typical_kept: float | None = None
    predicted_M: float | None = None
    predicted_F: float | None = None
    predicted_localization: float | None = None
    prior_entropy: float | None = None
    prior_typical_kept: float | None = None
    prior_localization: float | None = None
    logit_bound: float | None = None
    flags: tuple[str, ...] = ()

    __repr__ = brief

    def __getitem__(self, column: str) -> Any:
        return getattr(self, column)


PROBE_COLUMNS = tuple(f.name for f in fields(ProbeRow) if "float" in str(f.type))
PREDICTED = tuple(name for name in PROBE_COLUMNS if name.startswith("predicted_"))
PRIOR = tuple(name for name in PROBE_COLUMNS if name.startswith("prior_"))
BOUND = ("logit_bound",)
MEASURED = tuple(name for name in PROBE_COLUMNS if name not in (*PREDICTED, *PRIOR, *BOUND))
# M, S, F, key bias and skew over the measured tokens decide flags, and so does what a head can write; not all of them
# are columns
UNLISTED = ("finite", "written_share", "M", "S", "F", "key_bias", "skew")
PROBE_FLAGS = tuple(flag.name for flag in FLAGS if set(flag.needs) <= {*PROBE_COLUMNS, *UNLISTED})


@dataclass(frozen=True, repr=False)
class Probe(Document):
    """The result of `probe()`."""

    source: str
    assumptions: dict[str, Any]
    layers: list[dict[str, Any]]  # attention layers, with the statistics of their input
    streams: list[SeenLayer]  # the residual stream between blocks
    rows: list[ProbeRow]
    agreement: dict[str, dict[str, float | None]]  # by prediction: Spearman correlation and mean error over heads
    statistics: Statistics | None = field(default=None, compare=False)

    schema = PROBE_SCHEMA

    def __repr__(self) -> str:
        return f"Probe({self.source!r}, {len(self.rows)} heads in {len(self.layers)} layers)"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from locater.report.probe import probe_in_notebook

        return probe_in_notebook(self.to_dict())

    def plot(self, column: str | None = None) -> Any:
        """One column of all heads, heads by layers; without a name the entropy.

        A matplotlib Figure, or an altair Chart where only altair is installed.
        """
        from locater.report.pages import short_name
        from locater.report.plots import map_of_measured, plot

        return plot(map_of_measured(short_name(self.source), self.records(), column))

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """For each row: its role, which of its flags are faults, and why the others are not."""
        return judge([vars(row) for row in self.rows], self.assumptions["length"])

    @property
    def roles(self) -> dict[str, list[tuple[int, int]]]:
        """(layer, head) of the heads with each role; a role that was not measured is no key."""
        return heads_by_role([vars(row) for row in self.rows], self.verdicts)

    def records(self) -> list[dict[str, Any]]:
        """Rows as dictionaries, with `faults` beside `flags`, and the `role`."""
        pairs = zip(self.rows, self.verdicts, strict=True)
        return [{**vars(row), "faults": verdict.faults, "role": verdict.role} for row, verdict in pairs]

    def to_dict(self) -> dict[str, Any]:
        """The JSON document: schema, locater, source, assumptions, agreement, roles, layers, streams, heads."""
        return {
            **self.header(),
            "source": self.source,
            "assumptions": self.assumptions,
            "agreement": self.agreement,
            "roles": self.roles,
            "layers": self.layers,
            "streams": [asdict(stream) for stream in self.streams],
            "heads": self.records(),
        }

    def page(self) -> str:
        from locater.report.probe import probe_page

        return probe_page(self.to_dict())

    def show(self, console: Console) -> None:
        """Print what heads do and which have faults, tables, and how well predictions agree."""
        from locater.report.probe import print_probe

        print_probe(self.to_dict(), console)
