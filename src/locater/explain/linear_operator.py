"""`operator()`: a model at one input as one linear map from its input tokens to its output (Atad and others 2026)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.explain.collapses import CONFIDENCE, Collapsed, FrozenOperator, by_norm, with_input
from locater.explain.explanation import Explanation
from locater.explain.readout import Readout, check_sum, frozen_with_readout
from locater.explain.targets import TargetChoice

Collapse = Literal["logit", "input", "input_output", "norm"]
EXACT_WIDTH = 256  # wider models take random probes for their norms
PROBES = 16


def operator(
    model: nn.Module,
    inputs: Mapping[str, Tensor] | Tensor,
    target: TargetChoice = None,
    *,
    collapse: Collapse = "logit",
    matrix: bool = False,
    probes: int | None = None,
    seed: int = 0,
) -> Explanation:
    """Scores of input tokens by the operator T of the model at this input (`inputs`: keywords, or token ids).

    With attention maps, denominators of norms and activation ratios frozen at their values, the stream y_i at the
    end is sum_j T_ij x_j + c_i, exactly, with x_j the stream that enters the first block. `collapse` makes one number
    of each T_ij:

        "logit"         u^T T_ij x_j, u the direction of the target; scores and offset sum to the target
        "input_output"  y_i^T T_ij x_j; scores and offset sum to |y_i|^2
        "input"         |T_ij x_j|
        "norm"          |T_ij|_F, exactly with probes=0, otherwise from this many random probes with a 95% interval
                        (None: exactly up to a width of 256, 16 probes above)

    `matrix=True` adds all output tokens. docs/explain.md has the cost of each.

    >>> from locater_lab.train import Shape, Transformer
    >>> _ = torch.manual_seed(0)
    >>> model = Transformer(Shape(vocabulary=64, layers=3, width=32, heads=4, kv_heads=2, hidden=48), scale=0.2)
    >>> explanation = operator(model, torch.arange(10)[None], target=7)
    >>> total = float(explanation.scores.sum()) + explanation.offset
    >>> abs(total - explanation.target.value) < 1e-5
    True
    """
    _check(collapse, probes)
    paths, readout = frozen_with_readout(model, inputs, target, "linear")
    with torch.no_grad():
        T = FrozenOperator(paths)
        probes = (0 if T.x.shape[1] <= EXACT_WIDTH else PROBES) if probes is None else probes
        collapsed, offset, exact = _collapsed(T, readout, collapse, matrix, probes, seed)
        if offset is not None and collapse == "logit":
            total = float(collapsed.scores.double().sum()) + offset
            check_sum(readout, total, paths.output[0], next(model.parameters()).dtype)
    how = f"one forward pass of the model, then {collapsed.passes} through the frozen one"
    table, interval = (None if x is None else x.cpu() for x in (collapsed.matrix, collapsed.interval))
    return Explanation(
        "operator",
        readout.target,
        collapsed.scores.cpu(),
        table,
        offset=offset,
        interval=interval,
        exact=exact,
        how=how,
    )


def _check(collapse: str, probes: int | None) -> None:
    if collapse not in get_args(Collapse):
        raise LocaterError(f"collapse={collapse!r} is not known: use {', '.join(map(repr, get_args(Collapse)))}")
    if probes is not None and (not isinstance(probes, int) or probes < 0 or collapse != "norm"):
        raise LocaterError(f"probes={probes}: a whole number from 0 on, and for collapse='norm' only")


def _collapsed(
    T: FrozenOperator, readout: Readout, collapse: Collapse, matrix: bool, probes: int, seed: int
) -> tuple[Collapsed, float | None, str]:
    """Numbers, offset, and what they are exact about."""
    tokens = readout.tokens
    if collapse == "input":
        return with_input(T, tokens, matrix), None, "the norms of the vectors T_ij x_j; they have no sum"
    if collapse == "norm":
        exact = "the Frobenius norms of T_ij; they have no sum"
        if probes:
            exact = (
                f"estimates from {probes} random probes, unbiased for the squares; each interval holds the norm with a "
                f"probability of at least {CONFIDENCE:.0%}"
            )
        return by_norm(T, tokens, matrix, probes, seed), None, exact
    y = torch.einsum("t,td->d", tokens, T.y)
    covector = readout.covector if collapse == "logit" else torch.outer(tokens, y)
    offset = float((covector.double() * T.constants().double()).sum())
    passes = "one backward pass and one forward pass for the offset"
    table = None
    if matrix:
        table = T.along_each(readout.rows if collapse == "logit" else T.y)
        passes += f", and {len(T.x)} backward passes for the matrix, one per output token"
    result = Collapsed(T.along(covector), passes, table)
    if collapse == "logit":
        return result, offset + readout.constant, f"scores and offset sum to the target; {readout.note}"
    return result, offset, "scores and offset sum to |y|^2, y the last stream at the tokens that are read"
