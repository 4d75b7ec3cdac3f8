"""Relevance of heads in trained models, beside what leaving each head out does: study d."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.commands.load import load_model
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.inputs.text import batches
from locater.numerics import spearman
from locater_lab.engine.claims import Claim, Measurement, half_range
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.engine.trained_models import model_folders, read_each
from locater_lab.mechanisms.multiformer import head_relevance

SAMPLES, LENGTH = {True: 3, False: 16}, 48
CHARACTERS = 60_000
OUTPUTS = ("o_proj", "attention.output.dense", "out_proj")  # how output projections are called
Batch = dict[str, Tensor]

CLAIMS = (
    Claim(
        "d1",
        "Heads of a trained layer count unevenly",
        "variation of relevance over heads (standard deviation over mean), mean over layers, least of the models",
        "at least",
        0.1,
        by="ours",
    ),
    Claim(
        "d2",
        "Relevance orders the heads of a layer as leaving them out does",
        "rank correlation with the change of the last states, mean over layers, least of the models",
        "at least",
        0.5,
        by="ours",
    ),
)


def outputs(model: Any) -> list[tuple[nn.Linear, int]]:
    """Output projections of attention layers in their order, and how many heads each joins."""
    projections = [m for name, m in model.named_modules() if name.endswith(OUTPUTS) and isinstance(m, nn.Linear)]
    if not projections or len(projections) != len(list(attention_layers(model))):
        raise LocaterError(f"{type(model).__name__}: output projections are not called {', '.join(OUTPUTS)}")
    heads = int(model.config.num_attention_heads)
    return [(projection, heads) for projection in projections]


def variation(shares: Float[Tensor, " heads"]) -> float:
    """Standard deviation over mean; 0 is even.

    >>> variation(torch.tensor([0.25, 0.25, 0.25, 0.25])), variation(torch.tensor([1.0, 0.0]))
    (0.0, 1.0)
    """
    return (shares.std(correction=0) / shares.mean()).item()


@contextmanager
def without(projection: nn.Linear, head: int, heads: int) -> Iterator[None]:
    """The layer with nothing from one head."""

    def drop(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0].unflatten(-1, (heads, -1)).clone()
        x[..., head, :] = 0
        return (x.flatten(-2), *args[1:])

    hook = projection.register_forward_pre_hook(drop)
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def relevances(model: Any, batch: Batch) -> list[Tensor]:
    """Of every layer, over the samples of a batch."""
    seen: list[Tensor] = []
    parts = outputs(model)
    hooks = [p.register_forward_pre_hook(lambda module, args: seen.append(args[0])) for p, _ in parts]
    try:
        model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    return [
        head_relevance(x.unflatten(-1, (n, -1)).transpose(1, 2), p.weight)
        for x, (p, n) in zip(seen, parts, strict=True)
    ]


@torch.no_grad()
def changes(model: Any, batch: Batch) -> list[Tensor]:
    """Of every layer and head: |change of the last states| over their size, without it."""
    plain = model(**batch, output_hidden_states=True).hidden_states[-1]
    by_layer = []
    for projection, heads in outputs(model):
        sizes = []
        for head in range(heads):
            with without(projection, head, heads):
                last = model(**batch, output_hidden_states=True).hidden_states[-1]
            sizes.append((last - plain).norm() / plain.norm())
        by_layer.append(torch.stack(sizes))
    return by_layer


def loaded(name: str, folder: Path, setting: Setting) -> dict[str, Any]:
    """A model from its folder, on two halves of the text's first samples."""
    model = load_model(str(folder)).requires_grad_(False)
    each, text = SAMPLES[setting.quick], setting.text[:CHARACTERS]
    return entry(name, model, batches(model, text, length=LENGTH, tokens=2 * each * LENGTH, batch=each)[:2])


def entry(name: str, model: Any, halves: Sequence[Batch]) -> dict[str, Any]:
    """What a model shows on each half: the variation of relevance over heads, and its agreement with leaving heads out;
    for the page, the mean relevance of every head (1 is even) and the range of agreement over layers.
    """
    shares, agreement = [], []
    for half in halves:
        shares.append(relevances(model, half))
        pairs = zip(shares[-1], changes(model, half), strict=True)
        agreement.append([spearman(a, b) or 0.0 for a, b in pairs])
    heads = len(shares[0][0])
    by_layer = [x for half in agreement for x in half]
    return {
        "model": name,
        "heads": heads,
        "variation": [fmean(variation(x) for x in layers) for layers in shares],
        "agreement": [fmean(layers) for layers in agreement],
        "agreement_of_layers": [min(by_layer), max(by_layer)],
        "relevance": [(heads * torch.stack(layers).mean(0)).tolist() for layers in zip(*shares, strict=True)],
    }


def judged(entries: Sequence[Mapping[str, Any]]) -> dict[str, Measurement | None]:
    """Each half of the samples by itself."""
    if not entries:
        return {}
    of = "half the difference of two halves of the samples"
    return {
        key: half_range([min(entry[name][half] for entry in entries) for half in range(2)], of)
        for key, name in (("d1", "variation"), ("d2", "agreement"))
    }


def measure(setting: Setting) -> Results:
    """The models at hand; those that cannot be read are named."""
    read, left_out = read_each(
        model_folders(setting.models).items(), lambda name, folder: loaded(name, folder, setting)
    )
    rows = list(read.values())
    table = {"rows": rows, "left_out": left_out, "samples": SAMPLES[setting.quick], "length": LENGTH}
    return Results(judged(rows), {"trained_models": table} if rows else {})


STUDY = Study("relevance in trained models", CLAIMS, measure, needs="a trained model", on_models=True)
