"""Context parallelism: each rank has a part of every sequence, and rows are those of one process all the same.

PyTorch's ring attention knows the kernels of CUDA alone. Here it runs with the flash kernel of the CPU, which
`ring_on_cpu` tells it of; which tokens a rank has, what it sends on and how results are merged is PyTorch's own code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import locater
from locater.calls.call_and_masks import Call
from locater.kernels import Terms
from locater.observing.split_tokens import calls_of_whole_rows
from tests.processes import ranks
from tests.runs.test_sharded_runs import same
from tests.sharded import VOCABULARY, llama, titan

LENGTH = 16


@contextmanager
def ring_on_cpu() -> Iterator[None]:
    """PyTorch's ring attention with the CPU's kernel, in the precision of the model."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy, register_op_strategy
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def strategy(outputs: int, schema: Any) -> Any:
        tensors = sum(type(x).__name__ == "OpStrategy" for x in schema.args_schema)
        shards = [[Shard(2)] * (outputs + tensors)]
        return expand_to_full_mesh_op_strategy(schema.get_mesh_from_args(), schema, shards, input_index=outputs)

    register_op_strategy(forward, schema_info=RuntimeSchemaInfo(4))(partial(strategy, 2))
    register_op_strategy(backward)(partial(strategy, 3))

    def attend(mesh: Any, q: Tensor, k: Tensor, v: Tensor, p: float = 0.0, causal: bool = False, **kw: Any) -> Any:
        kw.pop("attn_mask", None)
        return ring._templated_ring_attention(mesh.get_group(), 2, forward, q, k, v, is_causal=causal, **kw)

    def differentiate(mesh: Any, grad: Tensor, *args: Any, **kw: Any) -> Any:
        q, k, v, out, lse, p, causal = args
        kw.pop("attn_mask", None)

        def of_parts(**part: Any) -> Any:
            order = [part.pop(name) for name in ("grad_out", "query", "key", "value", "out", "logsumexp")]
            return backward(*order, p, part.pop("is_causal"), **part)

        group = mesh.get_group()
        return ring._templated_ring_attention_backward(
            group, 2, of_parts, grad, "grad_out", q, k, v, out, lse, causal, **kw
        )

    def handle(op: Any, args: Any, kwargs: Any) -> Any:
        info = DTensor._op_dispatcher.unwrap_to_op_info(op, args, kwargs)
        DTensor._op_dispatcher.sharding_propagator.propagate(info)
        run = attend if op is forward else differentiate
        results = run(info.compute_mesh, *info.local_args, **info.local_kwargs)
        return DTensor._op_dispatcher.wrap(results, info.output_sharding.output_spec)

    ring.custom_ops |= {forward: handle, backward: handle}
    ring._cp_options.convert_to_f32 = False
    yield


def batch() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def without_masks(model: Any) -> None:
    """As accelerate does it: positions that are not in order would be taken for packed sequences."""

    def causal(module: Any, args: Any, kwargs: Any) -> Any:
        return args, kwargs | {"attention_mask": None, "is_causal": True}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(causal, with_kwargs=True)


def steps(model: Any, ids: Tensor, places: Tensor, labels: Tensor, log: Path, mesh: Any = None) -> None:
    """Three steps under a monitor; each rank has the gradient of its own tokens, and they are added up."""
    from torch.distributed.tensor.experimental import context_parallel

    monitor = locater.Monitor(log, every=2).attach(model.train())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        if mesh is None:
            loss = total_loss(model, ids, places, labels)
            loss.backward()
        else:
            mine = [x.clone() for x in (ids, places, labels)]
            with context_parallel(mesh, buffers=mine, buffer_seq_dims=[1, 1, 1]):
                loss = total_loss(model, *mine)
                loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
            loss = loss.detach().clone()
            dist.all_reduce(loss)
        optimizer.step()
        monitor.after_step(loss=loss.detach())
    monitor.detach()


def total_loss(model: Any, ids: Tensor, places: Tensor, labels: Tensor) -> Tensor:
    logits = model(ids, position_ids=places[:1]).logits
    return (
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        / labels.shape[0]
        / LENGTH
    )


def rows_of(model: Any, ids: Tensor, places: Tensor, mesh: Any = None, **options: Any) -> list[dict[str, Any]]:
    from torch.distributed.tensor.experimental import context_parallel

    with torch.no_grad(), locater.observe(model.eval(), **options) as seen:
        if mesh is None:
            model(ids, position_ids=places[:1])
        else:
            mine = [x.clone() for x in (ids, places)]
            with context_parallel(mesh, buffers=mine, buffer_seq_dims=[1, 1]):
                assert mine[0].shape[1] * mesh.size() == LENGTH, "each rank has a part of the tokens"
                model(mine[0], position_ids=mine[1][:1])
            with pytest.raises(locater.LocaterError, match=r"tokens were split over ranks.*seen.reduce\(\)"):
                _ = seen.rows
            seen.reduce()
    return [asdict(row) for row in seen.rows]


def worker(folder: Path, rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    ids, places = batch(), torch.arange(LENGTH).expand(2, LENGTH).clone()
    labels = ids.roll(-1, 1)
    options: dict[str, Any] = dict(outputs=True, rest=True, offsets=[1])
    model = llama()
    without_masks(model)
    want, alone = rows_of(model, ids, places, **options), folder / f"alone-{rank}.jsonl"
    steps(model, ids, places, labels, alone)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with ring_on_cpu():
        for balanced in (True, False):  # tokens from both ends of the sequence, or one run
            ring._cp_options.enable_load_balance = balanced
            model = llama()
            without_masks(model)
            same(rows_of(model, ids, places, mesh, **options), want, f"balanced {balanced}")
            log = folder / f"split-{balanced}.jsonl"
            steps(model, ids, places, labels, log, mesh)
            dist.barrier()
            if rank == 0:
                ours, theirs = (observed_steps(path) for path in (log, alone))
                assert len(theirs) == 2
                assert None not in [x for step in theirs for x in step["heads"]["M"][0]]
                same(ours, theirs, f"log, balanced {balanced}")
        if mesh.size() == 4:  # two batches, the tokens of each on two ranks
            ring._cp_options.enable_load_balance = True
            both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
            model = llama()
            without_masks(model)
            mine = [x.chunk(2)[both["dp"].get_local_rank()] for x in (ids, places)]
            same(rows_of(model, *mine, both["cp"], **options), want, "two batches")
        refusals(model, mesh, context_parallel)
    dist.barrier()
    print("done", flush=True)


def observed_steps(log: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [{key: line[key] for key in ("step", "loss", "heads")} for line in lines if line["kind"] == "step"]


def refusals(model: Any, mesh: Any, context_parallel: Any) -> None:
    """What would be a part for the whole is refused in one line, on every rank."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring
    from torch.distributed.tensor.parallel import parallelize_module

    def split(model: Any, **options: Any) -> None:
        mine = batch()
        with (
            torch.no_grad(),
            context_parallel(mesh, buffers=[mine], buffer_seq_dims=[1]),
            locater.observe(model, **options),
        ):
            model(mine)

    with pytest.raises(locater.LocaterError, match="hidden=True and patterns= are of whole sequences"):
        split(model, hidden=True)
    with pytest.raises(locater.LocaterError, match="found by its calls"):
        split(titan())
    compiled = llama()
    compiled.compile()
    with pytest.raises(locater.LocaterError, match="the model is compiled"):
        split(compiled)
    gathered = llama()
    kind = ring._ContextParallel
    plan = kind(seq_dim=2, attention_type=kind.AttentionType.FLEX)
    parallelize_module(gathered.model.layers[1].self_attn, mesh, plan)
    with pytest.raises(locater.LocaterError, match=r"layers.1.self_attn: .*FlexAttention puts keys in an order"):
        split(gathered)


def test_masks_of_split_tokens_are_refused() -> None:
    x = torch.randn(1, 2, 4, 8)
    padded = Call(x, x, Terms(causal=True, padding=torch.ones(1, 4, dtype=torch.bool)))
    with pytest.raises(locater.LocaterError, match=r"layers.0: a mask or a cache came with tokens that are split"):
        next(calls_of_whole_rows(padded, None, "layers.0"))


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_rows_of_split_tokens_are_those_of_one_process(tmp_path: Path, count: int) -> None:
    import torch.distributed.tensor.experimental  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401 - once, before the processes part

    assert all("done" in text for text in ranks(partial(worker, tmp_path), tmp_path, count))
