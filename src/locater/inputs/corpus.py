"""Text to read or to train on: files, or the documentation inside every Python installation, so that nothing has to be
downloaded. Text is a list of documents.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import lzma
import os
import sysconfig
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from locater.errors import LocaterError, first_line

JOINT = "\n\n"
UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error, tarfile.TarError)
BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")  # of statements, as the grammar orders them
SKIP = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "pydoc_data"}


def embedded_text() -> str:
    """The language reference that `help()` shows, then the unique docstrings of the standard library.

    About 2.2 million characters. The text differs between Python releases, so store `fingerprint(text)` with every
    result that depends on it. Takes a few seconds the first time in a process.
    """
    return JOINT.join(embedded_documents())


def embedded_documents() -> list[str]:
    """The documents that `embedded_text` joins, one by one."""
    return list(_embedded_texts())


@cache
def _embedded_texts() -> tuple[str, ...]:
    from pydoc_data import topics

    pages = [topics.topics[name] for name in sorted(topics.topics)]
    seen: dict[str, None] = {}
    for doc in _docstrings(Path(sysconfig.get_paths()["stdlib"])):
        seen.setdefault(doc)
    return (*pages, *seen)


def read_documents(paths: Sequence[str | Path]) -> list[str]:
    """The documents in files, folders and archives, in their order, without duplicates.

    A single file must be UTF-8 text. In folders and archives, files that are not UTF-8 text are skipped.
    """
    documents: dict[str, None] = {}
    if "" in paths:
        raise LocaterError("the name of a text is empty: give a file or a folder (. for this one)")
    for path in map(Path, paths):
        try:
            texts = [text for text in _texts(path) if text.strip()]
        except UNREADABLE as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
            raise LocaterError(f"{path}: cannot be read ({why})") from None
        if not texts:
            raise LocaterError(f"{path}: no text in it")
        documents.update(dict.fromkeys(texts))
    return list(documents)


def fingerprint(text: str) -> str:
    """SHA-256 of the text, in hex.

    >>> fingerprint("attention")[:8]
    'e0787d27'
    """
    return hashlib.sha256(text.encode()).hexdigest()


def _sources(root: Path) -> Iterator[Path]:
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in SKIP]  # installed packages are not searched
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _docstrings(root: Path) -> Iterator[str]:
    for path in sorted(_sources(root)):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):  # templates and fixtures that are not Python
            continue
        for node in _statements(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                doc = ast.get_docstring(node)
                if doc:
                    yield doc


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes that may contain a definition, in the order of `ast.walk`: expressions, most of the nodes, contain none."""
    nodes: list[ast.AST] = [tree]
    for node in nodes:  # the list grows
        yield node
        for name in BLOCKS:
            nodes += getattr(node, name, ())


def _texts(path: Path) -> Iterator[str]:
    """The texts of a folder without hidden files, of an archive, or of a single file."""
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.is_file() and not hidden:
                yield from _decode_readable(_contents(file))
    elif tarfile.is_tarfile(path):
        yield from _decode_readable(_contents(path))
    else:
        (data,) = _contents(path)
        try:
            yield _decode(data)
        except ValueError as error:
            raise LocaterError(f"{path}: not UTF-8 text ({error}); give text files, or a folder of them") from None


def _contents(path: Path) -> Iterator[bytes]:
    """The bytes of each file in an archive, or of the file itself, decompressed."""
    if tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            for member in sorted(filter(tarfile.TarInfo.isfile, archive.getmembers()), key=lambda m: m.name):
                file = archive.extractfile(member)
                if file is not None:
                    yield file.read()
        return
    data = path.read_bytes()
    yield {".xz": lzma.decompress, ".gz": gzip.decompress}.get(path.suffix, bytes)(data)


def _decode_readable(contents: Iterable[bytes]) -> Iterator[str]:
    """The contents that are UTF-8 text; others are skipped."""
    for data in contents:
        try:
            yield _decode(data)
        except ValueError:
            continue


def _decode(data: bytes) -> str:
    if b"\0" in data:
        raise ValueError(f"a zero byte at {data.index(0)}")
    return data.decode("utf-8-sig").replace("\r\n", "\n")
