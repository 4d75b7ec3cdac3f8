"""Windows that a short example does not show. A window of 4,096 tokens and no window look alike on nine tokens.

So the copy of the model runs again with such a setting made smaller than the example, at two sizes. A layer whose mask
follows has a window of that setting, by the one rule that explains both sizes. Where no mask follows, the model may
have built the size in when it was made: then it is rebuilt from its configuration.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from locater.discovery.attention_site import call_logits, site_of
from locater.discovery.masks import read_mask
from locater.discovery.norm_and_rotary_fit import unwrapped_path
from locater.discovery.redrawn_copy import RedrawnCopy, TapedPass
from locater.discovery.search_cache import Setting, settings_of
from locater.errors import LocaterError, UnreadableError
from locater.layers.layout import AttentionLayout, LogitsLayout

SETTING = re.compile(r"(?!max_window_layers).*window.*|attention_chunk_size|local_attention")
SIZES = (6, 4)
SHORTEST = 8  # tokens of an example that show a window of 7
RULES: tuple[Callable[[int], int], ...] = (
    lambda size: size,
    lambda size: size + 1,
    lambda size: size - 1,
    lambda size: size // 2 + 1,
    lambda size: size // 2,
)
Mask = LogitsLayout | str  # a mask, or why it cannot be read


@dataclass(frozen=True)
class WindowSetting:
    """A setting that may be the size of a window."""

    setting: Setting
    paths: tuple[str, ...]  # of the modules that it concerns


def window_settings(model: nn.Module, length: int) -> list[list[WindowSetting]]:
    """Settings that an example of this length does not show; those with the same name and value together."""
    holders: dict[int, list[str]] = {}  # of each configuration
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        if config is not None:
            holders.setdefault(id(config), []).append(unwrapped_path(path))
    groups: dict[tuple[str, int], list[WindowSetting]] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for setting in settings_of(module, seen):
            if not SETTING.fullmatch(setting.name) or type(setting.value) is not int or setting.value < length - 1:
                continue
            inside = [unwrapped_path(path)] if setting.owner is module else holders.get(id(setting.owner), [""])
            groups.setdefault((setting.name, setting.value), []).append(WindowSetting(setting, tuple(inside)))
    return list(groups.values())


def _is_concerned(name: str, settings: list[WindowSetting]) -> bool:
    """Whether a layer is inside a module that has one of the settings."""
    paths = {path for setting in settings for path in setting.paths}
    return "" in paths or any(f"{name}.".startswith(f"{path}.") for path in paths)


@contextlib.contextmanager
def shrink_settings(settings: list[WindowSetting], size: int) -> Iterator[None]:
    """Every setting is `size` inside."""
    try:
        for setting in settings:
            setting.setting.put(size)
        yield
    finally:
        for setting in settings:
            setting.setting.put(setting.setting.value)


def with_windows(
    copied: RedrawnCopy, layouts: Mapping[int, AttentionLayout], groups: list[list[WindowSetting]], length: int
) -> dict[int, AttentionLayout]:
    """Layouts, by number of their call, with the windows that show in passes with small settings."""
    result = dict(layouts)
    for settings in groups:
        name, value = settings[0].setting.name, settings[0].setting.value
        concerned = {n: layout for n, layout in layouts.items() if _is_concerned(layout.name, settings)}
        masks = _masks(copied, concerned, settings) if length >= SHORTEST else None
        for number, layout in concerned.items():
            if layout.kind == "cross" or layout.unknown_mask is not None or layout.logits.window is not None:
                continue
            before = result[number]
            if masks is None:
                after: Mask = f"its window ({name} = {value}) does not show in a mask"
            else:
                after = _explain_masks(layout.logits, [sized[number] for sized in masks], value)
            if isinstance(after, str):
                result[number] = replace(before, unknown_mask=after)
            elif after != layout.logits and before.logits not in (layout.logits, after):
                result[number] = replace(before, unknown_mask="its window may be one of several settings")
            elif after != layout.logits:
                result[number] = replace(before, logits=after)
    return result


def _explain_masks(now: LogitsLayout, shown: list[Mask], value: int) -> Mask:
    """The mask with a setting of `value`, from those that small sizes show; `now` where the setting does not act."""
    masks = []
    for mask in shown:
        if isinstance(mask, str):
            return f"{mask} in sequences longer than the example"
        masks.append(mask)
    if all(_rule(mask) == _rule(now) for mask in masks):
        return now
    if any(mask.causal != now.causal for mask in masks):
        return "its mask changes with the size of its window"
    if all(mask.chunk == size for mask, size in zip(masks, SIZES, strict=True)):
        return replace(now, chunk=value)
    windows = {
        rule(value)
        for rule in RULES
        if all(mask.window == rule(size) and mask.chunk is None for mask, size in zip(masks, SIZES, strict=True))
    }
    if len(windows) == 1:
        return replace(now, window=windows.pop())
    sizes = " and ".join(str(mask.window) for mask in masks)
    return f"window settings of {SIZES[0]} and {SIZES[1]} show as {sizes} tokens"


def _differs(mask: Mask, now: LogitsLayout) -> bool:
    return isinstance(mask, str) or _rule(mask) != _rule(now)


def _rule(mask: LogitsLayout) -> tuple[Any, ...]:
    return mask.causal, mask.window, mask.chunk


def _masks(
    copied: RedrawnCopy, layouts: Mapping[int, AttentionLayout], settings: list[WindowSetting]
) -> list[dict[int, Mask]] | None:
    """The masks of every call at each of SIZES; None where the setting shows in none, and may act all the same."""
    with contextlib.suppress(LocaterError):
        masks = [_masks_at(copied.run, layouts, settings, size) for size in SIZES]
        if any(_differs(mask, layouts[number].logits) for sized in masks for number, mask in sized.items()):
            return masks
    arguments = inspect.signature(copied.model.forward).parameters
    if "attention_mask" in arguments and "attention_mask" not in copied.inputs:
        return None  # some models make windows only where they are given a mask
    with contextlib.suppress(LocaterError):
        return [
            _masks_at(lambda _: copied.run_other(_rebuild_model(copied)), layouts, settings, size) for size in SIZES
        ]
    return None


def _masks_at(
    run: Callable[[None], TapedPass], layouts: Mapping[int, AttentionLayout], settings: list[WindowSetting], size: int
) -> dict[int, Mask]:
    with shrink_settings(settings, size):
        done = run(None)
    return {number: _mask(done, number, layout, size) for number, layout in layouts.items()}


def _mask(run: TapedPass, number: int, layout: AttentionLayout, size: int) -> Mask:
    if number >= len(run.calls) or unwrapped_path(run.calls[number].path) != layout.name:
        return "other attention runs"
    call = run.calls[number]
    try:
        site = site_of(run.tape, call)
        return read_mask(LogitsLayout(), call_logits(site)[2], (size,))
    except (LocaterError, RuntimeError, ValueError, TypeError, LookupError) as error:
        return str(error) if isinstance(error, UnreadableError) else "its mask cannot be read"


def _rebuild_model(copied: RedrawnCopy) -> nn.Module:
    """The model made from its configuration as it is now. Refused where that gives other parameters."""
    config: Any = getattr(copied.model, "config", None)
    if not hasattr(config, "to_dict"):
        raise LocaterError("it has no configuration to be made from")
    try:
        with _without_initialization():
            other: nn.Module = type(copied.model)(copy.deepcopy(config))
    except Exception as error:  # of the constructor of any class
        raise LocaterError("it cannot be made from its configuration") from error
    every = [model.named_parameters(remove_duplicate=False) for model in (copied.model, other)]
    shapes = [{name: p.shape for name, p in named} for named in every]
    if shapes[0] != shapes[1]:
        raise LocaterError("its configuration makes other parameters")
    return other


def _without_initialization() -> contextlib.AbstractContextManager[None]:
    """Models of transformers made inside have no numbers yet, which takes time."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[None] = no_init_weights()
    return context
