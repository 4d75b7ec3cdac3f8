"""What the page of the surrogate shows: tables of cells, from the figures of heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from locater_lab.engine.claims import decided_by_holm
from locater_lab.studies.surrogate.errors_and_claims import (
    BETWEEN,
    QUANTITIES,
    REASONS,
    Entry,
    Estimate,
    claim_figures,
    correlation_with_error,
    head_draws,
    head_quantity,
    learned_order,
    mean_error,
    mean_over_heads,
    order_of_heads,
    part_share,
    part_size,
    prediction_errors,
    reason_correlations,
)

KINDS = {
    "weights": "weights alone: z ~ N(0, I)",
    "diagonal": "z ~ N(mean, diagonal)",
    "covariance": "z ~ N(mean, covariance)",
    "other": "the same, statistics from another corpus",
    "own": "the same, statistics from the measured text (not held out)",
    "shuffled": "real tokens in random order (not held out)",
}
MAIN = ("weights", "diagonal", "covariance", "shuffled")
COLUMNS = {
    "rest_entropy": "Entropy without the first token (nats)",
    "sink": "Weight on the first token",
}
Rows = list[list[str]]  # of a table, the headings first
Correlation = tuple[str, Estimate, int, int, str]  # words, estimate, models of this sign, models, whether decided
WORST = 3  # heads of a model that are listed


def cells_table(rows: Rows) -> str:
    """A table of Markdown, the headings first."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def kinds_table(entries: Sequence[Entry], column: str = "entropy") -> Rows:
    """Spearman's correlation and mean absolute error, by model and kind of tokens."""
    lines = _header("model", *KINDS.values())
    for e in entries:
        cells = []
        for kind in KINDS:
            known = kind in e["predicted"]
            order = order_of_heads(e, kind, column).value if known else 0
            cells.append(f"{order:.2f}, {mean_error(e, kind, column).value:.2f}" if known else "")
        lines.append(_row(e["model"], *cells))
    return lines


def page_tables(entries: Sequence[Entry]) -> dict[str, Any]:
    """All that the page shows but verdicts, by name."""
    correlations = _correlations(entries)
    return {
        "summary": _summary(entries, correlations),
        "claims": {
            f"{x.claim}, {x.model}": _estimate_text(x.estimate, 3 if x.claim in BETWEEN else 2)
            for x in claim_figures(entries)
        },
        "models": _models(entries),
        "kinds": _by_kind(entries),
        "kinds_all": kinds_table(entries),
        "groups": _groups(entries),
        "layers": _by_layer(entries),
        "parts": _parts(entries),
        "reasons": [
            *_header("quantity", "correlation with the error", "models of this sign", "decided"),
            *(
                _row(words, _estimate_text(x), f"{same} of {models}", said)
                for words, x, same, models, said in correlations
            ),
        ],
        "suggested": _suggested_reasons(entries),
        "worst": _worst(entries),
        **{column: _other_column(entries, column) for column in COLUMNS},
    }


def _summary(entries: Sequence[Entry], correlations: Sequence[Correlation]) -> dict[str, Any]:
    """Figures of the sentences at the beginning."""
    orders, sizes = ([figure(e) for e in entries] for figure in (order_of_heads, mean_error))
    prior = [mean_error(e, "weights").value for e in entries]

    def ends(figures: Sequence[Estimate]) -> list[str]:
        named = sorted(zip(figures, entries, strict=True), key=lambda pair: pair[0].value)
        return [f"{_estimate_text(x)} ({e['model']})" for x, e in (named[0], named[-1])]

    def ends_in_nats(figures: Sequence[Estimate]) -> list[str]:
        return [end.replace(" (", " nats (", 1) for end in ends(figures)]

    return {
        "models": len(entries),
        "heads": sum(_head_count(e) for e in entries),
        "orders": ends(orders),
        "errors": ends_in_nats(sizes),
        "prior": [f"{min(prior):.2f}", f"{max(prior):.2f}"],
        "strong": [f"{words} {_estimate_text(x)}" for words, x, _, _, said in correlations if said == "yes"],
    }


def _models(entries: Sequence[Entry]) -> Rows:
    lines = _header(
        "model",
        "parameters",
        "layers x width",
        "heads",
        "size",
        "mask",
        "positions",
        "input",
        "length",
        "tokens: statistics, measured",
        "energy of the mean, by layer",
    )
    for e in entries:
        shares = [x["mean_share"] for x in e["layers"]]
        cells = (
            f"{e['parameters'] / 1e6:.1f} M", f"{len(e['layers'])} x {e['width']}", str(_head_count(e)), str(e["head_dim"]),
            "causal" if e["causal"] else "none", e["positions"], e["corpus"], str(e["length"]),
            f"{e['statistics_tokens']:,}, {e['measured_tokens']:,}", f"{min(shares):.0%} to {max(shares):.0%}",
        )  # fmt: skip
        lines.append(_row(e["model"], *cells))
    return lines


def _by_kind(entries: Sequence[Entry]) -> Rows:
    lines = _header("model", *(KINDS[kind] for kind in MAIN))
    for e in entries:
        cells = [f"{_estimate_text(order_of_heads(e, kind))}; {_estimate_text(mean_error(e, kind))}" for kind in MAIN]
        lines.append(_row(e["model"], *cells))
    return lines


def _groups(entries: Sequence[Entry]) -> Rows:
    lines = _header("heads", "how many", "models", "mean and covariance", "real tokens, random order")
    for words, members in _members(entries):
        counts = np.concatenate([head_draws(e, len(at)) for e, at in members], 1)
        cells = []
        for kind in ("covariance", "shuffled"):
            values = np.concatenate([np.abs(prediction_errors(e, kind))[at] for e, at in members])
            cells.append(_estimate_text(mean_over_heads(values, counts)))
        lines.append(_row(words, str(counts.shape[1]), str(len(members)), *cells))
    return lines


def _members(entries: Sequence[Entry]) -> list[tuple[str, list[tuple[Entry, Any]]]]:
    """Groups of heads, in words: entries with the places of their heads."""

    def depth(e: Entry, low: float, high: float) -> Any:
        last = max(1, len(e["layers"]) - 1)
        share = np.array(e["heads"]["layer"]) / last
        return np.flatnonzero((share > low) & (share <= high))

    depths = {
        "first layer": (-1, 0),
        "first third of the others": (0, 1 / 3),
        "second third": (1 / 3, 2 / 3),
        "last third": (2 / 3, 1),
    }
    groups = [(words, [(e, depth(e, *span)) for e in entries]) for words, span in depths.items()]
    for word, name in (("width", "width"), ("head size", "head_dim")):
        for size in sorted({e[name] for e in entries}):
            groups.append((f"{word} {size}", [(e, np.arange(_head_count(e))) for e in entries if e[name] == size]))
    for causal, mask in ((True, "causal"), (False, "no mask")):
        for kind in sorted({e["positions"] for e in entries}):
            alike = [e for e in entries if (e["causal"], e["positions"]) == (causal, kind)]
            groups.append((f"{mask}, positions {kind}", [(e, np.arange(_head_count(e))) for e in alike]))
    kept = [(words, [(e, at) for e, at in members if len(at)]) for words, members in groups]
    return [(words, members) for words, members in kept if members]


def _by_layer(entries: Sequence[Entry]) -> Rows:
    lines = _header("model", "mean and covariance", "real tokens, random order", "distance from normal")
    for e in entries:
        layer = np.array(e["heads"]["layer"])
        by_layer = [
            ", ".join(f"{np.abs(prediction_errors(e, kind))[layer == x['layer']].mean():.2f}" for x in e["layers"])
            for kind in ("covariance", "shuffled")
        ]
        far = ", ".join(f"{x['normality'] / x['normality_expected']:.1f}" for x in e["layers"])
        lines.append(_row(e["model"], *by_layer, far))
    return lines


def _parts(entries: Sequence[Entry]) -> Rows:
    lines = _header("model", "mean error, signed", "another text", "not normal", "order")
    for e in entries:
        cells = [
            f"{_estimate_text(part_size(e, name))}; {_estimate_text(part_share(e, name))}"
            for name in ("text", "shape", "order")
        ]
        lines.append(_row(e["model"], _estimate_text(mean_over_heads(prediction_errors(e), head_draws(e))), *cells))
    return lines


def _correlations(entries: Sequence[Entry]) -> list[Correlation]:
    """Per quantity: words, correlation with the absolute error, models of the same sign, models, whether decided."""
    known = {name: correlation_with_error(entries, name) for name in QUANTITIES}
    decided = decided_by_holm({name: x.p_value(0.0) for name, (x, _, _) in known.items()})
    order = sorted(known, key=lambda name: -abs(known[name][0].value))
    return [(QUANTITIES[name], *known[name], "yes" if name in decided else "undecided") for name in order]


def _suggested_reasons(entries: Sequence[Entry]) -> Rows:
    """Reasons that the available models suggested, judged on those trained for it."""
    available, trained = ([e for e in entries if ("arm" in e) == is_trained] for is_trained in (False, True))
    lines = _header("claim", "correlation of", "models at hand", "trained models", "verdict on the trained")
    first = reason_correlations(available)
    known = reason_correlations(trained) if trained else {}
    estimates = {claim: x for claim, (x, _, _) in known.items()}
    learned = learned_order(entries)
    if learned is not None:
        estimates["learned order"] = learned
    decided = decided_by_holm({claim: x.p_value(0.0) for claim, x in estimates.items()})
    verdicts = {c: ("holds" if x.value > 0 else "fails") if c in decided else "undecided" for c, x in estimates.items()}
    for claim, (words, _, _) in REASONS.items():
        cells = [
            f"{_estimate_text(figures[claim][0])}, {figures[claim][1]} of {figures[claim][2]} models" if figures else ""
            for figures in (first, known)
        ]
        lines.append(_row(f"`{claim}`", words, *cells, verdicts.get(claim, "not run")))
    words = 'mean size of the part "order", learned less rotary positions, nats'
    lines.append(
        _row(
            "`learned order`",
            words,
            "",
            "" if learned is None else _estimate_text(learned),
            verdicts.get("learned order", "not run"),
        )
    )
    return lines


def _worst(entries: Sequence[Entry]) -> Rows:
    shown = ("sink", "previous", "induction", "identity", "skew", "kurtosis", "rank")
    lines = _header("model", "head", "measured", "predicted", "own text", "random order", *shown)
    for e in entries:
        heads, predicted = e["heads"], e["predicted"]
        for i in np.argsort(-np.abs(prediction_errors(e)), kind="stable")[:WORST]:
            kinds = [f"{predicted[kind]['entropy'][i]:.2f}" for kind in ("covariance", "own", "shuffled")]
            values = [head_quantity(e, name) for name in shown]
            cells = ["" if column is None else f"{column[i]:.2f}" for column in values]
            place = f"{heads['layer'][i]}.{heads['head'][i]}"
            lines.append(_row(e["model"], place, f"{heads['entropy'][i]:.2f}", *kinds, *cells))
    return lines


def _other_column(entries: Sequence[Entry], column: str) -> Rows:
    lines = _header("model", *(KINDS[kind] for kind in MAIN))
    for e in entries:
        cells = [
            f"{order_of_heads(e, kind, column).value:.2f}, {mean_error(e, kind, column).value:.3f}" for kind in MAIN
        ]
        lines.append(_row(e["model"], *cells))
    return lines


def _estimate_text(x: Estimate, digits: int = 2) -> str:
    low, high = x.interval
    return f"{_number_text(x.value, digits)} [{_number_text(low, digits)}, {_number_text(high, digits)}]"


def _number_text(x: float, digits: int) -> str:
    return f"{round(x, digits) + 0.0:.{digits}f}"  # + 0.0: no minus sign on zero


def _head_count(e: Entry) -> int:
    return len(e["heads"]["entropy"])


def _header(*cells: str) -> Rows:
    return [[*cells]]


def _row(*cells: str) -> list[str]:
    return [*cells]
