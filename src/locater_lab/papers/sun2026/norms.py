"""What a norm makes of a spike: sparse vectors that all point the same way. Study b.

A spike token is h = s u + r: s along a fixed unit direction u of few channels, r normal noise of deviation 1 in all of
n channels. RMSNorm divides by the length, so that

    cosine of two spike tokens   s1 s2 / sqrt((s1^2 + n) (s2^2 + n))
    deviation of other channels  sqrt(n / (s^2 + n)), and P(|x| < t) = erf(t / sqrt 2 / deviation) there, 0 in the channels of u

The cosine is 1 - n / s^2 for large s. It is over 0.99 from s = 10 sqrt(n) on, which is 14.8 sqrt(n) medians of |h|: 944
of them at a width of 4096, where 1000 medians are the usual criterion of a massive activation. The criterion is one of
that width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from locater.measures import ranks, token_cosine
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.reproduction import Results, Setting, Study

WIDTHS = (64, 256, 1024, 4096)
SPIKES = (0.1, 0.3, 1.0, 2.0, 4.0, 10.0, 30.0, 100.0)  # s / sqrt(n)
TOKENS, DRAWS = {True: 48, False: 200}, {True: 8, False: 20}
VARIED = 0.2  # spikes differ by this share of their size
SMALL = 0.01
MEDIAN = 0.67449  # of |x|, x normal
ALIKE = 0.99
HEAD = 64
DYT = 0.8  # alpha of tanh(alpha x), a norm that is none

CLAIMS = (
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
    sizes = size * (1 + VARIED * (2 * torch.rand(count, generator=generator, dtype=torch.float64) - 1))
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


def predicted_small(size: float, width: int, below: float = SMALL, channels: int = 0) -> float:
    """Share of entries under `below` after RMSNorm, `channels` of them being the spike's.

    >>> round(predicted_small(0.0, 16, below=0.67449), 4)                   # no spike: half of them are under the median
    0.5
    """
    return (1 - channels / width) * math.erf(below / math.sqrt(2) / math.sqrt(width / (size**2 + width)))


def curve(width: int, count: int, seed: int = 0) -> list[dict[str, float]]:
    """Cosines and sparsity over spike sizes, measured and predicted."""
    points = []
    for at in SPIKES:
        size = at * width**0.5
        x, sizes = spike_tokens(width, size, count, seed)
        y = functional.rms_norm(x, (width,))
        points.append({
            "spike": at, "medians": size / MEDIAN, "cosine": float(token_cosine(y)), "predicted": predicted_cosine(sizes, width),
            "small": float((y.abs() < SMALL).double().mean()),
            "predicted_small": sum(predicted_small(float(s), width, SMALL, 2 if at > 1 else 0) for s in sizes) / count,
            "layernorm": float(token_cosine(functional.layer_norm(x, (width,)))), "tanh": float(token_cosine(torch.tanh(DYT * x))),
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
        low, high = (low, middle) if float(token_cosine(functional.rms_norm(x, (width,)))) > ALIKE else (middle, high)
    return high * width**0.5 / MEDIAN


def first_direction(width: int, medians: float, count: int, seed: int) -> float:
    """Share of the energy of keys k = W_K norm(h) in their first direction, W_K of one draw."""
    x, _ = spike_tokens(width, medians * MEDIAN, count, seed)
    W_K = torch.randn(width, HEAD, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / width**0.5
    return 1 / float(ranks(functional.rms_norm(x, (width,)) @ W_K).stable)


Draws = Mapping[int, list[list[dict[str, float]]]]  # by width: curves, one for each draw


def mean_curve(draws: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """The curve, mean over draws."""
    return [{name: fmean(point[name] for point in points) for name in points[0]} for points in zip(*draws, strict=True)]


def measure(setting: Setting) -> Results:
    """Curves over spike sizes at four widths."""
    count, seeds = TOKENS[setting.quick], DRAWS[setting.quick]
    draws = {width: [curve(width, count, seed) for seed in range(seeds)] for width in setting.each(list(WIDTHS))}
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
        "b8": by_seed([float((y.abs() < SMALL).double().mean()) for y in at], of="draws"),
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


STUDY = Study("what a norm makes of a spike", CLAIMS, measure)
