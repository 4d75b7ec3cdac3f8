"""Folders of torch.distributed.checkpoint: pieces put together, only those that are needed, and bad folders refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import locater
from locater.errors import LocaterError
from locater.sources.dcp_folder import DcpWeights
from locater.sources.open_source import open_source
from tests.conftest import Result
from tests.processes import ranks
from tests.sharded import HEADS, llama, mesh_of, split, titan

NAMES = ["--query", "layers.*.attention.wq.weight", "--key", "layers.*.attention.wk.weight", "--heads", str(HEADS)]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(make: Callable[[], Any], dp: int, tp: int, folder: Path, rank: int) -> None:
    """A model after a step, beside its optimizer and other state; each rank writes its pieces."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    dist.init_process_group("gloo")
    model = split(make(), mesh_of(dp, tp))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)  # parameters stay, moments are written
    out = model(torch.arange(20).view(2, 10))
    getattr(out, "logits", out).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "train_state": {"step": 1}}, checkpoint_id=folder / "whole")
    dcp.save(weights, checkpoint_id=folder / "alone")
    dist.barrier()
    print("done", flush=True)


def compare(make: Callable[[], Any], folder: Path) -> None:
    """Every tensor, whole and by rows, with the model that was saved; and the scan with that of the model."""
    model = make()
    expected = model.state_dict()
    for part in ("whole", "alone"):
        weights = DcpWeights(folder / part)
        assert weights.names() == expected.keys()
        for name, tensor in expected.items():
            assert weights.shape(name) == tuple(tensor.shape)
            assert torch.equal(weights.read(name), tensor), name
            rows = [(len(tensor) - 3, len(tensor)), (0, 1), (2, 7)]
            assert torch.equal(weights.read(name, rows), torch.cat([tensor[a:b] for a, b in rows])), name
        names = {}
        if hasattr(model, "config"):
            (folder / part / "config.json").write_text(json.dumps(model.config.to_dict()))
        else:
            names = dict(query=NAMES[1], key=NAMES[3], heads=HEADS)
        assert locater.scan(folder / part, **names).rows == locater.scan(model, **names).rows


def imports() -> None:
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401


def saved_by(count: int, make: Callable[[], Any], dp: int, tp: int, folder: Path) -> None:
    imports()
    assert all("done" in text for text in ranks(partial(save, make, dp, tp, folder), folder, count))
    compare(make, folder)


def test_pieces_of_two_ranks(tmp_path: Path) -> None:
    saved_by(2, llama, 2, 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "dp", "tp"), [(titan, 2, 2), (llama, 2, 2), (titan, 4, 1)])
def test_pieces_of_four_ranks(make: Callable[[], Any], dp: int, tp: int, tmp_path: Path) -> None:
    saved_by(4, make, dp, tp, tmp_path)


def in_one_process(state: dict[str, Any], folder: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=folder)
    return folder


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return in_one_process({"model": titan().state_dict(), "step": 1}, tmp_path_factory.mktemp("dcp") / "good")


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "checkpoint"))


def test_only_what_is_needed_is_read(good: Path, tmp_path: Path) -> None:
    """Of a model with large tensors beside its queries and keys, a scan reads little more than these."""
    state = {**titan().state_dict(), "large.weight": torch.zeros(1000, 1000)}
    path = in_one_process({"model": state}, tmp_path / "large")
    scan = partial(locater.scan, path, query=NAMES[1], key=NAMES[3], heads=HEADS)
    scan()
    before = bytes_read()
    scan()
    metadata = (path / ".metadata").stat().st_size
    maps = sum(state[f"layers.{i}.attention.{name}.weight"].numel() * 8 for i in range(2) for name in ("wq", "wk"))
    assert maps < bytes_read() - before < 1.5 * (maps + metadata) + 20_000 < 4_000_000


def bytes_read() -> int:
    if not os.path.exists("/proc/self/io"):
        pytest.skip("needs /proc")
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.fixture
def refused(run: Callable[..., Result]) -> Callable[[Path], str]:
    """The one line in which a scan of a folder is refused."""

    def line(folder: Path) -> str:
        result = run("scan", folder, *NAMES)
        assert result.status == 2, result
        assert len(result.err.splitlines()) == 1, result.err
        return str(result.err)

    return line


def changed(folder: Path, change: Callable[[Any], None]) -> Path:
    """With another index, written by PyTorch's own classes."""
    path = folder / ".metadata"
    content = pickle.loads(path.read_bytes())
    change(content)
    path.write_bytes(pickle.dumps(content))
    return folder


def test_a_missing_file(folder: Path, refused: Callable[[Path], str]) -> None:
    (folder / "__0_0.distcp").unlink()
    assert "__0_0.distcp is not there (1 of 1 files with pieces of the model are missing)" in refused(folder)


def test_a_truncated_file(folder: Path, refused: Callable[[Path], str]) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "__0_0.distcp: has fewer than the" in refused(folder)


def test_a_save_that_was_cut_off(folder: Path, refused: Callable[[Path], str]) -> None:
    (folder / ".metadata").unlink()
    assert "holds __0_0.distcp and no .metadata, which is written last" in refused(folder)


@pytest.mark.parametrize("size", [0, 10, 1000])
def test_an_index_that_was_cut_off(folder: Path, size: int, refused: Callable[[Path], str]) -> None:
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes()[:size])
    assert ".metadata: not the index of a checkpoint" in refused(folder)


class Foreign:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def test_an_index_that_would_run_code(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[[Path], str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder / ".metadata").write_bytes(pickle.dumps(Foreign()))
    assert "names 'posix.mkdir', which the index of a checkpoint does not need: refused" in refused(folder)
    assert not (tmp_path / "ran").exists()


def first_piece(content: Any) -> tuple[Any, Any]:
    return next((i, x) for i, x in content.storage_data.items() if i.fqn == "model.layers.0.attention.wq.weight")


def test_a_piece_that_is_no_tensor(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[[Path], str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = BytesIO()
    torch.save([Foreign(), torch.zeros(32, 32, dtype=torch.float64)], data)
    place_of_wq(folder, data.getvalue())
    assert "its piece of layers.0.attention.wq.weight holds more than a tensor: refused" in refused(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.zeros(33, 32, dtype=torch.float64), r"is torch.float64 \[33, 32\], and .metadata says torch.float64 \[32, 32\]"),
        (torch.zeros(32, 32, dtype=torch.int64), r"is torch.int64 \[32, 32\], and .metadata says torch.float64"),
        ([torch.zeros(32, 32, dtype=torch.float64), torch.zeros(3)], "is not one tensor with its data"),
        (torch.zeros(32, 31), "is larger than the bytes that hold it"),
    ],
)  # fmt: skip
def test_a_piece_that_is_another_tensor(folder: Path, tensor: Any, said: str) -> None:
    data = BytesIO()
    torch.save(tensor, data)
    place_of_wq(folder, data.getvalue())
    with pytest.raises(LocaterError, match=said):
        open_source(folder)[0].read("layers.0.attention.wq.weight")


def place_of_wq(folder: Path, data: bytes) -> None:
    """Other bytes in place of a piece."""
    path = folder / "__0_0.distcp"
    start = path.stat().st_size
    path.write_bytes(path.read_bytes() + data)
    changed(folder, lambda content: replace(content, offset=start, length=len(data)))


def replace(content: Any, **changes: Any) -> None:
    index, info = first_piece(content)
    for name, value in changes.items():
        setattr(info, name, value)
    content.storage_data[index] = info


def test_a_file_elsewhere(folder: Path, refused: Callable[[Path], str]) -> None:
    changed(folder, lambda content: replace(content, relative_path="../secret.distcp"))
    assert "names the file '../secret.distcp', which is not in its folder: refused" in refused(folder)


def test_compressed_pieces(folder: Path, refused: Callable[[Path], str]) -> None:
    changed(folder, lambda content: replace(content, transform_descriptors=["zstd"]))
    assert "is stored compressed or encrypted" in refused(folder)


def test_pieces_that_do_not_make_up_the_tensor(folder: Path, refused: Callable[[Path], str]) -> None:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    def halve(content: Any) -> None:
        entry = content.state_dict_metadata["model.layers.0.attention.wq.weight"]
        entry.chunks[0] = ChunkStorageMetadata(entry.chunks[0].offsets, torch.Size([16, 32]))

    changed(folder, halve)
    assert "the pieces of model.layers.0.attention.wq.weight are not as large as it is, [32, 32]" in refused(folder)


def test_overlapping_pieces(folder: Path) -> None:
    """Twice the same half: as many numbers as the tensor has, and half of it is missing."""
    import copy

    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    name = "model.layers.0.attention.wk.weight"

    def overlap(content: Any, second: int = 4) -> None:
        entry = content.state_dict_metadata[name]
        first = next(index for index in content.storage_data if index.fqn == name)
        info = content.storage_data[first]
        info.length //= 2
        entry.chunks[:] = [ChunkStorageMetadata(torch.Size([at, 0]), torch.Size([8, 32])) for at in (0, second)]
        content.storage_data[MetadataIndex(name, torch.Size([second, 0]))] = copy.copy(info)

    before = (folder / ".metadata").read_bytes()
    changed(folder, partial(overlap, second=0))
    with pytest.raises(LocaterError, match=rf"two pieces of {name} begin at \[0, 0\]"):
        DcpWeights(folder)
    (folder / ".metadata").write_bytes(before)
    changed(folder, overlap)
    weights = DcpWeights(folder)
    piece = torch.zeros(8, 32, dtype=torch.float64)
    weights._piece = lambda *_: piece  # type: ignore[method-assign]  # both halves can be read
    with pytest.raises(LocaterError, match=r"pieces of layers.0.attention.wk.weight overlap, and others are missing"):
        weights.read("layers.0.attention.wk.weight")


def test_pieces_that_are_the_same_bytes(folder: Path, refused: Callable[[Path], str]) -> None:
    """Every piece names the largest one's bytes: a small file would be read as a large model."""

    def change(content: Any) -> None:
        tensors = [info for index, info in content.storage_data.items() if index.offset is not None]
        largest = max(tensors, key=lambda info: info.length)
        for info in tensors:
            info.relative_path, info.offset, info.length = largest.relative_path, largest.offset, largest.length

    assert "__0_0.distcp: pieces overlap" in refused(changed(folder, change))


def test_attributes_of_functions_and_classes_are_not_set(tmp_path: Path) -> None:
    """They would stay, and count when the next file is read."""
    import locater.sources.dcp_folder as module

    (tmp_path / "__0_0.distcp").touch()
    for name, state in ((b"ctorch.serialization\n_get_layout\n", b"}K\x01K\x02s"), (b"ctorch.distributed.checkpoint.metadata\nMetadata\n", b"N}\x8c\x01xK\x02s\x86")):  # fmt: skip
        (tmp_path / ".metadata").write_bytes(b"\x80\x04" + name + state + b"b.")
        with pytest.raises(LocaterError, match=r"not the index of a checkpoint \(attributes of a"):
            DcpWeights(tmp_path)
    assert not vars(module._text)
    assert not hasattr(module.Metadata, "x")


def test_no_model_or_several(tmp_path: Path, refused: Callable[[Path], str]) -> None:
    state: dict[str, Tensor] = {"weight": torch.zeros(2, 2)}
    optimizer = in_one_process({"optimizer": {"state": state}}, tmp_path / "optimizer")
    assert "no model among its states (optimizer.state)" in refused(optimizer)
    several = in_one_process({"a": {"model": state}, "b": {"model": state}}, tmp_path / "several")
    assert "several models among its states (a.model, b.model)" in refused(several)


class Nested:
    """A path whose only part is a list of lists of lists: a few bytes here, and 10**30 words as text."""

    def __reduce__(self) -> tuple[Any, ...]:
        return PurePosixPath, (many_lists(),)


def many_lists() -> list[Any]:
    lists: list[Any] = ["word"]
    for _ in range(30):
        lists = [lists] * 10
    return lists


@pytest.mark.parametrize("place", ["path", "sizes", "keys", "file"])
def test_an_index_that_would_never_end(place: str, folder: Path, refused: Callable[[Path], str]) -> None:
    def change(content: Any) -> None:
        if place == "path":
            content.storage_meta = Nested()
        elif place == "sizes":
            next(iter(content.state_dict_metadata.values())).size = many_lists()
        elif place == "keys":
            content.planner_data = dict.fromkeys(content.state_dict_metadata, (many_lists(),))
        else:
            replace(content, relative_path=many_lists())

    assert ".metadata: " in refused(changed(folder, change))


@pytest.mark.parametrize(
    ("begin", "end"), [(b"}", b"K\x01s."), (b"(", b"K\x01d."), (b"\x8f(", b"\x90.")], ids=["item", "dictionary", "set"]
)
def test_keys_that_would_be_hashed_for_ever_are_refused_at_once(tmp_path: Path, begin: bytes, end: bytes) -> None:
    """Ten to the thirtieth tuples in 675 bytes: hashing them never ends."""
    key: Any = "w"
    for _ in range(30):
        key = (key,) * 10
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + begin + pickle.dumps(key, protocol=2)[2:-1] + end)
    (tmp_path / "__0_0.distcp").touch()
    with pytest.raises(LocaterError, match=r"not the index of a checkpoint \(a (dictionary has a key|set)"):
        locater.scan(tmp_path)
