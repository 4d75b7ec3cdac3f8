"""The gate of Qwen3-Next, from the weights of a tiny random layer of transformers: which rows of q_proj are queries,
which are gates. The rest of study a.

q_proj has 2 H size rows. Three ways to read them:
    per head    head by head, `size` rows of query, then `size` rows of gate
    halves      all queries, then all gates
    per group   for each key head, the queries of its group, then their gates (as the paper's own repository has it)
"""

from __future__ import annotations

import torch
from torch import Tensor

from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms import mechanism
from locater_lab.papers.qiu2025.gates import relative

PER_HEAD, HALVES, PER_GROUP = "per head", "halves", "per group"
WIDTH, HEADS, KEY_HEADS, SIZE, TOKENS, ROTATED = 32, 4, 2, 8, 11, 4

CLAIMS = (
    Claim(
        "a2", "Qwen3-Next has this gate after attention, per element, of the layer's normalised input, untouched by rotation",
        "relative error of an explicit computation beside the attention layer of transformers, random weights", "at most", 1e-5, by="ours",
    ),
    Claim(
        "a3", "Its query and gate rows lie side by side head by head; another reading of the same weights is another layer",
        "relative error of the closer of two other readings: two halves, or side by side per group of heads", "at least", 0.1, by="ours",
    ),
)  # fmt: skip


def readings(seed: int = 0) -> dict[str, float] | None:
    """Relative error of each reading beside the layer's own output; None without Qwen3-Next."""
    try:
        from transformers import Qwen3NextConfig
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention
    except ImportError:
        return None
    config = Qwen3NextConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, head_dim=SIZE, num_hidden_layers=4, num_experts=0,
        attn_implementation="sdpa",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    attention = Qwen3NextAttention(config, layer_idx=3).double().eval().requires_grad_(False)
    for p in attention.parameters():
        p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * (0.1 if p.ndim == 1 else WIDTH**-0.5))
    x = torch.randn(1, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    cos, sin = angles()
    reference = attention(x, (cos[None], sin[None]), None, is_causal=True)[0]
    weights = {name: p.data for name, p in attention.named_parameters()}
    return {
        name: relative(_explicit(x, weights, name, config.rms_norm_eps), reference)
        for name in (PER_HEAD, HALVES, PER_GROUP)
    }


def angles() -> tuple[Tensor, Tensor]:
    """cos and sin (T, ROTATED) of the turned channels, both halves of each pair."""
    angle = torch.arange(TOKENS, dtype=torch.float64)[:, None] / 1e4 ** (
        torch.arange(0, ROTATED, 2, dtype=torch.float64) / ROTATED
    )
    return torch.cat([angle.cos(), angle.cos()], -1), torch.cat([angle.sin(), angle.sin()], -1)


def _explicit(x: Tensor, weights: dict[str, Tensor], reading: str, eps: float) -> Tensor:
    q, gate = split(x @ weights["q_proj.weight"].mT, reading)
    k, v = ((x @ weights[f"{name}_proj.weight"].mT).unflatten(-1, (KEY_HEADS, SIZE)).transpose(1, 2) for name in "kv")
    q, k = (_turned(_normed(y, weights[f"{name}_norm.weight"], eps)) for name, y in (("q", q), ("k", k)))
    heads = mechanism("gated")(q, k, v, gate=1 / (1 + torch.exp(-gate)), causal=True)
    return heads.transpose(1, 2).flatten(2) @ weights["o_proj.weight"].mT


def split(rows: Tensor, reading: str) -> tuple[Tensor, Tensor]:
    """Query and gate logits (B, H, T, size) out of what q_proj gives (B, T, 2 H size).

    >>> q, gate = split(torch.arange(64.0).view(1, 1, 64), "per head")
    >>> q[0, 1, 0, 0].item(), gate[0, 1, 0, 0].item()
    (16.0, 24.0)
    """
    if reading == PER_HEAD:
        both = rows.unflatten(-1, (HEADS, 2, SIZE)).movedim(-2, 0)
    elif reading == HALVES:
        both = rows.unflatten(-1, (2, HEADS, SIZE)).movedim(-3, 0)
    else:
        both = rows.unflatten(-1, (KEY_HEADS, 2, HEADS // KEY_HEADS, SIZE)).movedim(-3, 0).flatten(-3, -2)
    return both[0].transpose(1, 2), both[1].transpose(1, 2)


def _normed(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + gain)


def _turned(x: Tensor) -> Tensor:
    """The first ROTATED channels turned as pairs (i, i + ROTATED / 2), the others as they are."""
    half = ROTATED // 2
    cos, sin = (y[:, :half] for y in angles())
    a, b = x[..., :half], x[..., half:ROTATED]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., ROTATED:]], -1)


def measure(setting: Setting) -> Results:
    """One random layer, read in three ways; nothing where transformers has no Qwen3-Next."""
    errors = readings()
    if errors is None:
        return Results({})
    closest = min(error for name, error in errors.items() if name != PER_HEAD)
    measured = {
        "a2": Measurement(errors[PER_HEAD], 0.0, "none: one layer, float32 norms"),
        "a3": Measurement(closest, 0.0, "none: one layer"),
    }
    return Results(measured, {"qwen_readings": errors})


STUDY = Study("the gate of Qwen3-Next", CLAIMS, measure, needs="transformers with Qwen3-Next")
