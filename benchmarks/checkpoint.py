"""Time and memory of scanning a checkpoint, against loading the model with TransformerLens, in one run.

    python benchmarks/checkpoint.py         # writes benchmarks/results/checkpoint.json

A random checkpoint of 1B shape (16 layers, width 2048, 32 query and 8 key heads of 64, bfloat16, 4 shards, gains away
from 1) is written to a temporary folder. Each contender then runs in a process of its own, so that peak memory is its
own:

    locater            scan from disk, moments and eigenvalues; bytes read and peak memory over the import; split by stage
    moments            our moments of tensors already in memory, against one product of the same rows with themselves
                       (the floor)
    transformer_lens   load the model, then bridge.QK.eigenvalues: once as its defaults load it (float32) and once in the
                       checkpoint's own bfloat16; and its error on the effective map

Contenders take turns, ROUNDS times, and the median of each counts: on a shared machine a single run says little. The
file is in the page cache for all of them; --cold drops it before each run.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import bytes_read, command_line, in_process, in_turns, machine, median_run, memory, peak, place, write
from random_checkpoint import HEADS, KEY_HEADS, LAYERS, SIZE, WIDTH, write_checkpoint


def run_locater(folder: Path) -> dict[str, Any]:
    import locater
    from locater.commands.layer_moments import _load_maps, _moments
    from locater.numerics import one_thread

    run = locater.scan  # imports what it needs, which is not a part of scanning
    base, read_before = memory(), bytes_read()
    began, worked = time.perf_counter(), time.process_time()
    scan = run(folder, eigenvalues=True)
    whole, worked = time.perf_counter() - began, time.process_time() - worked
    taken, top = bytes_read() - read_before, peak() - base
    stages = dict.fromkeys(("reading", "folding and moments", "singular values", "eigenvalues"), 0.0)
    with one_thread():
        for layer in locater.attention_layers(folder):
            marks = [time.perf_counter()]
            read = _load_maps(layer)
            marks.append(time.perf_counter())
            moments, _ = _moments(read, False, None)
            moments.trace, moments.trace_of_square, moments.frobenius_sq, moments.symmetric_cube  # noqa: B018
            marks.append(time.perf_counter())
            moments.singular_values()
            marks.append(time.perf_counter())
            moments.eigenvalues()
            marks.append(time.perf_counter())
            for stage, (a, b) in zip(stages, itertools.pairwise(marks), strict=True):
                stages[stage] += b - a
    return {
        "heads": len(scan.rows),
        "seconds": whole,
        "processor_seconds": worked,
        "bytes_read": taken,
        "peak_over_import": top,
        "stages": stages,
        "error": effective_error({(r.layer, r.head): r.eigenvalues for r in scan.rows}, folder),
    }


def run_moments(folder: Path) -> dict[str, Any]:
    """Every contender works on the same bfloat16 tensors in memory, upcasts them itself, and is timed best of five."""
    import locater

    tensors = [(x.query.weight(), x.key.weight()) for x in locater.attention_layers(folder)]

    def ours() -> None:
        for query, key in tensors:
            moments = locater.moments(query.view(KEY_HEADS, -1, SIZE, WIDTH), key.view(KEY_HEADS, 1, SIZE, WIDTH))
            moments.trace, moments.trace_of_square, moments.frobenius_sq, moments.symmetric_cube  # noqa: B018

    def floor() -> None:
        for pair in tensors:
            for weight in pair:
                rows = weight.view(-1, SIZE, WIDTH).float()
                rows @ rows.mT

    def naive() -> None:  # W itself, for one layer, float32
        query, key = (x.float().view(-1, SIZE, WIDTH) for x in tensors[0])
        for head in range(HEADS):
            W = query[head].T @ key[head // (HEADS // KEY_HEADS)]
            W.trace(), (W * W.T).sum(), (W * W).sum()

    times = {name: best(f) for name, f in (("moments", ours), ("floor", floor), ("naive_one_layer", naive))}
    return {
        **times,
        "moments_over_floor": times["moments"] / times["floor"],
        "naive_over_moments": times["naive_one_layer"] * LAYERS / times["moments"],
    }


def best(function: Any, runs: int = 5) -> float:
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def run_transformer_lens(folder: Path, half: bool = False) -> dict[str, Any]:
    import torch
    import transformers
    from transformer_lens.model_bridge import TransformerBridge

    tokenizer = _tokenizer(folder)
    base, read_before = memory(), bytes_read()
    began, worked = time.perf_counter(), time.process_time()
    dtype = torch.bfloat16 if half else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    bridge = TransformerBridge.boot_transformers(
        str(folder), hf_model=model, dtype=dtype, device="cpu", tokenizer=tokenizer
    )
    loaded = time.perf_counter() - began
    values = bridge.QK.eigenvalues
    whole, worked = time.perf_counter() - began, time.process_time() - worked
    taken, top = bytes_read() - read_before, peak() - base
    spectra = {(i, h): [(z.real, z.imag) for z in values[i, h].tolist()] for i in range(LAYERS) for h in range(HEADS)}
    return {
        "seconds": whole,
        "processor_seconds": worked,
        "seconds_loading": loaded,
        "bytes_read": taken,
        "peak_over_import": top,
        "error": effective_error(spectra, folder),
        "version": version("transformer-lens"),
    }


def _tokenizer(folder: Path) -> Any:
    """A tokenizer of four words: TransformerLens needs one, by path, and this measurement does not use it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    words = {word: i for i, word in enumerate(special.values())}
    words_only = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words_only, **special).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def effective_error(spectra: dict[tuple[int, int], Any], folder: Path) -> dict[str, float]:
    """|tr - tr of the effective W| over its Frobenius norm, float64, worst and median over the heads of four layers."""
    import torch
    from safetensors import safe_open

    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]

    def tensor(name: str) -> Any:
        with safe_open(folder / places[name], "pt") as file:
            return file.get_tensor(name).double()

    errors = []
    for layer in (0, 5, 10, 15):
        gain = tensor(f"model.layers.{layer}.input_layernorm.weight")
        query = (tensor(f"model.layers.{layer}.self_attn.q_proj.weight") * gain).view(HEADS, SIZE, WIDTH)
        key = (tensor(f"model.layers.{layer}.self_attn.k_proj.weight") * gain).view(KEY_HEADS, SIZE, WIDTH)
        for head in range(HEADS):
            W_Q, W_K = query[head], key[head // (HEADS // KEY_HEADS)]
            norm = ((W_Q @ W_Q.T) * (W_K @ W_K.T)).sum().sqrt()
            trace = sum(re for re, _ in spectra[layer, head])
            errors.append(abs(trace - float((W_K @ W_Q.T).trace())) / float(norm))
    all_errors = torch.tensor(errors)
    return {"worst": float(all_errors.max()), "median": float(all_errors.median())}


RUNS = {
    "locater": run_locater,
    "moments": run_moments,
    "transformer_lens": run_transformer_lens,
    "transformer_lens_bfloat16": partial(run_transformer_lens, half=True),
}
ROUNDS = 5


def drop_cache(folder: Path) -> None:
    """Drop the files from the page cache, so that the next run reads the disk."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def rounds(folder: Path, cold: bool, count: int) -> dict[str, Any]:
    """Every contender `count` times, in turns; of each the run with the median time."""

    def contender(name: str) -> dict[str, Any]:
        if cold:
            drop_cache(folder)
        return in_process(__file__, "--run", name, str(folder))

    there = [name for name in RUNS if "lens" not in name or find_spec("transformer_lens")]  # make bench installs it
    runs = in_turns({name: partial(contender, name) for name in there}, count)
    return {
        name: median_run(of_name, *(("moments_over_floor",) if name == "moments" else ("seconds", "processor_seconds")))
        for name, of_name in runs.items()
    }


def summary(results: dict[str, Any]) -> str:
    ours, moments = results["locater"], results["moments"]
    lines = [
        f"{ours['heads']} heads: {ours['seconds']:.2f} s, {ours['bytes_read'] / 1e6:.0f} MB read of {results['bytes_on_disk'] / 1e6:.0f} "
        f"({ours['bytes_read'] / results['bytes_on_disk']:.1%}), {ours['peak_over_import'] / 1e6:.0f} MB over the import",
        "stages: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in ours["stages"].items()),
        f"moments of tensors in memory: {moments['moments_over_floor']:.2f} x one product of the same rows with themselves, "
        f"1/{moments['naive_over_moments']:.0f} of forming W",
    ]
    for name in ("transformer_lens", "transformer_lens_bfloat16"):
        if name not in results:
            lines.append(f"{name}: not installed")
            continue
        theirs = results[name]
        lines.append(
            f"{name} {theirs['version']}: {theirs['seconds']:.2f} s ({theirs['seconds'] / ours['seconds']:.1f} x; of processor "
            f"time {theirs['processor_seconds'] / ours['processor_seconds']:.1f} x), "
            f"{theirs['peak_over_import'] / 1e6:.0f} MB over the import "
            f"({theirs['peak_over_import'] / ours['peak_over_import']:.0f} x); error "
            f"of the trace on the effective map {theirs['error']['median']:.2g} of its norm (median), ours {ours['error']['median']:.2g}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = command_line(__doc__, "checkpoint")
    parser.add_argument("--cold", action="store_true", help="read the disk in every run")
    parser.add_argument("--run", nargs=2, metavar=("NAME", "FOLDER"), help="one contender, in this process")
    args = parser.parse_args()
    if args.run:
        print(json.dumps(RUNS[args.run[0]](Path(args.run[1]))))
        return
    count = 1 if args.quick else ROUNDS
    with tempfile.TemporaryDirectory() as folder:
        results: dict[str, Any] = {
            "machine": machine(),
            "shape": {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "key_heads": KEY_HEADS},
        }
        results["bytes_on_disk"] = write_checkpoint(Path(folder))
        results |= {"cold": args.cold, "rounds": count} | rounds(Path(folder), args.cold, count)
        results["load"] = os.getloadavg()[1]  # over five minutes; the machine may have other work
    write(results, place(args), summary(results))


if __name__ == "__main__":
    main()
