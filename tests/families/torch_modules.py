"""PyTorch's own attention: nn.MultiheadAttention, nn.TransformerEncoder and nn.Transformer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity import EPS, Case, Record, Site

WIDTH, HEADS = 32, 4


@contextlib.contextmanager
def tap(model: nn.Module, implementation: str, records: dict[str, Record]) -> Iterator[None]:
    """sdpa: replace the fused function and read what it is given. eager: ask every module for its maps."""
    paths = {id(module): path for path, module in model.named_modules()}
    fused, forward = torch.nn.functional.scaled_dot_product_attention, nn.MultiheadAttention.forward
    running: list[Record] = []

    def attend(self: nn.MultiheadAttention, *args: Any, **kw: Any) -> Any:
        running.append(records[paths[id(self)]])
        if implementation == "sdpa":
            return forward(self, *args, **kw)
        out, maps = forward(self, *args, **{**kw, "need_weights": True, "average_attn_weights": False})
        running[-1].calls += 1
        running[-1].maps = maps
        return out, maps

    def see(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *args: Any, **kw: Any) -> Tensor:
        running[-1].calls += 1
        running[-1].logits = q @ k.mT * q.shape[-1] ** -0.5
        if attn_mask is not None:
            running[-1].mask = (attn_mask == 0)[:, :1]
        return fused(q, k, v, attn_mask, *args, **kw)

    nn.MultiheadAttention.forward = attend  # type: ignore[method-assign]
    if implementation == "sdpa":
        torch.nn.functional.scaled_dot_product_attention = see  # type: ignore[assignment]
    try:
        with torch.enable_grad():  # without it nn.TransformerEncoder takes a fast path past its own attention module
            yield
    finally:
        nn.MultiheadAttention.forward = forward  # type: ignore[method-assign]
        torch.nn.functional.scaled_dot_product_attention = fused


def stream(batch: int = 2, length: int = 9, seed: int = 1) -> Tensor:
    return torch.randn(batch, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def padded() -> dict[str, Tensor]:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    return {"src": stream(), "attention_mask": mask}


def encode(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(batch["src"], src_key_padding_mask=batch["attention_mask"] == 0)


def alone(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(
        batch["src"], batch["src"], batch["src"], key_padding_mask=batch["attention_mask"] == 0, need_weights=False
    )


def both(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(batch["src"], batch["tgt"])


def encoder(norm_first: bool) -> nn.Module:
    block = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 48, dropout=0.0, batch_first=True, norm_first=norm_first, layer_norm_eps=EPS
    )
    return nn.TransformerEncoder(block, 2, enable_nested_tensor=False)


def whole(norm_first: bool) -> nn.Module:
    return nn.Transformer(
        WIDTH, HEADS, 2, 2, 48, dropout=0.0, batch_first=True, norm_first=norm_first, layer_norm_eps=EPS
    )


def save(model: nn.Module, folder: Path, **config: Any) -> None:
    from safetensors.torch import save_file

    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({"model_type": "torch", "num_heads": HEADS, "layer_norm_eps": EPS, **config})
    )


def site(stack: str, i: int, attention: str, norm: str | None, memory: str | None = None) -> Site:
    here = f"{stack}layers.{i}.{attention}"
    return Site(here, None if norm is None else f"{stack}{norm}", here, memory)


def make(label: str, build: Any, call: Any, sites: list[Site], batch: Any = padded, **config: Any) -> Case:
    return Case(label, build, batch, sites, tap=tap, call=call, save=partial(save, **config))


PRE = dict(norm_first=True)
DECODER_PRE = [
    s
    for i in range(2)
    for s in (
        site("decoder.", i, "multihead_attn", f"layers.{i}.norm2", "encoder.norm"),
        site("decoder.", i, "self_attn", f"layers.{i}.norm1"),
    )
]
DECODER_POST = [
    s
    for i in range(2)
    for s in (
        site("decoder.", i, "multihead_attn", f"layers.{i}.norm1", "encoder.norm"),
        site("decoder.", i, "self_attn", f"layers.{i - 1}.norm3" if i else None),
    )
]
CASES = [
    make(
        "torch-encoder-pre",
        lambda: encoder(True),
        encode,
        [site("", i, "self_attn", f"layers.{i}.norm1") for i in range(2)],
        **PRE,
    ),
    make(
        "torch-encoder-post",
        lambda: encoder(False),
        encode,
        [site("", 0, "self_attn", None), site("", 1, "self_attn", "layers.0.norm2")],
    ),
    make("torch-attention", lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), alone, [Site("", None, "")]),
    make(
        "torch-transformer-pre",
        lambda: whole(True),
        both,
        [*DECODER_PRE, *(site("encoder.", i, "self_attn", f"layers.{i}.norm1") for i in range(2))],
        lambda: {"src": stream(), "tgt": stream(length=7, seed=2)},
        **PRE,
    ),
    make(
        "torch-transformer-post",
        lambda: whole(False),
        both,
        [*DECODER_POST, site("encoder.", 0, "self_attn", None), site("encoder.", 1, "self_attn", "layers.0.norm2")],
        lambda: {"src": stream(), "tgt": stream(length=7, seed=2)},
    ),
]
