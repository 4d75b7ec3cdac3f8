"""`scan()`: the query-key spectrum of every head of a model or a checkpoint, and what theory predicts from it.

No forward pass of the source is run; a live model of an unknown architecture is run as a copy (`discover`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from locater.calls.coverage import unread
from locater.commands.head_rows import ScanOptions, rows_of
from locater.commands.layer_moments import NumberedLayer, Work, layer_moments
from locater.commands.reading_record import ReadingRecord
from locater.commands.scan_notes import assumptions, layer_entry, unread_notes
from locater.discovery import read_source
from locater.discovery.disk import searched_once
from locater.discovery.planning import planned_reads
from locater.errors import LocaterError
from locater.layers import AttentionLayer
from locater.predict.input_statistics import Input, Statistics
from locater.results.scan import LENGTH, Scan
from locater.sources.adapter_folder import base_name_of
from locater.sources.remote import Traffic, session
from locater.sources.remote.address import remote_address
from locater.sources.sources import Source, open_source

LONGEST = 8192  # tokens that heads are run on where statistics are given
Progress = Callable[[Iterable[Any], int], Iterable[Any]]  # (items, their number) -> the same items, shown as a bar


def scan(
    source: Source,
    *,
    length: int = LENGTH,
    raw: bool = False,
    statistics: Statistics | None = None,
    eigenvalues: bool = False,
    details: bool = False,
    shard: tuple[int, int] | None = None,
    query: str | None = None,
    key: str | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    example: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    download: bool = False,
    base: str | None = None,
    traffic: Traffic | None = None,
) -> Scan:
    """Read every head of `source`: an nn.Module, a folder, a weights file, a hub id, or an address (hf://, s3://, gs://,
    az://, https://).

    `length` is the number of tokens in view for entropy and sharpness. `raw` takes stored parameters without folding
    norms. `statistics` (from `locater.statistics(model, text)`) replaces unit tokens by the tokens that the layers
    read. `shard=(i, n)` reads the i-th of n parts of the layers; `Scan.join` puts them together. `query`, `key` and
    `heads` name the tensors of an unknown architecture. A live model of one is run as a copy, and its attention is
    discovered and verified; `example` holds inputs for that where they cannot be guessed. `details` adds what a page
    draws. Of a checkpoint elsewhere only the rows that are needed are read, and `traffic` counts them; `download` takes
    the whole checkpoint first (docs/remote.md). An adapter is read on `base`, or on the base model that it names.

    >>> from torch import nn
    >>> result = scan(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2))
    >>> len(result.rows), result.assumptions["prediction"]
    (4, 'prior')
    """
    if not 2 <= length <= 10**9:
        raise LocaterError(f"length {length} is out of range: give 2 to 1,000,000,000 tokens")
    settings = {"length": length, "raw": raw, "statistics": statistics, "shard": shard, "example": example}
    names: dict[str, Any] = {"query": query, "key": key, "heads": heads, "kv_heads": kv_heads}
    with session(traffic) as remote, searched_once():
        weights, config = open_source(source, download, base)
        record = ReadingRecord(weights)
        read = partial(read_source, weights, config, **names, example=example)
        choose = partial(_chosen, statistics, shard, where=weights.where, length=length, raw=raw)
        if remote.files:
            remote.read_ahead(planned_reads(read, lambda layers: choose(layers)[1], raw))
        reading = read()  # maps are still where they are stored
        layers = reading.layers
        inputs, numbered = choose(layers)
        options = ScanOptions(length, raw, eigenvalues, details, inputs)
        shown = progress(numbered, len(numbered)) if progress else numbered
        threads = torch.get_num_threads()
        by_threads, held = getattr(weights, "read_by_threads", False), isinstance(source, nn.Module)
        work = Work(raw, inputs, (threads + 1) // 2, by_threads, held)
        rows = list(rows_of(layer_moments(shown, [layer for _, layer in numbered], work), options, threads))
        # what discovery leaves out it says itself
        discovered = any(layer.provenance == "discovered" for layer in layers)
        left = [] if discovered else unread(weights, [x.name for x in layers], config.get("num_hidden_layers"))
    gaps = [*reading.gaps, *unread_notes(left)]
    opened_base = base_name_of(weights)
    if opened_base is not None:
        gaps = [f"an adapter, read on its base model {opened_base}", *gaps]
    read_numbers = record.end()
    return Scan(
        _shown(source),
        {
            **({"read": read_numbers} if read_numbers else {}),
            **assumptions(layers, length, raw, named=bool(query), statistics=statistics, gaps=gaps, left=left),
            **({} if opened_base is None else {"base": opened_base}),
        },
        [
            {**layer_entry(layer, n, details), "residual_kept": root_mean_square(column_of(rows, n, "residual_kept"))}
            for n, layer in numbered
        ],
        rows,
        partial(_scan_with_details, _reference(source), **settings, **names, download=download, base=base),
    )


def _shown(source: Source) -> str:
    """The name of a source; what a URL has after `?` may be a secret."""
    if isinstance(source, nn.Module):
        return type(source).__name__
    return str(remote_address(str(source)) or source)


def _chosen(
    statistics: Statistics | None,
    shard: tuple[int, int] | None,
    layers: list[AttentionLayer],
    where: str,
    length: int,
    raw: bool,
) -> tuple[dict[int, Input] | None, list[NumberedLayer]]:
    """What was measured by layer number, and the layers to read."""
    if not layers:
        raise LocaterError(f"{where}: no attention layer found")
    inputs = None if statistics is None else _inputs_by_layer(statistics, layers, where, length, raw)
    numbered = [(n, layer) for n, layer in enumerate(layers) if inputs is None or n in inputs]
    return inputs, numbered if shard is None else _part(numbered, *shard)


def column_of(rows: Iterable[Any], number: int, column: str) -> list[float | None]:
    """A column of the heads of one layer."""
    return [row[column] for row in rows if row.layer == number]


def root_mean_square(values: Iterable[float | None]) -> float | None:
    """Root mean square of the values that are not None; None if there are none.

    >>> root_mean_square([3.0, None, 3.0])
    3.0
    """
    known = [value for value in values if value is not None]
    return math.sqrt(sum(x * x for x in known) / len(known)) if known else None


def _reference(source: Source) -> Callable[[], Source | None]:
    """The source for later use; a scan does not keep a live model in memory."""
    return weakref.ref(source) if isinstance(source, nn.Module) else lambda: source


def _scan_with_details(reference: Callable[[], Source | None], **settings: Any) -> Scan:
    source = reference()
    if source is None:
        raise LocaterError("the scanned model is gone: scan it with details=True where a page will be drawn later")
    return scan(source, details=True, **settings)


def parsed_shard(text: str | None) -> tuple[int, int] | None:
    """`2/8` as (2, 8).

    >>> parsed_shard("2/8")
    (2, 8)
    """
    if text is None:
        return None
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal()):
        raise LocaterError(f"--shard {text!r}: write it as I/N, such as 2/8")
    return int(number), int(count)


def _part(layers: list[NumberedLayer], number: int, count: int) -> list[NumberedLayer]:
    if not 1 <= number <= count:
        raise LocaterError(f"shard {number}/{count}: the first number counts from 1 to the second")
    size = len(layers)
    if count > size:
        raise LocaterError(f"shard {number}/{count}: there are only {size} attention layers, so at most {size} parts")
    return layers[size * (number - 1) // count : size * number // count]


def _inputs_by_layer(
    statistics: Statistics, layers: list[AttentionLayer], where: str, length: int, raw: bool
) -> dict[int, Input]:
    """Statistics by layer number; refused if they are those of another model."""
    if raw:
        raise LocaterError("--raw and --statistics exclude each other: measured tokens meet the maps that act on them")
    if length > LONGEST:
        raise LocaterError(f"length {length}: with statistics the heads are run on tokens, so at most {LONGEST}")
    inputs = {entry.layer: entry for entry in statistics.inputs}
    for number, layer in enumerate(layers):
        entry = inputs.get(number)
        if number in statistics.silent:
            continue
        if entry is None or len(entry.mean) != layer.width or entry.kind != layer.kind:
            has = "nothing" if entry is None else f"{entry.kind}-attention of width {len(entry.mean)}"
            raise LocaterError(
                f"{where}: layer {number} ({layer.name}) is {layer.kind}-attention of width {layer.width}, "
                f"the statistics of {statistics.source} have {has} there: collect them from this model"
            )
    most = max((*inputs, *statistics.silent), default=-1) + 1
    if most > len(layers):
        raise LocaterError(
            f"{where}: {len(layers)} attention layers, the statistics of {statistics.source} are of {most}: "
            "collect them from this model"
        )
    return inputs
