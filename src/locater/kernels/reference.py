"""Attention statistics in plain PyTorch, some rows at a time: any device, any mask, the judge of the Triton kernels."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from locater.kernels.terms import AttentionStatistics, Terms
from locater.spectrum import upcast

ELEMENTS = 1 << 24  # logits held at a time


def row_chunks(B: int, H: int, T: int, S: int) -> list[slice]:
    size = max(1, ELEMENTS // max(1, B * H * S))
    return [slice(start, min(start + size, T)) for start in range(0, T, size)]


def statistics(q: Tensor, k: Tensor, terms: Terms, extended: bool, per_key: bool) -> AttentionStatistics:
    """q (B, H, T, D), k (B, K, S, D) with H a multiple of K."""
    B, H, T, _ = q.shape
    S = k.shape[-2]
    keys = upcast(k).repeat_interleave(H // k.shape[1], 1)
    parts: list[AttentionStatistics] = []
    received = keys.new_zeros(B, H, S) if per_key else None
    lookers = keys.new_zeros(1, 1, S) if per_key else None
    for rows in row_chunks(B, H, T, S):
        logits = terms.logits(upcast(q[:, :, rows]), keys, rows, T)
        seen = terms.visible(rows, T, S, q.device)
        kept, p = _of_rows(logits, seen, terms, rows, T, extended)
        parts.append(kept)
        if received is not None and lookers is not None:
            received += p.sum(2)
            lookers = lookers + seen.sum(2)
    found = {f.name: _joined([getattr(part, f.name) for part in parts]) for f in fields(AttentionStatistics) if f.name != "received"}
    if received is not None and lookers is not None:
        received = received / lookers.clamp_min(1)
    return AttentionStatistics(**found, received=received)  # type: ignore[arg-type]


def _of_rows(logits: Tensor, seen: Tensor, terms: Terms, rows: slice, T: int, extended: bool) -> tuple[AttentionStatistics, Tensor]:
    seen = seen & (logits > -torch.inf)  # a bias of -inf is a mask
    shown = seen.any(-1)
    masked = logits.masked_fill(~seen, -torch.inf)
    top = masked.amax(-1)
    base = torch.where(shown, top, torch.zeros_like(top))
    if terms.sinks is not None:
        base = torch.maximum(base, terms.sinks.to(base).view(1, -1, 1))
    y = masked - base[..., None]  # relative to the largest: at logits of 1e4 float32 has no digits left for log p
    total = y.exp().sum(-1)
    if terms.sinks is not None:
        total = total + torch.exp(terms.sinks.to(base).view(1, -1, 1) - base)
    log_total = torch.where(shown, total, torch.ones_like(total)).log()
    p = torch.exp(y - log_total[..., None])
    entropy = -torch.where(p > 0, p * (y - log_total[..., None]), torch.zeros_like(p)).sum(-1)
    lse = torch.where(shown, base + log_total, torch.full_like(base, -torch.inf))
    more: dict[str, Tensor] = {}
    if extended:
        distance = terms.distance(rows, T, logits.shape[-1], logits.device)
        more = {
            "sum_of_squares": p.square().sum(-1),
            "distance": (p * distance.abs()).sum(-1),
            "first_mass": p[..., : terms.first].sum(-1),
            "self_mass": (p * (distance == 0)).sum(-1),
        }
    visible = seen.sum(-1).expand(lse.shape)
    return AttentionStatistics(lse, entropy, top, visible, p.sum(-1), **more), p


def entropy_gradient(q: Tensor, k: Tensor, terms: Terms, lse: Tensor, entropy: Tensor, mass: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of sum(grad * entropy): d H / d logit_j = -p_j (log p_j + 1 - mass + H), logits computed again, O(T) memory."""
    B, H, T, _ = q.shape
    K, S = k.shape[1], k.shape[-2]
    keys = upcast(k).repeat_interleave(H // K, 1)
    dq, dk = torch.zeros_like(q, dtype=keys.dtype), torch.zeros_like(keys)
    for rows in row_chunks(B, H, T, S):
        query = upcast(q[:, :, rows])
        logits = terms.logits(query, keys, rows, T)
        seen = terms.visible(rows, T, S, q.device) & lse[:, :, rows, None].isfinite()
        log_p = logits - torch.where(lse.isfinite(), lse, torch.zeros_like(lse))[:, :, rows, None]
        p = torch.where(seen, torch.exp(log_p), torch.zeros_like(log_p))
        slope = -p * (log_p + (1 - mass + entropy)[:, :, rows, None]) * grad[:, :, rows, None].to(p)
        slope = torch.where(p > 0, slope, torch.zeros_like(slope))
        if terms.softcap is not None:
            slope = slope * (1 - (logits / terms.softcap).square())
        dq[:, :, rows] = terms.scale * (slope @ keys)
        dk += terms.scale * (slope.mT @ query)
    return dq.to(q.dtype), dk.unflatten(1, (K, -1)).sum(2).to(k.dtype)


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    held = [part for part in parts if part is not None]
    return torch.cat(held, 2) if held else None
