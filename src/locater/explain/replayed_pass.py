"""A pass of a model, recorded once and run again from a layer on with heads removed.

What is before the layer has the numbers that it had: a block (an entry of a list of modules that attends) returns what
was recorded of it, and in the layer itself so do the maps of queries, keys and values and, at the interface of
transformers, attention. What follows is computed by the model's own code. Several removals are parts of one batch.

Nothing here knows an architecture, so the replay is tried before it is used: run again with nothing removed, it has to
give the output of the pass. Where it does not, every removal runs the whole model.
"""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from locater.calls.attention_interface import always_uses_interface
from locater.calls.head_removal import LAST, HeadRemoval, Removal, heads_removed, removals_of, turn_fast_path_off
from locater.calls.interceptors import AttentionRequest, Interceptor, add_interceptor, remove_interceptor
from locater.calls.patching import replace_method
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.explain.explanation import Target
from locater.layers import AttentionLayer
from locater.layers.tensor_parallel import SplitHeads
from locater.observing.run_model import run_checked
from locater.sources.weights import ModuleWeights
from locater.torch_private import tree_map, unwrap_compiled

Heads = Mapping[int, Sequence[int]]  # heads to remove, by number of layer
TOGETHER = 18  # removals that share a batch, where the input is a single one
SAME = 1e-4  # a replay and the pass may differ by this share of the output, or by a few roundings of its type
read_clock = time.perf_counter
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class _Recorded:
    """What a block returned, and how many attention calls there were by then."""

    end: int
    output: Any


@dataclass
class Seconds:
    """Where the time of a pass went."""

    blocks: float = 0.0
    rest: float = 0.0  # embeddings, the output layer


class ReplayedPass:
    """One pass of `model` over `batch`; make it with `replayed`, inside of whose block it can be run again."""

    def __init__(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        self.model = unwrap_compiled(model)
        if SplitHeads(self.model).is_any:
            raise LocaterError(
                f"{type(model).__name__}: its heads may be split over ranks, and heads are removed from a whole "
                "model: load its checkpoint in one process"
            )
        self.weights = ModuleWeights(self.model)
        self.layers: Sequence[AttentionLayer] = attention_layers(self.model)
        self.batch = _without_cache(self.model, batch)
        self.size = batch_size(batch)
        self.first: int | None = None  # the attention call from which on the model runs; None while it is recorded
        self.copies = 1
        self.event = 0  # attention calls so far
        self.events: dict[tuple[int, int], int] = {}  # number of an attention call, by module and turn
        self.blocks: dict[tuple[int, int], _Recorded] = {}  # by module and the attention calls before it
        self.parts: dict[tuple[int, int, int], Tensor] = {}  # maps in front of attention: by call, module and turn
        self.outputs: dict[int, Tensor] = {}  # of the attention calls at the interface
        self.can_skip = True
        self.most = 1  # removals that may share a batch
        self.name = type(self.model).__name__
        self._turns: dict[int, int] = {}
        self._in_attention: int | None = None  # the attention call that runs, as long as its outputs are not known
        self._depth = 0
        self._seconds = Seconds()

    # ---- what is put on the model

    @contextmanager
    def installed(self) -> Iterator[None]:
        with ExitStack() as stack:
            paths = list(dict.fromkeys(layer.name for layer in self.layers))
            modules = dict(self.model.named_modules())
            for path in _blocks_around(modules, paths):
                stack.callback(replace_method(modules[path], "forward", self._run_block))
            for path in paths:
                module = self.weights.submodule(path)
                stack.callback(replace_method(module, "forward", self._run_attention))
                if always_uses_interface(module):
                    known = _KnownOutputs(self)
                    add_interceptor(module, known)
                    stack.callback(remove_interceptor, module, known)
                    for child in module.children():
                        stack.callback(replace_method(child, "forward", self._run_part))
            stack.enter_context(heads_removed(self.model, []))  # for as long as interceptors are on
            for undo in turn_fast_path_off(self.model):
                stack.callback(undo)
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # a graph would be traced for each removal
            yield

    def _run_block(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        key = (id(module), self.event)
        if self.first is not None and self.can_skip:
            known = self.blocks.get(key)
            if known is not None and known.end <= self.first:
                self.event = known.end
                return self._repeated(known.output)
        self._depth += 1
        began = _clock(self.model) if self._depth == 1 else 0.0
        try:
            out = forward(*args, **kw)
        finally:
            self._depth -= 1
        if self._depth == 0:
            self._seconds.blocks += _clock(self.model) - began
        if self.first is None and self.event > key[1]:
            self.blocks[key] = _Recorded(self.event, tree_map(_copied, out))
        return out

    def _run_attention(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        if self.first is None:
            turn = self._turns[id(module)] = self._turns.get(id(module), -1) + 1
            self.events[id(module), turn] = self.event
        before, self._in_attention = self._in_attention, self.event
        self._turns_of_parts: dict[int, int] = {}
        try:
            return forward(*args, **kw)
        finally:
            self._in_attention = before
            self.event += 1

    def _run_part(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        """A map in front of attention."""
        if self._in_attention is None:
            return forward(*args, **kw)
        turn = self._turns_of_parts[id(module)] = self._turns_of_parts.get(id(module), -1) + 1
        key = (self._in_attention, id(module), turn)
        if self.first is None:
            out = forward(*args, **kw)
            if isinstance(out, Tensor):
                self.parts[key] = out.clone()
            return out
        if self.can_skip and self._in_attention == self.first and key in self.parts:
            return self._repeated(self.parts[key])
        return forward(*args, **kw)

    def attended(self, output: Tensor) -> None:
        """The outputs of all heads are there: what follows in the module comes after attention."""
        if self.first is None and self._in_attention is not None:
            self.outputs[self._in_attention] = output.clone()
        self._in_attention = None

    def known_output(self) -> Tensor | None:
        """The outputs of all heads in the call that runs, where they are those of the pass."""
        if self.first is None or not self.can_skip or self._in_attention != self.first:
            return None
        output = self.outputs.get(self.first)
        return None if output is None else self._repeated(output)

    def _repeated(self, x: Any) -> Any:
        return tree_map(partial(_repeated, size=self.size, copies=self.copies), x)

    # ---- running

    def record(self) -> tuple[Any, Seconds]:
        """The output of the pass and its times."""
        self.first, self.copies = None, 1
        out = self._run()
        calls = Counter(key for key, _ in self.events)
        for name, count in Counter(layer.name for layer in self.layers).items():
            made = calls[id(self.weights.submodule(name))]
            if not made:
                raise LocaterError(f"{name}: not called with these inputs, so its heads cannot be removed")
            if made != count > 1:
                raise LocaterError(
                    f"{name}: called {made} times in a pass and known as {count} layers: which heads are whose is not "
                    "known"
                )
        return out, self._seconds

    def replay(self, parts: Sequence[Heads], how: Removal, tokens: Tensor | None = None) -> tuple[Any, Seconds]:
        """The output with the heads of each of `parts` removed in a copy of the batch, one copy after the other."""
        self.copies = len(parts)
        removals = self._removals(parts, how, tokens)
        numbers = [number for heads in parts for number in heads]
        self.first = min((self._event_of(number) for number in numbers), default=len(self.events) // 2)
        with heads_removed(self.model, removals):
            out = self._run()
        for _, removal in removals:
            if not removal.calls:
                raise LocaterError(f"{removal.name}: heads cannot be removed: its attention call was not found")
        return out, self._seconds

    def _run(self) -> Any:
        self.event, self._turns, self._in_attention, self._depth = 0, {}, None, 0
        self._turns_of_parts = {}
        self._seconds = Seconds()
        batch = {name: _repeated(x, self.size, self.copies) for name, x in self.batch.items()}
        began = _clock(self.model)
        out = run_checked(self.model, batch)
        self._seconds.rest = _clock(self.model) - began - self._seconds.blocks
        return out

    def _removals(
        self, parts: Sequence[Heads], how: Removal, tokens: Tensor | None
    ) -> list[tuple[nn.Module, HeadRemoval]]:
        every = {number: () for heads in parts for number in heads}
        places = [(layer.name, layer.heads) for layer in self.layers]
        found = []
        for name, removal in removals_of(places, every, how).items():
            numbers = [number for number, layer in enumerate(self.layers) if layer.name == name]
            removal.shared = {turn: [heads.get(n, ()) for heads in parts] for turn, n in enumerate(numbers)}
            removal.tokens = tokens
            if len(numbers) > 1:  # a module that is one layer lacks its heads at each of its calls
                removal.which_turn = self._turn_that_runs
            found.append((self.weights.submodule(name), removal))
        return found

    def _event_of(self, number: int) -> int:
        name = self.layers[number].name
        turn = sum(layer.name == name for layer in self.layers[:number])
        return self.events[id(self.weights.submodule(name)), turn]

    def _turn_that_runs(self) -> int:
        return next(turn for (_, turn), event in self.events.items() if event == self.event)

    def check(self, output: Tensor, copies: int) -> int:
        """How many copies of the batch may be run at once: `copies`, or 1 where they do not give `output` each. Where
        one does not, nothing is skipped.
        """
        size = output.nan_to_num().norm()
        for count in dict.fromkeys((copies, 1)):
            again = main_output(self.replay([{}] * count, Removal())[0])
            if again is not None and again.shape == (count * len(output), *output.shape[1:]):
                # padding may be NaN
                apart = [float((x - output).nan_to_num().norm() / size) for x in again.float().chunk(count)]
                if max(apart) <= max(SAME, 4 * torch.finfo(again.dtype).eps):
                    return count
        self.can_skip = False
        return 1


class _KnownOutputs(Interceptor):
    """Puts the recorded outputs of all heads in the place of attention."""

    order = LAST - 1

    def __init__(self, replayed: ReplayedPass) -> None:
        self.replayed = replayed

    def __call__(self, request: AttentionRequest) -> AttentionRequest:
        return replace(request, attend=partial(self._attend, request.attend))

    def _attend(self, attend: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        known = self.replayed.known_output()
        out = attend(*args, **kw) if known is None else (known, None)
        self.replayed.attended(out[0])
        return out


@contextmanager
def replayed(
    model: nn.Module, batch: Mapping[str, Any], copies: int = 1
) -> Iterator[tuple[ReplayedPass, Any, Seconds]]:
    """A pass that can be run again with heads removed, its output, and its times; `copies` is the most removals that
    share a batch, and `replay.most` how many may.
    """
    replay = ReplayedPass(model, batch)
    with replay.installed():
        out, seconds = replay.record()
        first = main_output(out)
        if first is None:
            raise LocaterError(f"{replay.name}: its output has no tensor by which removals could be judged")
        replay.most = replay.check(first.float(), copies)
        yield replay, out, seconds


@torch.no_grad()
def head_effects(
    model: nn.Module, inputs: Mapping[str, Any], target: Target, heads: Sequence[tuple[int, int]]
) -> list[float]:
    """The target of one input with every head, less the target without each of `heads`."""
    order, effects = sorted(range(len(heads)), key=lambda at: heads[at]), dict[int, float]()
    with replayed(model, inputs, TOGETHER) as (replay, out, _):
        before, at = float(target.number(out)), 0
        while at < len(order):
            layer = heads[order[at]][0]
            group = [n for n in order[at : at + replay.most] if heads[n][0] == layer]
            output = main_output(replay.replay([{layer: (heads[n][1],)} for n in group], Removal())[0])
            assert output is not None
            kind = "last_hidden_state" if target.index is None else "logits"
            for number, part in zip(group, output.chunk(len(group)), strict=True):
                effects[number] = before - float(target.number({kind: part}))
            at += len(group)
    return [effects[number] for number in range(len(heads))]


def main_output(out: Any) -> Tensor | None:
    """What a model says: its logits, or the last hidden state, or the first tensor of floats."""
    if isinstance(out, Tensor):
        return out if out.is_floating_point() else None
    for name in ("logits", "last_hidden_state", "logits_per_image", "pooler_output"):
        if isinstance(x := getattr(out, name, None), Tensor):
            return x
    parts = out.values() if isinstance(out, Mapping) else out if isinstance(out, list | tuple) else ()
    return next((x for x in map(main_output, parts) if x is not None), None)


def batch_size(batch: Mapping[str, Any]) -> int:
    """Sequences of a batch."""
    named = [batch[name] for name in ("input_ids", "pixel_values") if isinstance(batch.get(name), Tensor)]
    tensors = [*named, *(x for x in batch.values() if isinstance(x, Tensor) and x.ndim)]
    if not tensors:
        raise LocaterError("a batch without a tensor: give the inputs as the model takes them")
    return len(tensors[0])


def _without_cache(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """A cache of blocks that are skipped would have holes."""
    takes = "use_cache" in inspect.signature(model.forward).parameters
    return {**batch, **({"use_cache": False} if takes else {})}


def _blocks_around(modules: Mapping[str, nn.Module], paths: Sequence[str]) -> list[str]:
    """Entries of lists of modules in which attention is, the outer ones first."""
    found = dict[str, None]()
    for path in paths:
        parts = path.split(".")
        for end in range(1, len(parts)):
            if isinstance(modules.get(".".join(parts[: end - 1])), LISTS):
                found[".".join(parts[:end])] = None
    return list(found)


def _copied(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _repeated(x: Any, size: int, copies: int) -> Any:
    """A tensor with its `size` sequences `copies` times; the same numbers where it has no axis for them."""
    if not isinstance(x, Tensor):
        return x
    axis = next((axis for axis in range(min(x.ndim, 2)) if x.shape[axis] == size), None)
    return x.clone() if axis is None else x.repeat([copies if at == axis else 1 for at in range(x.ndim)])


def _clock(model: nn.Module) -> float:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return read_clock()
