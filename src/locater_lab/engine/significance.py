"""What a few seeds can tell: intervals that hold their level, and claims of one page judged together.

A quantity that was measured with several seeds is a sample x_1 ... x_n, of differences within a seed where two ways of
training are compared (the seed fixes first weights and the order of the data, so that pairing takes their noise away).
Its interval is that of Student's t,

    mean +- t(n - 1) s / sqrt(n),    s^2 = sum (x_i - mean)^2 / (n - 1),

which covers the expectation in 95 % of samples when noise is normal, whatever its size. "All seeds agree" is no such
rule: with a true difference of 0 it decides 50 % of samples of two and 25 % of samples of three. A sample without
spread, such as counts that are all equal, has no s: it is judged by signs, p = 2^(1 - n), and so decides from six seeds
on.

A page with many claims would decide some by chance, so its claims are corrected for multiple comparisons (Holm): the
smallest p must be at most 0.05 / m, the next 0.05 / (m - 1), and so on. The chance that one claim or more of the page
is decided wrongly is then at most 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

LEVEL = 0.05


def probability_within(t: float, freedom: int) -> float:
    """P(|T| <= t) of Student's t with a whole number of degrees of freedom, by its finite sum.

    >>> round(probability_within(12.706, 1), 4), round(probability_within(4.303, 2), 4), round(probability_within(2.365, 7), 4)
    (0.95, 0.95, 0.95)
    """
    angle = math.atan(t / math.sqrt(freedom))
    term = math.cos(angle) if freedom % 2 else 1.0
    total = 0.0
    for power in range(1 + freedom % 2, freedom, 2):  # of even freedom 1, 3, ..., of odd 2, 4, ...
        total += term
        term *= math.cos(angle) ** 2 * power / (power + 1)
    if freedom % 2:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def quantile(freedom: int, level: float = LEVEL) -> float:
    """The t with P(|T| > t) = level.

    >>> [round(quantile(n), 3) for n in (1, 2, 7)]
    [12.706, 4.303, 2.365]
    """
    low, high = 0.0, 1.0
    while probability_within(high, freedom) < 1 - level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if probability_within(middle, freedom) < 1 - level else (low, middle)
    return high


def interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """Mean and half-width; one value has no interval, and its half-width is infinite.

    >>> tuple(round(x, 3) for x in interval([1.0, 2.0, 3.0]))
    (2.0, 2.484)
    """
    if len(values) < 2:
        return fmean(values), math.inf
    return fmean(values), quantile(len(values) - 1, level) * stdev(values) / math.sqrt(len(values))


def p_value(values: Sequence[float], stated: float) -> float:
    """The level at which the interval of a sample would just touch a number.

    >>> round(p_value([1.0, 2.0, 3.0], 2.0 - 2.484), 3), p_value([1.0], 0.0), p_value([3.0, 3.0, 3.0], 2.0)
    (0.05, 1.0, 0.25)
    """
    n = len(values)
    if n < 2:
        return 1.0
    distance, error = abs(fmean(values) - stated), stdev(values) / math.sqrt(n)
    if error <= 1e-12 * max(map(abs, values), default=0.0):
        return 2.0 ** (1 - n) if distance else 1.0
    return 1 - probability_within(distance / error, n - 1)


def decided_by_holm(p_values: Mapping[str, float], level: float = LEVEL) -> set[str]:
    """Names of the claims that stay decided when all are judged together (Holm's step-down rule).

    >>> sorted(decided_by_holm({"a": 0.001, "b": 0.02, "c": 0.04}))
    ['a', 'b', 'c']
    >>> sorted(decided_by_holm({"a": 0.001, "b": 0.04, "c": 0.04}))
    ['a']
    """
    decided: set[str] = set()
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        if p > level / (len(p_values) - rank):
            break
        decided.add(name)
    return decided
