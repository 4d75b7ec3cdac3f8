"""Linear attention and its state: as a recurrence (study a), and what a state of fixed size can store (study b).

**Recurrences**, token by token, against the package's chunks and sums:

    (a) S_t = S_{t-1} + phi(k_t) v_t^T, z_t = z_{t-1} + phi(k_t), o_t = S_t^T phi(q_t) / z_t.phi(q_t), phi = elu + 1
    (b) S_t = S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T, o_t = S_t q_t, |k_t| = 1
    (c) M <- a_t M, u = b_t (v_t - M^T k_t), M <- M + k_t u^T, o_t = M^T q_t / sqrt(d)
The theorem is about all such recurrences: whatever came before a token is known to it through one state of fixed size.

**Recall.** Pairs of keys and values are written one after the other, then queried.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms import mechanism

# ---- a: linear attention as a recurrence ----


TOKENS, KEY_SIZE, VALUE_SIZE = 150, 8, 5  # more tokens than two of the package's chunks
HEADS, FEW = 4, 2
EXACT = "none: exact"

RECURRENCE_CLAIMS = (
    Claim(
        "a1",
        "Kernel linear attention is the recurrence (a)",
        "largest difference of `linear` from the loop over tokens, grouped heads",
        "at most",
        1e-12,
        by="ours",
    ),
    Claim(
        "a2",
        "DeltaNet is the recurrence (b)",
        "largest difference of `delta` from the loop over tokens, grouped heads",
        "at most",
        1e-12,
        by="ours",
    ),
    Claim(
        "a3",
        "Gated DeltaNet is the recurrence (c)",
        "largest difference of `gated_delta` from the loop over tokens, grouped heads",
        "at most",
        1e-12,
        by="ours",
    ),
    Claim(
        "a4",
        "The correction form (c) and the form with (I - b k k^T) are the same recurrence",
        "largest difference of the two loops, with decay",
        "at most",
        1e-12,
        by="ours",
    ),
    Claim(
        "a5",
        "Softmax attention is no such recurrence of this size: its outputs need more than the state could tell apart",
        "rank of the map from values of the past to outputs of the future, over the size of a state",
        "at least",
        2.0,
        by="ours",
    ),
)


def draw_operands(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    q, k, v = draw(1, HEADS, TOKENS, KEY_SIZE), draw(1, FEW, TOKENS, KEY_SIZE), draw(1, FEW, TOKENS, VALUE_SIZE)
    return {
        "q": q,
        "k": k,
        "v": v,
        "beta": draw(1, FEW, TOKENS).sigmoid(),
        "log_decay": -0.1 * draw(1, FEW, TOKENS).exp(),
    }


def kernel_loop(
    q: Float[Tensor, "T d"], k: Float[Tensor, "T d"], v: Float[Tensor, "T e"], **_: Tensor
) -> Float[Tensor, "T e"]:
    """(a)."""
    q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    total, weight, out = k.new_zeros(k.shape[1], v.shape[1]), k.new_zeros(k.shape[1]), []
    for t in range(len(k)):
        total, weight = total + torch.outer(k[t], v[t]), weight + k[t]
        out.append(total.mT @ q[t] / (weight @ q[t]))
    return torch.stack(out)


def erasing_loop(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """(b), with decay where it is given: the state times (I - b k k^T)."""
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    state, out, eye = k.new_zeros(v.shape[1], k.shape[1]), [], torch.eye(k.shape[1], dtype=k.dtype)
    for t in range(len(k)):
        decay = 1.0 if log_decay is None else log_decay[t].exp()
        state = decay * state @ (eye - beta[t] * torch.outer(k[t], k[t])) + beta[t] * torch.outer(v[t], k[t])
        out.append(scale * state @ q[t])
    return torch.stack(out)


def correcting_loop(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, scale: float = 1.0) -> Tensor:
    """(c)."""
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    memory, out = k.new_zeros(k.shape[1], v.shape[1]), []
    for t in range(len(k)):
        memory = log_decay[t].exp() * memory
        memory = memory + torch.outer(k[t], beta[t] * (v[t] - memory.mT @ k[t]))
        out.append(scale * memory.mT @ q[t])
    return torch.stack(out)


def mechanism_difference(
    name: str, loop: Callable[..., Tensor], options: tuple[str, ...], scale: float | None = None
) -> float:
    """Of the package's mechanism from a loop, query head by query head."""
    tensors = draw_operands()
    scaling: dict[str, Any] = {} if scale is None else {"scale": scale}
    extra: dict[str, Any] = {n: tensors[n] for n in options}
    package = mechanism(name)(tensors["q"], tensors["k"], tensors["v"], causal=True, **extra, **scaling)[0]
    worst = 0.0
    for h in range(HEADS):
        kv_head = h // (HEADS // FEW)
        q, k, v = tensors["q"][0, h], tensors["k"][0, kv_head], tensors["v"][0, kv_head]
        expected = loop(q, k, v, **{n: tensors[n][0, kv_head] for n in options}, **scaling)
        worst = max(worst, float((package[h] - expected).abs().max()))
    return worst


def rank_across(name: str, *options: str, cut: int = TOKENS // 2, sharp: float = 8.0) -> int:
    """Rank of the map's block from keys before `cut` to queries after it: what the past can tell the future, per
    channel of values.

    For a recurrence with a state of d rows it is at most d.
    """
    tensors = draw_operands(1)
    extra: dict[str, Any] = {n: tensors[n] for n in options}
    weights = mechanism(name).map(sharp * tensors["q"][:, :FEW], tensors["k"], causal=True, **extra)[0, 0]
    return int(torch.linalg.matrix_rank(weights[cut:, :cut], rtol=1e-10))


def measure_recurrence(setting: Setting) -> Results:
    """Each mechanism against its loop, and the rank of what passes from the first half of the tokens to the second."""
    tensors = draw_operands()
    q, k, v, beta, decay = (tensors[n][0, 0] for n in ("q", "k", "v", "beta", "log_decay"))
    ranks = {
        "linear": rank_across("linear"),
        "delta": rank_across("delta", "beta"),
        "gated_delta": rank_across("gated_delta", "beta", "log_decay"),
        "softmax": rank_across("softmax"),
    }
    values = {
        "a1": mechanism_difference("linear", kernel_loop, ()),
        "a2": mechanism_difference("delta", erasing_loop, ("beta",)),
        "a3": mechanism_difference("gated_delta", correcting_loop, ("beta", "log_decay"), KEY_SIZE**-0.5),
        "a4": float((erasing_loop(q, k, v, beta, decay) - correcting_loop(q, k, v, beta, decay)).abs().max()),
        "a5": ranks["softmax"] / KEY_SIZE,
    }
    measured = {key: Measurement(value, 0.0, EXACT) for key, value in values.items()}
    return Results(measured, {"state_ranks": {"ranks": ranks, "size": KEY_SIZE, "tokens": TOKENS}})


RECURRENCE_STUDY = Study("linear attention as a recurrence", RECURRENCE_CLAIMS, measure_recurrence)


# ---- b: what a state can hold ----


KEY_CHANNELS = 32  # d_k, of a key
VALUE_CHANNELS = 64  # of a value
LONG_KEY = 64.0  # of the keys of `linear`: its features tell short ones hardly apart
SHARP = 60.0  # scale of softmax logits, keys of length one
DECAY = -0.01  # log of the factor on the memory at each token, for gated_delta
LOADS = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0)  # pairs / d_k
SEEDS = {True: 8, False: 16}
ADDING = "adding v k^T"
NAMES = ("softmax", "delta", "gated_delta", "linear", ADDING)

RECALL_CLAIMS = (
    Claim(
        "b1",
        "DeltaNet recalls d_k pairs with orthonormal keys exactly",
        "largest error of a recalled entry, d_k pairs",
        "at most",
        1e-12,
        by="ours",
    ),
    Claim(
        "b2",
        "It replaces exactly: a key written again gives its new value, and the others keep theirs",
        "largest error of a recalled entry after half of the keys are written again",
        "at most",
        1e-12,
        by="ours",
    ),
    Claim(
        "b3",
        "Plain linear attention recalls up to d_k pairs",
        f"share of pairs recalled by `linear`, d_k pairs, random keys of length {LONG_KEY:g}; a value counts as recalled "
        "where it is the nearest of all",
        "at least",
        0.9,
        by="ours",
    ),
    Claim(
        "b4",
        "and fails past d_k, features or none",
        "share of pairs recalled, 2 d_k pairs, the larger of `linear` and of adding v k^T alone",
        "at most",
        0.9,
        by="ours",
    ),
    Claim(
        "b5",
        "No state of d_k rows can do better than 1 - d_k / n of the squared error on n orthonormal values",
        "least of (squared error) / (1 - d_k / n) over recurrences, n from 1.5 to 8 d_k",
        "at least",
        1.0,
        by="ours",
    ),
    Claim(
        "b6",
        "Past d_k, correcting the state (`delta`) stores more than adding to it",
        "share of pairs recalled by `delta`, every key written in full, less that of adding, 2 d_k pairs",
        "at least",
        0.0,
        by="ours",
    ),
    Claim(
        "b7",
        "Full attention knows no such bound",
        "share of pairs recalled by sharp softmax, 8 d_k pairs",
        "at least",
        0.99,
        by="ours",
    ),
)


def recall(
    name: str, keys: Float[Tensor, "n d"], values: Float[Tensor, "n e"], queries: Float[Tensor, "a d"] | None = None
) -> Float[Tensor, "a e"]:
    """What a mechanism answers to queries after all pairs were written; tokens that query write nothing and come last.

    Without `queries`, every key is one.
    """
    queries = keys if queries is None else queries
    if name == ADDING:
        return queries @ (keys.mT @ values)
    q = torch.cat([torch.zeros_like(keys), queries])[None, None]
    k = torch.cat([keys, torch.zeros_like(queries)])[None, None]
    v = torch.cat([values, values.new_zeros(len(queries), values.shape[1])])[None, None]
    writes = torch.cat([keys.new_ones(len(keys)), keys.new_zeros(len(queries))])
    if name in ("delta", "gated_delta"):
        options: dict[str, Any] = {"beta": writes[None, None]}
        if name == "gated_delta":
            options["log_decay"] = DECAY * writes[None, None]
        out = mechanism(name)(q, k, v, causal=True, **options)
    else:
        options = {"scale": SHARP} if name == "softmax" else {"scale": LONG_KEY}
        k = k if name == "softmax" else LONG_KEY * k
        out = mechanism(name)(q, k, v, causal=True, padding=writes.bool()[None], **options)
    return out[0, 0, len(keys) :]


def draw_pairs(n: int, seed: int, width: int = VALUE_CHANNELS) -> tuple[Tensor, Tensor]:
    """Random unit keys and random values of signs."""
    g = torch.Generator().manual_seed(seed)
    keys = torch.randn(n, KEY_CHANNELS, generator=g, dtype=torch.float64)
    values = torch.randn(n, width, generator=g, dtype=torch.float64).sign()
    return keys / keys.norm(dim=-1, keepdim=True), values


def recall_accuracy(name: str, load: float, seed: int) -> float:
    """Share of keys whose answer is nearest, in angle, to their own value."""
    keys, values = draw_pairs(int(load * KEY_CHANNELS), seed)
    answers = recall(name, keys, values)
    return float(((answers @ values.mT).argmax(-1) == torch.arange(len(keys))).double().mean())


def over_bound(name: str, load: float, seed: int) -> float:
    """Mean squared error on n orthonormal values over 1 - d_k / n, the best scale of answers taken."""
    n = int(load * KEY_CHANNELS)
    keys, _ = draw_pairs(n, seed)
    answers = recall(name, keys, torch.eye(n, dtype=torch.float64))
    scale = answers.diagonal().sum() / answers.square().sum()  # least squares
    return float((scale * answers - torch.eye(n, dtype=torch.float64)).square().sum() / n / (1 - KEY_CHANNELS / n))


def exact_recall() -> tuple[float, float]:
    """Errors with orthonormal keys: as many as there are channels; and with half of them written again."""
    g = torch.Generator().manual_seed(0)
    keys = torch.linalg.qr(torch.randn(KEY_CHANNELS, KEY_CHANNELS, generator=g, dtype=torch.float64)).Q
    values, others = torch.randn(2, KEY_CHANNELS, VALUE_CHANNELS, generator=g, dtype=torch.float64)
    first = float((recall("delta", keys, values) - values).abs().max())
    half = KEY_CHANNELS // 2
    then = torch.cat([others[:half], values[half:]])
    answers = recall("delta", torch.cat([keys, keys[:half]]), torch.cat([values, others[:half]]), keys)
    return first, float((answers - then).abs().max())


def measure_recall(setting: Setting) -> Results:
    """Shares of recalled pairs and squared errors by mechanism, load (pairs over d_k) and seed."""
    seeds = range(SEEDS[setting.quick])
    shares = {name: {load: [recall_accuracy(name, load, seed) for seed in seeds] for load in LOADS} for name in NAMES}
    over = {
        name: {load: [over_bound(name, load, seed) for seed in seeds] for load in LOADS if load > 1}
        for name in NAMES[1:]
    }
    first, again = exact_recall()
    measured = {
        "b1": Measurement(first, 0.0, EXACT),
        "b2": Measurement(again, 0.0, EXACT),
        "b3": by_seed(shares["linear"][1.0]),
        "b4": by_seed([max(shares[name][2.0][s] for name in ("linear", ADDING)) for s in seeds]),
        "b5": by_seed([min(x[s] for by_load in over.values() for x in by_load.values()) for s in seeds]),
        "b6": by_seed([shares["delta"][2.0][s] - shares[ADDING][2.0][s] for s in seeds]),
        "b7": by_seed(shares["softmax"][8.0]),
    }
    return Results(
        measured, {"recall": {"size": KEY_CHANNELS, "curves": _mean_points(shares), "bounds": _mean_points(over)}}
    )


def _mean_points(by_name: dict[str, dict[float, list[float]]]) -> dict[str, list[list[float]]]:
    """Points (load, mean over seeds) by mechanism."""
    return {name: [[load, fmean(x)] for load, x in by_load.items()] for name, by_load in by_name.items()}


RECALL_STUDY = Study("what a state can hold", RECALL_CLAIMS, measure_recall)
