"""What Locater makes of one model type, as a row of the table: built, run, met, read, discovered, observed.

Keys of a row:

- `built`, `ran`, `class`, `parameters`, `inputs` (shapes): the tiny model; `why` where it was not built or did not run.
- `part_of`, `part`: the type is a part of another, in whose tiny model it ran, at this path.
- `modules`: how many modules look like attention; `met`: softmax attention that ran, by the way it is written.
- `record`: how many layers the record of its family reads; empty without one.
- `discovered`: layers `verified` in full, `mask_open` (logits and output verified, the mask has to be given),
  `logits_only` (output not known), `qk_only` (queries and keys), `refused_layers`, modules that did not run (`unreached`)
  and modules without a softmax of products (`no_softmax`); `layers` is the sum of the first four. The same for each of several `towers`. `reasons`: one line of each kind.
- `disk`: layers discovered from the saved model, those of them verified, and those that are the `same` as live.
- `scans`: rows of `locater.scan` of the live model with gains and biases redrawn, rows `stored` of the scan of its saved
  folder, rows with the `same` numbers, layers whose numbers are `apart`, and how many of these no line of either scan names (`silent`).
- `observed`: layers and heads that `observe` measured.
- `heads`: heads that a plain pass `met`, counted apart from Locater (`heads`), and of `scan`, the same from `disk` and
  `observe`: the rows of these heads, modules that have fewer rows than heads and that no line names (`silent`, and the
  first of them `named`), and the line of a refusal.
- `refused` or `error` in place of the last four: a refusal of Locater's, or an exception that should be none.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import locater
from locater.calls.attention_like import attention_like
from locater.calls.recognise import NO_SOFTMAX
from locater.discovery.verified_search import Discovered, discover
from locater.errors import LocaterError, first_line
from locater.families.registry import BUILT_IN
from locater.layers.layer import AttentionLayer
from locater.observing.seen_heads import tower_of
from locater.sources.weights import ModuleWeights
from tests.reach.heads import checked, heads_met, observed, scanned
from tests.reach.met import attention_met
from tests.reach.on_disk import NotSavedError, from_disk, saved, scans_of, with_gains
from tests.reach.tiny import parameters_of, tiny

LONGEST = 220  # characters of a reason
MOST_REASONS = 6


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
    model, inputs, problem, part = (made := tiny(model_type)).model, made.inputs, made.problem, made.part
    result.update(
        {"built": True, "class": type(model.get_submodule(part)).__name__, "parameters": parameters_of(model)},
        modules=len([path for path in attention_like(ModuleWeights(model)) if _inside(path, part)]),
    )
    if made.whole:
        result.update(part_of=made.whole, part=part)
    if inputs is None:
        result["why"] = problem[:LONGEST]
        return
    result.update(ran=True, inputs={name: list(x.shape) for name, x in inputs.items()})
    result["met"] = attention_met(model, inputs, part)
    result["record"] = _step(_record, model) if not part else {}
    live: list[Discovered] = []
    result["discovered"] = _step(_discovered, model, inputs, part, live)
    result["observed"] = _step(_observed, model, inputs, part)
    met = {path: count for path, count in heads_met(model, inputs).items() if _inside(path, part)}
    result["heads"] = {"met": sum(met.values())}
    if met:
        result["heads"]["scan"] = _step(checked, met, partial(scanned, model, inputs))
        result["heads"]["observe"] = _step(checked, met, partial(observed, model, inputs))
    if not part:
        _from_disk(result, model, inputs, live, met)


def _from_disk(
    result: dict[str, Any],
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    live: list[Discovered],
    met: Mapping[str, int],
) -> None:
    """The same from a saved copy."""
    try:
        trained = with_gains(copy.deepcopy(model))
        with saved(trained) as folder:
            if met:
                result["scans"] = _step(scans_of, trained, inputs, folder)
        with saved(copy.deepcopy(model)) as folder:
            if live:
                result["disk"] = _step(from_disk, folder, live[0])
            if met:
                result["heads"]["disk"] = _step(checked, met, partial(scanned, folder), True)
    except NotSavedError as error:
        result["disk"] = {"not_saved": str(error)[:LONGEST]}


def _inside(path: str, part: str) -> bool:
    return not part or path == part or path.startswith(f"{part}.")


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
    layers = locater.attention_layers(model)
    return {"layers": len(layers)}


def _discovered(model: nn.Module, inputs: Mapping[str, Tensor], part: str, live: list[Discovered]) -> dict[str, Any]:
    """How many attention layers were verified how far, by tower where there are several, and the reasons. What was
    discovered is appended to `live`.
    """
    live.append(discovered := discover(model, example=dict(inputs)))
    steps: list[tuple[str, str, str | None]] = []  # name of a layer, how far it got, why not further
    for layer in discovered.layers:
        steps.append((layer.name, *_how_far(layer)))
    for refusal in discovered.refused:
        step = "no_softmax" if refusal.reason == NO_SOFTMAX else "refused_layers"
        steps.append((refusal.name, step, refusal.reason if step == "refused_layers" else None))
    steps += [(path, "unreached", None) for path in discovered.unreached]
    steps = [step for step in steps if _inside(step[0], part)]
    names = dict.fromkeys(tower_of(name) for name, _, _ in steps)
    towers = {tower: [step for step in steps if tower_of(step[0]) == tower] for tower in names}
    reasons = sorted({f"{name}: {reason}"[:LONGEST] for name, _, reason in steps if reason})
    return {
        **_counted(steps),
        **({"towers": {tower: _counted(some) for tower, some in towers.items()}} if len(towers) > 1 else {}),
        **({"reasons": _of_each_kind(reasons)} if reasons else {}),
    }


STEPS = ("verified", "mask_open", "logits_only", "qk_only", "refused_layers", "unreached", "no_softmax")


def _how_far(layer: AttentionLayer) -> tuple[str, str | None]:
    """How far a layer is verified, and why not further."""
    unknown = {"qk_only": layer.unknown_logits, "logits_only": layer.unknown_output, "mask_open": layer.unknown_mask}
    return next(((step, why) for step, why in unknown.items() if why is not None), ("verified", None))


def _counted(steps: list[tuple[str, str, str | None]]) -> dict[str, int]:
    """Layers by how far they got; `layers` are those that discovery returns. Only the first and counts above 0."""
    counts = {name: sum(step == name for _, step, _ in steps) for name in STEPS}
    layers = sum(counts[name] for name in ("verified", "mask_open", "logits_only", "qk_only"))
    return {"layers": layers, **{name: count for name, count in counts.items() if count or name == "verified"}}


def _of_each_kind(reasons: list[str]) -> list[str]:
    """The first line of each reason: layers of a tower are often refused for the same one."""
    return list({re.sub(r"\d+", "N", line.partition(": ")[2]): line for line in reversed(reasons)}.values())[::-1][
        :MOST_REASONS
    ]


def _observed(model: nn.Module, inputs: Mapping[str, Tensor], part: str) -> dict[str, Any]:
    """Layers and heads that `observe` measures in one pass."""
    with torch.no_grad(), locater.observe(model) as seen:
        model(**inputs)
    heads = [head for head in seen.rows if head.entropy is not None and _inside(head.name, part)]
    return {"layers": len({head.layer for head in heads}), "heads": len(heads)}


def _reason(error: BaseException) -> str:
    line = first_line(error)
    return (line if isinstance(error, LocaterError) else f"{type(error).__name__}: {line}")[:LONGEST]
