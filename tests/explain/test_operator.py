"""operator(): against T written out from the models' own modules, the models' own outputs, and closed forms."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import locater
from locater.discovery import attention_layers
from locater.explain import operator
from locater.explain.explanation import vectors
from locater.explain.linear_operator import CONFIDENCE, FrozenOperator, collapse_by_input, frozen_with_readout, quantile
from locater.explain.recorded_run import Run
from locater.families import registry
from tests.explain.float64 import AllFloat64
from tests.explain.maps_only import FAMILY, MapsOnly
from tests.explain.models import LABELS, built
from tests.explain.test_paths import LAYERS, TEXT, WIDTH, Reference, bert, gpt2, hf, model_of, reference
from tests.families.decoders import GROUPED, make
from tests.parity import EPS, redraw, tokens

EXPERTS = {
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": ("Qwen3Moe", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)),
    "gpt_oss": ("GptOss", dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8)),
    "granitemoe": ("GraniteMoe", dict(num_local_experts=4, num_experts_per_tok=2)),
}


def one(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first input of a batch, which has no padding."""
    return {name: x[:1] for name, x in batch.items()}


def close_to(got: Tensor, want: Tensor, rtol: float = 1e-10) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max() <= rtol * want.abs().max().clamp_min(1)


# T written out


@cache
@torch.no_grad()
def dense(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """T (T, d, T, d) of the first input, its input x and its output y, (T, d): unit fields through the plain closures
    that tests/explain/test_paths.py writes from the modules.
    """
    made = reference(name, linear=True)
    length, width = made.start.shape[1:]
    T = torch.zeros(length, width, length, width, dtype=torch.float64)
    for token in range(length):
        for channel in range(width):
            unit = torch.zeros_like(made.start)
            unit[:, token, channel] = 1
            T[:, :, token, channel] = through(made, unit)[0]
    return T, made.start[0], made.output[0]


def through(made: Reference, x: Tensor) -> Tensor:
    for branches, norm in zip(made.branches, made.norms, strict=True):
        x = norm(x + sum((branch(x) for branch in branches), torch.zeros_like(x)))
    return x


def first_input(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    return model_of(name), one(tokens())


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_every_collapse_is_that_of_the_operator_written_out(name: str) -> None:
    T, x, y = dense(name)
    model, batch = first_input(name)
    length = len(x)
    if name == "bert":  # no logits: its mean over tokens, in its own direction
        row, u = T.mean(0, keepdim=True), y.mean(0) / y.mean(0).norm()
        y_read, rows = y.mean(0), u.expand(length, -1) / length
    else:
        row, u = T[-1:], model.lm_head.weight[5].detach()  # type: ignore[union-attr, index]
        y_read, rows = y[-1], u.expand(length, -1)
    target = None if name == "bert" else 5
    result = {
        c: operator(model, batch, target, collapse=c, matrix=True) for c in ("logit", "input", "input_output", "norm")
    }
    carried = torch.einsum("idje,je->ijd", T, x)  # T_ij x_j
    mean = torch.einsum("idje,je->ijd", row, x)[0]
    close_to(result["logit"].scores, mean @ u)
    close_to(result["input_output"].scores, mean @ y_read)
    close_to(result["input"].scores, mean.norm(dim=-1))
    close_to(result["norm"].scores, row[0].permute(1, 0, 2).flatten(1).norm(dim=1))
    close_to(result["logit"].matrix, torch.einsum("ijd,id->ij", carried, rows))
    close_to(result["input_output"].matrix, torch.einsum("ijd,id->ij", carried, y))
    close_to(result["input"].matrix, carried.norm(dim=-1))
    close_to(result["norm"].matrix, T.permute(0, 2, 1, 3).flatten(2).norm(dim=2))
    assert result["logit"].offset == pytest.approx(result["logit"].target.value - float((mean @ u).sum()), abs=1e-10)
    assert result["input_output"].offset == pytest.approx(float(y_read @ y_read - (mean @ y_read).sum()), abs=1e-9)
    assert result["norm"].offset is result["input"].offset is result["norm"].interval is None
    assert abs(result["logit"].offset) > 1e-2


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_backward_is_the_transpose_of_forward(name: str) -> None:
    paths, _ = frozen_with_readout(*first_input(name), None, "linear")
    start = torch.zeros(2, *paths.input.shape, dtype=torch.float64, requires_grad=True)
    seeds = torch.randn(start.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (want,) = torch.autograd.grad(paths.push_forward(start), start, seeds)
    close_to(paths.pull_back(seeds), want)


def test_norms_with_input_take_the_shorter_way() -> None:
    """One backward pass per channel, where an input has more tokens than channels."""
    ids = torch.randint(64, (1, WIDTH + 4), generator=torch.Generator().manual_seed(3))
    paths, readout = frozen_with_readout(model_of("gpt2"), ids, (7, 3), "linear")
    T = FrozenOperator(paths)
    backward, forward = (collapse_by_input(T, readout.tokens, matrix) for matrix in (False, True))
    assert (backward.passes, forward.passes) == (
        f"{WIDTH} backward passes, one per channel",
        f"{WIDTH + 4} forward passes, one per input token",
    )
    close_to(backward.scores, forward.scores)
    assert forward.matrix is not None
    close_to(forward.scores, forward.matrix[7])


# Every family


@pytest.mark.parametrize("label", LABELS)
def test_tokens_and_offset_sum_to_the_output_of_every_family(label: str) -> None:
    model, batch = built(label)
    exact(model, one(batch), bias_free=label in "llama mistral-window mixtral qwen3 phi3 gemma2 granite olmo2".split())


@pytest.mark.parametrize("label", EXPERTS)
def test_mixtures_with_several_experts_per_token(label: str) -> None:
    name, settings = EXPERTS[label]
    torch.manual_seed(0)
    model: Any = make(name, **{**GROUPED, **settings}).double().eval()
    redraw(model)
    if label == "gpt_oss":
        model.set_attn_implementation("eager")
    exact(model, one(tokens()), bias_free=False)


def exact(model: nn.Module, batch: dict[str, Tensor], bias_free: bool) -> None:
    with AllFloat64(), torch.no_grad():
        own = vectors(model(**batch))[0][0]
        result = operator(model, batch, matrix=True)
        paths, readout = frozen_with_readout(model, batch, None, "linear")
    target, length = result.target, len(result.scores)
    if target.index is None:
        value = own.mean(0).norm() if own.ndim == 2 else own.norm()
    else:
        value = own[target.index] if target.position is None else own[target.position, target.index]
    total = float(result.scores.sum()) + result.offset  # type: ignore[operator]
    assert abs(total - float(value)) < 1e-10 * max(1, abs(float(value)))
    T = FrozenOperator(paths)
    carried = torch.cat([mean for _, mean, _ in T.contributions(readout.tokens)])
    assert carried.shape == paths.input.shape[1:]
    close_to(carried.sum(0) + readout.tokens @ T.constants(), readout.tokens @ paths.output[0])
    assert result.matrix is not None
    if target.position is not None:
        close_to(result.matrix[target.position], result.scores)
    if all(layer.causal for layer in attention_layers(model)):
        assert not result.matrix.triu(1).any()
        assert result.matrix.diagonal().all()
    if bias_free:
        assert abs(result.offset) < 1e-10  # type: ignore[arg-type]
        close_to(result.matrix.sum(1), own[:, target.index])
    assert length == paths.input.shape[1]


# Not the Jacobian


def test_it_is_not_the_jacobian_by_far() -> None:
    """The operator reconstructs the output and the Jacobian does not: frozen parts have derivatives of their own."""
    T, _, y = dense("gpt2")
    model: Any = model_of("gpt2")
    batch = one(tokens())
    x = Run(model, batch).blocks.ends()[0][0]
    places = model.transformer.wpe.weight[: len(x)].detach()

    def run(stream: Tensor) -> Tensor:
        return model.transformer(inputs_embeds=(stream - places)[None]).last_hidden_state[0]  # type: ignore[no-any-return]

    J = torch.autograd.functional.jacobian(run, x)
    close_to(run(x).detach(), y)
    apart = float((T - J).norm() / J.norm())
    assert 0.2 < apart < 5
    paths, _ = frozen_with_readout(model, batch, None, "linear")
    constants = FrozenOperator(paths).constants()
    rebuilt, tangent = (torch.einsum("idje,je->id", map_, x) for map_ in (T, J))
    assert float((rebuilt + constants - y).norm() / y.norm()) < 1e-12
    assert float((tangent - y).norm() / y.norm()) > 0.2
    assert float((tangent + constants - y).norm() / y.norm()) > 0.2
    assert float(constants.norm() / y.norm()) > 0.1, "the affine part is not small"


# A closed form


def test_of_a_model_of_maps_alone_it_is_their_product() -> None:
    """x -> x + A x in each layer, so T = prod_l (I + A_l): 2^L times attention rollout."""
    torch.manual_seed(0)
    model = MapsOnly(LAYERS, 8).double()
    locater.register(FAMILY)
    try:
        ids = torch.randint(64, (1, 7), generator=torch.Generator().manual_seed(1))
        result = {c: operator(model, ids, 2, collapse=c, matrix=True) for c in ("logit", "input", "norm")}
    finally:
        registry.BY_TYPE.remove("maps_only")
    with torch.no_grad():
        start = x = model.embed(ids)
        product = rollout = torch.eye(7, dtype=torch.float64)
        for layer in model.layers:
            A = layer.attn.maps(x)[0]  # type: ignore[union-attr, operator]
            product = (torch.eye(7) + A) @ product
            rollout = (torch.eye(7) + A) / 2 @ rollout
            x = layer(x)
    close_to(result["norm"].matrix, product * 8**0.5)
    close_to(result["norm"].matrix / 8**0.5, 2**LAYERS * rollout)
    close_to(result["input"].matrix, product * start[0].norm(dim=-1))
    close_to(result["logit"].matrix, product * start[0, :, 2])
    assert result["logit"].offset == pytest.approx(0, abs=1e-12)


# Readouts


def test_a_linear_classifier_reads_its_class_token() -> None:
    model = hf("ViT", "ForImageClassification", **{**SIZES, "num_labels": 5})
    model = drawn(model)
    pixels = torch.randn(1, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    result = operator(model, {"pixel_values": pixels}, 3, matrix=True)
    assert result.target.position is None
    assert "the readout is linear" in result.exact
    close_to(result.scores, result.matrix[0])  # type: ignore[index]
    assert not result.matrix[1:].any()  # type: ignore[index]
    complete(result)


SIZES: dict[str, Any] = dict(
    hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
    layer_norm_eps=EPS,
)  # fmt: skip


def test_a_pooler_that_is_not_linear_is_said_to_be_its_tangent() -> None:
    model = drawn(hf("Bert", "ForSequenceClassification", **TEXT, layer_norm_eps=EPS, num_labels=3))
    result = operator(model, one(tokens()), 1)
    assert "replaced by its tangent" in result.exact
    complete(result)
    # moving the last stream a little moves the logit by the tangent
    paths, readout = frozen_with_readout(model, one(tokens()), 1, "linear")
    pooled = torch.tanh(model.bert.pooler.dense(paths.output[0, 0]))  # type: ignore[union-attr, operator]
    slope = (1 - pooled**2) * model.classifier.weight[1] @ model.bert.pooler.dense.weight  # type: ignore[union-attr, index, operator]
    close_to(readout.covector[0], slope.detach())
    assert not readout.covector[1:].any()


def test_a_soft_cap_is_frozen_at_its_ratio() -> None:
    model, batch = built("gemma2")
    batch = one(batch)
    cap = model.config.final_logit_softcapping  # type: ignore[union-attr]
    with AllFloat64():
        result = operator(model, batch, 9)
        model.config.final_logit_softcapping = None  # type: ignore[union-attr]
        try:
            plain = operator(model, batch, 9)
        finally:
            model.config.final_logit_softcapping = cap  # type: ignore[union-attr]
    ratio = result.target.value / plain.target.value
    assert 0.01 < ratio < 0.99
    close_to(result.scores, plain.scores * ratio)
    assert "soft cap" in result.exact
    complete(result)


def drawn(model: nn.Module) -> nn.Module:
    model = model.double().eval()
    redraw(model, 0.8)
    return model


def complete(result: Any) -> None:
    assert abs(float(result.scores.sum()) + result.offset - result.target.value) < 1e-10 * max(
        1, abs(result.target.value)
    )


def test_targets_are_the_logits_of_the_model() -> None:
    model, batch = gpt2().double().eval(), one(tokens())
    logits = model(**batch).logits[0].detach()
    assert operator(model, batch).target.index == int(logits[-1].argmax())
    for target, row, index in ((17, -1, 17), ((4, 5), 4, 5), ((-2, 5), -2, 5)):
        result = operator(model, batch, target)  # type: ignore[arg-type]
        assert result.target.value == pytest.approx(float(logits[row, index]), rel=1e-12)
        complete(result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions_are_carried_in_float32(dtype: torch.dtype) -> None:
    model = model_of("gpt2")
    batch = one(tokens())
    want = operator(model, batch, 5)
    lower = gpt2().eval()
    lower.load_state_dict(model.state_dict())
    result = operator(lower.to(dtype), batch, 5)
    assert result.scores.dtype == torch.float32
    most = {torch.float32: 1e-4, torch.bfloat16: 0.15}[dtype]
    assert (result.scores - want.scores).norm() < most * want.scores.norm()


# Probes


def test_probes_are_unbiased_for_the_square_and_their_intervals_hold() -> None:
    model, batch = first_input("gpt2")
    want = operator(model, batch, collapse="norm", probes=0).scores
    result = [operator(model, batch, collapse="norm", probes=16, seed=seed) for seed in range(24)]
    assert all(e.offset is None and "16 random probes" in e.exact for e in result)
    squares = torch.stack([e.scores.square() for e in result])
    error = squares.std(0) / len(result) ** 0.5
    assert ((squares.mean(0) - want.square()).abs() < 4.5 * error).all()
    assert (squares.mean(0) / want.square() - 1).abs().max() > 1e-6, "these are estimates"
    inside = torch.stack([(e.interval[0] <= want) & (want <= e.interval[1]) for e in result])  # type: ignore[index]
    assert inside.double().mean() >= CONFIDENCE
    again = operator(model, batch, collapse="norm", probes=16, seed=3)
    assert torch.equal(again.scores, result[3].scores)


def test_intervals_hold_with_95_percent_whatever_the_operator() -> None:
    """For one direction the coverage is 95% exactly; for several, equal or not, it is more."""
    n, draws = 16, 20000
    low, high = (quantile(n, p) / n for p in (0.025, 0.975))
    generator = torch.Generator().manual_seed(0)
    spectra = [[1.0], [0.9, 0.1], [0.7, 0.3], [0.5, 0.5], [0.6, 0.3, 0.1], [0.25] * 4, [0.1] * 10]
    for spectrum in spectra:
        probes = torch.randn(draws, n, len(spectrum), generator=generator, dtype=torch.float64).square()
        estimate = (probes @ torch.tensor(spectrum, dtype=torch.float64)).mean(1)  # of a norm whose square is 1
        held = ((estimate / high <= 1) & (1 <= estimate / low)).double().mean()
        margin = 3 * (0.05 * 0.95 / draws) ** 0.5
        assert held > CONFIDENCE - margin
        if len(spectrum) == 1:
            assert held < CONFIDENCE + margin


def test_wide_models_take_probes_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = first_input("gpt2")
    monkeypatch.setattr("locater.explain.linear_operator.EXACT_WIDTH", WIDTH - 1)
    assert operator(model, batch, collapse="norm").interval is not None
    assert operator(model, batch, collapse="norm", probes=0).interval is None


def test_bert_has_no_logits_and_is_explained_along_its_mean() -> None:
    result = operator(drawn(bert()), one(tokens()))
    assert (result.target.index, result.target.position) == (None, None)
    complete(result)
