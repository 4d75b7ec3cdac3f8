"""The records that a training run writes to its sinks. docs/watch.md lists their fields."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from locater.findings import FLAGS, Condition, reasons
from locater.version import __version__

Record = dict[str, Any]


def header(source: str, every: int, layers: list[Record], columns: Iterable[str], passes: str = "") -> Record:
    """The first record of a run: what is observed, and of which passes."""
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


def step_record(step: int, numbers: dict[str, float], heads: dict[str, list[list[Any]]], left_out: int) -> Record:
    """An observed step: `numbers` of the run by name, the loss among them if known, per column those of every head, and
    how many passes without gradients were left out.
    """
    scalars = {name: number for name, number in numbers.items() if name != "loss"}
    loss = {"loss": numbers["loss"]} if "loss" in numbers else {}
    others = {"passes_left_out": left_out} if left_out else {}
    return {"kind": "step", "step": step, "time": time.time(), **loss, "scalars": scalars, "heads": heads, **others}


def loss_record(step: int, loss: float) -> Record:
    """A step that was not observed."""
    return {"kind": "loss", "step": step, "loss": loss}


def end_record(step: int) -> Record:
    """The run is over."""
    return {"kind": "end", "step": step, "time": time.time()}


def warning_record(
    step: int, layer: int, head: int, name: str, row: Record, condition: Condition, advice: str
) -> Record:
    """A head that meets a condition. `row` has its columns, `name` is that of its layer."""
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
    }
