"""What the papers on mechanisms train: one model, one text, the same seeds, each arm at the better of two learning rates.

All runs go to one file, and runs with the same plan are one, whichever paper asks for them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from locater.papers.runs import Arm
from locater.train.plan import Plan

BASE = Plan(
    corpus=("speeches.tar.xz",), vocabulary=4096, layers=6, width=256, heads=4, length=256, steps=1500, batch=32, observe=0, evaluate=500,
    checkpoint=0, compile=True,
)  # fmt: skip
MASKED = replace(BASE, task="masked")
IMAGE = replace(BASE, task="image", corpus=(), vocabulary=256, images="fashion.npz", batch=128)
RATES, IMAGE_RATES = (1e-3, 2.5e-3), (2e-4, 5e-4)


def arm(attention: str = "softmax", base: Plan = BASE, name: str | None = None, *, claim: str = "zoo", **changes: Any) -> Arm:
    """A way to train: a mechanism, or other changes of the base plan.

    >>> arm("gated(per=element)").name, arm(mlp="none").name, arm("softmax", MASKED).name
    ('gated(per=element)', 'mlp=none', 'softmax, masked')
    """
    said = [attention] if attention != "softmax" or not changes else []
    said += [f"{key}={value}" for key, value in changes.items()] + ([base.task] if base.task != "causal" else [])
    rates = IMAGE_RATES if base.task == "image" else RATES
    return Arm(name or ", ".join(said), claim, replace(base, attention=attention, **changes), rates)


SOFTMAX, SOFTMAX_MASKED, SOFTMAX_IMAGE = arm(), arm(base=MASKED), arm(base=IMAGE)
