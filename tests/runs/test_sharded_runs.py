"""A run on several ranks does what one process does: under DDP, FSDP2, tensor parallelism and both of these, with the
module names of torchtitan and of transformers.
"""

from __future__ import annotations

import json
import re
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
from locater.control import EntropyPenalty, LocAteR, QKClip, QKNorm, SigmaReparam, Temperature
from locater.errors import LocaterError
from tests.processes import ranks
from tests.sharded import VOCABULARY, llama, mesh_of, same_parts, split, titan, whole

STEPS = 3


def batch() -> Tensor:
    return torch.randint(0, VOCABULARY, (4, 10), generator=torch.Generator().manual_seed(1))


def loss_of(model: Any, ids: Tensor) -> Tensor:
    logits = model(ids)
    logits = getattr(logits, "logits", logits)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def mean_over_ranks(loss: Tensor) -> Tensor:
    mean = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean


def trained(run: Any, ids: Tensor, log: Path, form: Any = "effective") -> dict[str, Any]:
    """A few steps under LocAteR, a monitor and, where attention passes the interface, learned temperatures and gains."""
    model = run.module if isinstance(run, nn.parallel.DistributedDataParallel) else run
    reachable = hasattr(model, "config")
    controls: list[Any] = [LocAteR(shrink=0.1, hold=0.1, form=form).attach(model)]
    if reachable:
        controls += [Temperature(init=0.5).attach(model), QKNorm().attach(model)]
    monitor = locater.Monitor(log, every=2, warn_on="entropy_ratio<0.99").attach(model)
    own = [p for control in controls for p in control.parameters()]
    optimizer = torch.optim.SGD([*model.parameters(), *own], lr=0.1, momentum=0.9)
    penalties = []
    for _ in range(STEPS):
        loss = loss_of(run, ids)
        penalty = controls[0].loss()
        (loss + penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
        for control in controls:
            control.after_step()
        penalties.append(float(penalty.detach()))
        monitor.after_step(loss=mean_over_ranks(loss))
    monitor.detach()
    model.eval()
    rows = locater.scan(model).rows
    with locater.observe(model, outputs=True, rest=True, offsets=[1]) as seen:
        loss_of(model, ids)
    seen.reduce()
    for control in controls:
        control.detach()
    return {
        "penalties": penalties,
        "parameters": {name: whole(p.detach()).clone() for name, p in model.named_parameters()},
        "own": [p.detach().clone() for p in own],
        "scan": [asdict(row) for row in rows],
        "seen": [asdict(row) for row in seen.rows],
    }


same = partial(same_parts, rtol=1e-7, atol=1e-9)  # rounding in float64; the order in which ranks are added up differs


def records(log: Path) -> list[dict[str, Any]]:
    """Of a log, without the times, the class, to whose name FSDP2 adds its own, and the controls that attach:
    SigmaReparam refuses sharded models.
    """
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        line.pop("time", None)
        line.pop("source", None)
        line.pop("controls", None)
        if "message" in line:  # numbers are in `value`
            line["message"] = re.sub(r"[0-9.e-]+", "", line["message"].partition("; ")[0])  # advice names controls
    return lines


def worker(
    makes: list[Callable[[], Any]],
    meshes: list[tuple[int, int]],
    folder: Path,
    rank: int,
    compiled: bool = False,
    **kw: Any,
) -> None:
    ids = batch()
    alone = folder / f"alone-{rank}"
    alone.mkdir()
    one = {}  # made while there are no other ranks
    for make in makes:
        model = make()
        if compiled:  # other roundings than eager, in the float32 parts of its norms: 2e-7
            model.compile()
        one[make] = trained(model, ids, alone / f"{make.__name__}.jsonl", **kw)
    dist.init_process_group("gloo")
    for dp, tp in meshes:
        mesh = mesh_of(dp, tp)
        for make in makes:
            log = folder / f"{make.__name__}-{dp}-{tp}.jsonl"
            model = split(make(), mesh)
            found = trained(model, ids.chunk(dp)[rank // tp], log, **kw)
            same(found, one[make], f"{make.__name__} {dp} x {tp}")
            dist.barrier()
            if rank == 0:  # one log of all ranks, with every head
                want = records(alone / f"{make.__name__}.jsonl")
                observed = [line for line in want if line["kind"] == "step"]
                assert len(observed) == 2
                assert any(line["kind"] == "warning" for line in want)
                assert all(None not in row for line in observed for row in line["heads"]["entropy"])
                same(records(log), want, f"log of {make.__name__} {dp} x {tp}")
            if tp > 1 and "form" not in kw:
                refusals(model, ids, make is llama and dp == 1)
    if compiled:
        model = split(llama(), mesh_of(1, dist.get_world_size()))
        model.compile()
        same(trained(model, ids, folder / "compiled.jsonl"), one[llama], "compiled")
    else:
        clipped(ids, meshes, rank)
        copied = nn.parallel.DistributedDataParallel(makes[0]())
        found = trained(copied, ids.chunk(dist.get_world_size())[rank], folder / "copied.jsonl", **kw)
        same(found, one[makes[0]], "DDP")
        heads_on_every_rank(ids)
    dist.barrier()
    print("done", flush=True)


def clipped(ids: Tensor, meshes: list[tuple[int, int]], rank: int) -> None:
    """QK-Clip, by the largest logits of all ranks."""

    def weights(model: Any, ids: Tensor) -> dict[str, Tensor]:
        control = QKClip(0.5).attach(model.train())
        model(ids)
        control.after_step()
        assert control.clipped == 8
        control.detach()
        return {name: whole(p.detach()) for name, p in model.named_parameters()}

    expected = weights(llama(), ids)
    for dp, tp in meshes:
        same(weights(split(llama(), mesh_of(dp, tp)), ids.chunk(dp)[rank // tp]), expected, f"clipped {dp} x {tp}")


def heads_on_every_rank(ids: Tensor) -> None:
    """Only the MLPs are split: all ranks compute all heads of one batch, which is counted once."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = llama(), mesh_of(1, dist.get_world_size())
    plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    for block in model.model.layers:
        parallelize_module(block.mlp, mesh["tp"], plan)
    rows = []
    for each in (model, llama()):
        with locater.observe(each, outputs=True) as seen:
            each(ids)
        if each is model:
            seen.reduce()
        rows.append([asdict(row) for row in seen.rows])
    same(*rows, "heads on every rank")


def refusals(model: Any, ids: Tensor, interface: bool) -> None:
    """What would be a part for the whole is refused in one line, on every rank."""
    with locater.observe(model) as seen:
        model(ids)
    with pytest.raises(LocaterError, match=r"heads are split over 2 ranks.*call seen.reduce\(\) on every rank"):
        _ = seen.rows
    with pytest.raises(LocaterError, match="observe it without hidden=True"):
        locater.observe(model, hidden=True)
    if interface:
        with (
            pytest.raises(LocaterError, match="single heads are read only from a whole model"),
            locater.observe(model, patterns=[(0, 0)]),
        ):
            pass
        with pytest.raises(LocaterError, match="single heads are read only from a whole model"):
            locater.attention_pattern(model, ids)
        with pytest.raises(LocaterError, match="EntropyPenalty is a mean over all"):
            EntropyPenalty(floor=0.1).attach(model)
        with pytest.raises(LocaterError, match="SigmaReparam needs whole maps"):
            SigmaReparam().attach(model)
        late = llama()
        with (
            pytest.raises(LocaterError, match="2 query heads arrived, and 4 of 4 were expected: observe a model after"),
            locater.observe(late),
        ):
            split(late, mesh_of(1, 2))(ids)
        stage = llama()
        with locater.observe(stage, layers=[dist.get_rank() % 2]) as seen:  # as the stages of a pipeline
            stage(ids)
        with pytest.raises(LocaterError, match=r"ranks found different attention layers.*the stages of a pipeline"):
            seen.reduce()


def imports() -> None:
    """Once, before the processes part."""
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401


def test_two_ranks_split_heads_or_parameters(tmp_path: Path) -> None:
    imports()
    work = partial(worker, [llama, titan], [(1, 2), (2, 1)], tmp_path)
    assert all("done" in text for text in ranks(work, tmp_path))


@pytest.mark.slow
def test_four_ranks_split_heads_and_parameters(tmp_path: Path) -> None:
    imports()
    work = partial(worker, [llama, titan], [(2, 2), (4, 1)], tmp_path)
    assert all("done" in text for text in ranks(work, tmp_path, 4, seconds=300))


@pytest.mark.slow
def test_a_compiled_model_whose_heads_are_split(tmp_path: Path) -> None:
    imports()
    work = partial(worker, [llama], [], tmp_path, compiled=True)
    assert all("done" in text for text in ranks(work, tmp_path, seconds=600))


@pytest.mark.slow
def test_four_ranks_share_measured_tokens(tmp_path: Path) -> None:
    imports()
    work = partial(worker, [llama, titan], [(2, 2)], tmp_path, form="measured")
    assert all("done" in text for text in ranks(work, tmp_path, 4, seconds=300))


def placed_by_transformers(folder: Path, rank: int) -> None:
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    dist.init_process_group("gloo")
    plan = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    model = LlamaForCausalLM.from_pretrained(folder, distributed_config=plan, dtype=torch.float64)
    whole, rows = llama(), []
    for each in (model, whole):
        with locater.observe(each) as seen:
            each(batch())
        if each is model:
            seen.reduce()
        rows.append([asdict(row) for row in seen.rows])
    same(*rows, "observed")
    same(*([asdict(row) for row in locater.scan(each).rows] for each in (model, whole)), "scanned")
    print("done", flush=True)


@pytest.mark.slow
def test_the_tensor_parallelism_of_transformers(tmp_path: Path) -> None:
    imports()
    llama().save_pretrained(tmp_path / "model")
    assert all("done" in text for text in ranks(partial(placed_by_transformers, tmp_path / "model"), tmp_path))
