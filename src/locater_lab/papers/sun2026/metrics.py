"""Sinks and massive activations as numbers, compared with plain loops; and what the sink metric says of heads that have
none. Study a.

alpha_k     weight that key k receives, per query that may look at it (Gu et al. 2024)
sink rate   share of heads with alpha_1 > 0.3, 1 the first token
sink ratio  share of heads with alpha_k > 0.3 for some k in the first half (Sun et al. 2026)
massive     |h| > 100 and at least 1000 medians (Sun et al. 2024)
"""

from __future__ import annotations

import math
import random
from statistics import median_low

import torch
from torch import Tensor

from locater.kernels import attention_statistics
from locater.measures import massive_activations
from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.train.measured import SINK, of_map

THRESHOLD = SINK
LENGTH = 64  # at which Gu et al. measure
HEADS = {True: 24, False: 120}
RANDOM = {True: 400, False: 2000}
SPREADS = (0.5, 1.0, 2.0, 4.0, 8.0)  # of logits of heads without a sink
EXACT = "none: exact up to rounding"

CLAIMS = (
    Claim("a1", "alpha_k is the column sum of the map over the queries that can see key k",
          "largest error of the streaming statistics beside loops over the map", "at most", 1e-9, where="Gu et al. 2024"),
    Claim("a2", "Sink rate and sink ratio count heads over the threshold",
          "heads, of planted sinks of every strength, that loops count otherwise", "at most", 0.0, by="summary",
          where="equation 28, Gu et al. 2024"),
    Claim("a3", "Massive: over 100 and over 1000 medians", "hidden states that sorting counts otherwise", "at most", 0.0,
          by="summary", where="Sun et al. 2024"),
    Claim("a4", "Short sequences make every head a sink: uniform causal attention passes up to nine tokens",
          "longest sequence on which uniform causal attention has alpha_1 > 0.3", "about", 9.0, by="ours"),
    Claim("a5", "At 64 tokens a head without a sink is not called one on the first token",
          "share of random heads with alpha_1 > 0.3, largest over spreads of their logits up to 8", "at most", 0.01, by="ours"),
    Claim("a6", "Nor on another of the first half", "share of random heads that the sink ratio counts, largest over spreads up to 8",
          "at most", 0.01, by="ours"),
)  # fmt: skip


# --- plain loops ---


def looped(rows: list[list[float]]) -> list[float]:
    """alpha_k of one map, number by number."""
    T = len(rows)
    return [sum(rows[i][k] for i in range(k, T)) / (T - k) for k in range(T)]


def massive_by_sorting(x: list[list[float]]) -> bool:
    sizes = sorted(abs(entry) for row in x for entry in row)
    return sizes[-1] > 100 and sizes[-1] >= 1000 * median_low(sizes)


def planted(seed: int, strength: float, at: int, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """Queries and keys of one head, (1, 1, T, 8): the key `at` has a logit of `strength` more with every query."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 1, LENGTH, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    q, k = q * (spread * 8**-0.25), k * 8**-0.25
    q[..., 0] = 1.0
    k[..., 0] = 0.0
    k[..., at, 0] = strength
    return q, k


def errors(heads: int) -> tuple[float, float]:
    """Of alpha in the streaming statistics, and of the two counts of `of_map`, against loops."""
    worst, wrong = 0.0, 0
    for seed in range(heads):
        q, k = planted(seed, strength=8.0 * seed / heads, at=(seed % 3) * LENGTH // 4)
        streamed = attention_statistics(q, k, causal=True, scale=1.0, per_key=True).received
        assert streamed is not None
        maps = (q @ k.mT).masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
        plain = looped(maps[0, 0].tolist())
        worst = max(worst, *(abs(a - b) for a, b in zip(streamed[0, 0].tolist(), plain, strict=True)))
        counted = of_map(maps, causal=True)
        wrong += counted["sink_rate"] != (plain[0] > THRESHOLD)
        wrong += counted["sink_ratio"] != any(alpha > THRESHOLD for alpha in plain[: LENGTH // 2])
    return worst, float(wrong)


def massive_errors(states: int) -> float:
    """Hidden states with a largest entry around both limits."""
    draw, wrong = random.Random(0), 0
    for _ in range(states):
        x = [[draw.gauss(0, 1) * 0.15 for _ in range(16)] for _ in range(9)]
        x[draw.randrange(9)][draw.randrange(16)] = draw.choice((-1, 1)) * draw.uniform(60, 160)
        wrong += bool(massive_activations(torch.tensor([x], dtype=torch.float64)).is_massive) != massive_by_sorting(x)
    return float(wrong)


def uniform_limit() -> int:
    """The longest uniform causal map with sum_i 1/i / T > 0.3."""
    T = 1
    while of_map(_uniform(T + 1), causal=True)["sink_rate"] == 1.0:
        T += 1
    return T


def _uniform(T: int) -> Tensor:
    rows = torch.ones(T, T, dtype=torch.float64).tril()
    return (rows / rows.sum(-1, keepdim=True))[None, None]


def called(heads: int, spread: float) -> tuple[float, float]:
    """Shares of heads with random queries and keys of size 64 that count as sinks: on the first token, in the first
    half.
    """
    generator = torch.Generator().manual_seed(int(10 * spread))
    q, k = (torch.randn(1, heads, LENGTH, 64, generator=generator) for _ in range(2))
    logits = spread * (q @ k.mT) / 8
    maps = logits.masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    counted = of_map(maps, causal=True)
    return float(counted["sink_rate"] or 0.0), float(counted["sink_ratio"] or 0.0)


def share_interval(count: int, of: int, level: float = 0.05) -> tuple[float, float]:
    """Clopper and Pearson: the shares at which as many, or as few, as were counted have a probability of level / 2.

    >>> [round(x, 4) for x in share_interval(0, 200)], [round(x, 3) for x in share_interval(5, 10)]
    ([0.0, 0.0183], [0.187, 0.813])
    """

    def at_most(k: int, p: float) -> float:
        logs = (math.lgamma(of + 1) - math.lgamma(i + 1) - math.lgamma(of - i + 1) for i in range(k + 1))
        return math.fsum(math.exp(c + i * math.log(p) + (of - i) * math.log1p(-p)) for i, c in enumerate(logs))

    def solved(k: int, probability: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if at_most(k, middle) > probability else (low, middle)
        return high

    lower = solved(count - 1, 1 - level / 2) if count else 0.0
    return lower, solved(count, level / 2) if count < of else 1.0


def measure(setting: Setting) -> Results:
    """Loops over maps, and random heads."""
    worst, wrong = errors(HEADS[setting.quick])
    count = RANDOM[setting.quick]
    shares = {f"{spread:g}": called(count, spread) for spread in SPREADS}
    measured = {
        "a1": Measurement(worst, 0.0, EXACT),
        "a2": Measurement(wrong, 0.0, EXACT),
        "a3": Measurement(massive_errors(10 * HEADS[setting.quick]), 0.0, EXACT),
        "a4": Measurement(float(uniform_limit()), 0.0, EXACT),
        "a5": _share(max(a for a, _ in shares.values()), count),
        "a6": _share(max(b for _, b in shares.values()), count),
    }
    metric = {"threshold": THRESHOLD, "tokens": LENGTH, "random_heads": {k: list(v) for k, v in shares.items()}}
    return Results(measured, {"sink_metric": metric})


def _share(p: float, count: int) -> Measurement:
    low, high = share_interval(round(p * count), count)
    return Measurement(p, max(high - p, p - low), f"95 % interval (Clopper and Pearson) of a share of {count} heads")


STUDY = Study("sinks and spikes as numbers", CLAIMS, measure)
