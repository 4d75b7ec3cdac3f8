"""Controls by name, `locater(target=2, part=full)`: read, checked against the attention, attached; and their state."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

import locater_lab.mechanisms.swap  # noqa: F401 - registers its control
from locater.control import CONTROLS
from locater.control.base import Control, Controls, known_options
from locater.errors import LocaterError
from locater.options import parse_call
from locater_lab.mechanisms.registry import why_unmeasurable


def controls() -> dict[str, type[Control]]:
    """Every control that is registered, by name in lower case."""
    return {name: CONTROLS[name] for name in sorted(CONTROLS)}


def parse_control(text: str) -> Control:
    """A control from its description. Errors begin with `--control`.

    >>> parse_control("temperature(init=2, layers=[0])")
    Temperature(init=2, learn=True, layers=[0])
    """
    name, options = parse_call(text, "--control")
    with _control_named_in_errors(text):
        kind = CONTROLS.lookup(name)
    known = known_options(kind)
    unknown = [option for option in options if option not in known]
    if unknown:
        raise LocaterError(f"--control {name} has no option {unknown[0]!r}: it has {', '.join(known) or 'none'}")
    needed = [option for option, default in known.items() if default is inspect.Parameter.empty]
    missing = [option for option in needed if option not in options]
    if missing:
        raise LocaterError(f"--control {text}: {name} needs {missing[0]}: write it as {name}({missing[0]}=...)")
    layers = options.get("layers")
    if layers is not None and not (isinstance(layers, list | tuple) and all(type(i) is int for i in layers)):
        raise LocaterError(f"--control {text}: layers={layers!r}: give a list of numbers, such as [0, 2]")
    with _control_named_in_errors(text):
        return kind(**options)


@contextmanager
def _control_named_in_errors(text: str) -> Iterator[None]:
    """Errors inside begin with the `--control` that is at fault."""
    try:
        yield
    except (LocaterError, TypeError, ValueError) as error:
        raise LocaterError(f"--control {text}: {error}") from error


def check_controls(texts: Sequence[str], attention: Sequence[str]) -> None:
    """Refuse, before there is a model, a text that names no control, and a control that needs the logits of a softmax
    on a layer that has none.

    `attention` is the name of each layer's mechanism. A control may put another in its place.

    >>> check_controls(["qk_clip"], ["softmax", "learned_sink"])
    """
    parsed = [(text, parse_control(text)) for text in texts]
    swapped = list(attention)
    for _, control in parsed:
        swapped = [control.mechanism_of(layer, name) for layer, name in enumerate(swapped)]
    for text, control in parsed:
        if not control.needs_softmax:
            continue
        mechanisms = attention if control.precedes_mechanism else swapped
        acted_on = [name for layer, name in enumerate(mechanisms) if control.acts_on(layer)]
        without_softmax = [name for name in acted_on if why_unmeasurable(name) is not None]
        if without_softmax:
            has_choice = "layers" in known_options(type(control)) and len(set(swapped)) > 1
            remedies = [control.softmax_remedy, "choose its layers=[...]" if has_choice else "", "leave it out"]
            raise LocaterError(
                f"--control {text}: it needs the logits of a softmax, and {without_softmax[0]} attention has none: "
                f"{', '.join(filter(None, remedies))}, or attend by softmax, softmax_plus_one or learned_sink"
            )


def attach(texts: Sequence[str], model: nn.Module) -> Controls:
    """All of them as one, attached; an error names the control that does not fit the model."""
    attached = Controls([]).attach(model)
    try:
        for text in texts:
            control = parse_control(text)
            with _control_named_in_errors(text):
                attached.controls.append(control.attach(model))
    except BaseException:
        attached.detach()
        raise
    return attached


def restore(attached: Controls, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Load the state of a checkpoint into attached controls of the same kinds: `Controls.state_dict()`, or its older
    form.
    """
    attached.load_state_dict(state if isinstance(state, Mapping) else _from_older_form(attached, state))


def _from_older_form(attached: Controls, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Checkpoints until November 2026 have a list with, for each control, all its plain attributes under "kept", its
    options among them, and its parameters under "state".
    """
    by_place: dict[str, Any] = {str(place): dict(entry["state"]) for place, entry in enumerate(entries)}
    for place, (control, entry) in enumerate(zip(attached.controls, entries, strict=False)):
        attributes = {name: entry["kept"][name] for name in control.state_attributes if name in entry["kept"]}
        by_place[str(place)] |= attributes
    return by_place
