"""The branches of the rescue trial: what each arm changes at a state, and the run that follows from there."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater import QKClip
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater_lab.studies.early_warning import plan
from locater_lab.studies.rescue.base_runs import EVERY, Head, Size, Training, query_and_key, state_file

LOGIT, SPREAD, MOST_NAMED = 50.0, 2.5, 4
CLIPPING = ("named", "random", "layer", "all")
ARMS = ("nothing", *CLIPPING, "freeze", "half")
Row = Mapping[str, float | None]


class HeadClip(QKClip):
    """QK-clip of chosen heads alone, and a first scaling of each by a factor of its own."""

    def __init__(self, factors: Mapping[Head, float]) -> None:
        super().__init__(limit=LOGIT, every=EVERY)
        self.factors = factors

    def scale_once(self) -> None:
        for number, layer in enumerate(attention_layers(self.attached)):
            gamma = [self.factors.get((number, head), 1.0) for head in range(layer.heads)]
            if min(gamma) < 1:
                super()._clip(self.attached, number, torch.tensor(gamma, dtype=torch.float64))

    def _clip(self, model: nn.Module, number: int, gamma: Tensor) -> None:
        chosen = torch.tensor([(number, head) in self.factors for head in range(len(gamma))])
        gamma = torch.where(chosen, gamma, torch.ones_like(gamma))
        if bool((gamma < 1).any()):
            super()._clip(model, number, gamma)


class FrozenHeads:
    """Puts the queries of heads back to what they were, and their keys where no other head shares them."""

    def __init__(self, model: nn.Module, heads: Sequence[Head]) -> None:
        leaves = list(model.parameters())
        marked: dict[int, Tensor] = {}
        with torch.enable_grad():
            for number, layer in enumerate(attention_layers(model)):
                rows = [head * layer.head_dim + i for at, head in heads if at == number for i in range(layer.head_dim)]
                for part in query_and_key(layer)[: 1 if layer.group > 1 else 2] if rows else ():
                    weight = part.weight()
                    for read in (weight, *(() if part.bias is None else (part.bias,))):
                        chosen = torch.zeros_like(read)
                        chosen[rows] = 1
                        places = torch.autograd.grad(read, leaves, chosen, allow_unused=True)
                        for i, mark in enumerate(places):
                            if mark is not None:
                                marked[i] = marked.get(i, torch.zeros_like(mark)) + mark
        self.kept = [(leaves[i], mark != 0, leaves[i].detach().clone()) for i, mark in marked.items()]

    @torch.no_grad()
    def restore(self) -> None:
        for leaf, mark, old in self.kept:
            leaf.copy_(torch.where(mark, old, leaf))


def over_bound(row: Row) -> float:
    """How far a head is over what it is scaled down to; 1 for one that stays as it is, infinite where it is not finite."""
    logit, spread = (math.inf if row[name] is None else row[name] or 0.0 for name in ("max_logit", "spread"))
    return max(1.0, logit / LOGIT, spread / SPREAD)


def scale_of(row: Row) -> float:
    """What a head is scaled by. One whose numbers are not finite stays as it is: a scale cannot repair it."""
    over = over_bound(row)
    return 1 / over if math.isfinite(over) else 1.0


def named_heads(state: Mapping[str, Any]) -> list[Head]:
    """Those warned of at the state, the furthest over the bound first; of a quiet state those with the largest logit."""
    rows = state["heads"]
    if state["sort"] == "alarmed":
        return sorted(state["warned"], key=lambda head: -over_bound(rows[head]))[:MOST_NAMED]
    return sorted(rows, key=lambda head: -(rows[head]["max_logit"] or 0.0))[:MOST_NAMED]


def factors_of(arm: str, state: Mapping[str, Any], name: str) -> dict[Head, float]:
    """Heads that an arm clips, and what each is scaled by at first."""
    rows, named = state["heads"], named_heads(state)
    own = {head: scale_of(rows[head]) for head in rows}
    if arm == "named":
        return {head: own[head] for head in named}
    if arm == "random":
        others = sorted(set(rows) - set(named))
        drawn = random.Random(name).sample(others, min(len(named), len(others)))
        return {head: own[other] for head, other in zip(drawn, named, strict=False)}
    layers = {layer for layer, _ in named}
    return {head: factor for head, factor in own.items() if arm == "all" or head[0] in layers}


def train_branch(
    run: plan.TrainingRun, arm: str, tokens: Path, states: Path, device: str, size: Size
) -> dict[str, Any]:
    """The line of one branch; without losses where its clip does not apply to the model."""
    began = time.time()
    # to the CPU: AdamW waits for the device at every step where its count of steps is there
    state = torch.load(state_file(states, run.name), map_location="cpu", weights_only=True)
    this = Training(run, tokens, device, size)
    about = {"name": run.name, "arm": arm, "sort": state["sort"], "step": state["step"]}
    factors = factors_of(arm, state, run.name) if arm in CLIPPING else {}
    held = factors or dict.fromkeys(named_heads(state) if arm == "freeze" else (), 1.0)
    about["heads"] = [[*head, round(factor, 4)] for head, factor in held.items()]
    this.model.load_state_dict(state["model"])
    clip, frozen = HeadClip(factors), FrozenHeads(this.model, named_heads(state)) if arm == "freeze" else None
    if factors:
        try:
            clip.attach(this.model)
        except LocaterError as error:
            return {**about, "losses": None, "why": str(error)}
    this.load(state)
    this.factor = 0.5 if arm == "half" else 1.0
    if factors:
        clip.scale_once()
    losses: list[float] = []
    for _ in range(min(size.branch, plan.STEPS - state["step"])):
        losses.append(this.advance()[0])
        if factors:
            clip.after_step()
        if frozen is not None:
            frozen.restore()
        if len(losses) > 10 and not any(map(math.isfinite, losses[-10:])):
            break
    clipped = {"clipped": clip.clipped} if factors else {}
    kept = [round(x, 4) if math.isfinite(x) else None for x in losses]
    return {**about, "losses": kept, **clipped, "seconds": round(time.time() - began, 1)}
