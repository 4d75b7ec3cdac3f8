"""The training runs behind the early-warning record; scripts/early_warning.py starts and judges them."""

from __future__ import annotations

import json
import math
import platform
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater.inputs.corpus import embedded_text
from locater.inputs.text import read_text
from locater.runs import Monitor

STEPS, LENGTH, BATCH, WIDTH, LAYERS, HEADS = 500, 256, 32, 256, 6, 8


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
    """Runs that are pushed to fail (forced), then healthy ones."""
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
    healthy = [
        Plan(f"{kind} rate {rate:g}, seed {seed}", kind, rate, seed=seed)
        for kind in ("gpt2", "llama", "qwen3")
        for rate in (3e-4, 1e-3)
        for seed in (1, 2)
    ]
    return [*forced, *healthy, Plan("gpt2 rate 3e-3", "gpt2", 3e-3), Plan("llama rate 3e-3", "llama", 3e-3)]


def build(plan: Plan) -> nn.Module:
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


class Extremes:
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
                "max_logit": _best(max, known["max_logit"]),
                "entropy_ratio_min": _best(min, ratios),
                "entropy_ratio_mean": sum(ratios) / len(ratios) if ratios else None,
                "sink": _best(max, known["sink"]),
                "spread": _best(max, known["spread"]),
                "M": _best(max, [abs(x) for x in known["M"]]),
            }
        )

    def close(self) -> None:
        return


def _best(choose: Any, numbers: list[float]) -> float | None:
    return choose(numbers) if numbers else None


def train(plan: Plan, data: Tensor, device: str) -> dict[str, Any]:
    """One run, watched at every step."""
    torch.manual_seed(plan.seed)
    model = build(plan).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.1)
    extremes = Extremes()
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


def run_all(out: Path, text: Path | None, part: str, steps: int) -> None:
    """Train the runs of a part, such as "1/4", and write each as JSON."""
    words = read_text(text) if text else embedded_text()
    data = torch.frombuffer(bytearray(words.encode()), dtype=torch.uint8)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "torch": torch.__version__,
    }
    number, count = (int(x) for x in part.split("/"))
    out.mkdir(parents=True, exist_ok=True)
    for i, plan in enumerate(plans()):
        if i % count != number - 1:
            continue
        run = train(replace(plan, steps=steps), data, device)
        setting = {"machine": machine, "text": text.name if text else "embedded"}
        (out / f"{i:02d}.json").write_text(json.dumps({**run, **setting}))
        trained = f"{len(run['steps'])} steps in {run['seconds']:.1f} s, loss {run['steps'][-1]['loss']}"
        print(f"{plan.name}: {trained}", file=sys.stderr, flush=True)
