"""The first token sees itself alone: what attention does there, mechanism by mechanism. Study c.

Under a causal mask row 1 of a map that sums to 1 is a single 1, so the output is W_O W_V x whatever queries and keys
are: one fixed linear map. A spike that is made there depends on nothing but the token. Where a row may sum to less, or
more, the weight is a function of the token, and the map is not fixed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms import mechanism, mechanisms
from locater_lab.mechanisms.modules import attention_module

WIDTH, HEADS, KEY_HEADS, SIZE, TOKENS = 16, 4, 2, 4, 6
DRAWS = {True: 300, False: 2000}
AWAY = ("gated", "softmax_plus_one", "learned_sink", "sigmoid")
EXACT = "none: exact up to rounding"

CLAIMS = (
    Claim("c1", "Attention at the first position is a fixed linear map", "relative error of W_O W_V x beside causal softmax, grouped heads",
          "at most", 1e-12, by="summary"),
    Claim("c2", "So it is for every causal mechanism whose rows sum to 1", "largest relative error over these mechanisms",
          "at most", 1e-9, by="ours"),
    Claim("c3", "Where a query can look away it is not", "largest R^2 of a linear fit of the output on the token: "
          "gate per head, softmax with a sink, learned sink, sigmoid", "at most", 0.99, by="ours"),
)  # fmt: skip


@dataclass(frozen=True)
class First:
    """The first token of many draws through one mechanism, float64."""

    x: Float[Tensor, "draws width"]
    out: Float[Tensor, "draws heads_size"]  # of heads, side by side
    merged: Float[Tensor, "width heads_size"]  # W_V, a key head's columns once for each of its query heads

    @property
    def error(self) -> float:
        """How far W_O W_V x, merged beforehand, is from W_O applied to the output; W_O of one draw."""
        W_O = torch.randn(self.out.shape[1], WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        fixed = self.x @ (self.merged @ W_O)
        return float((self.out @ W_O - fixed).abs().max() / fixed.abs().max())


def outputs(name: str, draws: int) -> First:
    """A mechanism with random weights, its own ones too, on random tokens; queries are large enough that logits
    matter.
    """
    torch.manual_seed(0)
    x = torch.randn(draws, TOKENS, WIDTH, dtype=torch.float64)
    W_Q, W_K, W_V = (
        torch.randn(WIDTH, heads * SIZE, dtype=torch.float64) / WIDTH**0.5 for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    q, k, v = ((x @ W).unflatten(-1, (-1, SIZE)).transpose(1, 2) for W in (3 * W_Q, W_K, W_V))
    module = (
        attention_module(name, width=WIDTH, heads=HEADS, size=SIZE, kv_heads=KEY_HEADS).double().requires_grad_(False)
    )
    for p in module.parameters():
        p.copy_(torch.randn(p.shape, dtype=torch.float64) * (0.5 if p.ndim < 2 else 1.0))
    out = module(q, k, v, x, causal=True)[:, :, 0].flatten(1)
    return First(x[:, 0], out, W_V.unflatten(1, (KEY_HEADS, SIZE)).repeat_interleave(HEADS // KEY_HEADS, 1).flatten(1))


def fit(x: Tensor, y: Tensor) -> float:
    """R^2 of y = x M, M the best fixed matrix; 1 where y is 0."""
    rest = y - x @ torch.linalg.lstsq(x, y).solution
    size = float(y.square().sum())
    return 1 - float(rest.square().sum()) / size if size else 1.0


def causal_names() -> list[str]:
    """Mechanisms that have a causal form with default settings."""
    return [m.name for m in mechanisms() if m.is_causal_safe]


def measure(setting: Setting) -> Results:
    """Every causal mechanism on the same tokens."""
    draws = DRAWS[setting.quick]
    firsts = {name: outputs(name, draws) for name in setting.each(causal_names())}
    fits = {name: fit(first.x, first.out) for name, first in firsts.items()}
    sizes = {name: float(first.out.norm() / (first.x @ first.merged).norm()) for name, first in firsts.items()}
    rows = [{"mechanism": n, "kind": mechanism(n).kind, "R2": fits[n], "size": sizes[n]} for n in firsts]
    summing = {name: first.error for name, first in firsts.items() if mechanism(name).kind == "stochastic"}
    measured = {
        "c1": Measurement(summing["softmax"], 0.0, EXACT),
        "c2": Measurement(max(summing.values()), 0.0, EXACT, {"errors": summing}),
        "c3": Measurement(max(fits[name] for name in AWAY), 0.0, "none: a fit over draws of tokens"),
    }
    return Results(measured, {"first_position": rows})


STUDY = Study("the first position", CLAIMS, measure)
