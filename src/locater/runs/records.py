"""The records of a run log, and the line of JSON that each is written as.

A record has a `kind`: `run` (what is observed), `step` (numbers of every head), `loss` (a step that was not observed),
`warning`, `end`. docs/watch.md lists their fields. Unknown numbers are left out; NaN and the infinities are strings
("NaN"), so that each line stays valid JSON.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from locater.findings import FLAGS, Condition, reasons
from locater.version import __version__

Record = dict[str, Any]
WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # as float() reads them


def parse_record(line: bytes) -> Record | None:
    """The record on a line; None if the line is incomplete or not a JSON object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def is_run(record: Record | None) -> bool:
    return record is not None and record.get("kind") == "run"


def shape_of(header: Record) -> list[tuple[int, int, str]]:
    """Number, heads and name of each layer. A run can continue a log only if these are the same."""
    return [(int(entry["layer"]), int(entry["heads"]), str(entry["name"])) for entry in header["layers"]]


def number(x: Any) -> float | None:
    """A number from a log, where NaN and the infinities are strings; None for anything else.

    >>> number(2), number("NaN"), number("low")
    (2.0, nan, None)
    """
    if type(x) not in (int, float):
        return WORDS.get(x) if isinstance(x, str) else None
    try:
        return float(x)
    except OverflowError:  # a whole number of more digits than any float has
        return None


def line_of(record: Record) -> bytes:
    """A record as a line. Unknown numbers are left out; those of heads become null, which keeps their places.

    >>> numbers = {"loss": float("nan"), "scalars": {"rate": None}, "heads": {"sink": [[float("nan")]]}}
    >>> line_of({"kind": "step", "step": 3, **numbers})
    b'{"kind":"step","step":3,"loss":"NaN","scalars":{},"heads":{"sink":[[null]]}}\\n'
    """
    fields = {name: value if name == "heads" else _spell_nonfinite(value) for name, value in record.items()}
    if fields.get("loss", 0) is None:
        del fields["loss"]
    if isinstance(fields.get("scalars"), dict):
        fields["scalars"] = {name: value for name, value in fields["scalars"].items() if value is not None}
    compact: dict[str, Any] = {"separators": (",", ":"), "allow_nan": False}
    try:
        text = json.dumps(fields, **compact)
    except (TypeError, ValueError):  # arrays, or numbers that are not finite; looking at each takes longer than writing
        text = json.dumps(json_values(fields), **compact)
    return text.encode() + b"\n"


def _spell_nonfinite(x: Any) -> Any:
    """NaN and the infinities as strings, at any depth of a dict."""
    if hasattr(x, "tolist"):
        x = x.tolist()
    if isinstance(x, dict):
        return {name: _spell_nonfinite(value) for name, value in x.items()}
    if isinstance(x, float) and not math.isfinite(x):
        return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"
    return x


def json_values(x: Any) -> Any:
    """Values that JSON can hold: arrays become lists, NaN and infinity become null.

    >>> json_values({"a": (1.5, float("nan"))})
    {'a': [1.5, None]}
    """
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    if isinstance(x, dict):
        return {str(key): json_values(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [json_values(value) for value in x]
    return json_values(x.tolist()) if hasattr(x, "tolist") else x


# What a run writes: one function for each kind.


def header(source: str, every: int, layers: list[Record], columns: Iterable[str], passes: str = "") -> Record:
    """The first record of a run: what is observed, and in which passes."""
    return {
        "kind": "run",
        "schema": 1,
        "locater": __version__,
        "source": source,
        "every": every,
        "layers": layers,
        "columns": list(columns),
        **({"passes": passes} if passes else {}),
        "time": time.time(),
    }


def step_record(
    step: int,
    numbers: dict[str, float],
    heads: dict[str, list[list[Any]]],
    left_out: int,
    outputs: int | None = None,
) -> Record:
    """An observed step: `numbers` of the run by name (with the loss, if known), `heads` with the numbers of every head
    by column, how many passes without gradients were left out, and how many outputs the model has (its vocabulary).
    """
    scalars = {name: number for name, number in numbers.items() if name != "loss"}
    loss = {"loss": numbers["loss"]} if "loss" in numbers else {}
    others = {"passes_left_out": left_out} if left_out else {}
    if outputs is not None:
        others["outputs"] = outputs
    return {"kind": "step", "step": step, "time": time.time(), **loss, "scalars": scalars, "heads": heads, **others}


def loss_record(step: int, loss: float) -> Record:
    """A step that was not observed."""
    return {"kind": "loss", "step": step, "loss": loss}


def end_record(step: int) -> Record:
    """The run is over."""
    return {"kind": "end", "step": step, "time": time.time()}


def warning_record(
    step: int,
    layer: int,
    head: int,
    name: str,
    row: Record,
    condition: Condition,
    advice: str,
    controls: Sequence[str] = (),
) -> Record:
    """A head that meets a condition. `row` has its columns, `name` is the name of its layer; `controls` are those that
    help runs at hot rates and could be attached to the model.
    """
    flag = next((f for f in FLAGS if f.name == condition.text), None)
    column = condition.column or (flag.needs[0] if flag else None)
    value = row.get(column) if column else None
    crossed, meaning = reasons(condition, [value])
    return {
        "kind": "warning",
        "step": step,
        "time": time.time(),
        "layer": layer,
        "head": head,
        "name": name,
        "flag": condition.text,
        "value": value,
        "threshold": condition.bound,
        "message": f"step {step}: {name} head {head}: {crossed}: {meaning}; {advice}",
        **({"controls": list(controls)} if controls else {}),
    }
