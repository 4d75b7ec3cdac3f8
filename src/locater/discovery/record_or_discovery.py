"""The attention layers of a model or a checkpoint: choose its family, read it, check that no attention was left out."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

from locater.calls.attention_like import CROSS, attention_like, folded_paths, is_within, unread
from locater.discovery.example_inputs import check_example
from locater.discovery.from_config_json import discovered_on_disk
from locater.discovery.verified_search import Discovered, discovered_in
from locater.errors import LocaterError, first_line
from locater.families import timm, torch_mha, torchtitan
from locater.families.record import Found, Reader
from locater.families.registry import BUILT_IN, BY_TYPE
from locater.layers.build import check_layer, integer, named_map, shape_of
from locater.layers.layer import AttentionLayer
from locater.layers.layout import AttentionLayout, LogitsLayout
from locater.sources.config_rules import CheckedConfig, remedy
from locater.sources.open_source import Config, Source, config_of, open_source
from locater.sources.remote import session
from locater.sources.remote.prefetch import Step, planned_reads
from locater.sources.weights import ModuleWeights, Weights, natural_key, quantised_modules

# Heads of an unknown architecture: the user names the query and key tensors. Gains are not folded.


def layers_by_name(
    weights: Weights, query: str, key: str, heads: int, kv_heads: int | None = None
) -> Iterator[AttentionLayout]:
    """Layers from patterns such as `blocks.*.attn.wq.weight`; `*` stands for the same text in both.

    Weights are taken as (heads x head_dim, width), the layout of nn.Linear. Key heads are counted from the rows.
    """
    queries, keys = _matches(weights, query, "--query"), _matches(weights, key, "--key")
    for index, (where, q_name) in enumerate(
        sorted(queries.items(), key=lambda item: [natural_key(part) for part in item[0]])
    ):
        if where not in keys:
            raise LocaterError(f"{weights.where}: {q_name} has no partner that matches --key {key!r}")
        k_name = keys[where]
        q, k = (named_map(weights, name, f"{name.removesuffix('.weight')}.bias") for name in (q_name, k_name))
        (rows, width), k_shape = shape_of(weights, q_name), shape_of(weights, k_name)
        if rows % heads:
            raise LocaterError(
                f"{weights.where}: {q_name} has {rows} rows, which {heads} heads do not divide: change --heads"
            )
        head_dim = rows // heads
        groups = kv_heads or k_shape[0] // head_dim
        if groups == 0 or k_shape != (groups * head_dim, width) or heads % groups:
            raise LocaterError(
                f"{weights.where}: {k_name} has shape {list(k_shape)}, "
                f"which does not fit {heads} query heads of size {head_dim} on width {width}: change --heads"
            )
        yield AttentionLayout(
            name=q_name.removesuffix(".weight"),
            index=index,
            heads=heads,
            kv_heads=groups,
            head_dim=head_dim,
            query=q,
            key=k,
            logits=LogitsLayout(scale=head_dim**-0.5),
            kind="cross" if CROSS.search(q_name) else "self",
        )


def _matches(weights: Weights, pattern: str, option: str) -> dict[tuple[str, ...], str]:
    expression = "(.+?)".join(re.escape(part) for part in pattern.split("*"))
    names = {m.groups(): name for name in weights.names() if (m := re.fullmatch(expression, name))}
    if not names:
        raise LocaterError(f"{weights.where}: no tensor matches {option} {pattern!r}; there are {examples(weights)}")
    return names


def examples(weights: Weights, most: int = 6) -> str:
    """Some matrices of the source, the likeliest first, layer numbers folded: for error messages."""
    folded = {re.sub(r"\.\d+\.", ".*.", n): weights.shape(n) for n in weights.names() if len(weights.shape(n)) == 2}
    likely = sorted(
        folded,
        key=lambda n: (not re.search(r"(^|[._])(q|k|w[qk]|query|key|qkv|q_proj|k_proj|attn|attention)([._]|$)", n), n),
    )
    shown = [f"{name} {list(folded[name])}" for name in likely[:most]]
    return (
        ", ".join(shown) + (f" and {len(folded) - most} more" if len(folded) > most else "") if shown else "no matrices"
    )


# Messages for sources that cannot be read, or only in part: what was recognised, what was not, and what to do.


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
            and all(is_within(name, path) for name in read)
            and not any(is_within(name, path) for name in left)
        )
        if path and kind in BY_TYPE and (kind != tried or whole) and not any(is_within(path, outer) for outer in parts):
            parts.append(path)
    if parts or tried in BY_TYPE or not read:
        return parts
    steps = read[0].split(".")
    above = (".".join(steps[:count]) for count in range(1, len(steps) + 1))
    return [next(path for path in above if path == read[0] or not any(is_within(other, path) for other in left))]


NOT_MET = "its attention was not met when a copy of the model ran"
GIVE = "give inputs of the model as example={...}"
# the number of heads is a setting of the call there, and of no tensor
HEADS_UNKNOWN = {*torch_mha.FAMILY.model_types, *timm.FAMILY.model_types}


def attention_layers(
    source: Source,
    *,
    query: str | None = None,
    key: str | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    example: Mapping[str, Any] | None = None,
    download: bool = False,
) -> list[AttentionLayer]:
    """Every attention layer of a model or a checkpoint. Maps stay where they are until a layer is used; only gains and
    biases are read. A live model of an unknown architecture is run once or twice as a copy (`discover`); `example`
    holds inputs for that, where they cannot be guessed. `download` takes all of a checkpoint that is elsewhere.

    >>> from torch import nn
    >>> layers = attention_layers(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2))
    >>> len(layers), layers[0].name
    (2, 'layers.0.self_attn')
    """
    with session(keep_open=True) as remote:
        weights, config = open_source(source, download)
        reading = whole_reading(weights, config, query=query, key=key, heads=heads, kv_heads=kv_heads, example=example)
        if remote.files:  # gains and biases; maps are read when a layer is used
            remote.prefetch(planned_reads(reading.steps(())))
        return reading.layers


def layers_of(
    weights: Weights,
    config: Config,
    *,
    query: str | None = None,
    key: str | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    example: Mapping[str, Any] | None = None,
) -> list[AttentionLayer]:
    """The same, from an opened source. A source of which only a part can be read is refused."""
    return whole_reading(weights, config, query=query, key=key, heads=heads, kv_heads=kv_heads, example=example).layers


@dataclass(frozen=True)
class Reading:
    """Where the attention of a source is, and what is missing. Tensors are read when layers are built."""

    weights: Weights
    config: Config
    found: Sequence[Found]
    gaps: list[str] = field(default_factory=list)  # a line for each kind of attention that is not read in full
    whole: bool = True  # no attention is missing from the layers

    @cached_property
    def layers(self) -> list[AttentionLayer]:
        return self.build(range(len(self.found)))

    def build(self, numbers: Iterable[int]) -> list[AttentionLayer]:
        """The layers of these numbers, from the tensors as they are now."""
        with errors_named(self.weights, self.config):
            formats = quantised_modules(self.weights)
            return [self._built(self.found[number], formats) for number in numbers]

    def _built(self, item: Found, formats: Mapping[str, str]) -> AttentionLayer:
        if isinstance(item, AttentionLayer):
            layer = replace(item, quantised=formats.get(item.name))
        else:
            layer = item.build(self.weights, formats.get(item.name))
        if layer.provenance == "family" and not isinstance(self.weights, ModuleWeights):
            check_layer(self.weights, layer)
        return layer

    def steps(self, chosen: Iterable[Found]) -> Iterator[Step]:
        """What is read of the source when layers are built, then of the maps of each of `chosen`, for
        `planned_reads`.
        """
        read = self.weights.read
        layouts = [item for item in self.found if isinstance(item, AttentionLayout)]
        yield [partial(read, *tensor) for layout in layouts for tensor in layout.vectors(self.weights)]
        for item in chosen:
            if isinstance(item, AttentionLayout):
                yield [partial(read, *tensor) for tensor in item.maps(self.weights)]
            else:
                yield [item.query.weight, item.key.weight]


def whole_reading(weights: Weights, config: Config, **names: Any) -> Reading:
    """`read_source` of a source that can be read in full, with the scale of its logits; others are refused."""
    reading, where = read_source(weights, config, **names), weights.where
    if not reading.whole:
        raise LocaterError(
            f"{where}: {'; '.join(reading.gaps[:3])}. A part of its attention is never given as the whole: "
            "locater.discover(model) has what was read of it"
        )
    unscaled = next((item for item in reading.found if item.unknown_scale is not None), None)
    if unscaled is not None:
        raise LocaterError(
            f"{where}: of {unscaled.name} only the query and key maps are known, and not the scale of its "
            f"logits: {unscaled.unknown_scale} (locater.discover(model) has the layers, locater.scan(model) the rows)"
        )
    return reading


def read_source(
    weights: Weights,
    config: Config,
    *,
    query: str | None = None,
    key: str | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    example: Mapping[str, Any] | None = None,
) -> Reading:
    """The layers that can be read, and a line for each kind of attention that cannot. Only discovery leaves gaps: a
    family that reads a part is refused.
    """
    check_example(example)
    for option, count in (("--heads", heads), ("kv_heads", kv_heads)):
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise LocaterError(f"{weights.where}: {option} {count!r} is not a positive whole number")
    if query or key:
        return Reading(weights, config, _found_by_pattern(weights, config, query, key, heads, kv_heads))
    try:
        reader = reader_for(weights, config)
    except LocaterError as unknown:
        return _discovered(weights, config, example, unknown, heads, kv_heads)
    model_type = config.get("model_type")
    # a family from outside the package, or of `locater train`: not checked for what it leaves out
    trusted = isinstance(model_type, str) and BY_TYPE.get(model_type) is not BUILT_IN.get(model_type)
    if not trusted and (model_type in BUILT_IN or (model_type is None and not isinstance(weights, ModuleWeights))):
        config = CheckedConfig(_with_heads(weights, config, heads), weights.where, remedy(weights))
    else:
        config = _with_heads(weights, config, heads)
    try:
        found = _found(reader, weights, config)
    except LocaterError as unreadable:  # attention of a known form, in a model whose settings have other names
        if model_type is None or model_type in BY_TYPE:
            raise
        return _discovered(weights, config, example, unreadable, heads, kv_heads)
    if (discovered := _by_configuration(weights, config, found, example)) is not None:
        _check_counts(weights, discovered.found, heads, kv_heads)
        return discovered
    found, gaps = _with_norms(weights, found, example)
    _check_counts(weights, found, heads, kv_heads)
    names = [item.name for item in found]
    left = [] if trusted else unread(weights, names, config.get("num_hidden_layers"))
    if left:
        raise LocaterError(f"{weights.where}: {only_a_part(weights, names, left)}")
    return Reading(weights, config, found, gaps)


def _discovered(
    weights: Weights,
    config: Config,
    example: Mapping[str, Any] | None,
    unknown: LocaterError,
    heads: int | None,
    kv_heads: int | None,
) -> Reading:
    """A model of an unknown architecture. Where no attention is discovered, `unknown` says what to do."""
    try:
        if isinstance(weights, ModuleWeights):
            discovered = discovered_in(weights, example)
        elif config.get("model_type") is None:
            raise unknown
        else:
            discovered = discovered_on_disk(weights, config, example)
    except LocaterError as error:
        raise unknown if error is unknown else undiscovered(weights, unknown, str(error)) from None
    if not discovered.layouts:
        raise undiscovered(weights, unknown, "; ".join(discovered.gaps)) if discovered.gaps else unknown
    _check_counts(weights, discovered.layouts, heads, kv_heads)
    return reading_of(discovered, config)


def reading_of(discovered: Discovered, config: Config) -> Reading:
    return Reading(discovered.weights, config, discovered.layouts, discovered.gaps, discovered.whole)


def _by_configuration(
    weights: Weights, config: Config, found: Sequence[Found], example: Mapping[str, Any] | None
) -> Reading | None:
    """A checkpoint whose attention was known by the form of its tensors, as discovery reads it from config.json, where
    the norm in front is not known otherwise; None where that does not serve.
    """
    known = config.get("model_type") in (None, *BY_TYPE)
    if isinstance(weights, ModuleWeights) or known or all(item.unknown_norm is None for item in found):
        return None
    try:
        discovered = discovered_on_disk(weights, config, example)
    except LocaterError:
        return None
    return reading_of(discovered, config) if discovered.layouts else None


def _with_norms(
    weights: Weights, found: list[Found], example: Mapping[str, Any] | None
) -> tuple[list[Found], list[str]]:
    """The layers, those without a known norm in front as discovery reads them, and a line for each reason why a norm is
    still not known.
    """
    if all(item.unknown_norm is None for item in found):
        return found, []
    discovered, missing = Discovered([], [], [], weights), ""
    if isinstance(weights, ModuleWeights):
        try:
            discovered = discovered_in(weights, example)
        except LocaterError as error:
            missing = str(error).removeprefix(f"{weights.where}: ")
    whole = [other for item in found for other in _as_discovered(item, discovered)]
    reasons: dict[str, list[str]] = {}
    for item in whole:
        if item.unknown_norm is not None:
            why = _why(weights, item, discovered, missing)
            reasons.setdefault(why, []).append(item.name)
    return [replace(item, index=index) for index, item in enumerate(whole)], [
        f"{folded_paths(names, most=None)}: {why}" for why, names in reasons.items()
    ]


def _as_discovered(item: Found, discovered: Discovered) -> Sequence[Found]:
    """A layer as it was discovered, once for each way in which the model calls it. The output map stays that of the
    record, which knows what multiplies it (layer scale).
    """
    if item.unknown_norm is None or isinstance(item, AttentionLayer):
        return [item]
    others = [other for other in discovered.layouts if other.name == item.name and other.unknown_scale is None]
    known = [(item.out, other.value) if other.out and item.out else (None, None) for other in others]
    return [replace(other, out=out, value=value) for other, (out, value) in zip(others, known, strict=True)] or [item]


def _why(weights: Weights, item: Found, discovered: Discovered, missing: str) -> str:
    folded = "none is" if item.norm.kind == "none" else "the one that is named so is"
    start = f"the norm in front is not known, and {folded} folded in, because {item.unknown_norm}"
    if not isinstance(weights, ModuleWeights):
        return start
    reasons = [refusal.reason for refusal in discovered.refused if refusal.name == item.name]
    reasons += [other.unknown_scale for other in discovered.layouts if other.name == item.name and other.unknown_scale]
    return f"{start}, and {next(iter(reasons), missing or NOT_MET)}: {GIVE}"


def reader_for(weights: Weights, config: Config) -> Reader:
    """The reader of a source: that of its family, or, without a known type, those of the attention that it holds."""
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in BY_TYPE:
        return BY_TYPE[model_type].layers
    readers: list[Reader] = []  # a module without a configuration is known by its parts, and may hold several kinds
    read: list[str] = []
    if stems := torch_mha.stems(weights):
        readers.append(torch_mha.layers)
        read += stems
    if model_type is None and (stems := timm.stems(weights)):
        readers.append(timm.layers)
        read += stems
    if model_type is None and (stems := torchtitan.stems(weights)):
        readers.append(torchtitan.layers)
        read += stems
    read = [stem.removesuffix(".") for stem in read]
    left = unread(weights, read)
    if readers and not left:
        return lambda weights, config: chain.from_iterable(reader(weights, config) for reader in readers)
    raise unknown_architecture(weights, model_type, read, left)


def _found(reader: Reader, weights: Weights, config: Config) -> list[Found]:
    with errors_named(weights, config):
        return list(reader(weights, config))


@contextlib.contextmanager
def errors_named(weights: Weights, config: Config) -> Iterator[None]:
    """Families take the values of config.json as they are. An error that a bad value causes names the checkpoint."""
    try:
        yield
    except LocaterError as error:
        message = str(error)
        if message.startswith(weights.where):
            raise
        raise LocaterError(f"{weights.where}: {message}") from None
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        if isinstance(weights, ModuleWeights):
            raise
        raise LocaterError(
            f"{weights.where}: its configuration (model_type {config.get('model_type')!r}) cannot be read as expected "
            f"({type(error).__name__}: {first_line(error)}): {remedy(weights)}"
        ) from error


def _found_by_pattern(
    weights: Weights, config: Config, query: str | None, key: str | None, heads: int | None, kv_heads: int | None
) -> list[Found]:
    """Layers whose tensors the user named. For a known architecture the configuration decides the number of heads."""
    if not (query and key):
        raise LocaterError("--query and --key go together: name both tensors")
    setting = next((name for name in ("num_attention_heads", "n_head") if config.get(name) is not None), None)
    if heads is None and setting is None:
        raise LocaterError(f"{weights.where}: the number of heads is not in the tensors: add --heads N")
    if setting is not None and (heads is None or config.get("model_type") in BUILT_IN):
        count = integer(config, weights, setting)
        if heads is not None and heads != count:
            raise LocaterError(contradiction(weights, f"--heads {heads}", f"{setting} = {count}"))
        heads = count
    assert heads is not None
    count = heads
    return _found(lambda weights, config: layers_by_name(weights, query, key, count, kv_heads), weights, config)


def _with_heads(weights: Weights, config: Config, heads: int | None) -> Config:
    """The configuration with the number of heads that the user gave, where no tensor tells it."""
    if heads is None or config.get("model_type") in BUILT_IN.keys() - HEADS_UNKNOWN:
        return config
    args = config.get("model_args")
    for settings in (config, args if isinstance(args, Mapping) else {}):
        for name in ("num_heads", "nhead", "num_attention_heads"):
            if settings.get(name) not in (None, heads):
                raise LocaterError(contradiction(weights, f"--heads {heads}", f"{name} = {settings[name]}"))
    return {**config, "num_heads": heads}


def _check_counts(weights: Weights, found: Sequence[Found], heads: int | None, kv_heads: int | None) -> None:
    """Refuse options that the source contradicts: they were not used."""
    for option, count, attribute in (("--heads", heads, "heads"), ("kv_heads", kv_heads, "kv_heads")):
        other = next((item for item in found if count not in (None, getattr(item, attribute))), None)
        if other is not None:
            in_model = f"{getattr(other, attribute)} for {other.name or 'itself'}"
            raise LocaterError(contradiction(weights, f"{option} {count}", in_model))
