"""Whether LocAteR slows rank collapse: the penalty alone on drawn heads, and trained models without their skips and
MLPs. End of study h.

A model that sorts numbers (the paper's own task) sees all tokens at once, so that nothing but attention, once skips and
MLPs are out (`locater.control.surgery`), decides how fast its tokens become equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.control.base import Control
from locater.control.locater import LocAteR, traces
from locater.control.surgery import Surgery
from locater.measures import rank_residual
from locater_lab.engine.claims import Claim, by_seed
from locater_lab.engine.devices_and_processes import device_of_study, map_parts
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.dong2021.contraction import visible_points
from locater_lab.papers.dong2021.planted_heads import WIDTH, draw_tokens
from locater_lab.papers.dong2021.two_collapses import MAIN
from locater_lab.theory import FunctionalBlock, depth_residuals
from locater_lab.train import Shape, Transformer

SEEDS = 8
TARGET, LARGE = 2.0, 8.0  # LocAteR's default, and one beyond it
# sqrt F of drawn heads, about that of BERT's; steps of the penalty and their size
DRAWN_SIZE, DESCENT_STEPS, RATE = 0.3, 400, 3e-3
DEPTH, SHOWN = 6, 2  # layers of a stack; after how many its claims are read
# after how many that of trained models is: beyond it attention without penalty has nothing left that float64 could tell
READ_LAYER = 3
SCALE = WIDTH**-0.5
SHAPE = Shape(
    vocabulary=10,
    layers=6,
    width=48,
    heads=2,
    kv_heads=2,
    hidden=96,
    length=16,
    positions="learned",
    mlp="gelu",
    causal=False,
)
STEPS, BATCH, PACE, WARM = {True: 60, False: 2000}, 32, 3e-3, 30
CHECKED = 64  # sequences
Maps = tuple[Float[Tensor, "heads h d"], Float[Tensor, "heads h d"]]

CLAIMS = (
    Claim(
        "h11", f"LocAteR's penalty alone, at its default target of {TARGET:g}, slows the collapse of drawn heads",
        f"decades of the residual's share gained after {SHOWN} layers of attention and LayerNorm", "at least", 0.0, by="ours",
    ),
    Claim(
        "h12", "It is the mean that does it: maps of mean zero and the same F collapse sooner",
        f"decades of the residual's share lost after {SHOWN} layers by redrawing the maps at the same F", "at least", 0.0, by="ours",
    ),
    Claim(
        "h13", "A trained model's attention collapses later if it was trained with LocAteR",
        f"decades of the residual's share gained after {READ_LAYER} of {SHAPE.layers} layers without skips and MLPs, models that sort",
        "at least", 0.0,
        by="ours",
    ),
)  # fmt: skip


# --- the penalty alone ---


def draw_maps(heads: int, size: float, seed: int) -> Maps:
    """Gaussian query and key maps with sqrt F = size on average."""
    noise = torch.randn(2, heads, WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed))
    query, key = noise * math.sqrt(size / (SCALE * WIDTH**1.5))
    return query, key


def penalize_maps(maps: Maps, target: float, steps: int | None = None) -> Maps:
    """Adam on the penalty and nothing else, DESCENT steps of it unless said."""
    query, key = (x.clone().requires_grad_() for x in maps)
    penalty, optimizer = LocAteR(target=target), torch.optim.Adam([query, key], lr=RATE)
    for _ in range(DESCENT_STEPS if steps is None else steps):
        optimizer.zero_grad()
        penalty.of(query, key, SCALE).sum().backward()
        optimizer.step()
    return query.detach(), key.detach()


def moments_of(maps: Maps) -> dict[str, float]:
    """Means over heads of M, sqrt F and S/F."""
    trace, square, size = traces(*maps)
    return {
        "M": float(SCALE * trace.mean()),
        "size": float(SCALE * size.sqrt().mean()),
        "ratio": float((square / size).mean()),
    }


def stack_shares(maps: Maps, x: Float[Tensor, "T d"]) -> list[float]:
    """Residual's share after every layer; values and output are the identity."""
    same = torch.eye(WIDTH, dtype=torch.float64)[None]
    layers = [FunctionalBlock((q.mT @ k).double()[None], same, SCALE, norm=True) for q, k in zip(*maps, strict=True)]
    return depth_residuals(x, layers, relative=True).clamp_min(1e-17).tolist()


def penalty_alone(seed: int) -> dict[str, dict[str, Any]]:
    """A stack of drawn heads as it is, after the penalty, and redrawn at the F that the penalty left."""
    x, begun = draw_tokens(MAIN, 1, seed)[0].double(), draw_maps(DEPTH, DRAWN_SIZE, seed)
    heads = {
        "drawn": begun,
        "penalty, target 2": penalize_maps(begun, TARGET),
        "penalty, target 8": penalize_maps(begun, LARGE),
    }
    for name in list(heads)[1:]:
        heads[f"mean zero, F of {name[9:]}"] = draw_maps(DEPTH, moments_of(heads[name])["size"], seed + 100)
    return {name: {"shares": stack_shares(maps, x), **moments_of(maps)} for name, maps in heads.items()}


# --- in training ---

ARMS = {"no penalty": None, "LocAteR, target 2": TARGET, "LocAteR, target 8": LARGE}


def draw_numbers(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences of digits, and the same in order: the class of a place is the digit that belongs there."""
    rows = torch.randint(SHAPE.vocabulary, (count, SHAPE.length), generator=generator)
    return rows, rows.sort(1).values


def train_sorter(arm: str, seed: int, steps: int, where: str = "cpu") -> tuple[Transformer, float]:
    """A model that sorts, and its accuracy on fresh sequences; every arm starts alike and sees the same batches."""
    torch.manual_seed(seed)
    model, target = Transformer(SHAPE).to(where), ARMS[arm]
    control: Control = (Control() if target is None else LocAteR(target=target)).attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PACE, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(seed)
    # at once: a step does not wait for its batch
    drawn_rows = torch.stack([draw_numbers(BATCH, generator)[0] for _ in range(steps)]).to(where)
    for step, rows in enumerate(drawn_rows):
        for group in optimizer.param_groups:
            group["lr"] = PACE * min(1.0, (step + 1) / WARM) * 0.5 * (1 + math.cos(math.pi * step / steps))
        (model(rows, rows.sort(1).values) + control.loss()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        control.after_step()
    control.detach()
    rows, right = (x.to(where) for x in draw_numbers(CHECKED, torch.Generator().manual_seed(10_000 + seed)))
    with torch.no_grad():
        return model, float((model(rows).argmax(-1) == right).double().mean())


@torch.no_grad()
def layer_shares(model: Transformer, cut: bool, seed: int) -> list[float]:
    """Residual's share before the first block and after each, geometric mean over sequences; `cut`: without skips and
    MLPs.
    """
    rows = draw_numbers(CHECKED, torch.Generator().manual_seed(20_000 + seed))[0].to(model.lm_head.weight.device)
    states: list[Tensor] = []
    model = model.double()  # in place: float32 would call tokens equal from 1e-8 on
    hooks = [model.model.layers[0].register_forward_pre_hook(lambda m, inputs: states.append(inputs[0]))]
    hooks += [layer.register_forward_hook(lambda m, inputs, out: states.append(out)) for layer in model.model.layers]
    surgery = Surgery(no_skip=True, no_mlp=True).attach(model) if cut else None
    try:
        model(rows)
    finally:
        for hook in hooks:
            hook.remove()
        if surgery is not None:
            surgery.detach()
    return [float(rank_residual(x).clamp_min(1e-17).log().mean().exp()) for x in states]


def train_and_measure(arm: str, seed: int, steps: int, where: str = "cpu") -> dict[str, Any]:
    """An arm's accuracy, and the residual's share per layer, whole and cut."""
    model, accuracy = train_sorter(arm, seed, steps, where)
    return {"accuracy": accuracy, "whole": layer_shares(model, False, seed), "cut": layer_shares(model, True, seed)}


# --- the study ---


def measure_part(setting: Setting, part: tuple[str | None, int]) -> dict[str, Any]:
    """An arm's model, or, without an arm, stacks of drawn heads."""
    arm, seed = part
    return (
        penalty_alone(seed)
        if arm is None
        else train_and_measure(arm, seed, STEPS[setting.quick], device_of_study(setting))
    )


def measure(setting: Setting) -> Results:
    """All seeds; differences are taken within a seed."""
    plan = [(arm, seed) for arm in (*ARMS, None) for seed in range(SEEDS)]
    by_part = dict(zip(plan, map_parts(measure_part, plan, setting), strict=True))
    stacks = [by_part[None, seed] for seed in range(SEEDS)]
    runs = [{arm: by_part[arm, seed] for arm in ARMS} for seed in range(SEEDS)]

    def gain(better: str, worse: str) -> list[float]:
        return [math.log10(run[better]["shares"][SHOWN] / run[worse]["shares"][SHOWN]) for run in stacks]

    def later(arm: str) -> list[float]:
        return [math.log10(run[arm]["cut"][READ_LAYER] / run["no penalty"]["cut"][READ_LAYER]) for run in runs]

    measured = {
        "h11": by_seed(gain("penalty, target 2", "drawn")),
        "h12": by_seed(gain("penalty, target 2", "mean zero, F of target 2")),
        "h13": by_seed(later("LocAteR, target 2")),
    }
    shown = {
        name: {"shares": _geometric_means([run[name]["shares"] for run in stacks]), **_moments(stacks, name)}
        for name in stacks[0]
    }
    large = {"h12": gain("penalty, target 8", "mean zero, F of target 8"), "h13": later("LocAteR, target 8")}
    models = models_table({arm: _mean_over_runs(runs, arm) for arm in ARMS}, STEPS[setting.quick])
    return Results(measured, {"penalty_stacks": stacks_table(shown), "sorting_models": models, "at_target_8": large})


def stacks_table(stacks: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """With the points that float64 can show."""
    return {name: {**stack, "points": visible_points(stack["shares"])} for name, stack in stacks.items()}


def models_table(arms: Mapping[str, Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """The same of trained models, whole and cut."""
    drawn_arms = {
        name: {**arm, "points": {kind: visible_points(arm[kind]) for kind in ("whole", "cut")}}
        for name, arm in arms.items()
    }
    return {"arms": drawn_arms, "steps": steps, "layers": SHAPE.layers, "shown": SHOWN, "halfway": READ_LAYER}


def _mean_over_runs(runs: Sequence[Mapping[str, Any]], arm: str) -> dict[str, Any]:
    """An arm's accuracy and residuals, over seeds."""
    shares = {kind: _geometric_means([run[arm][kind] for run in runs]) for kind in ("whole", "cut")}
    return {"accuracy": fmean(run[arm]["accuracy"] for run in runs), **shares}


def _moments(runs: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    return {key: fmean(run[name][key] for run in runs) for key in ("M", "size", "ratio")}


def _geometric_means(rows: Sequence[Sequence[float]]) -> list[float]:
    return torch.tensor(rows, dtype=torch.float64).log().mean(0).exp().tolist()


STUDY = Study("does LocAteR slow rank collapse", CLAIMS, measure, quick=False)
