"""The lines of the table of benchmarks: what is measured, against what, the aim, and where the results have the figure.

A figure that results do not have is None, and shown as `-`: it was not measured on that device yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from obstacles import (
    LINEAR,
    Results,
    of_eigenvalues,
    of_host,
    of_import,
    of_layer,
    of_other_work,
    of_penalty,
    of_products,
    of_rival,
    of_slow_host,
    of_slowest,
    of_step,
    slowest_mechanism,
)

Device = Literal["cpu", "gpu"]
LONG = 8192  # tokens from which on the aims of the statistics hold


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    what: str
    against: str
    results: str  # the name of the file, without .json
    figure: Callable[[Results], float | None]
    unit: str = ""  # "": a ratio
    aim: float | None = None
    at_least: bool = False  # the aim is a lower bound
    obstacle: Callable[[Results], str] | None = None  # what stands in the way, where the aim is not met
    shown: str = ".2f"

    def value(self, results: Results | None) -> float | None:
        """The figure in results; None where they do not have it."""
        if results is None:
            return None
        try:
            return self.figure(results)
        except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError):
            return None

    def words(self, value: float | None) -> str:
        """A figure with its unit."""
        return "-" if value is None else f"{value:{self.shown}}{' ' if self.unit else ''}{self.unit}"

    def aim_words(self) -> str:
        if self.aim is None:
            return "-"
        return f"{'at least' if self.at_least else 'at most'} {self.words(self.aim)}"

    def met(self, value: float | None) -> bool | None:
        """Whether a figure reaches the aim, as the table shows both; None without an aim or a figure."""
        if self.aim is None or value is None:
            return None
        shown = float(f"{value:{self.shown}}".replace(",", ""))
        return shown >= self.aim if self.at_least else shown <= self.aim


def at(*path: str | int) -> Callable[[Results], float | None]:
    """The number at a place in nested results."""

    def figure(results: Results) -> float | None:
        found: Any = results
        for key in path:
            found = found[key]
        return float(found)

    return figure


def over(path: Iterable[str | int], below: Iterable[str | int]) -> Callable[[Results], float | None]:
    """The ratio of two numbers."""
    upper, lower = at(*path), at(*below)
    return lambda results: (upper(results) or 0.0) / (lower(results) or float("nan"))


def of_flash(size: int, name: str) -> Callable[[Results], float | None]:
    """The largest ratio to the flash forward pass over lengths from 8,192 tokens on, bfloat16 and causal."""

    def figure(results: Results) -> float | None:
        return max(
            case["ms"][name] / case["ms"]["flash forward"]
            for case in results["cases"]
            if case["T"] >= LONG and case["D"] == size and case["dtype"] == "bfloat16" and case["causal"]
            if case.get("batch", 1) == 1
            if name in case["ms"]
        )

    return figure


def slowest(names: Iterable[str] | None, excluded: Iterable[str] = ()) -> Callable[[Results], float | None]:
    """The largest ratio of a mechanism to SDPA with as many keys, forward pass, at the longest T."""
    return lambda results: slowest_mechanism(results, names, excluded)[1]


def decoding(case: int) -> Callable[[Results], float | None]:
    """Extended statistics of one query over a cache, of the time of SDPA."""
    ms = ("decoding", case, "ms")
    return over((*ms, "statistics, extended"), (*ms, "SDPA"))


# The table


SCAN = "512 heads of a checkpoint of 1B shape from disk, with eigenvalues"
FLASH = "SDPA flash forward, bfloat16, causal, from 8,192 tokens on"
LLAMA = "the plain pass, Llama-1B shape, 2 x 4,096 tokens"

CPU_LINES = (
    Line(SCAN, "TransformerLens, float32", "checkpoint", over(("transformer_lens", "seconds"), ("locater", "seconds")),
         "times as fast", 10, True, of_import, ".1f"),
    Line(SCAN, "TransformerLens, bfloat16", "checkpoint",
         over(("transformer_lens_bfloat16", "seconds"), ("locater", "seconds")), "times as fast", 2, True, of_rival, ".1f"),
    Line("the same while the machine is busy", "TransformerLens, float32", "checkpoint-busy",
         over(("transformer_lens", "seconds"), ("locater", "seconds")), "times as fast", shown=".1f"),
    Line("the same while the machine is busy", "TransformerLens, bfloat16", "checkpoint-busy",
         over(("transformer_lens_bfloat16", "seconds"), ("locater", "seconds")), "times as fast", shown=".1f"),
    Line("processor time, one thread each", "TransformerLens, float32", "checkpoint-one-thread",
         over(("transformer_lens", "processor_seconds"), ("locater", "processor_seconds")), "times less", shown=".1f"),
    Line("processor time, one thread each", "TransformerLens, bfloat16", "checkpoint-one-thread",
         over(("transformer_lens_bfloat16", "processor_seconds"), ("locater", "processor_seconds")), "times less",
         shown=".1f"),
    Line(SCAN, "-", "checkpoint", at("locater", "seconds"), "s"),
    Line("the same scan: memory", "over the import", "checkpoint", lambda r: r["locater"]["peak_over_import"] / 1e6, "MB",
         shown=".0f"),
    Line("the same heads of a live model", "-", "live-cpu", at("seconds"), "s"),
    Line("one layer of a 405B shape: memory", "over the import", "large",
         lambda r: r["Llama-405B"]["peak_over_import"] / 1e9, "GB", 1, obstacle=of_layer),
    Line("`doctor`, a whole checkpoint of 2 GB, processor time after the import", "sha256sum", "doctor",
         over(("doctor", "processor_seconds"), ("sha256sum", "processor_seconds")), aim=1.5),
    Line("the same on the clock", "sha256sum", "doctor", over(("doctor", "seconds"), ("sha256sum", "seconds")), aim=1.5),
    Line("the same: memory", "over the import", "doctor", lambda r: r["doctor"]["peak_over_import"] / 1e6, "MB", 300,
         shown=".0f"),
    Line("`doctor` beside a base in which every number differs, processor time", "sha256sum", "doctor",
         over(("doctor, with base", "processor_seconds"), ("sha256sum", "processor_seconds")), aim=3),
    Line("the same: memory", "over the import, with base", "doctor",
         lambda r: r["doctor, with base"]["peak_over_import"] / 1e6, "MB", 600, shown=".0f"),
    Line("`locater doctor`, the whole command, processor time", "weightlens analyze", "doctor",
         over(("weightlens", "processor_seconds"), ("doctor command", "processor_seconds")), "times less", shown=".1f"),
    Line("remote scan, 30 ms latency", "the same scan from disk", "remote",
         lambda r: r["https"]["seconds"] - r["local"]["seconds"], "s more", 1, obstacle=of_other_work),
    Line("remote scan: bytes", "queries, keys and norms", "remote", over(("https", "bytes"), ("bytes_needed",)), aim=1.15,
         obstacle=of_other_work),
    Line("a model without a record, layouts known", "names given by hand", "discovery",
         over(("cached", "seconds"), ("named", "seconds"))),
    Line("a fleet of 1,000 small checkpoints, two workers", "-", "fleet", at("checkpoints_per_second", "2 workers"),
         "a second", shown=".0f"),
    Line("`locater --help`", "-", "startup", at("help", "seconds"), "s", 0.3, obstacle=of_slow_host),
    Line("`locater --version`", "-", "startup", at("version", "seconds"), "s", 0.3, obstacle=of_slow_host),
    Line("`locater train`, one step, from the start of the process", "import torch", "startup",
         over(("train", "seconds"), ("torch", "seconds"))),
    Line("what a further run of a plan pays before its second step, tiny model", "-", "training-cpu",
         lambda r: r["seconds"]["tokens again"] + r["seconds"]["first step again"], "s"),
    Line("the page of a scan of 1,024 heads", "-", "pages", at("scan", "seconds"), "s"),
    Line("the page of a scan of 1,024 heads: size", "-", "pages", at("scan", "megabytes"), "MB", shown=".1f"),
    Line("`observe`, GPT-2 small, 4 x 1,024 tokens", "the plain pass", "observe-cpu",
         over(("contenders", "observe", "seconds"), ("contenders", "plain", "seconds"))),
    Line("the same: memory", "the plain pass", "observe-cpu",
         over(("contenders", "observe", "peak_mb"), ("contenders", "plain", "peak_mb"))),
    Line("a generated token observed, cache of 1,024 tokens", "the plain token", "generation-cpu",
         at("caches", "dynamic, 1 sequence", "1024", "ratio", "observed")),
    Line("the same, cache of 16,384 tokens", "the plain token", "generation-cpu",
         at("caches", "dynamic, 1 sequence", "16384", "ratio", "observed")),
    Line("LocAteR penalty, GPT-2 small", "the plain step", "penalty-cpu", at("step with / step without")),
    Line("`explain.relevance`, GPT-2 small", "a forward pass", "relevance",
         over(("work", "relevance", "seconds"), ("work", "forward", "seconds"))),
    Line("`ablate`, a head of SmolLM2-135M: blocks", "the blocks of a pass", "ablate-cpu", at("smollm2", "blocks_over_blocks"),
         aim=0.55),
    Line("the same: embeddings and output layer", "those of a pass", "ablate-cpu", at("smollm2", "rest_over_rest")),
    Line("`ablate`, a head of six layers of 384: blocks", "the blocks of a pass", "ablate-cpu",
         at("minilm", "blocks_over_blocks"), aim=0.55),
    Line("slowest mechanism, forward, 2,048 tokens", "SDPA", "mechanisms-cpu", slowest(None)),
)  # fmt: skip

GPU_LINES = (
    Line("statistics, heads of 128", FLASH, "attention", of_flash(128, "statistics"), aim=0.37, obstacle=of_products(128)),
    Line("statistics, extended, heads of 128", FLASH, "attention", of_flash(128, "statistics, extended"), aim=0.43,
         obstacle=of_products(128)),
    Line("statistics, heads of 64", FLASH, "attention", of_flash(64, "statistics"), aim=0.40, obstacle=of_products(64)),
    Line("statistics, extended, heads of 64", FLASH, "attention", of_flash(64, "statistics, extended"), aim=0.45,
         obstacle=of_products(64)),
    Line("output and extended statistics in one pass, heads of 128", FLASH, "attention",
         of_flash(128, "attention with statistics, extended"), aim=1.15, obstacle=of_products(128)),
    Line("output and extended statistics in one pass, heads of 64", FLASH, "attention",
         of_flash(64, "attention with statistics, extended"), aim=1.15, obstacle=of_products(64)),
    Line("`observe` around one pass", LLAMA, "observe-gpu", at("llama", "around"), aim=1.12, obstacle=of_host),
    Line("a pass inside an observation that goes on", LLAMA, "observe-gpu", at("llama", "inside"), aim=1.10,
         obstacle=of_host),
    Line("the same, `rows=64`", LLAMA, "observe-gpu", at("llama", "rows64_inside"), aim=1.03, obstacle=of_host),
    Line("an observed step, GPT-2 small, compiled", "-", "observe-gpu", at("compiled", "observed_step_ms"), "ms", 30,
         obstacle=of_step, shown=".1f"),
    Line("steps with a `Monitor`, every 50th observed", "the plain steps", "observe-gpu", at("compiled", "ratio"),
         shown=".3f"),
    Line("a generated token observed, cache of 4,096 tokens", "the plain token", "generation-gpu",
         at("caches", "dynamic, 1 sequence", "4096", "ratio", "observed")),
    Line("scan of a live model of 1B shape, with eigenvalues", "-", "live-gpu", at("seconds"), "s", 0.1,
         obstacle=of_eigenvalues, shown=".3f"),
    Line("LocAteR penalty, GPT-2 small", "the plain step", "penalty-gpu", at("step with / step without"), aim=1.01,
         obstacle=of_penalty, shown=".3f"),
    Line("slowest mechanism that is linear in T, forward, 8,192 tokens", "SDPA", "mechanisms-gpu", slowest(LINEAR), aim=1,
         obstacle=of_slowest(LINEAR)),
    Line("slowest of the others, forward, 8,192 tokens", "SDPA", "mechanisms-gpu", slowest(None, LINEAR), aim=3,
         obstacle=of_slowest(None, LINEAR)),
    Line("statistics of one query, 32,768 keys, 8 key heads of 128", "SDPA", "attention", decoding(0)),
    Line("the same, 8 sequences", "SDPA", "attention", decoding(1)),
    Line("`explain.operator`, a row, Llama of 1B", "a forward pass", "explain-gpu", at("bfloat16", "one_row_over_forward")),
    Line("`ablate`, a head of a Llama of 1B: blocks", "the blocks of a pass", "ablate-gpu", at("llama-1b", "blocks_over_blocks"),
         aim=0.55),
    Line("a step of the papers' small runs: queued by the host", "the step", "training-gpu", at("host_share")),
    Line("runs of 1,500 steps, one at a time", "-", "training-gpu", at("runs_per_minute"), "a minute"),
)  # fmt: skip

LINES: dict[Device, tuple[Line, ...]] = {"cpu": CPU_LINES, "gpu": GPU_LINES}
