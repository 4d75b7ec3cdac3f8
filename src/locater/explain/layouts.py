"""Which modules a block is made of, by model type."""

from __future__ import annotations

from dataclasses import dataclass

from locater.families.norm import NormKind


@dataclass(frozen=True)
class Layout:
    """Paths of modules under a block, which is `<base><stack>.<number>`; `final` is under the base. None: there is
    none.
    """

    stack: str
    attention: str
    kind: NormKind
    before: str | None  # norm in front of attention
    after: str | None  # norm around attention and skip
    mlp_before: str | None
    mlp_after: str | None
    mlp: str  # what gives the MLP's output
    up: str
    down: str
    final: str | None


LLAMA = Layout(
    "layers",
    "self_attn",
    "rms",
    "input_layernorm",
    None,
    "post_attention_layernorm",
    None,
    "mlp",
    "mlp.up_proj",
    "mlp.down_proj",
    "norm",
)
GPT2 = Layout("h", "attn", "layer", "ln_1", None, "ln_2", None, "mlp", "mlp.c_fc", "mlp.c_proj", "ln_f")
VIT = Layout(
    "layers",
    "attention",
    "layer",
    "layernorm_before",
    None,
    "layernorm_after",
    None,
    "mlp",
    "mlp.fc1",
    "mlp.fc2",
    "layernorm",
)
BERT = Layout(
    "encoder.layer", "attention.self", "layer", None, "attention.output.LayerNorm", None, "output.LayerNorm",
    "output.dense", "intermediate.dense", "output.dense", None,
)  # fmt: skip
LAYOUTS = {
    **dict.fromkeys(("llama", "locater", "mistral", "qwen2", "qwen3"), LLAMA),
    **dict.fromkeys(("bert", "camembert", "electra", "roberta", "xlm-roberta"), BERT),
    "gpt2": GPT2,
    "vit": VIT,
}
