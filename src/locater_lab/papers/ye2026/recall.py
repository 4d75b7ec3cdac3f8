"""What a state of fixed size can store: pairs of keys and values written one after the other, then queried. Study b."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms import mechanism

SIZE = 32  # d_k, of a key
VALUES = 64  # of a value
LONG = 64.0  # of the keys of `linear`: its features tell short ones hardly apart
SHARP = 60.0  # scale of softmax logits, keys of length one
DECAY = -0.01  # log of the factor on the memory at each token, for gated_delta
LOADS = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0)  # pairs / d_k
SEEDS = {True: 8, False: 16}
ADDED = "adding v k^T"
NAMES = ("softmax", "delta", "gated_delta", "linear", ADDED)
EXACT = "none: exact"

CLAIMS = (
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
        f"share of pairs recalled by `linear`, d_k pairs, random keys of length {LONG:g}; a value counts as recalled "
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


def recalled(
    name: str, keys: Float[Tensor, "n d"], values: Float[Tensor, "n e"], queries: Float[Tensor, "a d"] | None = None
) -> Float[Tensor, "a e"]:
    """What a mechanism answers to queries after all pairs were written; tokens that query write nothing and come last.

    Without `queries`, every key is one.
    """
    queries = keys if queries is None else queries
    if name == ADDED:
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
        options = {"scale": SHARP} if name == "softmax" else {"scale": LONG}
        k = k if name == "softmax" else LONG * k
        out = mechanism(name)(q, k, v, causal=True, padding=writes.bool()[None], **options)
    return out[0, 0, len(keys) :]


def drawn(n: int, seed: int, width: int = VALUES) -> tuple[Tensor, Tensor]:
    """Random unit keys and random values of signs."""
    g = torch.Generator().manual_seed(seed)
    keys = torch.randn(n, SIZE, generator=g, dtype=torch.float64)
    values = torch.randn(n, width, generator=g, dtype=torch.float64).sign()
    return keys / keys.norm(dim=-1, keepdim=True), values


def accuracy(name: str, load: float, seed: int) -> float:
    """Share of keys whose answer is nearest, in angle, to their own value."""
    keys, values = drawn(int(load * SIZE), seed)
    answers = recalled(name, keys, values)
    return float(((answers @ values.mT).argmax(-1) == torch.arange(len(keys))).double().mean())


def over_bound(name: str, load: float, seed: int) -> float:
    """Mean squared error on n orthonormal values over 1 - d_k / n, the best scale of answers taken."""
    n = int(load * SIZE)
    keys, _ = drawn(n, seed)
    answers = recalled(name, keys, torch.eye(n, dtype=torch.float64))
    scale = answers.diagonal().sum() / answers.square().sum()  # least squares
    return float((scale * answers - torch.eye(n, dtype=torch.float64)).square().sum() / n / (1 - SIZE / n))


def exact_recall() -> tuple[float, float]:
    """Errors with orthonormal keys: as many as there are channels; and with half of them written again."""
    g = torch.Generator().manual_seed(0)
    keys = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=g, dtype=torch.float64)).Q
    values, others = torch.randn(2, SIZE, VALUES, generator=g, dtype=torch.float64)
    first = float((recalled("delta", keys, values) - values).abs().max())
    half = SIZE // 2
    then = torch.cat([others[:half], values[half:]])
    answers = recalled("delta", torch.cat([keys, keys[:half]]), torch.cat([values, others[:half]]), keys)
    return first, float((answers - then).abs().max())


def measure(setting: Setting) -> Results:
    """Shares of recalled pairs and squared errors by mechanism, load (pairs over d_k) and seed."""
    seeds = range(SEEDS[setting.quick])
    shares = {name: {load: [accuracy(name, load, seed) for seed in seeds] for load in LOADS} for name in NAMES}
    over = {
        name: {load: [over_bound(name, load, seed) for seed in seeds] for load in LOADS if load > 1}
        for name in NAMES[1:]
    }
    first, again = exact_recall()
    measured = {
        "b1": Measurement(first, 0.0, EXACT),
        "b2": Measurement(again, 0.0, EXACT),
        "b3": by_seed(shares["linear"][1.0]),
        "b4": by_seed([max(shares[name][2.0][s] for name in ("linear", ADDED)) for s in seeds]),
        "b5": by_seed([min(x[s] for by_load in over.values() for x in by_load.values()) for s in seeds]),
        "b6": by_seed([shares["delta"][2.0][s] - shares[ADDED][2.0][s] for s in seeds]),
        "b7": by_seed(shares["softmax"][8.0]),
    }
    return Results(measured, {"recall": {"size": SIZE, "curves": _means(shares), "bounds": _means(over)}})


def _means(by_name: dict[str, dict[float, list[float]]]) -> dict[str, list[list[float]]]:
    """Points (load, mean over seeds) by mechanism."""
    return {name: [[load, fmean(x)] for load, x in by_load.items()] for name, by_load in by_name.items()}


STUDY = Study("what a state can hold", CLAIMS, measure)
