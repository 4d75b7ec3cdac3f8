"""A model to run, from a folder or a hub id."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from locater.errors import LocaterError, first_line
from locater.families.registry import BY_TYPE
from locater.files import CONFIG_LIMIT, is_there, read_json
from locater.sources.adapter_folder import BASE, HUB_ID, base_on_the_hub, checked_settings
from locater.sources.adapter_folder import SETTINGS as ADAPTER
from locater.sources.open_source import hub_folder


def load_model(source: str) -> Any:
    """The model that the checkpoint's configuration names, in float32, ready to run."""
    try:
        import transformers
        from transformers import AutoConfig, AutoModel
    except ImportError:
        raise LocaterError("running a model needs the transformers package: pip install 'locater[hf]'") from None
    if not source:
        raise LocaterError("the name of the model is empty: give a folder or a hub id")
    path = Path(source)
    if path.is_file():
        raise LocaterError(
            f"{source}: a weights file alone cannot be run; give the folder with the weights and config.json"
        )
    if path.is_dir() and not (path / "config.json").is_file():
        raise LocaterError(
            f"{source}: no config.json in it, so its architecture is not known: give a folder that has one"
        )
    if not path.exists():
        # fails immediately without a network, where transformers would retry for minutes
        _check_adapter(hub_folder(source, ("config.json", ADAPTER)), source, elsewhere=True)
    elif path.is_dir():
        _check_adapter(path, source, elsewhere=False)
    family = BY_TYPE.get(_model_type(path)) if path.is_dir() else None
    if family is not None and family.load is not None:
        model: Any = family.load(path)
        model.name_or_path = source  # its tokenizer is in the same folder
        return model
    try:
        # False, not the default None: with None transformers asks on a terminal whether to run code of the checkpoint
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        named = (getattr(config, "architectures", None) or [""])[0]
        kind = getattr(transformers, named, None) or AutoModel
        transformers.logging.disable_progress_bar()
        return kind.from_pretrained(source, dtype=torch.float32, trust_remote_code=False).eval()
    except Exception as error:  # transformers, and the code of the model, raise many kinds
        raise LocaterError(f"{source}: cannot be run ({first_line(error)})") from None


def _check_adapter(folder: Path, source: str, elsewhere: bool) -> None:
    """transformers loads the base that an adapter names; refuse first what `scan` would not open."""
    if not is_there(folder / ADAPTER):
        return
    settings = checked_settings(read_json(folder / ADAPTER, most=CONFIG_LIMIT), source)
    base, here = settings[BASE], os.path.exists(settings[BASE])  # transformers looks for a folder first
    if here if elsewhere else not (here or HUB_ID.fullmatch(base)):
        raise LocaterError(
            f"{source}: an adapter on {base!r:.80}, which is not opened for it: load both with peft, merge them "
            "(merge_and_unload), and give the model that you save"
        )
    if elsewhere:
        base_on_the_hub(settings, source)


def _model_type(folder: Path) -> str:
    config = read_json(folder / "config.json", most=CONFIG_LIMIT)
    named = config.get("model_type") if isinstance(config, dict) else None
    return named if isinstance(named, str) else ""
