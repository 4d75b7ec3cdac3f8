"""The table of flags: which numbers raise a flag, what it means for training, and what to do about it.

Thresholds are in logit units of unit tokens (docs/theory.md section 9).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Numbers = Mapping[str, Any]  # a row by column; a number that was not measured is None or absent


@dataclass(frozen=True)
class Flag:
    """One line of the table. `rule` reads the columns in `needs`; without them the flag is not raised.

    A fault says that something is wrong, a note does not. `locater.findings.judge` turns some faults into notes.
    """

    name: str
    severity: Literal["fault", "note"]
    needs: tuple[str, ...]
    rule: Callable[..., bool]  # (*needs, length) -> whether it is raised
    meaning: str
    way_out: str
    on_purpose: bool = False  # a head with a role raises it by doing its work
    confirmed: Callable[[float], bool] | None = None  # for a prediction: does the measured entropy_ratio agree?
    worst: Callable[..., tuple[float, str]] | None = None  # (*needs, length) -> how bad a head is, and that in words

    @property
    def verb(self) -> str:
        """What a sentence says about a head with this flag: `is sharp`, `raises sink`."""
        return f"raises {self.name}" if self.severity == "note" else f"is {self.name}"


@dataclass(frozen=True)
class Role:
    """What a head does, read from measured columns. `shown` is a sentence about the first column of `needs`.

    A head with one of the flags in `NO_ROLE` has no role: it does nothing with what it attends to.
    """

    name: str
    needs: tuple[str, ...]
    rule: Callable[..., bool]  # (*needs, length) -> whether the head has the role
    shown: str


def key_variance(F: Any, key_bias: Any) -> Any:
    """Variance of logits across keys: of the query-key map, plus that of the term that depends on the key alone. Of
    numbers, or of tensors.
    """
    return F + key_bias**2


def _locked_variance(length: int) -> float:
    """The variance of logits above which the expected entropy of a row is below LOCKED of that of uniform attention."""
    from locater.theory import variance_at  # needs torch, and `locater --help` reads this table

    return variance_at(LOCKED, length)


def _how_sharp(variance: float, length: int) -> tuple[float, str]:
    from locater.theory import expected_entropy

    return variance, f"H ratio {expected_entropy(variance, length).item() / math.log(length):.2g}"


# largest logit: catches as many failures as 100, with half of the false alarms (docs/results/early-warning.md)
EXPLODING = 200
LOCKED = 0.1  # entropy over that of uniform attention, under which attention is nearly one-hot
LEVEL = 0.95  # entropy over that of uniform attention, above which attention is nearly uniform
UNIFORM = 0.01  # variance of logits, under which attention is uniform
ROLE_WEIGHT = 0.5  # share of a head's attention that a role needs
# what a head writes over the median of its layer, under which it does nothing: in the demo, stories260K and MiniLM the
# least is 0.37 (docs/flags.md)
SILENT = 0.05
LOCAL = 2.0  # mean distance in tokens, under which a head is local

FLAGS: tuple[Flag, ...] = (
    Flag(
        "nonfinite",
        "fault",
        ("finite",),
        lambda finite, length: not finite,
        "its weights or what it reads hold NaN or infinite values, or are so large that products overflow: "
        "everything after it is lost",
        "Restore an earlier checkpoint and lower the learning rate; nothing else of this head can be computed",
    ),
    Flag(
        "uniform",
        "fault",
        ("F", "key_bias"),
        lambda F, key_bias, length: key_variance(F, key_bias) < UNIFORM,
        "its logits hardly differ between tokens: it hands every token the same average, "
        "which makes tokens alike (rank collapse)",
        "In a trained model it is a candidate for pruning; "
        "before training start it larger or with a positive mean (control Mimetic)",
        confirmed=lambda entropy_ratio: entropy_ratio > LEVEL,
        worst=lambda F, key_bias, length: (
            -key_variance(F, key_bias),
            f"spread {key_variance(F, key_bias) ** 0.5:.2g}",
        ),
    ),
    Flag(
        "sharp",
        "fault",
        ("F", "key_bias"),
        lambda F, key_bias, length: key_variance(F, key_bias) > _locked_variance(length),
        "its logits spread so far that rows of attention are nearly one-hot: little gradient passes, "
        "and training can become unstable",
        "If locater probe shows no role such as previous-token, lower the learning rate "
        "or attach QKClip, QKNorm or LocAteR",
        on_purpose=True,
        confirmed=lambda entropy_ratio: entropy_ratio < LOCKED,
        worst=lambda F, key_bias, length: _how_sharp(key_variance(F, key_bias), length),
    ),
    Flag(
        "silent",
        "fault",
        ("written_share",),
        lambda written_share, length: written_share < SILENT,
        "it writes nothing, or next to nothing: its values or its columns of the output map are zero or tiny beside "
        "those of the other heads of its layer, so where it attends has no effect",
        "If it was not pruned on purpose, restore these weights: a conversion or a merge has lost them; "
        "where training made it so, it can be pruned",
        worst=lambda written_share, length: (-written_share, f"writes {written_share:.2g} of the median of its layer"),
    ),
    Flag(
        "antisymmetric",
        "note",
        ("S", "F"),
        lambda S, F, length: F > 0 and S / F < -0.5,
        "its query-key map mostly rotates: who looks at whom is one-way",
        "Nothing to do; read its eigenvalues in the complex plane and not by their mean",
        worst=lambda S, F, length: (-S / F, f"S/F {S / F:.2g}"),
    ),
    Flag(
        "exploding",
        "fault",
        ("max_logit",),
        lambda max_logit, length: max_logit > EXPLODING,
        f"logits beyond {EXPLODING} were observed: the softmax saturates, little gradient passes, "
        "and half precision is near its limits",
        "Clip or normalise queries and keys (controls QKClip, QKNorm), or lower the learning rate, "
        "before the loss diverges",
        worst=lambda max_logit, length: (max_logit, f"largest logit {max_logit:.3g}"),
    ),
    Flag(
        "locked",
        "fault",
        ("entropy_ratio",),
        lambda entropy_ratio, length: entropy_ratio < LOCKED,
        "its observed attention is nearly one-hot: little gradient reaches its queries and keys, "
        "so it hardly learns any more",
        "If the loss stalls or spikes, lower the learning rate or attach QKClip, EntropyPenalty or LocAteR",
        on_purpose=True,
        worst=lambda entropy_ratio, length: (-entropy_ratio, f"entropy ratio {entropy_ratio:.2g}"),
    ),
    Flag(
        "sink",
        "note",
        ("sink",),
        lambda sink, length: sink > 0.9,
        "its observed attention rests on the first token: it adds next to nothing on this text",
        "Nothing to do, it is usual in trained decoders; "
        "to use such heads, prune them or give the softmax a sink of its own",
        worst=lambda sink, length: (sink, f"{sink:.2g} of its weight there"),
    ),
)
ROLES: tuple[Role, ...] = (
    Role(
        "previous-token",
        ("previous",),
        lambda previous, length: previous > ROLE_WEIGHT,
        "{:.2f} of its weight on the token before",
    ),
    Role(
        "induction",
        ("induction",),
        lambda induction, length: induction > ROLE_WEIGHT,
        "{:.2f} of its weight on the token that followed the same token before",
    ),
    Role(
        "duplicate-token",
        ("duplicate",),
        lambda duplicate, length: duplicate > ROLE_WEIGHT,
        "{:.2f} of its weight on the earlier copy",
    ),
    Role("first-token", ("sink",), lambda sink, length: sink > ROLE_WEIGHT, "{:.2f} of its weight on the first token"),
    # not a head that only sees itself, which moves nothing between tokens; among few tokens everything is near
    Role(
        "local",
        ("distance", "self_mass"),
        lambda distance, self_mass, length: distance < min(LOCAL, length / 16) and self_mass <= ROLE_WEIGHT,
        "{:.1f} tokens away on average",
    ),
)
NO_ROLE = ("nonfinite", "silent")
FLAG_NAMES = tuple(flag.name for flag in FLAGS)
# flags of version 0.2 that are now columns, and where to find them
RETIRED = {
    "few-directions": "it is the column skew of locater scan, beyond 0.75 in size: --fail-on 'skew>0.75, skew<-0.75'",
    "repels-itself": "it is the column M of locater scan, below -1: --fail-on 'M<-1'",
}


def flags_of(row: Numbers, length: int) -> tuple[str, ...]:
    """Names of the flags that a row raises.

    >>> flags_of({"finite": True, "F": 400.0, "S": -300.0, "key_bias": 0.0}, length=256)
    ('sharp', 'antisymmetric')
    """
    return tuple(flag.name for flag in FLAGS if applies(flag, row, length))


def applies(line: Flag | Role, row: Numbers, length: int) -> bool:
    """Whether a row has all the columns that a flag or role needs, and fulfils its rule."""
    numbers = [row.get(column) for column in line.needs]
    return None not in numbers and line.rule(*numbers, length=length)
