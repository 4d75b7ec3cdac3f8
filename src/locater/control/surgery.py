"""Surgery: remove attention skips, MLPs, norms and heads from a live model and restore them (Dong, Cordonnier and
Loukas 2021).

The remaining parts decide whether tokens stay apart. Attention alone makes them equal at a doubly exponential rate.
The skip keeps them apart; MLPs and norms alone do not (`locater.measures.rank_residual` over the layers).

    switch            pre-norm block: y = x + attn(norm(x))          post-norm block: y = norm(x + attn(x))
                                      y + mlp(norm(y))                                norm(y + mlp(y))
    no_skip           y = attn(norm(x))                              y = norm(attn(x))
    no_mlp            y                                              norm(y)
    no_mlp=sublayer   y                                              y
    no_norm           y = x + attn(x), y + mlp(y)                    y = x + attn(x), y + mlp(y)

A parallel block, y = x + attn(norm(x)) + mlp(norm(x)), has one skip: no_skip leaves attn(norm(x)) + mlp(norm(x)).

The `Block` of the model's family says where the parts are. No module is copied and no code of a model is rewritten:
methods of single modules are replaced, and a term is removed from a sum by a zero, so that the rest is exact.

    no_skip   the block runs on zeros, and the norm in front of attention, or attention itself, gets the real stream.
              Where the attention module adds its skip itself (ALBERT, XLNet), the norm after it gets the output alone.
    no_mlp    the MLP returns zeros. Where it is not one module, its first map passes its input on, and its last
              returns zeros.
    no_norm   a norm returns its input.
    heads     attention gives the output map zeros, or something else, for these heads (`calls/head_removal.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor, nn

from locater.calls import attention_interface
from locater.calls.head_removal import HeadRemoval, Removal, removals_of, remove_heads
from locater.calls.patching import REPLACED, replace_method
from locater.control.base import Control, Layers, self_layers
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.families.record import Block, BlockModules
from locater.families.registry import block_of
from locater.layers.tensor_parallel import SplitHeads
from locater.sources.open_source import config_of
from locater.sources.weights import ModuleWeights

Forward = Callable[..., Any]


@dataclass(frozen=True)
class ReplacedForward:
    """A module whose forward is replaced by `stand_in(module, forward, *args, **kwargs)`."""

    module: nn.Module
    stand_in: Forward


@dataclass
class Switch:
    """On until a control is detached. A copy of the model has its own."""

    on: bool = True


class Surgery(Control):
    """A model without attention skips, MLPs or the norms of its blocks, each by its own switch; `detach` restores
    them.

    no_skip removes the skip around self-attention; those around the MLP and around cross-attention stay. no_mlp removes
    the whole branch. A post-norm block then still has the norm at its end: no_mlp="sublayer" removes that too, as the
    paper did with BERT and XLNet. no_norm removes the norms of the blocks; the norms of embeddings, the final norm, and
    those of queries and keys stay. `layers` are numbers as in a scan. ALBERT runs one module at many depths: a part
    that is removed is missing at each of them.

    `heads` are pairs of (layer, head), in any layers; `mode` says what stands in their place, as in `locater.ablate`.

    Parameters keep their names; unused ones get no gradient. Attach it before `observe` and `Monitor`, which then see
    the remaining model. A scan reads weights and does not see it. A copy of the model lacks the same parts, even after
    the original is restored.

    >>> from locater.measures import rank_residual
    >>> from locater_lab.train import Shape, Transformer
    >>> _ = torch.manual_seed(0)
    >>> shape = Shape(width=16, heads=2, kv_heads=2, layers=3, hidden=24, causal=False)
    >>> model = Transformer(shape).double().requires_grad_(False)
    >>> ids, stream = torch.arange(12)[None], model.model
    >>> round(float(rank_residual(stream(ids))), 2)
    0.97
    >>> control = Surgery(no_skip=True, no_mlp=True).attach(model)
    >>> bool(rank_residual(stream(ids)) < 1e-6)
    True
    >>> control.detach()
    """

    def __init__(
        self,
        no_skip: bool = False,
        no_mlp: bool | Literal["sublayer"] = False,
        no_norm: bool = False,
        layers: Layers = None,
        heads: Sequence[tuple[int, int]] = (),
        mode: str = "zero",
        window: int = 128,
        sinks: int = 4,
        bits: int = 4,
    ) -> None:
        for name, value in (("no_skip", no_skip), ("no_norm", no_norm)):
            if not isinstance(value, bool):
                raise LocaterError(f"{name}={value!r}: must be True or False")
        if not isinstance(no_mlp, bool) and no_mlp != "sublayer":
            raise LocaterError(
                f"no_mlp={no_mlp!r}: must be True, False, or sublayer, which removes the norm after it too"
            )
        if not (no_skip or no_mlp or no_norm or heads):
            raise LocaterError(
                "Surgery would remove nothing: give no_skip=True, no_mlp=True, no_norm=True or heads=[(layer, head)]"
            )
        if isinstance(layers, int):
            raise LocaterError(f"layers={layers}: must be a list of numbers, such as [{layers}]")
        self.no_skip, self.no_mlp, self.no_norm, self.layers = no_skip, no_mlp, no_norm, layers
        self.heads, self.removal = _pairs(heads), Removal(mode, window, sinks, bits)
        self.mode, self.window, self.sinks, self.bits = mode, window, sinks, bits

    def __repr__(self) -> str:
        whole = super().__repr__()
        return whole if self.heads else whole.partition(", heads=")[0] + ")"  # what is said of no head is left out

    def _attach(self, model: nn.Module) -> None:
        cuts = self._check(model)
        removals = self._removals(model)
        self._switch, self._undo = Switch(), list[Callable[[], None]]()
        try:
            if removals:
                self._undo += remove_heads(model, removals, repr(self))
            for cut in cuts:
                stand_in = partial(_run_while_on, self._switch, cut.stand_in)
                self._undo.append(replace_method(cut.module, "forward", stand_in, repr(self)))
        except BaseException:
            self._detach(model)
            raise

    def _detach(self, model: nn.Module) -> None:
        self._switch.on = False  # a stand-in may stay below one that somebody else has added
        for undo in reversed(self._undo):
            undo()

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        """A surgery that is copied together with its model needs the attention interface for itself."""
        vars(self).update(attributes)
        if self.model is not None and self.heads:
            attention_interface.install()

    def _check(self, model: nn.Module) -> list[ReplacedForward]:
        """Every replacement, each block once; raises if a part is missing or its forward is already replaced."""
        self._removals(model)
        if not (self.no_skip or self.no_mlp or self.no_norm):
            return []
        block = self._block_of(model)
        weights, cuts = ModuleWeights(model), list[ReplacedForward]()
        for path in dict.fromkeys(block.path(layer) for layer in self_layers(model, self.layers)):
            try:
                cuts += self._cuts_of(block, BlockModules(weights, path))
            except KeyError as error:
                raise LocaterError(_refusal(model, f"{error.args[0]}, which its family names, is not there")) from None
        for cut in cuts:
            if REPLACED in getattr(cut.module.__dict__.get("forward"), "__dict__", ()):
                raise LocaterError(
                    f"{type(cut.module).__name__}.forward is observed, or replaced by another Surgery: attach Surgery "
                    "before observe and Monitor, and give one Surgery all switches for a block"
                )
        return cuts

    def _removals(self, model: nn.Module) -> list[tuple[nn.Module, HeadRemoval]]:
        """What is removed from each attention module; raises if a head is not there."""
        if not self.heads:
            return []
        layers, chosen = attention_layers(model), dict[int, list[int]]()
        for layer, head in self.heads:
            if not 0 <= layer < len(layers) or not 0 <= head < layers[layer].heads:
                sizes = f"{len(layers)} layers" + (
                    f" of {layers[layer].heads} heads" if layer in range(len(layers)) else ""
                )
                raise LocaterError(f"heads: ({layer}, {head}): there are {sizes}, numbered from 0")
            chosen.setdefault(layer, []).append(head)
        if SplitHeads(model).is_any:
            raise LocaterError("heads: they may be split over ranks; remove them from a whole model, in one process")
        weights = ModuleWeights(model)
        found = removals_of([(layer.name, layer.heads) for layer in layers], chosen, self.removal)
        return [(weights.submodule(name), removal) for name, removal in found.items()]

    def _block_of(self, model: nn.Module) -> Block:
        try:
            block = block_of(model)
        except LocaterError as error:
            raise LocaterError(_refusal(model, str(error))) from None
        if block is None:
            reason = "its blocks are not known: describe them with locater.register(), docs/add-a-family.md"
            raise LocaterError(_refusal(model, reason))
        return block

    def _cuts_of(self, block: Block, modules: BlockModules) -> Iterator[ReplacedForward]:
        """Norms first, since the other stand-ins go on top of theirs."""
        if self.no_norm:
            norms = [modules.module(norm) for norm in block.norms]
            norms += [modules.module(norm) for norm in block.other_norms if modules.find(norm)]
            yield from (ReplacedForward(norm, _return_input) for norm in dict.fromkeys(norms))
        if self.no_mlp:
            yield from _without_mlp(block, modules)
        if self.no_mlp == "sublayer" and block.after_mlp and not self.no_norm:
            yield ReplacedForward(modules.module(block.after_mlp), _return_input)
        if self.no_skip:
            yield from _without_skip(block, modules)


@contextmanager
def without(
    model: nn.Module,
    heads: Sequence[tuple[int, int]],
    mode: str = "zero",
    *,
    window: int = 128,
    sinks: int = 4,
    bits: int = 4,
) -> Iterator[nn.Module]:
    """The model without some heads, inside of the block: `Surgery(heads=...)`, attached and detached.

    >>> from locater_lab.train import Shape, Transformer
    >>> model, ids = Transformer(Shape(width=16, heads=2, kv_heads=2, layers=3, hidden=24)), torch.arange(12)[None]
    >>> with without(model, [(2, 1)]):
    ...     less = model(ids)
    >>> bool((less != model(ids)).any())
    True
    """
    control = Surgery(heads=heads, mode=mode, window=window, sinks=sinks, bits=bits)
    control.attach(model)
    try:
        yield model
    finally:
        control.detach()


def _pairs(heads: Any) -> list[tuple[int, int]]:
    try:
        return [(index(layer), index(head)) for layer, head in heads]
    except (TypeError, ValueError):
        raise LocaterError(f"heads={heads!r:.60}: give pairs of layer and head, such as heads=[(3, 0)]") from None


def _refusal(model: nn.Module, reason: str) -> str:
    kind = config_of(model).get("model_type")
    of = f"model type {kind!r}" if kind else "no model type"
    return f"Surgery: {type(model).__name__} ({of}): {reason}"


def _without_mlp(block: Block, modules: BlockModules) -> Iterator[ReplacedForward]:
    if block.mlp:
        yield ReplacedForward(modules.module(block.mlp), _return_zeros)
    elif block.down:
        yield ReplacedForward(modules.module(block.up), _return_input)
        yield ReplacedForward(modules.module(block.down), _return_zeros)
    else:
        raise LocaterError(f"Surgery: {modules.path} has no MLP to remove")


def _without_skip(block: Block, modules: BlockModules) -> Iterator[ReplacedForward]:
    if block.added:
        output: list[Tensor] = []
        yield ReplacedForward(modules.module(block.added), partial(_keep_output, output))
        yield ReplacedForward(modules.module(block.after_attention), partial(_norm_output_alone, output))
        return
    readers = [modules.module(block.before_attention or block.attention)]
    if block.parallel and block.before_mlp:
        readers.append(modules.module(block.before_mlp))
    streams: list[list[Tensor]] = [[] for _ in readers]
    yield ReplacedForward(modules.module(""), partial(_run_on_zeros, streams))
    for reader, stream in zip(readers, streams, strict=True):
        yield ReplacedForward(reader, partial(_read_stream, stream))


# Stand-ins. Each gets the module, the forward that it replaces, and the arguments.


def _run_while_on(switch: Switch, stand_in: Forward, module: nn.Module, forward: Forward, *args: Any, **kw: Any) -> Any:
    return stand_in(module, forward, *args, **kw) if switch.on else forward(*args, **kw)


def _return_input(module: nn.Module, forward: Forward, x: Tensor) -> Tensor:
    return x


def _return_zeros(module: nn.Module, forward: Forward, x: Tensor, *args: Any, **kw: Any) -> Tensor:
    return torch.zeros_like(x)


# A block on zeros. Each of `streams` takes its input to one module that reads it.


def _run_on_zeros(streams: list[list[Tensor]], block: nn.Module, forward: Forward, *args: Any, **kw: Any) -> Any:
    x, call = _first_argument(forward, args, kw)
    for stream in streams:
        stream[:] = [x]
    try:
        out = call(torch.zeros_like(x))
        if any(streams):
            raise LocaterError(
                f"{type(block).__name__} did not call the norm in front of its attention: "
                "Surgery cannot remove its skip"
            )
        return out
    finally:
        for stream in streams:
            stream.clear()


def _read_stream(stream: list[Tensor], reader: nn.Module, forward: Forward, *args: Any, **kw: Any) -> Any:
    if not stream:
        return forward(*args, **kw)
    _, call = _first_argument(forward, args, kw)
    return call(stream.pop())


def _first_argument(forward: Forward, args: tuple[Any, ...], kw: dict[str, Any]) -> tuple[Tensor, Forward]:
    """The stream, which is the first argument by place or by keyword, and the call with another in its place."""
    if args:
        return args[0], lambda x: forward(x, *args[1:], **kw)
    name = "hidden_states" if "hidden_states" in kw else next(iter(kw))
    return kw[name], lambda x: forward(**{**kw, name: x})


# Attention that adds its skip itself. `output` takes what is added to the norm that is called with the sum.


def _keep_output(output: list[Tensor], module: nn.Module, forward: Forward, x: Tensor) -> Tensor:
    output[:] = [forward(x)]
    return output[0]


def _norm_output_alone(output: list[Tensor], norm: nn.Module, forward: Forward, x: Tensor) -> Any:
    return forward(output.pop())
