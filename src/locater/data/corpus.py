"""Text to learn from: what every Python carries, built at run time so that nothing has to be downloaded, or files of
one's own.

Text is kept as documents, because that is how it is split: train, select (choose settings by it) and report (publish
that).
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import lzma
import os
import random
import sysconfig
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from locater.errors import LocaterError, first_line

SHARE = 0.05  # of the text, for each of select and report
FEW = 40  # with fewer documents than this, they are cut into pieces
JOINT = "\n\n"
UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error, tarfile.TarError)
SKIP = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "pydoc_data"}


def embedded_text() -> str:
    """The language reference that `help()` shows, then the unique docstrings of the standard library.

    About 2.2 million characters. The text differs between Python releases: keep `fingerprint(text)` beside
    every result that depends on it. Takes a few seconds.
    """
    return JOINT.join(embedded_documents())


def embedded_documents() -> list[str]:
    """The same, page by page."""
    from pydoc_data import topics

    pages = [topics.topics[name] for name in sorted(topics.topics)]
    seen: dict[str, None] = {}
    for doc in _docstrings(Path(sysconfig.get_paths()["stdlib"])):
        seen.setdefault(doc)
    return [*pages, *seen]


def read_documents(paths: Sequence[str | Path]) -> list[str]:
    """Documents in files, folders and archives, in the order given, without those that are there twice.

    A file that is named must be text in UTF-8. In folders and archives whatever is not is passed over.
    """
    found: dict[str, None] = {}
    for path in map(Path, paths):
        try:
            held = [text for text in _texts(path) if text.strip()]
        except UNREADABLE as error:
            raise LocaterError(f"{path}: cannot be read ({first_line(error)})") from None
        if not held:
            raise LocaterError(f"{path}: no text in it")
        found.update(dict.fromkeys(held))
    return list(found)


def split(documents: Sequence[str], share: float = SHARE) -> dict[str, list[str]]:
    """Documents by split: shuffled with a fixed seed, then `share` of the characters to report, as much to select, the
    rest to train.

    >>> {name: len(held) for name, held in split([f"document {n:4}" for n in range(100)]).items()}
    {'report': 5, 'select': 5, 'train': 90}
    """
    pieces = (
        list(documents) if len(documents) >= FEW else [piece for text in documents for piece in _cut(text, documents)]
    )
    random.Random(0).shuffle(pieces)
    wanted, found, at = share * sum(map(len, pieces)), {}, 0
    for name in ("report", "select"):
        begin, size = at, 0
        while size < wanted and at < len(pieces):
            size += len(pieces[at])
            at += 1
        found[name] = pieces[begin:at]
    return {**found, "train": pieces[at:]}


def fingerprint(text: str) -> str:
    """SHA-256 of the text, in hex.

    >>> fingerprint("attention")[:8]
    'e0787d27'
    """
    return hashlib.sha256(text.encode()).hexdigest()


def _sources(root: Path) -> Iterator[Path]:
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in SKIP]  # do not even walk through installed packages
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _docstrings(root: Path) -> Iterator[str]:
    for path in sorted(_sources(root)):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):  # templates and fixtures that are not Python
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                doc = ast.get_docstring(node)
                if doc:
                    yield doc


def _cut(text: str, documents: Sequence[str]) -> Iterator[str]:
    """Pieces of a long document, ends at blank lines (at lines, where there are none): about 2 FEW of all documents
    together.
    """
    size = max(1, sum(map(len, documents)) // (2 * FEW))
    joint = JOINT if text.count(JOINT) >= FEW else "\n"
    held: list[str] = []
    taken = 0
    for part in text.split(joint):
        held.append(part)
        taken += len(part)
        if taken >= size:
            yield joint.join(held)
            held, taken = [], 0
    if any(held):
        yield joint.join(held)


def _texts(path: Path) -> Iterator[str]:
    if path.is_dir():
        for file in sorted(
            p
            for p in path.rglob("*")
            if p.is_file() and not any(part.startswith(".") for part in p.relative_to(path).parts)
        ):
            yield from _kept(_members(file))
    elif tarfile.is_tarfile(path):
        yield from _kept(_members(path))
    else:
        (data,) = _members(path)
        try:
            yield _decoded(data)
        except ValueError as error:
            raise LocaterError(f"{path}: not text in UTF-8 ({error}); give text files, or a folder of them") from None


def _members(path: Path) -> Iterator[bytes]:
    """What a file holds: an archive's files, or the file itself, unpacked."""
    if tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            for member in sorted(filter(tarfile.TarInfo.isfile, archive.getmembers()), key=lambda m: m.name):
                file = archive.extractfile(member)
                if file is not None:
                    yield file.read()
        return
    data = path.read_bytes()
    yield {".xz": lzma.decompress, ".gz": gzip.decompress}.get(path.suffix, bytes)(data)


def _kept(parts: Iterable[bytes]) -> Iterator[str]:
    for data in parts:
        try:
            yield _decoded(data)
        except ValueError:
            continue


def _decoded(data: bytes) -> str:
    if b"\0" in data:
        raise ValueError(f"a zero byte at {data.index(0)}")
    return data.decode("utf-8-sig").replace("\r\n", "\n")
