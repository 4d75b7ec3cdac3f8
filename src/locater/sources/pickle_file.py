"""Read pickled weights (`pytorch_model.bin`, `*.pt`) with weights_only; zip archives are memory-mapped, not loaded.

A mapping uses the bytes of a record as they are in the file, so the archive has to be as torch.save writes it: nothing
compressed, no record twice, no overlapping records.
"""

from __future__ import annotations

import io
import mmap
import pickle
import pickletools
import struct
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from locater.errors import DamagedError, LocaterError, first_line
from locater.files import regular_file
from locater.sources.weights import DictWeights, has_dense_data, join_files
from locater.torch_private import read_archive_record, storage_id

# Walk a pickle before it is loaded: what would cost more than its bytes is refused.


KEY_PARTS = 64  # of a tuple that is hashed, with the tuples inside it
AXES = 64  # PyTorch has no more


class StandIn:
    """Stands for an object. Text, numbers, None and lists stand for themselves."""


class Name(StandIn, str):
    """A class or a function, by its full name."""


class Tuple(StandIn):
    """`parts` counts what is hashed with it: itself, its items, and the items of tuples inside."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = tuple(items)
        self.parts = 1 + sum(_parts(item) for item in self.items)


class Table(StandIn):
    """A dictionary or a set: only how much was put into it counts."""

    length = 0


class Storage(StandIn):
    def __init__(self, numbers: int) -> None:
        self.numbers = numbers


class BuiltObject(StandIn):
    """A tensor or another object. `wide`: it claims more numbers than are stored, as an expanded tensor does."""

    def __init__(self, wide: bool = False) -> None:
        self.wide = wide


def check_pickle(file: Any, room: int, where: str) -> None:
    """Refuse a pickle that would cost more than its bytes; `room` is the size of the whole file with its data."""
    walk = _Walk(room, where)
    walk.run(file)


def check_legacy_pickles(file: Any, room: int, where: str) -> None:
    """The same for a file that is no archive: magic number, version, system, content and the keys of its storages."""
    walk = _Walk(room, where)
    magic, version, _, _, keys = (walk.run(file) for _ in range(5))
    # PyTorch quotes the first two in messages, and looks up the keys
    if type(magic) is not int or type(version) is not int or not isinstance(keys, list):
        raise pickle.UnpicklingError("not what torch.save writes")
    walk.check_hashed(keys)


def _parts(value: Any) -> int:
    return value.parts if isinstance(value, Tuple) else 1


def _length(value: Any) -> int:
    """How much is copied where a call takes this."""
    if isinstance(value, Table):
        return value.length
    if isinstance(value, Tuple):
        return len(value.items) + sum(item.length for item in value.items if isinstance(item, Table))
    return len(value) if isinstance(value, str | bytes | list) else 0


class _Walk:
    def __init__(self, room: int, where: str) -> None:
        self.room, self.where = room, where
        self.left = 4 * room + 10_000  # what calls may copy in all
        self.claimed: dict[Any, int] = {}  # the numbers of each storage
        self.numbers = 0  # of all
        self.allowed = {_full_name(known) for known in torch.serialization.get_safe_globals()}

    def refuse(self, reason: str) -> NoReturn:
        raise LocaterError(
            f"{self.where}: its pickle {reason}, which no weights need: refused. If you trust the file, load it with "
            "torch and save it again as safetensors"
        )

    def run(self, file: Any) -> Any:
        """What stands for the object of one pickle."""
        stack: list[Any] = []
        below: list[list[Any]] = []
        memo: dict[Any, Any] = {}
        for opcode, argument, _ in pickletools.genops(file):
            name = opcode.name
            if name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name in VALUES:
                stack.append(VALUES[name](argument))
            elif name == "MARK":
                below.append(stack)
                stack = []
            elif name in MARKED:
                items, stack = stack, below.pop()
                self._put(name, stack, items)
            elif name in TAKEN:
                count = TAKEN[name]
                items = stack[len(stack) - count :] if count <= len(stack) else []
                if len(items) < count:
                    raise pickle.UnpicklingError("its stack is empty")
                del stack[len(stack) - count :]
                self._put(name, stack, items)
            elif name == "STOP":
                return stack.pop()
            elif name != "PROTO":
                raise pickle.UnpicklingError(f"Unsupported operand {name}")
        return None

    def _put(self, name: str, stack: list[Any], items: list[Any]) -> None:
        """An opcode that takes items off the stack."""
        if name.startswith("TUPLE"):
            stack.append(Tuple(items))
        elif name in ("APPEND", "APPENDS"):
            if type(stack[-1]) is not list:
                raise pickle.UnpicklingError("Can only append to lists")
            stack[-1].extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            if not isinstance(stack[-1], Table):
                raise pickle.UnpicklingError("Can only set items of dictionaries")
            stack[-1].length += len(items) // 2
            self.check_hashed(items[::2])
        elif name == "BINPERSID":
            stack.append(self._storage(items[0]))
        elif name in ("REDUCE", "NEWOBJ"):
            stack.append(self._call_result(*items))
        elif name == "BUILD":
            self.spend(_length(items[0]))
            if not isinstance(stack[-1], Table | BuiltObject) or not _entries(self, items):
                raise pickle.UnpicklingError("Can only build Tensor, Parameter, OrderedDict")

    def check_hashed(self, keys: Sequence[Any]) -> None:
        for key in keys:
            if _parts(key) > KEY_PARTS:
                self.refuse(f"has a key of more than {KEY_PARTS} parts")

    def spend(self, much: int) -> None:
        self.left -= much
        if self.left < 0:
            self.refuse("copies the same data again and again")

    def _storage(self, key: Any) -> Storage:
        """A storage: kind, key, place and how many numbers; files that are no archives have a view of it as well."""
        items = key.items if isinstance(key, Tuple) else ()
        known = len(items) in (5, 6) and isinstance(items[1], Name) and isinstance(items[2], str | bytes | int)
        if not known or type(items[4]) is not int or not isinstance(items[3], str | bytes):
            raise pickle.UnpicklingError("Unsupported persistent id")
        if _parts(key) > KEY_PARTS:
            self.refuse(f"has a key of more than {KEY_PARTS} parts")
        before = self.claimed.get(items[2], 0)
        self.claimed[items[2]] = max(before, items[4])
        self.numbers += self.claimed[items[2]] - before
        if self.numbers > self.room:
            raise LocaterError(
                f"{self.where}: claims {self.numbers:,} numbers in {self.room:,} bytes: the file is damaged, "
                "download it again"
            )
        return Storage(items[4])

    def _call_result(self, function: Any, arguments: Any) -> Any:
        """What stands for the result of a call."""
        if not isinstance(function, Name) or not isinstance(arguments, Tuple):
            raise pickle.UnpicklingError("Unsupported call")
        given = arguments.items
        self.spend(1 + sum(_length(value) for value in given))
        wide = any(isinstance(value, BuiltObject) and value.wide for value in given)
        if function == "torch._tensor._rebuild_from_type_v2" and len(given) == 4:
            return self._call_result(given[0], given[2])
        if function in TENSORS:
            return self.tensor(given)
        if function in SAME:
            return BuiltObject(wide)
        if function in CHECKED:
            if wide or not CHECKED[function](self, given):
                self.refuse(f"calls {function} with other than it takes")
            if function in TABLES:
                return Table()
            if function == "_codecs.encode":
                return given[0].encode("latin-1", "replace")
            return given[0] if function == "torch.Size" else BuiltObject()
        if function not in self.allowed:
            raise pickle.UnpicklingError(f"Unsupported global: GLOBAL {function}")
        if wide:
            self.refuse(f"calls {function} with a tensor of more numbers than are stored")
        return BuiltObject()

    def tensor(self, given: Sequence[Any]) -> BuiltObject:
        """A tensor of a storage: offset, size, strides."""
        if len(given) < 4 or not isinstance(given[0], Storage) or not _sizes(given[2]):
            raise pickle.UnpicklingError("a tensor without a storage and a size")
        return BuiltObject(prod(given[2].items) > given[0].numbers)


def _sizes(value: Any) -> bool:
    return isinstance(value, Tuple) and len(value.items) <= AXES and all(isinstance(item, int) for item in value.items)


def _flat(value: Any) -> bool:
    """No list or tuple with another inside: such a one can be short here, and endless as a tensor."""
    items = value.items if isinstance(value, Tuple) else value if isinstance(value, list) else ()
    return not any(isinstance(item, list | Tuple) for item in items)


def _flat_inside(value: Any) -> bool:
    items = value.items if isinstance(value, Tuple) else ()
    return not isinstance(value, list) and all(
        _flat(item) and not (isinstance(item, BuiltObject) and item.wide) for item in items
    )


def _entries(walk: _Walk, given: Sequence[Any]) -> bool:
    """What a dictionary or a set is made of: nothing, as PyTorch writes it, or a list of keys or of pairs."""
    if len(given) > 1:
        return False
    items = given[0].items if given and isinstance(given[0], Tuple) else given[0] if given else ()
    for item in items if isinstance(items, tuple | list) else ():
        pair = item.items if isinstance(item, Tuple) else item if isinstance(item, list) else ()
        walk.spend(1)
        walk.check_hashed([item, *pair[:2]])
    return True


def _quantised(walk: _Walk, given: Sequence[Any]) -> bool:
    return len(given) > 4 and not walk.tensor(given).wide and _flat_inside(given[4])


def _nothing(walk: _Walk, given: Sequence[Any]) -> bool:
    return not given


def _plain(walk: _Walk, given: Sequence[Any]) -> bool:
    """Arguments without lists, and tuples without tuples."""
    return all(_flat(value) and not isinstance(value, list) for value in given)


def _text(walk: _Walk, given: Sequence[Any]) -> bool:
    return len(given) <= 2 and all(
        isinstance(value, int | float) or (isinstance(value, str) and len(value) < 100) for value in given
    )


def _bytes(walk: _Walk, given: Sequence[Any]) -> bool:
    """Bytes as pickle writes them with protocol 2; other codecs expand or take quadratic time."""
    return len(given) == 2 and isinstance(given[0], str) and given[1] in ("latin1", "latin-1", "ascii", "utf-8")


def _shape(walk: _Walk, given: Sequence[Any]) -> bool:
    return len(given) == 1 and _sizes(given[0])


def _full_name(known: Any) -> str:
    return known[1] if isinstance(known, tuple) else f"{known.__module__}.{known.__qualname__}"


def _name(argument: str) -> Name:
    """The full name of a global, under the name that it has in Python 3."""
    module, _, name = argument.partition(" ")
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[module, name]
    return Name(f"{IMPORT_MAPPING.get(module, module)}.{name}")


VALUES: dict[str, Callable[[Any], Any]] = {
    "GLOBAL": _name,
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_TUPLE": lambda _: Tuple(()),
    "EMPTY_LIST": lambda _: [],
    "EMPTY_DICT": lambda _: Table(),
    "EMPTY_SET": lambda _: Table(),
} | dict.fromkeys(
    ("BININT", "BININT1", "BININT2", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "LONG1"), lambda value: value
)
MARKED = {"TUPLE", "APPENDS", "SETITEMS"}  # take what is above the last mark
TAKEN = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2, "BINPERSID": 1}  # take so many
TAKEN |= {"REDUCE": 2, "NEWOBJ": 2, "BUILD": 1}
TENSORS = {f"torch._utils._rebuild_tensor{end}" for end in ("", "_v2", "_v3")}
SAME = {  # of a tensor, the same numbers
    "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state", "torch.nn.parameter.Parameter",
}  # fmt: skip
TABLES = {"collections.OrderedDict", "collections.Counter", "builtins.set"}
CHECKED: dict[str, Callable[[_Walk, Sequence[Any]], bool]] = {
    **dict.fromkeys(TABLES, _entries),
    "builtins.bytearray": lambda walk, given: all(isinstance(value, bytes) for value in given),
    "builtins.complex": _text,
    "torch.Size": _shape,
    "torch.device": _text,
    "torch.serialization._get_layout": _text,
    "_codecs.encode": _bytes,
    "torch._utils._rebuild_sparse_tensor": lambda walk, given: all(_flat_inside(value) for value in given),
    "torch._utils._rebuild_qtensor": _quantised,
    "torch._utils._rebuild_meta_tensor_no_storage": _plain,
    "torch._utils._rebuild_nested_tensor": _plain,
    "torch._utils._rebuild_wrapper_subclass": _plain,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _plain,
    "torch.Tensor": _nothing,
    **{f"torch.{kind}Tensor": _nothing for kind in "Double Float Half BFloat16 Long Int Short Char Byte Bool".split()},
}


MAGIC = b"PK\x03\x04"
FOLDER = 0x10  # attribute of a zip record
# of a zip record: magic bytes, length of its name, length of the field between name and data
LOCAL_HEADER = struct.Struct("<4s22xHH")


def open_pickles(files: Sequence[Path], where: str, file_of: Mapping[str, Path] | None = None) -> DictWeights:
    """The tensors of one or several files; `file_of` names the file of each tensor where there is an index."""
    return DictWeights(join_files(((path, _load(path)) for path in files), where, file_of), where)


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
        if any(
            words in str(error) for words in ("central directory", "not a zip file")
        ):  # the end of an archive lists what is in it
            raise DamagedError(
                "truncated", f"{path}: ends before its data does: the file is truncated, download it again"
            ) from None
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
    record = read_archive_record(str(file) if isinstance(file, Path) else file, "data.pkl")
    check_pickle(io.BytesIO(record), room, where)


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
        storage_id(tensor): name
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
