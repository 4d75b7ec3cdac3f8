"""One forward pass of a model over a batch, in evaluation mode, and the checks of its inputs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from locater.errors import LocaterError, first_line
from locater.inputs.text import Batch

IDS = ("input_ids", "inputs", "ids")  # names of token ids among the inputs of models
TOWERS = {"input_ids": "get_text_features", "pixel_values": "get_image_features"}


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients, then as before."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, was in training.items():
            module.training = was


def check_model(model: Any) -> None:
    """Refuse what is no module."""
    if not isinstance(model, nn.Module):
        way_out = "load it first; locater.explanations and locater.probe take a folder or a hub id"
        raise LocaterError(f"{model!r:.60} is no nn.Module: {way_out}")


def run_model(model: nn.Module, batch: Batch, gradients: bool = False) -> Any:
    """One forward pass in evaluation mode, on the model's device. Of a model with a text and an image tower, the tower
    that the batch is for.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    arguments = {name: _ready(x, gradients).to(device) if isinstance(x, Tensor) else x for name, x in batch.items()}
    towers = [method for name, method in TOWERS.items() if name in arguments]
    two = all(hasattr(model, method) for method in TOWERS.values())
    forward = getattr(model, towers[0]) if two and len(towers) == 1 else model
    with evaluation_mode(model), torch.set_grad_enabled(gradients):
        return forward(**arguments)


def _ready(x: Tensor, gradients: bool) -> Tensor:
    """A tensor of inference mode takes part in no graph; a copy does."""
    return x.clone() if gradients and x.is_inference() else x


def as_keywords(model: nn.Module, inputs: Mapping[str, Any] | Tensor) -> dict[str, Any]:
    """Inputs as keywords of a model; a tensor is its first argument."""
    check_model(model)
    if isinstance(inputs, Tensor):
        return {next(iter(inspect.signature(model.forward).parameters)): inputs}
    if not isinstance(inputs, Mapping):
        raise LocaterError(
            f"inputs are a {type(inputs).__name__}: give token ids as a tensor, or the keywords that the model takes"
        )
    return dict(inputs)


def run_checked(model: nn.Module, batch: Batch, gradients: bool = False) -> Any:
    """`run_model`, with one line about inputs that the model does not take."""
    for name in IDS:
        x = batch.get(name)
        if isinstance(x, Tensor) and not x.is_floating_point():
            check_tokens(model, name, x)
    try:
        return run_model(model, batch, gradients)
    except LocaterError:
        raise
    except Exception as error:  # of the model's own code
        raise LocaterError(f"{type(model).__name__}: does not run on these inputs ({first_line(error)})") from error


def check_tokens(model: nn.Module, name: str, x: Tensor) -> None:
    """Refuse an input without a batch axis or without tokens, and token ids that are not in the vocabulary: on a GPU
    the model's own error would end the process.
    """
    if x.ndim < 2 or not x.numel():
        raise LocaterError(f"{name} has the shape {tuple(x.shape)}: give one token or more, with a batch axis in front")
    if x.ndim != 2 or x.is_floating_point():
        return
    words_of: Any = getattr(model, "get_input_embeddings", None)
    try:
        words = None if words_of is None else words_of()
    except (AttributeError, NotImplementedError):  # a model of several parts may not say which embeds its tokens
        words = None
    low, high = int(x.min()), int(x.max())
    if isinstance(words, nn.Embedding) and not 0 <= low <= high < words.num_embeddings:
        size = words.num_embeddings
        raise LocaterError(
            f"{name} has token ids from {low} to {high}, and the vocabulary has {size}: check the tokenizer"
        )
