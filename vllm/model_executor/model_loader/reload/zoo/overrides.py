# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What an architecture of transformers needs besides tiny dimensions."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .recipe import Fill, uniform


@dataclass(frozen=True)
class Published:
    """What the published checkpoints of an architecture hold other than what
    transformers saves.
    """

    #: The class that has their tensors, if not the architecture's own, and the part of
    #: its configuration that is theirs.
    by: str = ""
    part: str = ""
    #: Fields of config.json. None: there is no such field.
    config: Mapping[str, Any] = field(default_factory=dict)
    #: Patterns of names, with what they are there.
    names: Mapping[str, str] = field(default_factory=dict)
    #: Further tensors, with the shape, or with the one of the same shape and dtype.
    #: A prefix stands for all that begin with it.
    also: Mapping[str, str | tuple[int, ...]] = field(default_factory=dict)
    #: Patterns of the names that they lack.
    without: tuple[str, ...] = ()
    #: Patterns of names, with the values of tensors that are no ordinary weights.
    fills: Mapping[str, Fill] = field(default_factory=dict)
    #: The attention backend that the model is built with where it cannot be run.
    backend: str = ""


_WINDOWED = ["sliding_attention", "full_attention"]
_LINEAR = ["linear_attention", "full_attention"]
_GATED_DELTA = {
    "layer_types": _LINEAR,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
_DBRX_ATTENTION = {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 500000.0}
_DBRX_EXPERTS = {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}

_INKLING_TEXT = {
    "vocab_size": 256,
    "unpadded_vocab_size": 250,
    "hidden_size": 128,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 32,
    "sliding_window_size": 16,
    "d_rel": 8,
    "rel_extent": 32,
    "local_layer_ids": [0],
    "mlp_layer_types": ["dense", "sparse"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "max_position_embeddings": 256,
}

#: By architecture of transformers: fields of its configuration.
OVERRIDES: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {
        "attention_bias": False,
        "score_func": "sigmoid",
        "route_norm": True,
        "n_group": 1,
        "topk_group": 1,
        "layer_types": _WINDOWED,
    },
    "AXK1ForCausalLM": {"attention_bias": False},
    "Cohere2ForCausalLM": {"attention_bias": False, "layer_types": _WINDOWED},
    "Cohere2MoeForCausalLM": {
        "attention_bias": False,
        "layer_types": _WINDOWED,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "CohereForCausalLM": {"attention_bias": False},
    "DbrxForCausalLM": {
        "attn_config": _DBRX_ATTENTION,
        "ffn_config": _DBRX_EXPERTS,
    },
    "DeepseekV2ForCausalLM": {"attention_bias": False, "mlp_bias": False},
    "DeepseekV32ForCausalLM": {
        "attention_bias": False,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "index_topk": 16,
        "index_n_heads": 4,
        "index_head_dim": 128,
    },
    "DeepseekV3ForCausalLM": {
        "attention_bias": False,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "DeepseekV4ForCausalLM": {
        "num_hidden_layers": 3,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "attention_bias": False,
        "mlp_bias": False,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "partial_rotary_factor": 0.125,
        "o_groups": 2,
        "o_lora_rank": 32,
        "index_topk": 16,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "hc_mult": 2,
    },
    "Ernie4_5_MoeForCausalLM": {"use_bias": False},
    "Ernie4_5ForCausalLM": {"use_bias": False},
    "Exaone4ForCausalLM": {"layer_types": _WINDOWED},
    "ExaoneMoeForCausalLM": {"layer_types": _WINDOWED},
    "FalconH1ForCausalLM": {
        "attention_bias": False,
        "mlp_bias": False,
        "mamba_d_ssm": 256,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
    },
    "Gemma3ForCausalLM": {"layer_types": _WINDOWED},
    "Gemma3nForCausalLM": {
        "num_hidden_layers": 4,
        "layer_types": _WINDOWED * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "vocab_size_per_layer_input": 240,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 16,
    },
    "Gemma4ForCausalLM": {
        "num_hidden_layers": 4,
        "layer_types": _WINDOWED * 2,
        "num_kv_shared_layers": 2,
        "attention_k_eq_v": True,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "vocab_size_per_layer_input": 250,
        "hidden_size_per_layer_input": 16,
        "use_double_wide_mlp": True,
        "enable_moe_block": True,
        "top_k_experts": 2,
        "attention_bias": False,
    },
    "GemmaForCausalLM": {"attention_bias": False},
    "Glm4MoeForCausalLM": {"head_dim": 32},
    "Glm4MoeLiteForCausalLM": {
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "GlmMoeDsaForCausalLM": {
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "index_topk": 16,
        "index_n_heads": 4,
        "index_head_dim": 128,
    },
    "GPTJForCausalLM": {"rotary_dim": 16},
    "GptOssForCausalLM": {"rope_parameters": _YARN},
    "GraniteMoeForCausalLM": {"attention_bias": False},
    "GraniteMoeHybridForCausalLM": {
        "layer_types": _LINEAR,
        "shared_intermediate_size": 48,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
    },
    "GraniteMoeSharedForCausalLM": {"attention_bias": False},
    "GraniteMoeSWAForCausalLM": {"attention_bias": False},
    "HrmTextForCausalLM": {"attention_bias": False, "mlp_bias": False},
    "HYV3ForCausalLM": {
        "attention_bias": False,
        "mlp_bias": False,
        "first_k_dense_replace": 1,
        "expert_hidden_dim": 48,
        "route_norm": True,
        "qk_norm": True,
    },
    "HYV4ForCausalLM": {
        "attention_bias": False,
        "index_topk": 16,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "hc_mult": 2,
        "num_key_value_heads": 4,
    },
    "InklingForConditionalGeneration": {
        "text_config": _INKLING_TEXT,
        "vision_config": {
            "num_hidden_layers": 3,
            "patch_size": 2,
            "temporal_patch_size": 2,
            "hidden_size": 64,
        },
        "audio_config": {"n_mel_bins": 8, "mel_vocab_size": 16},
        "image_token_id": 240,
        "audio_token_id": 241,
        "image_bos_token_id": 242,
        "audio_bos_token_id": 243,
    },
    "JambaForCausalLM": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "KimiLinearForCausalLM": {
        "attention_bias": False,
        "q_lora_rank": None,
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "num_experts_per_token": 2,
        "num_experts": 4,
        "num_shared_experts": 1,
        "use_grouped_topk": True,
        "mla_use_nope": True,
    },
    "LagunaForCausalLM": {
        "layer_types": ["full_attention", "sliding_attention"],
        "num_attention_heads_per_layer": [4, 8],
    },
    "Lfm2ForCausalLM": {
        "layer_types": ["conv", "full_attention"],
        "block_dim": 128,
        "conv_dim": 128,
        "conv_dim_out": 128,
        "block_ff_dim": 96,
        "block_auto_adjust_ff_dim": False,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "conv_bias": True,
    },
    "Lfm2MoeForCausalLM": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_bias": True,
    },
    "Llama4ForCausalLM": {
        "attention_bias": False,
        "num_experts_per_tok": 1,
        "intermediate_size": 48,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 128,
    },
    "LongcatFlashForCausalLM": {
        "attention_bias": False,
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 48,
        "zero_expert_num": 2,
        "zero_expert_type": "identity",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "Mamba2ForCausalLM": {
        "num_heads": 8,
        "head_dim": 32,
        "state_size": 16,
        "n_groups": 2,
    },
    "MiMoV2FlashForCausalLM": {
        "attention_bias": False,
        "layer_types": ["full_attention", "sliding_attention"],
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "v_head_dim": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
        "sliding_window_size": 16,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "attention_value_scale": 0.707,
        "layernorm_epsilon": 1e-5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "MiniCPM3ForCausalLM": {"attention_bias": False, "mlp_bias": False},
    "MiniMaxM2ForCausalLM": {
        "rotary_dim": 16,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "Ministral3ForCausalLM": {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.1}},
    # Experts without a gate are not for a CPU.
    "NemotronHForCausalLM": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 48,
        # On a CPU a second request gets no numbers from states in float32.
        "mamba_ssm_cache_dtype": "bfloat16",
    },
    "OlmoeForCausalLM": {"attention_bias": False},
    "OlmoHybridForCausalLM": {"layer_types": _LINEAR, "num_key_value_heads": 4},
    "OPTForCausalLM": {"ffn_dim": 96, "word_embed_proj_dim": 128},
    "Qwen2ForCausalLM": {"tie_word_embeddings": True},
    "Qwen3_5ForCausalLM": {**_GATED_DELTA, "attention_bias": False},
    "Qwen3_5MoeForCausalLM": {**_GATED_DELTA, "attention_bias": False},
    "Qwen3ForCausalLM": {"attention_bias": False},
    "Qwen3MoeForCausalLM": {"attention_bias": False},
    "Qwen3NextForCausalLM": {**_GATED_DELTA, "attention_bias": False},
    "Qwen4ExpForCausalLM": {
        **_GATED_DELTA,
        "attention_bias": False,
        "layer_types": ["linear_attention", "indexed_attention"],
        "output_gate_type": "silu",
        "hc_count": 2,
        "hc_lowrank": 16,
        "ple_layer_ids": [1],
        "ple_embed_dim": 64,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "StableLmForCausalLM": {"qk_layernorm": False, "use_qkv_bias": True},
    "Zamba2ForCausalLM": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention"] + ["hybrid"] * 3,
        "num_mem_blocks": 2,
        "attention_head_dim": 64,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
        "adapter_rank": 16,
        "n_mamba_heads": 4,
        "mamba_d_state": 16,
        "num_key_value_heads": 4,
    },
}

_INKLING_PUBLISHED = {
    "local_layer_ids": [0],
    "dense_mlp_idx": 1,
    "use_embed_norm": True,
    "use_sconv": True,
    "use_gate_bias": True,
    "use_global_scale": True,
}


def _next_token(layer: int) -> dict[str, str | tuple[int, ...]]:
    """The layer that predicts one token more, as DeepSeek V3 has it after its last."""
    before, after = f"model.layers.{layer}.", f"model.layers.{layer + 1}."
    return {
        after: before,
        f"{after}enorm.weight": "model.norm.weight",
        f"{after}hnorm.weight": "model.norm.weight",
        f"{after}eh_proj.weight": (128, 256),
        f"{after}embed_tokens.weight": "model.embed_tokens.weight",
        f"{after}shared_head.norm.weight": "model.norm.weight",
        f"{after}shared_head.head.weight": "lm_head.weight",
    }


_NEXT_TOKEN = Published(
    config={"num_nextn_predict_layers": 1, "num_mtp_layers": None}, also=_next_token(1)
)

_SPARSE_NEXT_TOKEN = replace(
    _NEXT_TOKEN,
    backend="vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend",
)

#: By architecture of transformers, where there is something to say.
PUBLISHED: dict[str, Published] = {
    "AXK1ForCausalLM": Published(
        also={
            "model.layers.0.post_mlp_layernorm.weight": (
                "model.layers.1.post_mlp_layernorm.weight"
            )
        }
    ),
    # Its own class refuses some of the fields that it writes.
    "DbrxForCausalLM": Published(
        config={"attn_config": _DBRX_ATTENTION, "ffn_config": _DBRX_EXPERTS}
    ),
    "DeepseekV32ForCausalLM": _SPARSE_NEXT_TOKEN,
    "DeepseekV3ForCausalLM": _NEXT_TOKEN,
    "DeepseekV4ForCausalLM": Published(
        config={
            "layer_types": None,
            "mlp_layer_types": None,
            "compress_rates": None,
            "partial_rotary_factor": None,
            "compress_ratios": [0, 4, 128],
            "num_hash_layers": 1,
            "qk_rope_head_dim": 64,
            "topk_method": "noaux_tc",
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4,
                "original_max_position_embeddings": 64,
                "beta_fast": 32,
                "beta_slow": 1,
            },
            "expert_dtype": "bf16",
        },
        names={
            r"^model\.hc_head\.hc_": "hc_head_",
            r"^model\.embed_tokens\.": "embed.",
            r"^model\.": "",
            r"\.attn\.norm\.": ".attn.kv_norm.",
        },
        # The experts of each token.
        fills={r"\.tid2eid$": uniform(0, 4)},
    ),
    "Glm4MoeForCausalLM": _NEXT_TOKEN,
    "Glm4MoeLiteForCausalLM": _NEXT_TOKEN,
    "GlmMoeDsaForCausalLM": _SPARSE_NEXT_TOKEN,
    "HYV4ForCausalLM": Published(
        config={"layer_types": ["deepseek_sparse_attention"] * 2},
        backend=("vllm.models.hy_v4.nvidia.flashmla_sparse.HYV4FlashMLASparseBackend"),
        names={
            r"\.hc_pre\.hc_head\.": ".hc_head.",
            r"\.hc_pre\.(hc_\w+_layer)\.": r".\1.hc_pre.",
            r"\.mlp(\.shared_experts)?\.linear_gate\.": r".mlp\1.gate_proj.",
        },
    ),
    "InklingForCausalLM": Published(
        by="InklingForConditionalGeneration",
        part="text_config",
        config=_INKLING_PUBLISHED | {"model_type": "inkling_model"},
        without=(r"^model\.(audio|visual)\.",),
    ),
    "InklingForConditionalGeneration": Published(
        config={
            "text_config": _INKLING_PUBLISHED,
            "vision_config": {
                "vision_encoder_type": "hmlp",
                "decoder_dmodel": 128,
                "n_channels": 3,
                "n_layers": 3,
                "use_vision_norm": True,
            },
            "audio_config": {
                "decoder_dmodel": 128,
                "dmel_min_value": -7.0,
                "dmel_max_value": 2.0,
                "use_audio_norm": True,
                "audio_mode": "dmel",
            },
        }
    ),
    "KimiLinearForCausalLM": Published(
        names={r"\.block_sparse_moe\.(gate|up|down)_proj\.": r".mlp.\1_proj."}
    ),
    # The experts that do nothing have no weights.
    "LongcatFlashForCausalLM": Published(without=(r"\.experts\.[45]\.",)),
    "NemotronHForCausalLM": Published(config={"hybrid_override_pattern": "M*-"}),
    "OlmoHybridForCausalLM": Published(
        names={
            r"\.attention_layer_norm\.": ".input_layernorm.",
            r"\.feedforward_layer_norm\.": ".post_attention_layernorm.",
        },
        # transformers splits them in equal parts.
        also={
            "model.layers.0.linear_attn.q_conv1d.weight": (96, 1, 4),
            "model.layers.0.linear_attn.k_conv1d.weight": (96, 1, 4),
            "model.layers.0.linear_attn.v_conv1d.weight": (192, 1, 4),
        },
    ),
}
