"""The base runs of the rescue trial: a ladder of learning rates, each run with a monitor, and the states that they leave.

A state is everything that a run needs to go on from a step, bitwise on a CPU: branches.py forks it.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from locater import Monitor
from locater.discovery import attention_layers
from locater.layers import AttentionLayer, Projection
from locater.layers.projection_with_norm import NormedProjection
from locater_lab.engine.reproduction import round_numbers
from locater_lab.studies.early_warning import plan, training

KINDS = ("gpt2-a", "gpt2-b", "llama-a", "llama-b", "llama-c", "qwen3-a", "qwen3-c", "olmo2", "gemma2", "neox", "opt", "post-a")  # fmt: skip
RATES, SEEDS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0), 3
EVERY = 10
KEPT_OF_HEADS = {"max_logit": 3, "entropy_ratio": 3, "spread": 3}  # digits of what a line has of every head
Head = tuple[int, int]


@dataclass(frozen=True)
class Size:
    """How large the trial is: that of the plan, or a toy."""

    kinds: tuple[str, ...] = KINDS
    rates: tuple[float, ...] = RATES
    seeds: int = SEEDS
    batch: int = plan.BATCH
    length: int = plan.LENGTH
    steps: int = plan.STEPS
    branch: int = 300
    alarmed: tuple[int, int] = (20, 450)  # steps between which a warning makes a state
    quiet: tuple[int, int] = (50, 450)
    states: int = 60  # of each sort
    of_kind: int = 8


TOY = Size(("gpt2-a", "qwen3-a"), (1.0, 30.0), 1, 4, 32, 40, 10, (5, 35), (10, 20), 2, 2)


def planned_runs(size: Size) -> list[plan.TrainingRun]:
    """The ladder of rates, in the order in which its lines are made."""
    runs = [
        plan.TrainingRun(
            kind, f"{kind} rescue {rate:g} {seed}", 400 + seed, cause="" if rate == 1 else "rate", rate=rate
        )
        for kind in size.kinds
        for rate in size.rates
        for seed in range(size.seeds)
    ]
    random.Random(0).shuffle(runs)
    return runs


def quiet_step(run: plan.TrainingRun, size: Size) -> int:
    """Where a run that was not warned of gives a quiet state."""
    first, last = (step // EVERY for step in size.quiet)
    return EVERY * random.Random(run.name).randrange(first, last + 1) + 1  # an observed step


class Training:
    """A run that can be saved after any step and go on bitwise from there."""

    def __init__(self, run: plan.TrainingRun, tokens: Path, device: str, size: Size) -> None:
        self.run, self.kind, self.device, self.step = run, plan.BY_NAME[run.kind], device, 0
        torch.manual_seed(run.seed)
        self.model = plan.build_model(self.kind, run).to(device).train()
        self.optimizers = plan.make_optimizers(self.kind, run, self.model)
        ids = torch.from_numpy(np.load(tokens / f"{self.kind.text}.npy", allow_pickle=False))
        words = plan.vocabulary_size(self.kind)
        self._batches = training.draw_batches(run, ids, words, (size.batch, size.length))
        self._dtype = getattr(torch, self.kind.dtype)
        self.factor = 1.0  # of the rate

    def advance(self) -> tuple[float, float]:
        """One step: its loss and gradient norm."""
        self.step += 1
        inputs, targets = (x.to(self.device) for x in next(self._batches))
        rate = self.factor * plan.rate_at(self.kind, self.run, self.step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        with torch.autocast(self.device, self._dtype, enabled=self._dtype != torch.float32):
            own = self.kind.build == "own"
            out = self.model(inputs) if own else self.model(input_ids=inputs, use_cache=False).logits
        loss = functional.cross_entropy(out.flatten(0, 1).float(), targets.flatten())
        self.model.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.run.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        held, length = torch.stack((loss.detach().float(), norm.float())).tolist()  # one wait for the device
        return held, length

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on after the step of a state: the batches before it are drawn and dropped."""
        self.model.load_state_dict(state["model"])
        for optimizer, held in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(held)
        for _ in range(state["step"] - self.step):
            next(self._batches)
        self.step = state["step"]


class LastStep:
    """A sink that keeps the numbers of all heads at the last observed step, and what a line needs of the run."""

    def __init__(self) -> None:
        self.heads: dict[Head, dict[str, float | None]] = {}
        self.layers: list[int] = []
        self.observed = training.WarningsSink()
        self.curves: dict[str, list[list[float | None]]] = {name: [] for name in KEPT_OF_HEADS}

    def write(self, record: dict[str, Any]) -> None:
        self.observed.write(record)
        if record["kind"] == "run":
            self.layers = [entry["layer"] for entry in record["layers"]]
        if record["kind"] == "step":
            self.heads = {}
            for column in ("max_logit", "spread"):
                for layer, row in zip(self.layers, record["heads"][column], strict=True):
                    for head, value in enumerate(row):
                        self.heads.setdefault((layer, head), {})[column] = value
            for name, digits in KEPT_OF_HEADS.items():
                row = [x for layer in record["heads"][name] for x in layer]
                self.curves[name].append(round_numbers(row, digits))

    def close(self) -> None:
        return


def query_and_key(layer: AttentionLayer) -> tuple[Projection, Projection]:
    """The maps as they are stored: where a norm follows all heads together, those in front of it."""
    query, key = (p.down if isinstance(p, NormedProjection) else p for p in (layer.query, layer.key))
    return query, key


def gains(layer: AttentionLayer) -> list[Tensor]:
    """Of the norms on queries and keys, where there are any."""
    parts = ((layer.query, layer.query_norm), (layer.key, layer.key_norm))
    norms = [p.inner if isinstance(p, NormedProjection) else norm for p, norm in parts]
    return [norm.gain.detach().float() for norm in norms if norm is not None and norm.gain is not None]


class WeightSignals:
    """What the rivals read from the weights. The layers are read once: their maps are those of the live parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = list(attention_layers(model))
        self.before = self._maps()

    def row(self, step: int) -> list[float | None]:
        """Step, spectral entropy, size of the update since the last row, and the gains of norms on queries and keys: the
        largest over layers of the product of their root mean squares, and of their largest entries.
        """
        now = self._maps()
        update = (now - self.before).norm() / now.norm()
        self.before = now
        numbers = [self._spectral_entropy().to(update), update, *self._gains(update)]
        held: list[float] = torch.stack(numbers).tolist()
        return [step, *(x if math.isfinite(x) else None for x in held)]

    def _maps(self) -> Tensor:
        """All query and key weights as one vector."""
        return torch.cat([p.weight().detach().flatten() for x in self.layers for p in query_and_key(x)])

    def _spectral_entropy(self) -> Tensor:
        """The lowest entropy, over heads, of the squared singular values of their queries or keys (arXiv 2606.28116).

        They are the eigenvalues of the small matrix W W^T of a head, taken on the CPU, where a batch of them is quicker
        than on a GPU that others use.
        """
        parts = [part for x in self.layers for part in zip(query_and_key(x), (x.heads, x.kv_heads), strict=True)]
        weights = torch.cat([p.weight().detach().float().reshape(n, -1, p.shape[1]) for p, n in parts])
        small = (weights @ weights.mT).double().cpu()
        if not bool(small.isfinite().all()):
            return torch.zeros(())
        values = torch.linalg.eigvalsh(small).clamp(min=0)
        shares = values / values.sum(-1, keepdim=True)
        return (-torch.special.xlogy(shares, shares).sum(-1)).min()

    def _gains(self, like: Tensor) -> list[Tensor]:
        pairs = [pair for x in self.layers if len(pair := gains(x)) == 2]
        if not pairs:
            return [like.new_full((), math.nan)] * 2
        return [
            torch.stack([q.square().mean().sqrt() * k.square().mean().sqrt() for q, k in pairs]).max(),
            torch.stack([q.abs().max() * k.abs().max() for q, k in pairs]).max(),
        ]


def state_file(states: Path, name: str) -> Path:
    return states / f"{name}.pt"


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Whole or not at all: a process may be ended at any moment."""
    part = path.with_suffix(f".{os.getpid()}.part")
    torch.save(dict(state), part)
    part.replace(path)


def train_base(run: plan.TrainingRun, tokens: Path, states: Path, device: str, size: Size) -> dict[str, Any]:
    """The line of a base run. Its state is in `states`, where it has one."""
    began = time.time()
    this, last = Training(run, tokens, device, size), LastStep()
    monitor = Monitor(last, every=EVERY).attach(this.model)
    losses: list[float] = []
    norms: list[float] = []
    rivals: list[list[float | None]] = []
    signals, sort = WeightSignals(this.model), ""
    for step in range(1, size.steps + 1):
        known = bool(monitor.warned)
        loss, norm = this.advance()
        warnings = monitor.after_step(loss=loss, grad_norm=norm)
        losses.append(loss)
        norms.append(norm)
        if (step - 1) % EVERY == 0:
            rivals.append(signals.row(step))
        alarmed = bool(warnings) and not known and size.alarmed[0] <= step <= size.alarmed[1]
        if alarmed or (not monitor.warned and step == quiet_step(run, size)):
            heads = dict.fromkeys((w["layer"], w["head"]) for w in warnings) or dict.fromkeys(last.heads)
            sort = "alarmed" if alarmed else "quiet"
            about = {"heads": last.heads, "warned": list(heads), "sort": sort, "losses": losses}
            save_state(state_file(states, run.name), {**this.state(), **about})
        if len(losses) > 10 and not any(map(math.isfinite, losses[-10:])):
            break
    monitor.detach()
    return {
        "name": run.name,
        "run": asdict(run),
        "state": sort,
        "losses": [round(x, 3) if math.isfinite(x) else None for x in losses],
        "norms": [round(x, 3) if math.isfinite(x) else None for x in norms],
        "warnings": last.observed.first(),
        "observed": last.observed.observed,
        "rivals": round_numbers(rivals, 6),
        "heads": last.curves,
        "seconds": round(time.time() - began, 1),
    }
