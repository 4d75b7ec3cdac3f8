"""Token classifiers of the paper's path experiment: embedding, layers LN(x + heads), a linear classifier; how they are
trained and walked.

A path takes the skip in all but k layers and one head in each of these. Its tokens attend to each other as they are on
that path: attention is not frozen at what it is in the whole model, as it is in `locater.explain` and in the theorem,
unless `maps` are passed. Each layer's norm has no gain then and does not see the skip. Paths are added, normed once and
classified.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from locater_lab.engine.devices_and_processes import as_cuda_graph

DEPTH, DROPOUT, EPS = 6, 0.1, 1e-12
WARM_UP_STEPS = 100  # steps
HeadPath = tuple[int | None, ...]  # a head per layer, None where the path takes the skip


@dataclass(frozen=True)
class LabelledTokens:
    """Inputs (N, T) of tokens or (N, T, 2) of coordinates, and a class per token, -1 where there is none."""

    x: Tensor
    y: Tensor

    @property
    def real(self) -> Tensor:
        return self.y >= 0

    def part(self, rows: slice | Tensor) -> LabelledTokens:
        return LabelledTokens(self.x[rows], self.y[rows])

    def to(self, device: str) -> LabelledTokens:
        return LabelledTokens(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class ClassifierShape:
    """Sizes of a classifier."""

    heads: int
    width: int
    labels: int
    vocabulary: int = 0  # 0: coordinates
    positions: int = 0
    mlp: bool = False


# --- the model ---


class ClassifierLayer(nn.Module):
    """LN(x + heads(x)), and LN(x + MLP(x)) after it where there is one."""

    def __init__(self, width: int, heads: int, mlp: bool) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        for module in (self.query, self.key):
            nn.init.normal_(module.weight, std=0.02)
        self.norm, self.drop = nn.LayerNorm(width, EPS), nn.Dropout(DROPOUT)
        self.mlp = (
            nn.Sequential(_linear(width, width), nn.GELU(), _linear(width, width), nn.Dropout(DROPOUT)) if mlp else None
        )
        self.mlp_norm = nn.LayerNorm(width, EPS) if mlp else None
        for module in (self.query, self.key, self.value, self.out):
            nn.init.zeros_(module.bias)

    def maps(self, x: Tensor, real: Tensor) -> Tensor:
        """Attention (B, H, T, T); what is not real is not attended to."""
        q, k = self._split(self.query(x)), self._split(self.key(x))
        return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~real[:, None, None], -math.inf).softmax(-1)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        mixed = self.drop(self.maps(x, real)) @ self._split(self.value(x))  # (B, H, T, h)
        return self._add_and_normalize(self.norm(x + self.drop(self.out(mixed.transpose(1, 2).flatten(-2)))))

    def apply_head(self, x: Tensor, real: Tensor, head: int, maps: Tensor | None = None) -> Tensor:
        """One head's way through: its output and the bias, normed without gain, without x; `maps` in place of its own
        attention.
        """
        attention = (self.maps(x, real) if maps is None else maps)[:, head]
        value = attention @ self._split(self.value(x))[:, head]
        return self._add_and_normalize(
            _normalize(value @ self.out.weight.unflatten(1, (self.heads, -1))[:, head].mT + self.out.bias)
        )

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _add_and_normalize(self, x: Tensor) -> Tensor:
        return x if self.mlp is None or self.mlp_norm is None else self.mlp_norm(x + self.mlp(x))


class Classifier(nn.Module):
    """Embedding, layers, and a linear classifier per token."""

    def __init__(self, shape: ClassifierShape) -> None:
        super().__init__()
        self.shape, width = shape, shape.width
        self.tokens = nn.Embedding(shape.vocabulary, width) if shape.vocabulary else None
        self.places = nn.Embedding(shape.positions, width) if shape.positions else None
        for table in (self.tokens, self.places):
            if table is not None:
                nn.init.normal_(table.weight, std=0.02)
        self.points = None if shape.vocabulary else nn.Sequential(_linear(2, width), nn.GELU())
        self.mixed, self.norm, self.drop = _linear(width, width), nn.LayerNorm(width, EPS), nn.Dropout(DROPOUT)
        self.layers = nn.ModuleList(ClassifierLayer(width, shape.heads, shape.mlp) for _ in range(DEPTH))
        self.head = _linear(width, shape.labels)

    def embed(self, x: Tensor) -> Tensor:
        first = self.tokens or self.points
        assert first is not None
        embedded = first(x)
        if self.places is not None:
            embedded = embedded + self.places.weight[: x.shape[1]]
        return self.drop(self.norm(self.mixed(embedded)))

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, real)
        return self.head(self.drop(x))

    def attention(self, x: Tensor, real: Tensor) -> list[Tensor]:
        """The maps of every layer in the whole model."""
        x, maps = self.embed(x), []
        for layer in self.layers:
            assert isinstance(layer, ClassifierLayer)
            maps.append(layer.maps(x, real))
            x = layer(x, real)
        return maps

    def follow_path(self, x: Tensor, real: Tensor, path: HeadPath, maps: Sequence[Tensor] | None = None) -> Tensor:
        """Embedded tokens x after one path; a layer that it skips does nothing, not even its norm."""
        for number, (layer, head) in enumerate(zip(self.layers, path, strict=True)):
            if head is not None:
                assert isinstance(layer, ClassifierLayer)
                x = layer.apply_head(x, real, head, None if maps is None else maps[number])
        return x

    def path_logits(
        self, data: LabelledTokens, paths: Sequence[HeadPath], maps: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Logits from the sum of the paths."""
        start = self.embed(data.x)
        total = torch.zeros_like(start)
        for path in paths:
            total += self.follow_path(start, data.real, path, maps)
        return self.head(_normalize(total))


def _linear(wide: int, out: int) -> nn.Linear:
    module = nn.Linear(wide, out)
    nn.init.normal_(module.weight, std=0.02)
    nn.init.zeros_(module.bias)
    return module


def _normalize(x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:], eps=EPS)


# --- training and paths ---


@dataclass(frozen=True)
class TrainingRecipe:
    """How a classifier is trained."""

    epochs: int
    batch: int
    rate: float
    decay: float = 0.0
    steady: bool = False  # the rate


def train_classifier(shape: ClassifierShape, data: LabelledTokens, recipe: TrainingRecipe, seed: int) -> Classifier:
    """AdamW on batches in the order of the data; the rate rises over the first steps and falls to zero in a straight
    line, or is steady.
    """
    torch.manual_seed(seed)
    model = Classifier(shape).to(data.x.device).train()
    cuda = data.x.is_cuda
    rate: Tensor | float = torch.tensor(recipe.rate, device=data.x.device) if cuda else recipe.rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=recipe.decay, fused=True, capturable=cuda)
    steps = recipe.epochs * math.ceil(len(data.x) / recipe.batch)
    take = (
        _graph_of_step(model, optimizer, data.part(slice(0, recipe.batch)))
        if cuda
        else partial(_take_step, model, optimizer)
    )
    for step, part in enumerate(_batches(data, recipe.batch, recipe.epochs)):
        now = recipe.rate * (1.0 if recipe.steady else min(1.0, (step + 1) / WARM_UP_STEPS) * (1 - step / steps))
        for group in optimizer.param_groups:
            group["lr"] = group["lr"].fill_(now) if cuda else now
        take(part)
    return model.eval().requires_grad_(False)


def _take_step(model: Classifier, optimizer: torch.optim.Optimizer, part: LabelledTokens) -> None:
    """One step."""
    logits = model(part.x, part.real)
    nn.functional.cross_entropy(logits.flatten(0, 1), part.y.flatten(), ignore_index=-1).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=not part.x.is_cuda)


def _graph_of_step(
    model: Classifier, optimizer: torch.optim.Optimizer, first: LabelledTokens
) -> Callable[[LabelledTokens], None]:
    """The same as a CUDA graph, since the steps of so small a model are nothing but launches; the last, shorter batch
    is taken as it is.

    Capturing needs steps before it: they run on the first batch, and everything is put back after them.
    """
    batch = LabelledTokens(first.x.clone(), first.y.clone())
    before = [p.detach().clone() for p in model.parameters()]
    again = as_cuda_graph(partial(_take_step, model, optimizer, batch))
    with torch.no_grad():
        for p, was in zip(model.parameters(), before, strict=True):
            p.copy_(was)
            for x in optimizer.state[p].values():
                x.zero_()

    def take(part: LabelledTokens) -> None:
        if part.x.shape != batch.x.shape:
            return _take_step(model, optimizer, part)
        batch.x.copy_(part.x)
        batch.y.copy_(part.y)
        return again()

    return take


def _batches(data: LabelledTokens, size: int, epochs: int) -> Iterator[LabelledTokens]:
    for _ in range(epochs):
        for start in range(0, len(data.x), size):
            yield data.part(slice(start, start + size))


def accuracy(logits: Tensor, data: LabelledTokens) -> float:
    """The share of real tokens whose class is right."""
    return float((logits.argmax(-1) == data.y)[data.real].double().mean())


def guess_accuracy(learn: LabelledTokens, judged: LabelledTokens) -> float:
    """Accuracy of the most frequent class of each place: what can be had without reading the input.

    >>> one = LabelledTokens(torch.zeros(3, 2, dtype=torch.long), torch.tensor([[0, 1], [0, 1], [1, 1]]))
    >>> round(guess_accuracy(one, one), 3)
    0.833
    """
    counts = torch.stack([(learn.y == c).sum(0) for c in range(int(learn.y.max()) + 1)], -1)  # (T, classes)
    return accuracy(counts.expand(len(judged.y), -1, -1), judged)


def draw_path(length: int, heads: int, draws: random.Random, depth: int = DEPTH) -> HeadPath:
    """A path through `length` layers, these and the head in each drawn evenly.

    >>> path = draw_path(2, 3, random.Random(0))
    >>> len(path), sum(head is not None for head in path)
    (6, 2)
    """
    visited = set(draws.sample(range(depth), length))
    return tuple(draws.randrange(heads) if layer in visited else None for layer in range(depth))
