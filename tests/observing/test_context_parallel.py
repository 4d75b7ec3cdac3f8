"""Context parallelism: each rank has a part of every sequence, so nothing that it computes is a row of attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import locater
from tests.processes import ranks


def refused_inside_and_observed_outside(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from transformers import GPT2Config, GPT2Model

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=32)).eval()
    ids = torch.arange(16)[None]
    mesh = init_device_mesh("cpu", (2,))
    with torch.no_grad(), context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]):
        assert ids.shape == (1, 8), "each rank has half of the tokens"
        with pytest.raises(locater.LocaterError, match="GPT2Model: context parallelism splits"), locater.observe(model):
            model(ids)
    with torch.no_grad(), locater.observe(model) as seen:
        model(ids)
    assert seen.rows[0].rows == 16
    dist.destroy_process_group()


def test_split_tokens_are_refused(tmp_path: Path) -> None:
    ranks(refused_inside_and_observed_outside, tmp_path)
