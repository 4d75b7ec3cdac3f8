"""What to do about a head: an action, and controls that help where they can be attached to the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Remedy:
    """`controls` are calls of classes in `locater`, the first to try first.

    >>> LOWER_LOGITS.words(["QKClip()"])
    'lower the learning rate, or attach locater.QKClip()'
    >>> LOWER_LOGITS.words([])
    'lower the learning rate'
    """

    action: str
    controls: tuple[str, ...] = ()

    def words(self, fitting: Sequence[str] | None = None) -> str:
        """The action, with the controls that fit the model; None if that is not known, which names all of them."""
        names = [f"locater.{call}" for call in (self.controls if fitting is None else fitting)]
        if not names:
            return self.action
        several = f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
        return f"{self.action}, or attach {several}"


_SOFTENING = ("QKClip()", "QKNorm()", "LocAteR()")
LOWER_LOGITS = Remedy("lower the learning rate", _SOFTENING)
RAISE_LOGITS = Remedy("raise the query-key scale", ("LocAteR(target=2.0)",))
OF_FLAGS = {  # for flags that a monitor can raise while a run goes on
    "nonfinite": Remedy("restore an earlier checkpoint and lower the learning rate"),
    "exploding": Remedy("lower the learning rate before the loss diverges", _SOFTENING),
    "locked": Remedy(
        "if the loss stalls or spikes, lower the learning rate", (*_SOFTENING, "EntropyPenalty(floor=0.2)")
    ),
}
