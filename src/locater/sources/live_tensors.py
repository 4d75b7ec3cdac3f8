"""The tensors that a live model computes with, whether plain, parametrized, sharded or changed by an adapter.

A layer with a LoRA adapter (peft) computes with W + scale B A. One with DoRA computes with m (W + scale B A) /
|W + scale B A|, row by row. A parametrized layer computes with the output of its parametrization. Names are those that
the tensors have in the model without adapters and parametrizations.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from locater.errors import LocaterError
from locater.numerics import upcast
from locater.torch_private import (
    gathered_partitions,
    is_empty_now,
    is_partitioned,
    own_buffers,
    own_children,
    own_parameters,
    updates_in_training,
    whole_shape,
)

if TYPE_CHECKING:
    from locater.sources.quantised.stored_map import Stored


# peft's classes of LoRA around linear layers: plain, and of bitsandbytes
LINEAR = (("layer", "Linear"), ("bnb", "Linear4bit"), ("bnb", "Linear8bitLt"))


@dataclass(frozen=True)
class LiveTensor:
    """A tensor of a live model: an attribute of a module, with the adapters around that module, innermost first."""

    name: str
    module: nn.Module
    attribute: str
    adapters: tuple[nn.Module, ...] = ()
    packed: bool = False  # a weight that its module stores quantised

    @property
    def quantised(self) -> str | None:
        """The format of a weight that is stored quantised."""
        return self._stored().kind if self.packed else None

    def _stored(self) -> Stored:
        stored = stored_map(self.module)
        if stored is None:
            raise LocaterError(f"{self.name} was quantised when it was found, and no longer is: read the model again")
        return stored

    @property
    def shape(self) -> tuple[int, ...]:
        if self.packed:
            return self._stored().shape()
        if parametrize.is_parametrized(self.module, self.attribute):
            parametrization: Any = self.module.parametrizations[self.attribute]  # type: ignore[index]
            if (
                parametrization.is_tensor and not parametrization.unsafe
            ):  # then PyTorch has checked that the shape stays
                return tuple(parametrization.original.shape)
            with torch.no_grad():
                return tuple(self.read().shape)
        tensor = getattr(self.module, self.attribute)
        if is_lazy(tensor):
            raise LocaterError(f"{self.name} has no shape yet (a lazy module): run the model once first")
        return tuple(whole_shape(tensor))

    def read(self) -> Tensor:
        """The tensor that the model computes with, gathered in full. Gradients flow to all parameters behind it."""
        tensor = self._stored().read() if self.packed else _own_tensor(self.module, self.attribute)
        for adapter in self.adapters:
            tensor = _with_adapter(adapter, self.name, self.attribute, tensor)
        return tensor


def live_tensors(module: nn.Module) -> tuple[list[LiveTensor], dict[str, nn.Module]]:
    """Every parameter, then every buffer; and every module by its path. A tensor used twice has both names."""
    parameters: list[LiveTensor] = []
    buffers: list[LiveTensor] = []
    modules: dict[str, nn.Module] = {}
    for path, part, adapters in _walk(module, "", ()):
        modules[path] = part
        parametrized = list(part.parametrizations) if parametrize.is_parametrized(part) else []  # type: ignore[arg-type]
        stored = stored_map(part)
        hidden: set[str] = set()
        if stored is not None:
            hidden = {"weight", *stored.parts}
            parameters.append(LiveTensor(f"{path}.weight" if path else "weight", part, "weight", adapters, packed=True))
        for into, names in ((parameters, [*own_parameters(part), *parametrized]), (buffers, own_buffers(part))):
            present = [name for name in names if name in parametrized or getattr(part, name) is not None]
            present = [name for name in present if name not in hidden]
            into.extend(LiveTensor(f"{path}.{name}" if path else name, part, name, adapters) for name in present)
    return [*parameters, *buffers], modules


def _walk(
    part: nn.Module, path: str, adapters: tuple[nn.Module, ...]
) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    if is_a(part, "peft.tuners.tuners_utils", "BaseTunerLayer") and hasattr(part, "base_layer"):
        yield from _walk(part.base_layer, path, (part, *adapters))  # type: ignore[arg-type]
        return
    if is_a(part, "peft.utils.other", "ModulesToSaveWrapper"):
        yield from _walk(copy_in_use(part), path, adapters)
        return
    yield path, part, adapters
    for name, child in part.named_children():
        if name != "parametrizations" or not parametrize.is_parametrized(part):
            yield from _walk(child, f"{path}.{name}" if path else name, ())


def copy_in_use(wrapper: Any) -> nn.Module:
    """The module that a peft `ModulesToSaveWrapper` runs: the trained copy, or the original where adapters are off."""
    on = wrapper.active_adapters and not wrapper.disable_adapters
    return wrapper.modules_to_save[wrapper.active_adapters[0]] if on else wrapper.original_module


def stored_map(module: nn.Module) -> Stored | None:
    """The map that a quantised layer stands for; None for other modules."""
    weight = own_parameters(module).get("weight")
    plain = weight is None or (weight.dtype.is_floating_point and weight.dtype.itemsize > 1)
    if plain and "weight_packed" not in own_parameters(module) and getattr(weight, "quant_state", None) is None:
        return None
    from locater.sources.quantised.dequantised import (
        live_map,  # it reads through `weights`, which reads through this file
    )

    return live_map(module)


def _own_tensor(module: nn.Module, attribute: str) -> Tensor:
    if parametrize.is_parametrized(module, attribute) and module.training and not torch.compiler.is_compiling():
        parametrization: nn.Module = module.parametrizations[attribute]  # type: ignore[index,assignment]
        before = [(part, part.training) for part in parametrization.modules()]
        parametrization.eval()  # in training, some update their state at every call; reading must not
        try:
            return _full_tensor(getattr(module, attribute))
        finally:
            for part, training in before:
                part.training = training
    return _full_tensor(getattr(module, attribute))


@contextmanager
def next_training_pass(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, tensors are those that the next training pass will compute with. Some parametrizations move on in each
    training pass, as the power iteration of a spectral norm does: these move on here too, and are put back.
    """
    moving = [(part, name, one) for part in parts for name, one in _parametrizations(part) if _changes_in_training(one)]
    before = [(buffer, buffer.clone()) for _, _, one in moving for buffer in one.buffers()]
    try:
        with torch.no_grad():
            for part, name, one in moving:
                for step in one:
                    if hasattr(step, "advance"):
                        step.advance(one.original)
                if not any(hasattr(step, "advance") for step in one):
                    getattr(part, name)
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _parametrizations(part: nn.Module) -> list[tuple[str, Any]]:
    """Of each tensor of a module that is parametrized: its name, and the list of its parametrizations."""
    parametrized: Any = own_children(part).get("parametrizations")
    return [] if parametrized is None or not parametrize.is_parametrized(part) else list(parametrized.items())


def _changes_in_training(steps: Any) -> bool:
    """Whether parametrizations change in a training pass: one that a control has put there says so by `advance`."""
    return any(hasattr(step, "advance") or updates_in_training(step) for step in steps)


def _full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of one that is sharded, by one gather that gradients pass; other tensors as they are."""
    if is_partitioned(tensor):
        return _gathered(tensor)
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _gathered(parameter: Any) -> Tensor:
    """A copy of a parameter that DeepSpeed partitions (ZeRO-3), which gradients pass.

    A gradient that arrives while the parameter is empty again, because the penalty's pass comes before or after the
    model's own, could not be added to it: the parameter is gathered for that moment.
    """
    with gathered_partitions(parameter):
        copy = parameter.clone()
    if copy.grad_fn is not None:
        empty = []  # set while the parameter is gathered for its gradient

        def gather(grads: Any) -> None:
            if is_empty_now(parameter):
                parameter.all_gather()
                empty.append(True)

        def release(*grads: Any) -> None:
            if empty:
                empty.clear()
                parameter.partition()

        accumulate = copy.grad_fn.next_functions[0][0]
        accumulate.register_prehook(gather)
        accumulate.register_hook(release)
    return copy


def _with_adapter(adapter: Any, name: str, attribute: str, base: Tensor) -> Tensor:
    kind = f"{type(adapter).__module__.split('.')[-2]} {type(adapter).__name__}"  # as in "ia3 Linear"
    if adapter.disable_adapters and adapter.merged:
        raise LocaterError(f"{name}: its adapter is both merged and switched off: unmerge it, or switch it on")
    if adapter.disable_adapters or adapter.merged:
        return base
    active = [one for one in adapter.active_adapters if one in getattr(adapter, "lora_A", {})]
    variants = {type(adapter.lora_variant[one]).__name__ for one in active if one in adapter.lora_variant}
    linear = any(is_a(adapter, f"peft.tuners.lora.{module}", name) for module, name in LINEAR)
    if not linear or variants - {"DoraLinearVariant"}:
        raise LocaterError(
            f"{name}: adapters of kind {' '.join([kind, *variants])} are not read: merge_and_unload() them first"
        )
    if not base.is_floating_point():
        raise LocaterError(f"{name} is stored as {base.dtype} (quantised): dequantise the model first")
    if not active:
        return base
    base = total = upcast(base)  # the layer adds outputs, not weights, so the sum of weights is not rounded to 16 bits
    for one in active:
        if attribute == "bias":
            extra = adapter.lora_B[one].bias
            total = total if extra is None else total + adapter.scaling[one] * upcast(_full_tensor(extra))
        elif one in adapter.lora_variant:
            total = _dora(adapter, one, base, total)
        else:
            total = total + _product(adapter, one)
    return total


def _product(adapter: Any, one: str) -> Tensor:
    """scale B A, with the axes in the order of the stored weight."""
    b, a = (upcast(_full_tensor(part[one].weight)) for part in (adapter.lora_B, adapter.lora_A))
    delta = b @ a * adapter.scaling[one]
    return delta.mT if adapter.fan_in_fan_out else delta


def _dora(adapter: Any, one: str, base: Tensor, total: Tensor) -> Tensor:
    """m (W + scale B A) / |base + scale B A|, row by row. W is the base weight after the adapters before this one.

    No gradient flows through the norm, as in the paper.
    """
    delta = _product(adapter, one)
    inputs = 0 if adapter.fan_in_fan_out else 1  # axis
    size = (base + delta).norm(dim=inputs, keepdim=True).detach()
    return upcast(_full_tensor(adapter.lora_magnitude_vector[one].weight)).unsqueeze(inputs) / size * (total + delta)


def is_a(part: object, module: str, name: str) -> bool:
    """isinstance for a class of an optional library, without importing that library."""
    library = sys.modules.get(module)
    return library is not None and isinstance(part, getattr(library, name, ()))
