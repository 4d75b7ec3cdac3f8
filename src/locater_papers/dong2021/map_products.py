"""Products of attention maps along paths, and how far they are from rank one.

As in the paper: k distinct layers in their order, one head drawn in each, and P = A_1 A_2 ... A_k of one sample. What
is left of P besides the closest matrix of rank one, over P, in the composite norm. Products are formed in float64,
where the paper's float32 ends near 1e-6. That is attention alone: values and skips play no part.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.measures import composite_norm, token_residual

FLOOR = 1e-12  # of float64 products: medians under it do not enter slopes
Medians = dict[int, float]  # by number of factors


@torch.no_grad()
def attention_maps(model: Any, ids: Tensor) -> Tensor:
    """(layers, samples, heads, tokens, tokens), float32 as the model has them."""
    was = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the only one that hands them out
    try:
        found = getattr(
            model(input_ids=ids.to(next(model.parameters()).device), output_attentions=True), "attentions", None
        )
    finally:
        model.set_attn_implementation(was)
    if not found or any(x is None for x in found):
        raise LocaterError(f"{type(model).__name__} hands out no attention maps")
    return torch.stack(list(found)).cpu()


def chain(maps: Tensor, factors: int, repeats: int, seed: int = 0) -> Tensor:
    """Products of `factors` maps each: sample, layers and heads drawn evenly, layers in their order. (repeats, tokens,
    tokens).

    >>> eye = torch.eye(2).expand(3, 1, 2, 2, 2)
    >>> chain(eye, 3, 1).tolist()
    [[[1.0, 0.0], [0.0, 1.0]]]
    """
    layers, samples, heads = maps.shape[:3]
    draws = random.Random(seed)
    found = []
    for _ in range(repeats):
        sample, product = draws.randrange(samples), torch.eye(maps.shape[-1], dtype=maps.dtype)
        for layer in sorted(draws.sample(range(layers), factors)):
            product = product @ maps[layer, sample, draws.randrange(heads)]
        found.append(product)
    return torch.stack(found)


def off_rank_one(products: Tensor) -> Tensor:
    """||P - its closest matrix of rank one|| over ||P||, composite norm."""
    return composite_norm(token_residual(products, centre="svd")) / composite_norm(products)


def off_rank_one_single(products: Tensor) -> Tensor:
    """The same with everything in float32, as the paper had it: this ends where float32 does."""
    U, s, Vh = torch.linalg.svd(products.float(), full_matrices=False)
    rest = products.float() - U[..., :, :1] * s[..., None, :1] * Vh[..., :1, :]
    return composite_norm(rest) / composite_norm(products)


def medians(maps: Tensor, repeats: int, seed: int = 0) -> Medians:
    """Median relative residual by number of factors, products in the precision of `maps`."""
    return {k: float(off_rank_one(chain(maps, k, repeats, seed)).median()) for k in range(1, len(maps) + 1)}


def decades(found: Mapping[int, float], floor: float = FLOOR) -> float:
    """Slope of -log10 over the number of factors, by least squares, as far as medians are above the floor.

    >>> round(decades({1: 1e-1, 2: 1e-3, 3: 1e-5, 4: 1e-16}), 6)
    2.0
    """
    points = [(k, -math.log10(x)) for k, x in found.items() if x > floor]
    if len(points) < 2:
        return math.nan
    middle = sum(k for k, _ in points) / len(points)
    return sum((k - middle) * y for k, y in points) / sum((k - middle) ** 2 for k, _ in points)
