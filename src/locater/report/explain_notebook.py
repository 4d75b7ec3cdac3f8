"""Explanations of one input in a notebook: the tokens coloured by the scores of each method."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from locater.report.explain_words import method_label, target_sentence, unit, verdict
from locater.report.pages import short_name

if TYPE_CHECKING:
    from locater.explain.explanation import Explanation
    from locater.results.explanations import Explanations, TokenStream

MOST_TOKENS = 200
FOR, AGAINST = "11,150,160", "220,110,40"  # seen on light and dark ground


def explain_in_notebook(result: Explanations) -> str:
    """A line of tokens per method; patches of a picture are on the page alone."""
    parts = [f"<p><b>{html.escape(short_name(result.source))}</b><br>{html.escape(verdict(result))}<br>"]
    parts.append(f"{html.escape(target_sentence(result))}</p>")
    texts = [stream for stream in result.streams if stream.ids is not None]
    for method in result.methods:
        name = html.escape(f"{method_label(method.method)} ({unit(method)})")
        parts += [f"<p>{name}<br>{_line(method, stream)}</p>" for stream in texts if _has(method, stream)]
    return "".join(parts) + "<p><code>.report(path)</code> writes the page, with heads, matrices and deletion.</p>"


def _has(method: Explanation, stream: TokenStream) -> bool:
    return stream.name == method.stream or stream.name in method.other_streams


def _line(method: Explanation, stream: TokenStream) -> str:
    scores = (method.scores if stream.name == method.stream else method.other_streams[stream.name]).tolist()
    usual = [abs(x) for t, x in enumerate(scores) if t not in set(stream.special)] or [abs(x) for x in scores]
    most = max(usual) or 1.0
    spans = []
    for token, score in list(zip(stream.tokens, scores, strict=True))[:MOST_TOKENS]:
        strength = min(1.0, abs(score) / most)
        colour = f"rgba({AGAINST if score < 0 else FOR},{0.75 * strength:.2f})"
        spans.append(
            f"<span style='background:{colour};white-space:pre-wrap' title='{score:.3g}'>{html.escape(token)}</span>"
        )
    more = f" and {len(scores) - MOST_TOKENS:,} more" if len(scores) > MOST_TOKENS else ""
    return "".join(spans) + more
