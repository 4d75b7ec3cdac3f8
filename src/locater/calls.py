"""Things by name with options, written as a call: `locater(target=2, part=full)`. No code is run to read them."""

from __future__ import annotations

import ast
from typing import Any

from locater.errors import LocaterError


def parse_call(text: str, what: str) -> tuple[str, dict[str, Any]]:
    """Name and options; values are literals, or bare words for texts. `what` is named where it cannot be read.

    >>> parse_call("gated(per=element, shared=True)", "attention")
    ('gated', {'per': 'element', 'shared': True})
    """
    how = f"{what} {text!r}: write it as name or name(option=value, ...)"
    try:
        held = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise LocaterError(how) from None
    if isinstance(held, ast.Name):
        return held.id, {}
    if (
        not isinstance(held, ast.Call)
        or not isinstance(held.func, ast.Name)
        or held.args
        or any(k.arg is None for k in held.keywords)
    ):
        raise LocaterError(how)
    return held.func.id, {str(k.arg): _value(k.value, f"{what} {text!r}: {k.arg}") for k in held.keywords}


def _value(node: ast.expr, where: str) -> Any:
    if isinstance(node, ast.Name):
        return node.id
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise LocaterError(f"{where}: a number, a word, a text or a list of them") from None
