"""A scan as a Parquet file and back: a row per head, and the document's assumptions and layers in the metadata."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from locater.commands.fleet.cache_keys import Job
from locater.errors import LocaterError, first_line
from locater.results.scan import VALUE_COLUMNS, HeadRow, Scan
from locater.version import SCAN_SCHEMA, __version__

METADATA = b"locater"
ROW = 20  # bytes that a head takes in a part at least: it has some twenty numbers that do not repeat
LABELS = {"source": "str", "run": "str", "step": "int", "identity": "str", "digest": "str", "layer_name": "str"}
COMPUTED_AGAIN = ("expected_entropy", "flags", "faults")  # columns of schema 1 with another meaning
# columns that only a page of one scan draws, and those of values, which a fleet does not read
LEFT_OUT = ("drive", "profile", *VALUE_COLUMNS)


class DamagedPartError(LocaterError):
    """A part that is not complete: truncated, or overwritten by something else."""


def pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise LocaterError("a fleet is stored as Parquet files: pip install 'locater[fleet]'") from None
    return pyarrow


@cache
def schema() -> Any:
    """The columns of a part: labels, then those of the rows of a scan, with `faults` next to `flags`."""
    columns = {**LABELS, **{f.name: str(f.type) for f in fields(HeadRow) if f.name not in LEFT_OUT}}
    entries = []
    for name, kind in columns.items():
        entries.append((name, _type(kind)))
        if name == "flags":
            entries.append(("faults", _type(kind)))
    return pyarrow().schema(entries)


def _type(kind: str) -> Any:
    """The type of a column, from the annotation in `HeadRow`."""
    arrow = pyarrow()
    plain = kind.removesuffix(" | None")
    types = {
        "int": arrow.int64(),
        "float": arrow.float64(),
        "str": arrow.string(),
        "bool": arrow.bool_(),
        "tuple[str, ...]": arrow.list_(arrow.string()),
        "tuple[tuple[float, float], ...]": arrow.list_(arrow.list_(arrow.float64())),
    }
    return types[plain]


def to_bytes(scan: Scan, job: Job, digest: str) -> bytes:
    """The Parquet file of one scanned checkpoint."""
    arrow = pyarrow()
    names = {entry["layer"]: entry["name"] for entry in scan.layers}
    labels = {"source": job.source, "run": job.run, "step": job.step, "identity": job.identity, "digest": digest}
    rows = [{**labels, "layer_name": names[row["layer"]], **row} for row in scan.records()]
    document = {
        "schema": SCAN_SCHEMA,
        "locater": __version__,
        "reader": job.reader,
        "key": job.key,
        **labels,
        "heads": len(rows),
        "assumptions": scan.assumptions,
        "layers": scan.layers,
    }
    table = arrow.Table.from_pylist(rows, schema=schema())
    return _encode(table, document)


def _encode(table: Any, document: dict[str, Any]) -> bytes:
    arrow = pyarrow()
    table = table.replace_schema_metadata({METADATA: json.dumps(document, allow_nan=False).encode()})
    sink = arrow.BufferOutputStream()
    arrow.parquet.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return bytes(sink.getvalue())


def read_header(path: Path) -> dict[str, Any]:
    """The metadata of a part; `DamagedPartError` if it is not complete."""
    arrow = pyarrow()
    try:
        metadata = arrow.parquet.read_metadata(path)
        _check_rows(path, metadata)
        document: dict[str, Any] = json.loads(metadata.metadata[METADATA])
        if metadata.num_rows != document["heads"]:
            raise ValueError(f"{metadata.num_rows} rows in place of {document['heads']}")
        return document
    except FileNotFoundError:
        raise
    except (arrow.ArrowException, KeyError, TypeError, ValueError, OSError) as error:
        raise DamagedPartError(f"{path}: not a complete part ({first_line(error)})") from None


def of_schema_1(path: Path) -> bool:
    """Whether a version before 0.3 wrote this part: its expected entropy and flags have another meaning."""
    return bool(read_header(path).get("schema", 1) < SCAN_SCHEMA)


def _check_rows(path: Path, metadata: Any) -> None:
    """ValueError if a file has more rows than bytes for them: nulls take none, and gigabytes once they are read."""
    size = path.stat().st_size
    if metadata.num_rows * ROW > size:
        raise ValueError(f"{metadata.num_rows:,} rows in {size:,} bytes")


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Any:
    """The rows of a part as a pyarrow table. Expected entropy and flags of a part of schema 1 are recomputed, so that
    the rows of all parts mean the same.
    """
    table = _stored_rows(path, columns)
    again = [name for name in COMPUTED_AGAIN if name in table.column_names]
    if not again or not of_schema_1(path):
        return table
    records = to_scan(path).records()
    for name in again:
        place = table.schema.get_field_index(name)
        values = pyarrow().array([row[name] for row in records], table.schema.field(name).type)
        table = table.set_column(place, table.schema.field(name), values)
    return table


def _stored_rows(path: Path, columns: Sequence[str] | None = None) -> Any:
    """The rows as they are stored. For small files, starting threads would take longer than reading."""
    arrow = pyarrow()
    try:
        with arrow.parquet.ParquetFile(path, pre_buffer=False, page_checksum_verification=True) as file:
            _check_rows(path, file.metadata)
            return file.read(columns=None if columns is None else list(columns), use_threads=False)
    except FileNotFoundError:
        raise DamagedPartError(f"{path}: replaced while the fleet was read: ask again") from None
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise DamagedPartError(f"{path}: damaged ({first_line(error)}): remove it and run the fleet again") from None


def relabel(path: Path, run: str | None, step: int | None) -> bytes:
    """The same part with another run and step."""
    arrow = pyarrow()
    document = {**read_header(path), "run": run, "step": step}
    table = _stored_rows(path)
    for name, value in (("run", run), ("step", step)):
        place, kind = table.schema.get_field_index(name), table.schema.field(name).type
        table = table.set_column(place, table.schema.field(name), arrow.array([value] * len(table), kind))
    return _encode(table, document)


def to_scan(path: Path) -> Scan:
    """The scan behind a part; numbers of schema 1 are recomputed."""
    document = read_header(path)
    names = {f.name for f in fields(HeadRow)}
    rows = []
    for record in _stored_rows(path).to_pylist():
        known = {name: value for name, value in record.items() if name in names}
        known["flags"] = tuple(known["flags"])
        if known.get("eigenvalues") is not None:
            known["eigenvalues"] = tuple((re, im) for re, im in known["eigenvalues"])
        rows.append(HeadRow(**known))
    found = Scan(document["source"], document["assumptions"], document["layers"], rows)
    return found if document.get("schema", 1) == SCAN_SCHEMA else found.label_as_old().recompute()
