"""Sinks and spikes as numbers: their measures (study a), what a norm makes of a spike (study b), and the first
position, which sees itself alone (study c).

**Measures (study a)**, compared with plain loops; and what the sink metric says of heads that have none.

    alpha_k     weight that key k receives, per query that may look at it (Gu et al. 2024)
    sink rate   share of heads with alpha_1 > 0.3, 1 the first token
    sink ratio  share of heads with alpha_k > 0.3 for some k in the first half (Sun et al. 2026)
    massive     |h| > 100 and at least 1000 medians (Sun et al. 2024)

**Norms (study b)** make sparse vectors that all point the same way of spikes. A spike token is h = s u + r: s along a
fixed unit direction u of few channels, r normal noise of deviation 1 in all of n channels. RMSNorm divides by the
length, so that

    cosine of two spike tokens   s1 s2 / sqrt((s1^2 + n) (s2^2 + n))
    deviation of other channels  sqrt(n / (s^2 + n)), and P(|x| < t) = erf(t / sqrt 2 / deviation) there, 0 in the channels of u

The cosine is 1 - n / s^2 for large s. It is over 0.99 from s = 10 sqrt(n) on, which is 14.8 sqrt(n) medians of |h|: 944
of them at a width of 4096, where 1000 medians are the usual criterion of a massive activation. The criterion is one of
that width.

**The first position (study c).** Under a causal mask row 1 of a map that sums to 1 is a single 1, so the output is W_O
W_V x whatever queries and keys are: one fixed linear map. A spike that is made there depends on nothing but the token.
Where a row may sum to less, or more, the weight is a function of the token, and the map is not fixed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median_low

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from locater.kernels import attention_statistics
from locater.measures import massive_activations, ranks, token_cosine
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms import mechanism, mechanisms
from locater_lab.mechanisms.modules import attention_module
from locater_lab.train.map_measures_and_diverged_layer import SINK, map_numbers

# ---- a: sinks and spikes as numbers ----


THRESHOLD = SINK
LENGTH = 64  # at which Gu et al. measure
HEAD_DRAWS = {True: 24, False: 120}
RANDOM_HEADS = {True: 400, False: 2000}
SPREADS = (0.5, 1.0, 2.0, 4.0, 8.0)  # of logits of heads without a sink
EXACT = "none: exact up to rounding"

METRICS_CLAIMS = (
    Claim("a1", "alpha_k is the column sum of the map over the queries that can see key k",
          "largest error of the streaming statistics beside loops over the map", "at most", 1e-9, by="ours",
          where="Gu et al. 2024"),
    Claim("a2", "Sink rate and sink ratio count heads over the threshold",
          "heads, of planted sinks of every strength, that loops count otherwise", "at most", 0.0, by="ours",
          where="equation 28, Gu et al. 2024"),
    Claim("a3", "Massive: over 100 and over 1000 medians", "hidden states that sorting counts otherwise", "at most", 0.0,
          by="ours", where="Sun et al. 2024"),
    Claim("a4", "Short sequences make every head a sink: uniform causal attention passes up to nine tokens",
          "longest sequence on which uniform causal attention has alpha_1 > 0.3", "about", 9.0, by="ours"),
    Claim("a5", "At 64 tokens a head without a sink is not called one on the first token",
          "share of random heads with alpha_1 > 0.3, largest over spreads of their logits up to 8", "at most", 0.01, by="ours"),
    Claim("a6", "Nor on another of the first half", "share of random heads that the sink ratio counts, largest over spreads up to 8",
          "at most", 0.01, by="ours"),
)  # fmt: skip


# --- plain loops ---


def alpha_in_loops(rows: list[list[float]]) -> list[float]:
    """alpha_k of one map, number by number."""
    T = len(rows)
    return [sum(rows[i][k] for i in range(k, T)) / (T - k) for k in range(T)]


def massive_by_sorting(x: list[list[float]]) -> bool:
    sizes = sorted(abs(entry) for row in x for entry in row)
    return sizes[-1] > 100 and sizes[-1] >= 1000 * median_low(sizes)


def planted_head(seed: int, strength: float, at: int, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """Queries and keys of one head, (1, 1, T, 8): the key `at` has a logit of `strength` more with every query."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 1, LENGTH, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    q, k = q * (spread * 8**-0.25), k * 8**-0.25
    q[..., 0] = 1.0
    k[..., 0] = 0.0
    k[..., at, 0] = strength
    return q, k


def metric_errors(heads: int) -> tuple[float, float]:
    """Of alpha in the streaming statistics, and of the two counts of `map_numbers`, against loops."""
    worst, wrong = 0.0, 0
    for seed in range(heads):
        q, k = planted_head(seed, strength=8.0 * seed / heads, at=(seed % 3) * LENGTH // 4)
        streamed = attention_statistics(q, k, causal=True, scale=1.0, per_key=True).received
        assert streamed is not None
        maps = (q @ k.mT).masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
        plain = alpha_in_loops(maps[0, 0].tolist())
        worst = max(worst, *(abs(a - b) for a, b in zip(streamed[0, 0].tolist(), plain, strict=True)))
        counted = map_numbers(maps, causal=True)
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
    while map_numbers(_uniform(T + 1), causal=True)["sink_rate"] == 1.0:
        T += 1
    return T


def _uniform(T: int) -> Tensor:
    rows = torch.ones(T, T, dtype=torch.float64).tril()
    return (rows / rows.sum(-1, keepdim=True))[None, None]


def shares_called_sinks(heads: int, spread: float) -> tuple[float, float]:
    """Shares of heads with random queries and keys of size 64 that count as sinks: on the first token, in the first
    half.
    """
    generator = torch.Generator().manual_seed(int(10 * spread))
    q, k = (torch.randn(1, heads, LENGTH, 64, generator=generator) for _ in range(2))
    logits = spread * (q @ k.mT) / 8
    maps = logits.masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    counted = map_numbers(maps, causal=True)
    return float(counted["sink_rate"] or 0.0), float(counted["sink_ratio"] or 0.0)


def share_interval(count: int, of: int, level: float = 0.05) -> tuple[float, float]:
    """Clopper and Pearson: the shares at which as many, or as few, as were counted have a probability of level / 2.

    >>> [round(x, 4) for x in share_interval(0, 200)], [round(x, 3) for x in share_interval(5, 10)]
    ([0.0, 0.0183], [0.187, 0.813])
    """

    def at_most(k: int, p: float) -> float:
        logs = (math.lgamma(of + 1) - math.lgamma(i + 1) - math.lgamma(of - i + 1) for i in range(k + 1))
        return math.fsum(math.exp(c + i * math.log(p) + (of - i) * math.log1p(-p)) for i, c in enumerate(logs))

    def solve_share(k: int, probability: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if at_most(k, middle) > probability else (low, middle)
        return high

    lower = solve_share(count - 1, 1 - level / 2) if count else 0.0
    return lower, solve_share(count, level / 2) if count < of else 1.0


def measure_metrics(setting: Setting) -> Results:
    """Loops over maps, and random heads."""
    worst, wrong = metric_errors(HEAD_DRAWS[setting.quick])
    count = RANDOM_HEADS[setting.quick]
    shares = {f"{spread:g}": shares_called_sinks(count, spread) for spread in SPREADS}
    measured = {
        "a1": Measurement(worst, 0.0, EXACT),
        "a2": Measurement(wrong, 0.0, EXACT),
        "a3": Measurement(massive_errors(10 * HEAD_DRAWS[setting.quick]), 0.0, EXACT),
        "a4": Measurement(float(uniform_limit()), 0.0, EXACT),
        "a5": _share(max(a for a, _ in shares.values()), count),
        "a6": _share(max(b for _, b in shares.values()), count),
    }
    metric = {"threshold": THRESHOLD, "tokens": LENGTH, "random_heads": {k: list(v) for k, v in shares.items()}}
    return Results(measured, {"sink_metric": metric})


def _share(p: float, count: int) -> Measurement:
    low, high = share_interval(round(p * count), count)
    return Measurement(p, max(high - p, p - low), f"95 % interval (Clopper and Pearson) of a share of {count} heads")


METRICS_STUDY = Study("sinks and spikes as numbers", METRICS_CLAIMS, measure_metrics)


# ---- b: what a norm makes of a spike ----


WIDTHS = (64, 256, 1024, 4096)
SPIKES = (0.1, 0.3, 1.0, 2.0, 4.0, 10.0, 30.0, 100.0)  # s / sqrt(n)
SPIKE_TOKENS, NORM_DRAWS = {True: 48, False: 200}, {True: 8, False: 20}
SIZE_SPREAD = 0.2  # spikes differ by this share of their size
SMALL_ENTRY = 0.01
MEDIAN = 0.67449  # of |x|, x normal
ALIKE_COSINE = 0.99
KEY_SIZE = 64
DYT_SCALE = 0.8  # alpha of tanh(alpha x), a norm that is none

NORM_CLAIMS = (
    Claim("b1", "RMSNorm turns spike tokens into near-constant vectors", "cosine of spike tokens after RMSNorm at 1000 medians, width 4096",
          "at least", 0.99, by="summary", bound="ours"),
    Claim("b2", "Their cosine is s1 s2 / sqrt((s1^2 + n) (s2^2 + n))",
          "largest distance of the measured mean cosine from it, four widths, spikes from 0.1 to 100 sqrt(n)", "at most", 0.02, by="ours"),
    Claim("b3", "They are sparse: outside of the spike's channels a share of erf(0.01 / sqrt 2 / deviation) is under 0.01",
          "largest distance of the measured share of entries under 0.01 from it", "at most", 0.02, by="ours"),
    Claim("b4", "Keys of spike tokens lie in one or two dimensions",
          "share of their energy in the first direction at 1000 medians, width 4096, draws of W_K", "at least", 0.95, by="summary",
          bound="ours"),
    Claim("b5", "1000 medians is the criterion of one width: at 4096 it is where spike tokens become alike, elsewhere it is not",
          "medians at which the cosine passes 0.99, at width 4096 over those at width 64", "about", 8.0, 0.4, by="ours"),
    Claim("b6", "LayerNorm does the same", "largest difference of the cosine after LayerNorm from that after RMSNorm, width 256 and more",
          "at most", 0.02, by="ours"),
    Claim("b7", "tanh(alpha x) in the place of a norm does not", "cosine of spike tokens after it, spikes of 100 sqrt(n), width 4096",
          "at most", 0.1, by="ours"),
    Claim("b8", "Spike tokens are sparse behind RMSNorm", "share of entries under 0.01 at 1000 medians, width 4096", "at least", 0.5,
          by="summary", bound="ours"),
)  # fmt: skip


def spike_tokens(
    width: int, size: float, count: int, seed: int = 0
) -> tuple[Float[Tensor, "1 count width"], Float[Tensor, " count"]]:
    """Tokens with spikes of about `size` in two channels of fixed ratio, and the sizes."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.zeros(width, dtype=torch.float64)
    direction[width // 5], direction[width // 2] = 0.8, -0.6
    sizes = size * (1 + SIZE_SPREAD * (2 * torch.rand(count, generator=generator, dtype=torch.float64) - 1))
    noise = torch.randn(count, width, generator=generator, dtype=torch.float64)
    return (sizes[:, None] * direction + noise)[None], sizes


def predicted_cosine(sizes: Float[Tensor, " count"], width: int) -> float:
    """Mean over pairs of s1 s2 / sqrt((s1^2 + n) (s2^2 + n)).

    >>> round(predicted_cosine(torch.tensor([3.0, 3.0]), 9), 6)
    0.5
    """
    c = sizes / (sizes.square() + width).sqrt()
    n = len(c)
    return float((c.sum().square() - c.square().sum()) / (n * (n - 1)))


def predicted_small(size: float, width: int, below: float = SMALL_ENTRY, channels: int = 0) -> float:
    """Share of entries under `below` after RMSNorm, `channels` of them being the spike's.

    >>> round(predicted_small(0.0, 16, below=0.67449), 4)                   # no spike: half of them are under the median
    0.5
    """
    return (1 - channels / width) * math.erf(below / math.sqrt(2) / math.sqrt(width / (size**2 + width)))


def spike_curve(width: int, count: int, seed: int = 0) -> list[dict[str, float]]:
    """Cosines and sparsity over spike sizes, measured and predicted."""
    points = []
    for at in SPIKES:
        size = at * width**0.5
        x, sizes = spike_tokens(width, size, count, seed)
        y = functional.rms_norm(x, (width,))
        points.append({
            "spike": at, "medians": size / MEDIAN, "cosine": float(token_cosine(y)), "predicted": predicted_cosine(sizes, width),
            "small": float((y.abs() < SMALL_ENTRY).double().mean()),
            "predicted_small": sum(predicted_small(float(s), width, SMALL_ENTRY, 2 if at > 1 else 0) for s in sizes) / count,
            "layernorm": float(token_cosine(functional.layer_norm(x, (width,)))), "tanh": float(token_cosine(torch.tanh(DYT_SCALE * x))),
        })  # fmt: skip
    return points


def medians_needed(width: int, count: int) -> float:
    """Spike, in medians of |h|, at which the measured cosine after RMSNorm passes 0.99, by bisection on one draw of
    noise.
    """
    low, high = 1.0, 100.0
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        x, _ = spike_tokens(width, middle * width**0.5, count)
        low, high = (
            (low, middle) if float(token_cosine(functional.rms_norm(x, (width,)))) > ALIKE_COSINE else (middle, high)
        )
    return high * width**0.5 / MEDIAN


def first_direction(width: int, medians: float, count: int, seed: int) -> float:
    """Share of the energy of keys k = W_K norm(h) in their first direction, W_K of one draw."""
    x, _ = spike_tokens(width, medians * MEDIAN, count, seed)
    W_K = torch.randn(width, KEY_SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / width**0.5
    return 1 / float(ranks(functional.rms_norm(x, (width,)) @ W_K).stable)


Draws = Mapping[int, list[list[dict[str, float]]]]  # by width: curves, one for each draw


def mean_curve(draws: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """The curve, mean over draws."""
    return [{name: fmean(point[name] for point in points) for name in points[0]} for points in zip(*draws, strict=True)]


def measure_norm(setting: Setting) -> Results:
    """Curves over spike sizes at four widths."""
    count, seeds = SPIKE_TOKENS[setting.quick], NORM_DRAWS[setting.quick]
    draws = {width: [spike_curve(width, count, seed) for seed in range(seeds)] for width in setting.each(list(WIDTHS))}
    curves = {str(width): mean_curve(of_width) for width, of_width in draws.items()}
    wide = [point for width, points in curves.items() if int(width) >= 256 for point in points]
    at = [functional.rms_norm(spike_tokens(4096, 1000 * MEDIAN, count, seed)[0], (4096,)) for seed in range(seeds)]
    needed = {str(width): medians_needed(width, count) for width in WIDTHS}
    measured = {
        "b1": by_seed([float(token_cosine(y)) for y in at], of="draws"),
        "b2": _farthest(draws, "cosine", "predicted"),
        "b3": _farthest(draws, "small", "predicted_small"),
        "b4": by_seed([first_direction(4096, 1000, count, seed) for seed in range(seeds)], of="draws"),
        "b5": Measurement(needed["4096"] / needed["64"], 0.0, "none: one draw, by bisection"),
        "b6": Measurement(max(abs(e["cosine"] - e["layernorm"]) for e in wide), 0.0, "none: the farthest of all"),
        "b7": Measurement(curves["4096"][-1]["tanh"], 0.0, "none: mean over pairs and draws"),
        "b8": by_seed([float((y.abs() < SMALL_ENTRY).double().mean()) for y in at], of="draws"),
    }
    tables = {"spike_curves": curves, "medians_needed": [{"width": w, "medians": x} for w, x in needed.items()]}
    return Results(measured, tables)


def _farthest(draws: Draws, name: str, predicted: str) -> Measurement:
    """Where the mean is farthest from what is predicted: its distance, draw by draw."""
    cells = [
        ({"width": width, "spike": points[0]["spike"]}, [point[name] - point[predicted] for point in points])
        for width, curves in draws.items()
        for points in zip(*curves, strict=True)
    ]
    cell, distances = max(cells, key=lambda each: abs(fmean(each[1])))
    sign = math.copysign(1.0, fmean(distances))
    return by_seed([sign * distance for distance in distances], cell, "draws")


NORM_STUDY = Study("what a norm makes of a spike", NORM_CLAIMS, measure_norm)


# ---- c: the first position ----


FIRST_WIDTH, FIRST_HEADS, FIRST_KEY_HEADS, FIRST_SIZE, FIRST_TOKENS = 16, 4, 2, 4, 6
FIRST_DRAWS = {True: 300, False: 2000}
SUBSTOCHASTIC = ("gated", "softmax_plus_one", "learned_sink", "sigmoid")

FIRST_CLAIMS = (
    Claim("c1", "Attention at the first position is a fixed linear map", "relative error of W_O W_V x beside causal softmax, grouped heads",
          "at most", 1e-12, by="summary"),
    Claim("c2", "So it is for every causal mechanism whose rows sum to 1", "largest relative error over these mechanisms",
          "at most", 1e-9, by="ours"),
    Claim("c3", "Where a query can look away it is not", "largest R^2 of a linear fit of the output on the token: "
          "gate per head, softmax with a sink, learned sink, sigmoid", "at most", 0.99, by="ours"),
)  # fmt: skip


@dataclass(frozen=True)
class FirstToken:
    """The first token of many draws through one mechanism, float64."""

    x: Float[Tensor, "draws width"]
    out: Float[Tensor, "draws heads_size"]  # of heads, side by side
    merged: Float[Tensor, "width heads_size"]  # W_V, a key head's columns once for each of its query heads

    @property
    def error(self) -> float:
        """How far W_O W_V x, merged beforehand, is from W_O applied to the output; W_O of one draw."""
        W_O = torch.randn(
            self.out.shape[1], FIRST_WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64
        )
        fixed = self.x @ (self.merged @ W_O)
        return float((self.out @ W_O - fixed).abs().max() / fixed.abs().max())


def first_outputs(name: str, draws: int) -> FirstToken:
    """A mechanism with random weights, its own ones too, on random tokens; queries are large enough that logits
    matter.
    """
    torch.manual_seed(0)
    x = torch.randn(draws, FIRST_TOKENS, FIRST_WIDTH, dtype=torch.float64)
    W_Q, W_K, W_V = (
        torch.randn(FIRST_WIDTH, heads * FIRST_SIZE, dtype=torch.float64) / FIRST_WIDTH**0.5
        for heads in (FIRST_HEADS, FIRST_KEY_HEADS, FIRST_KEY_HEADS)
    )
    q, k, v = ((x @ W).unflatten(-1, (-1, FIRST_SIZE)).transpose(1, 2) for W in (3 * W_Q, W_K, W_V))
    module = (
        attention_module(name, width=FIRST_WIDTH, heads=FIRST_HEADS, size=FIRST_SIZE, kv_heads=FIRST_KEY_HEADS)
        .double()
        .requires_grad_(False)
    )
    for p in module.parameters():
        p.copy_(torch.randn(p.shape, dtype=torch.float64) * (0.5 if p.ndim < 2 else 1.0))
    out = module(q, k, v, x, causal=True)[:, :, 0].flatten(1)
    return FirstToken(
        x[:, 0],
        out,
        W_V.unflatten(1, (FIRST_KEY_HEADS, FIRST_SIZE)).repeat_interleave(FIRST_HEADS // FIRST_KEY_HEADS, 1).flatten(1),
    )


def linear_fit(x: Tensor, y: Tensor) -> float:
    """R^2 of y = x M, M the best fixed matrix; 1 where y is 0."""
    rest = y - x @ torch.linalg.lstsq(x, y).solution
    size = float(y.square().sum())
    return 1 - float(rest.square().sum()) / size if size else 1.0


def causal_names() -> list[str]:
    """Mechanisms that have a causal form with default settings."""
    return [m.name for m in mechanisms() if m.is_causal_safe]


def measure_first(setting: Setting) -> Results:
    """Every causal mechanism on the same tokens."""
    draws = FIRST_DRAWS[setting.quick]
    firsts = {name: first_outputs(name, draws) for name in setting.each(causal_names())}
    fits = {name: linear_fit(first.x, first.out) for name, first in firsts.items()}
    sizes = {name: float(first.out.norm() / (first.x @ first.merged).norm()) for name, first in firsts.items()}
    rows = [{"mechanism": n, "kind": mechanism(n).kind, "R2": fits[n], "size": sizes[n]} for n in firsts]
    summing = {name: first.error for name, first in firsts.items() if mechanism(name).kind == "stochastic"}
    measured = {
        "c1": Measurement(summing["softmax"], 0.0, EXACT),
        "c2": Measurement(max(summing.values()), 0.0, EXACT, {"errors": summing}),
        "c3": Measurement(max(fits[name] for name in SUBSTOCHASTIC), 0.0, "none: a fit over draws of tokens"),
    }
    return Results(measured, {"first_position": rows})


FIRST_STUDY = Study("the first position", FIRST_CLAIMS, measure_first)
