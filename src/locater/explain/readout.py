"""The readout: how a model makes the target of its last stream, as a covector on that stream and a constant.

The last stream is what the frozen model ends with, after the final norm. The readout is what follows: the head of a
language model, a classifier, or the mean over tokens. Its gradient u at this input is the covector:

    target = sum_i u_i . y_i + constant          i: output tokens

A linear readout has the same u everywhere. Otherwise this is its tangent, and `note` says so. A soft cap on the logits
is no tangent: it is frozen at the ratio of the logit to what it was before, like an activation.

Axes: T tokens, d width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.explain.decomposing import frozen_paths, recorded_run, tolerance
from locater.explain.freezing import Mlp
from locater.explain.path_sums import Paths
from locater.explain.targets import Target, TargetChoice, choose_target, vectors
from locater.numerics import upcast
from locater.sources.sources import config_of

LINEAR = "the readout is linear"
CAPPED = "the readout is linear up to a soft cap, which is frozen at its ratio"
TANGENT = "the readout is not linear and is replaced by its tangent at this input, whose constant is in the offset"


@dataclass(frozen=True)
class Readout:
    """One target of one run."""

    target: Target
    covector: Float[Tensor, "T d"]
    constant: float  # the part of the target that does not come from the last stream
    rows: Float[Tensor, "T d"]  # for each output token, the covector of the same entry there
    note: str

    @property
    def tokens(self) -> Float[Tensor, " T"]:
        """Weights of the output tokens that are read, of sum 1: one of them, or several in equal parts."""
        read = (self.covector != 0).any(-1)
        return read.to(self.covector) / read.sum()


def frozen_with_readout(
    model: nn.Module, inputs: Mapping[str, Tensor] | Tensor, target: TargetChoice, mlp: Mlp
) -> tuple[Paths, Readout]:
    """The model run once on one input and frozen, and the readout of the target."""
    with torch.inference_mode(False), torch.enable_grad():
        recording, keywords, output = recorded_run(model, inputs, readout=True)
        if recording.end is None:
            raise LocaterError(f"{type(model).__name__}: its last norm was not called, so it is not known what is read")
        readout = _readout(config_of(model).get("final_logit_softcapping"), output, target, recording.end)
    time_first = recording.block.time_first
    covector, rows = ((x.transpose(0, 1) if time_first else x)[0] for x in (readout.covector, readout.rows))
    del output
    paths = frozen_paths(recording, keywords, mlp)
    constant = readout.target.value - float((covector.double() * paths.output[0].double()).sum())
    return paths, Readout(readout.target, covector, constant, rows, readout.note)


def _readout(cap: float | None, output: Any, choice: TargetChoice, end: Tensor) -> Readout:
    """The readout with covectors in the shape of the model's stream, and its constant still open."""
    target = choose_target(output, choice)
    values, _ = vectors(output)
    number = target.number(output)
    if not number.requires_grad:
        raise LocaterError(f"{target.what} does not depend on the last stream: there is nothing to explain")
    cap = None if target.index is None else cap
    covector = _gradient(_uncapped(number, cap), end, graph=cap is None)
    note = CAPPED if cap else LINEAR
    if cap is None and covector.requires_grad:
        (bend,) = torch.autograd.grad((covector * end).sum(), end, retain_graph=True)
        # the derivative of u . y is u where u does not change with y
        if not torch.equal(bend, covector):
            note = TANGENT
    rows = covector
    if target.position is not None:
        rows = _gradient(_uncapped(values[0, :, target.index], cap), end)
    return Readout(target, upcast(covector.detach()), 0.0, upcast(rows.detach()), note)


def _gradient(numbers: Tensor, end: Tensor, graph: bool = False) -> Tensor:
    (gradient,) = torch.autograd.grad(numbers.sum(), end, retain_graph=True, create_graph=graph)
    return gradient


def _uncapped(numbers: Tensor, cap: float | None) -> Tensor:
    """The logits times frozen ratios: their gradient is that of the logits before the cap, times the ratio."""
    if cap is None:
        return numbers
    numbers = upcast(numbers)
    if bool((numbers.detach().abs() >= cap).any()):
        raise LocaterError(f"a logit has reached the soft cap of {cap}, where it no longer changes: use more precision")
    before = cap * torch.atanh(numbers / cap)
    ratio = torch.where(before == 0, 1.0, numbers / before).detach()
    return before * ratio


def check_sum(readout: Readout, total: float, y: Float[Tensor, "T d"], dtype: torch.dtype) -> None:
    """Refuse a sum of scores and offset that is not the target: then padding is read, which attention does not see."""
    value = readout.target.value
    size = max(abs(value), float(readout.covector.norm() * y.norm()))
    if not abs(total - value) <= tolerance(dtype) * size:
        raise LocaterError(f"scores and offset sum to {total:.6g}, the target is {value:.6g}: leave padding out")
