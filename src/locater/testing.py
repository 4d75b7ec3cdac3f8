"""Assertions for other people's tests: no head of a model has a fault, and no tensor."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from locater.commands.doctor.diagnosing import doctor
from locater.commands.scanning import scan
from locater.defaults import LENGTH
from locater.errors import LocaterError
from locater.findings import FLAGS, Condition, explain, parse_conditions
from locater.observing import observe
from locater.observing.seen_heads import SHOWN, SeenHead
from locater.results.scan import NUMERIC_COLUMNS, SCAN_FLAGS, VALUE_COLUMNS, VALUE_FLAGS
from locater.sources.open_source import Source

SEEN_COLUMNS = tuple(f.name for f in fields(SeenHead) if str(f.type) == "float | None")
SEEN_FLAGS = tuple(name for name, _, _ in SHOWN)
NAMED = 5  # heads that a failure names
Rows = Sequence[Mapping[str, Any]]


def assert_heads(
    source: Source, no: str = "nonfinite", *, batch: Mapping[str, Any] | None = None, length: int = LENGTH
) -> None:
    """Fail with an AssertionError if a head of `source` has one of these flags, or meets one of these conditions.

    `source` is what `locater.scan` takes: a live model, a folder, a file, a name on the hub. `no` is a list as for
    `--fail-on`: flags and comparisons, such as "nonfinite, sharp, M<-1". Flags and numbers that weights do not show
    ("exploding", "locked", "entropy<0.5") need `batch`, the inputs of one forward pass of a live model: it is observed
    in evaluation mode, without gradients. Attention that cannot be read is named in a warning.

    >>> from torch import nn
    >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2)
    >>> assert_heads(model, no="nonfinite, sharp")
    >>> assert_heads(model, no="M<1000")
    Traceback (most recent call last):
    ...
    AssertionError: TransformerEncoder: 4 of 4 heads: layer 0 head 0: mean self-logit M ... is below 1000: ...
    """
    columns, flags = {*NUMERIC_COLUMNS, *VALUE_COLUMNS}, [*SCAN_FLAGS, *VALUE_FLAGS]
    if batch is not None:
        columns, flags = columns | set(SEEN_COLUMNS), list(dict.fromkeys([*flags, *SEEN_FLAGS]))
    try:
        conditions = parse_conditions(no, columns, flags, option="no=")
    except LocaterError as error:
        way_out = "" if batch is not None else "; give batch=, inputs of the model, for what a forward pass shows"
        raise LocaterError(f"{error}{way_out}") from None
    rows = _observed_rows(source, batch) if batch is not None else []
    asked = {each.column or each.text for each in conditions}
    values = bool(asked & {*VALUE_COLUMNS, *VALUE_FLAGS})
    if values or asked & {*NUMERIC_COLUMNS, *SCAN_FLAGS}:
        rows = [*rows, *_scan_rows(source, length, values)]
    _fail_where(conditions, rows, type(source).__name__ if isinstance(source, nn.Module) else str(source))


def assert_healthy(source: Source, base: Source | None = None, *, adapter: str | None = None) -> None:
    """Fail with an AssertionError where `locater.doctor` finds a fault: alone, beside `base`, or with the folder of an
    adapter that should be merged into it. The message has what is found, and what to do.

    >>> from torch import nn
    >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2)
    >>> assert_healthy(model)
    >>> _ = nn.init.zeros_(model.layers[1].linear1.weight)
    >>> assert_healthy(model)
    Traceback (most recent call last):
    ...
    AssertionError: TransformerEncoder: broken: 1 fault (zero): layers.1.linear1.weight is all zero; download ...
    """
    found = doctor(source, base, adapter)
    faults = [item for item in found.findings if item.severity == "fault"]
    if faults:
        first = "; ".join(f"{item.where} {item.words}" for item in faults[:NAMED])
        more = f"; and {len(faults) - NAMED} more" if len(faults) > NAMED else ""
        raise AssertionError(f"{found.source}: {found.verdict}: {first}{more}; {faults[0].next}")


def _scan_rows(source: Source, length: int, values: bool) -> Rows:
    result = scan(source, length=length, values=values)
    for path in result.assumptions.get("unread", ()):
        warnings.warn(f"{result.source}: {path} is not read, so no condition was tested on it", stacklevel=3)
    return [vars(row) for row in result.rows]


def _observed_rows(source: Source, batch: Mapping[str, Any]) -> Rows:
    if not isinstance(source, nn.Module):
        raise LocaterError(f"{source}: batch= is for a live model, not for a file: load the model first")
    modes = {module: module.training for module in source.modules()}  # parts may be frozen in evaluation mode
    source.eval()
    try:
        with torch.no_grad(), observe(source) as seen:
            source(**batch)
    finally:
        for module, training in modes.items():
            module.training = training
    return [vars(row) for row in seen.rows]


def _fail_where(conditions: Sequence[Condition], rows: Rows, name: str) -> None:
    heads: dict[tuple[int, int], str] = {}
    for condition in conditions:
        for row in rows:
            if condition.test(row):
                heads.setdefault((row["layer"], row["head"]), _words(condition, row))
    if heads:
        every = len({(row["layer"], row["head"]) for row in rows})
        first = "; ".join(f"layer {layer} head {head}: {why}" for (layer, head), why in sorted(heads.items())[:NAMED])
        more = f"; and {len(heads) - NAMED} more" if len(heads) > NAMED else ""
        raise AssertionError(f"{name}: {len(heads)} of {every} heads: {first}{more}")


def _words(condition: Condition, row: Mapping[str, Any]) -> str:
    if condition.column is not None:
        return explain(condition, row[condition.column])
    return f"{condition.text}: {next(flag.meaning for flag in FLAGS if flag.name == condition.text)}"
