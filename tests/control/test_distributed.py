"""LocAteR and QK-Clip on two processes: the penalty and its gradient are those of one, under DDP and FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.processes import ranks

LENGTH, RANKS = 9, 2


def model_of() -> Any:
    """Grouped keys, gains stored as 1 + w, norms on queries and keys; every parameter away from its start."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    shape = dict(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=64,
    )
    model = Gemma3ForCausalLM(Gemma3TextConfig(**shape, head_dim=8, max_position_embeddings=64))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape))
    return model


def batch() -> Tensor:
    return torch.randint(0, 64, (2 * RANKS, LENGTH), generator=torch.Generator().manual_seed(1))


def gradients(
    model: nn.Module, ids: Tensor, before: bool = True, form: Any = "effective"
) -> tuple[float, dict[str, Tensor]]:
    """Of the mean loss over ids and the penalty, which is taken before or after the forward pass."""
    from locater.control import LocAteR

    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    control = LocAteR(shrink=1.0, hold=1.0, form=form).attach(inner.train())
    penalty = control.loss() if before else None
    loss = model(ids, labels=ids).loss
    penalty = control.loss() if penalty is None else penalty
    (loss + penalty).backward()
    found = {}
    for name, p in inner.named_parameters():
        assert p.grad is not None, name
        found[name] = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
    return float(penalty.detach()), found


def same(ours: tuple[float, dict[str, Tensor]], theirs: tuple[float, dict[str, Tensor]]) -> None:
    assert abs(ours[0] - theirs[0]) < 1e-5 * abs(theirs[0]), (ours[0], theirs[0])
    for name, want in theirs[1].items():
        off = float((ours[1][name] - want).abs().max())
        assert off < 1e-5 * max(1.0, float(want.abs().max())), (name, off)


def shard(model: Any, **kw: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    for block in getattr(model.model, "decoder", model.model).layers:
        fully_shard(block, mesh=mesh, **kw)
    return fully_shard(model, mesh=mesh, **kw)


def post_norm() -> Any:
    """No norm in front of its first layer; embeddings far from unit size."""
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    shape = dict(hidden_size=32, word_embed_proj_dim=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48)
    plain = dict(vocab_size=64, dropout=0.0, do_layer_norm_before=False, max_position_embeddings=64, init_std=0.3)
    return OPTForCausalLM(OPTConfig(**shape, **plain))


def clipped(model: Any, ids: Tensor, limit: float) -> dict[str, Tensor]:
    from locater.control import QKClip

    control = QKClip(limit).attach(model.train())
    model(ids)
    control.after_step()
    assert control.clipped > 0
    control.detach()
    return {
        name: p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()
        for name, p in model.named_parameters()
    }


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = dict(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=64,
    )
    return LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=64, initializer_range=0.3))


def worker(rank: int) -> None:
    ids = batch()
    alone = gradients(model_of(), ids, False, "measured")  # before there are other ranks
    dist.init_process_group("gloo")
    mine = ids.chunk(RANKS)[rank]
    one = gradients(model_of(), ids)
    for before in (True, False):
        same(gradients(nn.parallel.DistributedDataParallel(model_of()), mine, before), one)
        same(gradients(shard(model_of()), mine, before), one)
    same(gradients(shard(model_of(), reshard_after_forward=False), mine, False), one)

    # without a norm in front, the size of tokens is that of all ranks
    whole = gradients(post_norm(), ids, False)  # every rank sees the whole batch here
    same(gradients(nn.parallel.DistributedDataParallel(post_norm()), mine, False), whole)
    same(gradients(shard(post_norm()), mine, False), whole)

    # measured tokens: the sample is one of all ranks
    same(gradients(nn.parallel.DistributedDataParallel(model_of()), mine, False, "measured"), alone)
    same(gradients(shard(model_of()), mine, False, "measured"), alone)

    # QK-Clip: the largest logit is that over all ranks, and sharded maps are written in place
    whole = clipped(llama(), ids, 1.0)  # every rank sees the whole batch here, as one process would
    for model in (llama(), shard(llama())):
        for name, p in clipped(model, mine, 1.0).items():
            assert torch.allclose(p, whole[name], atol=1e-6), name
    dist.barrier()
    print("done", flush=True)


def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    # imported once, before the processes part
    import torch.distributed.fsdp  # noqa: F401
    from transformers import Gemma3ForCausalLM, LlamaForCausalLM, OPTForCausalLM  # noqa: F401

    assert all("done" in text for text in ranks(worker, tmp_path, RANKS))
