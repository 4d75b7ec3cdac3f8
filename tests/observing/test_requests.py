"""Generation request by request: sequences of a batch, with each kind of cache, and requests of continuous batching."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from locater import LocaterError
from locater.observing import observe
from tests.families.decoders import GROUPED, make
from tests.parity import redraw

PROMPTS = [[3, 5, 7, 9, 11], [13, 15, 17], [2, 4, 6, 8, 10, 12, 14, 16]]
COLUMNS = ("entropy", "entropy_ratio", "max_logit", "sink", "distance", "self_mass", "participation")
NEW = 5


def model_of(name: str = "Llama", **kw: Any) -> Any:
    model = make(name, **{**GROUPED, **kw}).eval()
    redraw(model)
    return model


def alone(model: Any, tokens: list[int], **kw: Any) -> list[Any]:
    """The rows of one pass over a text; its last token was never fed."""
    with observe(model, **kw) as seen, torch.no_grad():
        model(torch.tensor([tokens[:-1]]), use_cache=False)
    return seen.rows


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a.layer, a.head, a.rows) == (b.layer, b.head, b.rows)
        for column in COLUMNS:
            assert a[column] == pytest.approx(b[column], rel=1e-4, abs=1e-5), (column, a.layer, a.head)


def batch() -> dict[str, torch.Tensor]:
    """Prompts padded on the left."""
    longest = max(map(len, PROMPTS))
    rows = [[0] * (longest - len(x)) + x for x in PROMPTS]
    mask = [[0] * (longest - len(x)) + [1] * len(x) for x in PROMPTS]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_each_sequence_of_a_padded_batch_is_as_it_is_alone(cache: str) -> None:
    model, settings = model_of(), dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)
    with observe(model) as plain:
        expected = model.generate(**batch(), **settings, cache_implementation=cache)
    with observe(model, by_request=True, offsets=(1,), outputs=True) as seen:
        made = model.generate(**batch(), **settings, cache_implementation=cache)
    assert torch.equal(made, expected)
    assert list(seen.by_request) == [0, 1, 2]
    for number, rows in seen.by_request.items():
        pad = made.shape[1] - NEW - len(PROMPTS[number])
        one = alone(model, made[number, pad:].tolist(), offsets=(1,), outputs=True)
        assert_same(rows, one)
        for a, b in zip(rows, one, strict=True):
            assert a.offsets[1] == pytest.approx(b.offsets[1], rel=1e-4, abs=1e-5)
            assert a.output_effective_rank == pytest.approx(b.output_effective_rank, rel=1e-3)
    assert_same(seen.rows, plain.rows)


def generate_batch(model: Any, **kw: Any) -> dict[str, Any]:
    config = ContinuousBatchingConfig(**{"num_blocks": 64, "max_batch_tokens": 64, **kw})
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return model.generate_batch(inputs=PROMPTS, generation_config=settings, continuous_batching_config=config)


@pytest.mark.parametrize(
    ("name", "options", "config"),
    [
        ("Llama", {}, {}),
        ("Llama", {"attn_implementation": "eager"}, {"max_batch_tokens": 6}),  # a prompt in pieces, beside others
        ("Mistral", {"sliding_window": 4}, {"max_batch_tokens": 6}),
    ],
)
def test_each_request_of_continuous_batching_is_as_it_is_alone(
    name: str, options: dict[str, Any], config: dict[str, Any]
) -> None:
    model = model_of(name, **options)
    expected = generate_batch(model, **config)
    with observe(model, by_request=True, any_thread=True) as seen:
        made = generate_batch(model, **config)
    assert {x: y.generated_tokens for x, y in made.items()} == {x: y.generated_tokens for x, y in expected.items()}
    assert set(seen.by_request) == set(made)
    together = 0
    for request, rows in seen.by_request.items():
        one = alone(model, [*made[request].prompt_ids, *made[request].generated_tokens])
        assert_same(rows, one)
        together += rows[0].rows
    with observe(model, any_thread=True) as whole:
        generate_batch(model, **config)
    assert whole.rows[0].rows == together
    assert_same(whole.rows, seen.rows)


def test_what_is_not_kept_is_refused() -> None:
    model = model_of()
    with observe(model) as seen, torch.no_grad():
        model(torch.tensor([PROMPTS[0]]))
    with pytest.raises(LocaterError, match="by_request=True"):
        _ = seen.by_request
    with pytest.raises(LocaterError, match="any_thread=True"), observe(model):
        generate_batch(model)
