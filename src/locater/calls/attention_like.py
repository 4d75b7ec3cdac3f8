"""Modules that look like attention, so that no part of a model is read as the whole of it.

A reader knows the attention that it knows. The rest of a model, a second tower or layers of another kind, would be left
out unnoticed. So this module searches once more for attention, by the names of tensors (a query map beside a key map,
or one map for both) and, in a live model, by class. Modules that no layer was read from are named.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache

from torch import nn

from locater.sources.weights import ModuleWeights, Weights, natural_key

BEFORE = r"(?:to_|w_?|add_|lin_|linear_|proj_|attn_|in_proj_)?"
AFTER = r"(?:_?(?:a|b|proj|projs|projection|lin|linear|layer|dense|conv|map|weight|heads?|fc))*"
QUERY = re.compile(rf"({BEFORE})(q|query|queries)({AFTER})", re.IGNORECASE)
PARTNERS = {"q": ("k", "kv", "kv_b"), "query": ("key", "key_value"), "queries": ("keys",)}
FUSED = re.compile(rf"{BEFORE}qkv{AFTER}|query_key_value|c_attn|in_proj_weight", re.IGNORECASE)
NAMED_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
CROSS = re.compile(r"cross|encoder_att|enc_dec|encdec|multihead_attn", re.IGNORECASE)  # names of cross-attention
HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_attn_heads", "nhead", "heads")
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a path that is a number
SHOWN = 4  # kinds of unread modules that a message names


def attention_like(weights: Weights) -> list[str]:
    """Paths of modules that look like attention, in order; the source itself has the path ""."""
    paths = set(_by_tensors(weights))
    if isinstance(weights, ModuleWeights):
        paths |= set(_by_class(weights, paths))
    return sorted(paths, key=natural_key)


def unread(weights: Weights, read: Iterable[str], deep: int | None = None) -> list[str]:
    """The modules of `attention_like` that are not in `read`, neither themselves nor a part of them nor a module around
    them.

    Layers of a checkpoint beyond the number `deep` of its configuration are not counted: they predict further tokens,
    and the model does not run them.
    """
    read = set(read)
    if "" in read:
        return []
    above = {
        path[:at] for path in read for at in _part_ends(path)
    }  # every path on the way to what was read, itself too
    stays = [
        path
        for path in attention_like(weights)
        if path not in above and not any(path[:at] in read for at in _part_ends(path))
    ]
    if isinstance(weights, ModuleWeights):  # one module under two names is one module
        modules = weights.modules()
        known = {id(modules.get(path)) for path in read}
        return [path for path in stays if path not in modules or id(modules[path]) not in known]
    if deep is None:
        return stays
    stacks = {_number(path)[0] for path in read}
    return [path for path in stays if _number(path)[0] not in stacks or _number(path)[1] < deep]


def folded_paths(paths: Sequence[str], most: int | None = SHOWN) -> str:
    """For a message: paths that differ in layers' numbers folded into one with *, with how many there are; of kinds of
    paths the first `most`, all with None.

    >>> folded_paths(["text.0.attn", "text.1.attn", "image.attn", "audio.3.attn"])
    'text.*.attn (2), image.attn, audio.3.attn'
    """
    kinds: dict[str, list[str]] = {}
    for path in paths:
        kinds.setdefault(NUMBER.sub("*", path), []).append(path or "the model itself")
    shown = [some[0] if len(some) == 1 else f"{name} ({len(some)})" for name, some in kinds.items()][:most]
    return ", ".join(shown) + (f" and {len(kinds) - len(shown)} more kinds" if len(kinds) > len(shown) else "")


def is_within(path: str, outer: str) -> bool:
    """Whether a module is another one or a part of it."""
    return not outer or f"{path}.".startswith(f"{outer}.")


def _part_ends(path: str) -> Iterator[int]:
    """Where the leading parts of a path end, the whole path last."""
    yield from (match.start() for match in re.finditer(r"\.", path))
    yield len(path)


def _by_tensors(weights: Weights) -> Iterator[str]:
    names = weights.names()
    for name in names:
        for path, partners in _places(name):
            if len(weights.shape(name)) > 1 and (not partners or any(partner in names for partner in partners)):
                yield path


@lru_cache(maxsize=1 << 16)
def _places(name: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(path of the attention that a tensor may belong to, names of which one must be there too); a fused map needs
    none.
    """
    places: list[tuple[str, tuple[str, ...]]] = []
    parts = name.split(".")
    for at, part in enumerate(parts):
        path, rest = ".".join(parts[:at]), parts[at + 1 :]
        if FUSED.fullmatch(part):
            places.append((path, ()))
        elif match := QUERY.fullmatch(part):
            before, word, after = match.groups()
            others = [_with_case_of(partner, word) for partner in PARTNERS[word.lower()]]
            places.append((path, tuple(".".join([*parts[:at], f"{before}{other}{after}", *rest]) for other in others)))
    return tuple(places)


def _with_case_of(word: str, like: str) -> str:
    return word.capitalize() if like[0].isupper() else word


def _by_class(weights: ModuleWeights, known: Collection[str]) -> Iterator[str]:
    """Modules called attention that have a number of heads and two maps or more, unless one of the
    modules `known` is inside.
    """
    above = {path[:at] for path in known for at in _part_ends(path)}
    for path, module in weights.modules().items():
        if (
            path not in above
            and NAMED_ATTENTION.search(type(module).__name__)
            and _has_heads(module)
            and _count_maps(module) > 1
        ):
            yield path


def _has_heads(module: nn.Module) -> bool:
    return any(isinstance(getattr(module, name, None), int) for name in HEADS)


def _count_maps(module: nn.Module) -> int:
    return sum(parameter.ndim == 2 for parameter in module.parameters())


def _number(path: str) -> tuple[str, int]:
    """A path with its first number taken out, and that number; -1 where there is none."""
    match = NUMBER.search(path)
    return (path, -1) if match is None else (f"{path[: match.start()]}*{path[match.end() :]}", int(match[0]))
