"""Controls of the forward pass: what they do is what the mathematics says, it is what is observed, and it comes off
without a trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from locater import LocaterError, Monitor
from locater.calls.call_and_masks import Call
from locater.control import Control, Controls, EntropyPenalty, LogitSoftcap, QKNorm, Temperature
from locater.control.forward_controls import ForwardControl
from locater.control.qk_norm import qk_norm
from locater.control.row_entropy import row_entropy
from locater.control.softcap import softcap
from locater.discovery import attention_layers
from locater.kernels import Terms, attention_entropy
from locater.layers.norm import Norm
from locater.observing import observe
from tests.families import CASES
from tests.families.decoders import GROUPED, make
from tests.observing.test_observe import batch_of, tensors, use
from tests.parity import model_of, redraw, tokens

BATCH = tokens()
REAL = BATCH["attention_mask"].bool()
ALL: dict[str, Callable[[], ForwardControl]] = {
    "temperature": lambda: Temperature(init=1.7),
    "qk_norm": lambda: QKNorm(init=0.7),
    "softcap": lambda: LogitSoftcap(cap=0.8),
    "entropy": lambda: EntropyPenalty(ceiling=0.5),
}
FAMILIES = [
    "llama",
    "gemma3",
    "gpt_oss",
    "gpt2",
    "opt",
    "bert",
    "albert",
    "t5",
    "whisper",
    "deepseek_v3",
    "vit",
    "mistral-window",
]
RUNS = [pytest.param(c, how, id=f"{c.label}-{how}") for c in CASES if c.label in FAMILIES for how in c.implementations]


pytestmark = pytest.mark.usefixtures("detached")


def llama(how: str = "sdpa", **kw: Any) -> Any:
    model = make("Llama", **{**GROUPED, **kw})
    redraw(model)
    model.set_attn_implementation(how)
    return model


def stepped(model: Any, *controls: Control, run: Any = None, **kw: Any) -> tuple[float, list[Tensor]]:
    """One training step without its optimizer: the whole loss, and gradients of the model and of the controls."""
    held = [*model.parameters(), *(p for c in controls if isinstance(c, ForwardControl) for p in c.parameters())]
    for p in held:
        p.grad = None
    loss = (model if run is None else run)(**BATCH, labels=BATCH["input_ids"], use_cache=False, **kw).loss
    for control in controls:
        loss = loss + control.loss()
    loss.backward()
    for control in controls:
        assert float(control.loss().detach()) == 0  # nothing is collected twice, by checkpointing either
        control.after_step()
    return float(loss.detach()), [p.grad.clone() for p in held if p.grad is not None]


# Every family


@pytest.mark.parametrize(("case", "how"), RUNS)
def test_each_acts_and_comes_off_without_a_trace(case: Any, how: str) -> None:
    """Padded batches. The entropy of the maps under a control is also what is observed; T5's bias and sinks
    included.
    """
    model = use(model_of(case).float(), how)

    def run() -> list[Tensor]:
        with torch.no_grad():
            return tensors(case.call(model, batch_of(case)) if case.call else model(**batch_of(case)))

    before, keys = run(), list(model.state_dict())
    for name, build in ALL.items():
        control = build().attach(model)
        with observe(model) as seen:
            during = run()
        assert list(model.state_dict()) == keys
        assert all(torch.equal(a, b) for a, b in zip(before, during, strict=True)) == (name == "entropy"), name
        assert all(t.isfinite().all() for t in during)
        if isinstance(control, LogitSoftcap):
            assert all(row.max_logit <= 0.8 * (1 + 1e-6) for row in seen.rows)
        if isinstance(control, QKNorm) and case.label != "t5":  # whose position bias is added
            bounds = [b for layer in control.bounds().values() for b in layer]
            assert all(row.max_logit <= bound * (1 + 1e-5) for row, bound in zip(seen.rows, bounds, strict=True))
        control.detach()
        assert all(torch.equal(a, b) for a, b in zip(before, run(), strict=True))
        assert not any("locater" in key or key == "forward" for module in model.modules() for key in vars(module))


OUT_OF_REACH = {
    "bloom": "BloomAttention", "falcon": "FalconAttention", "gptj": "GPTJAttention", "mpnet": "MPNetSelfAttention", "timm": "Attention",
    "xlnet": "XLNetRelativeAttention", "deberta_v2": "DisentangledSelfAttention", "torch-encoder-pre": "MultiheadAttention",
}  # fmt: skip


@pytest.mark.parametrize("label", OUT_OF_REACH)
def test_families_out_of_reach_are_named(label: str) -> None:
    model = next(c for c in CASES if c.label.startswith(label)).build()
    for build in ALL.values():
        said = rf": {OUT_OF_REACH[label]} does not use the attention interface .* GPT-2, .* do\. "
        with pytest.raises(LocaterError, match=said) as error:
            build().attach(model)
        assert "\n" not in str(error.value)
    assert not any("locater" in key for module in model.modules() for key in vars(module))


def test_a_part_within_reach_can_be_chosen() -> None:
    case = next(c for c in CASES if c.label == "siglip")  # its vision head is PyTorch's own attention
    model = case.build()
    with pytest.raises(LocaterError, match=r"vision_model.head.attention"):
        Temperature().attach(model)
    assert len(Temperature(layers=[0]).attach(model).parameters()) == 1


# The mathematics, against AttentionLayer in float64


def first_maps(model: Any) -> Tensor:
    with torch.no_grad():
        return model(**BATCH, output_attentions=True, use_cache=False).attentions[0][REAL[:, None].expand(-1, 4, -1)]


def expected(model: Any, changed: Callable[[Any], Any], logits: Callable[[Tensor], Tensor] = lambda z: z) -> Tensor:
    layer = changed(next(iter(attention_layers(model))))
    with torch.no_grad():
        z = logits(layer.logits(model.model.embed_tokens(BATCH["input_ids"])))
    z = z.masked_fill(~layer.visible(9, 9, REAL), -torch.inf)
    return z.softmax(-1)[REAL[:, None].expand(-1, 4, -1)]


def test_temperature_divides_logits_of_each_head() -> None:
    model = llama("eager").double().eval()
    control = Temperature().attach(model)
    with torch.no_grad():
        control.parameters()[0].copy_(torch.tensor([0.5, 1.0, 2.0, 4.0]).log())
    t = torch.tensor([0.5, 1.0, 2.0, 4.0])[:, None, None]
    torch.testing.assert_close(first_maps(model), expected(model, lambda x: x, lambda z: z / t), rtol=1e-5, atol=1e-6)
    assert control.temperatures()["model.layers.0.self_attn"] == pytest.approx([0.5, 1, 2, 4])


def test_qk_norm_after_rotation_is_the_norm_before_it() -> None:
    """The reference normalises before it rotates; gains of their own for four query heads and two key heads."""
    model = llama("eager").double().eval()
    control = QKNorm(init=1.0, eps=1e-3).attach(model)
    g, k = torch.tensor([0.5, -1.0, 2.0, 3.0]), torch.tensor([1.5, 0.7])
    with torch.no_grad():
        control.parameters()[0].copy_(g)
        control.parameters()[1].copy_(k)
    both = (g * k.repeat_interleave(2))[:, None, None]
    wanted = expected(
        model,
        lambda x: replace(x, query_norm=Norm("rms", eps=1e-3), key_norm=Norm("rms", eps=1e-3)),
        lambda z: z * both,
    )
    torch.testing.assert_close(first_maps(model), wanted, rtol=1e-5, atol=1e-6)
    assert control.bounds()["model.layers.0.self_attn"] == pytest.approx((8**0.5 * both.abs()).flatten().tolist())


def test_softcap_comes_before_the_mask() -> None:
    model = llama("eager").double().eval()
    LogitSoftcap(cap=1.3).attach(model)
    torch.testing.assert_close(
        first_maps(model), expected(model, lambda x: replace(x, softcap=1.3)), rtol=1e-5, atol=1e-6
    )


def test_softcap_equals_that_of_a_model_that_has_it() -> None:
    """Gemma 2 without its cap, under the control, is Gemma 2; windows and padding included."""
    shape = {**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 24, "sliding_window": 4}
    capped = make("Gemma2", **shape, attn_logit_softcapping=3.0).eval()
    redraw(capped)
    capped.set_attn_implementation("eager")
    bare = make("Gemma2", **shape, attn_logit_softcapping=None).eval()
    bare.load_state_dict(capped.state_dict())
    bare.set_attn_implementation("eager")
    LogitSoftcap(cap=3.0).attach(bare)
    with torch.no_grad(), observe(bare) as one, observe(capped) as other:
        torch.testing.assert_close(bare(**BATCH).logits[REAL], capped(**BATCH).logits[REAL], rtol=1e-4, atol=1e-5)
    assert [r.max_logit for r in one.rows] == pytest.approx([r.max_logit for r in other.rows], rel=1e-5)
    with pytest.raises(LocaterError, match=r"layers.0.self_attn: its logits are already capped at 3.0"):
        LogitSoftcap().attach(capped)
    with pytest.raises(LocaterError, match=r"already capped at 3.0"):
        LogitSoftcap().attach(bare)


def test_a_high_cap_changes_nothing_and_user_biases_stay() -> None:
    """A float mask that holds more than what is hidden."""
    for how in ("eager", "sdpa"):
        model = llama(how).eval()
        bias = torch.randn(2, 1, 9, 9, generator=torch.Generator().manual_seed(0)).masked_fill(
            ~torch.ones(9, 9).tril().bool(), -1e30
        )
        for mask in (bias, BATCH["attention_mask"], None):
            with torch.no_grad():
                alone = model(BATCH["input_ids"], attention_mask=mask).logits
                control = LogitSoftcap(cap=1e5).attach(model)
                torch.testing.assert_close(
                    model(BATCH["input_ids"], attention_mask=mask).logits[REAL], alone[REAL], rtol=1e-4, atol=1e-4
                )
            control.detach()


@pytest.mark.parametrize("label", ["gpt_oss", "t5", "whisper"])
def test_a_high_cap_changes_no_gradient(label: str) -> None:
    """Sinks and tables of position biases are parameters too."""
    case = next(c for c in CASES if c.label == label)
    model = use(model_of(case).float(), "eager")
    batch = {k: torch.ones_like(v) if k.endswith("mask") else v for k, v in batch_of(case).items()}

    def gradients() -> list[Tensor]:
        model.zero_grad()
        tensors(model(**batch))[0].square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    alone = gradients()
    LogitSoftcap(cap=1e4).attach(model)
    for a, b in zip(gradients(), alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))


@pytest.mark.parametrize("label", ["bert", "opt", "whisper"])
def test_kept_gains_keep_the_scale_of_logits(label: str) -> None:
    """OPT and Whisper scale queries before the call, and that scale is put back: forgotten, it would be a factor of
    sqrt(8).
    """
    case = next(c for c in CASES if c.label == label)
    model = model_of(case).float()

    def highest() -> list[float]:
        with torch.no_grad(), observe(model, layers=[0]) as seen:
            case.call(model, batch_of(case)) if case.call else model(**batch_of(case))
        return [row.max_logit for row in seen.rows]

    was = highest()
    QKNorm(layers=[0]).attach(model)
    assert all(0.4 < now / before < 2.0 for now, before in zip(highest(), was, strict=True))


def test_kept_gains_are_lengths_of_real_tokens() -> None:
    """Root mean squares over tokens and channels, without their mean, and without padding."""
    case = next(c for c in CASES if c.label == "bert")
    model = model_of(case).float()
    control = QKNorm(kind="layer", layers=[0]).attach(model)
    held: list[Tensor] = []
    model.embeddings.LayerNorm.register_forward_pre_hook(lambda m, args: held.append(args[0]))
    layer = next(iter(attention_layers(model)))
    with torch.no_grad():
        model(**batch_of(case))
        sides = {"query_gain": layer.queries(held[0]), "key_gain": layer.keys(held[0])}
    for name, y in sides.items():
        centred = (y - y.mean(-1, keepdim=True)).transpose(1, 2)[REAL]  # (tokens, H, D)
        torch.testing.assert_close(
            control.state_dict()[f"{layer.name}.{name}"], centred.square().mean((0, 2)).sqrt(), rtol=1e-4, atol=1e-5
        )


def test_layer_norm_is_refused_after_rotation() -> None:
    with pytest.raises(
        LocaterError, match=r"layers.0.self_attn: kind='layer' after rotation would break relative positions"
    ):
        QKNorm(kind="layer").attach(llama())


# Running in the ways models are run


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["temperature", "qk_norm", "softcap"])
def test_generation_equals_the_full_forward(name: str, padded: bool, cache: str) -> None:
    """Keys come out of the cache as they went in; a static one has room left, which no mask hides where nothing is
    padded.
    """
    model = llama().eval()
    ALL[name]().attach(model)
    settings = dict(
        max_new_tokens=4,
        min_new_tokens=4,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    prompt = (
        BATCH if padded else {"input_ids": BATCH["input_ids"], "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    )
    made = model.generate(**prompt, **settings, cache_implementation=cache)
    mask = torch.cat([prompt["attention_mask"], torch.ones(2, 3, dtype=torch.long)], 1)
    with torch.no_grad():
        whole = model(made.sequences[:, :-1], attention_mask=mask, use_cache=False).logits
    for step, logits in enumerate(made.logits):
        torch.testing.assert_close(logits, whole[:, 8 + step], rtol=1e-4, atol=1e-4)


@pytest.fixture
def fresh_graphs() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_graphs")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_graphs_stay_whole(checkpointing: bool) -> None:
    """All four in one graph; with checkpointing, all but the penalty, which leaves the region that is run again."""
    model = llama(num_hidden_layers=1).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    for name in list(ALL)[: 3 if checkpointing else 4]:
        ALL[name]().attach(model)
    with observe(model):
        found = torch._dynamo.explain(model)(**BATCH, labels=BATCH["input_ids"], use_cache=False)
    assert (found.graph_break_count, found.graph_count) == (0, 1)


@pytest.mark.usefixtures("fresh_graphs")
@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiled_steps_are_those_of_eager(checkpointing: bool) -> None:
    """Attached after the first compiled call; gains from the first batch; the penalty counted once, and cleared."""
    from torch._dynamo.testing import CompileCounterWithBackend

    found: list[Any] = []
    graphs = CompileCounterWithBackend("eager" if checkpointing else "aot_eager")
    for compiled in (False, True):
        model = llama(num_hidden_layers=1).train()
        run = torch.compile(model, backend=graphs) if compiled else model
        if checkpointing:
            model.gradient_checkpointing_enable()
        else:
            run(**BATCH, labels=BATCH["input_ids"], use_cache=False)
        kept = QKNorm(init=0.7 if checkpointing else "keep").attach(model)
        controls = [Temperature(1.2).attach(model), kept, EntropyPenalty(floor=0.9).attach(model)]
        found.append([stepped(model, *controls, run=run) for _ in range(2)] + [kept.state_dict()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found[0][-1]["model.layers.0.self_attn.query_gain"], torch.ones(4))
    if not checkpointing:
        assert graphs.frame_count == 3  # before, the first batch, all others


@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_half_precision_and_autocast(how: str) -> None:
    exact, _ = stepped(model := llama(how).train(), *(controls := [build().attach(model) for build in ALL.values()]))
    with torch.autocast("cpu", torch.bfloat16):
        loss, grads = stepped(model, *controls)
    assert loss == pytest.approx(exact, rel=0.02)
    assert all(g.isfinite().all() and g.dtype == torch.float32 for g in grads)
    half = model.to(torch.bfloat16)
    loss, grads = stepped(half, *controls)
    assert loss == pytest.approx(exact, rel=0.05)
    assert all(p.dtype == torch.float32 and p.grad.abs().sum() > 0 for c in controls for p in c.parameters())


def test_dropout_follows_the_mode() -> None:
    model = llama(attention_dropout=0.5)
    LogitSoftcap().attach(model)
    for mode in (True, False):
        model.train(mode)
        with torch.no_grad():
            assert torch.equal(model(**BATCH).logits, model(**BATCH).logits) is not mode


# Entropy


def whole_penalty(maps: Tensor, visible: Tensor, rows: Tensor, low: float, high: float) -> Tensor:
    """The penalty from full maps (B, H, T, S)."""
    count = visible.expand(maps.shape).sum(-1).double()
    entropy = -torch.special.xlogy(maps, maps.clamp_min(1e-300)).sum(-1)
    ratio = entropy / count.clamp_min(2).log()
    off = (low - ratio).clamp_min(0).square() + (ratio - high).clamp_min(0).square()
    return off[(count > 1) & rows[:, None]].mean()


MAPS = ["llama", "bert", "gpt2", "mistral-window", "gemma2", "gpt_oss", "qwen3"]


@pytest.mark.parametrize(
    ("label", "how"), [(c.label, how) for c in CASES if c.label in MAPS for how in c.implementations]
)
def test_penalty_and_gradient_are_those_of_full_maps(label: str, how: str) -> None:
    """float64; causal and both ways, padding, windows, a soft-cap, sinks, grouped keys."""
    case = next(c for c in CASES if c.label == label)
    model = use(model_of(case), how).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    control = EntropyPenalty(floor=0.7, ceiling=0.8, weight=3.0, margin=0.02, layers=[0]).attach(model)
    held: list[Tensor] = []
    site = next(s for s in case.sites)
    model.get_submodule(site.stream).register_forward_pre_hook(lambda m, args: held.append(args[0]))
    model(**case.batch())
    layer = next(iter(attention_layers(model)))
    visible = layer.visible(9, 9, REAL)
    maps = layer.attention(held[0], padding=REAL)
    loss, wanted = control.loss(), 3.0 * whole_penalty(maps, visible, REAL, 0.72, 0.78)
    near = 1e-9 if label in ("bert", "gpt2") else 1e-6  # the others rotate in float32, whatever the model is in
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=near)
    weights = [p for name, p in model.named_parameters() if name.startswith(layer.name) and p.ndim == 2]
    got = torch.autograd.grad(loss, weights, allow_unused=True, retain_graph=True)
    ours = torch.autograd.grad(wanted, weights, allow_unused=True)
    assert sum(g is not None and bool(g.abs().max() > 1e-6) for g in got) >= (1 if label == "gpt2" else 2)
    for a, b in zip(got, ours, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=100 * near, atol=near)


def test_rows_are_those_of_attention_entropy() -> None:
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, h, 7, 8, generator=g, dtype=torch.float64, requires_grad=True) for h in (4, 2))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0] * 7])
    out = torch.randn(2, 4, 7, generator=g, dtype=torch.float64)
    found, visible = row_entropy(Call(q, k, Terms(0.4, causal=True, documents=documents)), own=True)
    plain = attention_entropy(q, k, scale=0.4, causal=True, documents=documents)
    torch.testing.assert_close(found, plain, rtol=0, atol=0)
    assert visible[0, 0].tolist() == [1, 2, 3, 1, 2, 3, 4]
    for a, b in zip(torch.autograd.grad(found, (q, k), out), torch.autograd.grad(plain, (q, k), out), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "terms",
    [
        Terms(0.4, causal=True),
        Terms(0.4, softcap=0.7),
        Terms(0.4, sinks=torch.tensor([0.3, -0.2], dtype=torch.float64)),
    ],
    ids=["causal", "capped", "sinks"],
)
def test_every_number_that_rows_return_has_its_gradient(terms: Terms) -> None:
    """Entropy, log-sum-exp and mass, by finite differences in float64, alone and together."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, h, 4, 3, generator=g, dtype=torch.float64, requires_grad=True) for h in (2, 1))

    def numbers(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        entropy, _, lse, mass = torch.ops.locater.row_entropy(q, k, True, *terms.flat())
        return entropy, lse, mass

    visible = torch.ops.locater.row_entropy(q, k, True, *terms.flat())[1]
    assert not visible.requires_grad
    assert torch.autograd.gradcheck(numbers, (q, k))
    assert torch.autograd.gradcheck(lambda q, k: numbers(q, k)[1], (q, k))
    assert torch.autograd.gradcheck(lambda q, k: sum(x.square().sum() for x in numbers(q, k)), (q, k))
    lse = (q @ k.mT * 0.4).tril(0).masked_fill(~torch.ones(4, 4).tril().bool(), -torch.inf).logsumexp(-1)
    if terms.causal:
        torch.testing.assert_close(numbers(q, k)[1], lse)
    compiled = torch.compile(numbers, backend="aot_eager", fullgraph=True)
    weights = [torch.randn(1, 2, 4, generator=g, dtype=torch.float64) for _ in range(3)]
    found = torch.autograd.grad(compiled(q, k), (q, k), weights)
    for a, b in zip(found, torch.autograd.grad(numbers(q, k), (q, k), weights), strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_transposed_queries_have_the_layout_that_the_compiler_is_told() -> None:
    """Queries that no rotation copies are a view of (B, T, H, h); compiled, a model with learned positions broke."""
    q, k = (torch.randn(2, 5, 3, 4).transpose(1, 2) for _ in range(2))
    numbers = Terms(0.5, causal=True).flat()
    entropy, _, lse, mass = torch.ops.locater.row_entropy(q, k, True, *numbers)
    operands = (q, k, lse, entropy, mass, torch.ones_like(entropy), *numbers)
    made = torch.ops.locater.row_entropy_gradient(*operands)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        told = torch.ops.locater.row_entropy_gradient(*operands)
    assert [x.stride() for x in made] == [x.stride() for x in told]


def test_each_row_is_compared_with_the_keys_it_sees() -> None:
    """Uniform causal attention is as spread as can be, from the second row on: no penalty at a floor of 1."""
    model = llama().train()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    low, high = EntropyPenalty(floor=1.0).attach(model), EntropyPenalty(ceiling=0.5, weight=1.0).attach(model)
    model(**BATCH)
    assert float(low.loss().detach()) < 1e-12
    assert float(high.loss().detach()) == pytest.approx(0.25, rel=1e-5)


def test_penalty_has_no_size_and_is_given_once() -> None:
    model = llama().train()
    control = EntropyPenalty(floor=0.9).attach(model)
    ids = BATCH["input_ids"]
    model(ids)
    once = control.loss()
    assert float(once.detach()) > 0
    assert float(control.loss().detach()) == 0
    model(torch.cat([ids, ids]))
    torch.testing.assert_close(control.loss(), once)
    model(ids)
    model(ids)
    torch.testing.assert_close(control.loss(), once)
    with torch.no_grad():
        model(ids)
    model.eval()(ids)
    assert float(control.loss().detach()) == 0
    model.train()(ids)
    control.after_step()
    assert float(control.loss().detach()) == 0


def test_accumulated_gradients_are_those_of_the_whole_batch() -> None:
    model = llama().train()
    control = EntropyPenalty(floor=0.9, weight=1.0).attach(model)
    ids = torch.cat([BATCH["input_ids"], BATCH["input_ids"].flip(1)])

    def gradient(parts: list[Tensor]) -> Tensor:
        model.zero_grad()
        for part in parts:
            ((model(part, labels=part).loss + control.loss()) / len(parts)).backward()
        control.after_step()
        return model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    torch.testing.assert_close(gradient(list(ids.split(2))), gradient([ids]), rtol=1e-4, atol=1e-7)


def test_checkpointed_passes_count_once() -> None:
    found = []
    for how in (None, False):
        model = llama().train()
        if how is not None:
            model.gradient_checkpointing_enable({"use_reentrant": how})
        controls = [build().attach(model) for build in ALL.values()]
        found.append(stepped(model, *controls))
    assert found[0][0] == found[1][0]
    for a, b in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


def test_reentrant_checkpointing_is_refused() -> None:
    model = llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    control = EntropyPenalty(floor=0.9).attach(model)
    with pytest.raises(LocaterError, match="cannot follow reentrant activation checkpointing"):
        stepped(model, control)
    control.detach()
    model.zero_grad()
    assert all(g.isfinite().all() for g in stepped(model, Temperature().attach(model))[1])


def test_training_raises_entropy() -> None:
    model = llama().train()
    control, temperature = EntropyPenalty(floor=0.95, weight=1.0).attach(model), Temperature().attach(model)
    optimizer = torch.optim.Adam(temperature.parameters(), lr=0.1)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        model(**BATCH, use_cache=False)
        loss = control.loss()
        loss.backward()
        optimizer.step()
        control.after_step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert all(t > 1 for layer in temperature.temperatures().values() for t in layer)


# Together


def test_order_of_attaching_does_not_matter() -> None:
    found = []
    for names in (list(ALL), list(reversed(ALL))):
        model = llama().train()
        control = Controls([ALL[name]() for name in names]).attach(model)
        loss = model(**BATCH, labels=BATCH["input_ids"]).loss
        found.append((loss.detach(), control.loss().detach()))
        control.detach()
    assert found[0] == found[1]
    assert float(found[0][1]) > 0


def test_what_acts_is_observed_and_monitored(tmp_path: Path) -> None:
    from locater.runs.record_sinks import read_run

    model = llama("eager").train()
    monitor = Monitor(tmp_path / "run.jsonl", every=1, spectrum=False).attach(model)
    controls = [build().attach(model) for build in ALL.values()]
    with observe(model) as seen:
        maps = [x.detach() for x in model(**BATCH, output_attentions=True, use_cache=False).attentions]
    monitor.after_step()
    monitor.detach()
    for row in seen.rows:
        p = maps[row.layer][:, row.head][REAL]
        assert row.entropy == pytest.approx(float(-torch.special.xlogy(p, p).sum(-1).mean()), rel=1e-4)
    step = read_run(tmp_path / "run.jsonl").steps[0]
    assert [e for layer in step["heads"]["entropy"] for e in layer] == pytest.approx(
        [row.entropy for row in seen.rows], rel=1e-5
    )
    for control in controls:
        control.detach()


def test_parameters_are_saved_and_loaded() -> None:
    model, other = llama().eval(), llama().eval()
    control, twin = QKNorm().attach(model), QKNorm().attach(other)
    with torch.no_grad():
        one = model(**BATCH).logits
        assert list(control.state_dict())[:2] == [f"model.layers.0.self_attn.{side}_gain" for side in ("query", "key")]
        twin.load_state_dict(control.state_dict())
        other(BATCH["input_ids"].flip(1))  # another first batch: gains are there already
        assert torch.equal(other(**BATCH).logits, one)
    with pytest.raises(LocaterError, match="has other layers or heads"):
        twin.load_state_dict({})
    assert Temperature(learn=False).attach(other).parameters() == []


# One line


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Temperature(init=0.0), "init=0.0: a temperature must be a number above 0"),
        (lambda: QKNorm(kind="l2"), "kind='l2': choose rms or layer"),  # type: ignore[arg-type]
        (lambda: QKNorm(init="lost"), "init='lost': must be a number above 0, or keep"),  # type: ignore[arg-type]
        (lambda: QKNorm(init=-1.0), "init=-1.0: must be a number above 0, or keep"),
        (lambda: QKNorm(eps=-1.0), "eps=-1.0"),
        (lambda: LogitSoftcap(cap=0.0), "cap=0.0: must be a number above 0"),
        (lambda: LogitSoftcap(cap=math.inf), "cap=inf: must be a number above 0"),
        (lambda: EntropyPenalty(), "give floor, ceiling or both"),
        (lambda: EntropyPenalty(floor=0.8, ceiling=0.2), "floor=0.8, ceiling=0.2"),
        (lambda: EntropyPenalty(floor=1.2), "floor=1.2"),
        (lambda: EntropyPenalty(floor=0.2, weight=-1.0), "weight=-1.0"),
        (lambda: EntropyPenalty(floor=0.2, ceiling=0.3, margin=0.1), "margin=0.1"),
        (lambda: EntropyPenalty(floor=0.2, margin=math.nan), "margin=nan"),
        (lambda: Temperature(layers=[2]).attach(llama()), r"layers=\[2\]: there are 2, numbered from 0"),
        (lambda: Temperature(layers=[]).attach(llama()), r"layers=\[\]: there are 2"),
        (lambda: Temperature().parameters(), "Temperature is not attached"),
        (lambda: QKNorm().bounds(), "QKNorm is not attached"),
        (lambda: EntropyPenalty(floor=0.1).loss(), "EntropyPenalty is not attached"),
    ],
)
def test_bad_options_are_named(build: Callable[[], Any], said: str) -> None:
    with pytest.raises(LocaterError, match=said) as error:
        build()
    assert "\n" not in str(error.value)


def test_attention_that_is_never_reached_is_an_error() -> None:
    model = llama()
    control = Temperature().attach(model)
    with pytest.raises(LocaterError, match="without reaching the attention of LlamaForCausalLM"):
        control.after_step()
    model(**BATCH)
    control.after_step()


def test_own_path_of_gpt2_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64, n_positions=64, reorder_and_upcast_attn=True)
    )
    with pytest.raises(LocaterError, match="does not use the attention interface"):
        Temperature().attach(model)


def test_the_functions_alone() -> None:
    x = torch.randn(1, 3, 4, 16, dtype=torch.float64)
    gain = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
    for kind in ("rms", "layer"):
        y = qk_norm(x, gain, kind, eps=0.0)  # type: ignore[arg-type]
        torch.testing.assert_close(y.norm(dim=-1), (4 * gain.abs())[:, None].expand(1, 3, 4))
        assert (y.mean(-1).abs().max() < 1e-12) == (kind == "layer")
    z = torch.tensor([-1e6, 0.0, 0.01, 1e6])
    torch.testing.assert_close(softcap(z, 2.0), torch.tensor([-2.0, 0.0, 0.01, 2.0]), atol=1e-6, rtol=1e-4)
