"""The floor under the entropy of attention (study a), and the reparametrization that keeps it up (study b).

Theorem 3.1: for sigma = |W_Q W_K^T|, sigma_x = |X X^T| (spectral norms) and s = sigma sigma_x, every row of softmax(X
W_Q W_K^T X^T) has

    H >= log(1 + (T-1) b) + s sqrt(T (T-1)) b / (1 + (T-1) b),    b = exp(-s sqrt(T / (T-1)))

`entropy_floor(s, T)` is the right side, and also the least entropy of a row whose logits, less their mean, have the l2
norm s.

The reparametrization writes every map as its direction times a learned spectral norm.
"""

from __future__ import annotations

import math
from itertools import product
from statistics import fmean, median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils import parametrize

from locater.control.sigma_reparam import SigmaReparam, SpectralScale
from locater.theory import entropy_floor, entropy_floor_of_range
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.devices_and_processes import draw_normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.models.shape import Shape
from locater_lab.models.transformer import Transformer

# ---- a: the floor under entropy ----


Row = Float[Tensor, "*n T"]

DRAWS = {True: 900, False: 9000}
FLOOR_TOKENS, WIDTHS, SIZES = (2, 3, 8, 32, 64), (2, 8, 16), (0.02, 0.1, 0.5, 2.0)
SEARCHES = {True: 50, False: 500}  # descents from each norm or range that look for rows under the floor
DESCENT_STEPS = 300
CENTRED_NORMS = (0.5, 2.0, 5.0, 10.0)  # of centred rows
LISTED_TOKENS = 8  # tokens of which every row of two levels is listed
ROUNDING = 1e-9

FLOOR_CLAIMS = (
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
        f"least of entropy less floor, every row of two levels of {LISTED_TOKENS} tokens and descents inside the range, in nats", "at least",
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
    T, d, size = FLOOR_TOKENS[seed % 5], WIDTHS[seed // 5 % 3], SIZES[seed // 15 % 4]
    x, W = (
        draw_normal(T, d, seed=seed),
        draw_normal(d, d, seed=seed + 10_000) @ draw_normal(d, d, seed=seed + 20_000).mT * size / d,
    )
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


def descend_from_random(
    T: int, count: int, norm: float | None = None, spread: float | None = None
) -> Float[Tensor, " count"]:
    """Entropies where descents from random logits end, over centred rows of a norm or over rows within a range."""
    free = draw_normal(count, T, seed=T).requires_grad_()
    optimizer = torch.optim.Adam([free], lr=0.1)

    def logits() -> Tensor:
        if norm is None:
            return (spread or 0.0) * free.sigmoid()
        z = free - free.mean(-1, keepdim=True)
        return norm * z / z.norm(dim=-1, keepdim=True)

    for _ in range(DESCENT_STEPS):
        optimizer.zero_grad()
        row_entropy(logits()).sum().backward()
        optimizer.step()
    with torch.no_grad():
        return row_entropy(logits())


def measure_floor(setting: Setting) -> Results:
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
    lower = [
        x
        for norm in CENTRED_NORMS
        for x in (descend_from_random(12, count, norm=norm) - entropy_floor(norm, 12)).tolist()
    ]
    others = sum(int(row_entropy(two_levels(T, s)).argmin()) != 0 for T, s in product((4, 16, 64), CENTRED_NORMS))
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
    tables = {"floor_curve": _floor_curve(), "theorem_share": float(torch.tensor(shares).median())}
    return Results({**measured, **within_range.measured}, {**tables, **within_range.tables})


def measure_range(setting: Setting) -> Results:
    """Logits within a range: the floor, and searches for rows below it."""
    floor = float(entropy_floor_of_range(2.0, 64))
    high = torch.stack([2.0 * (torch.arange(64) < k).double() for k in range(1, 64)])
    listed = torch.tensor(list(product((0.0, 1.0), repeat=LISTED_TOKENS)), dtype=torch.float64)
    apart = []
    for spread in (0.5, 2.0, 6.0):
        least = float(entropy_floor_of_range(spread, LISTED_TOKENS))
        apart.append(float(row_entropy(spread * listed).min()) - least)
        apart += (descend_from_random(LISTED_TOKENS, SEARCHES[setting.quick], spread=spread) - least).tolist()
    entropies = row_entropy(high)
    lowest = {"tokens": 64, "range": 2.0, "high": int(entropies.argmin()) + 1, "one": float(entropies[0])}
    measured = {
        "a7": Measurement(floor, 0.0, "none: solved"),
        "a8": Measurement(min(apart), 0.0, f"none: least of {len(apart)}", {"closest": min(apart)}),
    }
    return Results(measured, {"least_within_range": lowest})


def _floor_curve() -> list[dict[str, Any]]:
    """The floor against the norm s, by number of tokens; and the floor of a range of that size."""
    return [
        {
            "s": s,
            **{str(T): float(entropy_floor(s, T)) for T in (16, 256)},
            "range": float(entropy_floor_of_range(s, 256)),
        }
        for s in (0.1 * 1.25**n for n in range(25))
    ]


FLOOR_STUDY = Study("the floor under entropy", FLOOR_CLAIMS, measure_floor)


# ---- b: the reparametrization ----


STEPS = {True: 100, False: 400}
FIRST_STEPS = 100
RATES = (1e-3, 1e-2, 1e-1)  # the last is hot: weights change by their own size within ten steps
SEEDS = 8
WIDTH, REPARAM_TOKENS, HEAD = 256, 256, 64  # of the model that claim b6 is about
SMALL_SHAPE = Shape(vocabulary=32, layers=2, width=32, heads=2, kv_heads=2, hidden=48, length=16)

REPARAM_CLAIMS = (
    Claim(
        "b1", "Attached with gamma at each map's own norm, it leaves outputs as they are",
        "largest change of logits, float64", "at most", 1e-12, by="ours",
    ),
    Claim(
        "b2", "One step of power iteration in a training step follows the spectral norm of every map",
        f"largest relative error over maps and steps from the tenth on, rate {RATES[1]:g}", "at most", 0.05, by="ours",
    ),
    Claim(
        "b3", "It follows that of most maps",
        f"relative error of the median map, mean over the first {FIRST_STEPS} steps, the worst of three rates", "at most", 0.05, by="ours",
    ),
    Claim(
        "b4", "With u and v held constant, the gradient of gamma W / sigma is that of gamma W over its exact spectral norm",
        "largest relative difference from finite differences with the norm from an SVD", "at most", 1e-6, by="ours",
    ),
    Claim(
        "b5", "So gradients know that scaling W changes nothing",
        "cosine of W and its gradient, largest absolute value", "at most", 1e-12, by="ours",
    ),
    Claim(
        "b6", "With gamma = 1 on queries and keys the theorem keeps entropy from collapse",
        f"its bound in nats for {REPARAM_TOKENS} orthogonal tokens of root mean square 1, width {WIDTH}, heads of {HEAD}: the best case",
        "at least", 0.1, by="ours",
    ),
)  # fmt: skip


def small_model(seed: int) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(SMALL_SHAPE).double()


def spectral_norm(W: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(W.flatten(1), 2)


def attachment_error(seed: int) -> float:
    """Largest change of logits when attached and when taken off again."""
    net, ids = small_model(seed).eval(), torch.arange(16)[None] % 32
    with torch.no_grad():
        before = net(ids)
        control = SigmaReparam().attach(net)
        attached = net(ids)
        control.detach()
        return float(max((attached - before).abs().max(), (net(ids) - before).abs().max()))


def norm_errors(seed: int, rate: float, steps: int) -> list[list[float]]:
    """Relative error of sigma of every map, after every step of training on random tokens that follow a rule."""
    net = small_model(seed).train()
    control = SigmaReparam().attach(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate)
    generator, found = torch.Generator().manual_seed(seed), []
    maps = [parametrize_original(place.module, place.attribute) for place, _ in control.tensors]
    for _ in range(steps):
        ids = torch.randint(32, (8, 16), generator=generator)
        optimizer.zero_grad()
        net(ids, (3 * ids + 1) % 32).backward()
        with torch.no_grad():  # of the weights that this pass used
            found.append(
                [1 - float(part.sigma(W) / spectral_norm(W)) for W, part in zip(maps, control.parts, strict=True)]
            )
        optimizer.step()
    control.detach()
    return found


def parametrize_original(module: torch.nn.Module, attribute: str) -> Tensor:
    """The weight before it is scaled."""
    assert parametrize.is_parametrized(module, attribute)
    return module.parametrizations[attribute].original  # type: ignore[index,union-attr]


def gradient_errors(seed: int, rows: int = 6, columns: int = 9, step: float = 1e-6) -> tuple[float, float, float]:
    """Of sum(G gamma W / sigma): distance from differences with the exact norm; cosine of W and the gradient, with
    sigma and without.
    """
    W, G = draw_normal(rows, columns, seed=seed), draw_normal(rows, columns, seed=seed + 1)
    part = SpectralScale(W, 1.5)
    free = W.clone().requires_grad_()
    (given,) = torch.autograd.grad((G * part(free)).sum(), free)
    gamma = part.gamma.item()

    def value(at: Tensor) -> float:
        return float((G * gamma * at / spectral_norm(at)).sum())

    nudges = torch.eye(W.numel(), dtype=W.dtype).reshape(-1, rows, columns) * step
    numeric = torch.tensor([(value(W + n) - value(W - n)) / (2 * step) for n in nudges], dtype=W.dtype).reshape(
        rows, columns
    )
    off = float((given - numeric).norm() / numeric.norm())
    without = G * gamma / float(part.sigma(W))  # sigma as a constant
    cosines = [float((W * g).sum() / (W.norm() * g.norm())) for g in (given, without)]
    return off, abs(cosines[0]), abs(cosines[1])


def promised_entropy(
    tokens: int = REPARAM_TOKENS, width: int = WIDTH, head: int = HEAD, gamma: float = 1.0
) -> tuple[float, float]:
    """s and the bound for orthogonal tokens of length sqrt(width): |X X^T| = width, and no tokens of that length have
    less.

    >>> s, bound = promised_entropy()
    >>> s, f"{bound:.0e}"
    (32.0, '1e-10')
    """
    s = gamma**2 * width / math.sqrt(head)
    return s, float(entropy_floor(s, tokens))


def measure_reparam(setting: Setting) -> Results:
    """A small model, and single maps."""
    steps = STEPS[setting.quick]
    errors = {rate: [norm_errors(seed, rate, steps) for seed in range(SEEDS)] for rate in RATES}
    worst = {rate: [max(max(step) for step in run[9:]) for run in runs] for rate, runs in errors.items()}
    middle = {
        rate: [fmean(median(step) for step in run[:FIRST_STEPS]) for run in runs] for rate, runs in errors.items()
    }
    rows = [
        {"rate": rate, "largest": max(worst[rate]), "median": fmean(middle[rate]), "last": fmean(max(run[-1]) for run in errors[rate])}
        for rate in RATES
    ]  # fmt: skip
    curve = {f"{rate:g}": [max(step) for step in errors[rate][0]] for rate in RATES}
    checks = [gradient_errors(seed) for seed in range(5)]
    s, bound = promised_entropy()
    needed = max(g / 100 for g in range(1, 101) if promised_entropy(gamma=g / 100)[1] >= 1.0)
    measured = {
        "b1": Measurement(
            max(attachment_error(seed) for seed in range(SEEDS)), 0.0, f"none: largest of {SEEDS} models"
        ),
        "b2": by_seed(worst[RATES[1]]),
        "b3": by_seed(max(middle.values(), key=fmean)),
        "b4": Measurement(max(x[0] for x in checks), 0.0, "none: largest of 5 maps"),
        "b5": Measurement(max(x[1] for x in checks), 0.0, "none: largest of 5 maps"),
        "b6": Measurement(bound, 0.0, "none: solved"),
    }
    tables = {
        "power_iteration": {"rows": rows, "steps": steps, "first": min(FIRST_STEPS, steps), "curve": curve},
        "cosine_with_constant_sigma": max(x[2] for x in checks),
        "gamma_of_one": {"s": s, "gamma_for_one_nat": needed},
    }
    return Results(measured, tables)


REPARAM_STUDY = Study("the reparametrization", REPARAM_CLAIMS, measure_reparam)
