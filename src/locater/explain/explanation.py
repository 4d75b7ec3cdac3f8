"""`Explanation`: what every method of this room returns for one input; and `Target`, the one number that is explained.

Every method takes `target=`:

    None                the model's own choice: its largest logit, at the last token where it has one per token. A model
                        without logits is explained along its own output: its mean over tokens, in its own direction
    17                  entry 17 of the vocabulary, or class 17; at the last token where there is one per token
    (5, 17)             entry 17 at token 5
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.brief import brief
from locater.errors import LocaterError
from locater.markup import display, heat_map, table
from locater.numerics import finite_or_none

TargetChoice = int | tuple[int, int] | None
LOGITS = ("logits", "logits_per_image")
HIDDEN = ("last_hidden_state", "image_embeds", "text_embeds")


@dataclass(frozen=True, eq=False)
class Target:
    """One entry of the output; `number` takes it out of an output with its gradient."""

    index: int | None  # entry of the vocabulary, or class; None: along the output's own direction
    position: int | None  # output token; None where the output is one vector for the whole input
    value: float
    direction: Tensor | None = None  # (d,) of unit length, where index is None

    __repr__ = brief

    @property
    def what(self) -> str:
        """In words."""
        entry = "the output along itself" if self.index is None else f"logit {self.index}"
        return entry if self.position is None else f"{entry} at token {self.position}"

    def number(self, output: Any) -> Tensor:
        """The target as a scalar, from what the model returned for one input."""
        values, _ = vectors(output)
        if self.index is None:
            mean = values[0].mean(0) if values.ndim == 3 else values[0]
            return mean @ self.direction.to(mean)  # type: ignore[union-attr]
        return values[0, self.index] if self.position is None else values[0, self.position, self.index]


def vectors(output: Any) -> tuple[Tensor, bool]:
    """The output of a model, (1, T, C) or (1, C), and whether it is logits."""
    if isinstance(output, Tensor):
        return output, True
    for names, logits in ((LOGITS, True), (HIDDEN, False)):
        for name in names:
            value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
            if isinstance(value, Tensor):
                return value, logits
    raise LocaterError(
        f"{type(output).__name__}: the output has neither logits nor a last hidden state to explain: "
        "pass a model that returns a tensor, or an output of transformers"
    )


def choose_target(output: Any, target: TargetChoice = None) -> Target:
    """The target that a user chose, checked against what the model returned for one input."""
    values, logits = vectors(output)
    if values.shape[0] != 1:
        raise LocaterError(f"the batch has {values.shape[0]} inputs: explain one at a time")
    if not logits:
        if target is not None:
            raise LocaterError(f"target={target!r}: the model has no logits to choose from; leave the target out")
        mean = values[0].mean(0) if values.ndim == 3 else values[0]
        length = mean.detach().norm()
        if not 0 < length < torch.inf:
            raise LocaterError(f"the length of the output is {float(length):g}: there is nothing to explain")
        return Target(None, None, float(length), mean.detach() / length)
    tokens = values.shape[1] if values.ndim == 3 else None
    _check_form(target)
    position, index = target if isinstance(target, tuple) else (None, target)
    if tokens is None and position is not None:
        raise LocaterError(f"target={target!r}: the model has one output for all tokens; give the class alone")
    if tokens is not None:
        position = tokens - 1 if position is None else position
        if not -tokens <= position < tokens:
            raise LocaterError(f"target={target!r}: the output has tokens 0 to {tokens - 1}")
        position %= tokens
    row = values[0] if position is None else values[0, position]
    index = int(row.argmax()) if index is None else index
    if not 0 <= index < len(row):
        raise LocaterError(f"target={target!r}: the output has entries 0 to {len(row) - 1}")
    value = row[index].detach()
    if not torch.isfinite(value):
        raise LocaterError(f"logit {index} is {float(value)}: there is nothing to explain")
    return Target(index, position, float(value))


def _check_form(target: Any) -> None:
    """Refuse what is neither None, a whole number nor a pair of them."""
    parts = target if isinstance(target, tuple) else (0, target)
    if len(parts) == 2 and all(isinstance(part, int) and not isinstance(part, bool) for part in parts):
        return
    if target is not None:
        raise LocaterError(f"target={target!r}: give an entry of the output, or (token, entry)")


MOST_SHOWN = 256  # tokens in a notebook


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """How much each input token counts for one output of a model.

    A score of `scores` belongs to a token of the stream named `stream`; models with two streams (encoder and decoder,
    text and image) have the scores of the other ones in `other_streams`, by name. Scores of different methods have
    different units: compare their order, or their shares.
    """

    method: str
    target: Target
    scores: Float[Tensor, " T"]  # one per input token, for the target; on the CPU
    matrix: Float[Tensor, "Q T"] | None = None  # output token x input token, where the method has one
    stream: str = "input"
    other_streams: Mapping[str, Float[Tensor, " S"]] = field(default_factory=dict)
    offset: float | None = None  # the part of the target that no token carries (biases), where the method knows it
    interval: Float[Tensor, "2 T"] | None = None  # lower and upper end for each score, where scores are estimates
    # the target split in other ways, in its own units: "length" (L + 1,) and "head" (L, H), where the method has them
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    exact: str = ""  # what the scores are exact about, or what they are not
    how: str = ""  # how they were made: passes, settings, approximations

    def ranked(self) -> list[tuple[int, float]]:
        """(token, score), the largest score first; tokens without a score (NaN) last."""
        order = self.scores.nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True).tolist()
        return [(token, float(self.scores[token])) for token in order]

    def _repr_html_(self) -> str:
        """What a notebook shows: a cell per input token, and the largest scores."""
        streams = {self.stream: self.scores, **self.other_streams}
        values = [[finite_or_none(x) for x in scores[:MOST_SHOWN].tolist()] for scores in streams.values()]
        sums = (
            ""
            if self.offset is None
            else f"Scores sum to {float(self.scores.nansum()):.3g}, {self.offset:.3g} comes from no token."
        )
        more = f"The first {MOST_SHOWN} tokens are drawn." if len(self.scores) > MOST_SHOWN else ""
        return display(
            f"{self.method}: {self.target.what}",
            [sums, f"{self.exact[:1].upper()}{self.exact[1:]}." * bool(self.exact), more],
            heat_map(values, "score", rows="stream", columns="token", names=list(streams)),
            table(["token", "score"], [[str(token), f"{score:.3g}"] for token, score in self.ranked()[:5]]),
        )

    def __repr__(self) -> str:
        best = ", ".join(f"{token}: {score:.3g}" for token, score in self.ranked()[:3])
        return f"<Explanation by {self.method} of {self.target.what}: {len(self.scores)} tokens; largest {best}>"
