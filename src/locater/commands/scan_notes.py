"""What the document of a scan says besides the rows: the conditions of the numbers, what they leave out, and its
layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from locater.calls.attention_like import folded_paths
from locater.layers import AttentionLayer
from locater.layers.bias import PairBias
from locater.layers.joined_projection import norm_inside
from locater.layers.projection_with_norm import NormedProjection
from locater.predict.statistics_file import Statistics


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
