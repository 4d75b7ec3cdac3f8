"""What signs do to the logits of Gaussian queries and keys: the arcsine law, flatter rows, an order half kept. Study
b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

from locater.theory import second_order_entropy
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.compute import normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms import mechanism
from locater_lab.mechanisms.binary import sign

CORRELATIONS = (-0.6, -0.3, 0.0, 0.3, 0.6, 0.9, 0.99)
PAIRS = {True: 400_000, False: 4_000_000}
TOKENS = 256
SIZES = (4, 8, 16, 32, 64, 128)
DRAWS = {True: 16, False: 60}
SHARP = 3.0  # times, of queries and of keys
KEPT = 0.62  # rank correlation of real and binary logits, about
LIMIT = 6 / math.pi * math.asin(1 / math.pi)  # 0.6187, rank correlation of two normals whose correlation is 2/pi

CLAIMS = (
    Claim(
        "b1", "Similarity survives in the mean: of jointly Gaussian entries of mean zero and correlation r, the mean product of signs is "
        "(2/pi) asin(r); the paper's Theorem 1 is of this kind, its wording was not at hand",
        f"largest difference over {len(CORRELATIONS)} correlations, in standard errors", "at most", 4.0, by="ours",
    ),
    Claim("b2", "Signs flatten: the standard deviation of logits falls to 2/pi of what it was",
          "standard deviation of binary logits over that of real ones, independent N(0, 1) queries and keys, d = 64", "about", 0.637, 0.005,
          by="ours"),
    Claim("b3", f"A real row of {TOKENS} keys has 5.05 nats of entropy", "mean entropy in nats of softmax rows, d = 64", "about", 5.05,
          0.01, by="ours"),
    Claim("b4", f"A binary row of {TOKENS} keys has 5.345 nats", "mean entropy in nats of binary rows, d = 64", "about", 5.345,
          0.01, by="ours"),
    Claim("b5", "The binary entropy follows from the arcsine law: log N - (2/pi)^2 / 2",
          "measured entropy less that estimate, in nats", "about", 0.0, 0.02, by="ours"),
    Claim("b6", "The order of keys is half kept: the rank correlation of real and binary logits is about 0.62",
          "rank correlation within rows, d = 64, ties shared", "about", 0.62, 0.01, by="ours"),
    Claim("b7", "That is so whatever d is",
          f"largest distance of the rank correlation from 0.62, d = {', '.join(map(str, SIZES))}", "at most", 0.02,
          by="ours"),
    Claim("b8", "Over all pairs, real and binary logits have a correlation of 2/pi whatever d is, so that of ranks tends to "
          "(6/pi) asin(1/pi) = 0.6187",
          "rank correlation at the largest d less that limit", "about", 0.0, 0.005, by="ours"),
    Claim("b9", f"Sharp rows (queries and keys {SHARP:g} times as large): a real one has 0.64 nats", "mean entropy in nats, d = 64",
          "about", 0.64, 0.05, by="ours"),
    Claim("b10", "Sharp rows: a binary one has 1.13 nats", "mean entropy in nats, d = 64", "about", 1.13, 0.05, by="ours"),
    Claim("b11", "Sharp rows: the strongest key is the same in 13 % of them", "share of rows with the same largest weight, d = 64, "
          "ties among binary weights counted by their share", "about", 0.13, 0.02, by="ours"),
)  # fmt: skip


def arcsine(r: float) -> float:
    """(2/pi) asin(r).

    >>> [round(arcsine(r), 3) for r in (0.3, 0.6, 0.9)]
    [0.194, 0.41, 0.713]
    """
    return 2 / math.pi * math.asin(r)


def sign_product(r: float, pairs: int, seed: int) -> tuple[float, float]:
    """Mean product of signs of `pairs` pairs of correlation r, and its standard error."""
    a, noise = normal(pairs, seed=seed), normal(pairs, seed=seed + 1000)
    product = sign(a) * sign(r * a + math.sqrt(1 - r * r) * noise)
    return float(product.mean()), float(product.std()) / math.sqrt(pairs)


def ranks(x: Float[Tensor, "rows keys"]) -> Float[Tensor, "rows keys"]:
    """From 0, equal entries share the mean of theirs.

    >>> ranks(torch.tensor([[5.0, 1.0, 5.0]])).tolist()
    [[1.5, 0.0, 1.5]]
    """
    below = torch.searchsorted(x.sort(-1).values, x, right=False)
    upto = torch.searchsorted(x.sort(-1).values, x, right=True)
    return (below + upto - 1).double() / 2


def row_correlation(a: Float[Tensor, "rows keys"], b: Float[Tensor, "rows keys"]) -> Float[Tensor, " rows"]:
    """Pearson's, row by row; NaN where one of the two does not vary."""
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    return (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()


def top_agreement(real: Float[Tensor, "rows keys"], binary: Float[Tensor, "rows keys"]) -> Float[Tensor, " rows"]:
    """1 where the largest real weight is the largest binary one, 1 / n where n keys tie for it.

    >>> top_agreement(torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[0.4, 0.4, 0.2]])).tolist()
    [0.5]
    """
    most = binary.amax(-1, keepdim=True)
    best = binary >= most * (1 - 1e-6)  # rounding tells no two counts apart
    return best.gather(-1, real.argmax(-1, keepdim=True))[..., 0].to(real) / best.sum(-1)


@dataclass(frozen=True)
class Rows:
    """Means over the rows of one draw: spread of binary logits over that of real ones, entropies of both, correlation of
    the two logits and of their ranks, and rows whose strongest key is the same.
    """

    spread: float
    real: float
    binary: float
    correlation: float
    rank: float
    top: float


def rows(d: int, seed: int, size: float = 1.0) -> Rows:
    """One draw: a head of d channels, entries of queries and keys N(0, size^2)."""
    q, k = (size * normal(TOKENS, d, seed=2 * seed + part) for part in range(2))
    weights = [mechanism(name).map(q[None, None], k[None, None])[0, 0] for name in ("softmax", "binary")]
    logits = [w.clamp_min(1e-300).log() for w in weights]
    logits = [x - x.mean(-1, keepdim=True) for x in logits]
    ranked = row_correlation(ranks(logits[0]), ranks(logits[1].mul(1e6).round()))  # equal counts are equal
    return Rows(
        spread=float(logits[1].square().mean().sqrt() / logits[0].square().mean().sqrt()),
        real=float(torch.special.entr(weights[0]).sum(-1).mean()),
        binary=float(torch.special.entr(weights[1]).sum(-1).mean()),
        correlation=float(row_correlation(*logits).mean()),
        rank=float(ranked.mean()),
        top=float(top_agreement(*weights).mean()),
    )


def arcsine_law(pairs: int) -> list[dict[str, float]]:
    """Mean products of signs by correlation, beside the law."""
    rows = []
    for number, r in enumerate(CORRELATIONS):
        mean, error = sign_product(r, pairs, number)
        rows.append({"r": r, "mean": mean, "law": arcsine(r), "error": error})
    return rows


def measure(setting: Setting) -> Results:
    """Pairs of Gaussian entries, then rows of Gaussian heads of several sizes."""
    draws, law = DRAWS[setting.quick], arcsine_law(PAIRS[setting.quick])
    by_size = {d: [rows(d, seed) for seed in range(draws)] for d in SIZES}
    sharp = [rows(64, seed, SHARP) for seed in range(draws)]
    means = [
        {"size": d, **{f.name: sum(getattr(x, f.name) for x in drawn) / draws for f in fields(Rows)}}
        for d, drawn in by_size.items()
    ]
    off = max(abs(row["mean"] - row["law"]) / row["error"] for row in law)
    tables = {
        "arcsine_law": {"rows": law, "curve": [[i / 50, arcsine(i / 50)] for i in range(-50, 51)]},
        "gaussian_heads": {"keys": TOKENS, "rows": means},
    }
    measured = {"b1": Measurement(off, 0.0, "none: in standard errors"), **of_rows(by_size), **of_sharp_rows(sharp)}
    return Results(measured, tables)


def of_rows(by_size: dict[int, list[Rows]]) -> dict[str, Measurement]:
    """Claims on rows of heads; b7 is judged at the size whose rank correlation is farthest from the stated one."""
    plain, widest = by_size[64], by_size[SIZES[-1]]
    estimate = float(second_order_entropy((2 / math.pi) ** 2, TOKENS))
    away = {d: sum(x.rank for x in drawn) / len(drawn) - KEPT for d, drawn in by_size.items()}
    worst = max(SIZES, key=lambda d: abs(away[d]))
    side = math.copysign(1.0, away[worst])
    return {
        "b2": by_seed([x.spread for x in plain], of="draws"),
        "b3": by_seed([x.real for x in plain], of="draws"),
        "b4": by_seed([x.binary for x in plain], of="draws"),
        "b5": by_seed([x.binary - estimate for x in plain], of="draws"),
        "b6": by_seed([x.rank for x in plain], of="draws"),
        "b7": by_seed([side * (x.rank - KEPT) for x in by_size[worst]], {"size": worst}, "draws"),
        "b8": by_seed([x.rank - LIMIT for x in widest], {"limit": LIMIT}, "draws"),
    }


def of_sharp_rows(sharp: list[Rows]) -> dict[str, Measurement]:
    return {
        "b9": by_seed([x.real for x in sharp], of="draws"),
        "b10": by_seed([x.binary for x in sharp], of="draws"),
        "b11": by_seed([x.top for x in sharp], of="draws"),
    }


STUDY = Study("what signs do to Gaussian queries and keys", CLAIMS, measure)
