"""A digest of the tensors that were read, so that two checkpoints in which these are equal show as such."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from locater.sources.weights import Rows, Weights


class HashedWeights:
    """Weights that remember a digest of everything that is read from them.

    >>> from locater.sources.weights import DictWeights
    >>> a, b = (HashedWeights(DictWeights({"q": torch.ones(2, 2), "k": torch.zeros(2)}, "here")) for _ in range(2))
    >>> _ = a.read("q"), a.read("k"), b.read("k"), b.read("q"), b.read("q")
    >>> combined_hash(a.reads) == combined_hash(b.reads)
    True
    """

    def __init__(self, weights: Weights) -> None:
        self.where = weights.where
        self._weights = weights
        self._lock = threading.Lock()
        self.reads: dict[str, str] = {}  # name and rows of what was read, and its digest

    def names(self) -> Collection[str]:
        return self._weights.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(name)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        tensor = self._weights.read(name, rows)
        if tensor.device.type == "meta":  # a plan of reads, without data
            return tensor
        sum_ = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)} ".encode(), digest_size=16)
        sum_.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        place = "" if rows is None else repr([(int(a), int(b)) for a, b in rows])
        with self._lock:
            self.reads[f"{name} {place}"] = sum_.hexdigest()
        return tensor

    def __getattr__(self, name: str) -> Any:
        """What a kind of weights has beside the interface, such as `bytes_read`."""
        return getattr(self._weights, name)


def combined_hash(*reads: Mapping[str, str]) -> str:
    """Equal for equal names, rows and bytes, in whatever order, in however many parts and however often they were read.

    >>> combined_hash({"q ": "1", "k ": "2"}) == combined_hash({"k ": "2"}, {"q ": "1", "k ": "2"})
    True
    """
    whole = {place: value for part in reads for place, value in part.items()}
    lines = "\n".join(f"{place}\0{whole[place]}" for place in sorted(whole))
    return hashlib.blake2b(lines.encode(errors="surrogatepass"), digest_size=16).hexdigest()
