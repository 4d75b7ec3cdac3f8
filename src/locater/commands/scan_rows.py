"""The rows of a scan: what the weights of attention layers say about each of their heads."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.commands.layer_moments import LayerMoments
from locater.defaults import LENGTH
from locater.findings import flags_of, key_variance
from locater.findings.flags import FLAG_NAMES
from locater.layers import AttentionLayer
from locater.layers.output_maps_and_written_norms import written_norms, written_shares
from locater.layers.position_biases import PairBias, PairTerms
from locater.numerics import finite_or_none, lone_workers, one_thread
from locater.predict.prediction_and_logit_bound import predict
from locater.predict.statistics_file import Input
from locater.results.scan import HeadRow
from locater.spectrum import Moments
from locater.theory import (
    expected_entropy,
    kept_at_entropy,
    localization,
    mixture_continuum,
    mixture_localization,
    residual_kept,
    unit_moments,
)
from locater.theory.propagation_and_regimes import SKEW_LIMIT

SOFTMAX_ONLY = ("expected_entropy", "residual_kept", "localization")  # columns without meaning for other mechanisms
# columns in units of logits
SCALED = ("M", "S", "F", "key_bias", "expected_entropy", "residual_kept", "localization", "drive", "profile")
SAMPLED_ROWS = 32  # rows of attention, of different length, that stand for all
PROFILE_POINTS = 65  # of a propagation profile that has no closed form


@dataclass(frozen=True)
class ScanOptions:
    """What a scan computes for each head."""

    length: int = LENGTH
    raw: bool = False
    eigenvalues: bool = False
    details: bool = False  # what a page draws: eigenvalues, drives, profiles without a closed form
    inputs: Mapping[int, Input] | None = None  # measured statistics by layer number


def rows_of(parts: Iterable[LayerMoments], options: ScanOptions, workers: int = 1) -> Iterator[HeadRow]:
    """One row per head of all layers, in their order. `workers` records are processed at a time, or one on a GPU, where
    decompositions use all workers.
    """
    if workers < 2 or options.inputs is not None:  # heads that are run on tokens have all threads
        for part in parts:
            yield from head_rows(part, options)
        return
    waiting: deque[Future[list[HeadRow]]] = deque()
    with lone_workers(workers) as pool:
        for part in parts:
            if part.key_bias.device.type != "cpu":
                while waiting:
                    yield from waiting.popleft().result()
                yield from head_rows(part, options)
                continue
            waiting.append(pool.submit(_list_rows, part, options))
            if len(waiting) > workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def rows_with_written(rows: Iterable[HeadRow], layers: Mapping[int, AttentionLayer], raw: bool) -> Iterator[HeadRow]:
    """Rows with what their heads write, and the flags of that; `layers` by number. NaN or infinite values and output
    maps make a head nonfinite, and its numbers of queries and keys stay.
    """
    with one_thread():
        norms = {number: written_norms(layer, raw) for number, layer in layers.items()}
    shares = {number: written_shares(of_layer) for number, of_layer in norms.items()}
    for row in rows:
        norm, share = norms[row.layer][row.head], shares[row.layer][row.head]
        raised = {*row.flags, *flags_of({"written_share": share, "finite": math.isfinite(norm or 0.0)}, LENGTH)}
        written = None if norm is None else finite_or_none(norm)
        flags = tuple(name for name in FLAG_NAMES if name in raised)
        yield replace(row, written=written, written_share=share, flags=flags)


def _list_rows(part: LayerMoments, options: ScanOptions) -> list[HeadRow]:
    return list(head_rows(part, options))


@torch.no_grad()
def head_rows(part: LayerMoments, options: ScanOptions) -> Iterator[HeadRow]:
    """One row per head of layers of one kind. A head whose weights are not finite gets a row without numbers."""
    with one_thread(), torch.autocast(part.key_bias.device.type, enabled=False):
        finite = _finite_heads(part.moments, part.key_bias).cpu()
        columns = _columns(part, finite, options)
    if options.inputs is not None and "residual_kept" in columns:
        columns |= _predicted_columns(part, finite, columns, options.inputs, options.length)
    names, rows = [*columns], zip(*columns.values(), strict=True)
    numbers = ({} if not known else dict(zip(names, next(rows), strict=True)) for known in finite.tolist())
    for number, layer in part.layers:
        of_layer: dict[str, Any] = {
            "layer": number,
            "kind": layer.kind,
            "width": layer.width,
            "head_dim": layer.head_dim,
            "scale": layer.scale if layer.unknown_scale is None else None,
            "quantised": layer.quantised,
        }
        for head, known in zip(range(layer.heads), numbers, strict=False):
            flagged = known if layer.mechanism == "softmax" else {}  # the flags describe softmax attention
            flags = flags_of({**flagged, "finite": bool(known)}, options.length)
            yield HeadRow(head=head, kv_head=head // layer.group, **of_layer, **known, flags=flags)


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


def _norm_after_rotation(layer: AttentionLayer) -> bool:
    """Whether gains of query or key norms act on rotated channels: then drives have no closed form."""
    norms = (layer.query_norm, layer.key_norm)
    return layer.norm_last and any(norm is not None and norm.gain is not None for norm in norms)


def _finite_heads(moments: Moments, key_bias: Tensor) -> Tensor:
    """Which heads are finite: NaN or infinite weights, and products that overflow, show in the small matrices."""
    matrices = [m for m in (moments.query_gram, moments.key_gram, moments.cross) if m is not None]
    ends = [end((-2, -1)) for m in matrices for end in (m.amin, m.amax)]  # NaN where any entry is
    finite = torch.stack(ends).isfinite().all(0)
    return finite & key_bias.isfinite() & moments.frobenius_sq.isfinite()


def _columns(part: LayerMoments, finite: Tensor, options: ScanOptions) -> dict[str, list[Any]]:
    """The computed columns of the finite heads of layers of one kind."""
    whole = bool(finite.all())  # nearly always: then nothing is copied
    m, key_bias = part.moments, part.key_bias
    if not whole:
        m, key_bias = _select_heads(m, finite), key_bias[finite.to(key_bias.device)]
    one = part.layers[0][1]
    scale = 1.0 if one.unknown_scale is not None else one.scale
    columns = _moment_columns(m, scale, key_bias, options.length)
    if m.cross is not None and (options.eigenvalues or options.details):
        columns["eigenvalues"] = _pairs(m.eigenvalues())
    if m.cross is not None and options.details:
        columns |= _profiles(m, scale, columns["approximation"]) | _drives(part, finite, m.gram.cpu(), scale)
    if one.mechanism != "softmax":
        columns |= {name: [None] * len(key_bias) for name in SOFTMAX_ONLY if name in columns}
    if one.unknown_scale is not None:
        columns = {name: column for name, column in columns.items() if name not in SCALED}
    return columns


def _moment_columns(m: Moments, scale: float, key_bias: Tensor, length: int) -> dict[str, list[Any]]:
    """What follows from moments alone; without the traces for cross-attention, where they have no meaning."""
    table = _moment_table(m, scale, key_bias, length)
    values = torch.stack([column.double() for column in table.values()]).cpu()  # the one wait for a GPU
    if m.cross is None:
        return dict(zip(table, _finite_lists(values), strict=True))
    rows = dict(zip(table, values, strict=True))
    few = rows["skew"].abs() > SKEW_LIMIT  # a few directions dominate: the closed form does not apply
    if bool(few.any()):
        rows["localization"][few] = mixture_localization(_select_heads(m, few), scale).cpu()
    columns: dict[str, list[Any]] = dict(zip(table, _finite_lists(values), strict=True))
    columns["approximation"] = ["mixture" if x else "gaussian" for x in few.tolist()]
    return columns


def _moment_table(m: Moments, scale: float, key_bias: Tensor, length: int) -> dict[str, Tensor]:
    """Columns where the moments are. Singular values come first: they need the most memory beside the moments."""
    names = ["spectral_norm", "stable_rank", "effective_rank", "frobenius_sq"]
    if m.cross is not None:
        names += ["trace", "trace_of_square", "symmetric_sq", "mean", "variance", "concentration", "skew"]
    table: dict[str, Tensor] = {name: getattr(m, name) for name in names}
    table["F"], table["key_bias"] = m.frobenius_sq * scale**2, key_bias
    variance = key_variance(table["F"].double(), key_bias.double())
    table["expected_entropy"] = expected_entropy(variance, length)
    table["residual_kept"] = residual_kept(variance, length)
    if m.cross is not None:
        table["M"], table["S"], _ = unit_moments(m, scale)
        table["localization"] = localization(table["M"], table["S"], table["F"])
    return table


def _select_heads(m: Moments, heads: Tensor) -> Moments:
    """The moments of heads chosen by a mask on the CPU. A mask on a GPU would be waited for, once for each matrix."""
    return m.select(heads.nonzero()[:, 0].to(m.query_gram.device))


def _predicted_columns(
    part: LayerMoments,
    finite: Tensor,
    columns: Mapping[str, list[Any]],
    inputs: Mapping[int, Input],
    length: int,
) -> dict[str, list[Any]]:
    """Entropy, and what attention keeps of differences, from heads run on tokens with the measured moments; unchanged
    for heads that cannot be run.
    """
    predicted: dict[str, list[Any]] = {"residual_kept": [], "expected_entropy": []}
    for (number, layer), known, place in _by_layer(part, finite):
        if layer.mechanism == "softmax" and _weights_known(layer):
            entropy = predict(layer, inputs[number], length)["entropy"].cpu()[known]
            kept = kept_at_entropy(entropy, row_keys(layer, length))
            for column, values in zip(predicted.values(), _finite_lists(torch.stack([kept, entropy])), strict=True):
                column += values
        else:
            for name, column in predicted.items():
                column += columns[name][place]
    return predicted


def _by_layer(part: LayerMoments, finite: Tensor) -> Iterator[tuple[tuple[int, AttentionLayer], Tensor, slice]]:
    """Each layer, which of its heads are finite, and where those are in the columns."""
    start = 0
    for (number, layer), known in zip(part.layers, finite.split([x.heads for _, x in part.layers]), strict=True):
        count = int(known.sum())
        yield (number, layer), known, slice(start, start + count)
        start += count


def _pairs(values: Tensor) -> list[tuple[tuple[float, float], ...]]:
    """Complex numbers (heads, n) as pairs of real and imaginary parts."""
    parts = zip(values.real.tolist(), values.imag.tolist(), strict=True)
    return [tuple(zip(real, imaginary, strict=True)) for real, imaginary in parts]


def _profiles(m: Moments, scale: float, approximation: list[str]) -> dict[str, list[Any]]:
    """Propagation profiles that have no closed form."""
    few = torch.tensor([how == "mixture" for how in approximation], dtype=torch.bool, device="cpu")
    u = torch.linspace(-0.5, 0.5, PROFILE_POINTS, dtype=torch.float64, device="cpu")
    profiles = iter(mixture_continuum(_select_heads(m, few), scale, u).tolist())
    return {"profile": [tuple(next(profiles)) if how == "mixture" else None for how in approximation]}


def _drives(part: LayerMoments, finite: Tensor, gram: Tensor, scale: float) -> dict[str, list[Any]]:
    """What rotary positions add, by layer, since each may have frequencies of its own."""
    drives: list[dict[str, Any] | None] = []
    for (_, layer), _, place in _by_layer(part, finite):
        if layer.rotary is None or _norm_after_rotation(layer):
            drives += [None] * (place.stop - place.start)
            continue
        terms = [(scale * x).tolist() for x in layer.rotary.drive_terms(gram[place])]
        drives += [{"even": even, "odd": odd, "still": still} for even, odd, still in zip(*terms, strict=True)]
    return {"drive": drives}


def _finite_lists(table: Float[Tensor, "columns heads"]) -> list[list[float | None]]:
    """Columns as numbers; None where one is not finite."""
    values: list[list[float | None]] = table.tolist()
    return values if bool(table.isfinite().all()) else [[finite_or_none(x) for x in column] for column in values]
