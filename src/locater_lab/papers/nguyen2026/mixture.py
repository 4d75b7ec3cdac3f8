"""An entry of an attention layer as a mixture of experts in three levels, written out: heads, tokens, channels. Study
a.

    plain:   out_ic = sum_h sum_j A^h_ij E^h_jc,  E^h_jc = sum_m (x_j W_V^h)_m (W_O^h)_mc          linear experts
    gated:   out_ic = sum_h sum_m g^h_im [sum_j A^h_ij (x_j W_V^h)_m] (W_O^h)_mc                   a weight on each expert, made of x_i
    values:  out_ic = sum_h sum_j A^h_ij sum_m g^h_jm (x_j W_V^h)_m (W_O^h)_mc                     experts made of x_j, not linear
Sums are loops over numbers, maps are exponentials one by one; the package's modules are on the other side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms.gated import Gate
from locater_lab.mechanisms.modules import attention_module

TOKENS, WIDTH, HEADS, SIZE = 5, 6, 4, 3
EXACT = "none: exact"
CASES = tuple((causal, few) for causal in (False, True) for few in (HEADS, 2))  # causal, key heads

CLAIMS = (
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
class Weights:
    """Projections of a layer, drawn; key heads may be fewer than query heads."""

    query: Float[Tensor, "D H d"]
    key: Float[Tensor, "D K d"]
    value: Float[Tensor, "D K d"]
    out: Float[Tensor, "H d D"]

    @classmethod
    def drawn(cls, seed: int, few: int = HEADS, width: int = WIDTH, heads: int = HEADS, size: int = SIZE) -> Weights:
        g = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64) / math.sqrt(width)

        return cls(draw(width, heads, size), draw(width, few, size), draw(width, few, size), draw(heads, size, width))

    def operands(self, x: Float[Tensor, "N D"]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v (1, heads, N, d) as mechanisms take them."""
        return tuple(torch.einsum("nd,dhm->hnm", x, w)[None] for w in (self.query, self.key, self.value))  # type: ignore[return-value]

    def projected(self, heads: Float[Tensor, "1 H N d"]) -> Float[Tensor, "N D"]:
        return torch.einsum("hnm,hmc->nc", heads[0], self.out)


def row(scores: list[float]) -> list[float]:
    """Softmax, number by number.

    >>> row([0.0, math.log(3.0)])
    [0.25, 0.75]
    """
    top = max(scores)
    parts = [math.exp(s - top) for s in scores]
    return [p / sum(parts) for p in parts]


def triple_sum(
    x: Float[Tensor, "N D"],
    w: Weights,
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
            weights = row([sum(q[h][i][m] * k[few][j][m] for m in range(size)) / math.sqrt(size) for j in range(seen)])
            for j, weight in enumerate(weights):
                for m in range(size):
                    after = 1.0 if gate is None else float(gate[h, i, m])
                    before = 1.0 if value_gate is None else float(value_gate[few, j, m])
                    out[i] += after * weight * before * v[few][j][m] * w.out[h, m]
    return out


def of_module(
    x: Tensor, w: Weights, causal: bool, position: str | None = None, per: str = "element"
) -> tuple[Tensor, Tensor | None]:
    """The package's layer, and the gates that it made (heads, tokens, channels)."""
    q, k, v = w.operands(x)
    sizes = dict(width=x.shape[1], heads=w.query.shape[1], kv_heads=w.key.shape[1], size=q.shape[3])
    if position is None:
        return w.projected(attention_module("softmax", **sizes)(q, k, v, causal=causal)), None
    layer = attention_module("gated", **sizes, position=position, per=per).double()
    gate = layer.gate
    assert isinstance(gate, Gate)
    with torch.no_grad():
        gate.weight.normal_(generator=torch.Generator().manual_seed(7))
        out = layer(q, k, v, x[None], causal=causal)
        return w.projected(out), gate(x[None])[0].expand(-1, -1, q.shape[3])


def measure(setting: Setting) -> Results:
    off = {"a1": 0.0, "a2": 0.0, "a3": 0.0}
    for number, (causal, few) in enumerate(CASES):
        w = Weights.drawn(number, few)
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 + number), dtype=torch.float64)
        off["a1"] = max(off["a1"], float((triple_sum(x, w, causal) - of_module(x, w, causal)[0]).abs().max()))
        for per in ("element", "head"):
            out, gate = of_module(x, w, causal, "output", per)
            off["a2"] = max(off["a2"], float((triple_sum(x, w, causal, gate=gate) - out).abs().max()))
            out, gate = of_module(x, w, causal, "value", per)
            off["a3"] = max(off["a3"], float((triple_sum(x, w, causal, value_gate=gate) - out).abs().max()))
    within, after = sums()
    distances = {**off, "a4": within, "a5": after}
    return Results({key: Measurement(value, 0.0, EXACT) for key, value in distances.items()})


def sums() -> tuple[float, float]:
    """How far the weights of a row are from summing to 1: with gates on keys or queries, and with one after
    attention.
    """
    w = Weights.drawn(0)
    x = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    q, k, _ = w.operands(x[0])
    far = {}
    for position in ("key", "query", "output"):
        layer = attention_module("gated", width=WIDTH, heads=HEADS, size=SIZE, position=position).double()
        with torch.no_grad():
            layer.gate.weight.normal_(generator=torch.Generator().manual_seed(7))  # type: ignore[operator, union-attr]
            far[position] = float((layer.map(q, k, x).sum(-1) - 1).abs().max())
    return max(far["key"], far["query"]), far["output"]


STUDY = Study("attention as a mixture of experts", CLAIMS, measure)
