"""Explanations, measured for the papers on them: models whose outputs are explained, what explanations are tested by,
and the measurements that several papers judge.

Models are small ones that are trained here in seconds, and available trained ones:

    text      two kinds of text told apart: the language reference of Python, and docstrings of its library
    images    Fashion-MNIST, where the data folder has it; a patch is a token
    planted   one token of eight kinds among noise decides the class, and only its place differs
    streams   an encoder and a decoder: one token of the encoder decides what the decoder says

The last two have a known answer: the place of the token that decides. Tests:

    area         of what is left of the target when the least relevant tokens go first, less the same when the most
                 relevant go first (Chefer, Gur and Wolf 2021): the larger, the better the order
    hit          1 where the token with the largest score is the one that decides
    likeness     rank correlation of the scores with those after the last blocks were redrawn: scores that stay as they
                 were do not explain the model
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from locater.commands.load_model import load_model
from locater.errors import LocaterError
from locater.explain import METHODS, Explanation, deletion, operator
from locater.inputs.corpus import JOINT, embedded_documents
from locater.inputs.tokenizer import tokenizer_for
from locater.numerics import spearman
from locater_lab.engine.claims import Measurement, by_seed
from locater_lab.engine.reproduction import Setting
from locater_lab.engine.trained_models import model_folders
from locater_lab.train import Plan, Shape, Transformer, load, run
from locater_lab.train.data import open_data

# ---- models ----


CLASSES, NOISE = 8, 24  # kinds of token that decide the class of a planted row, and that do not
TOKENS, DECODED = 24, 4  # of a row, and of what the decoder reads
SMALL_RUN = dict(layers=3, width=48, heads=4, rate=3e-3, observe=0, evaluate=0, checkpoint=0, device="cpu")
TEXT = dict(SMALL_RUN, task="classify", vocabulary=512, length=48, batch=32, steps=200)
IMAGES = dict(SMALL_RUN, task="image", patch=7, batch=64, steps=400)
PLANTED = Shape(
    vocabulary=CLASSES + NOISE,
    layers=2,
    width=32,
    heads=2,
    kv_heads=2,
    hidden=64,
    length=TOKENS,
    causal=False,
    classes=CLASSES,
)
BLACK = 0  # what is around the things of Fashion-MNIST, and so in place of a patch that is taken away
STEPS, BATCH, RATE = 200, 64, 3e-3  # of the tasks with a known answer


@dataclass(frozen=True, eq=False)
class ExplainedModel:
    """A model, inputs to explain it on, the target of each, and for some the token that decides."""

    name: str
    model: nn.Module
    inputs: Sequence[Mapping[str, Tensor]]
    targets: Sequence[Any]
    deciding: Sequence[int] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)  # of its training
    blank: int | None = None  # token or pixel value in place of what is taken away; None: tokens are left out


def text_model(count: int, seed: int = 0) -> ExplainedModel:
    """The classifier of two kinds of text, and windows of its report split that it gets right."""
    with tempfile.TemporaryDirectory() as folder:
        pages, docs = _text_classes()
        for name, documents in (("reference", pages), ("docstrings", docs)):
            Path(folder, f"{name}.txt").write_text(JOINT.join(documents), encoding="utf-8")
        corpus = tuple(str(Path(folder, f"{name}.txt")) for name in ("reference", "docstrings"))
        return _train_classifier("text", TEXT, folder, seed, count, corpus=corpus)


def image_model(count: int, data: Path | None, seed: int = 0) -> ExplainedModel:
    """The classifier of Fashion-MNIST, and test images that it gets right."""
    path = image_file(data)
    if path is None:
        raise LocaterError("no fashion.npz: give its folder by --data")
    with tempfile.TemporaryDirectory() as folder:
        return replace(_train_classifier("images", IMAGES, folder, seed, count, images=str(path)), blank=BLACK)


def image_file(data: Path | None) -> Path | None:
    places = () if data is None else (data / "fashion.npz", data / "fashion" / "fashion.npz")
    return next((path for path in places if path.is_file()), None)


def _train_classifier(
    name: str, settings: Mapping[str, Any], folder: str, seed: int, count: int, **source: Any
) -> ExplainedModel:
    plan = Plan(**settings, seed=seed, out=str(Path(folder, "run")), **source)
    result = run(plan)
    model = load(result.model).eval()
    right: list[tuple[Tensor, int]] = []
    with torch.no_grad():
        for inputs, labels in open_data(plan, Path(plan.out), torch.device("cpu")).windows("report", 4 * count):
            guesses = model(inputs).argmax(-1)
            right += [(x, int(y)) for x, y, guess in zip(inputs, labels, guesses, strict=True) if y == guess]
    right = right[:count]
    facts = {"accuracy": result.accuracy, "steps": plan.steps, "layers": plan.layers, "width": plan.width}
    return ExplainedModel(name, model, [{"inputs": x[None]} for x, _ in right], [y for _, y in right], facts=facts)


@lru_cache(maxsize=1)
def _text_classes() -> tuple[list[str], list[str]]:
    """Pages of the language reference, and the docstrings of the standard library, by their order in the package."""
    from pydoc_data import topics

    documents = embedded_documents()
    return documents[: len(topics.topics)], documents[len(topics.topics) :]


# ---- tasks with a known answer ----


def planted_rows(count: int, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (count, TOKENS) of noise with one token that decides; the class of each, and the place of that token."""
    rows = torch.randint(CLASSES, CLASSES + NOISE, (count, TOKENS), generator=rng)
    labels, places = (torch.randint(n, (count,), generator=rng) for n in (CLASSES, TOKENS))
    rows[torch.arange(count), places] = labels
    return rows, labels, places


def planted_model(count: int, seed: int = 0) -> ExplainedModel:
    """A model of our own on the planted task."""
    torch.manual_seed(seed)
    model, rng = Transformer(PLANTED, 0.2), torch.Generator().manual_seed(seed)

    def loss() -> Tensor:
        rows, labels, _ = planted_rows(BATCH, rng)
        return model(rows, labels)

    _fit(model, loss)
    rows, labels, places = planted_rows(count, rng)
    accuracy = float((model(rows).argmax(-1) == labels).float().mean())
    inputs = [{"inputs": row[None]} for row in rows]
    return ExplainedModel(
        "planted", model, inputs, labels.tolist(), places.tolist(), {"accuracy": accuracy, "steps": STEPS}, CLASSES
    )


def two_stream_model(count: int, seed: int = 0) -> ExplainedModel:
    """An encoder that reads the planted row, and a decoder that reads noise of its own and then names the class: a
    BART of two layers each, as transformers builds it.
    """
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(seed)
    kinds = CLASSES + NOISE
    config = BartConfig(
        vocab_size=kinds + 2, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=TOKENS + 8, dropout=0.0,
        pad_token_id=kinds, bos_token_id=kinds + 1, eos_token_id=kinds, decoder_start_token_id=kinds + 1, forced_eos_token_id=None,
        init_std=0.2,
    )  # fmt: skip
    model, rng = BartForConditionalGeneration(config), torch.Generator().manual_seed(seed)

    def batch(size: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        rows, labels, places = planted_rows(size, rng)
        own = torch.randint(CLASSES, kinds, (size, DECODED), generator=rng)
        own[:, -1] = kinds + 1
        return {"input_ids": rows, "decoder_input_ids": own}, labels, places

    def loss() -> Tensor:
        inputs, labels, _ = batch(BATCH)
        return nn.functional.cross_entropy(model(**inputs).logits[:, -1], labels)

    _fit(model, loss)
    inputs, labels, places = batch(count)
    with torch.no_grad():
        accuracy = float((model(**inputs).logits[:, -1].argmax(-1) == labels).float().mean())
    rows = [{name: x[at : at + 1] for name, x in inputs.items()} for at in range(count)]
    targets = [(DECODED - 1, label) for label in labels.tolist()]
    return ExplainedModel(
        "streams", model, rows, targets, places.tolist(), {"accuracy": accuracy, "steps": STEPS}, CLASSES
    )


def _fit(model: nn.Module, loss: Callable[[], Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    model.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    model.eval()


# ---- available trained models ----


def sentence_model(count: int) -> ExplainedModel | None:
    """The sentence encoder where it is installed, along its own output, on sentences of Python's documentation."""
    folder = model_folders(None).get("all-MiniLM-L6-v2")
    return None if folder is None else _available_model("all-MiniLM-L6-v2", folder, count, 24)


def story_model(count: int, models: Path | None) -> ExplainedModel | None:
    """The story model where `--models` has it: the token that it says next, at the end of made-up stories."""
    folder = model_folders(models).get("stories260K")
    return None if folder is None else _available_model("stories260K", folder, count, 32)


def _available_model(name: str, folder: Path, count: int, length: int) -> ExplainedModel:
    model = load_model(str(folder))
    tokenizer = tokenizer_for(model)
    texts = [text for text in embedded_documents() if len(text) > 8 * length][:count]
    rows = [tokenizer(text, truncation=True, max_length=length, return_tensors="pt") for text in texts]
    inputs = [{key: x for key, x in row.items() if key in ("input_ids", "attention_mask")} for row in rows]
    return ExplainedModel(name, model, inputs, [None] * len(inputs))


# ---- tests ----


# the methods of this project's room, and the collapses of the operator as methods of their own
RIVALS = ("rollout", "raw_attention", "attention_norms")  # maps of attention put together without gradients
FRACTIONS = (0.0, 0.25, 0.5, 0.75, 0.9)  # of tokens taken away; some model needs one that is left
Method = Callable[[nn.Module, Mapping[str, Tensor], Any], Explanation]


def method_named(name: str) -> Method:
    """A method by name; `operator norm` is the operator with that collapse.

    >>> method_named("rollout") is METHODS["rollout"]
    True
    """
    if not name.startswith("operator "):
        return METHODS[name]
    collapse: Any = name.removeprefix("operator ")
    return lambda model, inputs, target: operator(model, inputs, target, collapse=collapse)


def deletion_areas(subject: ExplainedModel, name: str) -> list[float]:
    """The area between the two curves for each input, over the target's value where it is no probability."""
    explain, values = method_named(name), []
    for inputs, target in zip(subject.inputs, subject.targets, strict=True):
        explanation = explain(subject.model, inputs, target)
        curves = deletion(subject.model, inputs, explanation, FRACTIONS, replace=subject.blank)
        size = 1.0 if curves.positive.probabilities is not None else abs(float(curves.positive.values[0]))
        values.append((curves.negative.area - curves.positive.area) / size)
    return values


def hit_rate(subject: ExplainedModel, name: str) -> float:
    """The share of inputs whose largest score is that of the token that decides."""
    explain = method_named(name)
    each = zip(subject.inputs, subject.targets, subject.deciding, strict=True)
    return fmean(explain(subject.model, x, target).ranked()[0][0] == place for x, target, place in each)


def redraw_similarity(subject: ExplainedModel, name: str, seed: int = 0) -> list[float]:
    """Mean rank correlation of scores with those of the same model whose last 1, 2, ... blocks were redrawn, over
    inputs whose scores differ.
    """
    explain, model, values = method_named(name), copy.deepcopy(subject.model), []
    before = _scores(explain, subject.model, subject)
    for number, block in enumerate(reversed(blocks_of(model))):
        redraw_block(block, 100 * seed + number)
        pairs = zip(before, _scores(explain, model, subject), strict=True)
        alike = [x for x in (spearman(a, b) for a, b in pairs) if x is not None]
        if not alike:
            raise LocaterError(f"{name}: all scores of an input are equal, so that they have no rank correlation")
        values.append(fmean(alike))
    return values


def _scores(explain: Method, model: nn.Module, subject: ExplainedModel) -> list[Tensor]:
    each = zip(subject.inputs, subject.targets, strict=True)
    return [explain(model, inputs, target).scores for inputs, target in each]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model of `locater train`."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None:
        raise LocaterError(f"{type(model).__name__}: its blocks are not known here; use a model of locater train")
    return list(layers)


def redraw_block(block: nn.Module, seed: int) -> None:
    """Every matrix from a normal distribution of its own standard deviation."""
    rng = torch.Generator().manual_seed(seed)
    for p in block.parameters():
        if p.ndim > 1:
            p.data = torch.randn(p.shape, generator=rng) * p.data.std()


def gain_over_best_rival(
    by_method: Mapping[str, Sequence[float]], better: str, rivals: Iterable[str] = RIVALS
) -> list[float]:
    """`better` less the best rival (by its mean), input by input."""
    best = max((name for name in rivals if name in by_method), key=lambda name: fmean(by_method[name]))
    return [a - b for a, b in zip(by_method[better], by_method[best], strict=True)]


def relative_cost(subject: ExplainedModel, names: Sequence[str], rounds: int = 5) -> dict[str, float]:
    """Seconds of a method over those of a forward pass, in turns on the same input; medians."""
    inputs, target = subject.inputs[0], subject.targets[0]
    taken: dict[str, list[float]] = {name: [] for name in ("forward", *names)}
    with torch.no_grad():
        subject.model(**inputs)
    for _ in range(rounds):
        for name, times in taken.items():
            began = time.perf_counter()
            if name == "forward":
                with torch.no_grad():
                    subject.model(**inputs)
            else:
                method_named(name)(subject.model, inputs, target)
            times.append(time.perf_counter() - began)
    forward = median(taken["forward"])
    return {name: median(taken[name]) / forward for name in names}


# ---- measurements that several papers judge: areas by model, known answers, redrawn parameters ----


INPUTS = {True: 48, False: 200}  # explained for each model that is trained here
AVAILABLE = {True: 24, False: 100}  # and for each of the available ones, which are larger
PLANTED_INPUTS = {True: 8, False: 64}  # inputs with a known answer, for each seed
SEEDS = 8
MODELS = {"b1": "text", "b2": "images", "b3": "all-MiniLM-L6-v2", "b4": "stories260K"}  # by the claim on each
WORDS = {
    "text": "a text classifier",
    "images": "an image classifier",
    "all-MiniLM-L6-v2": "a sentence encoder",
    "stories260K": "a language model",
}
CLASSIFIERS = ("text", "images")
COSTLY = 20.0  # forward passes that scores may take and still be called cheap
LEARNED = 0.9  # accuracy from which a model counts as having learned its task
GRADIENT_METHODS = ("gradient_input", "relevance")
OPERATORS = ("operator logit", "operator input_output", "operator input", "operator norm")
MISSING = "fashion.npz in the folder of --data (images), the trained models (the sentence encoder installed, stories260K in --models)"


@dataclass(frozen=True)
class Areas:
    """The area between the curves of every method for each input, by model."""

    by_model: Mapping[str, Mapping[str, Sequence[float]]]
    facts: Mapping[str, Mapping[str, Any]]

    def gain_over_rivals(self, model: str, method: str, rivals: Sequence[str] = RIVALS) -> Measurement | None:
        """A method less its best rival, over the inputs of one model; None where the model is missing."""
        if model not in self.by_model:
            return None
        return by_seed(gain_over_best_rival(self.by_model[model], method, rivals), of="inputs of one model")

    def table(self) -> dict[str, Any]:
        methods = list(dict.fromkeys(name for table in self.by_model.values() for name in table))
        rows = [
            {"method": name, **{model: fmean(table[name]) for model, table in self.by_model.items() if name in table}}
            for name in methods
        ]
        return {"rows": rows, "models": list(self.by_model), "facts": dict(self.facts)}


def measure_areas(setting: Setting, methods: Sequence[str], on_classifiers: Sequence[str] = ()) -> Areas:
    """Every method on every available model, and more of them on the classifiers that are trained here."""
    count = INPUTS[setting.quick]
    makers: dict[str, Callable[[], ExplainedModel | None]] = {
        "text": lambda: text_model(count),
        "images": lambda: image_model(count, setting.data) if image_file(setting.data) else None,
        "all-MiniLM-L6-v2": lambda: sentence_model(AVAILABLE[setting.quick]),
        "stories260K": lambda: story_model(AVAILABLE[setting.quick], setting.models),
    }
    by_model: dict[str, dict[str, list[float]]] = {}
    facts: dict[str, Mapping[str, Any]] = {}
    for name in setting.each(list(makers)):
        subject = makers[name]()
        if subject is not None:
            facts[name] = {"inputs": len(subject.inputs), **subject.facts}
            names = (*methods, *on_classifiers) if name in CLASSIFIERS else methods
            by_model[name] = {method: deletion_areas(subject, method) for method in names}
    return Areas(by_model, facts)


def train_by_seed(setting: Setting, make: Callable[[int, int], ExplainedModel]) -> list[ExplainedModel]:
    """A task with a known answer, learned with every seed."""
    subjects = [make(PLANTED_INPUTS[setting.quick], seed) for seed in setting.each(list(range(SEEDS)))]
    for seed, subject in enumerate(subjects):
        if subject.facts["accuracy"] < LEARNED:
            raise LocaterError(f"{subject.name}: not learned with seed {seed}: accuracy {subject.facts['accuracy']}")
    return subjects


def hit_rates_by_method(subjects: Sequence[ExplainedModel], methods: Sequence[str]) -> dict[str, list[float]]:
    """The share of inputs whose largest score is that of the token that decides, by method and seed."""
    return {name: [hit_rate(subject, name) for subject in subjects] for name in methods}


def redraw_similarities(subjects: Sequence[ExplainedModel], methods: Sequence[str]) -> dict[str, list[list[float]]]:
    """Rank correlations of scores with those of models whose last blocks were redrawn, by method and seed."""
    return {name: [redraw_similarity(subject, name, seed) for seed, subject in enumerate(subjects)] for name in methods}


def mean_curves(redraw_similarity: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, list[float]]:
    """Means over seeds of what `redraw_similarities` returns: for each method a number by how many blocks were redrawn.

    >>> mean_curves({"rollout": [[1.0, 0.5], [0.0, 0.5]]})
    {'rollout': [0.5, 0.5]}
    """
    return {name: [fmean(depth) for depth in zip(*curves, strict=True)] for name, curves in redraw_similarity.items()}
