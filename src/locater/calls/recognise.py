"""Which softmax is attention, decided once for a model that runs and for one that was recorded on a tape.

Attention is a call of fused attention, or a softmax over numbers that come from a product of two activations and were
only moved, scaled, capped or masked since. The product may be written as a matrix product, as einsum, or as a sum of
broadcast products (`contraction`, `broadcast_contraction`); the softmax may be written out (`softmax_written_out`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from string import ascii_letters
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from locater.calls.function_table import (
    CASTS,
    COPIES,
    ENDS,
    HIDING,
    JOINS,
    KEEPING,
    LARGEST,
    MOVES,
    PARTING,
    PRODUCTS,
    axis_of,
    fills,
)
from locater.errors import LocaterError
from locater.torch_private import base_of_view

NO_SOFTMAX = "no softmax of products of queries and keys was met in it"

K = TypeVar("K")  # a tensor, or what stands for one
SAME_NUMBERS = CASTS | COPIES | {"widen"}  # by `part_name`


# ---- products


class Product(NamedTuple):
    """A product of two tensors in the words of einsum. Its tensors may have axes of size 1 beside (`shapes`)."""

    equation: str
    one: Tensor
    two: Tensor
    shapes: tuple[torch.Size, torch.Size] | None = None

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """The two tensors as the equation has them."""
        shapes = (self.one.shape, self.two.shape) if self.shapes is None else self.shapes
        one, two = (x if x.shape == s else x.reshape(s) for x, s in zip((self.one, self.two), shapes, strict=True))
        return one, two


def contraction(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Product | None:
    """A call that sums products of two tensors over axes that they share; None for other calls.

    >>> a, b = torch.zeros(2, 3, 5), torch.zeros(2, 4, 5)
    >>> contraction("einsum", ("...ik,...jk->...ij", a, b), {}).equation, contraction("einsum", ("bik->b", a), {})
    ('aik,ajk->aij', None)
    >>> contraction("tensordot", (a, torch.zeros(4, 5), ([-1], [1])), {}).equation
    'abc,dc->abd'
    """
    tensors = [x for x in flat_arguments((*args, *kwargs.values())) if isinstance(x, Tensor)]
    if len(tensors) != 2:
        return None
    one, two = tensors
    if name == "einsum" and args and isinstance(args[0], str):
        equation = _spelled_out(args[0].replace(" ", ""), one.ndim, two.ndim)
    elif name == "inner" and min(one.ndim, two.ndim) > 0:
        equation = _of_axes(one.ndim, two.ndim, [one.ndim - 1], [two.ndim - 1])
    elif name == "tensordot":
        axes = kwargs.get("dims", args[2] if len(args) > 2 else 2)
        if isinstance(axes, int):
            axes = list(range(one.ndim - axes, one.ndim)), list(range(axes))
        if not isinstance(axes, list | tuple) or not all(isinstance(x, list | tuple) for x in axes):
            return None
        equation = _of_axes(one.ndim, two.ndim, *axes)
    elif name == "vecdot":
        return broadcast_contraction(one, two, axis_of(args, kwargs, 2) or -1)
    else:
        return None
    return None if equation is None else _valid_product(Product(equation, one, two))


def is_of_queries_and_keys(left: Tensor, right: Tensor, made_of_maps: Callable[[Tensor], bool]) -> bool:
    """Whether a product is of queries and keys: the left factor may be learned, the right one is no weight."""
    if isinstance(right, nn.Parameter) or isinstance(base_of_view(right), nn.Parameter):
        return False
    return all(x.ndim >= 3 for x in (left, right)) or (made_of_maps(left) and made_of_maps(right))


def broadcast_contraction(one: Tensor, two: Tensor, axis: int) -> Product | None:
    """`(one * two).sum(axis)`, where each of the two is repeated along axes of the other; None where that is not so.

    >>> q, k = torch.zeros(2, 7, 1, 5), torch.zeros(2, 1, 9, 5)
    >>> broadcast_contraction(q, k, -1).equation, broadcast_contraction(q, q, -1)
    ('abd,acd->abc', None)
    """
    ndim = max(one.ndim, two.ndim)
    if not -ndim <= axis < ndim or ndim > len(ascii_letters):
        return None
    sizes = [[1] * (ndim - x.ndim) + list(x.shape) for x in (one, two)]
    letters = ascii_letters[:ndim]
    apart = [{at for at in range(ndim) if mine[at] == 1 != other[at]} for mine, other in (sizes, sizes[::-1])]
    if not apart[0] or not apart[1] or axis % ndim in apart[0] | apart[1]:
        return None
    words, shapes = [], []
    for mine, missing in zip(sizes, apart, strict=True):
        words.append("".join(letter for at, letter in enumerate(letters) if at not in missing))
        shapes.append(torch.Size(size for at, size in enumerate(mine) if at not in missing))
    out = letters.replace(letters[axis % ndim], "")
    return _valid_product(Product(f"{words[0]},{words[1]}->{out}", one, two, (shapes[0], shapes[1])))


def in_order(product: Product) -> Product:
    """The same with that tensor first whose own axes come first in the result: its rows are those of the result."""
    terms, _, out = product.equation.partition("->")
    one, _, two = terms.partition(",")
    own = next((letter for letter in out if (letter in one) != (letter in two)), "")
    if not own or own in one:
        return product
    shapes = None if product.shapes is None else product.shapes[::-1]
    return Product(f"{two},{one}->{out}", product.two, product.one, shapes)


def _valid_product(product: Product) -> Product | None:
    """The same where each letter is one size, stands once in each tensor, and one at least is summed over."""
    terms, _, out = product.equation.partition("->")
    one, _, two = terms.partition(",")
    if any(len(set(word)) < len(word) for word in (one, two, out)):
        return None
    if (set(one) ^ set(two)) - set(out) or set(out) - set(one + two) or not (set(one) & set(two)) - set(out):
        return None
    shapes = (product.one.shape, product.two.shape) if product.shapes is None else product.shapes
    sizes = dict(zip(one, shapes[0], strict=True))
    fits = all(sizes.get(letter, size) == size for letter, size in zip(two, shapes[1], strict=True))
    return product if fits else None


def _of_axes(ndim: int, other: int, axes: Sequence[int], others: Sequence[int]) -> str | None:
    """The equation of a sum over these axes of two tensors."""
    if ndim + other > len(ascii_letters):
        return None
    one, left = list(ascii_letters[:ndim]), iter(ascii_letters[ndim:])
    shared = {at % other: one[axis] for axis, at in zip(axes, others, strict=True)}
    two = [shared[at] if at in shared else next(left) for at in range(other)]
    out = [letter for letter in one + two if (letter in one) != (letter in two)]
    return f"{''.join(one)},{''.join(two)}->{''.join(out)}"


def _spelled_out(equation: str, *ndims: int) -> str | None:
    """An equation of einsum with letters for its dots, and with its result; None where that fails."""
    terms, arrow, out = equation.partition("->")
    words = terms.split(",")
    if len(words) != len(ndims):
        return None
    free = [letter for letter in ascii_letters if letter not in equation]
    longest = 0
    for at, (word, ndim) in enumerate(zip(words, ndims, strict=True)):
        dots = ndim - len(word.replace("...", ""))
        if dots < 0 or (dots and "..." not in word) or dots > len(free):
            return None
        longest = max(longest, dots)
        words[at] = word.replace("...", "".join(free[:dots][::-1]))  # counted from the last, as broadcasting does
    if not arrow:
        letters = "".join(words)
        broadcast = "".join(free[:longest][::-1]) if "..." in terms else ""
        out = broadcast + "".join(sorted(x for x in set(letters) - set(broadcast) if letters.count(x) == 1))
    else:
        out = out.replace("...", "".join(free[:longest][::-1]))
    whole = ",".join(words) + "->" + out
    return whole if all(x.isalpha() for word in (*words, out) for x in word) else None


def flat_arguments(args: Sequence[Any]) -> list[Any]:
    """Arguments, those in lists too: einsum and cat take either."""
    return [x for argument in args for x in (argument if isinstance(argument, list | tuple) else (argument,))]


# ---- what follows a product


def makes_logits(name: str, x: Tensor, out: Tensor) -> bool:
    """Whether the function called `name` makes logits of logits x: in another place or form, or with others joined."""
    if name in ENDS or name in PRODUCTS or fills(name) or not out.is_floating_point():
        return False
    return name in MOVES or (out.ndim > 1 and x.numel() <= out.numel())


def softmax_axis(args: Sequence[Any], kwargs: Mapping[str, Any], ndim: int) -> int | None:
    """The axis of a softmax, counted from the first; None where it is not said."""
    axis = axis_of(tuple(args), kwargs)
    return axis % ndim if isinstance(axis, int) and not isinstance(axis, bool) and -ndim <= axis < ndim else None


class Operation(NamedTuple, Generic[K]):
    """How a tensor was made: by which function (`part_name`), of which tensors."""

    name: str
    inputs: Sequence[K]


def part_name(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], ndim: int) -> str:
    """The name of a function as a part of a softmax that is written out: `row_sum` and `row_logsumexp` where it reduces
    the last of `ndim` axes alone, `widen` where it puts an axis of size 1 behind them; else its own.

    >>> part_name("sum", ("e", [-1]), {"keepdim": True}, 4), part_name("sum", ("e", 1), {}, 4)
    ('row_sum', 'sum')
    >>> part_name("__getitem__", ("s", (..., None)), {}, 3), part_name("__getitem__", ("s", ([1, 0], None)), {}, 3)
    ('widen', '__getitem__')
    """
    if name in ("sum", "logsumexp"):
        axis = axis_of(args, kwargs)
        axis = axis[0] if isinstance(axis, list | tuple) and len(axis) == 1 else axis
        return f"row_{name}" if isinstance(axis, int) and axis in (-1, ndim - 1) else name
    if name == "unsqueeze":
        return "widen" if axis_of(args, kwargs) in (-1, ndim) else name
    if name == "__getitem__" and len(args) == 2:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        plain = all(x is None or x is ... or (isinstance(x, slice) and x == slice(None)) for x in index)
        return "widen" if plain and index[-1:] == (None,) and index.count(None) == 1 else name
    return name


def softmax_written_out(
    name: str, inputs: Sequence[K], made: Callable[[K], Operation[K] | None], shape: Callable[[K], torch.Size]
) -> K | None:
    """The logits of a softmax over the last axis that ends with the function called `name`; None where none does.

    It is the exponential of a log-softmax, or of logits less their log-sum-exp; or exponentials over their sum. A
    log-softmax over another axis is not to be in `made`.
    """
    if name == "exp" and inputs:
        how = _made_of(inputs[0], made)
        if how is not None and how.name == "log_softmax":
            return how.inputs[0]
        if how is not None and how.name == "sub" and len(how.inputs) == 2:
            total = _made_of(how.inputs[1], made)
            if _is_of_row(total, "row_logsumexp", how.inputs, shape):
                return how.inputs[0]
    if name == "div" and len(inputs) == 2:
        how, total = _made_of(inputs[0], made), _made_of(inputs[1], made)
        if how is not None and how.name == "exp" and _is_of_row(total, "row_sum", inputs, shape):
            return how.inputs[0]
    return None


def _made_of(x: K, made: Callable[[K], Operation[K] | None]) -> Operation[K] | None:
    """How a tensor was made, before it was cast, copied or given one more axis."""
    how = made(x)
    while how is not None and how.name in SAME_NUMBERS and how.inputs:
        how = made(how.inputs[0])
    return how


def _is_of_row(how: Operation[K] | None, name: str, both: Sequence[K], shape: Callable[[K], torch.Size]) -> bool:
    """Whether the second of `both` is one number for each row of the first, which the function called `name` made."""
    return (
        how is not None
        and how.name == name
        and how.inputs[0] is both[0]
        and shape(both[1]) == (*shape(both[0])[:-1], 1)
    )


CHANGED = "what was taken off each row of its logits is not known any more"
MOVED = "where the numbers are that belong to no key, after the axes of its logits were moved, is not known"
IN_FRONT = "numbers that belong to no key stand in front of its logits"


@dataclass(frozen=True)
class KnownLogits:
    """What is known of logits of a model that runs."""

    keys: int | None = None  # logits of keys, where others stand behind them
    taken: Tensor | None = None  # (..., T, 1): what was taken off each row; (): off all of them
    unclear: str | None = None  # why they cannot be told

    def as_before(self, x: Tensor, *taken: Tensor) -> Tensor:
        """The model's own logits, of the input `x` of a softmax."""
        if self.unclear is not None:
            raise LocaterError(self.unclear)
        return x if not taken else x + taken[0]


PLAIN = KnownLogits()
CLAMPS = frozenset({"clamp", "clamp_min", "clamp_max"})
# what a softmax is written out of
PARTS = frozenset({"exp", "sub", "row_sum", "row_logsumexp"})


class LogitsTracker:
    """The logits of a pass, as long as these tensors live."""

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()
        self._largest = WeakTensorKeyDictionary()  # largest numbers of rows of logits, or of all of them
        self._made = WeakTensorKeyDictionary()  # parts of a softmax that is written out

    def of(self, x: Tensor) -> KnownLogits | None:
        """What is known of a tensor as logits; None where it is something else."""
        return self._known.get(x)

    def add_product(self, out: Tensor) -> None:
        """Remember a product of two activations."""
        self._known[out] = PLAIN

    def follow(self, name: str, tensors: list[Tensor], out: Tensor, part: str = "") -> Tensor | None:
        """Remember what the function called `name` made: logits in another place or form are logits. Returns them as
        they were before. `part` is its `part_name`.
        """
        if name in LARGEST and tensors and tensors[0] in self._known and out.shape in _of_rows_or_all(tensors[0]):
            self._largest[out] = True
            return None
        if part in PARTS or part in SAME_NUMBERS:
            self._note_part(part, tensors, out)
        before = next((x for x in tensors if x in self._known and makes_logits(name, x, out)), None)
        if before is not None:
            self._known[out] = self._of_step(name, tensors, before, out)
        elif out.ndim and out.shape[-1] == 1 and any(x in self._largest for x in tensors):
            self._largest[out] = True
        return before

    def note_assignment(self, target: Tensor, value: Any) -> None:
        """Logits that are written into a part of a tensor make it one of logits: Longformer's, a diagonal at a time."""
        known = self._known.get(value) if isinstance(value, Tensor) else None
        if known is not None and target not in self._known:
            self._known[target] = self.after_move(known)

    def after_move(self, known: KnownLogits) -> KnownLogits:
        """What is known of logits whose axes were moved."""
        return known if known is PLAIN or known.unclear is not None else KnownLogits(unclear=MOVED)

    def note_log_softmax(self, x: Tensor, out: Tensor) -> None:
        """Remember a log-softmax over the last axis."""
        if x in self._known:
            self._made[out] = Operation("log_softmax", (x,))

    def softmax_written_out(self, name: str, tensors: list[Tensor], out: Tensor) -> Tensor | None:
        """The logits of a softmax that ends here."""
        if name not in ("exp", "div"):
            return None
        x = softmax_written_out(name, tensors, self._made.get, _shape)
        return x if x is not None and x in self._known and x is not out else None

    def _note_part(self, name: str, tensors: list[Tensor], out: Tensor) -> None:
        first = tensors[0] if tensors else None
        if first is None or first is out or not (first in self._made or (first in self._known and name in PARTS)):
            return
        if name != "sub" or (len(tensors) == 2 and tensors[1] in self._made):
            self._made[out] = Operation(name, tuple(tensors))

    def _of_step(self, name: str, tensors: list[Tensor], before: Tensor, out: Tensor) -> KnownLogits:
        known: KnownLogits = self._known[before]
        if name == "sub" and before is tensors[0] and tensors[-1] in self._largest:
            taken = tensors[-1].detach()
            if known.taken is None or known.taken.ndim == 0:
                return replace(known, taken=taken if known.taken is None else known.taken + taken)
            return known
        if name in JOINS and out.shape[:-1] == before.shape[:-1] and not all(x in self._known for x in tensors):
            return replace(known, keys=before.shape[-1]) if before is tensors[0] else KnownLogits(unclear=IN_FRONT)
        if known is PLAIN or (name in HIDING and out.shape == before.shape):
            return known
        if known.unclear is not None:
            return known
        if known.taken is not None and known.taken.ndim == 0 and known.keys is None and name in KEEPING:
            return known
        if known.taken is not None:
            return known if name in CLAMPS and _are_equal(before, out) else KnownLogits(unclear=CHANGED)
        if known.keys is None or (name in PARTING and out.shape == (*before.shape[:-1], known.keys)):
            return PLAIN
        return known if out.shape[-1:] == before.shape[-1:] else KnownLogits(unclear=MOVED)


def _of_rows_or_all(x: Tensor) -> tuple[torch.Size, torch.Size]:
    """The shapes of the largest number of each row, and of all numbers."""
    return torch.Size((*x.shape[:-1], 1)), torch.Size(())


def _are_equal(before: Tensor, out: Tensor) -> bool:
    """Whether a function that did not write to its input left all numbers as they are."""
    return before.data_ptr() != out.data_ptr() and before.shape == out.shape and bool(torch.equal(before, out))


def _shape(x: Tensor) -> torch.Size:
    return x.shape
