"""Relevance of every token for every other, carried through the attention layers of one or several streams.

Rules of Chefer, Gur and Wolf 2021; numbers in brackets are those of their equations. A map Abar (T_s, T_q) says how
much each query of stream s takes from each key of stream q. R_sq (T_s, T_q) is the relevance of the tokens of q for
those of s. At the start R_ss is the identity and R_sq is zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor


class RelevanceMatrices:
    """The matrices R, by (stream of the reader, stream of what is read).

    >>> R = RelevanceMatrices({"text": 2})
    >>> R.self_attention("text", torch.tensor([[0.5, 0.5], [0.0, 1.0]]))
    >>> R["text", "text"].tolist()
    [[1.5, 0.5], [0.0, 2.0]]
    """

    def __init__(self, sizes: Mapping[str, int], like: Tensor | None = None) -> None:
        like = torch.zeros(()) if like is None else like
        self.sizes = dict(sizes)
        self._matrices = {(s, s): torch.eye(size).to(like) for s, size in sizes.items()}

    def __getitem__(self, pair: tuple[str, str]) -> Float[Tensor, "Q T"]:
        if pair in self._matrices:
            return self._matrices[pair]
        like = next(iter(self._matrices.values()))
        return like.new_zeros(self.sizes[pair[0]], self.sizes[pair[1]])

    def knows(self, reader: str, read: str) -> bool:
        """Whether anything of `read` has reached `reader`."""
        return (reader, read) in self._matrices

    def self_attention(self, s: str, Abar: Float[Tensor, "T T"]) -> None:
        """R_ss += Abar R_ss (6), R_sq += Abar R_sq (7)."""
        for pair, R in self._matrices.items():
            if pair[0] == s:
                self._matrices[pair] = R + Abar @ R

    def cross_attention(self, *steps: tuple[str, str, Float[Tensor, "Q T"]]) -> None:
        """Steps (s, q, Abar_sq) at once: R_sq += Rbar_ss^T Abar_sq Rbar_qq (10), R_ss += Abar_sq R_qs (11)."""
        added = []
        for s, q, Abar in steps:
            carried = normalized(self[s, s]).mT @ Abar @ normalized(self[q, q])
            added.append(((s, q), carried))
            if self.knows(q, s):
                added.append(((s, s), Abar @ self[q, s]))
        for pair, addition in added:
            self._matrices[pair] = self[pair] + addition


def normalized(R: Float[Tensor, "T T"]) -> Float[Tensor, "T T"]:
    """Rbar (8, 9): R - I with rows scaled to sum to 1, plus I. A row of zeros stays zero, where the quotient is 0 / 0.

    >>> normalized(torch.tensor([[2.0, 3.0], [0.0, 1.0]])).tolist()
    [[1.25, 0.75], [0.0, 1.0]]
    """
    eye = torch.eye(len(R), dtype=R.dtype, device=R.device)
    moved = R - eye
    sums = moved.sum(-1, keepdim=True)
    return torch.where(sums == 0, torch.zeros_like(moved), moved / torch.where(sums == 0, 1.0, sums)) + eye
