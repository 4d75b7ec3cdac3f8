"""The logits of softmaxes that modules compute themselves: products of two activations, and what was made of them.

A softmax does not see what is taken off a whole row, and other numbers may stand behind the logits of keys: a sink.
Both are remembered, so that the largest logit is the model's own and a sink is not taken for a key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from locater.errors import LocaterError

LARGEST = frozenset({"amax", "max"})
SUBTRACTING = frozenset("sub __sub__ sub_ __isub__ subtract".split())
JOINING = frozenset({"cat", "concat", "concatenate"})
# calls after which a row that something was taken off is still that row, with other keys hidden
PASSING = frozenset(
    """masked_fill masked_fill_ where add add_ __add__ __radd__ __iadd__ to type type_as float double half bfloat16
    contiguous clone detach dropout""".split()
)
CHANGED = "what was taken off each row of its logits is not known any more"
IN_FRONT = "numbers that belong to no key stand in front of its logits"


@dataclass(frozen=True)
class Written:
    """What is known of logits."""

    keys: int | None = None  # logits of keys, where others stand behind them
    taken: Tensor | None = None  # (..., T, 1): what was taken off each row
    unclear: str | None = None  # why they cannot be told

    def logits(self, x: Tensor, *taken: Tensor) -> Tensor:
        """The model's own logits, of the input `x` of a softmax."""
        if self.unclear is not None:
            raise LocaterError(self.unclear)
        return x if not taken else x + taken[0]


PLAIN = Written()


class WrittenLogits:
    """The logits of a pass, as long as these tensors live."""

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()
        self._largest = WeakTensorKeyDictionary()  # largest numbers of rows of logits

    def of(self, x: Tensor) -> Written | None:
        """What is known of a tensor as logits; None where it is something else."""
        return self._known.get(x)

    def product(self, out: Tensor) -> None:
        """Remember a product of two activations."""
        self._known[out] = PLAIN

    def largest(self, x: Any, out: Any) -> None:
        """Remember the largest numbers of rows, if these are logits."""
        numbers = out if isinstance(out, Tensor) else out[0]
        if isinstance(x, Tensor) and x in self._known and numbers.shape == (*x.shape[:-1], 1):
            self._largest[numbers] = True

    def follow(self, name: str, tensors: list[Tensor], out: Tensor) -> Tensor | None:
        """Remember what the function called `name` made: logits in another place or form are logits. Returns them as
        they were before.
        """
        before = next((x for x in tensors if x.numel() <= out.numel() and x in self._known), None)
        if before is not None:
            self._known[out] = self._made(name, tensors, before, out)
        elif out.shape[-1] == 1 and any(x in self._largest for x in tensors):
            self._largest[out] = True
        return before

    def _made(self, name: str, tensors: list[Tensor], before: Tensor, out: Tensor) -> Written:
        known: Written = self._known[before]
        if name in SUBTRACTING and before is tensors[0] and tensors[-1] in self._largest:
            return known if known.taken is not None else replace(known, taken=tensors[-1].detach())
        if name in JOINING and out.shape[:-1] == before.shape[:-1] and not all(x in self._known for x in tensors):
            return replace(known, keys=before.shape[-1]) if before is tensors[0] else Written(unclear=IN_FRONT)
        if known is PLAIN or (name in PASSING and out.shape == before.shape):
            return known
        if known.taken is not None:
            return Written(unclear=CHANGED)
        return known if out.shape[-1] == before.shape[-1] else PLAIN
