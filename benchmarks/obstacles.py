"""Known obstacles to an aim that is not met: in words, with a measurement from the same results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Results = dict[str, Any]
LINEAR = ("linear", "fastmax", "delta", "gated_delta")  # mechanisms whose cost is linear in the number of tokens


def slowest_mechanism(results: Results, names: Iterable[str] | None, excluded: Iterable[str] = ()) -> tuple[str, float]:
    long, seconds = str(results["lengths"][-1]), results["seconds"]
    ratios = {}
    for label, times in seconds.items():
        base = label.split("(")[0].split(",")[0].strip()
        if label.startswith("SDPA") or base in excluded or (names is not None and base not in names):
            continue
        sdpa = seconds["SDPA, all keys" if label in results["all_keys"] else "SDPA"]
        ratios[label] = times[long]["forward"] / sdpa[long]["forward"]
    return max(ratios.items(), key=lambda item: item[1])


def of_import(results: Results) -> str:
    stages = results["locater"]["stages"]
    decompositions = stages["eigenvalues"] + stages["singular values"]
    return (
        f"of {results['locater']['seconds']:.2f} s, {decompositions:.2f} s are 1,024 decompositions of 64 x 64, "
        f"{stages['folding and moments']:.2f} s the products of all query and key maps, and "
        f"{stages['reading']:.2f} s reading {results['locater']['bytes_read'] / 1e6:.0f} MB, stage by stage"
    )


def of_rival(results: Results) -> str:
    rival = results["transformer_lens_bfloat16"]
    return (
        f"the rival maps the file and reads {rival['seconds_loading']:.2f} s long; what remains is the same 512 "
        f"eigenproblems on both sides. {of_import(results)[0].upper()}{of_import(results)[1:]}"
    )


def of_eigenvalues(results: Results) -> str:
    rest, profile = results["seconds_without_eigenvalues"], results.get("profile")
    parts = "" if not profile else ". A profile: " + ", ".join(f"`{k}` {1e3 * v:.0f} ms" for k, v in profile.items())
    return (
        f"without eigenvalues it takes {rest:.3f} s: the decompositions run on the {results['cores']} cores of the host, since "
        f"CUDA has no fast solver for matrices that are not symmetric{parts}"
    )


def of_slowest(names: Iterable[str] | None, excluded: Iterable[str] = ()) -> Callable[[Results], str]:
    def words(results: Results) -> str:
        name, ratio = slowest_mechanism(results, names, excluded)
        said = f"the slowest is {name} at {ratio:.2f} ([all of them](results/kernels.md#mechanisms))"
        if name != "hybrid_normalized":
            return said
        long, parts = str(results["lengths"][-1]), ("hybrid_normalized", "doubly_normalized", "SDPA, all keys")
        whole, doubly, fused = (1e3 * results["seconds"][part][long]["forward"] for part in parts)
        return f"{said}: its {whole:.2f} ms are doubly normalized attention, {doubly:.2f} ms, and SDPA, {fused:.2f} ms"

    return words


def of_products(size: int) -> Callable[[Results], str]:
    """The share of the products of queries and keys in the time of the statistics at the longest T."""

    def words(results: Results) -> str:
        cases = [x for x in results["cases"] if x["D"] == size and x["dtype"] == "bfloat16" and x["causal"]]
        long = max((x for x in cases if x.get("batch", 1) == 1), key=lambda case: case["T"])
        ms = long["ms"]["statistics"]
        return (
            f"at {long['T']:,} tokens the products of queries and keys alone take {long['floor_ms'] / ms:.2f} of its "
            f"{ms:.2f} ms at the card's rate of 790 TFLOP/s; the rest are exponentials, of which a head of {size} has "
            f"{128 // size} times as many for each product as one of 128"
        )

    return words


def of_host(results: Results) -> str:
    llama = results["llama"]
    milliseconds = {name: us / 1e3 for name, us in llama.get("host_us_per_layer", {}).items()}
    milliseconds |= llama.get("host_ms_per_layer", {})
    host = ", ".join(f"{name} {ms:.2f} ms" for name, ms in milliseconds.items())
    whole = ", ".join(f"{name} {ms:.1f} ms" for name, ms in llama["ms"].items())
    return f"a pass takes {whole}; the host needs for each layer beside a plain pass: {host}"


def of_step(results: Results) -> str:
    compiled = results["compiled"]
    return (
        f"a plain step alone takes {compiled['single_step_ms']:.1f} ms; an observed one runs another graph, "
        "with kernels of its own in every layer, and its numbers and spectra are read before the next begins"
    )


def of_penalty(results: Results) -> str:
    seconds = results["seconds"]
    return (
        f"alone, penalty and gradient take {1e3 * seconds['penalty']:.2f} ms of a step of "
        f"{1e3 * seconds['training step']:.1f} ms: a few dozen small kernels, whose launches take the time"
    )


def of_slow_host(results: Results) -> str:
    return (
        f"{results['help']['processor_seconds']:.2f} s of processor time; other work on the machine, load "
        f"{results['load']:.1f}, has the rest"
    )


def of_other_work(results: Results) -> str:
    """Of measurements in seconds of the CPU, which other work on the machine decides."""
    return f"the load of the machine was {results.get('load', 0.0):.1f} on {results['machine']['cores']} cores"


def of_layer(results: Results) -> str:
    return f"{results['Llama-405B']['heads']} heads are folded in blocks of 160 MiB, of which two are held at a time"
