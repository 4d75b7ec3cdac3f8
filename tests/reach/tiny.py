"""A tiny model of a model type, with random weights, from the default configuration of its class made small.

One way of shrinking does not fit all: the gentlest change that builds and runs wins, from the smallest model down.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pkgutil
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, ResNetConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from locater.calls.attention_like import unread
from locater.discovery.example_inputs import example_inputs
from locater.errors import LocaterError, first_line
from locater.sources.weights import ModuleWeights
from tests.reach.overrides import OVERRIDES, PART_OF
from tests.reach.sizes import LAYERS, OPEN, SIZES, VOCABULARY, rotary_sections, size_of

TABLES = """MODEL_MAPPING_NAMES MODEL_FOR_CAUSAL_LM_MAPPING_NAMES MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    MODEL_FOR_PRETRAINING_MAPPING_NAMES MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES""".split()
MOST_PARAMETERS = 100_000_000
MOST_CLASSES = 4


@dataclass
class Tiny:
    """A model, and inputs that it ran on; or, without inputs, why it did not run. A type that is only a part of another
    comes as the model of that type, `whole`, and the path of the part in it.
    """

    model: PreTrainedModel
    inputs: dict[str, Tensor] | None
    problem: str = ""
    whole: str = ""
    part: str = ""


def model_types() -> list[str]:
    """Every model type that the installed transformers has a configuration of."""
    return sorted(CONFIG_MAPPING_NAMES)


def tiny(model_type: str) -> Tiny:
    """Of the combinations of class and shrinking the first that runs and whose inputs reach all of its attention, else
    the one that reaches most of it, else the first that builds, else an error.
    """
    if model_type in PART_OF:
        whole, name = PART_OF[model_type]
        return _part(tiny(whole), whole, name)
    built: Tiny | None = None
    best: tuple[int, Tiny] | None = None  # how many modules are not reached
    problem: Exception | None = None
    for kind in model_classes(model_type)[:MOST_CLASSES]:
        for shrink in (shrunk, evened, shallow):
            if best is not None and shrink is shallow:
                continue
            try:
                model = _built(kind, _overridden(shrink(_configuration(model_type)), model_type))
            except Exception as error:
                problem = problem or error
                continue
            try:
                made = Tiny(model, example_inputs(model))
            except LocaterError as error:
                built = built or Tiny(model, None, str(error))
                continue
            missed = not_reached(made)
            if not missed:
                return made
            best = (missed, made) if best is None or missed < best[0] else best
        if best is not None:
            return best[1]
    if built is not None:
        return built
    raise LocaterError(f"{model_type}: {first_line(problem) if problem else 'no model class takes this configuration'}")


def not_reached(made: Tiny) -> int:
    """How many modules that look like attention the inputs do not reach."""
    ran: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda *_, path=path: ran.add(path))
        for path, module in made.model.named_modules()
    ]
    with torch.no_grad():
        made.model(**(made.inputs or {}))
    for hook in hooks:
        hook.remove()
    return len([path for path in unread(ModuleWeights(made.model), []) if path not in ran])


def _part(made: Tiny, whole: str, name: str) -> Tiny:
    """The first part of this name. It ran, or not: the inputs of the whole may not reach it."""
    part = next((path for path, _ in made.model.named_modules() if path.split(".")[-1] == name), None)
    if part is None:
        raise LocaterError(f"{whole} has no part {name}")
    ran: list[bool] = []
    if made.inputs is not None:
        hook = made.model.get_submodule(part).register_forward_hook(lambda *_: ran.append(True))
        with torch.no_grad():
            made.model(**made.inputs)
        hook.remove()
    problem = made.problem or ("" if ran else f"{part}: the inputs of {whole} do not reach it")
    return Tiny(made.model, made.inputs if ran else None, problem, whole, part)


def model_classes(model_type: str) -> list[type[PreTrainedModel]]:
    """Classes that take the configuration of a type: those of the auto classes first, then others of its file."""
    import transformers

    classes: list[Any] = []
    for table in TABLES:
        names = getattr(modeling_auto, table).get(model_type) or ()
        classes += [getattr(transformers, name, None) for name in ([names] if isinstance(names, str) else names)]
    classes += sorted(_classes_of_files(CONFIG_MAPPING[model_type]), key=_is_part)
    return list(dict.fromkeys(kind for kind in classes if kind is not None))


def _is_part(kind: type[PreTrainedModel]) -> bool:
    """Whether a class is a part of a model, by its name: whole models end in Model, or say what they are for."""
    return not (kind.__name__.endswith("Model") or "For" in kind.__name__)


def _classes_of_files(configuration: type[PretrainedConfig]) -> Iterator[type[PreTrainedModel]]:
    """Model classes that take a configuration, from the files beside its own."""
    package = importlib.import_module(configuration.__module__.rpartition(".")[0])
    for file in pkgutil.iter_modules(package.__path__):
        if not file.name.startswith("modeling_"):
            continue
        try:
            module = importlib.import_module(f"{package.__name__}.{file.name}")
        except ImportError:
            continue
        for kind in vars(module).values():
            if (
                isinstance(kind, type)
                and issubclass(kind, PreTrainedModel)
                and kind.__module__ == module.__name__
                and _takes(kind, configuration)
                and not kind.__name__.endswith("PreTrainedModel")
            ):
                yield kind


def _takes(kind: type[PreTrainedModel], configuration: type[PretrainedConfig]) -> bool:
    """Whether a class is made from a configuration: by `config_class`, or by the annotation of its first argument, as a
    class for a part of a model may inherit `config_class` from the class for the whole.
    """
    arguments = list(inspect.signature(kind.__init__).parameters.values())[1:]
    annotation = str(arguments[0].annotation) if arguments else ""
    named = re.search(rf"\b{configuration.__name__}\b", annotation) is not None
    return named or getattr(kind, "config_class", None) is configuration


def _configuration(model_type: str) -> PretrainedConfig:
    config = CONFIG_MAPPING[model_type]()
    for part in list(parts(config)):
        backbone = vars(part).get("backbone_config")
        if getattr(backbone, "model_type", None) == "timm_backbone":  # timm may not be installed
            vars(part).update(backbone_config=_small_resnet(), use_timm_backbone=False, backbone=None)
    return config


def _overridden(config: PretrainedConfig, model_type: str) -> PretrainedConfig:
    for path, value in OVERRIDES.get(model_type, {}).items():
        *steps, name = path.split(".")
        vars(functools.reduce(getattr, steps, config))[name] = value
    return config


def _small_resnet() -> PretrainedConfig:
    stages = ["stage2", "stage3", "stage4"]
    return ResNetConfig(embedding_size=16, hidden_sizes=[16, 16, 24, 32], depths=[1, 1, 1, 1], out_features=stages)


def _built(kind: Callable[[Any], PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in kind(copy.deepcopy(config)).parameters())
    if count > MOST_PARAMETERS:
        raise LocaterError(f"{count / 1e6:.0f} million parameters after shrinking")
    torch.manual_seed(0)
    return kind(config).eval()


def parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """A configuration and those inside it."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PretrainedConfig):
            yield from parts(value)


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """Every size that is known by its name made small, one layer of each kind."""
    for part in parts(config):
        settings, aliases = vars(part), {stored: name for name, stored in part.attribute_map.items()}
        stages = settings.get("depths")
        if isinstance(stages, (list, tuple)):  # widths and heads of the stages fit each other; fewer layers are enough
            settings["depths"] = [min(depth, 2) for depth in stages]
            continue
        for name, value in list(settings.items()):
            size = size_of(name) if size_of(name) is not None else size_of(aliases.get(name, ""))
            if size is not None and type(value) is int and value > size:
                settings[name] = size
            elif value is None and name in OPEN:
                settings[name] = OPEN[name]
            elif name == "image_grid_pinpoints":
                settings[name] = [[32, 64]]
            elif name == "image_size" and isinstance(value, (list, tuple)):
                settings[name] = [32, 32 * value[1] // value[0] // 8 * 8]
        _fewer_layers(settings)
        _small_tokens(settings)
        _short_sections(settings)
        _stages_for_each(settings)
    return config


def evened(config: PretrainedConfig) -> PretrainedConfig:
    """Shrunk, with as many key heads as query heads and one size of head, which latent attention expects, and with
    sections of rotary channels also where the code has them as a default.
    """
    for part in parts(shrunk(config)):
        settings = vars(part)
        if isinstance(rope := settings.get("rope_parameters"), dict):
            rope.setdefault("mrope_section", rotary_sections([1, 1], rope.get("partial_rotary_factor") or 1.0))
        if settings.get("num_key_value_heads") and settings.get("num_attention_heads"):
            settings["num_key_value_heads"] = settings["num_attention_heads"]
        if settings.get("qk_rope_head_dim") and settings.get("head_dim"):
            settings["head_dim"] = settings["qk_rope_head_dim"]
    return config


def shallow(config: PretrainedConfig) -> PretrainedConfig:
    """Only fewer layers and a smaller vocabulary: widths as they are fit each other."""
    for part in parts(config):
        settings = vars(part)
        for name, value in list(settings.items()):
            if (name in LAYERS or "vocab_size" in name) and type(value) is int and value > SIZES.get(name, value):
                settings[name] = SIZES[name]
        _fewer_layers(settings)
        _small_tokens(settings)
        _stages_for_each(settings)
    return config


def _fewer_layers(settings: dict[str, Any]) -> None:
    """One layer of each kind, or two of the only one; every list with an entry per layer is cut alike."""
    name_of_kinds = "layer_types" if "layer_types" in settings else "layers_block_type"
    kinds = settings.get(name_of_kinds)
    if not isinstance(kinds, (list, tuple)) or not kinds:
        return
    chosen = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    chosen = chosen if len(chosen) > 1 else [0, min(1, len(kinds) - 1)]
    for name, value in list(settings.items()):
        if isinstance(value, (list, tuple)) and len(value) == len(kinds) and name != name_of_kinds:
            settings[name] = [value[at] for at in chosen]
    settings[name_of_kinds] = [kinds[at] for at in chosen]
    own = getattr(settings.get("_heterogeneity_spec"), "per_layer_overrides", None)
    if own:  # settings of single layers: larger than those of the others, and small
        kept = {
            to: {name: _larger(name, x) for name, x in own[at].items()} for to, at in enumerate(chosen) if at in own
        }
        own.clear()
        own.update(kept)
    for name in ("num_hidden_layers", "num_layers", "n_layer"):
        if name in settings:
            settings[name] = len(chosen)


def _larger(name: str, value: Any) -> Any:
    """A setting of one layer, twice the small one of all others."""
    size = size_of(name)
    return 2 * size if size is not None and type(value) is int and value > size else value


def _small_tokens(settings: dict[str, Any]) -> None:
    """Special tokens inside the small vocabulary, each with a number of its own where its name is."""
    for name, value in list(settings.items()):
        if not name.endswith(("token_id", "token_index")):
            continue
        small = VOCABULARY - 1 - zlib.crc32(name.encode()) % 40
        if isinstance(value, int) and value >= VOCABULARY - 40:
            settings[name] = small
        elif isinstance(value, (list, tuple)):
            settings[name] = [small]


def _stages_for_each(settings: dict[str, Any]) -> None:
    """A backbone whose outputs are those of layers beyond the small number gets a layer for each of its outputs."""
    taken, layers = settings.get("_out_indices"), settings.get("num_hidden_layers")
    if not isinstance(layers, int) or not taken or max(taken) <= layers:
        return
    layers = max(layers, len(taken))
    names = ["stem", *(f"stage{number}" for number in range(1, layers + 1))]
    settings.update(num_hidden_layers=layers, stage_names=names, _out_features=names[-len(taken) :])
    settings["_out_indices"] = list(range(layers + 1))[-len(taken) :]


def _short_sections(settings: dict[str, Any]) -> None:
    for name in ("rope_parameters", "rope_scaling"):
        values = settings.get(name)
        if not isinstance(values, dict):
            continue
        for table in [values, *(value for value in values.values() if isinstance(value, dict))]:
            if "mrope_section" in table:
                factor = table.get("partial_rotary_factor", settings.get("partial_rotary_factor")) or 1.0
                table["mrope_section"] = rotary_sections(table["mrope_section"], factor)


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
