"""Parts of the penalty in a model small enough for a CPU, at one learning rate: study d, first part.

The two claims of the paper on training (c1, c2) are judged by the tuned runs of `judged.py`. What this small model says
of them is a second measurement in another setting, which the page shows beside the first; it has no verdict of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locater.commands.scanning import scan
from locater.control import register_control
from locater.control.base import Control
from locater.control.eigenspectrum import LocAteR
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.layers import effective
from locater.numerics import one_thread
from locater.observing.inputs import quiet
from locater.observing.observation import observe
from locater_lab.engine.claims import Claim, by_seed
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.bao2024.judged import LOWER_LOSS, MORE_ENTROPY, in_setting

STEPS, SEEDS = {True: 200, False: 800}, {True: 4, False: 8}
BATCH, LENGTH, RATE, WARM = 8, 64, 3e-3, 40
STRENGTH, TARGET = 0.01, 2.0  # LocAteR's defaults, for every arm
LETTERS = 96
SHAPE = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
CHECKED = 32  # sequences of validation


@register_control
class RawSquare(Control):
    """The trap: strength * s^2 tr W^2, which a rotation takes below zero without bound."""

    def __init__(self, strength: float = STRENGTH) -> None:
        self.strength = strength

    def loss(self) -> Tensor:
        layers = [effective(layer) for layer in attention_layers(self.attached)]
        squares = [layer.scale**2 * layer.moments().trace_of_square.sum() for layer in layers]
        return self.strength * torch.stack(squares).sum()


ARMS: dict[str, Any] = {
    "no penalty": None,
    "mean only": lambda: LocAteR(shrink=0.0, hold=STRENGTH, target=TARGET),
    "scale only": lambda: LocAteR(shrink=STRENGTH, hold=0.0),
    "both": lambda: LocAteR(shrink=STRENGTH, hold=STRENGTH, target=TARGET),
    "raw tr W^2": RawSquare,
}
SMALL = f"a model of {SHAPE['num_hidden_layers']} layers, width {SHAPE['hidden_size']}, at one learning rate"
CLAIMS = (
    Claim(
        "d1", "In a small model, holding a positive mean alone lowers the loss",
        f"change of validation loss by the mean-only penalty, {SMALL}", "at most", 0.0, by="ours",
    ),
    Claim(
        "d2", "In a small model, shrinking the scale alone raises attention entropy",
        f"change of mean attention entropy by the scale-only penalty, {SMALL}", "at least", 0.0, by="ours",
    ),
    Claim(
        "d3", "In a small model, shrinking the scale alone does not lower the loss",
        f"change of validation loss by the scale-only penalty, {SMALL}", "at least", 0.0, by="ours",
    ),
    Claim(
        "d6", "LocAteR holds the mean of the spectrum while it shrinks the scale",
        f"mean self-logit M over heads at the end, target {TARGET:g}, {SMALL}", "about", TARGET, 0.5,
        where="definition of LocAteR", bound="ours",
    ),
    Claim(
        "d7", "Raw tr W^2 is no penalty on the scale: it grows the antisymmetric part",
        f"change of tr W^2 / Frobenius^2 by the raw penalty, {SMALL}", "at most", 0.0, by="ours",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class End:
    """A run at its end: means over heads, loss and entropy on held-out text in nats."""

    loss: float
    entropy: float
    M: float
    trace: float
    trace_of_square: float
    frobenius_sq: float


def letters(text: str) -> Tensor:
    """Characters as numbers, the most frequent ones; all others share the last."""
    common = [c for c, _ in Counter(text).most_common(LETTERS - 1)]
    known = {c: i for i, c in enumerate(common)}
    return torch.tensor([known.get(c, LETTERS - 1) for c in text])


def build(seed: int) -> nn.Module:
    """A Llama of this shape, freshly drawn: rotary positions, so that a few hundred steps get beyond pairs of
    letters.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise LocaterError("training needs the transformers package: pip install 'locater[hf]'") from None
    torch.manual_seed(seed)
    plain = dict(bos_token_id=None, eos_token_id=None, use_cache=False)
    return LlamaForCausalLM(LlamaConfig(vocab_size=LETTERS, max_position_embeddings=LENGTH, **SHAPE, **plain))


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    logits = model(input_ids=rows).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def train(data: Tensor, arm: str, seed: int, steps: int) -> End:
    """One run: AdamW, warm-up and cosine decay, gradients clipped at 1; every arm sees the same batches and starts the
    same.
    """
    model = build(seed)
    control: Control = Control() if ARMS[arm] is None else ARMS[arm]()
    control.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    for step, rows in enumerate(batches(data[: -len(data) // 20], steps, seed)):
        share = min(1.0, (step + 1) / WARM) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = RATE * share
        (loss_of(model, rows) + control.loss()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        control.after_step()
    control.detach()
    return end(model, data[-len(data) // 20 :])


def batches(data: Tensor, steps: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=generator)
        yield data[starts[:, None] + torch.arange(LENGTH)]


def end(model: nn.Module, unseen: Tensor) -> End:
    """Loss, entropy and spectrum on the first sequences of text that was not trained on."""
    count = min(CHECKED * 8, len(unseen) // LENGTH)
    rows = unseen[: count * LENGTH].view(count, LENGTH)
    with quiet(model), observe(model) as seen:
        loss = sum(float(loss_of(model, part)) * len(part) for part in rows.split(CHECKED)) / count
    heads = scan(model).rows
    M, trace, square, size = (
        sum(float(getattr(row, name) or 0.0) for row in heads) / len(heads)
        for name in ("M", "trace", "trace_of_square", "frobenius_sq")
    )
    return End(loss, sum(row.entropy or 0.0 for row in seen.rows) / len(seen.rows), M, trace, square, size)


def measure(setting: Setting) -> Results:
    """Every arm with every seed; differences are taken within a seed."""
    data, seeds = letters(setting.text), range(SEEDS[setting.quick])
    plan = [(arm, seed) for arm in ARMS for seed in seeds]
    with one_thread():  # operations this small only wait for each other in a team
        ends = {(arm, seed): train(data, arm, seed, STEPS[setting.quick]) for arm, seed in setting.each(plan)}

    def change(arm: str, name: str) -> list[float]:
        return [getattr(ends[arm, s], name) - getattr(ends["no penalty", s], name) for s in seeds]

    def symmetry(arm: str) -> list[float]:
        return [ends[arm, s].trace_of_square / ends[arm, s].frobenius_sq for s in seeds]

    measured = {
        "d1": by_seed(change("mean only", "loss")),
        "d2": by_seed(change("scale only", "entropy")),
        "d3": by_seed(change("scale only", "loss")),
        "d6": by_seed([ends["both", s].M for s in seeds]),
        "d7": by_seed([a - b for a, b in zip(symmetry("raw tr W^2"), symmetry("no penalty"), strict=True)]),
    }
    tables = {
        "small_model": {
            "runs": {arm: [vars(ends[arm, seed]) for seed in seeds] for arm in ARMS},
            "settings": {
                "steps": STEPS[setting.quick],
                "rate": RATE,
                "batch": BATCH,
                "length": LENGTH,
                "strength": STRENGTH,
            },
        },
        "other_setting": [
            in_setting(LOWER_LOSS, change("both", "loss"), SMALL),
            in_setting(MORE_ENTROPY, change("both", "entropy"), SMALL),
        ],
    }
    return Results(measured, tables)


STUDY = Study("parts of the penalty in a small model", CLAIMS, measure)
