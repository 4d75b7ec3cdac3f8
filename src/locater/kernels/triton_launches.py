"""Launches of the Triton kernels of attention statistics: arguments, tile sizes, and results as records."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from locater.kernels.terms import AttentionStatistics, Terms
from locater.kernels.triton_gradients import columns_kernel, query_gradient_kernel
from locater.kernels.triton_kept_kernels import LAUNCHES, keep_kernel, launch_arguments, tensor_layout
from locater.kernels.triton_key_parts import count_parts, statistics_in_parts
from locater.kernels.triton_parts import EMPTY, LOG2E
from locater.kernels.triton_rows import rows_kernel
from locater.torch_private import launch_compiled


def statistics(
    q: Tensor, k: Tensor, terms: Terms, extended: bool, per_key: bool, rows: Tensor | None = None
) -> AttentionStatistics:
    """q (B, H, T, D), k (B, K, S, D); float32 or half precision, sums in float32. Of all rows, or of those at `rows`
    (R,), which rise; `per_key` is for all of them.
    """
    q, terms = _with_positive_scale(q, terms)
    out, count = rows_of_statistics(q, k, terms, extended, per_key, rows)
    B, H, T, _ = q.shape
    if count is None:
        visible = visible_counts(terms, T, k.shape[-2], q.device)
        count = (visible if rows is None else visible[rows]).expand(B, H, out.shape[-1])
    lse, entropy, top, mass = out[:4].unbind()
    more = out[4:8].unbind() if extended else (None,) * 4
    received = _received_weights(q, k, terms, out[8], out[9]) if per_key else None
    return AttentionStatistics(lse, entropy, top, count, mass, *more, received)


def rows_of_statistics(
    q: Tensor,
    k: Tensor,
    terms: Terms,
    extended: bool,
    per_key: bool,
    rows: Tensor | None = None,
    spans: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The numbers of each row (4, 8 or 10, B, H, R) in the order of `AttentionStatistics`, and how many keys it sees
    (B, H, R); None where that follows from its position.

    `spans` of a mask that is the only one: first key and end (2, B, T) of what each row sees, and whether that is all
    that the mask says. It stays on the device, so both kernels are launched, and one of them has nothing to do.
    """
    return rows_of_prepared(*prepare_call(q, k, terms), extended, per_key, rows, spans)


def prepare_call(q: Tensor, k: Tensor, terms: Terms) -> tuple[Tensor, Tensor, Terms]:
    """A call as the kernels of rows read it."""
    q, terms = _with_positive_scale(q, terms)
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    return q, k, _prepare_terms(terms)


def rows_of_prepared(
    q: Tensor,
    k: Tensor,
    ready: Terms,
    extended: bool,
    per_key: bool,
    rows: Tensor | None,
    spans: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor | None]:
    """`rows_of_statistics` of a call that `prepare_call` returned."""
    B, H, T, _ = q.shape
    number = T if rows is None else len(rows)
    rows = None if rows is None else rows.contiguous()
    out = torch.empty(10 if per_key else 8 if extended else 4, B, H, number, dtype=torch.float32, device=q.device)
    counted = _generic(ready) or ready.bias is not None
    count = torch.empty(B, H, number, dtype=torch.int32, device=q.device) if counted else None
    if not number:
        return out, count
    parts = count_parts(q, k) if rows is None else 1
    if parts > 1:
        statistics_in_parts(q, k, ready, parts, out, count, extended, per_key)
    elif spans is None:
        _launch(q, k, ready, out, count, rows, extended, per_key)
    else:
        _launch(q, k, replace(ready, mask=None), out, count, rows, extended, per_key, spans, 1)
        _launch(q, k, ready, out, count, rows, extended, per_key, spans, 2)
    return out, count


def _launch(
    q: Tensor,
    k: Tensor,
    terms: Terms,
    out: Tensor,
    count: Tensor | None,
    rows: Tensor | None,
    extended: bool,
    per_key: bool,
    spans: tuple[Tensor, Tensor] | None = None,
    span: int = 0,
) -> None:
    """`rows_kernel`, by Triton's own dispatch the first time."""
    (B, H, _, D), S, number = q.shape, k.shape[-2], out.shape[-1]
    ends = (None, None) if spans is None else spans
    tensors = (terms.documents, terms.padding, terms.mask, terms.bias, terms.alibi)
    given = (q, k, out, count, terms.sinks, rows, *ends, *tensors)
    key = (terms.scale, terms.causal, terms.window, terms.softcap, terms.first, extended, per_key, span, q.device)
    key = (*key, *map(tensor_layout, given))
    if key in LAUNCHES:
        kernel, grid, rest = LAUNCHES[key]
        launch_compiled(kernel, grid, (*given, *rest))
        return
    arguments, flags = launch_arguments(q, k, terms)
    masked = any(x is not None for x in tensors[:4])
    size = _blocks(D, q.dtype, "masked" if masked else "extended" if extended else "plain", S)
    if rows is not None:
        size |= FEW_MASKED if masked else FEW
    flags |= {"SINKS": terms.sinks is not None, "EXTENDED": extended, "COUNT": count is not None, "PER_KEY": per_key}
    flags |= {"SOME": rows is not None, "SPAN": span}
    grid = (B * H * triton.cdiv(number, size["BLOCK_M"]), 1, 1)
    rest = [*arguments[len(tensors) :], terms.first, number, B * H * number]
    made = rows_kernel[grid](*given, *rest, **flags, **size)
    keep_kernel(key, rows_kernel, made, grid, rest, len(given), flags | size)


def _with_positive_scale(q: Tensor, terms: Terms) -> tuple[Tensor, Terms]:
    """The same logits by a scale above 0, which the running maximum of unscaled products needs."""
    scale = terms.scale_for(q.shape[-1])
    if scale > 0:
        return q, terms
    return -q if scale else torch.zeros_like(q), replace(terms, scale=-scale or 1.0)


def _received_weights(q: Tensor, k: Tensor, terms: Terms, base: Tensor, rest: Tensor) -> Tensor:
    B, H, T, D = q.shape
    ready, q, k = _prepare_terms(terms), *(x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    S = k.shape[-2]
    out = torch.empty(B, H, S, dtype=torch.float32, device=q.device)
    arguments, flags = launch_arguments(q, k, ready)
    size = _blocks(D, q.dtype, "received", S)
    if S:
        columns_kernel[(B * H * triton.cdiv(S, size["BLOCK_N"]),)](
            q, k, base, rest, None, out, *arguments, **flags, RECEIVED=True, **size
        )
    lookers = torch.zeros(1, 1, S, device=q.device) if _generic(terms) else _lookers(terms, T, S, q.device)
    step = max(1, (1 << 24) // max(1, S))
    for start in range(0, T if _generic(terms) else 0, step):
        lookers = lookers + terms.visible(slice(start, min(T, start + step)), T, S, q.device).sum(2)
    return out / lookers.clamp_min(1)


def entropy_gradient(
    q: Tensor, k: Tensor, terms: Terms, lse: Tensor, entropy: Tensor, mass: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of sum(grad * entropy) with respect to q and k."""
    B, H, T, D = q.shape
    K, S = k.shape[1], k.shape[-2]
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    shown = lse > -torch.inf
    base = torch.where(shown, lse * LOG2E.value, -EMPTY.value)
    pull, weight = (1 - mass + entropy) * LOG2E.value, torch.where(shown, -grad.float(), 0.0).contiguous()
    dq = torch.empty(B, H, T, D, dtype=q.dtype, device=q.device)
    # heads that share keys are added below
    dk = torch.empty(B, H, S, D, dtype=k.dtype if H == K else torch.float32, device=q.device)
    ready = _prepare_terms(terms)
    arguments, flags = launch_arguments(q, k, ready)
    size = _blocks(D, q.dtype, "queries", S)
    query_gradient_kernel[(B * H * triton.cdiv(T, size["BLOCK_M"]),)](
        q, k, base, pull, weight, dq, *arguments, **flags, **size
    )
    size = _blocks(D, q.dtype, "keys", S)
    columns_kernel[(B * H * triton.cdiv(S, size["BLOCK_N"]),)](
        q, k, base, pull, weight, dk, *arguments, **flags, RECEIVED=False, **size
    )
    return dq, dk if H == K else dk.unflatten(1, (K, -1)).sum(2).to(k.dtype)


def _generic(terms: Terms) -> bool:
    return terms.padding is not None or terms.documents is not None or terms.mask is not None


def _prepare_terms(terms: Terms) -> Terms:
    """The same terms with tensors as the kernels read them: small types, keys next to one another. A mask that is
    boolean already is not copied.
    """
    if not terms.has_masks and terms.alibi is None and terms.sinks is None:
        return terms

    def ready(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        return None if x is None else x.to(dtype).contiguous()

    def rows(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()

    return replace(
        terms,
        padding=None if terms.padding is None else terms.padding.bool().contiguous().view(torch.int8),
        documents=ready(terms.documents, torch.int32),
        mask=None if terms.mask is None else rows(terms.mask.bool().view(torch.int8)),
        bias=rows(terms.bias),
        alibi=ready(terms.alibi, torch.float32),
        sinks=None if terms.sinks is None else terms.sinks.contiguous(),
    )


Tile = tuple[int, int, int, int, int | None]  # BLOCK_M, BLOCK_N, warps, stages, most registers of a thread
TILES: dict[tuple[str, int, str], Tile] = {  # the fastest on an H200 (benchmarks/results/attention-tuning.json)
    ("half", 64, "plain"): (64, 128, 4, 2, 128),
    ("half", 64, "extended"): (128, 128, 4, 2, None),
    ("half", 64, "received"): (64, 64, 4, 3, None),
    ("half", 64, "queries"): (64, 64, 4, 3, None),
    ("half", 64, "keys"): (64, 128, 4, 2, None),
    ("half", 128, "plain"): (64, 64, 4, 2, None),
    ("half", 128, "extended"): (64, 64, 4, 2, None),
    ("half", 128, "received"): (64, 64, 4, 3, None),
    ("half", 128, "queries"): (64, 64, 4, 3, None),
    ("half", 128, "keys"): (128, 64, 4, 2, None),
    # with masks to load a thread holds more: larger tiles do not fit its registers
    ("half", 64, "masked"): (64, 32, 4, 2, None),
    ("half", 128, "masked"): (64, 32, 4, 2, None),
    ("float32", 64, "masked"): (64, 32, 4, 2, None),
    ("float32", 128, "masked"): (64, 32, 4, 2, None),
    ("float32", 128, "plain"): (64, 32, 4, 2, None),
    ("float32", 128, "extended"): (64, 32, 4, 2, None),
    ("float32", 128, "queries"): (128, 32, 8, 2, None),
    ("float32", 128, "keys"): (32, 32, 4, 3, None),
}
FEW = {"BLOCK_M": 16, "BLOCK_N": 256}  # some rows of many: more programs than heads, each with few of them
FEW_MASKED = {"BLOCK_M": 16, "BLOCK_N": 64}
LONG = 12_288  # keys from which on the tiles of LONG_TILES are faster
LONG_TILES: dict[tuple[str, int, str], Tile] = {
    ("half", 64, "plain"): (64, 128, 4, 3, None),
    ("half", 128, "plain"): (128, 128, 4, 2, None),
    ("half", 128, "extended"): (128, 128, 4, 2, None),
}


def _blocks(D: int, dtype: torch.dtype, kernel: str, length: int) -> dict[str, int]:
    """Tile sizes and launch settings."""
    wide = max(16, triton.next_power_of_2(D))
    key = ("float32" if dtype == torch.float32 else "half", max(wide, 64), kernel)
    tile = TILES.get(key, (64, 64, 4, 2, None) if wide <= 128 else (64, 32, 4, 2, None))
    m, n, warps, stages, registers = LONG_TILES.get(key, tile) if length >= LONG else tile
    size = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_D": wide, "num_warps": warps, "num_stages": stages}
    return size if registers is None else size | {"maxnreg": registers}


def visible_counts(terms: Terms, T: int, S: int, device: torch.device) -> Tensor:
    """Keys in view of each row where only causal and window masks act."""
    if terms.window is None:
        least = S - T + 1 if terms.causal else S
        return torch.arange(least, S + 1, dtype=torch.int32, device=device).expand(T)
    at = torch.arange(S - T, S, dtype=torch.int32, device=device)
    high = (at + (1 if terms.causal else terms.window)).clamp_max(S)
    return (high - (at - terms.window + 1).clamp_min(0)).clamp_min(0)


def _lookers(terms: Terms, T: int, S: int, device: torch.device) -> Tensor:
    """Rows that have each key in view, likewise."""
    j = torch.arange(S, dtype=torch.int32, device=device)
    low, high = torch.full_like(j, S - T), torch.full_like(j, S)
    if terms.causal:
        low = torch.maximum(low, j)
    if terms.window is not None:
        low = torch.maximum(low, j - terms.window + 1)
        high = torch.minimum(high, j + terms.window)
    return (high - low).clamp_min(0)
