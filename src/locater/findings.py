"""The flag table: what a number must be for a head to deserve a look, what that means, and the way out.

Thresholds are in logit units of unit tokens (docs/theory.md section 9); `v` is the variance of logits across keys.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from locater.errors import LocaterError

Numbers = Mapping[str, Any]  # a row; a number that was not measured is None or absent


@dataclass(frozen=True)
class Flag:
    """One line of the table. `needs` are the columns that `rule` reads; without them the flag cannot be raised."""

    name: str
    needs: tuple[str, ...]
    rule: Callable[..., bool]  # (*needs, length) -> raised?
    meaning: str
    way_out: str


def key_variance(F: float, key_bias: float) -> float:
    """Variance of logits across keys: of the query-key map, plus that of the term every query adds."""
    return F + key_bias**2


EXPLODING = 200  # docs/results/early-warning.md: as many failures caught as with 100, half of the false alarms

FLAGS: tuple[Flag, ...] = (
    Flag(
        "nonfinite", ("finite",), lambda finite, length: not finite,
        "its weights hold NaN or infinite values, or are so large that their products overflow",
        "Restore an earlier checkpoint; nothing else of this head can be computed",
    ),
    Flag(
        "uniform", ("F", "key_bias"), lambda F, key_bias, length: key_variance(F, key_bias) < 0.01,
        "logits hardly differ between keys: attention averages everything, which drives rank collapse",
        "Raise its query-key scale or give it a positive mean (M about 2) at initialisation",
    ),
    Flag(
        "sharp", ("F", "key_bias"), lambda F, key_bias, length: key_variance(F, key_bias) > 2 * math.log(length),
        "logits spread so far that a row's entropy collapses: each token locks onto one other",
        "Shrink its query-key spectrum (penalty, normalised queries and keys, soft-cap) or lower the learning rate",
    ),
    Flag(
        "repels-itself", ("M",), lambda M, length: M < -1,
        "the spectrum's mean is negative: a token looks away from tokens like itself",
        "Often a head that wants difference, such as previous-token or suppression; check it on data",
    ),
    Flag(
        "antisymmetric", ("S", "F"), lambda S, F, length: F > 0 and S / F < -0.5,
        "the query-key map mostly rotates: who looks at whom is one-way",
        "No fault; eigenvalues are far from real, so read the complex plane and not the mean",
    ),
    Flag(
        "few-directions", ("skew",), lambda skew, length: abs(skew) > 0.75,
        "a few directions carry the spectrum, so the normal approximation fails (the exact mixture was used)",
        "No fault; Lambda comes from 4,096 draws here",
    ),
    Flag(
        "exploding", ("max_logit",), lambda max_logit, length: max_logit > EXPLODING,
        f"logits beyond {EXPLODING} were observed: the softmax saturates and half precision is near its limits",
        "Clip or normalise queries and keys, or lower the learning rate",
    ),
    Flag(
        "locked", ("entropy_ratio",), lambda entropy_ratio, length: entropy_ratio < 0.1,
        "observed attention is nearly one-hot",
        "If training has stalled, raise this head's entropy: shrink its spectrum or its temperature",
    ),
    Flag(
        "sink", ("sink",), lambda sink, length: sink > 0.9,
        "observed attention rests on the first key: the head is idle on this text",
        "Common in trained decoders and not by itself a fault; prune, or give the softmax a sink of its own",
    ),
)  # fmt: skip

FLAG_NAMES = tuple(flag.name for flag in FLAGS)
_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def flags_of(row: Numbers, length: int) -> tuple[str, ...]:
    """Names of the flags that a row raises.

    >>> flags_of({"finite": True, "M": -3.0, "F": 100.0, "S": 1.0, "key_bias": 0.0, "skew": 0.1}, length=256)
    ('sharp', 'repels-itself')
    """
    return tuple(
        flag.name
        for flag in FLAGS
        if all(row.get(column) is not None for column in flag.needs) and flag.rule(*(row[column] for column in flag.needs), length=length)
    )


@dataclass(frozen=True)
class Condition:
    """One part of `--fail-on`: a flag's name, or a comparison of a column with a number."""

    text: str
    test: Callable[[Numbers], bool]
    column: str | None = None  # of a comparison
    bound: float | None = None


def parse_conditions(text: str, columns: Collection[str], measured: Sequence[str], option: str = "--fail-on") -> list[Condition]:
    """`sharp,nonfinite` or `M<-1, stable_rank<2`. `columns` and `measured` say which numbers and flags there are, `option` who asks.

    >>> [c.text for c in parse_conditions("sharp, M<-1", {"M"}, ["sharp"])]
    ['sharp', 'M<-1']
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise LocaterError(f"{option} {text!r} names nothing; flags are {', '.join(measured)}")
    return [_parse(part, columns, measured, option) for part in parts]


def _parse(part: str, columns: Collection[str], measured: Sequence[str], option: str) -> Condition:
    if part in measured:
        return Condition(part, lambda row: part in row["flags"])
    if part in FLAG_NAMES:
        raise LocaterError(f"{option} {part}: this flag needs observation and weights alone do not show it; here: {', '.join(measured)}")
    match = re.fullmatch(r"(\w+)\s*(<=|>=|<|>)\s*(\S+)", part)
    if match is None:
        raise LocaterError(f"{option} {part!r}: neither a flag ({', '.join(measured)}) nor a comparison such as 'M<-1'")
    column, sign, number = match.groups()
    if column not in columns:
        raise LocaterError(f"{option} {part!r}: no column {column!r}; there are {', '.join(sorted(columns))}")
    try:
        bound = float(number)
    except ValueError:
        bound = math.nan
    if math.isnan(bound):
        raise LocaterError(f"{option} {part!r}: {number!r} is not a number")
    return Condition(part, lambda row: row.get(column) is not None and _COMPARE[sign](row[column], bound), column, bound)
