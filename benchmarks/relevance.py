"""Time and memory of the methods of locater.explain, as ratios against a forward pass.

    python benchmarks/relevance.py          # writes benchmarks/results/relevance.json

Each measurement runs in a process of its own, because peak memory is that of a process.
"""

from __future__ import annotations

import json
import time
from typing import Any

from common import command_line, device_and_torch, in_process, peak, place, write

TOKENS = 256
WORK = (
    "forward",
    "relevance, eager by autograd",
    "relevance",
    "rollout",
    "attention_norms",
    "gradient_input",
    "one pattern",
)


def measure(work: str, tokens: int) -> dict[str, float]:
    """Processor seconds (the less of two) and memory above the peak of building GPT-2 small with random weights."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import locater

    torch.set_num_threads(1)
    torch.manual_seed(0)
    eager = "eager" in work
    model = GPT2LMHeadModel._from_config(GPT2Config(), attn_implementation="eager" if eager else "sdpa").eval()
    ids = torch.randint(50257, (1, tokens))

    def run() -> None:
        if work == "forward":
            with torch.no_grad():
                model(ids)
        elif eager:
            out = model(ids, output_attentions=True)
            torch.autograd.grad(out.logits[0, -1].max(), out.attentions)
        elif work == "one pattern":
            locater.attention_pattern(model, ids, layers=[6], heads=[0])
        else:
            locater.explain.METHODS[work](model, ids)

    before = peak()
    seconds = []
    for _ in range(2):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return {"seconds": min(seconds), "megabytes": (peak() - before) / 1e6}


def main() -> None:
    parser = command_line(__doc__, "relevance")
    parser.add_argument("--run", metavar="WORK", choices=WORK, help="one of them, in this process")
    args = parser.parse_args()
    if args.run:
        print(json.dumps(measure(args.run, TOKENS)))
        return
    results: dict[str, Any] = {**device_and_torch(gpu=False), "shape": f"GPT-2 small, {TOKENS} tokens, float32"}
    results["work"] = {work: in_process(__file__, "--run", work) for work in (WORK[:3] if args.quick else WORK)}
    forward = results["work"]["forward"]["seconds"]
    lines = [
        f"{work}: {run['seconds'] / forward:.2f} x a forward pass ({forward:.2f} s), {run['megabytes']:.0f} MB"
        for work, run in results["work"].items()
    ]
    write(results, place(args), "\n".join(lines))


if __name__ == "__main__":
    main()
