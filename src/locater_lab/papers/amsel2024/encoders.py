"""Encoders that give every point the point farthest from it, all seeds of an arm as one batched model; and study c, the
same at a size that a CPU trains.

A layer is that of the paper's code: `copies` multi-head attentions side by side, averaged, each with all of its heads
of one rank; a sum with the input; an MLP with ReLU; a sum again. After each sum a token is scaled to a length that is
one learned number. It begins at 1, or at sqrt(d) as in ScaleNorm: begun at 1, encoders of several layers learn the
length 0. Points have no positions, or learned ones in channels of their own. Weights do not depend on the rank: a head
of rank r reads r channels of its copy, so that arms of one width and number of copies have equal parameters.

The loss is the squared distance from the answer. AdamW, no decay; the rate rises over the first 5 % of the steps and
falls to 0 along a cosine; every step has new points. Steps are CUDA graphs on a GPU, with products in TF32.

**Study c.** d and N are 8, the MLP has 64 channels, the lengths of tokens begin at sqrt(d), and there are 1,200 steps;
everything else is as at the published size. It says whether the order of the ranks is there already at this size, at
equal parameters and by the time that a step takes. Several layers are left to the published size: at this rate encoders
of three layers learn nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.numerics import finite_or_none, one_thread
from locater.spectrum import moments
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.devices_and_processes import as_cuda_graph
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.amsel2024.untrained_heads import farthest

# ---- what is trained ----


Heads = Float[Tensor, "n N H r"]  # n is seeds x batch

BETAS = (0.9, 0.95)
WARMUP = 0.05  # share of the steps
EPOCH = 100  # steps that the training loss is averaged over
BROADCAST = 4  # up to this rank products of a head are sums that a compiler puts into one kernel
LARGE = 1e8  # scores a step from which on that is worth compiling
HEADS = 64  # of the first layer whose W is read, at most
JUDGED = 2048  # sets of points that the end of training is judged on, by seed


@dataclass(frozen=True)
class Encoder:
    """An arm: what is trained, with how many seeds, for how long."""

    rank: int
    copies: int = 1
    layers: int = 1
    points: int = 16  # N
    width: int = 64  # d
    positions: int = 0  # channels beside those of the points
    hidden: int = 2048
    seeds: int = 8
    batch: int = 128
    steps: int = 10_000
    rate: float = 0.01
    length: float = 1.0  # that the learned lengths of tokens begin with

    @property
    def channels(self) -> int:
        return self.width + self.positions

    @property
    def heads(self) -> int:
        return self.copies * self.channels // self.rank

    @property
    def scores(self) -> int:
        """Of a layer, in one step of all seeds."""
        return self.seeds * self.batch * self.heads * self.points**2

    @property
    def options(self) -> dict[str, Any]:
        """What decides a run; a length of 1 is not mentioned."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("length", 1.0)}


class Encoders:
    """The models of all seeds: parameters have a first axis of seeds, points are (seeds, batch, N, d)."""

    def __init__(self, arm: Encoder, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.arm = arm
        self.parameters: list[Tensor] = []
        drawn = [torch.Generator().manual_seed(seed) for seed in range(arm.seeds)]

        def even(*shape: int, bound: float) -> Tensor:
            """Drawn evenly from -bound to bound, each seed with its own generator."""
            each = [bound * (2 * torch.rand(*shape, generator=g, dtype=torch.float64) - 1) for g in drawn]
            return self._own(torch.stack(each).to(device, dtype))

        def full(*shape: int, value: float) -> Tensor:
            return self._own(torch.full((arm.seeds, *shape), value, device=device, dtype=dtype))

        D, wide, hidden = arm.channels, arm.copies * arm.channels, arm.hidden
        if arm.positions:
            self.places = even(arm.points, arm.positions, bound=math.sqrt(3 / arm.positions))  # of length about 1
        self.layers = [
            {
                **{name: even(D, wide, bound=math.sqrt(6 / (4 * D))) for name in "qkv"},  # Xavier, of the three as one
                **{f"{name}_bias": full(1, wide, value=0.0) for name in "qkv"},
                "o": even(wide, D, bound=D**-0.5),
                "o_bias": full(1, D, value=0.0),
                "up": even(D, hidden, bound=D**-0.5),
                "up_bias": even(1, hidden, bound=D**-0.5),
                "down": even(hidden, D, bound=hidden**-0.5),
                "down_bias": even(1, D, bound=hidden**-0.5),
                "size": full(1, 1, value=arm.length),
                "last_size": full(1, 1, value=arm.length),
            }
            for _ in range(arm.layers)
        ]
        self.attend: Callable[..., Tensor] = attend_by_sums if arm.rank == 1 and device == "cpu" else attend

    def _own(self, value: Tensor) -> Tensor:
        self.parameters.append(value.requires_grad_())
        return value

    def __call__(self, points: Float[Tensor, "S B N d"]) -> Float[Tensor, "S B N d"]:
        arm = self.arm
        x = points
        if arm.positions:
            x = torch.cat([points, self.places[:, None].expand(-1, points.shape[1], -1, -1)], -1)
        x = x.flatten(1, 2)  # (S, B N, D)
        for layer in self.layers:
            q, k, v = (torch.baddbmm(layer[f"{name}_bias"], x, layer[name]) for name in "qkv")
            y = self.attend(*(part.reshape(-1, arm.points, arm.heads, arm.rank) for part in (q, k, v)))
            y = y.reshape(*x.shape[:2], -1)
            x = _scaled_tokens(x + layer["o_bias"] + y @ layer["o"] / arm.copies, layer["size"])
            hidden = torch.baddbmm(layer["up_bias"], x, layer["up"]).relu()
            x = _scaled_tokens(x + torch.baddbmm(layer["down_bias"], hidden, layer["down"]), layer["last_size"])
        return x.unflatten(1, (-1, arm.points))[..., : arm.width]


def attend(q: Heads, k: Heads, v: Heads) -> Heads:
    """Softmax attention of heads of rank r, scores over sqrt(r)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (n, H, N, r)
    return (torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v).transpose(1, 2)


def attend_by_sums(q: Heads, k: Heads, v: Heads) -> Heads:
    """The same without matrix products: a score of rank 1 is one product, and millions of matrices of rank 1 are slow."""
    scores = (q[:, :, None] * k[:, None]).sum(-1) * q.shape[-1] ** -0.5  # (n, N queries, N keys, H)
    return (torch.softmax(scores, 2)[..., None] * v[:, None]).sum(2)


def train_encoders(arm: Encoder, device: str = "cpu") -> dict[str, Any]:
    """Train all seeds of an arm. Losses on new points at the end, the least mean over 100 steps of training, its curve,
    seconds, and what the heads of the first layer are; each by seed.
    """
    cuda = device != "cpu"
    if cuda:
        torch.cuda.empty_cache()  # the graph of the arm before had memory of its own
    with _products_in_tf32(), torch.random.fork_rng(devices=[torch.cuda.current_device()] if cuda else []):
        torch.manual_seed(0)
        model = Encoders(arm, device)
        if cuda and arm.rank <= BROADCAST and arm.scores >= LARGE:
            torch.compiler.reset()  # each shape is compiled once, and too many are refused
            model.attend = torch.compile(attend_by_sums, dynamic=False)
        curve, seconds = _descend(model, device)
        torch.set_float32_matmul_precision("highest")
        end = final_losses(model, device)
    return {
        "loss": _finite(end),
        "best": _finite(curve.nan_to_num(math.inf).amin(0)),
        "curve": _finite(curve[:: max(1, len(curve) // 50)].mean(1)),
        "seconds": seconds,
        "heads": head_statistics(model),
    }


def _descend(model: Encoders, device: str) -> tuple[Float[Tensor, "epochs S"], float]:
    """All steps: mean losses of each 100 of them, and the seconds they took, without those before the graph."""
    arm, cuda = model.arm, device != "cpu"
    rate: Tensor | float = torch.tensor(0.0, device=device) if cuda else 0.0
    optimizer = torch.optim.AdamW(model.parameters, lr=rate, betas=BETAS, weight_decay=0.0, fused=True, capturable=cuda)
    total = torch.zeros(arm.seeds, device=device)
    step: Callable[[], None] = partial(_step, model, optimizer, total, device)
    if cuda:
        step = as_cuda_graph(step)  # its first steps have the rate 0
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()
    total.zero_()
    means, start = [], time.perf_counter()
    for number in range(arm.steps):
        now = arm.rate * share_of_rate(number, arm.steps)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"].fill_(now) if cuda else now
        step()
        if (number + 1) % EPOCH == 0:
            means.append(total / EPOCH)
            total.zero_()
    losses = torch.stack(means).double().cpu()  # waits for the device
    return losses, time.perf_counter() - start


def _step(model: Encoders, optimizer: torch.optim.Optimizer, total: Tensor, device: str) -> None:
    """One step of all seeds on new points; losses are added to `total`."""
    optimizer.zero_grad(set_to_none=True)
    loss = losses(model, draw_points(model.arm, model.arm.batch, device))
    loss.sum().backward()  # of the sum over seeds: each seed's own gradient
    optimizer.step()
    total += loss.detach()


def draw_points(arm: Encoder, batch: int, device: str) -> Float[Tensor, "S B N d"]:
    """New points on the sphere, each seed its own."""
    points = torch.randn(arm.seeds, batch, arm.points, arm.width, device=device)
    return torch.nn.functional.normalize(points, dim=-1)


def losses(model: Encoders, points: Float[Tensor, "S B N d"]) -> Float[Tensor, " S"]:
    """Squared distance from the farthest point, mean over points."""
    return (model(points) - farthest(points)).square().sum(-1).mean((1, 2))


@torch.no_grad()
def final_losses(model: Encoders, device: str) -> Float[Tensor, " S"]:
    """Losses on new points, with products in float32."""
    torch.manual_seed(1)
    batch = 64
    if device != "cpu":
        batch, model.attend = model.arm.batch, attend
    parts = max(1, JUDGED // batch)
    return torch.stack([losses(model, draw_points(model.arm, batch, device)) for _ in range(parts)]).mean(0).cpu()


def share_of_rate(step: int, steps: int) -> float:
    """Of the highest rate: a straight rise over the first 5 %, then a cosine to 0.

    >>> [round(share_of_rate(n, 100), 2) for n in (0, 4, 5, 52, 99)]
    [0.2, 1.0, 1.0, 0.51, 0.0]
    """
    rise = max(1, round(WARMUP * steps))
    return (step + 1) / rise if step < rise else 0.5 + 0.5 * math.cos(math.pi * (step - rise) / (steps - rise))


def head_statistics(model: Encoders) -> dict[str, list[float | None]]:
    """Of W = W_Q^T W_K of the first layer's heads, means over the heads of each seed: the angle to the identity in
    degrees, ||W||_F, mean eigenvalue over the head's directions, stable and effective rank, concentration.
    """
    arm, layer = model.arm, model.layers[0]
    q, k = (layer[name].detach().cpu().double().mT.unflatten(1, (-1, arm.rank))[:, :HEADS] for name in "qk")
    with one_thread():
        m = moments(q, k)
        size = m.frobenius_sq.sqrt()
        angle = torch.rad2deg(torch.acos((m.trace / (math.sqrt(arm.channels) * size)).clamp(-1, 1)))
        table = {
            "angle": angle,
            "frobenius": size,
            "mean": m.mean,
            "stable_rank": m.stable_rank,
            "effective_rank": m.effective_rank,
            "concentration": m.concentration,
        }
    return {name: _finite(column.mean(1)) for name, column in table.items()}


def _finite(column: Tensor) -> list[float | None]:
    return [finite_or_none(x) for x in column.tolist()]


def _scaled_tokens(x: Tensor, size: Tensor) -> Tensor:
    return size * torch.nn.functional.normalize(x, dim=-1)


@contextmanager
def _products_in_tf32() -> Iterator[None]:
    """Products of float32 in TF32 where the device has it; as before afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# ---- c: at a small size ----


WIDTH = POINTS = 8
RANKS = (1, 2, 4, 8)
STEP_FACTORS = {True: 1, False: 3}  # times those of the arms
SMALL = Encoder(rank=1, width=WIDTH, points=POINTS, hidden=64, seeds=8, batch=8, rate=0.03, length=WIDTH**0.5)
NARROW = tuple(replace(SMALL, rank=r, steps=1200) for r in RANKS)  # d^2 parameters
WIDE = tuple(replace(SMALL, rank=r, copies=WIDTH, steps=1200) for r in (1, 4, 8))  # d^3
REPEATS = 24  # of each timing, the two in turns
TIMED = 8  # steps of one

AT_SMALL_SIZE = f"as seen at d = {WIDTH}, N = {POINTS}"
SMALL_CLAIMS = (
    Claim(
        "c1", f"With d^2 parameters full rank is far better than half of it, {AT_SMALL_SIZE}",
        "loss at rank d over loss at rank d / 2, one layer, one copy", "at most", 0.3, by="ours",
    ),
    Claim(
        "c2", f"With d^3 parameters full rank is better than half of it, {AT_SMALL_SIZE}",
        "loss at rank d less loss at rank d / 2, one layer, d copies", "at most", 0.0, by="ours",
    ),
    Claim(
        "c3", f"One full-rank head beats rank one with d times its parameters, {AT_SMALL_SIZE}",
        "loss at rank d with one copy less loss at rank 1 with d copies", "at most", 0.0, by="ours",
    ),
    Claim(
        "c4", f"With d^2 parameters half of full rank is hardly better than rank one, {AT_SMALL_SIZE}",
        "loss at rank d / 2 over loss at rank 1, one layer, one copy", "at least", 0.7, by="ours",
    ),
    Claim(
        "c5", f"The W that one full-rank head learns is a multiple of -I, {AT_SMALL_SIZE}",
        "angle of W to the identity in degrees", "at least", 175.0, by="ours",
    ),
    Claim(
        "c6", f"A step of one full-rank head takes no longer than one of d heads of rank one, {AT_SMALL_SIZE}",
        "seconds of a training step, rank d over rank 1, one copy each, in turns", "at most", 1.0, by="ours",
    ),
)  # fmt: skip


def measure_small_encoders(setting: Setting) -> Results:
    """Every arm, all seeds at once; then steps of two arms timed in turns."""
    arms = (*NARROW, *WIDE)
    results = {
        arm: train_encoders(replace(arm, steps=arm.steps * STEP_FACTORS[setting.quick]))
        for arm in setting.each(list(arms))
    }

    def loss(arm: Encoder) -> list[float]:
        return [float(x) for x in results[arm]["loss"]]

    def over(a: Encoder, b: Encoder) -> Measurement:
        return by_seed([x / y for x, y in zip(loss(a), loss(b), strict=True)])

    def less(a: Encoder, b: Encoder) -> Measurement:
        return by_seed([x - y for x, y in zip(loss(a), loss(b), strict=True)])

    one, _, half, full = NARROW
    times = step_times(full, one)
    measured = {
        "c1": over(full, half),
        "c2": less(WIDE[2], WIDE[1]),
        "c3": less(full, WIDE[0]),
        "c4": over(half, one),
        "c5": by_seed(results[full]["heads"]["angle"]),
        "c6": by_seed([a / b for a, b in times], of="repeats"),
    }
    rows = [_arm_row(arm, result) for arm, result in results.items()]
    table = {
        "rows": rows,
        "seeds": SMALL.seeds,
        "step_milliseconds": {
            name: 1000 * median(pair[n] for pair in times) for n, name in enumerate(("full rank", "rank one"))
        },
    }
    return Results(measured, {"small": table})


def step_times(a: Encoder, b: Encoder) -> list[tuple[float, float]]:
    """Seconds of a forward and backward pass of each, in turns, so that both see the same machine."""
    steps = [partial(_gradient_pass, Encoders(arm)) for arm in (a, b)]
    for step in steps:
        step()
    return [(_seconds(steps[0]), _seconds(steps[1])) for _ in range(REPEATS)]


def _gradient_pass(model: Encoders) -> None:
    torch.autograd.grad(losses(model, draw_points(model.arm, model.arm.batch, "cpu")).sum(), model.parameters)


def _seconds(step: partial[None]) -> float:
    start = time.process_time()  # of this process alone, whatever else the machine does
    for _ in range(TIMED):
        step()
    return (time.process_time() - start) / TIMED


def _arm_row(arm: Encoder, result: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of an arm: sizes, losses, and W of its heads."""
    means = {name: fmean(values) for name, values in result["heads"].items()}
    return {
        **{name: arm.options[name] for name in ("layers", "copies", "rank")},
        "steps": arm.steps,
        "heads": arm.heads,
        "losses": result["loss"],
        "mean_loss": fmean(result["loss"]),
        "least": min(result["loss"]),
        **means,
        "curve": [[100 * (n + 0.5), loss] for n, loss in enumerate(result["curve"])],
    }


SMALL_STUDY = Study("small encoders", SMALL_CLAIMS, measure_small_encoders)
