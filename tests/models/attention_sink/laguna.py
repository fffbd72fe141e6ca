# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Laguna and its DFlash drafter."""

from tests.models.attention_sink.harness import HEADS, TINY, Row

LAGUNA = TINY | {
    "architectures": ["LagunaForCausalLM"],
    "model_type": "laguna",
    "layer_types": ["sliding_attention"] * 2,
    "swa_attention_sink_enabled": True,
    "sliding_window": 16,
    "num_attention_heads_per_layer": [HEADS] * 2,
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "mlp_layer_types": ["dense"] * 2,
    "mlp_only_layers": [0, 1],
}

DRAFTER = LAGUNA | {
    "architectures": ["DFlashLagunaForCausalLM"],
    "draft_vocab_size": 128,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 1]},
}

ROWS = {
    "laguna": Row(
        LAGUNA,
        *["model.layers.{}.self_attn.sink"] * 2,
        "vllm.model_executor.models.laguna",
    ),
    "laguna-dflash": Row(
        LAGUNA,
        "layers.{}.self_attn.sink",
        "model.layers.{}.self_attn.sink",
        "vllm.model_executor.models.laguna_dflash",
        stages=(),
        unstaged="a drafter is whole on each stage",
        draft={"method": "dflash", "model": DRAFTER, "num_speculative_tokens": 2},
    ),
}
