"""Listening to the attention of a model for the length of a `with` block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal

from torch import nn

from locater.calls import attention_interface
from locater.calls.listeners import Listener, add_listener, remove_listener
from locater.calls.patching import force_retrace, replace_method
from locater.errors import LocaterError
from locater.families.record import Family
from locater.families.registry import family_of
from locater.families.taps import put_tap, refuse_unobservable
from locater.layers.tensor_parallel import SplitHeads
from locater.observing.layers_by_record import parts_of
from locater.torch_private import is_compiled_in_place, own_children


@contextmanager
def listening_to(
    model: nn.Module, sites: Sequence[Listener], family: Family | Literal["own"] | None = "own"
) -> Iterator[None]:
    """Announce the attention calls of `model` to `sites` inside the `with` block.

    `family` is that of the model, where it is known already; without any (None) taps go by the class of a module alone.
    """
    family = family_of(model) if family == "own" else family
    whole = next((site for site in sites if not getattr(site, "counts_split_heads", False)), None)
    if whole is not None and SplitHeads(model).is_any:
        raise LocaterError(
            f"{whole.name or type(model).__name__}: its heads may be split over ranks, and single heads are read only "
            "from a whole model: load its checkpoint in one process"
        )
    with ExitStack() as stack:
        attention_interface.install()
        stack.callback(attention_interface.remove)
        for site in sites:
            refuse_unobservable(site.module, family, site.name)
            add_listener(site)
            stack.callback(remove_listener, site)
            for undo in put_tap(site.module, family):
                stack.callback(undo)
        for part in parts_that_may_be_compiled(model):
            stack.callback(replace_method(part, "forward", force_retrace))
        yield


def parts_that_may_be_compiled(model: nn.Module) -> list[nn.Module]:
    """Parts that may be compiled already. Their graphs are guarded on `forward`, but not on a new entry in the table of
    attention functions.
    """
    compiled = [
        own_children(part).get("_orig_mod", part if is_compiled_in_place(part) else None) for part in parts_of(model)
    ]
    return [part for part in compiled if part is not None]
