"""Mutations: bytes at random, JSON by its structure, and zip archives record by record. All from one seeded
generator.
"""

from __future__ import annotations

import copy
import json
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from io import BytesIO
from random import Random
from typing import Any

NUMBERS = (0, 1, 2, 3, 7, 8, 31, 32, 33, 127, 128, 255, 256, 4096, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**48,
           2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**40, 2**63, 2**64, 10**30, 10**400, 0.0, -0.0, 0.5, 1e-40, 1e30, 1e300, -1e300,
    float("nan"), float("inf"), "", "x", "4", "none", "../x", "/etc/passwd", "\0", "\ud800", "a" * 5000, [], [1], [0], [[]], [None], {},
    {"x": 1}, {"a": {}}, [1, 2, 3, 4], ["x"], [-1, 8],
)  # fmt: skip


def of_bytes(rng: Random, data: bytes, most: int = 4) -> bytes:
    """One to `most` edits: flips, numbers of two, four and eight bytes, cuts, copies, insertions."""
    made = bytearray(data)
    for _ in range(rng.randint(1, most)):
        # headers are worth more edits
        at = rng.choice((rng.randrange(len(made) + 1), rng.randrange(min(len(made), 600) + 1)))
        match rng.randrange(8):
            case 0 if at < len(made):
                made[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(made):
                made[at] = rng.randrange(256)
            case 2:
                form = rng.choice("HIQ")
                number = rng.choice(NUMBERS) % 2 ** (8 * struct.calcsize(form))
                made[at : at + struct.calcsize(form)] = struct.pack(f"<{form}", number)
            case 3:
                del made[at:]
            case 4:
                del made[at : at + rng.choice((1, 2, 4, 8, 16, 64))]
            case 5:
                made[at:at] = rng.randbytes(rng.choice((1, 4, 8, 32)))
            case 6:
                size, to = rng.choice((1, 4, 8, 64)), rng.randrange(len(made) + 1)
                made[to : to + size] = made[at : at + size]
            case _:
                made[at:at] = made[at : at + rng.choice((1, 8, 64))]
        made = made or bytearray(b"\0")
    return bytes(made)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every value of a document lies, from the outside in."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, child in inner for found in paths(child, (*path, key)))]


def of_value(rng: Random, document: Any, most: int = 3, extra: tuple[Any, ...] = ()) -> Any:
    """A document with one to `most` values replaced, removed, nudged or taken from elsewhere in it."""
    made = copy.deepcopy(document)
    for _ in range(rng.randint(1, most)):
        known = [path for path in paths(made) if path]
        if not known:
            return rng.choice(VALUES)
        path, other = rng.choice(known), rng.choice(known)
        parent = at(made, path[:-1])
        old, key = parent[path[-1]], path[-1]
        match rng.randrange(6):
            case 0:
                del parent[key]
            case 1 if isinstance(old, int) and not isinstance(old, bool):
                parent[key] = old + rng.choice((-8, -4, -1, 1, 4, 8, 2**32))
            case 2:
                parent[key] = copy.deepcopy(at(made, other))
            case 3 if isinstance(parent, dict) and isinstance(key, str):
                parent[of_text(rng, key)] = parent.pop(key)
            case 4 if isinstance(parent, list):
                parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(old))
            case _:
                parent[key] = copy.deepcopy(rng.choice(VALUES + extra))
    return made


def of_objects(rng: Random, root: Any, values: tuple[Any, ...], most: int = 2) -> None:
    """One to `most` parts of a tree of objects replaced, removed or taken from elsewhere in it: entries of dictionaries
    (keys too), items of lists and tuples, attributes.
    """
    for _ in range(rng.randint(1, most)):
        slots = list(_slots(root))
        setter, old = rng.choice(slots)
        new = rng.choice(
            (rng.choice(values), rng.choice(values), copy.deepcopy(rng.choice(slots)[1]), _nudged(rng, old))
        )
        with suppress(TypeError, KeyError):  # a key that cannot be one, or that was itself changed
            setter(new)


def _nudged(rng: Random, value: Any) -> Any:
    """Near to what was there: a number more or less, a tuple shorter or longer, a text with a letter changed."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value + rng.choice((-8, -1, 1, 8, 2**32))
    if isinstance(value, tuple) and value:
        return rng.choice((value[:-1], (*value, value[0]), (*value[:-1], _nudged(rng, value[-1])), ()))
    return of_text(rng, value) if isinstance(value, str) and value else rng.choice((None, (), 0))


def _slots(value: Any, seen: set[int] | None = None) -> Iterator[tuple[Callable[[Any], None], Any]]:
    """Every place in a tree of objects: how it is set, and what is there."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for key, item in list(value.items()):
            yield partial(_rename, value, key), key
            yield partial(value.__setitem__, key), item
            yield from _slots(key, seen)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield partial(value.__setitem__, number), item
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inner:
        yield from _slots(item, seen)
    for name, item in list(vars(value).items()) if hasattr(value, "__dict__") and not isinstance(value, type) else ():
        yield partial(vars(value).__setitem__, name), item
        yield from _slots(item, seen)


def _rename(table: dict[Any, Any], old: Any, new: Any) -> None:
    parts = [new, old, *getattr(new, "__dict__", {}).values(), *getattr(old, "__dict__", {}).values()]
    if any(isinstance(inner, tuple) for part in parts if isinstance(part, tuple) for inner in part):
        return  # it would be hashed for ever here
    table[new] = table[old]
    if new != old:
        del table[old]


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


def of_text(rng: Random, text: str) -> str:
    place = rng.randrange(len(text) + 1)
    return text[:place] + rng.choice(("", "0", "x", ".", "é", "\0")) + text[place + 1 :] or "x"


def as_json(rng: Random, document: Any) -> bytes:
    """The document as text, at times with a key twice or with bytes changed."""
    text = json.dumps(document).encode("utf-8", "surrogatepass")
    choice = rng.randrange(8)
    if choice == 0 and isinstance(document, dict) and document:
        key = rng.choice(list(document))
        value = rng.choice((document[key], *document.values(), None))
        text = text[:-1] + b", " + json.dumps({key: value}).encode()[1:-1] + b"}"
    return of_bytes(rng, text, 2) if choice == 1 else text


def of_safetensors(rng: Random, data: bytes) -> bytes:
    """The header edited as JSON, with its length made right or wrong, and the data behind it, longer or shorter at
    times.
    """
    size = struct.unpack_from("<Q", data)[0]
    dtypes = ("F32", "F16", "BF16", "F64", "I8", "F4", "F8_E4M3", "BOOL", "F33")
    header = as_json(rng, of_value(rng, json.loads(data[8 : 8 + size]), 2, extra=dtypes))
    header = rng.choice((b"", b"", b"", b" ")) + header + b" " * rng.choice((0, 0, 1, 8))
    body = data[8 + size :]
    body = rng.choice((body, body, body, body[:-4], body + b"\0", body[4:]))
    return struct.pack("<Q", len(header) + rng.choice((0, 0, 0, 0, 0, -1, 1, 8))) + header + body


def of_zip(rng: Random, data: bytes) -> bytes:
    """The archive written anew: a record edited, lost, doubled or compressed."""
    with zipfile.ZipFile(BytesIO(data)) as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    chosen = rng.choice(
        [i for i, (name, _) in enumerate(records) if name.endswith("data.pkl")] * 3 + list(range(len(records)))
    )
    name, content = records[chosen]
    match rng.randrange(6):
        case 0:
            del records[chosen]
        case 1:
            records.append((name, of_bytes(rng, content)))
        case 2:
            records[chosen] = (of_text(rng, name).replace("\0", "0"), content)  # a zip cuts names there
        case _:
            records[chosen] = (name, of_bytes(rng, content, 2))
    made = BytesIO()
    with (
        warnings.catch_warnings(),
        zipfile.ZipFile(made, "w", rng.choice((zipfile.ZIP_STORED,) * 5 + (zipfile.ZIP_DEFLATED,))) as archive,
    ):
        warnings.simplefilter("ignore")  # a record twice is meant
        for name, content in records:
            archive.writestr(name, content)
    return made.getvalue()
