"""Which family reads which model, and how to add one from outside."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from itertools import chain

from locater.errors import LocaterError
from locater.heads import timm, torch_mha
from locater.heads.layer import AttentionLayer
from locater.heads.named import examples, layers_by_name
from locater.heads.readers import Config, Source, open_source
from locater.heads.weights import Weights

Reader = Callable[[Weights, Config], Iterator[AttentionLayer]]
OWN = "locater"  # models that `locater train` saves; read by the package that makes them

FAMILIES = tuple(
    import_module(f"locater.heads.{name}")
    for name in (
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
        "vit",
        "whisper",
        "xlnet",
    )
)
_readers: dict[str, Reader] = {model_type: family.layers for family in FAMILIES for model_type in family.MODEL_TYPES}


def register(model_types: str | Iterable[str], layers: Reader) -> None:
    """Teach Locater an architecture: `layers(weights, config)` yields one `AttentionLayer` per attention layer.

    `model_types` are values of `model_type` in config.json; a name that is taken is replaced. docs/add-a-family.md.
    """
    for model_type in [model_types] if isinstance(model_types, str) else model_types:
        _readers[model_type] = layers


def families() -> tuple[str, ...]:
    """Every `model_type` that can be read."""
    return tuple(sorted(_readers))


def attention_layers(
    source: Source, *, query: str | None = None, key: str | None = None, heads: int | None = None, kv_heads: int | None = None
) -> Iterator[AttentionLayer]:
    """Every attention layer of a model or a checkpoint, one at a time; tensors are read when a layer is used.

    >>> from torch import nn
    >>> [layer.name for layer in attention_layers(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2))]
    ['layers.0.self_attn', 'layers.1.self_attn']
    """
    weights, config = open_source(source)
    yield from layers_of(weights, config, query=query, key=key, heads=heads, kv_heads=kv_heads)


def layers_of(
    weights: Weights,
    config: Config,
    *,
    query: str | None = None,
    key: str | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
) -> Iterator[AttentionLayer]:
    """The same, from an opened source."""
    if query or key:
        if not (query and key):
            raise LocaterError("--query and --key go together: name both tensors")
        count = heads or config.get("num_attention_heads") or config.get("n_head")
        if not count:
            raise LocaterError(f"{weights.where}: the number of heads is not in the tensors: add --heads N")
        return layers_by_name(weights, query, key, count, kv_heads)
    if heads is not None:
        known = config.get("num_attention_heads") or config.get("n_head")
        if known is not None and known != heads:
            raise LocaterError(f"{weights.where}: --heads {heads}, but its configuration says {known}: leave --heads out")
        config = {**config, "num_heads": heads}
    return reader_for(weights, config)(weights, config)


def reader_for(weights: Weights, config: Config) -> Reader:
    model_type = config.get("model_type")
    if model_type == OWN and model_type not in _readers:
        import_module("locater.train.model")  # registers it
    if model_type in _readers:
        return _readers[model_type]
    readers: list[Reader] = []  # a module without a configuration is known by its parts, and may hold several kinds
    if any(re.fullmatch(torch_mha.PATTERN, name) for name in weights.names()):
        readers.append(torch_mha.layers)
    if model_type is None and timm.recognises(weights):
        readers.append(timm.layers)
    if readers:
        return lambda weights, config: chain.from_iterable(read(weights, config) for read in readers)
    raise LocaterError(_unknown(weights, model_type))


def _unknown(weights: Weights, model_type: str | None) -> str:
    if not _may_hold_attention(weights):
        return f"{weights.where}: no attention found; it holds {examples(weights)}"
    what = (
        f"model_type {model_type!r} is not a known architecture"
        if model_type
        else "no config.json with a model_type tells its architecture"
    )
    wrapped = any(".base_layer." in name or ".parametrizations." in name for name in weights.names())
    hint = "Adapters or parametrizations wrap its maps: merge them first. " if wrapped else ""
    return (
        f"{weights.where}: {what} (docs/families.md lists {len(families())}). It holds {examples(weights)}. {hint}"
        "Put its config.json beside it, name its tensors with --query 'PATTERN' --key 'PATTERN' --heads N (* for the layer number), "
        "or describe it with locater.register()"
    )


def _may_hold_attention(weights: Weights) -> bool:
    words = re.compile(r"attn|attention|q_proj|k_proj|qkv|query|(^|\.)w?[qk](\.|$)", re.IGNORECASE)
    return any(words.search(name) for name in weights.names())
