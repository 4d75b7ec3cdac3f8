"""`Explanations`, the result of `explanations()`: one input of a model, explained by several methods.

It is written as JSON and shown by `report/`.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from locater.brief import brief
from locater.explain.explanation import Explanation, Target
from locater.files import write_whole
from locater.numerics import finite_or_none
from locater.results.document import Document

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class TokenStream:
    """The tokens of one input of the model, as a reader sees them."""

    name: str  # "input"; of models with two inputs "encoder" and "decoder", or "text" and "image"
    tokens: list[str]
    ids: list[int] | None = None  # None for patches of a picture
    special: list[int] = field(default_factory=list)  # places of special tokens, such as [CLS]

    __repr__ = brief


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture in patches: the tokens of its stream after the first `before` ones, row by row."""

    pixels: Tensor  # (height, width, 3) uint8, at the model's size
    rows: int
    columns: int
    before: int = 0

    __repr__ = brief


@dataclass(frozen=True)
class Prediction:
    """One of the model's likeliest tokens or classes."""

    index: int
    name: str
    logit: float
    probability: float


@dataclass(frozen=True)
class HeadShare:
    """How much of the target passes through a head along attention, with the outputs of MLPs held as they were. A path
    passes several heads, so these do not sum to the target. `effect` is another thing: what the target loses without
    the head, measured for the heads with the largest estimates of it.
    """

    layer: int
    head: int
    value: float  # in units of the target
    share: float  # value / |target|: positive is for the target, negative against it
    estimate: float | None = None  # of the effect: the gradient of the target times the head's output
    effect: float | None = None  # the target less the target without the head; None where it was not measured


@dataclass(frozen=True)
class LengthShare:
    """How much of the target comes along paths through this many heads. Over lengths they sum to the target, less what
    the readout adds (a bias of the logits).
    """

    length: int
    value: float
    share: float  # value / |target|


@dataclass(frozen=True, eq=False)
class Pattern:
    """What one head attended to: (queries, keys), rows that sum to 1 under softmax attention."""

    layer: int
    head: int
    weights: Tensor
    queries: str  # names of streams
    keys: str

    __repr__ = brief


@dataclass(frozen=True)
class DeletionCurve:
    """What is left when tokens are removed in the order of their scores, and against it."""

    removed: list[float]  # share of the tokens that may be removed
    largest_first: list[float]
    smallest_first: list[float]
    of: str  # "probability" of the target, or the "target" itself where there are no probabilities

    __repr__ = brief

    @property
    def area(self) -> float:
        """The mean of `largest_first` over `removed`: the lower, the sooner the scores point at what the model uses."""
        steps = zip(self.removed, self.removed[1:], self.largest_first, self.largest_first[1:], strict=False)
        return sum((b - a) * (y + z) / 2 for a, b, y, z in steps) / (self.removed[-1] - self.removed[0])


@dataclass(frozen=True, eq=False, repr=False)
class Explanations(Document):
    """The result of `explanations()`."""

    source: str
    streams: list[TokenStream]
    target: Target
    target_name: str  # the token, the class, or "the output along itself"
    predictions: list[Prediction]
    methods: list[Explanation]
    layers: list[dict[str, Any]] = field(default_factory=list)  # layer, name, kind, heads
    heads: list[HeadShare] = field(default_factory=list)
    lengths: list[LengthShare] = field(default_factory=list)
    patterns: list[Pattern] = field(default_factory=list)
    deletion: Mapping[str, DeletionCurve] = field(default_factory=dict)
    picture: Picture | None = None
    assumptions: dict[str, Any] = field(default_factory=dict)  # notes, and why a part is missing
    groups: dict[str, Any] = field(default_factory=dict)  # of tokens: labels, attention, even; {} for one group alone

    def __repr__(self) -> str:
        tokens = " + ".join(str(len(stream.tokens)) for stream in self.streams)
        names = ", ".join(method.method for method in self.methods)
        return f"Explanations({self.source!r}, {self.target_name!r}, {tokens} tokens, by {names})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from locater.report.explanation import explanations_in_notebook

        return explanations_in_notebook(self.to_dict())

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row per token: stream, position, token, and the score of each method."""
        return self.records()

    def records(self) -> list[dict[str, Any]]:
        """The same: one row per token."""
        from locater.report.explanation import token_rows

        return token_rows(self.to_dict())

    def to_dict(self, matrices: bool = False) -> dict[str, Any]:
        """The JSON document. `matrices` adds what has a number per pair of tokens, which the page draws: matrices, head
        patterns, and the picture.
        """
        return self._document(Tensor.tolist if matrices else None)

    def _document(self, table: Callable[[Tensor], Any] | None) -> dict[str, Any]:
        """The document, with tables of numbers as `table` makes them; without them where it is None."""
        return {
            **self.header(),
            "source": self.source,
            "assumptions": self.assumptions,
            "streams": [asdict(stream) for stream in self.streams],
            "target": {
                "name": self.target_name,
                "index": self.target.index,
                "position": self.target.position,
                "value": self.target.value,
            },
            "predictions": [asdict(prediction) for prediction in self.predictions],
            "methods": [self._method(method, table) for method in self.methods],
            "layers": self.layers,
            "heads": [asdict(head) for head in self.heads],
            "lengths": [asdict(length) for length in self.lengths],
            "groups": self.groups,
            **({} if table is None else {"patterns": [_pattern(pattern, table) for pattern in self.patterns]}),
            **({} if table is None or self.picture is None else {"picture": _picture(self.picture)}),
        }

    def to_json(self, matrices: bool = False) -> str:
        return json.dumps(self.to_dict(matrices), indent=1, allow_nan=False)

    def save(self, path: str | os.PathLike[str], matrices: bool = False) -> None:
        """Write the JSON document; the file appears whole or not at all."""
        write_whole(Path(path), self.to_json(matrices) + "\n")

    def page(self) -> str:
        from locater.report.explanation import explanations_page

        return explanations_page(self._document(lambda table: table.detach().cpu().float().numpy()))

    def show(self, console: Console) -> None:
        """Print what the model predicts, tokens with scores, heads by share, and what each method is exact about."""
        from locater.report.explanation import print_explanations

        print_explanations(self.to_dict(), console)

    def _method(self, method: Explanation, table: Callable[[Tensor], Any] | None) -> dict[str, Any]:
        curve = self.deletion.get(method.method)
        streams = dict.fromkeys([method.stream, *(stream.name for stream in self.streams)])  # the main one comes first
        scores = {name: _scores_in(method, name) for name in streams}
        entry: dict[str, Any] = {
            "method": method.method,
            "scores": {name: values for name, values in scores.items() if values is not None},
            "offset": method.offset,
            "exact": method.exact,
            "how": method.how,
            "deletion": None if curve is None else {**asdict(curve), "area": curve.area},
        }
        if table is not None:
            entry["matrix"] = None if method.matrix is None else table(method.matrix)
        return entry


def _scores_in(method: Explanation, stream: str) -> list[float | None] | None:
    """The scores of a method for the tokens of one stream, None where it has none there. A token without a score has
    None.
    """
    scores = method.scores if method.stream == stream else method.other_streams.get(stream)
    return None if scores is None else [finite_or_none(x) for x in scores.tolist()]


def _pattern(pattern: Pattern, table: Callable[[Tensor], Any]) -> dict[str, Any]:
    names = ("layer", "head", "queries", "keys")
    return {**{name: getattr(pattern, name) for name in names}, "weights": table(pattern.weights)}


def _picture(picture: Picture) -> dict[str, Any]:
    height, width, _ = picture.pixels.shape
    sizes = {"width": width, "height": height, "rows": picture.rows, "columns": picture.columns}
    pixels = base64.b64encode(picture.pixels.numpy().tobytes()).decode()
    return {**sizes, "before": picture.before, "pixels": pixels}
