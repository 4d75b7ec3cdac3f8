"""A fleet of small checkpoints: in one process, in worker processes and on Ray, with the same tasks and the same parts.

Each way runs in a process of its own, from its start to its end, imports included. Then what a rerun costs that has
nothing to do, and a query over all parts.

python benchmarks/fleet.py                1,000 small checkpoints; writes benchmarks/results/fleet.json
python benchmarks/fleet.py --table        the table of docs/fleet.md from that file
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import command_line, place, processor, write

ROOT = Path(__file__).parents[1]
SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 4}
CPUS = 2


def write_checkpoints(folder: Path, count: int) -> int:
    """Random Llama checkpoints of one shape; returns the bytes of all."""
    import torch
    from safetensors.torch import save_file

    width, size = SHAPE["hidden_size"], SHAPE["head_dim"]
    generator, total = torch.Generator().manual_seed(0), 0
    for step in range(count):
        place = folder / f"step-{step:08}"
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": 1e-5, **SHAPE}))
        tensors = {}
        for layer in range(SHAPE["num_hidden_layers"]):
            stem = f"model.layers.{layer}"
            for name, heads in (("q", 4), ("k", 2), ("v", 2)):
                map_ = torch.randn(heads * size, width, generator=generator) * 0.3
                tensors[f"{stem}.self_attn.{name}_proj.weight"] = map_
            tensors[f"{stem}.self_attn.o_proj.weight"] = torch.zeros(width, 4 * size)
            tensors[f"{stem}.input_layernorm.weight"] = torch.ones(width)
        save_file(tensors, place / "model.safetensors", {"format": "pt"})
        total += (place / "model.safetensors").stat().st_size
    return total


def timed_command(run: Path, out: Path, home: str, *options: str) -> float:
    """Seconds of `locater fleet`, from start to end."""
    command = [sys.executable, "-m", "locater", "fleet", str(run / "step-*"), "--out", str(out), *options]
    started = time.perf_counter()
    done = subprocess.run(command, env=environment(home), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return time.perf_counter() - started


def environment(home: str) -> dict[str, str]:
    """One thread per process, as in a fleet, and a home for the token that Ray writes."""
    own = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HOME": home, "RAY_AUTH_MODE": "token"}
    return {**os.environ, **own}


@contextmanager
def cluster(home: str) -> Iterator[tuple[str, float]]:
    """A Ray cluster on this machine, in a process of its own: its address, and how long it took to start."""
    code = (
        "import ray, sys\n"
        f"own = dict(num_cpus={CPUS}, include_dashboard=False, log_to_driver=False, _node_ip_address='127.0.0.1')\n"
        f"print('at', ray.init(_temp_dir={home!r}, **own).address_info['gcs_address'], flush=True)\n"
        "sys.stdin.read()\n"
    )
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment(home), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    address = next(line for line in process.stdout if line.startswith("at ")).split()[1]
    try:
        yield address, time.perf_counter() - started
    finally:
        process.communicate("")


def query_seconds(out: Path) -> dict[str, float]:
    import locater

    seconds = {}
    for name, ask in (
        ("open", lambda fleet: fleet.counts()),
        ("polars", lambda fleet: fleet.to_polars()),
        ("sql", lambda fleet: fleet.sql("select step, max(F) from heads group by step").fetchall()),
    ):
        fleet = locater.Fleet.open(out)
        if name != "open":
            fleet.files()
        started = time.perf_counter()
        ask(fleet)
        seconds[name] = time.perf_counter() - started
    return seconds


def measure(count: int) -> dict[str, Any]:
    import torch

    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # paths of Ray's sockets have to be short
    home = str(folder / "home")
    Path(home).mkdir()
    try:
        size = write_checkpoints(folder / "run", count)
        seconds = {"one process": timed_command(folder / "run", folder / "one", home, "--workers", "0")}
        seconds[f"{CPUS} workers"] = timed_command(folder / "run", folder / "workers", home, "--workers", str(CPUS))
        with cluster(home) as (address, start):
            seconds[f"Ray, {CPUS} processors"] = timed_command(folder / "run", folder / "ray", home, "--ray", address)
        rerun = timed_command(folder / "run", folder / "one", home)
        names = [sorted(path.name for path in (folder / way).glob("*.parquet")) for way in ("one", "workers", "ray")]
        assert names[0] == names[1] == names[2]
        assert len(names[0]) == count
        stored = sum(path.stat().st_size for path in (folder / "one").glob("*.parquet"))
        return {
            "machine": f"{processor()}, {os.cpu_count()} processors, load {os.getloadavg()[1]:.1f} by other work as well",
            "torch": torch.__version__,
            "checkpoints": count,
            "bytes_of_a_checkpoint": size // count,
            "seconds": seconds,
            "checkpoints_per_second": {way: count / took for way, took in seconds.items()},
            "start_of_the_ray_cluster": start,
            "rerun_with_nothing_to_do": rerun,
            "bytes_of_a_part": stored // count,
            "queries": query_seconds(folder / "one"),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def table(results: dict[str, Any]) -> str:
    """The lines of docs/fleet.md."""
    lines = [f"| {results['checkpoints']:,} small checkpoints | seconds | checkpoints a second |", "|---|---|---|"]
    for way, seconds in results["seconds"].items():
        lines.append(f"| {way} | {seconds:.1f} | {results['checkpoints_per_second'][way]:.0f} |")
    return "\n".join([*lines, f"| a rerun with nothing to do | {results['rerun_with_nothing_to_do']:.1f} | - |"])


def main() -> None:
    parser = command_line(__doc__, "fleet")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--table", action="store_true", help="print the table of docs/fleet.md from the results")
    args = parser.parse_args()
    path = place(args)
    if not args.table:
        results = measure(40 if args.quick else args.count)
        write(results, path, table(results))
        return
    print(table(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
