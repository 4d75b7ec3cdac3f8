"""sigma-Reparam (Zhai et al., ICML 2023): every linear map as its direction times a learned spectral norm.

    W_hat = gamma W / sigma(W)        sigma = v^T W u        v = W u / |W u|,  u = W^T v / |W^T v|

u and v make one step of power iteration per training pass. Gradients flow through sigma but not through u and v, so
they are orthogonal to W: scaling W changes nothing.
"""

from __future__ import annotations

import copy
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from locater.calls.patching import CONTROL
from locater.control.base import Control, Layers, layers_numbered
from locater.discovery import layers_of
from locater.discovery.replayed_maps import Recorder
from locater.errors import LocaterError
from locater.layers import AttentionLayer
from locater.numerics import is_number, upcast
from locater.observing.residual_stream import stream_points
from locater.sources.live_tensors import LiveTensor, is_a, stored_map
from locater.sources.open_source import config_of
from locater.torch_private import is_partitioned, own_parameters

Only = Literal["linear", "query-key"]


class SigmaReparam(Control):
    """sigma-Reparam on every linear map of the blocks of the chosen attention layers, or on query and key maps alone
    with only="query-key".

    gamma="spectral" starts each gamma at the map's own norm, so that attaching does not change outputs (Apple's PyTorch
    release); a number starts all of them there (the paper: 1.0). Attach before the optimizer is made, so that it gets
    the gammas, and before torch.compile. A fused map has one gamma; experts stored as one tensor are left as they are.
    `detach` leaves the reparametrized weights: outputs stay the same, and parameters get their old names back. A copy
    of the model carries it, gammas included; pickling is refused.

    Gammas are parameters of the model while it is attached, and part of its `state_dict`: `parameters()` is empty.

    >>> block = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    >>> model = nn.TransformerEncoder(block, 1, enable_nested_tensor=False)
    >>> control = SigmaReparam(gamma=1.0).attach(model)
    >>> round(float(torch.linalg.matrix_norm(model.layers[0].linear1.weight, 2).detach()), 4), len(control.parts)
    (1.0, 4)
    >>> control.detach()
    """

    def __init__(
        self, layers: Layers = None, gamma: Literal["spectral"] | float = "spectral", only: Only = "linear"
    ) -> None:
        if gamma != "spectral" and not is_number(gamma):
            raise LocaterError(f"gamma={gamma!r}: must be a number, or spectral")
        if only not in ("linear", "query-key"):
            raise LocaterError(f"only={only!r}: choose linear or query-key")
        self.layers, self.gamma, self.only = layers, gamma, only

    def _check(self, model: nn.Module) -> list[LiveTensor]:
        tensors = _tensors_to_scale(model, self.layers, self.only)
        for tensor in tensors:
            if parametrize.is_parametrized(tensor.module, tensor.attribute):
                raise LocaterError(f"{tensor.name}: it already has a parametrization: remove that first")
            stored = stored_map(tensor.module)
            if stored is not None:
                raise LocaterError(f"{tensor.name}: it is quantised ({stored.kind}), so there is nothing to train")
            stored_tensor = getattr(tensor.module, tensor.attribute)
            if hasattr(stored_tensor, "full_tensor") or is_partitioned(stored_tensor):
                raise LocaterError(
                    f"{tensor.name}: it is sharded over ranks, and SigmaReparam needs whole maps: it does not support "
                    "FSDP2, tensor parallelism and ZeRO-3"
                )
        return tensors

    def _attach(self, model: nn.Module) -> None:
        tensors = self._check(model)
        # with each tensor, the order of its module's parameters, which registering a parametrization changes
        self.tensors = [(tensor, list(own_parameters(tensor.module))) for tensor in tensors]
        self.parts: list[SpectralScale] = []
        for tensor in tensors:
            part = SpectralScale(getattr(tensor.module, tensor.attribute).detach(), self.gamma)
            vars(part)[CONTROL] = repr(self)
            parametrize.register_parametrization(tensor.module, tensor.attribute, part)
            self.parts.append(part)
        self._hook = model.register_forward_pre_hook(self._before_pass)

    def _before_pass(self, model: nn.Module, args: Any) -> None:
        """One step of power iteration; on the model, because checkpointing calls its blocks again in the backward
        pass.
        """
        if model.training:
            for (tensor, _), part in zip(self.tensors, self.parts, strict=True):
                part.advance(tensor.module.parametrizations[tensor.attribute].original)  # type: ignore[index,union-attr]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of the model has a copy of this control as its hook."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        vars(copied).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.model is not None:
            raise LocaterError(
                "SigmaReparam: a model under it cannot be pickled, since torch does not pickle parametrized modules: "
                "copy.deepcopy it, save its state_dict(), or detach() first, which leaves its outputs as they are"
            )
        return super().__reduce_ex__(protocol)

    def _detach(self, model: nn.Module) -> None:
        self._hook.remove()
        for tensor, _ in self.tensors:
            _give_own_class(tensor.module)
            parametrize.remove_parametrizations(tensor.module, tensor.attribute, leave_parametrized=True)
        for tensor, order in self.tensors:  # optimizers and checkpoints depend on the order
            parameters = dict(own_parameters(tensor.module))
            own_parameters(tensor.module).clear()
            own_parameters(tensor.module).update({name: parameters[name] for name in order})
        self.tensors, self.parts = [], []


class SpectralScale(nn.Module):
    """W -> gamma W / sigma(W). A tensor of more than two axes counts as a matrix of its first axis by the others."""

    def __init__(self, weight: Tensor, gamma: Literal["spectral"] | float) -> None:
        super().__init__()
        W = upcast(weight).flatten(1)
        gram = (W @ W.mT if W.shape[0] <= W.shape[1] else W.mT @ W).double()
        top = torch.linalg.eigh(gram)[1][:, -1].to(W)
        v = top if W.shape[0] <= W.shape[1] else W @ top
        self.register_buffer("v", v / v.norm())
        u = W.mT @ self.v
        self.register_buffer("u", u / u.norm())
        start = self.sigma(W) if isinstance(gamma, str) else torch.tensor(float(gamma))
        self.gamma = nn.Parameter(start.to(W).clone())

    u: Tensor
    v: Tensor

    def forward(self, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):
            return (self.gamma / self.sigma(upcast(weight).flatten(1)) * upcast(weight)).to(weight.dtype)

    def sigma(self, W: Tensor) -> Tensor:
        # copies: the next forward pass changes u and v in place, perhaps before this one's backward pass
        return self.v.clone() @ (W @ self.u.clone())

    @torch.no_grad()
    def advance(self, weight: Tensor) -> None:
        with torch.autocast(weight.device.type, enabled=False):
            W = upcast(weight).flatten(1)
            v = W @ self.u
            self.v.copy_(v / v.norm())
            u = W.mT @ self.v
            self.u.copy_(u / u.norm())


def _give_own_class(module: nn.Module) -> None:
    """Give a module a class of its own: torch removes a parametrization from the class that it created for the module,
    which copies of the module share.
    """
    kind = type(module)
    members = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    module.__class__ = type(kind.__name__, kind.__bases__, members)


def _tensors_to_scale(model: nn.Module, chosen: Layers, only: Only) -> list[LiveTensor]:
    """The maps to reparametrize, each once."""
    weights = Recorder(model)
    layers = layers_numbered(layers_of(weights, config_of(model)), chosen)
    weights.tensors.clear()  # all that is read from here on are maps
    for layer in layers:
        layer.query.weight(), layer.key.weight()
    tensors = [weights.live_tensor(name) for name, value in weights.tensors.items() if value.ndim >= 2]
    if only == "linear":
        for path in _blocks(model, weights, layers):
            tensors += _linear(path, weights.submodule(path))
    once = {(id(tensor.module), tensor.attribute): tensor for tensor in tensors}
    return list(once.values())


def _blocks(model: nn.Module, weights: Recorder, layers: list[AttentionLayer]) -> list[str]:
    """Paths of the blocks of these layers; the attention module's parent where there is no list of blocks."""
    modules = {id(weights.submodule(layer.name)) for layer in layers}
    names = [path for path, module in model.named_modules() if id(module) in modules]
    blocks = list(dict.fromkeys(stream.name for stream in stream_points(model, names)))

    def block_of(name: str) -> str:
        parent = name.rpartition(".")[0]
        return next((block for block in blocks if f"{name}.".startswith(f"{block}.")), parent)

    return list(dict.fromkeys(map(block_of, names)))


def _linear(path: str, block: nn.Module) -> list[LiveTensor]:
    """Weights of the linear maps in a block."""
    parts = [(f"{path}.{name}", part) for name, part in block.named_modules()]
    return [
        LiveTensor(f"{name}.weight", p, "weight")
        for name, p in parts
        if isinstance(p, nn.Linear) or is_a(p, "transformers.pytorch_utils", "Conv1D")
    ]
