"""Damaged and hostile checkpoint files: each kind of fault is refused in one line that names the file, never read as
other numbers.

The named cases are here; `tests/sources/test_fuzz.py` tries thousands of mutations against the libraries that define the
formats.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from locater import LocaterError, Scan, Statistics, scan
from locater.commands.load_model import load_model
from locater.sources.open_source import open_source
from tests.sources.test_readers import rows, shard

TWO = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "F32", "shape": [3], "data_offsets": [8, 20]},
}


def packed(header: dict[str, Any] | bytes, data: bytes = bytes(20)) -> bytes:
    """A safetensors file with this header, whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def changed(name: str, **values: object) -> bytes:
    return packed({**TWO, name: {**TWO[name], **values}})


def text(header: bytes) -> bytes:
    """TWO as JSON with the first `"shape": [2]` replaced by other bytes."""
    return packed(json.dumps(TWO).encode().replace(b'"shape": [2]', header, 1))


DAMAGE: dict[str, tuple[bytes, str]] = {
    "negative offset": (changed("a", data_offsets=[-8, 0]), "a negative number"),
    "overlap": (changed("b", data_offsets=[4, 16]), "tensor b begins at byte 4"),
    "gap": (packed({**TWO, "b": {**TWO["b"], "data_offsets": [12, 24]}}, bytes(24)), "tensor b begins at byte 12"),
    "end before begin": (changed("b", data_offsets=[20, 8]), "tensor b"),
    "bytes after the last tensor": (packed(TWO, bytes(21)), "1 byte more than its tensors"),
    "bytes missing": (packed(TWO, bytes(19)), "truncated"),
    "tensor twice": (packed(json.dumps(TWO).encode().replace(b'"b"', b'"a"')), "'a' occurs twice"),
    "field twice": (text(b'"shape": [2], "shape": [2]'), "'shape' occurs twice"),
    "shape that overflows": (packed({"a": {"dtype": "F32", "shape": [2**62, 16, 0], "data_offsets": [0, 0]}}, b""), "tensor a"),
    "shape beyond a machine's numbers": (packed({"a": {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]}}, b""), "tensor a"),
    "shape with a fraction": (text(b'"shape": [2.0]'), "2.0"),
    "shape with true": (text(b'"shape": [true, 2]'), "tensor a"),
    "shape with -0": (text(b'"shape": [2, -0]'), "a negative number"),
    "shape that is a number": (text(b'"shape": 2'), "tensor a"),
    "three offsets": (changed("a", data_offsets=[0, 8, 8]), "tensor a"),
    "unknown dtype": (changed("a", dtype="F33"), "tensor a has the dtype 'F33'"),
    "dtype that is a list": (changed("a", dtype=["F32"]), "tensor a has the dtype"),
    "missing field": (packed({**TWO, "a": {"dtype": "F32", "shape": [2]}}), "tensor a"),
    "entry that is a list": (packed({**TWO, "a": ["F32", [2], [0, 8]]}), "tensor a"),
    "metadata with a number": (packed({**TWO, "__metadata__": {"step": 3}}), "__metadata__"),
    "lone surrogate": (packed(json.dumps({**TWO, "__metadata__": {"x": "?"}}).encode().replace(b"?", rb"\ud800")), "header"),
    "not UTF-8": (packed(json.dumps(TWO).encode().replace(b"F32", b"F\xff2")), "UTF-8"),
    "another encoding": (packed(json.dumps(TWO).encode("utf-16")), "'{'"),
    "space in front": (packed(b" " + json.dumps(TWO).encode()), "'{'"),
    "NaN": (text(b'"shape": [NaN]'), "NaN"),
    "deep nesting": (packed(b'{"a":' + b"[" * 200_000), "nested"),
    "half a byte": (packed({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, bytes(1)), "tensor a"),
    "empty": (b"", "0 bytes"),
    "header longer than the file": (struct.pack("<Q", 2**40) + b"{}", "truncated in its header"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_safetensors_are_refused(tmp_path: Path, damage: str) -> None:
    data, says = DAMAGE[damage]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(LocaterError) as error:
        open_source(path)
    assert says in str(error.value)
    assert str(path) in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    if damage not in ("tensor twice", "space in front", "shape beyond a machine's numbers", "entry that is a list"):
        with pytest.raises(SafetensorError):  # the library is more lenient in these four alone
            safe_open(path, "pt")


def test_a_safetensors_header_beyond_the_limit_is_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:  # sparse: no disk is used
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(100_000_100)
    with pytest.raises(LocaterError, match="header"):
        open_source(path)


def test_every_dtype_of_the_format_is_known(tmp_path: Path) -> None:
    """Also those that no attention map is stored in: such a tensor beside them does not make a file unreadable."""
    bits = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16,
            "U16": 16, "I32": 32, "U32": 32, "C64": 64, "I64": 64, "U64": 64}  # fmt: skip
    for dtype, size in bits.items():
        entry = {"dtype": dtype, "shape": [4], "data_offsets": [0, size // 2]}
        (tmp_path / "x.safetensors").write_bytes(packed({"a": entry}, bytes(size // 2)))
        safe_open(tmp_path / "x.safetensors", "pt")
        assert open_source(tmp_path / "x.safetensors")[0].shape("a") == (4,)


def test_a_field_more_in_an_entry_is_read_over(tmp_path: Path) -> None:
    """As the library does."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(changed("a", note=1))
    with safe_open(path, "pt") as file:
        assert torch.equal(open_source(path)[0].read("a"), file.get_tensor("a"))


def test_safetensors_without_positioned_reads(saved_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has neither preadv nor pread."""
    expected = rows(saved_llama)
    monkeypatch.delattr(os, "preadv", raising=False)
    monkeypatch.delattr(os, "pread", raising=False)
    assert rows(saved_llama) == expected


def edited_index(folder: Path, stem: str, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / f"{stem}.index.json"
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_an_index_may_not_lead_out_of_its_folder(saved_llama: Path, tmp_path: Path, suffix: str) -> None:
    tensors = load_file(saved_llama / "model.safetensors")
    inner = tmp_path / "inner"
    inner.mkdir()
    places = shard(tensors, inner, saved_llama, suffix)
    first, stem = (
        sorted(set(places.values()))[0],
        "model.safetensors" if suffix == "safetensors" else "pytorch_model.bin",
    )
    shutil.move(inner / first, tmp_path / first)
    for outside in (
        f"../{first}",
        str(tmp_path / first),
        f"sub/../../{first}",
        f"..\\{first}",
        f"C:\\{first}",
        "",
        ".",
    ):
        places_now = {name: outside if place == first else place for name, place in places.items()}
        edited_index(inner, stem, lambda document, new=places_now: document.update(weight_map=new))
        with pytest.raises(LocaterError, match=r"index\.json: .*shard"):
            open_source(inner)


@pytest.mark.parametrize(
    "weight_map",
    [[], {}, None, 3, {"a": 3}, {"a": None}, {"a": ["x"]}, {"a": {}}, {"a": "x" * 5000}, {"a": "x\0y"}, "missing"],
)
def test_an_index_of_the_wrong_kind(tmp_path: Path, weight_map: object) -> None:
    document = {} if weight_map == "missing" else {"weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(document))
    with pytest.raises(LocaterError, match=r"index\.json: "):
        open_source(tmp_path)


def test_an_index_that_places_a_tensor_twice(saved_llama: Path, tmp_path: Path) -> None:
    places = shard(load_file(saved_llama / "model.safetensors"), tmp_path, saved_llama)
    (tmp_path / "model.safetensors.index.json").write_text(
        f'{{"weight_map": {{"lm_head.weight": "{sorted(set(places.values()))[1]}", {json.dumps(places)[1:]}}}'
    )
    with pytest.raises(LocaterError, match=r"'lm_head\.weight' occurs twice"):
        open_source(tmp_path)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_that_contradict_their_index(saved_llama: Path, tmp_path: Path, suffix: str) -> None:
    """A tensor in two shards, or in another one than the index says: neither is chosen for the reader."""
    tensors = load_file(saved_llama / "model.safetensors")
    places = shard(tensors, tmp_path, saved_llama, suffix)
    one, two = sorted(set(places.values()))
    name = "model.layers.0.self_attn.q_proj.weight"
    part = {n: t for n, t in tensors.items() if places[n] == two} | {name: tensors[name] + 1}
    save_file(part, tmp_path / two) if suffix == "safetensors" else torch.save(part, tmp_path / two)
    with pytest.raises(LocaterError, match=rf"{name} is in {one} and in {two}"):
        open_source(tmp_path)
    stem = "model.safetensors" if suffix == "safetensors" else "pytorch_model.bin"
    shard(tensors, tmp_path, saved_llama, suffix)
    edited_index(tmp_path, stem, lambda document: document["weight_map"].update({name: two}))
    with pytest.raises(LocaterError, match=rf"{name} is in {one}, the index says {two}"):
        open_source(tmp_path)


@pytest.fixture
def pickled(saved_llama: Path, tmp_path: Path) -> Path:
    """The model as a zip archive of torch.save."""
    shutil.copy(saved_llama / "config.json", tmp_path)
    torch.save(load_file(saved_llama / "model.safetensors"), tmp_path / "pytorch_model.bin")
    return tmp_path / "pytorch_model.bin"


def rewritten(path: Path, how: int, twice: str = "nothing") -> None:
    """The archive once more, with another compression, the record that ends in `twice` two times."""
    with zipfile.ZipFile(path) as old:
        records = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(path, "w", how) as new:
        for name, data in records.items():
            for _ in range(1 + name.endswith(twice)):
                new.writestr(name, data)


def test_a_compressed_pickle_is_refused(pickled: Path, saved_llama: Path) -> None:
    rewritten(pickled, zipfile.ZIP_STORED)
    assert rows(pickled) == rows(saved_llama)
    rewritten(pickled, zipfile.ZIP_DEFLATED)
    with pytest.raises(LocaterError, match=r"pytorch_model\.bin: .* is compressed"):
        open_source(pickled)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_pickle_with_a_record_twice_is_refused(pickled: Path) -> None:
    rewritten(pickled, zipfile.ZIP_STORED, "data/0")
    with pytest.raises(LocaterError, match=r"pytorch_model\.bin: .*data/0 occurs twice"):
        open_source(pickled)


def test_a_pickle_whose_records_overlap_is_refused(pickled: Path) -> None:
    data = bytearray(pickled.read_bytes())
    with zipfile.ZipFile(pickled) as archive:
        record = next(info for info in archive.infolist() if info.filename.endswith("data/0"))
    at = record.header_offset + 28  # the length of the local extra field: the data would begin 64 bytes later
    data[at : at + 2] = struct.pack("<H", struct.unpack_from("<H", data, at)[0] + 64)
    pickled.write_bytes(data)
    with pytest.raises(LocaterError, match=r"pytorch_model\.bin: .*overlap"):
        open_source(pickled)


def test_a_pickle_with_a_record_marked_as_a_folder_is_refused(pickled: Path) -> None:
    """For such a record torch gives memory that nobody wrote."""
    data = bytearray(pickled.read_bytes())
    at = data.index(b"PK\1\2", data.rindex(b"data/0", 0, data.rindex(b"data/1")) - 60)  # its entry in the directory
    data[at + 38] |= 0x10
    pickled.write_bytes(data)
    with pytest.raises(LocaterError, match=r"pytorch_model\.bin: .*data/0 is marked as a folder"):
        open_source(pickled)


def test_tensors_that_claim_more_numbers_than_the_file_holds(pickled: Path) -> None:
    """A stride of 0 makes terabytes of four bytes. One that nobody reads refuses nothing."""
    torch.save({"a": torch.zeros(1).expand(2**20, 2**20), "b": torch.ones(2)}, pickled)
    weights, _ = open_source(pickled)
    assert weights.read("b").tolist() == [1, 1]
    with pytest.raises(LocaterError, match=r"pytorch_model\.bin: a claims 4,398,046,511,104 bytes"):
        weights.read("a")


def test_a_record_longer_than_its_storage_is_refused(pickled: Path) -> None:
    """By whatever it is longer: so does torch, and a byte put in before the numbers would turn them into others."""
    torch.save({"a": torch.ones(3), "b": torch.arange(4.0)}, pickled)
    with zipfile.ZipFile(pickled) as old:
        records = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(pickled, "w") as new:
        for name, data in records.items():
            new.writestr(name, b"1" + data if name.endswith("data/0") else data)
    with pytest.raises(RuntimeError, match="record size"):
        torch.load(pickled, weights_only=True)
    with pytest.raises(LocaterError, match="its record has another size"):
        open_source(pickled)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_without_plain_numbers_are_refused_when_read(pickled: Path) -> None:
    torch.save({"a": torch.eye(3).to_sparse(), "b": torch.empty(2, device="meta"), "c": torch.ones(2)}, pickled)
    weights, _ = open_source(pickled)
    assert weights.read("c").tolist() == [1, 1]
    for name in "ab":
        with pytest.raises(LocaterError, match=rf"pytorch_model\.bin: {name} is not a dense tensor with data"):
            weights.read(name)


def special_files(folder: Path) -> dict[str, Callable[[Path], object]]:
    """Ways to make something that is no regular file."""
    return {
        "pipe": os.mkfifo,
        "socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
        "device": lambda path: path.symlink_to("/dev/zero"),
        "folder": Path.mkdir,
        "loop": lambda path: path.symlink_to(path),
        "dangling": lambda path: path.symlink_to(folder / "nowhere"),
    }


NAMES = [
    "model.safetensors",
    "loose.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "config.json",
    "own.gguf",
]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder", "loop", "dangling"])
def test_only_regular_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    """A pipe would hang the scan, a device never ends: each is named, wherever a checkpoint's file should be."""
    monkeypatch.chdir(tmp_path)  # a socket's name may not be long
    make = special_files(tmp_path)[kind]
    make(Path(name))
    if name == "config.json":
        save_file({"x": torch.ones(1)}, "other.safetensors")
    source = Path(name) if name == "own.gguf" else Path(".")
    if kind != "folder" or name != "own.gguf":
        with pytest.raises(LocaterError, match=name):
            open_source(source)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("name", ["x.json", "x.pt", "x.safetensors", "x.bin", "x.index.json", "x.gguf", "x"])
def test_a_pipe_that_is_named_is_refused(tmp_path: Path, name: str) -> None:
    pipe = tmp_path / name
    os.mkfifo(pipe)
    for read in (scan, Scan.load, Statistics.load):
        with pytest.raises(LocaterError, match="not a regular file"):
            read(pipe)


@pytest.mark.parametrize("name", ["x.json", "x.pt", "x.safetensors", "x.bin", "model.safetensors.index.json", "x.gguf"])
def test_an_empty_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(LocaterError, match=name):
        scan(tmp_path / name)


def test_a_name_that_no_file_can_have() -> None:
    for name in ("x" * 5000, "a\0b"):
        with pytest.raises(LocaterError):
            scan(name)


def test_a_configuration_nested_too_deep(saved_llama: Path, tmp_path: Path) -> None:
    shutil.copy(saved_llama / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(LocaterError, match=r"config\.json: not readable as JSON"):
        open_source(tmp_path)


def test_a_configuration_nested_too_deep_is_not_run_either(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' + "[" * 200_000)
    with pytest.raises(LocaterError, match=r"config\.json: not readable as JSON \(nested too deep\)"):
        load_model(str(tmp_path))


def test_layers_numbered_with_zeros_in_front_are_refused(saved_llama: Path, tmp_path: Path) -> None:
    """Layer 00 was read as layer 0 once more, and layer 1 not at all."""
    shutil.copy(saved_llama / "config.json", tmp_path)
    tensors = load_file(saved_llama / "model.safetensors")
    save_file({n.replace("layers.1.", "layers.00."): t for n, t in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(LocaterError, match=r"layers\.00\.self_attn\.q_proj\.weight does not write the number"):
        scan(tmp_path)


def test_a_gain_of_another_size_is_refused(saved_llama: Path, tmp_path: Path) -> None:
    """A single number was spread over all channels; 31 of 32 ended in an error from within."""
    shutil.copy(saved_llama / "config.json", tmp_path)
    tensors = load_file(saved_llama / "model.safetensors")
    for gain in (torch.ones(1), torch.ones(31), torch.tensor(2.0)):
        save_file({**tensors, "model.layers.1.input_layernorm.weight": gain}, tmp_path / "model.safetensors")
        with pytest.raises(
            LocaterError, match=r"layers\.1\.self_attn has a gain or a bias of shape .* where 32 numbers belong"
        ):
            scan(tmp_path)


def test_a_bias_beside_named_maps_of_another_size_is_refused(tmp_path: Path) -> None:
    maps = {"wq.weight": torch.eye(8), "wk.weight": torch.eye(8), "wq.bias": torch.ones(1)}
    save_file(maps, tmp_path / "x.safetensors")
    with pytest.raises(LocaterError, match=r"wq has a gain or a bias of shape \[1\] .* where 8 numbers belong"):
        scan(tmp_path / "x.safetensors", query="wq.weight", key="wk.weight", heads=2)


def test_a_pickle_whose_records_have_another_size_is_refused(pickled: Path) -> None:
    """Mapped, the tensor reached into the record behind it."""
    with zipfile.ZipFile(pickled) as old:
        records = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(pickled, "w") as new:
        for name, data in records.items():
            new.writestr(name, data[:-4] if name.endswith("data/3") else data)
    with pytest.raises(RuntimeError, match="record size"):
        torch.load(pickled, weights_only=True)
    with pytest.raises(LocaterError, match=r"pytorch_model\.bin: .* its record has another size"):
        open_source(pickled)


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": "x"}, {"rms_norm_eps": None}, {"rms_norm_eps": float("nan")}, {"rope_parameters": {"rope_theta": 0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2, "rope_theta": -1}}, {"rope_parameters": 3}, {"head_dim": "8"},
        {"num_key_value_heads": [2]}, {"num_key_value_heads": 1.5},
    ],
)  # fmt: skip
def test_settings_that_are_no_numbers_are_refused_from_python_too(
    saved_llama: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    shutil.copy(saved_llama / "model.safetensors", tmp_path)
    config = json.loads((saved_llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(LocaterError, match="correct config"):
        scan(tmp_path)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("assumptions", 3), ("assumptions", {}), ("layers", {}), ("layers", [3]), ("heads", [{}]), ("source", None),
        ("layers", [{"layer": "0", "name": "x"}]), ("heads", 3),
    ],
)  # fmt: skip
def test_damaged_scans_are_refused(saved_llama: Path, tmp_path: Path, part: str, change: object) -> None:
    scan(saved_llama).save(tmp_path / "scan.json")
    document = json.loads((tmp_path / "scan.json").read_text())
    assert len(Scan.load(tmp_path / "scan.json").rows) == 12
    (tmp_path / "scan.json").write_text(json.dumps({**document, part: change}))
    with pytest.raises(LocaterError, match=r"scan\.json: not "):
        Scan.load(tmp_path / "scan.json")


@pytest.mark.parametrize(
    "change",
    [
        {"F": -1.0},
        {"M": 1e301},
        {"M": 10**400},
        {"eigenvalues": [1.0]},
        {"drive": {"even": 3}},
        {"layer": 9},
        {"flags": [3]},
        {"head": True},
    ],
)
def test_damaged_heads_of_a_scan_are_refused(saved_llama: Path, tmp_path: Path, change: dict[str, object]) -> None:
    scan(saved_llama).save(tmp_path / "scan.json")
    document = json.loads((tmp_path / "scan.json").read_text())
    document["heads"][3].update(change)
    (tmp_path / "scan.json").write_text(json.dumps(document))
    with pytest.raises(LocaterError, match=r"scan\.json: not a scan that this version reads"):
        Scan.load(tmp_path / "scan.json")


@pytest.mark.parametrize(
    "change",
    [
        {"mean": torch.zeros(3)}, {"mean": [0.0]}, {"covariance": torch.zeros(8)}, {"first": torch.empty(8, device="meta")}, {"layer": -1},
        {"covariance": torch.zeros(1).expand(8, 8)}, {"covariance": torch.zeros(8, 8, dtype=torch.int8)}, {"kind": "cross"}, {"tokens": "many"}, {"name": 3}, {"nonsense": 1},
    ],
)  # fmt: skip
def test_damaged_statistics_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    given = {"layer": 0, "name": "x", "kind": "self", "tokens": 5, "mean": torch.zeros(8), "covariance": torch.eye(8)}
    document = {"schema": 1, "source": "x", "tokens": 5, "length": 5, "silent": ()}
    torch.save({**document, "inputs": [given]}, tmp_path / "good.pt")
    assert len(Statistics.load(tmp_path / "good.pt").inputs) == 1
    torch.save({**document, "inputs": [{**given, **change}]}, tmp_path / "bad.pt")
    with pytest.raises(LocaterError, match=r"bad\.pt: not statistics that this version reads"):
        Statistics.load(tmp_path / "bad.pt")


def test_a_name_that_is_a_number_and_a_text_is_refused(pickled: Path) -> None:
    torch.save({1: torch.zeros(2), "1": torch.ones(2)}, pickled)
    with pytest.raises(LocaterError, match="two of its tensors have one name"):
        open_source(pickled)
