"""The causes that `locater doctor` names: what each says, and what to do about it.

A fault is wrong in itself, or was done wrongly to BASE. A change is what people do on purpose. A note is neither.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["fault", "change", "note"]


@dataclass(frozen=True)
class Cause:
    """One line of the table: `meaning` ends a sentence that begins with a place."""

    name: str
    severity: Severity
    meaning: str
    next: str


_AGAIN = "download the file again, or copy it from where it is whole"
_CONVERT = "convert the model again"
_MERGE = "merge again"
CAUSES = {
    cause.name: cause
    for cause in (
        # values
        Cause("nonfinite", "fault", "has numbers that are NaN or infinite", "restore an earlier checkpoint"),
        Cause(
            "overflow",
            "fault",
            "overflowed in a cast: numbers beyond its type became infinite",
            "cast the original to bfloat16 instead",
        ),
        Cause("zero", "fault", "is all zero", _AGAIN),
        Cause("constant", "fault", "holds one number everywhere", _AGAIN),
        Cause("random-bits", "fault", "holds random bits and no weights", _AGAIN),
        # heads
        Cause(
            "scaled-head",
            "fault",
            "has another scale than it should",
            "restore this head from BASE or an earlier checkpoint",
        ),
        Cause("dead-head", "fault", "does nothing: a map of it is zero", "restore this head, or remove it on purpose"),
        Cause(
            "copied-head", "fault", "is a copy of another head", "restore this head from BASE or an earlier checkpoint"
        ),
        Cause("swapped-heads", "fault", "exchanged places in some maps and not in others", _CONVERT),
        Cause("permuted-heads", "fault", "stands in another order in some maps than in others", _CONVERT),
        # layers
        Cause("zero-layer", "fault", "is zero: the layer does nothing", "restore this layer, or remove it on purpose"),
        Cause(
            "duplicated-layer",
            "fault",
            "is a copy of another layer",
            "if no layer was repeated on purpose, convert again",
        ),
        Cause("shifted-layers", "fault", "holds the weights of a neighbouring layer", _CONVERT),
        Cause("swapped-layers", "fault", "exchanged places", _CONVERT),
        Cause(
            "missing-layer",
            "fault",
            "is missing, or was never filled",
            "save or download the model again, with all shards",
        ),
        # conversion
        Cause(
            "rotary-order",
            "fault",
            "has rows of queries and keys in another rotary order",
            "convert again, with the permutation of rotary channels that the source format needs",
        ),
        Cause(
            "shifted-gain",
            "fault",
            "has gains that are off by one",
            "convert again: some formats store w, others 1 + w",
        ),
        Cause(
            "scaled-queries",
            "fault",
            "lost the scale of its logits, or has it twice",
            "convert again, and fold the scale of queries once",
        ),
        Cause(
            "fused-order",
            "fault",
            "has queries, keys and values cut in the wrong order",
            "convert again with the order of the fused map",
        ),
        Cause("transposed", "fault", "is transposed", "convert again: Conv1D stores (in, out), Linear (out, in)"),
        Cause(
            "untied",
            "fault",
            "differs from the embeddings that config.json ties it to",
            "save the model again with tie_word_embeddings as it was trained",
        ),
        Cause("lost-biases", "fault", "lost its biases", _CONVERT),
        Cause(
            "config",
            "fault",
            "is contradicted by config.json",
            "take config.json from BASE, or from where the weights came",
        ),
        # merging
        Cause("not-merged", "fault", "does not contain the adapter", _MERGE),
        Cause(
            "wrong-dose",
            "fault",
            "contains the adapter with another strength",
            "merge again, once, with the alpha and rank of the adapter's settings",
        ),
        Cause("wrong-sign", "fault", "has the adapter subtracted", _MERGE),
        Cause(
            "wrong-base",
            "fault",
            "contains the adapter on another base",
            "merge into the base that the adapter was trained on",
        ),
        Cause("half-merged", "fault", "contains the adapter in some modules only", _MERGE),
        # quantisation
        Cause("lost-scales", "fault", "has blocks with a wrong scale", "quantise again"),
        Cause("low-bits", "fault", "has far fewer levels than the others", "quantise again with more bits for it"),
        Cause(
            "lost-zero-points",
            "fault",
            "is shifted by a constant in its blocks, as without zero points",
            "quantise or dequantise again with the zero points",
        ),
        # files
        Cause("another-step", "fault", "comes from another checkpoint than the rest", "copy all shards of one step"),
        Cause("stale-index", "fault", "does not fit its index", "write the index again, or download the folder again"),
        Cause("truncated", "fault", "ends before its data does", _AGAIN),
        Cause("duplicate-names", "fault", "is stored twice", "keep the files of one save"),
        Cause(
            "another-model",
            "fault",
            "has no relation to BASE",
            "check which of the two was uploaded under a wrong name",
        ),
        # on a text
        Cause(
            "worse-loss",
            "fault",
            "has a much larger loss than BASE",
            "where the weights show no cause: locater compare BASE MODEL --report changes.html",
        ),
        Cause(
            "lost-role",
            "change",
            "lost a role that it has in BASE",
            "locater probe MODEL --text FILE --report probe.html, and the same of BASE",
        ),
        Cause("other-attention", "change", "attends otherwise than in BASE", ""),
        # neutral
        Cause("loss", "note", "has a loss", ""),
        Cause("identical", "note", "is identical to BASE", ""),
        Cause("dtype", "note", "differs from BASE by rounding alone", ""),
        Cause("fine-tune", "change", "was trained further", ""),
        Cause(
            "low-rank",
            "change",
            "differs from BASE by a low-rank delta, as of a merged adapter",
            "give --adapter to check the merge",
        ),
        Cause("equivalent", "note", "is stored otherwise and computes the same", ""),
        Cause("quantised", "change", "was quantised", ""),
        Cause("adapter", "change", "contains the adapter as it should", ""),
        Cause(
            "unknown",
            "change",
            "changed, and the cause is not known",
            "locater compare BASE MODEL --report changes.html",
        ),
    )
}


@dataclass(frozen=True)
class Finding:
    """One thing that doctor found. `evidence` holds the numbers that tell the cause from its rivals."""

    cause: str
    where: str
    evidence: dict[str, Any] = field(default_factory=dict)
    severity: Severity = "note"
    words: str = ""  # what is found there; the meaning of the cause where it is empty
    next: str = ""


def finding(cause: str, where: str, words: str = "", /, severity: Severity | None = None, **evidence: Any) -> Finding:
    """A finding with the severity and the advice of its cause.

    >>> finding("zero", "layers.3.mlp").severity
    'fault'
    """
    known = CAUSES[cause]
    return Finding(cause, where, evidence, severity or known.severity, words or known.meaning, known.next)
