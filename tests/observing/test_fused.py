"""`observe(model, fused=True)`: attention runs in the kernel that returns its statistics, and the numbers stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import locater
from tests.processes import interpreted


def llama(device: str, dtype: torch.dtype, implementation: str = "sdpa") -> nn.Module:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=implementation,
    )
    return LlamaForCausalLM(config).to(device, dtype).eval()


def both(model: nn.Module, **run: Any) -> tuple[list[Any], list[Any], torch.Tensor, torch.Tensor]:
    with locater.observe(model) as plain, torch.no_grad():
        expected = model(**run).logits
    with locater.observe(model, fused=True) as seen, torch.no_grad():
        found = model(**run).logits
    return plain.rows, seen.rows, expected, found


def same(plain: list[Any], fused: list[Any], tolerance: float) -> None:
    for a, b in zip(plain, fused, strict=True):
        assert (a.layer, a.head) == (b.layer, b.head)
        for name in ("entropy", "entropy_ratio", "max_logit", "sink", "distance", "participation", "self_mass"):
            x, y = getattr(a, name), getattr(b, name)
            assert x == pytest.approx(y, rel=tolerance, abs=tolerance), (a.layer, a.head, name)


def check_fused(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Every call goes to the kernel, and its statistics are not computed again."""
    from locater.calls import attention_interface as one_pass
    from locater.kernels import fused, reference, triton_launches

    model = llama(device, dtype)
    ids = torch.arange(40, device=device)[None] % 50
    calls = []
    kept = fused._operator
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            patch.setattr(one_pass, "is_fused", lambda *_: True)  # what a GPU answers for these calls
        plain, found, expected, logits = both(model, input_ids=ids)
        same(plain, found, tolerance)
        assert (expected - logits).abs().max() < tolerance * expected.abs().max()

        counted = lambda q, k, v, terms: calls.append(1) or kept(q, k, v, *terms.flat(), True)  # noqa: E731
        patch.setattr(one_pass, "attend_with_numbers", counted)
        for module, name in ((reference, "statistics"), (triton_launches, "rows_of_statistics")):
            patch.setattr(module, name, None)  # nothing is computed twice
        with locater.observe(model, fused=True) as seen, torch.no_grad():
            model(input_ids=ids)
    same(found, seen.rows, 1e-6)
    assert len(calls) == 2


def test_the_kernel_takes_the_calls_in_the_interpreter() -> None:
    pytest.importorskip("transformers")
    interpreted(__name__, "t.check_fused('cpu', torch.float16, 2e-2)")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_without_a_gpu_nothing_changes(implementation: str) -> None:
    model = llama("cpu", torch.float32, implementation)
    plain, found, expected, logits = both(model, input_ids=torch.arange(12)[None])
    same(plain, found, 0.0)
    assert torch.equal(expected, logits)


@pytest.mark.gpu
def test_fused_on_the_gpu() -> None:
    check_fused("cuda", torch.bfloat16, 3e-2)


@pytest.mark.gpu
def test_padded_batches_keep_the_kernel_of_the_model() -> None:
    model = llama("cuda", torch.bfloat16)
    mask = torch.ones(2, 20, dtype=torch.long, device="cuda")
    mask[1, :5] = 0
    plain, found, expected, logits = both(model, input_ids=torch.ones_like(mask), attention_mask=mask)
    same(plain, found, 0.0)
    assert torch.equal(expected, logits)


@pytest.mark.gpu
def test_training_keeps_the_kernel_of_the_model() -> None:
    model = llama("cuda", torch.bfloat16).train()
    ids = torch.arange(64, device="cuda")[None] % 50

    def loss(**options: bool) -> torch.Tensor:
        with locater.observe(model, **options):  # type: ignore[arg-type]
            return model(input_ids=ids, labels=ids).loss

    assert torch.equal(loss(), loss(fused=True))
