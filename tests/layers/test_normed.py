"""Maps with a norm inside: exact when called, and one matrix, in mean field, for whoever wants one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from locater.layers import Norm, Projection
from locater.layers.projection_with_norm import normed

WIDTH, RANK, HEADS = 12, 6, 3


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def linear(rows: int, columns: int, seed: int, biased: bool = False) -> Projection:
    weight = drawn(rows, columns, seed=seed).requires_grad_()
    return Projection(lambda: weight, (rows, columns), drawn(rows, seed=seed + 100) if biased else None)


def unit_tokens(kind: str) -> Tensor:
    """Mean 0, covariance I (off the mean direction for LayerNorm): a basis and its mirror image."""
    z = WIDTH**0.5 * torch.eye(WIDTH, dtype=torch.float64)
    z = z - z.mean(-1, keepdim=True) if kind == "layer" else z
    return torch.cat([z, -z])


@pytest.mark.parametrize("before", ["rms", "layer", "none"])
@pytest.mark.parametrize("inside", ["rms", "layer"])
@pytest.mark.parametrize("blocks", [1, HEADS])
@pytest.mark.parametrize("biased", [False, True])
def test_the_matrix_replaces_each_tokens_root_mean_square_by_that_of_unit_tokens(
    before: str, inside: str, blocks: int, biased: bool
) -> None:
    front = Norm(before, drawn(WIDTH, seed=1), drawn(WIDTH, seed=2) if biased else None)
    down, gain = linear(RANK, WIDTH, 3, biased), drawn(blocks, RANK // blocks, seed=4)
    whole = normed(down, Norm(inside, gain), front, blocks=blocks)
    y = front.affine(unit_tokens(before))  # what reaches the map
    latent = down(y).unflatten(-1, (blocks, -1))
    latent = latent - latent.mean(-1, keepdim=True) if inside == "layer" else latent
    typical = latent.square().mean((0, -1), keepdim=True).sqrt()
    matrix = torch.nn.functional.linear(y, whole.weight(), whole.bias)
    torch.testing.assert_close(matrix, (gain * latent / typical).flatten(-2))
    own = latent.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(whole(y), (gain * latent / own).flatten(-2))


@pytest.mark.parametrize("biased", [False, True])
def test_shared_channels_stand_in_front_of_each_head(biased: bool) -> None:
    down, up, shared = linear(RANK, WIDTH, 1, biased), linear(HEADS * 4, RANK, 2, biased), linear(2, WIDTH, 3, biased)
    whole = normed(down, Norm("rms", drawn(RANK, seed=4)), Norm("rms"), up=up, shared=shared, heads=HEADS)
    x = drawn(5, WIDTH, seed=5)
    for y in (whole(x), torch.nn.functional.linear(x, whole.weight(), whole.bias)):
        heads = y.unflatten(-1, (HEADS, 6))
        torch.testing.assert_close(heads[..., :2], shared(x)[:, None].expand(-1, HEADS, -1))
    assert whole.shape == tuple(whole.weight().shape) == (HEADS * 6, WIDTH)


def test_gradients_reach_every_matrix() -> None:
    down, up = linear(RANK, WIDTH, 1), linear(8, RANK, 2)
    normed(down, Norm("rms"), Norm("rms"), up=up).weight().square().sum().backward()
    for part in (down, up):
        assert part.weight().grad is not None
        assert part.weight().grad.abs().sum() > 0
