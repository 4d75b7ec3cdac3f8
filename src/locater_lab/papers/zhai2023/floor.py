"""The floor under the entropy of attention: study a.

Theorem 3.1: for sigma = |W_Q W_K^T|, sigma_x = |X X^T| (spectral norms) and s = sigma sigma_x, every row of softmax(X
W_Q W_K^T X^T) has

    H >= log(1 + (T-1) b) + s sqrt(T (T-1)) b / (1 + (T-1) b),    b = exp(-s sqrt(T / (T-1)))

`entropy_floor(s, T)` is the right side, and also the least entropy of a row whose logits, less their mean, have the l2
norm s.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.theory import entropy_floor, entropy_floor_of_range
from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.compute import normal
from locater_lab.engine.reproduction import Results, Setting, Study

Row = Float[Tensor, "*n T"]

DRAWS = {True: 900, False: 9000}
TOKENS, WIDTHS, SIZES = (2, 3, 8, 32, 64), (2, 8, 16), (0.02, 0.1, 0.5, 2.0)
SEARCHES = {True: 50, False: 500}  # descents from each norm or range that look for rows under the floor
STEPS = 300
NORMS = (0.5, 2.0, 5.0, 10.0)  # of centred rows
LISTED = 8  # tokens of which every row of two levels is listed
ROUNDING = 1e-9

CLAIMS = (
    Claim(
        "a1", "Attention entropy is at least the bound of Theorem 3.1",
        "least of entropy less bound over all rows of random layers, in nats", "at least", -ROUNDING, where="Theorem 3.1",
    ),
    Claim(
        "a2", "The bound is reached by an attention layer: orthogonal tokens of one length, weights of rank one, a row of two levels",
        "largest distance of entropy from bound, in nats", "at most", ROUNDING, by="ours",
    ),
    Claim(
        "a3", "The l2 norm of the row's own logits, less their mean, may stand in the place of the two spectral norms",
        "least of entropy less this bound, random layers and descents that look for less, in nats", "at least", -ROUNDING, by="ours",
    ),
    Claim(
        "a4", "Of rows with two levels and a given norm, one high logit has the least entropy",
        "norms and lengths at which another number of high logits has less", "at most", 0.0, by="ours",
    ),
    Claim(
        "a5", "For large s the bound falls as T s exp(-s)",
        "bound over T s exp(-s), s = 20, T = 1024", "about", 1.0, 0.1, where="section 3.1", bound="ours",
    ),
    Claim(
        "a6", "In random layers the theorem promises less than half of what the row form does",
        "share of the row form's bound that the theorem has, median over rows of layers whose bound is above 0.1 nats", "at most", 0.5,
        by="ours",
    ),
    Claim(
        "a7", "Logits within a range Δ: two levels have the least entropy, with more than one high logit where Δ is small",
        "floor for Δ = 2, T = 64, in nats (4.044 with one high logit)", "about", 3.684, 1e-3, by="ours",
    ),
    Claim(
        "a8", "No logits within the range have less entropy",
        f"least of entropy less floor, every row of two levels of {LISTED} tokens and descents inside the range, in nats", "at least",
        -ROUNDING, by="ours",
    ),
)  # fmt: skip


def row_entropy(logits: Row) -> Float[Tensor, "*n"]:
    """Of softmax rows, in nats, from differences of logits, so that a nearly certain row has its digits.

    >>> round(row_entropy(torch.zeros(4)).item() - math.log(4), 6)
    0.0
    """
    z = logits - logits.amax(-1, keepdim=True)
    top = z.argmax(-1, keepdim=True)
    rest = torch.log1p(z.exp().scatter(-1, top, 0.0).sum(-1))  # log of the sum, whose largest term is 1
    return rest - (z * (z - rest[..., None]).exp()).sum(-1)


def centred_norm(logits: Row) -> Float[Tensor, "*n"]:
    return (logits - logits.mean(-1, keepdim=True)).norm(dim=-1)


def layer_rows(seed: int) -> tuple[Float[Tensor, "T T"], float]:
    """Logits of a random layer without scale, and s = |W_Q W_K^T| |X X^T|."""
    T, d, size = TOKENS[seed % 5], WIDTHS[seed // 5 % 3], SIZES[seed // 15 % 4]
    x, W = normal(T, d, seed=seed), normal(d, d, seed=seed + 10_000) @ normal(d, d, seed=seed + 20_000).mT * size / d
    spectral = torch.linalg.matrix_norm(W, 2) * torch.linalg.matrix_norm(x @ x.mT, 2)
    return x @ W @ x.mT, float(spectral)


def tight_layer(T: int, s: float) -> tuple[Float[Tensor, "T T"], float]:
    """X = I and W = s e_0 z^T with z = (T-1, -1, ..., -1) / sqrt(T (T-1)): logits of the first token have norm s and
    two levels.
    """
    x, z = torch.eye(T, dtype=torch.float64), torch.full((T,), -1.0, dtype=torch.float64)
    z[0] = T - 1
    W = s * torch.outer(x[0], z / math.sqrt(T * (T - 1)))
    spectral = torch.linalg.matrix_norm(W, 2) * torch.linalg.matrix_norm(x @ x.mT, 2)
    return x @ W @ x.mT, float(spectral)


def two_levels(T: int, norm: float) -> Float[Tensor, "high T"]:
    """Centred rows of this norm with 1, 2, ... T - 1 high logits."""
    rows = torch.stack([(torch.arange(T) < k).double() for k in range(1, T)])
    rows = rows - rows.mean(-1, keepdim=True)
    return norm * rows / rows.norm(dim=-1, keepdim=True)


def descended(T: int, count: int, norm: float | None = None, spread: float | None = None) -> Float[Tensor, " count"]:
    """Entropies where descents from random logits end, over centred rows of a norm or over rows within a range."""
    free = normal(count, T, seed=T).requires_grad_()
    optimizer = torch.optim.Adam([free], lr=0.1)

    def logits() -> Tensor:
        if norm is None:
            return (spread or 0.0) * free.sigmoid()
        z = free - free.mean(-1, keepdim=True)
        return norm * z / z.norm(dim=-1, keepdim=True)

    for _ in range(STEPS):
        optimizer.zero_grad()
        row_entropy(logits()).sum().backward()
        optimizer.step()
    with torch.no_grad():
        return row_entropy(logits())


def measure(setting: Setting) -> Results:
    """Random layers, the layer that is tight, and descents that look for less."""
    found, own, shares = [], [], []
    for seed in setting.each(list(range(DRAWS[setting.quick]))):
        logits, s = layer_rows(seed)
        T = len(logits)
        entropy, bound, sharp = row_entropy(logits), float(entropy_floor(s, T)), entropy_floor(centred_norm(logits), T)
        found.append(float((entropy - bound).min()))
        own.append(float((entropy - sharp).min()))
        shares += (bound / sharp[sharp > 0.1]).tolist()
    cases = [tight_layer(T, s) for T, s in product((2, 8, 64, 512), (0.1, 1.0, 5.0, 15.0))]
    off = max(abs(float(row_entropy(logits[0])) - float(entropy_floor(s, len(logits)))) for logits, s in cases)
    count = SEARCHES[setting.quick]
    lower = [x for norm in NORMS for x in (descended(12, count, norm=norm) - entropy_floor(norm, 12)).tolist()]
    others = sum(int(row_entropy(two_levels(T, s)).argmin()) != 0 for T, s in product((4, 16, 64), NORMS))
    of = f"none: least of {len(found)} layers"
    within_range = measure_range(setting)
    measured = {
        "a1": Measurement(min(found), 0.0, of),
        "a2": Measurement(off, 0.0, f"none: largest of {len(cases)} layers"),
        "a3": Measurement(min(*own, *lower), 0.0, f"{of} and {len(lower)} descents", {"closest": min(lower)}),
        "a4": Measurement(float(others), 0.0, "none: counted"),
        "a5": Measurement(float(entropy_floor(20.0, 1024)) / (1024 * 20 * math.exp(-20)), 0.0, "none: solved"),
        "a6": Measurement(float(torch.tensor(shares).median()), 0.0, f"none: median of {len(shares)} rows"),
    }
    tables = {"floor_curve": _curve(), "theorem_share": float(torch.tensor(shares).median())}
    return Results({**measured, **within_range.measured}, {**tables, **within_range.tables})


def measure_range(setting: Setting) -> Results:
    """Logits within a range: the floor, and searches for rows below it."""
    floor = float(entropy_floor_of_range(2.0, 64))
    high = torch.stack([2.0 * (torch.arange(64) < k).double() for k in range(1, 64)])
    listed = torch.tensor(list(product((0.0, 1.0), repeat=LISTED)), dtype=torch.float64)
    apart = []
    for spread in (0.5, 2.0, 6.0):
        least = float(entropy_floor_of_range(spread, LISTED))
        apart.append(float(row_entropy(spread * listed).min()) - least)
        apart += (descended(LISTED, SEARCHES[setting.quick], spread=spread) - least).tolist()
    entropies = row_entropy(high)
    lowest = {"tokens": 64, "range": 2.0, "high": int(entropies.argmin()) + 1, "one": float(entropies[0])}
    measured = {
        "a7": Measurement(floor, 0.0, "none: solved"),
        "a8": Measurement(min(apart), 0.0, f"none: least of {len(apart)}", {"closest": min(apart)}),
    }
    return Results(measured, {"least_within_range": lowest})


def _curve() -> list[dict[str, Any]]:
    """The floor against the norm s, by number of tokens; and the floor of a range of that size."""
    return [
        {
            "s": s,
            **{str(T): float(entropy_floor(s, T)) for T in (16, 256)},
            "range": float(entropy_floor_of_range(s, 256)),
        }
        for s in (0.1 * 1.25**n for n in range(25))
    ]


STUDY = Study("the floor under entropy", CLAIMS, measure)
