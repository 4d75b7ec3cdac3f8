"""Listening to attention that does not pass the interface of transformers: each kind at its own point.

A tap is put on a module once, however many observations are under way; the last one to end takes it off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from torch import nn

from locater.attention.interface import reaches
from locater.attention.stand_ins import Undo
from locater.errors import LocaterError
from locater.families import timm_tap, torch_mha_tap
from locater.families.timm import _offers as offers_timm
from locater.observing.taps import bloom, deberta, falcon, gptj, mpnet, xlnet

Tap = Callable[[nn.Module], Iterator[Undo]]
TAPS: dict[str, Tap] = {  # by class name
    "BloomAttention": bloom.tap,
    "FalconAttention": falcon.tap,
    "GPTJAttention": gptj.tap,
    "MPNetSelfAttention": mpnet.tap,
    "XLNetRelativeAttention": xlnet.tap,
    "DisentangledSelfAttention": deberta.tap,
}
UNSEEN = {
    "DiffLlamaAttention": "differential attention subtracts one map from another, and a signed map has no entropy; "
    "observe the other layers with layers=[...]",
    "GPTJFlashAttention2": "GPT-J under FlashAttention goes past where Locater listens; load it with attn_implementation='eager'",
}


@dataclass
class _Put:
    users: int
    undo: ExitStack


_put: dict[nn.Module, _Put] = {}


def tap(module: nn.Module) -> Iterator[Undo]:
    """Put the tap of its kind on a module, if it needs one; yields what takes it off."""
    kind = _tap_of(module)
    if kind is None:
        return
    if module not in _put:
        with ExitStack() as stack:
            for undo in kind(module):
                stack.callback(undo)
            _put[module] = _Put(0, stack.pop_all())
    _put[module].users += 1
    yield partial(_release, module)


def _release(module: nn.Module) -> None:
    held = _put[module]
    held.users -= 1
    if not held.users:
        del _put[module]
        held.undo.close()


def _tap_of(module: nn.Module) -> Tap | None:
    if isinstance(module, nn.MultiheadAttention):
        return torch_mha_tap.tap
    for kind in type(module).__mro__:
        if kind.__name__ in TAPS:
            return TAPS[kind.__name__]
    return timm_tap.tap if offers_timm(module) and not reaches(module) else None


def refuse(module: nn.Module, name: str) -> None:
    """Say why a layer cannot be observed."""
    for kind in type(module).__mro__:
        if kind.__name__ in UNSEEN:
            raise LocaterError(f"{name}: {UNSEEN[kind.__name__]}")
    if isinstance(module, nn.MultiheadAttention) and (module.bias_k is not None or module.add_zero_attn):
        raise LocaterError(
            f"{name or 'nn.MultiheadAttention'}: add_bias_kv and add_zero_attn give every query a key that is no token, "
            "which is not observed; observe the other layers with layers=[...]"
        )
