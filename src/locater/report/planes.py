"""Long tables of numbers for pages, to six digits, as compressed text that a script reads when it needs them."""

from __future__ import annotations

import base64
import zlib

import numpy as np
from numpy.typing import ArrayLike

NONE = 0x7FF80000  # upper half of a NaN: no number


def pack_numbers(numbers: ArrayLike) -> str:
    """Base64 of a zlib stream: of each number the upper 32 bits of its float64, as four planes of bytes.

    A number is off by at most 2^-21 of itself (5e-7), over the whole range of float64. Bytes of the same weight lie
    together, because the upper ones of neighbours are alike and compress well. None and NaN become NaN.

    >>> unpack_numbers(pack_numbers([[0.1, -2.5], [None, 0.0]])).round(6).tolist()
    [0.1, -2.5, nan, 0.0]
    """
    x = np.asarray(numbers, dtype=np.float64).ravel()
    bits = x.view(np.uint64)
    upper = ((bits + np.uint64(1 << 31)) >> np.uint64(32)).astype(np.uint32)
    upper = np.where(upper & 0x7FFFFFFF >= 0x7FF00000, (bits >> np.uint64(32)).astype(np.uint32), upper)  # no carry
    upper = np.where(np.isfinite(x), upper, NONE).astype(">u4")
    planes = upper.view(np.uint8).reshape(-1, 4).T
    return base64.b64encode(zlib.compress(np.ascontiguousarray(planes).tobytes(), 9)).decode()


def unpack_numbers(packed: str) -> np.ndarray:
    """The numbers again, as the script of a page reads them."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(packed)), np.uint8).reshape(4, -1)
    upper = np.ascontiguousarray(planes.T).view(">u4").ravel().astype(np.uint64)
    return (upper << np.uint64(32)).view(np.float64)
