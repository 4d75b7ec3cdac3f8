"""Fastmax, exactly: the factorised form against the map written out (study a), and what normalising over the sequence
tells earlier tokens of later ones (study c).

**Forms.** The factorised form against the map written out, in float64 and in float32: study a.

    A_ij = f(x_ij) / sum_j f(x_ij),   x_ij = q_i.k_j,   f(x) = 1 + x  or  1 + x + x^2 / 2

f(q.k) is a product of features of q and of k alone, so the sum over keys can be taken once for all queries: cost grows
with the number of tokens and not with its square. The reference here is row by row, in float64, with nothing
factorised.

**The leak.** What normalising over the sequence tells earlier tokens of later ones: study c.

Public code for the method takes off the mean over tokens and divides by the largest length among them, so that |q.k| <=
1. Both depend on tokens that a causal model must not see, mask or no mask. Dividing each query and key by its own
length does not.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.numerics import spearman
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.compute import normal
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
    q = scale * normal(1, heads * groups, T, size, seed=seed)
    return q, normal(1, heads, S, size, seed=seed + 1) + 0.3, normal(1, heads, S, 3, seed=seed + 2)


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
            grads.append(torch.autograd.grad((out * normal(*out.shape, seed=seed + 5)).sum(), leaves))
        largest[name] = (outs[0] - outs[1]).abs().max().item()
        largest[f"{name} gradient"] = max((a - b).abs().max().item() for a, b in zip(*grads, strict=True))
    return largest


def rounding_errors(length: int, order: int, seed: int = 0) -> dict[str, float]:
    """Errors in float32 against float64, over the largest output: factorised, and the explicit map's."""
    q, k, v = (normal(1, 1, length, FORM_SIZE, seed=seed + i) for i in range(3))
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
        q = normal(1, 1, 1, FORM_SIZE, seed=seed)
        k = -q / q.norm() + far / FORM_SIZE**0.5 * normal(1, 1, 64, FORM_SIZE, seed=seed + 100)
        v = normal(1, 1, 64, 4, seed=seed + 200)
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

    The last token is drawn anew, or, with `factor`, made so many times as long.
    """
    q, k, v = (normal(tokens, LEAK_SIZE, seed=10 * seed + i) for i in range(3))
    before = causal_outputs(q, k, v, sequence)[: tokens // 2]
    other = [x.clone() for x in (q, k, v)]
    for i, x in enumerate(other):
        x[-1] = normal(LEAK_SIZE, seed=10 * seed + 5 + i) if factor is None else factor * x[-1]
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
