"""What a monitor says of failing heads: for each step and reason a line that names them, and what helps this model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from locater.findings import Condition, Remedy, reasons
from locater.options import parse_call
from locater.runs.run_records import Record

NAMED = 12  # heads in a line


def controls_that_fit(model: nn.Module, remedy: Remedy) -> list[str]:
    """Those of its controls that could be attached to the model as it is. They are looked up in `locater`, where a user
    would find them, so that what is advised exists.
    """
    import locater

    fitting = []
    for call in remedy.controls:
        name, options = parse_call(call, "remedy")
        if getattr(locater, name)(**options).can_attach(model):
            fitting.append(call)
    return fitting


def warning_line(step: int, condition: Condition, records: Sequence[Record]) -> str:
    """One line for the heads that meet a condition at a step."""
    crossed, meaning = reasons(condition, [record["value"] for record in records])
    heads = [f"{record['layer']}.{record['head']}" for record in records]
    more = f" and {len(heads) - NAMED} more" if len(heads) > NAMED else ""
    return f"step {step}: {crossed} at {', '.join(heads[:NAMED])}{more}: {meaning}"
