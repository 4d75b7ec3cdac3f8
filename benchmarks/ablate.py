"""What removing one head costs, relative to a pass: `locater.ablate` on one head of every layer.

python benchmarks/ablate.py             models of the shapes of SmolLM2-135M and all-MiniLM-L6 -> results/ablate-cpu.json
python benchmarks/ablate.py --gpu       a Llama of 1B, and the same two -> results/ablate-gpu.json

A removal in layer l of L runs what follows the attention of that layer. The mean over layers is compared with the time of
all blocks in the recorded pass; embeddings and output layer are apart. On the CPU one thread runs, and the clock is that
of the process: what else the machine does is not counted.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from common import LLAMA_1B, MINILM, SMOLLM2, command_line, device_and_torch, place, write

ROUNDS = 3


def models(gpu: bool) -> dict[str, Any]:
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

    made = {
        "smollm2": lambda: LlamaForCausalLM(LlamaConfig(**SMOLLM2)),
        "minilm": lambda: BertModel(BertConfig(**MINILM), add_pooling_layer=False),
    }
    return {**({"llama-1b": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA_1B))} if gpu else {}), **made}


def cost(model: Any, sequences: int, tokens: int, device: str, rounds: int) -> dict[str, Any]:
    """Medians over rounds; each is the mean over layers."""
    from locater import ablate
    from locater.discovery import attention_layers

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 30_000, (sequences, tokens), generator=generator).to(device)
    heads = [(layer, 0) for layer in range(len(attention_layers(model)))]
    runs = [ablate(model, [{"input_ids": ids}], heads).cost for _ in range(rounds + 1)][1:]
    shares = [run["share_of_blocks"] for run in runs]
    return {
        "sequences": sequences,
        "tokens": tokens,
        "layers": len(heads),
        "blocks_over_blocks": statistics.median(shares),
        "spread": [min(shares), max(shares)],
        "rest_over_rest": statistics.median(run["removal_rest"] / run["pass_rest"] for run in runs),
        "all_over_pass": statistics.median(
            (run["removal_blocks"] + run["removal_rest"]) / (run["pass_blocks"] + run["pass_rest"]) for run in runs
        ),
        "seconds": statistics.median(run["removal_blocks"] + run["removal_rest"] for run in runs),
    }


def main() -> None:
    from locater.explain import replayed_pass

    args = command_line(__doc__, "ablate", ("cpu", "gpu")).parse_args()
    device = "cuda" if args.gpu else "cpu"
    if not args.gpu:
        torch.set_num_threads(1)
        replayed_pass.read_clock = time.process_time
    results: dict[str, Any] = dict(device_and_torch(args.gpu))
    for name, build in models(args.gpu).items():
        torch.manual_seed(0)
        with torch.device(device):
            model = build().eval()
        results[name] = cost(model, 1, 128, device, 1 if args.quick else ROUNDS)
    write(results, place(args))


if __name__ == "__main__":
    main()
