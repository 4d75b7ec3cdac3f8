"""The few steps that every family file shares: name a map, name a norm, check shapes against the configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from locater.errors import DamagedError, LocaterError
from locater.layers.layer import AttentionLayer, Projection
from locater.layers.map_layouts import AnyMap, MapLayout, NormLayout, VectorLayout, count
from locater.layers.norm import Norm, NormKind
from locater.layers.row_readers import PickedRows, read_floats
from locater.sources.config_rules import configuration, remedy
from locater.sources.weights import Rows, Weights

# Layouts: what readers name in a source. No tensor is read here, only names and shapes.


def present(weights: Weights, *names: str) -> str | None:
    """The first of these tensors that is there."""
    return next((name for name in names if name in weights.names()), None)


def map_layout(
    weights: Weights, stem: str, rows: Rows | None = None, *, shape: tuple[int, ...] = (), why: str = ""
) -> MapLayout:
    """`stem.weight` (out, in) and `stem.bias` where present; `rows` picks and orders output rows of a fused map.

    Refused where the stored map has another `shape` than the configuration says; `why` names the settings that say it.
    """
    layout = named_map(weights, f"{stem}.weight", f"{stem}.bias", rows)
    if shape:
        expect(weights, layout.weight, layout.shape, shape, why)
    return layout


def named_map(weights: Weights, name: str, bias: str, rows: Rows | None = None) -> MapLayout:
    """The map stored as `name`, (out, in), with its bias where that is there."""
    shape = shape_of(weights, name)
    if len(shape) != 2:
        raise LocaterError(
            f"{weights.where}: {name} has shape {list(shape)}; "
            "a query or key map has two axes, and so have values and outputs"
        )
    stem = name.removesuffix(".weight")
    scales = [
        other
        for other in (f"{name}_scale_inv", f"{name}_scale", f"{stem}.scales", f"{stem}.SCB")
        if other in weights.names()
    ]
    if scales:
        raise LocaterError(
            f"{weights.where}: {name} is quantised ({scales[0]} scales it): "
            "dequantise the checkpoint first (to bfloat16)"
        )
    runs = (range(shape[0]),) if rows is None else tuple(range(start, stop) for start, stop in rows)
    return MapLayout(name, shape, runs, present(weights, bias))


def norm_layout(
    weights: Weights, stem: str, kind: NormKind, eps: float, offset: float = 0.0, affine: bool = True
) -> NormLayout:
    """`stem.weight` and `stem.bias` (or gamma and beta, the old names); `offset` is 1 where gain - 1 is stored."""
    gain = present(weights, f"{stem}.weight", f"{stem}.gamma")
    if gain is None and affine:
        raise DamagedError(
            "missing-layer",
            f"{weights.where}: the gain {stem}.weight is missing; "
            "the checkpoint is incomplete or of another architecture",
        )
    bias = present(weights, f"{stem}.bias", f"{stem}.beta")
    return NormLayout(kind, gain, offset if gain else 0.0, bias, eps)


def normed_rows(whole: AnyMap, inner: NormLayout, blocks: int = 1) -> MapLayout:
    """`whole` with a norm over all its rows, or over each of so many runs of them."""
    assert isinstance(whole, MapLayout)
    return replace(whole, inner=inner, inner_blocks=blocks)


def scaled_rows(weights: Weights, out: MapLayout, name: str) -> MapLayout:
    """`out` with every output channel multiplied by the tensor `name` (layer scale), where that is there."""
    factor = present(weights, name)
    return out if factor is None else replace(out, factors=VectorLayout(factor, (range(count(out.rows)),)))


# The same as tensors, for readers that build an `AttentionLayer` themselves.


def optional(weights: Weights, name: str) -> Tensor | None:
    """A small tensor, if it is there: biases, gains."""
    return read_floats(weights, name) if name in weights.names() else None


def projection(weights: Weights, stem: str, rows: Rows | None = None) -> Projection:
    """The same as `map_layout`, with the tensors."""
    return map_layout(weights, stem, rows).build(weights, Norm())


def within_heads(whole: Projection, heads: int, order: Sequence[int]) -> Projection:
    """The same map with each head's rows put in `order`; rows that `order` leaves out are dropped."""
    size = whole.shape[0] // heads
    rows = torch.tensor([head * size + row for head in range(heads) for row in order])
    bias = None if whole.bias is None else whole.bias[rows]
    return Projection(PickedRows(whole.weight, rows), (len(rows), whole.shape[1]), bias)


def norm(weights: Weights, stem: str, kind: NormKind, eps: float, offset: float = 0.0, affine: bool = True) -> Norm:
    """The same as `norm_layout`, with the tensors."""
    return norm_layout(weights, stem, kind, eps, offset, affine).build(weights)


# Checks.


def shape_of(weights: Weights, name: str) -> tuple[int, ...]:
    try:
        return weights.shape(name)
    except KeyError:
        raise DamagedError(
            "missing-layer", f"{weights.where}: the tensor {name} is missing; the checkpoint is incomplete"
        ) from None


def integer(config: Mapping[str, Any], weights: Weights, *keys: str) -> int:
    """The first of `keys` that the configuration holds."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        if value is not None:
            raise LocaterError(
                f"{weights.where}: its configuration says {key} = {value!r}, "
                f"not a positive whole number: {remedy(weights)}"
            )
    kind = config.get("model_type")
    raise LocaterError(
        f"{weights.where}: its configuration (model_type {kind!r}) has no {keys[0]}: add it to {configuration(weights)}"
    )


def expect(weights: Weights, name: str, got: tuple[int, ...], want: tuple[int, ...], why: str) -> None:
    """Refuse a tensor whose shape contradicts the configuration."""
    if got != want:
        raise DamagedError(
            "config",
            f"{weights.where}: {name} has shape {list(got)} but the configuration says {list(want)} ({why})",
        )


def check_layer(weights: Weights, layer: AttentionLayer) -> None:
    """Refuse gains and biases that do not fit their maps, and settings that are no numbers. A gain of a single number
    would otherwise spread over all channels unnoticed.
    """
    width, norms = layer.query.shape[1], [(layer.query_norm, layer.head_dim), (layer.key_norm, layer.head_dim)]
    norms += [(layer.norm, width), (layer.memory_norm, layer.key.shape[1])]
    vectors = [(tensor, size) for norm, size in norms if norm is not None for tensor in (norm.gain, norm.bias)]
    maps = [
        part
        for part in (layer.query, layer.key, layer.value, layer.out)
        if part is not None and type(part) is Projection
    ]
    vectors += [(part.bias, part.shape[0]) for part in maps]
    for tensor, size in vectors:
        if tensor is not None and (not tensor.ndim or tensor.shape[-1] != size or not tensor.is_floating_point()):
            raise DamagedError(
                "config",
                f"{weights.where}: {layer.name} has a gain or a bias of shape {list(tensor.shape)} ({tensor.dtype}) "
                f"where {size} numbers belong: the checkpoint is damaged or of another architecture",
            )
    settings: list[tuple[str, Any]] = [("epsilon", norm.eps) for norm, _ in norms if norm is not None]
    settings += [("scale", layer.scale), ("softcap", layer.softcap or 0.0), ("window", layer.window or 0)]
    if layer.rotary is not None:
        settings += [
            ("rotary amplitude", layer.rotary.amplitude),
            ("rotary frequency", float(layer.rotary.frequencies.sum())),
        ]
    for name, value in settings:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise LocaterError(f"{weights.where}: {layer.name} has the {name} {value!r:.40}: {remedy(weights)}")
    if layer.heads % layer.kv_heads:
        raise DamagedError(
            "config",
            f"{weights.where}: {layer.name} has {layer.heads} heads for {layer.kv_heads} key heads: {remedy(weights)}",
        )


def expect_layers(weights: Weights, count: int, config: Mapping[str, Any], *keys: str) -> None:
    """Refuse a checkpoint with another number of layers than its configuration."""
    want = integer(config, weights, *keys)
    if count != want:
        raise DamagedError(
            "missing-layer" if count < want else "config",
            f"{weights.where}: holds {count} attention layers but the configuration says {want} ({keys[0]})",
        )
