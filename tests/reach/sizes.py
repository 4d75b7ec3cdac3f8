"""How settings of a configuration are made small: by name, and for some types one by one."""

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


# settings of one type that the rules do not make right
OVERRIDES: dict[str, dict[str, Any]] = {
    "nemotron_h_omni": {"vision_config.patch_size": 16},
    "phi4_multimodal_audio": {"nemo_conv_channels": 32},
    "deepseek_vl_hybrid": {"high_res_vision_config.global_attn_indexes": [1]},
    "idefics": {"use_resampler": True},
    "vibevoice": {"audio_config.num_filters": 2, "semantic_model_config.num_filters": 2},
    "vibevoice_acoustic_tokenizer": {"num_filters": 2},
    "vibevoice_acoustic_tokenizer_decoder": {"num_filters": 2},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2},
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config.num_filters": 2,
        "semantic_tokenizer_encoder_config.num_filters": 2,
    },
    "vitmatte": {"convstream_hidden_sizes": [16, 32, 64], "fusion_hidden_sizes": [64, 32, 16, 8]},
    "florence2": {
        "vision_config.embed_dim": [16, 16, 32, 32],
        "vision_config.num_heads": [2, 2, 4, 4],
        "vision_config.num_groups": [2, 2, 4, 4],
        "vision_config.projection_dim": 32,
    },
    **{name: {"audio_config.intermediate_size": 128} for name in ("voxtral", "glmasr", "voxtral_realtime")},
    "deepseek_ocr2": {"vision_config.sam_config.downsample_channels": [32, 32]},
    "unlimited_ocr": {"vision_config.sam_config.downsample_channels": [32, 32]},
    "unlimited_ocr_vision": {"sam_config.downsample_channels": [32, 32]},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "align": {
        "vision_config.width_coefficient": 0.5,
        "vision_config.depth_coefficient": 0.5,
        "vision_config.hidden_dim": 640,
        "projection_dim": 160,
    },
    "efficientnet": {"width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640},
    "deepseek_ocr2_vision": {"sam_config.downsample_channels": [32, 32]},
    "lw_detr": {
        "projector_scale_factors": [1.0],
        "projector_in_channels": [32],
        "backbone_config.num_windows": 4,
        "projector_out_channels": 32,
        "num_feature_levels": 1,
        "backbone_config.num_windows_side": 2,
    },
    "sapiens2": {"num_key_value_heads_per_layer": [4, 2]},
    "sam3_tracker": {
        "vision_config.backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
        **{f"{part}.image_size": 64 for part in ("vision_config.backbone_config", "prompt_encoder_config")},
    },
    "sam2": {
        "vision_config.backbone_config.image_size": [64, 64],
        "vision_config.backbone_config.hidden_size": 16,
        "vision_config.backbone_config.blocks_per_stage": [1, 1, 2, 1],
        "vision_config.backbone_config.embed_dim_per_stage": [16, 32, 64, 128],
        "vision_config.backbone_config.num_attention_heads_per_stage": [1, 2, 4, 8],
        "vision_config.backbone_config.global_attention_blocks": [3],
        "vision_config.backbone_channel_list": [128, 64, 32, 16],
        "vision_config.backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        "prompt_encoder_config.image_size": 64,
        "prompt_encoder_config.patch_size": 16,
    },
    "emu3": {
        "vocabulary_map": {
            "<image>": 150,
            "<|extra_200|>": 149,
            **{f"<|visual token {i:06d}|>": 100 + i for i in range(16)},
        },
        "image_token_id": 150,
        "vq_config.codebook_size": 16,
        "vq_config.hidden_size": 128,
        "vq_config.base_channels": 32,
    },
    "emu3_vqgan": {"codebook_size": 16, "hidden_size": 128, "base_channels": 32},
    "janus": {"vq_config.num_embeddings": 16, "vq_config.base_channels": 32, "vq_config.latent_channels": 32},
    "janus_vqgan": {"num_embeddings": 16, "base_channels": 32, "latent_channels": 32},
    "mistral4": {"head_dim": 16},
    "moshi_depth": {"num_codebooks": 12},
    "omdet-turbo": {"backbone_kwargs": {}},
    "perceiver": {"d_latents": 32, "num_latents": 16},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 48},
    "step3p5": {"sliding_window": 4},
    "step3p7": {"text_config.sliding_window": 4},
    "blt": {
        "num_hidden_layers": 2,
        "encoder_hash_byte_group_vocab": 100,
        "global_config.hidden_size": 64,
        "global_config.head_dim": 16,
        "encoder_config.hidden_size_global": 64,
        "decoder_config.hidden_size_global": 64,
    },
    "chameleon": {
        "vocabulary_map": {
            "<image>": 150,
            **{f"IMGIMG{chr(65 + i // 10)}{chr(65 + i % 10)}Z": 100 + i for i in range(16)},
        },
        "image_token_id": 150,
        "vq_config.num_embeddings": 16,
        "vq_config.base_channels": 32,
        "vq_config.resolution": 32,
    },
    "cohere_compass": {"text_config.rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "depth_pro": {
        "intermediate_hook_ids": [1, 0],
        "intermediate_feature_dims": [16, 16],
        "scaled_images_feature_dims": [32, 32, 16],
        "merge_padding_value": 1,
    },
    "granite4_vision": {"deepstack_layer_map": [(-1, 0)], "downsample_rate": "1/2"},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "nemotron": {"num_key_value_heads": 2},
    "aria": {"projector_patch_to_query_dict": {16: 8}},
    "bamba": {"attn_layer_indices": [1]},
    "blip-2": {"image_token_index": 150},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_vision_model": {
        "intermediate_size": 128,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "vision_output_dim": 32,
    },
    "mllama_vision_model": {
        "intermediate_layers_indices": [0, 1],
        "max_num_tiles": 1,
        "num_global_layers": 1,
        "vision_output_dim": 96,
    },
    "sam": {
        "prompt_encoder_config.image_embedding_size": 4,
        "prompt_encoder_config.image_size": 32,
        "vision_config.output_channels": 32,
        "vision_config.num_pos_feats": 16,
        "vision_config.global_attn_indexes": [1],
    },
    "sam_hq": {
        "prompt_encoder_config.image_embedding_size": 4,
        "prompt_encoder_config.image_size": 32,
        "vision_config.output_channels": 32,
        "vision_config.num_pos_feats": 16,
        "vision_config.global_attn_indexes": [1],
        "mask_decoder_config.vit_dim": 32,
    },
    "esm": {"pad_token_id": 1, "mask_token_id": 4},
    "instructblip": {"image_token_index": 150},
    "instructblipvideo": {"video_token_index": 150},
    "llama4": {
        "vision_config.intermediate_size": 128,
        "vision_config.projector_input_dim": 32,
        "vision_config.projector_output_dim": 32,
        "vision_config.vision_output_dim": 32,
    },
    "mamba2": {"expand": 1},
    "mllama": {
        "text_config.cross_attention_layers": [1],
        "vision_config.intermediate_layers_indices": [0, 1],
        "vision_config.max_num_tiles": 1,
        "vision_config.num_global_layers": 1,
        "vision_config.vision_output_dim": 96,  # the width, once for the last layer and once for each layer of the list
    },
    **{
        name: {"vision_start_token_id": 151, "vision_end_token_id": 152, "audio_start_token_id": 153}
        for name in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
    },
}


def size_of(name: str) -> int | None:
    """The largest value that a setting of this name keeps; None for settings that are no size."""
    if name in SIZES:
        return SIZES[name]
    return next((size for ending, size in ENDINGS.items() if name.endswith(ending)), None)


# types without a model class of their own: the type that they are a part of, and the name of the part in its model
PART_OF: dict[str, tuple[str, str]] = {
    "blt_local_decoder": ("blt", "local_decoder"),
    "blt_local_encoder": ("blt", "local_encoder"),
    "pp_formulanet_text": ("pp_formulanet", "decoder"),
    "deepseek_ocr2_encoder": ("deepseek_ocr2", "vision_encoder"),
    "got_ocr2_vision": ("got_ocr2", "vision_tower"),
    "idefics_perciever": ("idefics", "perceiver_resampler"),
    "idefics_vision": ("idefics", "vision_model"),
    "pp_chart2table_vision": ("pp_chart2table", "vision_tower"),
    "sam_mask_decoder": ("sam", "mask_decoder"),
    "sam_prompt_encoder": ("sam", "prompt_encoder"),
    "sam_hq_mask_decoder": ("sam_hq", "mask_decoder"),
    "sam_hq_prompt_encoder": ("sam_hq", "prompt_encoder"),
    "sam2_mask_decoder": ("sam2", "mask_decoder"),
    "sam2_prompt_encoder": ("sam2", "prompt_encoder"),
    "sam3_tracker_mask_decoder": ("sam3_tracker", "mask_decoder"),
    "sam3_tracker_prompt_encoder": ("sam3_tracker", "prompt_encoder"),
    **{
        f"{whole}_{part}": (whole, part)
        for whole in ("sam3", "sam3_lite_text")
        for part in ("detr_encoder", "detr_decoder", "mask_decoder", "geometry_encoder")
    },
    "slanext_vision": ("slanext", "vision_tower"),
    "t5_gemma_module": ("t5gemma", "decoder"),
    "t5gemma2_decoder": ("t5gemma2", "decoder"),
    "t5gemma2_encoder": ("t5gemma2", "encoder"),
    "t5gemma2_text": ("t5gemma2", "text_model"),
    "unlimited_ocr_vision_encoder": ("unlimited_ocr", "vision_encoder"),
}
