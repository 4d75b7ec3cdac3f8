"""Models whose outputs are explained, for papers on explanations: small ones that are trained here in seconds, and
trained models at hand.

    text      two kinds of text told apart: the language reference of Python, and docstrings of its library
    images    Fashion-MNIST, where the data folder has it; a patch is a token
    planted   one token of eight kinds among noise decides the class, and only its place differs
    streams   an encoder and a decoder: one token of the encoder decides what the decoder says

The last two have a known answer: the place of the token that decides.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater.commands.load import load_model
from locater.errors import LocaterError
from locater.inputs.corpus import JOINT, embedded_documents
from locater.inputs.text import tokenizer_for
from locater_lab.engine.trained_heads import sources
from locater_lab.train import Plan, Shape, Transformer, load, run
from locater_lab.train.data import open_data

CLASSES, NOISE = 8, 24  # kinds of token that decide the class of a planted row, and that do not
TOKENS, DECODED = 24, 4  # of a row, and of what the decoder reads
BRIEF = dict(layers=3, width=48, heads=4, rate=3e-3, observe=0, evaluate=0, checkpoint=0, device="cpu")
TEXT = dict(BRIEF, task="classify", vocabulary=512, length=48, batch=32, steps=200)
IMAGES = dict(BRIEF, task="image", patch=7, batch=64, steps=400)
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
class Explained:
    """A model, inputs to explain it on, the target of each, and for some the token that decides."""

    name: str
    model: nn.Module
    inputs: Sequence[Mapping[str, Tensor]]
    targets: Sequence[Any]
    deciding: Sequence[int] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)  # of its training
    blank: int | None = None  # token or pixel value in place of what is taken away; None: tokens are left out


def text_model(count: int, seed: int = 0) -> Explained:
    """The classifier of two kinds of text, and windows of its report split that it gets right."""
    with tempfile.TemporaryDirectory() as folder:
        pages, docs = _two_kinds()
        for name, documents in (("reference", pages), ("docstrings", docs)):
            Path(folder, f"{name}.txt").write_text(JOINT.join(documents), encoding="utf-8")
        corpus = tuple(str(Path(folder, f"{name}.txt")) for name in ("reference", "docstrings"))
        return _trained("text", TEXT, folder, seed, count, corpus=corpus)


def image_model(count: int, data: Path | None, seed: int = 0) -> Explained:
    """The classifier of Fashion-MNIST, and test images that it gets right."""
    path = image_file(data)
    if path is None:
        raise LocaterError("no fashion.npz: give its folder by --data")
    with tempfile.TemporaryDirectory() as folder:
        return replace(_trained("images", IMAGES, folder, seed, count, images=str(path)), blank=BLACK)


def image_file(data: Path | None) -> Path | None:
    places = () if data is None else (data / "fashion.npz", data / "fashion" / "fashion.npz")
    return next((path for path in places if path.is_file()), None)


def _trained(name: str, settings: Mapping[str, Any], folder: str, seed: int, count: int, **source: Any) -> Explained:
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
    return Explained(name, model, [{"inputs": x[None]} for x, _ in right], [y for _, y in right], facts=facts)


@lru_cache(maxsize=1)
def _two_kinds() -> tuple[list[str], list[str]]:
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


def planted_model(count: int, seed: int = 0) -> Explained:
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
    return Explained(
        "planted", model, inputs, labels.tolist(), places.tolist(), {"accuracy": accuracy, "steps": STEPS}, CLASSES
    )


def two_stream_model(count: int, seed: int = 0) -> Explained:
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
    return Explained("streams", model, rows, targets, places.tolist(), {"accuracy": accuracy, "steps": STEPS}, CLASSES)


def _fit(model: nn.Module, loss: Callable[[], Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    model.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    model.eval()


# ---- trained models at hand ----


def sentence_model(count: int) -> Explained | None:
    """The sentence encoder where it is installed, along its own output, on sentences of Python's documentation."""
    folder = sources(None).get("all-MiniLM-L6-v2")
    return None if folder is None else _at_hand("all-MiniLM-L6-v2", folder, count, 24)


def story_model(count: int, models: Path | None) -> Explained | None:
    """The story model where `--models` has it: the token that it says next, at the end of made-up stories."""
    folder = sources(models).get("stories260K")
    return None if folder is None else _at_hand("stories260K", folder, count, 32)


def _at_hand(name: str, folder: Path, count: int, length: int) -> Explained:
    model = load_model(str(folder))
    tokenizer = tokenizer_for(model)
    texts = [text for text in embedded_documents() if len(text) > 8 * length][:count]
    rows = [tokenizer(text, truncation=True, max_length=length, return_tensors="pt") for text in texts]
    inputs = [{key: x for key, x in row.items() if key in ("input_ids", "attention_mask")} for row in rows]
    return Explained(name, model, inputs, [None] * len(inputs))
