"""Change a head's query or key map in place, whatever its layout: fused, interleaved, transposed, grouped, sharded.

`projection.weight()` is a selection of parameter entries, W = J theta with one 1 in each row of J. So J^T applied to
the wanted W, a vector-Jacobian product, puts each of its entries where it belongs, and J^T applied to ones says which
entries those are. What was written is read again; a map that is more than a selection (an adapter, a parametrization)
is put back and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.families import Projection

Read = Callable[[], Projection]  # reads a projection anew: its bias is what it was when it was read


def rewrite(model: nn.Module, name: str, read: Read, weight: Tensor | None = None, bias: Tensor | None = None) -> None:
    """Set the weight (out, in) and the bias (out,) of the projection that `read()` gives; None leaves one as it is.

    >>> layer = nn.Linear(2, 2)
    >>> rewrite(layer, "layer", lambda: Projection(lambda: layer.weight.flip(0), (2, 2)), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> layer.weight.tolist()
    [[3.0, 4.0], [1.0, 2.0]]
    """
    for wanted, part in ((weight, _weight), (bias, _bias)):
        if wanted is not None:
            _write(model, name, lambda part=part: part(read()), wanted)  # type: ignore[misc]


def check_writable(model: nn.Module, name: str, projection: Projection) -> None:
    """Refuse a projection whose weight `rewrite` would refuse; changes nothing."""
    rewrite(model, name, lambda: projection, projection.weight().detach().clone())


def _write(model: nn.Module, name: str, read: Callable[[], Tensor], wanted: Tensor) -> None:
    leaves = [leaf for leaf in model.parameters() if leaf.is_floating_point()]
    with _differentiable(leaves):
        held = read()
        wanted = wanted.detach().to(held)
        if not held.requires_grad:
            raise LocaterError(
                f"{name}: its query and key maps hold no parameter of the model, so there is nothing to write to"
            )
        placed = torch.autograd.grad(held, leaves, wanted, allow_unused=True, retain_graph=True)
        chosen = torch.autograd.grad(held, leaves, torch.ones_like(held), allow_unused=True)
    moved = [
        (leaf, leaf.detach().clone(), x, at)
        for leaf, x, at in zip(leaves, placed, chosen, strict=True)
        if x is not None
    ]
    with torch.no_grad():
        for leaf, before, x, at in moved:
            leaf.copy_(torch.where(at != 0, x.to(leaf.dtype), before))
        if torch.equal(read(), wanted):
            return
        for leaf, before, _, _ in moved:
            leaf.copy_(before)
    raise LocaterError(
        f"{name}: its query and key maps are more than stored parameters (an adapter or a parametrization is on them): take it off first"
    )


@contextmanager
def _differentiable(leaves: list[nn.Parameter]) -> Iterator[None]:
    """Frozen parameters count as trained, and gradients are on, for a while."""
    frozen = [leaf for leaf in leaves if not leaf.requires_grad]
    for leaf in frozen:
        leaf.requires_grad_(True)
    try:
        with torch.enable_grad():
            yield
    finally:
        for leaf in frozen:
            leaf.requires_grad_(False)


def _weight(projection: Projection) -> Tensor:
    return projection.weight()


def _bias(projection: Projection) -> Tensor:
    assert projection.bias is not None
    return projection.bias
