"""Inputs for a model that comes without a tokenizer or processor: guessed from its configuration and from the arguments
of `forward`, and tried.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from locater.discovery.example_settings import BATCH, TOKENS, WIDTH, InputRequest, InputSettings, Make
from locater.discovery.example_tensors import group_of, ids, makers
from locater.errors import LocaterError, first_line
from locater.sources.open_source import config_of

# Placeholders in a text: tokens whose embeddings a model replaces by features of a picture or a sound.


SOUND = (
    "input_features input_features_mask feature_attention_mask input_values input_features_attention_mask padding_mask"
).split()
PICTURE = (
    "pixel_values image_grid_thw image_sizes image_grid_hw grid_thw image_position_ids pixel_position_ids"
    " pixel_attention_mask target_sizes spatial_shapes image_merge_sizes high_res_pixel_values"
).split()
# names of the token, of the method that computes the features, of its inputs
KINDS = (
    (("image_token_id", "image_token_index", "im_patch_id", "image_patch_id"), "get_image_features", PICTURE),
    (("audio_token_id", "audio_token_index"), "get_audio_features", SOUND),
)
MISMATCH = re.compile(r"tokens: (?P<tokens>\d+),? features:? (?P<features>\d+)")
BEFORE = 3  # tokens of text before the first placeholder


def put_placeholders(model: nn.Module, guess: dict[str, Tensor], quietly: Callable[..., Any]) -> None:
    """Put one placeholder into the text for each feature vector of a picture or a sound; the text gets longer.

    `quietly(call, **arguments)` calls a method of the model and gives None where that fails.
    """
    _make_room(model, guess)
    for tokens, method, inputs in KINDS:
        given = {name: guess[name] for name in inputs if name in guess}
        token = InputSettings(config_of(model)).number(tokens, -1)
        compute = next((getattr(part, method) for part in model.modules() if hasattr(part, method)), None)
        if token < 0 or not given or guess.get("input_ids", torch.zeros(())).ndim != 2:
            continue
        if compute is None:  # the model makes room itself: one placeholder for a picture or a sound
            _put(model, guess, token, 1)
            continue
        known, config = inspect.signature(compute).parameters, config_of(model)
        settings = {name: config[name] for name, p in known.items() if p.default is p.empty and name in config}
        features = quietly(compute, **settings, **{name: x for name, x in given.items() if name in known})
        if features is not None:
            _put(model, guess, token, _count(features) // BATCH)


def more_placeholders(model: nn.Module, guess: dict[str, Tensor], message: str) -> dict[str, Tensor] | None:
    """A guess with as many placeholders as a model's error says that it has features; None for other errors."""
    match = MISMATCH.search(message)
    if match is None or guess.get("input_ids", torch.zeros(())).ndim != 2:
        return None
    missing = (int(match["features"]) - int(match["tokens"])) // BATCH
    for tokens, method, inputs in KINDS:
        token = InputSettings(config_of(model)).number(tokens, -1)
        known = any(name in guess for name in inputs) and method.split("_")[1] in message.lower()
        if token >= 0 and known and missing > 0:
            changed = dict(guess)
            _put(model, changed, token, missing)
            return changed
    return None


def _make_room(model: nn.Module, guess: dict[str, Tensor]) -> None:
    """A longer text where a mask says which tokens the features of a picture replace, and they are many."""
    count = InputSettings(config_of(model)).number(("latent_query_num",), 0)
    if count and "image_embeds_position_mask" in guess and guess["input_ids"].shape[1] < count + BEFORE:
        _put(model, guess, int(guess["input_ids"][0, 0]), count)
        mask = torch.zeros_like(guess["input_ids"])
        mask[:, BEFORE : BEFORE + count] = 1
        guess["image_embeds_position_mask"] = mask


def _put(model: nn.Module, guess: dict[str, Tensor], token: int, count: int) -> None:
    ids = guess["input_ids"]
    ids = torch.where(ids == token, max(token - 1, 0), ids)  # none by chance
    marks = torch.full((len(ids), count), token, device=ids.device)
    guess["input_ids"] = ids = torch.cat([ids[:, :BEFORE], marks, ids[:, BEFORE:]], 1)
    if "attention_mask" in guess:
        guess["attention_mask"] = torch.ones_like(ids)
    arguments = inspect.signature(model.forward).parameters
    for name in ("mm_token_type_ids", "token_type_ids"):  # 1 where a picture stands, 0 for text
        if name in arguments and (name == "mm_token_type_ids" or name in guess):
            guess[name] = (ids == token).long()


def _count(features: Any) -> int:
    """How many feature vectors a method returned."""
    pooled = getattr(features, "pooler_output", None)
    return _vectors(getattr(features, "last_hidden_state", features) if pooled is None else pooled)


def _vectors(features: Any) -> int:
    if isinstance(features, Tensor):
        return features.shape[:-1].numel()
    return sum(_vectors(part) for part in features) if isinstance(features, (list, tuple)) else 0


# A guess that a model refuses, changed where PyTorch's error says that a size does not fit.


# messages of PyTorch -> (the size that a tensor had, the size that fits); "either" where it may be the other way round
MISFITS = {
    r"size of tensor a \((?P<given>\d+)\) must match the size of tensor b \((?P<fits>\d+)\)": "either",
    r"shapes cannot be multiplied \(\d+x(?P<given>\d+) and (?P<fits>\d+)x\d+\)": "",
    r"normalized_shape=\[(?P<fits>\d+)\], expected .* got input of size ?\[.*?(?P<given>\d+)\]": "",
    r"to have (?P<fits>\d+) channels, but got (?P<given>\d+) channels": "",
    r"contract \w+ dimension.* (?P<given>\d+) but got (?P<fits>\d+)": "either",
}
LARGEST = 4096  # channels that a repaired tensor may get


def repaired(guess: Mapping[str, Tensor], message: str) -> Iterator[dict[str, Tensor]]:
    """The guess with one axis of one tensor resized, for each axis that the message may be about.

    An axis of the size that did not fit comes first. Then the last axis of a tensor of real numbers is scaled by the
    same factor: features may be stacked or halved before they meet a map.

    >>> x = torch.zeros(2, 9, 80)
    >>> error = "mat1 and mat2 shapes cannot be multiplied (18x80 and 128x32)"
    >>> [tuple(changed["x"].shape) for changed in repaired({"x": x}, error)]
    [(2, 9, 128)]
    """
    for given, fits in _misfits(message):
        for name, x in guess.items():
            for axis in range(x.ndim - 1, 0, -1):
                if x.shape[axis] == given:
                    yield {**guess, name: _resized(x, axis, fits)}
        for name, x in guess.items():
            size, rest = divmod(x.shape[-1] * fits, given) if x.ndim > 1 and given else (0, 1)
            if x.is_floating_point() and not rest and size != x.shape[-1] and x.shape[-1] != given and size <= LARGEST:
                yield {**guess, name: _resized(x, -1, size)}


def _misfits(message: str) -> Iterator[tuple[int, int]]:
    for pattern, order in MISFITS.items():
        if match := re.search(pattern, message):
            given, fits = int(match["given"]), int(match["fits"])
            yield given, fits
            if order == "either":
                yield fits, given


def _resized(x: Tensor, axis: int, size: int) -> Tensor:
    """A tensor with another size of an axis: the same numbers again and again, or new ones where they are real."""
    repeated = x.index_select(axis, torch.arange(size, device=x.device) % x.shape[axis])
    if not x.is_floating_point():
        return repeated
    return torch.randn(repeated.shape, generator=torch.Generator().manual_seed(size)).to(x)


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


def check_example(example: object) -> None:
    """Refuse inputs that have no names."""
    if example is None or (isinstance(example, Mapping) and all(isinstance(name, str) for name in example)):
        return
    raise LocaterError(
        f"example is a {type(example).__name__}: give a mapping from names of arguments of forward to inputs"
    )


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
        except Exception as error:  # a model may raise anything on inputs that it does not take
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
    return itertools.islice(_guesses(model, ways, InputSettings(config or _config_of_parts(model)), seed), MOST_WAYS)


def _guesses(
    model: nn.Module, ways: Mapping[str, tuple[Make, ...]], settings: InputSettings, seed: int
) -> Iterator[dict[str, Tensor]]:
    example = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(0))
    groups = sorted({group_of(name) for name in ways})
    most = [max(len(makes) for name, makes in ways.items() if group_of(name) == group) for group in groups]
    for choice in sorted(itertools.product(*map(range, most)), key=lambda choice: (sum(choice), choice[::-1])):
        request = InputRequest(settings, torch.Generator().manual_seed(seed), _words(model))
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
