"""Read pickled weights (`pytorch_model.bin`, `*.pt`) with weights_only; zip archives are memory-mapped, not loaded.

A mapping uses the bytes of a record as they are in the file, so the archive has to be as torch.save writes it: nothing
compressed, no record twice, no overlapping records.
"""

from __future__ import annotations

import io
import mmap
import pickle
import struct
import zipfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locater.errors import LocaterError, first_line
from locater.files import regular_file
from locater.sources.pickle_walk import check_legacy_pickles, check_pickle
from locater.sources.weights import DictWeights, has_dense_data, joined

MAGIC = b"PK\x03\x04"
FOLDER = 0x10  # attribute of a zip record
# of a zip record: magic bytes, length of its name, length of the field between name and data
LOCAL_HEADER = struct.Struct("<4s22xHH")


def open_pickles(files: Sequence[Path], where: str, file_of: Mapping[str, Path] | None = None) -> DictWeights:
    """The tensors of one or several files; `file_of` names the file of each tensor where there is an index."""
    return DictWeights(joined(((path, _load(path)) for path in files), where, file_of), where)


def _load(path: Path) -> dict[str, Tensor]:
    try:
        content, records = load_pickle(path, mapped=True)
    except LocaterError:
        raise
    except OSError as error:
        raise LocaterError(f"{path}: cannot be read ({error.strerror})") from None
    except (pickle.UnpicklingError, ValueError) as error:
        with path.open("rb") as file:
            if file.read(1) not in (b"P", b"\x80"):  # neither an archive nor a pickle
                raise LocaterError(f"{path}: not a weights file: torch.save writes no such bytes") from None
        if isinstance(error, ValueError):
            raise LocaterError(f"{path}: not a readable weights file ({first_line(error)})") from None
        if "Unsupported" not in str(error) and "GLOBAL" not in str(error) and "weights_only" not in str(error).lower():
            raise LocaterError(f"{path}: not a readable weights file") from None
        raise LocaterError(
            f"{path}: holds more than weights, so opening it would run its code: refused. Save it again as safetensors"
        ) from None
    except Exception as error:  # on bytes that are no pickle the unpickler can raise anything
        raise LocaterError(f"{path}: not a readable weights file ({first_line(error)})") from None
    tensors = _tensors(path, content)
    if records is not None:
        _check_storages(path, tensors, records)
    return tensors


def load_pickle(
    path: Path, mapped: bool = False, device: torch.device | str = "cpu"
) -> tuple[Any, dict[int, int] | None]:
    """What `torch.load` reads after a walk over its pickle, and the records of the archive, None where it is none.

    It raises whatever PyTorch does. `mapped` maps an archive; the format before archives cannot be mapped.
    """
    records, size = archive_records(path), regular_file(path)
    if records is not None:
        check_archive(path, size, str(path))
    elif size:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            check_legacy_pickles(content, size, str(path))
    return torch.load(path, map_location=device, weights_only=True, mmap=mapped and records is not None), records


def check_archive(file: Path | io.BytesIO, room: int, where: str) -> None:
    """Walk over the pickle in an archive, as PyTorch's own reader finds it."""
    if isinstance(file, io.BytesIO):
        file.seek(0)
    reader = torch._C.PyTorchFileReader(str(file) if isinstance(file, Path) else file)
    check_pickle(io.BytesIO(reader.get_record("data.pkl")), room, where)


def _tensors(path: Path, content: Any) -> dict[str, Tensor]:
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise LocaterError(f"{path}: holds a {type(content).__name__}, not a dictionary of tensors")
    named = [(name, value) for name, value in content.items() if isinstance(value, Tensor)]
    other = next((type(name).__name__ for name, _ in named if not isinstance(name, str | int)), None)
    if other is not None:
        raise LocaterError(f"{path}: one of its tensors has a {other} for a name: save it under a text")
    named = [(str(name), value) for name, value in named]
    tensors = dict(named)
    if len(tensors) < len(named):
        raise LocaterError(f"{path}: two of its tensors have one name, once as a text and once as a number: rename one")
    return tensors


def _check_storages(path: Path, tensors: Mapping[str, Tensor], records: Mapping[int, int]) -> None:
    """Refuse a tensor whose storage is not exactly one record: a larger one would reach into the next record.

    PyTorch does not tell at which address the file is mapped. It is the one address from which all storages begin at
    records of their size.
    """
    storages = {
        tensor.untyped_storage().data_ptr(): (tensor.untyped_storage().nbytes(), name)
        for name, tensor in tensors.items()
        if has_dense_data(tensor)
    }
    empty = {
        tensor.untyped_storage()._cdata: name
        for name, tensor in tensors.items()
        if has_dense_data(tensor) and not tensor.untyped_storage().nbytes()
    }
    if len(empty) > sum(
        not length for length in records.values()
    ):  # empty storages have no address, so they are counted
        name = next(iter(empty.values()))
        raise LocaterError(
            f"{path}: {name} or another empty tensor has a record with data: the file is damaged, download it again"
        )
    bases: set[int] | None = None
    for address, (size, name) in storages.items():
        if not size:
            continue
        if bases is None:
            bases = {address - start for start, length in records.items() if length == size}
        bases = {base for base in bases if records.get(address - base) == size}
        if not bases:
            raise LocaterError(
                f"{path}: {name} is stored in {size:,} bytes, its record has another size: "
                "the file is damaged, download it again"
            )


def archive_records(path: Path) -> dict[int, int] | None:
    """Start and size of the data of each record of a zip archive; None for a file that is not an archive.

    An archive with compressed or encrypted records is refused: a compressed record can expand a thousandfold.
    """
    regular_file(path)
    with open(path, "rb") as file:
        if file.read(4) != MAGIC:
            return None
        with zipfile.ZipFile(file) as archive:
            return records_in(file, archive, str(path))


def records_in(file: Any, archive: zipfile.ZipFile, path: str) -> dict[int, int]:
    """The same for an open archive; `path` is its name in messages."""
    end = 0
    sizes = {}
    records = sorted(archive.infolist(), key=lambda record: record.header_offset)
    names = sorted(record.filename for record in records)
    twice = next((a for a, b in pairwise(names) if a == b), None)
    if twice is not None:
        raise LocaterError(f"{path}: its record {twice} occurs twice: save it again")
    for record in records:
        where, damaged = f"{path}: its record {record.filename}", "the file is damaged, download it again"
        if (
            record.compress_type != zipfile.ZIP_STORED
            or record.file_size != record.compress_size
            or record.flag_bits & 1
        ):
            raise LocaterError(f"{where} is compressed or encrypted: load it with torch and save it again")
        if record.is_dir() or record.external_attr & FOLDER:
            raise LocaterError(f"{where} is marked as a folder: {damaged}")  # torch would return uninitialised memory
        if record.header_offset < end:
            raise LocaterError(f"{where} overlaps the one before it: {damaged}")
        file.seek(record.header_offset)
        magic, name_length, extra = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
        if magic != MAGIC:
            raise LocaterError(f"{where} is not where the archive says: {damaged}")
        start = record.header_offset + LOCAL_HEADER.size + name_length + extra
        end = start + record.file_size
        sizes[start] = record.file_size
    if end > archive.start_dir:
        raise LocaterError(f"{path}: its last record overlaps the directory: the file is damaged, download it again")
    return sizes
