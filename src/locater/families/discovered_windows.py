"""Windows that a short example does not show. A window of 4,096 tokens and no window look alike on nine tokens.

So the copy of the model runs once more with every such setting made smaller than the example. Where the mask of a call
follows, the call has that window.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from locater.errors import LocaterError
from locater.families.discovered_errors import UnreadableError
from locater.families.discovered_layout import AttentionLayout, LogitsLayout
from locater.families.discovered_logits import read_mask
from locater.families.discovered_passes import Copy, Pass
from locater.families.discovered_place import captured_logits, place_of

SETTING = re.compile(r"(?!max_window_layers).*window.*|attention_chunk_size|local_attention")
SMALL = 6  # tokens: with 6, a window of 6, 7, 4 or 3 tells the convention


@dataclass(frozen=True)
class Setting:
    """An attribute of a module or a configuration that may be the size of a window."""

    owner: Any
    name: str
    value: int


def window_settings(model: nn.Module, length: int) -> list[Setting]:
    """Settings that are longer than the example."""
    owners: dict[int, Any] = {}
    for module in model.modules():
        owners[id(module)] = module
        for config in _configs(getattr(module, "config", None)):
            owners[id(config)] = config
    return [
        Setting(owner, name, value)
        for owner in owners.values()
        for name, value in vars(owner).items()
        if SETTING.fullmatch(name) and type(value) is int and value >= length
    ]


@contextlib.contextmanager
def made_small(settings: list[Setting]) -> Iterator[None]:
    """Every setting is SMALL inside."""
    try:
        for setting in settings:
            vars(setting.owner)[setting.name] = SMALL
        yield
    finally:
        for setting in settings:
            vars(setting.owner)[setting.name] = setting.value


def with_windows(
    copied: Copy, layouts: dict[int, AttentionLayout], settings: list[Setting]
) -> dict[int, AttentionLayout]:
    """Layouts, by number of their call, with the windows that show in a pass with small settings."""
    reason = f"its window ({settings[0].name} = {settings[0].value}) does not show in a mask"
    try:
        with made_small(settings):
            run = copied.run(1)
        masks = {number: _mask(run, number) for number in layouts}
    except LocaterError:
        return {number: _without_output(layout, reason) for number, layout in layouts.items()}
    if all(mask is None for mask in masks.values()):  # the size may be built into the model when it is made
        return {number: _without_output(layout, reason) for number, layout in layouts.items()}
    return {number: _with_window(layout, masks[number], run, number, settings) for number, layout in layouts.items()}


def _mask(run: Pass, number: int) -> int | str | None:
    """The window of a call; None where it has none; why its mask is none of a window."""
    call = run.calls[number]
    place = place_of(run.tape, call)
    try:
        return read_mask(LogitsLayout(), captured_logits(place)[2]).window
    except UnreadableError as error:
        return str(error)


def _with_window(
    layout: AttentionLayout, window: int | str | None, run: Pass, number: int, settings: list[Setting]
) -> AttentionLayout:
    if layout.out is None or layout.kind == "cross" or layout.logits.window is not None or window is None:
        return layout
    if isinstance(window, str):
        return _without_output(layout, f"{window} in sequences longer than the example")
    module = run.module(run.calls[number].path)
    own = {setting.value for setting in settings if setting.owner is module}
    values = own or {setting.value for setting in settings}
    if len(values) > 1:
        return _without_output(layout, f"its window may be any of {sorted(values)} tokens")
    return replace(layout, logits=replace(layout.logits, window=_scaled(values.pop(), window)))


def _scaled(value: int, shown: int) -> int:
    """The window of a setting, from the one that SMALL shows: the setting itself, or its half on both sides."""
    for window in (lambda size: size, lambda size: size + 1, lambda size: size // 2 + 1, lambda size: size // 2):
        if window(SMALL) == shown:
            return window(value)
    raise UnreadableError(f"a window setting of {SMALL} shows as {shown} tokens")


def _configs(config: Any) -> Iterator[Any]:
    """A configuration and those inside it."""
    if hasattr(config, "to_dict"):
        yield config
        for inner in vars(config).values():
            if hasattr(inner, "to_dict"):
                yield from _configs(inner)


def _without_output(layout: AttentionLayout, why: str) -> AttentionLayout:
    return replace(layout, value=None, out=None, unknown_output=why)
