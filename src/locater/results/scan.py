"""`Scan`, the result of `scan()`: a row per head, an entry per layer, and the assumptions behind the numbers.

It is written as JSON, read back, and shown by `report/`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locater.brief import brief
from locater.errors import LocaterError, first_line
from locater.files import regular_file
from locater.findings import FLAGS, Verdict, flags_of, judge, key_variance
from locater.report.verdict_sentences import amount
from locater.results.document import Document, check_scan, parse_document
from locater.version import COMPUTED_AGAIN, OF_SCHEMA, OLD_NUMBERS, SCAN_SCHEMA

if TYPE_CHECKING:
    from rich.console import Console


READ = (1, SCAN_SCHEMA)  # schemas of documents that are read


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
    written: float | None = None  # norm of O_h V_h, where values were read
    written_share: float | None = None  # over the median of the heads of its layer that write
    eigenvalues: tuple[tuple[float, float], ...] | None = None
    drive: dict[str, Any] | None = None  # rotary: "even" and "odd" by frequency, and the constant "still", in logits
    profile: tuple[float, ...] | None = None  # rho over 65 positions, where the closed form does not apply

    __repr__ = brief

    def __getitem__(self, column: str) -> Any:
        return getattr(self, column)


VALUE_COLUMNS = ("written", "written_share")  # of scans that read values
# columns that a document has only where they are filled
OPTIONAL = (*VALUE_COLUMNS, "eigenvalues", "drive", "profile", "quantised")
NUMERIC_COLUMNS = tuple(f.name for f in fields(HeadRow) if "float" in str(f.type) and f.name not in OPTIONAL)
SCAN_FLAGS = tuple(f.name for f in FLAGS if set(f.needs) <= {*NUMERIC_COLUMNS, "finite"})
VALUE_FLAGS = tuple(f.name for f in FLAGS if set(f.needs) <= {*VALUE_COLUMNS})


@dataclass(frozen=True, repr=False)
class Scan(Document):
    """The result of `scan()`."""

    source: str
    assumptions: dict[str, Any]
    layers: list[dict[str, Any]]
    rows: list[HeadRow]
    detailed: Callable[[], Scan] | None = field(default=None, repr=False, compare=False)  # scans again, with details

    schema = SCAN_SCHEMA

    def __repr__(self) -> str:
        faulty = sum(bool(verdict.faults) for verdict in self.verdicts)
        return f"Scan({self.source!r}, {len(self.rows)} heads in {len(self.layers)} layers, {faulty} with faults)"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from locater.report.scan import scan_in_notebook

        return scan_in_notebook(self.to_dict())

    def plot(self, column: str | None = None) -> Any:
        """One column of all heads, heads by layers; without a name the one that the page opens on.

        A matplotlib Figure, or an altair Chart where only altair is installed.
        """
        from locater.report.plots import map_of_scan, plot

        return plot(map_of_scan(self.to_dict(), column))

    def title(self) -> str:
        return f"{self.source}: {amount(len(self.rows), 'head')} in {amount(len(self.layers), 'attention layer')}"

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """For each row: which of its flags are faults, and why the others are not."""
        return judge([vars(row) for row in self.rows], self.assumptions["length"])

    def records(self) -> list[dict[str, Any]]:
        """Rows as dictionaries, with `faults` beside `flags`."""
        pairs = zip(self.rows, self.verdicts, strict=True)
        return [{**vars(row), "faults": verdict.faults} for row, verdict in pairs]

    def to_dict(self) -> dict[str, Any]:
        """The JSON document: schema, locater, source, assumptions, layers, heads."""
        heads = [{k: v for k, v in row.items() if v is not None or k not in OPTIONAL} for row in self.records()]
        return {
            **self.header(),
            "source": self.source,
            "assumptions": self.assumptions,
            "layers": self.layers,
            "heads": heads,
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Scan:
        """Read a document that `save` or `--json` wrote."""
        file = Path(path)
        regular_file(file)
        try:
            document = parse_document(file.read_text(encoding="utf-8"))
            if document["schema"] not in READ or isinstance(document["schema"], bool):
                raise ValueError(f"schema {document['schema']!r:.40}, not {' or '.join(map(str, READ))}")
            check_scan(document, NUMERIC_COLUMNS, OPTIONAL)
            rows = [_row_of(head) for head in document["heads"]]
            found = cls(document["source"], document["assumptions"], document["layers"], rows)
            return found if document["schema"] == SCAN_SCHEMA else found.label_as_old()
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
        if any(_other_assumptions(shard) != _other_assumptions(shards[0]) for shard in shards):
            raise LocaterError("these shards were scanned with different settings (length, raw): scan them alike")
        rows = sorted((row for shard in shards for row in shard.rows), key=lambda row: (row.layer, row.head))
        reads = [shard.assumptions["read"] for shard in shards if "read" in shard.assumptions]
        if len(reads) == len(shards):  # each reads the maps of its own layers, and the vectors of all
            read = {
                "maps": sum(part["maps"] for part in reads),
                "vectors": max(part["vectors"] for part in reads),
            }
            assumptions = {**assumptions, "read": {**read, "of": reads[0]["of"]}}
        return cls(sources[0], assumptions, layers, rows)

    @property
    def has_values(self) -> bool:
        """Whether values and output maps were read."""
        return bool(self.assumptions.get("values"))

    def without_values(self) -> Scan:
        """This scan as if values and output maps had not been read."""
        if not self.has_values:
            return self
        rows = [replace(row, written=None, written_share=None, flags=_flags_without_values(row)) for row in self.rows]
        assumptions = {name: value for name, value in self.assumptions.items() if name != "values"}
        return replace(self, assumptions=assumptions, rows=rows)

    @property
    def old(self) -> bool:
        """Whether expected entropy and flags come from a document of schema 1."""
        return OF_SCHEMA in self.assumptions

    def label_as_old(self) -> Scan:
        """This scan of schema 1, with a note that says so."""
        notes = [OLD_NUMBERS, *self.assumptions["notes"]]
        return replace(self, assumptions={**self.assumptions, OF_SCHEMA: 1, "notes": notes})

    def recompute(self) -> Scan:
        """This scan with the expected entropy and flags of this version, computed from the other columns of its rows;
        unchanged unless it is `old`.
        """
        if not self.old:
            return self
        from locater.theory import expected_entropy, second_order_entropy

        length = self.assumptions["length"]
        known = [row for row in self.rows if None not in (row.expected_entropy, row.F, row.key_bias)]
        variance = [float(key_variance(row.F, row.key_bias)) for row in known]
        entropies: dict[int, float] = {}
        for row, v, entropy in zip(known, variance, _entropies(expected_entropy, variance, length), strict=True):
            old = _entropies(second_order_entropy, [v], length)[0]
            # heads that were run on measured tokens have another entropy, which stays
            if abs((row.expected_entropy or 0.0) - old) <= 1e-6 * (1 + old):
                entropies[id(row)] = entropy
        rows = [
            replace(
                row, expected_entropy=entropies.get(id(row), row.expected_entropy), flags=_recompute_flags(row, length)
            )
            for row in self.rows
        ]
        notes = [note for note in self.assumptions["notes"] if note != OLD_NUMBERS]
        assumptions = {name: value for name, value in self.assumptions.items() if name != OF_SCHEMA}
        assumptions["notes"] = [COMPUTED_AGAIN, *notes]
        return replace(self, assumptions=assumptions, rows=rows)

    def with_details(self) -> Scan:
        """This scan with the eigenvalues, drives and profiles that a page draws, re-reading the source for them."""
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

    def page(self) -> str:
        """The HTML page, with the details that it draws."""
        from locater.report.scan import scan_page

        return scan_page(self.with_details().to_dict())

    def show(self, console: Console) -> None:
        """Print the verdict, a table of heads, what the flags mean, and what was assumed."""
        from locater.report.scan import print_scan

        print_scan(self.to_dict(), console)


def recompute_mixed(scans: Iterable[Scan]) -> list[Scan]:
    """Scans to be compared: if only some are of schema 1, those are recomputed."""
    listed = list(scans)
    return listed if all(x.old for x in listed) else [x.recompute() for x in listed]


def _other_assumptions(shard: Scan) -> dict[str, Any]:
    return {name: value for name, value in shard.assumptions.items() if name != "read"}


def _flags_without_values(row: HeadRow) -> tuple[str, ...]:
    """A head that is finite but for its values has its numbers."""
    gone = {*VALUE_FLAGS} | ({"nonfinite"} if row.frobenius_sq is not None else set())
    return tuple(name for name in row.flags if name not in gone)


def _entropies(entropy: Callable[..., Any], variance: list[float], length: int) -> list[float]:
    import torch

    values: list[float] = entropy(torch.tensor(variance, dtype=torch.float64, device="cpu"), length).tolist()
    return values


def _recompute_flags(row: HeadRow, length: int) -> tuple[str, ...]:
    """The flags that this version raises; for mechanisms other than softmax, only whether the weights are finite."""
    numbers = vars(row) if row.expected_entropy is not None else {}
    return flags_of({**numbers, "finite": "nonfinite" not in row.flags}, length)


def _lacks_details(row: HeadRow) -> bool:
    without_profile = row.approximation == "mixture" and row.profile is None
    return row.trace is not None and (row.eigenvalues is None or without_profile)


def _row_of(head: dict[str, Any]) -> HeadRow:
    stored = {name: value for name, value in head.items() if name != "faults"}  # faults are derived from the rest
    return HeadRow(**{**stored, "flags": tuple(head["flags"])})
