"""Inputs that a model cannot take, refused before it runs: on a GPU the model's own error would end the process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from locater.errors import LocaterError
from locater.observing.inputs import IDS, check_tokens


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
