"""Two forward passes of a copy of a model, on tape, with all parameters redrawn in between."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locater.errors import LocaterError, first_line
from locater.families.discovered_calls import Call, attention_calls
from locater.families.example_inputs import example_inputs
from locater.tape import Tape


@dataclass(frozen=True)
class Pass:
    """One forward pass on tape, its attention calls, and the parameters that it ran with."""

    tape: Tape
    calls: list[Call]
    model: nn.Module

    def module(self, path: str) -> nn.Module:
        return self.model.get_submodule(path)

    @property
    def length(self) -> int:
        """The largest number of queries that a call had."""
        return max((call.query.value.shape[-2] for call in self.calls), default=0)


class Copy:
    """A copy of a model that runs on tape. The model itself and the random state stay as they are."""

    def __init__(self, model: nn.Module, example: Mapping[str, Any] | None) -> None:
        self.where = type(model).__name__
        self.inputs = _arguments(model, example)
        self.model = _copied(model, self.where)

    def run(self, seed: int) -> Pass:
        """One pass with every parameter drawn anew. Passes before it keep their activations, not their parameters."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return _run(self.model, self.inputs, seed, self.where)


def _run(model: nn.Module, inputs: dict[str, Any], seed: int, where: str) -> Pass:
    redraw(model, seed)
    try:
        tape = _taped(model, inputs)
    except Exception as error:
        raise LocaterError(
            f"{where}: its forward pass with {', '.join(inputs) or 'no arguments'} failed "
            f"({type(error).__name__}: {first_line(error)[:160]}): give inputs that it takes as example={{...}}"
        ) from error
    holding = {path for path, module in model.named_modules() if any(True for _ in module.parameters())}
    return Pass(tape, list(attention_calls(tape, holding)), model)


def _taped(model: nn.Module, inputs: dict[str, Any]) -> Tape:
    """A pass on tape, in float64 as far as the model lets it: some compare dtypes, some mask in the default one."""
    for precise, default in ((True, torch.get_default_dtype()), (True, torch.float64)):
        with contextlib.suppress(Exception):
            return _once(model, inputs, precise, default)
    return _once(model, inputs, False, torch.get_default_dtype())


def _once(model: nn.Module, inputs: dict[str, Any], precise: bool, default: torch.dtype) -> Tape:
    torch.manual_seed(0)
    tape, before = Tape(model, inputs, precise), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        with tape:
            model(**inputs)
    finally:
        torch.set_default_dtype(before)
    return tape


def _copied(model: nn.Module, where: str) -> nn.Module:
    """A copy on the CPU, in float64 and eval mode, without the hooks of others."""
    empty = next((name for name, tensor in model.named_parameters() if tensor.device.type == "meta"), None)
    if empty is not None:
        raise LocaterError(f"{where}: {empty} has no data (meta device): load the weights first")
    try:
        with _without_hooks(model):
            copied = copy.deepcopy(model)
    except Exception as error:
        raise LocaterError(
            f"{where}: it cannot be copied ({type(error).__name__}: {first_line(error):.120})"
        ) from error
    copied = _precise(copied.cpu().eval().requires_grad_(False))
    choose: Any = getattr(copied, "set_experts_implementation", None)
    if choose is not None:  # fused products of experts do not run in float64
        with contextlib.suppress(Exception):
            choose("eager")
    return copied


def _precise(model: nn.Module) -> nn.Module:
    """The model in float64, complex tensors in complex128: `Module.to` would drop their imaginary parts."""
    kinds = {True: torch.complex128, False: torch.float64}
    return model._apply(lambda t: t.to(kinds[t.is_complex()]) if t.is_floating_point() or t.is_complex() else t)


BLOCK = 1_000_003  # normal numbers that a large tensor repeats
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextlib.contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Copies made inside have none of the model's hooks: an observer must not see the passes of a copy. Hooks that
    compute a weight (weight_norm) stay.
    """
    before = [(module, name, getattr(module, name)) for module in model.modules() for name in HOOKS]
    try:
        for module, name, hooks in before:
            kept = type(hooks)((key, hook) for key, hook in hooks.items() if hasattr(hook, "compute_weight"))
            setattr(module, name, kept)
        yield
    finally:
        for module, name, hooks in before:
            setattr(module, name, hooks)


def _arguments(model: nn.Module, example: Mapping[str, Any] | None) -> dict[str, Any]:
    """Inputs in float64, without a cache of keys and values."""
    inputs = dict(example_inputs(model) if example is None else example)
    inputs = {
        name: x.detach().to("cpu", torch.float64) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }
    inputs = {name: x.detach().cpu() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs.setdefault("use_cache", False)
    return inputs


@torch.no_grad()
def redraw(model: nn.Module, seed: int) -> None:
    """Every parameter from a normal distribution: matrices by fan-in, embeddings of unit size, biases and gains wide.
    At initialisation biases are 0 and gains 1, and a mistake can hide behind that.
    """
    generator = torch.Generator().manual_seed(seed)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, p in model.named_parameters():
        if not p.is_floating_point() or not p.numel():
            continue
        if p.ndim >= 2 and id(p) not in tables and min(p.shape) > 1:
            _fill(p, generator, min(p.shape[0], p[0].numel()) ** -0.5)
        elif p.ndim >= 2:
            _fill(p, generator, 1.0)
        else:
            _fill(p, generator, 0.5, 0.0 if name.endswith("bias") else 1.0)


def _fill(p: Tensor, generator: torch.Generator, spread: float, mean: float = 0.0) -> None:
    """Normal numbers in place. Large tensors repeat a block of them: its length is a prime, so that no two rows are
    alike.
    """
    block = mean + spread * torch.randn(min(p.numel(), BLOCK), generator=generator, dtype=p.dtype)
    if p.numel() <= BLOCK or not p.is_contiguous():
        p.copy_(block.repeat(p.numel() // len(block) + 1)[: p.numel()].view(p.shape))
        return
    flat = p.view(-1)
    for start in range(0, p.numel(), BLOCK):
        part = flat[start : start + BLOCK]
        part.copy_(block[: len(part)])
