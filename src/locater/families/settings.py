"""What a configuration may say. Every setting that a family takes from config.json is checked here, before anything is read.

JSON has no types to speak of, and Python's reader lets NaN and Infinity pass. A base of 0 or a soft-cap of NaN would run through to
numbers that look like results, so a value that no model can have is refused, with its key and the source. A key that is missing, or
null where the families have a default, is not touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from locater.errors import LocaterError

Check = Callable[[Any], bool]
Rule = tuple[str, Check]  # what a value has to be, and whether it is
LARGEST = 10**7  # no width of a model and no number of its heads comes near
DEEPEST = 10**5  # nor its depth


def _whole(value: Any, most: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= most


def _finite(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(_finite(x) and x > 0 for x in value)


SIZE: Rule = (f"a positive whole number up to {LARGEST:,}", lambda x: _whole(x, LARGEST) and x > 0)
COUNT: Rule = (f"a positive whole number up to {LARGEST:,}", lambda x: x is None or (_whole(x, LARGEST) and x > 0))
LAYERS: Rule = (f"a whole number from 0 to {DEEPEST:,}", lambda x: x is None or (_whole(x, DEEPEST) and x >= 0))
TOKENS: Rule = ("a positive whole number or null", lambda x: x is None or (_whole(x) and x > 0))
WHOLE: Rule = ("a whole number", _whole)
POSITIVE: Rule = ("a positive number", lambda x: _finite(x) and x > 0)
POSITIVE_OR_NULL: Rule = ("a positive number or null", lambda x: x is None or (_finite(x) and x > 0))
NOT_NEGATIVE: Rule = ("a number from 0", lambda x: _finite(x) and x >= 0)
WEIGHT: Rule = ("a number from 0, or null", lambda x: x is None or (_finite(x) and x >= 0))
SHARE: Rule = ("a number above 0 and up to 1", lambda x: _finite(x) and 0 < x <= 1)
FLAG: Rule = ("true or false", lambda x: x is None or x in (0, 1))
FACTORS: Rule = ("a list of positive numbers", _numbers)
NAMES: Rule = ("a list of names", lambda x: x is None or (isinstance(x, list | tuple) and all(isinstance(y, str) for y in x)))
NESTED: Rule = ("a table of settings", lambda x: x is None or isinstance(x, Mapping))

RULES: dict[str, Rule] = {
    key: rule
    for rule, keys in (
        (COUNT, "num_attention_heads n_head n_heads num_heads nhead encoder_attention_heads decoder_attention_heads num_key_value_heads "
                "num_kv_heads hidden_size n_embd n_embed d_model dim head_dim d_kv d_head q_lora_rank sliding_window_pattern "
                "_sliding_window_pattern"),
        (SIZE, "qk_nope_head_dim qk_rope_head_dim v_head_dim kv_lora_rank num_hidden_groups inner_group_num pretraining_tp "
               "relative_attention_num_buckets relative_attention_max_distance"),
        (TOKENS, "sliding_window"),
        (LAYERS, "num_hidden_layers n_layer n_layers num_layers num_decoder_layers encoder_layers decoder_layers"),
        (WHOLE, "max_window_layers conv_kernel_size rotary_dim position_buckets max_relative_positions clamp_len"),
        (POSITIVE, "rope_theta rotary_emb_base rope_local_base_freq query_pre_attn_scalar attention_multiplier"),
        (POSITIVE_OR_NULL, "attn_logit_softcapping max_position_embeddings original_max_position_embeddings"),
        (NOT_NEGATIVE, "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon"),
        (SHARE, "partial_rotary_factor rotary_pct"),
        (FLAG, "is_decoder use_sliding_window scale_attn_weights scale_attn_by_inverse_layer_idx alibi multi_query use_qk_norm norm_first "
               "new_decoder_architecture qk_layernorm relative_attention share_att_key do_layer_norm_before slow_but_exact rope_interleave "
               "layer_norm_elementwise_affine use_bidirectional_attention bi_data same_length"),
        (NAMES, "layer_types"),
        (NESTED, "rope_parameters rope_scaling text_config text_config_dict vision_config vision_config_dict"),
    )
    for key in keys.split()
}  # fmt: skip
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


def check_settings(config: Mapping[str, Any], where: str, path: str = "") -> None:
    """Refuse a configuration that says what no model can have."""
    _check(config, RULES, where, path)
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name) or {}
        _check(rope, ROPE, where, f"{path}{name}.")
        for kind, inner in rope.items():  # one entry for each type of layer
            if isinstance(inner, Mapping):
                _check(inner, ROPE, where, f"{path}{name}.{kind}.")
    types, deep = config.get("layer_types"), config.get("num_hidden_layers")
    if types and deep is not None and len(types) < deep:
        raise LocaterError(f"{where}: {path}layer_types has {len(types)} entries but the configuration says {deep} (num_hidden_layers)")
    for name in PARTS:
        if config.get(name):
            check_settings(config[name], where, f"{path}{name}.")


def _check(config: Mapping[str, Any], rules: Mapping[str, Rule], where: str, path: str) -> None:
    for key, value in config.items():
        what, fits = rules.get(key, ("", None))
        if fits is not None and not fits(value):
            shown = repr(value)
            shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
            raise LocaterError(f"{where}: its configuration says {path}{key} = {shown}, not {what}: mend config.json")
