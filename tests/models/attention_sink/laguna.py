# SPDX-License-Identifier: Apache-2.0
"""Laguna."""

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

ROWS = {"laguna": Row(LAGUNA, *["model.layers.{}.self_attn.sink"] * 2, "vllm.model_executor.models.laguna")}
