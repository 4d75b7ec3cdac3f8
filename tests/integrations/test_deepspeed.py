"""DeepSpeed ZeRO-3, which leaves every parameter empty between its uses: numbers, penalties and gradients are those of
one process that has the whole model and all batches.

Models are in float64. DeepSpeed trains a float32 copy of their parameters, and so does the one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import locater
from locater import LocaterError
from locater.control import Mimetic, QKClip, QKNorm, SigmaReparam, Temperature
from tests.processes import ranks
from tests.runs.test_sharded_runs import batch, loss_of, mean_over_ranks
from tests.sharded import llama, same_parts, titan

STEPS, RATE = 3, 0.1
COLUMNS = ("entropy", "entropy_ratio", "max_logit", "sink", "distance", "participation", "M", "spread")


def imports() -> None:
    """Once, before the processes part."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install 'locater[slow]'")
    from transformers import LlamaForCausalLM  # noqa: F401


def settings(count: int) -> dict[str, Any]:
    """Of the engine: every parameter is partitioned, norms too, and gradients are not clipped, as they are by default."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    return {
        "train_micro_batch_size_per_gpu": 4 // count,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }


def engine_of(model: nn.Module, **more: Any) -> Any:
    import deepspeed

    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    config = settings(dist.get_world_size()) | more
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def trained(run: Any, model: Any, ids: Tensor, log: Path, backward: Any, step: Any, first: bool) -> dict[str, Any]:
    """A few steps under LocAteR and a monitor; the penalty is made `first`, or after the model's pass."""
    control = locater.LocAteR(shrink=0.1, hold=0.1).attach(model)
    reachable = hasattr(model, "config")  # attention passes the interface of transformers
    more = [Temperature(init=0.5).attach(model), QKNorm().attach(model)] if reachable else []
    own = [p for each in more for p in each.parameters()]
    own_optimizer = torch.optim.SGD(own, lr=RATE) if own else None
    monitor = locater.Monitor(log, every=2).attach(model)
    penalties = []
    for _ in range(STEPS):
        penalty = control.loss() if first else None
        loss = loss_of(run, ids)
        penalty = control.loss() if penalty is None else penalty
        backward(loss + penalty)
        step()
        if own_optimizer is not None:
            own_optimizer.step()
            own_optimizer.zero_grad()
        control.after_step()
        penalties.append(float(penalty.detach()))
        monitor.after_step(loss=mean_over_ranks(loss))
    monitor.detach()
    model.eval()
    rows = locater.scan(model).rows
    with locater.observe(model) as seen:
        loss_of(run, ids)
    seen.reduce()
    for each in (*reversed(more), control):
        each.detach()
    weights = dict(model.named_parameters())
    return {
        "penalties": penalties,
        "own": [p.detach().clone() for p in own],
        "scan": [asdict(row) for row in rows],
        "seen": [asdict(row) for row in seen.rows],
        "parameters": {name: whole(p) for name, p in weights.items()},
    }


def whole(p: Any) -> Tensor:
    if not hasattr(p, "ds_id"):
        return p.detach().clone()
    import deepspeed

    with deepspeed.zero.GatheredParameters([p]):
        return p.detach().clone()


def alone(make: Callable[[], Any], ids: Tensor, log: Path, first: bool) -> dict[str, Any]:
    model = make()
    copies = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.SGD(copies, lr=RATE)

    @torch.no_grad()
    def step() -> None:
        for p, copied in zip(model.parameters(), copies, strict=True):
            copied.grad = p.grad.float()
        optimizer.step()
        for p, copied in zip(model.parameters(), copies, strict=True):
            p.copy_(copied)
            p.grad = None

    return trained(model, model, ids, log, lambda loss: loss.backward(), step, first)


same = partial(same_parts, rtol=1e-6, atol=1e-6)


def steps_of(log: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [{key: line[key] for key in ("step", "loss", "heads")} for line in lines if line["kind"] == "step"]


def worker(makes: list[Callable[[], Any]], folder: Path, rank: int) -> None:
    import deepspeed

    (folder / f"{rank}").mkdir()
    cases = [(make, first) for make in makes for first in (False, True)]
    one = [alone(make, batch(), folder / f"{rank}/{i}.jsonl", first) for i, (make, first) in enumerate(cases)]
    deepspeed.init_distributed("gloo")
    ids = batch().chunk(dist.get_world_size())[rank]
    for i, (make, first) in enumerate(cases):
        engine, log = engine_of(make()), folder / f"zero-{i}.jsonl"
        found = trained(engine, engine.module, ids, log, engine.backward, engine.step, first)
        same(found, one[i], f"{make.__name__}, penalty {'before' if first else 'after'} the pass")
        if rank == 0:
            want = steps_of(folder / f"{rank}/{i}.jsonl")
            assert len(want) == 2
            assert all(None not in row for step in want for name in COLUMNS for row in step["heads"][name])
            same(steps_of(log), want, f"log of {make.__name__}")
        refusals(engine.module)
    copied = engine_of(llama(), zero_optimization={"stage": 2})
    with pytest.raises(LocaterError, match="DeepSpeed trains a copy of the parameters"):
        QKClip(0.5).attach(copied.module)
    print("done", flush=True)


def refusals(model: Any) -> None:
    """What would write where the next step writes its own copy."""
    with pytest.raises(LocaterError, match="DeepSpeed trains a copy of the parameters"):
        Mimetic().attach(model)
    with pytest.raises(LocaterError, match="DeepSpeed trains a copy of the parameters"):
        QKClip(0.5).attach(model)
    with pytest.raises(LocaterError, match=r"SigmaReparam needs whole maps.*ZeRO-3"):
        SigmaReparam().attach(model)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_zero_3_is_one_process(tmp_path: Path, count: int) -> None:
    imports()
    assert all("done" in text for text in ranks(partial(worker, [llama, titan], tmp_path), tmp_path, count, 300))
