"""Deletion and insertion curves: what is left of the target when tokens are taken away in the order of their scores.

Protocol of Chefer, Gur and Wolf 2021. The positive test takes away the most relevant tokens first: the faster the
target falls, the better the scores. The negative test takes away the least relevant first: the longer it stays, the
better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from locater.brief import brief
from locater.errors import LocaterError
from locater.explain.explanation import Explanation
from locater.explain.targets import Target, vectors
from locater.explain.token_removal import TokenRemoval
from locater.observing.inputs import as_keywords, run_checked

FRACTIONS = (0.0, 0.25, 0.5, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)


@dataclass(frozen=True, eq=False)
class Curve:
    """The target at every fraction of tokens taken away."""

    fractions: tuple[float, ...]
    values: Float[Tensor, " F"]  # the target
    probabilities: Float[Tensor, " F"] | None  # softmax of the logits, where there are several
    unchanged: Bool[Tensor, " F"] | None  # whether the target is the model's first choice of several

    __repr__ = brief

    @property
    def area(self) -> float:
        """Area under the probabilities, or under the values where there are none, over the width of the fractions."""
        y = self.values if self.probabilities is None else self.probabilities
        return self._area(y)

    @property
    def accuracy_area(self) -> float | None:
        """Area under `unchanged`: for one input; a study takes the mean over many."""
        return None if self.unchanged is None else self._area(self.unchanged.to(self.values))

    def _area(self, y: Tensor) -> float:
        x = torch.tensor(self.fractions, dtype=y.dtype)
        return float(torch.trapezoid(y, x) / (x[-1] - x[0]))


@dataclass(frozen=True, eq=False)
class Deletion:
    """Both tests of one explanation. `tokens` are those that could be taken away, the most relevant first."""

    method: str
    target: Target
    tokens: tuple[int, ...]
    positive: Curve  # the most relevant first: deletion
    negative: Curve  # the least relevant first

    __repr__ = brief

    @property
    def insertion(self) -> Curve:
        """The negative test read backwards: the fraction of tokens present, the most relevant put in first."""
        curve = self.negative
        return Curve(
            tuple(1 - x for x in reversed(curve.fractions)),
            curve.values.flip(0),
            None if curve.probabilities is None else curve.probabilities.flip(0),
            None if curve.unchanged is None else curve.unchanged.flip(0),
        )

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row per test and fraction, for a table or a plot."""
        for test, curve in (("positive", self.positive), ("negative", self.negative)):
            for at, fraction in enumerate(curve.fractions):
                yield {
                    "method": self.method,
                    "test": test,
                    "fraction": fraction,
                    "value": float(curve.values[at]),
                    "probability": None if curve.probabilities is None else float(curve.probabilities[at]),
                    "unchanged": None if curve.unchanged is None else bool(curve.unchanged[at]),
                }


def deletion(
    model: nn.Module,
    inputs: Mapping[str, Any] | Tensor,
    explanation: Explanation,
    fractions: Sequence[float] = FRACTIONS,
    *,
    replace: float | None = None,
    keep: Sequence[int] | None = None,
) -> Deletion:
    """Run `model` with the given fractions of tokens taken away, in the order of `explanation.scores` and against it.

    Tokens of a text are left out, which makes it shorter, or replaced by the id `replace`. Patches of an image are
    filled with the pixel value `replace` (0, or the middle grey of an image of bytes). `keep` are tokens that stay: by
    default the special ones of the model, and the one whose output is explained.

    >>> from locater.explain import rollout
    >>> from locater_lab.train import Shape, Transformer
    >>> _ = torch.manual_seed(0)
    >>> model = Transformer(Shape(vocabulary=16, layers=1, width=16, heads=2, kv_heads=2, hidden=16))
    >>> ids = torch.arange(8)[None]
    >>> curves = deletion(model, ids, rollout(model, ids), fractions=(0, 0.5, 1))
    >>> len(curves.tokens), curves.positive.values.shape          # the last token stays: its output is explained
    (7, torch.Size([3]))
    """
    steps = tuple(float(x) for x in fractions)
    if len(steps) < 2 or list(steps) != sorted(set(steps)) or not 0 <= steps[0] <= steps[-1] <= 1:
        raise LocaterError(f"fractions={list(fractions)}: two or more numbers between 0 and 1, in ascending order")
    model = getattr(model, "_orig_mod", model)
    removal = TokenRemoval(model, as_keywords(model, inputs), explanation, replace, keep)
    ranked = [token for token, _ in explanation.ranked() if token in removal.removable]

    def curve(order: list[int]) -> Curve:
        points = [_measured(model, removal, order[: round(x * len(order))]) for x in steps]
        values, probabilities, unchanged = zip(*points, strict=True)
        return Curve(
            steps,
            torch.tensor(values),
            None if None in probabilities else torch.tensor(probabilities),
            None if None in unchanged else torch.tensor(unchanged),
        )

    return Deletion(explanation.method, explanation.target, tuple(ranked), curve(ranked), curve(ranked[::-1]))


def _measured(
    model: nn.Module, removal: TokenRemoval, tokens: Sequence[int]
) -> tuple[float, float | None, bool | None]:
    """The target without some tokens, its probability, and whether it is the first choice; both None without several
    logits.
    """
    batch, target = removal.without(tokens)
    output = run_checked(model, batch)
    value = float(target.number(output))
    entries = vectors(output)[0][0]
    entries = entries if target.position is None else entries[target.position]
    if target.index is None or len(entries) == 1:  # of a single logit the softmax is 1, whatever it is
        return value, None, None
    return value, float(entries.softmax(-1)[target.index]), int(entries.argmax()) == target.index
