"""Configurations of small models that have the attention of a large one.

Width, heads, head size, positions and norms stay as they are, so that names and rows of the small model are those of
the large one. Layers, vocabulary, MLPs, experts and pictures get fewer or smaller. Whether attention really stayed as
it was is checked on the models themselves (`carried_layouts`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from locater.torch_private import settings_of_single_layers

DEPTH = re.compile(r"(\w+_)?layers|n_layer|num_blocks|depth")
NO_DEPTH = re.compile(
    r".*(max_window|shared|nextn|mtp|dense|every_n|feat_extract|conv|adapter|residual|lstm|sparse|global|full_attention"
    r"|postnet|prenet|predict|wavenet|proj|per_stack|feature|hidden_layer$).*"
)
MLP = re.compile(r"\w*(intermediate_size(_mlp)?|ffn_dim|ffn_hidden_size|d_ff|dff|dim_ff|n_inner|feedforward|mlp_dim)")
EXPERTS = re.compile(r"(moe_)?(num|n)_(local_|routed_)?experts")
CHOSEN_EXPERTS = re.compile(r"num_experts_per_tok(en)?|moe_(top_?)?k|top_k_experts")
GROUPS = ("n_group", "topk_group", "num_expert_group")
VOCABULARY = re.compile(r"\w*vocab_size(_per_layer_input)?")
TOKEN = re.compile(r"\w*token_(id|index)s?|im_\w+_id")
OTHER_PARTS = re.compile(r"mlp|moe|ffn|expert|intermediate|sparsity")  # lists of these do not tell kinds of attention
DEEP, WORDS, WIDE, EXPERT_COUNT, FRAMES = 3, 512, 128, 4, 32  # what is left
PATCHES = 4  # of a picture, in each direction


@dataclass(frozen=True)
class Reduction:
    """What is made smaller."""

    layers: int | None  # layers that are left of each stack, at least; None: all
    by_lists: bool = True  # choose layers by the lists of a configuration that have an entry per layer
    words: bool = True
    mlp: bool = True
    experts: bool = True
    pictures: bool = True  # and sounds


CUTS = (
    Reduction(DEEP),
    Reduction(DEEP, pictures=False),
    Reduction(DEEP, pictures=False, experts=False),
    Reduction(DEEP, pictures=False, experts=False, mlp=False),
    Reduction(DEEP, pictures=False, experts=False, mlp=False, words=False),
    Reduction(None, pictures=False, experts=False, mlp=False, words=False),
)
PICTURE_SETTINGS = {"image_size", "max_source_positions"}


def small_config(config: Any, cut: Reduction) -> Any:
    """A copy of a configuration of transformers, made smaller."""
    small = copy.deepcopy(config)
    tokens: dict[int, int] = {}  # special tokens in the small vocabulary
    for part in parts(small):
        settings = vars(part)
        names = {stored: name for name, stored in getattr(part, "attribute_map", {}).items()}
        if cut.layers is not None:
            _fewer_layers(settings, names, cut.layers, cut.by_lists)
        for name, value in list(settings.items()):
            if type(value) is int:
                settings[name] = _smaller(name, value, cut)
            if cut.words and TOKEN.fullmatch(name):
                settings[name] = _small_token(value, tokens)
        if cut.pictures:
            _smaller_pictures(settings)
    return small


def parts(config: Any) -> Iterator[Any]:
    """A configuration and those inside it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from parts(value)


def changed_settings(one: Any, other: Any) -> set[str]:
    """Names of the settings that differ between two configurations of one form."""
    names: set[str] = set()
    for a, b in zip(parts(one), parts(other), strict=True):
        names |= {name for name, value in vars(a).items() if _plain(value) and vars(b).get(name) != value}
    return names


def _plain(value: Any) -> bool:
    return isinstance(value, int | float | str | list | tuple | None)


def _smaller(name: str, value: int, cut: Reduction) -> int:
    if cut.words and VOCABULARY.fullmatch(name):
        return min(value, WORDS)
    if cut.mlp and MLP.fullmatch(name):
        return min(value, WIDE)
    if cut.experts and EXPERTS.fullmatch(name):
        return min(value, EXPERT_COUNT)
    if cut.experts and CHOSEN_EXPERTS.fullmatch(name):
        return min(value, 2)
    if cut.experts and name in GROUPS:
        return min(value, 1)
    if cut.pictures and name == "max_source_positions":
        return min(value, FRAMES)
    return value


def _small_token(value: Any, tokens: dict[int, int]) -> Any:
    """A special token in the small vocabulary; different tokens stay different."""
    if isinstance(value, list | tuple):
        return [_small_token(x, tokens) for x in value]
    if type(value) is not int or value < WORDS - 100:
        return value
    return tokens.setdefault(value, WORDS - 1 - len(tokens) % 99)


def _smaller_pictures(settings: dict[str, Any]) -> None:
    patch, size = settings.get("patch_size"), settings.get("image_size")
    if type(patch) is int and type(size) is int and size > PATCHES * patch:
        settings["image_size"] = PATCHES * patch


def _fewer_layers(settings: dict[str, Any], names: dict[str, str], count: int, by_lists: bool) -> None:
    """The first layers of each stack; or, where lists have an entry per layer, some of each kind."""
    stages = settings.get("depths")
    if isinstance(stages, list | tuple):
        settings["depths"] = [min(depth, count) for depth in stages]
        return
    depths = {
        name: value
        for name, value in settings.items()
        if type(value) is int and value > count and _is_depth(name, names.get(name, ""))
    }
    for depth in set(depths.values()):
        lists = {
            name: value
            for name, value in settings.items()
            if isinstance(value, list | tuple) and len(value) == depth and not TOKEN.fullmatch(name)
        }
        own = settings_of_single_layers(settings)
        telling = {**lists, "": [own.get(at) for at in range(depth)]} if own else lists
        chosen = _chosen_layers(depth, telling, count) if by_lists else range(count)
        for name, value in lists.items():
            settings[name] = [value[at] for at in chosen]
        kept = {to: own[at] for to, at in enumerate(chosen) if at in own}
        own.clear()
        own.update(kept)
        settings.update({name: len(chosen) for name, value in depths.items() if value == depth})


def _is_depth(name: str, alias: str) -> bool:
    return any(DEPTH.fullmatch(x) and not NO_DEPTH.fullmatch(x) for x in (name, alias) if x)


def _chosen_layers(depth: int, lists: Mapping[str, Sequence[Any]], count: int) -> Sequence[int]:
    """The first layer, and of each kind the first two others: two layers tell what is the same in all."""
    telling = [value for name, value in lists.items() if not OTHER_PARTS.search(name)]
    kinds: dict[str, list[int]] = {}
    for at in range(1, depth):
        kinds.setdefault(repr([value[at] for value in telling]), []).append(at)
    chosen = sorted({0, *(at for places in kinds.values() for at in places[:2])})
    return chosen if len(kinds) > 1 else range(min(count, depth))
