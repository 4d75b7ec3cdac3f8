"""`decompose()`: a model run once on an input, and frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.explain.freezing import Freezer, Mlp
from locater.explain.path_sums import Paths
from locater.explain.recording import Recording
from locater.families import Block
from locater.families.registry import block_of
from locater.layers import AttentionLayer
from locater.observing.inputs import IDS, as_keywords, check_tokens, run_checked
from locater.sources.sources import config_of
from locater.sources.weights import ModuleWeights
from locater.torch_private import unwrap_compiled

# Inputs that a model cannot take, refused before it runs: on a GPU the model's own error would end the process.


def check_inputs(model: nn.Module, keywords: Mapping[str, Any]) -> None:
    """Refuse inputs without a batch axis or without tokens, more tokens than the model has positions, and token ids
    that are not in its vocabulary.
    """
    name = next((name for name in (*IDS, *keywords) if isinstance(keywords.get(name), Tensor)), None)
    x = None if name is None else keywords[name]
    if x is None:
        return
    check_tokens(model, str(name), x)
    if x.ndim != 2 or x.is_floating_point():
        return
    for path, table in model.named_modules():
        kind = path.rpartition(".")[2]
        positions = isinstance(table, nn.Embedding) and ("position" in kind or kind == "wpe")
        if positions and x.shape[1] > table.num_embeddings:
            raise LocaterError(
                f"the input has {x.shape[1]} tokens and {path} has {table.num_embeddings} positions: shorten it"
            )


def decompose(
    model: nn.Module, batch: Mapping[str, Tensor] | Tensor, *, mlp: Mlp = "source", final_norm: bool = True
) -> Paths:
    """Run `model` once on `batch` (keywords, or its first argument) and freeze it into paths.

    `mlp` is "source" or "linear" (`locater.explain.path_sums`). The output is the stream after the final norm, whose
    denominators are frozen too, or before it with `final_norm=False`. It works for every family whose record says where
    the parts of a block are (docs/explain.md lists them). Everything is computed in the model's precision, float32 at
    least. transformers computes the RMSNorms of most models, and the eager softmax of some, in float32 whatever the
    model's precision, which shows in `gap`.

    >>> from locater_lab.train import Shape, Transformer
    >>> _ = torch.manual_seed(0)
    >>> model = Transformer(Shape(vocabulary=64, layers=3, width=32, heads=4, kv_heads=2, hidden=48), scale=0.2)
    >>> paths = decompose(model, torch.arange(10)[None])
    >>> by_length = paths.by_length()                          # 5^3 = 125 paths, by length 0 to 3
    >>> torch.allclose(by_length.total.sum(0), paths.output, atol=1e-5)
    True
    >>> [paths.count(k) for k in range(4)], tuple(paths.contribution((2, None, 0)).shape)
    ([1, 12, 48, 64], (1, 10, 32))
    >>> torch.allclose(paths.sum_of([(None, None, None)]), by_length.input[0], atol=1e-5)
    True
    >>> paths.through_heads().norm.shape
    torch.Size([3, 4])
    """
    check_mlp(mlp)
    recording, keywords, _ = recorded_run(model, batch)
    return frozen_paths(recording, keywords, mlp, final_norm)


def check_mlp(mlp: str) -> None:
    if mlp not in ("source", "linear"):
        raise LocaterError(f"mlp={mlp!r} is not known: use 'source' or 'linear'")


def recorded_run(
    model: nn.Module, batch: Mapping[str, Tensor] | Tensor, readout: bool = False
) -> tuple[Recording, dict[str, Tensor], Any]:
    """One run of the model: its recording, the keywords it was called with, and its output. With `readout`, the output
    has the gradient of what the model does with its last stream.
    """
    keywords = as_keywords(unwrap_compiled(model), batch)
    block = _block_of(model)
    layers = attention_layers(model)
    _check_one_stack(model, block, layers)
    recording = Recording(ModuleWeights(model), block, layers)
    check_inputs(model, keywords)
    with recording.listening(readout):
        output = run_checked(model, keywords)
    return recording, keywords, output


@torch.no_grad()
def frozen_paths(recording: Recording, keywords: Mapping[str, Tensor], mlp: Mlp, final_norm: bool = True) -> Paths:
    """A recorded run, frozen; refused where its paths do not sum to its output."""
    paths = Freezer(recording, mlp).paths(final_norm, keywords.get("attention_mask"))
    _check_sum(paths, next(recording.weights.module.parameters()).dtype)
    return paths


def _block_of(model: nn.Module) -> Block:
    kind = config_of(model).get("model_type")
    name = f"{type(model).__name__}: " + (f"model_type {kind!r}" if kind else "a model without a model_type")
    try:
        block = block_of(model)
    except LocaterError as error:
        raise LocaterError(f"{name} is not split into linear steps: {error}") from None
    if block is None:
        raise LocaterError(
            f"{name} is not split into linear steps: describe its blocks with locater.register(), "
            "docs/add-a-family.md; locater.explain.gradient_input needs no such record"
        )
    return block


def _check_one_stack(model: nn.Module, block: Block, layers: Sequence[AttentionLayer]) -> None:
    """Refuse models of which one stream is not the whole."""
    cross = next((layer.name for layer in layers if layer.kind != "self"), None)
    if cross is not None:
        raise LocaterError(
            f"{cross}: paths go through one stack, and cross-attention joins two: pass a model without it, "
            "or use locater.explain.relevance"
        )
    stacks = dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", block.path(layer)) for layer in layers)
    if len(stacks) > 1:
        raise LocaterError(
            f"{type(model).__name__}: paths go through one stack, and it has {' and '.join(stacks)}: pass one of them"
        )


def _check_sum(paths: Paths, dtype: torch.dtype) -> None:
    """Refuse a sum that is not the output: then the model has parts that its family does not describe."""
    most = tolerance(dtype)
    if not paths.gap <= most:
        raise LocaterError(
            f"{paths.name}: its paths sum to its output only within {paths.gap:.1e} (expected {most:.0e}): "
            + (
                "torch.autocast rounds what it computes: leave its block"
                if torch.is_autocast_enabled(paths.output.device.type)
                else "it has parts that its model_type does not have, or its output is not finite"
            )
        )


def tolerance(dtype: torch.dtype) -> float:
    """How far a sum may be from the output of a model in this precision, relative to it."""
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
