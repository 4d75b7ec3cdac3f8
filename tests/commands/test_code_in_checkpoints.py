"""Code that comes with a checkpoint is never run, whatever anyone answers to transformers' question."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from locater.commands.load_model import load_model
from locater.commands.scanning import scan
from locater.errors import LocaterError
from locater.inputs.tokenizer import tokenizer_for

CODE = """
from pathlib import Path
Path({marker!r}).write_text("this code ran")
from transformers import PretrainedConfig, PreTrainedTokenizerFast
class Own(PretrainedConfig):
    model_type = "homemade"
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint whose configuration and tokenizer name Python code in the same folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "own.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    config = {"model_type": "homemade", "auto_map": {"AutoConfig": "own.Own", "AutoModel": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    names = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "model.safetensors").write_bytes(bytes([2, 0, 0, 0, 0, 0, 0, 0]) + b"{}")
    return folder


@pytest.mark.parametrize(
    "read", [load_model, lambda path: tokenizer_for(None, path), scan], ids=["model", "tokenizer", "scan"]
)
def test_code_in_a_checkpoint_is_not_run(
    read: Callable[[Any], Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda question="": "y")  # transformers asks on a terminal
    with pytest.raises(LocaterError):
        read(str(folder))
    assert not (tmp_path / "ran").exists()
