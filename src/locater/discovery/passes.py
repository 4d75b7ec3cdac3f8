"""Two forward passes of a copy of a model, on tape, with all parameters redrawn in between."""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from locater.discovery.calls import FUSED, SOFTMAX, Call, attention_calls
from locater.discovery.copy import light_copy, parameter_versions
from locater.discovery.example_inputs import example_inputs
from locater.discovery.flex import flex_attention_written_out
from locater.discovery.memory import changed, facts_of
from locater.discovery.tape import Tape
from locater.discovery.thin_weights import ThinProducts, redraw
from locater.errors import LocaterError, first_line


class NoInputsError(LocaterError):
    """Inputs of a model could not be guessed."""


@dataclass(frozen=True)
class Pass:
    """One forward pass on tape, its attention calls, and the parameters that it ran with."""

    tape: Tape
    calls: list[Call]
    model: nn.Module
    draws: bool = False  # whether the pass drew random numbers

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
        self.guessed = example is None
        with process_state_kept():
            self.inputs = _arguments(model, _guessed(model, self.where) if example is None else example)
            self.model = light_copy(model, self.where, torch.float64)
        self._facts = facts_of(self.model)

    @property
    def volatile(self) -> frozenset[str]:
        """Names of facts about the model that its passes have changed."""
        return changed(self._facts, facts_of(self.model))

    def run(self, seed: int | None) -> Pass:
        """One pass with every parameter drawn anew; with None, as they are. Passes before it keep their activations,
        not their parameters. A pass in which the model puts other modules in place of its own is run again: BigBird
        changes to full attention when it meets short inputs.
        """
        with process_state_kept(), torch.no_grad():
            before = set(self.model.modules())
            run = _run(self.model, self.inputs, seed, self.where)
            return run if before == set(self.model.modules()) else _run(self.model, self.inputs, seed, self.where)

    def run_without(self, name: str) -> Pass | None:
        """A pass without one of the inputs; None where the model does not run so."""
        inputs = {other: x for other, x in self.inputs.items() if other != name}
        with process_state_kept(), torch.no_grad(), contextlib.suppress(LocaterError):
            return _run(self.model, inputs, 1, self.where)
        return None

    def run_other(self, model: nn.Module) -> Pass:
        """A pass of another model that takes these inputs."""
        with process_state_kept(), torch.no_grad():
            return _run(light_copy(model, self.where, torch.float64), self.inputs, 1, self.where)


def _guessed(model: nn.Module, where: str) -> dict[str, Tensor]:
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
def process_state_kept() -> Iterator[None]:
    """Afterwards the random states and the default dtype of this process are as before. Devices are left alone: nothing
    runs on them.
    """
    before, python = torch.default_generator.get_state(), random.getstate()
    numpy = np.random.get_state()  # noqa: NPY002 (that of the process)
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float32)
        with torch.inference_mode(False), _on_cpu(), flex_attention_written_out():
            yield
    finally:
        torch.default_generator.set_state(before)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_default_dtype(dtype)


def _run(model: nn.Module, inputs: dict[str, Any], seed: int | None, where: str) -> Pass:
    if seed is not None:
        redraw(model, seed)
    before = list(parameter_versions(model))
    try:
        tape, draws = _taped(model, inputs)
    except Exception as error:
        if isinstance(error, LocaterError):  # of the pass itself, whatever its inputs are
            raise LocaterError(f"{where}: {error}") from error
        if type(error).__module__.startswith("torch._dynamo") or "BatchedTensor" in str(error):
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
    return Pass(tape, list(attention_calls(tape, holding)), model, draws)


def _taped(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tape, bool]:
    """(a pass on tape, whether it drew random numbers), in float64 as far as the model lets it: some compare dtypes,
    some mask in the default one: the least float64 is -inf in float32, and 0 times that is NaN.
    """
    unclear: tuple[Tape, bool] | None = None
    for precise, default in ((True, torch.get_default_dtype()), (True, torch.float64)):
        with contextlib.suppress(Exception):
            taped = _once(model, inputs, precise, default)
            if not _has_nan(taped[0]):
                return taped
            unclear = unclear or taped
    return unclear or _once(model, inputs, False, torch.get_default_dtype())


def _has_nan(tape: Tape) -> bool:
    """Whether an attention of a pass has weights or results that are no numbers."""
    return any(bool(node.value.isnan().any()) for node in tape.nodes if node.name in (FUSED, *SOFTMAX))


def _once(model: nn.Module, inputs: dict[str, Any], precise: bool, default: torch.dtype) -> tuple[Tape, bool]:
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
