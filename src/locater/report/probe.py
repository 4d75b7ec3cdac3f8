"""A probe: its page with measured numbers beside predicted ones, its tables in the terminal, and a notebook display."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.markup import escape

from locater.findings import FLAGS
from locater.report.columns import COLUMNS, KINDS, PAIRS, PROBE_HEADINGS, MeasuredAndPredicted
from locater.report.notebook import heads_display
from locater.report.pages import assemble, excuses, flag_table, layer_note, round_significant, short_name
from locater.report.plots import map_of_measured
from locater.report.terminal import named_table, print_heads
from locater.report.verdict_sentences import amount, notes_sentence, number, roles_sentence, summary, verdicts_of
from locater.version import __version__

Document = Any
STREAM = ("residual", "cosine", "centred_cosine", "stable_rank", "effective_rank", "top_ratio")
INPUT = ("mean_share", "kurtosis", "normality", "normality_expected")
ALIKE = 0.1  # share of the stream that differs between tokens, under which they are nearly the same
CLOSER = 0.8  # share of the difference that is left, under which tokens have come closer
PROBE_LEGEND = {
    "H": "entropy in nats",
    "first": "weight on the first token",
    "max logit": "largest score before the softmax",
    "pred. H": "predicted from statistics of the input",
    "prior H": "from weights alone",
    "distance": "in tokens",
    "top": "weight of the strongest token",
    "Λ": "localization by position",
    "pred. first": "predicted weight on the first token",
}
RESIDUAL_LEGEND = (
    "before, after: share of the stream that differs between tokens, around the block (0 is rank collapse) · "
    "keep: share of it that a typical row of attention passes on; the skip connection passes on all of it"
)
RESIDUAL_COLUMNS = {  # heading: key of a layer
    "before": "residual_before",
    "after": "residual_after",
    "heads keep": "typical_kept",
    "pred. keep": "predicted_typical_kept",
    "prior keep": "prior_typical_kept",
}


# ---- sentences ----


def data_sentence(probe: Document) -> str:
    """How many heads were measured, and on what."""
    a = probe["assumptions"]
    heads, layers = (
        amount(len(probe["heads"]), "head"),
        amount(len({row["layer"] for row in probe["heads"]}), "attention layer"),
    )
    data = f" of {a['data']}" if a.get("data") else ""
    other = (
        amount(a["statistics_sequences"], "other sequence")
        if a["held_out"]
        else "the same sequences: there were no others"
    )
    sequences = amount(a["measured_sequences"], "sequence")
    return (
        f"{heads} in {layers}, measured on {sequences} of {a['length']} tokens{data}. "
        f"Predictions use the mean and covariance of what each layer reads, taken from {other}."
    )


def agreement_sentence(probe: Document) -> str:
    """How well the predicted entropy agrees with the measured one, compared with weights alone."""
    predicted, prior = probe["agreement"].get("predicted_entropy"), probe["agreement"].get("prior_entropy")
    if predicted is None:
        return "Too few heads have both a measured and a predicted entropy to say how well the predictions agree."
    alone = {
        key: "" if prior is None or prior[key] is None else f" (weights alone: {_short(prior[key])})"
        for key in ("error", "spearman")
    }
    text = f"Predicted entropy is off by {_short(predicted['error'])} nats on average{alone['error']}"
    if predicted["spearman"] is None:
        return f"{text}; all heads are alike, so their order says nothing."
    order = f"{_short(predicted['spearman'])}{alone['spearman']}, where 1 is the same order"
    return f"{text} and ranks the heads with a Spearman correlation of {order}."


def agreement_of(probe: Document, column: str) -> str:
    """`Spearman 0.96, mean error 0.17`, or nothing where too few heads have both numbers."""
    scores = probe["agreement"].get(column)
    if scores is None:
        return ""
    order = "Spearman undefined" if scores["spearman"] is None else f"Spearman {scores['spearman']:.2f}"
    return f"{order}, mean error {scores['error']:.2g}"


def collapse(probe: Document) -> str:
    """Whether tokens become alike between blocks, and where most of their difference is lost."""
    stacks = list(dict.fromkeys(point["stack"] for point in probe["streams"]))
    sentences = (
        _collapse_of([point for point in probe["streams"] if point["stack"] == stack], several=len(stacks) > 1)
        for stack in stacks
    )
    return " ".join(filter(None, sentences))


def _collapse_of(points: Sequence[Document], several: bool) -> str:
    known = [(point["block"], point["residual"]) for point in points if point["residual"] is not None]
    if len(known) < 2:
        return ""
    (_, first), (_, last), (at, least) = known[0], known[-1], min(known[1:], key=lambda pair: pair[1])
    verdict = "Tokens stay apart"
    if least < ALIKE:
        verdict = "Tokens become alike"
    elif last < CLOSER * first:
        verdict = "Tokens come closer"
    where = f" in {points[0]['stack']}" if several else ""
    text = (
        f"{verdict}{where}: the share of the stream that differs between them goes "
        f"from {_short(first)} to {_short(last)} over the blocks"
    )
    ratios = [(after / before, block) for (_, before), (block, after) in pairwise(known) if before]
    if ratios and min(ratios)[0] < CLOSER:
        text += f", and block {min(ratios)[1]} keeps least of it, {_short(min(ratios)[0])}"
    if least < min(first, last):
        text += f" (least {_short(least)}, after block {at})"
    return f"{text}; 0 is rank collapse."


def notes(probe: Document) -> list[str]:
    """What was assumed, and what the kinds of numbers are."""
    kinds = sorted(set(probe["assumptions"]["how"].values()), key=list(KINDS).index)
    return [
        f"Statistics: {probe['assumptions']['tokens']}.",
        *(f"{kind.capitalize()}: {KINDS[kind]}." for kind in kinds),
        *(f"{note[0].upper()}{note[1:]}." for note in probe["assumptions"]["notes"]),
    ]


def _short(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}" if abs(x) >= 0.01 or x == 0 else f"{x:.1g}"


# ---- the page ----


def probe_page(probe: Document) -> str:
    """The page of one probe."""
    name, rows, verdicts = short_name(probe["source"]), probe["heads"], verdicts_of(probe)
    words = {
        "TITLE": f"{name} · Locater",
        "HEADING": name,
        "RAN": data_sentence(probe),
        "AGREEMENT": agreement_sentence(probe),
        "COLLAPSE": collapse(probe),
        "VERDICT": summary(rows, verdicts),
        "ROLES": roles_sentence(probe["roles"]),
        "NOTED": notes_sentence(rows, verdicts),
        "FOOTER": f"Made by Locater {__version__}: measured while the model ran.",
    }
    return assemble("probe", words, page_data(probe))


def page_data(probe: Document) -> dict[str, Any]:
    """What the page's script reads. Numbers are stored by column, in the order of the heads."""
    called = {row["layer"] for row in probe["heads"]}
    entries = [entry for entry in probe["layers"] if entry["layer"] in called]
    kinds = probe["assumptions"]["how"]
    return {
        "layers": [_layer_data(probe, entry) for entry in entries],
        "heads": _heads_data(probe, entries),
        "values": {column.name: [round_significant(row[column.name]) for row in probe["heads"]] for column in COLUMNS},
        "columns": [{**column._asdict(), "kind": kinds[column.name]} for column in COLUMNS],
        "pairs": [_pair_data(probe, pair) for pair in PAIRS],
        "flags": [{"name": name, **flag} for name, flag in flag_table().items()],
        "streams": _streams_data(probe, entries),
        "notes": notes(probe),
    }


def _heads_data(probe: Document, entries: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Place of the layer, head, key head, rows of attention, numbers of its flags, excuses of them, role."""
    places = {entry["layer"]: place for place, entry in enumerate(entries)}
    numbers = {flag.name: number for number, flag in enumerate(FLAGS)}
    return [
        [
            places[row["layer"]],
            *(row["head"], row["kv_head"], row["rows"]),
            [numbers[flag] for flag in row["flags"]],
            excuses(verdict),
            verdict.role,
        ]
        for row, verdict in zip(probe["heads"], verdicts_of(probe), strict=True)
    ]


def _layer_data(probe: Document, entry: dict[str, Any]) -> dict[str, Any]:
    stream, statistics = stream_after(entry["name"], probe["streams"]), entry.get("input")
    if statistics is not None:
        statistics = {
            **{name: round_significant(statistics[name]) for name in INPUT},
            "tokens": statistics["tokens"],
            "directions": [round_significant(x) for x in statistics["directions"]],
        }
    return {
        "name": entry["name"],
        "short": str(entry["layer"]),
        "heads": entry["heads"],
        "kv_heads": entry["kv_heads"],
        "width": entry["width"],
        "note": layer_note(entry),
        "block": None if stream is None else [stream["stack"], stream["block"]],
        "input": statistics,
    }


def _streams_data(probe: Document, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The points of each stack: the block, the measures of the stream after it, and what its heads keep."""
    by_block: dict[tuple[str, int], dict[str, Any]] = {}  # the first self-attention layer of each block
    for entry in entries:
        stream = stream_after(entry["name"], probe["streams"])
        if stream is not None and entry["kind"] == "self":
            by_block.setdefault((stream["stack"], stream["block"]), entry)

    def point(stream: Document) -> list[float | None]:
        entry = by_block.get((stream["stack"], stream["block"]), {})
        return [
            stream["block"],
            *(round_significant(stream[name]) for name in STREAM),
            *(round_significant(entry.get(name)) for name in ("typical_kept", "predicted_typical_kept")),
        ]

    return [
        {"stack": stack, "points": [point(stream) for stream in probe["streams"] if stream["stack"] == stack]}
        for stack in dict.fromkeys(stream["stack"] for stream in probe["streams"])
    ]


def _pair_data(probe: Document, pair: MeasuredAndPredicted) -> dict[str, Any]:
    return {
        **pair._asdict(),
        "agreement": agreement_of(probe, pair.predicted),
        "prior_agreement": agreement_of(probe, pair.prior) if pair.prior else "",
    }


def stream_after(layer_name: str, streams: Sequence[Any]) -> Any | None:
    """The point of the stream after the block whose name begins the layer's; None for attention outside of blocks."""
    points = (x for x in streams if x["block"] >= 0 and f"{layer_name}.".startswith(f"{x['name']}."))
    return next(points, None)


# ---- terminal and notebook ----


def print_probe(probe: Document, console: Console) -> None:
    """What heads do and which have faults, the tables, how well predictions agree, and the kinds of numbers."""
    rows, verdicts = probe["heads"], verdicts_of(probe)
    console.print(escape(data_sentence(probe)), highlight=False)
    console.print(f"[bold]{summary(rows, verdicts)}[/bold]", highlight=False)
    for sentence in filter(None, (roles_sentence(probe["roles"]), notes_sentence(rows, verdicts), collapse(probe))):
        console.print(escape(sentence), highlight=False)
    print_heads(probe, verdicts, PROBE_HEADINGS, PROBE_LEGEND, {}, console)
    _print_residuals(probe, console)
    console.print(escape(agreement_sentence(probe)), highlight=False)
    for kind, meaning in KINDS.items():
        columns = [name for name, how in probe["assumptions"]["how"].items() if how == kind]
        if columns:
            console.print(f"[bold]{kind}[/bold] ({meaning}): [dim]{', '.join(columns)}[/dim]", highlight=False)
    for note in probe["assumptions"]["notes"]:
        console.print(f"[dim]- {escape(note)}[/dim]", highlight=False)


def _print_residuals(probe: Document, console: Console) -> None:
    """How much tokens differ before and after each layer's block, and how much of it the layer's heads keep."""
    cells = {"layer": [str(entry["layer"]) for entry in probe["layers"]]}
    cells |= {name: [number(entry.get(key)) for entry in probe["layers"]] for name, key in RESIDUAL_COLUMNS.items()}
    names = [escape(entry["name"]) for entry in probe["layers"]]
    console.print(named_table("differences between tokens, by layer", cells, ("layer",), names, console.width))
    console.print(f"[dim]{RESIDUAL_LEGEND}[/dim]", highlight=False)


def probe_in_notebook(probe: Document) -> str:
    rows, verdicts, title = probe["heads"], verdicts_of(probe), short_name(probe["source"])
    sentences = (
        summary(rows, verdicts),
        roles_sentence(probe["roles"]),
        notes_sentence(rows, verdicts),
        data_sentence(probe),
    )
    return heads_display(title, sentences, map_of_measured(title, rows), PROBE_HEADINGS, rows, verdicts)
