"""torchtitan's own Llama: its record is what discovery finds, and its compiled blocks are observed and logged, with M.

torchtitan 0.3 wants an older `datasets` than the other packages of the tests, so it is in no extra. Where it is there,
`pip install --no-deps torchtitan spmd_types torchdata tyro torch_checkpointing docstring_parser`, these tests run.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import locater
from locater.families import torchtitan as record
from locater.results.scan import NUMERIC_COLUMNS
from locater.runs.record_sinks import read_run
from tests import ROOT
from tests.sharded import Block

pytestmark = pytest.mark.slow
pytest.importorskip("torchtitan", reason="torchtitan is not installed; it needs another version of datasets")

WIDTH, VOCABULARY, LENGTH = 32, 64, 12


def llama(fused: bool = True, inner: str = "sdpa", qk_norm: bool = False) -> Any:
    """Its Llama, small; all parameters drawn, gains too. With SDPA, which its trainer's own tests use, it runs and trains
    on the CPU; PyTorch's FlexAttention has no backward pass there.
    """
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import Llama3Model, _build_llama3_layers

    rope = ComplexRoPE.Config(dim=WIDTH // 4, max_seq_len=64, theta=500_000, scaling="llama")
    shape = dict(n_layers=2, dim=WIDTH, n_heads=4, n_kv_heads=2, hidden_dim=48)
    layers = _build_llama3_layers(**shape, rope=rope, fuse_qkv=fused, attn_backend="flex")
    for layer in layers:
        if inner == "sdpa":
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        if qk_norm:
            layer.attention.qk_norm = RMSNorm.Config(normalized_shape=WIDTH // 4)
    model = Llama3Model.Config(
        dim=WIDTH,
        vocab_size=VOCABULARY,
        layers=layers,
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=WIDTH),
        norm=RMSNorm.Config(normalized_shape=WIDTH),
        lm_head=Linear.Config(in_features=WIDTH, out_features=VOCABULARY),
    ).build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2 + (p.ndim == 1))
    return model


def batch() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def near(ours: Any, theirs: Any, within: float = 1e-6) -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            near(ours[name], value, within)
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            near(one, other, within)
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=within, abs=within)
    else:
        assert ours == theirs


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_record_is_discovery(fused: bool, qk_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(fused, qk_norm=qk_norm)
    ours = locater.scan(model)
    monkeypatch.setattr(record, "stems", lambda weights: [])
    theirs = locater.scan(model, example={"tokens": batch()})
    assert len(ours.rows) == len(theirs.rows) == 8
    for one, other in zip(ours.rows, theirs.rows, strict=True):
        assert (one.layer, one.head) == (other.layer, other.head)
        for name in NUMERIC_COLUMNS:
            near(getattr(one, name), getattr(other, name))


def rows_of(model: Any, **inputs: Any) -> list[dict[str, Any]]:
    with torch.no_grad(), locater.observe(model.eval(), rest=True) as seen:
        model(batch(), **inputs)
    return [{name: value for name, value in asdict(row).items() if name != "provenance"} for row in seen.rows]


def by_hand(model: Any) -> list[dict[str, Any]]:
    """Entropy and largest logit of every head, from the queries and keys of the inner module."""
    met: list[tuple[Tensor, Tensor]] = []
    hooks = [
        layer.attention.inner_attention.register_forward_pre_hook(lambda _, args: met.append(args[:2]))
        for layer in model.layers.values()
    ]
    with torch.no_grad():
        model(batch())
    for hook in hooks:
        hook.remove()
    rows = []
    for number, (q, k) in enumerate(met):
        q, k = (x.double().transpose(1, 2) for x in (q, k.repeat_interleave(2, dim=2)))
        hidden = torch.ones(LENGTH, LENGTH).triu(1).bool()
        logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
        p = logits.softmax(-1)
        entropy = -torch.xlogy(p, p).sum(-1).mean((0, 2))
        largest = logits.amax((0, 2, 3))
        for head in range(4):
            rows.append(dict(layer=number, head=head, entropy=float(entropy[head]), max_logit=float(largest[head])))
    return rows


@pytest.mark.parametrize("fused", [True, False])
def test_compiled_blocks_are_observed(fused: bool) -> None:
    model = llama(fused).eval()
    expected = by_hand(model)
    compiled = copy.deepcopy(model)
    for block in compiled.layers.values():
        block.compile(fullgraph=True)
    with torch.no_grad():
        compiled(batch())  # the graphs are there before the observation
    found = rows_of(model)
    near([{name: row[name] for name in expected[0]} for row in found], expected)
    near(rows_of(compiled), found)


class Beside(nn.Module):
    """The Llama, and attention that nobody has a record of."""

    def __init__(self) -> None:
        super().__init__()
        self.llama, self.attention = llama(), Block().attention.float()

    def forward(self, ids: Tensor) -> Tensor:
        return self.llama(ids) + self.attention(torch.ones(1, LENGTH, WIDTH)).mean()


def test_calls_inside_of_a_tapped_module_are_not_counted_again() -> None:
    model = Beside().eval()
    with torch.no_grad(), locater.observe(model) as seen:
        model(batch())
    assert {row.name for row in seen.rows} == {f"llama.layers.{i}.attention" for i in range(2)} | {"attention"}
    near([{name: row[name] for name in ("head", "entropy")} for row in seen.rows[:8]],
         [{name: row[name] for name in ("head", "entropy")} for row in by_hand(model.llama)])  # fmt: skip


def test_documents_of_a_block_mask() -> None:
    """FlexAttention with two documents in a row is two sequences, each with positions of its own."""
    plain, packed = llama(), llama(inner="flex")
    positions = torch.arange(LENGTH // 2).repeat(2, 2)
    masks = packed.get_attention_masks(positions=positions)
    parts = batch().view(4, LENGTH // 2)
    with torch.no_grad(), locater.observe(plain.eval()) as apart:
        expected = plain(parts)
    with torch.no_grad(), locater.observe(packed.eval()) as together:
        out = packed(batch(), positions=positions, attention_masks=masks)
    assert torch.allclose(out.view_as(expected), expected, atol=1e-5)
    columns = ("rows", "entropy", "entropy_ratio", "max_logit", "participation", "distance", "sink")
    for one, other in zip(together.rows, apart.rows, strict=True):
        near({name: one[name] for name in columns}, {name: other[name] for name in columns}, 2e-6)


def logged(model: Any, log: Path) -> list[dict[str, Any]]:
    monitor = locater.Monitor(log, every=2).attach(model.train())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        logits = model(batch())
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch()[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        monitor.after_step(loss=loss.detach())
    monitor.detach()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [{key: line[key] for key in ("step", "loss", "heads")} for line in lines if line["kind"] == "step"]


def test_compiled_blocks_are_logged_with_M(tmp_path: Path) -> None:
    model = llama()
    compiled = copy.deepcopy(model)
    for block in compiled.layers.values():
        block.compile(fullgraph=True)
    ours, theirs = logged(compiled, tmp_path / "compiled.jsonl"), logged(model, tmp_path / "eager.jsonl")
    assert len(theirs) == 2
    assert None not in [x for step in ours for name in ("M", "spread", "entropy") for x in step["heads"][name][1]]
    near(ours, theirs, 1e-5)  # float32 after two steps, compiled and eager


@pytest.mark.parametrize("count", [1, 2])
def test_the_recipe_for_its_trainer(tmp_path: Path, count: int) -> None:
    """As torchrun starts it; FSDP2 on two ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(ROOT / "examples" / "torchtitan_run.py"), "--folder", str(tmp_path), "--steps", "6"]
    common = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    texts = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0] * count, "\n".join(texts)
    log = read_run(tmp_path / "run.jsonl")
    assert [step for step, _ in log.losses] == [1, 2, 3, 4, 5, 6]
    assert [step["step"] for step in log.steps] == [1, 6]
    assert log.losses[-1][1] < log.losses[0][1] < 9
    for step in log.steps:
        for column in ("entropy", "max_logit", "M", "spread"):
            assert [len([x for x in row if x is not None]) for row in step["heads"][column]] == [16, 16]
