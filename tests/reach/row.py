"""What Locater makes of one model type, as a row of the table: built, run, met, read, discovered, observed."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import locater
from locater import families
from locater.checkpoints.weights import ModuleWeights
from locater.errors import LocaterError, first_line
from locater.families.coverage import attention_like
from locater.families.registry import BUILT_IN
from tests.reach.met import attention_met
from tests.reach.on_disk import from_disk
from tests.reach.tiny import parameters_of, tiny

LONGEST = 220  # characters of a reason


def row(model_type: str) -> dict[str, Any]:
    """One row. Every step that fails says why, and the steps behind it are left out. Seconds are of processor time."""
    started = time.process_time()
    result: dict[str, Any] = {"model_type": model_type, "built": False, "ran": False}
    try:
        _fill(result, model_type)
    except Exception as error:
        result["why"] = _reason(error)
    return {**result, "seconds": round(time.process_time() - started, 2)}


def _fill(result: dict[str, Any], model_type: str) -> None:
    model, inputs, problem = (made := tiny(model_type)).model, made.inputs, made.problem
    result.update(
        {"built": True, "class": type(model).__name__, "parameters": parameters_of(model)},
        modules=len(attention_like(ModuleWeights(model))),
    )
    if inputs is None:
        result["why"] = problem[:LONGEST]
    else:
        result.update(ran=True, inputs={name: list(x.shape) for name, x in inputs.items()})
        result["met"] = attention_met(model, inputs)
    result["record"] = _step(_record, model)
    if inputs is not None:
        result["discovered"] = _step(_discovered, copy.deepcopy(model), inputs)
        result["disk"] = _step(from_disk, copy.deepcopy(model), inputs)
        result["observed"] = _step(_observed, model, inputs)


def _step(work: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """What a step returns, or why it failed: `refused` in one line of Locater's, or an `error` that should be none."""
    try:
        return work(*args)
    except LocaterError as error:
        return {"refused": _reason(error)}
    except Exception as error:
        return {"error": _reason(error)}


def _record(model: nn.Module) -> dict[str, Any]:
    """Layers that a family's record reads."""
    if getattr(model.config, "model_type", None) not in BUILT_IN:
        return {}
    layers = families.attention_layers(model)
    return {"layers": len(layers)}


def _discovered(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """Layers that are discovered and verified, those refused with the reasons, and modules that never ran."""
    if find_spec("locater.families.discovered") is None:
        return {"missing": "not built"}
    discover = import_module("locater.families.discovered").discover
    discovered = discover(model, example=dict(inputs))
    layers = discovered.layers
    unknown = [[getattr(layer, name, None) for name in ("unknown_logits", "unknown_output")] for layer in layers]
    lines = [f"{refusal.name}: {refusal.reason}" for refusal in discovered.refused]
    for layer, (logits, output) in zip(layers, unknown, strict=True):
        lines += [f"{layer.name}: {logits or output}"] if logits or output else []
    reasons = sorted({line[:LONGEST] for line in lines})
    return {
        "layers": len(layers),
        "verified": unknown.count([None, None]),
        "refused_layers": len(discovered.refused),
        "unreached": len(discovered.unreached),
        **({"reasons": reasons[:4]} if reasons else {}),
    }


def _observed(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """Layers and heads that `observe` measures in one pass."""
    with torch.no_grad(), locater.observe(model) as seen:
        model(**inputs)
    heads = [head for head in seen.rows if head.entropy is not None]
    return {"layers": len({head.layer for head in heads}), "heads": len(heads)}


def _reason(error: BaseException) -> str:
    line = first_line(error)
    return (line if isinstance(error, LocaterError) else f"{type(error).__name__}: {line}")[:LONGEST]
