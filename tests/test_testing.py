"""`locater.testing.assert_heads`: passes on a sound model, fails on one that was broken on purpose, names the head."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from locater import LocaterError
from locater.testing import assert_heads

TINY = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=32)
BATCH = {"input_ids": torch.arange(24).reshape(2, 12)}


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(TINY)


def test_a_sound_model_passes_and_stays_in_training_mode(model: GPT2LMHeadModel) -> None:
    model.train()
    assert_heads(model)
    assert_heads(model, no="nonfinite, exploding, sharp", batch=BATCH)
    assert model.training
    model.transformer.h[0].eval()  # frozen, as its dropout would not be
    before = [part.training for part in model.modules()]
    assert_heads(model, no="exploding", batch=BATCH)
    assert [part.training for part in model.modules()] == before
    assert all(p.grad is None for p in model.parameters())


def test_weights_that_are_not_finite_are_named(model: GPT2LMHeadModel) -> None:
    broken = copy.deepcopy(model)
    broken.transformer.h[1].attn.c_attn.weight.data[0, 8:16] = float("nan")  # queries of head 1
    with pytest.raises(AssertionError, match=r"^GPT2LMHeadModel: 1 of 4 heads: layer 1 head 1: nonfinite: "):
        assert_heads(broken)


def test_what_a_forward_pass_shows_needs_a_batch(model: GPT2LMHeadModel) -> None:
    hot = copy.deepcopy(model)
    hot.transformer.h[0].attn.c_attn.weight.data[:, :32] *= 400
    with pytest.raises(LocaterError, match="give batch="):
        assert_heads(hot, no="exploding")
    with pytest.raises(AssertionError, match="layer 0 head 0: exploding: "):
        assert_heads(hot, no="exploding", batch=BATCH)
    with pytest.raises(AssertionError, match="entropy"):
        assert_heads(hot, no="entropy<0.5", batch=BATCH)


def test_a_checkpoint_is_read_from_disk(model: GPT2LMHeadModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    assert_heads(tmp_path)
    with pytest.raises(AssertionError, match="4 of 4 heads"):
        assert_heads(tmp_path, no="stable_rank<1000")
    with pytest.raises(LocaterError, match="load the model first"):
        assert_heads(tmp_path, no="exploding", batch=BATCH)


def test_a_misspelt_flag_is_refused(model: GPT2LMHeadModel) -> None:
    with pytest.raises(LocaterError, match="no= 'sharpp'"):
        assert_heads(model, no="sharpp")
