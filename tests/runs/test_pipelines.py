"""A pipeline has one log, of the layers of all its stages: that of one process with the whole model."""

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
from locater.errors import LocaterError
from tests.processes import ranks
from tests.runs.test_sharded_runs import batch, loss_of, same
from tests.sharded import VOCABULARY, Decoder, llama, mesh_of, titan

LAYERS, STEPS = 4, 3


class TitanStage(nn.Module):
    """Some blocks of the decoder under the names that they have in it, as torchtitan cuts a model."""

    def __init__(self, whole: Decoder, at: int, of: int) -> None:
        super().__init__()
        own = range(at * LAYERS // of, (at + 1) * LAYERS // of)
        self.tok_embeddings = whole.tok_embeddings if at == 0 else nn.Identity()
        self.layers = nn.ModuleDict({str(i): whole.layers[str(i)] for i in own})
        self.norm = whole.norm if at == of - 1 else nn.Identity()
        self.output = whole.output if at == of - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.tok_embeddings(x)
        for block in self.layers.values():
            x = block(x)
        return self.output(self.norm(x))


class LlamaStage(nn.Module):
    """A Llama of transformers with some of the layers, which it counts from 0."""

    def __init__(self, whole: Any, at: int, of: int) -> None:
        super().__init__()
        self.first, self.last = at == 0, at == of - 1
        self.model, self.lm_head, self.config = whole.model, whole.lm_head, whole.config
        self.model.layers = self.model.layers[at * LAYERS // of : (at + 1) * LAYERS // of]
        self.config.num_hidden_layers = len(self.model.layers)
        for i, layer in enumerate(self.model.layers):
            layer.self_attn.layer_idx = i
        if not self.last:
            self.model.norm, self.lm_head = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        given = {"input_ids": x} if self.first else {"inputs_embeds": x}
        return self.lm_head(self.model(**given, use_cache=False).last_hidden_state)


def cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def whole_run(make: Callable[..., Any], ids: Tensor, log: Path) -> list[dict[str, Any]]:
    """One process with the whole model."""
    model = make(LAYERS)
    monitor = locater.Monitor(log, every=2, warn_on="entropy_ratio<0.99").attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        monitor.after_step(loss=loss.detach())
    monitor.detach()
    with torch.no_grad(), locater.observe(model.eval()) as seen:
        model(ids)
    return [asdict(row) for row in seen.rows]


def staged_run(make: Any, kind: Any, ids: Tensor, log: Path, pp: Any, dp: Any = None) -> list[dict[str, Any]]:
    """The same in stages, two micro-batches at a time."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    at, of = pp.get_local_rank(), pp.size()
    part = kind(make(LAYERS), at, of)
    monitor = locater.Monitor(log, every=2, warn_on="entropy_ratio<0.99", pipeline=pp).attach(part)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    stage = PipelineStage(part, at, of, torch.device("cpu"), group=pp.get_group())
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=cross_entropy)

    def step(schedule: Any) -> Tensor:
        losses: list[Tensor] = []
        given, wanted = ([ids] if at == 0 else []), ({"target": ids, "losses": losses} if at == of - 1 else {})
        schedule.step(*given, **wanted)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros((), dtype=torch.float64)
        dist.all_reduce(loss)  # the last stage has it
        return loss / (dist.get_world_size() / of)

    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = step(schedule)
        for p in part.parameters():
            if dp is None or p.grad is None:  # the embedding of a later stage
                continue
            dist.all_reduce(p.grad, group=dp.get_group())
            p.grad /= dp.size()
        optimizer.step()
        monitor.after_step(loss=loss)
    monitor.detach()
    with locater.observe(part.eval(), pipeline=pp) as seen:
        step(schedule)
    with pytest.raises(LocaterError, match=r"a stage of a pipeline.*seen.reduce\(\)"):
        _ = seen.rows
    seen.reduce()
    return [asdict(row) for row in seen.rows]


def records(log: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    kept = ("kind", "step", "loss", "heads", "layer", "head", "value", "outputs")
    return [{key: line[key] for key in kept if key in line} for line in lines if line["kind"] != "run"]


def layers_of(log: Path) -> list[dict[str, Any]]:
    return json.loads(log.read_text().splitlines()[0])["layers"]


def unnamed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "name"} for row in rows]


def worker(folder: Path, rank: int) -> None:
    ids = batch()
    kinds = [(titan, TitanStage), (llama, LlamaStage)]
    want = [whole_run(make, ids, folder / f"{rank}-{make.__name__}.jsonl") for make, _ in kinds]
    dist.init_process_group("gloo")
    for dp in (1, 2) if dist.get_world_size() == 4 else (1,):
        mesh = mesh_of(dp, dist.get_world_size() // dp)
        mine = ids.chunk(dp)[mesh["dp"].get_local_rank()]
        for (make, kind), expected in zip(kinds, want, strict=True):
            log, alone = folder / f"{make.__name__}-{dp}.jsonl", folder / f"{rank}-{make.__name__}.jsonl"
            rows = staged_run(make, kind, mine, log, mesh["tp"], mesh["dp"] if dp > 1 else None)
            same(unnamed(rows), unnamed(expected), f"{make.__name__}, {dp} pipelines")
            dist.barrier()
            if rank == 0:  # one log, with the layers of every stage
                theirs = records(alone)
                steps = [line for line in theirs if line["kind"] == "step"]
                assert len(steps) == 2
                assert all(len(line["heads"]["M"]) == LAYERS and None not in line["heads"]["M"][3] for line in steps)
                assert any(line["kind"] == "warning" and line["layer"] == 3 for line in theirs)
                assert theirs[0].get("outputs", VOCABULARY) == VOCABULARY
                same(records(log), theirs, f"log of {make.__name__}, {dp} pipelines")
                names = [layer["name"] for layer in layers_of(log)]
                assert len({*names}) == LAYERS, "stages that count their layers from 0 are told apart"
                assert make is llama or names == [layer["name"] for layer in layers_of(alone)]
    refusals(ids, mesh["tp"])
    dist.barrier()
    print("done", flush=True)


def refusals(ids: Tensor, pp: Any) -> None:
    """Stages whose layers have equal names are not added up as if they were one layer."""
    part = LlamaStage(llama(LAYERS), pp.get_local_rank(), pp.size())
    x = ids if part.first else torch.randn(4, 10, 32, dtype=torch.float64)
    with torch.no_grad(), locater.observe(part) as seen:
        part(x)
    with pytest.raises(LocaterError, match=r"other weights on other ranks.*observe\(model, pipeline=group\)"):
        seen.reduce(pp.get_group())
    for options in (dict(layers=[0]), dict(hidden=True)):
        with pytest.raises(LocaterError, match="a stage of a pipeline has a part of it"):
            locater.observe(part, pipeline=pp, **options)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_pipeline_has_the_log_of_one_process(tmp_path: Path, count: int) -> None:
    import torch.distributed.pipelining  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401 - once, before the processes part

    assert all("done" in text for text in ranks(partial(worker, tmp_path), tmp_path, count))
