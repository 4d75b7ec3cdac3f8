"""From products of queries and keys to logits: scale, soft-cap and position terms, read from one call."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from locater.discovery.attention_site import AttentionSite, with_products
from locater.discovery.biases import content_tables_of, sink_of, table_of
from locater.discovery.errors import UnreadableError
from locater.discovery.norm_fit import relative_difference
from locater.discovery.tape import Tape
from locater.discovery.taped_calls import MASKED
from locater.layers.layout import AlibiLayout, LogitsLayout, PairTermsLayout, SinksLayout

CLOSE = 1e-9


def read_logits(
    tape: Tape, site: AttentionSite, captured: tuple[Tensor, Tensor, Tensor], queries: Tensor
) -> tuple[LogitsLayout, str | None]:
    """(the layout, why more than products and scale is not known). `captured` are products, logits and their constant
    part, `queries` those of the map, before any factor; all (B, H, T, S).
    """
    products, logits, constant = captured
    seen = constant > MASKED
    if not seen.any():
        raise UnreadableError("all its logits are masked")
    shifted, sinks = False, sink_of(tape, site)
    try:
        scale, cap = _scale_and_cap(site, products, logits, constant, seen)
    except UnreadableError:  # the same without what a row has in common, which a sink would see
        if sinks is not None:
            raise
        shifted = True
        scale, cap = _scale_of_differences(site, products, logits, constant, seen), None
    layout = LogitsLayout(scale, cap, sinks=None if sinks is None else SinksLayout(sinks), shifted=shifted)
    bias = centred(constant, seen) if shifted else constant.masked_fill(~seen, 0.0)
    if bias.abs().max() <= CLOSE:
        return layout, None
    if sinks is None and centred(bias, seen).abs().max() <= CLOSE * bias.abs().max():
        return replace(layout, shifted=True), None
    slopes = _alibi_slopes(bias, seen)
    if slopes is not None:
        return replace(layout, bias=AlibiLayout(slopes)), None
    table = table_of(tape, site, bias, seen)
    if table is not None:
        return replace(layout, bias=table), None
    own = float(site.queries.flatten()[0] / queries.flatten()[0])  # factor of the queries
    for factor in dict.fromkeys((1.0, own, scale, own * scale)):
        tables = content_tables_of(tape, site, bias, seen, factor * queries)
        if tables is not None:
            return replace(layout, relative=PairTermsLayout(tables, factor)), None
    return layout, "a bias that is not known is added to its logits"


def _scale_and_cap(
    site: AttentionSite, products: Tensor, logits: Tensor, constant: Tensor, seen: Tensor
) -> tuple[float, float | None]:
    call = site.call
    if call.product is None:  # a fused call has a scale and no cap
        return _ratio(logits - constant, products, seen), None

    def of(factor: float) -> Tensor:
        return site.grid.products_by_head(with_products(call, factor)) - constant

    small, large = of(1e-6), of(1e6)
    scale = _ratio(small, 1e-6 * products, seen, 1e-6)
    straight = relative_difference(logits - constant, scale * products, seen)
    if straight < 1e-6 and relative_difference(large, 1e6 * scale * products, seen) < 1e-6:
        return _ratio(logits - constant, products, seen), None
    cap = float(large[seen].abs().max())
    sizes = ((1.0, logits - constant), (1e6, large))
    if any(
        relative_difference(ours, cap * torch.tanh(factor * scale * products / cap), seen) > 1e-6
        for factor, ours in sizes
    ):
        raise UnreadableError("its logits are a nonlinear function of the products that is no soft-cap")
    return scale, cap


def _scale_of_differences(
    site: AttentionSite, products: Tensor, logits: Tensor, constant: Tensor, seen: Tensor
) -> float:
    """The factor from products to logits without what a row has in common, the same for products of any size."""
    start, products = centred(constant, seen), centred(products, seen)
    scale = _ratio(centred(logits, seen) - start, products, seen)
    for factor in (1e-6, 1e6) if site.call.product is not None else ():
        ours = centred(site.grid.products_by_head(with_products(site.call, factor)), seen) - start
        if relative_difference(ours, factor * scale * products, seen) > 1e-6:
            raise UnreadableError("its logits are a nonlinear function of the products that is no soft-cap")
    return scale


def _ratio(ours: Tensor, products: Tensor, seen: Tensor, close: float = CLOSE) -> float:
    """The one factor from products to logits."""
    factor = float((ours[seen] * products[seen]).sum() / products[seen].square().sum())
    if relative_difference(ours, factor * products, seen) > max(close, 1e-6):
        raise UnreadableError("its logits are not one multiple of the products of queries and keys")
    return factor


def _alibi_slopes(bias: Tensor, seen: Tensor) -> tuple[float, ...] | None:
    """Slopes with bias = -slope |distance| plus what a row has in common, wherever a query may look."""
    length, keys = bias.shape[-2:]
    distance = (torch.arange(length)[:, None] + (keys - length) - torch.arange(keys)).abs().to(bias)
    distance, bias = centred(distance.expand(bias.shape), seen), centred(bias, seen)
    slopes = -(bias * distance).sum((0, 2, 3)) / distance.square().sum((0, 2, 3)).clamp_min(1e-30)
    rest = bias + slopes[:, None, None] * distance
    return tuple(slopes.tolist()) if rest.abs().max() < 1e-6 * bias.abs().max() else None


def centred(logits: Tensor, seen: Tensor) -> Tensor:
    """Logits without what a row has in common, which softmax does not see; 0 where masked."""
    logits = logits.masked_fill(~seen, 0.0)
    return (logits - logits.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp_min(1)).masked_fill(~seen, 0.0)
