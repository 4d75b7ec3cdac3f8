"""Gradients with respect to embeddings against differences, and deletion curves against the model run by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from locater import LocaterError, explain
from locater.explain import Explanation
from locater.explain.explanation import choose_target
from locater.explain.input_gradients import EmbeddedInputs
from tests.explain.test_attention_flow import DECODED, IDS, PIXELS, WORDS, bart, bert, clean, clip, gpt2, own


def value(embedded: EmbeddedInputs, target: Any, features: dict[str, Tensor]) -> float:
    with torch.no_grad():
        return float(target.number(embedded.run(features)))


def test_gradient_times_input_is_the_slope_of_scaling_each_token() -> None:
    for model, inputs, streams in (
        (gpt2(), IDS, ["input"]),
        (bart(), {"input_ids": IDS, "decoder_input_ids": DECODED}, ["encoder", "decoder"]),
        (clip(), {"input_ids": WORDS, "pixel_values": PIXELS}, ["image", "text"]),
    ):
        why, embedded = explain.gradient_input(model, inputs, target=1), EmbeddedInputs(model, inputs)
        assert [why.stream, *why.other_streams] == streams
        for stream, scores in ((why.stream, why.scores), *why.other_streams.items()):
            x = embedded.features[stream]
            row = 1 if len(x) > 1 else 0
            for token in (0, len(scores) - 1):
                move = torch.zeros_like(x)
                at = (row, slice(None), *divmod(token, 2)) if x.ndim == 4 else (row, token)
                move[at] = x[at]
                ends = [
                    value(embedded, why.target, {**embedded.features, stream: x + step * move})
                    for step in (1e-5, -1e-5)
                ]
                assert float(scores[token]) == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-7, rel=1e-5)
        assert clean(model)


def test_integrated_gradients_add_up_and_are_the_integral() -> None:
    model = gpt2()
    why = explain.integrated_gradients(model, IDS, target=3)
    embedded = EmbeddedInputs(model, IDS)
    x, target = embedded.features["input"], choose_target(embedded.output, 3)
    assert why.offset is not None
    assert why.offset == pytest.approx(value(embedded, target, {"input": torch.zeros_like(x)}))
    gap = target.value - why.offset - float(why.scores.sum())
    assert abs(gap) < 1e-4
    assert f"a gap of {gap:.1e}" in why.exact
    total = torch.zeros_like(x)
    for at in (torch.arange(100) + 0.5) / 100:  # midpoints
        here = (at * x).requires_grad_(True)
        with torch.enable_grad():
            total += torch.autograd.grad(target.number(embedded.run({"input": here})), here)[0] / 100
    assert torch.allclose(why.scores, (total * x).sum(-1)[0], atol=1e-3)
    other = explain.integrated_gradients(model, IDS, target=3, steps=20, baseline=7)
    assert other.offset is not None
    with torch.no_grad():
        assert other.offset == pytest.approx(float(model(torch.full_like(IDS, 7)).logits[0, -1, 3]))
    assert abs(target.value - other.offset - float(other.scores.sum())) < 1e-3
    with pytest.raises(LocaterError, match="steps=0"):
        explain.integrated_gradients(model, IDS, steps=0)
    assert clean(model)


def test_tokens_are_left_out_in_order_and_the_class_token_stays() -> None:
    model = bert()
    model.config.cls_token_id = 3
    with torch.no_grad():
        logits = model(IDS).logits
    why = Explanation("given", choose_target(logits, 2), torch.tensor([9.0, 0.1, 0.5, 0.3, 0.2, 0.6, 0.4]))
    curves = explain.deletion(model, IDS, why, fractions=(0, 0.5, 1))
    assert curves.tokens == (5, 2, 6, 3, 4, 1)
    with torch.no_grad():
        for curve, dropped in ((curves.positive, {5, 2, 6}), (curves.negative, {1, 4, 3})):
            left = [t for t in range(7) if t not in dropped]
            expected = [logits[0], model(IDS[:, left]).logits[0], model(IDS[:, :1]).logits[0]]
            for at, row in enumerate(expected):
                assert float(curve.values[at]) == pytest.approx(float(row[2]), abs=1e-5)
                assert curve.probabilities is not None
                assert float(curve.probabilities[at]) == pytest.approx(float(row.softmax(-1)[2]), abs=1e-5)
        filled = explain.deletion(model, IDS, why, fractions=(0, 0.5, 1), replace=7)
        ids = IDS.clone()
        ids[0, [5, 2, 6]] = 7
        assert float(filled.positive.values[1]) == pytest.approx(float(model(ids).logits[0, 2]), abs=1e-5)
    p = curves.positive.probabilities
    assert p is not None
    assert curves.positive.area == pytest.approx(float(p[0] / 4 + p[1] / 2 + p[2] / 4), abs=1e-6)
    assert curves.insertion.fractions == (0, 0.5, 1)
    assert float(curves.insertion.values[0]) == float(curves.negative.values[-1])
    assert len(list(curves.rows())) == 6


def test_a_single_logit_has_no_probability() -> None:
    """Its softmax is 1 whatever is taken away, which would say that nothing matters."""
    model, inputs = clip(), {"input_ids": WORDS[:1], "pixel_values": PIXELS}
    curves = explain.deletion(model, inputs, explain.relevance(model, inputs, target=0), fractions=(0, 1))
    assert (curves.positive.probabilities, curves.positive.unchanged) == (None, None)
    with torch.no_grad():
        ends = [float(model(**{**inputs, "pixel_values": x}).logits_per_image) for x in (PIXELS, 0 * PIXELS)]
    assert curves.positive.values.tolist() == pytest.approx(ends, abs=1e-4)
    assert curves.positive.area == pytest.approx(sum(ends) / 2, abs=1e-4)


def test_the_target_moves_with_its_token_and_patches_are_filled() -> None:
    model = gpt2()
    why = explain.relevance(model, IDS, target=(4, 11))
    curves = explain.deletion(model, IDS, why)
    assert len(curves.positive.fractions) == 9
    assert 4 not in curves.tokens
    with torch.no_grad():
        alone = model(IDS[:, 4:5]).logits[0, 0, 11]
        assert float(curves.positive.values[-1]) == pytest.approx(float(alone), abs=1e-5)
        image = own(image=(8, 8, 3), causal=False, positions="learned", length=4)
        pixels = torch.randint(256, (1, 8, 8, 3), generator=torch.Generator().manual_seed(0))
        why = explain.relevance(image, pixels, target=1)
        first = why.ranked()[0][0]
        blank = pixels.clone()
        blank[:, 4 * (first // 2) : 4 * (first // 2) + 4, 4 * (first % 2) : 4 * (first % 2) + 4] = 127
        curves = explain.deletion(image, pixels, why, fractions=(0, 0.25))
        assert float(curves.positive.values[1]) == pytest.approx(float(image(blank)[0, 1]), abs=1e-5)
        towers, inputs = clip(), {"input_ids": WORDS, "pixel_values": PIXELS}
        why = explain.relevance(towers, inputs, target=1)
        everything = explain.deletion(towers, inputs, why, fractions=(0, 1)).positive.values[1]
        blank = towers(input_ids=WORDS, pixel_values=torch.zeros_like(PIXELS)).logits_per_image[0, 1]
        assert float(everything) == pytest.approx(float(blank), abs=1e-5)


def test_deletion_refuses_in_one_line() -> None:
    model = own()
    why = explain.rollout(model, IDS)
    for settings, match in (
        (dict(fractions=(0.5,)), "two or more numbers"),
        (dict(fractions=(0.5, 0.1)), "ascending"),
        (dict(keep=[9]), "tokens 0 to 6"),
        (dict(keep=range(7)), "nothing to take away"),
    ):
        with pytest.raises(LocaterError, match=match):
            explain.deletion(model, IDS, why, **settings)  # type: ignore[arg-type]
    with pytest.raises(LocaterError, match="7 scores for 5 tokens"):
        explain.deletion(model, IDS[:, :5], why)


@pytest.mark.parametrize("method", explain.METHODS)
def test_methods_do_the_same_in_inference_mode(method: str) -> None:
    model = gpt2()
    expected = explain.METHODS[method](model, IDS, target=1).scores
    with torch.inference_mode():
        inputs = {"input_ids": IDS.clone(), "attention_mask": torch.ones_like(IDS)}  # tensors that no graph takes
        scores = explain.METHODS[method](model, inputs, target=1).scores
        assert torch.is_inference_mode_enabled()
    assert torch.allclose(scores, expected, atol=1e-12)
    assert clean(model)


@pytest.mark.parametrize("method", explain.METHODS)
def test_scores_of_a_model_in_half_precision_are_not_rounded_to_it(method: str) -> None:
    assert explain.METHODS[method](gpt2().bfloat16(), IDS).scores.dtype == torch.float32


@pytest.mark.parametrize("method", explain.METHODS)
def test_bad_tokens_and_models_are_refused_before_anything_runs(method: str) -> None:
    model = gpt2()
    for given, inputs, message in (
        (model, IDS + 100_000, "token ids from .*, and the vocabulary has .*: check the tokenizer"),
        (model, IDS[0], "input_ids has the shape .* with a batch axis in front"),
        (model, IDS[:, :0], "input_ids has the shape .*: give one token or more"),
        ("folder", IDS, "'folder' is no nn.Module: load it first"),
    ):
        with pytest.raises(LocaterError, match=message):
            explain.METHODS[method](given, inputs)
    assert clean(model)


def test_autocast_is_named_where_it_spoils_the_sum() -> None:
    rounded = "rounds what it computes: leave its block"
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(LocaterError, match=rounded):
        explain.operator(gpt2().float(), IDS)
    with pytest.raises(LocaterError, match=r"steps=1.5: give at least 1 point"):
        explain.integrated_gradients(gpt2(), IDS, steps=1.5)  # type: ignore[arg-type]
