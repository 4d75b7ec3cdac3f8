"""Try each extra of a wheel: what it is for works in an environment with it, and names it in one without.

`make dist` does this after the plain wheel has been tried. `make dist DIST='--extras hf,gguf'` tries some of them,
`DIST='--extras none'` none. Each environment begins with the packages of the plain one, as hard links (torch alone has
0.8 GB, and unpacking it took from 12 s to minutes), and pip adds the extra; then it is removed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Not for users: what the make targets of this repository install.
OURS = {"test", "dev", "docs", "release", "slow", "bench"}
START = "import locater\nfrom importlib.resources import files\nDEMO = str(files('locater') / 'demo')\n"


@dataclass(frozen=True)
class Trial:
    """Code that needs an extra, code that makes its input with the extra's packages, and settings of the process."""

    code: str
    prepare: str = ""
    served: bool = False  # with a server of the demo as a hub and as a bucket
    lacking: str = ""  # the extra that is named first where both are missing


TRIALS: Mapping[str, Trial] = {
    "hf": Trial("""
probe = locater.probe(DEMO, "The quick brown fox jumps over the lazy dog. " * 40, length=64, tokens=128)
print(len(probe.rows), "heads measured on text")
"""),
    "lightning": Trial("""
import torch
from locater.integrations.lightning import ControlCallback
import lightning

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    def training_step(self, batch, index):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

monitor = locater.Monitor("lightning.jsonl", every=2)
callbacks = [monitor, ControlCallback(locater.LocAteR(target=2.0))]
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
data = torch.utils.data.DataLoader(torch.randn(16, 8, 16), batch_size=4)
lightning.Trainer(max_steps=4, accelerator="cpu", callbacks=callbacks, **quiet).fit(Module(), data)
print(sum('"entropy"' in line for line in open("lightning.jsonl")), "steps of a Lightning run observed")
"""),
    "gguf": Trial(
        """
print(len(locater.scan("model.gguf").rows), "heads of a GGUF file")
""",
        prepare="""
import gguf, numpy as np
writer, draw = gguf.GGUFWriter("model.gguf", "llama"), np.random.default_rng(0).standard_normal
writer.add_block_count(1), writer.add_embedding_length(32), writer.add_context_length(64)
writer.add_head_count(4), writer.add_head_count_kv(2), writer.add_rope_dimension_count(8)
writer.add_layer_norm_rms_eps(1e-5), writer.add_rope_freq_base(10000.0), writer.add_feed_forward_length(64)
shapes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32), "attn_norm": (32,)}
for name, shape in shapes.items():
    writer.add_tensor(f"blk.0.{name}.weight", draw(shape).astype(np.float32))
writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
""",
    ),
    "train": Trial("""
import sys, tempfile
from locater.cli import main
small = "--vocabulary 300 --steps 2 --layers 1 --width 16 --heads 2 --length 32"
sys.argv = ["locater", "train", *small.split(), "--out", tempfile.mkdtemp()]
main()
print("a model with a vocabulary of byte pairs trained")
"""),
    "explain": Trial("""
import torch
from locater_lab.models.transformer import load
model = load(DEMO).eval()
result = locater.explain.integrated_gradients(model, {"input_ids": torch.arange(8)[None]}, steps=4)
print(len(result.scores), "attributions by captum")
"""),
    "plot": Trial("""
locater.scan(DEMO).plot().savefig("plot.png")
print("a figure of heads by layers")
"""),
    "remote": Trial(
        """
rows, local = locater.scan("hf://demo/model").rows, locater.scan(DEMO).rows
assert [row.M for row in rows] == [row.M for row in local]
from locater.sources.remote import Traffic
from locater.sources.remote.address import remote_address
from locater.sources.remote.folders import ObjectFile
bucket, part = ObjectFile(remote_address("s3://demo/model/main/model.safetensors"), Traffic()), bytearray(64)
assert bucket.fill(8, memoryview(part)) == 64 and bytes(part) == open(DEMO + "/model.safetensors", "rb").read()[8:72]
print(len(rows), "heads read from a hub by ranges, and a range of an object in a bucket")
""",
        served=True,
    ),
    "fleet": Trial("""
import tempfile
fleet = locater.Fleet.run([DEMO, DEMO + "/twin"], tempfile.mkdtemp())
[(count,)] = fleet.sql("select count(*) from heads").fetchall()
print(count, "rows of two checkpoints by SQL,", len(fleet.to_polars()), "in a frame")
"""),
    "ray": Trial(
        """
import sys, tempfile
from locater.cli import main
sys.argv = ["locater", "fleet", DEMO, DEMO + "/twin", "--out", tempfile.mkdtemp(), "--ray", "local"]
main()
print("two checkpoints scanned on Ray")
""",
        lacking="fleet",  # which [ray] contains
    ),
}


def extras() -> list[str]:
    """Those that users install, in the order of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [name for name in project["optional-dependencies"] if name not in OURS]


def choose_extras(words: str) -> list[str]:
    """The extras of `--extras hf,gguf`; all without it."""
    if words == "none":
        return []
    wanted = [word.strip() for word in words.split(",")] if words else extras()
    if unknown := [name for name in wanted if name not in TRIALS]:
        sys.exit(f"--extras {','.join(unknown)}: no such extra; there are {', '.join(TRIALS)}")
    return wanted


def refuses(python: Path, name: str, folder: Path) -> None:
    """Without the extra the same code ends with a line that names it."""
    trial, named = TRIALS[name], f"locater[{TRIALS[name].lacking or name}]"
    with _settings(trial, folder) as settings:
        done = _python(python, trial.code, folder, settings)
    if done.returncode == 0 or named not in done.stdout + done.stderr:
        sys.exit(f"[{name}]: without it, its trial does not end with a line that names {named}:\n{_tail(done)}")


def works(python: Path, name: str, folder: Path) -> str:
    """With the extra it does its work; what it says of it."""
    trial = TRIALS[name]
    with _settings(trial, folder) as settings:
        for code in filter(None, (trial.prepare, trial.code)):
            done = _python(python, code, folder, settings)
            if done.returncode:
                sys.exit(f"[{name}]: its trial failed:\n{_tail(done)}")
    return done.stdout.strip().splitlines()[-1]


def try_extras(wheel: Path, names: list[str], plain: Path, folder: Path, install: Callable[..., Path]) -> None:
    """Each extra in an environment of its own, then its trial in the plain one: `plain` is the Python there, and
    `install(folder, requirement, like)` makes an environment and returns its Python.
    """
    for name in names:
        began, place = time.perf_counter(), folder / name
        python = install(place, f"{wheel}[{name}]", plain)
        seconds, added = time.perf_counter() - began, _size(python) - _size(plain)
        said = works(python, name, place)
        refuses(plain, name, place)
        print(
            f"[{name}] {said}; {added / 1e6:,.0f} MB beyond the plain wheel, installed in {seconds:.0f} s", flush=True
        )
        shutil.rmtree(place)


def packages(python: Path) -> Path:
    """The folder of packages of an environment."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip())


def _size(python: Path) -> int:
    files = (path for path in packages(python).rglob("*") if path.is_file() and path.suffix != ".pyc")
    return sum(path.stat().st_size for path in files)


@contextmanager
def _settings(trial: Trial, folder: Path) -> Iterator[dict[str, str]]:
    """The environment of a trial: a home of its own, and the demo on a server where it asks for one."""
    own = {"PYTHONPATH": "", "HOME": str(folder), "OMP_NUM_THREADS": "1", "LOCATER_CACHE": "off"}
    if not trial.served:
        yield own
        return
    sys.path.insert(0, str(ROOT))
    from tests.range_server import served

    shutil.copytree(
        ROOT / "src" / "locater" / "demo", folder / "served" / "demo" / "model" / "main", dirs_exist_ok=True
    )
    with served(folder / "served") as server:
        bucket = {"AWS_ENDPOINT": f"{server.url}/files", "AWS_SKIP_SIGNATURE": "true", "AWS_REGION": "us-east-1"}
        yield {**own, "HF_ENDPOINT": server.url, **bucket}


def _python(python: Path, code: str, folder: Path, settings: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    words = [str(python), "-c", START + code]
    return subprocess.run(words, cwd=folder, env={**os.environ, **settings}, capture_output=True, text=True)


def _tail(done: subprocess.CompletedProcess[str]) -> str:
    return f"status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
