"""The flag table: what a number must be for a head to be flagged, what that means for training, and the way out.

A flag is a fault, which deserves a look, or a note. `judge` decides it per head: one with a role is sharp on purpose,
and what was measured overrules what was predicted. Thresholds are in logit units of unit tokens (docs/theory.md section
9); `v` is the variance of logits across keys.
"""

from __future__ import annotations

import math
import operator
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from locater.errors import LocaterError

Numbers = Mapping[str, Any]  # a row; a number that was not measured is None or absent


@dataclass(frozen=True)
class Flag:
    """One line of the table. `needs` are the columns that `rule` reads; without them the flag cannot be raised."""

    name: str
    severity: Literal["fault", "note"]
    needs: tuple[str, ...]
    rule: Callable[..., bool]  # (*needs, length) -> raised?
    meaning: str
    way_out: str
    on_purpose: bool = False  # a head with a role raises it by doing its work
    confirmed: Callable[[float], bool] | None = None  # of a prediction: does the measured entropy_ratio agree?


@dataclass(frozen=True)
class Role:
    """What a head is for, read off measured columns. The first of `needs` is the number that is shown."""

    name: str
    needs: tuple[str, ...]
    rule: Callable[..., bool]  # (*needs, length) -> has it?
    shown: str


def key_variance(F: float, key_bias: float) -> float:
    """Variance of logits across keys: of the query-key map, plus that of the term every query adds."""
    return F + key_bias**2


EXPLODING = 200  # docs/results/early-warning.md: as many failures caught as with 100, half of the false alarms
LOCKED = 0.1  # entropy over that of uniform attention: under it attention is nearly one-hot
LEVEL = 0.95  # the same: above it attention is nearly uniform
ROLE_WEIGHT = 0.5  # of a head's attention goes where its role says
LOCAL = 2.0  # tokens: a head whose attention lies nearer than this on average is local
UNIFORM = 0.01  # variance of logits: under it attention is uniform
# the same, of a model as a whole: trained ones lie above (docs/log.md, 2026-11-16), GPT-2 as it starts below
NEAR_UNIFORM = 0.1
UNTRAINED = 0.8  # of the heads are near uniform: that says something of the model, not of its heads

FLAGS: tuple[Flag, ...] = (
    Flag(
        "nonfinite", "fault", ("finite",), lambda finite, length: not finite,
        "its weights hold NaN or infinite values, or are so large that their products overflow: everything after it is lost",
        "Restore an earlier checkpoint and lower the learning rate; nothing else of this head can be computed",
    ),
    Flag(
        "uniform", "fault", ("F", "key_bias"), lambda F, key_bias, length: key_variance(F, key_bias) < UNIFORM,
        "its logits hardly differ between tokens: it hands every token the same average, which makes tokens alike (rank collapse)",
        "In a trained model it is a candidate for pruning; before training start it larger or with a positive mean (control Mimetic)",
        confirmed=lambda entropy_ratio: entropy_ratio > LEVEL,
    ),
    Flag(
        "sharp", "fault", ("F", "key_bias"), lambda F, key_bias, length: key_variance(F, key_bias) > 2 * math.log(length),
        "its logits spread so far that each token locks onto one other: little gradient passes, and training can become unstable",
        "If locater probe shows no role such as previous-token, lower the learning rate or attach QKClip, QKNorm or LocAteR",
        on_purpose=True, confirmed=lambda entropy_ratio: entropy_ratio < LOCKED,
    ),
    Flag(
        "repels-itself", "note", ("M",), lambda M, length: M < -1,
        "its mean self-logit is negative: a token looks away from tokens like itself",
        "Nothing to do; common in heads that look for difference, such as previous-token or suppression heads",
    ),
    Flag(
        "antisymmetric", "note", ("S", "F"), lambda S, F, length: F > 0 and S / F < -0.5,
        "its query-key map mostly rotates: who looks at whom is one-way",
        "Nothing to do; read its eigenvalues in the complex plane and not by their mean",
    ),
    Flag(
        "few-directions", "note", ("skew",), lambda skew, length: abs(skew) > 0.75,
        "a few directions of its input decide its logits: the closed form for localization does not apply",
        "Nothing to do; its localization comes from 4,096 draws of the exact mixture",
    ),
    Flag(
        "exploding", "fault", ("max_logit",), lambda max_logit, length: max_logit > EXPLODING,
        f"logits beyond {EXPLODING} were observed: the softmax saturates, little gradient passes, and half precision is near its limits",
        "Clip or normalise queries and keys (controls QKClip, QKNorm), or lower the learning rate, before the loss diverges",
    ),
    Flag(
        "locked", "fault", ("entropy_ratio",), lambda entropy_ratio, length: entropy_ratio < LOCKED,
        "its observed attention is nearly one-hot: little gradient reaches its queries and keys, so it hardly learns any more",
        "If the loss stalls or spikes, lower the learning rate or attach QKClip, EntropyPenalty or LocAteR",
        on_purpose=True,
    ),
    Flag(
        "sink", "note", ("sink",), lambda sink, length: sink > 0.9,
        "its observed attention rests on the first token: it adds next to nothing on this text",
        "Nothing to do, it is usual in trained decoders; to use such heads, prune them or give the softmax a sink of its own",
    ),
)  # fmt: skip

ROLES: tuple[Role, ...] = (
    Role("previous-token", ("previous",), lambda previous, length: previous > ROLE_WEIGHT, "{:.2f} of its weight on the token before"),
    Role("induction", ("induction",), lambda induction, length: induction > ROLE_WEIGHT, "{:.2f} of its weight on what came next before"),
    Role("duplicate-token", ("duplicate",), lambda duplicate, length: duplicate > ROLE_WEIGHT, "{:.2f} of its weight on the earlier copy"),
    Role("first-token", ("sink",), lambda sink, length: sink > ROLE_WEIGHT, "{:.2f} of its weight on the first token"),
    Role(  # a head that only sees itself moves nothing between tokens; among few tokens everything is near
        "local", ("distance", "self_mass"),
        lambda distance, self_mass, length: distance < min(LOCAL, length / 16) and self_mass <= ROLE_WEIGHT,
        "{:.1f} tokens away on average",
    ),
)  # fmt: skip

FLAG_NAMES = tuple(flag.name for flag in FLAGS)
_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def flags_of(row: Numbers, length: int) -> tuple[str, ...]:
    """Names of the flags that a row raises.

    >>> flags_of({"finite": True, "M": -3.0, "F": 100.0, "S": 1.0, "key_bias": 0.0, "skew": 0.1}, length=256)
    ('sharp', 'repels-itself')
    """
    return tuple(flag.name for flag in FLAGS if _applies(flag, row, length))


def _applies(line: Flag | Role, row: Numbers, length: int) -> bool:
    numbers = [row.get(column) for column in line.needs]
    return all(x is not None for x in numbers) and line.rule(*numbers, length=length)


class Verdict(NamedTuple):
    """What the flags of one head come to."""

    faults: tuple[str, ...]  # flags that deserve a look
    notes: dict[str, str]  # every other flag, and why it is no fault here
    role: str | None  # a name of ROLES


def judge(rows: Sequence[Numbers], length: int) -> list[Verdict]:
    """Faults and notes of all heads of a model, from their `flags` and numbers.

    >>> judge([{"flags": ("sharp", "locked"), "entropy_ratio": 0.03, "previous": 0.99}], length=256)[0].faults
    ()
    """
    alike = untrained(rows)
    return [_verdict(row, length, alike) for row in rows]


def untrained(rows: Sequence[Numbers]) -> bool:
    """Whether so many heads are near uniform that this is said of the model and not of each head."""
    return bool(rows) and sum(near_uniform(row) for row in rows) >= UNTRAINED * len(rows)


def near_uniform(row: Numbers) -> bool:
    """Whether a softmax head treats all tokens nearly alike: as measured, or else as its weights say."""
    ratio, F, key_bias = (row.get(column) for column in ("entropy_ratio", "F", "key_bias"))
    if ratio is not None:
        return bool(ratio > LEVEL)
    return None not in (row.get("expected_entropy"), F, key_bias) and key_variance(F, key_bias) < NEAR_UNIFORM  # type: ignore[arg-type]


def _verdict(row: Numbers, length: int, alike: bool) -> Verdict:
    role = next((role for role in ROLES if _applies(role, row, length)), None)
    known = [flag for flag in FLAGS if flag.name in row["flags"]]
    reasons = {flag.name: _no_fault(flag, row, role, alike) for flag in known}
    reasons |= {
        name: "A flag of another version of Locater: scan the model again"
        for name in row["flags"]
        if name not in FLAG_NAMES
    }
    faults = tuple(name for name, reason in reasons.items() if not reason)
    return Verdict(faults, {name: reason for name, reason in reasons.items() if reason}, role.name if role else None)


def _no_fault(flag: Flag, row: Numbers, role: Role | None, alike: bool) -> str:
    """Why a flag of this head is no fault; nothing where it is one."""
    if flag.severity == "note":
        return flag.way_out
    if flag.on_purpose and role is not None:
        article = "An" if role.name[0] in "aeiou" else "A"
        return f"{article} {role.name} head ({role.shown.format(row[role.needs[0]])}): it is {flag.name} on purpose, leave it"
    if _refuted(flag, row):
        return (
            f"Predicted, and not seen: its measured entropy is {row['entropy_ratio']:.2f} of that of uniform attention"
        )
    if flag.name == "uniform" and alike:
        return "As nearly all heads of this model: it looks untrained"
    return ""


def _refuted(flag: Flag, row: Numbers) -> bool:
    """Whether a prediction is contradicted by the entropy that was measured."""
    ratio = row.get("entropy_ratio")
    return flag.confirmed is not None and ratio is not None and not flag.confirmed(ratio)


@dataclass(frozen=True)
class Condition:
    """One part of `--fail-on`: a flag's name, or a comparison of a column with a number."""

    text: str
    test: Callable[[Numbers], bool]
    column: str | None = None  # of a comparison
    bound: float | None = None


def parse_conditions(
    text: str,
    columns: Collection[str],
    measured: Sequence[str],
    option: str = "--fail-on",
    old_names: Mapping[str, str] | None = None,
) -> list[Condition]:
    """`sharp,nonfinite` or `M<-1, stable_rank<2`. `columns` and `measured` say which numbers and flags there are,
    `option` who asks.

    >>> [c.text for c in parse_conditions("sharp, M<-1", {"M"}, ["sharp"])]
    ['sharp', 'M<-1']
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise LocaterError(f"{option} {text!r} names nothing; flags are {', '.join(measured)}")
    return [_parse(part, columns, measured, option, old_names or {}) for part in parts]


def _parse(
    part: str, columns: Collection[str], measured: Sequence[str], option: str, old_names: Mapping[str, str]
) -> Condition:
    if part in measured:
        return Condition(part, lambda row: part in row["flags"])
    if part in FLAG_NAMES:
        raise LocaterError(
            f"{option} {part}: this flag needs observation and weights alone do not show it; here: {', '.join(measured)}"
        )
    match = re.fullmatch(r"(\w+)\s*(<=|>=|<|>)\s*(\S+)", part)
    if match is None:
        raise LocaterError(f"{option} {part!r}: neither a flag ({', '.join(measured)}) nor a comparison such as 'M<-1'")
    column, sign, number = match.groups()
    if column in old_names:
        message = f"{option} {part!r}: column {column} is now {old_names[column]}"
        warnings.warn(message, DeprecationWarning, stacklevel=3)
        column = old_names[column]
    if column not in columns:
        raise LocaterError(f"{option} {part!r}: no column {column!r}; there are {', '.join(sorted(columns))}")
    try:
        bound = float(number)
    except ValueError:
        bound = math.nan
    if math.isnan(bound):
        raise LocaterError(f"{option} {part!r}: {number!r} is not a number")
    return Condition(
        part, lambda row: row.get(column) is not None and _COMPARE[sign](row[column], bound), column, bound
    )


@dataclass(frozen=True)
class Quantity:
    """A number that a comparison of `Monitor(warn_on=...)` may name: what it means to lie above or below a bound, and
    what to do.
    """

    label: str
    above: tuple[str, str]  # meaning, way out
    below: tuple[str, str]


_ONE_HOT = "attention is close to one-hot", "lower the rate or attach QKClip"
_AVERAGES = (
    "attention averages over its keys, which drives rank collapse",
    "raise the query-key scale, or attach LocAteR(target=2)",
)
_SATURATED = "the softmax saturates and passes on hardly any gradient", "lower the rate or attach QKClip"

QUANTITIES = {
    "entropy": Quantity("entropy", _AVERAGES, _ONE_HOT),
    "entropy_ratio": Quantity("entropy ratio", _AVERAGES, _ONE_HOT),
    "max_logit": Quantity("largest logit", _SATURATED, _AVERAGES),
    "spread": Quantity("logit spread", _ONE_HOT, _AVERAGES),
    "participation": Quantity("number of keys that share the weight", _AVERAGES, _ONE_HOT),
    "M": Quantity(
        "mean self-logit M",
        (
            "each token attends to tokens like itself",
            "no fault where M was raised on purpose; else lower the rate or attach LocAteR",
        ),
        (
            "a token looks away from tokens like itself",
            "no fault if the head wants difference; check it with locater probe",
        ),
    ),
    "sink": Quantity(
        "weight on the first key",
        (
            "the head rests there and adds little",
            "no fault by itself; a gate, or sigmoid attention, takes the sink away",
        ),
        ("the first key is no sink for this head", "no fault"),
    ),
    "distance": Quantity(
        "distance in tokens",
        ("the head looks far back", "no fault by itself; compare it with the other heads of its layer"),
        ("the head looks at its neighbours", "no fault by itself; compare it with the other heads of its layer"),
    ),
}
_VERBS = {">": "exceeds", ">=": "has reached", "<": "is below", "<=": "is down to"}


def comparison(text: str) -> tuple[str, str, str, str] | None:
    """Column, sign, meaning and way out of a comparison such as "spread>5"; None for anything else."""
    match = re.fullmatch(r"(\w+)\s*(<=|>=|<|>)\s*\S+", text)
    if match is None or match[1] not in QUANTITIES:
        return None
    quantity = QUANTITIES[match[1]]
    return match[1], match[2], *(quantity.above if match[2].startswith(">") else quantity.below)


def explain(condition: Condition, value: float | None) -> str:
    """A comparison that holds, in words.

    >>> explain(parse_conditions("spread>5", {"spread"}, [])[0], 5.265)
    'logit spread 5.3 exceeds 5: attention is close to one-hot; lower the rate or attach QKClip'
    """
    about = comparison(condition.text)
    if about is None or condition.bound is None or value is None:
        return condition.text
    column, sign, meaning, way_out = about
    # as many digits as tell the value from the bound
    shown = next(
        (text for digits in range(2, 17) if float(text := f"{value:.{digits}g}") != condition.bound), f"{value:g}"
    )
    return f"{QUANTITIES[column].label} {shown} {_VERBS[sign]} {condition.bound:g}: {meaning}; {way_out}"
