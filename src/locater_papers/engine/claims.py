"""A claim of a paper, what was measured of it, and the verdict that follows from the two.

A claim states a bound or a value for one quantity. A measurement brings a value and its spread, the half-width of the
interval that it is known to lie in. The verdict compares the whole interval with what is stated, so a measurement that
is too coarse to tell says `undecided` and not the more welcome of the two answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

Relation = Literal["at most", "at least", "about"]
Judgement = Literal["holds", "fails", "undecided"]


@dataclass(frozen=True)
class Claim:
    """One sentence of a paper (`by="paper"`) or of this project's own notes on it (`by="notes"`), and the number that
    decides it.
    """

    id: str
    says: str
    quantity: str  # what is measured
    relation: Relation
    stated: float
    tolerance: float = 0.0  # with "about": how far off still counts
    by: Literal["paper", "notes"] = "paper"


@dataclass(frozen=True)
class Measured:
    """A value, the half-width of its interval (`spread_of` says which interval), and the numbers behind it."""

    value: float
    spread: float
    spread_of: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """A claim beside its measurement. `measured` is None where nothing was measured, and `waits_for` then says what it
    needs.
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

    def to_dict(self) -> dict[str, Any]:
        """As it stands in the JSON document: `claim` is the sentence, `id` its short name."""
        known = {k: v for k, v in asdict(self.claim).items() if k not in ("says", "stated")}
        return {
            **known, "claim": self.claim.says, "stated": self.stated, "measured": self.measured, "spread": self.spread,
            "spread_of": self.spread_of, "verdict": self.verdict, "decided": self.decided, "command": self.command,
            "waits_for": self.waits_for, "numbers": dict(self.numbers),
        }  # fmt: skip


def over_seeds(values: Sequence[float], numbers: Mapping[str, Any] | None = None, of: str = "seeds") -> Measured:
    """Mean over seeds, with twice its standard error."""
    x = torch.tensor(values, dtype=torch.float64)
    return Measured(
        float(x.mean()), 2 * float(x.std()) / len(x) ** 0.5, f"2 standard errors over {len(x)} {of}", numbers or {}
    )


def seeds_range(values: Sequence[float], numbers: Mapping[str, Any] | None = None) -> Measured:
    """The middle of the seeds' range and its half-width: the verdict then asks all seeds to agree."""
    return half_range(values, f"half the range of {len(values)} seeds", {"by_seed": list(values), **(numbers or {})})


def half_range(values: Sequence[float], of: str, numbers: Mapping[str, Any] | None = None) -> Measured:
    """The middle of a range and its half-width; `of` says which range."""
    low, high = min(values), max(values)
    return Measured((low + high) / 2, (high - low) / 2, of, numbers or {})


def judge(claim: Claim, value: float, spread: float) -> Judgement:
    """Whether all of value - spread ... value + spread is as stated, none of it, or some. An end that differs from what
    is stated by rounding is there: rank correlations of a few seeds meet a bound exactly.

    >>> claim = Claim("x1", "errors are small", "error", "at most", 0.1)
    >>> judge(claim, 0.05, 0.01), judge(claim, 0.2, 0.01), judge(claim, 0.1, 0.01)
    ('holds', 'fails', 'undecided')
    >>> judge(Claim("x2", "shares are small", "share", "at most", 0.3), 0.1, 0.2)                      # 0.1 + 0.2 > 0.3 in floating point
    'holds'
    """
    if not (math.isfinite(value) and math.isfinite(spread)):
        return "undecided"
    low, high = value - abs(spread), value + abs(spread)
    slack = 1e-9 * max(abs(value), abs(spread))
    if claim.relation == "at most":
        return _sided(high <= claim.stated + slack, low > claim.stated + slack)
    if claim.relation == "at least":
        return _sided(low >= claim.stated - slack, high < claim.stated - slack)
    least, most = claim.stated - claim.tolerance - slack, claim.stated + claim.tolerance + slack
    return _sided(least <= low and high <= most, high < least or low > most)


def verdict_of(claim: Claim, found: Measured | None, command: str, waits_for: str = "") -> Verdict:
    """The verdict on a measurement; undecided where there is none."""
    if found is None:
        return Verdict(claim, claim.stated, None, None, "undecided", False, command, waits_for=waits_for)
    said = judge(claim, found.value, found.spread)
    value, spread = (x if math.isfinite(x) else None for x in (found.value, found.spread))
    return Verdict(
        claim, claim.stated, value, spread, said, said != "undecided", command, found.numbers, found.spread_of
    )


def _sided(all_of_it: bool, none_of_it: bool) -> Judgement:
    return "holds" if all_of_it else "fails" if none_of_it else "undecided"
