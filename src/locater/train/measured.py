"""A trained model measured as it acts, whatever it attends by: its maps written out on a few sequences, and its stream
by half-blocks.

`observe` reads softmax attention without building maps; here they are built, so that every mechanism is asked the same
questions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.attention import mechanism
from locater.attention.modules import Gated, Multiformer
from locater.attention.multiformer import head_relevance
from locater.measures import massive_activations, rank_residual, token_cosine
from locater.models.transformer import Attention, Transformer, attended

SEQUENCES, TOKENS = 4, 256  # that are looked at
SINK = 0.3  # mean share of what queries give that makes a key a sink

Maps = Float[Tensor, "B H T S"]


@torch.no_grad()
def measure(model: Transformer, inputs: Tensor) -> dict[str, Any]:
    """Means over heads, sequences and rows; None where a number does not exist, as entropy where weights are negative.

    entropy, entropy_share of log n   rows made to sum to 1, n the keys in view (rows that see one key are left out of the share)
    row_mass                          sum of a row
    first_mass, first_weight          share of a row's absolute mass that is on the first key; the absolute weight that is
    first_value                       length of the first key's value over the mean length of the others'
    sink_rate, sink_ratio             heads in which the first key, or some key of the first half, is given more than 0.3 of rows that are
                                      made to sum to 1, mean over queries and sequences
    gap                               1 - s2 / s1 of a map's singular values; stable_rank is sum s^2 / s1^2
    column_least, explained_away      the least sum of a column; keys whose column sums to less than 1 / S
    relevance                         by layer, each head's share in what attention adds
    gate                              mean of gates, where there are any
    halves                            the stream at first, after attention, after the MLP, ...: largest and median |h|, residual, cosines
    spike, spike_ratio                the largest |h| of any half, and the largest ratio of it to the median
    """
    inputs = inputs[:SEQUENCES] if model.shape.image is not None else inputs[:SEQUENCES, :TOKENS]
    x, turn = model.model.embedded(inputs)
    halves, maps, found = [_half(x)], list[dict[str, Any]](), list[list[float]]()
    block: Any
    for block in model.model.layers:
        part, read = block.self_attn, block.read(x)
        q, k, v = part.operands(read, turn)
        more = {"gate": gate_of(part, q, read), "first_value": _first_of(v)}
        maps.append(of_map(map_of(part, q, k, read), part.causal, _kind(part)) | more)
        found.append(head_relevance(attended(part, q, k, v, read, part.causal), part.o_proj.weight).tolist())
        x = block.after_attention(x, turn)
        halves.append(_half(x))
        if block.mlp is not None:
            x = block.after_mlp(x)
            halves.append(_half(x))
    means = {name: _mean([held[name] for held in maps]) for name in maps[0]}
    return means | {
        "relevance": found, "halves": halves, "spike": _most(half["largest"] for half in halves),
        "spike_ratio": _most(half["ratio"] for half in halves),
    }  # fmt: skip


def map_of(part: Attention, q: Tensor, k: Tensor, x: Tensor) -> Maps:
    """The map as it acts. Where each channel has its own, that of the mean over channels: of gates, and of kernels on
    values.
    """
    held = part.mechanism
    if held is None or (isinstance(held, Gated) and held.additive):
        return mechanism("softmax" if held is not None else part.attention).map(q, k, causal=part.causal)
    options = held.options(q, k, x)
    if isinstance(held, Gated):
        name = held.option
        if name in ("gate", "value_gate"):
            options[name] = options[name].mean(-1, keepdim=True)
    if isinstance(held, Multiformer) and options.get("value_kernel") is not None:
        options["value_kernel"] = options["value_kernel"].mean(-1, keepdim=True)
        options.pop("value_bias", None)
    return mechanism(part.attention).map(q, k, causal=part.causal, **options)


def gate_of(part: Attention, q: Tensor, x: Tensor) -> float | None:
    """The mean of a layer's gates."""
    if not isinstance(part.mechanism, Gated) or part.mechanism.additive:
        return None
    return float(part.mechanism.gate(x if part.mechanism.gate.from_input else q).mean())


def of_map(p: Maps, causal: bool, kind: str = "stochastic") -> dict[str, float | None]:
    """Numbers of one layer's maps, means over heads.

    >>> found = of_map(torch.full((1, 1, 4, 4), 0.25), causal=False)
    >>> found["entropy_share"], found["row_mass"], round(found["gap"], 9), found["explained_away"]
    (1.0, 1.0, 1.0, 0.0)
    """
    p = p.double()
    T, S = p.shape[-2:]
    size = p.abs()
    share = size / size.sum(-1, keepdim=True).clamp_min(1e-300)
    # keys in view
    seen = torch.arange(S - T + 1, S + 1, device=p.device) if causal else torch.full((T,), S, device=p.device)
    # (B, H, S)
    received = share.sum(-2) / (torch.clamp(torch.arange(S, 0, -1, device=p.device), max=T) if causal else T)
    sinks = received.mean(0) > SINK  # (H, S)
    values = torch.linalg.svdvals(p[0])  # (H, S): of one sequence, since this is what takes long
    columns = p.sum(-2)
    found: dict[str, float | None] = {
        "row_mass": float(p.sum(-1).mean()),
        "first_mass": float(share[..., 0].mean()),
        "first_weight": float(size[..., 0].mean()),
        "sink_rate": float(sinks[:, 0].double().mean()),
        "sink_ratio": float(sinks[:, : max(1, S // 2)].any(-1).double().mean()),
        "gap": float((1 - values[:, 1] / values[:, 0].clamp_min(1e-300)).mean()) if min(T, S) > 1 else None,
        "stable_rank": float((values.square().sum(-1) / values[:, 0].square().clamp_min(1e-300)).mean()),
        "column_least": float(columns.amin(-1).mean()),
        "explained_away": float((columns < (1 - 1e-6) / S).double().mean()),
    }
    if kind == "signed":
        return {"entropy": None, "entropy_share": None, **found}
    entropy = -torch.special.xlogy(share, share).sum(-1)  # (B, H, T)
    several = seen > 1
    of_most = (entropy / seen.double().log())[..., several].mean() if bool(several.any()) else None
    return {"entropy": float(entropy.mean()), "entropy_share": None if of_most is None else float(of_most), **found}


def _first_of(v: Tensor) -> float | None:
    lengths = v.double().norm(dim=-1)
    found = (lengths[..., 0] / lengths[..., 1:].mean(-1)).mean()
    return float(found) if bool(found.isfinite()) else None  # not of one token, nor of values that are zero


def _half(x: Tensor) -> dict[str, float | None]:
    massive = massive_activations(x)
    top, median = massive.top.max(), massive.median.mean()
    numbers = {
        "largest": top, "median": median, "ratio": top / median, "residual": rank_residual(x).mean(), "cosine": token_cosine(x).mean(),
        "centred_cosine": token_cosine(x, centred=True).mean(),
    }  # fmt: skip
    return {name: float(value) if bool(value.isfinite()) else None for name, value in numbers.items()}


def _most(values: Iterable[float | None]) -> float | None:
    return max((x for x in values if x is not None), default=None)


def _kind(part: Attention) -> str:
    return mechanism(part.attention).kind


def _mean(values: list[Any]) -> float | None:
    """Over the layers that have one; None where none has."""
    known = [float(x) for x in values if x is not None]
    return sum(known) / len(known) if known else None
