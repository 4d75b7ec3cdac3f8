"""Sizes and kinds of a model of our own, and the config.json that they are written to and read from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from locater_lab.mechanisms.stack import LayerAttention, parse_attention
from locater_lab.models.family import EPS, MODEL_TYPE, VARIANT

THETA = 10_000.0  # base of the rotary angles
# field of `Shape`: its name in config.json
SIZES = {
    "vocabulary": "vocab_size",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
    "length": "max_position_embeddings",
}


class Config(dict[str, Any]):
    """config.json as a model carries it; entries are attributes too, as other code expects of a configuration."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True)
class Shape:
    """Sizes and kinds of a model. `image` is (height, width, channels), and `vocabulary` then counts classes, or the
    numbers in a patch where the model `denoises`. A model that classifies text has `classes` beside its `vocabulary`.
    Classifiers read the mean over tokens.
    """

    vocabulary: int = 256
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 4
    hidden: int = 352
    length: int = 128
    positions: str = "rotary"
    mlp: str = "swiglu"
    qk_norm: bool = False
    causal: bool = True
    image: tuple[int, int, int] | None = None
    patch: int = 4
    attention: str = "softmax"  # as `parse_attention` reads it
    norm: str = "pre"
    fusion: str | None = None
    classes: int | None = None
    denoises: bool = False
    build: str = "llama"

    @property
    def is_plain(self) -> bool:
        """Whether the blocks are those of Llama, by whatever mechanism they attend."""
        return self.norm == "pre" and self.fusion is None and self.mlp in ("swiglu", "gelu") and not self.is_fairseq

    @property
    def is_fairseq(self) -> bool:
        """LayerNorm, biases, and first weights as fairseq draws them."""
        return self.build == "fairseq"

    @property
    def has_last_norm(self) -> bool:
        """Whether the stream is normalized behind the last block; in fairseq not where norms stand after the sums."""
        return self.norm != "none" and not (self.is_fairseq and self.norm == "post")

    @property
    def is_classifier(self) -> bool:
        return (self.image is not None and not self.denoises) or self.classes is not None

    @property
    def is_tied(self) -> bool:
        """Whether the output map is the embedding of tokens."""
        return self.image is None and self.classes is None

    @property
    def is_llama(self) -> bool:
        plain = self.attention == "softmax" and self.is_tied and self.is_plain
        return plain and self.causal and self.positions == "rotary" and self.mlp == "swiglu"

    @property
    def by_layer(self) -> tuple[LayerAttention, ...]:
        """The attention mechanism of each layer."""
        return parse_attention(self.attention, self.layers)

    def sizes(self) -> dict[str, int]:
        """Arguments of `attention_module`."""
        return dict(width=self.width, heads=self.heads, size=self.width // self.heads, kv_heads=self.kv_heads)

    def config(self) -> Config:
        """The configuration that transformers and `locater scan` read."""
        config = Config(
            model_type=self._model_type(),
            vocab_size=self.vocabulary,
            num_hidden_layers=self.layers,
            hidden_size=self.width,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.width // self.heads,
            intermediate_size=self.hidden,
            max_position_embeddings=self.length,
            hidden_act="silu" if self.mlp == "swiglu" else self.mlp,
            rms_norm_eps=EPS,
            rope_parameters={"rope_type": "default", "rope_theta": THETA},
            attention_bias=self.is_fairseq,
            mlp_bias=self.is_fairseq,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            dtype="float32",
        )
        if self.is_llama:
            return Config(config, architectures=["Qwen3ForCausalLM" if self.qk_norm else "LlamaForCausalLM"])
        config.update(
            qk_norm=self.qk_norm,
            positions=self.positions,
            mlp=self.mlp,
            is_causal=self.causal,
            image=None if self.image is None else list(self.image),
            patch=self.patch,
            attention=self.attention,
        )
        if self.classes is not None:
            config["classes"] = self.classes
        if self.denoises:
            config["denoises"] = True
        if self.is_fairseq:
            config["build"] = self.build
        return config if self.is_plain else Config(config, norm=self.norm, fusion=self.fusion)

    def _model_type(self) -> str:
        if self.is_llama:
            return "qwen3" if self.qk_norm else "llama"
        return MODEL_TYPE if self.is_plain else VARIANT

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """The shape from which `config()` was made."""
        fields: dict[str, Any] = {ours: config[theirs] for ours, theirs in SIZES.items()}
        fields["qk_norm"] = config["model_type"] == "qwen3" or config.get("qk_norm", False)
        if config["model_type"] in (MODEL_TYPE, VARIANT):
            image = config["image"]
            fields |= {name: config[name] for name in ("positions", "mlp", "patch")}
            fields |= {"causal": config["is_causal"], "image": None if image is None else tuple(image)}
            fields |= {"attention": config.get("attention", "softmax"), "norm": config.get("norm", "pre")}
            fields |= {"fusion": config.get("fusion"), "classes": config.get("classes")}
            fields |= {"denoises": config.get("denoises", False), "build": config.get("build", "llama")}
        return cls(**fields)
