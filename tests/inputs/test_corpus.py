"""The text that every CPython carries."""

from __future__ import annotations

import ast
import json
from importlib.resources import files
from pathlib import Path

from locater.inputs.corpus import _docstrings, _statements, embedded_text, fingerprint


def test_embedded_text_is_large_and_readable() -> None:
    text = embedded_text()
    assert len(text) > 1_500_000
    assert text.count(" the ") > 5_000


def test_its_order_is_the_same_each_time() -> None:
    folder = Path(json.__file__).parents[1] / "email"
    texts = list(_docstrings(folder))
    assert len(texts) > 100
    assert fingerprint("".join(texts)) == fingerprint("".join(_docstrings(folder)))


def test_definitions_come_in_the_order_of_the_whole_tree() -> None:
    """Also those under `if`, `try`, `with`, `for`, `while` and `match`, and in every branch of them."""
    text = """
if x:
    def a(): "a"
elif y:
    async def b(): "b"
else:
    class C:
        "C"
        def d(self): "d"
try:
    def e(): "e"
except ValueError:
    def f(): "f"
else:
    def g(): "g"
finally:
    def h(): "h"
for i in x:
    with y:
        def j(): "j"
else:
    def k(): "k"
match x:
    case 1:
        def m(): "m"
"""
    tree = ast.parse(text)
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    names = [node.name for node in ast.walk(tree) if isinstance(node, kinds)]
    assert sorted(names) == list("Cabdefghjkm")
    assert [node.name for node in _statements(tree) if isinstance(node, kinds)] == names


def test_the_shipped_checkpoint_names_its_text() -> None:
    record = json.loads((files("locater") / "demo" / "training.json").read_text())
    assert len(record["text_sha256"]) == 64
    assert record["steps"] == 1500
