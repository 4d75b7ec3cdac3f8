"""Explanations of one input as a self-contained page."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from locater.report.explain_words import (
    best_method,
    heads_note,
    method_label,
    percent,
    sentence,
    target_sentence,
    unit,
    verdict,
)
from locater.report.pages import assemble, short_name, significant
from locater.version import __version__

if TYPE_CHECKING:
    from torch import Tensor

    from locater.explain.explanation import Explanation
    from locater.results.explanations import DeletionCurve, Explanations


# Tables of numbers for pages: one byte per number, compressed, as text that a script reads when it is needed.


def pack_table(table: ArrayLike) -> str:
    """A table (rows, columns) as base64 of a zlib stream: a float32 scale per row, then the numbers as int8.

    A number is its int8 times the scale of its row: it is off by at most 1/254 of the largest number in its row.

    >>> unpack_table(pack_table([[0.0, 0.5, 1.0], [-2.0, 0.0, 1.0]]), 2, 3).round(2)
    array([[ 0.  ,  0.5 ,  1.  ],
           [-2.  ,  0.  ,  1.01]], dtype=float32)
    """
    x = np.asarray(table, dtype=np.float32)
    scale = np.abs(x).max(axis=1, initial=0.0) / 127
    whole = np.rint(x / np.where(scale > 0, scale, 1)[:, None]).astype(np.int8)
    data = scale.astype("<f4").tobytes() + whole.tobytes()
    return base64.b64encode(zlib.compress(data, 6)).decode()


def unpack_table(packed: str, rows: int, columns: int) -> np.ndarray:
    """The table again, as the script of a page reads it."""
    data = zlib.decompress(base64.b64decode(packed))
    scale = np.frombuffer(data, "<f4", rows)
    return np.frombuffer(data, np.int8, rows * columns, 4 * rows).reshape(rows, columns) * scale[:, None]


class Tables:
    """Tables that a page carries beside its data, each in an element of its own that is read when it is shown."""

    def __init__(self) -> None:
        self.packed: list[str] = []

    def add(self, table: Tensor) -> int:
        """The number of the table on the page."""
        self.packed.append(pack_table(table.detach().cpu().float().numpy()))
        return len(self.packed) - 1

    def markup(self) -> str:
        return "\n".join(_data_element(f"table-{i}", text) for i, text in enumerate(self.packed))


def explain_page(result: Explanations) -> str:
    """The page of one input."""
    name, tables = short_name(result.source), Tables()
    data = page_data(result, tables)
    words = {
        "TITLE": f"{name} · Locater",
        "HEADING": name,
        "VERDICT": verdict(result),
        "TARGET": target_sentence(result),
        "AGREEMENT": best_method(result),
        "FOOTER": f"Made by Locater {__version__}.",
    }
    markup = tables.markup()
    if result.picture is not None:
        markup += "\n" + _data_element("pixels", base64.b64encode(result.picture.pixels.numpy().tobytes()).decode())
    return assemble("explain", words, data, {"TABLES": markup}, ("tables.js",))


def page_data(result: Explanations, tables: Tables) -> dict[str, Any]:
    """What the page's script reads."""
    places = {stream.name: place for place, stream in enumerate(result.streams)}
    return {
        "streams": [_stream_data(result, place) for place in range(len(result.streams))],
        "picture": _picture_data(result),
        "target": {"index": result.target.index, "position": result.target.position},
        "methods": [_method_data(method, result, places, tables) for method in result.methods],
        "predictions": [[p.index, p.name, significant(p.probability)] for p in result.predictions],
        "predictions_note": "Probability of the likeliest entries; the explained one is marked.",
        "layers": [{**entry, "short": str(entry["layer"])} for entry in result.layers],
        "heads": [[row.layer, row.head, significant(row.share)] for row in result.heads],
        "heads_note": heads_note(result),
        "patterns": [_pattern_data(pattern, places, tables) for pattern in result.patterns],
        "first_head": _first_head(result),
        "lengths": [[row.length, significant(row.share)] for row in result.lengths],
        "lengths_note": _lengths_note(result),
        "deletion": [_curve_data(name, curve) for name, curve in result.deletion.items()],
        "deletion_axis": _deletion_axis(result),
        "deletion_note": result.assumptions.get("deletion", ""),
        "notes": result.assumptions.get("notes", []),
    }


def _curve_data(name: str, curve: DeletionCurve) -> dict[str, Any]:
    sides = (curve.largest_first, curve.smallest_first)
    return {
        "label": method_label(name),
        "area": significant(curve.area),
        "points": [[[x, significant(y)] for x, y in zip(curve.removed, side, strict=True)] for side in sides],
    }


def _deletion_axis(result: Explanations) -> str:
    kinds = {curve.of for curve in result.deletion.values()}
    return "probability" if kinds == {"probability"} else "target"


def _data_element(name: str, text: str) -> str:
    return f'<script type="text/plain" id="{name}">{text}</script>'


def _stream_data(result: Explanations, place: int) -> dict[str, Any]:
    stream = result.streams[place]
    return {
        "name": stream.name,
        "tokens": stream.tokens,
        "special": sorted(stream.special),
        "patches": stream.ids is None and result.picture is not None,
        "explained": stream.name == result.assumptions.get("output_stream"),
    }


def _picture_data(result: Explanations) -> dict[str, int] | None:
    if result.picture is None:
        return None
    height, width, _ = result.picture.pixels.shape
    return {
        "width": width,
        "height": height,
        "rows": result.picture.rows,
        "columns": result.picture.columns,
        "before": result.picture.before,
    }


def _method_data(method: Explanation, result: Explanations, places: dict[str, int], tables: Tables) -> dict[str, Any]:
    shown = method.matrix is not None and method.method not in result.assumptions.get("without_matrix", ())
    scores: list[list[float | None] | None] = [None] * len(places)
    scores[places[method.stream]] = _numbers(method.scores)
    for name, values in method.other_streams.items():
        scores[places[name]] = _numbers(values)
    rows = 0 if method.matrix is None else method.matrix.shape[0]
    return {
        "name": method.method,
        "label": method_label(method.method),
        "unit": unit(method),
        "exact": sentence(method.exact),
        "how": sentence(method.how),
        "stream": places[method.stream],
        "scores": scores,
        "without": "" if shown or method.matrix is None else "Its matrix has no room on this page.",
        "table": tables.add(method.matrix) if shown and method.matrix is not None else None,
        "rows": rows,
        "queries": _queries(result, method, rows, places),
    }


def _queries(result: Explanations, method: Explanation, rows: int, places: dict[str, int]) -> int:
    """The stream whose tokens are the rows of a method's matrix: the output's, where the lengths agree."""
    output = result.assumptions.get("output_stream", method.stream)
    lengths = {stream.name: len(stream.tokens) for stream in result.streams}
    return places[output] if lengths.get(output) == rows else places[method.stream]


def _numbers(values: Tensor) -> list[float | None]:
    return [significant(float(x)) for x in values]


def _pattern_data(pattern: Any, places: dict[str, int], tables: Tables) -> dict[str, Any]:
    rows, columns = pattern.weights.shape
    return {
        "layer": pattern.layer,
        "head": pattern.head,
        "rows": rows,
        "columns": columns,
        "queries": places[pattern.queries],
        "keys": places[pattern.keys],
        "table": tables.add(pattern.weights),
    }


def _first_head(result: Explanations) -> int:
    """The pattern to begin with: of the head with the largest share, or of the last layer."""
    if not result.heads:
        return max(0, len(result.patterns) - 1)
    shares = {(row.layer, row.head): abs(row.share) for row in result.heads}
    sizes: Sequence[float] = [shares.get((p.layer, p.head), 0.0) for p in result.patterns]
    return sizes.index(max(sizes)) if sizes else 0


def _lengths_note(result: Explanations) -> str:
    if not result.lengths:
        return str(result.assumptions.get("lengths", ""))
    largest = max(result.lengths, key=lambda row: abs(row.share))
    heads = "no head" if largest.length == 0 else "1 head" if largest.length == 1 else f"{largest.length} heads"
    part = f"the largest part, {percent(largest.share)}, passes {heads}"
    return f"The target as a sum over paths, by heads passed: {part}."
