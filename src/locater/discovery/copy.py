"""A copy of a model that can be run and changed: on the CPU, in eval mode, with parameters of its own in little memory.

The model is not touched, and of its parameters only fixed tables are read: the copy gets random ones. What is wrapped
around a model or its maps is left out of the copy: hooks, compiled graphs, shards, processes, adapters. So the copy
computes as the model does, with weights of the same names and shapes.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from locater.discovery.thin_weights import tables_of_sines, thin_strides
from locater.errors import LocaterError, first_line
from locater.sources.live_tensors import copy_in_use, is_a

HOOKS = (
    "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks _state_dict_hooks _state_dict_pre_hooks"
    " _load_state_dict_pre_hooks _load_state_dict_post_hooks"
).split()
Memo = dict[int, Any]  # id of an object -> what stands for it in the copy, as `copy.deepcopy` takes it


def light_copy(model: nn.Module, where: str, dtype: torch.dtype) -> nn.Module:
    """A copy whose parameters are still to be drawn (`redraw`)."""
    _refuse_empty(model, where)
    try:
        memo = _parameters(model, dtype)
        for part in model.modules():
            memo |= _without_hooks(part) | _own_tensors(part)
        for part in reversed(list(model.modules())):  # inner ones first
            _put_stand_in(part, memo)
        copied = copy.deepcopy(model, memo)
    except LocaterError:
        raise
    except Exception as error:
        raise LocaterError(
            f"{where}: it cannot be copied ({type(error).__name__}: {first_line(error):.120})"
        ) from error
    for part in copied.modules():  # transformers puts hooks of its own, once: they are gone, so it has to do it again
        vars(part).pop("_output_capturing_hooks_installed", None)
    copied = _cast(copied, dtype).eval().requires_grad_(False)
    choose: Any = getattr(copied, "set_experts_implementation", None)
    if choose is not None:  # fused products of experts do not run in float64
        with contextlib.suppress(Exception):
            choose("eager")
    return copied


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model on the CPU in this dtype, complex tensors in the complex one: `Module.to` would drop their imaginary
    parts.
    """
    kinds = {True: dtype.to_complex(), False: dtype}
    return model._apply(
        lambda t: t.to("cpu", kinds[t.is_complex()] if t.is_floating_point() or t.is_complex() else t.dtype)
    )


def _refuse_empty(model: nn.Module, where: str) -> None:
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise LocaterError(f"{where}: {name} has no shape yet (a lazy module): run the model once first")
        if tensor.device.type == "meta":
            raise LocaterError(f"{where}: {name} has no data (meta device): load the weights first")
        stored_so = isinstance(tensor, nn.Parameter) or name.endswith("weight")
        if stored_so and tensor.ndim > 1 and not _has_real_numbers(tensor):
            raise LocaterError(f"{where}: {name} is stored as {tensor.dtype} (quantised): dequantise the model first")


def _has_real_numbers(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _parameters(model: nn.Module, dtype: torch.dtype) -> Memo:
    """A parameter on the CPU for each of the model's, of its full shape also where it is sharded; large ones hold one
    number until they are drawn.
    """
    memo: Memo = {}
    fixed = tables_of_sines(model)
    for p in model.parameters():
        if not p.is_floating_point() or id(p) in fixed:
            numbers = p.detach().cpu().clone()
        elif thin_strides(p.shape) is None:
            numbers = torch.zeros(p.shape, dtype=dtype)
        else:
            numbers = torch.zeros(1, dtype=dtype).expand(p.shape)
        memo[id(p)] = nn.Parameter(numbers, requires_grad=False)
    return memo


def _without_hooks(part: nn.Module) -> Memo:
    """No hooks of others, and no state of shards: an observer must not see the passes of a copy. Two kinds are part of
    the model and stay: those that compute a weight (weight_norm), and those by which models of transformers collect
    hidden states.
    """
    hooks = (those for name, those in vars(part).items() if name in HOOKS or name.startswith("__composable_api"))
    return {
        id(those): type(those)((key, hook) for key, hook in those.items() if _is_of_model(hook))
        for those in hooks
        if those is not None
    }


def _is_of_model(hook: object) -> bool:
    return hasattr(hook, "compute_weight") or getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def _own_tensors(part: nn.Module) -> Memo:
    """Buffers, and tensors that a module keeps as plain attributes without their gradients; copied to the CPU at once,
    so that the device of the model needs no memory for it.
    """
    kept = [x for x in (*vars(part).values(), *part._buffers.values()) if isinstance(x, Tensor)]
    return {id(x): x.detach().to("cpu", copy=True) for x in kept}


class Around(nn.Module):
    """In place of a wrapper of a whole model: only passes calls on."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _put_stand_in(part: Any, memo: Memo) -> None:
    """Into `memo`, what the copy has in place of a wrapper."""
    if is_a(part, "torch._dynamo.eval_frame", "OptimizedModule"):
        memo[id(part)] = copy.deepcopy(part._orig_mod, memo)
    elif is_a(part, "torch.nn.parallel.distributed", "DistributedDataParallel"):
        memo[id(part)] = type(type(part).__name__, (Around,), {})(copy.deepcopy(part.module, memo))
    elif is_a(part, "torch.distributed.fsdp", "FSDPModule"):  # a class made of this one and of the model's own
        kind = next(base for base in type(part).__bases__ if issubclass(base, nn.Module))
        memo[id(part)] = whole = kind.__new__(kind)
        vars(whole).update(copy.deepcopy(vars(part), memo))
        vars(whole).pop("_compiled_call_impl", None)  # of block.compile(): the copy runs as it is written
    elif is_a(part, "peft.tuners.tuners_utils", "BaseTunerLayer") and hasattr(part, "base_layer"):
        memo[id(part)] = copy.deepcopy(part.base_layer, memo)
    elif is_a(part, "peft.utils.other", "ModulesToSaveWrapper"):
        memo[id(part)] = copy.deepcopy(copy_in_use(part), memo)


def parameter_versions(model: nn.Module) -> Iterator[tuple[str, int, int, int]]:
    """(name, identity, place in memory, version) of each parameter. A pass that changes its own weights changes one of
    these.
    """
    for name, p in model.named_parameters():
        yield name, id(p), p.data_ptr(), p._version
