"""Which norm a module of an unknown model is: fit_norm to one input and output of it."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor, nn

from locater.discovery.tape import ModuleResult, Node, Tape, replay
from locater.layers.map_layouts import NormLayout
from locater.layers.norm import Norm, NormKind
from locater.sources.weights import WRAPPERS

CLOSE = 1e-6  # of the output's standard deviation; many norms compute in float32 inside a float64 model
GAINS, BIASES = ("weight", "scale", "gamma", "g"), ("bias", "beta", "b")
SIZES = (1e-3, 1e3)  # of inputs, beside the example's own
USUAL_EPS = (1e-6, 1e-5, 1e-12, 0.0)


def may_be_norm(tape: Tape, node: Node) -> bool:
    """Whether a module made this value that has no matrix and keeps the shape of its input."""
    made = tape.made.get(node)
    if made is None or made.source is node or made.source.value.shape != node.value.shape:
        return False
    named = "norm" in type(made.module).__name__.lower()
    return named and not any(p.squeeze().ndim > 1 for p in made.module.parameters())


def fit_norm(made: ModuleResult, x: Tensor, y: Tensor, node: Node) -> NormLayout | None:
    """The norm with norm(x) = y, from the tensors of its module; None where no formula fits, also to inputs that are
    much smaller or larger. `node` is what the module returned.
    """
    gain, bias = _tensor(made.module, GAINS), _tensor(made.module, BIASES)
    kinds: tuple[NormKind, ...] = ("layer", "rms")
    best, layout, norm = CLOSE, None, Norm()
    offsets = (0.0, 1.0) if gain else (0.0,)
    for kind, eps, offset in product(kinds, _eps(made.module), offsets):
        factor = None if gain is None else getattr(made.module, gain) + offset
        shift = None if bias is None else getattr(made.module, bias)
        error = relative_difference(Norm(kind, factor, shift, eps)(x), y)
        if error < best * (0.5 if layout else 1):
            best = error
            layout = NormLayout(kind, _path(made, gain), offset, _path(made, bias), eps)
            norm = Norm(kind, factor, shift, eps)
    for size in SIZES if layout is not None else ():
        given = size * made.source.value
        if relative_difference(norm(given), replay(node, {made.source: given})) > 10 * CLOSE:
            return None
    return layout


def relative_difference(ours: Tensor, theirs: Tensor, where: Tensor | None = None) -> float:
    """Largest difference, in standard deviations of `theirs`; infinite where shapes differ."""
    if ours.shape != theirs.shape or not theirs.numel():
        return float("inf")
    if where is not None:
        where = where.expand(theirs.shape)
        ours, theirs = ours[where], theirs[where]
    ours, theirs = ours.double(), theirs.double()
    error = float((ours - theirs).abs().max() / theirs.std().clamp_min(1e-30)) if theirs.numel() > 1 else float("inf")
    return error if torch.isfinite(theirs).all() and error == error else float("inf")


def _tensor(module: nn.Module, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if isinstance(getattr(module, name, None), Tensor)), None)


def _path(made: ModuleResult, name: str | None) -> str | None:
    return None if name is None else unwrapped_path(f"{made.path}.{name}" if made.path else name)


def _eps(module: nn.Module) -> list[float]:
    own = [x for name, x in vars(module).items() if "eps" in name and isinstance(x, float)]
    return list(dict.fromkeys([*own, *USUAL_EPS]))


def unwrapped_path(path: str) -> str:
    """A path of a module or a tensor without the names of wrappers."""
    return WRAPPERS.sub("", f"{path}.").removesuffix(".")
