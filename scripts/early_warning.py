"""The early-warning record: which signal crosses which threshold how many steps before a training run goes wrong, and
how often in vain.

    python scripts/early_warning.py run --out FOLDER [--text FILE] [--part I/N]     trains the runs (minutes on a GPU), one JSON each
    python scripts/early_warning.py table FOLDER                                    judges them, writes docs/results/early-warning.json
    python scripts/early_warning.py show                                            prints the table from that file

Runs are small language models on bytes, watched at every step by `locater.Monitor`. Some are forced: high learning
rate, no warm-up, large initial scale, half precision without a loss scale. Whether a run went wrong is decided by its
loss, not by what was intended: the smoothed loss stays 0.5 nats above its best so far, or above that of the usual run
of its kind at the same step, for 30 steps in a row, or is not finite. A collapse that only stalls the loss counts as
much as a spike.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater.data.corpus import embedded_text
from locater.data.text import read_text
from locater.monitor import Monitor

OUT = Path("docs/results/early-warning.json")
STEPS, LENGTH, BATCH, WIDTH, LAYERS, HEADS = 500, 256, 32, 256, 6, 8
RISE, BEHIND, LASTING, SMOOTH = 0.5, 0.5, 30, 5


@dataclass(frozen=True)
class Plan:
    """One run."""

    name: str
    # gpt2: learned positions, LayerNorm; llama: rotary, RMSNorm; qwen3: llama with norms on queries and keys
    kind: str = "gpt2"
    rate: float = 1e-3
    warmup: int = 50
    scale: float = 1.0  # of the initial query and key maps
    spread: float = 0.02  # of all initial weights
    dtype: str = "bfloat16"
    clip: float = 1.0
    seed: int = 0
    steps: int = STEPS


def plans() -> list[Plan]:
    """Forced ones, then healthy ones."""
    forced = [Plan(f"{kind} rate {rate:g}", kind, rate) for kind in ("gpt2", "llama") for rate in (1e-2, 3e-2, 1e-1)]
    forced += [
        Plan(f"{kind} rate 1e-2, no warm-up, no clipping", kind, 1e-2, warmup=0, clip=math.inf)
        for kind in ("gpt2", "llama")
    ]
    forced += [
        Plan(f"{kind} query-key scale {s:g}, rate 3e-3", kind, 3e-3, scale=s)
        for kind in ("gpt2", "llama")
        for s in (32,)
    ]
    forced += [Plan(f"{kind} initial spread 0.2, rate 3e-3", kind, 3e-3, spread=0.2) for kind in ("gpt2", "llama")]
    forced += [
        Plan(f"{kind} float16 without scale, rate {rate:g}", kind, rate, dtype="float16")
        for kind in ("gpt2", "llama")
        for rate in (3e-3, 1e-2)
    ]
    forced += [Plan(f"qwen3 rate {rate:g}", "qwen3", rate) for rate in (1e-2, 1e-1)]
    healthy = [Plan(f"{kind} rate {rate:g}, seed {seed}", kind, rate, seed=seed)
               for kind in ("gpt2", "llama", "qwen3") for rate in (3e-4, 1e-3) for seed in (1, 2)]  # fmt: skip
    return [*forced, *healthy, Plan("gpt2 rate 3e-3", "gpt2", 3e-3), Plan("llama rate 3e-3", "llama", 3e-3)]


def build(plan: Plan) -> nn.Module:
    import transformers

    shape: dict[str, Any] = dict(vocab_size=256, initializer_range=plan.spread, bos_token_id=0, eos_token_id=0)
    if plan.kind == "gpt2":
        config = transformers.GPT2Config(n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=LENGTH, resid_pdrop=0.0, embd_pdrop=0.0,
                                         attn_pdrop=0.0, **shape)  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
        maps = [block.attn.c_attn.weight[:, : 2 * WIDTH] for block in model.transformer.h]
    else:
        sizes = dict(hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS,
                     intermediate_size=3 * WIDTH, max_position_embeddings=LENGTH, head_dim=WIDTH // HEADS)  # fmt: skip
        name = {"llama": "Llama", "qwen3": "Qwen3"}[plan.kind]
        model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes, **shape))
        maps = [
            w for block in model.model.layers for w in (block.self_attn.q_proj.weight, block.self_attn.k_proj.weight)
        ]
    with torch.no_grad():
        for w in maps:
            w.mul_(math.sqrt(plan.scale))
    return model


class Extremes:
    """A sink that keeps, of every step, the extreme head of each column."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float | None]] = []

    def write(self, record: dict[str, Any]) -> None:
        if record["kind"] != "step":
            return
        held = {name: [x for layer in table for x in layer if x is not None] for name, table in record["heads"].items()}
        lost = sum(x is None for layer in record["heads"]["entropy"] for x in layer)
        self.steps.append({
            "loss": record["loss"], "grad_norm": record["scalars"].get("grad_norm"), "lost_heads": lost,
            "max_logit": _best(max, held["max_logit"]), "entropy_ratio_min": _best(min, held["entropy_ratio"]),
            "entropy_ratio_mean": sum(held["entropy_ratio"]) / len(held["entropy_ratio"]) if held["entropy_ratio"] else None,
            "sink": _best(max, held["sink"]), "spread": _best(max, held["spread"]), "M": _best(max, [abs(x) for x in held["M"]]),
        })  # fmt: skip

    def close(self) -> None:
        return


def _best(choose: Any, numbers: list[float]) -> float | None:
    return choose(numbers) if numbers else None


def train(plan: Plan, data: Tensor, device: str) -> dict[str, Any]:
    """One run, watched at every step."""
    torch.manual_seed(plan.seed)
    model = build(plan).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.1)
    kept = Extremes()
    monitor = Monitor(kept, every=1, warn_on="").attach(model)
    generator = torch.Generator().manual_seed(plan.seed)
    began = time.time()
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * min(1.0, (step + 1) / max(1, plan.warmup))
        at = torch.randint(len(data) - LENGTH, (BATCH,), generator=generator)
        batch = torch.stack([data[i : i + LENGTH] for i in at.tolist()]).long().to(device)
        with torch.autocast(device, getattr(torch, plan.dtype), enabled=device != "cpu"):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        optimizer.step()
        monitor.after_step(loss=loss, grad_norm=norm)
        if len(kept.steps) > 30 and all(x["loss"] is None for x in kept.steps[-10:]):
            break  # gone
    monitor.detach()
    return {
        "plan": {k: v if v != math.inf else None for k, v in asdict(plan).items()},
        "seconds": time.time() - began,
        "steps": kept.steps,
    }


# Judging


def smooth(run: dict[str, Any]) -> list[float]:
    """Losses as means over the last SMOOTH steps; not finite stays so."""
    losses = [math.inf if x["loss"] is None else x["loss"] for x in run["steps"]]
    return [statistics.fmean(losses[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(losses))]


def usual(runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The median loss at every step of the runs that were meant to be healthy, by kind."""
    found = {}
    for kind in {run["plan"]["kind"] for run in runs}:
        curves = [smooth(run) for run in runs if run["plan"]["kind"] == kind and "seed" in run["plan"]["name"]]
        found[kind] = [statistics.median(at) for at in zip(*curves, strict=True)]
    return found


def wrong_at(run: dict[str, Any], healthy: list[float]) -> int | None:
    """The first step from which on the loss shows that the run has gone wrong; None for a healthy one.

    Wrong is 0.5 nats above the best so far, or above the usual loss at that step, for LASTING steps in a row, or not
    finite.
    """
    losses = smooth(run)
    best = math.inf
    run_length = 0
    for step, loss in enumerate(losses):
        behind = not math.isfinite(loss) or loss > best + RISE or loss > healthy[min(step, len(healthy) - 1)] + BEHIND
        run_length = run_length + 1 if behind else 0
        if not math.isfinite(loss):
            return step - run_length + 1
        if run_length >= LASTING:
            return step - LASTING + 1
        best = min(best, loss)
    return None


def signals() -> dict[str, tuple[str, Any]]:
    """Name of each alarm: (what it reads, function of the steps so far that says whether it is raised at the last)."""
    found: dict[str, tuple[str, Any]] = {}
    for bound in (10, 20, 30, 50, 100, 200):
        found[f"max logit > {bound}"] = ("activations", lambda past, b=bound: _above(past[-1]["max_logit"], b))
    for factor in (2, 4, 8):
        found[f"max logit > {factor} x its median of the last 50 steps"] = (
            "activations",
            lambda past, f=factor: _jump(past, "max_logit", f),
        )
    for bound in (0.4, 0.3, 0.2, 0.1, 0.05):
        found[f"entropy ratio of a head < {bound}"] = (
            "activations",
            lambda past, b=bound: _below(past[-1]["entropy_ratio_min"], b),
        )
    for bound in (0.7, 0.6, 0.5, 0.4):
        found[f"mean entropy ratio < {bound}"] = (
            "activations",
            lambda past, b=bound: _below(past[-1]["entropy_ratio_mean"], b),
        )
    for bound in (3.3, 5, 10, 20, 50):
        found[f"logit spread from weights > {bound}"] = ("weights", lambda past, b=bound: _above(past[-1]["spread"], b))
    for bound in (2, 5, 20):
        found[f"|M| > {bound}"] = ("weights", lambda past, b=bound: _above(past[-1]["M"], b))
    for bound in (0.5, 0.9):
        found[f"first-key weight > {bound}"] = ("activations", lambda past, b=bound: _above(past[-1]["sink"], b))
    both = ("max_logit", 200), ("spread", 5)
    found["max logit > 200, or logit spread from weights > 5"] = (
        "both",
        lambda past: any(_above(past[-1][n], b) for n, b in both),
    )
    found["max logit > 200, and logit spread from weights > 5"] = (
        "both",
        lambda past: all(_above(past[-1][n], b) for n, b in both),
    )
    found["a head is not finite"] = ("activations", lambda past: past[-1]["lost_heads"] > 0)
    for factor in (3, 10, 30):
        found[f"gradient norm > {factor} x its median of the last 50 steps"] = (
            "gradients",
            lambda past, f=factor: _jump(past, "grad_norm", f),
        )
    return found


def _above(x: float | None, bound: float) -> bool:
    return x is None or x > bound


def _below(x: float | None, bound: float) -> bool:
    return x is None or x < bound


def _jump(past: list[dict[str, Any]], name: str, factor: float) -> bool:
    before = [x[name] for x in past[-51:-1] if x[name] is not None]
    return past[-1][name] is None or (len(before) >= 10 and past[-1][name] > factor * statistics.median(before))


def unforced(run: dict[str, Any]) -> bool:
    """Whether a run was meant to be an ordinary one."""
    return "seed" in run["plan"]["name"] or run["plan"]["name"] in ("gpt2 rate 3e-3", "llama rate 3e-3")


def judge(runs: list[dict[str, Any]]) -> dict[str, Any]:
    healthy_curves = usual(runs)
    verdicts = [wrong_at(run, healthy_curves[run["plan"]["kind"]]) for run in runs]
    rows = []
    for name, (reads, raised) in signals().items():
        at = [next((i for i in range(len(run["steps"])) if raised(run["steps"][: i + 1])), None) for run in runs]
        leads = [v - a for v, a in zip(verdicts, at, strict=True) if v is not None and a is not None and a < v]
        wrong, healthy = sum(v is not None for v in verdicts), sum(v is None for v in verdicts)
        rows.append({
            "signal": name, "reads": reads, "caught": len(leads), "missed": wrong - len(leads), "wrong": wrong,
            "false_alarms": sum(v is None and a is not None for v, a in zip(verdicts, at, strict=True)), "healthy": healthy,
            "false_alarms_unforced": sum(v is None and a is not None and unforced(r) for v, a, r in zip(verdicts, at, runs, strict=True)),
            "unforced": sum(map(unforced, runs)),
            "lead_median": statistics.median(leads) if leads else None, "lead_least": min(leads, default=None),
        })  # fmt: skip
    outcomes = [{"run": run["plan"]["name"], "wrong_at": v, "last_loss": run["steps"][-1]["loss"], "steps": len(run["steps"]),
                 "largest_logit": max((x["max_logit"] or 0 for x in run["steps"]), default=None)}
                for run, v in zip(runs, verdicts, strict=True)]  # fmt: skip
    return {
        "signals": rows,
        "runs": outcomes,
        "rule": {"rise": RISE, "behind": BEHIND, "lasting": LASTING, "smooth": SMOOTH},
    }


def text(found: dict[str, Any]) -> str:
    """The record as Markdown."""
    wrong, healthy = found["signals"][0]["wrong"], found["signals"][0]["healthy"]
    lines = [
        "# The early-warning record", "",
        f"Made by `scripts/early_warning.py` on an {found['machine']['device']} (torch {found['machine']['torch']}); figures in "
        f"`early-warning.json`. {wrong + healthy} runs of small language models on bytes ({LAYERS} layers, width {WIDTH}, {HEADS} heads, "
        f"{LENGTH} tokens, batch {BATCH}, {STEPS} steps), each watched at every step. {wrong} went wrong and {healthy} did not, judged by "
        f"the loss alone: smoothed over {SMOOTH} steps, it stayed {RISE} nats above its best, or above the usual run of its kind at that "
        f"step, for {LASTING} steps. Of the {healthy} healthy runs {found['signals'][0]['unforced']} were ordinary; the rest were forced "
        "and survived.", "",
        "Lead is how many steps the alarm came before the loss showed it. An alarm after that counts as missed.", "",
        "| signal | reads | caught | median lead | least lead | false alarms | of them in ordinary runs |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in found["signals"]:
        lead, least = ("-" if row[x] is None else f"{row[x]:g}" for x in ("lead_median", "lead_least"))
        name = row["signal"].replace("|", "\\|")
        lines.append(f"| {name} | {row['reads']} | {row['caught']} of {wrong} | {lead} | {least} | {row['false_alarms']} of {healthy} "
                     f"| {row['false_alarms_unforced']} of {row['unforced']} |")  # fmt: skip
    lines += ["", "| run | went wrong at step | last loss | largest logit |", "|---|---|---|---|"]
    for run in found["runs"]:
        end = "not finite" if run["last_loss"] is None else f"{run['last_loss']:.2f}"
        lines.append(
            f"| {run['run']} | {'-' if run['wrong_at'] is None else run['wrong_at']} | {end} | {run['largest_logit']:.3g} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("run", "table", "show"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    if given.verb == "show":
        print(text(json.loads(OUT.read_text())))
    elif given.verb == "table":
        runs = [json.loads(path.read_text()) for path in sorted(given.folder.glob("*.json"))]
        order = {plan.name: i for i, plan in enumerate(plans())}
        runs.sort(key=lambda run: order[run["plan"]["name"]])
        found = {**judge(runs), "machine": runs[0]["machine"], "text": runs[0]["text"]}
        OUT.write_text(json.dumps(found, indent=1) + "\n")
        OUT.with_suffix(".md").write_text(text(found))
        print(text(found))
    else:
        run_all(given)


def run_all(given: argparse.Namespace) -> None:
    words = read_text(given.text) if given.text else embedded_text()
    data = torch.frombuffer(bytearray(words.encode()), dtype=torch.uint8)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "torch": torch.__version__,
    }
    number, count = (int(x) for x in given.part.split("/"))
    given.out.mkdir(parents=True, exist_ok=True)
    for i, plan in enumerate(plans()):
        if i % count != number - 1:
            continue
        found = train(replace(plan, steps=given.steps), data, device)
        told = {"machine": machine, "text": given.text.name if given.text else "embedded"}
        (given.out / f"{i:02d}.json").write_text(json.dumps({**found, **told}))
        print(
            f"{plan.name}: {len(found['steps'])} steps in {found['seconds']:.1f} s, loss {found['steps'][-1]['loss']}",
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    main()
