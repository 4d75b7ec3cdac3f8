"""FlexAttention, called directly: its arguments, the call as a `Call`, and listening to it.

The function compiles itself, which no function mode sees and no tape records. So it is replaced, under each name by
which loaded files know it: by a listener while a model is observed, by fused attention while it is discovered.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial, wraps
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from locater.calls.call_and_masks import DENSE, Call, with_mask
from locater.calls.function_listener import DirectCall, FunctionListener
from locater.calls.patching import Undo
from locater.errors import LocaterError
from locater.kernels.terms import Terms
from locater.torch_private import current_function_mode, without_current_function_mode

HOME = "torch.nn.attention.flex_attention"


class FlexArguments(NamedTuple):
    """The arguments of `flex_attention`, by name and in its order: queries, keys and values are (B, H, T, D)."""

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: Callable[..., Tensor] | None = None
    block_mask: Any = None
    scale: float | None = None
    enable_gqa: bool = False
    return_lse: bool = False
    kernel_options: Any = None
    return_aux: Any = None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, H, T, S."""
        B, H, T = self.query.shape[:3]
        return B, H, T, self.key.shape[2]

    def mask(self) -> Tensor | None:
        """The block mask written out, (B, H, T, S); None where there is none."""
        if self.block_mask is None:
            return None
        return at_each_position(self.block_mask.mask_mod, *self.sizes, self.query.device)


def call_of_flex(output: Tensor, given: FlexArguments) -> Call:
    """A call of FlexAttention and its output (B, H, T, V), without gradients. The mask of blocks is written out, and
    with a `score_mod` the logits are.
    """
    B, H, T, S = given.sizes
    if prod((B, H if given.score_mod is not None else 1, T, S)) > DENSE:
        raise LocaterError(f"FlexAttention over {T} x {S} tokens is too large to be written out")
    q, k = given.query.detach(), given.key.detach()
    terms = Terms(None if given.scale is None else float(given.scale))
    if given.score_mod is not None:
        keys = k.repeat_interleave(H // k.shape[1], 1)
        logits = (q.float() @ keys.float().mT) * (q.shape[-1] ** -0.5 if given.scale is None else given.scale)
        with torch.no_grad():
            terms = Terms(1.0, bias=at_each_position(given.score_mod, B, H, T, S, q.device, logits).detach())
        q, k = q.new_zeros(B, H, T, 1), k.new_zeros(B, H, S, 1)
    mask = given.mask()
    return Call(q, k, terms if mask is None else with_mask(terms, mask, S), output.detach().transpose(1, 2))


def at_each_position(
    function: Callable[..., Tensor], B: int, H: int, T: int, S: int, device: torch.device, *scores: Tensor
) -> Tensor:
    """A function of (score,) batch, head, query and key, at each of them: (B, H, T, S)."""
    places = [torch.arange(size, device=device) for size in (B, H, T, S)]
    score = (0,) * len(scores)
    for at in (3, 2, 1, 0):
        function = torch.vmap(function, in_dims=(*score, *(0 if axis == at else None for axis in range(4))))
    return function(*scores, *places)


Replacements = Mapping[str, Callable[..., Any]]  # by the name of the function


def replace_flex_functions(make: Callable[[Any], Replacements], spared: str = "-") -> Iterator[Undo]:
    """Replace functions of FlexAttention wherever a loaded file knows them; yields what restores each of them. Nothing
    where no file has loaded it.

    `make` gives the replacements by name, from the module that has the originals. Files of the package `spared` keep
    them.
    """
    home: Any = sys.modules.get(HOME)
    if home is None:
        return
    replacements = make(home)
    originals = {name: getattr(home, name) for name in replacements}
    for path, module in list(sys.modules.items()):
        if path.startswith(f"{spared}."):
            continue
        for name, original in originals.items():
            if getattr(module, "__dict__", {}).get(name) is original:
                setattr(module, name, replacements[name])
                yield partial(_restore, module, name, replacements[name], original)


def _restore(module: Any, name: str, replacement: Any, original: Any) -> None:
    if getattr(module, name) is replacement:
        setattr(module, name, original)


def listen_to_flex(report: Callable[[DirectCall], None]) -> Iterator[Undo]:
    """Report direct calls of FlexAttention from now on; yields what ends it."""

    def listener(home: Any) -> Replacements:
        original = home.flex_attention

        @wraps(original)
        def flex_attention(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return original(*args, **kwargs)
            with ExitStack() as stack:  # it compiles itself, which goes without a mode
                if isinstance(current_function_mode(), FunctionListener):
                    stack.enter_context(without_current_function_mode())
                out = original(*args, **kwargs)
            output = out[0] if isinstance(out, tuple) else out
            report(DirectCall(lambda caller: call_of_flex(output, FlexArguments(*args, **kwargs))))
            return out

        return {"flex_attention": flex_attention}

    return replace_flex_functions(listener)
