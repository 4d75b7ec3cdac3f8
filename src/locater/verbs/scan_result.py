"""What a scan gives back: a row per head, an entry per layer, the assumptions behind the numbers; and how it is written
and read.
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

LENGTH = 256  # tokens in view, unless told otherwise
TOKENS = 8192  # that a probe measures, unless told otherwise


@dataclass(frozen=True)
class HeadRow:
    """One head. `trace`, `trace_of_square`, `frobenius_sq` are of the effective W without the logit scale; M, S, F with
    it.

    None stands for a number that has no meaning here: traces of cross-attention, everything of a head with NaN weights.
    """

    layer: int
    head: int
    kv_head: int
    kind: str
    width: int
    head_dim: int
    scale: float
    trace: float | None = None
    trace_of_square: float | None = None
    frobenius_sq: float | None = None
    symmetric_sq: float | None = None
    mean: float | None = None
    variance: float | None = None
    concentration: float | None = None
    spectral_norm: float | None = None
    stable_rank: float | None = None
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
    # on request
    eigenvalues: tuple[tuple[float, float], ...] | None = None
    # rotary: even and odd coefficients per frequency, and the still part, in logit units
    drive: dict[str, Any] | None = None
    profile: tuple[float, ...] | None = None  # rho over 65 positions, where it is not the closed form's

    def __getitem__(self, column: str) -> Any:
        return getattr(self, column)


OPTIONAL = ("eigenvalues", "drive", "profile")  # columns on request
ADDED = ("residual_kept",)  # columns that documents of earlier versions do not have
NUMERIC_COLUMNS = tuple(f.name for f in fields(HeadRow) if "float" in str(f.type) and f.name not in OPTIONAL)
SCAN_FLAGS = tuple(f.name for f in FLAGS if set(f.needs) <= {*NUMERIC_COLUMNS, "finite"})


@dataclass(frozen=True, repr=False)
class Scan:
    """What `scan()` found."""

    source: str
    assumptions: dict[str, Any]
    layers: list[dict[str, Any]]
    rows: list[HeadRow]
    # the same scan with what a page draws
    detailed: Callable[[], Scan] | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        bad = sum(bool(held.faults) for held in self.verdicts)
        return f"Scan({self.source!r}, {len(self.rows)} heads in {len(self.layers)} layers, {bad} to look at)"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from locater.report.scan import scan_in_notebook

        return scan_in_notebook(self)

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Of each row: which of its flags are faults, and why the others are not."""
        return judge([vars(row) for row in self.rows], self.assumptions["length"])

    def records(self) -> list[dict[str, Any]]:
        """Rows as they are written, with `faults` beside `flags`."""
        return [{**asdict(row), "faults": held.faults} for row, held in zip(self.rows, self.verdicts, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """The JSON document: schema, locater, source, assumptions, layers, heads."""
        heads = [{k: v for k, v in row.items() if v is not None or k not in OPTIONAL} for row in self.records()]
        return {
            "schema": SCHEMA, "locater": __version__, "source": self.source, "assumptions": self.assumptions,
            "layers": self.layers, "heads": heads,
        }  # fmt: skip

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
            rows = [_row(head) for head in document["heads"]]
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
        """The scans of all shards of one model (`--shard i/n`), as one."""
        held = list(parts)
        layers = sorted((entry for part in held for entry in part.layers), key=lambda entry: entry["layer"])
        numbers = [entry["layer"] for entry in layers]
        assumed = held[0].assumptions if held else {}
        if len({part.source for part in held}) != 1 or numbers != list(range(assumed.get("layers", len(numbers)))):
            raise LocaterError(
                f"these shards do not make one model: sources {sorted({p.source for p in held})}, layers {numbers}"
            )
        if any(part.assumptions != assumed for part in held):
            raise LocaterError("these shards were scanned with different settings (length, raw): scan them alike")
        rows = sorted((row for part in held for row in part.rows), key=lambda row: (row.layer, row.head))
        return cls(held[0].source, held[0].assumptions, layers, rows)

    def with_details(self) -> Scan:
        """This scan with what a page draws (eigenvalues, drives, profiles), reading the source again if it lacks
        them.
        """
        lacking = [row for row in self.rows if row.trace is not None and (row.eigenvalues is None or _no_profile(row))]
        turning = any(entry.get("positions") == "rotary" and "frequencies" not in entry for entry in self.layers)
        if self.detailed is None or not (lacking or turning):
            return self
        found = self.detailed()
        if [row.trace for row in found.rows] != [row.trace for row in self.rows]:
            raise LocaterError(
                f"{self.source} has changed since it was scanned: scan it with details=True to draw it later"
            )
        return found

    def plain(self, eigenvalues: bool) -> Scan:
        """This scan without what only a page draws."""
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


def _no_profile(row: HeadRow) -> bool:
    return row.approximation == "mixture" and row.profile is None


def _row(head: dict[str, Any]) -> HeadRow:
    head = {**dict.fromkeys(ADDED), **head}
    head.pop("faults", None)  # follows from the rest
    return HeadRow(**{**head, "flags": tuple(head["flags"])})
