"""Hostile files, a few hundred bytes to a megabyte each, that would take hours or gigabytes if they were believed.

`python -m tests.sources.hostile FOLDER` reads every source of a folder in one process and prints a line for each:
its name, what came of it, seconds, and by how many kB the process grew.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_S, LIMIT_KB = 20, 1_000_000


def text(word: str) -> bytes:
    data = word.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    data = value.to_bytes(12, "little", signed=True)
    return b"\x8a\x0c" + data


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def tuples(levels: int = 60) -> bytes:
    """Pairs of pairs: 2**levels to hash or to write out."""
    return text("w") + b"".join(b"q\x63h\x63\x86" for _ in range(levels))


def lists(levels: int = 60) -> bytes:
    return text("w") + b"".join(b"q\x62](h\x62h\x62e" for _ in range(levels))


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


def storage(key: bytes, count: int, kind: str = "FloatStorage") -> bytes:
    return b"(" + text("storage") + name("torch", kind) + key + text("cpu") + number(count) + b"tQ"


def tensor(size: tuple[int, ...], stride: tuple[int, ...], key: str = "0", count: int = 1) -> bytes:
    shapes = [b"(" + b"".join(map(number, axes)) + b"t" for axes in (size, stride)]
    hooks = call(name("collections", "OrderedDict"))
    rebuild = name("torch._utils", "_rebuild_tensor_v2")
    return call(rebuild, storage(text(key), count), number(0), *shapes, b"\x89", hooks)


ENCODE, OF_TYPE = name("_codecs", "encode"), name("torch._tensor", "_rebuild_from_type_v2")
GOOD = tensor((1,), (1,))
WIDE = tensor((2, 2**33), (0, 0))
PICKLES: dict[str, bytes] = {  # what stands in a dictionary, as pairs of key and value
    "key of tuples": tuples() + GOOD,
    "key of an OrderedDict": text("a") + call(name("collections", "OrderedDict"), b"](](" + tuples() + b"K\x01ee"),
    "items of a set": text("a") + call(name("__builtin__", "set"), b"](" + tuples() + b"e"),
    "items of a Counter": text("a") + call(name("collections", "Counter"), b"](" + tuples() + b"e"),
    "key of a storage": text("a") + storage(tuples(), 1),
    "bytearray": text("a") + call(name("__builtin__", "bytearray"), number(6_500_000_000)),
    "bytearray within": text("a") + call(
        OF_TYPE, name("__builtin__", "bytearray"), name("torch", "Tensor"), b"(" + number(6_500_000_000) + b"t", b"}"
    ),
    "bytes that double": text("a") + call(ENCODE, text("x"), text("latin1")) + b"q\x61"
    + b"".join(call(ENCODE, b"h\x61", text("hex")) + b"q\x61" for _ in range(34)),
    "a slow codec": text("a") + call(ENCODE, text("é1" * 300_000), text("punycode")),
    "text again and again": text("a") + text("x" * 200_000) + b"q\x61"
    + b"](" + b"".join(call(ENCODE, b"h\x61", text("latin1")) for _ in range(6000)) + b"e",
    "a tensor of lists": text("a") + call(name("torch", "FloatTensor"), lists(32)),
    "a large empty tensor": text("a") + call(name("torch", "FloatTensor"), number(2**33)),
    "scales of lists": text("a") + call(
        name("torch._utils", "_rebuild_qtensor"), storage(text("0"), 1), number(0), b"(K\x01t", b"(K\x01t",
        b"(" + name("torch", "per_channel_affine") + lists(32) + lists(32) + b"K\x00t", b"\x89", b"}",
    ),
    "a function of tuples": text("a") + tuples() + b"(tR",
    "a class of tuples": text("a") + tuples() + b")\x81",
    "a wide tensor copied": text("a") + call(
        name("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"), WIDE, name("torch", "float64"), text("cpu"), b"\x89"
    ),
    "a wide sparse tensor": text("a") + call(
        name("torch._utils", "_rebuild_sparse_tensor"), call(name("torch.serialization", "_get_layout"), text("torch.sparse_coo")),
        b"(" + tensor((1, 2**34), (0, 0)) + tensor((2**34,), (0,)) + b"(" + number(4) + b"tt",
    ),
    "a long state": text("a") + call(name("collections", "OrderedDict")) + b"q\x61" + b"}(" + b"".join(
        text(str(i)) + b"K\x01" for i in range(20_000)) + b"uq\x60" + b"b" + b"".join(b"h\x60b" for _ in range(40_000)),
    "layout of tuples": text("a") + call(name("torch.serialization", "_get_layout"), tuples()),
}  # fmt: skip


def in_archive(path: Path, pickled: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", bytes(4))
        archive.writestr("archive/version", "3\n")


def without_archive(path: Path, pickled: bytes, keys: bytes = b"](" + text("0") + b"e") -> None:
    magic = number(0x1950A86A20F9469CFC6C)
    parts = [magic, b"M\xe9\x03", b"}", pickled[2:-1], keys]
    data = b"".join(b"\x80\x02" + part + b"." for part in parts)
    path.write_bytes(data + struct.pack("<q", 1) + bytes(4))


def make_pickles(folder: Path) -> None:
    for label, pair in PICKLES.items():
        pickled = b"\x80\x02}(" + pair + b"u."
        in_archive(folder / f"{label}.bin", pickled)
        old = pickled.replace(text("cpu") + number(1) + b"tQ", text("cpu") + number(1) + b"NtQ")
        without_archive(folder / f"{label}, no archive.bin", old)
    good = b"\x80\x02}(" + text("a") + GOOD.replace(b"tQ", b"NtQ") + b"u."
    without_archive(folder / "keys of tuples, no archive.bin", good, b"](" + tuples() + b"e")
    without_archive(
        folder / "a storage of terabytes, no archive.bin", good.replace(number(1) + b"NtQ", number(2**40) + b"NtQ")
    )


def record(kind: str, module: str = "torch.distributed.checkpoint.metadata", **state: bytes) -> bytes:
    items = b"".join(text(key) + value for key, value in state.items())
    return name(module, kind) + b")\x81}(" + items + b"ub"


def size(*axes: int) -> bytes:
    return call(name("torch", "Size"), b"(" + b"".join(map(number, axes)) + b"t")


def metadata(**changed: bytes) -> bytes:
    """The index of one tensor of four numbers, with parts replaced."""
    parts = {
        "name": text("model.a"), "fqn": text("model.a"), "path": b"(" + text("model") + text("a") + b"t", "size": size(4), "offsets": size(0),
        "state": b"(" + name("torch", "float32") + b"t", "file": text("__0_0.distcp"), "more": b"", "chunks": b"",
    } | changed  # fmt: skip
    chunks = (
        parts["chunks"] or b"](" + record("ChunkStorageMetadata", offsets=parts["offsets"], sizes=parts["size"]) + b"e"
    )
    properties = (
        name("torch.distributed.checkpoint.metadata", "TensorProperties") + b")\x81" + parts["state"] + b"bq\x5f"
    )
    entry = record("TensorStorageMetadata", properties=properties, size=parts["size"], chunks=chunks)
    index = record("MetadataIndex", fqn=parts["fqn"], offset=parts["offsets"], index=b"K\x00")
    info = record(
        "_StorageInfo", "torch.distributed.checkpoint.filesystem",
        relative_path=parts["file"], offset=b"K\x00", length=number(4096),
    )  # fmt: skip
    return b"\x80\x02" + record(
        "Metadata", state_dict_metadata=b"}(" + parts["name"] + entry + parts["more"] + b"u",
        planner_data=b"}(" + parts["name"] + parts["path"] + b"u", storage_data=b"}(" + index + info + b"u",
    ) + b"."  # fmt: skip


PATH = name("pathlib", "PosixPath")
DOUBLED = text("x" * 64) + b"q\x61" + b"".join(call(PATH, b"h\x61", b"h\x61") + b"q\x61" for _ in range(26))
INDICES: dict[str, bytes] = {
    "name of tuples": metadata(fqn=tuples()),
    "text that doubles": metadata(file=DOUBLED),
    "a third of a million axes": metadata(size=call(name("torch", "Size"), b"(" + b"K\x01" * 300_000 + b"t")),
    "axes again and again": metadata(
        more=text("b") + b"(" + b"K\x01" * 200_000 + b"tq\x61" + b"]("
        + b"".join(call(name("torch", "Size"), b"h\x61") for _ in range(5000)) + b"e"
    ),
    "no dtype": metadata(state=b")"),
    "empty path": metadata(path=b")"),
    "path of tuples": metadata(path=b"(" + tuples() + b"t"),
    "a long path": metadata(path=b"(" + text("x" * 200) * 20_000 + b"t"),
    "a list of pieces in many places": metadata(
        size=size(0), chunks=b"](" + record("ChunkStorageMetadata", offsets=size(0), sizes=size(0)) + b"q\x61" + b"h\x61" * 60_000 + b"eq\x60",
        more=b"".join(
            text(f"t{i}") + record("TensorStorageMetadata", properties=b"h\x5f", size=size(0), chunks=b"h\x60") for i in range(3000)
        ),
    ),
}  # fmt: skip


def make_indices(folder: Path) -> None:
    for label, data in INDICES.items():
        place = folder / label
        place.mkdir()
        (place / ".metadata").write_bytes(data)
        (place / "__0_0.distcp").write_bytes(bytes(4096))


def safetensors(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def make_headers(folder: Path) -> None:
    """Safetensors, indices, configurations and GGUF whose headers alone are hostile."""
    one = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    keys = b",".join(b'"a%d":%s' % (i, one) for i in range(80_000))
    texts = {
        "keys twice": b"{" + keys + b',"a79999":' + one + b"}",
        "many values": b"[" + b"[]," * 7_000_000 + b"0]",
        "deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        "a long number": b'{"a":' + b"9" * 3_000_000 + b"}",
        "a long name twice": b'{"' + b"x" * 1_000_000 + b'":0,"' + b"x" * 1_000_000 + b'":0}',
    }
    for label, text in texts.items():
        (folder / f"{label}.safetensors").write_bytes(safetensors(text))
        for name in ("model.safetensors.index.json", "config.json", "adapter_config.json"):
            place = folder / f"{label}, {name.split('.')[0]}"
            place.mkdir()
            (place / name).write_bytes(text)
            if name == "config.json":
                (place / "model.safetensors").write_bytes(safetensors(b'{"a":' + one + b"}"))
    head, word = b"GGUF" + struct.pack("<I", 3), lambda name: struct.pack("<Q", len(name)) + name
    arrays = struct.pack("<IQ", 9, 8000) + (struct.pack("<IQ", 9, 100) + struct.pack("<IQ", 4, 0) * 100) * 8000
    gguf = {
        "many tensors": struct.pack("<QQ", 10**6, 0) + bytes(30 * 10**6),
        "a count": struct.pack("<QQ", 2**62, 1),
        "arrays of arrays": struct.pack("<QQ", 0, 1) + word(b"a") + struct.pack("<I", 9) + arrays,
        "a long text": struct.pack("<QQ", 0, 1) + struct.pack("<Q", 2**60) + b"a",
        "sixty-four axes": struct.pack("<QQ", 1, 0) + word(b"a") + struct.pack("<I", 64) + struct.pack("<q", 2) * 64 + bytes(12),
    }  # fmt: skip
    for label, data in gguf.items():
        (folder / f"{label}.gguf").write_bytes(head + data)


def nf4(**said: Any) -> dict[str, Any]:
    import torch

    state = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "float32",
        "shape": [8, 16],
        "nested_blocksize": 256,
        "nested_offset": 0.0,
    }
    state |= {"nested_dtype": "float32", **said}
    blocks = -(-128 // state["blocksize"]) if isinstance(state["blocksize"], int) else 2
    return {
        "a.weight": torch.zeros(64, 1, dtype=torch.uint8),
        "a.weight.absmax": torch.zeros(blocks, dtype=torch.uint8),
        "a.weight.quant_map": torch.zeros(16),
        "a.weight.nested_absmax": torch.zeros(1),
        "a.weight.nested_quant_map": torch.zeros(256),
        "a.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def make_quantised(folder: Path) -> None:
    """Maps whose scales or shapes say more than there is."""
    import torch
    from safetensors.torch import save_file

    codes, scales = torch.zeros(8, 16, dtype=torch.int8), torch.ones(8)
    words = {
        "a.qweight": torch.zeros(2, 8, dtype=torch.int32),
        "a.qzeros": torch.zeros(1, 1, dtype=torch.int32),
        "a.scales": torch.ones(1, 8),
    }
    files: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "a huge block": (nf4(blocksize=2**45), {}),
        "an outer block": (nf4(nested_blocksize=10**30), {}),
        "a huge shape": (nf4(shape=[2**31, 2**31]), {}),
        "an offset": ({**nf4(), **nf4(nested_offset=10**400)}, {}),
        "empty layout": ({"a.weight": codes, "a.SCB": scales, "a.weight_format": torch.zeros(0, dtype=torch.uint8)}, {}),
        "a weight without axes": ({"a.weight": codes[0, 0].clone(), "a.SCB": scales}, {}),
        "a packed number": ({**nf4(), "a.weight": torch.tensor(0, dtype=torch.uint8)}, {}),
        "a map without axes": ({"a.weight": torch.tensor(1.0)}, {}),
        "a scaled number": ({"a.weight": codes[0, 0].clone(), "a.weight_scale": torch.ones(1)}, {}),
        "groups": (words, {"quant_method": "gptq", "bits": 4, "group_size": 10**30, "checkpoint_format": "gptq_v2"}),
        "a method": (words, {"quant_method": [[[0] * 100] * 100] * 100, "bits": 4}),
    }  # fmt: skip
    for label, (tensors, settings) in files.items():
        place = folder / label
        place.mkdir()
        save_file(tensors, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps({"quantization_config": settings}))


def make_adapters(folder: Path) -> None:
    """Adapters on a base of one map."""
    import torch
    from safetensors.torch import save_file

    base = folder / ".base"
    base.mkdir()
    save_file({"a.weight": torch.eye(8)}, base / "model.safetensors")
    parts = {"base_model.model.a.lora_A.weight": torch.ones(2, 8), "base_model.model.a.lora_B.weight": torch.ones(8, 2)}
    good = {"peft_type": "LORA", "base_model_name_or_path": str(base), "lora_alpha": 1, "r": 2}
    nested: Any = 0
    for _ in range(900):
        nested = [nested]
    deep = ".".join("a" * 100_000)
    changes: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "patterns": ({"alpha_pattern": {"(a+)+b": 1}}, {}),
        "choices": ({"alpha_pattern": {"a?" * 100 + "b": 1}}, {}),
        "many patterns": ({"alpha_pattern": {f".*{i}.*x.*": 1 for i in range(9_000)}}, {f"base_model.model.{'a' * 200}.a.lora_A.weight": torch.ones(2, 8)}),
        "a huge alpha": ({"lora_alpha": 10**400}, {}),
        "a nested alpha": ({"lora_alpha": nested}, {}),
        "a nested kind": ({"peft_type": nested}, {}),
        "a nested start": ({"init_lora_weights": nested}, {}),
        "a nested option": ({"use_qalora": nested}, {}),
        "no axes": ({}, {"base_model.model.a.lora_A.weight": torch.tensor(1.0)}),
        "whole numbers": ({}, {"base_model.model.a.lora_B.weight": torch.ones(8, 2, dtype=torch.int64)}),
        "no rank": ({}, {"base_model.model.a.lora_A.weight": torch.ones(0, 8)}),
        "a long name": ({}, {f"base_model.model.{deep}.lora_A.weight": torch.ones(2, 8)}),
        "itself": ({"base_model_name_or_path": "."}, {}),
        "an address": ({"base_model_name_or_path": "http://127.0.0.1:9/x"}, {}),
        "another machine": ({"base_model_name_or_path": r"\\127.0.0.1\x"}, {}),
    }  # fmt: skip
    for label, (settings, tensors) in changes.items():
        place = folder / label
        place.mkdir()
        save_file({**parts, **tensors}, place / "adapter_model.safetensors")
        (place / "adapter_config.json").write_text(json.dumps({**good, **settings}))


MAKERS: dict[str, Callable[[Path], None]] = {
    "pickles": make_pickles,
    "indices": make_indices,
    "headers": make_headers,
    "quantised": make_quantised,
    "adapters": make_adapters,
}


def read(path: Path) -> str:
    import locater

    name = "a.weight" if path.is_dir() and not (path / ".metadata").exists() else "a"
    try:
        locater.scan(path, query=name, key=name, heads=1)
    except locater.LocaterError as error:
        return (
            "refused" if len(str(error).splitlines()) == 1 and len(str(error)) < 2000 else f"long: {str(error)[:300]}"
        )
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:300]
    return "read"


def main() -> None:
    import locater.families

    assert locater.families
    peak: Any = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # noqa: E731
    for path in sorted(Path(sys.argv[1]).glob("[!.]*")):
        print(json.dumps([path.name]), flush=True)  # what is named last is what the process died of
        before, start = peak(), time.monotonic()
        signal.alarm(LIMIT_S)
        said = read(path)
        signal.alarm(0)
        print(json.dumps([path.name, said, round(time.monotonic() - start, 2), peak() - before]), flush=True)


if __name__ == "__main__":
    main()
