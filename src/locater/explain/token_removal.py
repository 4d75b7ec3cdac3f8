"""Inputs with some of their tokens or patches taken away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace as changed
from typing import Any

from torch import Tensor, nn

from locater.errors import LocaterError
from locater.explain.explanation import Explanation
from locater.explain.targets import Target

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
        self.kept = self._kept(model, given, keep)
        self.removable = {t for t in range(self.first, tokens) if t not in self.kept}
        if not self.removable:
            raise LocaterError(f"{self.name}: all of its {tokens} tokens are to stay: there is nothing to take away")

    def without(self, tokens: Sequence[int]) -> tuple[dict[str, Any], Target]:
        """The inputs without these tokens, and the target at its new place."""
        if not tokens:
            return self.batch, self.target
        given: Tensor = self.batch[self.name]
        if self.is_image:
            return {**self.batch, self.name: self._blanked(given, [t - self.first for t in tokens])}, self.target
        if self.fill is not None:
            filled = given.clone()
            filled[0, list(tokens)] = int(self.fill)
            return {**self.batch, self.name: filled}, self.target
        left = [t for t in range(self.count) if t not in set(tokens)]
        if not left:
            raise LocaterError(f"{self.name}: no token is left: say which stay with keep=[...], or give replace=id")
        shorter = {
            name: x[:, left] if isinstance(x, Tensor) and x.shape == given.shape else x
            for name, x in self.batch.items()
        }
        at = self.target.position
        moved = at is not None and self.stream in OWN_OUTPUT
        return shorter, changed(self.target, position=left.index(at)) if moved and at is not None else self.target

    def _kept(self, model: nn.Module, given: Tensor, keep: Sequence[int] | None) -> set[int]:
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

    def _blanked(self, image: Tensor, patches: Sequence[int]) -> Tensor:
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
    ids = [name for name in ("input_ids", "inputs") if name in tensors and tensors[name].ndim == 2]
    if stream == "decoder":
        ids = [name for name in ("decoder_input_ids",) if name in tensors]
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
