"""`Document`: what every result has. It is written as JSON, and `report/` shows that JSON. And the checks of a saved
document: what is no number where one belongs is refused when it is read.

Pages and tables are made from `to_dict()` alone, so a saved file is shown as the result that wrote it.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from locater.errors import LocaterError
from locater.files import write_whole
from locater.version import SCHEMA, __version__

if TYPE_CHECKING:
    import pandas
    import polars
    from rich.console import Console


class Document(ABC):
    """A result with a JSON document."""

    schema: ClassVar[int] = SCHEMA  # of the JSON document; increases when a key moves or changes its meaning

    def header(self) -> dict[str, Any]:
        """The first keys of the document: which schema it has, and which version of Locater wrote it."""
        return {"schema": self.schema, "locater": __version__}

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""

    @abstractmethod
    def records(self) -> Iterable[dict[str, Any]]:
        """One dictionary per head or token, for tables and frames."""

    @abstractmethod
    def page(self) -> str:
        """The HTML page: self-contained, works offline."""

    @abstractmethod
    def show(self, console: Console) -> None:
        """Print tables and sentences in a terminal."""

    def to_json(self) -> str:
        """The JSON document as text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON document; the file appears whole or not at all."""
        write_whole(Path(path), self.to_json() + "\n")

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the HTML page: self-contained, works offline."""
        write_whole(Path(path), self.page())

    def to_pandas(self) -> pandas.DataFrame:
        """The records as a pandas frame."""
        try:
            import pandas
        except ImportError:
            raise LocaterError("pandas is not installed: pip install pandas") from None
        return pandas.DataFrame([*self.records()])

    def to_polars(self) -> polars.DataFrame:
        """The records as a polars frame."""
        try:
            import polars
        except ImportError:
            raise LocaterError("polars is not installed: pip install polars") from None
        return polars.DataFrame([*self.records()])


# ---- checks of the document of a scan, so that the code that reads it can rely on the type of every value ----

Check = Callable[[Any], bool]
LARGEST = 1e300  # largest number: the difference of two of them is still finite
NONNEGATIVE = {"frobenius_sq", "F"}  # columns whose square root is taken


def parse_document(text: str) -> Any:
    """Parse JSON. NaN and infinities are refused: in documents a number without meaning is null."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def check_scan(document: Mapping[str, Any], numeric: Collection[str], optional: Collection[str]) -> None:
    """Raise ValueError or KeyError with the path of the first value that a scan would never write.

    `numeric` are the columns with numbers, `optional` those that a row may lack.
    """
    for part in ("heads", "layers", "assumptions", "source"):
        document[part]  # KeyError names it
    if not _text(document["source"]):
        raise ValueError("source is not text")
    _check(document["assumptions"], ASSUMPTIONS, "assumptions", {"layers", "read", "values"})
    for part, checks, may_lack in (("layers", LAYER, LAYER_OPTIONAL), ("heads", _head(numeric), optional)):
        if not isinstance(document[part], list):
            raise ValueError(f"{part} is not a list")
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
        raise ValueError(f"layer {unknown} has heads but no entry in layers")


def _check(entry: Any, checks: Mapping[str, Check], where: str, optional: Collection[str]) -> None:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is not an object")
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


def _boolean(x: Any) -> bool:
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
    "values": _boolean,
    "read": lambda x: isinstance(x, dict) and all(_count(x.get(part)) for part in ("maps", "vectors", "of")),
}
LAYER: dict[str, Check] = {
    **dict.fromkeys(("layer", "heads", "kv_heads", "head_dim", "width"), _count),
    **dict.fromkeys(("name", "kind", "norm", "provenance", "quantised"), _text),
    **dict.fromkeys(("sinks", "query_key_norm"), _boolean),
    "causal": _maybe(_boolean),
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
    **dict.fromkeys(("written", "written_share"), _nonnegative),
    "eigenvalues": _maybe(_list(_pair)),
    "drive": _maybe(_drive),
    "profile": _maybe(_list(_number)),
}


def _head(numeric: Collection[str]) -> dict[str, Check]:
    columns: dict[str, Check] = {name: _nonnegative if name in NONNEGATIVE else _maybe(_number) for name in numeric}
    return {**HEAD, **columns, "scale": _maybe(_number)}
