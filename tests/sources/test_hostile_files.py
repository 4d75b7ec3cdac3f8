"""No file takes more than 20 seconds or a gigabyte above what its size justifies, whatever it says; and what PyTorch
itself writes is still read.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from locater.sources.pickle_file import load_pickle
from tests.processes import python
from tests.sources.hostile import GOOD, LIMIT_KB, LIMIT_S, MAKERS, call, in_archive, name, text, without_archive


@pytest.mark.parametrize("kind", MAKERS)
def test_hostile_files_are_refused_at_once(kind: str, tmp_path: Path) -> None:
    """All of a kind in one process, which an alarm ends: what hashes in C hears nothing else."""
    MAKERS[kind](tmp_path)
    command = [python(), "-m", "tests.sources.hostile", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"died of {lines[-1:]}: {done.stderr[-1000:]}"
    assert len(lines) == 2 * len([*tmp_path.glob("[!.]*")])
    wrong = [
        line for line in lines[1::2] if line[1] not in ("refused", "read") or line[2] > LIMIT_S or line[3] > LIMIT_KB
    ]
    assert not wrong, "\n".join(map(str, wrong))


def trained() -> dict[Any, Any]:
    """A model with its optimizer and the rest of a trainer's state."""
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 4).bfloat16())
    optimizer = torch.optim.AdamW(model.parameters())
    sum(p.float().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3, "torch": torch.get_rng_state(),
        "python": random.getstate(), "counts": Counter("abca"), "set": {1, 2}, "size": torch.Size((2, 3)), "dtype": torch.float16,
        "bytes": b"abc", "array": bytearray(b"abc"), "complex": 1j, "device": torch.device("cpu"), "large": 10**50, ("a", 1): None,
    }  # fmt: skip


def named(value: Tensor, note: Any) -> Tensor:
    value.note = note  # type: ignore[attr-defined]
    return value


def kinds() -> dict[str, Any]:
    base = torch.arange(12.0)
    return {
        "trainer": trained(),
        "ordered": OrderedDict(a=base, b=base[2:5], c=base.view(3, 4).T),
        "sparse": {"coo": torch.eye(3).to_sparse(), "csr": torch.eye(3).to_sparse_csr(), "bsr": torch.eye(4).to_sparse_bsr((2, 2))},
        "parameters": {"a": nn.Parameter(base), "b": named(nn.Parameter(base), {"x": 1}), "c": named(base * 2, "x")},
        "others": {"meta": torch.empty(3, device="meta"), "conj": torch.ones(3, dtype=torch.complex64).conj(), "expanded": torch.zeros(1).expand(4, 4)},
        "small": {"empty": torch.zeros(0, 3), "one": torch.tensor(1.0), "bytes": torch.ones(3, dtype=torch.uint8)},
        "fp8": {"a": torch.ones(3).to(torch.float8_e4m3fn), "b": torch.ones(3, dtype=torch.uint16)},
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("kind", ["trainer", "ordered", "sparse", "parameters", "others", "small", "fp8", "quantised"])
def test_what_torch_saves_is_read(kind: str, archive: bool, tmp_path: Path) -> None:
    if kind == "quantised":
        q = torch.quantize_per_channel(torch.ones(3, 2), torch.ones(3), torch.zeros(3), 0, torch.quint8)
        content: Any = {"a": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "b": q}
    else:
        content = kinds()[kind]
    path = tmp_path / "x.pt"
    torch.save(content, path, _use_new_zipfile_serialization=archive)
    try:
        expected = torch.load(path, map_location="cpu", weights_only=True)
    except AttributeError:
        assert kind == "fp8"  # PyTorch cannot read these itself
        assert not archive
        return
    assert repr(load_pickle(path)[0]) == repr(expected)


def test_lists_of_pairs_as_python_2_wrote_them(tmp_path: Path) -> None:
    ordered = call(name("collections", "OrderedDict"), b"](](" + text("a") + GOOD + b"ee")
    in_archive(tmp_path / "x.pt", b"\x80\x02" + ordered + b".")
    assert load_pickle(tmp_path / "x.pt")[0] == OrderedDict(a=torch.zeros(1))
    without_archive(tmp_path / "y.pt", b"\x80\x02" + ordered.replace(b"tQ", b"NtQ") + b".")
    assert load_pickle(tmp_path / "y.pt")[0] == OrderedDict(a=torch.zeros(1))
