"""Every known `Family` by model type, and how to add one from outside."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from torch import nn

from locater.errors import LocaterError
from locater.families.record import Block, Family
from locater.registry import Registry
from locater.sources.open_source import config_of

FILES = (
    "albert",
    "bart",
    "bert",
    "bloom",
    "clip",
    "cohere",
    "deberta_v2",
    "deepseek",
    "dinov2",
    "distilbert",
    "falcon",
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "granite",
    "llama",
    "mpnet",
    "olmo2",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "siglip",
    "stablelm",
    "starcoder2",
    "t5",
    "timm",
    "torch_mha",
    "torchtitan",
    "vit",
    "whisper",
    "xlnet",
)
BY_TYPE: Registry[Family] = Registry("model type", replaceable=True, group="families")
BY_TYPE.load("locater.families", FILES, "FAMILY", lambda family: family.model_types)
FAMILIES, BUILT_IN = BY_TYPE.entries(), dict(BY_TYPE)


def register(family: Family) -> Family:
    """Teach Locater an architecture; a model type that is known already is replaced. docs/add-a-family.md.

    The attention layers that a registered family leaves out are left out of a scan: only the families of the package
    are checked for attention that they did not read, and for settings that no model can have. Gains, biases and numbers
    of the layers that it reads from a checkpoint have to fit their maps, as for all.
    """
    if not isinstance(family, Family):
        raise LocaterError(
            f"register: {family!r:.60} is no Family: locater.register(locater.Family(model_types, layers))"
        )
    return BY_TYPE.add(family, *family.model_types)


def families() -> tuple[str, ...]:
    """Every `model_type` that can be read: those of docs/families.md, those of `locater train`, and registered ones."""
    return tuple(sorted(BY_TYPE.names()))


def family_of(model: nn.Module) -> Family | None:
    """The family of a live model, by the type in its configuration."""
    return BY_TYPE.get(config_of(model).get("model_type", ""))


def block_of(model: nn.Module) -> Block | None:
    """Where the parts of a live model's blocks are; None where its family does not say."""
    family = family_of(model)
    return None if family is None else family.block_for(config_of(model))


def recognised(module: nn.Module) -> Family | None:
    """The family of an attention module that is known by its class."""
    recognising = _recognising(BY_TYPE.changes)
    return next((family for family, recognises in recognising if recognises(module)), None)


@lru_cache(maxsize=1)
def _recognising(changes: int) -> list[tuple[Family, Callable[[nn.Module], bool]]]:
    """The families that know modules by their class; asked for every module, so not looked for each time."""
    return [(family, family.recognises) for family in BY_TYPE.entries() if family.recognises is not None]
