"""Two forward passes of a copy of a model, on tape, with all parameters redrawn in between."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from locater.calls.flex_attention import FlexArguments, replace_flex_functions
from locater.calls.function_table import FUSED
from locater.discovery.example_inputs import example_inputs
from locater.discovery.search_cache import changed_facts, facts_of
from locater.discovery.tape import Tape
from locater.discovery.taped_calls import TapedCall, attention_calls
from locater.errors import LocaterError, first_line
from locater.sources.live_tensors import copy_in_use, is_a
from locater.torch_private import (
    convert_tensors,
    drop_compiled_call,
    forget_output_hooks,
    gathered_partitions,
    hook_tables,
    is_compiled_wrapper,
    is_dynamo_error,
    is_output_hook,
    own_buffers,
    tree_map,
    unwrap_compiled,
    whole_shape,
    without_function_modes,
    write_count,
)

# Random parameters of any size in little memory: the rows of a large one are overlapping parts of one line of
# numbers.


LARGE = 1 << 18  # numbers: tensors with more are thin
STRIDE = 17
AT_ONCE = 1 << 21  # numbers of a thin matrix that are written out and multiplied at once


def thin_strides(shape: Iterable[int]) -> list[int] | None:
    """The strides of a thin tensor of this shape; None where it is stored in full: small ones, and those of short
    rows.
    """
    shape = tuple(shape)
    if len(shape) < 2 or math.prod(shape) <= LARGE or shape[-1] <= 2 * STRIDE:
        return None
    strides = [1, STRIDE]
    for size in reversed(shape[1:-1]):
        strides.append(strides[-1] * size)
    return strides[::-1]


def is_thin(x: Any) -> bool:
    """Whether rows of a matrix overlap in memory."""
    return isinstance(x, Tensor) and x.ndim == 2 and x.stride(1) == 1 and 0 < x.stride(0) < x.shape[1]


def sine_tables(model: nn.Module) -> set[int]:
    """Identities of parameters that are fixed tables of sines: positions that no training changes. Others in their
    place would turn channels otherwise than by angles.
    """
    modules = [module for module in model.modules() if "sinus" in type(module).__name__.lower()]
    return {id(p) for module in modules for p in module.parameters(recurse=False)}


@torch.no_grad()
def redraw(model: nn.Module, seed: int) -> None:
    """Every parameter from a normal distribution: matrices by fan-in, embeddings of unit size, biases and gains wide.
    At initialisation biases are 0 and gains 1, and a mistake can hide behind that. Large parameters become thin, and
    those before them stay as they are for whoever kept them.
    """
    generator = torch.Generator().manual_seed(seed)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    fixed = sine_tables(model)
    for name, p in model.named_parameters():
        if not p.is_floating_point() or not p.numel() or id(p) in fixed:
            continue
        spread, mean = _spread(name, p, id(p) in tables)
        strides = thin_strides(p.shape)
        if strides is None:
            p.copy_(mean + spread * torch.randn(p.shape, generator=generator, dtype=torch.float64))
            continue
        reach = 1 + sum((size - 1) * stride for size, stride in zip(p.shape, strides, strict=True))
        line = mean + spread * torch.randn(reach, generator=generator, dtype=torch.float64)
        p.data = line.to(p.dtype).as_strided(p.shape, strides)


def _spread(name: str, p: Tensor, table: bool) -> tuple[float, float]:
    """(standard deviation, mean) of what a parameter is drawn from."""
    if p.ndim >= 2:
        return (1.0 if table or min(p.shape) == 1 else min(p.shape[0], p[0].numel()) ** -0.5), 0.0
    return 0.5, 0.0 if name.endswith("bias") else 1.0


class ThinProducts(TorchFunctionMode):
    """Multiplies thin matrices a few rows at a time, written out into memory that is used again and again: PyTorch
    would write them out in full.
    """

    def __init__(self) -> None:
        super().__init__()
        self._space: dict[torch.dtype, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear and len(args) > 1 and is_thin(args[1]) and args[1].dtype == args[0].dtype:
            return torch.cat(list(self._parts(*args, **kwargs)), -1)
        return func(*args, **kwargs)

    def _parts(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Iterator[Tensor]:
        step = max(1, AT_ONCE // weight.shape[1])
        space = self._space.get(weight.dtype)
        if space is None or space.numel() < step * weight.shape[1]:
            space = self._space[weight.dtype] = torch.empty(max(AT_ONCE, weight.shape[1]), dtype=weight.dtype)
        for start in range(0, len(weight), step):
            part = weight[start : start + step]
            written = space[: part.numel()].view(part.shape).copy_(part)
            yield torch.nn.functional.linear(x, written, None if bias is None else bias[start : start + step])


# A copy of a model that can be run and changed: on the CPU, in eval mode, with parameters of its own in little
# memory.


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
    except Exception as error:  # modules copy themselves as they like
        raise LocaterError(
            f"{where}: it cannot be copied ({type(error).__name__}: {first_line(error):.120})"
        ) from error
    for part in copied.modules():
        forget_output_hooks(part)
    copied = _cast(copied, dtype).eval().requires_grad_(False)
    choose: Any = getattr(copied, "set_experts_implementation", None)
    if choose is not None:  # fused products of experts do not run in float64
        with contextlib.suppress(Exception):  # else it runs as it is, and that is judged
            choose("eager")
    return copied


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model on the CPU in this dtype, complex tensors in the complex one: `Module.to` would drop their imaginary
    parts.
    """
    kinds = {True: dtype.to_complex(), False: dtype}
    return convert_tensors(
        model, lambda t: t.to("cpu", kinds[t.is_complex()] if t.is_floating_point() or t.is_complex() else t.dtype)
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
    fixed = sine_tables(model)
    for p in model.parameters():
        shape = whole_shape(p)
        if not p.is_floating_point() or id(p) in fixed:
            with gathered_partitions(p):
                numbers = p.detach().cpu().clone()
        elif thin_strides(shape) is None:
            numbers = torch.zeros(shape, dtype=dtype)
        else:
            numbers = torch.zeros(1, dtype=dtype).expand(shape)
        memo[id(p)] = nn.Parameter(numbers, requires_grad=False)
    return memo


def _without_hooks(part: nn.Module) -> Memo:
    """No hooks of others, and no state of shards: an observer must not see the passes of a copy. Two kinds are part of
    the model and stay: those that compute a weight (weight_norm), and those by which models of transformers collect
    hidden states.
    """
    return {
        id(table): type(table)((key, hook) for key, hook in table.items() if _is_of_model(hook))  # type: ignore[call-arg]
        for table in hook_tables(part)
    }


def _is_of_model(hook: object) -> bool:
    return hasattr(hook, "compute_weight") or is_output_hook(hook)


def _own_tensors(part: nn.Module) -> Memo:
    """Buffers, and tensors that a module keeps as plain attributes without their gradients; copied to the CPU at once,
    so that the device of the model needs no memory for it.
    """
    kept = [x for x in (*vars(part).values(), *own_buffers(part).values()) if isinstance(x, Tensor)]
    return {id(x): x.detach().to("cpu", copy=True) for x in kept}


class PassThrough(nn.Module):
    """In place of a wrapper of a whole model: only passes calls on."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _put_stand_in(part: Any, memo: Memo) -> None:
    """Into `memo`, what the copy has in place of a wrapper."""
    if is_compiled_wrapper(part):
        memo[id(part)] = copy.deepcopy(unwrap_compiled(part), memo)
    elif is_a(part, "torch.nn.parallel.distributed", "DistributedDataParallel"):
        memo[id(part)] = type(type(part).__name__, (PassThrough,), {})(copy.deepcopy(part.module, memo))
    elif is_a(part, "torch.distributed.fsdp", "FSDPModule"):  # a class made of this one and of the model's own
        kind = next(base for base in type(part).__bases__ if issubclass(base, nn.Module))
        memo[id(part)] = whole = kind.__new__(kind)
        vars(whole).update(copy.deepcopy(vars(part), memo))
        drop_compiled_call(whole)
    elif is_a(part, "peft.tuners.tuners_utils", "BaseTunerLayer") and hasattr(part, "base_layer"):
        memo[id(part)] = copy.deepcopy(part.base_layer, memo)
    elif is_a(part, "peft.utils.other", "ModulesToSaveWrapper"):
        memo[id(part)] = copy.deepcopy(copy_in_use(part), memo)


def parameter_versions(model: nn.Module) -> Iterator[tuple[str, int, int, int]]:
    """(name, identity, place in memory, version) of each parameter. A pass that changes its own weights changes one of
    these.
    """
    for name, p in model.named_parameters():
        yield name, id(p), p.data_ptr(), write_count(p)


# Direct calls of FlexAttention while a model runs on tape: it compiles itself, which no tape records.


@contextlib.contextmanager
def write_out_flex_attention() -> Iterator[None]:
    """Inside, calls of FlexAttention are fused attention with their block mask written out: the same numbers. Block
    masks are made unrecorded.

    What transformers calls stays: its models are read under another attention function.
    """
    with contextlib.ExitStack() as stack:
        for undo in replace_flex_functions(_written_out_functions, spared="transformers"):
            stack.callback(undo)
        yield


def _written_out_functions(home: Any) -> dict[str, Callable[..., Any]]:
    return {
        "flex_attention": _fused_in_place_of_flex,
        "create_block_mask": partial(_call_unrecorded, home.create_block_mask),
    }


def _call_unrecorded(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What a mask is made of is no part of what the model computes."""
    with without_function_modes():
        return function(*args, **kwargs)


def _fused_in_place_of_flex(*args: Any, **kwargs: Any) -> Tensor:
    given = FlexArguments(*args, **kwargs)
    if given.score_mod is not None:
        raise LocaterError(
            "it calls FlexAttention with a score_mod, a function of single logits, which is not read from a pass"
        )
    if given.return_lse or given.return_aux is not None:
        raise LocaterError("it asks FlexAttention for the log-sum-exp of its rows, which is not read from a pass")
    mask = _call_unrecorded(given.mask)
    return scaled_dot_product_attention(
        given.query, given.key, given.value, mask, scale=given.scale, enable_gqa=given.enable_gqa
    )


class NoInputsError(LocaterError):
    """Inputs of a model could not be guessed."""


@dataclass(frozen=True)
class TapedPass:
    """One forward pass on tape, its attention calls, and the parameters that it ran with."""

    tape: Tape
    calls: list[TapedCall]
    model: nn.Module
    draws: bool = False  # whether the pass drew random numbers

    def module(self, path: str) -> nn.Module:
        return self.model.get_submodule(path)

    @property
    def length(self) -> int:
        """The largest number of queries that a call had."""
        return max((call.length for call in self.calls), default=0)


class RedrawnCopy:
    """A copy of a model that runs on tape. The model itself and the random state stay as they are."""

    def __init__(self, model: nn.Module, example: Mapping[str, Any] | None) -> None:
        self.where = type(model).__name__
        self.guessed = example is None
        with preserve_process_state():
            self.inputs = _arguments(model, _guess_inputs(model, self.where) if example is None else example)
            self.model = light_copy(model, self.where, torch.float64)
        self._facts = facts_of(self.model)

    @property
    def volatile(self) -> frozenset[str]:
        """Names of facts about the model that its passes have changed."""
        return changed_facts(self._facts, facts_of(self.model))

    def run(self, seed: int | None) -> TapedPass:
        """One pass with every parameter redrawn; with None, as they are. Passes before it keep their activations,
        not their parameters. A pass in which the model puts other modules in place of its own is run again: BigBird
        changes to full attention when it meets short inputs.
        """
        with preserve_process_state(), torch.no_grad():
            before = set(self.model.modules())
            run = _run(self.model, self.inputs, seed, self.where)
            return run if before == set(self.model.modules()) else _run(self.model, self.inputs, seed, self.where)

    def run_without(self, name: str) -> TapedPass | None:
        """A pass without one of the inputs; None where the model does not run so."""
        inputs = {other: x for other, x in self.inputs.items() if other != name}
        with preserve_process_state(), torch.no_grad(), contextlib.suppress(LocaterError):
            return _run(self.model, inputs, 1, self.where)
        return None

    def run_other(self, model: nn.Module) -> TapedPass:
        """A pass of another model that takes these inputs."""
        with preserve_process_state(), torch.no_grad():
            return _run(light_copy(model, self.where, torch.float64), self.inputs, 1, self.where)


def _guess_inputs(model: nn.Module, where: str) -> dict[str, Tensor]:
    """Inputs that a copy in float32 runs on: without a tape, not every model runs in float64."""
    trial = light_copy(model, where, torch.float32)
    redraw(trial, 0)
    try:
        with ThinProducts():
            return example_inputs(trial)
    except LocaterError as error:
        raise NoInputsError(str(error)) from None


def _on_cpu() -> contextlib.AbstractContextManager[Any]:
    """Tensors are made on the CPU inside. Where they are anyway nothing is entered, which saves time at every call."""
    return contextlib.nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


@contextlib.contextmanager
def preserve_process_state() -> Iterator[None]:
    """Afterwards the random states and the default dtype of this process are as before. Devices are left alone: nothing
    runs on them.
    """
    before, python = torch.default_generator.get_state(), random.getstate()
    numpy = np.random.get_state()  # noqa: NPY002 (that of the process)
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float32)
        with torch.inference_mode(False), _on_cpu(), write_out_flex_attention():
            yield
    finally:
        torch.default_generator.set_state(before)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_default_dtype(dtype)


def _run(model: nn.Module, inputs: dict[str, Any], seed: int | None, where: str) -> TapedPass:
    if seed is not None:
        redraw(model, seed)
    before = list(parameter_versions(model))
    try:
        tape, draws = _record_pass(model, inputs)
    except Exception as error:  # the model's own code, on inputs that it may not take
        if isinstance(error, LocaterError):  # of the pass itself, whatever its inputs are
            raise LocaterError(f"{where}: {error}") from error
        if is_dynamo_error(error) or "BatchedTensor" in str(error):
            raise LocaterError(
                f"{where}: it runs a part of itself through torch.compile or torch.vmap, which cannot be recorded: "
                "call that part as it is written, FlexAttention under its own name, while the model is read"
            ) from error
        raise LocaterError(
            f"{where}: its forward pass with {', '.join(inputs) or 'no arguments'} failed "
            f"({type(error).__name__}: {first_line(error)[:160]}): give inputs that it takes as example={{...}}"
        ) from error
    after = list(parameter_versions(model))
    written = next((one[0] for one, two in zip(before, after, strict=False) if one != two), None)
    if written is not None or len(before) != len(after):
        raise LocaterError(
            f"{where}: its forward pass changes its own parameter {written}: it has no weights to verify"
        )
    holding = {path for path, module in model.named_modules() if any(True for _ in module.parameters())}
    return TapedPass(tape, list(attention_calls(tape, holding)), model, draws)


def _record_pass(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tape, bool]:
    """(a pass on tape, whether it drew random numbers), in float64 as far as the model lets it: some compare dtypes,
    some mask in the default one: the least float64 is -inf in float32, and 0 times that is NaN.
    """
    unclear: tuple[Tape, bool] | None = None
    for precise, default in ((True, torch.get_default_dtype()), (True, torch.float64)):
        with contextlib.suppress(Exception):  # the last way, below, says what is wrong
            taped = _record_once(model, inputs, precise, default)
            if not _has_nan(taped[0]):
                return taped
            unclear = unclear or taped
    return unclear or _record_once(model, inputs, False, torch.get_default_dtype())


def _has_nan(tape: Tape) -> bool:
    """Whether an attention of a pass has weights or results that are no numbers."""
    return any(bool(node.value.isnan().any()) for node in tape.nodes if node.name in (FUSED, "softmax"))


def _record_once(model: nn.Module, inputs: dict[str, Any], precise: bool, default: torch.dtype) -> tuple[Tape, bool]:
    start = torch.default_generator.manual_seed(0).get_state()
    tape, before = Tape(model, inputs, precise), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        with ThinProducts(), tape:
            model(**inputs)
    finally:
        torch.set_default_dtype(before)
    return tape, not torch.equal(start, torch.default_generator.get_state())


def _arguments(model: nn.Module, example: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs in float64, also those inside of lists and mappings, without a cache of keys and values."""

    def own(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.detach().to("cpu", torch.float64 if x.is_floating_point() else x.dtype, copy=True)

    inputs: dict[str, Any] = tree_map(own, dict(example))
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs.setdefault("use_cache", False)
    return inputs
