"""A layer of attention trained on truncated linear functions of its tokens, in the form of the paper's code: study d.

Targets clip(w_i^T x_i + t_i, a, b) with a w and a t for each place i, x uniform on [-5, 5]. Tokens are mapped to a hidden
width and scaled by place; p - s learnt anchor tokens follow them; one layer of multi-head attention reads all; the target
is output channel 0 of every token, the other channels are 0. All seeds are trained at once, with weights of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.spectrum import moments
from locater_lab.engine.claims import Claim, by_seed
from locater_lab.engine.compute import device_of_study, map_parts
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.theory.approximation import Anchors, interpolated

WIDTH, HIDDEN, RATE, BATCH = 10, 32, 1e-3, 32
REACH = 5.0
LISTED = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)  # beta D^2 of the construction


@dataclass(frozen=True)
class Size:
    """How large an experiment is; the second is that of the paper's code."""

    places: int
    samples: int
    epochs: int
    seeds: int
    rate: float


SIZES = {True: Size(6, 480, 30, 8, 3e-3), False: Size(50, 1000, 50, 11, RATE)}


@dataclass(frozen=True)
class Case:
    """One setting of the layer."""

    heads: int = 1
    span: float = 50.0  # b - a
    anchors: int = 10  # p less the number of places


CASES = {
    True: (Case(), Case(heads=4), Case(heads=16), Case(span=10.0), Case(anchors=40)),
    False: (
        *(Case(heads=h) for h in (1, 2, 4, 8, 16)),
        *(Case(span=r) for r in (10.0, 20.0, 30.0, 40.0)),
        *(Case(anchors=n) for n in (20, 30, 40, 50, 60, 70)),
    ),
}
FEW, MOST_HEADS, NARROW = Case(), Case(heads=16), Case(span=10.0)
MANY = {True: Case(anchors=40), False: Case(anchors=70)}
VALIDATION = "the code's validation of Theorems 3.1 and 3.2"

CLAIMS = (
    Claim(
        "d1", "Trained, the error falls with the number of heads",
        "log10 of the mean square error with 16 heads over that with 1", "at most", 0.0, where=VALIDATION, bound="ours",
    ),
    Claim(
        "d2", "It rises with the range b - a",
        "log10 of the mean square error with a range of 50 over that with 10", "at least", 0.0, where=VALIDATION, bound="ours",
    ),
    Claim(
        "d3", "It falls with the number p of tokens and anchors",
        "log10 of the mean square error with the most anchors over that with 10", "at most", 0.0, where=VALIDATION, bound="ours",
    ),
    Claim(
        "d4", "A trained layer of one head does as well as the constructed head with its ten anchors",
        "log10 of its mean square error over that of the construction at its best temperature", "at most", 0.0, by="ours",
    ),
    Claim(
        "d5", "Training concentrates the map on few directions: its stable rank is at most 2, the rank of the construction",
        "stable rank of W, one head", "at most", 2.0, by="ours",
    ),
    Claim(
        "d6", "Training attends to the anchors more than uniform attention does",
        "mean weight on anchor tokens less their share of all tokens, one head", "at least", 0.0, by="ours",
    ),
    Claim(
        "d7", "Training finds the parabola: logits on anchors fall with the square of target less the anchor's value",
        "share of the variance of logits within a row that it explains, one head", "at least", 0.5, by="ours",
    ),
)  # fmt: skip


class Layers(torch.nn.Module):
    """B layers side by side, none of which sees another."""

    def __init__(self, seeds: int, places: int, case: Case) -> None:
        super().__init__()
        self.heads, self.places = case.heads, places
        g = torch.Generator().manual_seed(1)

        def linear(wide: int) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
            bound = 1 / math.sqrt(wide)
            weight, bias = torch.rand(seeds, wide, HIDDEN, generator=g), torch.rand(seeds, 1, HIDDEN, generator=g)
            return torch.nn.Parameter((2 * weight - 1) * bound), torch.nn.Parameter((2 * bias - 1) * bound)

        self.into, self.into_bias = linear(WIDTH)
        self.by_place = torch.nn.Parameter(torch.ones(seeds, 1, places, HIDDEN))
        line = torch.linspace(-1, 1, case.anchors)[:, None].expand(case.anchors, HIDDEN)
        self.anchors = torch.nn.Parameter(line.repeat(seeds, 1, 1, 1))
        self.query, self.query_bias = linear(HIDDEN)
        self.key, self.key_bias = linear(HIDDEN)
        self.value, self.value_bias = linear(HIDDEN)
        self.out, self.out_bias = linear(HIDDEN)

    def tokens(self, x: Float[Tensor, "B n s d"]) -> Float[Tensor, "B n p hidden"]:
        B, n = x.shape[:2]
        own = (x.flatten(1, 2) @ self.into + self.into_bias).reshape(B, n, self.places, HIDDEN) * self.by_place
        return torch.cat([own, self.anchors.expand(-1, n, -1, -1)], 2)

    def _mapped(self, z: Tensor, weight: Tensor, bias: Tensor) -> Float[Tensor, "B n h p size"]:
        B, n, p = z.shape[:3]
        return (z.flatten(1, 2) @ weight + bias).reshape(B, n, p, self.heads, -1).transpose(2, 3)

    def logits(self, z: Tensor) -> Float[Tensor, "B n h s p"]:
        q = self._mapped(z[:, :, : self.places], self.query, self.query_bias)
        return q @ self._mapped(z, self.key, self.key_bias).mT / math.sqrt(q.shape[-1])

    def forward(self, x: Float[Tensor, "B n s d"]) -> Float[Tensor, "B n s hidden"]:
        z = self.tokens(x)
        mixed = self.logits(z).softmax(-1) @ self._mapped(z, self.value, self.value_bias)
        B, n = x.shape[:2]
        flat = mixed.transpose(2, 3).reshape(B, n * self.places, HIDDEN)
        return (flat @ self.out + self.out_bias).reshape(B, n, self.places, HIDDEN)

    def anchor_values(self) -> Float[Tensor, "B anchors"]:
        """What every anchor would write into channel 0 if all attention were on it; one head."""
        values = self.anchors[:, 0] @ self.value + self.value_bias
        return (values @ self.out + self.out_bias)[..., 0]


def forms(size: Size) -> tuple[Tensor, Tensor]:
    """Tokens (B, samples, s, d) and their linear forms."""
    g = torch.Generator().manual_seed(0)
    x = REACH * (2 * torch.rand(size.seeds, size.samples, size.places, WIDTH, generator=g) - 1)
    w = torch.randn(size.seeds, 1, size.places, WIDTH, generator=g)
    return x, (w * x).sum(-1) + torch.randn(size.seeds, 1, size.places, generator=g)


def trained(case: Case, size: Size, where: str) -> tuple[Layers, Tensor, Tensor]:
    """Layers after training on four fifths of the samples; the rest, to be judged by."""
    x, s = (part.to(where) for part in forms(size))
    cut = size.samples * 4 // 5
    model = Layers(size.seeds, size.places, case).to(where)
    optimizer = torch.optim.Adam(model.parameters(), lr=size.rate)
    order = torch.Generator().manual_seed(2)
    for _ in range(size.epochs):
        for rows in torch.randperm(cut, generator=order).split(BATCH):
            target = torch.zeros(size.seeds, len(rows), size.places, HIDDEN, device=where)
            target[..., 0] = s[:, rows].clamp(-case.span / 2, case.span / 2)
            optimizer.zero_grad()
            (model(x[:, rows]) - target).square().mean((1, 2, 3)).sum().backward()
            optimizer.step()
    return model.requires_grad_(False), x[:, cut:], s[:, cut:]


def constructed(s: Tensor, case: Case) -> Float[Tensor, " B"]:
    """Mean square errors of the head with as many anchors, at the temperature that is best for them."""
    low, high = -case.span / 2, case.span / 2
    s = s.double().flatten(1)
    errors = [interpolated(s, Anchors.sharp(low, high, case.anchors, x)) - s.clamp(low, high) for x in LISTED]
    return torch.stack([error.square().mean(1) for error in errors]).amin(0)


def parabola(model: Layers, logits: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Of one head, by seed: beta of -beta (s - value)^2 fitted to logits on anchors, less their mean over the row; and the
    share of variance explained.
    """
    own = logits[:, :, 0, :, model.places :]
    far = (s[..., None] - model.anchor_values()[:, None, None]).square()
    own, far = (y - y.mean(-1, keepdim=True) for y in (own, far))
    beta = -(own * far).flatten(1).sum(1) / far.square().flatten(1).sum(1)
    left = own + beta[:, None, None, None] * far
    return beta, 1 - left.square().flatten(1).sum(1) / own.square().flatten(1).sum(1)


def described(model: Layers, x: Tensor, s: Tensor, case: Case) -> dict[str, Any]:
    """Errors, attention and query-key maps of layers on new samples, lists by seed."""
    target = s.clamp(-case.span / 2, case.span / 2)
    with torch.no_grad():
        error = (model(x)[..., 0] - target).square().flatten(1).mean(1)
        logits = model.logits(model.tokens(x))
        beta, share = parabola(model, logits, s) if case.heads == 1 else (None, None)
    maps = (
        y.detach().unflatten(2, (case.heads, -1)).permute(0, 2, 3, 1).double().cpu() for y in (model.query, model.key)
    )
    query, key = maps
    of = moments(query / math.sqrt(query.shape[2]), key)
    singular = of.singular_values()
    values = {
        "error": error,
        "constructed": constructed(s.cpu(), case),
        "on_anchors": logits.softmax(-1)[..., model.places :].sum(-1).flatten(1).mean(1),
        "stable_rank": of.stable_rank.mean(1),
        "rank": (singular > 0.01 * singular[..., :1]).double().sum(-1).mean(1),
        "mean": of.mean.mean(1),
        "scale": of.frobenius_sq.sqrt().mean(1),
        "kappa": of.concentration.mean(1),
        "spread": logits.std(-1).flatten(1).mean(1),
        "beta": beta,
        "parabola": share,
    }
    return {name: None if x is None else x.double().cpu().tolist() for name, x in values.items()}


def of_case(setting: Setting, case: Case) -> dict[str, Any]:
    return described(*trained(case, SIZES[setting.quick], device_of_study(setting)), case)


def _row(case: Case, values: dict[str, Any], places: int) -> dict[str, Any]:
    middle = {k: None if v is None else float(torch.tensor(v).median()) for k, v in values.items()}
    return {"heads": case.heads, "span": case.span, "p": case.anchors + places, "anchors": case.anchors,
            **middle}  # fmt: skip


def measure(setting: Setting) -> Results:
    cases = list(CASES[setting.quick])
    results = dict(zip(cases, map_parts(of_case, cases, setting), strict=True))
    one, size = results[FEW], SIZES[setting.quick]

    def ratio(top: list[float], bottom: list[float]) -> list[float]:
        return [math.log10(a / b) for a, b in zip(top, bottom, strict=True)]

    measured = {
        "d1": by_seed(ratio(results[MOST_HEADS]["error"], one["error"])),
        "d2": by_seed(ratio(one["error"], results[NARROW]["error"])),
        "d3": by_seed(ratio(results[MANY[setting.quick]]["error"], one["error"])),
        "d4": by_seed(ratio(one["error"], one["constructed"])),
        "d5": by_seed(one["stable_rank"]),
        "d6": by_seed([x - FEW.anchors / (FEW.anchors + size.places) for x in one["on_anchors"]]),
        "d7": by_seed(one["parabola"]),
    }
    none = described(*trained(FEW, replace(size, epochs=0), "cpu"), FEW)
    rows = [{"which": "untrained", **_row(FEW, none, size.places)}]
    rows += [{"which": "trained", **_row(case, values, size.places)} for case, values in results.items()]
    sizes = {
        "places": size.places,
        "samples": size.samples,
        "epochs": size.epochs,
        "seeds": size.seeds,
        "rate": size.rate,
    }
    return Results(measured, {"trained_layers": {"rows": rows, **sizes}})


STUDY = Study("a layer that is trained", CLAIMS, measure)
