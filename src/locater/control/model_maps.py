"""The query and key maps of a live model in the form that a penalty is on; read anew at each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from locater.control.penalty_maps import size_counts, sized_maps, stored_maps, token_maps
from locater.discovery import attention_layers
from locater.discovery.stacked_maps import Inputs, Maps, maps_of, recorded_stacks
from locater.errors import LocaterError
from locater.layers import AttentionLayer
from locater.layers.effective import Effective
from locater.observing.token_sample import Listener, TokenSample, on_training_tokens, samples_of, share_samples
from locater.observing.token_size import TokenSize, share_sizes, sizes_of

Form = Literal["effective", "measured", "stored"]
FOLDS: Mapping[Form, Callable[..., Effective]] = {
    "effective": sized_maps,
    "measured": token_maps,
    "stored": stored_maps,
}


class ModelMaps:
    """Maps of the layers of these numbers.

    Until `close`, the measured form listens to all of these layers, and the effective form to those whose logits depend
    on the size of their tokens.
    """

    def __init__(self, model: nn.Module, layers: Mapping[int, AttentionLayer], form: Form) -> None:
        self.model, self.numbers, self.fold = model, list(layers), FOLDS[form]
        self.samples = samples_of(model, layers) if form == "measured" else {}
        raw = {number: layer for number, layer in layers.items() if form == "effective" and size_counts(layer)}
        self.sizes = sizes_of(model, raw)
        self._inputs: dict[int, Inputs] = {
            **{number: partial(_tokens, sample) for number, sample in self.samples.items()},
            **{number: partial(_mean_square, size) for number, size in self.sizes.items()},
        }
        self._stacks = recorded_stacks(model, self.numbers, self.fold, self._inputs)
        listeners: list[Listener] = [*self.samples.values(), *self.sizes.values()]
        self._ends = on_training_tokens(model, listeners) if listeners else []

    def now(self) -> list[Maps]:
        """Queries (L, H, h, d), keys (L, K, h, d) and logit scales (L,) of each stack; gradients flow to the weights.

        In the measured form d counts tokens of the sample. Refused where tokens are needed and none were seen.
        """
        if self.samples:
            self._finish_samples()
        if self.sizes:
            self._finish_sizes()
        if self._stacks is not None:
            return self._stacks.maps()
        layers = attention_layers(self.model)
        return [maps_of(self.fold(layers[number], *self._inputs_of(number))) for number in self.numbers]

    def forget(self) -> None:
        """After a step: the samples were of the weights before it. Sizes of tokens stay until the next pass."""
        for sample in self.samples.values():
            sample.forget()

    def state(self) -> dict[str, Tensor]:
        """The sums behind the size of tokens (2,), by the name of the layer; zeros for a layer that has not run.

        All layers are there from the beginning: a distributed checkpoint fills in a state that is made before.
        """
        return {
            size.name: size.sums.detach().clone() if size.filled else torch.zeros_like(size.sums)
            for size in self.sizes.values()
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over the sizes of a checkpoint; refused where a layer of it has none here."""
        by_name = {size.name: size for size in self.sizes.values()}
        unknown = [name for name in state if name not in by_name]
        if unknown:
            raise LocaterError(
                f"LocAteR: this state has the size of the tokens of {unknown[0] or 'the model'}, which is not needed "
                "here: it is of another model or other layers"
            )
        for name, sums in state.items():
            if bool(sums[1]):  # the number of tokens
                by_name[name].load(sums)

    def close(self) -> None:
        """Stop listening."""
        for end in reversed(self._ends):
            end()
        self._ends = []

    def _inputs_of(self, number: int) -> tuple[Tensor, ...]:
        """Copies, since the next pass writes over a sample while a graph may still need it."""
        return tuple(x.clone() for x in self._inputs[number]()) if number in self._inputs else ()

    def _finish_sizes(self) -> None:
        sizes = list(self.sizes.values())
        if not torch.compiler.is_compiling():  # as for samples
            empty = [size for size in sizes if not size.filled]
            if empty:
                raise LocaterError(_why_unsized(type(self.model).__name__, empty))
        share_sizes(sizes)
        for size in sizes:
            size.restart()

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


def _mean_square(size: TokenSize) -> tuple[Tensor]:
    return (size.mean_square(),)


def _why_unsized(model: str, empty: Sequence[TokenSize]) -> str:
    return (
        f"{empty[0].name or model}: no norm stands in front of this layer, and the size of the tokens that it reads is "
        "not known before its first forward pass in training mode: call loss() after model(...) of the model that was "
        "handed to attach(), or choose layers=[...] without it"
    )


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
