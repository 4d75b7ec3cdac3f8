"""What is measured of a model that is trained: its attention maps and the residual stream, with any attention mechanism,
and which layer a run diverged in.

`observe` reads softmax attention without building its maps. Here they are built, on a few sequences, so that all
mechanisms can be compared by the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.measures import massive_activations, rank_residual, token_cosine
from locater.observing import observe
from locater_lab.mechanisms import mechanism
from locater_lab.mechanisms.modules import GatedAttention, MultiformerAttention
from locater_lab.mechanisms.multiformer import head_relevance
from locater_lab.mechanisms.registry import why_unmeasurable
from locater_lab.mechanisms.swap import acting_mechanism
from locater_lab.models.transformer import Attention, Transformer, attend_by_mechanism
from locater_lab.train.batches import Batch

SEQUENCES, TOKENS = 4, 256  # how many sequences are measured, and how many tokens of each
SINK = 0.3  # a key is a sink if it gets more than this share of its queries' weight on average

Maps = Float[Tensor, "B H T S"]


@torch.no_grad()
def measure(model: Transformer, inputs: Tensor) -> dict[str, Any]:
    """Means over heads, sequences and rows. A number that does not exist, such as the entropy of negative weights, is
    None.

    entropy         of rows normalised to sum to 1
    entropy_share   the same over log n, n the keys in view; rows that see one key are left out
    row_mass        sum of a row
    first_mass      share of a row's absolute mass on the first key
    first_weight    absolute weight on the first key
    first_value     length of the first key's value over the mean length of the others
    sink_rate       share of heads in which the first key is a sink: it gets more than 0.3 of normalised rows, mean over
                    queries and sequences
    sink_ratio      share of heads in which some key of the first half is one
    gap             1 - s2 / s1 of a map's singular values
    stable_rank     sum s^2 / s1^2 of them
    column_least    the least sum of a column
    explained_away  share of keys whose column sums to less than 1 / S
    relevance       each head's share of the output of attention, by layer
    gate            mean of gates, where there are any
    halves          the residual stream at the start and after each attention and MLP: largest and median |h|, rank
                    residual, cosines
    spike           the largest |h| of any half
    spike_ratio     the largest ratio of largest to median |h|
    """
    inputs = inputs[:SEQUENCES] if model.shape.image is not None else inputs[:SEQUENCES, :TOKENS]
    x, rotation = model.model.embed(inputs)
    halves, maps, relevance = [_stream_numbers(x)], list[dict[str, Any]](), list[list[float]]()
    block: Any
    for block in model.model.layers:
        attention, normed = block.self_attn, block.read(x)
        q, k, v = attention.operands(normed, rotation)
        more = {"gate": mean_gate(attention, q, normed), "first_value": _first_value_ratio(v)}
        maps.append(map_numbers(attention_map(attention, q, k, normed), attention.causal, _kind(attention)) | more)
        outputs = attend_by_mechanism(attention, q, k, v, normed, attention.causal)
        relevance.append(head_relevance(outputs, attention.o_proj.weight).tolist())
        x = block.after_attention(x, rotation)
        halves.append(_stream_numbers(x))
        if block.mlp is not None:
            x = block.after_mlp(x)
            halves.append(_stream_numbers(x))
    means = {name: _mean([numbers[name] for numbers in maps]) for name in maps[0]}
    return means | {
        "relevance": relevance,
        "halves": halves,
        "spike": _largest_known(half["largest"] for half in halves),
        "spike_ratio": _largest_known(half["ratio"] for half in halves),
    }


def attention_map(attention: Attention, q: Tensor, k: Tensor, x: Tensor) -> Maps:
    """The map that mixes the values. Where gates or kernels give each channel a map of its own, they are averaged over
    channels first.
    """
    module = attention.mechanism
    if module is None or (isinstance(module, GatedAttention) and module.additive):
        name = "softmax" if module is not None else attention.attention
        return mechanism(name).map(q, k, causal=attention.causal)
    options = module.options(q, k, x)
    if isinstance(module, GatedAttention) and module.option in ("gate", "value_gate"):
        options[module.option] = options[module.option].mean(-1, keepdim=True)
    if isinstance(module, MultiformerAttention) and options.get("value_kernel") is not None:
        options["value_kernel"] = options["value_kernel"].mean(-1, keepdim=True)
        options.pop("value_bias", None)
    return mechanism(attention.attention).map(q, k, causal=attention.causal, **options)


def mean_gate(attention: Attention, q: Tensor, x: Tensor) -> float | None:
    """The mean of a layer's gates; None where it has none."""
    module = attention.mechanism
    if not isinstance(module, GatedAttention) or module.additive:
        return None
    return float(module.gate(x if module.gate.from_input else q).mean())


def map_numbers(p: Maps, causal: bool, kind: str = "stochastic") -> dict[str, float | None]:
    """The numbers of one layer's maps, means over heads.

    >>> numbers = map_numbers(torch.full((1, 1, 4, 4), 0.25), causal=False)
    >>> numbers["entropy_share"], numbers["row_mass"], round(numbers["gap"], 9), numbers["explained_away"]
    (1.0, 1.0, 1.0, 0.0)
    """
    p = p.double()
    T, S = p.shape[-2:]
    size = p.abs()
    share = size / size.sum(-1, keepdim=True).clamp_min(1e-300)
    # keys in view of each row
    seen = torch.arange(S - T + 1, S + 1, device=p.device) if causal else torch.full((T,), S, device=p.device)
    # (B, H, S): mean share that a key receives from the queries that see it
    received = share.sum(-2) / (torch.clamp(torch.arange(S, 0, -1, device=p.device), max=T) if causal else T)
    sinks = received.mean(0) > SINK  # (H, S)
    values = torch.linalg.svdvals(p[0])  # (H, S): of one sequence, since it is slow
    columns = p.sum(-2)
    numbers: dict[str, float | None] = {
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
        return {"entropy": None, "entropy_share": None, **numbers}
    entropy = -torch.special.xlogy(share, share).sum(-1)  # (B, H, T)
    several = seen > 1
    entropy_share = float((entropy / seen.double().log())[..., several].mean()) if bool(several.any()) else None
    return {"entropy": float(entropy.mean()), "entropy_share": entropy_share, **numbers}


def _first_value_ratio(v: Tensor) -> float | None:
    """Length of the first value over the mean length of the others; None where there are no others, or all are zero."""
    lengths = v.double().norm(dim=-1)
    ratio = (lengths[..., 0] / lengths[..., 1:].mean(-1)).mean()
    return float(ratio) if bool(ratio.isfinite()) else None


def _stream_numbers(x: Tensor) -> dict[str, float | None]:
    """The numbers of the residual stream (B, T, d) at one point."""
    massive = massive_activations(x)
    top, median = massive.top.max(), massive.median.mean()
    numbers = {
        "largest": top,
        "median": median,
        "ratio": top / median,
        "residual": rank_residual(x).mean(),
        "cosine": token_cosine(x).mean(),
        "centred_cosine": token_cosine(x, centred=True).mean(),
    }
    return {name: float(value) if bool(value.isfinite()) else None for name, value in numbers.items()}


def _largest_known(values: Iterable[float | None]) -> float | None:
    return max((x for x in values if x is not None), default=None)


def _kind(attention: Attention) -> str:
    return mechanism(attention.attention).kind


def _mean(values: list[Any]) -> float | None:
    """Over the values that are not None; None where there are none."""
    known = [float(x) for x in values if x is not None]
    return sum(known) / len(known) if known else None


# ---- Whether heads can be measured, and which layer to blame when a run diverges ----


def why_unread(model: Transformer) -> str | None:
    """Why the heads of a model, with its controls attached, cannot be measured; None where they can."""
    reasons = (
        why_unmeasurable(acting_mechanism(module)) for module in model.modules() if isinstance(module, Attention)
    )
    return next((reason for reason in reasons if reason is not None), None)


@torch.no_grad()
def find_diverged_layer(model: Transformer, batches: list[Batch]) -> str:
    """Names the first layer whose logits are not finite on these batches; where all are finite, the layer with the
    largest.
    """
    if why_unread(model) is not None:
        return _first_output(model, batches)
    with observe(model) as seen:
        for inputs, _ in batches:
            model(inputs)
    for row in seen.rows:
        if "nonfinite" in row.flags:
            return f"the logits of {row.name} went first (head {row.head})"
    top = max(seen.rows, key=lambda row: row.max_logit or -math.inf)
    return f"all attention logits are finite, the largest {top.max_logit:.4g} in {top.name} head {top.head}"


def _first_output(model: Transformer, batches: list[Batch]) -> str:
    """The same for attention without logits to measure: names the first layer whose output is not finite."""
    wrong: list[str] = []
    hooks = [
        module.register_forward_hook(
            lambda *call, name=name: None if bool(call[-1].isfinite().all()) else wrong.append(name)
        )
        for name, module in model.named_modules()
        if isinstance(module, Attention)
    ]
    try:
        for inputs, _ in batches:
            model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return f"the outputs of {wrong[0]} went first" if wrong else "all outputs of attention are finite"
