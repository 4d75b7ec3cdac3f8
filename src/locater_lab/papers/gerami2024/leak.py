"""What normalising over the sequence tells earlier tokens of later ones: study c.

Public code for the method takes off the mean over tokens and divides by the largest length among them, so that |q.k| <=
1. Both depend on tokens that a causal model must not see, mask or no mask. Dividing each query and key by its own
length does not.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from locater.numerics import spearman
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.compute import normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms import mechanism
from locater_lab.papers.gerami2024.forms import polynomial

SEEDS = {True: 32, False: 200}
TOKENS, SIZE = 64, 16
LENGTHS = (16, 64, 256, 1024)
FACTORS = (1.0, 1.5, 2.0, 3.0, 5.0, 10.0)  # of the last token's length

CLAIMS = (
    Claim(
        "c1", "Normalisation over the sequence tells earlier tokens of later ones, causal mask or not",
        f"change of the first half's outputs when the last of {TOKENS} tokens is drawn anew, over their size", "at least", 1e-3, by="ours",
    ),
    Claim("c2", "Per token it does not", "the same with each query and key at unit length, largest of draws", "at most", 0.0, by="ours"),
    Claim(
        "c3", "The leak fades in long sequences", "the change at 1,024 tokens over that at 16", "at most", 0.1, by="ours",
    ),
    Claim(
        "c4", "It can be read: the longer the last token, the more the outputs of the first half change",
        "rank correlation of the last token's length with that change", "at least", 0.9, by="ours",
    ),
)  # fmt: skip


def sequence_normed(x: Float[Tensor, "tokens size"]) -> Float[Tensor, "tokens size"]:
    """As the public code does: the mean over tokens off, and over the largest length."""
    x = x - x.mean(0)
    return x / x.norm(dim=1).max()


def causal_outputs(q: Tensor, k: Tensor, v: Tensor, sequence: bool) -> Float[Tensor, "tokens size"]:
    """Order 2 under a causal mask, normalised over the sequence or per token. The first is what the mechanism refuses
    to do.
    """
    if not sequence:
        return mechanism("fastmax")(q[None, None], k[None, None], v[None, None], causal=True)[0, 0]
    weight = polynomial(sequence_normed(q) @ sequence_normed(k).mT, 2).tril()
    return weight @ v / weight.sum(-1, keepdim=True)


def earlier_change(seed: int, tokens: int, sequence: bool, factor: float | None = None) -> float:
    """Change of the first half's outputs by another last token, over their size.

    The last token is drawn anew, or, with `factor`, made so many times as long.
    """
    q, k, v = (normal(tokens, SIZE, seed=10 * seed + i) for i in range(3))
    before = causal_outputs(q, k, v, sequence)[: tokens // 2]
    other = [x.clone() for x in (q, k, v)]
    for i, x in enumerate(other):
        x[-1] = normal(SIZE, seed=10 * seed + 5 + i) if factor is None else factor * x[-1]
    after = causal_outputs(other[0], other[1], other[2], sequence)[: tokens // 2]
    return ((after - before).norm() / before.norm()).item()


def measure(setting: Setting) -> Results:
    """By length, by the last token's own length, and per token."""
    seeds = range(SEEDS[setting.quick])
    by_length = {n: [earlier_change(seed, n, True) for seed in seeds] for n in LENGTHS}
    by_factor = {f: [earlier_change(seed, TOKENS, True, f) for seed in seeds] for f in FACTORS}
    per_token = [earlier_change(seed, n, False) for n in (16, TOKENS) for seed in seeds]
    ratio = [a / b for a, b in zip(by_length[1024], by_length[16], strict=True)]
    factors = torch.tensor(FACTORS, dtype=torch.float64)
    correlations = [
        spearman(factors, torch.tensor([by_factor[f][i] for f in FACTORS], dtype=torch.float64)) or 0.0 for i in seeds
    ]
    measured = {
        "c1": by_seed(by_length[TOKENS]),
        "c2": Measurement(max(per_token), 0.0, f"none: the largest of {len(per_token)} draws"),
        "c3": by_seed(ratio),
        "c4": by_seed(correlations),
    }
    table = {
        "tokens": TOKENS,
        "by_length": [{"tokens": n, "change": sum(x) / len(x)} for n, x in by_length.items()],
        "by_factor": [{"factor": f, "change": sum(x) / len(x)} for f, x in by_factor.items()],
    }
    return Results(measured, {"leak": table})


STUDY = Study("what the norm tells", CLAIMS, measure)
