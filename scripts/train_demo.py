"""Train the checkpoints in the package: a small rotary decoder on Python's documentation, its LocAteR twin, and the
model of `locater demo` that repeats what it has seen.

    .venv/bin/python scripts/train_demo.py                                 # about 9 minutes on two cores
    .venv/bin/python scripts/train_demo.py --control "locater(target=2)" --out src/locater/demo/twin
    .venv/bin/python scripts/train_demo.py --repeats                       # half a minute, into src/locater/demo/repeats

Writes src/locater/demo/ or another folder: config.json, model.safetensors (bfloat16), tokenizer.json and training.json,
which records the recipe, the text's hash and the losses. Byte-pair vocabulary and weights both come from the embedded
text alone.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from locater.inputs.corpus import embedded_text, fingerprint
from locater_lab.demonstration import repeats, train_on_repeats
from locater_lab.models.transformer import names_of
from locater_lab.train.checkpoint import safetensors
from locater_lab.train.controls_and_conversion import attach

OUT = Path(__file__).parents[1] / "src" / "locater" / "demo"
VOCABULARY = 1024


def tokenize(text: str, vocabulary: int, out: Path) -> torch.Tensor:
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=vocabulary, show_progress=False)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    return torch.tensor(tokenizer.encode(text).ids)


def batches(tokens: torch.Tensor, size: int, length: int, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(tokens) - length, (size,), generator=generator)
    return torch.stack([tokens[s : s + length] for s in starts.tolist()])


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, tokens: torch.Tensor, length: int) -> float:
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    losses = [model(input_ids=r, labels=r).loss.item() for r in rows.split(16)]
    return sum(losses) / len(losses)


def build(length: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, tokens: torch.Tensor, args: argparse.Namespace) -> float:
    """Warm-up, then a cosine down to zero, with the control if there is one; returns the last loss."""
    control = attach([args.control] if args.control else [], model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(args.seed)
    warm, began = 100, time.time()
    for step in range(args.steps):
        share = min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        for group in optimizer.param_groups:
            group["lr"] = args.rate * share
        rows = batches(tokens, args.batch, args.length, generator)
        loss = model(input_ids=rows, labels=rows).loss
        (loss + control.loss()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        control.after_step()
        if step % 50 == 0:
            print(f"step {step:5d}  loss {loss.item():.3f}  {time.time() - began:6.0f} s", flush=True)
    control.detach()
    return loss.item()


def write_repeats(folder: Path) -> None:
    """The model of the demo's third act, and the record of how it was made."""
    model = train_on_repeats()
    folder.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        rows, known = repeats(torch.Generator().manual_seed(7), 64)
        losses = functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    record = {
        "command": "python scripts/train_demo.py --repeats",
        "data": "random words, a passage of 8 to 31 of them over and over (locater_lab.demonstration.repeats)",
        "loss_where_known": round(losses.view(len(rows), -1)[known[:, 1:]].mean().item(), 4),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    (folder / "model.safetensors").write_bytes(
        b"".join(safetensors({name: model.get_parameter(name) for name in names_of(model)}))
    )
    (folder / "config.json").write_text(json.dumps(model.config, indent=2) + "\n")
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--control", help="a control as locater train takes it, such as 'locater(target=2)'; default: none"
    )
    parser.add_argument("--repeats", action="store_true", help="the model that repeats random words")
    args = parser.parse_args()
    if args.repeats:
        write_repeats(OUT / "repeats")
        return
    args.out.mkdir(parents=True, exist_ok=True)

    text = embedded_text()
    tokens = tokenize(text, VOCABULARY, args.out)
    held_out = len(tokens) // 20
    torch.manual_seed(args.seed)
    model = build(args.length)
    last = train(model, tokens[:-held_out], args)
    model.eval()
    final = validation_loss(model, tokens[-held_out:], args.length)
    model.to(torch.bfloat16).save_pretrained(args.out)
    (args.out / "generation_config.json").unlink(missing_ok=True)
    record = {
        "command": "python scripts/train_demo.py" + (f' --control "{args.control}"' if args.control else ""),
        "text": "locater.inputs.corpus.embedded_text",
        "text_sha256": fingerprint(text),
        "characters": len(text),
        "tokens": len(tokens),
        **{name: getattr(args, name) for name in ("steps", "batch", "length", "rate", "seed")},
        "train_loss_last": round(last, 4),
        "validation_loss": round(final, 4),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
