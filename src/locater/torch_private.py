"""Every private name of torch, transformers, Triton and DeepSpeed that Locater uses, each behind one function.

None of them is a promise of its library, so a later version may rename, move or change it.
`tests/test_torch_private.py` uses each on the real thing and fails when that happens. All are there since the lowest
versions that Locater supports (torch 2.11, transformers 5.20; DeepSpeed was tried with 0.19), except where a docstring
says that a name is newer.

Names of pickled functions in checkpoints (`torch._utils._rebuild_tensor_v2`) are a file format and stand with its
reader, `sources/pickle_file.py`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

Function = TypeVar("Function", bound=Callable[..., Any])
Tensors = list[Tensor] | tuple[Tensor, ...]

# The forward and the backward pass


def in_backward_pass() -> bool:
    """Whether autograd is running a backward pass in this thread.

    A forward pass inside one is the second one of gradient checkpointing: it recomputes activations, and is not to be
    counted again.
    """
    return torch._C._current_graph_task_id() != -1


def disable_dynamo(function: Function) -> Function:
    """`torch.compiler.disable` without the second that its import takes: torch.compile calls `function` as it is."""
    from torch._compile import _disable_dynamo

    return cast(Function, _disable_dynamo(function))


def assume_constant_result(function: Function) -> Function:
    """`torch.compiler.assume_constant_result` without the second that its import takes: torch.compile calls `function`
    once, while it traces.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_dynamo_error(error: BaseException) -> bool:
    """Whether an error is one of torch.compile itself, whose classes have no public home."""
    return type(error).__module__.startswith("torch._dynamo")


# Modes that record or replace operations


def current_function_mode() -> Any:
    """The innermost `TorchFunctionMode` that is active; None where there is none."""
    return torch.overrides._get_current_function_mode()


def without_current_function_mode() -> AbstractContextManager[Any]:
    """Inside, the innermost `TorchFunctionMode` is suspended."""
    return torch.overrides._pop_mode_temporarily()


def without_function_modes() -> AbstractContextManager[Any]:
    """Inside, no `TorchFunctionMode` and no `__torch_function__` of a subclass is called."""
    mode: AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return mode


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Inside, no `TorchDispatchMode` (fake tensors) and no transform of `torch.func` is active."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C._DisableFuncTorch():
        yield


def fake_tensor_mode(**options: Any) -> Any:
    """A `FakeTensorMode`: inside, tensors have shapes and no data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(**options)


def without_fake_tensors() -> AbstractContextManager[Any]:
    """Inside, the active `FakeTensorMode` is suspended, so that tensors have data."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of nested lists, tuples and dictionaries, and their structure, which compares and prints."""
    from torch.utils import _pytree

    return _pytree.tree_flatten(tree)


def tree_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """The leaves of nested lists, tuples and dictionaries, and what `is_leaf` says is one."""
    from torch.utils import _pytree

    return _pytree.tree_leaves(tree, is_leaf)


def tree_map(function: Callable[..., Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """The same nested structure with `function` of each leaf."""
    from torch.utils import _pytree

    return _pytree.tree_map(function, tree, is_leaf=is_leaf)


# Tensors


def write_count(x: Tensor) -> int:
    """How often a tensor, or another view of the same numbers, was written to in place. Inference tensors have none."""
    return x._version


def base_of_view(x: Tensor) -> Tensor | None:
    """The tensor that `x` is a view of; None where it is no view."""
    return x._base


def storage_id(x: Tensor) -> int:
    """Equal for tensors that share a storage. Empty storages have no address to tell them by."""
    return x.untyped_storage()._cdata


def flatten_together(tensors: Tensors) -> Tensor:
    """All numbers of several tensors of one dtype, one after another, in one operation."""
    flat: Tensor = torch._utils._flatten_dense_tensors(tensors)
    return flat


def add_to_each(into: Tensors, values: Tensors | Sequence[float]) -> None:
    """`into[i] += values[i]`, for all in one operation."""
    torch._foreach_add_(into, values)


def subtract_from_each(into: Tensors, value: float) -> None:
    """`into[i] -= value`, for all in one operation."""
    torch._foreach_sub_(into, value)


def zero_each(tensors: Tensors) -> None:
    """`tensors[i].zero_()`, for all in one operation."""
    torch._foreach_zero_(tensors)


# Modules


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of a module itself, by name: the dictionary that torch keeps, None where one is registered as
    absent. `named_parameters(recurse=False)` leaves those out and takes ten times as long.
    """
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of a module itself, by name: the dictionary that torch keeps."""
    return module._buffers


def own_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """The children of a module, by name: the dictionary that torch keeps."""
    return module._modules


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Names of the buffers of a module that its `state_dict` leaves out."""
    return module._non_persistent_buffers_set


def convert_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> nn.Module:
    """Replace every parameter and buffer by `function` of it, as `module.to` does, and return the module."""
    return module._apply(function)


HOOK_TABLES = (
    "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks _state_dict_hooks _state_dict_pre_hooks"
    " _load_state_dict_pre_hooks _load_state_dict_post_hooks"
).split()


def hook_tables(module: nn.Module) -> list[MutableMapping[Any, Any]]:
    """The dictionaries with the hooks of a module, those of `torch.distributed._composable` (FSDP2) included."""
    own = vars(module).items()
    tables = [table for name, table in own if name in HOOK_TABLES or name.startswith("__composable_api")]
    return [table for table in tables if table is not None]


def is_batch_norm(module: nn.Module) -> bool:
    """Whether the buffers of a module are statistics of batches: batch and instance norms share one private class."""
    return isinstance(module, nn.modules.batchnorm._NormBase)


def updates_in_training(parametrization: nn.Module) -> bool:
    """Whether a parametrization of torch changes its own state when it is read in training mode, as the power iteration
    of `spectral_norm` does.
    """
    return parametrization.training and isinstance(parametrization, nn.utils.parametrizations._SpectralNorm)


# torch.compile


def is_compiled_wrapper(module: object) -> bool:
    """Whether a module is what `torch.compile(model)` returns. False without loading torch.compile."""
    library = sys.modules.get("torch._dynamo.eval_frame")
    return library is not None and isinstance(module, library.OptimizedModule)


def unwrap_compiled(model: Any) -> Any:
    """The model inside what `torch.compile(model)` returns; any other model itself."""
    return getattr(model, "_orig_mod", model)


COMPILED_CALL = "_compiled_call_impl"  # what calling a module runs after `module.compile()`


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return getattr(module, COMPILED_CALL) is not None


def drop_compiled_call(module: nn.Module) -> None:
    """Undo `module.compile()`: the module runs as it is written."""
    vars(module).pop(COMPILED_CALL, None)


# nn.MultiheadAttention and nn.TransformerEncoderLayer

ENCODER_STEPS = ("_sa_block", "_mha_block")  # methods of the layers of nn.Transformer that call attention
FUSED_ENCODER_LAYER = "_transformer_encoder_layer_fwd"


def replace_fused_encoder_layer(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Put `function` in place of the fused operation that `nn.TransformerEncoderLayer` calls in evaluation mode instead
    of its attention module. Returns the one that it replaces.
    """
    replaced: Callable[..., Tensor] = getattr(torch, FUSED_ENCODER_LAYER)
    setattr(torch, FUSED_ENCODER_LAYER, function)
    return replaced


def has_joint_projection(module: nn.MultiheadAttention) -> bool:
    """Whether queries, keys and values are projected by one matrix (`in_proj_weight`)."""
    return module._qkv_same_embed_dim


# Distributed training


def placement_of(parameter: Tensor | None) -> Any:
    """How a DTensor is placed on its mesh (`mesh`, `placements`); None for anything else."""
    return getattr(parameter, "_spec", None)


class ShardedParameter(NamedTuple):
    """A parameter of FSDP2."""

    uses: list[tuple[nn.Module, str]]  # every module that has it, and its name there
    gathered: Any  # how it is placed on its mesh once FSDP2 has gathered it; None for a plain tensor
    mesh_info: Any


def fsdp_parameters(module: nn.Module) -> Iterator[ShardedParameter]:
    """The parameters that an `FSDPModule` shards; raises AttributeError where a version of torch names them otherwise.

    `_fsdp_param_groups` and `_unsharded_dtensor_spec` are newer than torch 2.11, which has one `_fsdp_param_group` and
    `_tp_spec`.
    """
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        for parameter in () if group is None else group.fsdp_params:
            info = parameter._module_info
            shared = zip(info.shared_modules, info.shared_param_names, strict=True)
            spec = None
            if parameter.is_dtensor:
                old = hasattr(parameter, "_tp_spec")
                spec = parameter._tp_spec if old else parameter._unsharded_dtensor_spec
            yield ShardedParameter([(info.module, info.param_name), *shared], spec, parameter.mesh_info)


def whole_shape(parameter: Tensor) -> torch.Size:
    """The shape of a parameter, also where DeepSpeed partitions it over ranks (ZeRO-3) and its own data is empty."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def is_partitioned(parameter: Any) -> bool:
    """Whether DeepSpeed partitions a parameter over ranks (ZeRO-3)."""
    return hasattr(parameter, "ds_shape")


def is_empty_now(parameter: Any) -> bool:
    """Whether a parameter is partitioned, and its data is not here at the moment."""
    return is_partitioned(parameter) and parameter.ds_status.name != "AVAILABLE"


def is_copied_to_train(parameter: Any) -> bool:
    """Whether DeepSpeed (ZeRO, of any stage) trains a copy of a parameter, and writes it back at each step."""
    return is_partitioned(parameter) or hasattr(parameter, "_hp_mapping")


def gathered_partitions(*parameters: Tensor) -> AbstractContextManager[Any]:
    """Inside, partitioned parameters have their data, by a collective that every rank calls. Those that have it
    already, as in a forward pass, keep it afterwards.
    """
    apart = [p for p in parameters if is_empty_now(p)]
    zero: Any = sys.modules["deepspeed"].zero if apart else None
    return zero.GatheredParameters(apart) if apart else nullcontext()


PIPELINE_STAGE = "torch.distributed.pipelining.stage"
TRIAL_PASSES = ("_forward_metadata_inference", "_shape_inference")  # the second before torch 2.13


def in_trial_pass() -> bool:
    """Whether this is called inside the pass by which a stage of a pipeline learns the shapes of its outputs, before
    its first step: with numbers that mean nothing.
    """
    stage = getattr(sys.modules.get(PIPELINE_STAGE), "PipelineStage", None)
    if stage is None:
        return False
    codes = {getattr(getattr(stage, name, None), "__code__", None) for name in TRIAL_PASSES} - {None}
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


RING_ATTENTION = "torch.distributed.tensor.experimental._context_parallel._attention"


def splits_sequences() -> bool:
    """Whether context parallelism is on (`context_parallel`, ring attention): it replaces
    `scaled_dot_product_attention`, or registers its own handlers for the operators of DTensor.
    """
    ring = sys.modules.get(RING_ATTENTION)
    if ring is None:
        return False
    from torch.distributed.tensor import DTensor

    handlers = getattr(DTensor._op_dispatcher, "_custom_op_handlers", {})
    replaced = nn.functional.scaled_dot_product_attention in getattr(ring, "_replaced_functions", ())
    return replaced or any(op in handlers for op in getattr(ring, "custom_ops", ()))


def sequence_mesh() -> Any:
    """The mesh of the `context_parallel` block that runs; None outside of one."""
    ring, function = sys.modules.get(RING_ATTENTION), nn.functional.scaled_dot_product_attention
    if ring is None or function not in getattr(ring, "_replaced_functions", ()):
        return None
    return inspect.getclosurevars(function).nonlocals["device_mesh"]


def sequence_order(length: int, ranks: int) -> Tensor:
    """The tokens of a sequence in the order in which `context_parallel` hands them out, in equal parts; inside its
    block.
    """
    balancer = sys.modules[RING_ATTENTION]._create_default_load_balancer(length, ranks, "cpu")
    order: Tensor = torch.arange(length) if balancer is None else balancer._generate_indices()[0]
    return order


def gathers_keys(module: nn.Module) -> bool:
    """Whether a hook of context parallelism (`_ContextParallel` for FlexAttention) gathers the keys of a module."""
    kind = getattr(sys.modules.get(RING_ATTENTION), "_ContextParallel", None)
    hooks = module._forward_pre_hooks.values()
    return kind is not None and any(
        isinstance(getattr(getattr(hook, "func", None), "__self__", None), kind) for hook in hooks
    )


def unscales_gradients(optimizer: Any) -> bool:
    """Whether an optimizer divides gradients by the loss scale of half precision itself, in its step, as fused Adam."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


# Files


def read_archive_record(file: Any, record: str) -> bytes:
    """A record of a file that `torch.save` wrote, as torch's own reader finds it in the archive."""
    content: bytes = torch._C.PyTorchFileReader(file).get_record(record)
    return content


def compiler_module() -> str:
    """The module that `torch.compile` imports at its first call, so that a server of processes can import it before."""
    return "torch._dynamo"


# transformers


def attention_tables() -> list[dict[str, Any]]:
    """The global table of attention functions of transformers, and the local one that overrides it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    return [AttentionInterface._global_mapping, ALL_ATTENTION_FUNCTIONS._local_mapping]


def attention_implementation(module: object) -> str | None:
    """The name of the attention function that a model or module of transformers uses: "sdpa", "eager", ...; None for
    other modules.
    """
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def saved_path(config: object) -> str:
    """Where transformers loaded a configuration from: a folder or a name on the hub; empty where it did not."""
    return getattr(config, "_name_or_path", "") or ""


def settings_of_single_layers(settings: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Settings of single layers that differ from those of all (`per_layer_config`), by number of the layer.

    `settings` are the attributes of a configuration.
    """
    return getattr(settings.get("_heterogeneity_spec"), "per_layer_overrides", {})


def is_output_hook(hook: object) -> bool:
    """Whether a hook of a module is one by which transformers collects hidden states and attention maps."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def forget_output_hooks(module: nn.Module) -> None:
    """Have transformers register the hooks of `is_output_hook` again at the next pass: a copy of a model has lost them
    and still has the mark that they are there.
    """
    vars(module).pop("_output_capturing_hooks_installed", None)


def apply_expert_gate(experts: Any, gate_up: Tensor) -> Tensor:
    """The hidden units of experts from their gate and up projections, which some models of transformers compute in a
    method of their own.
    """
    if hasattr(experts, "_apply_gate"):
        hidden: Tensor = experts._apply_gate(gate_up)
        return hidden
    gate, up = gate_up.chunk(2, -1)
    return experts.act_fn(gate) * up


def split_bloom(module: Any, joint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of Bloom's attention (B, H, T, h) from its joint projection."""
    return module._reshape(joint)


def split_falcon(module: Any, joint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of Falcon's attention (B, T, H, h) from its joint projection."""
    return module._split_heads(joint)


GPTJ_ATTENTION = "_attn"  # the method of GPT-J that is called with queries and keys after rotation and cache


# Triton

DIRECT_LAUNCHES = ((3, 6),)  # versions whose compiled kernels were called directly, on a GPU


def has_tested_launch(version: str) -> bool:
    """Whether compiled kernels of this version of Triton were called directly (`launch_compiled`).

    >>> has_tested_launch("3.6.0"), has_tested_launch("3.6.0+git1"), has_tested_launch("3.10.0")
    (True, True, False)
    >>> has_tested_launch("4.6.0"), has_tested_launch("main")
    (False, False)
    """
    return version.split(".")[:2] in [[str(part) for part in known] for known in DIRECT_LAUNCHES]


def launch_compiled(kernel: Any, grid: tuple[int, int, int], arguments: Iterable[Any]) -> None:
    """Launch a compiled kernel of Triton past its dispatch, which costs more time of the host than 4,096 tokens take on
    the GPU. `arguments` are all of the kernel's, compile-time ones included, in its order.
    """
    kernel[grid](*arguments)
