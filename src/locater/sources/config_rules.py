"""Which values the settings of a configuration may have. A setting is checked when a family reads it, and only then.

JSON hardly restricts types, and Python's reader accepts NaN and Infinity. A rotary base of 0 or a soft-cap of NaN would
lead to numbers that look like results. So a value that no model can have is refused, and the message names the key and
the source. Missing keys and null are accepted, except for the few settings without which no model runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from locater.errors import LocaterError
from locater.sources.weights import ModuleWeights, Weights

Check = Callable[[Any], bool]
Rule = tuple[str, Check]  # the allowed values in words, and the test for them
LARGEST = 10**7  # width of a model or number of its heads; real ones are far smaller
DEEPEST = 10**5  # layers


def _whole(value: Any, most: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= most


def _finite(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer larger than any float
        return False


def _numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(_finite(x) and x > 0 for x in value)


COUNT: Rule = (f"a positive whole number up to {LARGEST:,}", lambda x: x is None or (_whole(x, LARGEST) and x > 0))
LAYERS: Rule = (f"a whole number from 0 to {DEEPEST:,}", lambda x: x is None or (_whole(x, DEEPEST) and x >= 0))
TOKENS: Rule = ("a positive whole number or null", lambda x: x is None or (_whole(x) and x > 0))
WHOLE: Rule = ("a whole number or null", lambda x: x is None or _whole(x))
POSITIVE: Rule = ("a positive number", lambda x: _finite(x) and x > 0)
POSITIVE_OR_NULL: Rule = ("a positive number or null", lambda x: x is None or (_finite(x) and x > 0))
NOT_NEGATIVE: Rule = ("a number from 0", lambda x: _finite(x) and x >= 0)
FINITE_OR_NULL: Rule = ("a number", lambda x: x is None or _finite(x))
WEIGHT: Rule = ("a number from 0, or null", lambda x: x is None or (_finite(x) and x >= 0))
SHARE: Rule = ("a number above 0 and up to 1, or null", lambda x: x is None or (_finite(x) and 0 < x <= 1))
FLAG: Rule = ("true or false", lambda x: x is None or x in (0, 1))
FACTORS: Rule = ("a list of positive numbers", _numbers)
NAMES: Rule = (
    "a list of names",
    lambda x: x is None or (isinstance(x, list | tuple) and all(isinstance(y, str) for y in x)),
)
NESTED: Rule = ("a table of settings", lambda x: x is None or isinstance(x, Mapping))

KEYS: tuple[tuple[Rule, str], ...] = (  # which keys of a configuration each rule is for
    (
        COUNT,
        "num_attention_heads n_head n_heads num_heads nhead encoder_attention_heads decoder_attention_heads "
        "num_key_value_heads num_kv_heads hidden_size n_embd n_embed d_model dim head_dim d_kv d_head q_lora_rank "
        "sliding_window_pattern _sliding_window_pattern qk_nope_head_dim qk_rope_head_dim v_head_dim kv_lora_rank "
        "num_hidden_groups inner_group_num relative_attention_num_buckets relative_attention_max_distance",
    ),
    (TOKENS, "sliding_window"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers num_decoder_layers encoder_layers decoder_layers"),
    (
        WHOLE,
        "pretraining_tp max_window_layers conv_kernel_size rotary_dim position_buckets max_relative_positions "
        "clamp_len",
    ),
    (POSITIVE, "query_pre_attn_scalar attention_multiplier"),
    (
        POSITIVE_OR_NULL,
        "rope_theta rotary_emb_base rope_local_base_freq attn_logit_softcapping max_position_embeddings "
        "original_max_position_embeddings",
    ),
    (NOT_NEGATIVE, "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon"),
    (SHARE, "partial_rotary_factor rotary_pct"),
    (
        FLAG,
        "is_decoder use_sliding_window scale_attn_weights scale_attn_by_inverse_layer_idx alibi multi_query "
        "use_qk_norm norm_first new_decoder_architecture qk_layernorm relative_attention share_att_key "
        "do_layer_norm_before slow_but_exact rope_interleave layer_norm_elementwise_affine "
        "use_bidirectional_attention bi_data same_length",
    ),
    (NAMES, "layer_types"),
    (NESTED, "rope_parameters rope_scaling text_config text_config_dict vision_config vision_config_dict"),
)
RULES: dict[str, Rule] = {key: rule for rule, keys in KEYS for key in keys.split()}
ROPE: dict[str, Rule] = {  # inside rope_parameters and rope_scaling
    "rope_theta": POSITIVE,
    "partial_rotary_factor": SHARE,
    "factor": POSITIVE_OR_NULL,
    "low_freq_factor": POSITIVE,
    "high_freq_factor": POSITIVE,
    "beta_fast": WEIGHT,
    "beta_slow": WEIGHT,
    "attention_factor": POSITIVE_OR_NULL,
    "mscale": WEIGHT,
    "mscale_all_dim": WEIGHT,
    "original_max_position_embeddings": ("a number above 1, or null", lambda x: x is None or (_finite(x) and x > 1)),
    "short_factor": FACTORS,
    "long_factor": FACTORS,
    "truncate": FLAG,
}
PARTS = ("text_config", "text_config_dict", "vision_config", "vision_config_dict")
TABLES = {"rope_parameters": ROPE, "rope_scaling": ROPE} | dict.fromkeys(PARTS, RULES)


class CheckedConfig(dict[str, Any]):
    """A configuration that checks each value when it is read. `{**config}` reads, and so checks, all of them."""

    def __init__(
        self, values: Mapping[str, Any], where: str, remedy: str, path: str = "", rules: Mapping[str, Rule] = RULES
    ) -> None:
        super().__init__(values)
        self._where, self._remedy, self._path, self._rules = where, remedy, path, rules

    def __iter__(self) -> Iterator[str]:  # overridden so that {**config} goes through __getitem__
        return super().__iter__()

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        expected = fault(self._rules, key, value)
        if expected is not None:
            shown = repr(value)
            shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
            self._refuse(f"its configuration says {self._path}{key} = {shown}, not {expected}: {self._remedy}")
        depth: Any = super().get("num_hidden_layers")
        if key == "layer_types" and value and _whole(depth) and len(value) < depth:
            self._refuse(f"{self._path}layer_types has {len(value)} entries but num_hidden_layers is {depth}")
        if not isinstance(value, Mapping) or (key not in TABLES and self._rules is not ROPE):
            return value
        return CheckedConfig(value, self._where, self._remedy, f"{self._path}{key}.", TABLES.get(key, ROPE))

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def _refuse(self, reason: str) -> NoReturn:
        raise LocaterError(f"{self._where}: {reason}")


def checked_config(config: Any, where: str) -> dict[str, Any]:
    """The content of a config.json; empty where there is none."""
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise LocaterError(f"{where}: contains a {type(config).__name__}, not a configuration")
    if not isinstance(config.get("model_type"), str | None):
        raise LocaterError(f"{where}: model_type is {config['model_type']!r:.80}, not a name")
    return config


def fault(rules: Mapping[str, Rule], key: str, value: Any) -> str | None:
    """The allowed values in words where `value` is not among them; None where it is."""
    allowed, fits = rules.get(key, ("", None))
    return allowed if fits is not None and not fits(value) else None


def configuration(weights: Weights) -> str:
    """Where the settings of a source are."""
    return "model.config" if isinstance(weights, ModuleWeights) else "config.json"


def remedy(weights: Weights) -> str:
    """How to correct a wrong setting, for this kind of source."""
    return "convert the model again" if weights.where.endswith(".gguf") else f"correct {configuration(weights)}"
