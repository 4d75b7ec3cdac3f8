"""Our own models read back from the folder that `locater train` left."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from locater.checkpoints.sources import open_source
from locater.errors import LocaterError, first_line
from locater.models.transformer import Shape, Transformer


def load(folder: str | os.PathLike[str]) -> Transformer:
    """A model that was trained here, from the folder of its weights, ready to run."""
    weights, config = open_source(Path(folder))
    try:
        model = Transformer(Shape.of(config))
        model.load_state_dict({name: weights.read(name) for name in names_of(model)}, strict=False)
    except (KeyError, TypeError, RuntimeError) as error:
        raise LocaterError(f"{folder}: not a model that locater train saved ({first_line(error)})") from None
    return model.eval()


def names_of(model: Transformer) -> list[str]:
    """Tensors of the model as it is without controls; the output map of text models is the table of tokens."""
    with torch.device("meta"):
        plain = Transformer(model.shape)
    return [name for name in plain.state_dict() if name != "lm_head.weight" or model.shape.image is not None]
