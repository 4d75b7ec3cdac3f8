"""A name with options, written as a call: `locater(target=2, part=full)`. It is parsed, never executed."""

from __future__ import annotations

import ast
from typing import Any

from locater.errors import LocaterError


def parse_call(text: str, where: str) -> tuple[str, dict[str, Any]]:
    """Name and options. A value is a literal, or a bare word for a string. Errors begin with `where`.

    >>> parse_call("gated(per=element, shared=True)", "attention")
    ('gated', {'per': 'element', 'shared': True})
    """
    usage = f"{where} {text!r}: write it as name or name(option=value, ...)"
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise LocaterError(usage) from None
    if isinstance(call, ast.Name):
        return call.id, {}
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise LocaterError(usage)
    if call.args or any(option.arg is None for option in call.keywords):  # without a name, or **options
        raise LocaterError(usage)
    options = {str(option.arg): option.value for option in call.keywords}
    return call.func.id, {name: _value(node, f"{where} {text!r}: {name}") for name, node in options.items()}


def _value(node: ast.expr, where: str) -> Any:
    if isinstance(node, ast.Name):
        return node.id
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise LocaterError(f"{where}: a number, a word, a text or a list of them") from None
