"""Seconds and memory of `locater.discover` on a live model of 1B shape without a record, and of a second call.

.venv/bin/python benchmarks/discovery.py
"""

from __future__ import annotations

import resource
import time

import torch
from transformers import SmolLM3Config, SmolLM3ForCausalLM

import locater

SHAPE = SmolLM3Config(
    num_hidden_layers=16,
    hidden_size=2048,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=8192,
    vocab_size=128_256,
)


def peak() -> float:
    """Largest memory of this process so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


if __name__ == "__main__":
    torch.set_default_dtype(torch.bfloat16)
    model = SmolLM3ForCausalLM(SHAPE)
    torch.set_default_dtype(torch.float32)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.1f} billion parameters, peak {peak():.1f} GB")
    for call in ("first", "second"):
        started, processor = time.perf_counter(), time.process_time()
        layers = locater.discover(model).layers
        print(
            f"{call} call: {time.perf_counter() - started:.2f} s, {time.process_time() - processor:.1f} s of processor "
            f"time on {torch.get_num_threads()} threads, {len(layers)} layers, peak {peak():.1f} GB"
        )
