"""Small models split over ranks as torchtitan does it: tensor parallel, FSDP2, or both on a mesh (dp, tp)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, KEYS, LAYERS, VOCABULARY = 32, 4, 2, 2, 64


class Attention(nn.Module):
    """With the names of torchtitan. Heads are counted from what the maps return, so a rank may have a part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = HEADS, KEYS, WIDTH // HEADS
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, KEYS * self.head_dim, bias=False)
        self.wv = nn.Linear(WIDTH, KEYS * self.head_dim, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (part(x).view(B, T, -1, self.head_dim).transpose(1, 2) for part in (self.wq, self.wk, self.wv))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(mixed.transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, 48, bias=False), nn.Linear(WIDTH, 48, bias=False)
        self.w2 = nn.Linear(48, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(layers)})
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        for block in self.layers.values():
            x = block(x)
        return self.output(self.norm(x))


def titan(layers: int = LAYERS) -> Any:
    """In float64; all parameters drawn, gains too."""
    return _drawn(Decoder(layers))


def llama(layers: int = LAYERS) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = dict(hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=HEADS, num_key_value_heads=KEYS)
    config = LlamaConfig(**shape, intermediate_size=48, vocab_size=VOCABULARY, max_position_embeddings=64)
    return _drawn(LlamaForCausalLM(config))


def _drawn(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.double().parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.2 + (p.ndim == 1))
    return model


def mesh_of(dp: int, tp: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def split(model: Any, mesh: Any) -> Any:
    """Heads and channels over "tp", tokens between torchtitan's blocks too; then parameters over "dp"."""
    if mesh["tp"].size() > 1:
        _tensor_parallel(model, mesh["tp"])
    if mesh["dp"].size() > 1:
        from torch.distributed.fsdp import fully_shard

        for block in _blocks(model):
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def _blocks(model: Any) -> list[Any]:
    return list(model.layers.values()) if isinstance(model, Decoder) else list(model.model.layers)


def _tensor_parallel(model: Any, mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    def gathered() -> Any:
        return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))

    if not isinstance(model, Decoder):
        columns = [*(f"self_attn.{x}_proj" for x in "qkv"), "mlp.gate_proj", "mlp.up_proj"]
        for block in _blocks(model):
            plan = {name: ColwiseParallel() for name in columns}
            plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
            parallelize_module(block, mesh, plan)
        return
    ends: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    for block in _blocks(model):
        columns = ["attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"]
        plan = {
            **{name: ColwiseParallel() for name in columns},
            **{name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.wo", "feed_forward.w2")},
            **{name: SequenceParallel() for name in ("attention_norm", "ffn_norm")},
            **{name: gathered() for name in ("attention", "feed_forward")},
        }
        parallelize_module(block, mesh, plan)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def same_parts(ours: Any, theirs: Any, where: str = "", *, rtol: float, atol: float) -> None:
    """Equal within these tolerances in every part."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), (where, ours.keys(), theirs.keys())
        for name, value in theirs.items():
            same_parts(ours[name], value, f"{where}.{name}", rtol=rtol, atol=atol)
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), (where, len(ours), len(theirs))
        for i, value in enumerate(theirs):
            same_parts(ours[i], value, f"{where}[{i}]", rtol=rtol, atol=atol)
    elif isinstance(theirs, Tensor | float):
        ours, theirs = torch.as_tensor(ours), torch.as_tensor(theirs)
        assert torch.allclose(ours, theirs, rtol=rtol, atol=atol), (where, ours, theirs)
    else:
        assert ours == theirs, (where, ours, theirs)
