"""A loop written for accelerate, under three configurations, logs what one process logs; and transformers.Trainer under
DeepSpeed's.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import locater
from locater.integrations import hf
from tests.integrations.test_trainers import Words, by_hand, furthest, llama
from tests.processes import ranks

pytestmark = pytest.mark.slow
RATE, STEPS = 0.1, 3
COLUMNS = ("entropy", "entropy_ratio", "max_logit", "sink", "distance", "participation", "M", "spread")


def batches() -> list[Tensor]:
    data = Words()
    return [torch.stack([data[4 * step + i]["input_ids"] for i in range(4)]) for step in range(STEPS)]


def accelerator_of(kind: str) -> Any:
    """As the configuration of `accelerate launch` makes it."""
    from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    if kind == "FSDP2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
        return Accelerator(cpu=True, fsdp_plugin=plugin)
    if kind == "ZeRO-3":
        config = {
            "train_micro_batch_size_per_gpu": 4 // dist.get_world_size(),
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
        }
        return Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    return Accelerator(cpu=True)


def loop(log: Path, accelerator: Any = None, share: Any = None) -> list[dict[str, Any]]:
    """The loop that a user of accelerate has, with a monitor and LocAteR."""
    model = llama().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    inner = model
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
        inner = accelerator.unwrap_model(model)
    control = locater.LocAteR(shrink=0.1, hold=0.1).attach(inner)
    monitor = locater.Monitor(log, every=2).attach(inner)
    for ids in batches():
        mine = ids if share is None else ids.chunk(share[1])[share[0]]
        loss = model(input_ids=mine, labels=mine).loss
        total = loss + control.loss()
        total.backward() if accelerator is None else accelerator.backward(total)
        optimizer.step()
        optimizer.zero_grad()
        control.after_step()
        mean = loss.detach() if accelerator is None else accelerator.reduce(loss.detach(), "mean")
        monitor.after_step(loss=mean)
    monitor.detach()
    control.detach()
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [{key: line[key] for key in ("step", "loss", "heads")} for line in lines if line["kind"] == "step"]


def worker(kind: str, folder: Path, rank: int) -> None:
    expected = loop(folder / f"alone-{rank}.jsonl")
    if kind == "ZeRO-3":
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    found = loop(folder / "log.jsonl", accelerator_of(kind), (rank, dist.get_world_size()))
    if rank == 0:
        assert [step["step"] for step in found] == [step["step"] for step in expected] == [1, 3]
        for ours, theirs in zip(found, expected, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-6)
            for name in COLUMNS:
                one, other = (torch.tensor(step["heads"][name]) for step in (ours, theirs))
                # of the third step in float32, whose weights are off by rounding
                within = 1e-6 if ours["step"] == 1 else 1e-5
                assert torch.allclose(one, other, rtol=within, atol=within), (ours["step"], name, one, other)
    dist.barrier()
    print("done", flush=True)


@pytest.mark.parametrize("kind", ["DDP", "FSDP2", "ZeRO-3"])
def test_a_loop_for_accelerate(tmp_path: Path, kind: str) -> None:
    if kind == "ZeRO-3":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install 'locater[slow]'")
    import accelerate  # noqa: F401

    assert all("done" in text for text in ranks(partial(worker, kind, tmp_path), tmp_path, seconds=300))


def train_one_of_two(folder: Path, rank: int) -> None:
    import deepspeed
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    settings = TrainingArguments(
        str(folder), per_device_train_batch_size=1, num_train_epochs=1, max_grad_norm=0.0, learning_rate=0.5,
        lr_scheduler_type="constant", optim="sgd", report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
        logging_steps=1, remove_unused_columns=False, deepspeed=config,
    )  # fmt: skip
    trainer = InOrder(llama(), settings, train_dataset=Words(), callbacks=[locater.Monitor(every=3)])
    hf.attach(trainer, locater.LocAteR(shrink=0.05, hold=0.05))
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        if rank == 0:
            torch.save({name: x.clone() for name, x in model.state_dict().items()}, folder / "two.pt")
    dist.barrier()


def test_transformers_trainer_under_zero_3(tmp_path: Path) -> None:
    """Two processes of one sequence each see the batches that one process of two sees."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install 'locater[slow]'")
    ranks(partial(train_one_of_two, tmp_path), tmp_path, seconds=300)
    lines = [json.loads(line) for line in (tmp_path / "locater.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 4, 7]
    assert all(None not in row for line in steps for name in COLUMNS for row in line["heads"][name])
    model = llama()
    model.load_state_dict(torch.load(tmp_path / "two.pt"))
    assert furthest(model, by_hand(llama(), 1, None)) < 2e-6
