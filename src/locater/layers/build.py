"""The few steps that every family file shares: read a projection, read a norm, check shapes against the
configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.layers.layer import AttentionLayer, Projection
from locater.layers.norm import Norm, NormKind
from locater.layers.row_readers import PickedRows, StoredRows
from locater.numerics import upcast
from locater.sources.config_rules import configuration, remedy
from locater.sources.weights import ModuleWeights, Rows, Weights


def optional(weights: Weights, name: str, rows: Rows | None = None) -> Tensor | None:
    """A small tensor, if it is there: biases, gains."""
    return read_floats(weights, name, rows) if name in weights.names() else None


def projection(weights: Weights, stem: str, rows: Rows | None = None) -> Projection:
    """`stem.weight` (out, in) and `stem.bias` where present; `rows` picks and orders output rows of a fused map."""
    return matrix(weights, f"{stem}.weight", optional(weights, f"{stem}.bias", rows), rows)


def matrix(weights: Weights, name: str, bias: Tensor | None, rows: Rows | None = None) -> Projection:
    """The map stored as `name`, (out, in); read when it is needed."""
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
    out = shape[0] if rows is None else sum(b - a for a, b in rows)
    return Projection(stored_rows(weights, name, rows), (out, shape[1]), bias)


def stored_rows(weights: Weights, name: str, rows: Rows | None = None) -> Callable[[], Tensor]:
    """What reads a stored map when it is needed, and ranges of its rows. A live model has it in memory already, and may
    have to merge adapters or gather shards for it: it is read there once, as a whole.
    """
    if isinstance(weights, ModuleWeights):
        return lambda: read_floats(weights, name, rows)
    return StoredRows(partial(read_floats, weights, name), rows)


def read_floats(weights: Weights, name: str, rows: Rows | None = None) -> Tensor:
    """A tensor; refused where it holds whole numbers, which stand for others."""
    tensor = weights.read(name, rows)
    if not tensor.is_floating_point():
        raise LocaterError(
            f"{weights.where}: {name} is stored as {tensor.dtype} (quantised): dequantise the checkpoint first"
        )
    return tensor


def within_heads(whole: Projection, heads: int, order: Sequence[int]) -> Projection:
    """The same map with each head's rows put in `order`; rows that `order` leaves out are dropped."""
    size = whole.shape[0] // heads
    rows = torch.tensor([head * size + row for head in range(heads) for row in order])
    bias = None if whole.bias is None else whole.bias[rows]
    return Projection(PickedRows(whole.weight, rows), (len(rows), whole.shape[1]), bias)


def norm(weights: Weights, stem: str, kind: NormKind, eps: float, offset: float = 0.0, affine: bool = True) -> Norm:
    """`stem.weight` and `stem.bias` (or gamma and beta, the old names); `offset` is 1 where the file stores gain - 1.

    The offset is added in float32 at least, as the models do: 1 + w of a bfloat16 w is not a bfloat16 number.
    """
    gain = first(weights, f"{stem}.weight", f"{stem}.gamma")
    bias = first(weights, f"{stem}.bias", f"{stem}.beta")
    if gain is None and affine:
        raise LocaterError(
            f"{weights.where}: the gain {stem}.weight is missing; "
            "the checkpoint is incomplete or of another architecture"
        )
    return Norm(kind, upcast(gain) + offset if gain is not None and offset else gain, bias, eps)


def rescaled(weights: Weights, out: Projection | None, name: str) -> Projection | None:
    """`out` with every output channel multiplied by the tensor `name` (layer scale), where that is there."""
    factor = optional(weights, name)
    if out is None or factor is None:
        return out
    plain, factor = out.weight, upcast(factor)  # a product of two 16-bit numbers is no 16-bit number
    return Projection(lambda: plain() * factor[:, None], out.shape, None if out.bias is None else out.bias * factor)


def first(weights: Weights, *names: str) -> Tensor | None:
    for name in names:
        tensor = optional(weights, name)
        if tensor is not None:
            return tensor
    return None


def shape_of(weights: Weights, name: str) -> tuple[int, ...]:
    try:
        return weights.shape(name)
    except KeyError:
        raise LocaterError(f"{weights.where}: the tensor {name} is missing; the checkpoint is incomplete") from None


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
        raise LocaterError(
            f"{weights.where}: {name} has shape {list(got)} but the configuration says {list(want)} ({why})"
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
            raise LocaterError(
                f"{weights.where}: {layer.name} has a gain or a bias of shape {list(tensor.shape)} ({tensor.dtype}) "
                f"where {size} numbers belong: the checkpoint is damaged or of another architecture"
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
        raise LocaterError(
            f"{weights.where}: {layer.name} has {layer.heads} heads for {layer.kv_heads} key heads: {remedy(weights)}"
        )


def expect_layers(weights: Weights, count: int, config: Mapping[str, Any], *keys: str) -> None:
    """Refuse a checkpoint with another number of layers than its configuration."""
    want = integer(config, weights, *keys)
    if count != want:
        raise LocaterError(
            f"{weights.where}: holds {count} attention layers but the configuration says {want} ({keys[0]})"
        )
