"""The harness behind the spine of `heads/`: run a real model, record what its attention did, compare with
`AttentionLayer`.

A case is a tiny model. Every parameter is redrawn, because at initialisation biases are zero and gains constant and a
layout mistake can hide behind that. The model runs in float64 on a left-padded batch, once per attention
implementation, with its own attention function intercepted; calls are counted, so a tap that is never reached fails.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from locater.layers import AttentionLayer

TOLERANCE = 1e-6  # of the reference's standard deviation
STORED = 1e-5  # the same, for a model that is stored in 16 bits
EPS = 0.05  # norms of the tiny models: large enough that forgetting it shows


@dataclass(frozen=True)
class Site:
    """Where to listen, by module path. `stream` is the module whose input is x; `out` the one whose output is the
    layer's.
    """

    attention: str
    stream: str | None
    out: str
    memory: str | None = None  # cross-attention: the module whose input is the memory stream
    # key of the batch that marks the real tokens of x; all are, where the batch has no such key
    padding: str | None = "attention_mask"


@dataclass
class Record:
    """What one attention layer of the real model did in one forward pass. Axes B, H, T, S."""

    x: Tensor | None = None
    memory: Tensor | None = None
    logits: Tensor | None = None
    maps: Tensor | None = None
    mask: Tensor | None = None  # True = may look, as the model built it
    output: Tensor | None = None
    calls: int = 0
    padding: str | None = "attention_mask"


Tap = Callable[[nn.Module, str, dict[str, Record]], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class Case:
    """A tiny model of one family."""

    label: str
    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    sites: Sequence[Site]
    implementations: tuple[str, ...] = ("eager", "sdpa")
    tap: Tap | None = None  # None: the attention interface of transformers
    call: Callable[[nn.Module, dict[str, Tensor]], Any] | None = None  # how to run it, where model(**batch) will not do
    save: Callable[[nn.Module, Any], None] | None = None  # how to write it, where save_pretrained will not do
    spread: float = 1.0  # of redrawn matrices, so that logits have a standard deviation of 1 to 3
    redraw_more: Callable[[nn.Module], None] | None = None
    memory_padding: str | None = None  # key of the batch that masks the memory; None: the memory is not padded
    # the model adds a number to whole rows of logits, which softmax does not see: compare centred rows
    shift_free: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # for attention_layers on the checkpoint


def tokens(vocabulary: int = 64, length: int = 9, pads: int = 3) -> dict[str, Tensor]:
    """Two rows, the second left-padded."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, :pads] = 0
    return {"input_ids": torch.randint(3, vocabulary, (2, length), generator=generator), "attention_mask": mask}


def decoder_sites(
    layers: int,
    prefix: str = "model.layers",
    attention: str = "self_attn",
    norm: str = "input_layernorm",
    out: str = "o_proj",
) -> list[Site]:
    return [
        Site(f"{prefix}.{i}.{attention}", f"{prefix}.{i}.{norm}", f"{prefix}.{i}.{attention}.{out}")
        for i in range(layers)
    ]


@torch.no_grad()
def redraw(model: nn.Module, spread: float = 1.0, seed: int = 0) -> None:
    """Every parameter from a normal: matrices by fan-in, embeddings of unit size, biases and gains wide."""
    generator = torch.Generator().manual_seed(seed)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        if p.ndim >= 2 and id(p) not in tables and min(p.shape) > 1:
            p.copy_(noise * spread / min(p.shape[0], p[0].numel()) ** 0.5)
        elif p.ndim >= 2:
            p.copy_(noise)
        elif name.endswith("bias"):
            p.copy_(0.5 * noise)
        else:
            p.copy_(1 + 0.5 * noise)


@contextlib.contextmanager
def interface_tap(model: nn.Module, implementation: str, records: dict[str, Record]) -> Iterator[None]:
    """Intercept the attention function of a transformers model; attention and mask are registered together."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    paths = {id(module): path for path, module in model.named_modules()}

    def tap(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kw: Any,
    ) -> Any:
        eager = implementation == "eager"
        if attention_mask is not None and attention_mask.is_floating_point():
            # transformers' eager softmax runs in float32, where float64's lowest value is -inf and a row of it is NaN
            attention_mask = attention_mask.clamp_min(torch.finfo(torch.float32).min)
        base = (
            sys.modules[type(module).__module__].eager_attention_forward
            if eager
            else ALL_ATTENTION_FUNCTIONS[implementation]
        )
        out = base(module, query, key, value, attention_mask, *args, **kw)
        record = records[paths[id(module)]]
        record.calls += 1
        logits = kw["scaling"] * (query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT)
        if kw.get("position_bias") is not None:
            logits = logits + kw["position_bias"]
        record.logits = softcap(logits, kw.get("softcap"))
        record.maps = out[1] if eager else None
        if attention_mask is not None:
            record.mask = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        return out

    name = f"parity_{implementation}"
    AttentionInterface.register(name, tap)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def softcap(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else cap * torch.tanh(logits / cap)


def record(case: Case, model: nn.Module, implementation: str, gradients: bool = False) -> list[Record]:
    """Run the model once, with or without gradients; one record per site."""
    records = {site.attention: Record(padding=site.padding) for site in case.sites}
    handles = []
    for site in case.sites:
        here = records[site.attention]
        handles.append(
            model.get_submodule(site.stream or site.attention).register_forward_pre_hook(
                _keep(here, "x"), with_kwargs=True
            )
        )
        handles.append(model.get_submodule(site.out).register_forward_hook(_keep_output(here)))
        if site.memory is not None:
            handles.append(
                model.get_submodule(site.memory).register_forward_pre_hook(_keep(here, "memory"), with_kwargs=True)
            )
    batch = case.batch()
    try:
        with torch.set_grad_enabled(gradients), (case.tap or interface_tap)(model, implementation, records):
            case.call(model, batch) if case.call else model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    return [records[site.attention] for site in case.sites]


def _keep(here: Record, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        setattr(here, name, (args[0] if args else kwargs["hidden_states"]).detach())

    return hook


def _keep_output(here: Record) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, out: Any) -> None:
        here.output = (out[0] if isinstance(out, tuple) else out).detach()

    return hook


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model = case.build().double().eval()
    redraw(model, case.spread)
    if case.redraw_more:
        with torch.no_grad():
            case.redraw_more(model)
    return model


@torch.no_grad()
def disagreement(layer: AttentionLayer, seen: Record, case: Case) -> dict[str, float]:
    """Largest difference of each quantity, in standard deviations of the reference; only real queries and visible keys
    count.
    """
    batch = case.batch()
    x, memory = seen.x, seen.memory
    assert x is not None
    rows = _real(batch, seen.padding, x)
    padding = rows if memory is None else _real(batch, case.memory_padding, memory)
    visible = layer.visible(x.shape[1], (x if memory is None else memory).shape[1], padding) & rows[:, None, :, None]
    found: dict[str, float] = {}
    if seen.mask is not None:
        found["mask"] = float((visible != (seen.mask & rows[:, None, :, None])).sum())
    if seen.logits is not None:
        ours, theirs = layer.logits(x, memory), seen.logits
        if case.shift_free:
            ours, theirs = (_centred(z, visible) for z in (ours, theirs))
        found["logits"] = _apart(ours, theirs, visible)
    if seen.maps is not None:
        found["maps"] = _apart(layer.attention(x, memory, padding=padding), seen.maps, visible)
    assert seen.output is not None
    found["output"] = _apart(layer.output(x, memory, padding=padding), seen.output, rows[..., None])
    return found


def _real(batch: dict[str, Tensor], key: str | None, x: Tensor) -> Tensor:
    return batch[key].bool() if key in batch else torch.ones(x.shape[:2], dtype=torch.bool)


def _centred(logits: Tensor, visible: Tensor) -> Tensor:
    return logits - (logits * visible).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp_min(1)


def _apart(ours: Tensor, theirs: Tensor, where: Tensor) -> float:
    where = where.expand(theirs.shape)
    spread = theirs[where].std()
    return float((ours - theirs)[where].abs().max() / spread)
