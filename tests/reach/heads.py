"""How many heads a model has, counted apart from Locater, against the rows and the lines that Locater gives.

The count is of softmax attention that a plain pass meets (`met`): heads are an axis of the queries or of the map. A
module that attends in several places of its code has the heads of all of them. What has no row has to be named in a
line: the path of its module, or the path with numbers folded into * and how many there are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import locater
from tests.reach.met import Met, Place

COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_attn_heads", "nhead", "heads")
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
END = 3  # steps at the end of a path that a module has on disk too
SHOWN = 6  # modules that a line of the results names


class ByModule(Met):
    """Heads by module of the model's own that has parameters, and place in its code."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.heads: dict[str, dict[Any, int]] = {}  # path -> place in the code -> heads
        self._model, self._running = model, [""]
        self._holding = {path for path, module in model.named_modules() if any(True for _ in module.parameters())}

    def count(self, kind: str, shape: tuple[int, ...], heads: int | None, place: Place) -> None:
        running = self._running[-1]
        path = next((path for path in reversed(self._running) if path in self._holding), "")
        places = self.heads.setdefault(path, {})
        declared = _declared(self._model.get_submodule(running)) or _declared(self._model.get_submodule(path))
        number = heads or _axis_of_heads(shape, declared)
        places[running, place] = max(number, places.get((running, place), 0))
        super().count(kind, shape, heads, place)

    def run(self, inputs: Mapping[str, Tensor]) -> None:
        handles = []
        for path, module in self._model.named_modules():
            own = not type(module).__module__.startswith("torch.nn.") or isinstance(module, nn.MultiheadAttention)
            if own:  # `nn.Softmax` belongs to the module that it is used in
                handles.append(module.register_forward_pre_hook(self._enter(path)))
                handles.append(module.register_forward_hook(lambda *_: self._running.pop() and None))
        try:
            with torch.no_grad(), self:
                self._model(**inputs)
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, path: str) -> Callable[..., None]:
        return lambda *_: self._running.append(path)


def heads_met(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, int]:
    """The heads of each module in which attention is met in one pass."""
    met = ByModule(model)
    met.run(inputs)
    return {path: sum(places.values()) for path, places in met.heads.items()}


def _axis_of_heads(shape: tuple[int, ...], declared: int | None) -> int:
    """Heads by the shape of queries or of a map, (..., H, T, n) or (B * H, T, n). Where the axes may be in another order
    (keys in blocks around each query), or B * H is one axis, as many as the module says, if they fit.
    """
    if len(shape) > 3:
        return declared if declared in shape[:-1] else shape[-3]
    return declared if declared is not None and len(shape) == 3 and shape[0] % declared == 0 else 1


def _declared(module: nn.Module) -> int | None:
    places = (module, getattr(module, "config", None))
    counts = (getattr(place, name, None) for place in places for name in COUNTS)
    return next((count for count in counts if type(count) is int and count > 0), None)


def left_out(heads: Mapping[str, int], names: Sequence[str], lines: Iterable[str], renamed: bool = False) -> list[str]:
    """Modules of which fewer heads are among `names`, the layer of each row, than they have, and that no line names."""
    text, rows, folds = "\n".join(lines), rows_of(heads, names, renamed), Counter[str]()
    silent = []
    for path, count in heads.items():
        if rows[path] < count and not _named(path, text):
            fold = NUMBER.sub("*", path) or "the model itself"
            folds[fold] += 1
            if folds[fold] > _named_together(fold, text):
                silent.append(f"{path}: {rows[path]} of {count} heads")
    return silent


def rows_of(heads: Mapping[str, int], names: Sequence[str], renamed: bool = False) -> Counter[str]:
    """How many rows each module has. A row belongs to one module: that of its name, else one inside or around it that
    has fewer rows than heads. Where names may be those on disk (`renamed`), a row of an unknown one is of any module.
    """
    rows: Counter[str] = Counter()
    others = []
    for name in names:
        if name in heads:
            rows[name] += 1
        else:
            others.append(name)
    for name in others:
        fits = [path for path, count in heads.items() if rows[path] < count and _related(path, name)]
        if fits:
            rows[max(fits, key=len)] += 1
        elif renamed and (open_ := [path for path, count in heads.items() if rows[path] < count]):
            rows[open_[0]] += 1
    return rows


def _related(path: str, name: str) -> bool:
    """Whether a row's layer is a part of a module, or the module that it is a part of."""
    return f"{name}.".startswith(f"{path}.") or f"{path}.".startswith(f"{name}.") or not path or not name


def _named(path: str, text: str) -> bool:
    """Whether a line names the module or something in it."""
    return bool(path) and re.search(rf"(?<![\w.]){re.escape(path)}(?!\w)", text) is not None


def _named_together(fold: str, text: str, inside: str = "") -> int:
    """How many modules of one folded path the lines name; `inside`: a pattern of steps that may follow."""
    counts = re.findall(rf"(?<![\w.*]){re.escape(fold)}{inside}(?![\w*]|\.\w)(?: \((\d+)\))?", text)
    return sum(int(count or 1) for count in counts)


def checked(
    heads: Mapping[str, int], read: Callable[[], tuple[list[str], list[str]]], renamed: bool = False
) -> dict[str, Any]:
    """Rows of the modules met, and what is missing without a word. `read` gives the layer of each row, and lines. A
    refusal counts as its line: it has to name what it leaves out.
    """
    try:
        names, lines = read()
    except locater.LocaterError as error:
        names, lines = [], [str(error)]
    rows, silent = rows_of(heads, names, renamed), left_out(heads, names, lines, renamed)
    if silent and renamed and not names and _named_by_their_ends(heads, lines[0]):
        silent = []
    result: dict[str, Any] = {"rows": sum(min(rows[path], count) for path, count in heads.items())}
    if silent:
        result.update(silent=len(silent), named=silent[:SHOWN])
    if not names:
        result["refused"] = lines[0][:200] if lines else ""
    return result


def _named_by_their_ends(heads: Mapping[str, int], line: str) -> bool:
    """Whether a line names as many modules as there are of each kind, by names on disk: their first steps may differ,
    and there may be more of them. Or as many in all, where also their last steps are others on disk.
    """
    listed = re.findall(r"[\w.*]+(?: \((\d+)\))?(?:, |$)", line.partition("; not read: ")[2])
    if sum(int(count or 1) for count in listed) >= len(heads):
        return True
    ends = Counter(".".join(NUMBER.sub("*", path).split(".")[-END:]) for path in heads)
    bare = {end: re.sub(rf"[\w.*]+\.(?={re.escape(end)})", "", line) for end in ends}
    return all(_named_together(end, bare[end], r"(?:\.\w+)*") >= count for end, count in ends.items())


def observed(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
    """Layers of the rows of `observe`, and its notes."""
    with torch.no_grad(), locater.observe(model) as seen:
        model(**inputs)
    return [row.name for row in seen.rows], list(seen.notes)


def scanned(source: nn.Module | str | Path, inputs: Mapping[str, Any] | None = None) -> tuple[list[str], list[str]]:
    """The same of `scan`, of a live model or a folder."""
    return lines_of(locater.scan(source, example=None if inputs is None else dict(inputs)))


def lines_of(result: locater.Scan) -> tuple[list[str], list[str]]:
    """The layer of each row of a scan, and its notes."""
    names = {entry["layer"]: str(entry["name"]) for entry in result.layers}
    return [names[row.layer] for row in result.rows], list(result.assumptions["notes"])
