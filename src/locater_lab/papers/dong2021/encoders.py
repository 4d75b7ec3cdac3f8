"""BERT, ALBERT and XLNet at initialisation, trained models at hand, and what is cut out of both; residuals of their
hidden states.

Models at initialisation have the published configurations and random weights, so what tokens mean does not matter, only
which of them are equal: words are numbered as they appear. The cuts are the paper's:

    no skip    the skip around attention goes; the MLP keeps its own ("SAN+MLP")
    no MLP     BERT and XLNet lose the MLP with its skip and norm ("SAN+skip"). ALBERT loses the two weight matrices alone and keeps
               activation, skip and norm, LN(x + act(x)); "no MLP, branch out" is LN(x)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater.commands.load import load_model
from locater.control.surgery import Surgery
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.families.registry import block_of
from locater.measures import rank_residual

LENGTH = 128  # tokens of a sample
TEXT = 400_000  # characters that samples are taken from
BRANCH_OUT = "no MLP, branch out"  # ALBERT's, without what the paper left in
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "no MLP": {"no_mlp": "sublayer"},
    "no skip": {"no_skip": True},
    "neither": {"no_skip": True, "no_mlp": "sublayer"},
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("Bert", dict(vocab_size=28996)),
    "ALBERT": ("Albert", dict(
        vocab_size=30000, embedding_size=128, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
        hidden_act="gelu_new", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )),
    "XLNet": ("XLNet", dict(vocab_size=32000, d_model=768, n_layer=12, n_head=12, d_inner=3072)),
}  # fmt: skip


def initial(name: str, seed: int, **changes: Any) -> nn.Module:
    """A model of the published configuration with random weights; nothing is downloaded."""
    try:
        import transformers
    except ImportError:
        raise LocaterError(
            "models at initialisation need the transformers package: pip install 'locater[hf]'"
        ) from None
    kind, settings = CONFIGS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**settings, **changes})
    pooler = {} if kind == "XLNet" else {"add_pooling_layer": False}
    model: nn.Module = getattr(transformers, f"{kind}Model")(config, **pooler)
    return model.eval().requires_grad_(False)


def word_rows(text: str, samples: int, length: int = LENGTH) -> Tensor:
    """Samples of `length` tokens from evenly spaced places of the text: words and marks by number, between two special
    tokens.

    >>> word_rows("a b a c, a b", 2, length=5).tolist()
    [[0, 2, 3, 2, 1], [0, 4, 2, 3, 1]]
    """
    all_words, size, numbers = words(text), length - 2, dict[str, int]()
    if len(all_words) < size:
        raise LocaterError(f"{len(all_words)} words of text for samples of {size}")
    starts = [i * (len(all_words) - size) // max(1, samples - 1) for i in range(samples)]
    return torch.tensor(
        [[0, *(2 + numbers.setdefault(w, len(numbers)) for w in all_words[at : at + size]), 1] for at in starts]
    )


def words(text: str) -> list[str]:
    """Words and punctuation marks, in small letters."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


@contextmanager
def cut(model: nn.Module, variant: str) -> Iterator[None]:
    """The model as a variant while the block runs. ALBERT's MLP is left as the paper left it, but for BRANCH_OUT."""
    settings = VARIANTS["no MLP"] if variant == BRANCH_OUT else VARIANTS[variant]
    albert = getattr(getattr(model, "config", None), "model_type", "") == "albert"
    if albert and "no_mlp" in settings:
        settings = (
            {**settings, "no_mlp": True}
            if variant == BRANCH_OUT
            else {k: v for k, v in settings.items() if k != "no_mlp"}
        )
    emptied = (
        [m for m in model.modules() if hasattr(m, "ffn_output")] if albert and variant in ("no MLP", "neither") else []
    )
    branches = [(m, m.ffn, m.ffn_output) for m in emptied]
    control = Surgery(**settings).attach(model) if settings else None
    try:
        for m in emptied:
            m.ffn, m.ffn_output = nn.Identity(), nn.Identity()
        yield
    finally:
        for m, ffn, output in branches:
            m.ffn, m.ffn_output = ffn, output
        if control is not None:
            control.detach()


@torch.no_grad()
def residuals(model: nn.Module, inputs: list[dict[str, Tensor]]) -> Tensor:
    """Relative residual of every sample in front of the first layer and after each: (samples, states)."""
    device = next(model.parameters()).device
    by_batch = []
    for batch in inputs:
        states = model(**{k: x.to(device) for k, x in batch.items()}, output_hidden_states=True).hidden_states
        by_batch.append(torch.stack([rank_residual(x) for x in states], 1).cpu())
    return torch.cat(by_batch)


def variants_of(model: nn.Module, inputs: list[dict[str, Tensor]], more: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Residuals of every variant: (samples, states) each."""
    by_variant = {}
    for variant in (*VARIANTS, *more):
        with cut(model, variant):
            by_variant[variant] = residuals(model, inputs)
    return by_variant


def trained_model(folder: Path) -> Any:
    """A trained model that Surgery knows its way around in."""
    model = load_model(str(folder)).requires_grad_(False)
    kind = model.config.model_type
    if block_of(model) is None:
        raise LocaterError(f"model type {kind}: Surgery does not know its blocks")
    return model


def is_causal(model: nn.Module) -> bool:
    """Whether its attention layers look back only."""
    return all(layer.causal for layer in attention_layers(model))
