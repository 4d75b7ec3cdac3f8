"""The cost of LocAteR: training steps of a GPT-2-small shape with it and without, in turns; and the time of its loss
and gradient alone, beside those of the d x d penalty. On a GPU the whole step is what counts. Alone, the penalty is a
few dozen small kernels, whose launches take the time; in a step they are queued long before the device gets to them.

python benchmarks/penalty.py              on the CPU, one thread; writes benchmarks/results/penalty-cpu.json
python benchmarks/penalty.py --gpu        on a GPU, bf16 autocast, compiled; writes benchmarks/results/penalty-gpu.json
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater.control import LocAteR
from locater.families import attention_layers, effective

RESULTS = Path(__file__).parent / "results"
WORDS = 50257


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


def timed(work: Callable[[], None], times: int, cuda: bool) -> float:
    """Seconds, the least of several: other work on the machine can only add."""
    best = float("inf")
    for _ in range(times):
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def several(step: Callable[..., None], **how: Any) -> None:
    for _ in range(10 if torch.cuda.is_available() else 2):
        step(**how)


def measure(device: str, batch: int, length: int, steps: int) -> dict[str, Any]:
    cuda = device == "cuda"
    model = model_of(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=cuda)
    control = LocAteR().attach(model)
    ids = torch.randint(0, WORDS, (batch, length), device=device)

    def forward(x: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=cuda):
            logits = model(x, use_cache=False).logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten())

    run: Any = torch.compile(forward) if cuda else forward
    loss: Any = torch.compile(control.loss) if cuda else control.loss

    def step(x: Tensor = ids, charged: bool = False) -> None:
        optimizer.zero_grad()
        (run(x) + loss() if charged else run(x)).backward()
        optimizer.step()

    with torch.no_grad():
        ours, theirs = float(control.loss()), float(naive(model))
    assert abs(ours - theirs) < 1e-4 * abs(theirs), (ours, theirs)
    for _ in range(3 if cuda else 1):  # compile, allocate
        step(ids if cuda else ids[:1, :8])
        step(ids if cuda else ids[:1, :8], charged=True)
        loss().backward()
    seconds = {
        "penalty": timed(lambda: loss().backward(), 10, cuda),
        "naive penalty": timed(lambda: naive(model).backward(), 10 if cuda else 2, cuda),
        "training step": timed(step, steps, cuda),
    }
    turns = [
        (timed(lambda: several(step), 1, cuda), timed(lambda: several(step, charged=True), 1, cuda))
        for _ in range(7 if cuda else 1)
    ]
    ratios = sorted(b / a for a, b in turns)
    return {
        "machine": torch.cuda.get_device_name() if cuda else f"{platform.processor() or platform.machine()}, 1 thread",
        "torch": torch.__version__,
        "shape": {"model": "GPT-2 small", "batch": batch, "length": length},
        "seconds": seconds,
        "step with / step without": ratios[len(ratios) // 2],
        "ratios": ratios,
        "penalty / training step": seconds["penalty"] / seconds["training step"],
        "penalty / naive": seconds["penalty"] / seconds["naive penalty"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    gpu = parser.parse_args().gpu
    if not gpu:
        torch.set_num_threads(1)
    results = measure("cuda", 32, 1024, 10) if gpu else measure("cpu", 4, 256, 1)
    path = RESULTS / f"penalty-{'gpu' if gpu else 'cpu'}.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
