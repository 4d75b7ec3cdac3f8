"""Whether a control takes a model can be asked before: the answer is what `attach` does, and nothing is changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import locater
from locater import LocaterError
from locater.control import CONTROLS, Control
from tests.families.decoders import GROUPED, SHAPE, make

MODELS: dict[str, Any] = {
    "llama": lambda: make("Llama", **GROUPED),
    "qwen3": lambda: make("Qwen3", **GROUPED),
    "gemma2": lambda: make("Gemma2", **GROUPED, head_dim=8),
    "gpt_neox": lambda: make("GPTNeoX", **SHAPE),
    "opt": lambda: make("OPT", **SHAPE, word_embed_proj_dim=32, ffn_dim=48),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, batch_first=True), 2, enable_nested_tensor=False
    ),
    "doubled": lambda: _doubled(make("Llama", **GROUPED)),
    "frozen": lambda: make("Llama", **GROUPED).requires_grad_(False),
    "no attention": lambda: nn.Sequential(nn.Linear(4, 4)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "EntropyPenalty": {"floor": 0.2},
    "Surgery": {"no_mlp": True},
}
NAMES = [
    "EntropyPenalty", "LocAteR", "LogitSoftcap", "Mimetic", "QKClip", "QKNorm", "SigmaReparam", "Surgery", "Temperature",
]  # fmt: skip


def _doubled(model: Any) -> Any:
    class Double(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    torch.nn.utils.parametrize.register_parametrization(model.model.layers[1].self_attn.k_proj, "weight", Double())
    return model


def form(model: nn.Module) -> Any:
    """Modules with their attributes and hooks, tensors with their identities and versions."""
    modules = [
        (name, type(part), sorted(vars(part)), len(part._forward_pre_hooks)) for name, part in model.named_modules()
    ]
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return modules, [(name, id(x), x._version, x.requires_grad, x.grad) for name, x in tensors.items()]


def test_every_control_has_a_name_at_the_top() -> None:
    ours = [
        kind for kind in CONTROLS.entries() if kind.__module__.startswith("locater.")
    ]  # other tests register theirs
    assert sorted(NAMES) == sorted(kind.__name__ for kind in ours)
    for name in NAMES:
        assert getattr(locater, name) is getattr(locater.control, name)
        assert name in locater.__all__


@pytest.mark.parametrize("label", MODELS)
def test_what_is_asked_before_is_what_attaching_does(label: str) -> None:
    torch.manual_seed(0)
    answers = {}
    for name in NAMES:
        model = MODELS[label]()
        control: Control = getattr(locater, name)(**OPTIONS.get(name, {}))
        before, values = form(model), copy.deepcopy({key: x.clone() for key, x in model.state_dict().items()})
        answers[name] = control.can_attach(model)
        assert form(model) == before, name
        assert all(torch.equal(x, values[key]) for key, x in model.state_dict().items())
        try:
            control.attach(model)
        except LocaterError:
            assert not answers[name], name
        else:
            assert answers[name], name
            assert not control.can_attach(model)  # it is attached
            control.detach()
    assert any(answers.values()) == (label != "no attention")
    if label == "doubled":
        assert not answers["QKClip"]
