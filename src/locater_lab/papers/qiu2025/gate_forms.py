"""What a gate computes and where it stands: every form beside plain loops, and the gate of Qwen3-Next (study a).

**Forms.** The paper puts sigmoid(x W_g) in five places of an attention layer. Four are options of the mechanism
`gated`; the fifth, after the output projection, is a plain product. Every form is compared with loops over heads and
tokens that share no code with it.

**Qwen3-Next.** Its gate, from the weights of a tiny random layer of transformers: which rows of q_proj are queries,
which are gates.

q_proj has 2 H size rows. Three ways to read them:
    per head    head by head, `size` rows of query, then `size` rows of gate
    halves      all queries, then all gates
    per group   for each key head, the queries of its group, then their gates (as the paper's own repository has it)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.devices_and_processes import relative_difference
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms import mechanism
from locater_lab.mechanisms.gated import GateModule
from locater_lab.mechanisms.modules import AttentionModule, attention_module

# ---- every form of the mechanism ----


WIDTH, HEADS, KEY_HEADS, SIZE, TOKENS, SEQUENCES = 24, 4, 2, 6, 9, 2
POSITIONS = ("output", "value", "key", "query")
DRAWS = {True: 6, False: 40}
TRAINED_WIDTH = 256  # of the runs of study d, for the gate at its start
EXACT = "none: exact up to rounding"

FORMS_CLAIMS = (
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


@dataclass(frozen=True)
class DrawnLayer:
    """Weights of one attention layer and tokens to read, float64."""

    x: Float[Tensor, "B T width"]
    W_Q: Float[Tensor, "H width size"]
    W_K: Float[Tensor, "K width size"]
    W_V: Float[Tensor, "K width size"]
    W_O: Float[Tensor, "H size width"]

    @classmethod
    def draw(
        cls, seed: int, tokens: int = TOKENS, width: int = WIDTH, heads: int = HEADS, key_heads: int = KEY_HEADS
    ) -> DrawnLayer:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        size = width // heads
        x, W_O = normal(SEQUENCES, tokens, width), normal(heads, size, width) / width**0.5
        W_Q, W_K, W_V = (normal(n, width, size) / width**0.5 for n in (heads, key_heads, key_heads))
        return cls(x, W_Q, W_K, W_V, W_O)

    @property
    def projections(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, size), keys and values (B, K, T, size)."""
        return tuple(torch.einsum("btd,hde->bhte", self.x, W) for W in (self.W_Q, self.W_K, self.W_V))  # type: ignore[return-value]

    def out(self, mixed: Float[Tensor, "B H T size"]) -> Float[Tensor, "B T width"]:
        return torch.einsum("bhte,hed->btd", mixed, self.W_O)


def gated_module(layer: DrawnLayer, seed: int, **settings: Any) -> AttentionModule:
    """The module of `gated`, its weights large enough that gates differ from 1/2."""
    heads, size = layer.W_O.shape[:2]
    gated = attention_module(
        "gated", width=layer.x.shape[2], heads=heads, size=size, kv_heads=len(layer.W_K), **settings
    ).double()
    generator = torch.Generator().manual_seed(seed + 77)
    for p in gated.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.5
    return gated.requires_grad_(False)


def looped_output(
    layer: DrawnLayer, W_g: Float[Tensor, "gates width"], position: str, per: str, causal: bool
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
        layer, causal = DrawnLayer.draw(seed), bool(seed % 2)
        gated = gated_module(layer, seed, position=position, per=per)
        q, k, v = layer.projections
        W_g = gated.get_parameter("gate.weight")
        errors.append(
            relative_difference(
                gated(q, k, v, layer.x, causal=causal), looped_output(layer, W_g, position, per, causal)
            )
        )
    return max(errors)


def half_gate_error(draws: int) -> float:
    """How far a gate of zero weights is from taking half."""
    distances = []
    for seed, per in product(range(draws), ("head", "element")):
        layer = DrawnLayer.draw(seed)
        gated = gated_module(layer, seed, per=per)
        gated.get_parameter("gate.weight").zero_()
        q, k, v = layer.projections
        plain = attention_module("softmax", width=WIDTH, heads=HEADS, size=SIZE)
        ratio = layer.out(gated(q, k, v, layer.x)) / layer.out(plain(q, k, v))
        distances.append(float((ratio - 0.5).abs().max()))
    return max(distances)


def definition_errors(draws: int) -> dict[str, float]:
    """Errors of the three variants beside their definitions."""
    errors = {"shared": 0.0, "without input": 0.0, "NS-sigmoid": 0.0}
    for seed in range(draws):
        x = DrawnLayer.draw(seed).x
        gates = {
            name: _draw_gate(seed, **how)
            for name, how in (("shared", dict(shared=True)), ("NS-sigmoid", dict(score="ns_sigmoid")))
        }
        for name, gate in gates.items():
            logits = torch.einsum("btd,hed->bhte", x, gate.weight.view(HEADS, SIZE, WIDTH))
            plain = 1 / (1 + torch.exp(-logits))
            defined = torch.stack([plain.mean(1)] * HEADS, 1) if name == "shared" else (1 + plain) / 2
            errors[name] = max(errors[name], float((gate(x) - defined).abs().max()))
        alone = _draw_gate(seed, from_input=False)
        defined = (1 / (1 + torch.exp(-alone.weight)))[None, :, None].expand(*x.shape[:1], -1, x.shape[1], -1)
        error = float((alone(x).expand_as(defined) - defined).abs().max())
        errors["without input"] = max(errors["without input"], error)
    return errors


def _draw_gate(seed: int, **how: Any) -> GateModule:
    gate = GateModule(WIDTH, HEADS, SIZE, "element", **how).double().requires_grad_(False)
    gate.weight.copy_(
        torch.randn(gate.weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    )
    return gate


def row_masses(draws: int) -> tuple[float, float, list[float]]:
    """|row sum - gate| after attention, |row sum - 1| on keys and queries, and the range of row sums with gates on
    values.
    """
    after, within, values = 0.0, 0.0, []
    for seed in range(draws):
        layer, causal = DrawnLayer.draw(seed), bool(seed % 2)
        q, k, _ = layer.projections
        for position in POSITIONS:
            gated = gated_module(layer, seed, position=position)
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


def constant_gate_error(draws: int) -> float:
    """A gate that ignores the input, beside W_O with the gate in it and no gate."""
    errors = []
    for seed, per in product(range(draws), ("head", "element")):
        layer = DrawnLayer.draw(seed)
        gated = gated_module(layer, seed, per=per, from_input=False)
        q, k, v = layer.projections
        plain = attention_module("softmax", width=WIDTH, heads=HEADS, size=SIZE)(q, k, v, causal=True)
        # gates (H, size or 1, 1) on rows of W_O
        W_O = layer.W_O * gated.get_parameter("gate.weight").sigmoid()[..., None]
        inside = torch.einsum("bhte,hed->btd", plain, W_O)
        errors.append(relative_difference(layer.out(gated(q, k, v, layer.x, causal=True)), inside))
    return max(errors)


def gates_at_start() -> dict[str, float]:
    """Mean and standard deviation of gates before training, of normalised input as wide as the runs'; W_g is N(0,
    0.02).
    """
    torch.manual_seed(0)
    gate = GateModule(TRAINED_WIDTH, 4, 64, "element").requires_grad_(False)
    gates = gate(torch.randn(1, 512, TRAINED_WIDTH))
    return {"mean": float(gates.mean()), "sd": float(gates.std())}


def measure_forms(setting: Setting) -> Results:
    """Everything in float64."""
    draws = DRAWS[setting.quick]
    errors = {(place, per): form_error(place, per, draws) for place in POSITIONS for per in ("head", "element")}
    forms = [{"place": p, "head": errors[p, "head"], "element": errors[p, "element"]} for p in POSITIONS]
    defined = definition_errors(draws)
    after, within, values = row_masses(draws)
    measured = {
        "a1": Measurement(max(errors.values()), 0.0, EXACT, {"draws": draws}),
        "a4": Measurement(half_gate_error(draws), 0.0, EXACT),
        "a5": Measurement(max(defined.values()), 0.0, EXACT, {"by_variant": defined}),
        "a6": Measurement(float(_closing_scores().min()), 0.0, EXACT),
        "a7": Measurement(after, 0.0, EXACT),
        "a8": Measurement(within, 0.0, EXACT),
        "a9": Measurement(constant_gate_error(draws), 0.0, EXACT),
    }
    return Results(
        measured, {"gate_forms": forms, "gates_at_start": gates_at_start(), "row_sums_of_value_gates": values}
    )


def _closing_scores() -> Tensor:
    gate = GateModule(1, 1, 1, "element", score="ns_sigmoid").double().requires_grad_(False)
    gate.weight.fill_(1.0)
    return gate(torch.linspace(-40, 0, 81, dtype=torch.float64)[None, :, None])


FORMS_STUDY = Study("what a gate computes", FORMS_CLAIMS, measure_forms)


# ---- the gate of Qwen3-Next ----


PER_HEAD, HALVES, PER_GROUP = "per head", "halves", "per group"
QWEN_WIDTH, QWEN_HEADS, QWEN_KEY_HEADS, QWEN_SIZE, QWEN_TOKENS, ROTATED = 32, 4, 2, 8, 11, 4

QWEN_CLAIMS = (
    Claim(
        "a2", "Qwen3-Next has this gate after attention, per element, of the layer's normalised input, untouched by rotation",
        "relative error of an explicit computation beside the attention layer of transformers, random weights", "at most", 1e-5, by="ours",
    ),
    Claim(
        "a3", "Its query and gate rows lie side by side head by head; another reading of the same weights is another layer",
        "relative error of the closer of two other readings: two halves, or side by side per group of heads", "at least", 0.1, by="ours",
    ),
)  # fmt: skip


def reading_errors(seed: int = 0) -> dict[str, float] | None:
    """Relative error of each reading beside the layer's own output; None without Qwen3-Next."""
    try:
        from transformers import Qwen3NextConfig
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention
    except ImportError:
        return None
    config = Qwen3NextConfig(
        hidden_size=QWEN_WIDTH, num_attention_heads=QWEN_HEADS, num_key_value_heads=QWEN_KEY_HEADS, head_dim=QWEN_SIZE, num_hidden_layers=4, num_experts=0,
        attn_implementation="sdpa",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    attention = Qwen3NextAttention(config, layer_idx=3).double().eval().requires_grad_(False)
    for p in attention.parameters():
        p.copy_(
            torch.randn(p.shape, generator=generator, dtype=torch.float64) * (0.1 if p.ndim == 1 else QWEN_WIDTH**-0.5)
        )
    x = torch.randn(1, QWEN_TOKENS, QWEN_WIDTH, generator=generator, dtype=torch.float64)
    cos, sin = rotary_angles()
    reference = attention(x, (cos[None], sin[None]), None, is_causal=True)[0]
    weights = {name: p.data for name, p in attention.named_parameters()}
    return {
        name: relative_difference(_explicit_layer(x, weights, name, config.rms_norm_eps), reference)
        for name in (PER_HEAD, HALVES, PER_GROUP)
    }


def rotary_angles() -> tuple[Tensor, Tensor]:
    """cos and sin (T, ROTATED) of the turned channels, both halves of each pair."""
    angle = torch.arange(QWEN_TOKENS, dtype=torch.float64)[:, None] / 1e4 ** (
        torch.arange(0, ROTATED, 2, dtype=torch.float64) / ROTATED
    )
    return torch.cat([angle.cos(), angle.cos()], -1), torch.cat([angle.sin(), angle.sin()], -1)


def _explicit_layer(x: Tensor, weights: dict[str, Tensor], reading: str, eps: float) -> Tensor:
    q, gate = split_query_and_gate(x @ weights["q_proj.weight"].mT, reading)
    k, v = (
        (x @ weights[f"{name}_proj.weight"].mT).unflatten(-1, (QWEN_KEY_HEADS, QWEN_SIZE)).transpose(1, 2)
        for name in "kv"
    )
    q, k = (_rotate(_rms_normalize(y, weights[f"{name}_norm.weight"], eps)) for name, y in (("q", q), ("k", k)))
    heads = mechanism("gated")(q, k, v, gate=1 / (1 + torch.exp(-gate)), causal=True)
    return heads.transpose(1, 2).flatten(2) @ weights["o_proj.weight"].mT


def split_query_and_gate(rows: Tensor, reading: str) -> tuple[Tensor, Tensor]:
    """Query and gate logits (B, H, T, size) out of what q_proj gives (B, T, 2 H size).

    >>> q, gate = split_query_and_gate(torch.arange(64.0).view(1, 1, 64), "per head")
    >>> q[0, 1, 0, 0].item(), gate[0, 1, 0, 0].item()
    (16.0, 24.0)
    """
    if reading == PER_HEAD:
        both = rows.unflatten(-1, (QWEN_HEADS, 2, QWEN_SIZE)).movedim(-2, 0)
    elif reading == HALVES:
        both = rows.unflatten(-1, (2, QWEN_HEADS, QWEN_SIZE)).movedim(-3, 0)
    else:
        both = (
            rows.unflatten(-1, (QWEN_KEY_HEADS, 2, QWEN_HEADS // QWEN_KEY_HEADS, QWEN_SIZE))
            .movedim(-3, 0)
            .flatten(-3, -2)
        )
    return both[0].transpose(1, 2), both[1].transpose(1, 2)


def _rms_normalize(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + gain)


def _rotate(x: Tensor) -> Tensor:
    """The first ROTATED channels turned as pairs (i, i + ROTATED / 2), the others as they are."""
    half = ROTATED // 2
    cos, sin = (y[:, :half] for y in rotary_angles())
    a, b = x[..., :half], x[..., half:ROTATED]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., ROTATED:]], -1)


def measure_qwen(setting: Setting) -> Results:
    """One random layer, read in three ways; nothing where transformers has no Qwen3-Next."""
    errors = reading_errors()
    if errors is None:
        return Results({})
    closest = min(error for name, error in errors.items() if name != PER_HEAD)
    measured = {
        "a2": Measurement(errors[PER_HEAD], 0.0, "none: one layer, float32 norms"),
        "a3": Measurement(closest, 0.0, "none: one layer"),
    }
    return Results(measured, {"qwen_readings": errors})


QWEN_STUDY = Study("the gate of Qwen3-Next", QWEN_CLAIMS, measure_qwen, needs="transformers with Qwen3-Next")
