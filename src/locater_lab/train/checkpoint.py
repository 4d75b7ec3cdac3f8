"""Checkpoints that survive a crash or a full disk: each is written to a temporary folder, flushed, then renamed.

A checkpoint is a folder that `locater scan` and, for causal models, transformers read. To resume from it there are
state.pt and SHA256SUMS, by which its files are checked: torch.load does not notice most bits that flip on a disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor, nn

from locater.errors import LocaterError, first_line
from locater.inputs.tokenizer import CONFIG, FILE
from locater.sources.pickle_file import load_pickle
from locater.sources.safetensors_file import DTYPES
from locater_lab.models.transformer import Transformer, names_of

# Files that are on the disk once they are written, with their SHA-256.


class HashingFile:
    """A file that adds up the SHA-256 of everything written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.sum = file, hashlib.sha256()

    def write(self, part: bytes) -> int:
        self.sum.update(part)
        return self.file.write(part)

    def flush(self) -> None:  # torch.save calls it
        self.file.flush()


@contextmanager
def synced_file(path: Path) -> Iterator[HashingFile]:
    """A new file, flushed to the disk at the end of the block."""
    with path.open("wb") as file:
        summed = HashingFile(file)
        yield summed
        summed.flush()
        os.fsync(file.fileno())


def write_synced(path: Path, *parts: bytes) -> str:
    """Write and flush a file; returns its SHA-256."""
    with synced_file(path) as file:
        for part in parts:
            file.write(part)
    return file.sum.hexdigest()


def flush_folder(folder: Path) -> None:
    if os.name == "posix":  # other systems cannot open a folder
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


STATE, SUMS = "state.pt", "SHA256SUMS"
SUM_LINE = re.compile(r"([0-9a-f]{64})  ([\w.]+)\n")  # as sha256sum writes it
logger = logging.getLogger("locater")
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def save(folder: Path, name: str, model: Transformer, state: dict[str, Any] | None = None) -> Path:
    """Write the checkpoint `folder/name`; with `state` training can resume from it."""
    target, temporary = folder / name, folder / f".{name}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _write_files(temporary, model, folder / FILE, state)
        flush_folder(temporary)
        if target.exists():  # of a run that got further before it was interrupted; it is written again
            shutil.rmtree(target)
        os.rename(temporary, target)
        flush_folder(folder)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as a RuntimeError
        shutil.rmtree(temporary, ignore_errors=True)
        last = latest(folder)
        previous = f"{last} is kept, and the same command goes on from there" if last else "there is none before it"
        why = error.strerror if isinstance(error, OSError) else first_line(error)
        raise LocaterError(f"{target}: the checkpoint cannot be written ({why}); {previous}") from None
    return target


def _write_files(folder: Path, model: Transformer, tokenizer: Path, state: dict[str, Any] | None) -> None:
    """Model, tokenizer where there is one, and with `state` the files to resume from."""
    tensors = {name: _tensor_of(model, name) for name in names_of(model)}
    files: dict[str, Iterable[bytes]] = {
        "config.json": [_json(model.config)],
        "model.safetensors": safetensors(tensors),
    }
    if tokenizer.is_file():
        files |= {FILE: [tokenizer.read_bytes()], "tokenizer_config.json": [_json(CONFIG)]}
    sums = {name: write_synced(folder / name, *parts) for name, parts in files.items()}
    if state is not None:
        with synced_file(folder / STATE) as file:
            torch.save(state, cast("IO[bytes]", file))
        sums[STATE] = file.sum.hexdigest()
        write_synced(folder / SUMS, *(f"{digest}  {name}\n".encode() for name, digest in sums.items()))


def _json(data: Any) -> bytes:
    return json.dumps(data, indent=2).encode() + b"\n"


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a run to resume from, oldest first."""
    return sorted(p for p in folder.glob("step-*") if p.name[5:].isdigit() and (p / STATE).is_file())


def latest(folder: Path) -> Path | None:
    paths = checkpoints(folder)
    return paths[-1] if paths else None


def remove_older(folder: Path, keep: int) -> None:
    """Remove all but the last `keep` checkpoints; none where it is 0."""
    for path in checkpoints(folder)[:-keep] if keep else []:
        hidden = path.with_name(f".{path.name}.old")
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(path, hidden)  # renamed first: half a folder must not look like a checkpoint
        shutil.rmtree(hidden, ignore_errors=True)


def read_state(path: Path, device: torch.device) -> dict[str, Any]:
    """The state to resume from. Refused where a file of the checkpoint is not as it was written."""
    _check_sums(path)
    try:
        state, _ = load_pickle(path / STATE, device=device)
        return dict(state)
    except LocaterError:
        raise
    except Exception as error:  # a damaged file makes the unpickler raise anything at all
        raise LocaterError(f"{path}: cannot be read ({first_line(error)}): {_how_to_recover(path)}") from None


def _check_sums(path: Path) -> None:
    """Compare every file of a checkpoint, and the run's tokenizer, with the sums that were written with it."""
    if not (path / SUMS).is_file():
        logger.warning(
            "%s: was written without %s, so it cannot be checked for damage; the run goes on from it", path, SUMS
        )
        return
    lines = (path / SUMS).read_text(encoding="utf-8", errors="replace")
    sums = {name: digest for digest, name in SUM_LINE.findall(lines)}
    if not re.fullmatch(f"({SUM_LINE.pattern})+", lines) or STATE not in sums:
        raise LocaterError(
            f"{path / SUMS}: damaged (it should hold a line for each file, {STATE} among them): {_how_to_recover(path)}"
        )
    for name, digest in sums.items():
        if _sum_of(path / name) != digest:
            raise LocaterError(
                f"{path / name}: damaged, or changed since (its SHA-256 is not that in {SUMS}): {_how_to_recover(path)}"
            )
    tokenizer = path.parent / FILE  # a resumed run reads this one
    if FILE in sums and tokenizer.is_file() and _sum_of(tokenizer) != sums[FILE]:
        raise LocaterError(f"{tokenizer}: damaged, or changed since {path.name}: copy {path / FILE} over it")


def _sum_of(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):  # missing, or not a valid file name
        return None


def _how_to_recover(path: Path) -> str:
    earlier = [other for other in checkpoints(path.parent) if other < path]
    start = earlier[-1].name if earlier else "its first step, since no other is kept"
    return f"remove {path}, and the run goes on from {start}"


def safetensors(tensors: Mapping[str, Tensor]) -> Iterator[bytes]:
    """A safetensors file, part by part: the length of the header, the header, the data."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for tensor in tensors.values():
        yield tensor.view(torch.uint8).numpy().tobytes()


def _tensor_of(model: nn.Module, name: str) -> Tensor:
    """Read as an attribute of its module, so that a weight that a control computes is saved as it acts."""
    path, _, attribute = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(path), attribute)
    return tensor
