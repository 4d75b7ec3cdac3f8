"""A probe as one self-contained page: what was measured beside what was predicted. Its words serve the terminal too."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from locater.findings import EXPLODING, FLAGS
from locater.report.scan import assemble, explained, layer_note, short_name, significant
from locater.report.tables import PROBE, counted, notebook, noted, roles, summary
from locater.version import __version__

if TYPE_CHECKING:
    from locater.observing.stream import SeenLayer
    from locater.verbs.probing import Probe

ALIKE = 0.1  # of the stream differs between tokens: under it they are all but the same
CLOSER = 0.8  # of the difference left: under it tokens have come closer


class Column(NamedTuple):
    """How a column is shown. Columns of one `scale` share their colours; `least` is the least end of it, so that noise
    stays pale.
    """

    name: str
    label: str
    scale: str
    least: float
    meaning: str


COLUMNS = tuple(Column(*line) for line in (
    ("entropy", "entropy", "entropy", 1.0,
     "How widely a token spreads its attention, in nats, mean over tokens. 0: all on one token. It grows with the number in view."),
    ("entropy_ratio", "entropy ratio", "share", 1.0,
     "Entropy over the log of the number of tokens in view. 1: the same weight on all. Towards 0: one token takes all."),
    ("rest_entropy", "entropy without the first token", "entropy", 1.0,
     "Entropy without the first token, which often takes weight that has nothing to do with content; the rest made to sum to 1."),
    ("sink", "weight on the first token", "sink", 0.1,
     "Attention that rests on the first token. Above 0.9 the head is idle on this input."),
    ("max_logit", "largest logit", "max_logit", 5.0,
     f"Largest score of any pair before the softmax. Beyond {EXPLODING} half precision is near its limits."),
    ("max_probability", "strongest token", "share", 0.2, "Weight of the token that gets most, mean over tokens. 1 is one-hot."),
    ("participation", "tokens that share the weight", "participation", 4.0,
     "1 over the sum of squared weights: how many tokens really share a token's attention."),
    ("typical_kept", "differences kept", "kept", 0.2,
     "Share of what differs between tokens that a typical row of attention hands on: 1 over the root of how many share its weight. "
     "Near 0: the head hands every token the same average. 1: each takes one token as it is."),
    ("distance", "distance (tokens)", "distance", 4.0, "How many tokens away what is attended to lies, weighted by attention."),
    ("self_mass", "weight on itself", "share", 0.1, "Attention that a token pays to itself."),
    ("row_mass", "sum of weights", "share", 1.0, "Sum of a token's weights. 1, unless a learned sink takes a part of it."),
    ("output_stable_rank", "stable rank of the output", "rank", 2.0,
     "How many directions the head's output mostly takes. 1: every token is handed the same thing up to its size."),
    ("output_effective_rank", "effective rank of the output", "rank", 2.0,
     "The same with weak directions counted too, up to the head size."),
    ("previous", "previous-token score", "circuit", 0.1,
     "Weight on the token just before, on random tokens that repeat once. High: a previous-token head."),
    ("duplicate", "duplicate-token score", "circuit", 0.1,
     "Weight on the earlier copy of the same token, on random tokens that repeat once. High: a duplicate-token head."),
    ("induction", "induction score", "circuit", 0.1,
     "Weight on the token after the earlier copy, on random tokens that repeat once. High: an induction head, which continues patterns."),
    ("predicted_entropy", "predicted entropy", "entropy", 1.0,
     "Entropy of this head on normal tokens with the mean and covariance of its real input, the real first token in its place."),
    ("predicted_rest_entropy", "predicted entropy without the first token", "entropy", 1.0, "The same without the first token."),
    ("predicted_sink", "predicted weight on the first token", "sink", 0.1, "Weight on the first token that the same tokens give it."),
    ("predicted_typical_kept", "predicted differences kept", "kept", 0.2,
     "Share of the differences that rows with the predicted entropy hand on, if their scores are normal."),
    ("M", "M, mean self-logit", "M", 1.0,
     "Mean score of a token with itself, from the measured mean and covariance. Around 2 and above attention can localize."),
    ("F", "F, variance of logits", "F", 0.25,
     "How far scores spread, as a variance. Near 0 all tokens get the same; above 2 log(length) each token locks onto one."),
    ("localization", "Λ, localization by position", "localization", 0.1,
     "How much position decides whose signal gets through. 0: not at all. Towards 1: near tokens win. Negative: far ones."),
    ("prior_entropy", "entropy from weights alone", "entropy", 1.0,
     "Entropy of this head on standard normal tokens: what its weights say when nothing is known of its input."),
    ("prior_typical_kept", "differences kept, from weights alone", "kept", 0.2, "The same for the entropy that weights alone give."),
    ("prior_localization", "Λ from weights alone", "localization", 0.1, "Localization for unit tokens, as `locater scan` gives it."),
    ("logit_bound", "bound on logits", "logit_bound", 5.0,
     "No score of this head can be larger than this, whatever the input: product of the largest possible query and key."),
))  # fmt: skip
KINDS = {
    "exact": "measured, with every row of attention counted",
    "sampled": "measured on a sample of the rows of attention",
    "predicted": "the head run on normal tokens that share mean and covariance with the real ones, and nothing else",
    "prior": "from weights alone, for tokens of mean zero and unit covariance",
    "bound": "from weights alone, and no input can exceed it",
}
PAIRS = (  # measured, predicted, from weights alone; what lies above the diagonal, and below
    ("entropy", "predicted_entropy", "prior_entropy", "more selective than predicted", "less selective than predicted"),
    ("rest_entropy", "predicted_rest_entropy", None, "more selective than predicted", "less selective than predicted"),
    (
        "typical_kept",
        "predicted_typical_kept",
        "prior_typical_kept",
        "keeps less than predicted",
        "keeps more than predicted",
    ),
    ("sink", "predicted_sink", None, "less weight there than predicted", "more weight there than predicted"),
)
STREAM = ("residual", "cosine", "centred_cosine", "stable_rank", "effective_rank", "top_ratio")


def probe_page(probe: Probe) -> str:
    """The page of one probe."""
    name = short_name(probe.source)
    words = {
        "TITLE": f"{name} · Locater", "HEADING": name, "RAN": ran(probe), "AGREEMENT": agreed(probe), "COLLAPSE": collapse(probe),
        "VERDICT": summary(probe.rows, probe.verdicts), "ROLES": roles(probe.rows, probe.verdicts),
        "NOTED": noted(probe.rows, probe.verdicts),
        "FOOTER": f"Made by Locater {__version__}: measured while the model ran.",
    }  # fmt: skip
    return assemble("probe", words, page_data(probe))


def probe_in_notebook(probe: Probe) -> str:
    """A small table, what deserves a look first."""
    said = (
        summary(probe.rows, probe.verdicts),
        roles(probe.rows, probe.verdicts),
        noted(probe.rows, probe.verdicts),
        ran(probe),
    )
    return notebook(short_name(probe.source), said, PROBE, probe.rows, probe.verdicts)


def page_data(probe: Probe) -> dict[str, Any]:
    """What the page's script reads. Numbers lie column by column, in the order of the heads."""
    called = {row.layer for row in probe.rows}
    entries = [entry for entry in probe.layers if entry["layer"] in called]
    places = {entry["layer"]: place for place, entry in enumerate(entries)}
    names = [flag.name for flag in FLAGS]
    how = probe.assumptions["how"]
    return {
        "layers": [_layer(entry, probe.streams) for entry in entries],
        "heads": [
            [
                places[row.layer],
                row.head,
                row.kv_head,
                row.rows,
                [names.index(flag) for flag in row.flags],
                explained(held),
                held.role,
            ]
            for row, held in zip(probe.rows, probe.verdicts, strict=True)
        ],
        "values": {column.name: [significant(row[column.name]) for row in probe.rows] for column in COLUMNS},
        "columns": [{**column._asdict(), "kind": how[column.name]} for column in COLUMNS],
        "pairs": [_pair(probe, *pair) for pair in PAIRS],
        "flags": [{"name": f.name, "meaning": f.meaning, "way_out": f.way_out, "severity": f.severity} for f in FLAGS],
        "streams": _streams(probe.streams, entries),
        "notes": notes(probe),
    }


def _layer(entry: dict[str, Any], streams: Sequence[SeenLayer]) -> dict[str, Any]:
    given = entry.get("input")
    if given is not None:
        numbers = {
            name: significant(given[name]) for name in ("mean_share", "kurtosis", "normality", "normality_expected")
        }
        given = {**numbers, "tokens": given["tokens"], "directions": [significant(x) for x in given["directions"]]}
    block = block_of(entry["name"], streams)
    return {
        "name": entry["name"], "short": str(entry["layer"]), "heads": entry["heads"], "kv_heads": entry["kv_heads"],
        "width": entry["width"], "note": layer_note(entry), "block": None if block is None else [block.stack, block.block],
        "input": given,
    }  # fmt: skip


def _streams(found: Sequence[SeenLayer], entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Points of each stack: the block, the measures of the stream after it, and what its heads keep, measured and
    predicted.
    """
    kept: dict[tuple[str, int], dict[str, Any]] = {}
    for entry in entries:
        block = block_of(entry["name"], found)
        if block is not None and entry["kind"] == "self":
            kept.setdefault((block.stack, block.block), entry)

    def point(x: SeenLayer) -> list[float | None]:
        of = kept.get((x.stack, x.block), {})
        return [
            x.block,
            *(significant(x[name]) for name in STREAM),
            *(significant(of.get(name)) for name in ("typical_kept", "predicted_typical_kept")),
        ]

    return [
        {"stack": stack, "points": [point(x) for x in found if x.stack == stack]}
        for stack in dict.fromkeys(x.stack for x in found)
    ]


def _pair(probe: Probe, measured: str, predicted: str, prior: str | None, above: str, below: str) -> dict[str, Any]:
    words = {
        "above": above,
        "below": below,
        "agreement": _fit(probe, predicted),
        "prior_agreement": _fit(probe, prior) if prior else "",
    }
    return {"measured": measured, "predicted": predicted, "prior": prior, **words}


def _fit(probe: Probe, column: str) -> str:
    """`Spearman 0.96, mean error 0.17`, or nothing where too few heads have both numbers."""
    held = probe.agreement.get(column)
    if held is None:
        return ""
    order = "Spearman undefined" if held["spearman"] is None else f"Spearman {held['spearman']:.2f}"
    return f"{order}, mean error {held['error']:.2g}"


# ---- words ----


def ran(probe: Probe) -> str:
    """How many heads, and on what."""
    a = probe.assumptions
    heads, layers = counted(len(probe.rows), "head"), counted(len({row.layer for row in probe.rows}), "attention layer")
    data = f" of {a['data']}" if a.get("data") else ""
    other = (
        counted(a["statistics_sequences"], "other sequence")
        if a["held_out"]
        else "the same sequences: there were no others"
    )
    return (
        f"{heads} in {layers}, measured on {counted(a['measured_sequences'], 'sequence')} of {a['length']} tokens{data}. "
        f"Predictions use the mean and covariance of what each layer reads, taken from {other}."
    )


def agreed(probe: Probe) -> str:
    """How well the predicted entropy does, beside weights alone."""
    found, prior = probe.agreement.get("predicted_entropy"), probe.agreement.get("prior_entropy")
    if found is None:
        return "Too few heads have both a measured and a predicted entropy to say how well the predictions agree."
    weights = {
        key: "" if prior is None or prior[key] is None else f" (weights alone: {_short(prior[key])})"
        for key in ("error", "spearman")
    }
    text = f"Predicted entropy is off by {_short(found['error'])} nats on average{weights['error']}"
    if found["spearman"] is None:
        return f"{text}; all heads are alike, so their order says nothing."
    order = f"{_short(found['spearman'])}{weights['spearman']}, where 1 is the same order"
    return f"{text} and ranks the heads with a Spearman correlation of {order}."


def collapse(probe: Probe) -> str:
    """Whether tokens become alike between blocks, and where most of their difference is lost."""
    stacks = list(dict.fromkeys(x.stack for x in probe.streams))
    return " ".join(
        filter(None, (_collapse([x for x in probe.streams if x.stack == stack], len(stacks) > 1) for stack in stacks))
    )


def _collapse(points: Sequence[SeenLayer], several: bool) -> str:
    known = [(x.block, x.residual) for x in points if x.residual is not None]
    if len(known) < 2:
        return ""
    (_, first), (_, last), (at, least) = known[0], known[-1], min(known[1:], key=lambda x: x[1])
    verdict = (
        "Tokens become alike"
        if least < ALIKE
        else "Tokens come closer"
        if last < CLOSER * first
        else "Tokens stay apart"
    )
    where = f" in {points[0].stack}" if several else ""
    text = f"{verdict}{where}: the share of the stream that differs between them goes from {_short(first)} to {_short(last)} over the blocks"
    steps = [(after / before, block) for (_, before), (block, after) in pairwise(known) if before]
    if steps and min(steps)[0] < CLOSER:
        text += f", and block {min(steps)[1]} keeps least of it, {_short(min(steps)[0])}"
    return f"{text}{f' (least {_short(least)}, after block {at})' if least < min(first, last) else ''}; 0 is rank collapse."


def _short(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}" if abs(x) >= 0.01 or x == 0 else f"{x:.1g}"


def notes(probe: Probe) -> list[str]:
    """What was assumed, and what the kinds of numbers are."""
    held = sorted(set(probe.assumptions["how"].values()), key=list(KINDS).index)
    return [f"Statistics: {probe.assumptions['tokens']}.", *(f"{kind.capitalize()}: {KINDS[kind]}." for kind in held),
            *(f"{note[0].upper()}{note[1:]}." for note in probe.assumptions["notes"])]  # fmt: skip


def block_of(name: str, streams: Sequence[SeenLayer]) -> SeenLayer | None:
    """The stream after the block that the attention layer of this name is in."""
    return next((point for point in streams if point.block >= 0 and f"{name}.".startswith(f"{point.name}.")), None)
