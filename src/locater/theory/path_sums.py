"""A stack of attention layers as a sum over paths, and how long the paths are (Dong, Cordonnier, Loukas 2021).

With attention held fixed a layer is linear, X -> sum_h P_h X W_h, so L of them are a sum of one term per choice of a
head in every layer:

    X_L = sum over (h_1 ... h_L) of  P_{h_L} ... P_{h_1}  X  W_{h_1} ... W_{h_L}

A skip is one more head with P = 1 and W = 1. The length of a path is the number of layers in which it does not take the
skip. Biases would add 1 b^T, the same for all tokens, since rows of P sum to one. docs/theory.md section 10.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from locater.errors import LocaterError
from locater.measures import composite_norm
from locater.theory.blocks import Block

# --- the sum ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FrozenLayer:
    """X -> sum_h P_h X W_h (+ X if skip), P given."""

    attention: Float[Tensor, "heads queries keys"]
    value: Float[Tensor, "heads width out"]  # W_V W_O of every head
    skip: bool = False


@dataclass(frozen=True)
class Path:
    """One term of the sum: P X W. `heads` has a head per layer, None where the path takes the skip."""

    heads: tuple[int | None, ...]
    attention: Float[Tensor, "queries keys"]
    value: Float[Tensor, "width out"]

    @property
    def length(self) -> int:
        """In how many layers it goes through attention."""
        return sum(head is not None for head in self.heads)

    def __call__(self, x: Float[Tensor, "keys width"]) -> Float[Tensor, "queries out"]:
        """The term itself, in float64."""
        return self.attention @ x.double() @ self.value


def frozen_layers(x: Float[Tensor, "tokens width"], blocks: Sequence[Block]) -> list[FrozenLayer]:
    """The layers that blocks are on these tokens, attention held at what it is there. Blocks with an MLP or norms are
    not linear even so.

    >>> block = Block(torch.zeros(1, 2, 2), torch.eye(2)[None], scale=1.0, skip=True)
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
    """Layer by layer: what the sum over paths must equal.

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
    """All paths added up, one by one: `apply_layers` up to rounding, in exponential time.

    >>> layer = FrozenLayer(torch.full((2, 2, 2), 0.5), torch.ones(2, 1, 1), skip=True)
    >>> path_sum(torch.tensor([[1.0], [3.0]]), [layer] * 3).tolist()          # 27 paths; two heads of half of the sum each
    [[53.0], [55.0]]
    """
    terms = [path(x) for path in all_paths(layers)]
    return torch.stack(terms).sum(0)


def terms_by_length(
    x: Float[Tensor, "tokens width"], layers: Sequence[FrozenLayer]
) -> Float[Tensor, "lengths tokens width"]:
    """What paths of every length 0 ... L add up to. Paths of one length share their way: L^2 layers are applied, not (H
    + 1)^L.

    >>> layer = FrozenLayer(torch.full((1, 2, 2), 0.5), torch.ones(1, 1, 1), skip=True)
    >>> terms_by_length(torch.tensor([[1.0], [3.0]]), [layer] * 2)[..., 0].tolist()          # 1 path, 2 and 1
    [[1.0, 3.0], [4.0, 4.0], [2.0, 2.0]]
    """
    x = x.double()
    found = torch.stack([x, *[torch.zeros_like(x)] * len(layers)])
    for layer in layers:
        longer = torch.stack([_through_heads(term, layer) for term in found[:-1]])
        found = torch.cat([torch.zeros_like(x)[None], longer]) + (found if layer.skip else 0)
    return found


def _through_heads(x: Tensor, layer: FrozenLayer) -> Tensor:
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
    """Paths of length 0 ... L through L layers of H heads with skips, as integers: C(L, k) H^k. They add up to (1 +
    H)^L.

    >>> path_counts(3, 2)
    [1, 6, 12, 8]
    """
    return [math.comb(depth, k) * heads**k for k in range(depth + 1)]


def path_lengths(depth: int, heads: int, log: bool = False) -> Float[Tensor, " lengths"]:
    """The share of paths that have length 0 ... L: binomial, L tries with chance H / (1 + H), so the mean is L H / (1 +
    H).

    Integers are divided at the end, so every share is correctly rounded at any size. `log` gives logarithms from the
    gamma function, finite where shares underflow and without large integers, to about 1e-15 of L log L.

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
    """alpha = N(x) / (N(x) + N(attention)), the share of the stream in x + attention; N = ||.||_1 ||.||_inf, without
    the root.

    >>> skip_weight(torch.full((2, 2), 3.0), torch.ones(2, 2)).item()
    0.9
    """
    stream, added = composite_norm(x).square(), composite_norm(attention).square()
    return stream / (stream + added)


def length_weights(skip: Float[Tensor, " layers"], log: bool = False) -> Float[Tensor, " lengths"]:
    """Weight of all paths of length 0 ... L if layer l is skipped with weight alpha_l: the sum over sets of k layers V
    of

        prod_{l in V} (1 - alpha_l)  prod_{l not in V} alpha_l

    which adds up to one over k. alpha = 1 / (1 + H) in every layer gives `path_lengths`. `log` stays finite where
    weights underflow.

    >>> length_weights(torch.tensor([0.9, 0.5])).round(decimals=6).tolist()
    [0.45, 0.5, 0.05]
    """
    alpha = skip.double()
    none = torch.full((1,), -math.inf, dtype=torch.float64, device=alpha.device)
    found = torch.zeros(1, dtype=torch.float64, device=alpha.device)
    for stay, go in zip(alpha.log(), torch.log1p(-alpha), strict=True):
        found = torch.logaddexp(torch.cat([found, none]) + stay, torch.cat([none, found]) + go)
    return found if log else found.exp()


def length_contributions(skip: Float[Tensor, " layers"], residual: float, rate: float) -> Float[Tensor, " lengths"]:
    """What paths of length k are predicted to add to the residual: R_0 / c^(3^k - 1) times their weight, c > 1 the
    contraction.

    >>> length_contributions(torch.tensor([0.5, 0.5]), residual=8.0, rate=2.0).round(decimals=7).tolist()          # 8, 8 / 4, 8 / 256
    [2.0, 1.0, 0.0078125]
    """
    power = 3.0 ** torch.arange(len(skip) + 1, dtype=torch.float64, device=skip.device) - 1
    return (length_weights(skip, log=True) + math.log(residual) - power * math.log(rate)).exp()
