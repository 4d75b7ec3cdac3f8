"""Hearing direct calls of FlexAttention: the function is replaced, under each name by which loaded files know it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch

from locater.calls.function_listener import DirectCall, FunctionListener
from locater.calls.patching import Undo
from locater.calls.torch_calls import from_flex
from locater.torch_private import current_function_mode, without_current_function_mode

HOME = "torch.nn.attention.flex_attention"


def flex_calls(report: Callable[[DirectCall], None]) -> Iterator[Undo]:
    """Report direct calls of FlexAttention from now on; yields what ends it. Nothing where no file has loaded it."""
    home: Any = sys.modules.get(HOME)
    if home is None:
        return
    original = home.flex_attention

    @wraps(original)
    def flex_attention(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return original(*args, **kwargs)
        with ExitStack() as stack:  # it compiles itself, which goes without a mode
            if isinstance(current_function_mode(), FunctionListener):
                stack.enter_context(without_current_function_mode())
            out = original(*args, **kwargs)
        report(DirectCall(lambda caller: _described(out, *args, **kwargs)))
        return out

    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("flex_attention") is original:
            yield _put(module, flex_attention, original)


def _put(module: Any, ours: Any, original: Any) -> Undo:
    module.flex_attention = ours

    def undo() -> None:
        if module.flex_attention is ours:
            module.flex_attention = original

    return undo


def _described(
    out: Any,
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    *_: Any,
    **__: Any,
) -> Any:
    return from_flex(out[0] if isinstance(out, tuple) else out, query, key, score_mod, block_mask, scale)
