"""Load models that `locater train` saved."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import torch

from locater.errors import LocaterError, first_line
from locater.sources.open_source import open_source
from locater_lab.models.shape import Shape
from locater_lab.models.transformer import Transformer


def load(folder: str | os.PathLike[str]) -> Transformer:
    """The model in a folder that `locater train` wrote, in evaluation mode."""
    weights, config = open_source(Path(folder))
    try:
        model = Transformer(Shape.of(config))
        model.load_state_dict({name: weights.read(name) for name in names_of(model)}, strict=False)
    except (KeyError, TypeError, RuntimeError) as error:
        raise LocaterError(f"{folder}: not a model that locater train saved ({first_line(error)})") from None
    return model.eval()


def names_of(model: Transformer) -> list[str]:
    """Names of the model's tensors without those of controls. The output map of text models is left out: it is the
    embedding.
    """
    return list(_names_of_shape(model.shape))


@lru_cache(maxsize=64)  # a run asks for them at every checkpoint
def _names_of_shape(shape: Shape) -> tuple[str, ...]:
    with torch.device("meta"):
        plain = Transformer(shape)
    return tuple(name for name in plain.state_dict() if name != "lm_head.weight" or not shape.is_tied)
