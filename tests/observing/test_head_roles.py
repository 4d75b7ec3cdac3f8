"""Induction scores for any parents, against loops over written-out maps in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from locater import LocaterError
from locater.calls.listeners import KEY
from locater.observing.head_roles import circuit_scores, match_scores, matches
from locater_lab.models.shape import Shape
from locater_lab.models.transformer import Attention, Transformer

SETS = ((1,), (2,), (1, 2), (1, 3), (3,))


def built(attention: str = "softmax", causal: bool = True) -> Transformer:
    torch.manual_seed(0)
    shape = Shape(
        vocabulary=3, layers=2, width=16, heads=4, kv_heads=2, hidden=16, length=24, mlp="none", attention=attention,
        causal=causal,
    )  # fmt: skip
    model = Transformer(shape, scale=0.6).double().eval()
    for name, p in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(p)
    return model


@torch.no_grad()
def written_out(model: Transformer, ids: Tensor) -> list[Tensor]:
    """The maps (B, H, T, T) of each layer, from queries and keys by hand."""
    maps = []
    x, turn = model.model.embed(ids)
    for block in model.model.layers:
        inner = block.self_attn
        assert isinstance(inner, Attention)
        q, k, _ = inner.operands(block.read(x), turn)
        logits = q @ k.repeat_interleave(2, 1).mT / math.sqrt(inner.size)
        if inner.causal:
            logits = logits.masked_fill(torch.ones_like(logits[0, 0], dtype=torch.bool).triu(1), -math.inf)
        sinks = getattr(inner.mechanism, "sinks", None)
        extra = (
            logits.new_empty(*logits.shape[:3], 0)
            if sinks is None
            else sinks.view(1, 4, 1, 1).expand(*logits.shape[:3], 1)
        )
        maps.append(torch.cat([logits, extra], -1).softmax(-1)[..., : ids.shape[1]])
        x = block(x, turn)
    return maps


@pytest.mark.parametrize(("attention", "causal"), [("softmax", True), ("learned_sink", True), ("softmax", False)])
def test_scores_against_loops_over_the_maps(attention: str, causal: bool) -> None:
    model = built(attention, causal)
    ids = torch.randint(3, (2, 15), generator=torch.Generator().manual_seed(1))
    scores, maps = match_scores(model, ids, SETS), written_out(model, ids)
    assert set(scores) == {(layer, head) for layer in range(2) for head in range(4)}
    for (layer, head), by_parents in scores.items():
        for parents, score in by_parents.items():
            weights, chances = [], []
            for row, tokens in zip(maps[layer][:, head].tolist(), ids.tolist(), strict=True):
                for t in range(15):
                    if t + 1 < max(parents):
                        continue
                    keys = [
                        s for s in range(max(parents), t + 1)
                        if all(tokens[s - p] == tokens[t + 1 - p] for p in parents)
                    ]  # fmt: skip
                    if keys:
                        weights.append(sum(row[t][s] for s in keys))
                        chances.append(len(keys) / (t + 1 if causal else 15))
            assert score.rows == len(weights) > 0
            assert score.weight == pytest.approx(sum(weights) / len(weights), abs=1e-12)
            assert score.chance == pytest.approx(sum(chances) / len(chances), abs=1e-12)
            assert score.excess == pytest.approx(score.weight - score.chance, abs=1e-12)


def test_matches_by_hand() -> None:
    ids = torch.tensor([[0, 1, 2, 0, 1]])
    pairs = {tuple(at) for at in matches(ids, (1,))[0].nonzero().tolist()}
    assert pairs == {(3, 1), (4, 2)}  # after the second 0 and the second 1
    assert {tuple(at) for at in matches(ids, (1, 2))[0].nonzero().tolist()} == {(4, 2)}
    assert {tuple(at) for at in matches(ids, (2,))[0].nonzero().tolist()} == {(4, 2)}


def test_nothing_is_left_behind_also_after_an_error() -> None:
    model = built()
    ids = torch.zeros(1, 8, dtype=torch.long)
    match_scores(model, ids)
    with pytest.raises(Exception, match=r"index|range"):
        match_scores(model, ids + 99)
    assert not any(KEY in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("parents", [[()], [(0,)], [(1, 1)], []])
def test_parents_that_are_no_distances_are_refused(parents: list[tuple[int, ...]]) -> None:
    with pytest.raises(LocaterError, match="give sets of distances from 1 on"):
        match_scores(built(), torch.zeros(1, 8, dtype=torch.long), parents)


def test_ids_without_sequences_are_refused() -> None:
    with pytest.raises(LocaterError, match=r"not of shape \(8,\)"):
        match_scores(built(), torch.zeros(8, dtype=torch.long))


def test_a_context_that_never_returns_has_no_score() -> None:
    score = match_scores(built(), torch.tensor([[0, 1, 2]]), [(1, 2)])[0, 0][1, 2]
    assert (score.weight, score.chance, score.excess, score.rows) == (None, None, None, 0)


def test_circuit_scores_have_them_too() -> None:
    scores = circuit_scores(built())
    for score in scores.values():
        assert score.skip_induction is not None
        assert score.pair_induction is not None
        assert -1 < score.pair_induction < 1


def test_keys_in_front_of_the_input_leave_the_other_circuit_scores() -> None:
    from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

    class Prefixed(GPT2LMHeadModel):  # type: ignore[misc]
        """A model with two keys of its own before the first token."""

        def forward(self, input_ids: Tensor) -> Any:
            cache, keys = DynamicCache(), torch.ones(len(input_ids), 2, 2, 8)
            cache.update(keys, keys, 0)
            return super().forward(input_ids, past_key_values=cache)

    sizes = dict(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=256, bos_token_id=0, eos_token_id=0)
    for score in circuit_scores(Prefixed(GPT2Config(**sizes))).values():
        assert score.previous is not None
        assert (score.skip_induction, score.pair_induction) == (None, None)
