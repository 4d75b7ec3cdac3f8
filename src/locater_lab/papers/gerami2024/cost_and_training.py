"""What Fastmax costs beside fused attention, multiplications counted and processor time in one run (study d), and what
it learns beside softmax, from text and images (study e).

One head of size D: softmax attention multiplies 2 T^2 D times forward; order p of Fastmax about 2 T F (D + 1), F
features, F = 1 + D at order 1 and 1 + D + D (D + 8) / 2 at order 2 (the public form has 1 + D + D^2). So they cross
near T = F.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from locater_lab.engine.arms import difference, mean_of_arm, study_of_arms, table_of_arms
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.mechanism_runs import BASE, IMAGE, SOFTMAX, SOFTMAX_IMAGE, arm
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.engine.runs import Runs
from locater_lab.mechanisms import mechanism
from locater_lab.mechanisms.linear import taylor_features
from locater_lab.train.map_measures_and_diverged_layer import SINK

# ---- d: cost ----


SIZES = (16, 32, 64)
COUNTED = (1024, 2048, 4096)
TIMED_LENGTHS, HEADS, TIMED_SIZE = (512, 1024, 2048, 4096), 2, 32
TRAINED_SIZE = 256, 64  # tokens and size of a head in the training runs
ROUNDS = {True: 8, False: 9}

COST_CLAIMS = (
    Claim(
        "d1", "Cost is linear in the number of tokens",
        "log2 of multiplications when T doubles, order 2, 2,048 to 4,096", "about", 1.0, 0.02, by="ours",
    ),
    Claim("d2", "Softmax attention's is quadratic", "the same of softmax attention", "about", 2.0, 0.02, by="ours"),
    Claim(
        "d3", "Order 2 multiplies less than softmax attention from T = F on, F the features of a token",
        f"T at which counts are equal over F, heads of {', '.join(map(str, SIZES))}: farthest from 1", "about", 1.0, 0.1, by="ours",
    ),
    Claim(
        "d4", f"At {TIMED_LENGTHS[-1]:,} tokens and heads of {TIMED_SIZE} order 2 is faster than fused attention",
        "processor time over that of fused attention, forward, one thread of this machine, no mask", "at most", 1.0, by="ours",
    ),
    Claim("d5", "There order 1 is faster than fused attention, too", "the same, order 1", "at most", 1.0, by="ours"),
    Claim(
        "d6", f"At the length of the training runs, {TRAINED_SIZE[0]} tokens, order 2 with heads of {TRAINED_SIZE[1]} multiplies no more than "
        "softmax attention",
        "multiplications over those of softmax attention", "at most", 1.0, by="ours",
    ),
)  # fmt: skip


def feature_count(size: int, order: int) -> int:
    """Features of a token, as they are made here.

    >>> feature_count(64, 2), feature_count(64, 1)
    (2369, 65)
    """
    return taylor_features(torch.zeros(size), order).shape[-1]


def multiplications(T: int, size: int, order: int | None) -> int:
    """Forward, one head, all keys in view; order None is softmax attention. On tensors without numbers."""
    x = torch.zeros(1, 1, T, size, device="meta")
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        if order is None:
            scaled_dot_product_attention(x, x, x)
        else:
            mechanism("fastmax")(x, x, x, order=order)
    return int(counter.get_total_flops()) // 2


def crossing_length(size: int) -> float:
    """T at which order 2 and softmax attention multiply as often, from counts at 4,096: one is a T, the other b T^2."""
    T = COUNTED[-1]
    return T * multiplications(T, size, 2) / multiplications(T, size, None)


def processor_seconds(call: Callable[[], Tensor]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def time_in_turns(rounds: int) -> list[dict[str, Any]]:
    """Processor seconds in turns, after one call of each to warm up."""
    generator = torch.Generator().manual_seed(0)
    table: list[dict[str, Any]] = []
    for T in TIMED_LENGTHS:
        q, k, v = (torch.randn(1, HEADS, T, TIMED_SIZE, generator=generator) for _ in range(3))
        calls: dict[str, Callable[[], Tensor]] = {
            "fused": partial(scaled_dot_product_attention, q, k, v),
            "order 1": partial(mechanism("fastmax"), q, k, v, order=1),
            "order 2": partial(mechanism("fastmax"), q, k, v),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(rounds + 1):
            for name, call in calls.items():
                took = processor_seconds(call)
                if turn:
                    times[name].append(took)
        ratios = {
            f"{name} ratio": [a / b for a, b in zip(times[name], times["fused"], strict=True)]
            for name in ("order 1", "order 2")
        }
        table.append({"tokens": T, **{name: median(x) for name, x in times.items()}, **ratios})
    return table


def growth_per_doubling(order: int | None) -> float:
    """log2 of multiplications when the number of tokens doubles."""
    few, many = (multiplications(T, TIMED_SIZE, order) for T in COUNTED[-2:])
    return math.log2(many / few)


def measure_cost(setting: Setting) -> Results:
    """Counts, then times."""
    sizes = [
        {
            "size": size,
            "features": feature_count(size, 2),
            "published": 1 + size + size**2,
            "crossing": crossing_length(size),
        }
        for size in SIZES
    ]
    far = max((row["crossing"] / row["features"] for row in sizes), key=lambda r: abs(r - 1))
    with torch.no_grad():
        times = time_in_turns(ROUNDS[setting.quick])
    T, size = TRAINED_SIZE
    counted = multiplications(T, size, 2) / multiplications(T, size, None)
    measured = {
        "d1": Measurement(growth_per_doubling(2), 0.0, "none: counted"),
        "d2": Measurement(growth_per_doubling(None), 0.0, "none: counted"),
        "d3": Measurement(far, 0.0, "none: counted"),
        "d4": by_seed(times[-1]["order 2 ratio"], of="rounds"),
        "d5": by_seed(times[-1]["order 1 ratio"], of="rounds"),
        "d6": Measurement(counted, 0.0, "none: counted", {"tokens": T, "size": size}),
    }
    tables = {"features": sizes, "times": {"rows": times, "heads": HEADS, "size": TIMED_SIZE}}
    return Results(measured, tables)


COST_STUDY = Study("cost", COST_CLAIMS, measure_cost)


# ---- e: training ----


ORDER_2, ORDER_1, ON_IMAGES = arm("fastmax"), arm("fastmax(order=1)"), arm("fastmax", IMAGE)
ARMS = (SOFTMAX, ORDER_2, ORDER_1, SOFTMAX_IMAGE, ON_IMAGES)
TEXT = "causal language model of this size"

TRAINING_CLAIMS = (
    Claim(
        "e1", "Fastmax with the norm of each token by itself, which is not the paper's, does about as well as softmax on text at this size",
        f"change of report loss by order 2, {TEXT}", "at most", 0.05, by="ours",
    ),
    Claim(
        "e2", "Order 1 does about as well as softmax too, as seen at this size",
        f"change of report loss by order 1, which has one rate, {TEXT}", "at most", 0.05, by="ours",
    ),
    Claim(
        "e3", "Order 2 does better than order 1, as seen at this size",
        f"report loss of order 2 less that of order 1, which has one rate, {TEXT}", "at most", 0.0, by="ours",
    ),
    Claim(
        "e4", "Fastmax has a robust performance: it does about as well as softmax on images, as seen at this size",
        "change of test accuracy by order 2, image classifier of this size", "at least", -0.01, where="abstract", bound="ours",
    ),
    Claim(
        "e5", "Trained, it does not localise: entropy stays near that of uniform rows, as seen at this size",
        f"entropy over log of keys in view, order 2, {TEXT}", "at least", 0.95, by="ours",
    ),
    Claim(
        "e6", "Softmax, trained, does localise, as seen at this size",
        "entropy over log of keys in view, softmax, the same model", "at most", 0.8, by="ours",
    ),
)  # fmt: skip


def judge_training(runs: Runs) -> Results:
    measured = {
        "e1": difference(runs, ORDER_2, SOFTMAX, "report_loss"),
        "e2": difference(runs, ORDER_1, SOFTMAX, "report_loss"),
        "e3": difference(runs, ORDER_2, ORDER_1, "report_loss"),
        "e4": difference(runs, ON_IMAGES, SOFTMAX_IMAGE, "accuracy"),
        "e5": mean_of_arm(runs, ORDER_2, "measures.entropy_share"),
        "e6": mean_of_arm(runs, SOFTMAX, "measures.entropy_share"),
    }
    return Results(measured, {"arms": table_of_arms(runs, ARMS), "training": {"layers": BASE.layers, "sink": SINK}})


TRAINING_STUDY = study_of_arms("Fastmax in training", TRAINING_CLAIMS, ARMS, judge_training)
