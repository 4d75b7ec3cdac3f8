"""`Probe`, the result of `probe()`: each head measured, beside predictions from statistics and from weights alone.

It is written as JSON and shown by `report/`.
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locater.brief import brief
from locater.files import write_whole
from locater.findings import FLAGS, Verdict, heads_by_role, judge
from locater.observing.rows import MeasuredHead
from locater.observing.stream import SeenLayer
from locater.predict.input_statistics import Statistics
from locater.version import PROBE_SCHEMA, __version__

if TYPE_CHECKING:
    import pandas

# Names until version 0.1; they work for one release. M, F and localization are those of unit tokens, in a scan.
OLD_COLUMNS = {"M": "predicted_M", "F": "predicted_F", "localization": "predicted_localization"}


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
        return _old_column(self, column) if column in OLD_COLUMNS else getattr(self, column)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:  # called for names that are not fields
            if name not in OLD_COLUMNS:
                raise AttributeError(f"a row of a probe has no {name!r}")
            return _old_column(self, name)


def _old_column(row: ProbeRow, name: str) -> Any:
    message = f"column {name} of a probe is now {OLD_COLUMNS[name]}: {name} is that of unit tokens, in a scan"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return getattr(row, OLD_COLUMNS[name])


PROBE_COLUMNS = tuple(f.name for f in fields(ProbeRow) if "float" in str(f.type))
PREDICTED = tuple(name for name in PROBE_COLUMNS if name.startswith("predicted_"))
PRIOR = tuple(name for name in PROBE_COLUMNS if name.startswith("prior_"))
BOUND = ("logit_bound",)
MEASURED = tuple(name for name in PROBE_COLUMNS if name not in (*PREDICTED, *PRIOR, *BOUND))
# M, S, F, key bias and skew over the measured tokens decide flags, and so does what a head can write; not all of them
# are columns
UNLISTED = ("finite", "written", "M", "S", "F", "key_bias", "skew")
PROBE_FLAGS = tuple(flag.name for flag in FLAGS if set(flag.needs) <= {*PROBE_COLUMNS, *UNLISTED})


@dataclass(frozen=True, repr=False)
class Probe:
    """The result of `probe()`."""

    source: str
    assumptions: dict[str, Any]
    layers: list[dict[str, Any]]  # attention layers, with the statistics of their input
    streams: list[SeenLayer]  # the residual stream between blocks
    rows: list[ProbeRow]
    agreement: dict[str, dict[str, float | None]]  # by prediction: Spearman correlation and mean error over heads
    statistics: Statistics | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"Probe({self.source!r}, {len(self.rows)} heads in {len(self.layers)} layers)"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from locater.report.notebook import probe_in_notebook

        return probe_in_notebook(self)

    def plot(self, column: str | None = None) -> Any:
        """One column of all heads, heads by layers; without a name the entropy.

        A matplotlib Figure, or an altair Chart where only altair is installed.
        """
        from locater.report.drawn import of_probe
        from locater.report.plots import plot

        return plot(of_probe(self, column))

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """For each row: its role, which of its flags are faults, and why the others are not."""
        return judge([vars(row) for row in self.rows], self.assumptions["length"])

    @property
    def roles(self) -> dict[str, list[tuple[int, int]]]:
        """(layer, head) of the heads with each role; a role that was not measured is no key."""
        return heads_by_role([vars(row) for row in self.rows], self.verdicts)

    def stream_after(self, layer_name: str) -> SeenLayer | None:
        """The residual stream after the block that contains the attention layer of this name."""
        return stream_after(layer_name, self.streams)

    def records(self) -> list[dict[str, Any]]:
        """Rows as dictionaries, with `faults` beside `flags`, and the `role`."""
        pairs = zip(self.rows, self.verdicts, strict=True)
        return [{**asdict(row), "faults": verdict.faults, "role": verdict.role} for row, verdict in pairs]

    def to_dict(self) -> dict[str, Any]:
        """The JSON document: schema, locater, source, assumptions, agreement, roles, layers, streams, heads."""
        return {
            "schema": PROBE_SCHEMA,
            "locater": __version__,
            "source": self.source,
            "assumptions": self.assumptions,
            "agreement": self.agreement,
            "roles": self.roles,
            "layers": self.layers,
            "streams": [asdict(stream) for stream in self.streams],
            "heads": self.records(),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON document; the file appears whole or not at all."""
        write_whole(Path(path), self.to_json() + "\n")

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the HTML page: self-contained, works offline."""
        from locater.report.probe import probe_page

        write_whole(Path(path), probe_page(self))

    def to_pandas(self) -> pandas.DataFrame:
        """One row per head, as a pandas frame."""
        import pandas

        return pandas.DataFrame(self.records())


def stream_after(layer_name: str, streams: list[SeenLayer]) -> SeenLayer | None:
    """The point of the stream after the block whose name begins the layer's; None for attention outside of blocks."""
    points = (point for point in streams if point.block >= 0 and f"{layer_name}.".startswith(f"{point.name}."))
    return next(points, None)
