"""Gated attention as a mixture of experts: the mixture written out (study a), and what a gate changes by the place it
is put (study b).

**The mixture (study a).** An entry of an attention layer in three levels: heads, tokens, channels.

    plain:   out_ic = sum_h sum_j A^h_ij E^h_jc,  E^h_jc = sum_m (x_j W_V^h)_m (W_O^h)_mc          linear experts
    gated:   out_ic = sum_h sum_m g^h_im [sum_j A^h_ij (x_j W_V^h)_m] (W_O^h)_mc                   a weight on each expert, made of x_i
    values:  out_ic = sum_h sum_j A^h_ij sum_m g^h_jm (x_j W_V^h)_m (W_O^h)_mc                     experts made of x_j, not linear
Sums are loops over numbers, maps are exponentials one by one; the package's modules are on the other side.

**Places (study b).** Linear experts, W_V and W_O as one matrix, and the rank of a head's output, by place. Places as in
Qiu et al. (2025): 1 after attention, 2 on values, 3 on keys, 4 on queries, 5 after W_O. The abstract of Nguyen et al.
says that their theory explains why places 1 and 2 help and the others do not; public summaries give experts that are
not linear as the reason. Maps are fixed as they are at one input, since the claims are about experts; x then varies,
and gates with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import torch
from jaxtyping import Float
from torch import Tensor

from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms import mechanism
from locater_lab.mechanisms.gated import GateModule
from locater_lab.mechanisms.modules import attention_module

# ---- a: attention as a mixture of experts ----


MIXTURE_TOKENS, MIXTURE_WIDTH, HEADS, MIXTURE_SIZE = 5, 6, 4, 3
EXACT = "none: exact"
CASES = tuple((causal, few) for causal in (False, True) for few in (HEADS, 2))  # causal, key heads

MIXTURE_CLAIMS = (
    Claim("a1", "An entry of multi-head attention is a hierarchical mixture of experts",
          "largest difference of the triple sum from the layer, causal and not, all heads and grouped", "at most", 1e-12, where="abstract"),
    Claim("a2", "So is an entry of gated attention (written here with a weight made of the query's token on every expert)",
          "largest difference of the triple sum from the layer, gates per element and per head after attention", "at most", 1e-12,
          where="abstract"),
    Claim("a3", "With gates on the values the experts are gated themselves", "largest difference of the triple sum from the layer, "
          "gates per element and per head on the values", "at most", 1e-12, by="ours"),
    Claim("a4", "Weights over tokens are those of a mixture: they sum to 1 in every head, gate or no gate on the keys and queries",
          "largest difference of a sum over tokens from 1", "at most", 1e-12, by="ours"),
    Claim("a5", "Behind a gate they are not: over tokens they sum to the gate",
          "largest difference of a sum over tokens from 1, gate per head",
          "at least", 0.1, by="ours"),
)  # fmt: skip


@dataclass(frozen=True)
class ProjectionWeights:
    """Projections of a layer, drawn; key heads may be fewer than query heads."""

    query: Float[Tensor, "D H d"]
    key: Float[Tensor, "D K d"]
    value: Float[Tensor, "D K d"]
    out: Float[Tensor, "H d D"]

    @classmethod
    def draw(
        cls, seed: int, few: int = HEADS, width: int = MIXTURE_WIDTH, heads: int = HEADS, size: int = MIXTURE_SIZE
    ) -> ProjectionWeights:
        g = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64) / math.sqrt(width)

        return cls(draw(width, heads, size), draw(width, few, size), draw(width, few, size), draw(heads, size, width))

    def operands(self, x: Float[Tensor, "N D"]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v (1, heads, N, d) as mechanisms take them."""
        return tuple(torch.einsum("nd,dhm->hnm", x, w)[None] for w in (self.query, self.key, self.value))  # type: ignore[return-value]

    def project_output(self, heads: Float[Tensor, "1 H N d"]) -> Float[Tensor, "N D"]:
        return torch.einsum("hnm,hmc->nc", heads[0], self.out)


def softmax_row(scores: list[float]) -> list[float]:
    """Softmax, number by number.

    >>> softmax_row([0.0, math.log(3.0)])
    [0.25, 0.75]
    """
    top = max(scores)
    parts = [math.exp(s - top) for s in scores]
    return [p / sum(parts) for p in parts]


def triple_sum(
    x: Float[Tensor, "N D"],
    w: ProjectionWeights,
    causal: bool,
    gate: Float[Tensor, "H N d"] | None = None,
    value_gate: Tensor | None = None,
) -> Float[Tensor, "N D"]:
    """The mixture, entry by entry; gates (heads, tokens, channels), those of values by key head."""
    tokens, heads, group = len(x), w.query.shape[1], w.query.shape[1] // w.key.shape[1]
    q, k, v = (y[0].tolist() for y in w.operands(x))
    out = torch.zeros_like(x)
    for i in range(tokens):
        seen = i + 1 if causal else tokens
        for h in range(heads):
            few = h // group
            size = len(q[h][i])
            weights = softmax_row(
                [sum(q[h][i][m] * k[few][j][m] for m in range(size)) / math.sqrt(size) for j in range(seen)]
            )
            for j, weight in enumerate(weights):
                for m in range(size):
                    after = 1.0 if gate is None else float(gate[h, i, m])
                    before = 1.0 if value_gate is None else float(value_gate[few, j, m])
                    out[i] += after * weight * before * v[few][j][m] * w.out[h, m]
    return out


def module_output(
    x: Tensor, w: ProjectionWeights, causal: bool, position: str | None = None, per: str = "element"
) -> tuple[Tensor, Tensor | None]:
    """The package's layer, and the gates that it made (heads, tokens, channels)."""
    q, k, v = w.operands(x)
    sizes = dict(width=x.shape[1], heads=w.query.shape[1], kv_heads=w.key.shape[1], size=q.shape[3])
    if position is None:
        return w.project_output(attention_module("softmax", **sizes)(q, k, v, causal=causal)), None
    layer = attention_module("gated", **sizes, position=position, per=per).double()
    gate = layer.gate
    assert isinstance(gate, GateModule)
    with torch.no_grad():
        gate.weight.normal_(generator=torch.Generator().manual_seed(7))
        out = layer(q, k, v, x[None], causal=causal)
        return w.project_output(out), gate(x[None])[0].expand(-1, -1, q.shape[3])


def measure_mixture(setting: Setting) -> Results:
    off = {"a1": 0.0, "a2": 0.0, "a3": 0.0}
    for number, (causal, few) in enumerate(CASES):
        w = ProjectionWeights.draw(number, few)
        x = torch.randn(
            MIXTURE_TOKENS, MIXTURE_WIDTH, generator=torch.Generator().manual_seed(100 + number), dtype=torch.float64
        )
        off["a1"] = max(off["a1"], float((triple_sum(x, w, causal) - module_output(x, w, causal)[0]).abs().max()))
        for per in ("element", "head"):
            out, gate = module_output(x, w, causal, "output", per)
            off["a2"] = max(off["a2"], float((triple_sum(x, w, causal, gate=gate) - out).abs().max()))
            out, gate = module_output(x, w, causal, "value", per)
            off["a3"] = max(off["a3"], float((triple_sum(x, w, causal, value_gate=gate) - out).abs().max()))
    within, after = row_sum_errors()
    distances = {**off, "a4": within, "a5": after}
    return Results({key: Measurement(value, 0.0, EXACT) for key, value in distances.items()})


def row_sum_errors() -> tuple[float, float]:
    """How far the weights of a row are from summing to 1: with gates on keys or queries, and with one after
    attention.
    """
    w = ProjectionWeights.draw(0)
    x = torch.randn(1, MIXTURE_TOKENS, MIXTURE_WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    q, k, _ = w.operands(x[0])
    far = {}
    for position in ("key", "query", "output"):
        layer = attention_module(
            "gated", width=MIXTURE_WIDTH, heads=HEADS, size=MIXTURE_SIZE, position=position
        ).double()
        with torch.no_grad():
            layer.gate.weight.normal_(generator=torch.Generator().manual_seed(7))  # type: ignore[operator, union-attr]
            far[position] = float((layer.map(q, k, x).sum(-1) - 1).abs().max())
    return max(far["key"], far["query"]), far["output"]


MIXTURE_STUDY = Study("attention as a mixture of experts", MIXTURE_CLAIMS, measure_mixture)


# ---- b: the place of a gate ----


TOKENS, WIDTH, SIZE = 6, 8, 3
PLACES = (
    "none",
    "1 after attention",
    "1, one per head",
    "2 values",
    "2, one per head",
    "3 keys",
    "4 queries",
    "5 after W_O",
)
GATE_SPREAD = 1.0  # standard deviation of a gate's logits
SPREADS = (0.1, 0.32, 1.0, 2.0, 4.0)  # 0.32 is this package's first weights at a width of 256
DRAWS, SEEDS = {True: 2000, False: 8000}, {True: 8, False: 20}
AT_FIXED_MAP = "the map fixed"

PLACES_CLAIMS = (
    Claim("b1", "Without a gate a head's output is linear in its tokens", f"share of variance that a linear fit leaves, {AT_FIXED_MAP}",
          "at most", 1e-9, by="summary"),
    Claim("b2", "A gate after attention, or on the values, makes the experts non-linear",
          "share of variance that a linear fit leaves, the least of places 1 and 2, per element and per head, gate logits of deviation 1, "
          f"{AT_FIXED_MAP}", "at least", 0.05, by="summary", bound="ours"),
    Claim("b3", "Gates on keys and queries do not: they act through the map alone",
          f"share of variance that a linear fit leaves, the larger of places 3 and 4, {AT_FIXED_MAP}", "at most", 1e-9, by="ours"),
    Claim("b4", "Nor does a gate after W_O, so that linear experts tell the places that help from those that do not",
          f"share of variance that a linear fit leaves, place 5, {AT_FIXED_MAP}", "at most", 1e-9, by="ours"),
    Claim("b5", "Gates begin nearly linear: the first weights of a gate, 0.02 at a width of 256",
          "share of variance that a linear fit leaves, place 1, gate logits of standard deviation 0.32", "at most", 0.01, by="ours"),
    Claim("b6", "A gate between W_V and W_O keeps them from being one matrix",
          "relative change of the output when W_V, W_O become W_V R, R^T W_O, R a rotation; the lesser of places "
          "1 and 2, per element", "at least", 0.1, by="ours"),
    Claim("b7", "So does a gate of one number per head", "the same, the lesser of places 1 and 2, one number per head", "at least", 0.1,
          by="ours"),
    Claim("b8", "Gates elsewhere leave them one matrix", "the same, the largest of no gate and places 3, 4, 5", "at most", 1e-12,
          by="ours"),
    Claim("b9", "A gate does not raise the rank of what a head adds: at most the size of the head",
          "largest rank less the size of the head, places 1 to 4", "at most", 0.0, by="ours"),
    Claim("b10", "Not after W_O either", "largest rank less the size of the head, place 5", "at most", 0.0, by="ours"),
)  # fmt: skip

Head = Callable[[Tensor], Tensor]  # (batch, N, D) to (batch, N, D)


def gated_head(
    place: str,
    seed: int,
    spread: float = GATE_SPREAD,
    tokens: int = TOKENS,
    width: int = WIDTH,
    size: int = SIZE,
    turn: bool = False,
) -> Head:
    """What one head adds to tokens, its map fixed as it is at one input; `turn` replaces W_V, W_O by W_V R, R^T W_O."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    query, key, value = (draw(width, size) / math.sqrt(width) for _ in range(3))
    out, at, mixed = draw(size, width) / math.sqrt(size), draw(tokens, width), draw(size, size)
    gate = spread * draw(width, width) / math.sqrt(width)
    if turn:
        rotation = torch.linalg.qr(mixed).Q
        value, out = value @ rotation, rotation.mT @ out
    q, k = at @ query, at @ key
    q = q * (at @ gate[:, :size]).sigmoid() if place.startswith("4") else q
    k = k * (at @ gate[:, :size]).sigmoid() if place.startswith("3") else k
    weights = mechanism("softmax").map(q[None, None], k[None, None])[0, 0]  # (N, N)
    columns = slice(0, 1) if "per head" in place else slice(0, size)

    def run(x: Tensor) -> Tensor:
        v = x @ value
        if place.startswith("2"):
            v = v * (x @ gate[:, columns]).sigmoid()
        y = weights @ v
        if place.startswith("1"):
            y = y * (x @ gate[:, columns]).sigmoid()
        y = y @ out
        return y * (x @ gate).sigmoid() if place.startswith("5") else y

    return run


def explained_variance(x: Float[Tensor, "n N D"], y: Float[Tensor, "n N D"]) -> float:
    """R^2 of the best affine map from all entries of x to all of y, on the second half of the samples; fitted on the
    first.
    """
    flat = torch.cat([x.flatten(1), torch.ones(len(x), 1, dtype=x.dtype)], 1)
    half = len(x) // 2
    fit = torch.linalg.lstsq(flat[:half], y.flatten(1)[:half]).solution
    rest = y.flatten(1)[half:]
    left = rest - flat[half:] @ fit
    return 1 - float(left.square().sum() / (rest - rest.mean(0)).square().sum())


def linear_share(place: str, seed: int, draws: int, spread: float = GATE_SPREAD) -> float:
    x = torch.randn(draws, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1000 + seed), dtype=torch.float64)
    return explained_variance(x, gated_head(place, seed, spread)(x))


def rotation_change(place: str, seed: int) -> float:
    """Relative change of the output when W_V and W_O are turned against each other: 0 where only their product
    counts.
    """
    x = torch.randn(8, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2000 + seed), dtype=torch.float64)
    a, b = (gated_head(place, seed, turn=turn)(x) for turn in (False, True))
    return float((a - b).norm() / a.norm())


def head_rank(place: str, seed: int) -> int:
    """Of what a head of size 3 adds to 24 tokens of width 16."""
    x = torch.randn(24, 16, generator=torch.Generator().manual_seed(3000 + seed), dtype=torch.float64)
    return int(torch.linalg.matrix_rank(gated_head(place, seed, tokens=24, width=16)(x)))


def measure_places(setting: Setting) -> Results:
    seeds, draws = range(SEEDS[setting.quick]), DRAWS[setting.quick]
    linear = {place: [linear_share(place, seed, draws) for seed in seeds] for place in PLACES}
    turned = {place: [rotation_change(place, seed) for seed in seeds] for place in PLACES}
    ranks = {place: max(head_rank(place, seed) for seed in seeds) for place in PLACES}
    gates, per_head = ("1 after attention", "2 values"), ("1, one per head", "2, one per head")
    first = [linear_share("1 after attention", seed, draws, 0.32) for seed in seeds]
    measured = {
        "b1": Measurement(1 - min(linear["none"]), 0.0, EXACT),
        "b2": by_seed([1 - max(linear[p][s] for p in (*gates, *per_head)) for s in seeds]),
        "b3": Measurement(1 - min(x for p in ("3 keys", "4 queries") for x in linear[p]), 0.0, EXACT),
        "b4": by_seed([1 - x for x in linear["5 after W_O"]]),
        "b5": by_seed([1 - x for x in first]),
        "b6": by_seed([min(turned[p][s] for p in gates) for s in seeds]),
        "b7": by_seed([min(turned[p][s] for p in per_head) for s in seeds]),
        "b8": Measurement(
            max(x for p in ("none", "3 keys", "4 queries", "5 after W_O") for x in turned[p]), 0.0, EXACT
        ),
        "b9": Measurement(float(max(ranks[p] for p in PLACES[:-1]) - SIZE), 0.0, EXACT),
        "b10": Measurement(float(ranks["5 after W_O"] - SIZE), 0.0, EXACT),
    }
    rows = [{"place": p, "linear": fmean(linear[p]), "merged": fmean(turned[p]), "rank": ranks[p]} for p in PLACES]
    return Results(measured, {"gate_places": {"size": SIZE, "rows": rows, "curves": _linearity_curves(draws)}})


def _linearity_curves(draws: int) -> dict[str, list[list[float]]]:
    """How linear a head is against the deviation of its gate's logits, means of three heads."""
    return {
        place: [[s, fmean(linear_share(place, seed, draws, s) for seed in range(3))] for s in SPREADS]
        for place in ("1 after attention", "2 values", "5 after W_O")
    }


PLACES_STUDY = Study("what a gate changes, by its place", PLACES_CLAIMS, measure_places)
