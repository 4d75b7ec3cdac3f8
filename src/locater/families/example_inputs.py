"""Inputs for a model that comes without a tokenizer or processor: guessed from its configuration and from the arguments
of `forward`, and tried.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from locater.checkpoints.sources import config_of
from locater.errors import LocaterError, first_line
from locater.families.example_tensors import BATCH, TOKENS, WIDTH, Make, Request, Settings, ids, makers

# arguments that have a default and are given all the same: they make more of a model run
OPTIONAL = (
    "input_ids attention_mask decoder_input_ids bbox pixel_values image_grid_thw image_sizes aspect_ratio_ids"
    " aspect_ratio_mask spatial_shapes input_features input_features_mask feature_attention_mask input_values"
).split()
SOUND = ("input_features", "input_features_mask", "feature_attention_mask", "input_values")
PLACEHOLDERS = (  # what stands in the text for features of a picture or a sound, and what computes them
    (("image_token_id", "image_token_index"), "get_image_features", ("pixel_values", "image_grid_thw", "image_sizes")),
    (("audio_token_id", "audio_token_index"), "get_audio_features", SOUND),
)
WAYS = 3  # how many makers of one argument are tried


def example_inputs(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Small inputs that `model` runs on, on its device: two examples of a few tokens, a picture, a sound, as it takes.

    Guesses are tried with a forward pass each, in evaluation mode and without gradients. The mode and the random state
    are as before afterwards. The fullest guess comes first, so that every tower of a model runs where that is possible.

    >>> from torch import nn
    >>> example_inputs(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 1))["src"].shape
    torch.Size([2, 9, 16])
    """
    name = type(model).__name__
    if any(parameter.is_meta for parameter in model.parameters()):
        raise LocaterError(f"{name}: its parameters are on the meta device: load the weights, or to_empty() first")
    required, optional = _arguments(model)
    problem = ""
    tried: list[dict[str, Tensor]] = []
    for guess in _guesses(model, required, optional, seed):
        if isinstance(guess, str):
            problem = problem or guess
            continue
        if any(_same(guess, other) for other in tried):
            continue
        tried.append(guess)
        error = _error_of(model, guess)
        if error is None:
            return guess
        problem = problem or f"it does not run on {_listed(guess)} ({error})"
    takes = ", ".join(required or optional[:3]) or "no named argument"
    problem = problem or f"forward takes {takes}"
    raise LocaterError(
        f"{name}: no inputs could be guessed: {problem}. Give them: example={{'{_main(model)}': tensor}}"
    )


def _arguments(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the arguments of `forward`: without and with a default."""
    named = [
        parameter
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    required = [parameter.name for parameter in named if parameter.default is parameter.empty]
    return required, [parameter.name for parameter in named if parameter.default is not parameter.empty]


def _main(model: nn.Module) -> str:
    """The argument that a model reads first."""
    name = getattr(model, "main_input_name", None)
    required, optional = _arguments(model)
    return name if isinstance(name, str) and name in {*required, *optional} else [*required, *optional, "input_ids"][0]


def _guesses(
    model: nn.Module, required: list[str], optional: list[str], seed: int
) -> Iterator[dict[str, Tensor] | str]:
    """Candidates, the fullest first; a line where an argument without a default is not known."""
    wide = [name for name in optional if name in OPTIONAL]
    if "input_ids" not in {*required, *wide}:  # a mask is for samples of a sound there, not for tokens
        wide = [name for name in wide if name != "attention_mask"]
    narrow = [_main(model)] if _main(model) in optional else []
    no_sizes = [name for name in wide if name != "image_sizes"]
    no_decoder = [name for name in no_sizes if name != "decoder_input_ids"]
    with_decoder = [*narrow, *(name for name in wide if name == "decoder_input_ids")]
    for extra in (wide, no_sizes, no_decoder, with_decoder, narrow, []):
        if not required and not extra:
            continue
        for way in range(WAYS):
            try:
                guess = _made(model, [*required, *extra], {*required, *optional}, way, seed)
            except LocaterError as error:
                yield str(error)
                break
            for line in PLACEHOLDERS:
                _put_placeholders(model, guess, *line)
            yield guess


def _made(model: nn.Module, names: list[str], arguments: set[str], way: int, seed: int) -> dict[str, Tensor]:
    """One tensor for each of the names; `way` chooses among the makers of a name."""
    config = config_of(model)
    random = torch.Generator().manual_seed(seed)
    request = Request(Settings(config or _config_of_parts(model)), random, _words(model))
    example = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(0))
    guess: dict[str, Tensor] = {}
    for name in dict.fromkeys(names):
        ways = makers(name, arguments) or (() if config else _by_first_part(model))
        if not ways:
            raise LocaterError(f"the argument {name!r} is not known")
        x = ways[min(way, len(ways) - 1)](request)
        guess[name] = x.to(example) if x.is_floating_point() else x.to(example.device)
    return guess


def _config_of_parts(model: nn.Module) -> dict[str, int]:
    """A width for a module without a configuration: what its first map, norm or attention reads."""
    for part in model.modules():
        for name in ("embed_dim", "embedding_dim", "in_features"):
            if isinstance(size := getattr(part, name, None), int):
                return {WIDTH[0]: size}
    return {}


def _by_first_part(model: nn.Module) -> tuple[Make, ...]:
    """Makers for an argument of unknown name, by the first module with parameters that a plain model has."""
    for part in model.modules():
        if isinstance(part, nn.Embedding):
            return (ids,)
        if isinstance(part, nn.Conv2d):
            return (lambda request, channels=part.in_channels: request.noise(BATCH, channels, 32, 32),)
        if isinstance(part, nn.Linear):
            return (lambda request, width=part.in_features: request.noise(BATCH, TOKENS, width),)
    return ()


def _words(model: nn.Module) -> int | None:
    """How many tokens a model knows, by its embeddings."""
    embeddings: Any = getattr(model, "get_input_embeddings", None)
    try:
        words = embeddings()
    except (AttributeError, NotImplementedError, TypeError):
        words = next((part for part in model.modules() if isinstance(part, nn.Embedding)), None)
    return words.num_embeddings if isinstance(words, nn.Embedding) else None


def _put_placeholders(
    model: nn.Module, guess: dict[str, Tensor], tokens: tuple[str, ...], method: str, inputs: tuple[str, ...]
) -> None:
    """Put one placeholder into the text for each feature vector of a picture or a sound; the text gets longer."""
    given = {name: guess[name] for name in inputs if name in guess}
    token = Settings(config_of(model)).number(tokens, -1)
    compute = next((getattr(part, method) for part in model.modules() if hasattr(part, method)), None)
    if token < 0 or compute is None or not given or "input_ids" not in guess:
        return
    known, config = inspect.signature(compute).parameters, config_of(model)
    settings = {name: config[name] for name, p in known.items() if p.default is p.empty and name in config}
    try:
        with _quiet(model):
            features = compute(**settings, **{name: x for name, x in given.items() if name in known})
    except Exception:  # the guess is tried as it is, and what is wrong with it is said then
        return
    pooled = getattr(features, "pooler_output", None)
    count = _vectors(getattr(features, "last_hidden_state", features) if pooled is None else pooled) // BATCH
    marks = torch.full((BATCH, count), token, device=guess["input_ids"].device)
    guess["input_ids"] = torch.cat([guess["input_ids"][:, :3], marks, guess["input_ids"][:, 3:]], 1)
    if "attention_mask" in guess:
        guess["attention_mask"] = torch.ones_like(guess["input_ids"])
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:  # 1 where a picture stands, 0 for text
        guess["mm_token_type_ids"] = (guess["input_ids"] == token).long()


def _vectors(features: Any) -> int:
    """How many vectors a tensor or a list of tensors holds."""
    if isinstance(features, Tensor):
        return features.shape[:-1].numel()
    return sum(_vectors(part) for part in features) if isinstance(features, (list, tuple)) else 0


def _error_of(model: nn.Module, guess: Mapping[str, Tensor]) -> str | None:
    """None where the model runs on a guess, else the first line of its error."""
    try:
        with _quiet(model):
            model(**guess)
    except Exception as error:
        return first_line(error)[:160]
    return None


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, and the random state as before afterwards."""
    training = {part: part.training for part in model.modules()}
    devices = [parameter.device for parameter in model.parameters() if parameter.is_cuda][:1]
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices):
            yield
    finally:
        for part, was in training.items():
            part.training = was


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return {name: x.shape for name, x in one.items()} == {name: x.shape for name, x in other.items()}


def _listed(guess: Mapping[str, Tensor]) -> str:
    """For a message: names and shapes."""
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in guess.items())
