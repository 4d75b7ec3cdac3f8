"""A stack of attention layers as a sum over paths, and how long the paths are (Dong, Cordonnier, Loukas 2021).

With its attention maps fixed, a layer is linear: X -> sum_h P_h X W_h. A stack of L layers is then a sum with one term
for each choice of a head in every layer:

    X_L = sum over (h_1 ... h_L) of  P_{h_L} ... P_{h_1}  X  W_{h_1} ... W_{h_L}

A skip counts as one more head with P = 1 and W = 1. The length of a path is the number of layers in which it goes
through attention and not through the skip. Biases would add 1 b^T, the same for all tokens, because rows of P sum to
one. docs/theory.md section 10.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from locater.brief import brief
from locater.errors import LocaterError
from locater.measures import composite_norm
from locater_lab.theory.collapse import FunctionalBlock

# --- the sum ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FrozenLayer:
    """X -> sum_h P_h X W_h (+ X if skip), with fixed attention maps P_h."""

    attention: Float[Tensor, "heads queries keys"]
    value: Float[Tensor, "heads width out"]  # W_V W_O of every head
    skip: bool = False

    __repr__ = brief


@dataclass(frozen=True)
class Path:
    """One term of the sum, P X W. `heads` is the head taken in each layer, None where the path takes the skip."""

    heads: tuple[int | None, ...]
    attention: Float[Tensor, "queries keys"]
    value: Float[Tensor, "width out"]

    __repr__ = brief

    @property
    def length(self) -> int:
        """The number of layers in which the path goes through attention."""
        return sum(head is not None for head in self.heads)

    def __call__(self, x: Float[Tensor, "keys width"]) -> Float[Tensor, "queries out"]:
        """The term itself, in float64."""
        return self.attention @ x.double() @ self.value


def frozen_layers(x: Float[Tensor, "tokens width"], blocks: Sequence[FunctionalBlock]) -> list[FrozenLayer]:
    """The blocks as linear layers, with the attention maps that they have on these tokens.

    Blocks with an MLP or norms are refused: they are not linear even with fixed attention.

    >>> block = FunctionalBlock(torch.zeros(1, 2, 2), torch.eye(2)[None], scale=1.0, skip=True)
    >>> frozen_layers(torch.eye(2), [block])[0].attention.tolist()
    [[[0.5, 0.5], [0.5, 0.5]]]
    """
    layers = []
    for index, block in enumerate(blocks):
        if block.mlp is not None or block.norm:
            raise LocaterError(f"block {index} has an MLP or norms: only attention and skips decompose into paths")
        layers.append(FrozenLayer(block.attention(x), block.W_VO.double(), block.skip))
        x = block(x)
    return layers


def apply_layers(x: Float[Tensor, "tokens width"], layers: Sequence[FrozenLayer]) -> Float[Tensor, "tokens out"]:
    """The tokens after all layers, applied one after the other. The sum over all paths equals this.

    >>> half = torch.full((1, 2, 2), 0.5)
    >>> apply_layers(torch.tensor([[1.0], [3.0]]), [FrozenLayer(half, torch.ones(1, 1, 1), skip=True)]).tolist()
    [[3.0], [5.0]]
    """
    x = x.double()
    for layer in layers:
        x = _through_heads(x, layer) + (x if layer.skip else 0)
    return x


def all_paths(layers: Sequence[FrozenLayer]) -> Iterator[Path]:
    """Every path, H^L of them, (H + 1)^L with skips, in the order of `itertools.product` with the skip last.

    >>> layer = FrozenLayer(torch.ones(2, 1, 1), torch.ones(2, 1, 1), skip=True)
    >>> [path.heads for path in all_paths([layer] * 2)][:4]
    [(0, 0), (0, 1), (0, None), (1, 0)]
    """
    choices = [[*range(len(layer.attention)), *([None] if layer.skip else [])] for layer in layers]
    for heads in itertools.product(*choices):
        yield _path(heads, layers)


def path_sum(x: Float[Tensor, "tokens width"], layers: Sequence[FrozenLayer]) -> Float[Tensor, "tokens out"]:
    """The sum over all paths, one by one: equal to `apply_layers` up to rounding, in exponential time.

    >>> layer = FrozenLayer(torch.full((2, 2, 2), 0.5), torch.ones(2, 1, 1), skip=True)
    >>> path_sum(torch.tensor([[1.0], [3.0]]), [layer] * 3).tolist()     # 27 paths; each head gives half of the sum
    [[53.0], [55.0]]
    """
    terms = [path(x) for path in all_paths(layers)]
    return torch.stack(terms).sum(0)


def terms_by_length(
    x: Float[Tensor, "tokens width"], layers: Sequence[FrozenLayer]
) -> Float[Tensor, "lengths tokens width"]:
    """The sum over the paths of each length 0 ... L. It applies L^2 layers instead of following (H + 1)^L paths.

    >>> layer = FrozenLayer(torch.full((1, 2, 2), 0.5), torch.ones(1, 1, 1), skip=True)
    >>> terms_by_length(torch.tensor([[1.0], [3.0]]), [layer] * 2)[..., 0].tolist()          # 1 path, 2 and 1
    [[1.0, 3.0], [4.0, 4.0], [2.0, 2.0]]
    """
    x = x.double()
    terms = torch.stack([x, *[torch.zeros_like(x)] * len(layers)])
    for layer in layers:
        longer = torch.stack([_through_heads(term, layer) for term in terms[:-1]])
        terms = torch.cat([torch.zeros_like(x)[None], longer]) + (terms if layer.skip else 0)
    return terms


def _through_heads(x: Float[Tensor, "keys width"], layer: FrozenLayer) -> Float[Tensor, "queries out"]:
    return (layer.attention.double() @ x @ layer.value.double()).sum(0)


def _path(heads: tuple[int | None, ...], layers: Sequence[FrozenLayer]) -> Path:
    first = layers[0]
    attention, value = (
        torch.eye(side, dtype=torch.float64) for side in (first.attention.shape[-1], first.value.shape[-2])
    )
    for head, layer in zip(heads, layers, strict=True):
        if head is not None:
            attention, value = layer.attention[head].double() @ attention, value @ layer.value[head].double()
    return Path(heads, attention, value)


# --- how long paths are -----------------------------------------------------------------------------------------------


def path_counts(depth: int, heads: int) -> list[int]:
    """The number of paths of each length k = 0 ... L through L layers of H heads with skips: C(L, k) H^k, exactly.

    They add up to (1 + H)^L.

    >>> path_counts(3, 2)
    [1, 6, 12, 8]
    """
    return [math.comb(depth, k) * heads**k for k in range(depth + 1)]


def path_lengths(depth: int, heads: int, log: bool = False) -> Float[Tensor, " lengths"]:
    """The share of paths of each length 0 ... L: binomial, L trials with probability H / (1 + H), mean L H / (1 + H).

    Shares are quotients of exact integers, so each is correctly rounded. `log` returns logarithms from the gamma
    function instead: finite where shares underflow, without large integers, accurate to about 1e-15 L log L.

    >>> path_lengths(12, 12)[-2:].round(decimals=4).tolist()
    [0.3827, 0.3827]
    """
    if log:
        k = torch.arange(depth + 1, dtype=torch.float64)
        rest = depth - k
        ways = math.lgamma(depth + 1) - torch.lgamma(k + 1) - torch.lgamma(rest + 1)
        return ways - k * math.log1p(1 / heads) - rest * math.log1p(heads)
    total = (1 + heads) ** depth
    return torch.tensor([count / total for count in path_counts(depth, heads)], dtype=torch.float64)


def skip_weight(
    x: Float[Tensor, "*n tokens width"], attention: Float[Tensor, "*n tokens width"]
) -> Float[Tensor, "*n"]:
    """alpha = N(x) / (N(x) + N(attention)): the share of the stream in x + attention, with N = ||.||_1 ||.||_inf.

    >>> skip_weight(torch.full((2, 2), 3.0), torch.ones(2, 2)).item()
    0.9
    """
    stream, added = composite_norm(x).square(), composite_norm(attention).square()
    return stream / (stream + added)


def length_weights(skip: Float[Tensor, " layers"], log: bool = False) -> Float[Tensor, " lengths"]:
    """The total weight of the paths of each length 0 ... L, if layer l is skipped with weight alpha_l.

        weight_k = sum over sets V of k layers of  prod_{l in V} (1 - alpha_l)  prod_{l not in V} alpha_l

    The weights add up to one over k. alpha = 1 / (1 + H) in every layer gives `path_lengths`. `log` returns logarithms,
    which stay finite where weights underflow.

    >>> length_weights(torch.tensor([0.9, 0.5])).round(decimals=6).tolist()
    [0.45, 0.5, 0.05]
    """
    alpha = skip.double()
    none = torch.full((1,), -math.inf, dtype=torch.float64, device=alpha.device)
    weights = torch.zeros(1, dtype=torch.float64, device=alpha.device)  # logarithms, by length
    for skipped, attended in zip(alpha.log(), torch.log1p(-alpha), strict=True):
        weights = torch.logaddexp(torch.cat([weights, none]) + skipped, torch.cat([none, weights]) + attended)
    return weights if log else weights.exp()


def length_contributions(skip: Float[Tensor, " layers"], residual: float, rate: float) -> Float[Tensor, " lengths"]:
    """The predicted contribution of paths of length k to the residual: their weight times R_0 / c^(3^k - 1).

    c > 1 is `rate`, the factor by which a layer contracts the residual R_0.

    >>> contributions = length_contributions(torch.tensor([0.5, 0.5]), residual=8.0, rate=2.0)
    >>> contributions.round(decimals=7).tolist()     # 8, 8 / 4 and 8 / 256, times their weights 1/4, 1/2 and 1/4
    [2.0, 1.0, 0.0078125]
    """
    power = 3.0 ** torch.arange(len(skip) + 1, dtype=torch.float64, device=skip.device) - 1
    return (length_weights(skip, log=True) + math.log(residual) - power * math.log(rate)).exp()
