"""torchtitan's trainer under a monitor: a small Llama of its own on made-up sentences.

    torchrun --nproc-per-node 2 examples/torchtitan_run.py --folder run --steps 20     # locater watch run/run.jsonl

`Watched` is all that a trainer needs. The rest makes data, and lets torchtitan 0.3 run without a GPU under torch 2.13:
its trainer asks a device for its name and memory, its timeouts need a newer torch, gloo lacks a way of adding up, and
FlexAttention has no backward pass on the CPU, so the layers attend by `scaled_dot_product_attention` here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils
from torch.distributed.fsdp import FSDPModule

import locater


class Processor:
    """What torchtitan asks of a device, for the CPU."""

    memory_stats = staticmethod(lambda device=None: {})
    get_device_name = staticmethod(lambda device=None: "CPU")
    get_device_properties = staticmethod(lambda device=None: SimpleNamespace(total_memory=1 << 34))
    reset_peak_memory_stats = empty_cache = staticmethod(lambda: None)
    set_device = synchronize = staticmethod(lambda device=None: None)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)


if not torch.cuda.is_available():  # before anything else of torchtitan is imported
    torchtitan.tools.utils.device_type, torchtitan.tools.utils.device_module = "cpu", Processor()

import torchtitan.distributed.utils  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


class Watched(Trainer):  # type: ignore[misc]
    """torchtitan's trainer with a monitor."""

    every = 5

    def train(self) -> None:
        log = Path(self.config.dump_folder) / "run.jsonl"
        self.monitor = locater.Monitor(log, every=self.every).attach(self.model_parts[0])
        try:
            super().train()
        finally:
            self.monitor.detach()

    def forward_backward_step(self, **given: Any) -> torch.Tensor:
        loss = super().forward_backward_step(**given)
        self.loss = self.loss + loss.detach()  # a micro-batch's share of the mean over all tokens
        return loss

    def train_step(self, data: Any) -> None:
        self.loss = torch.zeros((), device=self.device)
        super().train_step(data)
        if self.parallel_dims.dp_enabled:
            dist.all_reduce(self.loss, group=self.parallel_dims.get_mesh("batch").get_group())
        self.monitor.after_step(loss=self.loss)


def sentences(folder: Path) -> None:
    """A tokenizer of whole words, and documents of them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = "the cat sat on a mat and the dog ran home while it rained".split()
    ids = {word: at for at, word in enumerate(["[UNK]", "<s>", "</s>", *dict.fromkeys(words)])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for part in ("tokenizer", "data"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    draw = random.Random(0)
    lines = (json.dumps({"text": " ".join(draw.choices(words, k=60))}) for _ in range(200))
    (folder / "data/train.jsonl").write_text("\n".join(lines))


def configuration(folder: Path, steps: int, compiled: bool) -> Any:
    """Of torchtitan's smallest Llama, with two layers."""
    config = llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.hf_assets_path, config.dump_folder = str(folder / "tokenizer"), str(folder)
    config.dataloader.dataset_path = str(folder / "data")
    training = config.training
    training.seq_len, training.local_batch_size, training.steps = 64, 2, steps
    training.mixed_precision_param, training.disable_cuda_graphs = "float32", True
    config.validator.enable, config.activation_checkpoint = False, None
    config.compile.enable, config.parallelism.spmd_backend = compiled, "partial_dtensor"
    return Watched.Config(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("run"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="each block")
    options = parser.parse_args()
    if not hasattr(dist, "set_timeout"):
        torchtitan.distributed.utils.set_pg_timeouts = lambda **given: None
    if int(os.environ.get("RANK", "0")) == 0:
        sentences(options.folder)
    trainer = Watched(configuration(options.folder, options.steps, options.compile))
    for part in trainer.model_parts[0].modules():
        if isinstance(part, FSDPModule) and not torch.cuda.is_available():  # gloo does not scale what it adds up
            part.set_force_sum_reduction_for_comms(True)
    trainer.train()
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
