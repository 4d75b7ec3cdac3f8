"""Messages for sources that cannot be read, or only in part: what was recognised, what was not, and what to do."""

from __future__ import annotations

import re

from locater.checkpoints.sources import config_of
from locater.checkpoints.weights import ModuleWeights, Weights
from locater.families.by_name import examples
from locater.families.coverage import folded_paths
from locater.families.registry import BUILT_IN, BY_TYPE

ATTENTION_WORDS = re.compile(r"attn|attention|q_proj|k_proj|qkv|query|to_[qk](\.|$)|(^|\.)w?[qk](\.|$)", re.IGNORECASE)


def contradiction(weights: Weights, option: str, in_model: str) -> str:
    """Of an option that the model contradicts."""
    return f"{weights.where}: {option} was given, but the model says {in_model}: leave the option out"


def unknown_architecture(weights: Weights, model_type: str | None, read: list[str], left: list[str]) -> str:
    """Of a source without a known type; `read` and `left` are paths of attention that can and cannot be read."""
    if not left and not any(ATTENTION_WORDS.search(name) for name in weights.names()):
        return f"{weights.where}: no attention found; it holds {examples(weights)}"
    reason = (
        f"model_type {model_type!r} is not a known architecture"
        if model_type
        else "no config.json with a model_type tells its architecture"
    )
    start = f"{weights.where}: {reason} (docs/families.md lists {len(BUILT_IN)}). "
    if read:
        return start + only_a_part(weights, read, left)
    wrapped = any(".base_layer." in name or ".parametrizations." in name for name in weights.names())
    hint = "Adapters or parametrizations wrap its maps: merge them first. " if wrapped else ""
    first = "" if model_type else "Put its config.json beside it, or: "
    return f"{start}It holds {examples(weights)}. {hint}{first}{_ways_out(weights, read, left)}"


def only_a_part(weights: Weights, read: list[str], left: list[str]) -> str:
    """Of a model of which only a part can be read."""
    return (
        f"Only a part of its attention can be read ({folded_paths(read, 2)}), and a part is never given as the whole. "
        f"Not read: {folded_paths(left, most=None)}. {_ways_out(weights, read, left)}"
    )


def _ways_out(weights: Weights, read: list[str], left: list[str]) -> str:
    """What to do about attention that is not read; of a live model, a part that can be scanned on its own."""
    named = "--query 'PATTERN' --key 'PATTERN' --heads N (* for the layer number)"
    others = f"Name its tensors with {named}, or describe it with locater.register()"
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
