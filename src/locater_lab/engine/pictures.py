"""Small images in lines of runs and on pages: a strip of them as a PNG in base64, strips in one drawing."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping
from html import escape

from jaxtyping import UInt8
from torch import Tensor

SCALE, LABELS, TOP, GAP = 2, 190, 10, 8  # points per pixel, and room around the strips


def strip_of(images: UInt8[Tensor, "count height width channels"]) -> str:
    """The images side by side as a PNG, in base64; one channel is grey, three are colours.

    >>> import torch
    >>> size_of(strip_of(torch.zeros(3, 28, 20, 1, dtype=torch.uint8)))
    (60, 28)
    """
    count, height, width, channels = images.shape
    rows = images.transpose(0, 1).reshape(height, -1).tolist()
    pixels = zlib.compress(b"".join(b"\0" + bytes(row) for row in rows), 9)  # each row without a filter
    colours = {1: 0, 3: 2}[channels]
    header = struct.pack(">IIBBBBB", count * width, height, 8, colours, 0, 0, 0)
    parts = [_chunk(b"IHDR", header), _chunk(b"IDAT", pixels), _chunk(b"IEND", b"")]
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def size_of(strip: str) -> tuple[int, int]:
    """Width and height of a PNG in base64."""
    width, height = struct.unpack(">II", base64.b64decode(strip)[16:24])
    return width, height


def picture_rows(strips: Mapping[str, str]) -> str:
    """Strips below each other, each with its name, as SVG."""
    sizes = [size_of(strip) for strip in strips.values()]
    width = LABELS + SCALE * max(width for width, _ in sizes) + GAP
    y, parts = TOP, list[str]()
    for (name, strip), (across, down) in zip(strips.items(), sizes, strict=True):
        parts.append(f'<text x="{LABELS - 8}" y="{y + SCALE * down / 2 + 4:g}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<image x="{LABELS}" y="{y}" width="{SCALE * across}" height="{SCALE * down}" '
            f'style="image-rendering: pixelated" href="data:image/png;base64,{strip}"/>'
        )
        y += SCALE * down + GAP
    frame = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" height="{y}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="#222">'
    )
    return "\n".join([frame, f'<rect width="{width}" height="{y}" fill="#fff"/>', *parts, "</svg>", ""])
