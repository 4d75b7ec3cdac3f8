"""Messages for sources that cannot be read, or only in part: what was recognised, what was not, and what to do."""

from __future__ import annotations

import re

from locater.calls.coverage import attention_like, folded_paths
from locater.discovery.by_name import examples
from locater.errors import LocaterError
from locater.families.registry import BUILT_IN, BY_TYPE
from locater.sources.sources import config_of
from locater.sources.weights import ModuleWeights, Weights

ATTENTION_WORDS = re.compile(r"attn|attention|q_proj|k_proj|qkv|query|to_[qk](\.|$)|(^|\.)w?[qk](\.|$)", re.IGNORECASE)


def contradiction(weights: Weights, option: str, in_model: str) -> str:
    """Of an option that the model contradicts."""
    return f"{weights.where}: {option} was given, but the model says {in_model}: leave the option out"


class UnknownArchitectureError(LocaterError):
    """No record and no known attention: a reason, and what to do about it."""

    def __init__(self, where: str, reason: str, ways: str, typed: bool = False) -> None:
        self.reason, self.ways, self.typed = reason, ways, typed  # typed: the reason is about its model_type
        super().__init__(f"{where}: {reason}. {ways}" if ways else f"{where}: {reason}")


def unknown_architecture(
    weights: Weights, model_type: str | None, read: list[str], left: list[str]
) -> UnknownArchitectureError:
    """Of a source without a known type; `read` and `left` are paths of attention that can and cannot be read."""
    if not left and not any(ATTENTION_WORDS.search(name) for name in weights.names()):
        return UnknownArchitectureError(weights.where, f"no attention found; it holds {examples(weights)}", "")
    live = isinstance(weights, ModuleWeights)
    reason = "no config.json with a model_type tells its architecture"
    if model_type:
        reason = f"model_type {model_type!r} is not a known architecture"
    elif live:
        reason = "it is of no known architecture"
    reason += f" (docs/families.md lists {len(BUILT_IN)})"
    if read:
        return UnknownArchitectureError(weights.where, reason, only_a_part(weights, read, left), bool(model_type))
    wrapped = any(".base_layer." in name or ".parametrizations." in name for name in weights.names())
    hint = "Adapters or parametrizations wrap its maps: merge them first. " if wrapped else ""
    first = "" if model_type or live else "Put its config.json beside it. Or: "
    ways = f"{hint}{first}{_ways_out(weights, read, left)}. It holds {examples(weights)}"
    return UnknownArchitectureError(weights.where, reason, ways, bool(model_type))


def undiscovered(weights: Weights, unknown: LocaterError, reason: str) -> LocaterError:
    """Of a source that discovery could not read either: first why, then what to do, last what is not read."""
    said = str(unknown)
    if isinstance(unknown, UnknownArchitectureError) and unknown.ways:
        said = f"{unknown.reason}. {unknown.ways}" if unknown.typed else unknown.ways
    line = f"{reason.removeprefix(f'{weights.where}: ')}. {said.removeprefix(f'{weights.where}: ')}"
    left = [] if re.search(r"[Nn]ot read[:,] ", line) else attention_like(weights)
    listed = f"; not read: {folded_paths(left, most=None)}" if left else ""
    return LocaterError(f"{weights.where}: {line}{listed}")


def only_a_part(weights: Weights, read: list[str], left: list[str]) -> str:
    """Of a model of which only a part can be read."""
    return (
        f"Only a part of its attention can be read ({folded_paths(read, 2)}), and a part is never given as the whole. "
        f"Not read: {folded_paths(left, most=None)}. {_ways_out(weights, read, left)}"
    )


def _ways_out(weights: Weights, read: list[str], left: list[str]) -> str:
    """What to do about attention that is not read; of a live model, a part that can be scanned on its own."""
    live = isinstance(weights, ModuleWeights)
    named = "--query 'PATTERN' --key 'PATTERN' --heads N"
    if live:
        named = "locater.scan(model, query='PATTERN', key='PATTERN', heads=N)"
    others = f"Name its tensors with {named} (* for the layer number), or describe it with locater.register()"
    parts = _readable_parts(weights, read, left) if isinstance(weights, ModuleWeights) else []
    if not parts:
        return others
    also = f" (likewise {', '.join(parts[1:3])})" if parts[1:] else ""
    return f"Scan such a part on its own: locater.scan(model.{parts[0]}){also}. {others}"


def _readable_parts(weights: ModuleWeights, read: list[str], left: list[str]) -> list[str]:
    """Paths of the outermost modules that carry a configuration of a known architecture and would not be refused again,
    or, where the model is of none, a path that holds only attention that could be read.
    """
    parts: list[str] = []
    tried = config_of(weights.module).get("model_type")  # a part of this type is read as the whole was
    for path, module in weights.modules().items():
        kind = getattr(getattr(module, "config", None), "model_type", None)
        whole = (
            path not in read
            and all(_within(name, path) for name in read)
            and not any(_within(name, path) for name in left)
        )
        if path and kind in BY_TYPE and (kind != tried or whole) and not any(_within(path, outer) for outer in parts):
            parts.append(path)
    if parts or tried in BY_TYPE or not read:
        return parts
    steps = read[0].split(".")
    above = (".".join(steps[:count]) for count in range(1, len(steps) + 1))
    return [next(path for path in above if path == read[0] or not any(_within(other, path) for other in left))]


def _within(path: str, outer: str) -> bool:
    """Whether a module is another one or a part of it."""
    return not outer or f"{path}.".startswith(f"{outer}.")
