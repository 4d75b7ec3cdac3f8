"""Checkpoints of training runs: a page with every number over steps and heads on a slider, sentences, and medians in
the terminal.
"""

from __future__ import annotations

import base64
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console
from rich.markup import escape

from locater.findings import FLAGS
from locater.markup import quantile
from locater.numerics import known_median
from locater.report.columns import HeadQuantity, quantities
from locater.report.pages import assemble, flag_table, short_name
from locater.report.terminal import empty_table, fitting_columns
from locater.report.verdict_sentences import amount, number
from locater.version import __version__

Document = Mapping[str, Any]
VALUES = 4_000_000  # most numbers on one page, at about three bytes each; columns that others follow from go first
OPENING = ("M", "expected_entropy", "localization", "concentration", "residual_kept", "stable_rank")
NEARLY = 0.9  # of the largest change: a number that changes so much is as good to open on
UNKNOWN_LENGTH = 256  # only for the range of colours, where the document does not say how many tokens were in view
NAMED = 4  # runs, flags or steps that a sentence names
MEDIAN_COLUMNS = {
    "M": "M",
    "F": "F",
    "H": "expected_entropy",
    "Λ": "localization",
    "κ": "concentration",
    "kept": "residual_kept",
}
MOST_STEPS, MOST_RUNS = 6, 4  # steps of a run, and runs, that the tables show


# ---- sentences ----


def run_labels(names: Sequence[str]) -> dict[str, str]:
    """What to call runs: the shortest ends of their paths that tell them apart.

    >>> run_labels(["/data/a/small", "/data/b/small", "/data/b/large"])
    {'/data/a/small': 'a/small', '/data/b/small': 'b/small', '/data/b/large': 'b/large'}
    """
    parts = {name: [part for part in name.split("/") if part] or [name] for name in names}
    for count in range(1, max((len(x) for x in parts.values()), default=0) + 1):
        ends = {name: "/".join(x[-count:]) for name, x in parts.items()}
        if len({*ends.values()}) == len(ends):
            return ends
    return {name: name for name in names}


def failure_words(source: str, reason: str) -> str:
    """Source and reason; the source is not said twice where the reason names it."""
    return reason if source in reason else f"{source} ({reason})"


def overview(document: Document) -> str:
    """Runs, checkpoints and heads."""
    runs = document["runs"]
    labels = run_labels([run["name"] for run in runs])
    if not runs:
        return "No checkpoint was read."
    if len(runs) == 1:
        return f"{_run_words(runs[0])}."
    named = "; ".join(f"{labels[run['name']]}: {_run_words(run)}" for run in runs[:NAMED])
    more = f"; and {amount(len(runs) - NAMED, 'more run')}" if len(runs) > NAMED else ""
    return f"{amount(len(runs), 'run')}. {named}{more}."


def _run_words(run: Mapping[str, Any]) -> str:
    steps, heads = run["steps"], sum(layer["heads"] for layer in run["layers"])
    what = f"{amount(len(steps), 'checkpoint')} of {amount(heads, 'head')} in {amount(len(run['layers']), 'layer')}"
    if not run["numbered"] or len(steps) < 2:
        return what
    distances = {b["step"] - a["step"] for a, b in pairwise(steps)}
    every = f", every {distances.pop():,}" if len(distances) == 1 else ""
    return f"{what}, steps {steps[0]['step']:,} to {steps[-1]['step']:,}{every}"


def first_faults(document: Document) -> str:
    """The step at which each fault is first seen, by run."""
    parts = []
    labels = run_labels([run["name"] for run in document["runs"]])
    for run in document["runs"]:
        order = {flag.name: place for place, flag in enumerate(FLAGS)}
        faults = [x for x in run["first"] if x["fault_step"] is not None]
        faults.sort(key=lambda x: (x["fault_step"], order.get(x["flag"], len(order))))
        words = ", ".join(f"{x['flag']} from {step_words(run, x['fault_step'])}" for x in faults)
        parts.append((labels[run["name"]], words))
    if not any(words for _, words in parts):
        return "No head has a fault at any step." if parts else ""
    if len(parts) == 1:
        return f"First faults: {parts[0][1]}."
    named = "; ".join(f"{name}: {words or 'none'}" for name, words in parts[:NAMED])
    more = f"; and {amount(len(parts) - NAMED, 'more run')}" if len(parts) > NAMED else ""
    return f"First faults: {named}{more}."


def step_words(run: Mapping[str, Any], step: int) -> str:
    """`step 300`, or the source where checkpoints have no steps."""
    if run["numbered"]:
        return f"step {step:,}"
    return str(run["steps"][step]["source"])


def irregularities(document: Document) -> list[str]:
    """Gaps, failed sources, repeats, changes of shape, and sources without a place: one sentence each."""
    runs, sentences = document["runs"], []
    labels = run_labels([run["name"] for run in runs])
    gaps = [(run, gap) for run in runs for gap in run["gaps"]]
    if gaps:
        missing = sum(gap["missing"] for _, gap in gaps)
        named = ", ".join(_gap_words(gap) for _, gap in gaps[:NAMED])
        sentences.append(f"{amount(missing, 'step')} {_are(missing)} missing: {named}{_more(gaps)}.")
    failed = document["failed"]
    if failed:
        named = "; ".join(failure_words(x["source"], x["reason"]) for x in failed[:NAMED])
        sentences.append(f"{amount(len(failed), 'source')} could not be read: {named}{_more(failed)}.")
    repeats = sum(len(group) - 1 for group in document["duplicates"])
    if repeats:
        total = sum(len(run["steps"]) for run in runs)
        have = "has" if repeats == 1 else "have"
        groups = [_group_words(group, labels) for group in document["duplicates"]]
        sentences.append(
            f"{repeats:,} of {amount(total, 'checkpoint')} {have} the queries, keys and norms of another: "
            f"{'; '.join(groups[:NAMED])}{_more(groups)}."
        )
    for change in document["shapes"]:
        parts = ", ".join(change["parts"][:NAMED])
        sentences.append(f"{change['run']} changes its shape and is shown in parts: {parts}{_more(change['parts'])}.")
    aside = [x for run in runs for x in run["aside"]]
    if aside:
        reasons = Counter(x["reason"] for x in aside)
        named = "; ".join(f"{x['source']} ({x['reason']})" for x in aside[:NAMED])
        sentences.append(f"{amount(reasons.total(), 'checkpoint')} not shown: {named}{_more(aside)}.")
    return sentences


def _gap_words(gap: Mapping[str, int]) -> str:
    first, last = gap["after"] + gap["every"], gap["before"] - gap["every"]
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _group_words(group: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> str:
    """`step 200 = 300 = 400`, or with runs `a 200 = b 200`."""
    with_run = len(labels) > 1
    named = [f"{labels[x['run']]} {x['step']:,}" if with_run else f"{x['step']:,}" for x in group]
    more = f" and {len(named) - NAMED:,} more" if len(named) > NAMED else ""
    return f"{'' if with_run else 'step '}{' = '.join(named[:NAMED])}{more}"


def _more(items: Sequence[Any]) -> str:
    return f" and {len(items) - NAMED:,} more" if len(items) > NAMED else ""


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


# ---- the page ----


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


def _quantities(document: Document) -> dict[str, HeadQuantity]:
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
        "values": {name: _pack_values(run["values"][name], stored) for name in columns},
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


def _pack_values(steps: Sequence[Sequence[Sequence[float | None]]], stored: Sequence[int]) -> str:
    """By head and then by step, because a head hardly changes from one step to the next."""
    table = np.array([[x for layer in steps[at] for x in layer] for at in stored], dtype=np.float64)
    return pack_numbers(table.T)


# ---- the terminal ----


def print_trajectory(document: Mapping[str, Any], console: Console) -> None:
    """Sentences, then for the first runs the medians over heads at some steps, the first and the last among them."""
    console.print(overview(document), highlight=False, markup=False)
    if words := first_faults(document):
        console.print(words, style="bold", highlight=False, markup=False)
    for sentence in irregularities(document):
        console.print(sentence, highlight=False, markup=False)
    labels = run_labels([run["name"] for run in document["runs"]])
    for run in document["runs"][:MOST_RUNS]:
        _print_medians(run, labels[run["name"]], console)


def _print_medians(run: Mapping[str, Any], label: str, console: Console) -> None:
    count = len(run["steps"])
    if not count:
        return
    shown = min(count, MOST_STEPS)
    places = sorted({round(i * (count - 1) / max(1, shown - 1)) for i in range(shown)})
    steps = [run["steps"][at] for at in places]
    cells = {"step": [f"{x['step']:,}" if run["numbered"] else escape(x["source"][-24:]) for x in steps]}
    for heading, column in MEDIAN_COLUMNS.items():
        if column in run["values"]:
            values = (run["values"][column][at] for at in places)
            cells[heading] = [number(known_median(x for layer in step for x in layer)) for step in values]
    cells["faults"] = [str(_faults(run, x["step"])) for x in steps]
    names = fitting_columns(cells, ("step", "faults"), console.width)
    table = empty_table(f"{escape(label)}: medians over heads at {len(places)} of {count} checkpoints", names)
    for at in range(len(places)):
        table.add_row(*(cells[name][at] for name in names))
    console.print(table, markup=False, highlight=False)


def _faults(run: Mapping[str, Any], step: int) -> int:
    """How many heads have a fault at a step."""
    heads = {
        (x["layer"], x["head"])
        for x in run["findings"]
        if any(first <= step <= last for first, last in x["fault_spans"])
    }
    return len(heads)


# ---- long tables of numbers on the page, to six digits, as compressed text that a script reads when needed ----

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
