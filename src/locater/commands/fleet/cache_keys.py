"""Jobs of a fleet, and the key that names the part of each: a digest of source, identity, settings and code. And a
digest of the tensors that were read, so that two checkpoints in which these are equal show as such.

A job is one checkpoint, or some layers of a very large one.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locater.defaults import LENGTH
from locater.registry import offered_entries
from locater.sources.weights import Rows, Weights
from locater.version import __version__

PACKAGE = Path(__file__).parents[2]
# the numbers of a scan do not depend on these; a change of any other file leads to new parts
UNRELATED = (
    *("cli", "commands/fleet", "control", "demo", "explain", "inputs", "integrations", "observing", "runs"),
    *("__main__.py", "testing.py"),
)


@dataclass(frozen=True)
class ScanSettings:
    """How every checkpoint of a fleet is scanned."""

    length: int = LENGTH
    raw: bool = False
    eigenvalues: bool = False

    def words(self) -> str:
        """As options of the command line."""
        switches = [f"--{name}" for name in ("raw", "eigenvalues") if getattr(self, name)]
        return " ".join((f"--length {self.length}", *switches))


@dataclass(frozen=True)
class Job:
    """One checkpoint to scan, or a piece (i, n) of its layers."""

    source: str
    run: str | None
    step: int | None
    identity: str
    settings: ScanSettings
    reader: str  # the version of the code that reads
    piece: tuple[int, int] | None = None
    seconds: float = 0.0  # about how long it takes; decides only the order

    @property
    def key(self) -> str:
        """The name of the part: a digest of source, identity, settings and reader version."""
        return key_of(self.source, self.identity, self.settings, self.reader)

    @property
    def name(self) -> tuple[str, int]:
        """The key and the number of the piece."""
        return self.key, self.piece[0] if self.piece else 0


Task = tuple[Job, ...]  # jobs that one worker does in a row


@cache
def key_of(source: str, identity: str, settings: ScanSettings, reader: str) -> str:
    text = json.dumps([source, identity, asdict(settings), reader], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@cache
def reader_version() -> str:
    """Version of the package and a digest of the files that decide the numbers of a scan.

    >>> reader_version().startswith(__version__ + "+")
    True
    """
    digest = hashlib.blake2b(digest_size=6)
    for name, path in reader_files().items():
        digest.update(f"{name}\0".encode() + path.read_bytes())
    return f"{__version__}+{digest.hexdigest()}"


def reader_files() -> dict[str, Path]:
    """Files that decide the numbers of a scan, by name: those of the package, and all of the packages that offer
    families by entry points. None of these is imported.
    """
    own = _sources(PACKAGE, PACKAGE.name)
    files = {
        name: path
        for name, path in own.items()
        if not any(path.relative_to(PACKAGE).is_relative_to(place) for place in UNRELATED)
    }
    for package in sorted({point.module.partition(".")[0] for point in offered_entries("families").values()}):
        spec = None if package == PACKAGE.name else find_spec(package)
        if spec is not None and spec.submodule_search_locations is not None:
            for folder in spec.submodule_search_locations:
                files |= _sources(Path(folder), package)
        elif spec is not None and spec.origin is not None:
            files[package] = Path(spec.origin)
    return files


def _sources(folder: Path, package: str) -> dict[str, Path]:
    return {f"{package}/{path.relative_to(folder).as_posix()}": path for path in sorted(folder.rglob("*.py"))}


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
