"""The rows of a scan: what the weights of one attention layer say about each of its heads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from locater.families import AttentionLayer, Rotary, Tokens, effective
from locater.families.bias import PairBias
from locater.families.pairs import PairTerms
from locater.families.splitting import head_blocks
from locater.findings import flags_of, key_variance
from locater.missing import finite_or_none
from locater.numerics import one_thread
from locater.predict.input_statistics import Input
from locater.predict.prediction import predict
from locater.spectrum import Moments, joined_moments, lost_in_float32
from locater.theory import (
    expected_entropy,
    kept_at_entropy,
    localization,
    mixture_continuum,
    mixture_localization,
    residual_kept,
    unit_moments,
)
from locater.theory.propagation import SKEW_LIMIT
from locater.verbs.scan_result import LENGTH, HeadRow

SOFTMAX_ONLY = ("expected_entropy", "residual_kept", "localization")  # columns without meaning for other mechanisms
# columns in units of logits
SCALED = ("M", "S", "F", "key_bias", "expected_entropy", "residual_kept", "localization", "drive", "profile")
SAMPLED_ROWS = 32  # rows of attention, of different length, that stand for all
# numbers of query and key maps that are folded at a time, 160 MiB in float32: room for a key head of Llama-405B and its
# 16 query heads, so that their products are those of the whole layer
BLOCK = 40 * 2**20
PROFILE_POINTS = 65  # of a propagation profile that has no closed form


@dataclass(frozen=True)
class ScanOptions:
    """What a scan computes for each head."""

    length: int = LENGTH
    raw: bool = False
    eigenvalues: bool = False
    details: bool = False  # what a page draws: eigenvalues, drives, profiles without a closed form
    inputs: Mapping[int, Input] | None = None  # measured statistics by layer number


@torch.no_grad()
def head_rows(layer: AttentionLayer, number: int, options: ScanOptions) -> Iterator[HeadRow]:
    """One row per head of a layer. A head whose weights are not finite gets a row without numbers."""
    statistics = None if options.inputs is None else options.inputs[number]
    # without its scale a layer has the numbers of its maps alone
    scaled = replace(layer, scale=1.0, unknown_scale=None) if layer.unknown_scale is not None else layer
    moments, key_bias = _moments(scaled, options.raw, statistics)
    finite = _finite_heads(moments, key_bias)
    columns = _columns(scaled, moments.select(finite), key_bias[finite], options)
    if statistics is not None and layer.mechanism == "softmax" and _weights_known(layer):
        columns |= _predicted_columns(layer, statistics, options.length, finite)
    if layer.unknown_scale is not None:
        columns = {name: column for name, column in columns.items() if name not in SCALED}
    places = iter(range(int(finite.sum())))
    for head in range(layer.heads):
        numbers: dict[str, Any] = {}
        if finite[head]:
            place = next(places)
            numbers = {name: column[place] for name, column in columns.items()}
        flagged = numbers if layer.mechanism == "softmax" else {}  # the flags describe softmax attention
        yield HeadRow(
            layer=number,
            head=head,
            kv_head=head // layer.group,
            kind=layer.kind,
            width=layer.width,
            head_dim=layer.head_dim,
            scale=layer.scale if layer.unknown_scale is None else None,
            quantised=layer.quantised,
            **numbers,
            flags=flags_of({**flagged, "finite": bool(finite[head])}, options.length),
        )


def _weights_known(layer: AttentionLayer) -> bool:
    """Whether attention weights of any number of tokens can be computed."""
    tables = layer.rotary_table is not None or isinstance(layer.bias, PairBias) or isinstance(layer.relative, PairTerms)
    return not (layer.unknown_logits or layer.unknown_mask or tables)


def row_keys(layer: AttentionLayer, length: int, keys: int | None = None) -> tuple[int, ...]:
    """How many keys the rows of attention over `length` tokens see.

    At most `SAMPLED_ROWS` evenly spaced rows are returned: enough for a mean over rows.
    """
    if layer.kind != "self" or not (layer.causal or layer.window or layer.chunk):
        return (keys or length,)
    count, reach = min(length, SAMPLED_ROWS), layer.window or length  # a row sees the keys nearer than this
    places = [math.ceil((i + 0.5) * length / count) - 1 for i in range(count)]
    if layer.chunk is not None:
        chunk = layer.chunk
        return tuple(i % chunk + 1 if layer.causal else min(chunk, length - i // chunk * chunk) for i in places)
    return tuple(min(i, reach - 1) + 1 + (0 if layer.causal else min(length - 1 - i, reach - 1)) for i in places)


def _moments(layer: AttentionLayer, raw: bool, statistics: Input | None) -> tuple[Moments, Tensor]:
    """The small matrices of a layer and its key biases, by blocks of heads. The maps of a block are freed before those
    of the next are read.

    With measured tokens the layer is one block: their covariance, as large as a map, would be folded into each.
    """
    tokens = None if statistics is None else statistics.as_tokens()

    def pieces(double: bool) -> list[tuple[Moments, Tensor]]:
        blocks = head_blocks(layer, BLOCK) if tokens is None else [layer]
        return [_block_moments(block, raw, tokens, double) for block in blocks]

    parts = pieces(double=False)
    if len({moments.query_gram.dtype for moments, _ in parts}) > 1:  # one block needs float64: as one, all have it
        parts = pieces(double=True)
    return joined_moments([moments for moments, _ in parts]), torch.cat([bias for _, bias in parts])


def _block_moments(layer: AttentionLayer, raw: bool, tokens: Tokens | None, double: bool) -> tuple[Moments, Tensor]:
    folded = effective(layer, raw, tokens)
    moments = None if double else folded.moments().cpu()
    # checked on the CPU, so that a GPU is waited for once
    if moments is None or (moments.query_gram.dtype == torch.float32 and bool(lost_in_float32(moments).any())):
        moments = replace(folded, query=folded.query.double(), key=folded.key.double()).moments().cpu()
    return moments, folded.key_bias.cpu()


def _norm_turned(layer: AttentionLayer) -> bool:
    """Whether gains of query or key norms act on channels that have turned: then drives have no closed form."""
    norms = (layer.query_norm, layer.key_norm)
    return layer.norm_last and any(norm is not None and norm.gain is not None for norm in norms)


def _finite_heads(moments: Moments, key_bias: Tensor) -> Tensor:
    """Which heads are finite: NaN or infinite weights, and products that overflow, show in the small matrices."""
    matrices = [m for m in (moments.query_gram, moments.key_gram, moments.cross) if m is not None]
    finite = torch.stack([m.isfinite().flatten(1).all(1) for m in matrices]).all(0)
    return finite & key_bias.isfinite() & moments.frobenius_sq.isfinite()


def _columns(layer: AttentionLayer, m: Moments, key_bias: Tensor, options: ScanOptions) -> dict[str, list[Any]]:
    """The computed columns of the finite heads of a layer."""
    with one_thread():
        columns = _moment_columns(m, layer.scale, key_bias, options.length)
        if m.cross is not None:
            columns |= _spectra(
                m, layer.scale, columns["approximation"], options, None if _norm_turned(layer) else layer.rotary
            )
    if layer.mechanism != "softmax":
        columns |= {name: [None] * len(key_bias) for name in SOFTMAX_ONLY if name in columns}
    return columns


def _moment_columns(m: Moments, scale: float, key_bias: Tensor, length: int) -> dict[str, list[Any]]:
    """What follows from moments alone; without the traces for cross-attention, where they have no meaning."""
    names = ("frobenius_sq", "spectral_norm", "stable_rank", "effective_rank")
    table: dict[str, Tensor] = {name: getattr(m, name) for name in names}
    table["F"], table["key_bias"] = m.frobenius_sq * scale**2, key_bias
    pairs = zip(table["F"].tolist(), key_bias.tolist(), strict=True)
    variance = torch.tensor([key_variance(f, b) for f, b in pairs], dtype=torch.float64)
    table["expected_entropy"] = expected_entropy(variance, length)
    table["residual_kept"] = residual_kept(variance, length)
    if m.cross is None:
        return {name: _finite_list(column) for name, column in table.items()}
    for name in ("trace", "trace_of_square", "symmetric_sq", "mean", "variance", "concentration", "skew"):
        table[name] = getattr(m, name)
    table["M"], table["S"], _ = unit_moments(m, scale)
    few = table["skew"].abs() > SKEW_LIMIT  # a few directions dominate: the closed form does not apply
    table["localization"] = localization(table["M"], table["S"], table["F"])
    table["localization"][few] = mixture_localization(m.select(few), scale)
    columns: dict[str, list[Any]] = {name: _finite_list(column) for name, column in table.items()}
    columns["approximation"] = ["mixture" if x else "gaussian" for x in few.tolist()]
    return columns


def _predicted_columns(layer: AttentionLayer, statistics: Input, length: int, finite: Tensor) -> dict[str, list[Any]]:
    """Entropy, and what attention keeps of differences, from the head run on tokens with the measured moments."""
    entropy = predict(layer, statistics, length)["entropy"].cpu()[finite]
    return {
        "residual_kept": _finite_list(kept_at_entropy(entropy, row_keys(layer, length))),
        "expected_entropy": _finite_list(entropy),
    }


def _spectra(
    m: Moments, scale: float, approximation: list[str], options: ScanOptions, rotary: Rotary | None
) -> dict[str, list[Any]]:
    """The optional columns: eigenvalues, drives, profiles."""
    columns: dict[str, list[Any]] = {}
    if options.eigenvalues or options.details:
        pairs = torch.view_as_real(m.eigenvalues()).tolist()
        columns["eigenvalues"] = [tuple((re, im) for re, im in spectrum) for spectrum in pairs]
    if not options.details:
        return columns
    if rotary is not None:
        terms = [(scale * x).tolist() for x in rotary.drive_terms(m.gram)]
        columns["drive"] = [{"even": even, "odd": odd, "still": still} for even, odd, still in zip(*terms, strict=True)]
    u = torch.linspace(-0.5, 0.5, PROFILE_POINTS, dtype=torch.float64)
    columns["profile"] = [
        tuple(mixture_continuum(m.select(head), scale, u).tolist()) if how == "mixture" else None
        for head, how in enumerate(approximation)
    ]
    return columns


def _finite_list(column: Tensor) -> list[float | None]:
    return [finite_or_none(x) for x in column.tolist()]
