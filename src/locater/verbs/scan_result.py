"""`Scan`, the result of `scan()`: a row per head, an entry per layer, and the assumptions behind the numbers.

It is written as JSON, read back, and shown by `report/`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locater.errors import LocaterError, first_line
from locater.files import regular_file, write_whole
from locater.findings import FLAGS, Verdict, judge
from locater.verbs.documents import check_scan, parsed
from locater.version import SCHEMA, __version__

if TYPE_CHECKING:
    import pandas
    import polars

LENGTH = 256  # default number of tokens in view
TOKENS = 8192  # default number of tokens that a probe measures


@dataclass(frozen=True)
class HeadRow:
    """One head. `trace`, `trace_of_square` and `frobenius_sq` leave out the logit scale; M, S and F include it.

    None is a number without meaning: traces of cross-attention, every number of a head with NaN weights.
    """

    layer: int
    head: int
    kv_head: int
    kind: str
    width: int
    head_dim: int
    scale: float | None  # None where it is not known: then every number in units of logits is None too
    trace: float | None = None
    trace_of_square: float | None = None
    frobenius_sq: float | None = None
    symmetric_sq: float | None = None
    mean: float | None = None
    variance: float | None = None
    concentration: float | None = None
    spectral_norm: float | None = None
    stable_rank: float | None = None
    effective_rank: float | None = None
    M: float | None = None
    S: float | None = None
    F: float | None = None
    skew: float | None = None
    key_bias: float | None = None
    localization: float | None = None
    approximation: str | None = None
    expected_entropy: float | None = None
    residual_kept: float | None = None
    flags: tuple[str, ...] = ()
    quantised: str | None = None  # the format of the layer's weights, where they are stored quantised: "fp8", "nf4"
    # optional columns
    eigenvalues: tuple[tuple[float, float], ...] | None = None
    drive: dict[str, Any] | None = None  # rotary: "even" and "odd" by frequency, and the constant "still", in logits
    profile: tuple[float, ...] | None = None  # rho over 65 positions, where the closed form does not apply

    def __getitem__(self, column: str) -> Any:
        return getattr(self, column)


OPTIONAL = ("eigenvalues", "drive", "profile", "quantised")  # columns that a document has only where they are filled
ADDED = ("residual_kept", "effective_rank")  # columns that documents of earlier versions do not have
NUMERIC_COLUMNS = tuple(f.name for f in fields(HeadRow) if "float" in str(f.type) and f.name not in OPTIONAL)
SCAN_FLAGS = tuple(f.name for f in FLAGS if set(f.needs) <= {*NUMERIC_COLUMNS, "finite"})


@dataclass(frozen=True, repr=False)
class Scan:
    """The result of `scan()`."""

    source: str
    assumptions: dict[str, Any]
    layers: list[dict[str, Any]]
    rows: list[HeadRow]
    detailed: Callable[[], Scan] | None = field(default=None, repr=False, compare=False)  # scans again, with details

    def __repr__(self) -> str:
        faulty = sum(bool(verdict.faults) for verdict in self.verdicts)
        return f"Scan({self.source!r}, {len(self.rows)} heads in {len(self.layers)} layers, {faulty} to look at)"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from locater.report.notebook import scan_in_notebook

        return scan_in_notebook(self)

    def plot(self, column: str | None = None) -> Any:
        """One column of all heads, heads by layers; without a name the one that the page opens on.

        A matplotlib Figure, or an altair Chart where only altair is installed.
        """
        from locater.report.drawn import of_scan
        from locater.report.plots import plot

        return plot(of_scan(self, column))

    def title(self) -> str:
        return f"{self.source}: {len(self.rows)} heads in {len(self.layers)} attention layers"

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """For each row: which of its flags are faults, and why the others are not."""
        return judge([vars(row) for row in self.rows], self.assumptions["length"])

    def records(self) -> list[dict[str, Any]]:
        """Rows as dictionaries, with `faults` beside `flags`."""
        pairs = zip(self.rows, self.verdicts, strict=True)
        return [{**asdict(row), "faults": verdict.faults} for row, verdict in pairs]

    def to_dict(self) -> dict[str, Any]:
        """The JSON document: schema, locater, source, assumptions, layers, heads."""
        heads = [{k: v for k, v in row.items() if v is not None or k not in OPTIONAL} for row in self.records()]
        return {
            "schema": SCHEMA,
            "locater": __version__,
            "source": self.source,
            "assumptions": self.assumptions,
            "layers": self.layers,
            "heads": heads,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON document; the file appears whole or not at all."""
        write_whole(Path(path), self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Scan:
        """Read a document that `save` or `--json` wrote."""
        file = Path(path)
        regular_file(file)
        try:
            document = parsed(file.read_text(encoding="utf-8"))
            if document["schema"] != SCHEMA:
                raise ValueError(f"schema {document['schema']!r:.40}, not {SCHEMA}")
            check_scan(document, NUMERIC_COLUMNS, OPTIONAL + ADDED)
            rows = [_row_of(head) for head in document["heads"]]
            return cls(document["source"], document["assumptions"], document["layers"], rows)
        except (KeyError, TypeError, AttributeError) as error:
            raise LocaterError(
                f"{path}: not what `locater scan --json` writes (it lacks {error}): scan the model again"
            ) from None
        except RecursionError:
            raise LocaterError(
                f"{path}: not what `locater scan --json` writes (nested too deep): scan the model again"
            ) from None
        except ValueError as error:
            raise LocaterError(
                f"{path}: not a scan that this version reads ({first_line(error)}): scan the model again"
            ) from None
        except OSError as error:
            raise LocaterError(f"{path}: cannot be read ({error.strerror})") from None

    @classmethod
    def join(cls, parts: Iterable[Scan]) -> Scan:
        """Join the scans of all shards of one model (`--shard i/n`)."""
        shards = list(parts)
        layers = sorted((entry for shard in shards for entry in shard.layers), key=lambda entry: entry["layer"])
        numbers = [entry["layer"] for entry in layers]
        assumptions = shards[0].assumptions if shards else {}
        sources = sorted({shard.source for shard in shards})
        if len(sources) != 1 or numbers != list(range(assumptions.get("layers", len(numbers)))):
            raise LocaterError(f"these shards do not make one model: sources {sources}, layers {numbers}")
        if any(shard.assumptions != assumptions for shard in shards):
            raise LocaterError("these shards were scanned with different settings (length, raw): scan them alike")
        rows = sorted((row for shard in shards for row in shard.rows), key=lambda row: (row.layer, row.head))
        return cls(sources[0], assumptions, layers, rows)

    def with_details(self) -> Scan:
        """This scan with the eigenvalues, drives and profiles that a page draws; reads the source again for them."""
        lacking = any(_lacks_details(row) for row in self.rows)
        lacking |= any(entry.get("positions") == "rotary" and "frequencies" not in entry for entry in self.layers)
        if self.detailed is None or not lacking:
            return self
        detailed = self.detailed()
        if [row.trace for row in detailed.rows] != [row.trace for row in self.rows]:
            raise LocaterError(
                f"{self.source} has changed since it was scanned: scan it with details=True to draw it later"
            )
        return detailed

    def plain(self, eigenvalues: bool) -> Scan:
        """This scan without the details that only a page draws."""
        rows = [
            replace(row, eigenvalues=row.eigenvalues if eigenvalues else None, drive=None, profile=None)
            for row in self.rows
        ]
        layers = [{name: value for name, value in entry.items() if name != "frequencies"} for entry in self.layers]
        return Scan(self.source, self.assumptions, layers, rows, self.detailed)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the HTML page: self-contained, works offline."""
        from locater.report.scan import scan_page

        write_whole(Path(path), scan_page(self.with_details()))

    def to_pandas(self) -> pandas.DataFrame:
        """One row per head, as a pandas frame."""
        import pandas

        return pandas.DataFrame(self.records())

    def to_polars(self) -> polars.DataFrame:
        """One row per head, as a polars frame."""
        import polars

        return polars.DataFrame(self.records())


def _lacks_details(row: HeadRow) -> bool:
    without_profile = row.approximation == "mixture" and row.profile is None
    return row.trace is not None and (row.eigenvalues is None or without_profile)


def _row_of(head: dict[str, Any]) -> HeadRow:
    head = {**dict.fromkeys(ADDED), **head}
    head.pop("faults", None)  # derived from the rest
    return HeadRow(**{**head, "flags": tuple(head["flags"])})
