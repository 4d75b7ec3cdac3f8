"""Trained stacks of equal depth with more and more full layers, on composition. Study d. CUDA where there is one; all
seeds at once.

Letters are those of `locater_lab.mechanisms.stack`: L a linear layer (`delta`), S a full one (softmax); full layers
come last. Tokens hold (l, x, f_l(x)) in one, so that L layers are enough where L + 1 are needed for x and f(x) apart.
There are no positions: a token is looked up by its content. Keys have fewer channels, over all heads, than a function
has points. After every layer the stream is read out and trained towards where the chain should be by then: without this
help two hops are not learned in a short run.

It is a trend at one size and one budget of training. The theorem is about what can be represented at all, for large m,
against 2^(3 L^2) linear layers, which nobody will build.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.numerics import spearman
from locater_lab.engine.arms import mark_inconclusive
from locater_lab.engine.claims import Claim, by_seed
from locater_lab.engine.devices_and_processes import device_of_study, map_parts
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms import mechanism
from locater_lab.mechanisms.stack import hybrid
from locater_lab.papers.ye2026.composition import CompositionTask, Prompts, draw_prompts

QUESTIONS = 8  # in each prompt, which tell each other nothing that the list does not
WORSE = 0.05  # of answers: what counts as worse
# the all-full stack has learned the task where it is right so often at all hops; else nothing is compared
LEARNED = 0.9


@dataclass(frozen=True)
class StackSize:
    """What is trained, and for how long."""

    task: CompositionTask
    layouts: tuple[str, ...]
    width: int
    heads: int
    head: int
    batch: int
    steps: int
    seeds: int
    rate: float
    brief: bool = False  # too short to learn: tells nothing at all

    @property
    def rows(self) -> int:
        """Of all states of a layer: channels of all keys."""
        return self.heads * self.head


QUICK = StackSize(CompositionTask(10, 2), ("LL", "LS", "SS"), 48, 2, 4, 16, 300, 2, 5e-3, brief=True)
MIDDLE = StackSize(
    CompositionTask(12, 2), ("LL", "LS", "SS"), 64, 2, 4, 32, 2500, 3, 4e-3
)  # in full without a GPU: minutes on a core
FULL = StackSize(CompositionTask(24, 3), ("LLL", "LLS", "LSS", "SSS"), 128, 2, 8, 128, 4500, 4, 2e-3)
NEEDS = (
    "more than a quick run: `locater reproduce ye2026 --claim d --json d.json` (three hops on a GPU, --jobs 4 for its "
    "stacks all at once; two hops without one), then --from"
)
UNTRAINED = "the stack of full layers itself has not learned the task"

CLAIMS = (
    Claim(
        "d1",
        "A stack of full layers learns to compose",
        "share of right answers at all L hops, every layer full, as seen at this size",
        "at least",
        LEARNED,
        by="ours",
    ),
    Claim(
        "d2",
        "Of equal depth, L - 1 full layers among linear ones do worse (the theorem is about what can be represented, "
        "and large m)",
        "share of right answers at L hops, L - 1 full layers less all full, as seen at this size",
        "at most",
        -WORSE,
        by="ours",
    ),
    Claim(
        "d3",
        "The more full layers, the more hops",
        "rank correlation of the number of full layers with the share of right answers at L hops, as seen at this size",
        "at least",
        0.8,
        by="ours",
    ),
    Claim(
        "d4",
        "Linear layers alone do worse at one hop already, where a function has more points than all keys have channels",
        "share of right answers after the first layer, no full layer less all full, as seen at this size",
        "at most",
        -WORSE,
        by="ours",
    ),
)


class StackModels:
    """One model per seed, all in one: parameters have a first axis of seeds. Pre-norm, an MLP behind each attention
    layer.
    """

    def __init__(self, size: StackSize, layout: str, device: torch.device) -> None:
        self.size, self.names = size, hybrid(layout, linear="delta").names
        g = torch.Generator().manual_seed(0)
        self.parameters: list[Tensor] = []

        def weight(*shape: int, scale: float) -> Tensor:
            drawn = (scale * torch.randn(size.seeds, *shape, generator=g)).to(device).requires_grad_()
            self.parameters.append(drawn)
            return drawn

        m, L, w, inner = size.task.points, size.task.functions, size.width, size.rows
        quarter, deep = w // 4, (2 * len(self.names)) ** -0.5
        self.point, self.function = weight(m, quarter, scale=1.0), weight(L + 1, quarter, scale=1.0)
        self.out = weight(w, quarter, scale=w**-0.5)
        self.layers = [
            {
                "q": weight(w, inner, scale=w**-0.5),
                "k": weight(w, inner, scale=w**-0.5),
                "v": weight(w, w, scale=w**-0.5),
                "o": weight(w, w, scale=deep * w**-0.5),
                "up": weight(w, 2 * w, scale=w**-0.5),
                "down": weight(2 * w, w, scale=deep * (2 * w) ** -0.5),
                **({"b": weight(w, size.heads, scale=w**-0.5)} if name == "delta" else {}),
            }
            for name in self.names
        ]

    def __call__(self, batch: Prompts) -> Float[Tensor, "layers seeds batch questions m"]:
        """Answers as they would be after every layer; those of the last count."""
        answers = []
        listed = (self.point[:, batch.x], self.point[:, batch.y], self.function[:, batch.layer])
        start = self.point[:, batch.start]
        asking = (torch.zeros_like(start), start, self.function[:, -1:, None].expand_as(start))
        parts = [torch.cat(pair, 2) for pair in zip(listed, asking, strict=True)]
        # (seeds, batch, tokens, width), a quarter for each part and one free
        x = torch.cat([*parts, torch.zeros_like(parts[0])], 3)
        for name, layer in zip(self.names, self.layers, strict=True):
            y = normalize(x)
            q, k, v = (self._heads(y, layer[n]) for n in "qkv")
            options: dict[str, Tensor] = {}
            if name == "delta":
                beta = torch.einsum("sbtw,swh->sbht", y, layer["b"]).sigmoid()
                options = {"beta": beta.flatten(0, 1)}
            out = mechanism(name)(q, k, v, causal=True, **options)  # type: ignore[arg-type]
            out = out.transpose(1, 2).flatten(2).unflatten(0, x.shape[:2])
            x = x + torch.einsum("sbtw,swu->sbtu", out, layer["o"])
            hidden = torch.nn.functional.gelu(torch.einsum("sbtw,swu->sbtu", normalize(x), layer["up"]))
            x = x + torch.einsum("sbtw,swu->sbtu", hidden, layer["down"])
            last = normalize(x[:, :, -batch.start.shape[1] :])
            answers.append(torch.einsum("sbqw,swu,smu->sbqm", last, self.out, self.point))
        return torch.stack(answers)

    def _heads(self, y: Tensor, weight: Tensor) -> Float[Tensor, "sb heads tokens d"]:
        out = torch.einsum("sbtw,swu->sbtu", y, weight)
        return out.flatten(0, 1).unflatten(-1, (self.size.heads, -1)).transpose(1, 2)


def normalize(x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],))


def train_stack(size: StackSize, layout: str, device: torch.device) -> Float[Tensor, "seeds layers"]:
    """Share of right answers after each layer, on fresh prompts; all seeds see the same prompts and differ in their
    first weights.
    """
    model = StackModels(size, layout, device)
    optimizer = torch.optim.AdamW(
        model.parameters, lr=size.rate, weight_decay=0.01, betas=(0.9, 0.98), fused=device.type == "cuda"
    )
    warm = max(1, size.steps // 20)
    g = torch.Generator(device).manual_seed(1)
    for step in range(size.steps):
        share = min(1.0, (step + 1) / warm) * (
            0.5 + 0.5 * math.cos(math.pi * max(0.0, step - warm) / (size.steps - warm))
        )
        optimizer.param_groups[0]["lr"] = size.rate * max(share, 0.02)
        batch = draw_prompts(size.task, size.batch, g, questions=QUESTIONS)
        targets = batch.reached.permute(2, 0, 1)[:, None].expand(-1, size.seeds, -1, -1)
        logits = model(batch).flatten(0, 3)
        loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum") / batch.answer.numel()
        grads = torch.autograd.grad(loss, model.parameters)  # of the sum over seeds: each seed's own
        total = torch.stack([grad.flatten(1).square().sum(1) for grad in grads]).sum(0).sqrt()
        for p, grad in zip(model.parameters, grads, strict=True):
            short = grad * (1.0 / total.clamp_min(1.0)).view(-1, *([1] * (grad.ndim - 1)))
            p.grad = short.contiguous()  # as the parameter lies: fused AdamW asks for that
        optimizer.step()
    return share_answered(model, device)


@torch.no_grad()
def share_answered(model: StackModels, device: torch.device) -> Float[Tensor, "seeds layers"]:
    """Share of right answers after each layer, on fresh prompts."""
    count, g = 2048 if device.type == "cuda" else 512, torch.Generator(device).manual_seed(2)
    batch = draw_prompts(model.size.task, count, g, questions=QUESTIONS)
    right = model(batch).argmax(-1) == batch.reached.permute(2, 0, 1)[:, None]  # (layers, seeds, batch, questions)
    return right.double().mean((2, 3)).mT.cpu()


def measure(setting: Setting) -> Results:
    """Every layout trained with all seeds."""
    size = _size(setting)
    shares = map_parts(_train_layout, list(size.layouts), setting)
    return judge_stacks(dict(zip(size.layouts, shares, strict=True)), size, device_of_study(setting))


def _size(setting: Setting) -> StackSize:
    return QUICK if setting.quick else FULL if device_of_study(setting) == "cuda" else MIDDLE


def _train_layout(setting: Setting, layout: str) -> list[list[float]]:
    shares: list[list[float]] = train_stack(_size(setting), layout, torch.device(device_of_study(setting))).tolist()
    return shares


def judge_stacks(right: Mapping[str, list[list[float]]], size: StackSize, device: str) -> Results:
    """Claims from shares of right answers (seeds x hops) by layout; open where the all-full stack has not learned."""
    depth, L = len(size.layouts[0]), size.task.functions
    full, none = right["S" * depth], right["L" * depth]
    fewer = right["L" * (depth - L + 1) + "S" * (L - 1)]
    counts = torch.tensor([layout.count("S") for layout in right], dtype=torch.float64)
    by_number = [torch.tensor([x[s][-1] for x in right.values()], dtype=torch.float64) for s in range(len(full))]
    measured = {
        "d1": by_seed([shares[-1] for shares in full]),
        "d2": by_seed([a[-1] - b[-1] for a, b in zip(fewer, full, strict=True)]),
        "d3": by_seed([spearman(counts, shares) or 0.0 for shares in by_number]),
        "d4": by_seed([a[0] - b[0] for a, b in zip(none, full, strict=True)]),
    }
    learned = min(shares[-1] for shares in full) >= LEARNED
    open_ids = () if learned else measured if size.brief else ("d2", "d3")
    return Results(mark_inconclusive(measured, open_ids, UNTRAINED), {"trained_stacks": _table(right, size, device)})


def _table(right: Mapping[str, list[list[float]]], size: StackSize, device: str) -> dict[str, Any]:
    """Shares of right answers by stack, seed and hop, how many seeds learned, and what was trained."""
    rows: list[dict[str, Any]] = [
        {
            "stack": layout,
            "right": seeds,
            "means": [fmean(hop) for hop in zip(*seeds, strict=True)],
            "learned": sum(seed[-1] >= LEARNED for seed in seeds),
            "is_full": set(layout) == {"S"},
        }
        for layout, seeds in right.items()
    ]
    return {
        "rows": rows,
        "all_full_learned": all(row["learned"] == len(row["right"]) for row in rows if row["is_full"]),
        "learned_from": LEARNED,
        "points": size.task.points,
        "functions": size.task.functions,
        "pairs": size.task.pairs,
        "channels": size.rows,
        "width": size.width,
        "steps": size.steps,
        "device": device,
        "brief": size.brief,
    }


STUDY = Study("trained stacks", CLAIMS, measure, NEEDS)
