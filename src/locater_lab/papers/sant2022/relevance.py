"""How much a head counts: the paper's measure (study c), in trained models beside leaving heads out (study d), and in
training, where even relevance should go with a lower loss (study e). The paper's own scores, of speech translation,
are claims f, which nothing here can measure.

    c_h = sum_t |W_O^h o_ht|_1        r_h = median over samples of c_h / sum_h' c_h'

is the share of each head in what a layer adds to the stream, in the absolute-sum norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.commands.load_model import load_model
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.inputs.text import batches
from locater.numerics import spearman
from locater_lab.engine.arms import Line, difference, final_numbers, rank_correlation, study_of_arms, table_of_arms
from locater_lab.engine.claims import Claim, Measurement, by_seed, half_range
from locater_lab.engine.devices_and_processes import draw_normal
from locater_lab.engine.mechanism_runs import MASKED, SOFTMAX_MASKED, arm
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.engine.runs import Arm, Runs
from locater_lab.engine.trained_models import model_folders, read_each
from locater_lab.mechanisms.multiformer import head_relevance

# ---- c: relevance of heads ----


DRAWS = {True: 40, False: 300}
HEADS, SIZE, WIDTH, DRAWN_SAMPLES, TOKENS = 4, 8, 64, 31, 12
LOOPED_DRAWS = 5  # draws that are compared with loops

RELEVANCE_CLAIMS = (
    Claim(
        "c1",
        "Relevance is each head's share of what the layer adds",
        "largest difference from sums written out",
        "at most",
        1e-12,
        by="ours",
    ),
    Claim(
        "c2",
        "Of one sample the shares sum to 1",
        "largest distance of the sum from 1",
        "at most",
        1e-12,
        by="ours",
    ),
    Claim(
        "c3",
        "Their medians over samples do too",
        f"largest distance of the sum from 1 over draws, {DRAWN_SAMPLES} samples that lean on different heads",
        "at most",
        0.02,
        by="ours",
    ),
    Claim(
        "c4",
        "Another basis inside heads, another order of tokens or another scale of the layer changes nothing",
        "largest change of a share",
        "at most",
        1e-12,
        by="ours",
    ),
    Claim(
        "c5",
        "Another basis of the stream changes nothing",
        f"change of share, two heads of equal strength, one of which writes to one channel of {WIDTH}",
        "at most",
        0.05,
        by="ours",
    ),
    Claim(
        "c6",
        "A layer without its most relevant heads is another layer",
        "change of the layer's output by leaving out two heads with 0.9 of the relevance that undo each other, over "
        "its size",
        "at least",
        0.5,
        by="ours",
    ),
)


def draw_heads(seed: int, samples: int = DRAWN_SAMPLES) -> tuple[Float[Tensor, "B H T E"], Float[Tensor, "W HE"]]:
    """Heads of different strengths, which differ by sample."""
    heads = (
        draw_normal(samples, HEADS, TOKENS, SIZE, seed=seed) * draw_normal(samples, HEADS, 1, 1, seed=seed + 1).exp()
    )
    return heads, draw_normal(WIDTH, HEADS * SIZE, seed=seed + 2)


def relevance_in_loops(heads: Tensor, weight: Tensor) -> list[float]:
    """The definition in loops."""
    shares: list[list[float]] = []
    for sample in heads:
        sizes = []
        for h, outputs in enumerate(sample):
            part = weight[:, h * SIZE : (h + 1) * SIZE]
            sizes.append(sum((part @ o).abs().sum().item() for o in outputs))
        shares.append([size / sum(sizes) for size in sizes])
    return [median(share[h] for share in shares) for h in range(len(shares[0]))]


def invariance_error(seed: int) -> float:
    """Largest change by bases inside heads, order of tokens, and scale."""
    heads, weight = draw_heads(seed)
    plain = head_relevance(heads, weight)
    basis = draw_normal(HEADS, SIZE, SIZE, seed=seed + 3) + 3 * torch.eye(SIZE, dtype=torch.float64)
    turned = torch.cat([weight[:, h * SIZE : (h + 1) * SIZE] @ torch.linalg.inv(basis[h]).mT for h in range(HEADS)], 1)
    changes = [
        head_relevance(heads @ basis, turned),
        head_relevance(heads.flip(2), weight),
        head_relevance(7.0 * heads, weight / 3),
    ]
    return max((x - plain).abs().max().item() for x in changes)


def rotated_stream_shares(seed: int) -> tuple[float, float]:
    """Share of a head that writes to one channel beside one as strong that writes to all; as it is, and with the stream
    turned.
    """
    heads = draw_normal(DRAWN_SAMPLES, 2, TOKENS, 1, seed=seed)
    weight = torch.zeros(WIDTH, 2, dtype=torch.float64)
    weight[0, 0] = 1.0
    weight[:, 1] = draw_normal(WIDTH, seed=seed + 1)
    weight[:, 1] /= weight[:, 1].norm()
    turn = torch.linalg.qr(draw_normal(WIDTH, WIDTH, seed=seed + 2)).Q
    return head_relevance(heads, weight)[0].item(), head_relevance(heads, turn @ weight)[0].item()


def cancelling_heads() -> dict[str, float]:
    """Four heads, of which the first two write opposite things; their relevance, and what leaving both out changes."""
    heads, weight = draw_normal(DRAWN_SAMPLES, HEADS, TOKENS, SIZE, seed=0), draw_normal(WIDTH, HEADS * SIZE, seed=1)
    heads[:, 0] *= 9
    heads[:, 1] = heads[:, 0]
    weight[:, SIZE : 2 * SIZE] = -weight[:, :SIZE]
    shares = head_relevance(heads, weight)

    def layer(x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2) @ weight.mT

    without = heads.clone()
    without[:, :2] = 0
    change = (layer(heads) - layer(without)).norm() / layer(heads).norm()
    return {"relevance": shares[:2].sum().item(), "change": change.item()}


def measure_relevance(setting: Setting) -> Results:
    """All draws."""
    seeds = range(DRAWS[setting.quick])
    largest = f"none: the largest of {len(seeds)} draws"
    exact, once, medians = [], [], []
    for seed in seeds:
        heads, weight = draw_heads(10 * seed)
        shares = head_relevance(heads, weight)
        if seed < LOOPED_DRAWS:
            loops = torch.tensor(relevance_in_loops(heads, weight), dtype=torch.float64)
            exact.append((shares - loops).abs().max().item())
        once.append(abs(head_relevance(heads[:1], weight).sum().item() - 1))
        medians.append(shares.sum().item() - 1)
    pairs = [rotated_stream_shares(10 * seed) for seed in seeds]
    undone = cancelling_heads()
    measured = {
        "c1": Measurement(max(exact), 0.0, f"none: the largest of {len(exact)} draws"),
        "c2": Measurement(max(once), 0.0, largest),
        "c3": Measurement(max(abs(x) for x in medians), 0.0, largest),
        "c4": Measurement(max(invariance_error(10 * seed) for seed in seeds), 0.0, largest),
        "c5": by_seed([b - a for a, b in pairs], of="draws"),
        "c6": Measurement(undone["change"], 0.0, "none: built"),
    }
    tables = {
        "sum_of_medians": 1 + fmean(medians),
        "one_channel_share": {"as_it_is": pairs[0][0], "turned": pairs[0][1]},
        "cancelling_heads": undone,
    }
    return Results(measured, tables)


RELEVANCE_STUDY = Study("relevance of heads", RELEVANCE_CLAIMS, measure_relevance)


# ---- d: trained models ----


SAMPLES, LENGTH = {True: 3, False: 16}, 48
CHARACTERS = 60_000
OUTPUTS = ("o_proj", "attention.output.dense", "out_proj")  # how output projections are called
Batch = dict[str, Tensor]

MODEL_CLAIMS = (
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


def output_projections(model: Any) -> list[tuple[nn.Linear, int]]:
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
def without_head(projection: nn.Linear, head: int, heads: int) -> Iterator[None]:
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
def layer_relevances(model: Any, batch: Batch) -> list[Tensor]:
    """Of every layer, over the samples of a batch."""
    seen: list[Tensor] = []
    parts = output_projections(model)
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
def changes_without_heads(model: Any, batch: Batch) -> list[Tensor]:
    """Of every layer and head: |change of the last states| over their size, without it."""
    plain = model(**batch, output_hidden_states=True).hidden_states[-1]
    by_layer = []
    for projection, heads in output_projections(model):
        sizes = []
        for head in range(heads):
            with without_head(projection, head, heads):
                last = model(**batch, output_hidden_states=True).hidden_states[-1]
            sizes.append((last - plain).norm() / plain.norm())
        by_layer.append(torch.stack(sizes))
    return by_layer


def model_entry(name: str, folder: Path, setting: Setting) -> dict[str, Any]:
    """A model from its folder, on two halves of the text's first samples."""
    model = load_model(str(folder)).requires_grad_(False)
    each, text = SAMPLES[setting.quick], setting.text[:CHARACTERS]
    return entry_of_halves(name, model, batches(model, text, length=LENGTH, tokens=2 * each * LENGTH, batch=each)[:2])


def entry_of_halves(name: str, model: Any, halves: Sequence[Batch]) -> dict[str, Any]:
    """What a model shows on each half: the variation of relevance over heads, and its agreement with leaving heads out;
    for the page, the mean relevance of every head (1 is even) and the range of agreement over layers.
    """
    shares, agreement = [], []
    for half in halves:
        shares.append(layer_relevances(model, half))
        pairs = zip(shares[-1], changes_without_heads(model, half), strict=True)
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


def measure_entries(entries: Sequence[Mapping[str, Any]]) -> dict[str, Measurement | None]:
    """Each half of the samples by itself."""
    if not entries:
        return {}
    of = "half the difference of two halves of the samples"
    return {
        key: half_range([min(entry[name][half] for entry in entries) for half in range(2)], of)
        for key, name in (("d1", "variation"), ("d2", "agreement"))
    }


def measure_model(setting: Setting) -> Results:
    """The available models; those that cannot be read are named."""
    read, left_out = read_each(
        model_folders(setting.models).items(), lambda name, folder: model_entry(name, folder, setting)
    )
    rows = list(read.values())
    table = {"rows": rows, "left_out": left_out, "samples": SAMPLES[setting.quick], "length": LENGTH}
    return Results(measure_entries(rows), {"trained_models": table} if rows else {})


MODEL_STUDY = Study("relevance in trained models", MODEL_CLAIMS, measure_model, needs="a trained model", on_models=True)


# ---- e and f: training, and the paper's scores ----


FULL_MIX = arm("multiformer", MASKED)
KINDS = {kinds: arm(f"multiformer(kinds={kinds})", MASKED) for kinds in ("llcc", "llll", "cccc")}
LOCAL_COMPRESSED_MIX, LOCAL, COMPRESSED = KINDS.values()
ARMS = (SOFTMAX_MASKED, FULL_MIX, LOCAL_COMPRESSED_MIX, LOCAL, COMPRESSED)
AT_MODEL_SIZE = "masked language model of this size"

TRAINING_CLAIMS = (
    Claim(
        "e1",
        "Local and compressed heads in one layer do better than local heads alone, as seen at this size",
        f"report loss of llcc less that of llll, {AT_MODEL_SIZE}",
        "at most",
        0.0,
        by="ours",
    ),
    Claim(
        "e2",
        "They do better than compressed heads alone, as seen at this size",
        f"report loss of llcc less that of cccc, {AT_MODEL_SIZE}",
        "at most",
        0.0,
        by="ours",
    ),
    Claim(
        "e3",
        "A mix does better than full attention, as seen at this size",
        f"report loss of the mix with the lower select loss, less that of softmax, {AT_MODEL_SIZE}",
        "at most",
        0.0,
        by="ours",
    ),
    Claim(
        "e4",
        "A mix makes heads count more evenly, as seen at this size",
        f"variation of relevance of llcc less that of softmax attention, mean over layers, {AT_MODEL_SIZE}, llcc at one rate",
        "at most",
        0.0,
        by="ours",
    ),
    Claim(
        "e5",
        "The more evenly heads count, the better the model, as seen at this size",
        f"rank correlation of variation of relevance with report loss over {len(ARMS)} arms, {AT_MODEL_SIZE}",
        "at least",
        0.5,
        by="ours",
    ),
)

TRANSLATION_CLAIMS = (
    Claim(
        "f1",
        "In speech translation mixed heads score up to 0.7 BLEU above the baseline",
        "BLEU of the best mixed layout less that of the baseline",
        "about",
        0.7,
        0.05,
        where="abstract",
    ),
    Claim(
        "f2",
        "In speech translation, models whose heads count evenly score higher",
        "rank correlation of variation of relevance with BLEU over layouts",
        "at most",
        0.0,
        where="abstract",
        bound="ours",
    ),
)
SPEECH = (
    "speech translation, which this project does not train: MuST-C's recordings, a model first trained to transcribe, "
    "50,000 updates for each layout"
)


def unevenness(line: Line) -> float:
    """Standard deviation over mean of heads' relevance, mean over layers; NaN where it was not measured."""
    layers = (line.get("measures") or {}).get("relevance") or []
    return fmean(variation(torch.tensor(layer, dtype=torch.float64)) for layer in layers) if layers else math.nan


def evenness_correlation(runs: Runs) -> Measurement | None:
    """Over arms, seed by seed; None until all arms are whole and measured."""
    if any(math.isnan(unevenness(line)) for each in ARMS for line in each.final_lines(runs) or ()):
        return None
    return rank_correlation(runs, ARMS, unevenness, "report_loss")


def better_mix(runs: Runs) -> Arm | None:
    """The mix with the lower loss on the select split, over the seeds that both have; None while one is not whole."""
    full, mix = FULL_MIX.final_lines(runs), LOCAL_COMPRESSED_MIX.final_lines(runs)
    if full is None or mix is None:
        return None
    return (
        FULL_MIX
        if sum(a["select_loss"] - b["select_loss"] for a, b in zip(full, mix, strict=False)) < 0
        else LOCAL_COMPRESSED_MIX
    )


def judge_training(runs: Runs) -> Results:
    best = better_mix(runs)
    measured = {
        "e1": difference(runs, LOCAL_COMPRESSED_MIX, LOCAL, "report_loss"),
        "e2": difference(runs, LOCAL_COMPRESSED_MIX, COMPRESSED, "report_loss"),
        "e3": None if best is None else difference(runs, best, SOFTMAX_MASKED, "report_loss", {"best": best.name}),
        "e4": difference(runs, LOCAL_COMPRESSED_MIX, SOFTMAX_MASKED, unevenness),
        "e5": evenness_correlation(runs),
    }
    arms = table_of_arms(runs, ARMS, _end_of_line)
    table = {"arms": arms, "layers": MASKED.layers, "heads": MASKED.heads}
    return Results(measured, {"mixed_heads": table} if arms else {})


def _end_of_line(line: Line) -> dict[str, Any]:
    uneven = unevenness(line)
    return {**final_numbers(line), "unevenness": None if math.isnan(uneven) else uneven}


TRAINING_STUDY = study_of_arms("mixed heads in training", TRAINING_CLAIMS, ARMS, judge_training)
SCORES_STUDY = Study("translation scores", TRANSLATION_CLAIMS, needs=SPEECH)
