"""`Fleet`: the folder of a fleet, read back, also while it is written: frames, SQL, scans, a summary, a page."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locater.commands.fleet.cache_keys import ScanSettings
from locater.commands.fleet.parts import (
    DamagedPartError,
    of_schema_1,
    pyarrow,
    read_header,
    read_rows,
    schema,
    to_scan,
)
from locater.commands.fleet.store import Store
from locater.defaults import LENGTH, Progress
from locater.errors import LocaterError, first_line
from locater.findings import FLAGS, Condition, crossings
from locater.redacted_and_escaped_text import one_line
from locater.results.document import Document
from locater.results.scan import Scan

if TYPE_CHECKING:
    import duckdb
    import pandas
    import polars
    from rich.console import Console


# An overview of a fleet: the steps of each run, heads with faults, when flags first appear, duplicates.

Head = tuple[str, int, int]  # source if there is no run; layer, head


def summary(
    folder: str,
    settings: Mapping[str, Any],
    sources: Sequence[FleetSource],
    rows: Iterable[Mapping[str, Any]],
    damaged: Sequence[str] = (),
) -> dict[str, Any]:
    """The document of a fleet. `rows` need source, layer, head, flags and faults, and come by run and step."""
    runs = {name: _Run(name) for name in dict.fromkeys(entry.run for entry in sources)}
    run_of = {entry.source: runs[entry.run] for entry in sources}
    for entry in sources:
        runs[entry.run].sources.append(entry)
    for row in rows:
        if row["source"] in run_of:  # else it was finished after the sources were listed
            run_of[row["source"]].add(row)
    counts = {status: sum(entry.status == status for entry in sources) for status in ("done", "failed", "to do")}
    return {
        "source": folder,
        "settings": dict(settings),
        "checkpoints": {"done": counts["done"], "failed": counts["failed"], "to_do": counts["to do"]},
        "runs": [run.document() for run in runs.values()],
        "damaged": list(damaged),
    }


class _Run:
    """The checkpoints of one run, in the order of their steps."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.sources: list[FleetSource] = []
        self.heads: set[Head] = set()
        self.faulty: set[Head] = set()
        self.at_last: tuple[str, set[Head]] = ("", set())  # faulty heads of the last checkpoint
        self.flags: dict[str, dict[str, Any]] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        # without a run, checkpoints are different models: each has heads of its own
        place = (row["source"] if self.name is None else "", row["layer"], row["head"])
        self.heads.add(place)
        if row["source"] != self.at_last[0]:
            self.at_last = (row["source"], set())
        for flag in row["flags"]:
            at = {"source": row["source"], "step": row["step"]}
            entry = self.flags.setdefault(flag, {"first": at, "first_fault": None, "heads": set()})
            entry["heads"].add(place)
            if flag in row["faults"] and entry["first_fault"] is None:
                entry["first_fault"] = at
        if row["faults"]:
            self.faulty.add(place)
            self.at_last[1].add(place)

    def document(self) -> dict[str, Any]:
        done = [entry for entry in self.sources if entry.status == "done"]
        steps = [entry.step for entry in done if entry.step is not None]
        order = [flag.name for flag in FLAGS]
        flags = sorted(self.flags, key=lambda name: order.index(name) if name in order else len(order))
        return {
            "run": self.name,
            "checkpoints": len(done),
            "steps": {"count": len(set(steps)), "first": min(steps, default=None), "last": max(steps, default=None)},
            "without_step": len(done) - len(steps),
            "heads": len(self.heads),
            "heads_with_faults": len(self.faulty),
            "heads_with_faults_at_last": None if self.name is None else len(self.at_last[1]),
            "flags": {name: {**self.flags[name], "heads": len(self.flags[name]["heads"])} for name in flags},
            "failed": [_failure(entry) for entry in self.sources if entry.status == "failed"],
            "to_do": sum(entry.status == "to do" for entry in self.sources),
            "duplicates": _duplicates(done),
        }


def _failure(entry: FleetSource) -> dict[str, Any]:
    return {"source": entry.source, "step": entry.step, "reason": entry.reason, "tries": entry.tries}


def _duplicates(done: Sequence[FleetSource]) -> list[list[dict[str, Any]]]:
    """Groups of checkpoints whose queries, keys and norms are the same tensors with the same bytes."""
    groups: dict[str | None, list[dict[str, Any]]] = {}
    for entry in done:
        groups.setdefault(entry.digest, []).append({"source": entry.source, "step": entry.step})
    return [group for group in groups.values() if len(group) > 1]


# The fleet.

SMALL = ("source", "run", "step", "layer", "head", "flags", "faults")  # columns that a summary reads


@dataclass(frozen=True)
class FleetSource:
    """One checkpoint of a fleet."""

    source: str
    run: str | None
    step: int | None
    status: str  # "done", "failed" or "to do"
    heads: int | None = None
    digest: str | None = None  # of the tensors that were read: queries, keys and norms
    identity: str | None = None
    reason: str | None = None  # of a failure
    tries: int | None = None


class Fleet(Document):
    """Scans of many checkpoints in one folder. Every call re-reads the folder, so it can be used while a fleet runs;
    only complete checkpoints are shown.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._store = Store(folder)
        self.settings = self._store.settings()
        self._headers: dict[tuple[str, int], dict[str, Any]] = {}
        self.damaged: dict[str, str] = {}  # parts that cannot be read, and why; the next run rebuilds them

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Fleet:
        """The fleet in a folder that `locater fleet` has made."""
        return cls(folder)

    @classmethod
    def run(
        cls,
        sources: Sequence[str],
        out: str | os.PathLike[str],
        *,
        length: int = LENGTH,
        raw: bool = False,
        eigenvalues: bool = False,
        run: str | None = None,
        step_pattern: str | None = None,
        workers: int | None = None,
        shard: tuple[int, int] | None = None,
        ray: str | None = None,
        retry_failed: bool = False,
        progress: Progress | None = None,
    ) -> Fleet:
        """Scan checkpoints into a folder, as `locater fleet SOURCES --out FOLDER` does. What is already there is kept.

        Checkpoints that fail do not stop the others: `errors` has them.
        """
        from locater.commands.fleet.running import Engine
        from locater.commands.fleet.running import run as run_fleet

        run_fleet(
            sources,
            out,
            settings=ScanSettings(length, raw, eigenvalues),
            run_name=run,
            step_pattern=step_pattern,
            engine=Engine(workers, ray, shard),
            retry_failed=retry_failed,
            progress=progress,
        )
        return cls(out)

    @property
    def folder(self) -> Path:
        return self._store.folder

    def __repr__(self) -> str:
        counts = self.counts()
        words = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        return f"Fleet({str(self.folder)!r}, {words or 'empty'})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from locater.report.fleet import fleet_in_notebook

        return fleet_in_notebook(self.to_dict())

    # what is there

    def _parts(self) -> dict[str, dict[str, Any]]:
        """The metadata of each complete part by key; for each source only the newest part."""
        times = self._store.parts()
        self._headers = {place: known for place, known in self._headers.items() if times.get(place[0]) == place[1]}
        self.damaged = {}
        newest: dict[str, tuple[int, str]] = {}
        for key, time in times.items():
            if (key, time) not in self._headers:
                try:
                    self._headers[key, time] = read_header(self._store.part(key))
                except FileNotFoundError:
                    continue
                except DamagedPartError as error:
                    self.damaged[key] = str(error)
                    continue
            source = self._headers[key, time]["source"]
            newest[source] = max(newest.get(source, (0, "")), (time, key))
        by_key = {key: known for (key, _), known in self._headers.items()}
        parts = {key: by_key[key] for _, key in newest.values()}
        return dict(sorted(parts.items(), key=lambda item: _order(item[1])))

    def files(self) -> list[Path]:
        """The parts of all checkpoints that are done, by run and step."""
        return [self._store.part(key) for key in self._parts()]

    def _whole_files(self) -> list[Path]:
        """The same, with a warning for damaged parts, since a frame cannot say that a checkpoint is missing."""
        files = self.files()
        for line in self.damaged.values():
            warnings.warn(f"{line}: its rows are left out; run the fleet again", stacklevel=3)
        return files

    def sources(self) -> list[FleetSource]:
        """Every checkpoint that was asked for or is there, with its status, by run and step."""
        listed = self._store.lists()
        found = {entry.source: FleetSource(entry.source, entry.run, entry.step, "to do") for entry in listed}
        for error in self._store.errors().values():
            labels = (error["source"], error.get("run"), error.get("step"))
            found[error["source"]] = FleetSource(
                *labels, "failed", identity=error.get("identity"), reason=error["reason"], tries=error.get("tries")
            )
        for known in self._parts().values():
            labels = (known["source"], known["run"], known["step"])
            found[known["source"]] = FleetSource(*labels, "done", known["heads"], known["digest"], known["identity"])
        return sorted(found.values(), key=lambda entry: _order(vars(entry)))

    def counts(self) -> dict[str, int]:
        """How many checkpoints are done, failed and to do."""
        found = [entry.status for entry in self.sources()]
        return {status: found.count(status) for status in ("done", "failed", "to do")}

    def status_words(self, asked: Sequence[str] = ()) -> str:
        """What is done, failed and to do, and why checkpoints failed; `asked` may have names that are not in it yet."""
        entries = self.sources()
        new = {*asked} - {entry.source for entry in entries}
        counts = {**self.counts()}
        counts["to do"] += len(new)
        lines = [f"{self.folder}: " + ", ".join(f"{count:,} {status}" for status, count in counts.items())]
        lines += [
            f"failed ({entry.tries or 1} {'try' if entry.tries in (None, 1) else 'tries'}): {entry.reason}"
            for entry in entries
            if entry.status == "failed"
        ]
        return "\n".join(map(one_line, [*lines, *(f"damaged: {line}" for line in self.damaged.values())]))

    def crossings(self, conditions: Sequence[Condition], sources: Collection[str]) -> str:
        """How many heads of these checkpoints meet each condition of --fail-on, the worst first; empty if none does."""
        wanted = {*sources}
        rows = [row for row in self.records() if row["source"] in wanted] if conditions else []
        line = crossings(conditions, rows, self.settings.length)
        return line and f"--fail-on: {line}"

    @property
    def errors(self) -> dict[str, str]:
        """Why checkpoints failed, by source."""
        return {entry.source: entry.reason or "" for entry in self.sources() if entry.status == "failed"}

    # rows

    def records(self, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """One dictionary per head of every checkpoint, by run, step, layer and head."""
        for path in self.files():
            yield from read_rows(path, columns).to_pylist()

    def to_polars(self) -> polars.DataFrame:
        """One row per head of every checkpoint, as a polars frame."""
        try:
            import polars
        except ImportError:
            raise LocaterError("polars is not installed: pip install 'locater[fleet]'") from None
        return polars.from_arrow(self.to_arrow())

    def to_pandas(self) -> pandas.DataFrame:
        """The same as a pandas frame."""
        try:
            import pandas  # noqa: F401 - pyarrow would say less
        except ImportError:
            raise LocaterError("pandas is not installed: pip install pandas, or use to_polars()") from None
        return self.to_arrow().to_pandas()

    def to_arrow(self) -> Any:
        """The same as a pyarrow table. Columns that parts of earlier versions lack are null there."""
        arrow = pyarrow()
        tables = [read_rows(path) for path in self._whole_files()]
        tables = [table.replace_schema_metadata(None) for table in tables] or [schema().empty_table()]
        return arrow.concat_tables(tables, promote_options="default")

    def sql(self, query: str) -> duckdb.DuckDBPyRelation:
        """A query over the tables `heads` (a row per head), `sources` and `errors`, by DuckDB.

        The result prints as a table; `.pl()`, `.df()` and `.fetchall()` give it in other forms.
        """
        return run_query(query, self._whole_files(), [asdict(entry) for entry in self.sources()])

    def scan(self, source: str | os.PathLike[str]) -> Scan:
        """The scan of one checkpoint, given its name or the end of it (`step-1000`), with all that a `Scan` can do."""
        from locater.commands.scanning import scan

        parts = self._parts()
        wanted, path = str(source), os.path.abspath(source)
        matches = [key for key, known in parts.items() if known["source"] in (wanted, path)]
        matches = matches or [k for k, known in parts.items() if known["source"].endswith((f"/{wanted}", f"@{wanted}"))]
        if len(matches) != 1:
            if reason := self.errors.get(wanted, self.errors.get(path)):
                raise LocaterError(f"{source}: failed in this fleet ({reason})")
            what = "not in this fleet" if not matches else f"{len(matches)} checkpoints of this fleet match"
            raise LocaterError(f"{source}: {what}; fleet.sources() lists them")
        kept = to_scan(self._store.part(matches[0]))
        settings = self.settings
        again = partial(scan, kept.source, length=settings.length, raw=settings.raw, details=True)
        return replace(kept, detailed=again)

    # documents

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of `locater fleet --json`: a summary for each run, not the rows."""
        rows = self.records(SMALL)
        settings, damaged = asdict(self.settings), list(self.damaged.values())
        return {**self.header(), **summary(str(self.folder), settings, self.sources(), rows, damaged)}

    def page(self) -> str:
        """The HTML page: how heads change from step to step."""
        from locater.report.trajectory import trajectory_page
        from locater.results.trajectory import trajectory

        return trajectory_page(trajectory(self.records(), self.errors, length=self.settings.length))

    def show(self, console: Console) -> None:
        """Print a line per run, the first step of each flag, failures and duplicates."""
        from locater.report.fleet import print_fleet

        print_fleet(self.to_dict(), console)


def _order(labels: Any) -> tuple[str, float, str]:
    step = labels["step"]
    return labels["run"] or "", -1 if step is None else step, labels["source"]


# SQL over the parts of a fleet, by DuckDB.


def run_query(query: str, files: Sequence[Path], sources: Sequence[dict[str, Any]]) -> duckdb.DuckDBPyRelation:
    """The result of a query over `heads`, `sources` and `errors`."""
    try:
        import duckdb
    except ImportError:
        raise LocaterError("duckdb is not installed: pip install 'locater[fleet]'") from None
    arrow = pyarrow()
    connection = duckdb.connect()
    old = [path for path in files if of_schema_1(path)]
    if old:  # their numbers are computed again, so their rows come from memory
        tables = [read_rows(path).replace_schema_metadata(None) for path in old]
        connection.register("old_heads", arrow.concat_tables(tables, promote_options="default"))
    if new := [path for path in files if path not in old]:
        names = ", ".join("'" + str(path).replace("'", "''") + "'" for path in new)
        both = "union all by name select * from old_heads" if old else ""
        connection.execute(f"create view heads as select * from read_parquet([{names}], union_by_name=true) {both}")
    elif old:
        connection.execute("create view heads as select * from old_heads")
    else:
        connection.register("heads", schema().empty_table())
    text, whole = arrow.string(), arrow.int64()
    columns = {"source": text, "run": text, "step": whole, "status": text, "heads": whole, "digest": text}
    columns |= {"identity": text, "reason": text, "tries": whole}
    table = arrow.Table.from_pylist(list(sources), schema=arrow.schema(list(columns.items())))
    connection.register("sources", table)
    failed = "select source, run, step, reason, tries from sources where status = 'failed'"
    connection.execute(f"create view errors as {failed}")
    try:
        return connection.sql(query)
    except duckdb.Error as error:
        raise LocaterError(f"this query cannot be answered: {first_line(error)}") from None
