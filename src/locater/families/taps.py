"""Taps: how attention is observed that does not pass the interface of transformers. The family of a model gives them.

A tap is put on a module once, however many observations are under way; the last one to end takes it off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from torch import nn

from locater.calls.listeners import attaching
from locater.calls.patching import Undo
from locater.errors import LocaterError
from locater.families.record import Family, Tap
from locater.families.registry import recognised

# attention that passes the interface and is no softmax, by the name of its class
SIGNED = {
    "DiffLlamaAttention": "differential attention subtracts one map from another, and a signed map has no entropy; "
    "observe the other layers with layers=[...]"
}


@dataclass
class _Tapped:
    users: int
    undo: ExitStack


_tapped: dict[nn.Module, _Tapped] = {}


def put_tap(module: nn.Module, family: Family | None) -> Iterator[Undo]:
    """Put a tap on an attention module of a model of `family`, if it needs one; yields what takes it off."""
    tap = _tap_for(module, family)
    if tap is None:
        return
    with attaching:
        if module not in _tapped:
            with ExitStack() as stack:
                for undo in tap(module):
                    stack.callback(undo)
                _tapped[module] = _Tapped(0, stack.pop_all())
        _tapped[module].users += 1
    yield partial(_release, module)


def refuse_unobservable(module: nn.Module, family: Family | None, name: str) -> None:
    """Raise where an attention module cannot be observed, with the reason."""
    for kind in type(module).__mro__:
        if kind.__name__ in SIGNED:
            raise LocaterError(f"{name}: {SIGNED[kind.__name__]}")
    for known in (family, recognised(module)):
        reason = None if known is None or known.unobservable is None else known.unobservable(module)
        if reason is not None:
            raise LocaterError(f"{name or type(module).__name__}: {reason}")


def is_tapped(module: nn.Module, family: Family | None) -> bool:
    """Whether calls of a module come from a tap, and do not pass the interface."""
    return _tap_for(module, family) is not None


def _tap_for(module: nn.Module, family: Family | None) -> Tap | None:
    if family is not None and family.tap is not None:
        return family.tap
    other = recognised(module)
    return None if other is None else other.tap


def _release(module: nn.Module) -> None:
    with attaching:
        tapped = _tapped[module]
        tapped.users -= 1
        if not tapped.users:
            del _tapped[module]
            tapped.undo.close()
