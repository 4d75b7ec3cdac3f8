"""Deletion and insertion curves: what is left of the target when tokens are taken away in the order of their scores.

Protocol of Chefer, Gur and Wolf 2021. The positive test takes away the most relevant tokens first: the faster the
target falls, the better the scores. The negative test takes away the least relevant first: the longer it stays, the
better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as dataclass_replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from locater.brief import brief
from locater.errors import LocaterError
from locater.explain.explanation import Explanation, Target, vectors
from locater.observing.run_model import as_keywords, run_checked
from locater.torch_private import unwrap_compiled

# Inputs with some of their tokens or patches taken away.

SPECIAL = ("bos", "eos", "cls", "sep", "pad")
OWN_OUTPUT = ("input", "text")  # streams whose tokens have an output of their own, at which the target may be read


class TokenRemoval:
    """Takes tokens of `explanation.stream` out of a model's inputs."""

    def __init__(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        explanation: Explanation,
        fill: float | None,
        keep: Sequence[int] | None,
    ) -> None:
        self.batch, self.target, self.fill = dict(batch), explanation.target, fill
        self.stream, tokens = explanation.stream, len(explanation.scores)
        self.name = _input_of(batch, self.stream)
        given: Tensor = batch[self.name]
        self.is_image = given.ndim == 4
        self.count = _patches(model, given) if self.is_image else given.shape[1]
        # a class token and registers come before the patches
        self.first = tokens - self.count
        if self.first < 0 or (self.first and not self.is_image):
            raise LocaterError(
                f"{explanation.method}: {tokens} scores for {self.count} tokens of {self.name!r}: "
                "explain the input that you take tokens away from"
            )
        self.kept = self._tokens_to_keep(model, given, keep)
        self.removable = {t for t in range(self.first, tokens) if t not in self.kept}
        if not self.removable:
            raise LocaterError(f"{self.name}: all of its {tokens} tokens are to stay: there is nothing to take away")

    def without(self, tokens: Sequence[int]) -> tuple[dict[str, Any], Target]:
        """The inputs without these tokens, and the target at its new place."""
        if not tokens:
            return self.batch, self.target
        given: Tensor = self.batch[self.name]
        if self.is_image:
            return {**self.batch, self.name: self._blank_patches(given, [t - self.first for t in tokens])}, self.target
        if self.fill is not None:
            filled = given.clone()
            filled[0, list(tokens)] = int(self.fill)
            return {**self.batch, self.name: filled}, self.target
        left = [t for t in range(self.count) if t not in set(tokens)]
        if not left:
            raise LocaterError(f"{self.name}: no token is left: say which stay with keep=[...], or give replace=id")
        shorter = {
            name: x[:, left] if isinstance(x, Tensor) and x.shape == given.shape and self._beside(name) else x
            for name, x in self.batch.items()
        }
        at = self.target.position
        moved = at is not None and self.stream in OWN_OUTPUT
        return shorter, dataclass_replace(
            self.target, position=left.index(at)
        ) if moved and at is not None else self.target

    def _beside(self, name: str) -> bool:
        """Whether another input has an entry for the same tokens: those of encoder and decoder may be as long."""
        return name.startswith("decoder_") == self.name.startswith("decoder_")

    def _tokens_to_keep(self, model: nn.Module, given: Tensor, keep: Sequence[int] | None) -> set[int]:
        tokens = self.first + self.count
        if keep is not None:
            wrong = [t for t in keep if not 0 <= t < tokens]
            if wrong:
                raise LocaterError(f"keep={list(keep)}: there are tokens 0 to {tokens - 1}")
        kept = set(keep or ())
        if not self.is_image and keep is None:
            config = getattr(model, "config", None)
            special = {getattr(config, f"{name}_token_id", None) for name in SPECIAL} - {None}
            kept |= {at for at, token in enumerate(given[0].tolist()) if token in special}
        if not self.is_image and self.target.position is not None and self.stream in OWN_OUTPUT:
            kept.add(self.target.position)
        return kept

    def _blank_patches(self, image: Tensor, patches: Sequence[int]) -> Tensor:
        """The image with some patches filled. Pixels are (1, C, H, W), in models of this package (1, H, W, C)."""
        last = image.shape[-1] <= 4 < image.shape[1]
        H, W = image.shape[1:3] if last else image.shape[2:]
        size = round((H * W / self.count) ** 0.5)
        if size == 0 or (H // size) * (W // size) != self.count:
            raise LocaterError(f"{self.name}: {H} x {W} pixels are not {self.count} square patches")
        grey = 127.0 if not image.is_floating_point() else 0.0
        out = image.clone()
        for patch in patches:
            row, column = divmod(patch, W // size)
            rows, columns = slice(row * size, (row + 1) * size), slice(column * size, (column + 1) * size)
            where = (slice(None), rows, columns) if last else (slice(None), slice(None), rows, columns)
            out[where] = grey if self.fill is None else self.fill
        return out


def _input_of(batch: Mapping[str, Any], stream: str) -> str:
    """The name of the input that a stream reads."""
    tensors = {name: x for name, x in batch.items() if isinstance(x, Tensor)}
    pixels = [name for name, x in tensors.items() if x.ndim == 4]
    names = ["decoder_input_ids"] if stream == "decoder" else ["input_ids", "inputs"]
    ids = [name for name in names if name in tensors and tensors[name].ndim == 2]
    chosen = pixels if stream == "image" or (stream == "input" and not ids) else ids
    if not chosen:
        raise LocaterError(f"no input of the stream {stream!r} whose tokens could be taken away: {', '.join(batch)}")
    if tensors[chosen[0]].shape[0] != 1:
        raise LocaterError(f"{chosen[0]}: the batch has {tensors[chosen[0]].shape[0]} inputs: take one at a time")
    return chosen[0]


def _patches(model: nn.Module, image: Tensor) -> int:
    """How many patches a model cuts an image into."""
    shape, config = getattr(model, "shape", None), getattr(model, "config", None)
    for source in (shape, config, getattr(config, "vision_config", None)):
        size = getattr(source, "patch", None) or getattr(source, "patch_size", None)
        if isinstance(size, int):
            last = image.shape[-1] <= 4 < image.shape[1]
            H, W = image.shape[1:3] if last else image.shape[2:]
            return (H // size) * (W // size)
    raise LocaterError(f"{type(model).__name__}: the size of its patches is not known: its config has no patch_size")


# The curves.

FRACTIONS = (0.0, 0.25, 0.5, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)


@dataclass(frozen=True, eq=False)
class Curve:
    """The target at every fraction of tokens taken away."""

    fractions: tuple[float, ...]
    values: Float[Tensor, " F"]  # the target
    probabilities: Float[Tensor, " F"] | None  # softmax of the logits, where there are several
    unchanged: Bool[Tensor, " F"] | None  # whether the target is the model's first choice of several

    __repr__ = brief

    @property
    def area(self) -> float:
        """Area under the probabilities, or under the values where there are none, over the width of the fractions."""
        y = self.values if self.probabilities is None else self.probabilities
        return self._area(y)

    @property
    def accuracy_area(self) -> float | None:
        """Area under `unchanged`: for one input; a study takes the mean over many."""
        return None if self.unchanged is None else self._area(self.unchanged.to(self.values))

    def _area(self, y: Tensor) -> float:
        x = torch.tensor(self.fractions, dtype=y.dtype)
        return float(torch.trapezoid(y, x) / (x[-1] - x[0]))


@dataclass(frozen=True, eq=False)
class Deletion:
    """Both tests of one explanation. `tokens` are those that could be taken away, the most relevant first."""

    method: str
    target: Target
    tokens: tuple[int, ...]
    positive: Curve  # the most relevant first: deletion
    negative: Curve  # the least relevant first

    __repr__ = brief

    @property
    def insertion(self) -> Curve:
        """The negative test read backwards: the fraction of tokens present, the most relevant put in first."""
        curve = self.negative
        return Curve(
            tuple(1 - x for x in reversed(curve.fractions)),
            curve.values.flip(0),
            None if curve.probabilities is None else curve.probabilities.flip(0),
            None if curve.unchanged is None else curve.unchanged.flip(0),
        )

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row per test and fraction, for a table or a plot."""
        for test, curve in (("positive", self.positive), ("negative", self.negative)):
            for at, fraction in enumerate(curve.fractions):
                yield {
                    "method": self.method,
                    "test": test,
                    "fraction": fraction,
                    "value": float(curve.values[at]),
                    "probability": None if curve.probabilities is None else float(curve.probabilities[at]),
                    "unchanged": None if curve.unchanged is None else bool(curve.unchanged[at]),
                }


def deletion(
    model: nn.Module,
    inputs: Mapping[str, Any] | Tensor,
    explanation: Explanation,
    fractions: Sequence[float] = FRACTIONS,
    *,
    replace: float | None = None,
    keep: Sequence[int] | None = None,
) -> Deletion:
    """Run `model` with the given fractions of tokens taken away, in the order of `explanation.scores` and against it.

    Tokens of a text are left out, which makes it shorter, or replaced by the id `replace`. Patches of an image are
    filled with the pixel value `replace` (0, or the middle grey of an image of bytes). `keep` are tokens that stay: by
    default the special ones of the model, and the one whose output is explained.

    >>> from locater.explain import rollout
    >>> from locater_lab.train import Shape, Transformer
    >>> _ = torch.manual_seed(0)
    >>> model = Transformer(Shape(vocabulary=16, layers=1, width=16, heads=2, kv_heads=2, hidden=16))
    >>> ids = torch.arange(8)[None]
    >>> curves = deletion(model, ids, rollout(model, ids), fractions=(0, 0.5, 1))
    >>> len(curves.tokens), curves.positive.values.shape          # the last token stays: its output is explained
    (7, torch.Size([3]))
    """
    steps = tuple(float(x) for x in fractions)
    if len(steps) < 2 or list(steps) != sorted(set(steps)) or not 0 <= steps[0] <= steps[-1] <= 1:
        raise LocaterError(f"fractions={list(fractions)}: two or more numbers between 0 and 1, in ascending order")
    model = unwrap_compiled(model)
    removal = TokenRemoval(model, as_keywords(model, inputs), explanation, replace, keep)
    ranked = [token for token, _ in explanation.ranked() if token in removal.removable]

    def curve(order: list[int]) -> Curve:
        points = [_measure(model, removal, order[: round(x * len(order))]) for x in steps]
        values, probabilities, unchanged = zip(*points, strict=True)
        return Curve(
            steps,
            torch.tensor(values),
            None if None in probabilities else torch.tensor(probabilities),
            None if None in unchanged else torch.tensor(unchanged),
        )

    return Deletion(explanation.method, explanation.target, tuple(ranked), curve(ranked), curve(ranked[::-1]))


def _measure(model: nn.Module, removal: TokenRemoval, tokens: Sequence[int]) -> tuple[float, float | None, bool | None]:
    """The target without some tokens, its probability, and whether it is the first choice; both None without several
    logits.
    """
    batch, target = removal.without(tokens)
    output = run_checked(model, batch)
    value = float(target.number(output))
    entries = vectors(output)[0][0]
    entries = entries if target.position is None else entries[target.position]
    if target.index is None or len(entries) == 1:  # of a single logit the softmax is 1, whatever it is
        return value, None, None
    return value, float(entries.softmax(-1)[target.index]), int(entries.argmax()) == target.index
