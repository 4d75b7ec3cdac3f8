"""The text that every Python carries: the default corpus, built at run time, so that nothing has to be downloaded."""

from __future__ import annotations

import ast
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SKIP = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "pydoc_data"}


def embedded_text() -> str:
    """The language reference that `help()` shows, then the unique docstrings of the standard library.

    About 2.2 million characters. The text differs between Python releases: keep `fingerprint(text)` beside
    every result that depends on it. Takes a few seconds.
    """
    from pydoc_data import topics

    pages = [topics.topics[name] for name in sorted(topics.topics)]
    seen: dict[str, None] = {}
    for doc in _docstrings(Path(sysconfig.get_paths()["stdlib"])):
        seen.setdefault(doc)
    return "\n\n".join([*pages, *seen])


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
