"""Binary attention in training: from the start, on text and images (study d), trained late and from the start on images
and noise (study g), and what only large models and a kernel can measure (studies e and f).

**From the start (study d)** is what the paper does not do: it fine-tunes trained models, on images.

**Images (study g)**, the paper's own ground: a classifier and a small diffusion transformer, trained with binary
attention from the start, and with softmax, made binary late in training and trained on.

The paper starts from models trained on ImageNet, and fine-tunes them for 300 epochs. Here a run of 1,500 steps on
Fashion-MNIST changes its attention after 1,000 of them. Softmax and binary attention from the start have the same 1,500
steps, so what is compared has seen the same images the same number of times.

**Accuracy and speed (studies e and f)** stand among the claims so that the count of verdicts shows them as open.
Accuracy is that of models trained on ImageNet and then fine-tuned for 300 epochs with binary attention; speed is that
of a kernel for one-bit products.
"""

from __future__ import annotations

import math
from dataclasses import replace

from locater_lab.engine.arms import Line, difference, final_numbers, mean_of_arm, study_of_arms, table_of_arms
from locater_lab.engine.claims import Claim
from locater_lab.engine.mechanism_runs import AT_THIS_SIZE, IMAGE, IMAGE_RATES, SOFTMAX, SOFTMAX_IMAGE, TUNED, arm
from locater_lab.engine.reproduction import Results, Study
from locater_lab.engine.runs import Arm, Runs
from locater_lab.train.plan import Plan

# ---- d: from the start ----


BINARY_ARM = arm("binary")
WITHOUT_BIAS = arm(
    "binary(span=0)", name="binary, no bias"
)  # one bias for all distances, which a softmax does not feel
ON_IMAGES = arm("binary(grid=(7, 7))", IMAGE)  # patches of 4 x 4 of 28 x 28
START_ARMS = (SOFTMAX, BINARY_ARM, WITHOUT_BIAS, SOFTMAX_IMAGE, ON_IMAGES)

START_CLAIMS = (
    Claim(
        "d1", "Trained from scratch, binary attention comes within 0.05 nats of softmax; the paper fine-tunes and claims nothing of this",
        f"change of report loss by binary attention, {TUNED}", "at most", 0.05, by="ours",
    ),
    Claim(
        "d2", "A learned bias makes up for some of what one bit loses (in the paper: on images, after fine-tuning)",
        f"change of report loss by the bias, at the better of two rates with it and at the higher without, {AT_THIS_SIZE}", "at most", 0.0,
        by="ours",
    ),
    Claim(
        "d3", "Rows stay flatter than those of softmax after training",
        f"change of mean entropy in nats by binary attention, {TUNED}", "at least", 0.0, by="ours",
    ),
    Claim(
        "d4", "On images, the paper's own ground, it comes within one point of accuracy from scratch too",
        f"change of test accuracy by binary attention with a bias per offset, both at one rate, {AT_THIS_SIZE}", "at least", -0.01, by="ours",
    ),
)  # fmt: skip


def judge_start(runs: Runs) -> Results:
    measured = {
        "d1": difference(runs, BINARY_ARM, SOFTMAX, "report_loss"),
        "d2": difference(runs, BINARY_ARM, WITHOUT_BIAS, "report_loss"),
        "d3": difference(runs, BINARY_ARM, SOFTMAX, "measures.entropy"),
        "d4": difference(runs, ON_IMAGES, SOFTMAX_IMAGE, "accuracy"),
    }
    return Results(measured, {"arms": table_of_arms(runs, START_ARMS)})


START_STUDY = study_of_arms("training with binary attention", START_CLAIMS, START_ARMS, judge_start)


# ---- g: images ----


DIFFUSION = replace(IMAGE, task="diffusion")
DIFFUSION_RATES = (5e-4, 1.5e-3)
BINARY_ON_GRID = "binary(grid=(7, 7))"  # patches of 4 x 4 of 28 x 28, a learned bias per offset
CONVERTED_AT, SEEDS = 1000, 5
POINT, LOSS_PART = 0.01, 0.02  # of accuracy, and of the denoising loss: what counts as level; ours
BROKEN_LOSS = 0.1  # of the denoising loss: what counts as damage; ours


def arms_of(base: Plan, rates: tuple[float, float]) -> dict[str, Arm]:
    """Softmax, binary attention from the start, and softmax made binary, each at the better of two rates."""
    plans = {
        "softmax": base,
        "binary": replace(base, attention=BINARY_ON_GRID),
        "converted": replace(base, convert=BINARY_ON_GRID, convert_at=CONVERTED_AT),
    }
    return {name: Arm(f"{name}, {base.task}", "g", plan, rates, SEEDS) for name, plan in plans.items()}


IMAGES, NOISE = arms_of(IMAGE, IMAGE_RATES), arms_of(DIFFUSION, DIFFUSION_RATES)
IMAGE_ARMS = (*IMAGES.values(), *NOISE.values())

AFTER = f"softmax made binary after {CONVERTED_AT:,} of {IMAGE.steps:,} steps"
AT_IMAGE_RATES = f"each at the better of two rates, Fashion-MNIST, {AT_THIS_SIZE}"
ACCURACY_CHANGE, LOSS_RATIO = "change of test accuracy", "log ratio of denoising losses"

IMAGE_CLAIMS = (
    Claim("g1", "Made binary and fine-tuned, a small classifier of Fashion-MNIST is as accurate as in full precision, or more",
          f"{ACCURACY_CHANGE}, {AFTER}, against softmax throughout, {AT_IMAGE_RATES}", "at least", 0.0, by="ours"),
    Claim("g2", "It comes within one point",
          f"{ACCURACY_CHANGE}, {AFTER}, against softmax throughout, {AT_IMAGE_RATES}", "at least", -POINT, by="ours"),
    Claim("g3", "Without fine-tuning the change costs a classifier a point or more",
          f"{ACCURACY_CHANGE} by making softmax binary after {CONVERTED_AT:,} steps, the weights as they are", "at most", -POINT, by="ours"),
    Claim("g4", "A classifier made binary late ends ahead of one that is binary from the start",
          f"{ACCURACY_CHANGE}, {AFTER}, against binary throughout, {AT_IMAGE_RATES}", "at least", 0.0, by="ours"),
    Claim("g5", "From the start, binary attention comes within one point of softmax on images, both tuned",
          f"{ACCURACY_CHANGE}, binary throughout against softmax throughout, {AT_IMAGE_RATES}", "at least", -POINT, by="ours"),
    Claim("g6", "Made binary and fine-tuned, a small diffusion transformer of Fashion-MNIST is as good as in full precision, or better",
          f"{LOSS_RATIO}, {AFTER}, over softmax throughout, {AT_IMAGE_RATES}", "at most", 0.0, by="ours"),
    Claim("g7", "Its denoising loss comes within two per cent",
          f"{LOSS_RATIO}, {AFTER}, over softmax throughout, {AT_IMAGE_RATES}", "at most", LOSS_PART, by="ours"),
    Claim("g8", "Without fine-tuning the change costs a diffusion transformer ten per cent or more",
          f"{LOSS_RATIO} after over before making softmax binary at step {CONVERTED_AT:,}, the weights as they are", "at least", BROKEN_LOSS, by="ours"),
    Claim("g9", "A diffusion transformer made binary late ends ahead of one that is binary from the start",
          f"{LOSS_RATIO}, {AFTER}, over binary throughout, {AT_IMAGE_RATES}", "at most", 0.0, by="ours"),
    Claim("g10", "From the start, binary attention comes within two per cent of softmax's denoising loss, both tuned",
          f"{LOSS_RATIO}, binary throughout over softmax throughout, {AT_IMAGE_RATES}", "at most", LOSS_PART, by="ours"),
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


def judge_images(runs: Runs) -> Results:
    measured = {
        "g3": mean_of_arm(runs, IMAGES["converted"], lost_accuracy),
        "g8": mean_of_arm(runs, NOISE["converted"], risen_loss),
    }
    against = (("converted", "softmax"), ("converted", "binary"), ("binary", "softmax"))
    for ids, (ours, other) in zip((("g1", "g2"), ("g4",), ("g5",)), against, strict=True):
        measured |= dict.fromkeys(ids, difference(runs, IMAGES[ours], IMAGES[other], "accuracy"))
    for ids, (ours, other) in zip((("g6", "g7"), ("g9",), ("g10",)), against, strict=True):
        measured |= dict.fromkeys(ids, difference(runs, NOISE[ours], NOISE[other], log_loss))
    return Results(measured, {"vision": table_of_arms(runs, IMAGE_ARMS, end_with_change), "samples": samples_of(runs)})


def end_with_change(line: Line) -> dict[str, float | None]:
    """What the page shows of a run: its end, and where attention was changed, the report split before and after."""
    held = line.get("conversion") or {}
    parts = {
        f"{name}_{when}": held.get(when, {}).get(name) for when in ("before", "after") for name in ("loss", "accuracy")
    }
    return final_numbers(line) | parts


def samples_of(runs: Runs) -> dict[str, str]:
    """Images drawn from the first seed of each diffusion arm, as strips."""
    ends = {name: arm.lines_so_far(runs) for name, arm in NOISE.items()}
    return {name: lines[0]["samples"] for name, lines in ends.items() if lines and "samples" in lines[0]}


IMAGE_STUDY = study_of_arms(
    "binary attention on images: trained, and converted", IMAGE_CLAIMS, IMAGE_ARMS, judge_images
)


# ---- e and f: accuracy and speed of the paper ----


NEEDS_FINE_TUNING = (
    "ImageNet, ADE20K and the paper's fine-tuning of large trained models, 300 epochs on eight GPUs for its classifiers"
)
NEEDS_KERNEL = (
    "an A100 and a kernel that multiplies bits: the paper's public code has none, and this package computes the products "
    "of signs in floating point"
)

ACCURACY_CLAIMS = (
    Claim(
        "e1", "After fine-tuning, binary attention classifies images as well as full precision does, or better",
        "top-1 accuracy on ImageNet less that of full precision, DeiT-T, in points (published: 72.88 against 72.2)", "at least", 0.0,
        where="abstract",
    ),
    Claim(
        "e2", "It segments images as well as full precision does, or better",
        "mean intersection over union on ADE20K less that of full precision, DeiT-T, in points (published: 39.93 against 39.82)",
        "at least", 0.0, where="abstract",
    ),
    Claim(
        "e3", "In diffusion transformers it generates images as well as full precision does, or better",
        "FID on ImageNet less that of full precision, DiT-XL/2", "at most", 0.0,
        where="abstract",
    ),
)  # fmt: skip

SPEED_CLAIMS = (
    Claim(
        "f1", "Binary attention is more than twice as fast as FlashAttention2",
        "time of FlashAttention2 over that of binary attention, A100", "at least", 2.0, where="abstract",
    ),
)  # fmt: skip

ACCURACY_STUDY = Study("accuracy after fine-tuning", ACCURACY_CLAIMS, needs=NEEDS_FINE_TUNING)
SPEED_STUDY = Study("speed", SPEED_CLAIMS, needs=NEEDS_KERNEL)
