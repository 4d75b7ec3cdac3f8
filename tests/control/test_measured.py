"""LocAteR on measured tokens: its logits are those of the model's own attention, whatever the size of the tokens that a
layer reads.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from locater.control import LocAteR
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.observing.training_tokens import TokenSample, chosen_tokens
from locater_lab.models.shape import Shape
from locater_lab.models.transformer import Transformer
from tests.families import CASES
from tests.parity import Case, Record, model_of, record

QUICK = ("gpt2", "qwen3", "deepseek_v3", "bert", "t5-encoder", "torch-encoder-post", "torch-attention")
OTHER = [  # models of our own have tests of their own below, and shared layers read at several depths
    case for case in CASES if case.label not in QUICK and not case.label.startswith(("locater-", "albert"))
]
IDS = torch.randint(0, 256, (6, 8), generator=torch.Generator().manual_seed(1))


def case_of(label: str) -> Case:
    return next(case for case in CASES if case.label == label)


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name in ("p", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.train()


def penalty(L: Tensor, shrink: float = 0.01, hold: float = 0.01, target: float = 2.0) -> Tensor:
    """Of logits L (H, n, n) of all pairs of tokens."""
    L = L - L.mean(-1, keepdim=True)
    V, M = L.square().mean((-2, -1)), L.diagonal(dim1=-2, dim2=-1).mean(-1)
    return (shrink * V + hold * (M - target) ** 2).sum()


def expected(model: nn.Module, case: Case, records: list[Record]) -> float:
    """From the stream in front of the norm of each layer, as the model had it in this pass."""
    total = 0.0
    for layer, seen in zip(attention_layers(model), records, strict=True):
        if layer.kind == "self":
            assert seen.x is not None
            real = case.batch().get(seen.padding or "", torch.ones(seen.x.shape[:2])).bool()
            x = seen.x[real][None]
            content, zero = replace(layer, bias=None, relative=None, softcap=None), torch.zeros(x.shape[1])
            total += float(penalty(content.logits(x, query_positions=zero, key_positions=zero)[0]).detach())
    return total


def check(case: Case) -> None:
    model = without_dropout(model_of(case))
    control = LocAteR(form="measured").attach(model)
    records = record(case, model, case.implementations[0], gradients=True)
    assert float(control.loss().detach()) == pytest.approx(expected(model, case, records), rel=1e-6)


@pytest.mark.parametrize("label", QUICK)
def test_penalty_is_that_of_the_logits_of_real_tokens(label: str) -> None:
    check(case_of(label))


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHER, ids=lambda case: case.label)
def test_penalty_in_every_other_family(case: Case) -> None:
    check(case)


def small(seed: int = 0, **kw: Any) -> Any:
    torch.manual_seed(seed)
    sizes = dict(layers=1, width=16, heads=2, kv_heads=2, hidden=24, length=8, positions="learned")
    return Transformer(Shape(**{**sizes, **kw})).double().train()


def of_three_sizes() -> dict[str, Any]:
    """Models whose only attention layer reads normalised tokens, raw embeddings, and raw embeddings 8 times as large."""
    models = {"pre": small(norm="pre"), "post": small(norm="post"), "post, rescaled": small(norm="post")}
    with torch.no_grad():
        inner = models["post, rescaled"].model
        for table in (inner.embed_tokens, inner.embed_positions):
            table.weight.mul_(8)
    return models


def own_logits(model: Any, ids: Tensor = IDS) -> Tensor:
    """Logits (H, n, n) of all pairs of tokens of a pass, from the queries and keys of the attention module itself."""
    read: list[Tensor] = []
    attention = model.model.layers[0].self_attn
    handle = attention.register_forward_pre_hook(lambda module, args: read.append(args[0].detach()))
    model(ids)
    handle.remove()
    q, k, _ = (x.transpose(0, 1).flatten(1, 2) for x in attention.operands(read[0], None))
    return attention.size**-0.5 * q @ k.mT


def mean_and_spread(model: Any, ids: Tensor = IDS) -> tuple[Tensor, Tensor]:
    L = own_logits(model, ids).detach()
    L = L - L.mean(-1, keepdim=True)
    return L.diagonal(dim1=-2, dim2=-1).mean(-1), L.square().mean((-2, -1))


def at_rest(model: Any, form: str, ids: Tensor = IDS) -> tuple[Tensor, Tensor]:
    """M and V of the model's own logits after the penalty alone has come to rest."""
    control = LocAteR(shrink=0.5, hold=1.0, target=2.0, form=form).attach(model)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.q_proj.weight.normal_(generator=torch.Generator().manual_seed(2))
        attention.k_proj.weight.copy_(attention.q_proj.weight)
    optimizer = torch.optim.LBFGS(
        [attention.q_proj.weight, attention.k_proj.weight],
        max_iter=400,
        tolerance_grad=1e-9,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )
    model(ids)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = control.loss()
        loss.backward()
        return loss

    optimizer.step(closure)
    control.detach()
    return mean_and_spread(model, ids)


def test_the_same_strength_leaves_the_same_logits_whatever_the_size_of_tokens() -> None:
    """Where the penalty alone rests, L is a multiple of a projector of rank d_head: M = target / (1 + shrink / (hold
    d_head)) and V = M^2 / d_head.
    """
    M = torch.full((2,), 2 / (1 + 0.5 / 8), dtype=torch.float64)
    for name, model in of_three_sizes().items():
        mean, spread = at_rest(model, "measured")
        assert torch.allclose(mean, M, rtol=1e-3), (name, mean)
        assert torch.allclose(spread, M**2 / 8, rtol=1e-2), (name, spread)


def test_the_stored_form_leaves_other_logits_behind_norms_after_the_sums() -> None:
    models = of_three_sizes()
    post, rescaled = at_rest(models["post"], "stored"), at_rest(models["post, rescaled"], "stored")
    assert torch.allclose(rescaled[0] / post[0], torch.full((2,), 64.0, dtype=torch.float64))
    assert torch.allclose(rescaled[1] / post[1], torch.full((2,), 4096.0, dtype=torch.float64))


def pull(model: Any, form: str, ids: Tensor = IDS) -> Tensor:
    """How fast the penalty falls as the logits of all heads shrink together."""
    control = LocAteR(form=form).attach(model)
    model(ids)
    weight = model.model.layers[0].self_attn.q_proj.weight
    (gradient,) = torch.autograd.grad(control.loss(), [weight])
    control.detach()
    return (gradient * weight.detach()).sum()


def test_the_pull_on_logits_is_that_of_their_own_spread() -> None:
    wrong = []
    for model in of_three_sizes().values():
        factor = torch.ones((), dtype=torch.float64, requires_grad=True)
        (want,) = torch.autograd.grad(penalty(factor * own_logits(model).detach()), [factor])
        assert torch.allclose(pull(model, "measured"), want, rtol=1e-9)
        wrong.append(abs(float(pull(model, "stored") / want) - 1))
    assert min(wrong[1:]) > 0.1


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_go_to_queries_and_keys_alone() -> None:
    model = small(layers=2, qk_norm=True)
    control = LocAteR(form="measured").attach(model)
    model(IDS)
    assert {name.split("self_attn.")[-1] for name in gradients(model, control.loss())} == {
        "q_proj.weight",
        "k_proj.weight",
        "q_norm.weight",
        "k_norm.weight",
    }


def test_each_micro_batch_is_charged_for_its_own_tokens() -> None:
    model = small()
    control = LocAteR(form="measured").attach(model)

    def of(ids: Tensor) -> float:
        model(ids)
        return float(control.loss().detach())

    both = [of(part) for part in IDS.chunk(2)]
    assert both[0] != pytest.approx(both[1])
    assert [of(part) for part in IDS.chunk(2)] == both
    assert float(control.loss().detach()) == both[1]  # asked once more
    model.eval()(IDS)
    assert float(control.loss().detach()) == both[1]


def test_a_step_without_a_training_pass_is_refused() -> None:
    model = small()
    control = LocAteR(form="measured").attach(model)
    with pytest.raises(LocaterError, match=r"Transformer: form='measured' needs a forward pass in training mode"):
        control.loss()
    model(IDS)
    control.loss()
    control.after_step()
    model.eval()(IDS)
    with pytest.raises(LocaterError, match=r"call loss\(\) after model\(...\)"):
        control.loss()


@pytest.mark.parametrize("form", ["measured", "effective"])
def test_passes_without_gradients_do_not_count(form: Any) -> None:
    """A reference or a rollout in training mode, as TRL runs them; its tokens are not those of the loss."""
    found = []
    for others in (False, True):
        model = small(norm="post")
        control = LocAteR(form=form).attach(model)
        for _ in range(others):
            with torch.no_grad():
                model(IDS.flip(1) // 2)
        model(IDS)
        for _ in range(others):
            with torch.inference_mode():
                model(IDS.flip(1) // 2)
        found.append(control.loss().detach())
    assert found[0] == found[1] > 0


def test_a_layer_that_is_not_reached_is_named() -> None:
    model = small(layers=2)
    control = LocAteR(form="measured").attach(model)
    model.model.layers[0].self_attn(torch.randn(2, 8, 16, dtype=torch.float64), None)
    with pytest.raises(LocaterError, match=r"model.layers.1.self_attn: no tokens .* layers=\[...\] without it"):
        control.loss()


def test_only_chosen_layers_are_read() -> None:
    model = small(layers=2)
    control = LocAteR(form="measured", layers=[1]).attach(model)
    model(IDS)
    assert all("layers.1." in name for name in gradients(model, control.loss()))


def test_random_numbers_are_left_alone() -> None:
    model = small()
    control = LocAteR(form="measured").attach(model)
    before = torch.get_rng_state()
    model(IDS), model(IDS)
    control.loss()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_sample_covers_sequences_and_positions() -> None:
    index, filled = chosen_tokens(32 * 256, 256, torch.device("cpu"))
    assert bool(filled.all())
    assert len(index.unique()) == 256
    assert (index // 256).bincount(minlength=32).tolist() == [8] * 32
    positions = (index % 256 // 16).bincount(minlength=16)
    assert int(positions.min()) >= 12
    assert int(positions.max()) <= 20


def test_passes_share_a_sample_evenly() -> None:
    sample = TokenSample("layer", 1, torch.zeros(()))
    for number in range(4):
        sample.receive(torch.full((4, 100, 1), float(number)), None)
    assert all(abs(int(count) - 64) < 24 for count in sample.tokens.flatten().int().bincount(minlength=4))
    sample.restart()
    sample.receive(torch.full((4, 100, 1), 9.0), None)
    assert sample.tokens.unique().tolist() == [9.0]


def test_a_shared_layer_reads_at_all_depths() -> None:
    case = case_of("albert")
    model = without_dropout(model_of(case))
    control = LocAteR(form="measured").attach(model)
    read: list[Tensor] = []
    model.get_submodule(case.sites[0].attention).register_forward_pre_hook(lambda module, args: read.append(args[0]))
    model(**case.batch())
    (sample,) = control._maps.samples.values()
    depths = {i for token in sample.tokens[sample.real] for i, x in enumerate(read) if bool((x == token).all(-1).any())}
    assert depths == set(range(len(read)))
    assert len(read) == model.config.num_hidden_layers > 1


def test_padding_is_left_out_where_only_an_inner_model_is_run() -> None:
    case = case_of("bert")
    inner = without_dropout(model_of(case))
    losses = []
    for model in (inner, nn.ModuleDict({"inner": inner})):
        control = LocAteR(form="measured").attach(model)
        inner(**case.batch())
        losses.append(float(control.loss().detach()))
        control.detach()
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    model: Any = model_of(case_of("llama")).train()
    control = LocAteR(form="measured").attach(model)
    ids = IDS % 64

    def step() -> dict[str, Tensor]:
        """Of two micro-batches: the second forward pass of the first must not count for the second."""
        model.zero_grad()
        for part in ids.chunk(2):
            loss = model(part, labels=part, use_cache=False).loss
            (loss + 100 * control.loss()).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = step()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    again = step()
    assert plain.keys() == again.keys()
    assert all(torch.allclose(again[name], g, atol=1e-10) for name, g in plain.items())


def test_autocast_does_not_touch_the_penalty() -> None:
    model = small().float()
    control = LocAteR(form="measured").attach(model)
    model(IDS)
    with torch.autocast("cpu", torch.bfloat16):
        inside = control.loss()
    assert inside.dtype == torch.float32
    assert torch.equal(inside, control.loss())


def test_a_model_that_moves_to_another_dtype_is_read_again() -> None:
    model = small().float()
    control = LocAteR(form="measured").attach(model)
    model(IDS)
    control.loss()
    model.double()(IDS)
    assert control.loss().dtype == torch.float64
    assert float(control.loss().detach()) == pytest.approx(float(penalty(own_logits(model)).detach()), rel=1e-9)


def test_a_free_mean_is_never_rewarded() -> None:
    control = LocAteR(shrink=1.0, target="free", form="measured")
    for seed in range(2):
        model = small(seed)
        control.attach(model)
        model(IDS)
        M, V = mean_and_spread(model)
        loss = float(control.loss().detach())
        assert loss == pytest.approx(float((V - M**2 / 8).sum()), rel=1e-9)
        assert loss >= 0
        control.detach()


@pytest.mark.parametrize("form", ["measured", "effective", "stored"])
def test_only_what_exceeds_the_limit_is_charged(form: str) -> None:
    model = small(layers=1)
    plain, free = LocAteR(shrink=1.0, hold=0.0, form=form), LocAteR(shrink=0.0, hold=1.0, form=form)
    for control in (plain, free):
        control.attach(model)
    model(IDS)
    (maps,) = plain.maps()
    V = plain.of(maps[0], maps[1], maps[2][:, None]).detach().flatten()
    limit = float(V.mean())
    half = LocAteR(shrink=1.0, hold=1.0, form=form, limit=limit).attach(model)
    model(IDS)
    above = V[V > limit] - limit
    assert float(half.loss().detach()) == pytest.approx(float(above.sum() + free.loss().detach()), rel=1e-9)
    assert len(above) == 1


def explicit(model: Any, heads: int) -> float:
    """The stored form of a Llama-like layer without groups, from its parameters."""
    total = 0.0
    for block in model.model.layers:
        q, k = (
            part.weight.detach().unflatten(0, (heads, -1)) for part in (block.self_attn.q_proj, block.self_attn.k_proj)
        )
        W = q.shape[1] ** -0.5 * q.mT @ k
        trace = W.diagonal(dim1=1, dim2=2).sum(-1)
        total += float((0.01 * ((W + W.mT) / 2).square().sum((1, 2)) + 0.01 * (trace - 2) ** 2).sum())
    return total


@pytest.mark.parametrize("kw", [dict(norm="pre"), dict(norm="post"), dict(qk_norm=True)], ids=str)
def test_the_stored_form_takes_parameters_as_they_are(kw: dict[str, Any]) -> None:
    model = small(layers=2, **kw)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 2)
    assert float(LocAteR(form="stored").attach(model).loss().detach()) == pytest.approx(explicit(model, 2), rel=1e-9)


@pytest.mark.parametrize(("name", "spelled"), [("held", {}), ("free", {"target": "free"}), ("full", {"part": "full"})])
def test_a_reading_of_the_paper_is_the_stored_form_spelled_out(name: str, spelled: dict[str, Any]) -> None:
    model = model_of(case_of("llama"))
    by_name, by_parts = (LocAteR(**given).attach(model) for given in ({"form": name}, {"form": "stored", **spelled}))
    assert float(by_name.loss().detach()) == float(by_parts.loss().detach()) != 0


def test_the_stored_form_has_no_latent_attention() -> None:
    with pytest.raises(LocaterError, match=r"layers.0.self_attn: latent attention has no query-key map as stored"):
        LocAteR(form="stored").attach(model_of(case_of("deepseek_v3")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(form="raw"), "form='raw': choose effective, measured, held, free, full or stored"),
        (dict(form="measured", part="full"), "leave part out"),
        (dict(limit=-1.0), "limit=-1.0: must be a number from 0"),
        (dict(limit=math.inf), "limit=inf"),
        (dict(limit=1.0, target="free"), "limit=1.0 does not apply to target='free'"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LocaterError) as caught:
        LocAteR(**options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_detach_restores_every_module() -> None:
    model = small(layers=2)

    def attributes() -> dict[str, list[str]]:
        return {name: sorted(vars(module)) for name, module in model.named_modules()}

    before = attributes()
    control = LocAteR(form="measured").attach(model)
    model(IDS)
    control.loss().backward()
    control.after_step()
    control.detach()
    assert attributes() == before
    with pytest.raises(LocaterError):  # nothing is left attached where attaching fails
        LocAteR(form="measured", layers=[7]).attach(model)
    assert attributes() == before
