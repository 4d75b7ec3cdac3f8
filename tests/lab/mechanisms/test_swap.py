"""The control `SwapMechanism`: a model of transformers attends as the mechanism says, masks and all, and comes back to the
bit.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from locater import LocaterError, Monitor
from locater.calls.interceptors import AttentionRequest, Interceptor, add_interceptor, remove_interceptor
from locater.control import Controls, EntropyPenalty, LogitSoftcap, QKNorm, Temperature
from locater.discovery import attention_layers
from locater.observing import observe
from locater_lab.mechanisms import mechanism, mechanisms
from locater_lab.mechanisms.swap import SwapMechanism
from locater_lab.train import Shape, Transformer
from tests.families import CASES
from tests.families.decoders import GROUPED, make
from tests.families.encoders import bert
from tests.observing.test_observe import tensors
from tests.parity import redraw, tokens

BATCH = tokens()
REAL = BATCH["attention_mask"].bool()
FREE = [m.name for m in mechanisms() if not (m.has_parameters or m.needs)]
CAUSAL = [name for name in FREE if mechanism(name).causal != "never"]


pytestmark = pytest.mark.usefixtures("detached")


def llama(how: str = "sdpa", name: str = "Llama", **kw: Any) -> Any:
    model = make(name, **{**GROUPED, **kw}).double().eval()
    with torch.no_grad():
        redraw(model)
    model.set_attn_implementation(how)
    return model


def encoder(how: str = "sdpa") -> Any:
    model: Any = bert().double().eval()
    with torch.no_grad():
        redraw(model)
    model.set_attn_implementation(how)
    return model


class Noted(Interceptor):
    """Keeps the queries and keys that come first, before any control."""

    order = -1

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __call__(self, asked: AttentionRequest) -> AttentionRequest:
        self.seen.append((asked.query.detach(), asked.key.detach()))
        return asked


def last_layer(model: Any, batch: dict[str, Tensor] = BATCH, **kw: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k (after rotation), v and the mixed values (B, H, T, D) of the last layer, which goes through what those
    before it did.
    """
    layer = list(attention_layers(model))[-1]
    part = model.get_submodule(layer.name)
    value, out = (
        (part.v_proj, part.o_proj)
        if hasattr(part, "v_proj")
        else (part.value, model.get_submodule(f"{layer.name[:-5]}.output.dense"))
    )
    held: dict[str, Tensor] = {}
    note = Noted()
    add_interceptor(part, note)
    hooks = [
        value.register_forward_hook(lambda m, args, y: held.update(v=y)),
        out.register_forward_pre_hook(lambda m, args: held.update(out=args[0])),
    ]
    with torch.no_grad():
        model(**batch, **kw)
    remove_interceptor(part, note)
    for hook in hooks:
        hook.remove()
    q, k = note.seen[-1]
    size = q.shape[-1]
    v, mixed = (x.unflatten(-1, (-1, size)).transpose(1, 2) for x in (held["v"], held["out"]))
    return q, k, v, mixed


def close(mixed: Tensor, map_: Tensor, v: Tensor, real: Tensor = REAL) -> None:
    expected = map_ @ v.repeat_interleave(map_.shape[1] // v.shape[1], 1)
    torch.testing.assert_close(mixed.transpose(1, 2)[real], expected.transpose(1, 2)[real], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("how", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_model_attends_as_the_mechanism_says(name: str, how: str) -> None:
    """Padded on the left, not at all, and on the right; and detaching, which leaves no trace."""
    model = llama(how)
    # in float64 eager attention itself fails on the left
    right = {**BATCH, "attention_mask": BATCH["attention_mask"].flip(1)}
    with torch.no_grad():
        before, keys = tensors(model(**right)), list(model.state_dict())
    control = SwapMechanism(name).attach(model)
    assert list(model.state_dict()) == keys
    q, k, v, mixed = last_layer(model)
    close(mixed, mechanism(name).map(q, k, causal=True, padding=REAL), v)
    whole = {"input_ids": BATCH["input_ids"]}  # no mask at all
    q, k, v, mixed = last_layer(model, whole)
    close(mixed, mechanism(name).map(q, k, causal=True), v)
    q, k, v, mixed = last_layer(model, right)
    close(mixed, mechanism(name).map(q, k, causal=True, padding=REAL.flip(1)), v, REAL.flip(1))
    with torch.no_grad():
        during = tensors(model(**right))
        control.detach()
        after = tensors(model(**right))
    assert torch.allclose(before[0], during[0], rtol=1e-5, atol=1e-5) == (name == "softmax")
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not any("locater" in key or key == "forward" for module in model.modules() for key in vars(module))


@pytest.mark.parametrize("how", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FREE)
def test_an_encoder_attends_as_the_mechanism_says(name: str, how: str) -> None:
    """Padded queries do not count where something is summed over queries."""
    model = encoder(how)
    with torch.no_grad():
        before = model(**BATCH).last_hidden_state
    control = SwapMechanism(name).attach(model)
    q, k, v, mixed = last_layer(model)
    close(mixed, mechanism(name).map(q, k, padding=REAL, query_padding=REAL), v)
    q, k, v, mixed = last_layer(model, {"input_ids": BATCH["input_ids"]})
    close(mixed, mechanism(name).map(q, k), v, torch.ones_like(REAL))
    control.detach()
    with torch.no_grad():
        assert torch.equal(model(**BATCH).last_hidden_state, before)


@pytest.mark.parametrize("name", CAUSAL)
def test_padding_tells_nothing(name: str) -> None:
    model = llama()
    SwapMechanism(name).attach(model)
    other = {**BATCH, "input_ids": torch.where(REAL, BATCH["input_ids"], 5)}
    with torch.no_grad():
        a, b = model(**BATCH).logits, model(**other).logits
    torch.testing.assert_close(a[REAL], b[REAL], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", CAUSAL)
def test_cached_keys(name: str) -> None:
    """Token by token, left-padded, as all at once."""
    model = llama()
    SwapMechanism(name).attach(model)
    positions = (REAL.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        whole = model(**BATCH, position_ids=positions).logits
        held, parts = None, []
        for start, end in ((0, 6), (6, 7), (7, 9)):
            out = model(
                input_ids=BATCH["input_ids"][:, start:end], attention_mask=BATCH["attention_mask"][:, :end],
                position_ids=positions[:, start:end], past_key_values=held, use_cache=True,
            )  # fmt: skip
            held = out.past_key_values
            parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1)[REAL], whole[REAL], rtol=1e-8, atol=1e-10)


def test_a_window_holds_and_linear_mechanisms_refuse_it() -> None:
    model = llama(name="Mistral", sliding_window=3)
    SwapMechanism("sigmoid").attach(model)
    q, k, v, mixed = last_layer(model)
    at = torch.arange(9)
    near = (at[:, None] - at < 3)[None, None]
    close(mixed, mechanism("sigmoid").map(q, k, causal=True, padding=REAL, mask=near), v)
    other = llama(name="Mistral", sliding_window=3)
    SwapMechanism("linear").attach(other)
    with pytest.raises(LocaterError, match="linear: a mask with a row per query"):
        other(**BATCH)


def test_a_linear_mechanism_has_its_own_scale() -> None:
    """OPT hands over queries that are scaled already."""
    case = next(c for c in CASES if c.label == "opt")
    model: Any = case.build().double().eval()
    with torch.no_grad():
        redraw(model)
    SwapMechanism("linear").attach(model)
    layer = list(attention_layers(model))[-1]
    part, held = model.get_submodule(layer.name), {}
    hooks = [m.register_forward_hook(lambda m, a, y, n=n: held.update({n: y})) for n, m in part.named_children()]
    mixed = part.out_proj.register_forward_pre_hook(lambda m, args: held.update(mixed=args[0]))
    with torch.no_grad():
        model(**BATCH)
    for hook in (*hooks, mixed):
        hook.remove()
    q, k, v, out = (held[n].unflatten(-1, (-1, 8)).transpose(1, 2) for n in ("q_proj", "k_proj", "v_proj", "mixed"))
    close(out, mechanism("linear").map(q, k, causal=True, padding=REAL), v)


def test_maps_are_returned_where_they_would_be() -> None:
    model = llama("eager")
    SwapMechanism("centred").attach(model)
    with torch.no_grad():
        maps = model(**BATCH, output_attentions=True).attentions
    assert len(maps) == 2
    torch.testing.assert_close(
        maps[1].sum(-1)[REAL[:, None].expand(-1, 4, -1)], torch.zeros(15 * 4).double(), atol=1e-12, rtol=0
    )
    assert bool((maps[1] < 0).any())


def test_some_layers_and_gradients() -> None:
    model = llama().float().train()
    with torch.no_grad():
        before = model(**BATCH, output_hidden_states=True).hidden_states
    control = SwapMechanism("sigmoid", layers=[1]).attach(model)
    with torch.no_grad():
        during = model(**BATCH, output_hidden_states=True).hidden_states
    assert torch.equal(before[1], during[1])
    assert not torch.equal(before[2], during[2])
    model(**BATCH, labels=BATCH["input_ids"]).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert float(control.loss()) == 0
    assert control.parameters() == []
    control.after_step()


@pytest.mark.parametrize("name", ["sigmoid", "softmax_plus_one"])
def test_one_graph_with_padding(name: str) -> None:
    model = llama(num_hidden_layers=1).float()
    with torch.no_grad():
        SwapMechanism(name).attach(model)
        expected = model(**BATCH, use_cache=False).logits
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(**BATCH, use_cache=False).logits, expected)
    torch._dynamo.reset()


# With others


def test_norm_and_temperature_come_first() -> None:
    model = llama()
    Controls([SwapMechanism("sigmoid"), Temperature(init=2.0), QKNorm(init=0.5)]).attach(model)
    q, k, v, mixed = last_layer(model)
    q, k = (x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * 0.5 for x in (q, k))
    expected = mechanism("sigmoid").map(q / 2.0, k, causal=True, padding=REAL)
    torch.testing.assert_close(
        mixed.transpose(1, 2)[REAL], (expected @ v.repeat_interleave(2, 1)).transpose(1, 2)[REAL], rtol=1e-5, atol=1e-6
    )  # gains are float32


@pytest.mark.parametrize("name", ["softmax", "softcap", "softmax_plus_one"])
def test_what_is_a_softmax_is_observed(name: str) -> None:
    model = llama()
    SwapMechanism(name).attach(model)
    with observe(model) as seen:
        q, k, _, _ = last_layer(model)
    p = mechanism(name).map(q, k, causal=True, padding=REAL)
    counted = REAL[:, None].to(p)
    entropy = (-torch.special.xlogy(p, p).sum(-1) * counted).sum((0, 2)) / counted.sum()
    mass = (p.sum(-1) * counted).sum((0, 2)) / counted.sum()
    found = [row for row in seen.rows if row.layer == 1]
    assert [row.entropy for row in found] == pytest.approx(entropy.tolist(), rel=1e-5)
    assert [row.row_mass for row in found] == pytest.approx(mass.tolist(), rel=1e-5)


def test_what_is_none_is_refused_and_a_monitor_goes_on(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = llama().float()
    SwapMechanism("sigmoid").attach(model)
    with (
        pytest.raises(
            LocaterError, match=r"sigmoid attention cannot be measured: rows of non-negative weights .* no entropy"
        ),
        observe(model),
    ):
        model(**BATCH)
    monitor = Monitor(tmp_path / "run.jsonl", every=1).attach(model.train())
    with caplog.at_level(logging.WARNING, "locater"):
        for _ in range(3):
            model(**BATCH)
            monitor.after_step()
    monitor.detach()
    assert sum("sigmoid attention cannot be measured" in r.getMessage() for r in caplog.records) == 1
    EntropyPenalty(ceiling=0.5).attach(model)
    with pytest.raises(LocaterError, match="sigmoid attention cannot be measured"):
        model(**BATCH)


def test_a_penalty_sees_the_sink() -> None:
    """The entropy that is held in a band is that of the map which acts."""
    model = llama().train()
    penalty = Controls([SwapMechanism("softmax_plus_one"), held := EntropyPenalty(ceiling=0.3)]).attach(model)
    model(**BATCH)
    with_sink = float(held.loss().detach())
    penalty.detach()
    held = EntropyPenalty(ceiling=0.3).attach(model)
    model(**BATCH)
    assert with_sink != float(held.loss().detach())


# Refusals


REFUSED = [
    (
        "llama",
        "doubly_normalized",
        r"model\.layers\.0\.self_attn: doubly_normalized attention cannot be causal: it normalises over",
    ),
    (
        "gemma2",
        "sigmoid",
        r"its attention has a soft-cap, which sigmoid does not take; layers=\[\.\.\.\] leaves it out",
    ),
    ("gpt_oss", "sigmoid", "its attention has sinks, which sigmoid does not take"),
    ("t5", "sigmoid", "its attention has a position bias, which sigmoid does not take"),
    ("bloom", "sigmoid", "BloomAttention does not use the attention interface"),
    ("bert-decoder", "doubly_normalized", "doubly_normalized attention cannot be causal"),
]


@pytest.mark.parametrize(("label", "name", "said"), REFUSED)
def test_models_that_it_is_not_for(label: str, name: str, said: str) -> None:
    model = next(c for c in CASES if c.label == label).build()
    with pytest.raises(LocaterError, match=said) as error:
        SwapMechanism(name).attach(model)
    assert "\n" not in str(error.value)
    assert not any("locater" in key for module in model.modules() for key in vars(module))


def test_cross_attention_does_not_know_padded_queries() -> None:
    case = next(c for c in CASES if c.label == "bart")
    model = case.build()
    found = list(attention_layers(model))
    cross = next(i for i, layer in enumerate(found) if layer.kind == "cross")
    with pytest.raises(LocaterError, match="sums over queries, and cross-attention is not told which are padding"):
        SwapMechanism("doubly_normalized", layers=[cross]).attach(model)
    SwapMechanism("sigmoid").attach(model.double().eval())
    with torch.no_grad():
        assert all(t.isfinite().all() for t in tensors(model(**case.batch())))


def test_names() -> None:
    with pytest.raises(
        LocaterError,
        match=r"delta attention has parameters to learn \(beta\), which this control does not make; without: softmax,",
    ):
        SwapMechanism("delta")
    with pytest.raises(LocaterError, match=r"no attention mechanism 'sigmiod': did you mean 'sigmoid'\? There are"):
        SwapMechanism("sigmiod")


def test_one_mechanism_at_a_time() -> None:
    model = llama()
    SwapMechanism("sigmoid").attach(model)
    with pytest.raises(LocaterError, match="is that of sigmoid already, and linear would replace it: use one of them"):
        SwapMechanism("linear").attach(model)
    capped = llama()
    LogitSoftcap(cap=2.0).attach(capped)
    with pytest.raises(LocaterError, match="is that of LogitSoftcap already"):
        SwapMechanism("sigmoid").attach(capped)
    own = Transformer(Shape(width=16, heads=2, kv_heads=2, layers=1, hidden=24, attention="linear"))
    with pytest.raises(LocaterError, match="is that of linear already"):
        SwapMechanism("sigmoid").attach(own)
    twice = llama()
    Controls([SwapMechanism("softcap"), LogitSoftcap(cap=2.0)]).attach(twice)
    with pytest.raises(LocaterError, match="two are not one"):
        twice(**BATCH)


def test_calls_that_it_has_no_place_for() -> None:
    model = llama("eager", attention_dropout=0.1)
    SwapMechanism("sigmoid").attach(model)
    model(**BATCH)
    with pytest.raises(
        LocaterError,
        match=r"no dropout of weights, and LlamaAttention has 0\.1: set the model's attention dropout to 0",
    ):
        model.train()(**BATCH)
    added = torch.zeros(2, 1, 9, 9, dtype=torch.float64)
    added[..., 3] = 0.5
    with pytest.raises(LocaterError, match="does not take numbers that are added to logits"):
        model.eval()(input_ids=BATCH["input_ids"], attention_mask=added)


def test_what_is_causal_only_is_not_for_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    from locater_lab.mechanisms import registry

    only = replace(mechanism("linear"), name="onward", causal="only", reason="it is a recurrence over tokens")
    monkeypatch.setitem(registry.MECHANISMS._entries, "onward", only)
    with pytest.raises(LocaterError, match="onward attention is causal only: it is a recurrence over tokens"):
        SwapMechanism("onward").attach(encoder())
    model = llama()
    with torch.no_grad():
        SwapMechanism("linear").attach(model)
        whole = model.generate(**BATCH, max_new_tokens=3, do_sample=False, pad_token_id=0)
        other = llama()
        SwapMechanism("onward").attach(other)
        assert torch.equal(other.generate(**BATCH, max_new_tokens=3, do_sample=False, pad_token_id=0), whole)
