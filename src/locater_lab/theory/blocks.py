"""A transformer block as a function on tokens: attention, skips, MLP, norms; and a stack of such blocks.

Tokens are the rows of X. Head h maps X to P_h X W_h, with P_h = softmax(s X Q_h X^T), Q = W_Q W_K^T and W = W_V W_O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from locater.brief import brief

NORM_EPS = 1e-12  # the value of BERT; LayerNorm maps a token whose channels are all equal to 0


@dataclass(frozen=True)
class Block:
    """Attention, then an optional MLP, each with an optional skip and LayerNorm. Weights act from the right.

        Y = sum_h P_h X W_VO,h  (+ X if skip)          then LayerNorm if norm
        Z = mlp(Y)              (+ Y if mlp_skip)      then LayerNorm if norm

    The norms have no gain. `scale` is usually 1 / sqrt(d_head).

    >>> uniform = Block(torch.zeros(1, 2, 2), torch.eye(2)[None], scale=1.0)
    >>> uniform(torch.tensor([[0.0, 2.0], [4.0, 0.0]])).tolist()
    [[2.0, 1.0], [2.0, 1.0]]
    """

    W_QK: Float[Tensor, "heads width width"]
    W_VO: Float[Tensor, "heads width width"]
    scale: float
    skip: bool = False
    mlp: Callable[[Tensor], Tensor] | None = None
    mlp_skip: bool = False
    norm: bool = False
    causal: bool = False

    __repr__ = brief

    def attention(self, x: Float[Tensor, "tokens width"]) -> Float[Tensor, "heads tokens tokens"]:
        """The attention maps P_h of all heads, in float64."""
        x = x.double()
        logits = self.scale * (x @ self.W_QK.double() @ x.mT)
        if self.causal:
            later = torch.ones_like(logits[0], dtype=torch.bool).triu(1)
            logits = logits.masked_fill(later, -torch.inf)
        return logits.softmax(-1)

    def __call__(self, x: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width"]:
        """The tokens after this block, in float64."""
        x = x.double()
        y = (self.attention(x) @ x @ self.W_VO.double()).sum(0)
        y = self._normed(y + x if self.skip else y)
        if self.mlp is None:
            return y
        z = self.mlp(y)
        return self._normed(z + y if self.mlp_skip else z)

    def _normed(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=NORM_EPS) if self.norm else x


def hidden_states(x: Float[Tensor, "tokens width"], blocks: Sequence[Block]) -> Float[Tensor, "states tokens width"]:
    """The tokens before the first block and after each block.

    >>> half = Block(torch.zeros(1, 1, 1), torch.full((1, 1, 1), 0.5), scale=1.0)          # half of the mean
    >>> hidden_states(torch.tensor([[1.0], [3.0]]), [half, half])[..., 0].tolist()
    [[1.0, 3.0], [1.0, 1.0], [0.5, 0.5]]
    """
    states = [x.double()]
    for block in blocks:
        states.append(block(states[-1]))
    return torch.stack(states)
