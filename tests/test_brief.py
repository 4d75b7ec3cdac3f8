"""What `print` shows of data and results: a few lines, however large the model, and never a tensor."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import locater
from locater.brief import brief

ROOMS = "control discovery explain families kernels layers measures observing predict theory".split()
LABORATORY = "mechanisms models theory train".split()
FEW = 1200  # characters: eight to ten lines of a terminal


def public_dataclasses() -> list[type]:
    """The classes that locater and its rooms hand out; those that write a sentence of their own are made below."""
    rooms = [*(f"locater.{room}" for room in ROOMS), *(f"locater_lab.{room}" for room in LABORATORY)]
    modules = [locater, *map(importlib.import_module, rooms)]
    public = [getattr(module, name) for module in modules for name in getattr(module, "__all__", ())]
    made = {x for x in public if inspect.isclass(x) and is_dataclass(x)}
    return sorted(
        (x for x in made if x.__repr__ is brief or hasattr(x.__repr__, "__wrapped__")), key=lambda x: x.__name__
    )


def filled(kind: Any) -> Any:
    """An instance of which every field holds as much as it may hold of a large model."""
    made = object.__new__(kind)
    samples = {
        r"Tensor|Float\[|Bool\[": torch.rand(256, 256),
        r"tuple\[(float|int|Tensor), \.\.\.": (0.123456789,) * 256,
        r"list\[|Sequence\[": [0.123456789] * 256,
        r"dict\[|Mapping\[": {str(i): 0.123456789 for i in range(256)},
        r"^float": 0.123456789,
        r"^int": 12,
        r"^str": "model.layers.31.self_attn",
    }
    for item in fields(kind):
        found = (value for kind_of, value in samples.items() if re.search(kind_of, str(item.type)))
        object.__setattr__(made, item.name, next(found, None))
    return made


@pytest.mark.parametrize("kind", public_dataclasses(), ids=lambda kind: kind.__name__)
def test_data_of_every_public_class_is_a_few_lines(kind: type) -> None:
    shown = repr(filled(kind))
    assert len(shown) < FEW, shown
    assert "tensor(" not in shown
    assert shown.startswith(f"{kind.__name__}(")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """128 heads in 8 layers."""
    torch.manual_seed(0)
    shape = dict(n_embd=128, n_layer=8, n_head=16, vocab_size=300, n_positions=64, bos_token_id=1, eos_token_id=1)
    return GPT2LMHeadModel(GPT2Config(**shape)).eval()


def test_results_on_a_model_of_many_heads_are_a_few_lines(model: nn.Module) -> None:
    ids = torch.randint(3, 290, (4, 16))
    scan, probe, found = locater.scan(model, eigenvalues=True), locater.probe(model, ids), locater.compare(model, model)
    with locater.observe(model, outputs=True) as seen:
        model(input_ids=ids)
    paths = locater.explain.decompose(model, ids[:1])
    results = [
        *(scan, scan.rows[0], scan.verdicts[0], probe, probe.rows[0], probe.streams[0], probe.statistics),
        *(probe.statistics.inputs[0], found, found.rows[0], seen, seen.rows[0]),  # type: ignore[union-attr]
        *(paths, paths.through_heads(), paths.by_length(), locater.explain.gradient_input(model, ids[:1])),
        *(locater.attention_layers(model)[0], locater.layers.effective(locater.attention_layers(model)[0])),
        locater.moments(torch.rand(64, 8, 32), torch.rand(64, 8, 32)),
        locater.explanations(Path(str(locater.__file__)).parent / "demo", "the documentation"),
    ]
    for result in results:
        shown = repr(result)
        assert len(shown) < FEW, shown
        assert shown.count("\n") < 8, shown
        assert "tensor(" not in shown, shown
        assert not re.search(r"object at 0x", shown), shown
