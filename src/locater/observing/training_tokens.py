"""The tokens that an attention layer reads in training, in memory of a fixed size: a few hundred of them
(`TokenSample`), and their mean square size (`TokenSize`).

Which tokens a sample takes is deterministic and consumes no random numbers. The tokens of one pass are numbered through
all sequences, padding left out, and cut into as many runs as the sample has places; one token is taken of each run, at
a place within it that moves on by the golden ratio, so that sequences and positions are covered evenly. Later passes,
and further depths of a layer that several depths share, replace an equal share of the places.

The size is r^2 = E |z|^2 / d, 1 for unit tokens: the mean over every token of a pass that is no padding. Passes until
the next `restart`, and the depths of a layer that several depths share, are averaged over all of their tokens. In a
distributed run all ranks have the same number.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from locater.calls.listeners import ListeningSwitch, is_listening, run_pass
from locater.calls.patching import replace_method
from locater.errors import LocaterError
from locater.layers import AttentionLayer
from locater.observing.input_covariances import attention_input
from locater.observing.residual_stream import Padding
from locater.sources.weights import ModuleWeights
from locater.torch_private import in_backward_pass

SIZE = 256  # tokens of a sample
GOLDEN = 40503  # 2^16 / golden ratio

_samples: WeakValueDictionary[int, TokenSample] = WeakValueDictionary()
_numbers = count()


class TokenListener(Protocol):
    """Receives the tokens that one attention module reads."""

    name: str  # of the module

    def receive(self, x: Tensor, shown: Tensor | None) -> None:
        """Tokens x (B, T, d); `shown` (B, T) says which are no padding, None that none is."""


class TokenSample:
    """Tokens (size, d) that one attention module read, and which places are `real`: a small batch does not fill all.

    `passes` counts the calls of the module that share the sample, `filled` says whether there was one at all. In a
    distributed run each rank fills a part of the places.
    """

    def __init__(self, name: str, width: int, like: Tensor, size: int = SIZE) -> None:
        self.name, self.number = name, next(_numbers)
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.tokens = torch.zeros(size, width, dtype=dtype, device=like.device)
        self.real = torch.zeros(size, dtype=torch.bool, device=like.device)
        self.passes, self.filled = 0, False
        _samples[self.number] = self

    def receive(self, x: Tensor, shown: Tensor | None) -> None:
        """Take tokens of x (B, T, d); `shown` (B, T) says which are no padding, None that none is."""
        precise = torch.promote_types(self.tokens.dtype, x.dtype)
        if (self.tokens.device, self.tokens.dtype) != (x.device, precise):  # the model has moved since
            self.tokens, self.real = self.tokens.to(x.device, precise), self.real.to(x.device)
        shown = None if shown is None else shown.to(x.device)
        take_tokens(x.detach(), shown, self.number, self.tokens, self.real)

    def restart(self) -> None:
        """The next pass begins a new sample; until then this one stays."""
        self.passes = 0

    def forget(self) -> None:
        """There is no sample until the next pass."""
        self.passes, self.filled = 0, False


# An operator of its own: it stays in the graph of a compiled model, and what it does with the sample happens when the
# graph runs, not when it is traced.
@torch.library.custom_op("locater::take_tokens", mutates_args=("tokens", "real"))
def take_tokens(x: Tensor, shown: Tensor | None, number: int, tokens: Tensor, real: Tensor) -> None:
    """Put tokens of x (B, T, d) into the places of the sample of this number."""
    sample = _samples.get(number)
    if sample is None or not x.shape[:2].numel() or in_backward_pass():
        return  # in a backward pass: activation checkpointing runs the layer a second time
    first, last = own_places(len(tokens))
    size = last - first
    if shown is None:
        index, new = chosen_tokens(x.shape[:2].numel(), size, x.device)
    else:
        shown = shown.flatten()
        index, new = _spread(shown.sum(), size, x.device)
        index = torch.sort(~shown, stable=True).indices[index]
    picked, here, filled = x.flatten(0, 1)[index].to(tokens.dtype), tokens[first:last], real[first:last]
    if sample.passes:
        change = _share(sample.passes, size, x.device)
        picked, new = torch.where(change[:, None], picked, here), torch.where(change, new, filled)
    here.copy_(picked)
    filled.copy_(new)
    sample.passes += 1
    sample.filled = True


@take_tokens.register_fake
def _(*args: object, **kwargs: object) -> None:
    return None


@lru_cache(maxsize=256)
def chosen_tokens(total: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which of `total` tokens are taken (size,), and which places they fill.

    >>> index, new = chosen_tokens(40, 8, torch.device("cpu"))
    >>> index.tolist(), bool(new.all())
    ([0, 8, 11, 19, 22, 25, 33, 36], True)
    >>> index, new = chosen_tokens(3, 8, torch.device("cpu"))
    >>> index[new].tolist()
    [0, 1, 2]
    """
    return _spread(total, size, device)


def _spread(total: int | Tensor, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The same for a total that may be a tensor, for which the device is not waited for."""
    place = torch.arange(size, device=device)
    start, end = place * total // size, (place + 1) * total // size
    within = (place * GOLDEN % (1 << 16)) * (end - start) >> 16
    return start + within, end > start


@lru_cache(maxsize=256)
def _share(passes: int, size: int, device: torch.device) -> Tensor:
    """The places (size,) that a pass takes over after this many others, so that all have an equal share."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(passes))
    return (order < size / (passes + 1)).to(device)


def own_places(size: int) -> tuple[int, int]:
    """The first and last of the places of a sample that this process fills; in a distributed run all ranks share it."""
    rank, ranks = rank_and_ranks()
    return rank * size // ranks, (rank + 1) * size // ranks


def rank_and_ranks() -> tuple[int, int]:
    """The number of this process, and how many there are."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


@torch.no_grad()
def share_samples(samples: Sequence[TokenSample]) -> None:
    """In a distributed run, give every rank the places of all others; every rank calls it. A penalty on the samples
    then has the same value and gradient everywhere. One collective.
    """
    if rank_and_ranks()[1] == 1:
        return
    parts = [x for sample in samples for x in (sample.tokens, sample.real)]
    flat = torch.cat([_own_rows_only(x).flatten() for x in parts])
    torch.distributed.all_reduce(flat)
    for x, part in zip(parts, flat.split([x.numel() for x in parts]), strict=True):
        x.copy_(part.view_as(x))


def _own_rows_only(x: Tensor) -> Tensor:
    """The places of this rank, zeros elsewhere."""
    first, last = own_places(len(x))
    own = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    own[first:last] = x[first:last]
    return own


def check_names(model: nn.Module, layers: Iterable[AttentionLayer]) -> None:
    """Refuse a layer that no module is, since its input is not seen."""
    modules = ModuleWeights(model).modules()
    missing = [layer.name for layer in layers if layer.name and layer.name not in modules]
    if missing:
        raise LocaterError(f"{missing[0]}: no module of {type(model).__name__} has this name, so its input is not seen")


def samples_of(model: nn.Module, layers: Mapping[int, AttentionLayer], size: int = SIZE) -> dict[int, TokenSample]:
    """An empty sample for each of these layers, by its number; refused where no module is the layer."""
    check_names(model, layers.values())
    return {
        number: TokenSample(layer.name, layer.width, layer.query.weight().detach(), size)
        for number, layer in layers.items()
    }


def listen_to_training_tokens(model: nn.Module, listeners: Iterable[TokenListener]) -> list[Callable[[], None]]:
    """From now on, listeners receive the tokens that their modules read in training mode, in a pass that begins with
    gradients enabled: a reference model and a rollout run without. Returns functions that end it.
    """
    weights, padding = ModuleWeights(model), Padding()
    switch = ListeningSwitch(loss_only=True, thread=None)
    ends: list[Callable[[], None]] = []
    for listener in listeners:
        module = weights.submodule(listener.name)
        ends.append(
            replace_method(module, "forward", partial(_run_and_listen, listener, padding, switch, _names(module)))
        )
    # last, so that masks are noted first where the model is itself the attention module
    ends.append(replace_method(model, "forward", partial(_run_noting_masks, padding, switch, _names(model))))
    return ends


def _names(module: nn.Module) -> list[str]:
    """The names of the arguments of a module; found once, since a compiled model cannot look for them."""
    return list(inspect.signature(module.forward).parameters)


def _run_noting_masks(
    padding: Padding,
    switch: ListeningSwitch,
    names: Iterable[str],
    model: nn.Module,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    padding.before(model, (), {**dict(zip(names, args, strict=False)), **kwargs})
    return run_pass(switch, model, forward, *args, **kwargs)


def _run_and_listen(
    listener: TokenListener,
    padding: Padding,
    switch: ListeningSwitch,
    names: list[str],
    module: nn.Module,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if module.training and is_listening(switch):
        read = attention_input(module, args, kwargs, names)
        if read is not None and hasattr(read.x, "full_tensor"):  # under sequence parallelism
            read = replace(read, x=read.x.full_tensor())
        if read is not None:
            shown = read.real if read.real is not None else padding.of(read.x, listener.name)
            if not padding.masks and shown is None:  # the model was not run as a whole
                shown = _shown_tokens(dict(zip(names, args, strict=False)) | kwargs, read.x)
            listener.receive(read.x, shown)
    return forward(*args, **kwargs)


def _shown_tokens(arguments: Mapping[str, Any], x: Tensor) -> Tensor | None:
    """Which tokens (B, T) of an attention module are no padding, by the masks in its own arguments: a real token
    may look at itself. None where they do not say.
    """
    padding, mask = arguments.get("key_padding_mask"), arguments.get("attention_mask")
    if isinstance(padding, Tensor) and padding.shape == x.shape[:2] and padding.dtype == torch.bool:
        return ~padding
    if not isinstance(mask, Tensor) or mask.shape != (len(x), 1, x.shape[1], x.shape[1]):
        return None
    itself = mask.diagonal(dim1=-2, dim2=-1)[:, 0]
    return itself if itself.dtype == torch.bool else itself > torch.finfo(itself.dtype).min / 2


# ---- the size of tokens


_sizes: WeakValueDictionary[int, TokenSize] = WeakValueDictionary()


class TokenSize:
    """Of one attention module. `sums` (2,) are the sum of |z|^2 / d over tokens, and the number of tokens.

    `passes` counts the calls of the module that share the sums, `filled` says whether there was one at all.

    >>> size = TokenSize("attention", torch.zeros(()))
    >>> size.receive(torch.tensor([[[3.0, 4.0], [1.0, 1.0], [9.0, 9.0]]]), torch.tensor([[True, True, False]]))
    >>> size.mean_square()                                             # (25 / 2 + 2 / 2) / 2
    tensor([6.7500])
    """

    def __init__(self, name: str, like: Tensor) -> None:
        self.name, self.number = name, next(_numbers)
        self.sums = torch.zeros(2, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        self.passes, self.filled = 0, False
        _sizes[self.number] = self

    def receive(self, x: Tensor, shown: Tensor | None) -> None:
        """Add the tokens of x (B, T, d); `shown` (B, T) says which are no padding, None that none is."""
        precise = torch.promote_types(self.sums.dtype, x.dtype)
        if (self.sums.device, self.sums.dtype) != (x.device, precise):  # the model has moved since
            self.sums = self.sums.to(x.device, precise)
        add_squares(x.detach(), None if shown is None else shown.to(x.device), self.number, self.sums)

    def mean_square(self) -> Tensor:
        """r^2, of shape (1,)."""
        return self.sums[:1] / self.sums[1:].clamp_min(1)

    def restart(self) -> None:
        """The next pass begins a new mean; until then this one stays."""
        self.passes = 0

    def load(self, sums: Tensor) -> None:
        """Take over the sums of a checkpoint."""
        self.sums.copy_(sums)
        self.passes, self.filled = 0, True


# An operator of its own, as for the samples of tokens: it stays in the graph of a compiled model, and what it does
# happens when the graph runs, not when it is traced.
@torch.library.custom_op("locater::add_squares", mutates_args=("sums",))
def add_squares(x: Tensor, shown: Tensor | None, number: int, sums: Tensor) -> None:
    """Add |z|^2 / d of the tokens z of x (B, T, d), and their number, to the sums of the size of this number."""
    size = _sizes.get(number)
    if size is None or not x.numel() or in_backward_pass():
        return  # in a backward pass: activation checkpointing runs the layer a second time
    squares = torch.linalg.vector_norm(x, dim=-1, dtype=sums.dtype).square() / x.shape[-1]  # (B, T)
    shown = torch.ones_like(squares, dtype=torch.bool) if shown is None else shown.bool()
    new = torch.stack([squares.where(shown, 0).sum(), shown.sum().to(sums)])
    sums.copy_(sums + new if size.passes else new)
    size.passes += 1
    size.filled = True


@add_squares.register_fake
def _(*args: object, **kwargs: object) -> None:
    return None


@torch.no_grad()
def share_sizes(sizes: Sequence[TokenSize]) -> None:
    """In a distributed run, give every rank the mean over the tokens of all; every rank calls it, as often as it likes:
    the sums become their mean over ranks. One collective.
    """
    ranks = rank_and_ranks()[1]
    if ranks == 1:
        return
    total = torch.stack([size.sums for size in sizes])
    torch.distributed.all_reduce(total)
    for size, sums in zip(sizes, total / ranks, strict=True):
        size.sums.copy_(sums)


def sizes_of(model: nn.Module, layers: Mapping[int, AttentionLayer]) -> dict[int, TokenSize]:
    """A size that is not known yet for each of these layers, by its number; refused where no module is the layer."""
    check_names(model, layers.values())
    return {number: TokenSize(layer.name, layer.query.weight().detach()) for number, layer in layers.items()}
