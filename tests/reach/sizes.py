"""How settings of a configuration are made small, by their names."""

from __future__ import annotations

from typing import Any

# value: names of settings that get it, where they are larger
SMALL: dict[int, str] = {
    32: """hidden_size d_model dim n_embd embed_dim hidden_dim encoder_embed_dim decoder_hidden_size embedding_size
        projection_dim encoder_hidden_size output_dim out_hidden_size vision_feature_size word_embed_proj_dim feat_dim
        width decoder_embed_dim model_dim emb_dim text_hidden_size vision_hidden_size audio_hidden_size
        cross_attention_hidden_size lm_hidden_size project_dim projection_size hidden_channels image_size lru_width
        upsample_groups reassemble_hidden_size""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads
        num_query_heads decoder_num_attention_heads n_attention_heads num_experts n_routed_experts num_local_experts
        moe_num_experts mm_tokens_per_image latent_query_num""",
    2: """num_key_value_heads n_kv_heads num_kv_heads decoder_num_key_value_heads multi_query_group_num index_n_heads
        num_hidden_layers n_layer n_layers num_layers depth encoder_layers decoder_layers num_encoder_layers
        num_decoder_layers decoder_num_hidden_layers encoder_num_hidden_layers num_blocks layers max_window_layers
        num_experts_per_tok num_experts_per_token moe_k top_k_experts moe_topk moe_top_k""",
    8: """head_dim d_kv v_head_dim qk_nope_head_dim global_head_dim attention_head_dim swa_head_dim swa_v_head_dim
        qk_rope_head_dim index_topk patch_size rotary_dim num_queries two_stage_num_proposals d_state num_codebooks mamba_n_heads mamba_d_head""",
    16: "q_lora_rank kv_lora_rank qk_head_dim index_head_dim fusion_hidden_size",
    48: """intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner moe_intermediate_size
        shared_expert_intermediate_size moe_shared_expert_intermediate_size feed_forward_proj_dim ffn_hidden_size
        mlp_dim decoder_intermediate_size dim_feedforward intermediate_size_mlp encoder_intermediate_size
        hidden_size_per_layer_input""",
    64: "mamba_d_ssm",
    160: "vocab_size text_vocab_size vocab_size_per_layer_input audio_vocab_size",
    256: "max_position_embeddings n_positions max_seq_len max_source_positions",
    1: "n_group topk_group first_k_dense_replace n_groups mamba_n_groups",
    0: "num_kv_shared_layers",
}
SIZES = {name: size for size, names in SMALL.items() for name in names.split()}
# the same for names that end so, where the whole name is not above
ENDINGS = {
    "hidden_size": 32,
    "embed_dim": 32,
    "attention_heads": 4,
    "num_heads": 4,
    "key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "vocab_size": 160,
    "hidden_layers": 2,
    "num_layers": 2,
    "position_embeddings": 256,
}
# what a default configuration leaves open and its model needs
OPEN: dict[str, Any] = {
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "prediction_length": 8,
    "context_length": 32,
    "vocab_size": 160,
    "num_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "top_k_experts": 2,
    "mlp_layer_types": ["dense", "sparse"],
}
LAYERS = {name for name in SMALL[2].split() if "layer" in name or name in ("depth", "num_blocks")}
VOCABULARY = 160


def rotary_sections(given: list[int], factor: float) -> list[int]:
    """Of half a head of 8 channels, or of the share of it that turns: channels for time, height and width. Where the
    first two are alike, they stay alike.
    """
    if factor <= 0.5:
        return [1, 1, 0]
    return [1, 1, 2] if given[0] == given[1] else [2, 1, 1]


def size_of(name: str) -> int | None:
    """The largest value that a setting of this name keeps; None for settings that are no size."""
    if name in SIZES:
        return SIZES[name]
    return next((size for ending, size in ENDINGS.items() if name.endswith(ending)), None)
