"""The first early-warning runs, on which the thresholds of `locater.Monitor()` were chosen: docs/results/early-warning.md.

32 small language models on bytes, watched at every step. Some are pushed to fail: high learning rate, no warm-up, large
initial scale, half precision without a loss scale. They describe and forecast nothing, so they decide no claim. Their
steps are not kept; the record that was judged from them is (docs/results/early-warning.json), and `page_text` makes its page.

    make study STUDY='early_warning.first_runs train FOLDER'     # trains them, one JSON each
    make study STUDY='early_warning.first_runs judge FOLDER'     # judges them, writes the record and its page
    make study STUDY=early_warning.first_runs                    # writes the page again
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater import Monitor
from locater.files import write_whole
from locater.inputs.corpus import embedded_text
from locater_lab.studies.early_warning.judging import BEHIND, LASTING, RISE, SMOOTH, first_wrong_step, smooth_losses

OUT = Path("docs/results/early-warning.json")  # from the root of the repository, where make runs
STEPS, LENGTH, BATCH, WIDTH, LAYERS, HEADS = 500, 256, 32, 256, 6, 8


@dataclass(frozen=True)
class RunPlan:
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


def all_plans() -> list[RunPlan]:
    """Runs that are pushed to fail (forced), then healthy ones."""
    forced = [RunPlan(f"{kind} rate {rate:g}", kind, rate) for kind in ("gpt2", "llama") for rate in (1e-2, 3e-2, 1e-1)]
    forced += [
        RunPlan(f"{kind} rate 1e-2, no warm-up, no clipping", kind, 1e-2, warmup=0, clip=math.inf)
        for kind in ("gpt2", "llama")
    ]
    forced += [
        RunPlan(f"{kind} query-key scale {s:g}, rate 3e-3", kind, 3e-3, scale=s)
        for kind in ("gpt2", "llama")
        for s in (32,)
    ]
    forced += [RunPlan(f"{kind} initial spread 0.2, rate 3e-3", kind, 3e-3, spread=0.2) for kind in ("gpt2", "llama")]
    forced += [
        RunPlan(f"{kind} float16 without scale, rate {rate:g}", kind, rate, dtype="float16")
        for kind in ("gpt2", "llama")
        for rate in (3e-3, 1e-2)
    ]
    forced += [RunPlan(f"qwen3 rate {rate:g}", "qwen3", rate) for rate in (1e-2, 1e-1)]
    healthy = [
        RunPlan(f"{kind} rate {rate:g}, seed {seed}", kind, rate, seed=seed)
        for kind in ("gpt2", "llama", "qwen3")
        for rate in (3e-4, 1e-3)
        for seed in (1, 2)
    ]
    return [*forced, *healthy, RunPlan("gpt2 rate 3e-3", "gpt2", 3e-3), RunPlan("llama rate 3e-3", "llama", 3e-3)]


def build_model(plan: RunPlan) -> nn.Module:
    import transformers

    shape: dict[str, Any] = dict(vocab_size=256, initializer_range=plan.spread, bos_token_id=0, eos_token_id=0)
    if plan.kind == "gpt2":
        dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        sizes = dict(n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=LENGTH)
        config = transformers.GPT2Config(**sizes, **dropout, **shape)
        model = transformers.GPT2LMHeadModel(config)
        maps = [block.attn.c_attn.weight[:, : 2 * WIDTH] for block in model.transformer.h]
    else:
        sizes = dict(
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            intermediate_size=3 * WIDTH,
            max_position_embeddings=LENGTH,
            head_dim=WIDTH // HEADS,
        )
        name = {"llama": "Llama", "qwen3": "Qwen3"}[plan.kind]
        model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes, **shape))
        maps = [
            w for block in model.model.layers for w in (block.self_attn.q_proj.weight, block.self_attn.k_proj.weight)
        ]
    with torch.no_grad():
        for w in maps:
            w.mul_(math.sqrt(plan.scale))
    return model


class ExtremesSink:
    """A sink that stores the extreme value over heads of each column, for every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float | None]] = []

    def write(self, record: dict[str, Any]) -> None:
        if record["kind"] != "step":
            return
        heads = record["heads"]
        known = {name: [x for layer in table for x in layer if x is not None] for name, table in heads.items()}
        ratios = known["entropy_ratio"]
        self.steps.append(
            {
                "loss": record["loss"],
                "grad_norm": record["scalars"].get("grad_norm"),
                "lost_heads": sum(x is None for layer in heads["entropy"] for x in layer),
                "max_logit": _extreme(max, known["max_logit"]),
                "entropy_ratio_min": _extreme(min, ratios),
                "entropy_ratio_mean": sum(ratios) / len(ratios) if ratios else None,
                "sink": _extreme(max, known["sink"]),
                "spread": _extreme(max, known["spread"]),
                "M": _extreme(max, [abs(x) for x in known["M"]]),
            }
        )

    def close(self) -> None:
        return


def _extreme(choose: Any, numbers: list[float]) -> float | None:
    return choose(numbers) if numbers else None


def train(plan: RunPlan, data: Tensor, device: str) -> dict[str, Any]:
    """One run, watched at every step."""
    torch.manual_seed(plan.seed)
    model = build_model(plan).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.1)
    extremes = ExtremesSink()
    monitor = Monitor(extremes, every=1, warn_on="").attach(model)
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
        if len(extremes.steps) > 30 and all(x["loss"] is None for x in extremes.steps[-10:]):
            break  # it has diverged
    monitor.detach()
    return {
        "plan": {k: v if v != math.inf else None for k, v in asdict(plan).items()},
        "seconds": time.time() - began,
        "steps": extremes.steps,
    }


def train_all(out: Path) -> None:
    """Train the runs that `out` does not have, each into a file of JSON."""
    data = torch.frombuffer(bytearray(embedded_text().encode()), dtype=torch.uint8)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    facts = {"machine": {"device": name, "torch": torch.__version__}, "text": "embedded"}
    out.mkdir(parents=True, exist_ok=True)
    for number, plan in enumerate(all_plans()):
        path = out / f"{number:02d}.json"
        if path.is_file():
            continue
        run = train(plan, data, device)
        write_whole(path, json.dumps({**run, **facts}))
        trained = f"{len(run['steps'])} steps in {run['seconds']:.1f} s, loss {run['steps'][-1]['loss']}"
        print(f"{plan.name}: {trained}", file=sys.stderr, flush=True)


# ---- judged ----


def smoothed_losses(run: dict[str, Any]) -> list[float]:
    """Losses as means over the last steps; not finite stays so."""
    return smooth_losses([x["loss"] for x in run["steps"]])


def usual_losses(runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The median loss at every step of the runs that were meant to be healthy, by kind."""
    medians = {}
    for kind in {run["plan"]["kind"] for run in runs}:
        curves = [smoothed_losses(run) for run in runs if run["plan"]["kind"] == kind and "seed" in run["plan"]["name"]]
        medians[kind] = [statistics.median(at) for at in zip(*curves, strict=True)]
    return medians


def wrong_step(run: dict[str, Any], healthy: list[float]) -> int | None:
    """The first step, counted from 0, from which on the loss shows that the run has gone wrong; None for a healthy one."""
    step = first_wrong_step([x["loss"] for x in run["steps"]], healthy)
    return None if step is None else step - 1


def signals() -> dict[str, tuple[str, Any]]:
    """By name of the alarm: what it reads, and a function of the steps so far that says if it is raised at the last."""
    alarms: dict[str, tuple[str, Any]] = {}
    bound: float  # integers in some lists
    for bound in (10, 20, 30, 50, 100, 200):
        alarms[f"max logit > {bound}"] = ("activations", lambda past, b=bound: _above(past[-1]["max_logit"], b))
    for factor in (2, 4, 8):
        alarms[f"max logit > {factor} x its median of the last 50 steps"] = (
            "activations",
            lambda past, f=factor: _jumps(past, "max_logit", f),
        )
    for bound in (0.4, 0.3, 0.2, 0.1, 0.05):
        alarms[f"entropy ratio of a head < {bound}"] = (
            "activations",
            lambda past, b=bound: _below(past[-1]["entropy_ratio_min"], b),
        )
    for bound in (0.7, 0.6, 0.5, 0.4):
        alarms[f"mean entropy ratio < {bound}"] = (
            "activations",
            lambda past, b=bound: _below(past[-1]["entropy_ratio_mean"], b),
        )
    for bound in (3.3, 5, 10, 20, 50):
        alarms[f"logit spread from weights > {bound}"] = (
            "weights",
            lambda past, b=bound: _above(past[-1]["spread"], b),
        )
    for bound in (2, 5, 20):
        alarms[f"|M| > {bound}"] = ("weights", lambda past, b=bound: _above(past[-1]["M"], b))
    for bound in (0.5, 0.9):
        alarms[f"first-key weight > {bound}"] = ("activations", lambda past, b=bound: _above(past[-1]["sink"], b))
    both = ("max_logit", 200), ("spread", 5)
    alarms["max logit > 200, or logit spread from weights > 5"] = (
        "both",
        lambda past: any(_above(past[-1][n], b) for n, b in both),
    )
    alarms["max logit > 200, and logit spread from weights > 5"] = (
        "both",
        lambda past: all(_above(past[-1][n], b) for n, b in both),
    )
    alarms["a head is not finite"] = ("activations", lambda past: past[-1]["lost_heads"] > 0)
    for factor in (3, 10, 30):
        alarms[f"gradient norm > {factor} x its median of the last 50 steps"] = (
            "gradients",
            lambda past, f=factor: _jumps(past, "grad_norm", f),
        )
    return alarms


def _above(x: float | None, bound: float) -> bool:
    return x is None or x > bound


def _below(x: float | None, bound: float) -> bool:
    return x is None or x < bound


def _jumps(past: list[dict[str, Any]], name: str, factor: float) -> bool:
    before = [x[name] for x in past[-51:-1] if x[name] is not None]
    return past[-1][name] is None or (len(before) >= 10 and past[-1][name] > factor * statistics.median(before))


def is_ordinary(run: dict[str, Any]) -> bool:
    """Whether a run was meant to be an ordinary one."""
    return "seed" in run["plan"]["name"] or run["plan"]["name"] in ("gpt2 rate 3e-3", "llama rate 3e-3")


def judge(runs: list[dict[str, Any]]) -> dict[str, Any]:
    healthy_curves = usual_losses(runs)
    verdicts = [wrong_step(run, healthy_curves[run["plan"]["kind"]]) for run in runs]
    rows = []
    for name, (reads, raised) in signals().items():
        at = [next((i for i in range(len(run["steps"])) if raised(run["steps"][: i + 1])), None) for run in runs]
        leads = [v - a for v, a in zip(verdicts, at, strict=True) if v is not None and a is not None and a < v]
        wrong, healthy = sum(v is not None for v in verdicts), sum(v is None for v in verdicts)
        false_alarms = [run for v, a, run in zip(verdicts, at, runs, strict=True) if v is None and a is not None]
        rows.append(
            {
                "signal": name,
                "reads": reads,
                "caught": len(leads),
                "missed": wrong - len(leads),
                "wrong": wrong,
                "false_alarms": len(false_alarms),
                "healthy": healthy,
                "false_alarms_unforced": sum(map(is_ordinary, false_alarms)),
                "unforced": sum(map(is_ordinary, runs)),
                "lead_median": statistics.median(leads) if leads else None,
                "lead_least": min(leads, default=None),
            }
        )
    outcomes = [
        {
            "run": run["plan"]["name"],
            "wrong_at": v,
            "last_loss": run["steps"][-1]["loss"],
            "steps": len(run["steps"]),
            "largest_logit": max((x["max_logit"] or 0 for x in run["steps"]), default=None),
        }
        for run, v in zip(runs, verdicts, strict=True)
    ]
    return {
        "signals": rows,
        "runs": outcomes,
        "rule": {"rise": RISE, "behind": BEHIND, "lasting": LASTING, "smooth": SMOOTH},
    }


def page_text(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    wrong, healthy = record["signals"][0]["wrong"], record["signals"][0]["healthy"]
    device, torch_version = record["machine"]["device"], record["machine"]["torch"]
    ordinary = record["signals"][0]["unforced"]
    lines = [
        "# The early-warning record",
        "",
        f"Made by `make study STUDY=early_warning.first_runs` on an {device} (torch {torch_version}); figures in "
        f"`early-warning.json`. {wrong + healthy} runs of small language models on bytes ({LAYERS} layers, width {WIDTH}, "
        f"{HEADS} heads, {LENGTH} tokens, batch {BATCH}, {STEPS} steps), each watched at every step. {wrong} went wrong "
        f"and {healthy} did not, judged by the loss alone: smoothed over {SMOOTH} steps, it stayed {RISE} nats above its "
        f"best, or above the usual run of its kind at that step, for {LASTING} steps. Of the {healthy} healthy runs "
        f"{ordinary} were ordinary; the rest were forced and survived.",
        "",
        "Lead is how many steps the alarm came before the loss showed it. An alarm after that counts as missed.",
        "",
        "| signal | reads | caught | median lead | least lead | false alarms | of them in ordinary runs |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in record["signals"]:
        lead, least = ("-" if row[x] is None else f"{row[x]:g}" for x in ("lead_median", "lead_least"))
        cells = [
            row["signal"].replace("|", "\\|"),
            row["reads"],
            f"{row['caught']} of {wrong}",
            lead,
            least,
            f"{row['false_alarms']} of {healthy}",
            f"{row['false_alarms_unforced']} of {row['unforced']}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| run | went wrong at step | last loss | largest logit |", "|---|---|---|---|"]
    for run in record["runs"]:
        end = "not finite" if run["last_loss"] is None else f"{run['last_loss']:.2f}"
        lines.append(
            f"| {run['run']} | {'-' if run['wrong_at'] is None else run['wrong_at']} | {end} | {run['largest_logit']:.3g} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", nargs="?", choices=("train", "judge", "page"), default="page")
    parser.add_argument("folder", nargs="?", type=Path, help="one JSON for each run")
    args = parser.parse_args()
    if args.verb != "page" and args.folder is None:
        parser.error(f"{args.verb} needs a folder")
    if args.verb == "train":
        train_all(args.folder)
        return
    if args.verb == "judge":
        runs = [json.loads(path.read_text()) for path in sorted(args.folder.glob("*.json"))]
        record = {**judge(runs), "machine": runs[0]["machine"], "text": runs[0]["text"]}
        write_whole(OUT, json.dumps(record, indent=1) + "\n")
    write_whole(OUT.with_suffix(".md"), page_text(json.loads(OUT.read_text())))


if __name__ == "__main__":
    main()
