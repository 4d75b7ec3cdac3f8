"""What the tools of benchmarks/rivals.py have in common: one checkpoint, one text, one way to measure time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics
from statistics import median
from typing import Any

import torch
from common import memory, peak
from torch import Tensor

LAYERS, HEADS, KEY_HEADS, WIDTH, SIZE, VOCABULARY = 8, 8, 4, 512, 64, 1024
TOKENS, SHOWN, EXPLAINED, BATCH, STEPS, POINTS = 1024, 64, 64, (2, 512), 5, 20


def write_checkpoint(folder: Path) -> None:
    """A random Llama with gains away from 1 and logits that differ by a few units, float32."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = dict(hidden_size=WIDTH, intermediate_size=1376, num_hidden_layers=LAYERS, num_attention_heads=HEADS)
    config = LlamaConfig(**sizes, num_key_value_heads=KEY_HEADS, vocab_size=VOCABULARY, max_position_embeddings=1024)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(3)
    model.save_pretrained(folder)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(special.values())}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)  # TransformerLens asks for one


def ids(count: int) -> Tensor:
    """The same text for all: bytes of Python's documentation."""
    return torch.tensor([list("".join(topics.topics.values()).encode()[:count])])


def load(folder: Path, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=dtype).eval()


def ready(folder: Path, attention: str = "sdpa") -> Any:
    """A model whose weights have been read: files are mapped, and the first pass would count them as its memory."""
    model = load(folder, attention)
    for parameter in model.parameters():
        parameter.sum()
    return model


def time_work(work: Callable[[], Any], warm: int = 1, runs: int = 3) -> tuple[Any, dict[str, float]]:
    """The last result, the median time after a first run (imports, caches), and the highest memory over what the process
    had before that."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, times, used = memory(), [], []
    for _ in range(warm):
        work()
    for _ in range(runs):
        began = time.perf_counter(), time.process_time()
        result = work()
        times.append(time.perf_counter() - began[0])
        used.append(time.process_time() - began[1])
    cost = {"seconds": median(times), "processor_seconds": median(used), "peak_bytes": peak() - before}
    return result, cost
