"""SQL over the parts of a fleet, by DuckDB."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locater.commands.fleet.parts import of_schema_1, pyarrow, read_rows, schema
from locater.errors import LocaterError, first_line

if TYPE_CHECKING:
    import duckdb


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
