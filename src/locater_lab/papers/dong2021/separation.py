"""How well one or two numbers of a head tell whether it has a label: rules with thresholds, and the order alone."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def interval_accuracy(score: Float[Tensor, " heads"], label: Tensor) -> float:
    """Mean of the two hit rates of the rule "score lies in [a, b]", at the best a and b.

    Sorted by score, a rule is a stretch of heads: the largest sum of +1/positives and -1/negatives over stretches, in
    one pass.

    >>> interval_accuracy(torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([False, True, True, False]))
    1.0
    """
    values, inverse = score.unique(return_inverse=True)
    weight = torch.where(label, 1 / label.sum(), -1 / (~label).sum()).double()
    steps = torch.zeros(len(values), dtype=torch.float64).index_add(0, inverse, weight).tolist()
    best = at = 0.0
    for step in steps:
        at = max(0.0, at + step)
        best = max(best, at)
    return (1 + best) / 2


def corner(low: Tensor, high: Tensor, label: Tensor) -> tuple[float, float]:
    """The a and b for which "low at least a and high at most b" has the best balanced accuracy, among the values at
    hand.

    >>> corner(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.0, 1.0, 2.0]), torch.tensor([False, True, False]))
    (1.0, 1.0)
    """
    order = high.argsort(stable=True)
    low, high, label = low[order], high[order], label[order]
    last = torch.cat([high[1:] > high[:-1], torch.tensor([True])])  # a threshold takes all that are equal to it
    weight = torch.where(label, 1 / label.sum(), -1 / (~label).sum()).double()
    best, thresholds = -math.inf, (0.0, 0.0)
    for a in low.unique():
        score, at = (weight * (low >= a)).cumsum(0).masked_fill(~last, -math.inf).max(0)
        if float(score) > best:
            best, thresholds = float(score), (float(a), float(high[at]))
    return thresholds


def ordering(score: Tensor, label: Tensor) -> float:
    """Chance that a head with the label has the higher score (the area under the curve); NaN where all are alike.

    >>> ordering(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([False, True, True]))
    1.0
    """
    yes, no = score[label], score[~label]
    if not len(yes) or not len(no):
        return math.nan
    return float(((yes[:, None] > no).double() + (yes[:, None] == no).double() / 2).mean())
