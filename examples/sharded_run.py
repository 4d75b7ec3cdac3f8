"""Train a small model on several ranks with LocAteR, learned temperatures and a monitor; save, resume, scan.

    torchrun --nproc-per-node 2 examples/sharded_run.py --folder run --steps 20                  # FSDP2
    torchrun --nproc-per-node 2 examples/sharded_run.py --folder run --steps 40 --tensor 2       # goes on, heads split
    locater scan run/step-40 --query 'model.layers.*.self_attn.q_proj.weight' \
        --key 'model.layers.*.self_attn.k_proj.weight' --heads 4
    locater watch run/locater.jsonl

It runs on CPUs, with gloo. docs/distributed.md explains each part.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import locater
from locater.control import Controls, LocAteR, Temperature
from locater_lab.train import Shape, Transformer

BATCH, LENGTH = 8, 32


def split(model: Any, mesh: Any) -> Any:
    """Heads and channels over the ranks of "tp", then parameters over those of "dp"."""
    for block in model.model.layers:
        if mesh["tp"].size() > 1:
            plan: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
            plan |= {"self_attn.o_proj": RowwiseParallel()}
            plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
            plan |= {"mlp.down_proj": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def batch(step: int, mesh: Any) -> Tensor:
    """This rank's share of the batch of a step. Ranks that share heads get the same tokens."""
    ids = torch.randint(0, 64, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    ids[:, 1::2] = ids[:, :-1:2]  # every second token repeats the one before
    return ids.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]


class Run:
    """A model, its optimizer, controls with an optimizer of their own, and a monitor."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self.model = model
        self.control = Controls([LocAteR(shrink=0.01, hold=0.01), Temperature()]).attach(model)
        self.own = nn.ParameterList(self.control.parameters())  # as a module, so that PyTorch can name its moments
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.own_optimizer = torch.optim.AdamW(self.own.parameters(), lr=1e-2)
        self.monitor = locater.Monitor(every=5).attach(model, folder)  # writes locater.jsonl there
        self.folder = folder

    def state(self) -> dict[str, Any]:
        """`control` and `monitor` have state_dict and load_state_dict: dcp calls both by itself."""
        weights, moments = get_state_dict(self.model, self.optimizer)
        own_moments = get_optimizer_state_dict(self.own, self.own_optimizer)
        state = {"model": weights, "optimizer": moments, "control_optimizer": own_moments}
        return {**state, "control": self.control, "monitor": self.monitor}

    def save(self) -> None:
        dcp.save(self.state(), checkpoint_id=self.folder / f"step-{self.monitor.step}")

    def resume(self) -> None:
        complete = [path.parent for path in self.folder.glob("step-*/.metadata")]  # which is written last
        if not complete:
            return
        state = self.state()
        dcp.load(state, checkpoint_id=max(complete, key=lambda path: int(path.name.removeprefix("step-"))))
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)
        set_optimizer_state_dict(self.own, self.own_optimizer, state["control_optimizer"])

    def step(self, ids: Tensor) -> float:
        logits = self.model(ids[:, :-1])
        logits = getattr(logits, "logits", logits)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        (loss + self.control.loss()).backward()  # the penalty is that of one process: not divided by anything
        for optimizer in (self.optimizer, self.own_optimizer):
            optimizer.step()
            optimizer.zero_grad()
        self.control.after_step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)  # a monitor writes the number that its first rank is given
        mean /= dist.get_world_size()
        self.monitor.after_step(loss=mean)
        return float(mean)


def main(folder: Path, steps: int, tensor: int = 1) -> list[float]:
    """The losses of this run, from the step of the checkpoint on."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tensor, tensor), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)  # all ranks begin with the same parameters
    shape = Shape(vocabulary=64, width=32, heads=4, kv_heads=2, layers=2, hidden=64)
    run = Run(split(Transformer(shape), mesh), folder)
    run.resume()
    losses = [run.step(batch(step, mesh)) for step in range(run.monitor.step, steps)]
    run.save()
    run.monitor.detach()
    if dist.get_rank() == 0 and losses:
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("run"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share the heads of a layer")
    options = parser.parse_args()
    main(options.folder, options.steps, options.tensor)
