"""Pickled weights (`pytorch_model.bin`, `*.pt`): opened with weights_only, mapped and not loaded where they are a zip
archive.

Mapping takes the bytes of a record as they lie in the file, so the archive has to be what torch.save writes: nothing
compressed, no record twice, no two records in one place.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locater.checkpoints.weights import DictWeights, joined, plain
from locater.errors import LocaterError, first_line
from locater.files import regular_file

MARK = b"PK\x03\x04"
FOLDER = 0x10  # attribute of a zip record
# of a zip record: its mark, and the lengths of its name and of the field before the data
LOCAL_HEADER = struct.Struct("<4s22xHH")


def open_pickles(files: Sequence[Path], where: str, places: Mapping[str, Path] | None = None) -> DictWeights:
    """Tensors of one or several files; `places` is the file of each where an index tells."""
    return DictWeights(joined(((path, _load(path)) for path in files), where, places), where)


def _load(path: Path) -> dict[str, Tensor]:
    try:
        records = archive_records(path)
        # the older format cannot be mapped
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=records is not None)
    except LocaterError:
        raise
    except pickle.UnpicklingError as error:
        with path.open("rb") as file:
            if file.read(1) not in (b"P", b"\x80"):  # neither an archive nor a pickle
                raise LocaterError(f"{path}: not a weights file: torch.save writes no such bytes") from None
        if "Unsupported" not in str(error) and "GLOBAL" not in str(error) and "weights_only" not in str(error).lower():
            raise LocaterError(f"{path}: not a readable weights file") from None
        raise LocaterError(
            f"{path}: holds more than weights, so opening it would run its code: refused. Save it again as safetensors"
        ) from None
    except Exception as error:  # bytes that are no pickle make the unpickler raise anything at all
        raise LocaterError(f"{path}: not a readable weights file ({first_line(error)})") from None
    tensors = _tensors(path, content)
    if records is not None:
        _check_places(path, tensors, records)
    return tensors


def _tensors(path: Path, content: Any) -> dict[str, Tensor]:
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise LocaterError(f"{path}: holds a {type(content).__name__}, not a dictionary of tensors")
    named = [(str(name), value) for name, value in content.items() if isinstance(value, Tensor)]
    tensors = dict(named)
    if len(tensors) < len(named):
        raise LocaterError(f"{path}: two of its tensors have one name, once as a text and once as a number: rename one")
    return tensors


def _check_places(path: Path, tensors: Mapping[str, Tensor], records: Mapping[int, int]) -> None:
    """Each tensor's storage is one whole record: mapped, it would reach into the next where the pickle says another
    size.

    Where the file is mapped is not told; it is the one address from which all storages begin at records of their size.
    """
    storages = {
        tensor.untyped_storage().data_ptr(): (tensor.untyped_storage().nbytes(), name)
        for name, tensor in tensors.items()
        if plain(tensor)
    }
    empty = {
        tensor.untyped_storage()._cdata: name
        for name, tensor in tensors.items()
        if plain(tensor) and not tensor.untyped_storage().nbytes()
    }
    if len(empty) > sum(not length for length in records.values()):  # they have no address, so they are counted
        name = next(iter(empty.values()))
        raise LocaterError(
            f"{path}: {name} or another empty tensor has a record that is not: the file is damaged, fetch it again"
        )
    bases: set[int] | None = None
    for place, (size, name) in storages.items():
        if not size:
            continue
        if bases is None:
            bases = {place - start for start, length in records.items() if length == size}
        bases = {base for base in bases if records.get(place - base) == size}
        if not bases:
            raise LocaterError(
                f"{path}: {name} is stored in {size:,} bytes, its record has another size: the file is damaged, fetch it again"
            )


def archive_records(path: Path) -> dict[int, int] | None:
    """Where the data of each record of a zip archive begins, and its size; None for a file that is no archive.

    An archive whose records do not lie in the file as they are is refused: compressed ones can be a thousand times
    their size.
    """
    regular_file(path)
    with open(path, "rb") as file:
        if file.read(4) != MARK:
            return None
        with zipfile.ZipFile(file) as archive:
            return _records(path, file, archive)


def _records(path: Path, file: Any, archive: zipfile.ZipFile) -> dict[int, int]:
    end = 0
    found = {}
    records = sorted(archive.infolist(), key=lambda record: record.header_offset)
    names = sorted(record.filename for record in records)
    twice = next((a for a, b in pairwise(names) if a == b), None)
    if twice is not None:
        raise LocaterError(f"{path}: its record {twice} occurs twice: save it again")
    for record in records:
        where, damaged = f"{path}: its record {record.filename}", "the file is damaged, fetch it again"
        if (
            record.compress_type != zipfile.ZIP_STORED
            or record.file_size != record.compress_size
            or record.flag_bits & 1
        ):
            raise LocaterError(f"{where} is compressed or encrypted: load it with torch and save it again")
        if record.is_dir() or record.external_attr & FOLDER:
            raise LocaterError(f"{where} is marked as a folder: {damaged}")  # torch would give memory that nobody wrote
        if record.header_offset < end:
            raise LocaterError(f"{where} overlaps the one before it: {damaged}")
        file.seek(record.header_offset)
        mark, name_length, extra = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
        if mark != MARK:
            raise LocaterError(f"{where} is not where the archive says: {damaged}")
        start = record.header_offset + LOCAL_HEADER.size + name_length + extra
        end = start + record.file_size
        found[start] = record.file_size
    if end > archive.start_dir:
        raise LocaterError(f"{path}: its last record overlaps the directory: the file is damaged, fetch it again")
    return found
