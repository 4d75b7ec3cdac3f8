"""One run of a model, recorded: its attention calls, and the input and output of the modules that its block names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from locater.calls.call import Call
from locater.calls.listeners import Switch
from locater.calls.patching import instead
from locater.errors import LocaterError
from locater.families.record import Block, BlockModules, Part
from locater.layers import AttentionLayer
from locater.observing.accumulators import StatisticsOptions
from locater.observing.listen import heard
from locater.observing.site import Site
from locater.sources.weights import ModuleWeights


class CallSite(Site):
    """A site that stores its calls as they are."""

    def _make(self) -> None:
        self.calls: list[Call] = []
        self.order: list[CallSite] = []

    def see(self, call: Call, first: int | None = None) -> None:
        if first is not None:
            raise LocaterError(f"{self.name}: its heads attend in several calls, which an explanation does not follow")
        self.calls.append(call)
        self.order.append(self)


@dataclass(frozen=True)
class Passage:
    """One call of a module: its first argument and its first output."""

    input: Tensor
    output: Tensor
    others: tuple[Tensor, ...] = ()  # of a mixture's experts: the chosen ones and their weights


@dataclass
class Recording:
    """What one run of a model needs to leave behind to be frozen."""

    weights: ModuleWeights
    block: Block
    layers: Sequence[AttentionLayer]
    passages: dict[str, list[Passage]] = field(default_factory=dict)
    sites: list[CallSite] = field(default_factory=list)
    order: list[CallSite] = field(default_factory=list)  # one entry per attention call
    end: Tensor | None = None  # the last stream as the model passed it on, with the gradient of what reads it

    @contextmanager
    def listening(self, readout: bool = False) -> Iterator[None]:
        """Record every run inside the `with` block. With `readout`, gradients are on behind the last stream."""
        self.sites += [self._site(number, layer) for number, layer in enumerate(self.layers)]
        with ExitStack() as stack:
            stack.enter_context(heard(self.weights.module, self.sites))
            # some blocks add to the output of their MLP in place
            copied = {self.modules(layer).find(self.block.mlp or self.block.down) for layer in self.layers}
            for path in self._watched():
                record = partial(_record, self.passages.setdefault(path, []), path in copied)
                stack.callback(instead(self.weights.submodule(path), "forward", record))
            if readout:
                last = self.weights.submodule(self._final() or self.block.path(self.layers[-1]))
                stack.callback(instead(last, "forward", self._passed_on))
            yield

    def _site(self, number: int, layer: AttentionLayer) -> CallSite:
        module, count, group = self.weights.submodule(layer.name), layer.heads, layer.group
        site = CallSite(layer.name, number, "self", module, group, count, [], Switch(), StatisticsOptions(), layer)
        site.order = self.order
        return site

    def modules(self, layer: AttentionLayer) -> BlockModules:
        """The block of a layer."""
        return BlockModules(self.weights, self.block.path(layer))

    def find(self, layer: AttentionLayer, part: Part) -> str | None:
        """The path of a part of a layer's block, where it is there and was called."""
        path = self.modules(layer).find(part)
        return path if path is not None and self.passages.get(path) else None

    def final(self) -> str | None:
        """The path of the norm after the last block, where it is there and was called."""
        path = self._final()
        return path if path is not None and self.passages.get(path) else None

    def once(self, path: str) -> Passage:
        """The only call of a module, with axes (batch, tokens, ...)."""
        passages = self.passages.get(path, [])
        if len(passages) != 1:
            raise LocaterError(
                f"{path}: called {len(passages)} times in one run of the model; paths need every part once"
            )
        return Passage(self.batch_first(passages[0].input), self.batch_first(passages[0].output))

    def turns(self) -> Iterator[tuple[Recording, AttentionLayer, Call]]:
        """The attention calls in the model's order, each with its layer and a recording of that turn alone. Layers that
        share one module (ALBERT) take turns.
        """
        unheard = next((site.name for site in self.sites if not site.calls), None)
        if unheard is not None:
            raise LocaterError(
                f"{unheard}: no attention call was observed in one run of the model: "
                "load it with attn_implementation='sdpa' or 'eager'"
            )
        taken: dict[str, int] = {}
        for site in self.order:
            layer, count, turn = self.layers[site.number], len(site.calls), taken.get(site.name, 0)
            taken[site.name] = turn + 1
            inside = f"{self.block.path(layer)}."
            passages = {
                path: calls[turn : turn + 1] if path.startswith(inside) and len(calls) == count else calls
                for path, calls in self.passages.items()
            }
            yield replace(self, passages=passages), layer, site.calls[turn]

    def ends(self) -> tuple[Tensor, Tensor]:
        """The stream that enters the first block, and the one that leaves the last."""
        first, last = (self.passages.get(self.block.path(self.layers[i]), []) for i in (0, -1))
        if not first or not last:
            raise LocaterError(f"{self.block.path(self.layers[0])}: not called in a run of the model")
        return self.batch_first(first[0].input), self.batch_first(last[-1].output)

    def batch_first(self, x: Tensor) -> Tensor:
        """Some blocks put the tokens first, and some MLPs get all tokens of a batch in one axis."""
        if x.ndim != 2:
            return x.transpose(0, 1) if self.block.time_first else x
        first = self.passages[self.block.path(self.layers[0])][0].input
        return x.unflatten(0, first.shape[:2])

    def _passed_on(self, module: nn.Module, forward: Any, *args: Any, **kw: Any) -> Any:
        """The last module's output as a leaf. Gradients stay on until the context of the run ends."""
        out = forward(*args, **kw)
        y = out[0] if isinstance(out, tuple) else out
        self.end = y.detach().requires_grad_()
        torch.set_grad_enabled(True)
        return (self.end, *out[1:]) if isinstance(out, tuple) else self.end

    def _watched(self) -> list[str]:
        """Paths of modules whose input and output are needed."""
        block = self.block
        paths: list[str | None] = [block.path(self.layers[0]), block.path(self.layers[-1]), self._final()]
        for layer in self.layers:
            modules = self.modules(layer)
            mlp = (block.mlp, block.up, block.down, block.experts, block.shared_up, block.shared_down)
            paths += [modules.find(part) for part in (*block.norms, *mlp)]
        return list(dict.fromkeys(path for path in paths if path is not None))

    def _final(self) -> str | None:
        stack = self.block.path(self.layers[0]).rpartition(".")[0]
        return BlockModules(self.weights, stack.removesuffix(self.block.stack).removesuffix(".")).find(self.block.final)


def _record(passages: list[Passage], copied: bool, module: nn.Module, forward: Any, *args: Any, **kw: Any) -> Any:
    out = forward(*args, **kw)
    x = args[0] if args else next(iter(kw.values()))
    y = (out[0] if isinstance(out, tuple) else out).detach()
    others = tuple(a.detach() for a in (*args, *kw.values()) if isinstance(a, Tensor) and a is not x)
    passages.append(Passage(x.detach(), y.clone() if copied else y, others))
    return out
