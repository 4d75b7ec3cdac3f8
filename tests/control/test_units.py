"""LocAteR's default form in the units of what a layer reads: the same strength means the same logits, with or without a
norm in front of attention. References are the model's own logits and d x d maps, in float64.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from locater.control import LocAteR
from locater.control.locater import size_counts, sized_maps, traces
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.layers import AttentionLayer, effective
from locater.layers.layer import Projection
from locater.layers.norm import Norm
from locater.layers.norm_folding import Tokens
from locater.layers.projection_with_norm import normed
from locater_lab.train import run
from tests.control.test_locater import case_of, gradients
from tests.control.test_measured import at_rest, own_logits, pull, small, without_dropout
from tests.control.test_measured import penalty as measured_penalty
from tests.control.test_state import Cut, cut_at, plan
from tests.parity import Case, model_of, record

QUICK = ("opt-post-norm", "xlnet", "torch-encoder-post")
OTHER = ("electra-widened", "albert-unshared", "xlnet-causal-clamped", "torch-attention", "torch-transformer-post")
WORDS = torch.arange(32).view(4, 8)
PARTS: Any = ("symmetric", "full")


def even(norm: str, size: float, **kw: Any) -> Any:
    """One layer over 32 tokens that are even in all 16 directions, E z z^T = size^2 times the identity."""
    model = small(norm=norm, vocabulary=32, **kw)
    axes = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64))[0] * 4 * size
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.cat([axes, -axes]))
        model.model.embed_positions.weight.zero_()
    return model


def of_three_sizes() -> dict[str, Any]:
    """The first has a norm with a gain in front of attention; embeddings of 1,000 keep its epsilon out."""
    models = {"pre": even("pre", 1000), "post": even("post", 0.3), "post, rescaled": even("post", 2.4)}
    with torch.no_grad():
        models["pre"].model.layers[0].input_layernorm.weight.uniform_(0.5, 2)
    return models


def penalty(
    L: Tensor, part: str = "symmetric", shrink: float = 0.01, hold: float = 0.01, target: float = 2.0
) -> Tensor:
    """Of logits L (H, n, n) of all pairs of tokens."""
    if part == "symmetric":
        V = ((L + L.mT) / 2).square().mean((-2, -1))
    else:
        V = (2 * L.square() + L * L.mT).mean((-2, -1)) / 3
    M = L.diagonal(dim1=-2, dim2=-1).mean(-1)
    return (shrink * V + hold * (M - target) ** 2).sum()


@pytest.mark.parametrize("part", PARTS)
def test_the_default_penalty_is_that_of_the_models_own_logits(part: Any) -> None:
    for name, model in of_three_sizes().items():
        want = float(penalty(own_logits(model, WORDS).detach(), part))
        control = LocAteR(part=part).attach(model)
        model(WORDS)
        assert float(control.loss().detach()) == pytest.approx(want, rel=1e-9), name


@pytest.mark.parametrize("form", ["effective", "measured"])
def test_the_same_strength_leaves_the_same_logits(form: str) -> None:
    """Where the penalty alone rests, L is a multiple of a projector of rank d_head."""
    want = torch.full((2,), 2 / (1 + 0.5 / 8), dtype=torch.float64)
    for name, model in of_three_sizes().items():
        mean, spread = at_rest(model, form, WORDS)
        assert torch.allclose(mean, want, rtol=1e-3), (name, mean)
        assert torch.allclose(spread, want**2 / 8, rtol=1e-2), (name, spread)


@pytest.mark.parametrize(("form", "of"), [("effective", penalty), ("measured", measured_penalty)])
def test_the_pull_on_logits_is_that_of_their_own_penalty(form: str, of: Any) -> None:
    for name, model in of_three_sizes().items():
        factor = torch.ones((), dtype=torch.float64, requires_grad=True)
        (want,) = torch.autograd.grad(of(factor * own_logits(model, WORDS).detach()), [factor])
        assert torch.allclose(pull(model, form, WORDS), want, rtol=1e-9), name


def explicit(model: nn.Module, squares: dict[int, float]) -> Tensor:
    """Head by head from W itself, d x d, times the mean square of the tokens where it is given."""
    total = torch.zeros((), dtype=torch.float64)
    for number, layer in enumerate(attention_layers(model)):
        if layer.kind == "self":
            folded = effective(layer)
            for head in range(layer.heads):
                W = layer.scale * folded.query[head].mT @ folded.key[head // layer.group] * squares.get(number, 1.0)
                total = total + 0.01 * ((W + W.mT) / 2).square().sum() + 0.01 * (W.trace() - 2) ** 2
    return total


def mean_squares(model: nn.Module, case: Case) -> dict[int, float]:
    """Of the tokens of one pass that are no padding, for layers without a norm."""
    squares = {}
    for number, (layer, seen) in enumerate(
        zip(attention_layers(model), record(case, model, case.implementations[0], gradients=True), strict=True)
    ):
        if layer.norm.kind == "none" and layer.kind == "self":
            assert seen.x is not None
            real = case.batch().get(seen.padding or "", torch.ones(seen.x.shape[:2])).bool()
            squares[number] = float(seen.x[real].square().mean())
    return squares


@pytest.mark.parametrize("label", [*QUICK, *(pytest.param(label, marks=pytest.mark.slow) for label in OTHER)])
def test_families_without_a_norm_in_front(label: str) -> None:
    case = case_of(label)
    model = without_dropout(model_of(case))
    if hasattr(model, "get_input_embeddings"):
        model.get_input_embeddings().weight.data.mul_(3)  # some are of about unit size as drawn
    control = LocAteR().attach(model)
    squares = mean_squares(model, case)
    assert all(abs(square - 1) > 0.01 for square in squares.values())
    want = explicit(model, squares)
    loss = control.loss()
    assert float(loss.detach()) == pytest.approx(float(want.detach()), rel=1e-10)
    theirs, ours = gradients(model, want), gradients(model, loss)
    for name, gradient in theirs.items():
        assert torch.allclose(ours.get(name, torch.zeros_like(gradient)), gradient, rtol=1e-8, atol=1e-12), name


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def layer_with(biased: bool, latent: bool = False, **norms: Norm) -> AttentionLayer:
    def plain(rows: int, width: int = 6) -> Projection:
        weight = drawn(rows, width)
        return Projection(lambda: weight, (rows, width), drawn(rows) if biased else None)

    query, key = plain(8), plain(8)
    if latent:
        query = normed(plain(5), Norm("rms"), Norm(), up=plain(8, 5), heads=2)
        key = normed(plain(5), Norm("rms"), Norm(), up=plain(6, 5), shared=plain(1), heads=2)
    return AttentionLayer("attention", 0, 2, 2, 4, query=query, key=key, scale=0.5, **norms)  # type: ignore[arg-type]


BOTH = dict(query_norm=Norm("rms"), key_norm=Norm("rms"))


@pytest.mark.parametrize(
    ("kw", "power"),
    [
        (dict(biased=True), 2),  # of r in W; None: another function of r
        (dict(biased=False, query_norm=Norm("layer")), 1),
        (dict(biased=False, **BOTH), 0),
        (dict(biased=True, **BOTH), None),
        (dict(biased=False, latent=True), None),
    ],
    ids=str,
)
def test_what_a_norm_behind_the_maps_makes_of_the_size(kw: Any, power: int | None) -> None:
    """As with the mean and covariance of tokens that are measured, here even ones of a mean square of 9."""
    torch.manual_seed(0)
    layer, square = layer_with(**kw), torch.tensor([9.0], dtype=torch.float64)
    unit, sized = effective(layer), sized_maps(layer, square)
    eye = torch.eye(6, dtype=torch.float64)
    want = effective(layer, tokens=Tokens(eye.new_zeros(6), 9 * eye))

    def W(maps: Any) -> Tensor:
        return maps.query.mT @ maps.key

    assert torch.allclose(W(sized), W(want), rtol=1e-9)
    assert size_counts(layer) == (power != 0)
    if power is not None:
        assert torch.allclose(W(sized), 3**power * W(unit), rtol=1e-9)
    else:
        assert not torch.allclose(W(sized), W(unit), rtol=1e-2)


def test_norms_in_front_keep_the_penalty_to_the_last_bit() -> None:
    """Nothing listens, no pass is needed, and the value is that of the formula in the same precision."""
    model = small(layers=2).float()
    before = {name: sorted(vars(module)) for name, module in model.named_modules()}
    loss = LocAteR().attach(model).loss()
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == before
    blocks = model.model.layers
    q, k = (
        torch.stack([getattr(b.self_attn, part).weight.unflatten(0, (2, 8)) * b.input_layernorm.weight for b in blocks])
        for part in ("q_proj", "k_proj")
    )
    trace, square, size = traces(q, k)
    scale = torch.tensor(8**-0.5)
    M, V = scale * trace, scale**2 * ((square + size) / 2)
    assert float((0.01 * V + 0.01 * (M - 2.0) ** 2).sum().detach()).hex() == float(loss.detach()).hex()


def test_a_layer_that_has_not_run_is_named() -> None:
    model = small(layers=2, norm="post")
    control = LocAteR().attach(model)
    model.eval()(WORDS)
    with pytest.raises(
        LocaterError, match=r"^model.layers.0.self_attn: no norm stands in front .* call loss\(\) after"
    ):
        control.loss()
    assert float(LocAteR(layers=[1]).attach(model).loss().detach()) > 0  # the norm of layer 0 stands before layer 1
    model.train()(WORDS)
    before = control.loss()
    control.after_step()
    assert torch.equal(control.loss(), before)  # the size stays until the next pass in training mode


def test_passes_between_two_losses_are_averaged_over_their_tokens() -> None:
    model = small(norm="post")
    control = LocAteR().attach(model)

    def of(*batches: Tensor) -> float:
        for batch in batches:
            model(batch)
        return float(control.loss().detach())

    one, other, both = of(WORDS[:1]), of(WORDS[1:]), of(WORDS)
    assert of(WORDS[:1], WORDS[1:]) == pytest.approx(both, rel=1e-12)
    assert of(WORDS[:1]) == one != other
    model.eval()
    assert of(WORDS[1:]) == one


def test_half_precision_and_moves() -> None:
    model = even("post", 2.0)
    want = float(penalty(own_logits(model, WORDS).detach()))
    control = LocAteR().attach(model.float())
    model(WORDS)
    with torch.autocast("cpu", torch.bfloat16):
        model(WORDS)
        loss = control.loss()
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(want, rel=1e-5)
    model.bfloat16()(WORDS)
    assert control.loss().dtype == torch.float32
    assert float(control.loss().detach()) == pytest.approx(want, rel=0.05)


@pytest.mark.slow
def test_a_compiled_step_is_one_graph() -> None:
    """Which uses the size of the tokens of its own pass, not that of the one before."""
    model = small(norm="post")
    control = LocAteR().attach(model)

    def step(ids: Tensor) -> Tensor:
        return model(ids).square().mean() + 100 * control.loss()

    eager = gradients(model, step(WORDS // 2))
    step(WORDS)
    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    ours = gradients(model, compiled(WORDS // 2))
    assert all(torch.allclose(ours[name], g, atol=1e-10) for name, g in eager.items())


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    model: Any = without_dropout(model_of(case_of("opt-post-norm")))
    control = LocAteR().attach(model)

    def step() -> dict[str, Tensor]:
        """Two micro-batches: the second forward pass of the first must not count for the second."""
        model.zero_grad()
        for part in WORDS.chunk(2):
            (model(part, labels=part, use_cache=False).loss + 100 * control.loss()).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = step()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    again = step()
    assert all(torch.allclose(again[name], g, atol=1e-10) for name, g in plain.items())


def test_a_run_with_norms_after_the_sums_goes_on_exactly(tmp_path: Path) -> None:
    whole = run(replace(plan(tmp_path / "whole", "locater"), norm="post", layers=1, steps=4, checkpoint=2))
    cut = replace(whole.plan, out=str(tmp_path / "cut"))
    with pytest.raises(Cut):
        run(cut, cut_at(3))
    run(cut)
    files = [Path(folder) / "model" / "model.safetensors" for folder in (whole.plan.out, cut.out)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_size_is_part_of_the_state() -> None:
    model = small(layers=2, norm="post")
    first, second = LocAteR().attach(model), LocAteR().attach(model)
    empty = first.state_dict()
    assert empty["sizes"]["model.layers.0.self_attn"].tolist() == [0, 0]
    second.load_state_dict(empty)
    with pytest.raises(LocaterError, match="not known before its first forward pass"):
        second.loss()
    model(WORDS)
    loss, state = first.loss(), first.state_dict()
    assert list(state["sizes"]) == ["model.layers.0.self_attn"]
    second.detach()
    second.attach(model).load_state_dict(state)
    assert torch.equal(second.loss(), loss)
    with pytest.raises(LocaterError, match=r"size of the tokens of model.layers.0.self_attn, which is not needed here"):
        LocAteR().attach(small(layers=2)).load_state_dict(state)


def test_detach_restores_every_module() -> None:
    model = small(layers=2, norm="post")
    before = {name: sorted(vars(module)) for name, module in model.named_modules()}
    control = LocAteR().attach(model)
    model(WORDS)
    control.loss().backward()
    control.detach()
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == before
