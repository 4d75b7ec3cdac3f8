"""Checks the JSON document of a scan, so that the code which reads it can rely on the type of every value."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

Check = Callable[[Any], bool]
LARGEST = 1e300  # largest number: the difference of two of them is still finite
NONNEGATIVE = {"frobenius_sq", "F"}  # columns whose square root is taken


def parsed(text: str) -> Any:
    """Parse JSON. NaN and infinities are refused: in documents a number without meaning is null."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def check_scan(document: Mapping[str, Any], numeric: Collection[str], optional: Collection[str]) -> None:
    """Raise ValueError or KeyError with the path of the first value that a scan would not write.

    `numeric` are the columns with numbers, `optional` those that a row may lack.
    """
    for part in ("heads", "layers", "assumptions", "source"):
        document[part]  # KeyError names it
    if not _text(document["source"]):
        raise ValueError("source is no text")
    _check(document["assumptions"], ASSUMPTIONS, "assumptions", {"layers", "read"})
    for part, checks, may_lack in (("layers", LAYER, LAYER_OPTIONAL), ("heads", _head(numeric), optional)):
        if not isinstance(document[part], list):
            raise ValueError(f"{part} is no list")
        for number, entry in enumerate(document[part]):
            _check(entry, checks, f"{part}[{number}]", may_lack)
    places = [(entry["layer"], None) for entry in document["layers"]]
    rows = [(entry["layer"], entry["head"]) for entry in document["heads"]]
    for keys, name in ((places, "layer"), (rows, "head")):
        if len(set(keys)) < len(keys):
            raise ValueError(f"a {name} is listed twice")
    known = {layer for layer, _ in places}
    unknown = next((layer for layer, _ in rows if layer not in known), None)
    if unknown is not None:
        raise ValueError(f"layer {unknown} has heads and no entry in layers")


def _check(entry: Any, checks: Mapping[str, Check], where: str, optional: Collection[str]) -> None:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is no object")
    for name, check in checks.items():
        if name not in entry:
            if name in optional:
                continue
            raise KeyError(f"{where}.{name}")
        if not check(entry[name]):
            raise ValueError(f"{where}.{name} is {entry[name]!r:.60}")


def _finite(text: str) -> float:
    value = float(text)
    if not abs(value) < float("inf"):
        raise ValueError(f"the number {text:.40}")
    return value


def _count(x: Any) -> bool:
    return type(x) is int and 0 <= x < 2**53


def _number(x: Any) -> bool:
    return type(x) in (int, float) and abs(x) <= LARGEST


def _nonnegative(x: Any) -> bool:
    return x is None or (_number(x) and x >= 0)


def _text(x: Any) -> bool:
    return isinstance(x, str) and not any("\ud800" <= c <= "\udfff" for c in x)


def _switch(x: Any) -> bool:
    return isinstance(x, bool)


def _length(x: Any) -> bool:
    return _count(x) and x >= 2


def _maybe(check: Check) -> Check:
    return lambda x: x is None or check(x)


def _list(check: Check) -> Check:
    return lambda x: isinstance(x, list) and all(check(value) for value in x)


def _pair(x: Any) -> bool:
    return _list(_number)(x) and len(x) == 2


def _drive(x: Any) -> bool:
    return (
        isinstance(x, dict)
        and _list(_number)(x.get("even"))
        and _list(_number)(x.get("odd"))
        and _number(x.get("still"))
    )


ASSUMPTIONS: dict[str, Check] = {
    **dict.fromkeys(("prediction", "tokens", "weights"), _text),
    "length": _length,
    "layers": _count,
    "notes": _list(_text),
    "read": lambda x: isinstance(x, dict) and all(_count(x.get(part)) for part in ("maps", "vectors", "of")),
}
LAYER: dict[str, Check] = {
    **dict.fromkeys(("layer", "heads", "kv_heads", "head_dim", "width"), _count),
    **dict.fromkeys(("name", "kind", "norm", "provenance", "quantised"), _text),
    **dict.fromkeys(("sinks", "query_key_norm"), _switch),
    "causal": _maybe(_switch),
    **dict.fromkeys(("softcap", "residual_kept"), _maybe(_number)),
    "window": _maybe(_count),
    "positions": _maybe(_text),
    "frequencies": _list(_number),
}
LAYER_OPTIONAL = {"norm", "causal", "softcap", "sinks", "query_key_norm", "residual_kept", "frequencies", "provenance"}
LAYER_OPTIONAL |= {"quantised"}
HEAD: dict[str, Check] = {
    **dict.fromkeys(("layer", "head", "kv_head", "width", "head_dim"), _count),
    "kind": _text,
    **dict.fromkeys(("approximation", "quantised"), _maybe(_text)),
    "flags": _list(_text),
    "eigenvalues": _maybe(_list(_pair)),
    "drive": _maybe(_drive),
    "profile": _maybe(_list(_number)),
}


def _head(numeric: Collection[str]) -> dict[str, Check]:
    columns: dict[str, Check] = {name: _nonnegative if name in NONNEGATIVE else _maybe(_number) for name in numeric}
    return {**HEAD, **columns, "scale": _maybe(_number)}
