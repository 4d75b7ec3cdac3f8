"""Models that the hub's own client has downloaded before: read from there, if they are what the hub has now."""

from __future__ import annotations

from pathlib import Path

from locater.files import read_json
from locater.sources.index import shards_of
from locater.sources.remote.downloads import checkpoint_files
from locater.sources.remote.folders import HubFolder
from locater.sources.remote.hub import UnreachableError


def cached(folder: HubFolder, file: str | None = None) -> Path | None:
    """The local folder of a model, or one of its files, where all that is read of it is in the hub's cache, at the
    commit that the hub has now. Without a network that is the commit of the last download.
    """
    try:
        commit: str | None = folder.model.commit
    except UnreachableError:
        place = _snapshot(folder, None)
        if place is None or not (_complete(place) if file is None else (place / file).is_file()):
            raise
        return place if file is None else place / file
    place = _snapshot(folder, commit)
    wanted = checkpoint_files(folder) if file is None else [file]
    if place is None or not wanted or not all((place / name).is_file() for name in wanted):
        return None
    return place if file is None else place / file


def _snapshot(folder: HubFolder, commit: str | None) -> Path | None:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    address = folder.address
    model = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=address.root, repo_type="model")
    try:
        name = commit or (model / "refs" / (address.revision or "main")).read_text().strip()
    except OSError:
        name = address.revision or "main"
    place = model / "snapshots" / name / address.path
    return place if place.is_dir() else None


def _complete(place: Path) -> bool:
    """Whether a folder holds all weights that its index names, or a single file of them."""
    for stem in ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin"):
        index = place / f"{stem}.index.json"
        if index.is_file():
            shards = set(shards_of(read_json(index), str(index)).values())
            return all((place / shard).is_file() for shard in shards)
        if (place / stem).is_file():
            return True
    return any(place.glob("*.safetensors"))
