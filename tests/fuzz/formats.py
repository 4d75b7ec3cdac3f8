"""Each format: how a good file is made, mutated and read, and what the library that defines the format makes of the
same file.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from locater import LocaterError, Statistics, compare, scan
from locater.sources.open_source import open_source
from tests.fuzz import dcp, mutate, seeds

Tensors = dict[str, bytes]


@dataclass(frozen=True)
class Format:
    """`read` gives what is compared, or raises LocaterError; `reference` gives the same from the library, or raises
    what it likes.
    """

    make: Callable[[Path], None]
    mutate: Callable[[Random, Path], None]
    read: Callable[[Path], Any]
    reference: Callable[[Path], Any] | None = None
    share: int = 1  # of the files that are tried, in 20ths


class NoReferenceError(Exception):
    """The library that defines the format does not say what this file holds."""


class Near:
    """A tensor that equals another within rounding."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach().double()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Near) or self.tensor.shape != other.tensor.shape:
            return False
        return torch.allclose(self.tensor, other.tensor, rtol=1e-4, atol=1e-5, equal_nan=True)

    __hash__ = None  # type: ignore[assignment]


def raw(tensor: Tensor) -> bytes:
    """A tensor's bytes and what they mean: NaN equals itself, and 0 is not -0."""
    flat = tensor.detach().contiguous().flatten()
    return f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + (
        flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
    )


def every_tensor(weights: Any) -> Tensors:
    """All tensors that can be read, whole and once more by rows; those refused one by one (quantised, sparse) are left
    out.
    """
    found = {}
    for name in weights.names():
        try:
            tensor = weights.read(name)
            if tensor.ndim and len(tensor):
                assert raw(weights.read(name, [(0, 1), (len(tensor) - 1, len(tensor))])) == raw(
                    torch.cat([tensor[:1], tensor[-1:]])
                ), name
        except LocaterError:
            continue
        found[name] = raw(tensor)
    return found


def read_and_scan(path: Path) -> Tensors:
    weights, _ = open_source(path)
    found = every_tensor(weights)
    with suppress(LocaterError):
        scan(path)
    return found


def edit(pattern: str, change: Callable[[Random, bytes], bytes]) -> Callable[[Random, Path], None]:
    """Mutates one of the files that match, by its bytes or by its structure."""

    def change_one(rng: Random, folder: Path) -> None:
        path = rng.choice(sorted(folder.glob(pattern)))
        data = path.read_bytes()
        path.write_bytes(rng.choice((change, change, mutate.of_bytes))(rng, data))

    return change_one


def edit_json(extra: tuple[Any, ...] = ()) -> Callable[[Random, bytes], bytes]:
    return lambda rng, data: mutate.as_json(rng, mutate.of_value(rng, json.loads(data), extra=extra))


def any_of(*choices: Callable[[Random, Path], None]) -> Callable[[Random, Path], None]:
    return lambda rng, folder: rng.choice(choices)(rng, folder)


def safetensors_reference(path: Path) -> Tensors:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return {name: raw(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118


def shards_reference(load: Callable[[Path], Tensors]) -> Callable[[Path], Tensors]:
    """Every shard as the library reads it, each tensor from where the index says."""

    def read(folder: Path) -> Tensors:
        places: Mapping[str, str] = json.loads(next(folder.glob("*.index.json")).read_text())["weight_map"]
        held = {place: load(folder / place) for place in set(places.values())}
        whole = {name: tensor for part in held.values() for name, tensor in part.items()}
        return whole | {name: held[place][name] for name, place in places.items()}

    return read


def pickle_reference(path: Path) -> Tensors:
    held = torch.load(path, map_location="cpu", weights_only=True)
    held = held["state_dict"] if isinstance(held.get("state_dict"), Mapping) else held
    return {
        str(name): raw(value)
        for name, value in held.items()
        if isinstance(value, Tensor) and value.layout == torch.strided
    }


def read_dcp(folder: Path) -> Tensors:
    """Every tensor, or none: PyTorch loads a checkpoint as a whole."""
    weights, _ = open_source(folder)
    scan(folder)
    return {name: raw(weights.read(name)) for name in weights.names()}


def dcp_reference(folder: Path) -> Tensors:
    return {name: raw(tensor) for name, tensor in dcp.loaded(folder).items()}


def records_reference(folder: Path) -> Tensors:
    """PyTorch puts all states of a checkpoint together, where the model's alone are read here."""
    try:
        return dcp_reference(folder)
    except BaseException as error:
        raise NoReferenceError(repr(error)[:200]) from None


def edit_records(rng: Random, folder: Path) -> None:
    """The index, by what it says: loaded and written by PyTorch's own classes."""
    path = folder / ".metadata"
    content = pickle.loads(path.read_bytes())  # written a moment ago, by `seeds`
    deep: Any = "w"
    for _ in range(60):
        deep = (deep, deep)
    extra = ((), ("model",), ("model", "a"), torch.Size(()), torch.Size((1,)), torch.Size((2**40, 2**20)), torch.float16, (0,) * 100,
             "x" * 2000, deep, 2**61, -1, "__0_0.distcp", "model.norm.weight")  # fmt: skip
    mutate.of_objects(rng, content, extra + mutate.VALUES)
    with suppress(Exception):  # PyTorch's classes do not write everything
        path.write_bytes(pickle.dumps(content))


def adapter_values(folder: Path) -> dict[str, Near]:
    """Every tensor of the base as the adapter changes it. One that cannot be read refuses all: peft loads a whole."""
    weights, _ = open_source(folder / "adapter")
    scan(folder / "adapter")
    return {name: Near(weights.read(name)) for name in weights.names()}


def adapter_reference(folder: Path) -> dict[str, Near]:
    """The same by peft: what each layer computes of unit vectors, and what it stores."""
    import peft
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(folder / "base")
    names = [name for name, _ in base.named_parameters()]
    try:
        model: Any = peft.PeftModel.from_pretrained(base, folder / "adapter")
    except BaseException as error:  # it checks settings that do not change a number: ranks, tasks, names of versions
        raise NoReferenceError(repr(error)) from None
    live = model.base_model.model
    found = {}
    for name in names:
        layer, _, last = name.rpartition(".")
        module = live.get_submodule(layer)
        if last == "weight" and hasattr(module, "lora_A") and hasattr(module, "in_features"):
            with torch.no_grad():
                dtype = next(module.parameters()).dtype
                bias = module(torch.zeros(1, module.in_features, dtype=dtype))
                found[name] = Near((module(torch.eye(module.in_features, dtype=dtype)) - bias).mT)
        else:
            found[name] = Near(getattr(getattr(module, "base_layer", module), last))
    return found


def edit_adapter(rng: Random, folder: Path) -> None:
    """Its settings, or the header or the bytes of its tensors, or tensors themselves."""
    from safetensors.torch import load_file, save_file

    settings, file = folder / "adapter" / "adapter_config.json", folder / "adapter" / "adapter_model.safetensors"
    if rng.random() < 0.4:
        document = json.loads(settings.read_bytes())
        kept = {key: document.pop(key) for key in ("modules_to_save", "layers_to_transform", "exclude_modules", "bias")}
        extra = ("q_proj", "k_proj", "(a+)+b", ".*k_proj", "a?" * 40, {"q_proj": 4}, {".*": 2.5}, {"(a|aa)+": 1}, ["q_proj"], "../adapter",
                 "../base", "https://127.0.0.1:9/x", "LORA", "IA3", 16)  # fmt: skip
        document = mutate.of_value(rng, document, 2, extra)
        both = {**document, **kept} if isinstance(document, dict) else document
        settings.write_bytes(mutate.as_json(rng, both))
    elif rng.random() < 0.4:
        file.write_bytes(mutate.of_safetensors(rng, file.read_bytes()))
    else:
        tensors = load_file(file)
        name, other = rng.choice(sorted(tensors)), rng.choice(sorted(tensors))
        old = tensors[name]
        tensors[rng.choice((name, name, mutate.of_text(rng, name), other))] = rng.choice((
            old.double(), old.bfloat16(), old.to(torch.int8), old.to(torch.float8_e4m3fn), old[:1].clone(), old.flatten(), old.mT.contiguous(),
            old.mean(), old[:0].clone(), old * 3, tensors[other] + 0.5, torch.cat([old, old]), old * float("nan"),
        ))  # fmt: skip
        if rng.random() < 0.3:
            del tensors[other]
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, file)


def read_gguf(folder: Path) -> tuple[Any, Tensors]:
    """Settings and tensors of every file (after a mutation there is one)."""
    from locater.sources.gguf_file import Array, _floats, read_header

    kept, found = {}, {}
    for path in sorted(folder.glob("*.gguf")):
        header = read_header(path)
        for name in header.tensors:
            with suppress(LocaterError):
                found[f"{path.name} {name}"] = raw(_floats(path, header, name))
        with suppress(LocaterError):
            scan(path)
        kept |= {
            f"{path.name} {name}": repr(value) for name, value in header.fields.items() if not isinstance(value, Array)
        }
    return kept, found


def gguf_reference(folder: Path) -> tuple[Any, Tensors]:
    import gguf

    kept, found = {}, {}
    for path in sorted(folder.glob("*.gguf")):
        reader = gguf.GGUFReader(path)
        for tensor in reader.tensors:
            with suppress(NotImplementedError):
                numbers = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
                found[f"{path.name} {tensor.name}"] = raw(numbers.view(tuple(reversed(tensor.shape.tolist()))))
        for name, field in reader.fields.items():
            if not name.startswith("GGUF.") and field.types[0] != gguf.GGUFValueType.ARRAY:
                kept[f"{path.name} {name}"] = repr(field.contents())
    return kept, found


def edit_gguf(rng: Random, folder: Path) -> None:
    """One file stays; a number or a text of its header is replaced where it lies, or bytes anywhere."""
    import gguf

    path = rng.choice(sorted(folder.glob("*.gguf")))
    for other in folder.glob("*.gguf"):
        if other != path:
            other.unlink()
    data = bytearray(path.read_bytes())
    if rng.random() < 0.3:
        path.write_bytes(mutate.of_bytes(rng, bytes(data)))
        return
    reader = gguf.GGUFReader(path)
    fields = [
        *reader.fields.values(),
        *(tensor.field for tensor in reader.tensors),
        *(tensor.field for tensor in reader.tensors),
    ]
    origin = reader.data.ctypes.data
    for _ in range(rng.randint(1, 2)):
        parts = [part for part in rng.choice(fields).parts if part.nbytes]
        part = rng.choice(parts)
        at, size = part.ctypes.data - origin, part.nbytes
        old = int.from_bytes(data[at : at + min(size, 8)], "little")
        new = rng.choice(
            (rng.choice(mutate.NUMBERS), old + rng.choice((-32, -4, -1, 1, 4, 32, 64)), rng.randrange(256))
        )
        width = min(size, 8)
        data[at : at + width] = (new % 2 ** (8 * width)).to_bytes(width, "little")
    del reader
    path.write_bytes(data)


def read_compare(folder: Path) -> None:
    from rich.console import Console

    found = compare(folder / "scan.json", folder / "good.json")
    json.loads(found.to_json())
    found.show(Console(file=StringIO(), width=140))
    found.page()


def read_statistics(folder: Path) -> None:
    statistics = Statistics.load(folder / "statistics.pt")
    json.loads(scan(folder, statistics=statistics, length=8).to_json())


def edit_statistics(rng: Random, folder: Path) -> None:
    """Values of the document, tensors included, or its archive."""
    path = folder / "statistics.pt"
    if rng.random() < 0.4:
        path.write_bytes(mutate.of_zip(rng, path.read_bytes()))
        return
    document = torch.load(path, weights_only=True)
    document["silent"] = list(document["silent"])
    square, vector = torch.eye(16), torch.zeros(16)
    tensors = (
        vector, vector * float("nan"), vector.to(torch.int8), torch.zeros(0), torch.tensor(1.0), torch.ones(3, 3), square.double(), -square,
        torch.full((16, 16), 1e38), square.to_sparse(), torch.zeros(1).expand(16, 16), torch.empty(16, device="meta"),
    )  # fmt: skip
    torch.save(mutate.of_value(rng, document, extra=tensors * 2), path)


def read_log(folder: Path) -> None:
    from locater.runs.run_log import read_run

    run = read_run(folder / "run.jsonl")
    json.loads(run.to_json())
    run.summary()


def edit_log(rng: Random, data: bytes) -> bytes:
    """A line edited, lost or written twice."""
    lines = data.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    match rng.randrange(5):
        case 0:
            del lines[at]
        case 1:
            lines.insert(rng.randrange(len(lines)), lines[at])
        case _:
            lines[at] = edit_json()(rng, lines[at]) + b"\n"
    return b"".join(lines)


def read_config(folder: Path) -> None:
    for family in folder.iterdir():
        json.loads(scan(family).to_json())


def edit_config(rng: Random, folder: Path) -> None:
    import shutil

    chosen = rng.choice(sorted(folder.iterdir()))
    for other in folder.iterdir():
        if other != chosen:
            shutil.rmtree(other)
    path = chosen / "config.json"
    document = mutate.of_value(rng, json.loads(path.read_bytes()), 2, extra=("llama", "bert", "yarn", "longrope"))
    path.write_bytes(mutate.as_json(rng, document))


def in_folder(name: str, read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda folder: read(folder / name)


SHARDS = edit("part-*.safetensors", mutate.of_safetensors)
INDEX = edit(
    "*.index.json", edit_json(("part-0.safetensors", "part-1.safetensors", "config.json", "../part-0.safetensors"))
)
PICKLE = edit("*.bin", mutate.of_zip)
FORMATS = {
    "safetensors": Format(
        seeds.make_safetensors, edit("model.safetensors", mutate.of_safetensors), in_folder("model.safetensors", read_and_scan),
        in_folder("model.safetensors", safetensors_reference), share=5,
    ),
    "shards": Format(seeds.make_shards, any_of(SHARDS, INDEX), read_and_scan, shards_reference(safetensors_reference), share=2),
    "quantised": Format(
        seeds.make_quantised, any_of(edit("model.safetensors", mutate.of_safetensors), edit("config.json", edit_json())), read_and_scan
    ),
    "gguf": Format(seeds.make_gguf, edit_gguf, read_gguf, gguf_reference, share=4),
    "pickle": Format(
        seeds.make_pickle, PICKLE, in_folder("pytorch_model.bin", read_and_scan), in_folder("pytorch_model.bin", pickle_reference), share=2
    ),
    "pickled shards": Format(seeds.make_pickled_shards, any_of(PICKLE, INDEX), read_and_scan, shards_reference(pickle_reference)),
    "legacy pickle": Format(
        seeds.make_legacy_pickle, edit("*.bin", mutate.of_bytes), in_folder("pytorch_model.bin", read_and_scan),
        in_folder("pytorch_model.bin", pickle_reference),
    ),
    "dcp": Format(seeds.make_dcp, edit("*.distcp", mutate.of_bytes), read_dcp, dcp_reference),
    "dcp index": Format(seeds.make_dcp, edit(".metadata", mutate.of_bytes), read_dcp),
    "dcp records": Format(seeds.make_dcp, edit_records, read_dcp, records_reference),
    "adapter": Format(seeds.make_adapter, edit_adapter, adapter_values, adapter_reference),
    "config": Format(seeds.make_config, edit_config, read_config, share=2),
    "scan": Format(seeds.make_scan, edit("scan.json", edit_json()), read_compare),
    "statistics": Format(seeds.make_statistics, edit_statistics, read_statistics),
    "log": Format(seeds.make_log, edit("run.jsonl", edit_log), read_log),
}  # fmt: skip
