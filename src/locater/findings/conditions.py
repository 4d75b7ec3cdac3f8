"""Conditions that users give, such as `--fail-on "sharp, M<-1"`, and comparisons explained in words."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from locater.errors import LocaterError
from locater.findings.flags import FLAG_NAMES, FLAGS, RETIRED, Flag, Numbers

# What to do about a head: an action, and controls that help if they can be attached to the model.


@dataclass(frozen=True)
class Remedy:
    """`controls` are calls of classes in `locater`, the first to try first.

    >>> LOWER_LOGITS.words(["QKClip()"])
    'lower the learning rate, or attach locater.QKClip()'
    >>> LOWER_LOGITS.words([])
    'lower the learning rate'
    """

    action: str
    controls: tuple[str, ...] = ()

    def words(self, fitting: Sequence[str] | None = None) -> str:
        """The action, with the controls that fit the model; None if that is not known, which names all of them."""
        names = [f"locater.{call}" for call in (self.controls if fitting is None else fitting)]
        if not names:
            return self.action
        several = f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
        return f"{self.action}, or attach {several}"


# of a run that goes on: what was shown to help at hot rates (docs/which-control.md, k4 and a1), and nothing else
SHOWN_TO_HELP = ("SigmaReparam()",)
LOWER_LOGITS = Remedy("lower the learning rate", SHOWN_TO_HELP)
RAISE_LOGITS = Remedy("raise the query-key scale", ("LocAteR(target=2.0)",))
AT_HOT_RATES = Remedy("train at a lower learning rate", SHOWN_TO_HELP)  # of a whole run (runs/verdict.py)
NO_STRESS = Remedy("look at the batches and the learning rate before step {step}: no warning of logits came before it")
STUCK = Remedy("check that the labels belong to their inputs, that gradients reach the weights, that the rate is not 0")
OF_FLAGS = {  # for flags that a monitor can raise while a run goes on
    "nonfinite": Remedy("restore an earlier checkpoint and lower the learning rate"),
    "exploding": Remedy("lower the learning rate before the loss diverges", SHOWN_TO_HELP),
    "locked": Remedy("if the loss stalls or spikes, lower the learning rate", SHOWN_TO_HELP),
}


# Conditions: a flag, or a comparison of a column with a number.

WARN_ON = "nonfinite, exploding, spread>5"  # of `Monitor`: docs/results/early-warning.md, judged in -unseen.md
COMPARISON = r"(\w+)\s*(<=|>=|<|>)\s*(\S+)"
_OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_VERBS = {">": "exceeds", ">=": "has reached", "<": "is below", "<=": "is down to"}


@dataclass(frozen=True)
class Condition:
    """The name of a flag, or a comparison of a column with a number."""

    text: str
    test: Callable[[Numbers], bool]
    column: str | None = None  # of a comparison
    bound: float | None = None


def parse_conditions(
    text: str,
    columns: Collection[str],
    measured: Sequence[str],
    option: str = "--fail-on",
    example: str = "M<-1",
) -> list[Condition]:
    """Read conditions such as `sharp,nonfinite` or `M<-1, stable_rank<2`.

    `columns` and `measured` are the numbers and flags that exist. Errors name `option`, and show `example`, a
    comparison.

    >>> [c.text for c in parse_conditions("sharp, M<-1", {"M"}, ["sharp"])]
    ['sharp', 'M<-1']
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise LocaterError(f"{option} {text!r} names nothing; flags are {', '.join(measured)}")
    return [_flag(part, measured, option) or _comparison(part, columns, measured, option, example) for part in parts]


def _flag(part: str, measured: Sequence[str], option: str) -> Condition | None:
    if part in RETIRED:
        raise LocaterError(f"{option} {part}: no longer a flag (docs/flags.md); {RETIRED[part]}")
    if part == "silent" and part not in measured:
        raise LocaterError(
            f"{option} silent: what heads write is not read here: use `locater scan --values`; "
            f"here: {', '.join(measured)}"
        )
    if part in FLAG_NAMES and part not in measured:
        raise LocaterError(
            f"{option} {part}: this flag needs a forward pass, and weights alone do not show it; "
            f"here: {', '.join(measured)}"
        )
    return Condition(part, lambda row: part in row["flags"]) if part in measured else None


def _comparison(
    part: str,
    columns: Collection[str],
    measured: Sequence[str],
    option: str,
    example: str,
) -> Condition:
    match = re.fullmatch(COMPARISON, part)
    if match is None:
        raise LocaterError(
            f"{option} {part!r}: neither a flag ({', '.join(measured)}) nor a comparison such as {example!r}"
        )
    column, sign, number = match.groups()
    if column not in columns:
        raise LocaterError(f"{option} {part!r}: no column {column!r}; there are {', '.join(sorted(columns))}")
    try:
        bound = float(number)
    except ValueError:
        bound = math.nan
    if math.isnan(bound):
        raise LocaterError(f"{option} {part!r}: {number!r} is not a number")
    compare = _OPERATORS[sign]
    return Condition(part, lambda row: row.get(column) is not None and compare(row[column], bound), column, bound)


@dataclass(frozen=True)
class Quantity:
    """A number that comparisons may use: what it means above or below a bound, and what to do."""

    label: str
    above: tuple[str, Remedy]  # meaning, what to do
    below: tuple[str, Remedy]


_ONE_HOT = "attention is close to one-hot", LOWER_LOGITS
_AVERAGES = "attention averages over its keys, which drives rank collapse", RAISE_LOGITS
_SATURATED = "the softmax saturates and passes on hardly any gradient", LOWER_LOGITS
_COMPARE_HEADS = Remedy("no fault by itself; compare it with the other heads of its layer")
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
            Remedy("no fault where M was raised on purpose; else lower the learning rate", ("LocAteR()",)),
        ),
        (
            "a token looks away from tokens like itself",
            Remedy("no fault if the head wants difference; check it with locater probe"),
        ),
    ),
    "sink": Quantity(
        "weight on the first key",
        (
            "the head rests there and adds little",
            Remedy("no fault by itself; a gate, or sigmoid attention, takes the sink away"),
        ),
        ("the first key is no sink for this head", Remedy("no fault")),
    ),
    "distance": Quantity(
        "distance in tokens",
        ("the head looks far back", _COMPARE_HEADS),
        ("the head looks at its neighbours", _COMPARE_HEADS),
    ),
}


def comparison(text: str) -> tuple[str, str, str, Remedy] | None:
    """Column, sign, meaning and remedy of a comparison such as "spread>5"; None for anything else."""
    match = re.fullmatch(COMPARISON, text)
    if match is None or match[1] not in QUANTITIES:
        return None
    quantity = QUANTITIES[match[1]]
    return match[1], match[2], *(quantity.above if match[2].startswith(">") else quantity.below)


def explain(condition: Condition, value: float | None) -> str:
    """A comparison that holds, in words.

    >>> explain(parse_conditions("spread>5", {"spread"}, [])[0], 5.265).partition("; ")[0]
    'logit spread 5.3 exceeds 5: attention is close to one-hot'
    """
    if comparison(condition.text) is None or condition.bound is None or value is None:
        return condition.text
    crossed, meaning = reasons(condition, [value])
    return f"{crossed}: {meaning}; {remedy_for(condition).words()}"


def reasons(condition: Condition, values: Sequence[float | None]) -> tuple[str, str]:
    """For a condition that holds for heads with the numbers `values`: what was found, and what it means.

    >>> reasons(parse_conditions("spread>5", {"spread"}, [])[0], [5.265, 8.4])[0]
    'logit spread up to 8.4 exceeds 5'
    """
    known = [value for value in values if value is not None]
    flag = _flag_of(condition)
    if flag is not None:
        shown = f" ({flag.needs[0]} {_worst(known, [f'{x:.4g}' for x in known])})" if known else ""
        return f"{flag.name}{shown}", flag.meaning
    parts = comparison(condition.text)
    if parts is None or condition.bound is None or not known:
        return condition.text, "as requested"
    column, sign, meaning, _ = parts
    worst = _worst(known, [_distinct_digits(x, condition.bound) for x in known], highest=sign.startswith(">"))
    return f"{QUANTITIES[column].label} {worst} {_VERBS[sign]} {condition.bound:g}", meaning


def remedy_for(condition: Condition) -> Remedy:
    """What to do about a head that meets a condition."""
    flag, parts = _flag_of(condition), comparison(condition.text)
    if flag is not None:
        return OF_FLAGS.get(flag.name, Remedy(flag.way_out[:1].lower() + flag.way_out[1:]))
    return Remedy("compare it with the other heads of its layer") if parts is None else parts[3]


def _flag_of(condition: Condition) -> Flag | None:
    return next((flag for flag in FLAGS if flag.name == condition.text), None)


def _worst(values: Sequence[float], texts: Sequence[str], highest: bool | None = None) -> str:
    """The number of one head, or the farthest of several; without a direction, their range."""
    low, high = (texts[values.index(end(values))] for end in (min, max))
    if len(set(texts)) == 1:
        return low
    if highest is None:
        return f"{low} to {high}"
    return f"up to {high}" if highest else f"down to {low}"


def _distinct_digits(value: float, bound: float) -> str:
    """A value with enough digits to tell it from its bound."""
    texts = (f"{value:.{digits}g}" for digits in range(2, 17))
    return next((text for text in texts if float(text) != bound), f"{value:g}")


NAMED = 6  # heads that a line names for each condition


def crossings(conditions: Sequence[Condition], rows: Sequence[Numbers], length: int) -> str:
    """One line about the heads that meet conditions: for each condition how many, the worst first; empty if none does.

    >>> rows = [{"layer": 4, "head": 7, "flags": ("sharp",), "F": 1e4, "key_bias": 0.0, "M": 0.0}]
    >>> crossings(parse_conditions("sharp, M<-1", {"M"}, ["sharp"]), rows, length=256)
    '1 head is sharp: 4.7 (H ratio 0.0085)'
    """
    found = [(condition, [row for row in rows if condition.test(row)]) for condition in conditions]
    return "; ".join(_crossing(condition, some, length) for condition, some in found if some)


def _crossing(condition: Condition, rows: Sequence[Numbers], length: int) -> str:
    bad = [(_how_bad(condition, row, length), row) for row in rows]
    bad.sort(key=lambda pair: -pair[0][0])
    words = bad[0][0][1]
    of_head: dict[Any, str] = {}
    for _, row in bad:  # of several scans one head can have several rows
        of_head.setdefault((row["layer"], row["head"], row.get("source")), _head_name(row))
    places = list(of_head.values())
    rest = f" and {len(places) - NAMED:,} more" if len(places) > NAMED else ""
    if condition.column is not None:
        at = f" at {', '.join(places[:NAMED])}{rest}"
        if comparison(condition.text) is None:
            return f"{condition.text}{at} (worst {words})"
        crossed, meaning = reasons(condition, [row[condition.column] for row in rows])
        return f"{crossed}{at}: {meaning}"
    first = f"{places[0]} ({words})" if words else places[0]
    one, several = _verbs(condition, rows)
    if len(places) == 1:
        return f"1 head {one}: {first}"
    return f"{len(places):,} heads {several}, worst {first}, then {', '.join(places[1:NAMED])}{rest}"


def _how_bad(condition: Condition, row: Numbers, length: int) -> tuple[float, str]:
    """How bad a head is by a condition (larger is worse), and the same in words."""
    if condition.column is not None:
        value = float(row[condition.column])
        return (-value if "<" in condition.text else value), f"{value:.3g}"
    flag = _flag_of(condition)
    numbers = [row.get(column) for column in flag.needs] if flag is not None else []
    if flag is not None and flag.worst is not None and None not in numbers:
        return flag.worst(*numbers, length=length)
    ratio = row.get("entropy_ratio")
    if flag is not None and flag.confirmed is not None and ratio is not None:  # of a measured head
        return (-ratio if flag.confirmed(0.0) else ratio), f"entropy ratio {ratio:.2g}"
    return float("nonfinite" in row["flags"]), ""


def _verbs(condition: Condition, rows: Sequence[Numbers]) -> tuple[str, str]:
    """What to say about one head, and about several."""
    flag = _flag_of(condition)
    if flag is None:
        return f"has a new {condition.text}", f"have a new {condition.text}"
    one = flag.verb.replace("is ", "is newly ") if any(row.get("new") for row in rows) else flag.verb
    return one, one.replace("is ", "are ", 1).replace("raises ", "raise ", 1)


def _head_name(row: Numbers) -> str:
    """`4.7`; for several scans, also which scan."""
    where = f" from {row['where']}" if "where" in row else f" of {row['source']}" if "source" in row else ""
    return f"{row['layer']}.{row['head']}{where}"
