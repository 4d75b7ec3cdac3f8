"""`locater train --attention NAME`: blocks attend as the mechanism says, are read back, and are measured rightly or not
at all.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import locater
from locater import LocaterError, attention_layers, observe
from locater.control import EntropyPenalty, LogitSoftcap, Surgery
from locater.runs.record_sinks import read_run
from locater_lab.mechanisms import mechanism, mechanisms
from locater_lab.mechanisms.stack import parse_attention
from locater_lab.models.family import UNREAD
from locater_lab.models.transformer import rotate
from locater_lab.train import Plan, Shape, Transformer, load, run, sweep
from locater_lab.train import checkpoint as checkpoints
from locater_lab.train.controls_and_conversion import check_controls
from locater_lab.train.map_measures_and_diverged_layer import find_diverged_layer, why_unread
from tests.conftest import Result as Ran
from tests.lab.train.test_parts import TINY, corpus
from tests.lab.train.test_runs import Cut, cut_at, weights
from tests.parity import redraw

FREE = [m.name for m in mechanisms() if not (m.has_parameters or m.needs)]
READ = ["softmax", "softcap", "softmax_plus_one"]
SET = (  # learned ones, and settings, for stacks of two layers
    *(m.name for m in mechanisms() if m.name not in FREE), "fastmax(order=1)", "softcap(cap=3)", "gated(per=element, position=value)",
    "gated(from_input=False)", "gated(additive=True)", "multiformer(kinds=flcl)", "binary(span=0)", "hybrid(layout=1:1)",
    "hybrid(layout=LS, linear=linear, full=gated)",
)  # fmt: skip
CASES = [
    (name, causal) for name in FREE for causal in (True, False) if not (causal and mechanism(name).causal == "never")
]
IDS = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1))
SMALL = dict(vocabulary=64, layers=2, width=32, heads=4, kv_heads=2, hidden=48, length=16)


def model_of(attention: str, causal: bool = True, **kw: Any) -> Transformer:
    model = Transformer(Shape(**{**SMALL, "attention": attention, "causal": causal, **kw}))  # type: ignore[arg-type]
    with torch.no_grad():
        redraw(model)
    return model.double().eval()


def parts(model: Transformer) -> list[Any]:
    return [block.self_attn for block in model.model.layers]


def seen_by(model: Transformer, layer: int) -> Tensor:
    """What goes into a layer's attention."""
    held: dict[str, Tensor] = {}
    hook = parts(model)[layer].register_forward_pre_hook(lambda m, args: held.update(x=args[0]))
    with torch.no_grad():
        model(IDS)
    hook.remove()
    return held["x"]


def operands(model: Transformer, layer: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v of a layer as they meet, from its input, and what goes into its output map."""
    block: Any = model.model.layers[layer]
    held: dict[str, Tensor] = {}
    hooks = [
        block.self_attn.register_forward_pre_hook(lambda m, args: held.update(x=args[0])),
        block.self_attn.o_proj.register_forward_pre_hook(lambda m, args: held.update(out=args[0])),
    ]
    with torch.no_grad():
        model(IDS)
    for hook in hooks:
        hook.remove()
    part, T = block.self_attn, IDS.shape[1]
    q, k, v = (m(held["x"]).unflatten(-1, (-1, 8)).transpose(1, 2) for m in (part.q_proj, part.k_proj, part.v_proj))
    turn = model.model.cos[:T], model.model.sin[:T]
    return rotate(q, *turn), rotate(k, *turn), v, held["out"]


@pytest.mark.parametrize(("name", "causal"), CASES)
def test_blocks_attend_as_the_mechanism_says(name: str, causal: bool) -> None:
    q, k, v, out = operands(model_of(name, causal), layer=1)
    map_ = mechanism(name).map(q, k, causal=causal)
    expected = (map_ @ v.repeat_interleave(2, 1)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)


def can_look_ahead(text: str) -> bool:
    return any(m.mechanism.causal == "never" for m in parse_attention(text, 2))


@pytest.mark.parametrize("text", SET)
def test_blocks_attend_by_modules_and_settings(text: str) -> None:
    """What reaches the output map is the mechanism, on operands made here, with what it has learned."""
    model = model_of(text, causal=not can_look_ahead(text))
    for layer in (0, 1):
        q, k, v, out = operands(model, layer)
        part: Any = model.model.layers[layer].self_attn
        held, x = part.mechanism, seen_by(model, layer)
        if part.attention == "differential":
            q, k, _ = part.operands(x, (model.model.cos[:9], model.model.sin[:9]))
        if held is None:
            expected = mechanism(part.attention)(q, k, v, causal=part.causal)
        elif text == "gated(additive=True)":
            gates = functional.silu(x @ held.gate.weight.T).unflatten(-1, (4, -1)).transpose(1, 2)
            expected = mechanism("softmax")(q, k, v, causal=True) + gates
        else:
            expected = mechanism(part.attention)(q, k, v, causal=part.causal, **held.options(q, k, x))
            if part.attention == "differential":  # the norm behind it is the module's
                expected = (1 - held.lam_init) * functional.rms_norm(expected, (8,), held.gain, 1e-5)
        torch.testing.assert_close(out, expected.transpose(1, 2).flatten(2), rtol=1e-10, atol=1e-12)


def test_settings_are_heard() -> None:
    texts = [
        "softcap",
        "softcap(cap=3)",
        "gated",
        "gated(per=element)",
        "hybrid(layout=LS)",
        "hybrid(layout=SL)",
        "binary",
        "binary(span=0)",
    ]
    sizes = [sum(p.numel() for p in model_of(text).parameters()) for text in texts]
    assert sizes[2] < sizes[3]
    assert sizes[6] > sizes[7]
    assert [part.attention for part in parts(model_of("hybrid(layout=LS)"))] == ["gated_delta", "softmax"]
    wide, capped = model_of("softcap"), model_of("softcap(cap=3)")
    capped.load_state_dict(wide.state_dict())
    part = parts(wide)[0]
    part.q_proj.weight.data *= 40
    parts(capped)[0].q_proj.weight.data *= 40
    with torch.no_grad():
        assert not torch.allclose(wide(IDS), capped(IDS))
    with observe(capped) as seen, torch.no_grad():
        capped(IDS)
    assert 2.9 < max(row.max_logit or 0 for row in seen.rows) <= 3.0 + 1e-6


def test_halves_of_a_differential_head_turn_alone() -> None:
    """Logits of each half depend on the distance of two tokens, not on where they are."""
    x = torch.randn(1, 1, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).expand(1, 9, 32)
    angle = torch.arange(9)[:, None] * 1e4 ** (-torch.arange(0, 8, 2).double() / 8)
    with torch.no_grad():
        q, k, _ = parts(model_of("differential"))[0].operands(x, (angle.cos(), angle.sin()))
    for half in (slice(0, 4), slice(4, 8)):
        logits = (q[..., half] @ k.repeat_interleave(2, 1)[..., half].mT)[0, 0]
        for distance in range(-3, 4):
            along = logits.diagonal(distance)
            torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-6, atol=1e-8)
        assert float((logits - logits[0, 0]).abs().max()) > 1e-3


@pytest.mark.parametrize("text", [text for text in SET if not can_look_ahead(text)])
def test_nothing_after_a_token_changes_it(text: str) -> None:
    model, other = model_of(text), IDS.clone()
    other[:, 5:] = (other[:, 5:] + 1) % 64
    with torch.no_grad():
        torch.testing.assert_close(model(IDS)[:, :5], model(other)[:, :5], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("text", SET)
def test_modules_learn_in_half_precision_and_are_saved(text: str, tmp_path: Path) -> None:
    model = model_of(text, causal=not can_look_ahead(text)).float()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(IDS, IDS)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    for part in parts(model):
        if part.mechanism is not None and (own := list(part.mechanism.parameters())):
            assert any(bool(p.grad.any()) for p in own)
    path = checkpoints.save(tmp_path, "model", model)
    back = load(path)
    assert back.shape == model.shape
    with torch.no_grad():
        assert torch.equal(back(IDS), model(IDS))
    if any(m.name in UNREAD for m in model.shape.by_layer):
        with pytest.raises(LocaterError, match="attention is not read"):
            locater.scan(path)
        return
    assert len(locater.scan(path).rows) == 8
    wide = model.double()
    for index, layer in enumerate(attention_layers(wide)):
        held: dict[str, Tensor] = {}
        block: Any = wide.model.layers[index]
        hooks = [
            block.register_forward_pre_hook(lambda m, args, held=held: held.update(x=args[0])),
            block.self_attn.register_forward_hook(lambda m, args, y, held=held: held.update(y=y)),
        ]
        with torch.no_grad():
            wide(IDS)
        for hook in hooks:
            hook.remove()
        torch.testing.assert_close(layer.output(held["x"]), held["y"], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "changes",
    [{"norm": "sandwich"}, {"norm": "post"}, {"norm": "none"}, {"fusion": "gate"}, {"mlp": "none"}, {"mlp": "linear"}],
)
def test_other_blocks(changes: dict[str, str], tmp_path: Path) -> None:
    """Norms, fusion and MLPs by hand, saved and read again; surgery knows them."""
    torch.manual_seed(0)
    model = model_of("softmax", **changes)
    stack: Any = model.model
    norm, mlp = changes.get("norm", "pre"), changes.get("mlp", "swiglu")

    def added(x: Tensor, y: Tensor, behind: Any) -> Tensor:
        return behind(x + y) if norm == "post" else x + (behind(y) if norm == "sandwich" else y)

    with torch.no_grad():
        x, states = stack.embed_tokens(IDS), []
        for block in stack.layers:
            read = x if norm in ("post", "none") else block.input_layernorm(x)
            x = added(x, block.self_attn(read, (stack.cos[:9], stack.sin[:9])), block.attention_out_norm)
            if mlp != "none":
                read = x if norm in ("post", "none") else block.post_attention_layernorm(x)
                up, down = block.mlp.up_proj.weight, block.mlp.down_proj.weight
                bent = (
                    read @ up.T
                    if mlp == "linear"
                    else functional.silu(read @ block.mlp.gate_proj.weight.T) * (read @ up.T)
                )
                x = added(x, bent @ down.T, block.mlp_out_norm)
            states.append(x)
        if "fusion" in changes:
            stacked = torch.stack(states)
            shares = (stacked @ stack.fusion.weight).softmax(0)
            x = (shares[..., None] * stacked).sum(0)
        torch.testing.assert_close(model(IDS), stack.norm(x) @ model.lm_head.weight.T, rtol=1e-10, atol=1e-12)
        path = checkpoints.save(tmp_path, "model", model.float())
        assert torch.equal(load(path)(IDS), model(IDS))
    assert model.config.model_type == "locater_variant"
    before, control = model(IDS), Surgery(no_skip=True).attach(model)
    assert not torch.equal(model(IDS), before)
    control.detach()
    assert torch.equal(model(IDS), before)
    wide = model.double()
    held: dict[str, Tensor] = {}
    # what enters the norm in front of attention
    enters = stack.layers[0].mlp_out_norm if norm == "post" else stack.layers[1]
    hooks = [
        stack.layers[1].self_attn.register_forward_hook(lambda m, args, y: held.update(y=y)),
        enters.register_forward_pre_hook(lambda m, args: held.update(stream=args[0])),
    ]
    with torch.no_grad():
        wide(IDS)
    for hook in hooks:
        hook.remove()
    layer = list(attention_layers(wide))[1]
    torch.testing.assert_close(layer.output(held["stream"]), held["y"], rtol=1e-6, atol=1e-8)


def test_softmax_is_what_it_was() -> None:
    """To the bit, and the same call: nothing of the registry is reached."""
    model = model_of("softmax")
    q, k, v, out = operands(model)
    plain = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=8**-0.5, enable_gqa=True)
    assert torch.equal(out, plain.transpose(1, 2).flatten(2))
    assert model.config == Shape(**SMALL).config()  # type: ignore[arg-type]
    assert model.config.model_type == "llama"


@pytest.mark.parametrize("name", [n for n, causal in CASES if causal])
def test_a_later_token_changes_nothing_before_it(name: str) -> None:
    model, other = model_of(name), IDS.clone()
    other[:, 5:] = (other[:, 5:] + 1) % 64
    with torch.no_grad():
        a, b = model(IDS), model(other)
    torch.testing.assert_close(a[:, :5], b[:, :5], rtol=1e-9, atol=1e-10)
    assert not torch.equal(a[:, 5:], b[:, 5:])


@pytest.mark.parametrize(("name", "causal"), CASES)
def test_half_precision_and_gradients(name: str, causal: bool) -> None:
    """Under autocast a mechanism chooses its own precision, and hands on what came."""
    model = model_of(name, causal).float()
    whole = model(IDS)
    with torch.autocast("cpu", torch.bfloat16):
        half = model(IDS)
    assert half.dtype == torch.bfloat16
    assert float((half - whole).detach().norm() / whole.detach().norm()) < 0.1
    model(IDS, IDS).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    "name",
    [
        "softcap",
        "learned_sink",
        "gated",
        "hybrid(layout=1:1)",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("sigmoid", "linear", "softmax_plus_one")),
    ],
)
def test_one_graph(name: str) -> None:
    model = model_of(name) if "hybrid" in name else model_of(name, layers=1)
    with torch.no_grad():
        expected = model(IDS)
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(IDS), expected)
        torch._dynamo.reset()
        if name in (*READ, "learned_sink"):  # observed too
            with observe(model) as seen:
                torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(IDS), expected)
            assert seen.rows[0].entropy is not None
    torch._dynamo.reset()


# On disk


@pytest.mark.parametrize("name", ["sigmoid", "softcap", "linear"])
def test_a_checkpoint_says_how_it_attends(tmp_path: Path, name: str) -> None:
    model = model_of(name).float()
    path = checkpoints.save(tmp_path, "model", model)
    config = json.loads((path / "config.json").read_text())
    assert (config["model_type"], config["attention"]) == ("locater", name)
    back = load(path)
    assert back.shape == model.shape
    with torch.no_grad():
        assert torch.equal(back(IDS), model(IDS))
    from transformers import AutoModelForCausalLM

    with pytest.raises(ValueError, match="locater"):
        AutoModelForCausalLM.from_pretrained(path)


def test_a_scan_reads_the_same_maps(tmp_path: Path) -> None:
    """Query-key maps are a matter of the weights."""
    plain = model_of("softmax").float()
    rows = locater.scan(checkpoints.save(tmp_path, "softmax", plain)).rows
    for name in ("sigmoid", "softcap", "softmax_plus_one", "centred"):
        other = Transformer(replace(plain.shape, attention=name))
        other.load_state_dict(plain.state_dict())
        found = locater.scan(checkpoints.save(tmp_path, name, other))
        if name in READ:
            assert found.rows == rows
            continue
        assert [(row.M, row.S, row.F, row.stable_rank) for row in found.rows] == [
            (row.M, row.S, row.F, row.stable_rank) for row in rows
        ]
        assert {(row.expected_entropy, row.residual_kept, row.localization) for row in found.rows} == {
            (None, None, None)
        }
        assert {row.flags for row in found.rows} == {()}, "what flags mean is said of a softmax"
        assert any(
            note.startswith(f"{name} attention: its weights are no softmax") for note in found.assumptions["notes"]
        )


def test_a_model_saved_before_is_softmax(tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path, "model", model_of("softmax", causal=False).float())
    config = json.loads((path / "config.json").read_text())
    assert config.pop("attention") == "softmax"
    (path / "config.json").write_text(json.dumps(config))
    assert load(path).shape.attention == "softmax"


# What is measured


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("causal", [True, False])
def test_what_is_a_softmax_is_measured(name: str, causal: bool) -> None:
    model = model_of(name, causal)
    q, k, _, _ = operands(model)
    if name == "softcap":
        model.model.layers[0].self_attn.q_proj.weight.data *= 40  # type: ignore[union-attr, operator]
        q = q * 40
    p = mechanism(name).map(q, k, causal=causal)
    with observe(model) as seen, torch.no_grad():
        model(IDS)
    found = [row for row in seen.rows if row.layer == 0]
    entropy = -torch.special.xlogy(p, p).sum(-1).mean((0, 2))
    assert [row.entropy for row in found] == pytest.approx(entropy.tolist(), rel=1e-5)
    assert [row.row_mass for row in found] == pytest.approx(p.sum(-1).mean((0, 2)).tolist(), rel=1e-5)
    if name == "softcap":
        assert max(row.max_logit or 0 for row in found) <= 50 * (1 + 1e-6)
        assert all(layer.softcap == 50 for layer in attention_layers(model))
    if name == "softmax_plus_one":
        assert all(row.row_mass is not None and row.row_mass < 1 for row in found)


@pytest.mark.parametrize(("name", "causal"), CASES)
def test_a_layer_that_is_read_attends_as_its_block_does(name: str, causal: bool) -> None:
    model = model_of(name, causal)
    q, k, _, _ = operands(model)
    block, layer, held = model.model.layers[0], next(iter(attention_layers(model))), {}
    hooks = [
        block.register_forward_pre_hook(lambda m, args: held.update(x=args[0])),
        block.self_attn.register_forward_hook(lambda m, args, y: held.update(y=y)),  # type: ignore[union-attr]
    ]
    with torch.no_grad():
        model(IDS)
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(
        layer.attention(held["x"]), mechanism(name).map(q, k, causal=causal), rtol=1e-6, atol=1e-9
    )
    torch.testing.assert_close(layer.output(held["x"]), held["y"], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", [name for name in FREE if name not in READ])
def test_what_is_none_is_refused_with_a_reason(name: str) -> None:
    model = model_of(name, causal=mechanism(name).causal != "never")
    unsummed = mechanism(name).kind in ("signed", "non-negative")
    said = "do not sum to 1 and have no entropy; their mass is" if unsummed else r"its weights are no softmax of q\.k"
    with pytest.raises(LocaterError, match=rf"{name} attention cannot be measured: .*{said}") as error, observe(model):
        model(IDS)
    assert "\n" not in str(error.value)
    assert why_unread(model) == str(error.value)
    with torch.no_grad():
        model(IDS)  # and is none the worse for it


def test_controls_that_need_a_softmax_are_refused() -> None:
    model = model_of("sigmoid").train()
    for control in (EntropyPenalty(ceiling=0.5), LogitSoftcap(cap=2.0)):
        control.attach(model)
        with pytest.raises(LocaterError, match="sigmoid attention cannot be measured"):
            model(IDS)
        control.detach()
    with pytest.raises(LocaterError, match=r"already capped at 50\.0"):
        LogitSoftcap(cap=2.0).attach(model_of("softcap"))


@pytest.mark.parametrize("control", ["qk_clip", "entropy_penalty(ceiling=0.5)", "logit_softcap(cap=2)", "qk_norm"])
def test_a_run_under_them_is_refused_before_it_begins(
    tmp_path: Path, control: str, caplog: pytest.LogCaptureFixture
) -> None:
    held = plan(tmp_path, attention="sigmoid", control=(control,))
    with pytest.raises(LocaterError) as error:
        run(held)
    assert str(error.value).startswith(
        f"--control {control}: it needs the logits of a softmax, and sigmoid attention has none: "
    )
    assert not caplog.records, "no word of a run that goes on"
    with pytest.raises(LocaterError, match="needs the logits of a softmax"):
        sweep(replace(held, attention="softmax"), {"attention": ["softmax", "sigmoid"]})
    assert not (tmp_path / "run").exists()


def test_what_a_control_needs_is_asked_of_its_layers() -> None:
    mixed, whole = ["gated_delta", "softmax"], ["softmax", "learned_sink"]
    check_controls(["logit_softcap(cap=2, layers=[1])", "qk_norm(init=1.0)", "locater"], mixed)
    check_controls(["qk_norm", "mechanism(name=sigmoid)"], whole)
    with pytest.raises(LocaterError, match=r"gated_delta attention has none: choose its layers=\[...\], leave it out"):
        check_controls(["logit_softcap(cap=2)"], mixed)
    with pytest.raises(LocaterError, match=r"--control qk_norm: .* give it init=1\.0, "):
        check_controls(["qk_norm"], ["sigmoid"])
    for texts in (["qk_clip", "mechanism(name=sigmoid)"], ["mechanism(name=sigmoid, layers=[1])", "qk_clip"]):
        with pytest.raises(LocaterError, match=r"--control qk_clip: .* sigmoid attention has none"):
            check_controls(texts, whole)


def test_what_failed_is_named_without_logits() -> None:
    model = model_of("sigmoid")
    assert find_diverged_layer(model, [(IDS, IDS)]) == "all outputs of attention are finite"
    part = model.model.layers[1].self_attn
    assert isinstance(part, nn.Module)
    part.q_proj.weight.data[9] = torch.nan  # type: ignore[union-attr, index]
    assert find_diverged_layer(model, [(IDS, IDS)]) == "the outputs of model.layers.1.self_attn went first"
    assert not part._forward_hooks


# Runs


def plan(folder: Path, **changes: Any) -> Plan:
    text = folder / "corpus.txt"
    held = {**TINY, "corpus": (str(text if text.exists() else corpus(folder)),), "out": str(folder / "run"), "log": 1}
    return Plan(**{**held, "steps": 6, "checkpoint": 2, "evaluate": 3, "observe": 2, **changes})


def test_a_run_goes_on_exactly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "locater"):
        whole = run(plan(tmp_path, attention="sigmoid", kv_heads=1))
    said = [r.getMessage() for r in caplog.records if "sigmoid attention cannot be measured" in r.getMessage()]
    assert len(said) == 1, "told once"
    assert whole.report_entropy is None
    log = read_run(tmp_path / "run")
    assert log.ended
    assert [step for step, _ in log.losses] == [1, 2, 3, 4, 5, 6]
    assert load(whole.model).shape.attention == "sigmoid"
    again = replace(whole.plan, out=str(tmp_path / "cut"))
    with pytest.raises(Cut):
        run(again, cut_at(3))
    result = run(again)
    assert weights(result) == weights(whole)
    assert (result.report_loss, result.history) == (whole.report_loss, whole.history)
    assert weights(run(replace(whole.plan, out=str(tmp_path / "plain"), attention="softmax"))) != weights(whole)
    with pytest.raises(LocaterError, match=r"holds another run .attention='sigmoid', here 'linear'"):
        run(replace(again, attention="linear"))


def test_a_full_disk_costs_records_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from locater.runs.record_sinks import JsonlSink

    def full(self: JsonlSink, line: bytes) -> None:
        raise LocaterError("locater.jsonl: cannot be written (No space left on device)")

    monkeypatch.setattr(JsonlSink, "_append", full)
    result = run(plan(tmp_path, attention="sigmoid", steps=2))
    assert result.report_loss > 0
    assert sum("goes on without records" in r.getMessage() for r in caplog.records) == 1


def test_a_measured_run_and_other_tasks(tmp_path: Path) -> None:
    result = run(plan(tmp_path, attention="softmax_plus_one"))
    assert result.report_entropy is not None
    assert read_run(tmp_path / "run").steps[0]["heads"]["entropy"][1][1] > 0
    other = run(plan(tmp_path, task="masked", attention="doubly_normalized", out=str(tmp_path / "masked"), steps=2))
    assert load(other.model).shape.attention == "doubly_normalized"


def test_a_sweep_over_mechanisms(tmp_path: Path) -> None:
    lines = sweep(plan(tmp_path, steps=2, evaluate=0), {"attention": ["softmax", "sigmoid"]})
    assert [(line["name"], line["status"]) for line in lines] == [
        ("attention=softmax", "done"),
        ("attention=sigmoid", "done"),
    ]
    assert lines[0]["report_loss"] != lines[1]["report_loss"]


REFUSED = [
    (
        "causal",
        "doubly_normalized",
        "task=causal: doubly_normalized attention cannot be causal: it normalises over queries first",
    ),
    ("masked", "gated_delta", "task=masked: gated_delta attention is causal only: it is a recurrence"),
    ("masked", "hybrid(layout=1:1)", "task=masked: gated_delta attention is causal only"),
    ("causal", "sofmax", "no attention mechanism 'sofmax'; there are softmax, softcap"),
    ("causal", "softcap(50)", "attention 'softcap(50)': write it as name or name(option=value, ...)"),
    ("causal", "fastmax(degree=1)", "fastmax has no setting 'degree'; it has order, norm"),
    ("causal", "fastmax(order=7)", "order=7: 1 or 2"),
    ("causal", "differential(depth=2)", "differential has no setting 'depth'"),
    ("masked", "multiformer(kinds=xyz)", "kinds='xyz'"),
    ("causal", "softcap(cap=-1)", "cap=-1"),
    ("causal", "softcap(cap=word)", "cap=word: give a finite number above 0"),
    ("causal", "softcap(cap=nan)", "cap=nan: give a finite number above 0"),
    ("causal", "softcap(cap=1e400)", "cap=inf: give a finite number above 0"),
    ("causal", "learned_sink(sinks=3)", "learned_sink has no setting 'sinks'"),
    ("causal", "gated(position=end)", "position='end': choose output, value, key, query"),
    ("causal", "hybrid", "attention 'hybrid': hybrid(layout=3:1, full=softmax, linear=gated_delta)"),
    ("causal", "hybrid(layout=3:1, full=linear)", "full='linear' has linear cost"),
    ("causal", "binary(grid=[2, 3])", "binary: a grid of 2 x 3 has 6 tokens, and there are 128 keys"),
    ("masked", "multiformer(taps=-1)", "multiformer: a value that cannot be among taps=-1"),
]


@pytest.mark.parametrize(("task", "name", "said"), REFUSED)
def test_what_does_not_fit_is_refused(task: str, name: str, said: str) -> None:
    with pytest.raises(LocaterError) as error:
        Plan(task=task, attention=name)
    assert str(error.value).startswith(f"--attention {name}: {said}")
    assert "\n" not in str(error.value)


def test_what_is_causal_only_is_for_causal_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    from locater_lab.mechanisms import registry

    only = replace(mechanism("linear"), name="onward", causal="only", reason="it is a recurrence over tokens")
    monkeypatch.setitem(registry.MECHANISMS._entries, "onward", only)
    assert Plan(attention="onward").attention == "onward"
    with pytest.raises(
        LocaterError, match="task=masked: onward attention is causal only: it is a recurrence over tokens"
    ):
        Plan(task="masked", attention="onward")


def test_the_command(tmp_path: Path, run: Callable[..., Ran]) -> None:
    text = corpus(tmp_path)
    tiny = [part for name, value in TINY.items() for part in (f"--{name}", value)]
    args = ("train", "--corpus", text, *tiny, "--steps", 2, "--observe", 1)
    done = run(*args, "--out", tmp_path / "run", "--attention", "sigmoid")
    assert done.status == 0
    assert "entropy" not in done.out
    assert run("scan", tmp_path / "run" / "model").status == 0
    assert f"Now: locater scan {tmp_path / 'run' / 'model'}" in done.out
    for name in ("differential", "qk_norm"):
        unread = run(*args, "--out", tmp_path / name, "--attention", name)
        assert unread.status == 0, unread.err
        assert unread.out.endswith(f"Model written to {tmp_path / name / 'model'}.\n")
        assert run("scan", tmp_path / name / "model").status == 2
    refused = run(*args, "--out", tmp_path / "no", "--attention", "doubly_normalized")
    assert refused.status == 2
    assert refused.err.count("\n") == 1
    assert not (tmp_path / "no").exists()
    swept = run(*args, "--out", tmp_path / "sweep", "--sweep", "attention=softmax,sigmoid")
    assert swept.status == 0


def test_own_blocks_are_probed_where_they_are_a_softmax(tmp_path: Path, run: Callable[..., Ran]) -> None:
    """From the folder that a run leaves, whose type transformers does not know; others are refused with the reason."""
    from locater_lab.train import run as trained

    made = {
        name: trained(plan(tmp_path, attention=name, out=str(tmp_path / name), steps=2))
        for name in ("learned_sink", "sigmoid")
    }
    text = tmp_path / "corpus.txt"
    args = ("probe", made["learned_sink"].model, "--text", text, "--length", TINY["length"])
    done = run(*args, "--json", "-")
    assert done.status == 0, done.err
    heads = json.loads(done.out)["heads"]
    assert all(0 < row["row_mass"] < 1 for row in heads)
    refused = run("probe", made["sigmoid"].model, "--text", text, "--length", TINY["length"])
    assert refused.status == 2
    assert "sigmoid attention cannot be measured" in refused.err
    assert run("probe", made["learned_sink"].model, "--text", text, "--length", 10**4).status == 2
    pictures = Transformer(
        Shape(**{**SMALL, "length": 4, "vocabulary": 3}, causal=False, positions="learned", image=(8, 8, 1))
    )  # type: ignore[arg-type]
    images = run("probe", checkpoints.save(tmp_path, "images", pictures))
    assert images.status == 2
    assert "observe(locater_lab.train.load(" in images.err


def test_padding_is_refused() -> None:
    model = model_of("softmax")
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS, attention_mask=torch.ones_like(IDS)), model(IDS))
    with pytest.raises(LocaterError, match="no padding"):
        model(input_ids=IDS, attention_mask=torch.zeros_like(IDS))
    with pytest.raises(LocaterError, match="inputs of one length"):
        model()
