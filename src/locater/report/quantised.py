"""Tables of numbers for pages: one byte per number, compressed, as text that a script reads when it is needed."""

from __future__ import annotations

import base64
import zlib

import numpy as np
from numpy.typing import ArrayLike


def pack_table(table: ArrayLike) -> str:
    """A table (rows, columns) as base64 of a zlib stream: a float32 scale per row, then the numbers as int8.

    A number is its int8 times the scale of its row: it is off by at most 1/254 of the largest number in its row.

    >>> packed = pack_table([[0.0, 0.5, 1.0], [-2.0, 0.0, 1.0]])
    >>> unpack_table(packed, 2, 3).round(2).tolist()
    [[0.0, 0.5, 1.0], [-2.0, 0.0, 1.01]]
    """
    x = np.asarray(table, dtype=np.float32)
    scale = np.abs(x).max(axis=1, initial=0.0) / 127
    whole = np.rint(x / np.where(scale > 0, scale, 1)[:, None]).astype(np.int8)
    data = scale.astype("<f4").tobytes() + whole.tobytes()
    return base64.b64encode(zlib.compress(data, 6)).decode()


def unpack_table(packed: str, rows: int, columns: int) -> np.ndarray:
    """The table again, as the script of a page reads it."""
    data = zlib.decompress(base64.b64decode(packed))
    scale = np.frombuffer(data, "<f4", rows)
    return np.frombuffer(data, np.int8, rows * columns, 4 * rows).reshape(rows, columns) * scale[:, None]
