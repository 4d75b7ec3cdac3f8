"""Entropy of a run as two small pictures, for trackers: layers over steps, and every head at the last step."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from locater.runs.records import Record

if TYPE_CHECKING:
    from PIL.Image import Image

COLUMN = "entropy_ratio"
GROWTH = 1.15  # new pictures when so many times as many steps were observed as at the last ones
WIDTH, HEIGHT, LAYER = 600, (192, 768), 32  # pixels: of a map, its least and largest height, one layer
LEFT, TOP, BOTTOM, TEXT = 56, 36, 72, 22  # trackers show pictures at half of this size or less
INK, PAPER, UNKNOWN = (40, 44, 52), (255, 255, 255), (200, 200, 200)
STOPS = (0.0, 0.1, 0.35, 0.65, 1.0)  # of the colours: bright means that heads look at few tokens
COLOURS = ((253, 231, 37), (253, 174, 50), (204, 71, 120), (92, 60, 150), (20, 26, 70))


class EntropyPictures:
    """Collects the entropy ratios of a run. `draw(record)` gives two pictures by name now and then, none otherwise.

    They are drawn at the first observed step, later whenever the run has grown by a seventh (so that a long run
    does not fill the disk with pictures), and at the end.
    """

    def __init__(self, header: Record) -> None:
        self.layers: list[int] = [entry["layer"] for entry in header["layers"]]
        self.steps: list[int] = []
        self.means: list[list[float]] = []  # by observed step: of each layer, NaN where nothing is known
        self.heads: list[list[float]] = []  # of the last observed step
        self.drawn = 0  # observed steps at the last pictures

    def draw(self, record: Record) -> dict[str, Image]:
        rows = (record.get("heads") or {}).get(COLUMN)
        if rows:
            self.steps.append(record["step"])
            self.heads = [[math.nan if x is None else float(x) for x in row or ()] for row in rows]
            self.means.append([_mean(row) for row in self.heads])
        count = len(self.steps)
        due = count >= GROWTH * self.drawn if record["kind"] == "step" else record["kind"] == "end"
        if not due or count <= self.drawn:
            return {}
        self.drawn = count
        return {"entropy_by_layer": self._history(), "entropy_by_head": self._now()}

    def _history(self) -> Image:
        rows = [[step[layer] for step in self.means] for layer in range(len(self.layers))]
        title = "entropy ratio of layers, mean of heads"
        return self._picture(rows, title, (f"step {self.steps[0]}", str(self.steps[-1])))

    def _now(self) -> Image:
        count = max(1, *map(len, self.heads))
        rows = [row + [math.nan] * (count - len(row)) for row in self.heads]
        return self._picture(rows, f"entropy ratio of heads, step {self.steps[-1]}", ("head 0", str(count - 1)))

    def _picture(self, rows: list[list[float]], title: str, ends: tuple[str, str]) -> Image:
        """A map with its title, layers at the left, what the columns are below, and the scale."""
        from PIL import Image, ImageDraw, ImageFont

        height = min(max(HEIGHT[0], LAYER * len(rows)), HEIGHT[1])
        low, right = TOP + height, LEFT + WIDTH
        picture = Image.new("RGB", (right + 24, low + BOTTOM), PAPER)
        picture.paste(_map(rows, (WIDTH, height)), (LEFT, TOP))
        draw = ImageDraw.Draw(picture)
        text = partial(draw.text, fill=INK, font=ImageFont.load_default(TEXT))
        text((LEFT, 4), title)
        for at in range(0, len(rows), math.ceil(TEXT * len(rows) / height)):  # as many labels as there is room for
            text((LEFT - 10, TOP + (at + 0.5) * height / len(rows)), str(self.layers[at]), anchor="rm")
        text((LEFT, low + 4), ends[0])
        text((right, low + 4), ends[1], anchor="ra")
        for x in range(200):
            colour = tuple(_colours(x / 199).astype(int).tolist())
            draw.line([(LEFT + 120 + x, low + 42), (LEFT + 120 + x, low + 60)], fill=colour)
        text((LEFT, low + 38), "one-hot 0")
        text((LEFT + 330, low + 38), "1 uniform")
        return picture


def _map(rows: list[list[float]], size: tuple[int, int]) -> Image:
    """Rows of ratios as coloured cells. Where there are more columns than pixels, a pixel has the mean of several."""
    import numpy as np
    from PIL import Image

    cells = Image.fromarray(np.asarray(rows, dtype=np.float32))
    numbers = np.asarray(cells.resize(size, Image.Resampling.BOX))
    painted = np.where(np.isfinite(numbers)[..., None], _colours(numbers), UNKNOWN)
    return Image.fromarray(painted.round().astype(np.uint8))


def _colours(ratios: Any) -> Any:
    """Red, green and blue along a last axis."""
    import numpy as np

    return np.stack([np.interp(ratios, STOPS, channel) for channel in zip(*COLOURS, strict=True)], -1)


def _mean(row: list[float]) -> float:
    known = [x for x in row if math.isfinite(x)]
    return sum(known) / len(known) if known else math.nan
