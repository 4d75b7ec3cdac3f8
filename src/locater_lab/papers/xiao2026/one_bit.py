"""Attention of one bit per channel, exactly: counts of equal bits, levels, bounds, the entropy floor, gradients,
invariances. Study a.

Everything is in float64 and against something written another way: bits packed into whole numbers, loops over heads,
row by row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.theory import entropy_floor_of_range
from locater_lab.engine.claims import Claim, Measurement, by_seed, half_range
from locater_lab.engine.devices_and_processes import draw_normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms import mechanism
from locater_lab.mechanisms.softmax import sign

SIZES = (4, 16, 64, 128)  # channels of a head
KEYS = 64
RMS = (0.3, 1.0, 3.0, 10.0)  # of queries, for the gradient's window
SHIFT = 37  # positions
EXACT = "none: exact"
ROUNDING = 1e-12

CLAIMS = (
    Claim(
        "a1", "A product of two sign vectors is d less twice the number of channels in which they differ: XNOR and a bit count",
        f"largest difference from counting bits of packed whole numbers, d = {', '.join(map(str, SIZES))}, zeros among the entries",
        "at most", 0.0, by="ours",
    ),
    Claim(
        "a2", "The attention map is the softmax of those counts, times mu_q mu_k / sqrt(d)",
        "largest difference of a weight from the softmax of packed counts, written out row by row", "at most", ROUNDING,
        by="ours",
    ),
    Claim(
        "a3", "Logits without a bias take at most d + 1 levels, 2 mu_q mu_k / sqrt(d) apart",
        "largest distance of a difference of two logits from a whole number of steps, in steps", "at most", 1e-9, by="ours",
    ),
    Claim(
        "a4", "No logit without a bias exceeds mu_q mu_k sqrt(d)",
        "range of a row's logits over twice that bound, largest of all rows; keys with a query's own signs and with the opposite ones are "
        "among the keys, so it is reached", "about", 1.0, 1e-9, by="ours",
    ),
    Claim(
        "a5", "So entropy has a floor that depends on mu_q, mu_k, d and the number of keys alone",
        "least of (entropy - floor) over rows, in nats", "at least", -1e-12, by="ours",
    ),
    Claim(
        "a6", "The floor is reached: by m keys with the query's signs among others with the opposite ones, at the best m",
        "largest (entropy - floor) of such rows, in nats", "at most", 1e-12, by="ours",
    ),
    Claim(
        "a7", "One key above all others is not always the sharpest row: of 64 logits in a range of 2, the floor is 3.684, not 4.044",
        "least entropy over rows of two levels, every number of high keys tried", "about", 3.684, 5e-4, by="ours",
    ),
    Claim(
        "a8", "The gradient passes a sign where abs(x) <= 1 in raw units, so with large queries nearly all of it is cut",
        "share of a query's entries whose sign passes no gradient, at an rms of 10", "at least", 0.9, by="ours",
    ),
    Claim(
        "a9", "Without a bias the map knows of q only the signs and the mean size of its entries",
        "largest change of a weight when every entry of q is rescaled by a factor of its own and their mean size is kept", "at most",
        ROUNDING, by="ours",
    ),
    Claim(
        "a10", "A permutation of channels, or turning the sign of some, in both q and k leaves the map as it is",
        "largest change of a weight", "at most", ROUNDING, by="ours",
    ),
    Claim(
        "a11", "Signs taken after rotary embedding keep what it is for: logits depend on the distance of two tokens alone",
        "rms change of a logit when all positions move by the same number, over the standard deviation of logits", "at most", 0.01,
        by="ours",
    ),
    Claim(
        "a12", "Signs taken before it keep that, and lose the count: logits are no d + 1 levels any more",
        "distinct logits of one query over d + 1", "at least", 1.5, by="ours",
    ),
    Claim(
        "a13", "Grouped heads: the map is that of every query head with its key head, one mean size of entries per key head",
        "largest difference from a loop over query heads", "at most", ROUNDING, by="ours",
    ),
    Claim(
        "a14", "One mean size for all queries of a head, and one for its keys, as published for images, tells a causal query of "
        "later tokens",
        "change of the largest weight of an early row when the last token is made ten times as long", "at least", 1e-3, by="ours",
    ),
    Claim(
        "a15", "With the query's own mean and that of the keys in view it does not",
        "the same change in the causal form of this package", "at most", 0.0, by="ours",
    ),
)  # fmt: skip


def pack_bits(x: Float[Tensor, "n d"]) -> list[int]:
    """Each row as a whole number: bit c is 1 where channel c is at least 0.

    >>> pack_bits(torch.tensor([[1.0, -1.0, 0.0]]))
    [5]
    """
    return [sum(1 << c for c, entry in enumerate(row) if entry >= 0) for row in x.tolist()]


def count_product(q: Float[Tensor, "T d"], k: Float[Tensor, "S d"]) -> Float[Tensor, "T S"]:
    """d - 2 (bits in which query and key differ), by whole numbers alone.

    >>> count_product(torch.tensor([[1.0, 1.0, -1.0]]), torch.tensor([[1.0, 0.0, 2.0]])).tolist()
    [[1.0]]
    """
    keys = pack_bits(k)
    return torch.tensor(
        [[q.shape[1] - 2 * (a ^ b).bit_count() for b in keys] for a in pack_bits(q)], dtype=torch.float64
    )


def step_of_count(q: Tensor, k: Tensor) -> float:
    """mu_q mu_k / sqrt(d): what one unit of the count is worth."""
    return float(q.abs().mean() * k.abs().mean()) / math.sqrt(q.shape[-1])


def one_head(q: Tensor, k: Tensor, **how: Any) -> Tensor:
    """The package's map of one head (T, S)."""
    return mechanism("binary").map(q[None, None], k[None, None], **how)[0, 0]


def count_errors() -> Results:
    """Bits against signs, weights against counts, steps, bounds and floors, for every size of a head."""
    rows = [errors_of_size(d) for d in SIZES]

    def largest(name: str) -> Measurement:
        return Measurement(max(row[name] for row in rows), 0.0, EXACT)

    measured = {
        "a1": largest("count_error"),
        "a2": largest("map_error"),
        "a3": largest("step_error"),
        "a4": half_range([row["range_share"] for row in rows], "half the range over sizes of a head"),
        "a5": Measurement(min(row["least_entropy"] - row["floor"] for row in rows), 0.0, EXACT),
    }
    shown = ("size", "levels", "most", "bound", "floor", "least_entropy")
    table = {"keys": KEYS, "rows": [{name: row[name] for name in shown} for row in rows]}
    return Results(measured, {"levels": table})


def errors_of_size(d: int) -> dict[str, float]:
    """One head of d channels. Of its keys, one has the signs of a query and one the opposite ones."""
    q, k = draw_normal(24, d, seed=d), draw_normal(KEYS, d, seed=d + 1)
    q[0, : d // 2] = 0.0  # sign(0) = 1
    k[0], k[1] = q[3], -q[3]
    bits, weights, unit = count_product(q, k), one_head(q, k), step_of_count(q, k)
    gaps = (weights.log()[:, :, None] - weights.log()[:, None, :]) / (2 * unit)
    return {
        "size": d,
        "count_error": float((bits - sign(q) @ sign(k).mT).abs().max()),
        "map_error": max(
            float((w - (unit * row).softmax(-1)).abs().max()) for w, row in zip(weights, bits, strict=True)
        ),
        "step_error": float((gaps - gaps.round()).abs().max()),
        "range_share": float(gaps.max()) / d,  # gaps are in steps, of which twice the bound has d
        "floor": float(entropy_floor_of_range(2 * unit * d, KEYS)),
        "least_entropy": float(torch.special.entr(weights).sum(-1).min()),
        "levels": max(len(row.unique()) for row in gaps[:, :, 0].round()),
        "most": d + 1,
        "bound": unit * d,
    }


def entropy_floors() -> Results:
    """Rows that reach the floor, built from signs; and the smallest of all rows of two levels, by trying each."""
    rows = []
    for d, size in ((4, 0.3), (16, 0.6), (64, 0.5), (64, 1.0)):
        q = size * draw_normal(1, d, seed=5).sign()
        entropies = []
        for m in range(1, KEYS):
            k = size * torch.cat([q.sign().expand(m, d), -q.sign().expand(KEYS - m, d)])
            entropies.append(float(torch.special.entr(one_head(q, k)).sum(-1)[0]))
        floor, least = float(entropy_floor_of_range(2 * step_of_count(q, k) * d, KEYS)), min(entropies)
        rows.append(
            {"size": d, "mu": size, "floor": floor, "above": least - floor, "high_keys": entropies.index(least) + 1}
        )
    high = torch.arange(KEYS) < torch.arange(1, KEYS)[:, None]  # a row per number of high keys
    tried = torch.special.entr((2 * high.double()).softmax(-1)).sum(-1)
    numbers = {"one_key": float(tried[0]), "high_keys": int(tried.argmin()) + 1}
    measured = {
        "a6": Measurement(max(row["above"] for row in rows), 0.0, EXACT),
        "a7": Measurement(float(tried.min()), 0.0, EXACT, numbers),
    }
    return Results(measured, {"sharpest_rows": rows})


def cut_share(rms: float, seed: int = 0) -> float:
    """Share of entries of rms `rms` through whose sign no gradient comes, by autograd."""
    x = (rms * draw_normal(200, 64, seed=seed)).requires_grad_()
    (grad,) = torch.autograd.grad(sign(x).sum(), x)
    return float((grad == 0).double().mean())


def window_error() -> Results:
    """The share that is cut beside that of a normal, 1 - erf(1 / (rms sqrt 2))."""
    rows = [{"rms": rms, "cut": cut_share(rms), "normal": math.erfc(1 / (rms * math.sqrt(2)))} for rms in RMS]
    return Results(
        {"a8": by_seed([cut_share(RMS[-1], seed) for seed in range(8)], of="draws")}, {"gradient_window": rows}
    )


def rotate(x: Float[Tensor, "T d"], first: int, base: float = 10_000.0) -> Float[Tensor, "T d"]:
    """Pairs (c, c + d/2) of channels turned by position times base^(-2c/d); the first token is at position `first`."""
    half = x.shape[1] // 2
    rates = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = (first + torch.arange(x.shape[0], dtype=torch.float64))[:, None] * rates
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], 1)


def rotary_shift_error(shift: int = SHIFT) -> dict[str, float]:
    """rms change of logits when all positions move by `shift`, over their spread: of real logits, of signs after
    rotation and before.
    """
    q, k = draw_normal(48, 64, seed=1), draw_normal(48, 64, seed=2)
    kinds = {
        "no signs": lambda first: rotate(q, first) @ rotate(k, first).mT,
        "signs after": lambda first: sign(rotate(q, first)) @ sign(rotate(k, first)).mT,
        "signs before": lambda first: rotate(sign(q), first) @ rotate(sign(k), first).mT,
    }
    return {name: float((f(shift) - f(0)).square().mean().sqrt() / f(0).std()) for name, f in kinds.items()}


def levels_of_rotated_signs(d: int = 16, keys: int = 256) -> float:
    """Distinct logits of the last query where signs are turned after they are taken, over d + 1."""
    q, k = (rotate(sign(draw_normal(keys, d, seed=seed)), 0) for seed in (1, 2))
    return len((q[-1] @ k.mT * 1e6).round().unique()) / (d + 1)


def invariance_errors() -> Results:
    """Changes of queries, keys, channels and positions, and what they do to the map."""
    q, k = draw_normal(20, 32, seed=3), draw_normal(20, 32, seed=4)
    plain = one_head(q, k)
    other = q * draw_normal(20, 32, seed=5).exp()
    other = other * q.abs().mean() / other.abs().mean()
    order = torch.randperm(32, generator=torch.Generator().manual_seed(6))
    turn = draw_normal(32, seed=7).sign()
    channels = max(
        float((one_head(a, b) - plain).abs().max()) for a, b in ((q[:, order], k[:, order]), (q * turn, k * turn))
    )
    moved = rotary_shift_error()
    measured = {
        "a9": Measurement(float((one_head(other, k) - plain).abs().max()), 0.0, EXACT),
        "a10": Measurement(channels, 0.0, EXACT),
        "a11": Measurement(moved["signs after"], 0.0, EXACT),
        "a12": Measurement(levels_of_rotated_signs(), 0.0, EXACT),
    }
    return Results(measured, {"rotary": {"moved": moved, "shift": SHIFT}})


def grouped_head_error() -> Results:
    """Eight query heads on two key heads, causal and not, against a loop with each head's own means."""
    q, k = draw_normal(2, 8, 12, 16, seed=8), draw_normal(2, 2, 12, 16, seed=9)
    free, past = mechanism("binary").map(q, k), mechanism("binary").map(q, k, causal=True)
    worst = 0.0
    for b in range(2):
        for h in range(8):
            query, key = q[b, h], k[b, h // 4]
            bits = count_product(query, key)
            worst = max(worst, float((free[b, h] - (step_of_count(query, key) * bits).softmax(-1)).abs().max()))
            for t in range(12):
                row = (step_of_count(query[t], key[: t + 1]) * bits[t, : t + 1]).softmax(-1)
                worst = max(worst, float((past[b, h, t, : t + 1] - row).abs().max()))
    return Results({"a13": Measurement(worst, 0.0, EXACT)})


def leak_of_means() -> Results:
    """Change of row 5 of 16 by the last token: with one mean per head under a causal mask, and in the causal form."""
    q, k = draw_normal(16, 32, seed=10), draw_normal(16, 32, seed=11)
    longer = [torch.cat([x[:-1], 10 * x[-1:]]) for x in (q, k)]

    def one_mean(a: Tensor, b: Tensor) -> Tensor:
        return (step_of_count(a, b) * count_product(a, b)[5, :6]).softmax(-1)

    first, then = one_mean(q, k), one_mean(*longer)
    top = int(first.argmax())
    ours = one_head(q, k, causal=True)[5] - one_head(longer[0], longer[1], causal=True)[5]
    published = float((then - first)[top].abs())
    changes = {"a14": published, "a15": float(ours.abs().max())}
    return Results({id: Measurement(x, 0.0, EXACT) for id, x in changes.items()})


def measure(setting: Setting) -> Results:
    parts = count_errors(), entropy_floors(), window_error(), invariance_errors(), grouped_head_error(), leak_of_means()
    measured = {id: x for part in parts for id, x in part.measured.items()}
    return Results(measured, {name: x for part in parts for name, x in part.tables.items()})


STUDY = Study("attention of one bit, exactly", CLAIMS, measure)
