"""The same head with every key and value learnt: whether training finds the anchors and the parabola: study c.

Logits of anchor k are alpha_k s + gamma_k, its value v_k; the construction has alpha_k = 2 beta k D, gamma_k = -beta (L_k^2 -
L_0^2), v_k = L_k, which makes alpha linear in v and gamma quadratic. Trained on clip(s, -1, 1), s from -2 to 2.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from locater_lab.engine.claims import Claim, by_seed
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.hu2025.construction import slope
from locater_lab.theory.approximation import Anchors, interpolated

LOW, HIGH, REACH, POINTS = -1.0, 1.0, 2.0, 129
COUNTS = (4, 8, 16, 32)
SEEDS = {True: 8, False: 32}
STEPS = {True: 1500, False: 20_000}
RATE = 0.03
FITTED = 16  # anchors of the claims
LONGER = 4  # times as many steps, to see whether training has come to an end

CLAIMS = (
    Claim(
        "c1", "A trained head is at least as good as the constructed one at its best temperature",
        f"log10 of its root mean square error over that of the construction, {FITTED} anchors", "at most", 0.0, by="ours",
    ),
    Claim(
        "c2", "Its error falls with the number of anchors as the construction's does",
        f"slope of log error in log (p - 1), {COUNTS[0]} to {COUNTS[-1]} anchors", "about", -1.0, 0.25, by="ours",
    ),
    Claim(
        "c3", "Training finds the parabola: logits are quadratic in the anchors' values",
        f"share of gamma's variance that a parabola in v explains, weighted by use, {FITTED} anchors", "at least", 0.9, by="ours",
    ),
    Claim(
        "c4", "It uses all of its anchors",
        f"anchors in use, exp of the entropy of mean attention, over {FITTED}", "at least", 0.9, by="ours",
    ),
)  # fmt: skip


class Head(NamedTuple):
    """Keys (alpha, gamma) and values of B heads."""

    alpha: Float[Tensor, "B p"]
    gamma: Float[Tensor, "B p"]
    value: Float[Tensor, "B p"]

    def attention(self, s: Float[Tensor, " n"]) -> Float[Tensor, "B n p"]:
        return (self.alpha[:, None] * s[:, None] + self.gamma[:, None]).softmax(-1)

    def output(self, s: Float[Tensor, " n"]) -> Float[Tensor, "B n"]:
        return (self.attention(s) @ self.value[..., None])[..., 0]


def inputs() -> Float[Tensor, " n"]:
    return torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64)


def trained(count: int, seeds: int, steps: int) -> Head:
    """Normal keys and values at first; Adam on all inputs, the rate falls to 0."""
    g = torch.Generator().manual_seed(count)
    parts = [torch.randn(seeds, count, generator=g, dtype=torch.float64).requires_grad_() for _ in range(3)]
    head, s = Head(*parts), inputs()
    target = s.clamp(LOW, HIGH)
    optimizer = torch.optim.Adam(parts, lr=RATE)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / steps)
        optimizer.zero_grad()
        (head.output(s) - target).square().mean(1).sum().backward()
        optimizer.step()
    return Head(*(x.detach() for x in parts))


def constructed_error(count: int) -> tuple[float, float]:
    """The least root mean square error over temperatures, and its beta D^2."""
    s = inputs()
    tried = [0.2 * 1.1**n for n in range(50)]
    errors = [_rms(interpolated(s, Anchors.sharp(LOW, HIGH, count, x)) - s.clamp(LOW, HIGH)) for x in tried]
    least = min(range(len(tried)), key=lambda n: float(errors[n]))
    return float(errors[least]), tried[least]


def explained(
    x: Float[Tensor, " p"], y: Float[Tensor, " p"], use: Float[Tensor, " p"], degree: int
) -> tuple[float, Tensor]:
    """Share of y's variance that a polynomial in x explains, anchors weighted by their use; and its coefficients.

    >>> x = torch.arange(5.0).double()
    >>> share, coefficients = explained(x, 1 + 2 * x**2, torch.ones(5).double(), 2)
    >>> round(share, 6), torch.allclose(coefficients, torch.tensor([1.0, 0.0, 2.0]).double())
    (1.0, True)
    """
    root = use.sqrt()
    powers = torch.stack([x**n for n in range(degree + 1)], 1)
    fit = torch.linalg.lstsq(root[:, None] * powers, (root * y)[:, None]).solution[:, 0]
    middle = (use * y).sum() / use.sum()
    left, whole = (use * (y - powers @ fit).square()).sum(), (use * (y - middle).square()).sum()
    return float(1 - left / whole), fit


def spectra(head: Head) -> list[dict[str, Any]]:
    """What each trained head has in common with the construction."""
    use = head.attention(inputs()).mean(1)
    rows = []
    for n in range(len(use)):
        linear, line = explained(head.value[n], head.alpha[n], use[n], 1)
        quadratic, curve = explained(head.value[n], head.gamma[n], use[n], 2)
        keys = torch.stack([head.alpha[n], head.gamma[n]], 1)
        singular = torch.linalg.svdvals(keys - (use[n] @ keys) / use[n].sum())
        rows.append({"linear": linear, "quadratic": quadratic, "beta": float(line[1]) / 2, "beta_of_gamma": -float(curve[2]),
                     "in_use": math.exp(float(torch.special.entr(use[n]).sum())), "second": float(singular[1] / singular[0])})  # fmt: skip
    return rows


def _rms(x: Tensor) -> Tensor:
    return x.square().mean(-1).sqrt()


def measure(setting: Setting) -> Results:
    s = inputs()
    heads = {p: trained(p, SEEDS[setting.quick], STEPS[setting.quick]) for p in setting.each(list(COUNTS))}
    errors = {p: _rms(head.output(s) - s.clamp(LOW, HIGH)) for p, head in heads.items()}
    built = {p: constructed_error(p) for p in COUNTS}
    per_head = {p: spectra(head) for p, head in heads.items()}
    own = per_head[FITTED]
    by_p = torch.stack([errors[p] for p in COUNTS], 1)
    measured = {
        "c1": by_seed((errors[FITTED] / built[FITTED][0]).log10().tolist()),
        "c2": by_seed([slope([p - 1 for p in COUNTS], row) for row in by_p.tolist()]),
        "c3": by_seed([row["quadratic"] for row in own]),
        "c4": by_seed([row["in_use"] / FITTED for row in own]),
    }

    def median(p: int, key: str) -> float:
        return float(torch.tensor([row[key] for row in per_head[p]]).median())

    keys = ("linear", "quadratic", "beta", "beta_of_gamma", "in_use", "second")
    rows = [
        {"anchors": p, "trained": float(errors[p].median()), "constructed": built[p][0], "sharpness": built[p][1],
         "constructed_beta": built[p][1] / ((HIGH - LOW) / (p - 1)) ** 2, **{key: median(p, key) for key in keys}}
        for p in COUNTS
    ]  # fmt: skip
    steps = LONGER * STEPS[setting.quick]
    late = trained(FITTED, SEEDS[setting.quick], steps)
    error = float(_rms(late.output(s) - s.clamp(LOW, HIGH)).median())
    longer = {"steps": steps, "anchors": FITTED, "error": error, "ratio": error / built[FITTED][0]}
    table = {"rows": rows, "seeds": SEEDS[setting.quick], "steps": STEPS[setting.quick], "longer": longer}
    return Results(measured, {"free_heads": table})


STUDY = Study("a head that is trained", CLAIMS, measure)
