"""What signs do to attention without training: to the logits of Gaussian queries and keys (study b), and in trained
models made binary as they are (study c).

**Gaussian heads (study b).** The arcsine law, flatter rows, an order half kept.

**Trained models (study c).** Entropy, order of keys, gradients, loss, with no fine-tuning. The paper fine-tunes for 300
epochs after the change; nothing here says that this is not needed. It says how much it has to repair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.commands.load_model import load_model
from locater.control import Controls, Temperature
from locater.control.base import Layers
from locater.inputs.text import batches
from locater.layers import AttentionLayer, Norm
from locater.observing.run_model import run_model
from locater.theory import second_order_entropy
from locater_lab.engine.claims import Claim, Measurement, by_seed, half_range
from locater_lab.engine.devices_and_processes import draw_normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.engine.trained_models import HALVES, layer_inputs, model_folders
from locater_lab.mechanisms import mechanism
from locater_lab.mechanisms.softmax import sign
from locater_lab.mechanisms.swap import SwapMechanism

# ---- b: Gaussian queries and keys ----


CORRELATIONS = (-0.6, -0.3, 0.0, 0.3, 0.6, 0.9, 0.99)
PAIRS = {True: 400_000, False: 4_000_000}
GAUSSIAN_TOKENS = 256
SIZES = (4, 8, 16, 32, 64, 128)
DRAWS = {True: 16, False: 60}
SHARP = 3.0  # times, of queries and of keys
KEPT_ORDER = 0.62  # rank correlation of real and binary logits, about
LIMIT = 6 / math.pi * math.asin(1 / math.pi)  # 0.6187, rank correlation of two normals whose correlation is 2/pi

GAUSSIAN_CLAIMS = (
    Claim(
        "b1", "Similarity survives in the mean: of jointly Gaussian entries of mean zero and correlation r, the mean product of signs is "
        "(2/pi) asin(r); the paper's Theorem 1 is of this kind, its wording was not at hand",
        f"largest difference over {len(CORRELATIONS)} correlations, in standard errors", "at most", 4.0, by="ours",
    ),
    Claim("b2", "Signs flatten: the standard deviation of logits falls to 2/pi of what it was",
          "standard deviation of binary logits over that of real ones, independent N(0, 1) queries and keys, d = 64", "about", 0.637, 0.005,
          by="ours"),
    Claim("b3", f"A real row of {GAUSSIAN_TOKENS} keys has 5.05 nats of entropy", "mean entropy in nats of softmax rows, d = 64", "about", 5.05,
          0.01, by="ours"),
    Claim("b4", f"A binary row of {GAUSSIAN_TOKENS} keys has 5.345 nats", "mean entropy in nats of binary rows, d = 64", "about", 5.345,
          0.01, by="ours"),
    Claim("b5", "The binary entropy follows from the arcsine law: log N - (2/pi)^2 / 2",
          "measured entropy less that estimate, in nats", "about", 0.0, 0.02, by="ours"),
    Claim("b6", "The order of keys is half kept: the rank correlation of real and binary logits is about 0.62",
          "rank correlation within rows, d = 64, ties shared", "about", 0.62, 0.01, by="ours"),
    Claim("b7", "That is so whatever d is",
          f"largest distance of the rank correlation from 0.62, d = {', '.join(map(str, SIZES))}", "at most", 0.02,
          by="ours"),
    Claim("b8", "Over all pairs, real and binary logits have a correlation of 2/pi whatever d is, so that of ranks tends to "
          "(6/pi) asin(1/pi) = 0.6187",
          "rank correlation at the largest d less that limit", "about", 0.0, 0.005, by="ours"),
    Claim("b9", f"Sharp rows (queries and keys {SHARP:g} times as large): a real one has 0.64 nats", "mean entropy in nats, d = 64",
          "about", 0.64, 0.05, by="ours"),
    Claim("b10", "Sharp rows: a binary one has 1.13 nats", "mean entropy in nats, d = 64", "about", 1.13, 0.05, by="ours"),
    Claim("b11", "Sharp rows: the strongest key is the same in 13 % of them", "share of rows with the same largest weight, d = 64, "
          "ties among binary weights counted by their share", "about", 0.13, 0.02, by="ours"),
)  # fmt: skip


def arcsine(r: float) -> float:
    """(2/pi) asin(r).

    >>> [round(arcsine(r), 3) for r in (0.3, 0.6, 0.9)]
    [0.194, 0.41, 0.713]
    """
    return 2 / math.pi * math.asin(r)


def sign_product(r: float, pairs: int, seed: int) -> tuple[float, float]:
    """Mean product of signs of `pairs` pairs of correlation r, and its standard error."""
    a, noise = draw_normal(pairs, seed=seed), draw_normal(pairs, seed=seed + 1000)
    product = sign(a) * sign(r * a + math.sqrt(1 - r * r) * noise)
    return float(product.mean()), float(product.std()) / math.sqrt(pairs)


def ranks(x: Float[Tensor, "rows keys"]) -> Float[Tensor, "rows keys"]:
    """From 0, equal entries share the mean of theirs.

    >>> ranks(torch.tensor([[5.0, 1.0, 5.0]])).tolist()
    [[1.5, 0.0, 1.5]]
    """
    below = torch.searchsorted(x.sort(-1).values, x, right=False)
    upto = torch.searchsorted(x.sort(-1).values, x, right=True)
    return (below + upto - 1).double() / 2


def row_correlation(a: Float[Tensor, "rows keys"], b: Float[Tensor, "rows keys"]) -> Float[Tensor, " rows"]:
    """Pearson's, row by row; NaN where one of the two does not vary."""
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    return (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()


def top_agreement(real: Float[Tensor, "rows keys"], binary: Float[Tensor, "rows keys"]) -> Float[Tensor, " rows"]:
    """1 where the largest real weight is the largest binary one, 1 / n where n keys tie for it.

    >>> top_agreement(torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[0.4, 0.4, 0.2]])).tolist()
    [0.5]
    """
    most = binary.amax(-1, keepdim=True)
    best = binary >= most * (1 - 1e-6)  # rounding tells no two counts apart
    return best.gather(-1, real.argmax(-1, keepdim=True))[..., 0].to(real) / best.sum(-1)


@dataclass(frozen=True)
class RowMeans:
    """Means over the rows of one draw: spread of binary logits over that of real ones, entropies of both, correlation of
    the two logits and of their ranks, and rows whose strongest key is the same.
    """

    spread: float
    real: float
    binary: float
    correlation: float
    rank: float
    top: float


def draw_rows(d: int, seed: int, size: float = 1.0) -> RowMeans:
    """One draw: a head of d channels, entries of queries and keys N(0, size^2)."""
    q, k = (size * draw_normal(GAUSSIAN_TOKENS, d, seed=2 * seed + part) for part in range(2))
    weights = [mechanism(name).map(q[None, None], k[None, None])[0, 0] for name in ("softmax", "binary")]
    logits = [w.clamp_min(1e-300).log() for w in weights]
    logits = [x - x.mean(-1, keepdim=True) for x in logits]
    ranked = row_correlation(ranks(logits[0]), ranks(logits[1].mul(1e6).round()))  # equal counts are equal
    return RowMeans(
        spread=float(logits[1].square().mean().sqrt() / logits[0].square().mean().sqrt()),
        real=float(torch.special.entr(weights[0]).sum(-1).mean()),
        binary=float(torch.special.entr(weights[1]).sum(-1).mean()),
        correlation=float(row_correlation(*logits).mean()),
        rank=float(ranked.mean()),
        top=float(top_agreement(*weights).mean()),
    )


def arcsine_law(pairs: int) -> list[dict[str, float]]:
    """Mean products of signs by correlation, beside the law."""
    rows = []
    for number, r in enumerate(CORRELATIONS):
        mean, error = sign_product(r, pairs, number)
        rows.append({"r": r, "mean": mean, "law": arcsine(r), "error": error})
    return rows


def measure_gaussian(setting: Setting) -> Results:
    """Pairs of Gaussian entries, then rows of Gaussian heads of several sizes."""
    draws, law = DRAWS[setting.quick], arcsine_law(PAIRS[setting.quick])
    by_size = {d: [draw_rows(d, seed) for seed in range(draws)] for d in SIZES}
    sharp = [draw_rows(64, seed, SHARP) for seed in range(draws)]
    means = [
        {"size": d, **{f.name: sum(getattr(x, f.name) for x in drawn) / draws for f in fields(RowMeans)}}
        for d, drawn in by_size.items()
    ]
    off = max(abs(row["mean"] - row["law"]) / row["error"] for row in law)
    tables = {
        "arcsine_law": {"rows": law, "curve": [[i / 50, arcsine(i / 50)] for i in range(-50, 51)]},
        "gaussian_heads": {"keys": GAUSSIAN_TOKENS, "rows": means},
    }
    measured = {
        "b1": Measurement(off, 0.0, "none: in standard errors"),
        **measure_rows(by_size),
        **measure_sharp_rows(sharp),
    }
    return Results(measured, tables)


def measure_rows(by_size: dict[int, list[RowMeans]]) -> dict[str, Measurement]:
    """Claims on rows of heads; b7 is judged at the size whose rank correlation is farthest from the stated one."""
    plain, widest = by_size[64], by_size[SIZES[-1]]
    estimate = float(second_order_entropy((2 / math.pi) ** 2, GAUSSIAN_TOKENS))
    away = {d: sum(x.rank for x in drawn) / len(drawn) - KEPT_ORDER for d, drawn in by_size.items()}
    worst = max(SIZES, key=lambda d: abs(away[d]))
    side = math.copysign(1.0, away[worst])
    return {
        "b2": by_seed([x.spread for x in plain], of="draws"),
        "b3": by_seed([x.real for x in plain], of="draws"),
        "b4": by_seed([x.binary for x in plain], of="draws"),
        "b5": by_seed([x.binary - estimate for x in plain], of="draws"),
        "b6": by_seed([x.rank for x in plain], of="draws"),
        "b7": by_seed([side * (x.rank - KEPT_ORDER) for x in by_size[worst]], {"size": worst}, "draws"),
        "b8": by_seed([x.rank - LIMIT for x in widest], {"limit": LIMIT}, "draws"),
    }


def measure_sharp_rows(sharp: list[RowMeans]) -> dict[str, Measurement]:
    return {
        "b9": by_seed([x.real for x in sharp], of="draws"),
        "b10": by_seed([x.binary for x in sharp], of="draws"),
        "b11": by_seed([x.top for x in sharp], of="draws"),
    }


GAUSSIAN_STUDY = Study("what signs do to Gaussian queries and keys", GAUSSIAN_CLAIMS, measure_gaussian)


# ---- c: trained models ----


LENGTH = 128
MODEL_TOKENS = {True: 1024, False: 8192}  # per half of the text
CHARACTERS = {True: 30_000, False: 240_000}
RESTORED_SPREAD = math.pi / 2  # times: brings the spread of Gaussian logits back to what it was

MODEL_CLAIMS = (
    Claim("c1", "Signs flatten the rows of trained models too", "change of mean entropy in nats by binary attention, least of the models",
          "at least", 0.0, by="ours"),
    Claim("c2", "Trained heads keep their strongest key more often than random ones do (13 %)",
          "share of rows whose largest weight stays the largest, least of the models", "at least", 0.13, by="ours"),
    Claim("c3", "The order of keys is kept as well as of Gaussian ones (0.62)",
          "rank correlation of real and binary logits within rows, mean over heads, least of the models", "at least", 0.62, by="ours"),
    Claim("c4", "A trained model can be made binary as it is: fine-tuning is for the last bit",
          "divergence of the next token's distribution from the model's own, nats, largest of the causal models", "at most", 0.1,
          by="ours"),
    Claim("c5", "Giving logits their spread back (times pi/2) makes up for it: flatness is what is wrong",
          "share of that divergence that is undone, least of the causal models", "at least", 0.5, by="ours"),
    Claim("c6", "Fine-tuning sees its queries and keys: most entries are inside the window from -1 to 1 through which gradients come",
          "share of entries of queries and keys outside of it, largest of the models", "at most", 0.5, by="ours"),
)  # fmt: skip


class BinaryAttention(SwapMechanism):
    """Attention of an attached model becomes binary, without a bias: the one thing that binary attention would learn is
    left out.

    >>> BinaryAttention()
    BinaryAttention(layers=None)
    """

    def __init__(self, layers: Layers = None) -> None:
        self.name, self.layers = "binary", layers


@contextmanager
def binary_model(model: nn.Module, times: float = 1.0) -> Iterator[None]:
    """The model with binary attention, logits multiplied by `times`; as it was afterwards."""
    control = Controls([Temperature(init=1 / times, learn=False), BinaryAttention()]).attach(model)
    try:
        yield
    finally:
        control.detach()


@torch.no_grad()
def layer_entry(layer: AttentionLayer, x: Tensor) -> dict[str, float]:
    """Means over heads and over rows of the second half, whose keys are many: entropies, kept top, kept order, share
    outside the window.
    """
    bare = replace(layer, norm=Norm(), memory_norm=None)  # x is what comes out of the norm
    q, k = bare.queries(x).double(), bare.keys(x).double()
    late = slice(x.shape[1] // 2, None)
    how: dict[str, Any] = dict(causal=layer.causal, scale=layer.scale)
    real, binary = (mechanism(name).map(q, k, **how)[:, :, late] for name in ("softmax", "binary"))
    # keys that all of these rows see, but for the first, which many heads use as a sink
    early = slice(1, x.shape[1] // 2)
    logits = [y[..., early].clamp_min(1e-300).log().flatten(0, 2) for y in (real, binary)]
    ranked = row_correlation(ranks(logits[0]), ranks(logits[1].mul(1e5).round()))
    return {
        "entropy": float(torch.special.entr(real).sum(-1).mean()),
        "binary_entropy": float(torch.special.entr(binary).sum(-1).mean()),
        "top": float(top_agreement(real, binary).mean()),
        "rank": float(ranked[ranked.isfinite()].mean()),
        "outside": float(torch.cat([q.abs().flatten(), k.abs().flatten()]).gt(1).double().mean()),
        "size": float(q.shape[-1]),
        "query_rms": float(q.square().mean().sqrt()),
        "key_rms": float(k.square().mean().sqrt()),
    }


@torch.no_grad()
def next_token(model: nn.Module, batch: list[dict[str, Tensor]]) -> Tensor:
    """Log probabilities of the next token (sequences, tokens, vocabulary)."""
    return torch.cat([run_model(model, part).logits[:, :-1].log_softmax(-1) for part in batch])


def mean_loss(log: Tensor, batch: list[dict[str, Tensor]]) -> float:
    """Mean loss of the next token, in nats."""
    following = torch.cat([part["input_ids"][:, 1:] for part in batch])
    return -float(log.gather(-1, following[..., None]).mean())


def divergence(log: Tensor, other: Tensor) -> float:
    """KL(p || q) in nats per token: what q loses against p on text that p would write, whatever text this is.

    >>> half, sure = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
    >>> round(divergence(half, sure), 4)
    0.1438
    """
    return float((log.exp() * (log - other)).sum(-1).mean())


@torch.no_grad()
def pooled_outputs(model: nn.Module, batch: list[dict[str, Tensor]]) -> Tensor:
    """Means over tokens of what an encoder gives, a row per sequence."""
    return torch.cat([run_model(model, part).last_hidden_state.mean(1) for part in batch])


def model_entry(folder: Path, text: str, quick: bool) -> dict[str, Any]:
    """One model on one text: means over layers, and what it gives out as it is, binary, and with the spread back."""
    model = load_model(str(folder))
    batch = batches(model, text, length=LENGTH, tokens=MODEL_TOKENS[quick])
    layers = [layer_entry(layer, x) for layer, x in layer_inputs(model, batch)]
    entry: dict[str, Any] = {name: sum(row[name] for row in layers) / len(layers) for name in layers[0]}
    entry |= {"layers": layers, "causal": "CausalLM" in type(model).__name__}
    outputs = next_token if entry["causal"] else pooled_outputs
    before = outputs(model, batch)
    with binary_model(model):
        after = outputs(model, batch)
    with binary_model(model, RESTORED_SPREAD):
        restored = outputs(model, batch)
    if not entry["causal"]:
        return {**entry, "cosine": _cosine(before, after), "restored_cosine": _cosine(before, restored)}
    lost, still_lost = divergence(before, after), divergence(before, restored)
    return {
        **entry,
        "loss": mean_loss(before, batch),
        "binary_loss": mean_loss(after, batch),
        "restored_loss": mean_loss(restored, batch),
        "divergence": lost,
        "restored_divergence": still_lost,
        "undone": 1 - still_lost / lost,
    }


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(nn.functional.cosine_similarity(a, b).mean())


def measure_model(setting: Setting) -> Results:
    """Every model on two halves of a text, which give the spread."""
    size = CHARACTERS[setting.quick]
    by_half: list[dict[str, dict[str, Any]]] = [{}, {}]
    plan = [(name, folder, half) for name, folder in model_folders(setting.models).items() for half in range(2)]
    for name, folder, half in setting.each(plan):
        by_half[half][name] = model_entry(folder, setting.text[half * size : (half + 1) * size], setting.quick)
    models = [list(half.values()) for half in by_half]
    causal = [[m for m in half if m["causal"]] for half in models]

    def halves(values: list[float]) -> Measurement:
        return half_range(values, HALVES)

    measured = {
        "c1": halves([min(m["binary_entropy"] - m["entropy"] for m in half) for half in models]),
        "c2": halves([min(m["top"] for m in half) for half in models]),
        "c3": halves([min(m["rank"] for m in half) for half in models]),
        "c4": halves([max(m["divergence"] for m in half) for half in causal]),
        "c5": halves([min(m["undone"] for m in half) for half in causal]),
        "c6": halves([max(m["outside"] for m in half) for half in models]),
    }
    rows = [{"model": name, **entry} for name, entry in by_half[0].items()]
    return Results(measured, {"models_made_binary": rows})


MODEL_STUDY = Study("trained models made binary as they are", MODEL_CLAIMS, measure_model, on_models=True)
