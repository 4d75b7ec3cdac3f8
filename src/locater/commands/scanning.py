"""`scan()`: the query-key spectrum of every head of a model or a checkpoint, and what theory predicts from it.

No forward pass of the source is run; a live model of an unknown architecture is run as a copy (`discover`).
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from locater.calls.attention_like import folded_paths, unread
from locater.commands.layer_moments import Work, layer_moments
from locater.commands.scan_rows import ScanOptions, rows_of, rows_with_written
from locater.defaults import LENGTH, Progress
from locater.discovery import read_source
from locater.errors import LocaterError
from locater.layers import AttentionLayer
from locater.layers.position_biases import PairBias
from locater.layers.projection_with_norm import NormedProjection, norm_inside
from locater.predict.statistics_file import Input, Statistics
from locater.results.scan import Scan
from locater.sources.adapter_folder import base_name_of
from locater.sources.open_source import Source, open_source
from locater.sources.remote import Traffic, session
from locater.sources.remote.address import remote_address
from locater.sources.remote.prefetch import planned_reads
from locater.sources.weights import ModuleWeights, Rows, Weights
from locater.torch_private import unsaved_buffers


def unread_notes(left: Sequence[str]) -> list[str]:
    return [f"a part of its attention: not read are {folded_paths(left, most=None)}"] if left else []


def _statistics_notes(layers: list[AttentionLayer], statistics: Statistics | None) -> list[str]:
    if statistics is None:
        return []
    notes = [
        "expected entropy: each head run on normal tokens with the measured moments, "
        "the measured first token in its place"
    ]
    if statistics.silent:
        names = ", ".join(layers[number].name for number in statistics.silent if number < len(layers))
        notes.append(f"no statistics, because no token reached them, and left out: {names}")
    return notes


def _named_notes(layers: list[AttentionLayer]) -> list[str]:
    """Two maps do not tell whether queries and keys read one stream."""
    taken = sum(x.kind == "self" for x in layers)
    return [
        f"{taken} of {len(layers)} layers are taken for self-attention, as no name says otherwise: where keys read "
        "another stream than queries, trace, M, S and localization have no meaning"
    ] * bool(taken)


def _layer_notes(layers: list[AttentionLayer], raw: bool) -> list[str]:
    """What the numbers leave out, by the kinds of layers in the model."""
    notes = []
    if any(x.provenance == "discovered" for x in layers):
        notes.append("discovered: found in a forward pass, and verified in another with all parameters redrawn")
    formats = sorted({x.quantised for x in layers if x.quantised is not None})
    if formats:
        notes.append(f"quantised weights ({', '.join(formats)}): the numbers describe the quantised model")
    notes += [] if raw else _layers_without_norm(layers)
    if any(x.query_norm or x.key_norm for x in layers) and not raw:
        notes.append("query and key norms in mean field: each token's own norm is replaced by its root mean square")
    if any(norm_inside(part) for x in layers for part in (x.query, x.key)):
        notes.append(
            "norms inside query and key maps (latents, norms over all heads) in mean field, as stored weights too"
        )
    if any(x.norm_last and (x.query_norm or x.key_norm) for x in layers):
        notes.append("norms of queries and keys after the rotation: moments are those at position 0, without drives")
    if any(x.unknown_mask or x.rotary_table or isinstance(x.bias, PairBias) for x in layers):
        notes.append("masks or positions that are known for the example alone: no entropy is predicted there")
    if any(x.rotary or x.rotary_table for x in layers):
        notes.append("rotary positions: moments are those at offset 0")
    if any(x.bias or x.relative or x.softcap or x.sinks is not None for x in layers):
        notes.append(
            "position biases and relative terms, soft-caps and sinks are not in the prior: "
            "it speaks of the query-key map alone"
        )
    others = dict.fromkeys(x.mechanism for x in layers if x.mechanism != "softmax")
    if others:
        notes.append(
            f"{', '.join(others)} attention: its weights are no softmax, "
            "of which entropy, localization and risk of collapse speak"
        )
    if any(x.kind == "cross" for x in layers):
        notes.append("cross-attention: traces, M, S and localization have no meaning and are left out")
    return notes


def _layers_without_norm(layers: list[AttentionLayer]) -> list[str]:
    """Notes on layers without a known norm in front of their queries, or of keys that read another stream."""
    queries = [x.name for x in layers if x.norm.kind == "none" and x.unknown_norm is None]
    keys = [x.name for x in layers if x.kind == "cross" and (x.memory_norm is None or x.memory_norm.kind == "none")]
    sides = ((queries, "in front"), (keys, "in front of the keys"))
    return [
        f"no known norm {where} of {len(names)} of {len(layers)} layers: what they read there is taken as unit "
        f"tokens too ({folded_paths(names)})"
        for names, where in sides
        if names
    ]


def assumptions(
    layers: list[AttentionLayer],
    length: int,
    raw: bool,
    named: bool,
    statistics: Statistics | None = None,
    gaps: Sequence[str] = (),
    left: Sequence[str] = (),
) -> dict[str, Any]:
    """The conditions of the numbers. `gaps` say what is not read; `left` are modules that look like attention and were
    not read.
    """
    weights = "effective: norm gains and biases folded into queries and keys"
    if raw or named:
        weights = "as stored" if raw else "as named: stored maps and their biases, no norm"
    tokens = "unit tokens: mean 0, |z|² = width, covariance I (I - 11ᵀ/d after LayerNorm)"
    if statistics is not None:
        tokens = f"measured tokens: mean and covariance of each attention input over {statistics.tokens} tokens"
    return {
        "prediction": "prior" if statistics is None else "predicted",
        "tokens": tokens,
        "weights": weights,
        "length": length,
        "layers": len(layers),
        "notes": [
            *gaps,
            *_statistics_notes(layers, statistics),
            *(_named_notes(layers) if named else []),
            *_layer_notes(layers, raw),
        ],
        **({"unread": list(left)} if left else {}),
    }


def layer_entry(layer: AttentionLayer, number: int, details: bool) -> dict[str, Any]:
    """A layer as the document describes it."""
    entry: dict[str, Any] = {
        "layer": number,
        "name": layer.name,
        "kind": layer.kind,
        "heads": layer.heads,
        "kv_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "width": layer.width,
        "norm": layer.norm.kind,
        "causal": layer.causal if layer.unknown_mask is None else None,
        "window": layer.window,
        "positions": _positions(layer),
        "softcap": layer.softcap,
        "sinks": layer.sinks is not None,
        "query_key_norm": _query_key_norm(layer),
        "provenance": layer.provenance,
    }
    if layer.chunk is not None:
        entry["chunk"] = layer.chunk
    if layer.quantised is not None:
        entry["quantised"] = layer.quantised
    if details and layer.rotary is not None:
        entry["frequencies"] = layer.rotary.frequencies.tolist()
    return entry


def _query_key_norm(layer: AttentionLayer) -> bool:
    """Whether queries are normalized last. A norm on a latent does not count, since a map follows it."""
    return layer.query_norm is not None or (isinstance(layer.query, NormedProjection) and layer.query.up is None)


def _positions(layer: AttentionLayer) -> str | None:
    if layer.rotary:
        return "rotary"
    if layer.rotary_table:
        return "rotary table"
    if layer.relative:
        return "relative"
    return type(layer.bias).__name__.lower() if layer.bias else None


# How much of a model a scan reads, so that nobody takes a scan for a check of the whole file.


class ReadingRecord:
    """Records which rows of which tensors are read from `weights`, from now until `end`.

    >>> import torch
    >>> from locater.sources.weights import DictWeights
    >>> weights = DictWeights({"q": torch.ones(4, 8), "v": torch.ones(4, 8), "norm": torch.ones(8)}, "here")
    >>> record = ReadingRecord(weights)
    >>> _ = weights.read("q", [(0, 2)]), weights.read("q", [(1, 3)]), weights.read("norm")
    >>> record.end()
    {'maps': 24, 'vectors': 8, 'of': 72}
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._rows: dict[str, list[tuple[int, int]]] = {}
        self._lock = threading.Lock()
        read = weights.read

        def recorded(name: str, rows: Rows | None = None) -> Tensor:
            with self._lock:
                self._rows.setdefault(name, []).extend([(0, -1)] if rows is None else rows)
            return read(name, rows)

        object.__setattr__(weights, "read", recorded)

    def end(self) -> dict[str, int] | None:
        """How many numbers of maps and of vectors (gains, biases) were read, and how many all tensors have; None if
        none was read.
        """
        object.__delattr__(self._weights, "read")  # or weights would keep themselves, and a live model, in memory
        counts = {"maps": 0, "vectors": 0}
        for name, rows in self._rows.items():
            shape = self._weights.shape(name)
            counts["vectors" if len(shape) < 2 else "maps"] += _count(shape, rows)
        return {**counts, "of": _all_numbers(self._weights)} if any(counts.values()) else None


def _count(shape: tuple[int, ...], ranges: list[tuple[int, int]]) -> int:
    """How many numbers these rows have, each row counted once; (0, -1) is all rows."""
    if not shape or (0, -1) in ranges:
        return prod(shape)
    rows, reached = 0, 0
    for start, stop in sorted(ranges):
        rows += max(0, stop - max(start, reached))
        reached = max(reached, stop)
    return rows * prod(shape[1:])


def _all_numbers(weights: Weights) -> int:
    """How many numbers a source has. In a live model a parameter with two names counts once, and computed buffers that
    are never saved do not count. 0 if a map that was not needed has a format that is not read.
    """
    counted = getattr(weights, "all_numbers", None)
    if counted is not None:
        return int(counted())
    names: Any = weights.names()
    if isinstance(weights, ModuleWeights):
        tensors = {name: weights.live_tensor(name) for name in names}
        once = {
            id(getattr(x.module, x.attribute, x)): name
            for name, x in tensors.items()
            if x.attribute not in unsaved_buffers(x.module)
        }
        names = once.values()
    try:
        return sum(prod(weights.shape(name)) for name in names)
    except LocaterError:
        return 0


# The scan.

LONGEST = 8192  # tokens that heads are run on if statistics are given


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
    values: bool = False,
) -> Scan:
    """Read every head of `source`: an nn.Module, a folder, a weights file, a hub id, or an address (hf://, s3://, gs://,
    az://, https://).

    `length` is the number of tokens in view for entropy and sharpness. `raw` takes stored parameters without folding
    norms. `statistics` (from `locater.statistics(model, text)`) replaces unit tokens by the tokens that the layers
    read. `shard=(i, n)` reads the i-th of n parts of the layers; `Scan.join` puts them together. `query`, `key` and
    `heads` name the tensors of an unknown architecture. A live model of an unknown architecture is run as a copy, and
    its attention is discovered and verified; `example` has inputs for that, if they cannot be guessed. `details` adds
    what a page draws, and `values` what each head writes, for which values and output maps are read too. Of a remote
    checkpoint only the rows that are needed are read, and `traffic` counts them; `download` downloads the whole
    checkpoint first (docs/remote.md). An adapter is read on `base`, or on the base model that it names.

    >>> from torch import nn
    >>> result = scan(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2))
    >>> len(result.rows), result.assumptions["prediction"]
    (4, 'prior')
    """
    if not 2 <= length <= 10**9:
        raise LocaterError(f"length {length} is out of range: give 2 to 1,000,000,000 tokens")
    settings = {"length": length, "raw": raw, "statistics": statistics, "shard": shard, "example": example}
    settings["values"] = values
    names: dict[str, Any] = {"query": query, "key": key, "heads": heads, "kv_heads": kv_heads}
    with session(traffic) as remote:
        weights, config = open_source(source, download, base)
        record = ReadingRecord(weights)
        reading = read_source(weights, config, **names, example=example)
        if not reading.found:
            raise LocaterError(f"{weights.where}: no attention layer found")
        measured = None if statistics is None else {entry.layer for entry in statistics.inputs}
        chosen = [number for number in range(len(reading.found)) if measured is None or number in measured]
        chosen = chosen if shard is None else _part(chosen, *shard)
        if remote.files:
            remote.prefetch(planned_reads(reading.steps(reading.found[number] for number in chosen)))
        layers = reading.layers  # maps are still where they are stored
        inputs = None if statistics is None else _inputs_by_layer(statistics, layers, weights.where, length, raw)
        numbered = [(number, layers[number]) for number in chosen]
        options = ScanOptions(length, raw, eigenvalues, details, inputs)
        shown = progress(numbered, len(numbered)) if progress else numbered
        threads = torch.get_num_threads()
        by_threads, held = getattr(weights, "read_by_threads", False), isinstance(source, nn.Module)
        work = Work(raw, inputs, (threads + 1) // 2, by_threads, held)
        rows = list(rows_of(layer_moments(shown, [layer for _, layer in numbered], work), options, threads))
        if values:
            rows = [*rows_with_written(rows, dict(numbered), raw)]
        # what discovery leaves out it says itself
        discovered = any(layer.provenance == "discovered" for layer in layers)
        left = [] if discovered else unread(weights, [x.name for x in layers], config.get("num_hidden_layers"))
    gaps = [*reading.gaps, *unread_notes(left)]
    opened_base = base_name_of(weights)
    if opened_base is not None:
        gaps = [f"an adapter, read on its base model {opened_base}", *gaps]
    read_numbers = record.end()
    return Scan(
        _source_name(source),
        {
            **({"read": read_numbers} if read_numbers else {}),
            **assumptions(layers, length, raw, named=bool(query), statistics=statistics, gaps=gaps, left=left),
            **({"values": True} if values else {}),
            **({} if opened_base is None else {"base": opened_base}),
        },
        [
            {**layer_entry(layer, n, details), "residual_kept": root_mean_square(column_of(rows, n, "residual_kept"))}
            for n, layer in numbered
        ],
        rows,
        partial(_scan_with_details, _reference(source), **settings, **names, download=download, base=base),
    )


def _source_name(source: Source) -> str:
    """The name of a source; what a URL has after `?` may be a secret."""
    if isinstance(source, nn.Module):
        return type(source).__name__
    return str(remote_address(str(source)) or source)


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


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """`2/8` as (2, 8).

    >>> parse_shard("2/8")
    (2, 8)
    """
    if text is None:
        return None
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal()):
        raise LocaterError(f"--shard {text!r}: write it as I/N, such as 2/8")
    return int(number), int(count)


def _part(layers: list[int], number: int, count: int) -> list[int]:
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
