"""Time, bytes and requests of scanning a checkpoint that is elsewhere, against the same scan from local disk, in one run.

    python benchmarks/remote.py         # writes benchmarks/results/remote.json

The random checkpoint of 1B shape of benchmarks/checkpoint.py (4 shards) is served by tests/range_server.py, a process of
its own, which waits 30 ms before each answer and counts bytes and requests. Contenders:

    local     the folder on this machine
    https     the same folder behind a URL
    hf        the same as a model of the hub, by the real client of the hub: names, one HEAD per file, redirections

Each runs in a process of its own and is timed without the import. They take turns, ROUNDS times, and the median of each
counts: on a shared machine a single run says little. The rows of all have to be equal.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from common import command_line, in_process, in_turns, machine, median_run, place, write
from random_checkpoint import CONFIG, write_checkpoint

ROOT = Path(__file__).parent.parent
ROUNDS = 5
LATENCY = 0.03  # seconds
READ = ("q_proj.weight", "k_proj.weight", "input_layernorm.weight")


def run_scan(source: str) -> dict[str, Any]:
    import huggingface_hub

    import locater

    huggingface_hub.HfApi()  # imported when it is first used
    locater.scan(ROOT / "src" / "locater" / "demo")  # what the first scan of a process does once
    began, worked = time.perf_counter(), time.process_time()
    scan = locater.scan(source)
    seconds, processor = time.perf_counter() - began, time.process_time() - worked
    heads = json.dumps(json.loads(scan.to_json())["heads"])
    return {
        "seconds": seconds,
        "processor_seconds": processor,
        "heads": len(scan.rows),
        "rows": hashlib.sha256(heads.encode()).hexdigest(),
    }


def needed_bytes(folder: Path) -> int:
    """Bytes of queries, keys and the norms in front of them."""
    from locater.sources.safetensors_file import safetensors_header

    headers = [safetensors_header(path)[1] for path in folder.glob("*.safetensors")]
    entries = [entry for header in headers for name, entry in header.items() if name.endswith(READ)]
    return sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in entries)


class Server:
    """The server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.url = self._line()

    def counts(self) -> dict[str, int]:
        """Bytes and requests since the last call."""
        assert self._process.stdin is not None
        self._process.stdin.write("counts\n")
        self._process.stdin.flush()
        return dict(json.loads(self._line()))

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def server(folder: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "tests.range_server", str(folder), "--latency", str(LATENCY)]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield Server(process)
        finally:
            process.kill()


def rounds(served: Path, folder: Path, count: int) -> dict[str, Any]:
    with server(served) as serving:
        for path in folder.glob("*.safetensors"):  # the hub knows digests of its files; the server computes them once
            urlopen(Request(f"{serving.url}/files/org/model/main/{path.name}", method="HEAD")).close()
        sources = {"local": str(folder), "https": f"{serving.url}/files/org/model/main", "hf": "hf://org/model"}
        environment = {"HF_ENDPOINT": serving.url, "HF_HUB_CACHE": str(served / "empty cache"), "HF_HUB_OFFLINE": "0"}

        def contender(source: str) -> dict[str, Any]:
            serving.counts()
            return {**in_process(__file__, "--run", source, environment=environment), **serving.counts()}

        runs = in_turns({name: partial(contender, source) for name, source in sources.items()}, count)
    if len({run["rows"] for of_name in runs.values() for run in of_name}) != 1:
        raise SystemExit("the rows of the contenders differ")
    return {name: median_run(of_name, "seconds", "processor_seconds") for name, of_name in runs.items()}


def fused_requests() -> dict[str, dict[str, int]]:
    """Requests and bytes for the fused maps of a NeoX shape (24 layers, width 1024, 16 heads of 64, 16 bits), where the
    values of each head stand between ranges that are read: as they are planned, and with all gaps merged.
    """
    from locater.sources.remote import prefetch

    file: Any = object()
    rows, layer = 64 * 1024 * 2, 12 * 1024 * 1024 * 2  # bytes of a head's queries, and of a layer
    plan = [
        [(file, n * layer + head * 3 * rows, n * layer + head * 3 * rows + 2 * rows) for head in range(16)]
        for n in range(24)
    ]
    costs, share = {}, prefetch.WASTE
    for name, prefetch.WASTE in (("planned", share), ("merged", 1.0)):
        blocks = prefetch.byte_ranges(plan)
        costs[name] = {"requests": len(blocks), "bytes": sum(block.stop - block.start for block in blocks)}
    prefetch.WASTE = share
    return costs


def summary(results: dict[str, Any]) -> str:
    local, lines = results["local"]["seconds"], []
    fastest = {name: min(results[name]["all_seconds"]) for name in ("local", "https", "hf")}
    worked = {name: min(results[name]["all_processor_seconds"]) for name in fastest}
    for name in ("https", "hf"):
        run = results[name]
        lines.append(
            f"{name}: {run['seconds']:.2f} s, {run['seconds'] - local:+.2f} s against {local:.2f} s from local disk; "
            f"{run['bytes'] / 1e6:.1f} MB in {run['requests']} requests, {run['bytes'] / results['bytes_needed']:.3f} times the "
            f"{results['bytes_needed'] / 1e6:.1f} MB of queries, keys and norms, of {results['bytes_on_disk'] / 1e6:,.0f} MB; rows equal"
        )
    lines.append("fastest of each: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in fastest.items()))
    lines.append("least processor time: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in worked.items()))
    planned, merged = results["fused"]["planned"], results["fused"]["merged"]
    lines.append(
        f"fused maps of a NeoX shape: {planned['requests']} requests and {planned['bytes'] / 1e6:.0f} MB; "
        f"with all gaps merged {merged['requests']} and {merged['bytes'] / 1e6:.0f} MB"
    )
    lines.append(f"load of the machine: {results['load']:.1f} processes on {results['machine']['cores']} cores")
    return "\n".join(lines)


def main() -> None:
    parser = command_line(__doc__, "remote")
    parser.add_argument("--run", metavar="SOURCE", help="one scan, in this process")
    args = parser.parse_args()
    if args.run:
        print(json.dumps(run_scan(args.run)))
        return
    count = 1 if args.quick else ROUNDS
    with tempfile.TemporaryDirectory() as served:
        folder = Path(served) / "org" / "model" / "main"
        folder.mkdir(parents=True)
        results: dict[str, Any] = {"machine": machine(), "latency_s": LATENCY, "rounds": count, "shape": CONFIG}
        results["bytes_on_disk"] = write_checkpoint(folder)
        results["bytes_needed"] = needed_bytes(folder)
        results["fused"] = fused_requests()
        results |= rounds(Path(served), folder, count)
        results["load"] = os.getloadavg()[1]  # over five minutes; the machine may have other work
    write(results, place(args), summary(results))


if __name__ == "__main__":
    main()
