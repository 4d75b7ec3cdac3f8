"""What a gate computes, where it may stand, and what each variant can and cannot do: study a.

The paper puts sigmoid(x W_g) in five places of an attention layer. Four are options of the mechanism `gated`; the
fifth, after the output projection, is a plain product. Every form is compared with loops over heads and tokens that
share no code with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms.gated import Gate
from locater_lab.mechanisms.modules import AttentionModule, attention_module

WIDTH, HEADS, KEY_HEADS, SIZE, TOKENS, SEQUENCES = 24, 4, 2, 6, 9, 2
POSITIONS = ("output", "value", "key", "query")
DRAWS = {True: 6, False: 40}
TRAINED_WIDTH = 256  # of the runs of study d, for the gate at its start
EXACT = "none: exact up to rounding"

CLAIMS = (
    Claim(
        "a1", "A gated head is softmax attention times sigmoid(x W_g), in each of four places, per head or per element",
        "largest relative error of the module beside loops over heads and tokens, grouped heads, with and without a causal mask",
        "at most", 1e-12, where="Table 1",
    ),
    Claim(
        "a4", "A gate with zero weights is 1/2 and halves what attention adds",
        "largest distance from 1/2 of the layer's output over that without a gate", "at most", 1e-12, by="ours",
    ),
    Claim(
        "a5", "A gate shared by heads is the mean of their element-wise gates; one that ignores the input is the same for every token; "
        "NS-sigmoid is 1/2 + sigmoid / 2",
        "largest error of the three beside their definitions", "at most", 1e-12, where="Tables 1 and 4",
    ),
    Claim(
        "a6", "NS-sigmoid cannot close", "least gate at logits down to -40", "at least", 0.5, where="Table 4",
    ),
    Claim(
        "a7", "After attention a query may look away: rows of the map sum to its gate",
        "largest distance of a row's sum from its gate, per head", "at most", 1e-12, by="ours",
    ),
    Claim(
        "a8", "On keys or queries it may not: rows sum to 1 whatever the gate", "largest distance of a row's sum from 1", "at most", 1e-12,
        by="ours",
    ),
    Claim(
        "a9", "A gate that ignores the input adds no function: it folds into the output projection",
        "relative error of the plain layer whose W_O has the gate in it", "at most", 1e-12, by="ours",
    ),
)  # fmt: skip


def relative(tensor: Tensor, reference: Tensor) -> float:
    """Largest entry of the difference over the largest of the reference.

    >>> relative(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 4.0]))
    0.25
    """
    return float((tensor - reference).abs().max() / reference.abs().max())


@dataclass(frozen=True)
class Layer:
    """Weights of one attention layer and tokens to read, float64."""

    x: Float[Tensor, "B T width"]
    W_Q: Float[Tensor, "H width size"]
    W_K: Float[Tensor, "K width size"]
    W_V: Float[Tensor, "K width size"]
    W_O: Float[Tensor, "H size width"]

    @classmethod
    def draw(
        cls, seed: int, tokens: int = TOKENS, width: int = WIDTH, heads: int = HEADS, key_heads: int = KEY_HEADS
    ) -> Layer:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        size = width // heads
        x, W_O = normal(SEQUENCES, tokens, width), normal(heads, size, width) / width**0.5
        W_Q, W_K, W_V = (normal(n, width, size) / width**0.5 for n in (heads, key_heads, key_heads))
        return cls(x, W_Q, W_K, W_V, W_O)

    @property
    def projected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, size), keys and values (B, K, T, size)."""
        return tuple(torch.einsum("btd,hde->bhte", self.x, W) for W in (self.W_Q, self.W_K, self.W_V))  # type: ignore[return-value]

    def out(self, mixed: Float[Tensor, "B H T size"]) -> Float[Tensor, "B T width"]:
        return torch.einsum("bhte,hed->btd", mixed, self.W_O)


def module(layer: Layer, seed: int, **settings: Any) -> AttentionModule:
    """The module of `gated`, its weights large enough that gates differ from 1/2."""
    heads, size = layer.W_O.shape[:2]
    gated = attention_module(
        "gated", width=layer.x.shape[2], heads=heads, size=size, kv_heads=len(layer.W_K), **settings
    ).double()
    generator = torch.Generator().manual_seed(seed + 77)
    for p in gated.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.5
    return gated.requires_grad_(False)


def looped(
    layer: Layer, W_g: Float[Tensor, "gates width"], position: str, per: str, causal: bool
) -> Float[Tensor, "B H T size"]:
    """The same head by head and token by token."""
    B, T, _ = layer.x.shape
    H, K = len(layer.W_O), len(layer.W_K)
    size = layer.W_O.shape[1]
    heads = torch.zeros(B, H, T, size, dtype=torch.float64)
    for b, h in product(range(B), range(H)):
        g = h * K // H if position in ("key", "value") else h
        rows = W_g[g : g + 1] if per == "head" else W_g[g * size : (g + 1) * size]
        gates = [1 / (1 + torch.exp(-(rows @ x))) for x in layer.x[b]]
        q = [x @ layer.W_Q[h] for x in layer.x[b]]
        k = [x @ layer.W_K[h * K // H] for x in layer.x[b]]
        v = [x @ layer.W_V[h * K // H] for x in layer.x[b]]
        vectors = {"query": q, "key": k, "value": v}.get(position)
        if vectors is not None:
            vectors[:] = [vector * gate for vector, gate in zip(vectors, gates, strict=True)]
        for i in range(T):
            seen = range(i + 1) if causal else range(T)
            weight = [torch.exp(q[i] @ k[j] / size**0.5) for j in seen]
            row = sum(w * v[j] for w, j in zip(weight, seen, strict=True)) / sum(weight)
            heads[b, h, i] = row * gates[i] if position == "output" else row
    return heads


def form_error(position: str, per: str, draws: int) -> float:
    """Largest relative error of one form over draws, both masks."""
    errors = []
    for seed in range(draws):
        layer, causal = Layer.draw(seed), bool(seed % 2)
        gated = module(layer, seed, position=position, per=per)
        q, k, v = layer.projected
        W_g = gated.get_parameter("gate.weight")
        errors.append(relative(gated(q, k, v, layer.x, causal=causal), looped(layer, W_g, position, per, causal)))
    return max(errors)


def halved(draws: int) -> float:
    """How far a gate of zero weights is from taking half."""
    distances = []
    for seed, per in product(range(draws), ("head", "element")):
        layer = Layer.draw(seed)
        gated = module(layer, seed, per=per)
        gated.get_parameter("gate.weight").zero_()
        q, k, v = layer.projected
        plain = attention_module("softmax", width=WIDTH, heads=HEADS, size=SIZE)
        ratio = layer.out(gated(q, k, v, layer.x)) / layer.out(plain(q, k, v))
        distances.append(float((ratio - 0.5).abs().max()))
    return max(distances)


def definitions(draws: int) -> dict[str, float]:
    """Errors of the three variants beside their definitions."""
    errors = {"shared": 0.0, "without input": 0.0, "NS-sigmoid": 0.0}
    for seed in range(draws):
        x = Layer.draw(seed).x
        gates = {
            name: _gate(seed, **how)
            for name, how in (("shared", dict(shared=True)), ("NS-sigmoid", dict(score="ns_sigmoid")))
        }
        for name, gate in gates.items():
            logits = torch.einsum("btd,hed->bhte", x, gate.weight.view(HEADS, SIZE, WIDTH))
            plain = 1 / (1 + torch.exp(-logits))
            defined = torch.stack([plain.mean(1)] * HEADS, 1) if name == "shared" else (1 + plain) / 2
            errors[name] = max(errors[name], float((gate(x) - defined).abs().max()))
        alone = _gate(seed, from_input=False)
        defined = (1 / (1 + torch.exp(-alone.weight)))[None, :, None].expand(*x.shape[:1], -1, x.shape[1], -1)
        error = float((alone(x).expand_as(defined) - defined).abs().max())
        errors["without input"] = max(errors["without input"], error)
    return errors


def _gate(seed: int, **how: Any) -> Gate:
    gate = Gate(WIDTH, HEADS, SIZE, "element", **how).double().requires_grad_(False)
    gate.weight.copy_(
        torch.randn(gate.weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    )
    return gate


def masses(draws: int) -> tuple[float, float, list[float]]:
    """|row sum - gate| after attention, |row sum - 1| on keys and queries, and the range of row sums with gates on
    values.
    """
    after, within, values = 0.0, 0.0, []
    for seed in range(draws):
        layer, causal = Layer.draw(seed), bool(seed % 2)
        q, k, _ = layer.projected
        for position in POSITIONS:
            gated = module(layer, seed, position=position)
            sums = gated.map(q, k, layer.x, causal=causal).sum(-1)
            if position == "output":
                W_g = gated.get_parameter("gate.weight")
                gates = 1 / (1 + torch.exp(-torch.einsum("btd,hd->bht", layer.x, W_g)))
                after = max(after, float((sums - gates).abs().max()))
            elif position == "value":
                values += [float(sums.min()), float(sums.max())]
            else:
                within = max(within, float((sums - 1).abs().max()))
    return after, within, [min(values), max(values)]


def folded(draws: int) -> float:
    """A gate that ignores the input, beside W_O with the gate in it and no gate."""
    errors = []
    for seed, per in product(range(draws), ("head", "element")):
        layer = Layer.draw(seed)
        gated = module(layer, seed, per=per, from_input=False)
        q, k, v = layer.projected
        plain = attention_module("softmax", width=WIDTH, heads=HEADS, size=SIZE)(q, k, v, causal=True)
        # gates (H, size or 1, 1) on rows of W_O
        W_O = layer.W_O * gated.get_parameter("gate.weight").sigmoid()[..., None]
        inside = torch.einsum("bhte,hed->btd", plain, W_O)
        errors.append(relative(layer.out(gated(q, k, v, layer.x, causal=True)), inside))
    return max(errors)


def at_start() -> dict[str, float]:
    """Mean and standard deviation of gates before training, of normalised input as wide as the runs'; W_g is N(0,
    0.02).
    """
    torch.manual_seed(0)
    gate = Gate(TRAINED_WIDTH, 4, 64, "element").requires_grad_(False)
    gates = gate(torch.randn(1, 512, TRAINED_WIDTH))
    return {"mean": float(gates.mean()), "sd": float(gates.std())}


def measure(setting: Setting) -> Results:
    """Everything in float64."""
    draws = DRAWS[setting.quick]
    errors = {(place, per): form_error(place, per, draws) for place in POSITIONS for per in ("head", "element")}
    forms = [{"place": p, "head": errors[p, "head"], "element": errors[p, "element"]} for p in POSITIONS]
    defined = definitions(draws)
    after, within, values = masses(draws)
    measured = {
        "a1": Measurement(max(errors.values()), 0.0, EXACT, {"draws": draws}),
        "a4": Measurement(halved(draws), 0.0, EXACT),
        "a5": Measurement(max(defined.values()), 0.0, EXACT, {"by_variant": defined}),
        "a6": Measurement(float(_closing().min()), 0.0, EXACT),
        "a7": Measurement(after, 0.0, EXACT),
        "a8": Measurement(within, 0.0, EXACT),
        "a9": Measurement(folded(draws), 0.0, EXACT),
    }
    return Results(measured, {"gate_forms": forms, "gates_at_start": at_start(), "row_sums_of_value_gates": values})


def _closing() -> Tensor:
    gate = Gate(1, 1, 1, "element", score="ns_sigmoid").double().requires_grad_(False)
    gate.weight.fill_(1.0)
    return gate(torch.linspace(-40, 0, 81, dtype=torch.float64)[None, :, None])


STUDY = Study("what a gate computes", CLAIMS, measure)
