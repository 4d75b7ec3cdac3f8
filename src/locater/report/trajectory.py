"""Checkpoints of training runs as a page: heads by layers on a slider over steps, and every number over steps."""

from __future__ import annotations

import base64
import zlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from locater.markup import quantile
from locater.report.pages import assemble, flag_table, short_name
from locater.report.scan_columns import Quantity, quantities
from locater.report.trajectory_words import failure_words, first_faults, irregularities, overview, run_labels
from locater.version import __version__

# Long tables of numbers for pages, to six digits, as compressed text that a script reads when it needs them.


NONE = 0x7FF80000  # upper half of a NaN: no number


def pack_numbers(numbers: ArrayLike) -> str:
    """Base64 of a zlib stream: of each number the upper 32 bits of its float64, as four planes of bytes.

    A number is off by at most 2^-21 of itself (5e-7), over the whole range of float64. Bytes of the same weight lie
    together, because the upper ones of neighbours are alike and compress well. None and NaN become NaN.

    >>> unpack_numbers(pack_numbers([[0.1, -2.5], [None, 0.0]])).round(6).tolist()
    [0.1, -2.5, nan, 0.0]
    """
    x = np.asarray(numbers, dtype=np.float64).ravel()
    bits = x.view(np.uint64)
    upper = ((bits + np.uint64(1 << 31)) >> np.uint64(32)).astype(np.uint32)
    upper = np.where(upper & 0x7FFFFFFF >= 0x7FF00000, (bits >> np.uint64(32)).astype(np.uint32), upper)  # no carry
    upper = np.where(np.isfinite(x), upper, NONE).astype(">u4")
    planes = upper.view(np.uint8).reshape(-1, 4).T
    return base64.b64encode(zlib.compress(np.ascontiguousarray(planes).tobytes(), 9)).decode()


def unpack_numbers(packed: str) -> np.ndarray:
    """The numbers again, as the script of a page reads them."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(packed)), np.uint8).reshape(4, -1)
    upper = np.ascontiguousarray(planes.T).view(">u4").ravel().astype(np.uint64)
    return (upper << np.uint64(32)).view(np.float64)


Document = Mapping[str, Any]
VALUES = 4_000_000  # most numbers on one page, at about three bytes each; columns that others follow from go first
OPENING = ("M", "expected_entropy", "localization", "concentration", "residual_kept", "stable_rank")
NEARLY = 0.9  # of the largest change: a number that changes so much is as good to open on
UNKNOWN_LENGTH = 256  # only for the range of colours, where the document does not say how many tokens were in view


def trajectory_page(document: Document) -> str:
    """One self-contained page of the document that `trajectory()` returns."""
    whole, runs = document, [run for run in document["runs"] if run["steps"]]  # the others are named in the words
    document = {**document, "runs": runs}
    labels = run_labels([run["name"] for run in runs])
    names = list(labels.values())
    title = " and ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "") if names else "No run"
    columns, left_out = _page_columns(document)
    note = f"Only in the data, to keep this page small: {', '.join(left_out)}." if left_out else ""
    words = {
        "TITLE": f"{title} · Locater",
        "HEADING": title,
        "VERDICT": first_faults(whole),
        "COUNTS": overview(whole),
        "IRREGULAR": " ".join(irregularities(whole)),
        "LEFTOUT": note,
        "FOOTER": f"Made by Locater {__version__} from weights alone. Numbers are rounded to six digits.",
    }
    data = {
        "metrics": _metrics(document, columns),
        "opening": _opening(document, columns),
        "flags": flag_table(),
        "runs": [_run_data(run, labels, document, columns) for run in runs],
        "unplaced": [failure_words(x["source"], x["reason"]) for x in document["failed"] if x["step"] is None],
        "duplicates": [[[labels[x["run"]], x["step"]] for x in group] for group in document["duplicates"]],
    }
    scripts = ("steps.js", "trajectory_data.js", "trajectory_charts.js")
    return assemble("trajectory", words, data, scripts=scripts, styles=("steps.css",))


# ---- columns ----


def _quantities(document: Document) -> dict[str, Quantity]:
    return quantities(document["length"] or UNKNOWN_LENGTH)


def _page_columns(document: Document) -> tuple[list[str], list[str]]:
    """Columns that are on the page, and those for which there is no room: the ones that the menu has no words for."""
    wanted = {*_quantities(document), "F", "S"}
    ranked = sorted(document["columns"], key=lambda name: name not in wanted)
    heads = sum(len(run["steps"]) * sum(layer["heads"] for layer in run["layers"]) for run in document["runs"])
    most = max(len(wanted & {*ranked}), VALUES // max(1, heads))
    kept = {*ranked[:most]}
    return [x for x in document["columns"] if x in kept], [x for x in document["columns"] if x not in kept]


def _metrics(document: Document, columns: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What the menu offers: the quantities of a scan's page, then every other column by its name."""
    known, metrics = _quantities(document), {}
    needs = {"sqrtF": ("F",), "symmetry": ("S", "F")}
    for name, x in known.items():
        if all(column in columns for column in needs.get(name, (name,))):
            meaning = x.meaning
            if document["length"] is None and name == "residual_kept":  # its words name the length
                meaning = "Share of the differences between tokens that attention alone passes on."
            metrics[name] = {"label": x.label, "diverging": x.diverging, "least": x.least, "meaning": meaning}
    for name in columns:
        if name not in metrics:
            label = name.replace("_", " ") if len(name) > 1 else name
            metrics[name] = {"label": label, "diverging": False, "least": 0, "meaning": f"Column {name} of a scan."}
    return metrics


def _opening(document: Document, columns: Sequence[str]) -> dict[str, Any]:
    """The number and the head that a page opens on: the number that changes most over steps, for its range, and of
    nearly equal ones the first of the menu; the first head with a fault, or else the one that changes most.
    """
    known = _quantities(document)
    sizes = {name: _change(document["runs"], name, known[name].least) for name in OPENING if name in columns}
    most = max((size for size, _ in sizes.values()), default=0.0)
    metric = next((name for name, (size, _) in sizes.items() if size >= NEARLY * most), next(iter(columns), ""))
    run, layer, head = sizes[metric][1] if metric in sizes else (0, 0, 0)
    first = None
    for place, other in enumerate(document["runs"]):
        for x in other["findings"]:
            if x["first_fault"] is not None and (first is None or x["first_fault"] < first):
                first, run = x["first_fault"], place
                layer, head = [entry["layer"] for entry in other["layers"]].index(x["layer"]), x["head"]
    two = len(document["runs"]) == 2 and not document["shapes"]
    return {"metric": metric, "run": 0 if two else run, "layer": layer, "head": head, "two": two}


def _change(runs: Sequence[Mapping[str, Any]], name: str, least: float) -> tuple[float, tuple[int, int, int]]:
    """How far a number of a head moves over steps (98th percentile over heads, over the range of the number), and the
    run, layer and head that move most.
    """
    moves: list[tuple[float, tuple[int, int, int]]] = []
    most = least
    for at, run in enumerate(runs):
        sizes = [layer["heads"] for layer in run["layers"]]
        table = np.array([[x for layer in step for x in layer] for step in run["values"][name]], dtype=np.float64)
        table = np.where(np.isfinite(table), table, np.nan)
        if not table.size or np.isnan(table).all():
            continue
        most = max(most, float(np.nanquantile(np.abs(table), 0.98)))
        spans = np.nan_to_num(np.fmax.reduce(table) - np.fmin.reduce(table))
        places = [(at, layer, head) for layer, heads in enumerate(sizes) for head in range(heads)]
        moves += zip(spans.tolist(), places, strict=True)
    if not moves:
        return 0.0, (0, 0, 0)
    return quantile([size for size, _ in moves], 0.98) / (most or 1.0), max(moves)[1]


# ---- one run ----


def _run_data(
    run: Mapping[str, Any], labels: Mapping[str, str], document: Document, columns: Sequence[str]
) -> dict[str, Any]:
    steps = [x["step"] for x in run["steps"]]
    failed = [x for x in document["failed"] if x["step"] is not None and x["run"] == run["name"]]
    stored = [at for at, x in enumerate(run["steps"]) if x["same_as"] is None]
    place = {step: at for at, step in enumerate(steps)}
    rows = {steps[at]: row for row, at in enumerate(stored)}
    return {
        "name": labels[run["name"]],
        "numbered": run["numbered"],
        "layers": [
            {"short": str(x["layer"]), "name": x["name"], "heads": x["heads"], "kind": x["kind"]} for x in run["layers"]
        ],
        "steps": steps,
        "sources": [short_name(x["source"]) for x in run["steps"]],
        "same": [None if x["same_as"] is None else place[x["same_as"]] for x in run["steps"]],
        "rows": [
            rows[step if x["same_as"] is None else x["same_as"]] for step, x in zip(steps, run["steps"], strict=True)
        ],
        "gaps": run["gaps"],
        "failed": sorted([x["step"], failure_words(x["source"], x["reason"]), x["reason"]] for x in failed),
        "aside": [[x["source"], x["reason"]] for x in run["aside"]],
        "findings": _findings(run, place),
        "values": {name: _packed(run["values"][name], stored) for name in columns},
    }


def _findings(run: Mapping[str, Any], place: Mapping[int, int]) -> list[list[Any]]:
    """[layer, head, flag, spans, spans as a fault]: spans as pairs of indices of steps, the earliest first."""
    layers = [x["layer"] for x in run["layers"]]
    table = [
        [
            bisect_left(layers, x["layer"]),
            *(x["head"], x["flag"]),
            *([[place[a], place[b]] for a, b in x[key]] for key in ("spans", "fault_spans")),
        ]
        for x in run["findings"]
    ]
    return sorted(table, key=lambda x: (x[3][0][0], x[0], x[1]))


def _packed(steps: Sequence[Sequence[Sequence[float | None]]], stored: Sequence[int]) -> str:
    """By head and then by step, because a head hardly changes from one step to the next."""
    table = np.array([[x for layer in steps[at] for x in layer] for at in stored], dtype=np.float64)
    return pack_numbers(table.T)
