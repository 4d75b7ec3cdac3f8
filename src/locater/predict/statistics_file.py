"""Mean and covariance of the input of every attention layer, and the file that they are saved in."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locater.brief import brief
from locater.errors import LocaterError, first_line
from locater.files import write_whole
from locater.layers import Tokens
from locater.sources.pickle_file import load_pickle
from locater.sources.weights import has_dense_data

SCHEMA = 1


@dataclass(frozen=True)
class Input:
    """The input of one attention layer, after the norm in front of it. The first token of a sequence is counted apart
    (not in cross-attention, where it is no key).

    `mean_share` is |mean|^2 / E|x|^2. `kurtosis` is the median excess over channels. `normality` is the mean Kolmogorov
    distance of random projections to a normal, and `normality_expected` that of as many normal tokens. `directions` are
    the shares of the energy in the first principal directions.
    """

    layer: int
    name: str
    kind: str
    tokens: int
    mean: Tensor
    covariance: Tensor
    first: Tensor | None = None
    memory_mean: Tensor | None = None  # cross-attention: of the input of the keys
    memory_covariance: Tensor | None = None
    mean_share: float | None = None
    kurtosis: float | None = None
    normality: float | None = None
    normality_expected: float | None = None
    directions: tuple[float, ...] = ()
    length: int = 0  # mean number of real tokens in a sequence
    memory_length: int = 0

    __repr__ = brief

    def as_tokens(self) -> Tokens:
        """The same, as `effective` takes it."""
        if self.memory_mean is None or self.memory_covariance is None:
            return Tokens(self.mean, self.covariance)
        return Tokens(self.mean, self.covariance, Tokens(self.memory_mean, self.memory_covariance))


@dataclass(frozen=True, repr=False)
class Statistics:
    """Inputs of all attention layers, in the order of a scan."""

    source: str
    tokens: int
    length: int
    inputs: list[Input] = field(default_factory=list)
    silent: tuple[int, ...] = ()  # layers that no token reached: they have no input

    def __repr__(self) -> str:
        return f"Statistics({self.source!r}, {len(self.inputs)} layers, {self.tokens} tokens)"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a file that `load` and `locater scan --statistics` read; it appears whole or not at all."""
        about = {
            "schema": SCHEMA,
            "source": self.source,
            "tokens": self.tokens,
            "length": self.length,
            "silent": self.silent,
        }
        file = io.BytesIO()
        torch.save({**about, "inputs": [asdict(x) for x in self.inputs]}, file)
        write_whole(Path(path), file.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Statistics:
        try:
            data, _ = load_pickle(Path(path))
            if data["schema"] != SCHEMA:
                raise ValueError(f"schema {data['schema']}, not {SCHEMA}")
            inputs = [Input(**x) for x in data["inputs"]]
            statistics = cls(data["source"], data["tokens"], data["length"], inputs, tuple(data["silent"]))
            _check(statistics)
            return statistics
        except LocaterError:
            raise
        except OSError as error:
            raise LocaterError(f"{path}: cannot be read ({error.strerror})") from None
        except Exception as error:  # not PyTorch's own message, which is long and advises to trust the file
            alien = isinstance(error, pickle.UnpicklingError) or not zipfile.is_zipfile(path)
            why = "no file of torch.save" if alien else first_line(error)
            raise LocaterError(f"{path}: not statistics that this version reads ({why}): collect them again") from None


def _check(statistics: Statistics) -> None:
    """Raise ValueError for the first value that `save` cannot have written."""
    inputs = statistics.inputs
    numbers = [
        statistics.tokens,
        statistics.length,
        *statistics.silent,
        *(n for x in inputs for n in (x.layer, x.tokens, x.length, x.memory_length)),
    ]
    wrong = next((n for n in numbers if type(n) is not int or not 0 <= n < 2**53), None)
    if wrong is not None:
        raise ValueError(f"{wrong!r:.40} where a count should be")
    if not all(isinstance(text, str) for text in (statistics.source, *(x.name for x in inputs))):
        raise ValueError("a name is no text")
    layers = [x.layer for x in inputs]
    if len({*layers, *statistics.silent}) < len(layers) + len(statistics.silent):
        raise ValueError("a layer stands twice")
    for x in inputs:
        _check_input(x)


def _check_input(x: Input) -> None:
    cross, memory = x.kind == "cross", (x.memory_mean, x.memory_covariance)
    if x.kind not in ("self", "cross") or any((part is not None) != cross for part in memory):
        raise ValueError(f"layer {x.layer} is {x.kind!r:.40}-attention without the input of its keys, or with one")
    for mean, covariance in ((x.mean, x.covariance), memory)[: 1 + cross]:
        if not (_dense(mean, 1) and _dense(covariance, 2)) or covariance.shape != (*mean.shape, *mean.shape):  # type: ignore[union-attr]
            raise ValueError(f"the mean or covariance of layer {x.layer} is no vector or no square of its size")
    if x.first is not None and not (_dense(x.first, 1) and x.first.shape == x.mean.shape):
        raise ValueError(f"the first token of layer {x.layer} is no vector of its width")


def _dense(x: Any, axes: int) -> bool:
    if not (isinstance(x, Tensor) and has_dense_data(x) and x.is_floating_point() and x.ndim == axes and x.numel() > 0):
        return False
    return x.numel() * x.element_size() <= x.untyped_storage().nbytes()  # an expanded one claims what is not stored
