"""The residual stream between blocks: how alike its tokens are, how many directions they use, what sticks out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from locater.brief import brief
from locater.calls.listeners import Switch, counts_this_thread
from locater.calls.patching import replace_method
from locater.measures import massive_activations, rank_residual, ranks, token_cosine
from locater.observing.accumulate import is_of_another_thread, wide
from locater.torch_private import in_backward_pass

MEASURES = ("residual", "cosine", "centred_cosine", "stable_rank", "effective_rank", "top", "median", "top_ratio")


@dataclass(frozen=True)
class SeenLayer:
    """The stream after one block (`block` -1: before the first), averaged over sequences; docs of each in
    `locater.measures`.
    """

    stack: str  # the list of blocks it belongs to
    block: int
    name: str
    sequences: int
    residual: float | None = None  # ||X - 1 mean^T|| / ||X||: 0 is rank collapse
    cosine: float | None = None
    centred_cosine: float | None = None
    stable_rank: float | None = None
    effective_rank: float | None = None
    top: float | None = None  # largest |x|
    median: float | None = None
    top_ratio: float | None = None
    massive: bool = False

    __repr__ = brief

    def __getitem__(self, column: str) -> Any:
        return getattr(self, column)


@torch.library.custom_op("locater::measure_stream", mutates_args=("sums",))
def measure_stream(x: Tensor, real: Tensor | None, sums: Tensor) -> None:
    """Add the measures of a stream (B, T, d) to `sums` (MEASURES, 2): totals, and how many sequences had a value."""
    if in_backward_pass() or x.shape[1] < 2 or is_of_another_thread(sums):
        return
    with torch.autocast(x.device.type, enabled=False):
        directions, massive = ranks(x, real), massive_activations(x, real)
        cosines = (token_cosine(x, real), token_cosine(x, real, centred=True))
        ranks_of_x, largest = (directions.stable, directions.effective), (massive.top, massive.median, massive.ratio)
        values = torch.stack([rank_residual(x, real), *cosines, *ranks_of_x, *largest])  # in the order of MEASURES
    sums[:, 0] += values.nansum(1).to(sums)
    sums[:, 1] += values.isfinite().sum(1).to(sums)


@measure_stream.register_fake
def _(*args: object, **kwargs: object) -> None:
    return None


class Padding:
    """The padding masks of the batch that is running, by argument name, and which tokens of a stream are real."""

    def __init__(self) -> None:
        self.masks: dict[str, Tensor] = {}  # True where a token is real
        self.length = 0  # tokens of the batch
        self.pair = False  # encoder and decoder: the masks of one say nothing of the other

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = dict(kwargs)
        if args:
            names = list(inspect.signature(module.forward).parameters)
            named.update(zip(names, args, strict=False))
        masks = {name: x for name, x in named.items() if name.endswith("mask") and isinstance(x, Tensor)}
        self.masks = {name: x.bool() for name, x in masks.items() if name.endswith("attention_mask") and x.ndim == 2}
        # in PyTorch's own modules True hides, and a sequence may come without a batch
        self.masks |= {
            name: ~x.bool().view(-1, x.shape[-1]) for name, x in masks.items() if name.endswith("key_padding_mask")
        }
        tokens = next(
            (named[name] for name in ("input_ids", "inputs_embeds") if isinstance(named.get(name), Tensor)), None
        )
        self.length = 0 if tokens is None else tokens.shape[1]
        config = getattr(module, "config", None)
        self.pair = bool(getattr(config, "is_encoder_decoder", False)) or ("src" in named and "tgt" in named)

    def of(self, x: Tensor, path: str) -> Tensor | None:
        """Real tokens (B, T) of a stream at `path`, None where every token is."""
        parts = path.split(".")
        if any(part.startswith("vis") for part in parts):  # an image tower: masks are those of text tokens
            return None
        if self.pair and "decoder" in parts:
            return self._fitting_mask(x, "decoder_attention_mask", "tgt_key_padding_mask")
        return self._fitting_mask(
            x, "attention_mask", "src_key_padding_mask", "key_padding_mask", "tgt_key_padding_mask"
        )

    def of_memory(self, memory: Tensor) -> Tensor | None:
        """Real tokens (B, S) of the memory of cross-attention, None where every token is."""
        own = ("attention_mask", "src_key_padding_mask") if self.pair else ()
        return self._fitting_mask(memory, "encoder_attention_mask", "memory_key_padding_mask", *own)

    def _fitting_mask(self, x: Tensor, *names: str) -> Tensor | None:
        """The first of these masks that there is, if it fits x; a mask over cached tokens ends with those of x."""
        mask = next((self.masks[name] for name in names if name in self.masks), None)
        if mask is None or mask.shape[0] != x.shape[0] or mask.shape[1] < x.shape[1]:
            return None
        return mask[:, -x.shape[1] :] if x.shape[1] in (mask.shape[1], self.length) else None


@dataclass
class StreamPoint:
    """One point of the residual stream and the sums of its measures."""

    stack: str
    block: int
    name: str
    module: nn.Module
    sums: Tensor

    def row(self) -> SeenLayer | None:
        totals, counts = self.sums.cpu().double().unbind(1)
        if not float(counts.max()):
            return None
        means = {name: float(t / c) if c else None for name, t, c in zip(MEASURES, totals, counts, strict=True)}
        massive = (means["top"] or 0) > 100 and (means["top_ratio"] or 0) >= 1000
        return SeenLayer(self.stack, self.block, self.name, int(counts.max()), **means, massive=massive)


def stream_points(model: nn.Module, attention: list[str]) -> list[StreamPoint]:
    """Where to listen: after each block that holds attention, and before the first of each stack."""
    paths = dict(model.named_modules())
    points: list[StreamPoint] = []
    for stack, members in _stacks(model, attention).items():
        for number, path in enumerate(members):
            module = paths[path]
            device = next((p.device for p in module.parameters()), torch.device("cpu"))
            for block in (-1, number) if number == 0 else (number,):
                sums = torch.zeros(len(MEASURES), 2, dtype=wide(device), device=device)
                points.append(StreamPoint(stack, block, path, module, sums))
    return points


def _stacks(model: nn.Module, attention: list[str]) -> dict[str, list[str]]:
    """Lists of blocks by path: outermost containers of which more than one member, or the only one, holds attention."""
    stacks: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(
            path.startswith(f"{stack}.") for stack in stacks
        ):
            continue
        members = [f"{path}.{name}" if path else name for name, _ in module.named_children()]
        holding = [member for member in members if any(name.startswith(f"{member}.") for name in attention)]
        if len(holding) > 1 or (holding and len(members) == 1):
            stacks[path] = holding
    return stacks


def listen_to_stream(points: list[StreamPoint], padding: Padding, switch: Switch) -> list[Callable[[], None]]:
    """Listen at every block; returns functions that end it, to be called in reverse."""
    return [replace_method(point.module, "forward", partial(_run_block, point, padding, switch)) for point in points]


def _run_block(
    point: StreamPoint,
    padding: Padding,
    switch: Switch,
    module: nn.Module,
    forward: Callable[..., Any],
    *args: Any,
    **kw: Any,
) -> Any:
    if switch.on and counts_this_thread(switch) and point.block < 0:
        _measure_point(point, padding, args[0] if args else next(iter(kw.values())))
    out = forward(*args, **kw)
    if switch.on and counts_this_thread(switch) and point.block >= 0:
        _measure_point(point, padding, out[0] if isinstance(out, tuple) else out)
    return out


def _measure_point(point: StreamPoint, padding: Padding, x: Any) -> None:
    if not isinstance(x, Tensor) or x.ndim != 3 or x.is_nested:
        return
    if time_first(point.module):
        x = x.transpose(0, 1)
    measure_stream(x.detach(), padding.of(x, point.name), point.sums)


def time_first(module: nn.Module) -> bool:
    """Whether a block's tensors are (T, B, d): XLNet, and PyTorch's own unless batch_first."""
    if type(module).__name__.startswith("XLNet"):
        return True
    inner = module if isinstance(module, nn.MultiheadAttention) else getattr(module, "self_attn", None)
    return isinstance(inner, nn.MultiheadAttention) and not inner.batch_first
