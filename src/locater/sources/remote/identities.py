"""What tells one content of a remote checkpoint from another, without reading weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from locater.errors import LocaterError
from locater.sources.adapter_folder import ADAPTERS, BASE, base_on_the_hub, checked_settings
from locater.sources.index import shards_of
from locater.sources.remote.address import Address, hub_address, remote_address
from locater.sources.remote.folders import folder_of
from locater.sources.remote.ranged import RemoteFolder, remote_json

CONFIG, ADAPTER = "config.json", "adapter_config.json"
INDEX = "model.safetensors.index.json"
SINGLE = ("model.safetensors", "adapter_model.safetensors")


def identity(source: str, below: tuple[str, ...] = ()) -> str:
    """A text that is the same as long as configuration and weights of a remote checkpoint are: of two revisions with
    equal files too. It is made of the hub's sha256 of each file, or of ETag and size. No weights are read.
    """
    address = remote_address(source) or hub_address(source)
    folder = folder_of(address)
    facts = folder.digests() if folder.names() is not None else _asked(folder, address)
    facts = _read_ones(facts, address)
    if not any(name not in (CONFIG, ADAPTER) for name in facts):
        raise LocaterError(f"{address}: no weights there")
    settings = remote_json(folder, ADAPTER) if ADAPTER in facts else None
    if settings is not None:  # an adapter is read on its base
        base = base_on_the_hub(checked_settings(settings, str(address)), str(address))
        if base in below or len(below) > ADAPTERS:
            raise LocaterError(f"{address}: an adapter on adapters that name each other, and no model below them")
        facts = {**facts, BASE: identity(base, (*below, source))}
    text = "\n".join(f"{name} {fact}" for name, fact in sorted(facts.items()))
    return f"{address.scheme}:{hashlib.sha256(text.encode()).hexdigest()}"


def _read_ones(facts: Mapping[str, str], address: Address) -> dict[str, str]:
    """Those of the files that a reader would open: configuration, and the weights in the form that comes first."""
    read = {name: fact for name, fact in facts.items() if name in (CONFIG, ADAPTER)}
    if address.names_a_file and not address.path.endswith(".index.json"):
        if address.name not in facts:
            raise LocaterError(f"{address}: no such file there")
        return {**read, address.name: facts[address.name]}
    for ends in ((".safetensors", ".safetensors.index.json"), (".bin", ".bin.index.json"), (".gguf",), (".pt", ".pth")):
        weights = {name: fact for name, fact in facts.items() if name.endswith(ends)}
        if weights:
            return {**read, **weights}
    return read


def _asked(folder: RemoteFolder, address: Address) -> dict[str, str]:
    """The files of a server that lists none, each asked for by its name."""
    names = [CONFIG, address.name] if address.names_a_file else [CONFIG, ADAPTER]
    if not address.names_a_file or address.path.endswith(".index.json"):
        index = address.name if address.names_a_file else INDEX
        document = remote_json(folder, index, unique=True)
        names += SINGLE if document is None else [index, *sorted(set(shards_of(document, str(address)).values()))]
    facts = {name: folder.file(name).facts() for name in dict.fromkeys(names)}
    return {name: f"{fact[1]} {fact[0]}" for name, fact in facts.items() if fact is not None}
