"""`torch.einsum` of two tensors as permutations and one matrix product, so that a tape has the product itself."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

EQUATION = re.compile(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]+)")


def as_product(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Tensor, Tensor] | None:
    """(equation, one tensor, the other) of a call of einsum that is a matrix product; None for other calls.

    >>> a, b = torch.zeros(2, 3, 5), torch.zeros(2, 4, 5)
    >>> as_product(("bik,bjk->bij", a, b), {})[0], as_product(("bik->b", a), {})
    ('bik,bjk->bij', None)
    """
    if kwargs or not args or not isinstance(args[0], str):
        return None
    tensors = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    parts = EQUATION.fullmatch(args[0].replace(" ", ""))
    if parts is None or len(tensors) != 2 or not all(isinstance(x, Tensor) for x in tensors):
        return None
    one, two, out = parts.groups()
    if any(len(set(letters)) < len(letters) for letters in (one, two, out)):
        return None
    own = (set(one) ^ set(two)) - set(out)  # letters that are summed over in one tensor alone
    if own or set(out) - set(one + two) or not (set(one) & set(two)) - set(out):
        return None
    return parts[0], tensors[0], tensors[1]


def product(equation: str, one: Tensor, two: Tensor) -> Tensor:
    """The result of einsum. The tensor whose own axes come first in the result is the left factor.

    >>> a, b = torch.randn(2, 3, 5), torch.randn(4, 2, 5)
    >>> torch.allclose(product("bik,jbk->bji", a, b), torch.einsum("bik,jbk->bji", a, b), atol=1e-6)
    True
    """
    first, second, out = EQUATION.fullmatch(equation).groups()  # type: ignore[union-attr]
    free = [letter for letter in out if (letter in first) != (letter in second)]
    if free and free[0] in second:
        one, two, first, second = two, one, second, first
    both = [letter for letter in out if letter in first and letter in second]
    summed = [letter for letter in first if letter in second and letter not in out]
    left, right = ([letter for letter in out if letter in part and letter not in both] for part in (first, second))
    sizes = {**dict(zip(first, one.shape, strict=True)), **dict(zip(second, two.shape, strict=True))}
    shape = [sizes[letter] for letter in both]
    a = _placed(one, first, [*both, *left, *summed], [*shape, _size(sizes, left), _size(sizes, summed)])
    b = _placed(two, second, [*both, *summed, *right], [*shape, _size(sizes, summed), _size(sizes, right)])
    order = [*both, *left, *right]
    result = torch.matmul(a, b).reshape([sizes[letter] for letter in order])
    return result if order == list(out) else result.permute([order.index(letter) for letter in out])


def _placed(x: Tensor, letters: str, order: list[str], shape: list[int]) -> Tensor:
    if list(letters) != order:
        x = x.permute([letters.index(letter) for letter in order])
    return x if list(x.shape) == shape else x.reshape(shape)


def _size(sizes: dict[str, int], letters: list[str]) -> int:
    size = 1
    for letter in letters:
        size *= sizes[letter]
    return size
