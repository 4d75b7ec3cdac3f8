"""Read checkpoints of `torch.distributed.checkpoint` (DCP), as FSDP2 and torchtitan write them, in one process.

Each rank has written its pieces of all tensors into a file of its own (`__0_0.distcp`), and `.metadata` says where each
is. A tensor is put together when it is asked for, and only from the pieces with the rows that are asked for.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from locater.errors import LocaterError, first_line
from locater.files import is_there, regular_file
from locater.sources.dcp_metadata import DAMAGED, NAME, Piece, StoredTensor, read_metadata
from locater.sources.pickle_file import check_archive, records_in
from locater.sources.weights import DictWeights, Rows

MODEL_KEYS = ("model", "module", "state_dict", "model_state_dict")  # under which trainers save the model


def is_dcp(folder: Path) -> bool:
    """Whether a folder has the index of such a checkpoint."""
    return is_there(folder / NAME)


class DcpWeights:
    """The tensors of the model in a checkpoint folder, by the names that they have in the model."""

    def __init__(self, folder: Path) -> None:
        self.where, self._folder = str(folder), folder
        self._tensors = _of_model(read_metadata(folder), self.where)
        ends: dict[str, int] = {}  # of the pieces in each file
        taken: dict[str, int] = {}  # bytes of each file by pieces with numbers in them
        for piece in (piece for tensor in self._tensors.values() for piece in tensor.pieces):
            ends[piece.file] = max(ends.get(piece.file, 0), piece.start + piece.length)
            taken[piece.file] = taken.get(piece.file, 0) + piece.length * all(piece.sizes)
        files = ends.keys()
        missing = sorted(file for file in files if not is_there(folder / file))
        if missing:
            raise LocaterError(
                f"{folder}: {missing[0]} is not there ({len(missing)} of {len(files)} files with pieces of the model "
                "are missing): copy the whole folder, with what every rank has written"
            )
        for file, end in ends.items():
            size = regular_file(folder / file)
            if size < end:
                raise LocaterError(f"{folder / file}: has fewer than the {end:,} bytes that {NAME} names: {DAMAGED}")
            if size < taken[file]:  # the same bytes for many tensors: a small file would become a large model
                raise LocaterError(f"{folder / file}: pieces overlap, {taken[file]:,} of {size:,} bytes: {DAMAGED}")

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        tensor = self._tensors[name]
        if not tensor.shape:
            if rows is not None:
                raise LocaterError(f"{self.where}: {name} is a single number, where rows of a map belong")
            return self._piece(name, tensor, tensor.pieces[0])
        ranges = [(0, tensor.shape[0])] if rows is None else [slice(a, b).indices(tensor.shape[0])[:2] for a, b in rows]
        shape = (sum(max(0, b - a) for a, b in ranges), *tensor.shape[1:])
        out, filled = torch.empty(shape, dtype=tensor.dtype), torch.zeros(shape, dtype=torch.bool)
        for piece in tensor.pieces:
            first, end = piece.offsets[0], piece.offsets[0] + piece.sizes[0]
            if not any(max(a, first) < min(b, end) for a, b in ranges):
                continue
            values, at = self._piece(name, tensor, piece), 0
            others = tuple(slice(o, o + n) for o, n in zip(piece.offsets[1:], piece.sizes[1:], strict=True))
            for a, b in ranges:
                low, high = max(a, first), min(b, end)
                if low < high:
                    here = (slice(at + low - a, at + high - a), *others)
                    out[here], filled[here] = values[low - first : high - first], True
                at += max(0, b - a)
        if not bool(filled.all()):
            raise LocaterError(f"{self.where}: pieces of {name} overlap, and others are missing: {DAMAGED}")
        return out

    def _piece(self, name: str, tensor: StoredTensor, piece: Piece) -> Tensor:
        path = self._folder / piece.file
        with path.open("rb") as file:
            file.seek(piece.start)
            data = io.BytesIO(file.read(piece.length))
        values = _loaded(data, f"{path}: its piece of {name}")
        if tuple(values.shape) != piece.sizes or values.dtype != tensor.dtype:
            raise LocaterError(
                f"{path}: its piece of {name} is {values.dtype} {list(values.shape)}, and {NAME} says {tensor.dtype} "
                f"{list(piece.sizes)}: {DAMAGED}"
            )
        return DictWeights({name: values}, str(path)).read(name)


def _loaded(data: io.BytesIO, where: str) -> Tensor:
    """The one tensor that `torch.save` has written into these bytes."""
    try:
        with zipfile.ZipFile(data) as archive:
            records_in(data, archive, where)
            sizes = [record.file_size for record in archive.infolist() if "/data/" in record.filename]
        check_archive(data, data.getbuffer().nbytes, where)
        data.seek(0)
        values = torch.load(data, map_location="cpu", weights_only=True)
    except LocaterError:
        raise
    except pickle.UnpicklingError:
        raise LocaterError(f"{where} holds more than a tensor: refused, since opening it could run its code") from None
    except Exception as error:  # bytes that are no archive, or hold more than a tensor
        raise LocaterError(f"{where} is not a stored tensor ({first_line(error)}): {DAMAGED}") from None
    if not isinstance(values, Tensor) or sizes[:1] != [values.untyped_storage().nbytes()] or len(sizes) > 1:
        raise LocaterError(f"{where} is not one tensor with its data: {DAMAGED}")
    return values


def _of_model(tensors: Mapping[str, StoredTensor], where: str) -> dict[str, StoredTensor]:
    """The tensors of the model, without the keys under which a trainer has saved it beside its other state."""
    groups: dict[tuple[str, ...], dict[str, StoredTensor]] = {}
    for tensor in tensors.values():
        groups.setdefault(tensor.path[:-1], {})[tensor.path[-1]] = tensor
    models = [keys for keys in groups if keys and keys[-1] in MODEL_KEYS and not any("optim" in key for key in keys)]
    if not models and () in groups:
        models = [()]
    if len(models) != 1:
        found = ", ".join(".".join(keys) or "(no key)" for keys in sorted(groups)[:6]) or "none"
        problem = "no model" if not models else "several models"
        raise LocaterError(
            f"{where}: {problem} among its states ({found}): save the model alone, or as the key 'model' of the state"
        )
    return groups[models[0]]
