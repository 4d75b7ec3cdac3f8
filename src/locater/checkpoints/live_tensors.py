"""Where the tensors of a live model are, and what they are worth: plain, parametrized, sharded, or under an adapter.

A layer with a LoRA adapter (peft) computes with W + scale B A, one with DoRA with m (W + scale B A) / |W + scale B A|
row by row, and a parametrized one with what its parametrization makes of its parameters. Names are those of the model
without all that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from locater.errors import LocaterError
from locater.numerics import upcast


@dataclass(frozen=True)
class LiveTensor:
    """A tensor of a live model: an attribute of a module, with the adapters around that module, innermost first."""

    name: str
    module: nn.Module
    attribute: str
    adapters: tuple[nn.Module, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        if parametrize.is_parametrized(self.module, self.attribute):
            made: Any = self.module.parametrizations[self.attribute]  # type: ignore[index]
            if made.is_tensor and not made.unsafe:  # then PyTorch has seen to it that the shape stays
                return tuple(made.original.shape)
            with torch.no_grad():
                return tuple(self.read().shape)
        return tuple(getattr(self.module, self.attribute).shape)

    def read(self) -> Tensor:
        """What the model computes with, on this rank in full. Gradients flow to all that it is made of."""
        tensor = _own(self.module, self.attribute)
        for adapter in self.adapters:
            tensor = _adapted(adapter, self.name, self.attribute, tensor)
        return tensor


def live_tensors(module: nn.Module) -> tuple[list[LiveTensor], dict[str, nn.Module]]:
    """Every parameter, then every buffer; and every module by its path. What is used twice is there under both
    names.
    """
    parameters: list[LiveTensor] = []
    buffers: list[LiveTensor] = []
    modules: dict[str, nn.Module] = {}
    for path, part, adapters in _walk(module, "", ()):
        modules[path] = part
        made = list(part.parametrizations) if parametrize.is_parametrized(part) else []  # type: ignore[arg-type]
        for into, held in ((parameters, [*part._parameters, *made]), (buffers, part._buffers)):
            present = [name for name in held if name in made or getattr(part, name) is not None]
            into.extend(LiveTensor(f"{path}.{name}" if path else name, part, name, adapters) for name in present)
    return [*parameters, *buffers], modules


def _walk(
    part: nn.Module, path: str, adapters: tuple[nn.Module, ...]
) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    if is_a(part, "peft.tuners.tuners_utils", "BaseTunerLayer") and hasattr(part, "base_layer"):
        yield from _walk(part.base_layer, path, (part, *adapters))  # type: ignore[arg-type]
        return
    if is_a(part, "peft.utils.other", "ModulesToSaveWrapper"):
        yield from _walk(_trained_copy(part), path, adapters)
        return
    yield path, part, adapters
    for name, child in part.named_children():
        if name != "parametrizations" or not parametrize.is_parametrized(part):
            yield from _walk(child, f"{path}.{name}" if path else name, ())


def _trained_copy(wrapper: Any) -> nn.Module:
    """Of a module that is trained whole beside adapters: the copy in use."""
    on = wrapper.active_adapters and not wrapper.disable_adapters
    return wrapper.modules_to_save[wrapper.active_adapters[0]] if on else wrapper.original_module


def _own(module: nn.Module, attribute: str) -> Tensor:
    if parametrize.is_parametrized(module, attribute) and module.training and not torch.compiler.is_compiling():
        made: nn.Module = module.parametrizations[attribute]  # type: ignore[index,assignment]
        before = [(part, part.training) for part in made.modules()]
        made.eval()  # some count how often they are asked, in training: to look is not to use
        try:
            return _whole(getattr(module, attribute))
        finally:
            for part, training in before:
                part.training = training
    return _whole(getattr(module, attribute))


def _whole(tensor: Tensor) -> Tensor:
    """Of a sharded tensor (DTensor), all of it: one gather, which gradients pass."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _adapted(adapter: Any, name: str, attribute: str, base: Tensor) -> Tensor:
    kind = type(adapter).__name__
    if adapter.disable_adapters and adapter.merged:
        raise LocaterError(f"{name}: its adapter is merged and switched off at once: unmerge it, or switch it on")
    if adapter.disable_adapters or adapter.merged:
        return base
    active = [one for one in adapter.active_adapters if one in getattr(adapter, "lora_A", {})]
    variants = (
        {type(adapter.lora_variant[one]).__name__ for one in active if one in adapter.lora_variant} if active else set()
    )
    if not is_a(adapter, "peft.tuners.lora.layer", "Linear") or variants - {"DoraLinearVariant"}:
        raise LocaterError(
            f"{name}: adapters of kind {' '.join([kind, *variants])} are not read: merge_and_unload() them first"
        )
    if not base.is_floating_point():
        raise LocaterError(f"{name} is stored as {base.dtype} (quantised): dequantise the model first")
    if not active:
        return base
    base = total = upcast(base)  # the layer adds what its parts give, not their numbers: the sum is no 16-bit number
    for one in active:
        if attribute == "bias":
            extra = adapter.lora_B[one].bias
            total = total if extra is None else total + adapter.scaling[one] * upcast(_whole(extra))
        elif one in adapter.lora_variant:
            total = _dora(adapter, one, base, total)
        else:
            total = total + _product(adapter, one)
    return total


def _product(adapter: Any, one: str) -> Tensor:
    """scale B A, as the weight under it is stored."""
    delta = (
        upcast(_whole(adapter.lora_B[one].weight)) @ upcast(_whole(adapter.lora_A[one].weight)) * adapter.scaling[one]
    )
    return delta.mT if adapter.fan_in_fan_out else delta


def _dora(adapter: Any, one: str, base: Tensor, total: Tensor) -> Tensor:
    """m (W + scale B A) / |base + scale B A|, row by row, with W what the adapters before it have made of the base.

    No gradient through the norm, as in the paper.
    """
    delta = _product(adapter, one)
    inputs = 0 if adapter.fan_in_fan_out else 1  # their axis
    size = (base + delta).norm(dim=inputs, keepdim=True).detach()
    return upcast(_whole(adapter.lora_magnitude_vector[one].weight)).unsqueeze(inputs) / size * (total + delta)


def is_a(part: object, module: str, name: str) -> bool:
    """isinstance, of a class that is there only where its library is in use."""
    held = sys.modules.get(module)
    return held is not None and isinstance(part, getattr(held, name, ()))
