"""Inputs for a model that comes without a tokenizer or processor: guessed from its configuration and from the arguments
of `forward`, and tried.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from locater.discovery.example_marks import PICTURE, SOUND, more_placeholders, put_placeholders
from locater.discovery.example_repairs import repaired
from locater.discovery.example_settings import BATCH, TOKENS, WIDTH, Make, Request, Settings
from locater.discovery.example_tensors import group_of, ids, makers
from locater.errors import LocaterError, first_line
from locater.sources.sources import config_of

# arguments that have a default and are given all the same: they make more of a model run
OPTIONAL = (
    "input_ids attention_mask decoder_input_ids bbox pixel_values image_grid_thw grid_thw image_sizes aspect_ratio_ids"
    " aspect_ratio_mask spatial_shapes input_features input_features_mask feature_attention_mask input_values"
    " encoder_hidden_states image_attention_mask image_embeds_position_mask visual_feats visual_pos visual_embeds"
    " target_sizes image_grid_hw image_position_ids pixel_position_ids qformer_input_ids qformer_attention_mask"
    " pixel_attention_mask feature_lens image_merge_sizes high_res_pixel_values input_boxes input_boxes_labels"
    " future_values future_time_features flattened_patches protein_input_ids protein_attention_mask last_hidden_state"
).split()
CONTENT = (
    "input_ids bbox pixel_values input_features input_values visual_feats visual_embeds high_res_pixel_values"
    " flattened_patches protein_input_ids"
).split()  # of these, inputs that a tower or an embedding of its own reads
RARE = (
    "image_sizes",
    "encoder_hidden_states",
    "pixel_attention_mask",
    "input_boxes",
    "input_boxes_labels",
)  # left out again where they do not fit
MOST_WAYS, MOST_GUESSES, MOST_REPAIRS = 10, 24, 4  # of makers and of guesses for a choice of arguments; for a guess


def example_inputs(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Small inputs that `model` runs on, on its device: two examples of a few tokens, a picture, a sound, as it takes.

    Guesses are tried with a forward pass each, in evaluation mode and without gradients. The mode and the random state
    are as before afterwards. The fullest guess comes first, so that every tower of a model runs where that is possible.
    Where PyTorch says that a size does not fit, the guess is tried again with the size that does.

    >>> from torch import nn
    >>> example_inputs(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 1))["src"].shape
    torch.Size([2, 9, 16])
    """
    name = type(model).__name__
    if any(parameter.is_meta for parameter in model.parameters()):
        raise LocaterError(f"{name}: its parameters are on the meta device: load the weights, or to_empty() first")
    required, optional = _arguments(model)
    trial = _Trial(model)
    for names in _choices(model, required, optional):
        try:
            guesses = _made(model, names, {*required, *optional}, seed)
        except LocaterError as error:
            trial.problem = trial.problem or str(error)
            continue
        guess = trial.first_that_runs(guesses)
        if guess is not None:
            return guess
    takes = ", ".join(required or optional[:3]) or "no named argument"
    problem = trial.problem or f"forward takes {takes}"
    given = ", ".join(f"'{argument}': tensor" for argument in required or [_main(model)])
    raise LocaterError(f"{name}: no inputs could be guessed: {problem}. Give them: example={{{given}}}")


def left_out(model: nn.Module, given: Collection[str]) -> list[str]:
    """Contents that a model takes and that are not given: with them other parts of it may run."""
    required, optional = _arguments(model)
    return [name for name in CONTENT if name in {*required, *optional} and name not in given]


class _Trial:
    """Runs a model on guesses, each shape once, and remembers what was wrong with the first."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.problem = model, ""
        self.shapes: list[dict[str, Any]] = []
        self.ran: dict[str, Tensor] = {}  # the inputs that the model ran on

    def first_that_runs(self, guesses: Iterator[dict[str, Tensor]]) -> dict[str, Tensor] | None:
        """The first guess that runs; then the first that runs after a repair, or after two."""
        before = len(self.shapes)
        for _ in range(3):
            failed: list[tuple[dict[str, Tensor], str]] = []
            for guess in guesses:
                error = self.error_of(guess) if len(self.shapes) < before + MOST_GUESSES else ""
                if error is None:
                    return self.ran
                failed.append((guess, error))
            guesses = itertools.chain.from_iterable(
                itertools.islice(repaired(guess, error), MOST_REPAIRS) for guess, error in failed
            )
        return None

    def error_of(self, guess: dict[str, Tensor]) -> str | None:
        """None where the model runs on a guess, else its error; an empty one where the guess is not tried."""
        shapes = {name: x.shape for name, x in guess.items()}
        if shapes in self.shapes:
            return ""
        self.shapes.append(shapes)
        placed = dict(guess)
        put_placeholders(self.model, placed, self._quietly)
        error = self._run(placed)
        more = more_placeholders(self.model, placed, error or "")
        return error if more is None else self._run(more)

    def _run(self, guess: dict[str, Tensor]) -> str | None:
        try:
            with _quiet(self.model):
                self.model(**guess)
        except Exception as error:
            listed = ", ".join(f"{name} {tuple(x.shape)}" for name, x in guess.items())
            self.problem = self.problem or f"it does not run on {listed} ({first_line(error)[:160]})"
            return str(error)
        self.ran = guess
        return None

    def _quietly(self, call: Callable[..., Any], **arguments: Any) -> Any:
        try:
            with _quiet(self.model):
                return call(**arguments)
        except Exception:  # the guess is tried as it is, and what is wrong with it is said then
            return None


def _arguments(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the arguments of `forward`: without and with a default. A wrapper that names none takes those of the
    module inside it.
    """
    named = [
        parameter
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    inside = list(model.children())
    if not named and len(inside) == 1:
        return _arguments(inside[0])
    required = [parameter.name for parameter in named if parameter.default is parameter.empty]
    return required, [parameter.name for parameter in named if parameter.default is not parameter.empty]


def _main(model: nn.Module) -> str:
    """The argument that a model reads first."""
    name = getattr(model, "main_input_name", None)
    required, optional = _arguments(model)
    return name if isinstance(name, str) and name in {*required, *optional} else [*required, *optional, "input_ids"][0]


def _choices(model: nn.Module, required: list[str], optional: list[str]) -> Iterator[list[str]]:
    """Names of arguments to give, the most first."""
    wide = [name for name in optional if name in OPTIONAL]
    if "input_ids" not in {*required, *wide}:  # a mask is for samples of a sound there, not for tokens
        wide = [name for name in wide if name != "attention_mask"]
    narrow = [_main(model)] if _main(model) in optional else []
    usual = [name for name in wide if name not in RARE]
    choices = [
        wide,
        usual,
        [name for name in wide if name != "encoder_hidden_states"],
        [name for name in usual if name != "decoder_input_ids"],
        [name for name in usual if name == "attention_mask" or not name.endswith("_mask")],
        [name for name in usual if name != "input_features"],
        [name for name in usual if name not in SOUND],
        [name for name in usual if name not in PICTURE],
        [name for name in usual if name not in (*PICTURE, *SOUND)],
        [*narrow, *(name for name in wide if name == "decoder_input_ids")],
        narrow,
        [name for name in optional if name == "inputs_embeds"],
        [],
    ]
    seen: list[list[str]] = [[]]
    for extra in choices:
        names = list(dict.fromkeys([*required, *extra]))
        if names not in seen:
            seen.append(names)
            yield names


def _made(model: nn.Module, names: list[str], arguments: set[str], seed: int) -> Iterator[dict[str, Tensor]]:
    """Guesses with one tensor for each of the names, in several ways: those of a group change together."""
    config = config_of(model)
    ways = {name: makers(name, arguments) or (() if config else _by_first_part(model)) for name in names}
    unknown = next((name for name, makes in ways.items() if not makes), None)
    if unknown is not None:
        raise LocaterError(f"the argument {unknown!r} is not known")
    return itertools.islice(_guesses(model, ways, Settings(config or _config_of_parts(model)), seed), MOST_WAYS)


def _guesses(
    model: nn.Module, ways: Mapping[str, tuple[Make, ...]], settings: Settings, seed: int
) -> Iterator[dict[str, Tensor]]:
    example = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(0))
    groups = sorted({group_of(name) for name in ways})
    most = [max(len(makes) for name, makes in ways.items() if group_of(name) == group) for group in groups]
    for choice in sorted(itertools.product(*map(range, most)), key=lambda choice: (sum(choice), choice[::-1])):
        request = Request(settings, torch.Generator().manual_seed(seed), _words(model))
        guess: dict[str, Tensor] = {}
        for name, makes in ways.items():
            x = makes[min(choice[groups.index(group_of(name))], len(makes) - 1)](request)
            guess[name] = x.to(example) if x.is_floating_point() else x.to(example.device)
        yield guess


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
            return _pictures(part)
        if isinstance(part, nn.Linear):
            return (lambda request, width=part.in_features: request.noise(BATCH, TOKENS, width),)
    return ()


def _pictures(first: nn.Conv2d) -> tuple[Make, ...]:
    """Pictures for a plain model that begins with this: few patches, and then more pixels for what makes it smaller."""
    height, width = 4 * first.stride[0], 6 * first.stride[1]
    return (
        lambda request: request.noise(BATCH, first.in_channels, height, width),
        lambda request: request.noise(BATCH, first.in_channels, 32, 32),
    )


def _words(model: nn.Module) -> int | None:
    """How many tokens a model knows, by its embeddings."""
    embeddings: Any = getattr(model, "get_input_embeddings", None)
    try:
        words = embeddings()
    except (AttributeError, NotImplementedError, TypeError):
        words = next((part for part in model.modules() if isinstance(part, nn.Embedding)), None)
    return words.num_embeddings if isinstance(words, nn.Embedding) else None


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
