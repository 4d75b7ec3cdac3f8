"""Attention of a trained model converted to another mechanism, `--convert`: its weights stay, and may be trained on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch import nn

from locater.errors import LocaterError
from locater_lab.mechanisms.registry import other_attention, why_unmeasurable
from locater_lab.models.transformer import Attention, Transformer
from locater_lab.train.controls import attach, check_controls, parse_control
from locater_lab.train.plan import Plan


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
