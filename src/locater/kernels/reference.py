"""Attention statistics in plain PyTorch, some rows at a time: any device, any mask, the judge of the Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields

import torch
from torch import Tensor

from locater.kernels.terms import AttentionStatistics, Terms
from locater.numerics import upcast

ELEMENTS = 1 << 24  # logits in memory at a time
CACHED = 1 << 20  # the same on a CPU, whose caches are much faster than its memory
LOWEST = -1e30  # a masked logit: exp is 0, and so is exp times it, which -inf would make NaN


def row_chunks(B: int, H: int, T: int, S: int, device: torch.device) -> list[slice]:
    size = max(1, (CACHED if device.type == "cpu" else ELEMENTS) // max(1, B * H * S))
    return [slice(start, min(start + size, T)) for start in range(0, T, size)]


def _logits_by_rows(q: Tensor, k: Tensor, terms: Terms) -> Iterator[tuple[slice, Terms, Tensor, Tensor]]:
    """Some rows at a time: which, the terms of the keys that they may see, logits and visible keys (B, H, t, end)."""
    B, H, T, _ = q.shape
    S = k.shape[-2]
    keys = upcast(k)
    whole = terms.positions is not None or not terms.causal or T > S  # else no row of a chunk sees beyond its last
    placed = terms.placed(T, S, q.device)
    for rows in row_chunks(B, H, T, S, q.device):
        end = S if whole else S - T + rows.stop
        here = placed.up_to(end)
        logits = here.logits(upcast(q[:, :, rows]), keys[:, :, :end], rows, T)
        yield rows, here, logits, here.visible(rows, T, end, q.device)


def weights_by_rows(q: Tensor, k: Tensor, terms: Terms) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows of the attention map, some at a time: which, their weights (B, H, t, end) on the first `end` keys, beyond
    which they see none, and the keys that they see. The map as a whole is never in memory.
    """
    T = q.shape[2]
    for rows, here, logits, seen in _logits_by_rows(q, k, terms):
        _, weights = _of_rows(logits, seen, here, rows, T, extended=False)
        if here.bias is not None:
            seen = seen & ((here.bias if here.bias.shape[-2] == 1 else here.bias[..., rows, :]) > -torch.inf)
        yield rows, weights, seen


def statistics(q: Tensor, k: Tensor, terms: Terms, extended: bool, per_key: bool) -> AttentionStatistics:
    """q (B, H, T, D), k (B, K, S, D) with H a multiple of K."""
    B, H, T, _ = q.shape
    S = k.shape[-2]
    parts: list[AttentionStatistics] = []
    received = upcast(k).new_zeros(B, H, S) if per_key else None
    lookers = torch.zeros(1, 1, S, device=q.device) if per_key else None
    everything = T == 1 and not per_key and sees_everything(terms)  # a token that is generated
    for rows, here, logits, seen in _logits_by_rows(q, k, terms):
        part, p = _of_rows(logits, None if everything else seen, here, rows, T, extended)
        parts.append(part)
        if received is not None and lookers is not None:
            end = p.shape[-1]
            received[:, :, :end] += p.sum(2)
            lookers = lookers + torch.nn.functional.pad(seen.sum(2), (0, S - end))
    columns = {
        f.name: _concatenated([getattr(part, f.name) for part in parts])
        for f in fields(AttentionStatistics)
        if f.name != "received"
    }
    if received is not None and lookers is not None:
        received = received / lookers.clamp_min(1)
    return AttentionStatistics(**columns, received=received)  # type: ignore[arg-type]


def sees_everything(terms: Terms) -> bool:
    """Whether the last query sees all keys."""
    return not terms.has_masks and terms.window is None and terms.positions is None


def _of_rows(
    logits: Tensor, seen: Tensor | None, terms: Terms, rows: slice, T: int, extended: bool
) -> tuple[AttentionStatistics, Tensor]:
    """With y the logits relative to their largest and Z = sum exp y: H = mass log Z - sum exp(y) y / Z, which loses no
    digits at logits of 1e4. `logits` is used up. Without `seen` all keys are.
    """
    if seen is not None and terms.bias is not None:  # of -inf is a mask, also where a soft-cap follows
        seen = seen & ((terms.bias if terms.bias.shape[-2] == 1 else terms.bias[..., rows, :]) > -torch.inf)
    hidden = None if seen is None else ~seen
    top = (logits if hidden is None else logits.masked_fill_(hidden, -torch.inf)).amax(-1)
    if seen is None:
        visible, base = torch.full_like(top, logits.shape[-1], dtype=torch.long), top
    else:
        visible = seen.sum(-1).expand(top.shape)
        base = torch.where(visible > 0, top, torch.zeros_like(top))
    if terms.sinks is not None:
        base = torch.maximum(base, terms.sinks.to(base).view(1, -1, 1))
    y = logits.sub_(base[..., None])
    e = (y if hidden is None else y.masked_fill_(hidden, LOWEST)).exp()
    on_keys = e.sum(-1)
    total = on_keys if terms.sinks is None else on_keys + torch.exp(terms.sinks.to(base).view(1, -1, 1) - base)
    total = total if seen is None else torch.where(visible > 0, total, torch.ones_like(total))
    mass, log_total = on_keys / total, total.log()
    entropy = mass * log_total - y.mul_(e).sum(-1) / total
    lse = base + log_total
    lse = lse if seen is None else torch.where(visible > 0, lse, torch.full_like(base, -torch.inf))
    p = e.div_(total[..., None])
    more: dict[str, Tensor] = {}
    if extended:
        distance = terms.distance(rows, T, logits.shape[-1], logits.device)
        more = {
            "sum_of_squares": torch.mul(p, p, out=y).sum(-1),
            "distance": torch.mul(p, distance.abs().to(p), out=y).sum(-1),
            "first_mass": p[..., : terms.first].sum(-1),
            "self_mass": torch.mul(p, distance == 0, out=y).sum(-1),
        }
    return AttentionStatistics(lse, entropy, top, visible, mass, **more), p


def weight_at(q: Tensor, k: Tensor, terms: Terms, index: Tensor, log_sum_exp: Tensor) -> tuple[Tensor, Tensor]:
    """Weight of one key per row, and whether the row may look at it, both (B, H, T); O(T) memory.

    The key is `index` (B or 1, T), none where that is negative.
    """
    B, H, T, _ = q.shape
    S, group = k.shape[-2], H // k.shape[1]
    index = index.expand(B, T)
    at = index.clamp(0, S - 1)
    keys = upcast(k).gather(2, at[:, None, :, None].expand(B, k.shape[1], T, k.shape[-1])).repeat_interleave(group, 1)
    logits = (upcast(q) * keys).sum(-1) * terms.scale_for(q.shape[-1])
    distance = terms.at(T, S, q.device) - at
    if terms.alibi is not None:
        logits = logits - terms.alibi.to(logits)[:, None] * distance.abs()[:, None]
    if terms.bias is not None:
        bias = _entries_at(terms.bias, at).to(logits)
        logits = logits + bias
    if terms.softcap is not None:
        logits = terms.softcap * torch.tanh(logits / terms.softcap)
    seen = (index >= 0) & (index < S)
    if terms.causal:
        seen = seen & (distance >= 0)
    if terms.window is not None:
        seen = seen & (distance.abs() < terms.window)
    if terms.padding is not None:
        seen = seen & terms.padding.gather(1, at)
    if terms.documents is not None:
        seen = seen & (terms.documents[:, terms.at(T, S, q.device)] == terms.documents.gather(1, at))
    shown = (seen[:, None] if terms.mask is None else seen[:, None] & _entries_at(terms.mask, at)).expand(logits.shape)
    if terms.bias is not None:
        shown = shown & (bias > -torch.inf)
    weight = torch.exp(logits - log_sum_exp)
    return torch.where(shown & (log_sum_exp != -torch.inf), weight, torch.zeros_like(weight)), shown


def _entries_at(x: Tensor, at: Tensor) -> Tensor:
    """Entry `at` (B, T) of every row of a mask or a bias (b, h, t, S), as (B, h, T)."""
    B, T = at.shape
    wide = x.expand(B, x.shape[1], T, x.shape[-1])
    return wide.gather(-1, at[:, None, :, None].expand(B, x.shape[1], T, 1)).squeeze(-1)


def entropy_gradient(
    q: Tensor, k: Tensor, terms: Terms, lse: Tensor, entropy: Tensor, mass: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of sum(grad * entropy): d H / d logit_j = -p_j (log p_j + 1 - mass + H), logits computed again, O(T)
    memory.
    """
    pull = 1 - mass + entropy
    return _gradient(
        q,
        k,
        terms,
        lse,
        lambda p, log_p, rows: -p * (log_p + pull[:, :, rows, None]) * grad[:, :, rows, None].to(p),
    )


def _gradient(
    q: Tensor, k: Tensor, terms: Terms, lse: Tensor, slope_of: Callable[[Tensor, Tensor, slice], Tensor]
) -> tuple[Tensor, Tensor]:
    """Gradients to q and k from the slopes of logits, which follow from the weights p, log p and the rows."""
    B, H, T, _ = q.shape
    K, S, scale = k.shape[1], k.shape[-2], terms.scale_for(q.shape[-1])
    keys = upcast(k).repeat_interleave(H // K, 1)
    dq, dk = torch.zeros_like(q, dtype=keys.dtype), torch.zeros_like(keys)
    for rows in row_chunks(B, H, T, S, q.device):
        query = upcast(q[:, :, rows])
        logits = terms.logits(query, keys, rows, T)
        seen = terms.visible(rows, T, S, q.device) & lse[:, :, rows, None].isfinite()
        log_p = logits - torch.where(lse.isfinite(), lse, torch.zeros_like(lse))[:, :, rows, None]
        p = torch.where(seen, torch.exp(log_p), torch.zeros_like(log_p))
        slope = slope_of(p, log_p, rows)
        slope = torch.where(p > 0, slope, torch.zeros_like(slope))
        if terms.softcap is not None:
            slope = slope * (1 - (logits / terms.softcap).square())
        dq[:, :, rows] = scale * (slope @ keys)
        dk += scale * (slope.mT @ query)
    return dq.to(q.dtype), dk.unflatten(1, (K, -1)).sum(2).to(k.dtype)


def weights_gradient(q: Tensor, k: Tensor, terms: Terms, lse: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of a function of rows whose slope at logit j is weight * p_j, such as their log-sum-exp (weight 1)."""
    return _gradient(q, k, terms, lse, lambda p, log_p, rows: p * weight[:, :, rows, None].to(p))


def _concatenated(parts: list[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    if len(present) < 2:  # all rows at once, as those of a token that is generated
        return present[0] if present else None
    return torch.cat(present, 2)
