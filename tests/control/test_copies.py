"""A copy of a model under a control computes what the model computes, whatever becomes of the control."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from locater import LocaterError
from locater.calls import attention_interface
from locater.control import (
    Control,
    Controls,
    EntropyPenalty,
    LogitSoftcap,
    QKNorm,
    SigmaReparam,
    Surgery,
    Temperature,
    carried_changes,
    forward_controls,
)
from locater_lab.mechanisms.swap import SwapMechanism
from locater_lab.train import Shape, Transformer
from tests.families.decoders import GROUPED, make, make_gpt2
from tests.parity import redraw

IDS = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1))
CONTROLS: dict[str, Callable[[], Control]] = {
    "temperature": lambda: Temperature(init=1.7),
    "qk_norm": lambda: QKNorm(init=0.7),
    "softcap": lambda: LogitSoftcap(cap=0.8),
    "mechanism": lambda: SwapMechanism("sigmoid"),
    "surgery": lambda: Surgery(no_skip=True, no_mlp=True),
    "sigma_reparam": lambda: SigmaReparam(gamma=0.5),
    "several": lambda: Controls([QKNorm(init=0.7), Temperature(init=1.7), LogitSoftcap(cap=0.8), Surgery(no_mlp=True)]),
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": make_gpt2,
    "llama": lambda: make("Llama", **GROUPED),
    "own": lambda: Transformer(Shape(vocabulary=64, layers=2, width=32, heads=4, kv_heads=2, hidden=48, length=16)),
}
pytestmark = pytest.mark.usefixtures("detached")


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        redraw(model)
    return model.eval()


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    out = model(IDS)
    found: Tensor = getattr(out, "logits", out)
    return found


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_copy_computes_what_the_model_computes(kind: str, name: str) -> None:
    model = model_of(kind)
    plain, keys = logits(model), list(model.state_dict())
    control = CONTROLS[name]().attach(model)
    changed = logits(model)
    assert not torch.equal(changed, plain)
    averaged = AveragedModel(model)
    averaged.update_parameters(model)  # the first is a copy
    ways = {
        "deepcopy": copy.deepcopy(model),
        "averaged": averaged.eval(),
        "copy of a copy": copy.deepcopy(copy.deepcopy(model)),
    }
    if name == "sigma_reparam":
        for pickled in (pickle.dumps, saved):
            with pytest.raises(
                LocaterError, match=r"SigmaReparam: a model under it cannot be pickled, .* or detach\(\) first"
            ):
                pickled(model)
    else:
        ways |= {"pickle": pickle.loads(pickle.dumps(model)), "torch.save": saved(model)}
    ours = {held.control for held in carried_changes(model)}
    assert {word.partition("(")[0] for word in ours} == {
        type(c).__name__ for c in getattr(control, "controls", [control])
    }
    control.detach()
    assert name == "sigma_reparam" or torch.equal(logits(model), plain)
    assert not carried_changes(model)
    for way, other in ways.items():
        assert torch.equal(logits(other), changed), way
        assert {held.control for held in carried_changes(other)} == ours, way
        assert name == "sigma_reparam" or way == "averaged" or list(other.state_dict()) == keys, way
    shared = {p.data_ptr() for p in model.parameters()} & {
        p.data_ptr() for other in ways.values() for p in other.parameters()
    }
    assert not shared


@pytest.mark.parametrize("kind", ["llama", "own"])
def test_parameters_of_a_copy_are_its_own(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    forward_controls._warn_about_parameters.cache_clear()
    model = model_of(kind)
    control = Temperature(init=2.0).attach(model)
    with caplog.at_level(logging.WARNING, "locater"):
        twin, another = copy.deepcopy(model), copy.deepcopy(model)
    assert len(caplog.messages) == 1
    assert "average those of locater.control.carried_changes(copy) too" in caplog.messages[0]
    before = logits(twin)
    with torch.no_grad():
        for p in control.parameters():
            p.zero_()
    assert torch.equal(logits(twin), before)
    assert not torch.equal(logits(model), before)
    theirs = [p for held in carried_changes(twin) for p in held.parameters.values()]
    with torch.no_grad():
        for mine, p in zip(theirs, control.parameters(), strict=True):
            mine.copy_(p)
    assert torch.equal(logits(twin), logits(model))
    assert torch.equal(logits(another), before)


def test_a_running_average_of_all_parameters() -> None:
    """As docs/control.md has it."""
    model = model_of("own").train()
    control = Temperature(init=2.0).attach(model)
    averaged = AveragedModel(model)
    theirs = [p for held in carried_changes(averaged) for p in held.parameters.values()]
    for _ in range(3):
        with torch.no_grad():
            for p in (*model.parameters(), *control.parameters()):
                p += 1.0
        averaged.update_parameters(model)
        with torch.no_grad():
            for mine, p in zip(theirs, control.parameters(), strict=True):
                mine.lerp_(p, 1 / int(averaged.n_averaged))
    for mine, last in (
        *zip(theirs, control.parameters(), strict=True),
        *zip(averaged.parameters(), model.parameters(), strict=True),
    ):
        torch.testing.assert_close(mine, last - 1.0)


def test_a_state_dict_holds_nothing_of_a_control() -> None:
    """So it loads into a model with the control, without it, and into a copy that carries it."""
    model, other = model_of("llama"), model_of("llama")
    plain = logits(model)
    QKNorm(init=0.7).attach(model)
    changed, twin = logits(model), copy.deepcopy(model)
    with torch.no_grad():
        for part in (other, twin):
            for p in part.parameters():
                p.zero_()
    for part in (other, twin):
        part.load_state_dict(model.state_dict())
    assert torch.equal(logits(other), plain)
    assert torch.equal(logits(twin), changed)


def test_a_control_that_is_copied_along_is_the_copys() -> None:
    """As a model that holds its control in an attribute is copied."""
    model = model_of("llama")
    plain = logits(model)
    control = QKNorm(init=0.7).attach(model)
    changed = logits(model)
    for twin, its in (copy.deepcopy((model, control)), pickle.loads(pickle.dumps((model, control)))):
        assert torch.equal(logits(twin), changed)
        assert its.state_dict().keys() == control.state_dict().keys()
        assert not {id(p) for p in its.parameters()} & {id(p) for p in control.parameters()}
        its.detach()
        assert torch.equal(logits(twin), plain)
    assert torch.equal(logits(model), changed)


def test_a_penalty_changes_no_output_and_is_not_carried() -> None:
    model = model_of("llama").train()
    control = EntropyPenalty(ceiling=0.5).attach(model)
    twin, its = copy.deepcopy((model, control))
    twin(IDS)
    assert not carried_changes(twin)
    with pytest.raises(LocaterError, match="EntropyPenalty is not attached"):
        its.loss()
    model(IDS)
    assert float(control.loss().detach()) > 0


def test_the_table_is_restored_when_the_last_copy_is_gone() -> None:
    from transformers.modeling_utils import AttentionInterface

    table = AttentionInterface._global_mapping
    gc.collect()  # copies that earlier tests made
    attention_interface.install()
    attention_interface.remove()
    model, before = model_of("llama"), dict(table)
    control = Temperature(init=2.0).attach(model)
    twin = copy.deepcopy(model)
    control.detach()
    assert dict(table) != before, "the copy still needs it"
    del twin
    gc.collect()
    assert dict(table) == before


def test_copies_may_go_while_the_table_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may run at any line: what it takes off must not end what is being put on, nor wait for its own
    thread.
    """
    from transformers.modeling_utils import AttentionInterface

    model = model_of("llama")
    control = Temperature(init=2.0).attach(model)
    twins, real = [copy.deepcopy(model)], attention_interface._tables
    control.detach()

    def collected() -> Any:
        tables = real()
        twins.clear()
        gc.collect()
        return tables

    monkeypatch.setattr(attention_interface, "_tables", collected)
    attention_interface.install()
    assert attention_interface._replaced
    assert all(table.get(name) is ours for table, name, _, ours in attention_interface._replaced)
    attention_interface.remove()
    assert not attention_interface._replaced
    assert AttentionInterface._global_mapping


def in_another_process(model: nn.Module, sent: Any) -> None:
    torch.set_num_threads(1)
    sent.put(logits(model).tolist())


@pytest.mark.slow
def test_another_process_computes_the_same() -> None:
    model = model_of("llama")
    Controls([QKNorm(init=0.7), Surgery(no_mlp=True)]).attach(model)
    context = torch.multiprocessing.get_context("spawn")
    sent = context.Queue()
    process = context.Process(target=in_another_process, args=(model, sent))
    process.start()
    found = torch.tensor(sent.get(timeout=120))
    process.join()
    torch.testing.assert_close(found, logits(model))
