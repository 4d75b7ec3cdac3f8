"""The JSON document of a scan, checked before it is believed: what reads it may then take every value for what it
should be.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

Check = Callable[[Any], bool]
LARGEST = 1e300  # of a number: differences of two still are numbers
ROOTED = {"frobenius_sq", "F"}  # columns of which roots are taken


def parsed(text: str) -> Any:
    """JSON without NaN and infinities, which no document has: a number without meaning is null."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def check_scan(document: Mapping[str, Any], numeric: Collection[str], optional: Collection[str]) -> None:
    """Raise ValueError with the place of the first value that is not what a scan writes.

    `numeric` are the columns with numbers, `optional` those that a row may lack.
    """
    for part in ("heads", "layers", "assumptions", "source"):
        document[part]  # KeyError names it
    if not _text(document["source"]):
        raise ValueError("source is no text")
    _check(document["assumptions"], ASSUMPTIONS, "assumptions", {"layers"})
    for part, checks, may_lack in (("layers", LAYER, LAYER_OPTIONAL), ("heads", _head(numeric), optional)):
        if not isinstance(document[part], list):
            raise ValueError(f"{part} is no list")
        for number, entry in enumerate(document[part]):
            _check(entry, checks, f"{part}[{number}]", may_lack)
    places = [(entry["layer"], None) for entry in document["layers"]]
    rows = [(entry["layer"], entry["head"]) for entry in document["heads"]]
    for keys, what in ((places, "layer"), (rows, "head")):
        if len(set(keys)) < len(keys):
            raise ValueError(f"a {what} stands twice")
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


def _root(x: Any) -> bool:
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
    "prediction": _text, "tokens": _text, "weights": _text, "length": _length, "layers": _count, "notes": _list(_text),
}  # fmt: skip
LAYER: dict[str, Check] = {
    "layer": _count, "name": _text, "kind": _text, "heads": _count, "kv_heads": _count, "head_dim": _count, "width": _count,
    "norm": _text, "causal": _switch, "window": _maybe(_count), "positions": _maybe(_text), "softcap": _maybe(_number),
    "sinks": _switch, "query_key_norm": _switch, "residual_kept": _maybe(_number), "frequencies": _list(_number),
}  # fmt: skip
LAYER_OPTIONAL = {"norm", "causal", "softcap", "sinks", "query_key_norm", "residual_kept", "frequencies"}
HEAD: dict[str, Check] = {
    "layer": _count, "head": _count, "kv_head": _count, "kind": _text, "width": _count, "head_dim": _count,
    "approximation": _maybe(_text), "flags": _list(_text), "eigenvalues": _maybe(_list(_pair)), "drive": _maybe(_drive),
    "profile": _maybe(_list(_number)),
}  # fmt: skip


def _head(numeric: Collection[str]) -> dict[str, Check]:
    columns: dict[str, Check] = {name: _root if name in ROOTED else _maybe(_number) for name in numeric}
    return {**HEAD, **columns, "scale": _number}
