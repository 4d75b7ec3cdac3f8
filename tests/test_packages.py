"""Two packages: the instrument never loads the laboratory, which registers what it adds by entry points."""

from __future__ import annotations

import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

import locater
from locater.families.registry import BY_TYPE
from locater.registry import Registry, offered_entries
from tests.processes import python

DEMO = str(files("locater") / "demo")
USER = f"""
import sys, torch, locater
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=64))
ids = torch.randint(64, (2, 12))
locater.scan({DEMO!r}); locater.scan(model); locater.compare({DEMO!r}, {DEMO!r})
with locater.observe(model.eval()) as seen:
    model(ids)
locater.probe(model, torch.randint(64, (256,)), length=32)
locater.explain.decompose(model, {{"input_ids": ids[:1]}})
control = locater.LocAteR().attach(model.train())
control.loss().backward()
control.detach()
monitor = locater.Monitor(sys.argv[1] + "/log.jsonl", every=1).attach(model)
loss = model(ids, labels=ids).loss
loss.backward()
monitor.after_step(loss=loss)
monitor.detach()
print(sorted(name for name in sys.modules if name.startswith("locater_lab")))
"""


def test_a_user_of_the_instrument_never_loads_the_laboratory(tmp_path: Path) -> None:
    done = subprocess.run([python(), "-c", USER, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_command_line_of_the_instrument_does_not_either() -> None:
    code = f"import sys; from locater.cli import main\nsys.argv[1:] = ['scan', {DEMO!r}]\ntry: main()\nexcept SystemExit: pass\n"
    code += "print([name for name in sys.modules if name.startswith('locater_lab')])"
    done = subprocess.run([python(), "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_what_the_laboratory_adds_is_offered_and_loaded_by_name() -> None:
    assert set(offered_entries("commands")) >= {"train", "reproduce"}
    assert BY_TYPE["locater"].model_types == ("locater", "locater_variant")
    assert {"locater", "locater_variant"} <= set(locater.families.families())


def test_an_entry_of_a_group_is_added_when_it_is_asked_for() -> None:
    registry: Registry[object] = Registry("control", group="controls")
    assert list(registry) == []
    assert "mechanism" in registry
    assert registry["mechanism"].__name__ == "SwapMechanism"  # type: ignore[attr-defined]
    assert list(registry) == ["mechanism"]
    with pytest.raises(locater.LocaterError, match="did you mean 'mechanism'"):
        registry.lookup("mechanisn")
