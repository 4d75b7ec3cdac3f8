"""The trainer's own models: the causal one is a Llama, the others are of the types `locater` and `locater_variant`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater_lab.models.transformer import Attention
from locater_lab.train import Shape, Transformer
from locater_lab.train.checkpoint import save
from tests.parity import Case, Record, decoder_sites, tokens


@contextlib.contextmanager
def tap(model: nn.Module, implementation: str, records: dict[str, Record]) -> Iterator[None]:
    """Replace the fused function and read what each attention module hands to it."""
    paths = {id(module): path for path, module in model.named_modules()}
    fused, forward = torch.nn.functional.scaled_dot_product_attention, Attention.forward
    running: list[Record] = []

    def attend(self: Attention, *args: Any, **kw: Any) -> Tensor:
        running.append(records[paths[id(self)]])
        return forward(self, *args, **kw)

    def see(q: Tensor, k: Tensor, v: Tensor, *args: Any, is_causal: bool, **kw: Any) -> Tensor:
        running[-1].calls += 1
        running[-1].logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        running[-1].mask = (mask.tril() if is_causal else mask)[None, None]
        return fused(q, k, v, *args, is_causal=is_causal, **kw)

    Attention.forward = attend  # type: ignore[method-assign]
    torch.nn.functional.scaled_dot_product_attention = see  # type: ignore[assignment]
    try:
        yield
    finally:
        Attention.forward = forward  # type: ignore[method-assign]
        torch.nn.functional.scaled_dot_product_attention = fused


def ids() -> dict[str, Tensor]:
    return {"inputs": tokens()["input_ids"]}


def pictures() -> dict[str, Tensor]:
    return {"inputs": torch.randint(256, (2, 8, 8, 3), generator=torch.Generator().manual_seed(1))}


def write(model: nn.Module, folder: Any) -> None:
    assert isinstance(model, Transformer)
    save(Path(folder).parent, Path(folder).name, model)


class Tiny(Transformer):
    def set_attn_implementation(self, how: str) -> None:
        """The harness chooses one; there is but the fused one."""
        assert how == "sdpa"


SIZES: dict[str, Any] = dict(vocabulary=64, layers=2, width=32, heads=4, kv_heads=4, hidden=48, length=9)
SHAPES = {
    "locater-llama": Shape(**{**SIZES, "kv_heads": 2}),
    "locater-causal": Shape(**SIZES, positions="learned"),
    "locater-qwen3": Shape(**{**SIZES, "heads": 8, "kv_heads": 2}, qk_norm=True),
    "locater-normed": Shape(**SIZES, causal=False, mlp="gelu", qk_norm=True),
    "locater-masked": Shape(**SIZES, causal=False, mlp="gelu"),
    "locater-sandwich": Shape(**SIZES, norm="sandwich", fusion="max"),
    "locater-image": Shape(**{**SIZES, "length": 4}, causal=False, positions="learned", image=(8, 8, 3)),
}
CASES = [
    Case(
        label,
        lambda shape=shape: Tiny(shape),
        pictures if shape.image else ids,
        decoder_sites(2),
        ("sdpa",),
        tap,
        save=write,
        spread=1.3,
    )  # type: ignore[misc]
    for label, shape in SHAPES.items()
]
