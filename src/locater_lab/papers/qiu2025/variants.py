"""The paper's own table of variants: how far the mean gate orders sink and largest activation, and what a gate per head
costs. Study c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from typing import Any

import torch

from locater.numerics import spearman
from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.reproduction import Results, Setting, Study


@dataclass(frozen=True)
class Variant:
    """A row of Tables 1 and 4: a mixture-of-experts model of 15 billion parameters, 400 billion tokens."""

    name: str
    added: float | None  # million parameters, where the table has them
    perplexity: float
    gate: float  # mean
    largest: float  # activation
    sink: float  # attention on the first token


BASELINE = Variant("no gate", 0.0, 6.026, 1.0, 1053.0, 0.467)
TABLE = (
    Variant("after attention, per element", 201.0, 5.761, 0.116, 94.0, 0.048),
    Variant("after attention, per head", 1.6, 5.792, 0.172, 98.0, 0.073),
    Variant("on values, per element", 25.0, 5.820, 0.221, 125.0, 0.297),
    Variant("after attention, shared by heads", 201.0, 5.801, 0.271, 286.0, 0.301),
    Variant("without input", None, 5.917, 0.335, 471.0, 0.364),
    Variant("NS-sigmoid", None, 5.900, 0.653, 892.0, 0.451),
)

CLAIMS = (
    Claim("c1", "The more the gates close, the smaller the sink", "rank correlation of mean gate with first-token attention, six variants",
          "at least", 1.0, where="Table 4", bound="ours"),
    Claim("c2", "And the smaller the largest activation", "rank correlation of mean gate with largest activation, six variants",
          "at least", 1.0, by="ours"),
    Claim("c3", "Such an order is no accident of six rows", "share of all orders of six rows that have a correlation as high as c1",
          "at most", 0.01, by="ours"),
    Claim("c4", "Perplexity follows the mean gate too", "rank correlation of mean gate with perplexity, six variants",
          "at least", 1.0, by="ours"),
    Claim("c5", "One gate per head buys most of what one per element does, with a hundredth of the parameters",
          "gain in perplexity per head over that per element", "at least", 0.8, where="Table 1", bound="ours"),
    Claim("c6", "Most of the gain takes a gate that adds a function: one that ignores the input has less than half",
          "gain in perplexity of the gate without input over that per element", "at most", 0.5, by="ours"),
)  # fmt: skip


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; 0 where one side is constant."""
    return spearman(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)) or 0.0


def as_high(a: Sequence[float], b: Sequence[float]) -> float:
    """Share of the orders of b with at least the correlation that it has.

    >>> as_high([1.0, 2.0, 3.0], [5.0, 6.0, 7.0])                           # one of six
    0.16666666666666666
    """
    seen = correlation(a, b)
    orders = list(permutations(b))
    return sum(correlation(a, order) >= seen - 1e-12 for order in orders) / len(orders)


def gain(name: str) -> float:
    """What a variant takes off the baseline's perplexity."""
    return BASELINE.perplexity - next(v.perplexity for v in TABLE if v.name == name)


def measure(setting: Setting) -> Results:
    """From the table's own numbers."""
    gates, sinks = [v.gate for v in TABLE], [v.sink for v in TABLE]
    exact = "none: the table's own numbers"
    element = gain("after attention, per element")
    measured = {
        "c1": Measurement(correlation(gates, sinks), 0.0, exact),
        "c2": Measurement(correlation(gates, [v.largest for v in TABLE]), 0.0, exact),
        "c3": Measurement(as_high(gates, sinks), 0.0, "none: all 720 orders"),
        "c4": Measurement(correlation(gates, [v.perplexity for v in TABLE]), 0.0, exact),
        "c5": Measurement(gain("after attention, per head") / element, 0.0, exact),
        "c6": Measurement(gain("without input") / element, 0.0, exact),
    }
    return Results(measured, {"variants": [_row(v) for v in (BASELINE, *TABLE)]})


def _row(variant: Variant) -> dict[str, Any]:
    """As the page shows it, with the attention on the first token that is left behind the gate."""
    gate = None if variant is BASELINE else variant.gate
    return {**asdict(variant), "gate": gate, "acting": round(variant.gate * variant.sink, 3)}


STUDY = Study("the table's own order", CLAIMS, measure)
