"""What training finds in the place of the construction: one head with free keys and values (study c), and a layer in
the form of the paper's code (study d).

**One head (study c).** Does training find the anchors and the parabola? Logits of anchor k are alpha_k s + gamma_k, its
value v_k; the construction has alpha_k = 2 beta k D, gamma_k = -beta (L_k^2 - L_0^2), v_k = L_k, which makes alpha
linear in v and gamma quadratic. Trained on clip(s, -1, 1), s from -2 to 2.

**A layer (study d).** It learns truncated linear functions of its tokens. Targets clip(w_i^T x_i + t_i, a, b) with a w
and a t for each place i, x uniform on [-5, 5]. Tokens are mapped to a hidden width and scaled by place; p - s learnt
anchor tokens follow them; one layer of multi-head attention reads all; the target is output channel 0 of every token,
the other channels are 0. All seeds are trained at once, with weights of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from locater.spectrum import moments
from locater_lab.engine.claims import Claim, by_seed
from locater_lab.engine.devices_and_processes import device_of_study, log_slope, map_parts
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.theory.approximation import Anchors, interpolate

# ---- c: a head that is trained ----


LOW, HIGH, HEAD_REACH, POINTS = -1.0, 1.0, 2.0, 129
COUNTS = (4, 8, 16, 32)
SEEDS = {True: 8, False: 32}
HEAD_STEPS = {True: 1500, False: 20_000}
HEAD_RATE = 0.03
FITTED = 16  # anchors of the claims
LONGER = 4  # times as many steps, to see whether training has come to an end

HEAD_CLAIMS = (
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


def head_inputs() -> Float[Tensor, " n"]:
    return torch.linspace(-HEAD_REACH, HEAD_REACH, POINTS, dtype=torch.float64)


def train_heads(count: int, seeds: int, steps: int) -> Head:
    """Normal keys and values at first; Adam on all inputs, the rate falls to 0."""
    g = torch.Generator().manual_seed(count)
    parts = [torch.randn(seeds, count, generator=g, dtype=torch.float64).requires_grad_() for _ in range(3)]
    head, s = Head(*parts), head_inputs()
    target = s.clamp(LOW, HIGH)
    optimizer = torch.optim.Adam(parts, lr=HEAD_RATE)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = HEAD_RATE * (1 - step / steps)
        optimizer.zero_grad()
        (head.output(s) - target).square().mean(1).sum().backward()
        optimizer.step()
    return Head(*(x.detach() for x in parts))


def least_constructed_error(count: int) -> tuple[float, float]:
    """The least root mean square error over temperatures, and its beta D^2."""
    s = head_inputs()
    tried = [0.2 * 1.1**n for n in range(50)]
    errors = [_root_mean_square(interpolate(s, Anchors.sharp(LOW, HIGH, count, x)) - s.clamp(LOW, HIGH)) for x in tried]
    least = min(range(len(tried)), key=lambda n: float(errors[n]))
    return float(errors[least]), tried[least]


def explained_variance(
    x: Float[Tensor, " p"], y: Float[Tensor, " p"], use: Float[Tensor, " p"], degree: int
) -> tuple[float, Tensor]:
    """Share of y's variance that a polynomial in x explains, anchors weighted by their use; and its coefficients.

    >>> x = torch.arange(5.0).double()
    >>> share, coefficients = explained_variance(x, 1 + 2 * x**2, torch.ones(5).double(), 2)
    >>> round(share, 6), torch.allclose(coefficients, torch.tensor([1.0, 0.0, 2.0]).double())
    (1.0, True)
    """
    root = use.sqrt()
    powers = torch.stack([x**n for n in range(degree + 1)], 1)
    fit = torch.linalg.lstsq(root[:, None] * powers, (root * y)[:, None]).solution[:, 0]
    middle = (use * y).sum() / use.sum()
    left, whole = (use * (y - powers @ fit).square()).sum(), (use * (y - middle).square()).sum()
    return float(1 - left / whole), fit


def head_spectra(head: Head) -> list[dict[str, Any]]:
    """What each trained head has in common with the construction."""
    use = head.attention(head_inputs()).mean(1)
    rows = []
    for n in range(len(use)):
        linear, line = explained_variance(head.value[n], head.alpha[n], use[n], 1)
        quadratic, curve = explained_variance(head.value[n], head.gamma[n], use[n], 2)
        keys = torch.stack([head.alpha[n], head.gamma[n]], 1)
        singular = torch.linalg.svdvals(keys - (use[n] @ keys) / use[n].sum())
        rows.append({"linear": linear, "quadratic": quadratic, "beta": float(line[1]) / 2, "beta_of_gamma": -float(curve[2]),
                     "in_use": math.exp(float(torch.special.entr(use[n]).sum())), "second": float(singular[1] / singular[0])})  # fmt: skip
    return rows


def _root_mean_square(x: Tensor) -> Tensor:
    return x.square().mean(-1).sqrt()


def measure_head(setting: Setting) -> Results:
    s = head_inputs()
    heads = {p: train_heads(p, SEEDS[setting.quick], HEAD_STEPS[setting.quick]) for p in setting.each(list(COUNTS))}
    errors = {p: _root_mean_square(head.output(s) - s.clamp(LOW, HIGH)) for p, head in heads.items()}
    built = {p: least_constructed_error(p) for p in COUNTS}
    per_head = {p: head_spectra(head) for p, head in heads.items()}
    own = per_head[FITTED]
    by_p = torch.stack([errors[p] for p in COUNTS], 1)
    measured = {
        "c1": by_seed((errors[FITTED] / built[FITTED][0]).log10().tolist()),
        "c2": by_seed([log_slope([p - 1 for p in COUNTS], row) for row in by_p.tolist()]),
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
    steps = LONGER * HEAD_STEPS[setting.quick]
    late = train_heads(FITTED, SEEDS[setting.quick], steps)
    error = float(_root_mean_square(late.output(s) - s.clamp(LOW, HIGH)).median())
    longer = {"steps": steps, "anchors": FITTED, "error": error, "ratio": error / built[FITTED][0]}
    table = {"rows": rows, "seeds": SEEDS[setting.quick], "steps": HEAD_STEPS[setting.quick], "longer": longer}
    return Results(measured, {"free_heads": table})


HEAD_STUDY = Study("a head that is trained", HEAD_CLAIMS, measure_head)


# ---- d: a layer that is trained ----


WIDTH, HIDDEN, LAYER_RATE, BATCH = 10, 32, 1e-3, 32
LAYER_REACH = 5.0
LISTED_SHARPNESSES = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)  # beta D^2 of the construction


@dataclass(frozen=True)
class ExperimentSize:
    """How large an experiment is; the second is that of the paper's code."""

    places: int
    samples: int
    epochs: int
    seeds: int
    rate: float


SIZES = {True: ExperimentSize(6, 480, 30, 8, 3e-3), False: ExperimentSize(50, 1000, 50, 11, LAYER_RATE)}


@dataclass(frozen=True)
class LayerCase:
    """One setting of the layer."""

    heads: int = 1
    span: float = 50.0  # b - a
    anchors: int = 10  # p less the number of places


CASES = {
    True: (LayerCase(), LayerCase(heads=4), LayerCase(heads=16), LayerCase(span=10.0), LayerCase(anchors=40)),
    False: (
        *(LayerCase(heads=h) for h in (1, 2, 4, 8, 16)),
        *(LayerCase(span=r) for r in (10.0, 20.0, 30.0, 40.0)),
        *(LayerCase(anchors=n) for n in (20, 30, 40, 50, 60, 70)),
    ),
}
FEW_ANCHORS, MOST_HEADS, NARROW = LayerCase(), LayerCase(heads=16), LayerCase(span=10.0)
MANY_ANCHORS = {True: LayerCase(anchors=40), False: LayerCase(anchors=70)}
VALIDATION = "the code's validation of Theorems 3.1 and 3.2"

LAYER_CLAIMS = (
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

    def __init__(self, seeds: int, places: int, case: LayerCase) -> None:
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

    def _map_tokens(self, z: Tensor, weight: Tensor, bias: Tensor) -> Float[Tensor, "B n h p size"]:
        B, n, p = z.shape[:3]
        return (z.flatten(1, 2) @ weight + bias).reshape(B, n, p, self.heads, -1).transpose(2, 3)

    def logits(self, z: Tensor) -> Float[Tensor, "B n h s p"]:
        q = self._map_tokens(z[:, :, : self.places], self.query, self.query_bias)
        return q @ self._map_tokens(z, self.key, self.key_bias).mT / math.sqrt(q.shape[-1])

    def forward(self, x: Float[Tensor, "B n s d"]) -> Float[Tensor, "B n s hidden"]:
        z = self.tokens(x)
        mixed = self.logits(z).softmax(-1) @ self._map_tokens(z, self.value, self.value_bias)
        B, n = x.shape[:2]
        flat = mixed.transpose(2, 3).reshape(B, n * self.places, HIDDEN)
        return (flat @ self.out + self.out_bias).reshape(B, n, self.places, HIDDEN)

    def anchor_values(self) -> Float[Tensor, "B anchors"]:
        """What every anchor would write into channel 0 if all attention were on it; one head."""
        values = self.anchors[:, 0] @ self.value + self.value_bias
        return (values @ self.out + self.out_bias)[..., 0]


def linear_forms(size: ExperimentSize) -> tuple[Tensor, Tensor]:
    """Tokens (B, samples, s, d) and their linear forms."""
    g = torch.Generator().manual_seed(0)
    x = LAYER_REACH * (2 * torch.rand(size.seeds, size.samples, size.places, WIDTH, generator=g) - 1)
    w = torch.randn(size.seeds, 1, size.places, WIDTH, generator=g)
    return x, (w * x).sum(-1) + torch.randn(size.seeds, 1, size.places, generator=g)


def train_layers(case: LayerCase, size: ExperimentSize, where: str) -> tuple[Layers, Tensor, Tensor]:
    """Layers after training on four fifths of the samples; the rest, to be judged by."""
    x, s = (part.to(where) for part in linear_forms(size))
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


def constructed_errors(s: Tensor, case: LayerCase) -> Float[Tensor, " B"]:
    """Mean square errors of the head with as many anchors, at the temperature that is best for them."""
    low, high = -case.span / 2, case.span / 2
    s = s.double().flatten(1)
    errors = [
        interpolate(s, Anchors.sharp(low, high, case.anchors, x)) - s.clamp(low, high) for x in LISTED_SHARPNESSES
    ]
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


def describe_layers(model: Layers, x: Tensor, s: Tensor, case: LayerCase) -> dict[str, Any]:
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
        "constructed": constructed_errors(s.cpu(), case),
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


def measure_case(setting: Setting, case: LayerCase) -> dict[str, Any]:
    return describe_layers(*train_layers(case, SIZES[setting.quick], device_of_study(setting)), case)


def _case_row(case: LayerCase, values: dict[str, Any], places: int) -> dict[str, Any]:
    middle = {k: None if v is None else float(torch.tensor(v).median()) for k, v in values.items()}
    return {"heads": case.heads, "span": case.span, "p": case.anchors + places, "anchors": case.anchors,
            **middle}  # fmt: skip


def measure_layer(setting: Setting) -> Results:
    cases = list(CASES[setting.quick])
    results = dict(zip(cases, map_parts(measure_case, cases, setting), strict=True))
    one, size = results[FEW_ANCHORS], SIZES[setting.quick]

    def ratio(top: list[float], bottom: list[float]) -> list[float]:
        return [math.log10(a / b) for a, b in zip(top, bottom, strict=True)]

    measured = {
        "d1": by_seed(ratio(results[MOST_HEADS]["error"], one["error"])),
        "d2": by_seed(ratio(one["error"], results[NARROW]["error"])),
        "d3": by_seed(ratio(results[MANY_ANCHORS[setting.quick]]["error"], one["error"])),
        "d4": by_seed(ratio(one["error"], one["constructed"])),
        "d5": by_seed(one["stable_rank"]),
        "d6": by_seed([x - FEW_ANCHORS.anchors / (FEW_ANCHORS.anchors + size.places) for x in one["on_anchors"]]),
        "d7": by_seed(one["parabola"]),
    }
    none = describe_layers(*train_layers(FEW_ANCHORS, replace(size, epochs=0), "cpu"), FEW_ANCHORS)
    rows = [{"which": "untrained", **_case_row(FEW_ANCHORS, none, size.places)}]
    rows += [{"which": "trained", **_case_row(case, values, size.places)} for case, values in results.items()]
    sizes = {
        "places": size.places,
        "samples": size.samples,
        "epochs": size.epochs,
        "seeds": size.seeds,
        "rate": size.rate,
    }
    return Results(measured, {"trained_layers": {"rows": rows, **sizes}})


LAYER_STUDY = Study("a layer that is trained", LAYER_CLAIMS, measure_layer)
