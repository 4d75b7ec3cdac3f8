"""From a plan to its parts: shape of the model, optimizer, learning rate of a step, device, precision, and
its random numbers."""

from __future__ import annotations

import math
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from locater.errors import LocaterError
from locater_lab.models.shape import Shape
from locater_lab.train.batches import Data
from locater_lab.train.plan import Plan

MOMENTUM = 0.9  # of SGD
QUERIES_AND_KEYS = ("q_proj.weight", "k_proj.weight")


def shape_of(plan: Plan, data: Data) -> Shape:
    """The shape of a plan's model, on this data."""
    facts = data.facts
    image = tuple(facts["shape"]) if plan.reads_images else None
    return Shape(
        vocabulary=_outputs(plan, facts, image),
        layers=plan.layers,
        width=plan.width,
        heads=plan.heads,
        kv_heads=plan.kv_heads or plan.heads,
        hidden=plan.hidden or hidden_of(plan.width, plan.mlp),
        length=image[0] * image[1] // plan.patch**2 if image else plan.length,
        positions=plan.where,
        mlp=plan.mlp,
        qk_norm=plan.qk_norm,
        causal=plan.is_causal,
        image=image,
        patch=plan.patch,
        attention=plan.attention,
        norm=plan.norm,
        fusion=plan.fusion,
        classes=facts["classes"] if plan.task == "classify" else None,
        denoises=plan.task == "diffusion",
        build=plan.build,
    )


def _outputs(plan: Plan, facts: Mapping[str, Any], image: tuple[int, int, int] | None) -> int:
    """What `Shape.vocabulary` counts: classes of images, numbers in a patch with noise, or tokens."""
    if image is None:
        return int(facts["vocabulary"]) + (plan.task == "masked")
    return plan.patch**2 * image[2] if plan.task == "diffusion" else int(facts["classes"])


def hidden_of(width: int, mlp: str) -> int:
    """Channels of an MLP by default: as many weights with a gate as without.

    >>> hidden_of(128, "swiglu"), hidden_of(128, "gelu")
    (344, 512)
    """
    return 4 * width if mlp in ("gelu", "relu", "linear") else -(-8 * width // 3 // 8) * 8


def optimizer_for(plan: Plan, trainable: Mapping[str, nn.Parameter], device: torch.device) -> torch.optim.Optimizer:
    """The optimizer of a plan over parameters by name; weight decay on matrices only.

    Muon has the matrices inside blocks, its updates scaled to the size of AdamW's, so that rates mean the same; AdamW
    has the rest: embeddings, gains, what a control learns.
    """
    if plan.optimizer == "muon":
        inside = {name: p for name, p in trainable.items() if p.ndim == 2 and ".layers." in name}
        rest = {name: p for name, p in trainable.items() if name not in inside}
        muon = torch.optim.Muon(inside.values(), lr=plan.rate, weight_decay=plan.decay, adjust_lr_fn="match_rms_adamw")
        return OptimizerPair(muon, optimizer_for(replace(plan, optimizer="adamw"), rest, device))
    apart = QUERIES_AND_KEYS if plan.decay_qk is not None else ()
    matrices = {name: p for name, p in trainable.items() if p.ndim > 1}
    groups = [
        {"params": [p for name, p in matrices.items() if not name.endswith(apart)], "weight_decay": plan.decay},
        {"params": [p for p in trainable.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    if plan.decay_qk is not None:
        own = [p for name, p in matrices.items() if name.endswith(apart)]
        groups.append({"params": own, "weight_decay": plan.decay_qk})
    fused = device.type == "cuda"
    if plan.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=plan.rate, momentum=MOMENTUM, fused=fused)
    return torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, plan.beta2), fused=fused)


def compile_model(plan: Plan, model: nn.Module, device: torch.device) -> Callable[..., Any]:
    """The model as steps call it, compiled where the plan says so.

    On a GPU, passes are CUDA graphs, because the host needs longer to queue the kernels of a small model than the GPU
    to run them. Not with controls and gradients that are added up, which keep tensors of a pass; and evaluation and
    observed steps are not.
    """
    if not plan.compile:
        return model
    as_graphs = device.type == "cuda" and plan.accumulate == 1 and plan.dropout == 0 and not plan.control
    return torch.compile(model, mode="reduce-overhead" if as_graphs else "default")


class OptimizerPair(torch.optim.Optimizer):
    """Two optimizers, each with parameters of its own, that step together."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        self.pair = first, second
        super().__init__([*first.param_groups, *second.param_groups], {})
        # the same dictionaries, so that a rate that is set here is theirs
        self.param_groups = [*first.param_groups, *second.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.pair:
            optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"pair": [optimizer.state_dict() for optimizer in self.pair]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer, state in zip(self.pair, state_dict["pair"], strict=True):
            optimizer.load_state_dict(state)
        self.param_groups = [group for optimizer in self.pair for group in optimizer.param_groups]


def rate_at(plan: Plan, step: int) -> float:
    """The learning rate of a step: a linear warm-up, then a cosine down to the floor, or rate * sqrt(warm-up / step).

    >>> plan = Plan(steps=100, warmup=0.1, rate=1.0, floor=0.1)
    >>> [round(rate_at(plan, step), 3) for step in (0, 9, 10, 55, 99)]
    [0.1, 1.0, 1.0, 0.55, 0.1]
    >>> plan = Plan(steps=100, warmup=4, rate=1.0, schedule="inverse_sqrt")
    >>> [rate_at(plan, step) for step in (0, 3, 15, 63)]
    [0.25, 1.0, 0.5, 0.25]
    """
    warm = int(plan.warmup * plan.steps if plan.warmup <= 1 else plan.warmup)
    if step < warm:
        return plan.rate * (step + 1) / warm
    if plan.schedule == "inverse_sqrt":
        return plan.rate * math.sqrt(max(1, warm) / (step + 1))
    done = (step - warm) / max(1, plan.steps - warm)
    return plan.rate * (plan.floor + (1 - plan.floor) * 0.5 * (1 + math.cos(math.pi * done)))


def uses_bfloat16(plan: Plan, device: torch.device) -> bool:
    """Whether the model computes in bfloat16 autocast."""
    return plan.precision == "bfloat16" or (plan.precision == "auto" and device.type == "cuda")


def device_of(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (
        RuntimeError,
        AssertionError,
        ImportError,
    ) as error:  # of a name, of CUDA that was not compiled, of a backend
        raise LocaterError(f"device={name!r}: cannot be used here ({str(error).splitlines()[0]})") from None
    return device


# ---- The random numbers of a run: apart from the caller's, saved with each checkpoint and restored from it. ----


@contextmanager
def seeded_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the random numbers of a run; afterwards those of the caller go on as if it had not taken place."""
    before = random.getstate()
    with torch.random.fork_rng(range(torch.cuda.device_count()) if device.type == "cuda" else ()):
        try:
            torch.manual_seed(seed)
            random.seed(seed)
            yield
        finally:
            random.setstate(before)


@contextmanager
def deterministic_algorithms(device: torch.device, wanted: bool = True) -> Iterator[None]:
    """On a GPU, prefer algorithms whose sums have a fixed order: equal plans then give equal weights on one device.

    Without it equal runs of a compiled model end up to 0.01 nats apart. An operation that has no such algorithm is used
    as it is; PyTorch's warnings about it are left out. Gradients ask for more: `strictly_deterministic`.
    """
    if device.type != "cuda" or not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def strictly_deterministic() -> Iterator[None]:
    """Refuse operations without an algorithm whose sums have a fixed order.

    While PyTorch only warns of them, it sums the gradients of its fused attention in any order, although there is such
    an algorithm for them: equal runs on 512 tokens were up to 0.04 nats apart after 150 steps.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def random_state() -> dict[str, Any]:
    """The state of every generator that training or a control may use."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate()}


def restore_random(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([x.cpu() for x in state["cuda"]])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
