"""The reparametrization itself: every map as its direction times a learned spectral norm. Study b."""

from __future__ import annotations

import math
from statistics import fmean, median

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from locater.control.sigma_reparam import SigmaReparam, SpectralScale
from locater.theory import entropy_floor
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.compute import normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.models.shape import Shape
from locater_lab.models.transformer import Transformer

STEPS = {True: 100, False: 400}
FIRST = 100
RATES = (1e-3, 1e-2, 1e-1)  # the last is hot: weights change by their own size within ten steps
SEEDS = 8
WIDTH, TOKENS, HEAD = 256, 256, 64  # of the model that claim b6 is about
SMALL = Shape(vocabulary=32, layers=2, width=32, heads=2, kv_heads=2, hidden=48, length=16)

CLAIMS = (
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
        f"relative error of the median map, mean over the first {FIRST} steps, the worst of three rates", "at most", 0.05, by="ours",
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
        f"its bound in nats for {TOKENS} orthogonal tokens of root mean square 1, width {WIDTH}, heads of {HEAD}: the best case",
        "at least", 0.1, by="ours",
    ),
)  # fmt: skip


def model(seed: int) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(SMALL).double()


def exact(W: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(W.flatten(1), 2)


def unchanged(seed: int) -> float:
    """Largest change of logits when attached and when taken off again."""
    net, ids = model(seed).eval(), torch.arange(16)[None] % 32
    with torch.no_grad():
        before = net(ids)
        control = SigmaReparam().attach(net)
        attached = net(ids)
        control.detach()
        return float(max((attached - before).abs().max(), (net(ids) - before).abs().max()))


def followed(seed: int, rate: float, steps: int) -> list[list[float]]:
    """Relative error of sigma of every map, after every step of training on random tokens that follow a rule."""
    net = model(seed).train()
    control = SigmaReparam().attach(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate)
    generator, found = torch.Generator().manual_seed(seed), []
    maps = [parametrize_original(place.module, place.attribute) for place, _ in control.tensors]
    for _ in range(steps):
        ids = torch.randint(32, (8, 16), generator=generator)
        optimizer.zero_grad()
        net(ids, (3 * ids + 1) % 32).backward()
        with torch.no_grad():  # of the weights that this pass used
            found.append([1 - float(part.sigma(W) / exact(W)) for W, part in zip(maps, control.parts, strict=True)])
        optimizer.step()
    control.detach()
    return found


def parametrize_original(module: torch.nn.Module, attribute: str) -> Tensor:
    """The weight before it is scaled."""
    assert parametrize.is_parametrized(module, attribute)
    return module.parametrizations[attribute].original  # type: ignore[index,union-attr]


def gradients(seed: int, rows: int = 6, columns: int = 9, step: float = 1e-6) -> tuple[float, float, float]:
    """Of sum(G gamma W / sigma): distance from differences with the exact norm; cosine of W and the gradient, with
    sigma and without.
    """
    W, G = normal(rows, columns, seed=seed), normal(rows, columns, seed=seed + 1)
    part = SpectralScale(W, 1.5)
    free = W.clone().requires_grad_()
    (given,) = torch.autograd.grad((G * part(free)).sum(), free)
    gamma = part.gamma.item()

    def value(at: Tensor) -> float:
        return float((G * gamma * at / exact(at)).sum())

    nudges = torch.eye(W.numel(), dtype=W.dtype).reshape(-1, rows, columns) * step
    numeric = torch.tensor([(value(W + n) - value(W - n)) / (2 * step) for n in nudges], dtype=W.dtype).reshape(
        rows, columns
    )
    off = float((given - numeric).norm() / numeric.norm())
    without = G * gamma / float(part.sigma(W))  # sigma as a constant
    cosines = [float((W * g).sum() / (W.norm() * g.norm())) for g in (given, without)]
    return off, abs(cosines[0]), abs(cosines[1])


def promised(tokens: int = TOKENS, width: int = WIDTH, head: int = HEAD, gamma: float = 1.0) -> tuple[float, float]:
    """s and the bound for orthogonal tokens of length sqrt(width): |X X^T| = width, and no tokens of that length have
    less.

    >>> s, bound = promised()
    >>> s, f"{bound:.0e}"
    (32.0, '1e-10')
    """
    s = gamma**2 * width / math.sqrt(head)
    return s, float(entropy_floor(s, tokens))


def measure(setting: Setting) -> Results:
    """A small model, and single maps."""
    steps = STEPS[setting.quick]
    errors = {rate: [followed(seed, rate, steps) for seed in range(SEEDS)] for rate in RATES}
    worst = {rate: [max(max(step) for step in run[9:]) for run in runs] for rate, runs in errors.items()}
    middle = {rate: [fmean(median(step) for step in run[:FIRST]) for run in runs] for rate, runs in errors.items()}
    rows = [
        {"rate": rate, "largest": max(worst[rate]), "median": fmean(middle[rate]), "last": fmean(max(run[-1]) for run in errors[rate])}
        for rate in RATES
    ]  # fmt: skip
    curve = {f"{rate:g}": [max(step) for step in errors[rate][0]] for rate in RATES}
    checks = [gradients(seed) for seed in range(5)]
    s, bound = promised()
    needed = max(g / 100 for g in range(1, 101) if promised(gamma=g / 100)[1] >= 1.0)
    measured = {
        "b1": Measurement(max(unchanged(seed) for seed in range(SEEDS)), 0.0, f"none: largest of {SEEDS} models"),
        "b2": by_seed(worst[RATES[1]]),
        "b3": by_seed(max(middle.values(), key=fmean)),
        "b4": Measurement(max(x[0] for x in checks), 0.0, "none: largest of 5 maps"),
        "b5": Measurement(max(x[1] for x in checks), 0.0, "none: largest of 5 maps"),
        "b6": Measurement(bound, 0.0, "none: solved"),
    }
    tables = {
        "power_iteration": {"rows": rows, "steps": steps, "first": min(FIRST, steps), "curve": curve},
        "cosine_with_constant_sigma": max(x[2] for x in checks),
        "gamma_of_one": {"s": s, "gamma_for_one_nat": needed},
    }
    return Results(measured, tables)


STUDY = Study("the reparametrization", CLAIMS, measure)
