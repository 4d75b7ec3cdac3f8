"""Checkpoints of torch.distributed.checkpoint as PyTorch itself reads them."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor


def loaded(folder: Path, key: str = "model") -> dict[str, Tensor]:
    """The state under a key."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, dict[str, Tensor]] = {}
    reader = FileSystemReader(folder)
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(keys={key}), no_dist=True)
    return state[key]
