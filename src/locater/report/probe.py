"""A probe as a self-contained page: measured numbers beside predicted ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from locater.findings import FLAGS
from locater.report.pages import assemble, excuses, flag_table, layer_note, short_name, significant
from locater.report.probe_columns import COLUMNS, PAIRS, Pair
from locater.report.probe_words import agreement_of, agreement_sentence, collapse, data_sentence, notes
from locater.report.tables import noted, roles_sentence, summary
from locater.version import __version__

if TYPE_CHECKING:
    from locater.observing.stream import SeenLayer
    from locater.results.probe import Probe

STREAM = ("residual", "cosine", "centred_cosine", "stable_rank", "effective_rank", "top_ratio")
INPUT = ("mean_share", "kurtosis", "normality", "normality_expected")


def probe_page(probe: Probe) -> str:
    """The page of one probe."""
    name = short_name(probe.source)
    words = {
        "TITLE": f"{name} · Locater",
        "HEADING": name,
        "RAN": data_sentence(probe),
        "AGREEMENT": agreement_sentence(probe),
        "COLLAPSE": collapse(probe),
        "VERDICT": summary(probe.rows, probe.verdicts),
        "ROLES": roles_sentence(probe.roles),
        "NOTED": noted(probe.rows, probe.verdicts),
        "FOOTER": f"Made by Locater {__version__}: measured while the model ran.",
    }
    return assemble("probe", words, page_data(probe))


def page_data(probe: Probe) -> dict[str, Any]:
    """What the page's script reads. Numbers are stored by column, in the order of the heads."""
    called = {row.layer for row in probe.rows}
    entries = [entry for entry in probe.layers if entry["layer"] in called]
    kinds = probe.assumptions["how"]
    return {
        "layers": [_layer_data(probe, entry) for entry in entries],
        "heads": _heads_data(probe, entries),
        "values": {column.name: [significant(row[column.name]) for row in probe.rows] for column in COLUMNS},
        "columns": [{**column._asdict(), "kind": kinds[column.name]} for column in COLUMNS],
        "pairs": [_pair_data(probe, pair) for pair in PAIRS],
        "flags": [{"name": name, **flag} for name, flag in flag_table().items()],
        "streams": _streams_data(probe, entries),
        "notes": notes(probe),
    }


def _heads_data(probe: Probe, entries: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Place of the layer, head, key head, rows of attention, numbers of its flags, excuses of them, role."""
    places = {entry["layer"]: place for place, entry in enumerate(entries)}
    numbers = {flag.name: number for number, flag in enumerate(FLAGS)}
    return [
        [
            *(places[row.layer], row.head, row.kv_head, row.rows),
            [numbers[flag] for flag in row.flags],
            excuses(verdict),
            verdict.role,
        ]
        for row, verdict in zip(probe.rows, probe.verdicts, strict=True)
    ]


def _layer_data(probe: Probe, entry: dict[str, Any]) -> dict[str, Any]:
    stream, statistics = probe.stream_after(entry["name"]), entry.get("input")
    if statistics is not None:
        statistics = {
            **{name: significant(statistics[name]) for name in INPUT},
            "tokens": statistics["tokens"],
            "directions": [significant(x) for x in statistics["directions"]],
        }
    return {
        "name": entry["name"],
        "short": str(entry["layer"]),
        "heads": entry["heads"],
        "kv_heads": entry["kv_heads"],
        "width": entry["width"],
        "note": layer_note(entry),
        "block": None if stream is None else [stream.stack, stream.block],
        "input": statistics,
    }


def _streams_data(probe: Probe, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The points of each stack: the block, the measures of the stream after it, and what its heads keep."""
    by_block: dict[tuple[str, int], dict[str, Any]] = {}  # the first self-attention layer of each block
    for entry in entries:
        stream = probe.stream_after(entry["name"])
        if stream is not None and entry["kind"] == "self":
            by_block.setdefault((stream.stack, stream.block), entry)

    def point(stream: SeenLayer) -> list[float | None]:
        entry = by_block.get((stream.stack, stream.block), {})
        return [
            stream.block,
            *(significant(stream[name]) for name in STREAM),
            *(significant(entry.get(name)) for name in ("typical_kept", "predicted_typical_kept")),
        ]

    return [
        {"stack": stack, "points": [point(stream) for stream in probe.streams if stream.stack == stack]}
        for stack in dict.fromkeys(stream.stack for stream in probe.streams)
    ]


def _pair_data(probe: Probe, pair: Pair) -> dict[str, Any]:
    return {
        **pair._asdict(),
        "agreement": agreement_of(probe, pair.predicted),
        "prior_agreement": agreement_of(probe, pair.prior) if pair.prior else "",
    }
