"""`scan()`: every head of a model or a checkpoint, its query-key spectrum, and what the theory makes of it. No forward
pass.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from locater.checkpoints.sources import Source
from locater.errors import LocaterError
from locater.families import AttentionLayer, Rotary, effective, layers_of, open_source
from locater.families.normed import NormedProjection
from locater.findings import flags_of, key_variance
from locater.numerics import finite_or_none, one_thread
from locater.predict.input_statistics import Input, Statistics
from locater.predict.prediction import predict
from locater.spectrum import Moments, lost_in_float32
from locater.theory import (
    expected_entropy,
    kept_at_entropy,
    localization,
    mixture_continuum,
    mixture_localization,
    residual_kept,
    unit_moments,
)
from locater.theory.localization import SKEW_LIMIT
from locater.verbs.scan_result import LENGTH, HeadRow, Scan

OF_SOFTMAX = ("expected_entropy", "residual_kept", "localization")  # columns that speak of no other weights
LONGEST = 8192  # tokens that heads are run on where statistics are given
ROWS = 32  # of different length, that stand for all
PROFILE = 65  # points of a profile that has no closed form
Progress = Callable[[Iterable[Any], int], Iterable[Any]]  # wraps what is gone through; the number is how many


@dataclass(frozen=True)
class Wanted:
    """What a scan is asked to compute."""

    length: int = LENGTH
    raw: bool = False
    eigenvalues: bool = False
    details: bool = False  # what a page draws: eigenvalues, drives, profiles without a closed form
    inputs: Mapping[int, Input] | None = None  # measured statistics by layer number


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
    progress: Progress | None = None,
) -> Scan:
    """Read every head of `source`: an nn.Module, a folder, a weights file or a hub id.

    `length` is the number of tokens in view for entropy and sharpness; `raw` takes stored parameters without folding
    norms; `statistics` (of `locater.statistics(model, text)`) takes the tokens that the layers really read in place of
    unit tokens; `shard=(i, n)` reads the i-th of n parts of the layers (`Scan.join` puts them together); `query`, `key`
    and `heads` name the tensors of an architecture that is not known.

    >>> from torch import nn
    >>> found = scan(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2))
    >>> len(found.rows), found.assumptions["prediction"]
    (4, 'prior')
    """
    if not 2 <= length <= 10**9:
        raise LocaterError(
            f"length {length} is out of range: from 2 tokens, where attention begins to spread, to a thousand million"
        )
    weights, config = open_source(source)
    # tensors still on disk
    found = list(enumerate(layers_of(weights, config, query=query, key=key, heads=heads, kv_heads=kv_heads)))
    if not found:
        raise LocaterError(f"{weights.where}: no attention layer found")
    inputs = (
        None if statistics is None else _inputs(statistics, [layer for _, layer in found], weights.where, length, raw)
    )
    assumptions = _assumptions([layer for _, layer in found], length, raw, named=bool(query), statistics=statistics)
    if inputs is not None:
        found = [(number, layer) for number, layer in found if number in inputs]
    if shard is not None:
        found = _part(found, *shard)
    wanted = Wanted(length, raw, eigenvalues, details, inputs)
    rows: list[HeadRow] = []
    for number, layer in progress(found, len(found)) if progress else found:
        rows.extend(_rows(layer, number, wanted))
    name = type(source).__name__ if isinstance(source, nn.Module) else str(source)
    again = partial(
        _again,
        _kept(source),
        length=length,
        raw=raw,
        statistics=statistics,
        shard=shard,
        query=query,
        key=key,
        heads=heads,
        kv_heads=kv_heads,
    )
    entries = [
        _entry(layer, number, details) | {"residual_kept": root_mean_square(kept_in(rows, number))}
        for number, layer in found
    ]
    return Scan(name, assumptions, entries, rows, again)


def kept_in(rows: Iterable[Any], number: int, column: str = "residual_kept") -> list[float | None]:
    """What each head of a layer keeps."""
    return [row[column] for row in rows if row.layer == number]


def root_mean_square(values: Iterable[float | None]) -> float | None:
    """Of the numbers there are; None where there is none.

    >>> root_mean_square([3.0, None, 3.0])
    3.0
    """
    known = [value for value in values if value is not None]
    return math.sqrt(sum(x * x for x in known) / len(known)) if known else None


def row_keys(layer: AttentionLayer, length: int, keys: int | None = None) -> tuple[int, ...]:
    """How many keys rows of attention over `length` tokens see: for a mean over rows, at most `ROWS` of them, evenly
    spaced.
    """
    if layer.kind != "self" or not (layer.causal or layer.window):
        return (keys or length,)
    count, reach = min(length, ROWS), layer.window or length  # a row sees those nearer than this
    places = [math.ceil((i + 0.5) * length / count) - 1 for i in range(count)]
    return tuple(min(i, reach - 1) + 1 + (0 if layer.causal else min(length - 1 - i, reach - 1)) for i in places)


def _kept(source: Source) -> Callable[[], Source | None]:
    """The source for later; a live model is not kept alive by its scans."""
    return weakref.ref(source) if isinstance(source, nn.Module) else lambda: source


def _again(source: Callable[[], Source | None], **how: Any) -> Scan:
    held = source()
    if held is None:
        raise LocaterError("the scanned model is gone: scan it with details=True where a page will be drawn later")
    return scan(held, details=True, **how)


def _part(found: list[tuple[int, AttentionLayer]], number: int, count: int) -> list[tuple[int, AttentionLayer]]:
    if not 1 <= number <= count:
        raise LocaterError(f"shard {number}/{count}: the first number counts from 1 to the second")
    size = len(found)
    if count > size:
        raise LocaterError(f"shard {number}/{count}: there are only {size} attention layers, so at most {size} parts")
    return found[size * (number - 1) // count : size * number // count]


def _inputs(
    statistics: Statistics, layers: list[AttentionLayer], where: str, length: int, raw: bool
) -> dict[int, Input]:
    """Statistics by layer number, if they are this model's."""
    if raw:
        raise LocaterError("--raw and --statistics exclude each other: measured tokens meet the maps that act on them")
    if length > LONGEST:
        raise LocaterError(f"length {length}: with statistics the heads are run on tokens, so at most {LONGEST}")
    found = {given.layer: given for given in statistics.inputs}
    for number, layer in enumerate(layers):
        given = found.get(number)
        if number in statistics.silent:
            continue
        if given is None or len(given.mean) != layer.width or given.kind != layer.kind:
            has = "nothing" if given is None else f"{given.kind}-attention of width {len(given.mean)}"
            raise LocaterError(
                f"{where}: layer {number} ({layer.name}) is {layer.kind}-attention of width {layer.width}, the statistics of "
                f"{statistics.source} have {has} there: collect them from this model"
            )
    most = max((*found, *statistics.silent), default=-1) + 1
    if most > len(layers):
        raise LocaterError(
            f"{where}: {len(layers)} attention layers, the statistics of {statistics.source} are of {most}: collect them from this model"
        )
    return found


def _assumptions(
    layers: list[AttentionLayer], length: int, raw: bool, named: bool, statistics: Statistics | None = None
) -> dict[str, Any]:
    notes = []
    if statistics is not None:
        notes.append(
            "expected entropy: each head run on normal tokens with the measured moments, the measured first token in its place"
        )
        if statistics.silent:
            names = ", ".join(layers[number].name for number in statistics.silent if number < len(layers))
            notes.append(f"no statistics, because no token reached them, and left out: {names}")
    if any(x.norm.kind == "none" for x in layers) and not raw:
        notes.append("layers without a known norm in front: their input is taken as unit tokens too")
    if any(x.query_norm or x.key_norm for x in layers) and not raw:
        notes.append("query and key norms in mean field: each token's own norm is replaced by its root mean square")
    if any(isinstance(part, NormedProjection) for x in layers for part in (x.query, x.key)):
        notes.append(
            "norms inside query and key maps (latents, norms over all heads) in mean field, as stored weights too"
        )
    if any(x.rotary for x in layers):
        notes.append("rotary positions: moments are those at offset 0")
    if any(x.bias or x.relative or x.softcap or x.sinks is not None for x in layers):
        notes.append(
            "position biases and relative terms, soft-caps and sinks are not in the prior: it speaks of the query-key map alone"
        )
    others = dict.fromkeys(x.mechanism for x in layers if x.mechanism != "softmax")
    if others:
        notes.append(
            f"{', '.join(others)} attention: its weights are no softmax, of which entropy, localization and risk of collapse speak"
        )
    if any(x.kind == "cross" for x in layers):
        notes.append("cross-attention: traces, M, S and localization have no meaning and are left out")
    weights = "effective: norm gains and biases folded into queries and keys"
    tokens = "unit tokens: mean 0, |z|² = width, covariance I (I - 11ᵀ/d after LayerNorm)"
    if statistics is not None:
        tokens = f"measured tokens: mean and covariance of each attention input over {statistics.tokens} tokens"
    if raw or named:
        weights = "as stored" if raw else "as named: stored maps and their biases, no norm"
    return {
        "prediction": "prior" if statistics is None else "predicted",
        "tokens": tokens,
        "weights": weights,
        "length": length,
        "layers": len(layers),
        "notes": notes,
    }


def _entry(layer: AttentionLayer, number: int, details: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "layer": number, "name": layer.name, "kind": layer.kind, "heads": layer.heads, "kv_heads": layer.kv_heads,
        "head_dim": layer.head_dim, "width": layer.width, "norm": layer.norm.kind, "causal": layer.causal,
        "window": layer.window, "positions": _positions(layer), "softcap": layer.softcap,
        "sinks": layer.sinks is not None, "query_key_norm": _query_key_norm(layer),
    }  # fmt: skip
    if details and layer.rotary is not None:
        entry["frequencies"] = layer.rotary.frequencies.tolist()
    return entry


def _query_key_norm(layer: AttentionLayer) -> bool:
    """Whether queries leave a norm as they are; a norm on a latent has a map behind it."""
    return layer.query_norm is not None or (isinstance(layer.query, NormedProjection) and layer.query.up is None)


def _positions(layer: AttentionLayer) -> str | None:
    if layer.rotary:
        return "rotary"
    if layer.relative:
        return "relative"
    return type(layer.bias).__name__.lower() if layer.bias else None


@torch.no_grad()
def _rows(layer: AttentionLayer, number: int, wanted: Wanted) -> Iterator[HeadRow]:
    scale = layer.scale
    given = None if wanted.inputs is None else wanted.inputs[number]
    found, key_bias = _read(layer, wanted.raw, given)
    # a NaN or an infinite weight shows in its row of the small matrices, and so does a product that overflows
    matrices = [m for m in (found.query_gram, found.key_gram, found.cross) if m is not None]
    finite = torch.stack([m.isfinite().flatten(1).all(1) for m in matrices]).all(0)
    finite &= key_bias.isfinite() & found.frobenius_sq.isfinite()
    held = found.select(finite)
    with one_thread():
        columns = _columns(held, scale, key_bias[finite], wanted.length)
        if held.cross is not None:
            columns |= _spectra(held, scale, columns["approximation"], wanted, layer.rotary)
    if layer.mechanism != "softmax":
        columns |= {name: [None] * int(finite.sum()) for name in OF_SOFTMAX if name in columns}
    elif given is not None:
        expected = predict(layer, given, wanted.length)["entropy"].cpu()[finite]
        columns["residual_kept"] = [
            finite_or_none(x) for x in kept_at_entropy(expected, row_keys(layer, wanted.length)).tolist()
        ]
        columns["expected_entropy"] = [finite_or_none(x) for x in expected.tolist()]
    ready = iter(range(len(held.query_gram)))
    for head in range(layer.heads):
        row: dict[str, Any] = {}
        if finite[head]:
            at = next(ready)
            row = {name: column[at] for name, column in columns.items()}
        fixed: dict[str, Any] = {
            "layer": number, "head": head, "kv_head": head // layer.group, "kind": layer.kind,
            "width": layer.width, "head_dim": layer.head_dim, "scale": layer.scale,
        }  # fmt: skip
        read = row if layer.mechanism == "softmax" else {}  # what flags mean is said of a softmax
        flags = flags_of({**read, "finite": bool(finite[head])}, wanted.length)
        yield HeadRow(**fixed, **row, flags=flags)


def _read(layer: AttentionLayer, raw: bool, given: Input | None) -> tuple[Moments, Tensor]:
    """The small matrices of a layer and its key biases; the big ones are gone when this returns."""
    folded = effective(layer, raw, None if given is None else given.as_tokens())
    found = folded.moments().cpu()
    if found.query_gram.dtype == torch.float32 and bool(lost_in_float32(found).any()):  # a GPU is not asked before
        found = replace(folded, query=folded.query.double(), key=folded.key.double()).moments().cpu()
    return found, folded.key_bias.cpu()


def _columns(m: Moments, scale: float, key_bias: Tensor, length: int) -> dict[str, list[Any]]:
    """The computed columns of the heads of one layer."""
    table: dict[str, Tensor] = {name: getattr(m, name) for name in ("frobenius_sq", "spectral_norm", "stable_rank")}
    table["F"], table["key_bias"] = m.frobenius_sq * scale**2, key_bias
    pairs = zip(table["F"].tolist(), key_bias.tolist(), strict=True)
    variance = torch.tensor([key_variance(f, b) for f, b in pairs], dtype=torch.float64)
    table["expected_entropy"] = expected_entropy(variance, length)
    table["residual_kept"] = residual_kept(variance, length)
    if m.cross is None:
        return {name: [finite_or_none(x) for x in column.tolist()] for name, column in table.items()}
    for name in ("trace", "trace_of_square", "symmetric_sq", "mean", "variance", "concentration", "skew"):
        table[name] = getattr(m, name)
    table["M"], table["S"], _ = unit_moments(m, scale)
    few = table["skew"].abs() > SKEW_LIMIT
    table["localization"] = localization(table["M"], table["S"], table["F"])
    table["localization"][few] = mixture_localization(m.select(few), scale)
    columns: dict[str, list[Any]] = {
        name: [finite_or_none(x) for x in column.tolist()] for name, column in table.items()
    }
    columns["approximation"] = ["mixture" if x else "gaussian" for x in few.tolist()]
    return columns


def _spectra(
    m: Moments, scale: float, approximation: list[str], wanted: Wanted, rotary: Rotary | None
) -> dict[str, list[Any]]:
    """The columns on request: eigenvalues, drives, profiles."""
    columns: dict[str, list[Any]] = {}
    if wanted.eigenvalues or wanted.details:
        pairs = torch.view_as_real(m.eigenvalues()).tolist()
        columns["eigenvalues"] = [tuple((re, im) for re, im in spectrum) for spectrum in pairs]
    if not wanted.details:
        return columns
    if rotary is not None:
        terms = [(scale * x).tolist() for x in rotary.drive_terms(m.gram)]
        columns["drive"] = [{"even": even, "odd": odd, "still": still} for even, odd, still in zip(*terms, strict=True)]
    u = torch.linspace(-0.5, 0.5, PROFILE, dtype=torch.float64)
    columns["profile"] = [
        tuple(mixture_continuum(m.select(head), scale, u).tolist()) if how == "mixture" else None
        for head, how in enumerate(approximation)
    ]
    return columns
