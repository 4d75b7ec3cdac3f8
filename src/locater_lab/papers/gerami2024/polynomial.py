"""Fastmax, exactly: the factorised form against the map written out (study a), what a polynomial in the place of the
exponential can weigh at most, in positivity, sharpness, entropy and gradients (study b), and what normalising over
the sequence tells earlier tokens of later ones (study c).

**Forms (study a).** The map is

    A_ij = f(x_ij) / sum_j f(x_ij),   x_ij = q_i.k_j,   f(x) = 1 + x  or  1 + x + x^2 / 2

f(q.k) is a product of features of q and of k alone, so the sum over keys can be taken once for all queries: cost grows
with the number of tokens and not with its square. The reference here is row by row, in float64, with nothing
factorised.

**Limits (study b).** With |x| <= 1, which unit queries and keys give, f(x) = 1 + x + x^2/2 = ((1 + x)^2 + 1) / 2 lies
between 1/2 and 5/2. Hence among n keys

    A_ij <= 5 / (n + 4)        log n - H <= 0.313        |dO_i / dx_il| <= 4 / (n + 4) |v_l - o_i|

The first and the last are attained by one key along the query and all others against it, the second by a share of keys
along it. The last is true from n = 4 on: (1 + x) / (f(x) + (n - 1) / 2) is largest at x = 1 only where (n - 1) / 2 >=
3/2. With a scale s > 1 one key can have half of the weight once s^2 + 2 s + 2 = n - 1, where softmax needs exp(2 s) = n
- 1.

**The leak (study c).** Public code for the method takes off the mean over tokens and divides by the largest length
among them, so that |q.k| <= 1. Both depend on tokens that a causal model must not see, mask or no mask. Dividing each
query and key by its own length does not.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.numerics import spearman
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.devices_and_processes import draw_normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms import mechanism

# ---- a: factorised and explicit ----


DRAWS = {True: 40, False: 300}
FORM_LENGTHS = {True: (256, 2048), False: (256, 2048, 16384)}
FORM_SIZE = 32
DISTANCES_FROM_OPPOSITE = (1.0, 0.1, 0.01)  # how far keys are from the opposite of the query
OPPOSED_DRAWS = 8

FORMS_CLAIMS = (
    Claim(
        "a1", "The attention map factorises in full: factorised equals explicit, all keys in view",
        "largest difference of outputs, order 1 and 2, grouped heads too", "at most", 1e-12, where="abstract", bound="ours",
    ),
    Claim(
        "a2", "Factorised equals explicit under a causal mask",
        "the same, and with keys kept from before", "at most", 1e-12, by="ours",
    ),
    Claim(
        "a3", "Gradients of the factorised form are those of the explicit one",
        "largest difference of gradients to queries, keys and values", "at most", 1e-11, by="ours",
    ),
    Claim(
        "a4", "Sums over many tokens keep their digits in float32",
        "largest error of causal outputs in float32, order 2, Gaussian operands, over the largest output", "at most", 1e-5, by="ours",
    ),
    Claim(
        "a5", "Order 1 keeps its digits where all keys oppose the query, too",
        f"the same for one query and 64 keys {DISTANCES_FROM_OPPOSITE[-1]:g} from its opposite, order 1", "at most", 1e-5, by="ours",
    ),
)  # fmt: skip


def polynomial(x: Tensor, order: int) -> Tensor:
    return 1 + x if order == 1 else 1 + x + x * x / 2


def explicit_output(q: Tensor, k: Tensor, v: Tensor, order: int, causal: bool) -> Float[Tensor, "B H T E"]:
    """Row by row; queries and keys at unit length, query head h with key head h // group, queries are the last of the
    keys' places.

    >>> one = torch.ones(1, 1, 2, 4, dtype=torch.float64)
    >>> explicit_output(one, one, torch.tensor([[[[2.0], [4.0]]]], dtype=torch.float64), 2, causal=True).flatten().tolist()
    [2.0, 3.0]
    """
    group, ahead = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    rows = []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            keys, values = k[b, h // group], v[b, h // group]
            units = keys / keys.norm(dim=1, keepdim=True)
            for t in range(q.shape[2]):
                seen = slice(0, ahead + t + 1) if causal else slice(None)
                weight = polynomial(units[seen] @ (q[b, h, t] / q[b, h, t].norm()), order)
                rows.append(weight @ values[seen] / weight.sum())
    return torch.stack(rows).reshape(*q.shape[:3], v.shape[3])


def draw_operands(
    seed: int, T: int, S: int, heads: int = 2, groups: int = 1, size: int = 5
) -> tuple[Tensor, Tensor, Tensor]:
    scale = (0.1, 1.0, 10.0)[seed % 3]
    q = scale * draw_normal(1, heads * groups, T, size, seed=seed)
    return q, draw_normal(1, heads, S, size, seed=seed + 1) + 0.3, draw_normal(1, heads, S, 3, seed=seed + 2)


def form_differences(seed: int) -> dict[str, float]:
    """Of one draw: largest differences of outputs and of gradients, with all keys in view and causal."""
    order, T, S = 1 + seed % 2, (3, 9)[seed // 2 % 2], 9
    q, k, v = draw_operands(10 * seed, T, S, groups=1 + seed % 3)
    largest: dict[str, float] = {}
    for name, causal in (("free", False), ("causal", True)):
        outs, grads = [], []
        for factorised in (True, False):
            a, b, c = leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = (
                mechanism("fastmax")(a, b, c, causal=causal, order=order)
                if factorised
                else explicit_output(a, b, c, order, causal)
            )
            outs.append(out.detach())
            grads.append(torch.autograd.grad((out * draw_normal(*out.shape, seed=seed + 5)).sum(), leaves))
        largest[name] = (outs[0] - outs[1]).abs().max().item()
        largest[f"{name} gradient"] = max((a - b).abs().max().item() for a, b in zip(*grads, strict=True))
    return largest


def rounding_errors(length: int, order: int, seed: int = 0) -> dict[str, float]:
    """Errors in float32 against float64, over the largest output: factorised, and the explicit map's."""
    q, k, v = (draw_normal(1, 1, length, FORM_SIZE, seed=seed + i) for i in range(3))
    exact = mechanism("fastmax")(q, k, v, causal=True, order=order)
    low = [x.float() for x in (q, k, v)]
    factorised = mechanism("fastmax")(*low, causal=True, order=order).double()
    tail = low[0][:, :, -256:]  # a map of all queries would be large
    map_ = mechanism("fastmax").map(tail, low[1], causal=True, order=order) @ low[2]
    top = exact.abs().max().item()
    last = exact[:, :, -256:]
    return {
        "tokens": length,
        "order": order,
        "factorised": (factorised - exact).abs().max().item() / top,
        "explicit": (map_.double() - last).abs().max().item() / last.abs().max().item(),
    }


def opposed_errors(far: float, order: int) -> list[float]:
    """Errors in float32 for keys that are `far` from the opposite of the query, over the largest output, by draw."""
    errors = []
    for seed in range(OPPOSED_DRAWS):
        q = draw_normal(1, 1, 1, FORM_SIZE, seed=seed)
        k = -q / q.norm() + far / FORM_SIZE**0.5 * draw_normal(1, 1, 64, FORM_SIZE, seed=seed + 100)
        v = draw_normal(1, 1, 64, 4, seed=seed + 200)
        exact = mechanism("fastmax")(q, k, v, order=order)
        low = mechanism("fastmax")(q.float(), k.float(), v.float(), order=order).double()
        errors.append(((low - exact).abs().max() / exact.abs().max()).item())
    return errors


def measure_forms(setting: Setting) -> Results:
    """Draws in float64, then the rounding of float32 by length and by how much keys oppose the query."""
    drawn = [form_differences(seed) for seed in range(DRAWS[setting.quick])]
    largest = f"none: the largest of {len(drawn)} draws"
    rounded = [rounding_errors(length, order) for order in (1, 2) for length in FORM_LENGTHS[setting.quick]]
    against = {order: {f"{far:g}": opposed_errors(far, order) for far in DISTANCES_FROM_OPPOSITE} for order in (1, 2)}
    second = max(row["factorised"] for row in rounded if row["order"] == 2)
    measured = {
        "a1": Measurement(max(x["free"] for x in drawn), 0.0, largest),
        "a2": Measurement(max(x["causal"] for x in drawn), 0.0, largest),
        "a3": Measurement(max(max(x["free gradient"], x["causal gradient"]) for x in drawn), 0.0, largest),
        "a4": Measurement(second, 0.0, "none: the largest over lengths"),
        "a5": by_seed(against[1][f"{DISTANCES_FROM_OPPOSITE[-1]:g}"], of="draws"),
    }
    means: list[dict[str, Any]] = [
        {"order": order, **{far: fmean(errors) for far, errors in by_distance.items()}}
        for order, by_distance in against.items()
    ]
    return Results(measured, {"rounding": {"size": FORM_SIZE, "rows": rounded}, "opposed": means})


FORMS_STUDY = Study("factorised and explicit", FORMS_CLAIMS, measure_forms)


# ---- c: what the norm tells ----


LEAK_SEEDS = {True: 32, False: 200}
LEAK_TOKENS, LEAK_SIZE = 64, 16
LEAK_LENGTHS = (16, 64, 256, 1024)
FACTORS = (1.0, 1.5, 2.0, 3.0, 5.0, 10.0)  # of the last token's length

LEAK_CLAIMS = (
    Claim(
        "c1", "Normalisation over the sequence tells earlier tokens of later ones, causal mask or not",
        f"change of the first half's outputs when the last of {LEAK_TOKENS} tokens is drawn anew, over their size", "at least", 1e-3, by="ours",
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


def normalize_over_sequence(x: Float[Tensor, "tokens size"]) -> Float[Tensor, "tokens size"]:
    """As the public code does: the mean over tokens off, and over the largest length."""
    x = x - x.mean(0)
    return x / x.norm(dim=1).max()


def causal_outputs(q: Tensor, k: Tensor, v: Tensor, sequence: bool) -> Float[Tensor, "tokens size"]:
    """Order 2 under a causal mask, normalised over the sequence or per token. The first is what the mechanism refuses
    to do.
    """
    if not sequence:
        return mechanism("fastmax")(q[None, None], k[None, None], v[None, None], causal=True)[0, 0]
    weight = polynomial(normalize_over_sequence(q) @ normalize_over_sequence(k).mT, 2).tril()
    return weight @ v / weight.sum(-1, keepdim=True)


def earlier_change(seed: int, tokens: int, sequence: bool, factor: float | None = None) -> float:
    """Change of the first half's outputs by another last token, over their size.

    The last token is redrawn, or, with `factor`, made so many times as long.
    """
    q, k, v = (draw_normal(tokens, LEAK_SIZE, seed=10 * seed + i) for i in range(3))
    before = causal_outputs(q, k, v, sequence)[: tokens // 2]
    other = [x.clone() for x in (q, k, v)]
    for i, x in enumerate(other):
        x[-1] = draw_normal(LEAK_SIZE, seed=10 * seed + 5 + i) if factor is None else factor * x[-1]
    after = causal_outputs(other[0], other[1], other[2], sequence)[: tokens // 2]
    return ((after - before).norm() / before.norm()).item()


def measure_leak(setting: Setting) -> Results:
    """By length, by the last token's own length, and per token."""
    seeds = range(LEAK_SEEDS[setting.quick])
    by_length = {n: [earlier_change(seed, n, True) for seed in seeds] for n in LEAK_LENGTHS}
    by_factor = {f: [earlier_change(seed, LEAK_TOKENS, True, f) for seed in seeds] for f in FACTORS}
    per_token = [earlier_change(seed, n, False) for n in (16, LEAK_TOKENS) for seed in seeds]
    ratio = [a / b for a, b in zip(by_length[1024], by_length[16], strict=True)]
    factors = torch.tensor(FACTORS, dtype=torch.float64)
    correlations = [
        spearman(factors, torch.tensor([by_factor[f][i] for f in FACTORS], dtype=torch.float64)) or 0.0 for i in seeds
    ]
    measured = {
        "c1": by_seed(by_length[LEAK_TOKENS]),
        "c2": Measurement(max(per_token), 0.0, f"none: the largest of {len(per_token)} draws"),
        "c3": by_seed(ratio),
        "c4": by_seed(correlations),
    }
    table = {
        "tokens": LEAK_TOKENS,
        "by_length": [{"tokens": n, "change": sum(x) / len(x)} for n, x in by_length.items()],
        "by_factor": [{"factor": f, "change": sum(x) / len(x)} for f, x in by_factor.items()],
    }
    return Results(measured, {"leak": table})


LEAK_STUDY = Study("what the norm tells", LEAK_CLAIMS, measure_leak)


# ---- b: limits of the polynomial ----


LIMIT_DRAWS = {True: 200, False: 2000}
KEY_COUNTS = (4, 40, 400, 4000)
LIMIT_SIZE = 16
RATIO = 5.0  # of the largest f to the least, |x| <= 1, order 2
GAP = 0.313  # nats: `widest_gap`, rounded up
GAP_OF = f"none: the largest of {len(KEY_COUNTS)} numbers of keys and every share of them"

LIMIT_CLAIMS = (
    Claim(
        "b1", "Weights of order 2 are positive whatever queries and keys are",
        "least f over draws without a norm: weights of the mechanism's map over that of a key at 0, where f is 1", "at least", 0.5,
        by="ours",
    ),
    Claim(
        "b2", "Order 1 without a norm is no attention: weights are negative",
        "least 1 + x over normal x of standard deviation 3", "at most", 0.0, by="ours",
    ),
    Claim(
        "b3", "f is close to exp, whose Taylor polynomial it is", "largest relative distance of f from exp, x from -1 to 1, order 2",
        "at most", 0.1, by="ours",
    ),
    Claim(
        "b4", "Normalised Fastmax cannot localise: no weight exceeds 5 / (n + 4)",
        f"largest excess of a weight over that, relative, draws and keys built for it, {KEY_COUNTS[0]} to {KEY_COUNTS[-1]:,} keys", "at most", 1e-12,
        by="ours",
    ),
    Claim("b5", "The cap is attained", "largest shortfall from it, relative, built keys", "at most", 1e-12, by="ours"),
    Claim(
        "b6", "Entropy is all but that of a uniform row", "mean entropy over log n, 40 Gaussian keys, heads of 64", "about",
        0.997, 0.003, by="ours",
    ),
    Claim(
        "b7", f"Whatever keys there are, entropy is within {GAP:g} nats of log n",
        "largest log n - H, keys along or against the query in any number",
        "at most", GAP, by="ours",
    ),
    Claim(
        "b8", "From 4 keys on, the slope of an output o to the score of a key is at most 4 / (n + 4) times the distance of o from its "
        "value",
        "largest excess of autograd's slope over the bound, relative, draws and built keys", "at most", 1e-12, by="ours",
    ),
    Claim(
        "b9", "Gradients to scores fall as 1 / n", "exponent of the largest slope to a score, over that distance, in n; built keys, 40 "
        "to 4,000", "about", -1.0, 0.05, by="summary", bound="ours",
    ),
    Claim(
        "b10", "A scale brings localisation back, as it does for softmax",
        "scale at which one of 4,000 keys can have half of the weight, over that of softmax", "at most", 2.0, by="ours",
    ),
)  # fmt: skip


def build_keys(n: int, along: int = 1) -> tuple[Float[Tensor, "1 1 1 D"], Float[Tensor, "1 1 n D"]]:
    """A query, and n keys of which the first `along` point along it and the others against it."""
    q = draw_normal(1, 1, 1, LIMIT_SIZE, seed=n)
    signs = torch.ones(n, 1, dtype=torch.float64)
    signs[along:] = -1
    return q, q * signs


def least_f(seed: int) -> float:
    """Of order 2 without a norm: x has a standard deviation of 3, and the first key is 0."""
    q, k = 3 * draw_normal(1, 1, 16, LIMIT_SIZE, seed=seed), draw_normal(1, 1, 33, LIMIT_SIZE, seed=seed + 10_000)
    k[..., 0, :] = 0
    weights = mechanism("fastmax").map(q, k, norm=None)
    return (weights / weights[..., :1]).min().item()


def largest_weight(q: Tensor, k: Tensor, **options: Any) -> float:
    return mechanism("fastmax").map(q, k, **options).max().item()


def entropy(weights: Tensor) -> Float[Tensor, "*rows"]:
    return torch.special.entr(weights).sum(-1)


def entropy_of_draw(seed: int, size: int, n: int = 40) -> float:
    """Mean entropy over log n of Gaussian queries and keys. x spreads by 1 / sqrt(D), so it is about 1 - 1 / (2 D log
    n).

    >>> abs(entropy_of_draw(0, 64) - (1 - 1 / (128 * math.log(40)))) < 1e-3
    True
    """
    q, k = draw_normal(1, 1, 64, size, seed=seed), draw_normal(1, 1, n, size, seed=seed + 1000)
    return (entropy(mechanism("fastmax").map(q, k)).mean() / math.log(n)).item()


def widest_gap(ratio: float = RATIO) -> float:
    """Largest log n - H of weights within `ratio` of each other: a share a of them at the top,
    p = ratio / (1 + (ratio - 1) a), gap(a) = a p log p + (1 - a) p / ratio log(p / ratio).

    >>> round(widest_gap(), 4)
    0.3128
    """
    a = torch.linspace(1e-6, 1 - 1e-6, 200_001, dtype=torch.float64)
    p = ratio / (1 + (ratio - 1) * a)
    return (a * p * p.log() + (1 - a) * p / ratio * (p / ratio).log()).max().item()


def largest_slope(x: Tensor, values: Float[Tensor, "n E"]) -> float:
    """Largest over keys of |dO / dx_l| / |v_l - o|, by autograd of the map of scores x."""
    x = x.clone().requires_grad_()
    weight = polynomial(x, 2)
    out = weight @ values / weight.sum()
    rows = torch.stack([torch.autograd.grad(o, x, retain_graph=True)[0] for o in out])  # (E, n)
    return (rows.norm(dim=0) / (values - out.detach()).norm(dim=1)).max().item()


def half_scale(n: int, fastmax: bool) -> float:
    """The least scale at which one of n keys can have half of the weight; by bisection of the mechanism's own map.

    Fastmax's other keys are where f is least, at x = -1: at a cosine of -1 / s.
    """
    low, high = 1.0, 1e4
    for _ in range(60):
        s = math.sqrt(low * high)
        if fastmax:
            q = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
            other = torch.tensor([-1 / s, math.sqrt(1 - 1 / s**2)], dtype=torch.float64)
            k = torch.cat([q[0, 0], other.expand(n - 1, 2)])[None, None]
            top = mechanism("fastmax").map(q, k, scale=s)[..., 0].item()
        else:
            q, k = build_keys(n)
            unit = q / q.norm()
            top = mechanism("softmax").map(unit, k / k.norm(dim=-1, keepdim=True), scale=s)[..., 0].item()
        low, high = (low, s) if top > 0.5 else (s, high)
    return math.sqrt(low * high)


def limits_of_draw(seed: int) -> tuple[float, float | None]:
    """One draw: its largest weight over the cap, and its largest slope over the bound; slopes of few keys alone."""
    n = KEY_COUNTS[seed % 3]
    q = 3 * draw_normal(1, 1, 8, LIMIT_SIZE, seed=seed)
    k = draw_normal(1, 1, n, LIMIT_SIZE, seed=seed + 10_000) + (seed % 2) * draw_normal(
        1, 1, 1, LIMIT_SIZE, seed=seed + 1
    )
    weight = mechanism("fastmax").map(q, k).max().item() * (n + 4) / 5
    if n > 40:
        return weight, None
    x = (q / q.norm(dim=-1, keepdim=True) @ (k / k.norm(dim=-1, keepdim=True)).mT)[0, 0, 0]
    return weight, largest_slope(x, draw_normal(n, 3, seed=seed + 5)) * (n + 4) / 4


def limits_of_built_keys(n: int) -> dict[str, Any]:
    """Keys built to attain each bound, beside the bounds and softmax."""
    q, k = build_keys(n)
    weight = largest_weight(q, k)
    gap = max(math.log(n) - entropy(mechanism("fastmax").map(*build_keys(n, m))).item() for m in _shares(n))
    return {
        "keys": n,
        "cap": 5 / (n + 4),
        "built": weight,
        "softmax": math.exp(2) / (n - 1 + math.exp(2)),
        "uniform": 1 / n,
        "gap": gap,
        "share": 1 - gap / math.log(n),
        "slope": largest_slope(k[0, 0, :, 0].sign() * q[0, 0, 0, 0].sign(), draw_normal(n, 3, seed=n)),
        "slope_bound": 4 / (n + 4),
        "half_scale": half_scale(n, True) if n > 10 else None,
        "half_scale_softmax": half_scale(n, False) if n > 10 else None,
    }


def measure_limit(setting: Setting) -> Results:
    """Draws, and keys built to attain each bound."""
    count = LIMIT_DRAWS[setting.quick]
    raw = torch.cat([3 * draw_normal(512, seed=seed) for seed in range(count)])
    drawn = [limits_of_draw(seed) for seed in range(count)]
    weights, slopes = [weight for weight, _ in drawn], [x for _, x in drawn if x is not None]
    rows = [limits_of_built_keys(n) for n in KEY_COUNTS]
    by_keys = {row["keys"]: row for row in rows}
    attained = [row["built"] * (row["keys"] + 4) / 5 for row in rows]
    steep = [row["slope"] * (row["keys"] + 4) / 4 for row in rows]
    ratios = {size: [entropy_of_draw(seed, size) for seed in range(20)] for size in (16, 64, 256)}
    x = torch.linspace(-1, 1, 2001, dtype=torch.float64)
    off = (polynomial(x, 2) / x.exp() - 1).abs().max().item()
    largest = f"none: the largest of {count} draws and {len(KEY_COUNTS)} built"
    least_weight = round(min(least_f(seed) for seed in range(count)), 12)
    negative = {"negative": (raw < -1).double().mean().item()}
    measured = {
        "b1": Measurement(least_weight, 0.0, f"none: the least of {count} draws"),
        "b2": Measurement(polynomial(raw, 1).min().item(), 0.0, f"none: the least of {len(raw):,} numbers", negative),
        "b3": Measurement(off, 0.0, "none: computed"),
        "b4": Measurement(max(*weights, *attained) - 1, 0.0, largest, {"drawn": max(weights)}),
        "b5": Measurement(1 - min(attained), 0.0, f"none: the largest of {len(KEY_COUNTS)}"),
        "b6": by_seed(ratios[64], of="draws"),
        "b7": Measurement(max(row["gap"] for row in rows), 0.0, GAP_OF, {"gap": widest_gap()}),
        "b8": Measurement(max(*slopes, *steep) - 1, 0.0, largest, {"drawn": max(slopes)}),
        "b9": Measurement(
            math.log(by_keys[4000]["slope"] / by_keys[40]["slope"]) / math.log(100), 0.0, "none: computed"
        ),
        "b10": Measurement(rows[-1]["half_scale"] / rows[-1]["half_scale_softmax"], 0.0, "none: bisection"),
    }
    tables = {
        "limits_by_keys": rows,
        "polynomial_less_exp": {"at_minus_1": 0.5 / math.exp(-1) - 1, "at_1": 2.5 / math.e - 1},
        "entropy_by_head_size": {str(size): fmean(values) for size, values in ratios.items()},
    }
    return Results(measured, tables)


def _shares(n: int) -> range:
    return range(1, n, max(1, n // 200))


LIMIT_STUDY = Study("limits of the polynomial", LIMIT_CLAIMS, measure_limit)
