"""What a scan of a checkpoint costs, against the routes people use today, measured in one run on one machine.

    make bench                      # writes benchmarks/results/checkpoint.json

A random checkpoint of 1B shape (16 layers, width 2048, 32 query and 8 key heads of 64, bfloat16, 4 shards, gains away
from 1) is written to a temporary folder. Each contender then runs in a process of its own, so that peak memory is its
own:

    locater            scan from disk, moments and eigenvalues; bytes read and peak memory over the import; split by stage
    moments            our moments of tensors already in memory, against one product of the same rows with themselves (the floor)
    transformer_lens   load the model, then bridge.QK.eigenvalues: the whole-model route, once as its defaults load it (float32) and
                       once in the checkpoint's own bfloat16; and its error on the effective map

Contenders take turns, ROUNDS times, and each one's median is kept: on a shared machine a single run says little. The
file's pages are in memory for all of them; --cold drops them before each run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

LAYERS, WIDTH, HEADS, KEY_HEADS, SIZE, INNER, VOCABULARY, SHARDS = 16, 2048, 32, 8, 64, 8192, 32_000, 4
OUT = Path(__file__).parent / "results" / "checkpoint.json"


def write_checkpoint(folder: Path) -> int:
    """Random weights whose logits have a spread near 1; returns the bytes on disk."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Any:
        return (torch.randn(rows, columns, generator=generator) / columns**0.5).bfloat16()

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "head_dim": SIZE, "intermediate_size": INNER,
        "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 2048,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    places: dict[str, str] = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        held = {"model.embed_tokens.weight": matrix(VOCABULARY, WIDTH)} if shard == 0 else {}
        if shard == SHARDS - 1:
            held["model.norm.weight"] = torch.ones(WIDTH).bfloat16()
        for layer in range(shard * LAYERS // SHARDS, (shard + 1) * LAYERS // SHARDS):
            block = f"model.layers.{layer}"
            for name, rows, columns in (
                ("self_attn.q_proj", HEADS * SIZE, WIDTH), ("self_attn.k_proj", KEY_HEADS * SIZE, WIDTH),
                ("self_attn.v_proj", KEY_HEADS * SIZE, WIDTH), ("self_attn.o_proj", WIDTH, HEADS * SIZE),
                ("mlp.gate_proj", INNER, WIDTH), ("mlp.up_proj", INNER, WIDTH), ("mlp.down_proj", WIDTH, INNER),
            ):  # fmt: skip
                held[f"{block}.{name}.weight"] = matrix(rows, columns)
            for name in ("input_layernorm", "post_attention_layernorm"):
                held[f"{block}.{name}.weight"] = (1 + 0.5 * torch.randn(WIDTH, generator=generator)).bfloat16()
        save_file(held, folder / file, {"format": "pt"})
        places.update(dict.fromkeys(held, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """High-water mark of this process alone; the one of getrusage survives exec and would be the parent's."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def bytes_read() -> int:
    return int(
        next(line.split()[1] for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))
    )


def run_locater(folder: Path) -> dict[str, Any]:
    import locater
    from locater.families import effective

    base, read_before = memory(), bytes_read()
    began = time.perf_counter()
    found = locater.scan(folder, eigenvalues=True)
    whole = time.perf_counter() - began
    taken, top = bytes_read() - read_before, peak() - base
    stages = {"reading": 0.0, "folding and moments": 0.0, "singular values": 0.0, "eigenvalues": 0.0}
    for layer in locater.attention_layers(folder):
        marks = [time.perf_counter()]
        query, key = layer.query.weight(), layer.key.weight()
        marks.append(time.perf_counter())
        held = effective(_in_memory(layer, query, key)).moments()
        held.trace, held.trace_of_square, held.frobenius_sq, held.symmetric_cube  # noqa: B018
        marks.append(time.perf_counter())
        held.singular_values()
        marks.append(time.perf_counter())
        held.eigenvalues()
        marks.append(time.perf_counter())
        for stage, a, b in zip(stages, marks, marks[1:], strict=False):
            stages[stage] += b - a
    return {
        "heads": len(found.rows), "seconds": whole, "bytes_read": taken, "peak_over_import": top,
        "stages": stages, "error": effective_error({(r.layer, r.head): r.eigenvalues for r in found.rows}, folder),
    }  # fmt: skip


def _in_memory(layer: Any, query: Any, key: Any) -> Any:
    from dataclasses import replace

    return replace(layer, query=replace(layer.query, weight=lambda: query), key=replace(layer.key, weight=lambda: key))


def run_moments(folder: Path) -> dict[str, Any]:
    """Every contender works on the same bfloat16 tensors in memory, upcasts them itself, and is timed best of five."""
    import locater

    tensors = [(x.query.weight(), x.key.weight()) for x in locater.attention_layers(folder)]

    def ours() -> None:
        for query, key in tensors:
            found = locater.moments(query.view(KEY_HEADS, -1, SIZE, WIDTH), key.view(KEY_HEADS, 1, SIZE, WIDTH))
            found.trace, found.trace_of_square, found.frobenius_sq, found.symmetric_cube  # noqa: B018

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
    began = time.perf_counter()
    dtype = torch.bfloat16 if half else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    bridge = TransformerBridge.boot_transformers(
        str(folder), hf_model=model, dtype=dtype, device="cpu", tokenizer=tokenizer
    )
    loaded = time.perf_counter() - began
    values = bridge.QK.eigenvalues
    whole = time.perf_counter() - began
    taken, top = bytes_read() - read_before, peak() - base
    spectra = {(i, h): [(z.real, z.imag) for z in values[i, h].tolist()] for i in range(LAYERS) for h in range(HEADS)}
    return {
        "seconds": whole, "seconds_loading": loaded, "bytes_read": taken, "peak_over_import": top,
        "error": effective_error(spectra, folder), "version": __import__("importlib.metadata").metadata.version("transformer-lens"),
    }  # fmt: skip


def _tokenizer(folder: Path) -> Any:
    """A tokenizer of four words: the route asks for one, by path, and this measurement does not use it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    words = {word: i for i, word in enumerate(special.values())}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")), **special)
    made.save_pretrained(folder)
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
            G = key[head // (HEADS // KEY_HEADS)] @ query[head].T
            norm = (
                (
                    (query[head] @ query[head].T)
                    * (key[head // (HEADS // KEY_HEADS)] @ key[head // (HEADS // KEY_HEADS)].T)
                )
                .sum()
                .sqrt()
            )
            got = sum(re for re, _ in spectra[layer, head])
            errors.append(abs(got - float(G.trace())) / float(norm))
    held = torch.tensor(errors)
    return {"worst": float(held.max()), "median": float(held.median())}


RUNS = {
    "locater": run_locater,
    "moments": run_moments,
    "transformer_lens": run_transformer_lens,
    "transformer_lens_bfloat16": partial(run_transformer_lens, half=True),
}
ROUNDS = 5


def machine() -> dict[str, Any]:
    import torch

    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.processor(), "cores": os.cpu_count(), "python": platform.python_version(),
        "torch": torch.__version__, "memory_GB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
    }  # fmt: skip


def in_process(name: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--run", name, str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name} did not run: {done.stderr.strip().splitlines()[-1]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def forget(folder: Path) -> None:
    """Drop the files' pages from memory, so that the next run reads the disk."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def rounds(folder: Path, cold: bool) -> dict[str, Any]:
    """Every contender ROUNDS times, in turns; the run with the median time stands for each."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in RUNS}
    for _ in range(ROUNDS):
        for name in RUNS:
            if cold:
                forget(folder)
            runs[name].append(in_process(name, folder))
    kept: dict[str, Any] = {}
    for name, found in runs.items():
        key = "moments_over_floor" if name == "moments" else "seconds"
        found.sort(key=lambda run: run[key])
        kept[name] = {**found[len(found) // 2], f"all_{key}": [run[key] for run in found]}
    return kept


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
        theirs = results[name]
        lines.append(
            f"{name} {theirs['version']}: {theirs['seconds']:.2f} s ({theirs['seconds'] / ours['seconds']:.1f} x), "
            f"{theirs['peak_over_import'] / 1e6:.0f} MB over the import "
            f"({theirs['peak_over_import'] / ours['peak_over_import']:.0f} x); error "
            f"of the trace on the effective map {theirs['error']['median']:.2g} of its norm (median), ours {ours['error']['median']:.2g}"
        )
    return "\n".join(lines)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=OUT)
    ask.add_argument("--cold", action="store_true", help="read the disk in every run")
    ask.add_argument("--run", nargs=2, metavar=("NAME", "FOLDER"), help="one contender, in this process")
    args = ask.parse_args()
    if args.run:
        print(json.dumps(RUNS[args.run[0]](Path(args.run[1]))))
        return
    with tempfile.TemporaryDirectory() as place:
        results: dict[str, Any] = {
            "machine": machine(),
            "shape": {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "key_heads": KEY_HEADS},
        }
        results["bytes_on_disk"] = write_checkpoint(Path(place))
        results |= {"cold": args.cold, "rounds": ROUNDS} | rounds(Path(place), args.cold)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(summary(results))
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
