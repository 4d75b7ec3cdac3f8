"""The numbers of a record as flat scalars: few, and named so that a tracker groups them by what they say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from locater.missing import finite_or_none
from locater.runs.records import Record

BOTH = ("min", "max")
# Which extreme of a column tells that a head fails. A column that is not listed has both, without an alarm.
EXTREMES: dict[str, tuple[str, ...]] = {
    "entropy_ratio": ("min",),
    "max_logit": ("max",),
    "spread": ("max",),
    "sink": ("max",),
    "participation": ("min",),
    "entropy": (),  # the ratio says the same for any number of visible keys
    "distance": (),
}


def flat(record: Record, layers: list[int]) -> dict[str, float]:
    """Scalars of a record by name, without nulls; `layers` are the numbers of the layers.

    `attention/COLUMN/min` or `/max` is the worst head of the whole model. `layer_COLUMN/mean/03` is the mean over the
    heads of layer 3, and `layer_COLUMN/min/03` its worst head: trackers put the same number of all layers side by side.

    >>> flat({"kind": "step", "step": 5, "loss": 2.0, "scalars": {}, "heads": {"sink": [[0.25, None, 0.75]]}}, [3])
    {'loss': 2.0, 'attention/sink/max': 0.75, 'layer_sink/mean/03': 0.5, 'layer_sink/max/03': 0.75}
    """
    scalars = {"loss": record.get("loss"), **(record.get("scalars") or {})}
    if record["kind"] == "warning":
        scalars[f"warning/{record['flag']}"] = record.get("value")
    columns = {
        column: {layer: _known(row) for layer, row in zip(layers, rows, strict=False)}
        for column, rows in (record.get("heads") or {}).items()
    }
    ordered = [*(name for name in EXTREMES if name in columns), *(name for name in columns if name not in EXTREMES)]
    for column in ordered:
        scalars |= _of_model(column, columns[column])
    for column in ordered:
        scalars |= _of_layers(column, columns[column])
    return {
        name: number for name, number in scalars.items() if number is not None and finite_or_none(number) is not None
    }


def _of_model(column: str, rows: dict[int, list[float]]) -> Iterator[tuple[str, float]]:
    heads = [x for row in rows.values() for x in row]
    for end in EXTREMES.get(column, ()) if heads else ():
        yield f"attention/{column}/{end}", _extreme(end, heads)


def _of_layers(column: str, rows: dict[int, list[float]]) -> Iterator[tuple[str, float]]:
    for layer, row in rows.items():
        if row:
            yield f"layer_{column}/mean/{layer:02d}", sum(row) / len(row)
            for end in EXTREMES.get(column, BOTH):
                yield f"layer_{column}/{end}/{layer:02d}", _extreme(end, row)


def _known(row: Iterable[float | None] | None) -> list[float]:
    return [x for x in row or () if x is not None and finite_or_none(x) is not None]


def _extreme(end: str, values: list[float]) -> float:
    return min(values) if end == "min" else max(values)
