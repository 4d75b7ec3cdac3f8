"""What explanations are tested by: tokens taken away in their order, a token that is known to decide, parameters drawn
anew.

    area         of what is left of the target when the least relevant tokens go first, less the same when the most
                 relevant go first (Chefer, Gur and Wolf 2021): the larger, the better the order
    hit          1 where the token with the largest score is the one that decides
    likeness     rank correlation of the scores with those after the last blocks were drawn anew: scores that stay as
                 they were do not explain the model
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.explain import METHODS, Explanation, deletion, operator
from locater.numerics import spearman
from locater_lab.engine.explained import Explained

# the methods of this project's room, and the collapses of the operator as methods of their own
RIVALS = ("rollout", "raw_attention", "attention_norms")  # maps of attention put together without gradients
FRACTIONS = (0.0, 0.25, 0.5, 0.75, 0.9)  # of tokens taken away; some model needs one that is left
Method = Callable[[nn.Module, Mapping[str, Tensor], Any], Explanation]


def method(name: str) -> Method:
    """A method by name; `operator norm` is the operator with that collapse.

    >>> method("rollout") is METHODS["rollout"]
    True
    """
    if not name.startswith("operator "):
        return METHODS[name]
    collapse: Any = name.removeprefix("operator ")
    return lambda model, inputs, target: operator(model, inputs, target, collapse=collapse)


def areas(subject: Explained, name: str) -> list[float]:
    """The area between the two curves for each input, over the target's value where it is no probability."""
    explain, values = method(name), []
    for inputs, target in zip(subject.inputs, subject.targets, strict=True):
        explanation = explain(subject.model, inputs, target)
        curves = deletion(subject.model, inputs, explanation, FRACTIONS, replace=subject.blank)
        size = 1.0 if curves.positive.probabilities is not None else abs(float(curves.positive.values[0]))
        values.append((curves.negative.area - curves.positive.area) / size)
    return values


def hits(subject: Explained, name: str) -> float:
    """The share of inputs whose largest score is that of the token that decides."""
    explain = method(name)
    each = zip(subject.inputs, subject.targets, subject.deciding, strict=True)
    return fmean(explain(subject.model, x, target).ranked()[0][0] == place for x, target, place in each)


def likeness(subject: Explained, name: str, seed: int = 0) -> list[float]:
    """Mean rank correlation of scores with those of the same model whose last 1, 2, ... blocks were drawn anew, over
    inputs whose scores differ.
    """
    explain, model, values = method(name), copy.deepcopy(subject.model), []
    before = _scores(explain, subject.model, subject)
    for number, block in enumerate(reversed(blocks_of(model))):
        redraw(block, 100 * seed + number)
        pairs = zip(before, _scores(explain, model, subject), strict=True)
        alike = [x for x in (spearman(a, b) for a, b in pairs) if x is not None]
        if not alike:
            raise LocaterError(f"{name}: all scores of an input are equal, so that they have no rank correlation")
        values.append(fmean(alike))
    return values


def _scores(explain: Method, model: nn.Module, subject: Explained) -> list[Tensor]:
    each = zip(subject.inputs, subject.targets, strict=True)
    return [explain(model, inputs, target).scores for inputs, target in each]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model of `locater train`."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None:
        raise LocaterError(f"{type(model).__name__}: its blocks are not known here; use a model of locater train")
    return list(layers)


def redraw(block: nn.Module, seed: int) -> None:
    """Every matrix from a normal distribution of its own standard deviation."""
    rng = torch.Generator().manual_seed(seed)
    for p in block.parameters():
        if p.ndim > 1:
            p.data = torch.randn(p.shape, generator=rng) * p.data.std()


def difference(by_method: Mapping[str, Sequence[float]], better: str, rivals: Iterable[str] = RIVALS) -> list[float]:
    """`better` less the best rival (by its mean), input by input."""
    best = max((name for name in rivals if name in by_method), key=lambda name: fmean(by_method[name]))
    return [a - b for a, b in zip(by_method[better], by_method[best], strict=True)]


def cost(subject: Explained, names: Sequence[str], rounds: int = 5) -> dict[str, float]:
    """Seconds of a method over those of a forward pass, in turns on the same input; medians."""
    inputs, target = subject.inputs[0], subject.targets[0]
    taken: dict[str, list[float]] = {name: [] for name in ("forward", *names)}
    with torch.no_grad():
        subject.model(**inputs)
    for _ in range(rounds):
        for name, times in taken.items():
            began = time.perf_counter()
            if name == "forward":
                with torch.no_grad():
                    subject.model(**inputs)
            else:
                method(name)(subject.model, inputs, target)
            times.append(time.perf_counter() - began)
    forward = median(taken["forward"])
    return {name: median(taken[name]) / forward for name in names}
