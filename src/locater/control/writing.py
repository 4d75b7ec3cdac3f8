"""Change a head's query or key map in place, whatever its layout: fused, interleaved, transposed, grouped, sharded.

`projection.weight()` is a selection of parameter entries, W = J theta with one 1 in each row of J. So J^T applied to
the new W, a vector-Jacobian product, puts each of its entries where it belongs, and J^T applied to ones marks these
entries. The result is read back. A map that is more than a selection (an adapter, a parametrization) does not come
back as it was written: then the parameters are restored and the map is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.layers import Projection
from locater.torch_private import is_copied_to_train

Read = Callable[[], Projection]  # re-reads a projection, since its bias is read together with it


def rewrite(model: nn.Module, name: str, read: Read, weight: Tensor | None = None, bias: Tensor | None = None) -> None:
    """Set the weight (out, in) and the bias (out,) of the projection that `read()` gives; None leaves one as it is.

    >>> layer = nn.Linear(2, 2)
    >>> def read():
    ...     return Projection(lambda: layer.weight.flip(0), (2, 2))
    >>> rewrite(layer, "layer", read, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> layer.weight.tolist()
    [[3.0, 4.0], [1.0, 2.0]]
    """
    for new, part in ((weight, _weight), (bias, _bias)):
        if new is not None:
            _write(model, name, lambda part=part: part(read()), new)  # type: ignore[misc]


def check_weights_writable(model: nn.Module, name: str, projection: Projection) -> None:
    """Refuse a projection whose weight `rewrite` would refuse, without writing: if a weight is a selection of parameter
    entries, writing it unchanged would change none of them.
    """
    with _differentiable(_leaves(model)):
        current = projection.weight()
        for leaf, new in _parameters_behind(model, name, current, current.detach()):
            if not torch.equal(new, leaf):
                raise _refusal(name)


def _write(model: nn.Module, name: str, read: Callable[[], Tensor], new: Tensor) -> None:
    with _differentiable(_leaves(model)):
        current = read()
        new = new.detach().to(current)
        changed = [
            (leaf, leaf.detach().clone(), after) for leaf, after in _parameters_behind(model, name, current, new)
        ]
    with torch.no_grad():
        for leaf, _, after in changed:
            leaf.copy_(after)
        if torch.equal(read(), new):
            return
        for leaf, before, _ in changed:
            leaf.copy_(before)
    raise _refusal(name)


def _parameters_behind(model: nn.Module, name: str, current: Tensor, new: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
    """The parameters behind a map, each with the value that makes the map `new`."""
    if not current.requires_grad:
        raise LocaterError(
            f"{name}: no parameter of the model is behind its query and key maps, so nothing can be written"
        )
    leaves = _leaves(model)
    if any(is_copied_to_train(leaf) for leaf in leaves):
        raise LocaterError(
            f"{name}: DeepSpeed trains a copy of the parameters and writes it back at each step, which would undo a "
            "change of the query and key maps: make it before deepspeed.initialize(), or take LocAteR, whose penalty "
            "is added to the loss"
        )
    placed = torch.autograd.grad(current, leaves, new, allow_unused=True, retain_graph=True)
    marked = torch.autograd.grad(current, leaves, torch.ones_like(current), allow_unused=True)
    return [
        (leaf, torch.where(mark != 0, values.to(leaf.dtype), leaf.detach()))
        for leaf, values, mark in zip(leaves, placed, marked, strict=True)
        if values is not None and mark is not None
    ]


def _leaves(model: nn.Module) -> list[nn.Parameter]:
    return [leaf for leaf in model.parameters() if leaf.is_floating_point()]


def _refusal(name: str) -> LocaterError:
    return LocaterError(
        f"{name}: its query and key maps are more than stored parameters "
        "(they have an adapter or a parametrization): remove it first"
    )


@contextmanager
def _differentiable(leaves: list[nn.Parameter]) -> Iterator[None]:
    """Inside, gradients are on and frozen parameters have them too."""
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
