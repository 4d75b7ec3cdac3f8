"""What a probe runs a model on: batches of text or images, some for statistics and some for measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from locater.errors import LocaterError
from locater.inputs.images import image_batches
from locater.inputs.text import Batch, Text, batches, files_named
from locater.observing.residual_stream import time_first

DEFAULT_TEXT = "the documentation that comes with Python"


def probe_batches(
    module: nn.Module, text: Text | None, images: str | Path | None, tokenizer: Any, length: int, tokens: int
) -> list[Batch]:
    """Batches of images, or of the text: `tokens` tokens to measure and half as many again for the statistics."""
    if images is not None:
        return image_batches(module, images)
    _check_reads_text(module, text)
    if text is None:
        from locater.inputs.corpus import embedded_text

        text = embedded_text()
    return batches(module, text, tokenizer=tokenizer, length=length, tokens=tokens + max(length, tokens // 2))


def data_label(text: Text | None, images: str | Path | None) -> str | None:
    """The name of the data in the result: the default text and files by name; None for other text."""
    if images is not None:
        return str(images)
    if text is None:
        return f"{DEFAULT_TEXT} (the default; text= for yours)"
    if isinstance(text, str | Path):
        path = files_named([text])[0]
        return None if path is None else str(path)
    if not isinstance(text, list | tuple) or not text:
        return None
    paths = files_named(text)
    return f"{len(paths)} files, the first {paths[0]}" if all(path is not None for path in paths) else None


def split_batches(module: nn.Module, batches: list[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Batches for the statistics (the first third of the sequences) and for measurement (the rest).

    A single sequence is used for both. Batches of tokens or images are cut where the third ends. Batches of another
    kind are cut only if there is a single one and its first axis is that of the sequences.
    """
    known = all({"input_ids", "pixel_values"} & batch.keys() for batch in batches)
    if len(batches) > 1 and not known:
        cut = max(1, len(batches) // 3)
        return batches[:cut], batches[cut:]
    if not known and any(time_first(part) for part in module.modules()):
        return batches, batches
    left = max(1, count_sequences(batches) // 3)
    for_statistics: list[Batch] = []
    for_measurement: list[Batch] = []
    for batch in batches:
        size, cut = _sequences(batch), min(left, _sequences(batch))
        left -= cut
        for_statistics += [_cut(batch, size, slice(cut))] if cut else []
        for_measurement += [_cut(batch, size, slice(cut, None))] if cut < size else []
    return (for_statistics, for_measurement) if for_measurement else (batches, batches)


def count_sequences(batches: list[Batch]) -> int:
    return sum(_sequences(batch) for batch in batches)


def _check_reads_text(module: nn.Module, text: Any) -> None:
    main_input = getattr(module, "main_input_name", "input_ids")
    parts = text if isinstance(text, list | tuple) else [text]
    if all(part is None or isinstance(part, str | Path) for part in parts) and main_input != "input_ids":
        way_out = (
            "give images= (--images PATH on the command line)"
            if main_input == "pixel_values"
            else "from Python, give batches as it takes them"
        )
        raise LocaterError(f"{type(module).__name__} reads {main_input}, not text: {way_out}")


def _cut(batch: Batch, size: int, rows: slice) -> Batch:
    """Some sequences of a batch. Values that are not per sequence (positions, switches) stay as they are."""
    return {k: v[rows] if isinstance(v, Tensor) and v.ndim and len(v) == size else v for k, v in batch.items()}


def _sequences(batch: Batch) -> int:
    """Number of sequences in a batch."""
    tensors = [batch[name] for name in ("input_ids", "pixel_values") if name in batch] or list(batch.values())
    return next((len(x) for x in tensors if isinstance(x, Tensor) and x.ndim), 1)
