"""Which family reads which model, and how to add one from outside."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from itertools import chain

from locater.checkpoints.settings import CheckedConfig, remedy
from locater.checkpoints.sources import Config, Source, config_of, open_source
from locater.checkpoints.weights import ModuleWeights, Weights
from locater.errors import LocaterError, first_line
from locater.families import own, timm, torch_mha
from locater.families.build import check_layer, integer
from locater.families.by_name import examples, layers_by_name
from locater.families.coverage import folded_paths, unread
from locater.families.layer import AttentionLayer

Reader = Callable[[Weights, Config], Iterator[AttentionLayer]]

FAMILIES = tuple(
    import_module(f"locater.families.{name}")
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
BUILT_IN: dict[str, Reader] = {model_type: family.layers for family in FAMILIES for model_type in family.MODEL_TYPES}
_readers: dict[str, Reader] = {**BUILT_IN, **dict.fromkeys(own.MODEL_TYPES, own.layers)}


def register(model_types: str | Iterable[str], layers: Reader) -> None:
    """Teach Locater an architecture: `layers(weights, config)` yields one `AttentionLayer` per attention layer.

    `model_types` are values of `model_type` in config.json; a name that is taken is replaced. What such a reader leaves
    out, and what it makes of the configuration, is its own affair: neither is checked. Of the layers that it makes of a
    checkpoint, gains, biases and numbers are: they have to fit the maps. docs/add-a-family.md.
    """
    for model_type in [model_types] if isinstance(model_types, str) else model_types:
        _readers[model_type] = layers


def families() -> tuple[str, ...]:
    """Every `model_type` that can be read: those of docs/families.md, those of `locater train`, and what was
    registered.
    """
    return tuple(sorted(_readers))


def attention_layers(
    source: Source,
    *,
    query: str | None = None,
    key: str | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
) -> list[AttentionLayer]:
    """Every attention layer of a model or a checkpoint. Maps stay where they are until a layer is used; only gains and
    biases are read.

    >>> from torch import nn
    >>> layers = attention_layers(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2))
    >>> len(layers), layers[0].name
    (2, 'layers.0.self_attn')
    """
    weights, config = open_source(source)
    return layers_of(weights, config, query=query, key=key, heads=heads, kv_heads=kv_heads)


def layers_of(
    weights: Weights,
    config: Config,
    *,
    query: str | None = None,
    key: str | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
) -> list[AttentionLayer]:
    """The same, from an opened source. Refused where only a part of what looks like attention can be read."""
    for option, count in (("--heads", heads), ("kv_heads", kv_heads)):
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise LocaterError(f"{weights.where}: {option} {count!r} is not a positive whole number")
    if query or key:
        return _named(weights, config, query, key, heads, kv_heads)
    reader = reader_for(weights, config)
    model_type = config.get("model_type")
    trusted = model_type in _readers and _readers[model_type] is not BUILT_IN.get(model_type)
    if not trusted and (model_type in BUILT_IN or (model_type is None and not isinstance(weights, ModuleWeights))):
        config = CheckedConfig(_with_heads(weights, config, heads), weights.where, remedy(weights))
    else:
        config = _with_heads(weights, config, heads)
    layers = _read(reader, weights, config)
    _expect_heads(weights, layers, heads, kv_heads)
    names = [layer.name for layer in layers]
    left = [] if trusted else unread(weights, names, config.get("num_hidden_layers"))
    if left:
        raise LocaterError(f"{weights.where}: {_partly(weights, names, left)}")
    return layers


def _read(reader: Reader, weights: Weights, config: Config) -> list[AttentionLayer]:
    """Families take the values of config.json for what they should be; where one of a checkpoint is not, the file is at
    fault.
    """
    on_disk = not isinstance(weights, ModuleWeights)
    try:
        layers = list(reader(weights, config))
        for layer in layers if on_disk else ():
            check_layer(weights, layer)
    except LocaterError as error:
        said = str(error)
        raise LocaterError(said if said.startswith(weights.where) else f"{weights.where}: {said}") from None
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        if not on_disk:
            raise
        raise LocaterError(
            f"{weights.where}: its configuration (model_type {config.get('model_type')!r}) cannot be read as expected "
            f"({type(error).__name__}: {first_line(error)}): {remedy(weights)}"
        ) from error
    return layers


def _named(
    weights: Weights, config: Config, query: str | None, key: str | None, heads: int | None, kv_heads: int | None
) -> list[AttentionLayer]:
    """Layers whose tensors the user named; of a known architecture the configuration has the last word on the number of
    heads.
    """
    if not (query and key):
        raise LocaterError("--query and --key go together: name both tensors")
    told = next((name for name in ("num_attention_heads", "n_head") if config.get(name) is not None), None)
    if heads is None and told is None:
        raise LocaterError(f"{weights.where}: the number of heads is not in the tensors: add --heads N")
    if told is not None and (heads is None or config.get("model_type") in BUILT_IN):
        count = integer(config, weights, told)
        if heads is not None and heads != count:
            raise LocaterError(_contradiction(weights, f"--heads {heads}", f"{told} = {count}"))
        heads = count
    assert heads is not None
    count = heads
    return _read(lambda weights, config: layers_by_name(weights, query, key, count, kv_heads), weights, config)


def _with_heads(weights: Weights, config: Config, heads: int | None) -> Config:
    """The number of heads for PyTorch's own and timm's attention, whose tensors do not tell it."""
    if heads is None or config.get("model_type") in BUILT_IN.keys() - {*torch_mha.MODEL_TYPES, *timm.MODEL_TYPES}:
        return config
    args = config.get("model_args")
    for held in (config, args if isinstance(args, Mapping) else {}):
        for name in ("num_heads", "nhead", "num_attention_heads"):
            if held.get(name) not in (None, heads):
                raise LocaterError(_contradiction(weights, f"--heads {heads}", f"{name} = {held[name]}"))
    return {**config, "num_heads": heads}


def _expect_heads(weights: Weights, layers: list[AttentionLayer], heads: int | None, kv_heads: int | None) -> None:
    """An option that the source contradicts was not used, so it is refused."""
    for option, count, attribute in (("--heads", heads, "heads"), ("kv_heads", kv_heads, "kv_heads")):
        other = next((layer for layer in layers if count not in (None, getattr(layer, attribute))), None)
        if other is not None:
            raise LocaterError(
                _contradiction(
                    weights, f"{option} {count}", f"{getattr(other, attribute)} for {other.name or 'itself'}"
                )
            )


def _contradiction(weights: Weights, given: str, told: str) -> str:
    return f"{weights.where}: {given} was given, but the model says {told}: leave the option out"


def reader_for(weights: Weights, config: Config) -> Reader:
    model_type = config.get("model_type")
    if model_type in _readers:
        return _readers[model_type]
    readers: list[Reader] = []  # a module without a configuration is known by its parts, and may hold several kinds
    read: list[str] = []
    if stems := torch_mha.stems(weights):
        readers.append(torch_mha.layers)
        read += stems
    if model_type is None and (stems := timm.stems(weights)):
        readers.append(timm.layers)
        read += stems
    read = [stem.removesuffix(".") for stem in read]
    left = unread(weights, read)
    if readers and not left:
        return lambda weights, config: chain.from_iterable(read(weights, config) for read in readers)
    raise LocaterError(_unknown(weights, model_type, read, left))


def _unknown(weights: Weights, model_type: str | None, read: list[str], left: list[str]) -> str:
    if not left and not _may_hold_attention(weights):
        return f"{weights.where}: no attention found; it holds {examples(weights)}"
    what = (
        f"model_type {model_type!r} is not a known architecture"
        if model_type
        else "no config.json with a model_type tells its architecture"
    )
    start = f"{weights.where}: {what} (docs/families.md lists {len(BUILT_IN)}). "
    if read:
        return start + _partly(weights, read, left)
    wrapped = any(".base_layer." in name or ".parametrizations." in name for name in weights.names())
    hint = "Adapters or parametrizations wrap its maps: merge them first. " if wrapped else ""
    first = "" if model_type else "Put its config.json beside it, or: "
    return f"{start}It holds {examples(weights)}. {hint}{first}{_ways_out(weights, read, left)}"


def _partly(weights: Weights, read: list[str], left: list[str]) -> str:
    """Why a model of which only a part can be read is refused."""
    return (
        f"Only a part of its attention can be read ({folded_paths(read, 2)}), and a part is never given as the whole. "
        f"Not read: {folded_paths(left)}. {_ways_out(weights, read, left)}"
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
    or, where the model is of none, a path that holds only what was read."""
    parts: list[str] = []
    tried = config_of(weights.module).get("model_type")  # a part of this type is read as the whole was
    for path, module in weights.modules().items():
        kind = getattr(getattr(module, "config", None), "model_type", None)
        whole = (
            path not in read
            and all(_within(name, path) for name in read)
            and not any(_within(name, path) for name in left)
        )
        if path and kind in _readers and (kind != tried or whole) and not any(_within(path, outer) for outer in parts):
            parts.append(path)
    if parts or tried in _readers or not read:
        return parts
    steps = read[0].split(".")
    above = (".".join(steps[:count]) for count in range(1, len(steps) + 1))
    return [next(path for path in above if path == read[0] or not any(_within(other, path) for other in left))]


def _within(path: str, outer: str) -> bool:
    """Whether a module is another one or a part of it."""
    return not outer or f"{path}.".startswith(f"{outer}.")


def _may_hold_attention(weights: Weights) -> bool:
    words = re.compile(r"attn|attention|q_proj|k_proj|qkv|query|to_[qk](\.|$)|(^|\.)w?[qk](\.|$)", re.IGNORECASE)
    return any(words.search(name) for name in weights.names())
