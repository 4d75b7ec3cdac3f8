"""The simplified two-layer model of the paper, on counts in place of sequences.

A sequence x_0 ... x_{L-1} is followed by an empty query token, and x_L is to be predicted. Head h of layer 1 (from 0)
looks at the H offsets h + 1 ... h + H before a token by a softmax of w[h], and its output v_h is scaled to length 1.
Layer 2 compares query and key t by products over subsets of heads,

    logit(t) = a sum_S c_S^2 prod_{h in S} <v_h(query), v_h(t)> / sum_S c_S^2,

and its output, p = sum_t softmax(logit)_t onehot(x_t), is the prediction.

The logit depends on the tokens at the 2 H - 1 offsets before query and key alone, and a chain repeats itself: the keys
of a sequence that have the same such tokens and the same x_t are counted once. Tokens are renamed in the order in which
the query sees them, which changes no loss and leaves fewer pairs of query and key to compute.

Axes: N sequences, U pairs of query and key, H heads, S tokens, B = S + 1 symbols (the last: before the sequence).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import combinations, product
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locater_lab.data.synthetic import NgramSource

Form = Literal["ce", "nll"]

HEADS, DEGREE = 3, 2
W_PLUS, W_MINUS, C_START, A_START = 3.0, 0.1, 0.01, 0.01
RATE = 1.0
EPS = 0.01  # of the loss -log(p + EPS); our choice
TRAINING_ROWS, HELD_OUT_ROWS = 9000, 1000  # sequences


def subsets(heads: int = HEADS, degree: int = DEGREE) -> list[tuple[int, ...]]:
    """Sets of offsets that layer 2 can compare, named by the offset that each head looks at first.

    >>> subsets(3, 2)
    [(), (1,), (2,), (3,), (1, 2), (1, 3), (2, 3)]
    """
    return [part for size in range(degree + 1) for part in combinations(range(1, heads + 1), size)]


@dataclass
class Counts:
    """What the model reads of N sequences: how often the query met each kind of key, and the token to predict."""

    tokens: int  # S
    heads: int
    targets: Int[Tensor, " N"]
    cell: Int[Tensor, " n"]  # sequence * S + token, of each kind of key
    pair: Int[Tensor, " n"]  # its pair of query and key
    count: Float[Tensor, " n"]
    at: list[tuple[Tensor, Tensor]]  # by head: (U,) patterns of query and of key in the head's table

    @classmethod
    def of(cls, rows: Int[Tensor, "N L+1"], tokens: int, heads: int = HEADS) -> Counts:
        """From sequences whose last token is the one to predict."""
        reach, B = 2 * heads - 1, tokens + 1
        rows = rename_tokens(rows, tokens, heads)
        N, T = rows.shape
        padded = torch.cat([torch.full((N, reach), tokens), rows], 1)
        codes = torch.zeros_like(rows)
        for offset in range(reach, 0, -1):  # digit `offset - 1` in base B
            codes = codes * B + padded[:, reach - offset : reach - offset + T]
        wide = B**reach
        kinds = (torch.arange(N)[:, None] * wide + codes[:, :-1]) * tokens + rows[:, :-1]
        kind, count = kinds.flatten().unique(return_counts=True)
        row, key, token = kind // (wide * tokens), kind // tokens % wide, kind % tokens
        pairs, pair = (codes[row, -1] * wide + key).unique(return_inverse=True)
        at = [tuple(code // B**h % B**heads for code in (pairs // wide, pairs % wide)) for h in range(heads)]
        return cls(tokens, heads, rows[:, -1], row * tokens + token, pair, count.double(), at)


def rename_tokens(rows: Int[Tensor, "N T"], tokens: int, heads: int = HEADS) -> Int[Tensor, "N T"]:
    """The same sequences with tokens numbered in the order of their last appearance before the query, latest first.
    Predictions of the model are in these names.

    >>> rename_tokens(torch.tensor([[0, 2, 1, 1, 0]]), 3).tolist()
    [[2, 1, 0, 0, 2]]
    """
    reach = 2 * heads - 1
    recent = rows[:, :-1].flip(1)[:, :reach]
    first = torch.stack([torch.where(recent == token, torch.arange(recent.shape[1]), reach + token).amin(1)
                         for token in range(tokens)], 1)  # fmt: skip
    return first.argsort(1).argsort(1).gather(1, rows)


@dataclass
class Model:
    """Parameters. `c` is in the order of `subsets`, w[h, j] the logit of offset h + 1 + j."""

    tokens: int = 3
    heads: int = HEADS
    degree: int = DEGREE
    w_plus: float = W_PLUS
    c: Tensor = field(init=False)
    w: Tensor = field(init=False)
    a: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.sets = subsets(self.heads, self.degree)
        self.c = torch.full((len(self.sets),), C_START, dtype=torch.float64)
        self.w = torch.full((self.heads, self.heads), W_MINUS, dtype=torch.float64)
        self.w[:, 0] = self.w_plus
        self.a = torch.tensor(A_START, dtype=torch.float64)
        symbols = torch.tensor(list(product(range(self.tokens + 1), repeat=self.heads))).flip(1)  # (B^H, H)
        self.symbols = symbols
        self.vectors = torch.eye(self.tokens + 1, dtype=torch.float64)[symbols][..., : self.tokens]  # (B^H, H, S)

    def shares(self) -> list[float]:
        """Of each subset in sum c^2."""
        return (self.c**2 / (self.c**2).sum()).tolist()

    def masses(self) -> list[float]:
        """Weight of each head of layer 1 on its first offset, all of its offsets in sight."""
        return self.w.softmax(1)[:, 0].tolist()

    def similarities(self, counts: Counts) -> list[Float[Tensor, " U"]]:
        """<v_h(query), v_h(key)> of every pair, by head."""
        missing = self.symbols == self.tokens
        similarities = []
        for h, (query, key) in enumerate(counts.at):
            logits = self.w[h].expand(len(missing), -1).masked_fill(missing, -1e9)
            p = logits.softmax(1).masked_fill(missing, 0.0)
            v = (p[..., None] * self.vectors).sum(1)
            v = v / v.norm(dim=1, keepdim=True).clamp_min(1e-12)
            similarities.append((v @ v.mT).flatten().index_select(0, query * len(v) + key))
        return similarities

    def logits(self, counts: Counts) -> Float[Tensor, " U"]:
        """Of every pair of query and key."""
        like, share = self.similarities(counts), self.c**2 / (self.c**2).sum()
        total = torch.zeros_like(like[0])
        for part, weight in zip(self.sets, share.unbind(), strict=True):
            total = total + reduce(torch.mul, (like[h - 1] for h in part), weight)
        return self.a * total

    def __call__(self, counts: Counts) -> Float[Tensor, "N S"]:
        """Predictions, in the names of `rename_tokens`."""
        weight = self.logits(counts).exp().index_select(0, counts.pair) * counts.count
        totals = weight.new_zeros(len(counts.targets) * counts.tokens).index_add(0, counts.cell, weight)
        totals = totals.view(-1, counts.tokens)
        return totals / totals.sum(1, keepdim=True)


def loss(p: Float[Tensor, "N S"], targets: Int[Tensor, " N"], form: Form) -> Tensor:
    """`ce`: probabilities go through cross-entropy as if they were logits, as in the published code; so the loss of a
    certain and right prediction is log(1 + (S - 1) / e), not 0. `nll`: -log(p + EPS), which the theory is about.
    """
    right = p.gather(1, targets[:, None])[:, 0]
    if form == "ce":
        return (p.exp().sum(1).log() - right).mean()
    return -torch.log(right + EPS).mean()


def fit(
    model: Model,
    counts: Counts,
    epochs: int,
    parts: Collection[str] = ("c", "w", "a"),
    form: Form = "ce",
    keep: Collection[int] = (),
    held_out: Counts | None = None,
) -> list[dict[str, Any]]:
    """Gradient descent on all sequences at once, of some of the parameters; what was seen before the epochs of `keep`."""
    trained = [getattr(model, name).requires_grad_() for name in parts]
    kept = []
    for epoch in range(epochs + 1):
        value = loss(model(counts), counts.targets, form)
        if epoch in keep:
            kept.append({"epoch": epoch, "loss": float(value.detach()), **state_of(model, held_out, form)})
        if epoch < epochs:
            gradients = torch.autograd.grad(value, trained)
            with torch.no_grad():
                for parameter, gradient in zip(trained, gradients, strict=True):
                    parameter -= RATE * gradient
    for parameter in trained:
        parameter.requires_grad_(False)
    return kept


@torch.no_grad()
def state_of(model: Model, held_out: Counts | None, form: Form) -> dict[str, Any]:
    """The parameters as numbers, and the loss on other sequences."""
    state: dict[str, Any] = {"a": float(model.a), "shares": model.shares(), "masses": model.masses()}
    if held_out is not None:
        state["held_out"] = float(loss(model(held_out), held_out.targets, form))
    return state


def chosen_subset(model: Model) -> tuple[int, ...]:
    """The subset with the largest share."""
    return model.sets[max(range(len(model.sets)), key=model.shares().__getitem__)]


def draw_sequences(
    seed: int, rows: int, length: int = 100, source: NgramSource | None = None
) -> Int[Tensor, "rows length+1"]:
    """Sequences of the paper's source, or of another."""
    source = source or SOURCE
    return source.sample(rows, length, torch.Generator().manual_seed(seed))


SOURCE = NgramSource(3, (1, 2), 0.1)


def at_epochs(curve: Sequence[Mapping[str, Any]], key: str) -> dict[int, Any]:
    """A column of a curve by epoch."""
    return {row["epoch"]: row[key] for row in curve}
