"""Controls by name: `locater(target=2, part=full)`, attached to a model, and their state."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from locater.attention.call import why_unmeasurable
from locater.calls import parse_call
from locater.control import CONTROLS, EntropyPenalty, LogitSoftcap, QKClip, QKNorm, SwapMechanism
from locater.control.base import Control, Controls, known_options
from locater.errors import LocaterError


def controls() -> dict[str, type[Control]]:
    """Every control that is registered, by name in lower case."""
    return {name: CONTROLS[name] for name in sorted(CONTROLS)}


def parse_control(text: str) -> Control:
    """A control from its description; what is wrong with it is said of `--control`.

    >>> parse_control("locater(target=free, shrink=0.02)")
    LocAteR(shrink=0.02, hold=0.01, target='free', part='symmetric', layers=None, schedule=None)
    """
    name, options = parse_call(text, "--control")
    with _naming(text):
        kind = CONTROLS.lookup(name)
    valid = known_options(kind)
    wrong = [option for option in options if option not in valid]
    if wrong:
        raise LocaterError(f"--control {name} has no option {wrong[0]!r}: it has {', '.join(valid) or 'none'}")
    missing = [
        option for option, default in valid.items() if default is inspect.Parameter.empty and option not in options
    ]
    if missing:
        raise LocaterError(f"--control {text}: {name} needs {missing[0]}: write it as {name}({missing[0]}=...)")
    layers = options.get("layers")
    if layers is not None and not (isinstance(layers, list | tuple) and all(type(i) is int for i in layers)):
        raise LocaterError(f"--control {text}: layers={layers!r}: give a list of numbers, such as [0, 2]")
    with _naming(text):
        return kind(**options)


@contextmanager
def _naming(text: str) -> Iterator[None]:
    """What a control does not take is said of the `--control` that asks for it."""
    try:
        yield
    except (LocaterError, TypeError, ValueError) as error:
        raise LocaterError(f"--control {text}: {error}") from error


def check_controls(texts: Sequence[str], attention: Sequence[str]) -> None:
    """Refuse, before there is a model, what is no control, and one that needs logits of a softmax where a layer has
    none.

    `attention` names the mechanism of each layer; a control called mechanism changes it.

    >>> check_controls(["qk_clip"], ["softmax", "learned_sink"])
    """
    made, acting = [(text, parse_control(text)) for text in texts], list(attention)
    for _, control in made:
        if isinstance(control, SwapMechanism):
            acting = [control.name if _chosen(control, at) else name for at, name in enumerate(acting)]
    for text, control in made:
        held = attention if isinstance(control, QKNorm) else acting  # it comes before another mechanism does
        wrong = [name for at, name in enumerate(held) if _chosen(control, at) and why_unmeasurable(name) is not None]
        if wrong and _needs_softmax(control):
            start = "give it init=1.0, " if isinstance(control, QKNorm) else ""
            some = "choose its layers=[...], " if hasattr(control, "layers") and len(set(acting)) > 1 else ""
            raise LocaterError(
                f"--control {text}: it needs the logits of a softmax, and {wrong[0]} attention has none: {start}{some}leave it out, "
                "or attend by softmax, softmax_plus_one or learned_sink"
            )


def _needs_softmax(control: Control) -> bool:
    """Whether a control reads or changes logits as those of a softmax; lengths that are kept come of the same call."""
    return isinstance(control, EntropyPenalty | LogitSoftcap | QKClip) or (
        isinstance(control, QKNorm) and control.init == "keep"
    )


def _chosen(control: Control, layer: int) -> bool:
    layers = getattr(control, "layers", None)
    return not isinstance(layers, list | tuple) or layer in layers


def attach(texts: Sequence[str], model: nn.Module) -> Controls:
    """All of them as one, attached; one that does not fit the model is named."""
    held = Controls([]).attach(model)
    try:
        for text in texts:
            control = parse_control(text)
            with _naming(text):
                held.controls.append(control.attach(model))
    except BaseException:
        held.detach()
        raise
    return held


def parameters(held: Controls) -> list[nn.Parameter]:
    """What controls have to learn beside the model."""
    return [p for control in held.controls for p in getattr(control, "parameters", list)()]


# What a control counts or averages belongs to the state of a run, as do parameters of its own.


def state_of(held: Controls) -> list[dict[str, Any]]:
    """Numbers and tensors that each control keeps, and its own state where it has one."""
    return [
        {
            "kept": {name: x.clone() if isinstance(x, Tensor) else x for name, x in vars(control).items() if _plain(x)},
            "state": getattr(control, "state_dict", dict)(),
        }
        for control in held.controls
    ]


@torch.no_grad()
def restore(held: Controls, states: Sequence[dict[str, Any]]) -> None:
    """Into attached controls of the same kinds."""
    for control, state in zip(held.controls, states, strict=True):
        for name, value in state["kept"].items():
            there = getattr(control, name, None)
            if isinstance(there, Tensor) and isinstance(value, Tensor) and there.shape == value.shape:
                there.copy_(value)  # in place: others may hold the same tensor
            else:
                setattr(control, name, value)
        if state["state"]:
            control.load_state_dict(state["state"])  # type: ignore[attr-defined]


def _plain(x: Any) -> bool:
    if isinstance(x, nn.Parameter):
        return False
    if isinstance(x, list | tuple):
        return all(map(_plain, x))
    if isinstance(x, dict):
        return all(isinstance(k, str | int) and _plain(v) for k, v in x.items())
    return x is None or isinstance(x, bool | int | float | str | Tensor)
