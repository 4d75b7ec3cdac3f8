"""A claim, what was measured of it, and the verdict that follows from the two.

A claim states a bound or a value for one quantity. A measurement brings a value and its spread, the half-width of the
interval that it is known to lie in. The verdict compares the whole interval with what is stated, so a measurement that
is too coarse to tell says `undecided` and not the more welcome of the two answers. Measurements with several seeds are
judged together with the others of their page that the same author makes.

Five rules keep a verdict open whatever the numbers say. Fewer than four seeds decide nothing, and one training run
decides nothing about training. What was chosen after its outcome had been seen decides nothing. A setting that is not the paper's own cannot fail the paper. An arm whose best rate is an
edge of its grid decides nothing (`arms.py`, which also sees to it that seeds which chose a rate do not judge it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, stdev
from typing import Any, Literal

from locater.numerics import LEVEL, interval, probability_within

Relation = Literal["at most", "at least", "about"]
Judgement = Literal["holds", "fails", "undecided"]
Author = Literal["paper", "summary", "ours"]
# What a test of a claim is. Identity: follows from algebra or from a proof, and was checked. Construction: weights made by
# hand do it. Published: a number of the paper, computed again. Simulation: drawn weights or drawn data. Experiment:
# trained models.
Kind = Literal["experiment", "simulation", "published", "construction", "identity", ""]
KINDS: tuple[Kind, ...] = ("experiment", "simulation", "published", "construction", "identity")
FEWEST_SEEDS = 4  # that decide anything
OTHERWISE = "measured outside of the paper's own setting, which cannot fail the paper"


@dataclass(frozen=True)
class Claim:
    """A sentence, whose it is, and the number that decides it.

    `by` tells who says it: the paper, with `where` (section, theorem, equation or figure); a public summary of the
    paper; or this project (ours). `bound` tells who chose the number: a paper that says "small" leaves the bound to us.
    `kind`, `setting`, `one_run`, `seen` and `within` are stated in one place for all claims of a paper, its `Paper`. `setting` is
    "own" where a claim is tested in the setting of its authors, "scaled" where sizes, data or recipe are others.
    """

    id: str
    says: str
    quantity: str  # what is measured
    relation: Relation
    stated: float
    tolerance: float = 0.0  # with "about": how far off still counts
    by: Author = "paper"
    where: str = ""
    bound: Literal["paper", "ours"] = "paper"
    kind: Kind = ""
    setting: Literal["own", "scaled"] = "own"
    one_run: bool = False  # the measurement is of one training run, whatever its spread is over
    seen: bool = False  # what it is measured under was chosen after its outcome had been seen
    within: tuple[float | None, float | None] | None = None  # what the quantity can be, where intervals may go beyond


@dataclass(frozen=True)
class Measurement:
    """A value, the half-width of its interval (`spread_of` says which interval), and the numbers behind it.

    `sample` are the values by seed, where there are seeds: the verdict then follows from their p-value. Where values
    were drawn in another way (a bootstrap over heads, counts) `p` is given: the level at which the claim would just be
    decided. `values` counts seeds where the largest of them is taken and no sample is left.
    """

    value: float
    spread: float
    spread_of: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    sample: tuple[float, ...] = ()
    p: float | None = None
    values: int | None = None


@dataclass(frozen=True)
class ClaimVerdict:
    """A claim beside its measurement. `measured` is None where nothing was measured, and `waits_for` then says what it
    needs. `alone` is the verdict before claims are judged together, `p` the level at which it would just be decided,
    `values` how many values its sample has. `undecided_by` is the rule that keeps it open.
    """

    claim: Claim
    stated: float
    measured: float | None
    spread: float | None
    verdict: Judgement
    decided: bool
    command: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    spread_of: str = ""
    waits_for: str = ""
    p: float | None = None
    alone: Judgement = "undecided"
    values: int | None = None
    undecided_by: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As it stands in the JSON document: `claim` is the sentence, `id` its short name."""
        entry = asdict(self.claim)
        sentence = entry.pop("says")
        measurement = asdict(replace(self, numbers={}))
        del measurement["claim"], measurement["numbers"]
        return {**entry, "claim": sentence, **measurement, "numbers": dict(self.numbers)}


def by_seed(values: Sequence[float], numbers: Mapping[str, Any] | None = None, of: str = "seeds") -> Measurement:
    """Mean over seeds, or other repetitions, with its 95 % interval."""
    mean, half = interval(values)
    which = f"95 % interval (t) over {len(values)} {of}" if len(values) > 1 else f"unknown: one of the {of}"
    return Measurement(mean, half, which, {"by_seed": list(values), **(numbers or {})}, tuple(values))


def half_range(values: Sequence[float], of: str, numbers: Mapping[str, Any] | None = None) -> Measurement:
    """The middle of a range and its half-width; `of` says which range. For sets that are complete, not for samples."""
    low, high = min(values), max(values)
    return Measurement((low + high) / 2, (high - low) / 2, of, numbers or {})


def judge(claim: Claim, value: float, spread: float) -> Judgement:
    """Whether all of value - spread ... value + spread is as stated, none of it, or some. An end that differs from what
    is stated by rounding is there: rank correlations of a few seeds meet a bound exactly.

    >>> claim = Claim("x1", "errors are small", "error", "at most", 0.1)
    >>> judge(claim, 0.05, 0.01), judge(claim, 0.2, 0.01), judge(claim, 0.1, 0.01)
    ('holds', 'fails', 'undecided')
    >>> judge(Claim("x2", "shares are small", "share", "at most", 0.3), 0.1, 0.2)  # 0.1 + 0.2 > 0.3 in floating point
    'holds'
    """
    if not (math.isfinite(value) and math.isfinite(spread)):
        return "undecided"
    low, high = value - abs(spread), value + abs(spread)
    slack = 1e-9 * max(abs(value), abs(spread))
    if claim.relation == "at most":
        return _judge_sides(high <= claim.stated + slack, low > claim.stated + slack)
    if claim.relation == "at least":
        return _judge_sides(low >= claim.stated - slack, high < claim.stated - slack)
    least, most = claim.stated - claim.tolerance - slack, claim.stated + claim.tolerance + slack
    return _judge_sides(least <= low and high <= most, high < least or low > most)


def p_of(claim: Claim, sample: Sequence[float]) -> float:
    """The level at which a sample would just decide a claim, either way.

    A value that is stated with a tolerance has two ends: the sample must be clear of both to hold, of the nearer one to
    fail.

    >>> claim = Claim("x", "it is small", "size", "about", 0.0, tolerance=1.0)
    >>> p_of(claim, [0.0, 0.1, -0.1]) == p_value([0.0, 0.1, -0.1], 1.0)
    True
    """
    if claim.relation != "about":
        return p_value(sample, claim.stated)
    ends = [p_value(sample, claim.stated + sign * claim.tolerance) for sign in (-1, 1)]
    inside = abs(fmean(sample) - claim.stated) <= claim.tolerance
    return max(ends) if inside else min(ends)


def verdict_of(claim: Claim, measured: Measurement | None, command: str, waits_for: str = "") -> ClaimVerdict:
    """The verdict on a measurement by itself; undecided where there is none."""
    if measured is None:
        return ClaimVerdict(claim, claim.stated, None, None, "undecided", False, command, waits_for=waits_for)
    value, spread = (x if math.isfinite(x) else None for x in (measured.value, measured.spread))
    p = p_of(claim, measured.sample) if measured.sample else measured.p
    p = None if p is None else min(max(p, 0.0), 1.0)
    alone = judge(claim, measured.value, 0.0 if p is not None else measured.spread)
    found = ClaimVerdict(
        claim,
        claim.stated,
        value,
        spread,
        alone,
        alone != "undecided",
        command,
        measured.numbers,
        measured.spread_of,
        p=p,
        alone=alone,
        values=len(measured.sample) or measured.values,
    )
    return judge_together([found])[0]


def judge_together(verdicts: Sequence[ClaimVerdict]) -> tuple[ClaimVerdict, ...]:
    """The same verdicts after all rules; of each author, those that rest on seeds are corrected for their number.

    >>> claims = [Claim(name, "", "", "at most", 0.0, by=by) for name, by in (("a", "paper"), ("b", "ours"), ("c", "ours"))]
    >>> found = [verdict_of(claim, Measurement(-1.0, 0.0, "", p=0.04), "") for claim in claims]
    >>> [each.verdict for each in judge_together(found)]  # ours are two, of which one would be decided by chance
    ['holds', 'undecided', 'undecided']
    """
    judged: dict[str, ClaimVerdict] = {}
    for author in {v.claim.by for v in verdicts}:
        family = {v.claim.id: v.p for v in verdicts if v.claim.by == author and v.p is not None and not rule_on_runs(v)}
        decided = decided_by_holm(family)
        for each in verdicts:
            if each.claim.by == author:
                known = each.p is None or each.claim.id in decided
                judged[each.claim.id] = _under_rules(replace(each, verdict=each.alone if known else "undecided"))
    return tuple(judged[v.claim.id] for v in verdicts)


def _under_rules(found: ClaimVerdict) -> ClaimVerdict:
    rule = rule_on_runs(found)
    if not rule and found.verdict == "fails" and found.claim.by != "ours" and found.claim.setting == "scaled":
        rule = OTHERWISE
    verdict = "undecided" if rule else found.verdict
    return replace(found, verdict=verdict, decided=verdict != "undecided", undecided_by=rule)


def rule_on_runs(found: ClaimVerdict) -> str:
    """The rule that too few runs break, or nothing."""
    if found.claim.one_run and found.measured is not None:
        return "one training run, which decides nothing about training"
    if found.claim.seen and found.measured is not None:
        return "what it is measured under was chosen after its outcome had been seen, which decides nothing"
    if found.values is not None and found.values < FEWEST_SEEDS:
        return f"fewer than {FEWEST_SEEDS} seeds, which decide nothing"
    return ""


def _judge_sides(all_of_it: bool, none_of_it: bool) -> Judgement:
    return "holds" if all_of_it else "fails" if none_of_it else "undecided"


# ---- What a few seeds can tell ----
# A quantity that was measured with several seeds is a sample x_1 ... x_n, of differences within a seed where two ways of
# training are compared (the seed fixes first weights and the order of the data, so that pairing takes their noise away).
# Its interval is that of Student's t,
#
#     mean +- t(n - 1) s / sqrt(n),    s^2 = sum (x_i - mean)^2 / (n - 1),
#
# which covers the expectation in 95 % of samples when noise is normal, whatever its size. "All seeds agree" is no such
# rule: with a true difference of 0 it decides 50 % of samples of two and 25 % of samples of three. A sample without
# spread, such as counts that are all equal, has no s: it is judged by signs, p = 2^(1 - n), and so decides from six
# seeds on.
#
# A page with many claims would decide some by chance, so its claims are corrected for multiple comparisons (Holm), those
# of the paper, of summaries and ours each by themselves: the smallest p must be at most 0.05 / m, the next
# 0.05 / (m - 1), and so on. The chance that one claim or more of such a family is decided wrongly is then at most 5 %.


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
    return max(0.0, 1 - probability_within(distance / error, n - 1))


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
