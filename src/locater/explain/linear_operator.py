"""Scores of input tokens from a frozen model: `operator()`, one linear map from input tokens to the output (Atad and
others 2026), and `paths()`, sums over ways through the layers.

The operator T (T tokens x d channels, twice) is never built. A forward pass through the frozen model carries a field x
to T x, a backward pass a covector g to T^T g; several are carried at once. T_ij (d x d) maps input token j to output
token i, x_j is the input stream, y_i the output stream. A collapse makes one number of each T_ij. Where several output
tokens are read, "the output" is their mean, and T_ij the mean of their rows.

The readout says how a model makes the target of its last stream, as a covector on that stream and a constant.

The last stream is what the frozen model ends with, after the final norm. The readout is what follows: the head of a
language model, a classifier, or the mean over tokens. Its gradient u at this input is the covector:

    target = sum_i u_i . y_i + constant          i: output tokens

A linear readout has the same u everywhere. Otherwise this is its tangent, and `note` says so. A soft cap on the logits
is no tangent: it is frozen at the ratio of the logit to what it was before, like an activation.

Axes: n fields or covectors, T tokens, d width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.explain.explanation import Explanation, Target, TargetChoice, choose_target, vectors
from locater.explain.freezing import Mlp, check_mlp, frozen_paths, tolerance
from locater.explain.linear_steps import Branch, ExpertMixture, HeadBranch
from locater.explain.path_sums import Paths
from locater.explain.recorded_run import Inputs, Run, as_run
from locater.numerics import upcast
from locater.sources.open_source import config_of

Collapse = Literal["logit", "input", "input_output", "norm"]
EXACT_WIDTH = 256  # wider models take random probes for their norms
PROBES = 16
BYTES_AT_ONCE = 2**28  # of hidden units, of all fields that are carried together
CONFIDENCE = 0.95


# The readout

LINEAR = "the readout is linear"
CAPPED = "the readout is linear up to a soft cap, which is frozen at its ratio"
TANGENT = "the readout is not linear and is replaced by its tangent at this input, whose constant is in the offset"


@dataclass(frozen=True)
class Readout:
    """One target of one run."""

    target: Target
    covector: Float[Tensor, "T d"]
    constant: float  # the part of the target that does not come from the last stream
    rows: Float[Tensor, "T d"]  # for each output token, the covector of the same entry there
    note: str
    dtype: torch.dtype  # of the model's parameters

    @property
    def tokens(self) -> Float[Tensor, " T"]:
        """Weights of the output tokens that are read, of sum 1: one of them, or several in equal parts."""
        read = (self.covector != 0).any(-1)
        return read.to(self.covector) / read.sum()


def frozen_with_readout(
    model: nn.Module | Run, inputs: Inputs | None, target: TargetChoice, mlp: Mlp
) -> tuple[Paths, Readout]:
    """The model run once on one input and frozen, and the readout of the target."""
    run = as_run(model, inputs, blocks=True)
    with torch.inference_mode(False), torch.enable_grad():
        readout = _readout(config_of(run.model).get("final_logit_softcapping"), run.end, run.output, target)
    time_first = run.block.time_first
    covector, rows = ((x.transpose(0, 1) if time_first else x)[0] for x in (readout.covector, readout.rows))
    paths = frozen_paths(run, mlp)
    constant = readout.target.value - float((covector.double() * paths.output[0].double()).sum())
    return paths, Readout(readout.target, covector, constant, rows, readout.note, next(run.model.parameters()).dtype)


def _readout(cap: float | None, end: Tensor, output: Any, choice: TargetChoice) -> Readout:
    """The readout with covectors in the shape of the model's stream, and its constant still open."""
    target = choose_target(output, choice)
    values, _ = vectors(output)
    number = target.number(output)
    if not number.requires_grad:
        raise LocaterError(f"{target.what} does not depend on the last stream: there is nothing to explain")
    cap = None if target.index is None else cap
    covector = _gradient(_without_cap(number, cap), end, graph=cap is None)
    note = CAPPED if cap else LINEAR
    if cap is None and covector.requires_grad:
        (bend,) = torch.autograd.grad((covector * end).sum(), end, retain_graph=True)
        # the derivative of u . y is u where u does not change with y
        if not torch.equal(bend, covector):
            note = TANGENT
    rows = covector
    if target.position is not None:
        rows = _gradient(_without_cap(values[0, :, target.index], cap), end)
    return Readout(target, upcast(covector.detach()), 0.0, upcast(rows.detach()), note, end.dtype)


def _gradient(numbers: Tensor, end: Tensor, graph: bool = False) -> Tensor:
    (gradient,) = torch.autograd.grad(numbers.sum(), end, retain_graph=True, create_graph=graph)
    return gradient


def _without_cap(numbers: Tensor, cap: float | None) -> Tensor:
    """The logits times frozen ratios: their gradient is that of the logits before the cap, times the ratio."""
    if cap is None:
        return numbers
    numbers = upcast(numbers)
    if bool((numbers.detach().abs() >= cap).any()):
        raise LocaterError(f"a logit has reached the soft cap of {cap}, where it no longer changes: use more precision")
    before = cap * torch.atanh(numbers / cap)
    ratio = torch.where(before == 0, 1.0, numbers / before).detach()
    return before * ratio


def check_sum(readout: Readout, total: float, y: Float[Tensor, "T d"]) -> None:
    """Refuse a sum of scores and offset that is not the target: then padding is read, which attention does not see."""
    value = readout.target.value
    size = max(abs(value), float(readout.covector.norm() * y.norm()))
    if not abs(total - value) <= tolerance(readout.dtype) * size:
        raise LocaterError(f"scores and offset sum to {total:.6g}, the target is {value:.6g}: leave padding out")


# The operator


def operator(
    model: nn.Module | Run,
    inputs: Inputs | None = None,
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
        collapsed, offset, exact = _collapse(T, readout, collapse, matrix, probes, seed)
        if offset is not None and collapse == "logit":
            total = float(collapsed.scores.double().sum()) + offset
            check_sum(readout, total, paths.output[0])
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


def _collapse(
    T: FrozenOperator, readout: Readout, collapse: Collapse, matrix: bool, probes: int, seed: int
) -> tuple[CollapseResult, float | None, str]:
    """Numbers, offset, and what they are exact about."""
    tokens = readout.tokens
    if collapse == "input":
        return collapse_by_input(T, tokens, matrix), None, "the norms of the vectors T_ij x_j; they have no sum"
    if collapse == "norm":
        exact = "the Frobenius norms of T_ij; they have no sum"
        if probes:
            exact = (
                f"estimates from {probes} random probes, unbiased for the squares; each interval holds the norm with a "
                f"probability of at least {CONFIDENCE:.0%}"
            )
        return collapse_by_norm(T, tokens, matrix, probes, seed), None, exact
    y = torch.einsum("t,td->d", tokens, T.y)
    covector = readout.covector if collapse == "logit" else torch.outer(tokens, y)
    offset = float((covector.double() * T.constants().double()).sum())
    passes = "one backward pass and one forward pass for the offset"
    table = None
    if matrix:
        table = T.along_each(readout.rows if collapse == "logit" else T.y)
        passes += f", and {len(T.x)} backward passes for the matrix, one per output token"
    result = CollapseResult(T.along(covector), passes, table)
    if collapse == "logit":
        return result, offset + readout.constant, f"scores and offset sum to the target; {readout.note}"
    return result, offset, "scores and offset sum to |y|^2, y the last stream at the tokens that are read"


@dataclass(frozen=True)
class CollapseResult:
    """Numbers of one collapse, and how many passes through the frozen model they took."""

    scores: Float[Tensor, " T"]
    passes: str
    matrix: Float[Tensor, "T T"] | None = None
    interval: Float[Tensor, "2 T"] | None = None


@dataclass(frozen=True)
class FrozenOperator:
    """T of a model that was frozen on one input."""

    paths: Paths

    @property
    def x(self) -> Float[Tensor, "T d"]:
        return self.paths.input[0]

    @property
    def y(self) -> Float[Tensor, "T d"]:
        """The output, as the frozen model gives it."""
        return self.paths.streams[-1][0]

    def constants(self) -> Float[Tensor, "T d"]:
        """The affine part: y_i - sum_j T_ij x_j. One forward pass."""
        return self.y - self.paths.push_forward(self.paths.input[None])[0, 0]

    def forward(self, fields: Float[Tensor, "n T d"]) -> Float[Tensor, "n T d"]:
        return self.paths.push_forward(fields[:, None])[:, 0]

    def pull_back(self, covectors: Float[Tensor, "n T d"]) -> Float[Tensor, "n T d"]:
        return self.paths.pull_back(covectors[:, None])[:, 0]

    def at_once(self) -> int:
        """How many fields fit in BYTES_AT_ONCE."""
        widths = [self.x.shape[1]]
        widths += [
            _hidden_units(b) for step in self.paths.frozen for b in (step.branches, step.beside) if b is not None
        ]
        return max(1, BYTES_AT_ONCE // (max(widths) * self.x.shape[0] * self.x.element_size()))

    def along(self, covectors: Float[Tensor, "T d"]) -> Float[Tensor, " T"]:
        """sum_i u_i^T T_ij x_j for every input token j: one backward pass."""
        return (self.pull_back(covectors[None])[0] * self.x).sum(-1)

    def along_each(self, covectors: Float[Tensor, "T d"]) -> Float[Tensor, "T T"]:
        """u_i^T T_ij x_j for every pair: one backward pass per output token."""
        rows = range(len(covectors))
        return torch.cat([(g * self.x).sum(-1) for g in self._backward(rows, lambda i: (i, covectors[i]))])

    def contributions(self, tokens: Float[Tensor, " T"]) -> Iterator[tuple[range, Tensor, Tensor]]:
        """T_ij x_j for chunks of input tokens j: the chunk, the mean over `tokens` (n, d), and all i (n, T, d). One
        forward pass per input token.
        """
        for chunk in _chunks(len(self.x), self.at_once()):
            fields = self.x.new_zeros(len(chunk), *self.x.shape)
            at = torch.arange(len(chunk), device=self.x.device)
            fields[at, at + chunk.start] = self.x[chunk.start : chunk.stop]
            carried = self.forward(fields)
            yield chunk, torch.einsum("t,ntd->nd", tokens, carried), carried

    def _backward(self, numbers: range, seed: Callable[[int], tuple[int, Tensor]]) -> Iterator[Tensor]:
        """T^T g for covectors g at one output token each, in chunks: (n, T, d)."""
        for chunk in _chunks(len(numbers), self.at_once()):
            covectors = self.x.new_zeros(len(chunk), *self.x.shape)
            for place, number in enumerate(numbers[chunk.start : chunk.stop]):
                row, vector = seed(number)
                covectors[place, row] = vector
            yield self.pull_back(covectors)

    def spread(self, vectors: Float[Tensor, "n d"], tokens: Float[Tensor, " T"]) -> Iterator[Tensor]:
        """T^T g for covectors g on the mean of `tokens`, in chunks: (n, T, d)."""
        for chunk in _chunks(len(vectors), self.at_once()):
            yield self.pull_back(torch.einsum("nd,t->ntd", vectors[chunk.start : chunk.stop], tokens))


def collapse_by_input(T: FrozenOperator, tokens: Tensor, matrix: bool) -> CollapseResult:
    """|T_ij x_j|: one forward pass per input token, or one backward pass per channel where those are fewer."""
    length, width = T.x.shape
    if length > width and not matrix:
        squares = T.x.new_zeros(length)
        for g in T.spread(torch.eye(width).to(T.x), tokens):
            squares += (g * T.x).sum(-1).square().sum(0)
        return CollapseResult(squares.sqrt(), f"{width} backward passes, one per channel")
    scores, table = T.x.new_zeros(length), T.x.new_zeros(length, length)
    for chunk, mean, each in T.contributions(tokens):
        scores[chunk.start : chunk.stop] = mean.norm(dim=-1)
        table[:, chunk.start : chunk.stop] = each.norm(dim=-1).mT
    return CollapseResult(scores, f"{length} forward passes, one per input token", table)


def collapse_by_norm(T: FrozenOperator, tokens: Tensor, matrix: bool, probes: int, seed: int) -> CollapseResult:
    """|T_ij|_F: one backward pass per channel of the output token, or `probes` with random covectors.

    A covector g of independent standard normals has E |T_ij^T g|^2 = |T_ij|_F^2, so the mean of these squares is
    unbiased for the square of the norm.
    """
    length, width = T.x.shape
    vectors = torch.eye(width).to(T.x)
    if probes:
        vectors = torch.randn(probes, width, generator=torch.Generator().manual_seed(seed)).to(T.x)
    share = 1 / (probes or 1)
    table = None
    if matrix:
        table = torch.stack([_squares(T, vectors, row) for row in torch.eye(length).to(T.x)]).mul(share).sqrt()
    squares = _squares(T, vectors, tokens) * share
    interval = None
    if probes:
        low, high = (quantile(probes, p) / probes for p in ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
        interval = torch.stack([(squares / high).sqrt(), (squares / low).sqrt()])
    rows = f" for each of {length + 1} rows" if matrix else ""
    passes = f"{len(vectors)} backward passes{rows}, " + ("with random covectors" if probes else "one per channel")
    return CollapseResult(squares.sqrt(), passes, table, interval)


def _squares(T: FrozenOperator, vectors: Tensor, tokens: Tensor) -> Tensor:
    total = T.x.new_zeros(len(T.x))
    for g in T.spread(vectors, tokens):
        total += g.square().sum((0, 2))
    return total


def quantile(degrees: int, probability: float) -> float:
    """Of chi-square with that many degrees of freedom, by bisection.

    >>> round(quantile(16, 0.975), 3), round(quantile(16, 0.025), 3)
    (28.845, 6.908)
    """
    half, p = torch.tensor(degrees / 2, dtype=torch.float64), probability
    low, high = 0.0, 2.0 * degrees + 100.0
    for _ in range(80):
        middle = (low + high) / 2
        below = float(torch.special.gammainc(half, torch.tensor(middle / 2, dtype=torch.float64))) < p
        low, high = (middle, high) if below else (low, middle)
    return low


def _hidden_units(branch: Branch) -> int:
    if isinstance(branch, HeadBranch):
        return branch.out.shape[0] * branch.out.shape[1]
    return max(e.up.shape[0] for e in branch.experts) if isinstance(branch, ExpertMixture) else branch.up.shape[0]


def _chunks(count: int, size: int) -> Iterator[range]:
    return (range(start, min(start + size, count)) for start in range(0, count, size))


# The paths


def paths(
    model: nn.Module | Run,
    inputs: Inputs | None = None,
    target: TargetChoice = None,
    *,
    mlp: Mlp = "source",
) -> Explanation:
    """Scores of input tokens: the sum of all paths from a token to the target (`inputs`: keywords, or token ids).

    A path goes through one head or the skip in each layer (`decompose`, docs/explain.md). With mlp="source" the output
    of an MLP is a constant, and scores count what attention carries to the target. With mlp="linear" paths also go
    through MLPs, and the scores are those of `operator`. The offset has the paths that start at constants, and at MLPs
    that are a source.

    `parts["length"]` (L + 1,) is the target split by the number of heads that paths go through, and `parts["head"]`
    (L, H) the part that goes through each head; both with paths of every origin, in units of the target. A path goes
    through several heads, so the parts of heads do not sum to the target.

    >>> from locater_lab.train import Shape, Transformer
    >>> _ = torch.manual_seed(0)
    >>> model = Transformer(Shape(vocabulary=64, layers=3, width=32, heads=4, kv_heads=2, hidden=48), scale=0.2)
    >>> explanation = paths(model, torch.arange(10)[None], target=7)
    >>> explanation.parts["length"].shape, explanation.parts["head"].shape
    (torch.Size([4]), torch.Size([3, 4]))
    >>> abs(float(explanation.scores.sum()) + explanation.offset - explanation.target.value) < 1e-5
    True
    """
    check_mlp(mlp)
    frozen, readout = frozen_with_readout(model, inputs, target, mlp)
    with torch.no_grad():
        x, covector = frozen.input, readout.covector
        scores = (frozen.pull_back(covector[None, None])[0, 0] * x[0]).sum(-1)
        constants = frozen.streams[-1] - frozen.push_forward(x[None])[0]
        offset = readout.constant + float((constants[0].double() * covector.double()).sum())
        check_sum(readout, float(scores.double().sum()) + offset, frozen.output[0])
        parts = {
            "length": torch.einsum("lbtd,td->l", frozen.by_length().total, covector).cpu(),
            "head": frozen.along_heads(covector[None]).cpu(),
        }
    where = "constants and outputs of MLPs" if mlp == "source" else "constants"
    return Explanation(
        "paths",
        readout.target,
        scores.cpu(),
        offset=offset,
        parts=parts,
        exact=f"scores and offset (paths from {where}) sum to the target; {readout.note}",
        how=f"one forward pass of the model, frozen with mlp={mlp!r}; one backward pass through the frozen model, and "
        "its sums by length",
    )
