"""Linear attention as a recurrence: the state token by token, against the package's chunks and sums. Study a.

    (a) S_t = S_{t-1} + phi(k_t) v_t^T, z_t = z_{t-1} + phi(k_t), o_t = S_t^T phi(q_t) / z_t.phi(q_t), phi = elu + 1
    (b) S_t = S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T, o_t = S_t q_t, |k_t| = 1
    (c) M <- a_t M, u = b_t (v_t - M^T k_t), M <- M + k_t u^T, o_t = M^T q_t / sqrt(d)
The theorem is about all such recurrences: whatever came before a token is known to it through one state of fixed size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms import mechanism

TOKENS, SIZE, VALUES = 150, 8, 5  # more tokens than two of the package's chunks
HEADS, FEW = 4, 2
EXACT = "none: exact"

CLAIMS = (
    Claim(
        "a1",
        "Kernel linear attention is the recurrence (a)",
        "largest difference of `linear` from the loop over tokens, grouped heads",
        "at most",
        1e-12,
        by="ours",
    ),
    Claim(
        "a2",
        "DeltaNet is the recurrence (b)",
        "largest difference of `delta` from the loop over tokens, grouped heads",
        "at most",
        1e-12,
        by="ours",
    ),
    Claim(
        "a3",
        "Gated DeltaNet is the recurrence (c)",
        "largest difference of `gated_delta` from the loop over tokens, grouped heads",
        "at most",
        1e-12,
        by="ours",
    ),
    Claim(
        "a4",
        "The correction form (c) and the form with (I - b k k^T) are the same recurrence",
        "largest difference of the two loops, with decay",
        "at most",
        1e-12,
        by="ours",
    ),
    Claim(
        "a5",
        "Softmax attention is no such recurrence of this size: its outputs need more than the state could tell apart",
        "rank of the map from values of the past to outputs of the future, over the size of a state",
        "at least",
        2.0,
        by="ours",
    ),
)


def operands(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    q, k, v = draw(1, HEADS, TOKENS, SIZE), draw(1, FEW, TOKENS, SIZE), draw(1, FEW, TOKENS, VALUES)
    return {
        "q": q,
        "k": k,
        "v": v,
        "beta": draw(1, FEW, TOKENS).sigmoid(),
        "log_decay": -0.1 * draw(1, FEW, TOKENS).exp(),
    }


def kernel_loop(
    q: Float[Tensor, "T d"], k: Float[Tensor, "T d"], v: Float[Tensor, "T e"], **_: Tensor
) -> Float[Tensor, "T e"]:
    """(a)."""
    q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    total, weight, out = k.new_zeros(k.shape[1], v.shape[1]), k.new_zeros(k.shape[1]), []
    for t in range(len(k)):
        total, weight = total + torch.outer(k[t], v[t]), weight + k[t]
        out.append(total.mT @ q[t] / (weight @ q[t]))
    return torch.stack(out)


def erased(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """(b), with decay where it is given: the state times (I - b k k^T)."""
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    state, out, eye = k.new_zeros(v.shape[1], k.shape[1]), [], torch.eye(k.shape[1], dtype=k.dtype)
    for t in range(len(k)):
        decay = 1.0 if log_decay is None else log_decay[t].exp()
        state = decay * state @ (eye - beta[t] * torch.outer(k[t], k[t])) + beta[t] * torch.outer(v[t], k[t])
        out.append(scale * state @ q[t])
    return torch.stack(out)


def corrected(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, scale: float = 1.0) -> Tensor:
    """(c)."""
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    memory, out = k.new_zeros(k.shape[1], v.shape[1]), []
    for t in range(len(k)):
        memory = log_decay[t].exp() * memory
        memory = memory + torch.outer(k[t], beta[t] * (v[t] - memory.mT @ k[t]))
        out.append(scale * memory.mT @ q[t])
    return torch.stack(out)


def difference(name: str, loop: Callable[..., Tensor], options: tuple[str, ...], scale: float | None = None) -> float:
    """Of the package's mechanism from a loop, query head by query head."""
    tensors = operands()
    scaling: dict[str, Any] = {} if scale is None else {"scale": scale}
    extra: dict[str, Any] = {n: tensors[n] for n in options}
    package = mechanism(name)(tensors["q"], tensors["k"], tensors["v"], causal=True, **extra, **scaling)[0]
    worst = 0.0
    for h in range(HEADS):
        kv_head = h // (HEADS // FEW)
        q, k, v = tensors["q"][0, h], tensors["k"][0, kv_head], tensors["v"][0, kv_head]
        expected = loop(q, k, v, **{n: tensors[n][0, kv_head] for n in options}, **scaling)
        worst = max(worst, float((package[h] - expected).abs().max()))
    return worst


def rank_across(name: str, *options: str, cut: int = TOKENS // 2, sharp: float = 8.0) -> int:
    """Rank of the map's block from keys before `cut` to queries after it: what the past can tell the future, per
    channel of values.

    For a recurrence with a state of d rows it is at most d.
    """
    tensors = operands(1)
    extra: dict[str, Any] = {n: tensors[n] for n in options}
    weights = mechanism(name).map(sharp * tensors["q"][:, :FEW], tensors["k"], causal=True, **extra)[0, 0]
    return int(torch.linalg.matrix_rank(weights[cut:, :cut], rtol=1e-10))


def measure(setting: Setting) -> Results:
    """Each mechanism against its loop, and the rank of what passes from the first half of the tokens to the second."""
    tensors = operands()
    q, k, v, beta, decay = (tensors[n][0, 0] for n in ("q", "k", "v", "beta", "log_decay"))
    ranks = {
        "linear": rank_across("linear"),
        "delta": rank_across("delta", "beta"),
        "gated_delta": rank_across("gated_delta", "beta", "log_decay"),
        "softmax": rank_across("softmax"),
    }
    values = {
        "a1": difference("linear", kernel_loop, ()),
        "a2": difference("delta", erased, ("beta",)),
        "a3": difference("gated_delta", corrected, ("beta", "log_decay"), SIZE**-0.5),
        "a4": float((erased(q, k, v, beta, decay) - corrected(q, k, v, beta, decay)).abs().max()),
        "a5": ranks["softmax"] / SIZE,
    }
    measured = {key: Measurement(value, 0.0, EXACT) for key, value in values.items()}
    return Results(measured, {"state_ranks": {"ranks": ranks, "size": SIZE, "tokens": TOKENS}})


STUDY = Study("linear attention as a recurrence", CLAIMS, measure)
