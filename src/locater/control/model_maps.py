"""The query and key maps of a live model in the form that a penalty is on; read anew at each step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from locater.errors import LocaterError, first_line
from locater.families import AttentionLayer, attention_layers, effective
from locater.families.effective import Effective
from locater.families.folded import FoldedStacks, Inputs, Maps, maps_of
from locater.families.forms import stored_maps, token_maps
from locater.observing.token_sample import TokenSample, fill_samples, samples_of, share_samples

logger = logging.getLogger("locater")
Form = Literal["effective", "measured", "stored"]
FOLDS: Mapping[Form, Callable[..., Effective]] = {
    "effective": effective,
    "measured": token_maps,
    "stored": stored_maps,
}


class ModelMaps:
    """Maps of the layers of these numbers. The measured form listens to the model until `close`."""

    def __init__(self, model: nn.Module, layers: Mapping[int, AttentionLayer], form: Form) -> None:
        self.model, self.numbers, self.fold = model, list(layers), FOLDS[form]
        self.samples = samples_of(model, layers) if form == "measured" else {}
        inputs: dict[int, Inputs] = {number: partial(_tokens, sample) for number, sample in self.samples.items()}
        self._stacks: FoldedStacks | None = None
        try:
            self._stacks = FoldedStacks(model, self.numbers, self.fold, inputs)
        except LocaterError:
            raise
        except Exception as error:  # whatever a reader of a family from elsewhere does that cannot be traced
            logger.warning(
                "LocAteR: the maps of %s are read anew at each step, which is slower: they cannot be recorded (%s)",
                type(model).__name__,
                first_line(error),
            )
        self._ends = fill_samples(model, self.samples.values()) if self.samples else []

    def now(self) -> list[Maps]:
        """Queries (L, H, h, d), keys (L, K, h, d) and logit scales (L,) of each stack; gradients flow to the weights.

        In the measured form d counts tokens of the sample; refused where there is none.
        """
        if self.samples:
            self._finish_samples()
        if self._stacks is not None:
            return self._stacks.maps()
        layers = attention_layers(self.model)
        return [maps_of(self.fold(layers[number], *self._inputs(number))) for number in self.numbers]

    def forget(self) -> None:
        """After a step: the samples were of the weights before it."""
        for sample in self.samples.values():
            sample.forget()

    def close(self) -> None:
        """Stop listening."""
        for end in reversed(self._ends):
            end()
        self._ends = []

    def _inputs(self, number: int) -> tuple[Tensor, ...]:
        """Copies, since the next pass writes over a sample while a graph may still need it."""
        return tuple(x.clone() for x in _tokens(self.samples[number])) if self.samples else ()

    def _finish_samples(self) -> None:
        samples = list(self.samples.values())
        if not torch.compiler.is_compiling():  # in one graph with the forward pass, samples are not filled yet
            empty = [sample for sample in samples if not sample.filled]
            if empty:
                raise LocaterError(_why_empty(type(self.model).__name__, empty, len(samples)))
        share_samples(samples)
        for sample in samples:
            sample.restart()


def _tokens(sample: TokenSample) -> tuple[Tensor, Tensor]:
    return sample.tokens, sample.real


def _why_empty(model: str, empty: list[TokenSample], of: int) -> str:
    if len(empty) == of:
        return (
            f"{model}: form='measured' needs a forward pass in training mode since the last step: call loss() after "
            "model(...) of the model that was handed to attach()"
        )
    return (
        f"{empty[0].name}: no tokens (B, T, d) were seen at this layer in the last forward pass, so form='measured' "
        "does not know what it reads: use form='effective', or layers=[...] without it"
    )
