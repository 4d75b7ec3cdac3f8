"""How many heads a model has, counted apart from Locater: by the modules in which softmax attention is met."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.reach.met import Met

COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_attn_heads", "nhead", "heads")


class ByModule(Met):
    """The paths of modules of the model's own in which attention is met."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.paths: dict[str, None] = {}
        self._model, self._running = model, [""]

    def _count(self, kind: str) -> None:
        self.paths[self._running[-1]] = None
        super()._count(kind)

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
    """The heads of each module in which attention is met in one pass: as many as it or its configuration says, else 1."""
    met = ByModule(model)
    met.run(inputs)
    modules = dict(model.named_modules())
    return {path: _said(modules[path]) for path in met.paths}


def _said(module: nn.Module) -> int:
    places = (module, getattr(module, "config", None))
    counts = (getattr(place, name, None) for place in places for name in COUNTS)
    return next((count for count in counts if type(count) is int), 1)


def left_out(heads: Mapping[str, int], names: Sequence[str], lines: Iterable[str]) -> list[str]:
    """Modules of which fewer heads are among `names`, the layer of each row, than they have, and that no line names."""
    text = "\n".join(lines)
    silent = []
    for path, count in heads.items():
        rows = sum(_same(path, name) for name in names)
        if rows < count and not _named(path, text):
            silent.append(f"{path}: {rows} of {count} heads")
    return silent


def _same(path: str, name: str) -> bool:
    """Whether a row's layer is a module, a part of it, or the module that it is a part of."""
    return f"{name}.".startswith(f"{path}.") or f"{path}.".startswith(f"{name}.") or not path


def _named(path: str, text: str) -> bool:
    """Whether a line names the module, or says that it is one of several kinds that it does not name."""
    folded = re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
    return path in text or folded in text or "more kinds" in text


def observed_without_a_word(model: nn.Module, inputs: Mapping[str, Tensor], heads: Mapping[str, int]) -> list[str]:
    """Modules whose heads `observe` leaves out without saying so."""
    import locater

    try:
        with torch.no_grad(), locater.observe(model) as seen:
            model(**inputs)
    except locater.LocaterError as error:
        return left_out(heads, [], [str(error)])
    return left_out(heads, [row.name for row in seen.rows], seen.notes)


def scanned_without_a_word(model: nn.Module, inputs: Mapping[str, Any], heads: Mapping[str, int]) -> list[str]:
    """The same of `scan`. A refusal of the whole model leaves nothing out without a word."""
    import locater

    try:
        result = locater.scan(model, example=dict(inputs))
    except locater.LocaterError:
        return []
    return left_out(heads, [_name(result, row.layer) for row in result.rows], result.assumptions["notes"])


def _name(result: Any, layer: int) -> str:
    return str(next(entry["name"] for entry in result.layers if entry["layer"] == layer))
