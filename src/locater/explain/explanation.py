"""`Explanation`: what every method of this room returns for one input and one target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from locater.explain.targets import Target
from locater.markup import display, heat_map, table
from locater.numerics import finite_or_none

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
