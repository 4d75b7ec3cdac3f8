"""What the gate undoes: heads as linear maps of their tokens, ranks, and whether W_V and W_O still merge (study b), and
how far the paper's own table orders it (study c).

With the map A fixed, a head without a gate is linear in X. For tokens whose law is symmetric about zero and a gate g =
sigmoid(x W_g) without a bias, g - 1/2 is odd in x and the head o before its gate is odd too, so that g o = o / 2 + (g -
1/2) o falls into an odd and an even part. The best linear fit has all of the first and nothing but the mean of the
second:

    R^2 = 1 / (1 + 4 var((g - 1/2) o) / var o),    var the sum over channels

As |g - 1/2| < 1/2, R^2 is above 1/2 however sharp the gate. A gate that is mostly closed goes further: with a gate that
is open with probability p, independent of o, R^2 = p.

**The table (study c).** How far the mean gate orders sink and largest activation over the paper's variants, and what a
gate per head costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.measures import ranks
from locater.numerics import spearman
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.devices_and_processes import relative_difference
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms import mechanism
from locater_lab.papers.qiu2025.gate_forms import EXACT, DrawnLayer, gated_module

# ---- c: the paper's own table ----


@dataclass(frozen=True)
class GateVariant:
    """A row of Tables 1 and 4: a mixture-of-experts model of 15 billion parameters, 400 billion tokens."""

    name: str
    added: float | None  # million parameters, where the table has them
    perplexity: float
    gate: float  # mean
    largest: float  # activation
    sink: float  # attention on the first token


BASELINE = GateVariant("no gate", 0.0, 6.026, 1.0, 1053.0, 0.467)
VARIANTS = (
    GateVariant("after attention, per element", 201.0, 5.761, 0.116, 94.0, 0.048),
    GateVariant("after attention, per head", 1.6, 5.792, 0.172, 98.0, 0.073),
    GateVariant("on values, per element", 25.0, 5.820, 0.221, 125.0, 0.297),
    GateVariant("after attention, shared by heads", 201.0, 5.801, 0.271, 286.0, 0.301),
    GateVariant("without input", None, 5.917, 0.335, 471.0, 0.364),
    GateVariant("NS-sigmoid", None, 5.900, 0.653, 892.0, 0.451),
)

TABLE_CLAIMS = (
    Claim("c1", "In the paper's own table, the more the gates close, the smaller the sink", "rank correlation of mean gate with first-token attention, six variants",
          "at least", 1.0, by="ours"),
    Claim("c2", "And the smaller the largest activation", "rank correlation of mean gate with largest activation, six variants",
          "at least", 1.0, by="ours"),
    Claim("c3", "Such an order is no accident of six rows", "share of all orders of six rows that have a correlation as high as c1",
          "at most", 0.01, by="ours"),
    Claim("c4", "Perplexity follows the mean gate too", "rank correlation of mean gate with perplexity, six variants",
          "at least", 1.0, by="ours"),
    Claim("c5", "In the paper's own table, one gate per head buys most of what one per element does, with a hundredth of the parameters",
          "gain in perplexity per head over that per element", "at least", 0.8, by="ours"),
    Claim("c6", "Most of the gain takes a gate that adds a function: one that ignores the input has less than half",
          "gain in perplexity of the gate without input over that per element", "at most", 0.5, by="ours"),
)  # fmt: skip


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; 0 where one side is constant."""
    return spearman(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)) or 0.0


def share_of_orders(a: Sequence[float], b: Sequence[float]) -> float:
    """Share of the orders of b with at least the correlation that it has.

    >>> share_of_orders([1.0, 2.0, 3.0], [5.0, 6.0, 7.0])                           # one of six
    0.16666666666666666
    """
    seen = rank_correlation(a, b)
    orders = list(permutations(b))
    return sum(rank_correlation(a, order) >= seen - 1e-12 for order in orders) / len(orders)


def perplexity_gain(name: str) -> float:
    """What a variant takes off the baseline's perplexity."""
    return BASELINE.perplexity - next(v.perplexity for v in VARIANTS if v.name == name)


def measure_table(setting: Setting) -> Results:
    """From the table's own numbers."""
    gates, sinks = [v.gate for v in VARIANTS], [v.sink for v in VARIANTS]
    exact = "none: the table's own numbers"
    element = perplexity_gain("after attention, per element")
    measured = {
        "c1": Measurement(rank_correlation(gates, sinks), 0.0, exact),
        "c2": Measurement(rank_correlation(gates, [v.largest for v in VARIANTS]), 0.0, exact),
        "c3": Measurement(share_of_orders(gates, sinks), 0.0, "none: all 720 orders"),
        "c4": Measurement(rank_correlation(gates, [v.perplexity for v in VARIANTS]), 0.0, exact),
        "c5": Measurement(perplexity_gain("after attention, per head") / element, 0.0, exact),
        "c6": Measurement(perplexity_gain("without input") / element, 0.0, exact),
    }
    return Results(measured, {"variants": [_variant_row(v) for v in (BASELINE, *VARIANTS)]})


def _variant_row(variant: GateVariant) -> dict[str, Any]:
    """As the page shows it, with the attention on the first token that is left behind the gate."""
    gate = None if variant is BASELINE else variant.gate
    return {**asdict(variant), "gate": gate, "acting": round(variant.gate * variant.sink, 3)}


TABLE_STUDY = Study("the table's own order", TABLE_CLAIMS, measure_table)


# ---- b: heads as linear maps of their tokens ----


TOKENS, WIDTH, SIZE = 4, 6, 3
DRAWS = {True: 4_000, False: 40_000}  # sets of tokens for a linear fit
SEEDS = {True: 8, False: 12}
SHARPNESS = (0.0, 0.5, 1.0, 2.0, 4.0, 16.0)  # standard deviation of the gate's logits
GATE_BIASES = (0.0, -1.0, -2.0, -3.0, -4.0)  # their mean, where the deviation is 2
RANK_DRAWS = {True: 12, False: 100}
BEST_GATE = min(variant.gate for variant in VARIANTS)  # mean gate of the variant whose gates close most

LINEARITY_CLAIMS = (
    Claim(
        "b1", "Without a gate a head is linear in its tokens, the map fixed", "largest 1 - R^2 of a linear fit, draws of weights",
        "at most", 1e-12, by="ours",
    ),
    Claim(
        "b2", "A gate after attention makes it nonlinear", "R^2 of a linear fit, gate per element, logits of deviation 2", "at most", 0.8,
        where="title", bound="ours",
    ),
    Claim(
        "b3", "A gate without bias leaves more than half of it linear, however sharp (tokens symmetric about 0)",
        "least R^2 over sharpness and draws of weights", "at least", 0.5, by="ours",
    ),
    Claim(
        "b4", "R^2 = 1 / (1 + 4 var((g - 1/2) o) / var o)",
        "largest distance of the fitted R^2 from this, over sharpness and draws of weights", "at most", 0.02, by="ours",
    ),
    Claim(
        "b5", "What takes a head far from linear is a gate that is mostly closed",
        f"R^2 at the mean gate of the paper's best variant, {BEST_GATE:g}, interpolated over gates of growing bias", "at most", 0.5, by="ours",
    ),
    Claim(
        "b6", "The gate does not raise the rank of a head's output: it stays at the head's size",
        "largest rank of a head's output over the head's size, gates after attention or on values, per head or element", "at most", 1.0,
        by="ours",
    ),
    Claim(
        "b7", "Per element, W_V and W_O no longer merge: tokens see as many maps as the head has channels",
        "least dimension of the span of tokens' value-output maps over the head's size, by autograd", "at least", 1.0, bound="ours",
    ),
    Claim(
        "b8", "Per head they still merge: all tokens see one map, and the gate scales it",
        "largest relative error of gate x (A X) (W_V W_O), the two merged beforehand", "at most", 1e-12, by="ours",
    ),
)  # fmt: skip


def draw_tokens(seed: int, draws: int) -> Float[Tensor, "draws T width"]:
    return torch.randn(draws, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def head_and_gate(
    seed: int, x: Float[Tensor, "draws T width"]
) -> tuple[Float[Tensor, "draws size"], Float[Tensor, "size width"]]:
    """Output of the last token before its gate, the map fixed at one draw's; and W_g with logits of deviation 1."""
    generator = torch.Generator().manual_seed(seed + 1000)
    W_V, W_g = (torch.randn(SIZE, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5 for _ in range(2))
    weights = torch.randn(TOKENS, generator=generator, dtype=torch.float64).softmax(0)
    return torch.einsum("t,btd,ed->be", weights, x, W_V), W_g / W_g.norm(dim=1, keepdim=True)


def linear_fit(x: Float[Tensor, "draws regressors"], y: Float[Tensor, "draws size"]) -> float:
    """R^2 of the least-squares fit of y on x and a constant, all columns together.

    >>> x = torch.linspace(-1, 1, 9, dtype=torch.float64)[:, None]
    >>> round(linear_fit(x, 3 * x + 1), 6), round(linear_fit(x, x.square()), 6)
    (1.0, 0.0)
    """
    X = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    rest = y - X @ torch.linalg.lstsq(X, y).solution
    return 1 - float(rest.square().sum() / (y - y.mean(0)).square().sum())


def linear_fits(seed: int, draws: int) -> dict[str, list[float]]:
    """R^2 by sharpness, what the formula says, and R^2 and mean gate by bias."""
    x = draw_tokens(seed, draws)
    flat = x.flatten(1)
    o, W_g = head_and_gate(seed, x)
    z = x[:, -1] @ W_g.mT
    curves: dict[str, list[float]] = {
        "fitted": [],
        "formula": [],
        "gate": [],
        "closed": [],
        "plain": [linear_fit(flat, o)],
    }
    for sharp in SHARPNESS:
        gate = (sharp * z).sigmoid()
        curves["fitted"].append(linear_fit(flat, gate * o))
        curves["formula"].append(1 / (1 + 4 * float(((gate - 0.5) * o).var(0).sum() / o.var(0).sum())))
    for bias in GATE_BIASES:
        gate = (2 * z + bias).sigmoid()
        curves["gate"].append(float(gate.mean()))
        curves["closed"].append(linear_fit(flat, gate * o))
    return curves


def value_at_gate(gates: list[float], values: list[float], at: float) -> float:
    """Linear interpolation over falling gates.

    >>> value_at_gate([0.5, 0.3, 0.1], [0.8, 0.6, 0.2], 0.2)
    0.4
    """
    for a, b, u, v in zip(gates, gates[1:], values, values[1:], strict=False):
        if b <= at <= a:
            return u + (v - u) * (a - at) / (a - b)
    return values[-1]


# --- ranks ---


def head_rank(seed: int, position: str, per: str) -> float:
    """Largest numerical rank of a head's share of the output (T, width), more tokens and channels than the head's
    size.
    """
    layer = DrawnLayer.draw(seed, tokens=12)
    q, k, v = layer.projections
    mixed = gated_module(layer, seed, position=position, per=per)(q, k, v, layer.x, causal=True)
    shares = torch.einsum("bhte,hed->bhtd", mixed, layer.W_O).flatten(0, 1)
    return float(ranks(shares).numerical.max()) / layer.W_O.shape[1]


def map_dimensions(seed: int, per: str, position: str = "output") -> float:
    """Dimension of the span of the maps from what a head mixes to what it writes, one per token (of keys for "value"),
    over its size.

    By autograd through the mechanism with map and gates fixed: the Jacobian of the output of query i with respect to
    token j is A_ij times the map of the token whose gate acts.
    """
    layer = DrawnLayer.draw(seed, tokens=10, key_heads=4)
    q, k, _ = layer.projections
    gated = gated_module(layer, seed, position=position, per=per)
    options = gated.options(q, k, layer.x)
    last = q.shape[2] - 1

    def written(x: Tensor) -> Tensor:
        v = torch.einsum("td,de->te", x, layer.W_V[0])[None, None]
        heads = mechanism("gated")(q[:1, :1], k[:1, :1], v, **{name: gate[:1, :1] for name, gate in options.items()})
        return heads[0, 0] @ layer.W_O[0]

    J = torch.autograd.functional.jacobian(written, layer.x[0])  # (query, out, key, in)
    maps = J[:, :, last, :] if position == "output" else J[last].movedim(1, 0)
    flat = maps.flatten(1)
    unit = flat / flat.norm(dim=1, keepdim=True)
    return float(ranks(unit[None]).numerical) / layer.W_O.shape[1]


def merged_difference(seed: int) -> float:
    """A gate per head beside gate x (A X) M with M = W_V W_O made beforehand."""
    layer = DrawnLayer.draw(seed, key_heads=4)
    q, k, v = layer.projections
    gated = gated_module(layer, seed)
    reference = layer.out(gated(q, k, v, layer.x, causal=True))
    A = mechanism("softmax").map(q, k, causal=True)
    gates = gated.options(q, k, layer.x)["gate"]
    M = layer.W_V @ layer.W_O  # (H, width, width)
    heads = torch.stack([gates[:, h] * (A[:, h] @ layer.x @ M[h]) for h in range(len(M))])
    return relative_difference(heads.sum(0), reference)


def ranks_and_spans(many: int) -> tuple[dict[str, float], dict[str, float]]:
    """Of every kind of gate: the largest rank of a head's output and the least span of its maps, over its size."""
    kinds = [(position, per) for position in ("output", "value") for per in ("head", "element")]
    largest = {f"{place}, per {per}": max(head_rank(s, place, per) for s in range(many)) for place, per in kinds}
    least = {
        f"{place}, per {per}": min(map_dimensions(s, per, place) for s in range(min(many, 20))) for place, per in kinds
    }
    return largest, least


def measure_linearity(setting: Setting) -> Results:
    """Fits over draws of tokens, ranks over draws of weights."""
    seeds, draws, many = SEEDS[setting.quick], DRAWS[setting.quick], RANK_DRAWS[setting.quick]
    curves = [linear_fits(seed, draws) for seed in setting.each(list(range(seeds)))]
    off = [abs(a - b) for c in curves for a, b in zip(c["fitted"], c["formula"], strict=True)]
    at = SHARPNESS.index(2.0)
    by_kind, spans = ranks_and_spans(many)
    measured = {
        "b1": Measurement(max(1 - c["plain"][0] for c in curves), 0.0, EXACT),
        "b2": by_seed([c["fitted"][at] for c in curves], of="draws of weights"),
        "b3": Measurement(min(min(c["fitted"]) for c in curves), 0.0, "none: the least of all"),
        "b4": Measurement(max(off), 0.0, "none: the largest of all"),
        "b5": by_seed([value_at_gate(c["gate"], c["closed"], BEST_GATE) for c in curves], of="draws of weights"),
        "b6": Measurement(max(by_kind.values()), 0.0, EXACT),
        "b7": Measurement(min(span for kind, span in spans.items() if "element" in kind), 0.0, EXACT),
        "b8": Measurement(max(merged_difference(s) for s in range(many)), 0.0, EXACT),
    }
    return Results(measured, {"linear_fits": _mean_curves(curves, draws), "head_ranks": by_kind, "map_spans": spans})


def _mean_curves(curves: list[dict[str, list[float]]], draws: int) -> Mapping[str, object]:
    means = {name: [fmean(c[name][i] for c in curves) for i in range(len(curves[0][name]))] for name in curves[0]}
    return {"sharpness": list(SHARPNESS), "bias": list(GATE_BIASES), **means, "draws": draws, "best": BEST_GATE}


LINEARITY_STUDY = Study("what the gate undoes", LINEARITY_CLAIMS, measure_linearity)
