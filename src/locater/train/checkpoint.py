"""Checkpoints that are whole or not there: written beside, flushed to the disk, then renamed. A crash or a full disk
costs none.

A checkpoint is a folder that `locater scan` and, for causal models, transformers read, with state.pt for going on and
SHA256SUMS to check it by: torch.load does not notice most bits that flip on a disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor, nn

from locater.checkpoints.safetensors_file import DTYPES
from locater.data.tokenizer import CONFIG, FILE
from locater.errors import LocaterError, first_line
from locater.models.loading import names_of
from locater.models.transformer import Transformer
from locater.train.flushed_files import flush_folder, write, writing

KEPT = 2  # the last one, and one before it
STATE, SUMS = "state.pt", "SHA256SUMS"
LINE = re.compile(r"([0-9a-f]{64})  ([\w.]+)\n")  # as sha256sum writes it
logger = logging.getLogger("locater")
KINDS = {dtype: name for name, dtype in DTYPES.items()}


def save(folder: Path, name: str, model: Transformer, state: dict[str, Any] | None = None) -> Path:
    """Write `folder/name`; with `state` the checkpoint is one to go on from."""
    target, beside = folder / name, folder / f".{name}.tmp"
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        sums = {"config.json": write(beside / "config.json", json.dumps(model.config, indent=2).encode() + b"\n")}
        sums["model.safetensors"] = write(beside / "model.safetensors", *safetensors(model))
        if (folder / FILE).is_file():
            sums[FILE] = write(beside / FILE, (folder / FILE).read_bytes())
            sums["tokenizer_config.json"] = write(
                beside / "tokenizer_config.json", json.dumps(CONFIG, indent=2).encode() + b"\n"
            )
        if state is not None:
            with writing(beside / STATE) as file:
                torch.save(state, cast("IO[bytes]", file))
            sums[STATE] = file.sum.hexdigest()
            write(beside / SUMS, *(f"{sum_}  {name}\n".encode() for name, sum_ in sums.items()))
        flush_folder(beside)
        if target.exists():  # left by a run that went further before it was cut off; the same is written again
            shutil.rmtree(target)
        os.rename(beside, target)
        flush_folder(folder)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as a RuntimeError
        shutil.rmtree(beside, ignore_errors=True)
        last = latest(folder)
        kept = f"{last} is kept, and the same command goes on from there" if last else "there is none before it"
        why = error.strerror if isinstance(error, OSError) else first_line(error)
        raise LocaterError(f"{target}: the checkpoint cannot be written ({why}); {kept}") from None
    return target


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    return sorted(p for p in folder.glob("step-*") if p.name[5:].isdigit() and (p / STATE).is_file())


def latest(folder: Path) -> Path | None:
    found = checkpoints(folder)
    return found[-1] if found else None


def thin_out(folder: Path) -> None:
    """Remove all but the last ones."""
    for path in checkpoints(folder)[:-KEPT]:
        gone = path.with_name(f".{path.name}.old")
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(path, gone)  # first out of sight: half a folder must not look like a checkpoint
        shutil.rmtree(gone, ignore_errors=True)


def read_state(path: Path, device: torch.device) -> dict[str, Any]:
    """What a checkpoint holds for going on, once its files are those that were written; refused where they are not."""
    _check_sums(path)
    try:
        held: dict[str, Any] = torch.load(path / STATE, map_location=device, weights_only=True)
        return held
    except Exception as error:  # a damaged file makes the unpickler raise anything at all
        raise LocaterError(f"{path}: cannot be read ({first_line(error)}): {_way_out(path)}") from None


def _check_sums(path: Path) -> None:
    """Every file of a checkpoint, and the run's tokenizer, against the sums that were written with it."""
    if not (path / SUMS).is_file():
        logger.warning(
            "%s: was written without %s, so it cannot be checked for damage; the run goes on from it", path, SUMS
        )
        return
    written = (path / SUMS).read_text(encoding="utf-8", errors="replace")
    sums = {name: sum_ for sum_, name in LINE.findall(written)}
    if not re.fullmatch(f"({LINE.pattern})+", written) or STATE not in sums:
        raise LocaterError(
            f"{path / SUMS}: damaged (it should hold a line for each file, {STATE} among them): {_way_out(path)}"
        )
    for name, sum_ in sums.items():
        if _sum_of(path / name) != sum_:
            raise LocaterError(
                f"{path / name}: damaged, or changed since (its SHA-256 is not that in {SUMS}): {_way_out(path)}"
            )
    tokenizer = path.parent / FILE  # which a run that goes on reads
    if FILE in sums and tokenizer.is_file() and _sum_of(tokenizer) != sums[FILE]:
        raise LocaterError(f"{tokenizer}: damaged, or changed since {path.name}: copy {path / FILE} over it")


def _sum_of(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):  # not there, or no name of a file
        return None


def _way_out(path: Path) -> str:
    before = [other for other in checkpoints(path.parent) if other < path]
    return f"remove {path}, and the run goes on from {before[-1].name if before else 'its first step, since no other is kept'}"


def safetensors(model: Transformer) -> Iterator[bytes]:
    """The weights as a safetensors file, part by part: the length of the header, the header, the data.

    Tensors are taken by their path, so what a control computes a weight from is saved as the weight it makes.
    """
    tensors = {name: _at(model, name).detach().cpu().contiguous() for name in names_of(model)}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for tensor in tensors.values():
        yield tensor.view(torch.uint8).numpy().tobytes()


def _at(model: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(path), leaf)
    return found
