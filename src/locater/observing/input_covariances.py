"""`statistics()`: mean and covariance of the input of every attention layer, over a few thousand tokens of text; and
the hooks that take these inputs while batches pass through a model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from locater.defaults import Progress
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.inputs.text import Batch, Text, TextWindow, batches
from locater.measures import ChannelMoments, normality_distance, top_directions
from locater.observing.residual_stream import Padding, time_first
from locater.observing.run_model import run_model
from locater.predict.statistics_file import Input, Statistics
from locater.sources.weights import ModuleWeights

MEMORY = ("key_value_states", "encoder_hidden_states", "cross_attention_states")


@dataclass(frozen=True)
class AttentionInput:
    """The stream (B, T, d) that queries read and, for cross-attention, the one (B, S, e) that keys read."""

    x: Tensor
    memory: Tensor | None = None
    real: Tensor | None = None  # (B, T), where x itself says which tokens there are: a nested tensor


def attention_input(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str] | None = None
) -> AttentionInput | None:
    """The input of a call of an attention module, None where it is not known. `names` are those of its arguments, where
    they were looked up before.
    """
    names = list(inspect.signature(module.forward).parameters) if names is None else names
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    if isinstance(module, nn.MultiheadAttention):
        x, memory = arguments.get("query"), arguments.get("key")
        memory = None if memory is x else memory
    else:
        x = arguments.get(names[0]) if names else None
        x = kwargs.get("hidden_states") if x is None else x
        memory = next((arguments[name] for name in MEMORY if isinstance(arguments.get(name), Tensor)), None)
    if isinstance(x, Tensor) and x.is_nested:
        lengths = torch.tensor([len(part) for part in x.unbind()], device=x.device)
        x = torch.nested.to_padded_tensor(x, 0.0).detach()
        return AttentionInput(x, None, torch.arange(x.shape[1], device=x.device) < lengths[:, None])
    sequence = _sequence(module, x)
    return None if sequence is None else AttentionInput(sequence, _sequence(module, memory))


def _sequence(module: nn.Module, x: Any) -> Tensor | None:
    if not isinstance(x, Tensor) or x.is_nested:
        return None
    if x.ndim == 2 and isinstance(module, nn.MultiheadAttention):
        return x.detach()[None]
    return (x.transpose(0, 1) if time_first(module) else x).detach() if x.ndim == 3 else None


def listen_to_input(module: nn.Module, see: Callable[[AttentionInput], None]) -> Callable[[], None]:
    """Call `see` with the input of every call of an attention module; returns a function that ends it."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        read = attention_input(module, args, kwargs)
        if read is not None:
            see(read)

    return module.register_forward_pre_hook(hook, with_kwargs=True).remove


PRECISE = 1024  # up to this width covariances are summed in float64
SAMPLE = 4096  # tokens for the test of normality
TOP = 4  # principal directions reported


def statistics(
    model: nn.Module, text: Text, *, progress: Progress | None = None, **window: Unpack[TextWindow]
) -> Statistics:
    """Run `model` over some `text` and keep the mean and covariance of every attention input.

    `text` is a string, a path, token ids, or batches as the model takes them; `tokenizer`, `length` (256 tokens a
    sequence), `tokens` (about 4,096 in all) and `batch` (8 sequences) say how it is cut. Used by `locater.scan(source,
    statistics=...)`.

    >>> block = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    >>> encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    >>> first = statistics(encoder, [{"src": torch.randn(4, 32, 16)}]).inputs[0]
    >>> first.covariance.shape, first.tokens                   # without the first token of each sequence
    (torch.Size([16, 16]), 124)
    """
    return statistics_of_batches(model, batches(model, text, **window), progress)


def statistics_of_batches(model: nn.Module, parts: list[Batch], progress: Progress | None = None) -> Statistics:
    """The same, from batches."""
    weights = ModuleWeights(model)
    padding = Padding()
    sums = []
    with ExitStack() as stack:
        for number, layer in enumerate(attention_layers(model)):
            here = _InputSums(number, layer.name, layer.kind, padding)
            stack.callback(listen_to_input(weights.submodule(layer.name), here.receive))
            sums.append(here)
        for part in progress(parts, len(parts)) if progress else parts:
            padding.before(model, (), part)
            run_model(model, part)
    inputs = [x for x in (here.input() for here in sums) if x is not None]
    if not inputs:
        raise LocaterError(f"{type(model).__name__}: no attention layer was called with tokens of a known shape")
    # as the layer sees it: an image is a sequence of patches
    length = next(here.length for here in sums if here.length)
    silent = {here.number for here in sums} - {x.layer for x in inputs}
    return Statistics(type(model).__name__, inputs[0].tokens, length, inputs, tuple(sorted(silent)))


class _InputSums:
    """Sums over the inputs of one layer."""

    def __init__(self, number: int, name: str, kind: str, padding: Padding) -> None:
        self.number, self.name, self.kind, self.padding = number, name, kind, padding
        self.own: _CovarianceSums | None = None
        self.memory: _CovarianceSums | None = None
        self.first: Tensor | None = None
        self.sequences = self.real = self.length = 0
        self.sample: list[Tensor] = []
        self.moments: ChannelMoments | None = None

    def receive(self, read: AttentionInput) -> None:
        x, real = read.x, self.padding.of(read.x, self.name) if read.real is None else read.real
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if real is None else real.to(x.device)
        self.length = max(self.length, x.shape[1])
        self.sequences += int(real.any(1).sum())
        self.real += int(real.sum())
        later = x[real] if self.kind == "cross" else x[self._split(x, real)]  # (tokens, d)
        if len(later):
            self.own = self.own or _CovarianceSums(x)
            self.own.add(later)
            self.moments = (self.moments or ChannelMoments.empty(x.shape[-1], x.device)).add(later.float())
        if sum(len(part) for part in self.sample) < SAMPLE:
            self.sample.append(later.float().cpu())
        if read.memory is not None and self.kind == "cross":
            shown = self.padding.of_memory(read.memory)
            self.memory = self.memory or _CovarianceSums(read.memory)
            self.memory.add(read.memory.flatten(0, 1) if shown is None else read.memory[shown.to(x.device)])

    def _split(self, x: Tensor, real: Tensor) -> Tensor:
        """Keep the first real token of each sequence apart; returns where the others are."""
        start = real.to(torch.int8).argmax(1)
        first = x[torch.arange(len(x), device=x.device), start][real.any(1)].double().sum(0).cpu()
        self.first = first if self.first is None else self.first + first
        return real & (torch.arange(x.shape[1], device=x.device) != start[:, None])

    def input(self) -> Input | None:
        if (
            self.own is None
            or self.moments is None
            or (self.own.count < 2 if self.kind == "self" else self.memory is None)
        ):
            return None  # a layer that pools may have one query
        mean, covariance = self.own.moments()
        memory = (None, None) if self.memory is None else self.memory.moments()
        normal = normality_distance(torch.cat(self.sample)[:SAMPLE])
        top = top_directions(mean.double(), covariance.double(), min(TOP, len(mean)))
        first = None if self.first is None or not self.sequences else (self.first / self.sequences).float()
        return Input(
            self.number,
            self.name,
            self.kind,
            self.own.count,
            mean,
            covariance,
            first,
            memory[0],
            memory[1],
            mean_share=float(self.moments.mean_share),
            kurtosis=float(self.moments.median_kurtosis),
            normality=float(normal.mean),
            normality_expected=float(normal.expected),
            directions=tuple(top.principal.tolist()),
            length=round(self.real / self.sequences),
            memory_length=0 if self.memory is None else round(self.memory.count / self.sequences),
        )


class _CovarianceSums:
    """Sums for a mean and a covariance. The mean of the first batch is taken off all tokens, so that a large mean costs
    no digits.
    """

    def __init__(self, like: Tensor) -> None:
        width = like.shape[-1]
        self.shift: Tensor | None = None
        precise = width <= PRECISE and like.device.type != "mps"
        self.dtype = torch.float64 if precise else torch.float32
        self.count = 0
        self.total = torch.zeros(width, dtype=self.dtype, device=like.device)
        self.square = torch.zeros(width, width, dtype=self.dtype, device=like.device)

    def add(self, x: Tensor) -> None:
        x = x.to(self.dtype)
        self.shift = x.mean(0).nan_to_num() if self.shift is None else self.shift
        x = x - self.shift
        self.count += len(x)
        self.total += x.sum(0)
        self.square += x.mT @ x

    def moments(self) -> tuple[Tensor, Tensor]:
        mean = self.total / self.count
        covariance = self.square / self.count - torch.outer(mean, mean)
        mean = mean if self.shift is None else mean + self.shift
        return mean.float().cpu(), ((covariance + covariance.mT) / 2).float().cpu()
