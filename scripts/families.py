"""Write docs/families.md, from the family files themselves and from the lines that scripts/reach.py measured.

.venv/bin/python scripts/families.py, or `make reach`, which measures first.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import reach_page  # noqa: E402 - a script beside this one

from locater.families import registry  # noqa: E402

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
HEAD = """# Supported families

Every `model_type` below is compared with the real model by `tests/families/test_parity.py`: a tiny model of the family, every parameter redrawn, float64,
a left-padded batch (where the architecture takes one), each attention implementation that transformers offers it, its attention function
intercepted and the calls counted. `AttentionLayer.logits` and `.output`, the maps and the mask equal the model's within 1e-6 of their
standard deviation, from the live model and from the folder that `save_pretrained` wrote. Setting any one field of the record to its
neutral value breaks the test for some family. Once more with the weights in bfloat16, live and from disk: the same quantities, and the
moments of the effective W, equal those of a float64 model with the same stored numbers within 1e-5. Made by `scripts/families.py` from
the files in `src/locater/families/`.

| model_type | what is special |
|---|---|
"""
TAIL = """
GGUF files: architectures llama (Mistral and SmolLM too), qwen2, qwen3, qwen3moe, gemma2, gemma3.

A part of a model is never read as the whole. After a family, PyTorch's own attention or timm's has been read, everything else that looks
like attention is searched for, by the names of its tensors and, in a live model, by its class (`src/locater/calls/attention_like.py`). If
something is left, such as a second tower or a custom block, the model is refused with its path and the parts that can be scanned on
their own. Settings that the family reads and that no model can have are refused with the key and the value
(`src/locater/sources/config_rules.py`). Where a user names tensors, or a registered family reads a part by choice, the scan says what it left out: a
line in the terminal and on the page, `assumptions.unread` in the JSON.

Which norm an `nn.MultiheadAttention` or an attention in timm's manner reads is known in PyTorch's own encoder and decoder layers and in timm's own blocks. In any other block (OpenAI's CLIP,
open_clip, torchvision's ViT) and in front of a stack that stands in a larger model, a copy of the live model is run ([discover](discover.md)). Where that does not
run, and for a file, the layers are read without that norm and a line names them; config.json may name the norm inside the block (`"norm": "ln_1"`, with `"model_type": "torch"`).

`locater.observe` and `locater.Monitor` do not need a family. In a model of any other type they find the layers by their attention calls
([observe](observe.md#models-without-a-record)).

## Limits inside these families

- Tiny models and the checkpoints they write are what was compared. Of real checkpoints only the two of the census were read.
- Falcon with ALiBi follows sdpa: under eager transformers adds the bias twice.
- BLOOM, Falcon, MPNet, XLNet and DeBERTa do not pass through transformers' attention interface; they are tapped by hooks. MPNet, XLNet and
  DeBERTa have an eager path only.
- XLNet: one segment and the content stream; `bi_data` and `same_length` with one-way attention are refused.
- ALBERT: a shared module is recorded with the norm of its later calls; its first call reads another norm.
- Gemma 3 with images: tokens of one image look at each other both ways; the record says what text gets.
- timm: a module with its contract stands in for the library in the tests. Architectures known to differ under the same names (rotary,
  post-norm, relative tables, adaLN) are refused.
- longrope: frequencies for sequences up to the trained length. Dynamic scaling is refused.
- GPT-2 with cross-attention is refused: that attention is not read, and a part of a model is never read as the whole.

## Not supported, and why

| family | reason |
|---|---|
| OLMo 1, OLMoE | they clip queries and keys (`clip_qkv`), which no linear map stands for |
| DeBERTa v1 | other fused layout; not tried |
| SigLIP 2 | packed patches of varying shape; not tried |
| state-space and linear attention models | no query-key softmax |
| quantised weights as MLX, NVFP4, HQQ and others store them | refused with the tensor's name; FP8, INT8, INT4, nf4, GPTQ and AWQ are read ([quantised.md](quantised.md)) |

Anything else: [add-a-family.md](add-a-family.md), or name the tensors with `--query`, `--key` and `--heads`.
"""


def page() -> str:
    rows = []
    for family in registry.FAMILIES:
        special = " ".join((inspect.getdoc(inspect.getmodule(family.layers)) or "").split("\n\n")[0].split())
        rows.append(f"| {', '.join(f'`{m}`' for m in family.model_types)} | {special} |")
    lines = reach_page.read()
    return HEAD + "\n".join(rows) + "\n" + TAIL + reach_page.section(lines)


def write() -> None:
    """Make the page, and say what is on it."""
    PAGE.write_text(page())
    print(f"{len(registry.FAMILIES)} families, {len(registry.BUILT_IN)} model types: {PAGE}")


if __name__ == "__main__":
    write()
