"""The cost of LocAteR: training steps of a GPT-2-small shape without it, with it and with its measured form, in turns;
and the time of its loss and gradient alone, beside those of the d x d penalty. On a GPU the whole step is what counts.
Alone, the penalty is a few dozen small kernels, whose launches take the time; in a step they are queued long before the
device gets to them. The measured form has a model of its own, equal to the other, because it listens to the forward
pass. On the CPU seconds are those of the process, so that other work on the machine does not count.

python benchmarks/penalty.py              on the CPU, one thread; writes benchmarks/results/penalty-cpu.json
python benchmarks/penalty.py --gpu        on a GPU, bf16 autocast, compiled; writes benchmarks/results/penalty-gpu.json
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from common import command_line, device_and_torch, place, write
from torch import Tensor, nn

from locater.control import LocAteR
from locater.discovery import attention_layers
from locater.layers import effective

WORDS = 50257
FORMS: tuple[Literal["effective", "measured"], ...] = ("effective", "measured")


def model_of(device: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(attn_implementation="sdpa", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(config).to(device).train()


def naive(model: nn.Module, shrink: float = 0.01, hold: float = 0.01, target: float = 2.0) -> Tensor:
    """The same penalty from W itself, d x d for each head."""
    total = torch.zeros((), device=next(model.parameters()).device)
    for layer in attention_layers(model):
        folded = effective(layer)
        W = layer.scale * folded.query.mT @ folded.key
        total = (
            total
            + shrink * ((W + W.mT) / 2).square().sum()
            + hold * (W.diagonal(dim1=-2, dim2=-1).sum(-1) - target).square().sum()
        )
    return total


def time_steps(work: Callable[[], None], times: int, cuda: bool) -> float:
    """Seconds, the least of several: other work on the machine can only add."""
    clock = time.perf_counter if cuda else time.process_time
    best = float("inf")
    for _ in range(times):
        if cuda:
            torch.cuda.synchronize()
        began = clock()
        work()
        if cuda:
            torch.cuda.synchronize()
        best = min(best, clock() - began)
    return best


class Steps:
    """Training steps of one model, with the penalty of a control or without."""

    def __init__(self, device: str, form: Literal["effective", "measured"], ids: Tensor) -> None:
        self.cuda, self.ids, self.device = device == "cuda", ids, device
        self.model = model_of(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-5, fused=self.cuda)
        self.control = LocAteR(form=form).attach(self.model)
        self.forward: Any = torch.compile(self._forward) if self.cuda else self._forward
        self.penalty: Any = torch.compile(self.control.loss) if self.cuda else self.control.loss

    def _forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.cuda):
            logits = self.model(x, use_cache=False).logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten())

    def step(self, charged: bool, x: Tensor | None = None) -> None:
        self.optimizer.zero_grad()
        loss = self.forward(self.ids if x is None else x)
        (loss + self.penalty() if charged else loss).backward()
        self.optimizer.step()

    def several(self, charged: bool) -> None:
        for _ in range(10 if self.cuda else 1):
            self.step(charged)

    def warm_up(self) -> None:
        """Compile and allocate; on the CPU a few tokens do."""
        for _ in range(3 if self.cuda else 1):
            for charged in (False, True):
                self.step(charged, None if self.cuda else self.ids[:1, :8])
            self.penalty().backward()


def measure(device: str, batch: int, length: int, steps: int, rounds: int) -> dict[str, Any]:
    cuda = device == "cuda"
    ids = torch.randint(0, WORDS, (batch, length), device=device)
    arms = {form: Steps(device, form, ids) for form in FORMS}
    plain = arms["effective"]
    with torch.no_grad():
        ours, theirs = float(plain.control.loss()), float(naive(plain.model))
    assert abs(ours - theirs) < 1e-4 * abs(theirs), (ours, theirs)
    for arm in arms.values():
        arm.warm_up()
    seconds = {
        "penalty": time_steps(lambda: plain.penalty().backward(), 10, cuda),
        "measured penalty": time_steps(lambda: arms["measured"].penalty().backward(), 10, cuda),
        "naive penalty": time_steps(lambda: naive(plain.model).backward(), 10 if cuda else 2, cuda),
        "training step": time_steps(lambda: plain.step(False), steps, cuda),
    }
    ratios: dict[str, list[float]] = {form: [] for form in FORMS}
    for _ in range(rounds):
        without = time_steps(lambda: plain.several(False), 1, cuda)
        for form, arm in arms.items():
            ratios[form].append(time_steps(partial(arm.several, True), 1, cuda) / without)
    medians = {form: sorted(each)[len(each) // 2] for form, each in ratios.items()}
    return {
        **device_and_torch(cuda),
        "shape": {"model": "GPT-2 small", "batch": batch, "length": length},
        "seconds": seconds,
        "step with / step without": medians["effective"],
        "ratios": sorted(ratios["effective"]),
        "step with the measured form / step without": medians["measured"],
        "measured ratios": sorted(ratios["measured"]),
        "penalty / training step": seconds["penalty"] / seconds["training step"],
        "measured penalty / training step": seconds["measured penalty"] / seconds["training step"],
        "penalty / naive": seconds["penalty"] / seconds["naive penalty"],
    }


def main() -> None:
    args = command_line(__doc__, "penalty", ("cpu", "gpu")).parse_args()
    if not args.gpu:
        torch.set_num_threads(1)
    rounds = 1 if args.quick else 7 if args.gpu else 3
    results = measure("cuda", 32, 1024, 10, rounds) if args.gpu else measure("cpu", 4, 256, 1, rounds)
    write(results, place(args))


if __name__ == "__main__":
    main()
