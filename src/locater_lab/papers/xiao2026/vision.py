"""One-bit queries and keys on images, the paper's own ground: a classifier and a small diffusion transformer, trained
with binary attention from the start, and with softmax, made binary late in training and trained on. Study g.

The paper starts from models trained on ImageNet, and fine-tunes them for 300 epochs. Here a run of 1,500 steps on
Fashion-MNIST changes its attention after 1,000 of them. Softmax and binary attention from the start have the same 1,500
steps, so what is compared has seen the same images the same number of times.
"""

from __future__ import annotations

import math
from dataclasses import replace

from locater_lab.engine.arms import Line, difference, end_of, ends_table, mean_of_arm, study_of_arms
from locater_lab.engine.claims import Claim
from locater_lab.engine.mechanism_runs import AT_THIS_SIZE, IMAGE, IMAGE_RATES
from locater_lab.engine.reproduction import Results
from locater_lab.engine.runs import Arm, Runs
from locater_lab.train.plan import Plan

DIFFUSION = replace(IMAGE, task="diffusion")
DIFFUSION_RATES = (5e-4, 1.5e-3)
BINARY = "binary(grid=(7, 7))"  # patches of 4 x 4 of 28 x 28, a learned bias per offset
CONVERTED_AT, SEEDS = 1000, 5
POINT, PART = 0.01, 0.02  # of accuracy, and of the denoising loss: what counts as level; ours
BROKEN = 0.1  # of the denoising loss: what counts as damage; ours


def arms_of(base: Plan, rates: tuple[float, float]) -> dict[str, Arm]:
    """Softmax, binary attention from the start, and softmax made binary, each at the better of two rates."""
    plans = {
        "softmax": base,
        "binary": replace(base, attention=BINARY),
        "converted": replace(base, convert=BINARY, convert_at=CONVERTED_AT),
    }
    return {name: Arm(f"{name}, {base.task}", "g", plan, rates, SEEDS) for name, plan in plans.items()}


IMAGES, NOISE = arms_of(IMAGE, IMAGE_RATES), arms_of(DIFFUSION, DIFFUSION_RATES)
ARMS = (*IMAGES.values(), *NOISE.values())

AFTER = f"softmax made binary after {CONVERTED_AT:,} of {IMAGE.steps:,} steps"
ON_IMAGES = f"each at the better of two rates, Fashion-MNIST, {AT_THIS_SIZE}"
ACCURACY, LOSS = "change of test accuracy", "log ratio of denoising losses"

CLAIMS = (
    Claim("g1", "Made binary and fine-tuned, a classifier of images is as accurate as in full precision, or more (in the paper: on ImageNet)",
          f"{ACCURACY}, {AFTER}, against softmax throughout, {ON_IMAGES}", "at least", 0.0, where="abstract"),
    Claim("g2", "It comes within one point",
          f"{ACCURACY}, {AFTER}, against softmax throughout, {ON_IMAGES}", "at least", -POINT, by="ours"),
    Claim("g3", "Without fine-tuning the change costs a classifier a point or more",
          f"{ACCURACY} by making softmax binary after {CONVERTED_AT:,} steps, the weights as they are", "at most", -POINT, by="ours"),
    Claim("g4", "A classifier made binary late ends ahead of one that is binary from the start",
          f"{ACCURACY}, {AFTER}, against binary throughout, {ON_IMAGES}", "at least", 0.0, by="ours"),
    Claim("g5", "From the start, binary attention comes within one point of softmax on images, both tuned",
          f"{ACCURACY}, binary throughout against softmax throughout, {ON_IMAGES}", "at least", -POINT, by="ours"),
    Claim("g6", "Made binary and fine-tuned, a diffusion transformer is as good as in full precision, or better (in the paper: FID on ImageNet)",
          f"{LOSS}, {AFTER}, over softmax throughout, {ON_IMAGES}", "at most", 0.0, where="abstract"),
    Claim("g7", "Its denoising loss comes within two per cent",
          f"{LOSS}, {AFTER}, over softmax throughout, {ON_IMAGES}", "at most", PART, by="ours"),
    Claim("g8", "Without fine-tuning the change costs a diffusion transformer ten per cent or more",
          f"{LOSS} after over before making softmax binary at step {CONVERTED_AT:,}, the weights as they are", "at least", BROKEN, by="ours"),
    Claim("g9", "A diffusion transformer made binary late ends ahead of one that is binary from the start",
          f"{LOSS}, {AFTER}, over binary throughout, {ON_IMAGES}", "at most", 0.0, by="ours"),
    Claim("g10", "From the start, binary attention comes within two per cent of softmax's denoising loss, both tuned",
          f"{LOSS}, binary throughout over softmax throughout, {ON_IMAGES}", "at most", PART, by="ours"),
)  # fmt: skip


def log_loss(line: Line) -> float:
    return math.log(line["report_loss"])


def lost_accuracy(line: Line) -> float:
    """Accuracy right after the change of attention less that right before."""
    held = line["conversion"]
    return float(held["after"]["accuracy"] - held["before"]["accuracy"])


def risen_loss(line: Line) -> float:
    """Log of the loss right after the change of attention over that right before."""
    held = line["conversion"]
    return math.log(held["after"]["loss"] / held["before"]["loss"])


def judge(runs: Runs) -> Results:
    measured = {
        "g3": mean_of_arm(runs, IMAGES["converted"], lost_accuracy),
        "g8": mean_of_arm(runs, NOISE["converted"], risen_loss),
    }
    against = (("converted", "softmax"), ("converted", "binary"), ("binary", "softmax"))
    for ids, (arm, other) in zip((("g1", "g2"), ("g4",), ("g5",)), against, strict=True):
        measured |= dict.fromkeys(ids, difference(runs, IMAGES[arm], IMAGES[other], "accuracy"))
    for ids, (arm, other) in zip((("g6", "g7"), ("g9",), ("g10",)), against, strict=True):
        measured |= dict.fromkeys(ids, difference(runs, NOISE[arm], NOISE[other], log_loss))
    return Results(measured, {"vision": ends_table(runs, ARMS, end_with_change), "samples": samples_of(runs)})


def end_with_change(line: Line) -> dict[str, float | None]:
    """What the page shows of a run: its end, and where attention was changed, the report split before and after."""
    held = line.get("conversion") or {}
    parts = {
        f"{name}_{when}": held.get(when, {}).get(name) for when in ("before", "after") for name in ("loss", "accuracy")
    }
    return end_of(line) | parts


def samples_of(runs: Runs) -> dict[str, str]:
    """Images drawn from the first seed of each diffusion arm, as strips."""
    ends = {name: arm.so_far(runs) for name, arm in NOISE.items()}
    return {name: lines[0]["samples"] for name, lines in ends.items() if lines and "samples" in lines[0]}


STUDY = study_of_arms("binary attention on images: trained, and converted", CLAIMS, ARMS, judge)
