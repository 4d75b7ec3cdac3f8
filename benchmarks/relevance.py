"""Time and memory of the methods of locater.explain: `python benchmarks/relevance.py`, ratios against a forward pass.

Each measurement runs in a process of its own, because peak memory is that of a process.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

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
    return {"seconds": min(seconds), "megabytes": peak() - before}


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    results = {}
    for work in WORK:
        out = subprocess.run([sys.executable, __file__, work, str(TOKENS)], capture_output=True, text=True, check=True)
        results[work] = json.loads(out.stdout.splitlines()[-1])
        print(
            work, results[work], f"{results[work]['seconds'] / results['forward']['seconds']:.2f} x forward", flush=True
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
    else:
        main()
