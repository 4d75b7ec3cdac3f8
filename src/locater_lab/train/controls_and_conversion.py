"""Controls by name, `locater(target=2, part=full)`: read, checked against the attention, attached; and their state."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from torch import nn

import locater_lab.mechanisms.swap  # noqa: F401 - registers its control
from locater.control import CONTROLS
from locater.control.base import Control, Controls, known_options
from locater.errors import LocaterError
from locater.options import parse_call
from locater_lab.mechanisms.registry import other_attention, why_unmeasurable
from locater_lab.models.transformer import Attention, Transformer
from locater_lab.train.plan import Plan


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


class Conversion:
    """Another mechanism for every layer of a model, ready to take the place of the model's own.

    Its parameters are made at once, so that an optimizer can have them; they get gradients once it is applied.
    """

    def __init__(self, model: Transformer, attention: str) -> None:
        self.model, self.shape = model, replace(model.shape, attention=attention)
        device = model.lm_head.weight.device
        self.layers = [
            (named.name, None if named.is_bare else named.module(**self.shape.sizes(), depth=depth).to(device))
            for depth, named in enumerate(self.shape.by_layer)
        ]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """By names that begin with those of no parameter of the model."""
        return {
            f"converted.layers.{depth}.self_attn.mechanism.{name}": p
            for depth, (_, module) in enumerate(self.layers)
            if module is not None
            for name, p in module.named_parameters()
        }

    def apply(self) -> None:
        """From now on the model attends by the other mechanism, and is saved as such."""
        for block, (name, module) in zip(self.model.model.layers, self.layers, strict=True):
            attention = cast("Attention", cast("Any", block).self_attn)
            attention.attention, attention.mechanism, attention.other = name, module, other_attention(name)
        self.model.shape = self.model.model.shape = self.shape
        self.model.config = self.shape.config()

    @property
    def why_unread(self) -> str | None:
        """Why heads cannot be measured after it; None where they can."""
        reasons = (why_unmeasurable(name) for name, _ in self.layers)
        return next((reason for reason in reasons if reason is not None), None)


def conversion_of(plan: Plan, model: Transformer) -> Conversion | None:
    """The conversion of a plan. A mechanism that does not fit the images is refused here, and so are controls that do
    not fit the model after it: no run fails at its conversion.
    """
    if plan.convert is None:
        return None
    conversion = Conversion(model, plan.convert)
    for named in {named.name: named for named in conversion.shape.by_layer}.values():  # each mechanism once
        try:
            named.check(model.shape.length, **model.shape.sizes())
        except LocaterError as error:
            raise LocaterError(f"--convert {plan.convert}: {error}") from None
    if plan.control:
        attach(plan.control, Transformer(conversion.shape)).detach()
    return conversion


def check_conversion(plan: Plan) -> None:
    """Refuse, before there is a model, controls that do not fit the mechanism after a conversion."""
    if plan.convert is None:
        return
    names = [layer.name for layer in plan.attention_after]
    for text in plan.control:
        if any(parse_control(text).mechanism_of(layer, name) != name for layer, name in enumerate(names)):
            raise LocaterError(
                f"--control {text}: it replaces the attention of --convert {plan.convert}: leave one of them out"
            )
    check_controls(plan.control, names)
