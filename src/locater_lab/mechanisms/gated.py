"""Gated attention (Qiu et al. 2025): softmax attention with parts of a head scaled by a sigmoid of the layer's input.

g = sigmoid(x W_g), in one of four places, for a whole head (one number per token) or element by element:
    gate        after attention:  o_i = g_i * sum_j A_ij v_j
    value_gate  on the values:    o_i = sum_j A_ij (g_j * v_j)
    key_gate    on the keys:      A = softmax(scale q (g * k)^T)
    query_gate  on the queries:   A = softmax(scale (g * q) k^T)
The fifth place, after the output projection, is outside of attention: `y * GateModule(width, 1, width, "element")(x)[:, 0]`.

With gates per head the map is g_i A_ij g_j, whose rows sum to at most 1: a query may look away. Element by element
there is a map per channel, and W_V and W_O no longer merge into one matrix. Either way the output of a head has rank at
most E.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from locater.errors import LocaterError
from locater_lab.mechanisms.mechanism_record import Inputs
from locater_lab.mechanisms.softmax import softmax_attention, softmax_map

Per = Literal["head", "element"]
Score = Literal["sigmoid", "ns_sigmoid"]


def gated_attention(
    x: Inputs,
    *,
    gate: Tensor | None = None,
    value_gate: Tensor | None = None,
    key_gate: Tensor | None = None,
    query_gate: Tensor | None = None,
) -> Tensor:
    """Gates are (batch, heads, tokens), or (batch, heads, tokens, 1 or size); axes of size 1 are shared.

    Heads of `gate` and `query_gate` are those of queries, whose tokens may be counted with the keys before them: the
    last T are taken. A gate is used as it is given: what it is made of is up to `GateModule`.

    >>> from locater_lab.mechanisms import mechanism
    >>> q = k = v = torch.ones(1, 2, 3, 4)
    >>> gate = torch.tensor([[[1.0, 0.5, 0.0]]])                            # for both heads
    >>> mechanism("gated")(q, k, v, gate=gate)[0, 1, :, 0]
    tensor([1.0000, 0.5000, 0.0000])
    """
    x = _gated_logits(x, gate, value_gate, key_gate, query_gate)
    if value_gate is not None:
        x = replace(x, v=x.v * _fit_gate(value_gate, "value_gate", x.v, x.S))
    out = softmax_attention(x)
    return out if gate is None else out * _fit_gate(gate, "gate", out, x.S)


def gated_map(
    x: Inputs,
    *,
    gate: Tensor | None = None,
    value_gate: Tensor | None = None,
    key_gate: Tensor | None = None,
    query_gate: Tensor | None = None,
) -> Tensor:
    """g_i A_ij g_j; of gates per head only."""
    for name, gates in (("gate", gate), ("value_gate", value_gate)):
        if gates is not None and gates.ndim == 4 and gates.shape[3] > 1:
            raise LocaterError(
                f"gated: an element-wise {name} has a map per channel; its mean over channels, or the map of softmax"
            )
    x = _gated_logits(x, gate, value_gate, key_gate, query_gate)
    out = softmax_map(x)
    if value_gate is not None:
        out = out * x.per_query_head(_fit_gate(value_gate, "value_gate", x.k, x.S).expand(-1, x.k.shape[1], -1, -1)).mT
    return out if gate is None else out * _fit_gate(gate, "gate", x.q, x.S)


def _gated_logits(
    x: Inputs, gate: Tensor | None, value_gate: Tensor | None, key_gate: Tensor | None, query_gate: Tensor | None
) -> Inputs:
    if gate is None and value_gate is None and key_gate is None and query_gate is None:
        raise LocaterError(
            "gated needs at least one of gate, value_gate, key_gate, query_gate; without any it is softmax"
        )
    q = x.q if query_gate is None else x.q * _fit_gate(query_gate, "query_gate", x.q, x.S)
    k = x.k if key_gate is None else x.k * _fit_gate(key_gate, "key_gate", x.k, x.S)
    return replace(x, q=q, k=k)


def _fit_gate(gate: Tensor, name: str, onto: Tensor, S: int) -> Tensor:
    """A gate with four axes that fit `onto` (B, heads, tokens, size), in its type."""
    shape, tokens = list(gate.shape), onto.shape[2]
    if gate.ndim == 3:
        gate = gate[..., None]
    if gate.ndim == 4 and gate.shape[2] == S and tokens < S:
        gate = gate[:, :, S - tokens :]
    if gate.ndim != 4 or any(have not in (1, want) for have, want in zip(gate.shape, onto.shape, strict=True)):
        raise LocaterError(
            f"{name} has shape {shape}, which does not fit {list(onto.shape)} "
            "(batch, heads, tokens[, size]) with axes of 1 shared"
        )
    return gate.to(onto.dtype)


class GateModule(nn.Module):
    """Gates of the layer's input x (B, T, width): (B, heads, T, 1) per head, (B, heads, T, size) per element.

    g = f(x W_g), with W_g (width, heads) or (width, heads size) and f the sigmoid; "ns_sigmoid" is (1 + sigmoid) / 2,
    which cannot close. `shared`: the mean of element-wise gates over heads, for all of them. Without `from_input`: f of
    parameters alone, zero at first. W_g is small at first, so that gates are about 1/2 and so is what they let pass.

    >>> gate = GateModule(8, heads=2, size=3, per="element")
    >>> gates = gate(torch.zeros(1, 5, 8))
    >>> gates.shape, gates.mean().item(), sum(p.numel() for p in gate.parameters())
    (torch.Size([1, 2, 5, 3]), 0.5, 48)
    """

    def __init__(
        self,
        width: int,
        heads: int,
        size: int,
        per: Per = "head",
        *,
        shared: bool = False,
        from_input: bool = True,
        score: Score = "sigmoid",
    ) -> None:
        super().__init__()
        if per not in ("head", "element"):
            raise LocaterError(f"per={per!r}: choose head or element")
        if score not in ("sigmoid", "ns_sigmoid"):
            raise LocaterError(f"score={score!r}: choose sigmoid or ns_sigmoid")
        if shared and per == "head":
            raise LocaterError("shared gates are a mean of element-wise ones: per='element'")
        self.heads, self.score, self.shared, self.size = heads, score, shared, 1 if per == "head" else size
        self.weight = nn.Parameter(
            torch.zeros(heads * self.size, width) if from_input else torch.zeros(heads, self.size)
        )
        self.from_input = from_input
        if from_input:
            nn.init.normal_(self.weight, std=0.02)

    def logits(self, x: Tensor) -> Tensor:
        """x W_g (B, heads, T, 1 or size)."""
        if not self.from_input:
            return self.weight[None, :, None]
        if x.ndim != 3 or x.shape[2] != self.weight.shape[1]:
            raise LocaterError(
                f"x has shape {list(x.shape)}; "
                f"a gate is made of the layer's input (batch, tokens, {self.weight.shape[1]})"
            )
        return nn.functional.linear(x, self.weight).unflatten(-1, (self.heads, self.size)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.logits(x).sigmoid()
        if self.shared:
            out = out.mean(1, keepdim=True).expand(-1, self.heads, -1, -1)
        return out if self.score == "sigmoid" else 0.5 + 0.5 * out
