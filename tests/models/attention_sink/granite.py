# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Granite with sliding windows, dense and with experts."""

from tests.models.attention_sink.harness import TINY, Row

GRANITE = TINY | {
    "architectures": ["GraniteSWAForCausalLM"],
    "model_type": "granite_swa",
    "layer_types": ["sliding_attention"] * 2,
    "layer_rope_theta": [10000.0] * 2,
    "sliding_window": 16,
}
EXPERTS = GRANITE | {
    "architectures": ["GraniteMoeSWAForCausalLM"],
    "model_type": "granitemoe_swa",
    "num_local_experts": 4,
    "shared_intermediate_size": 32,
}
NAMES = ("model.layers.{}.self_attn.sinks",) * 2

ROWS = {
    "granite-swa": Row(GRANITE, *NAMES, "vllm.model_executor.models.granite"),
    "granite-moe-swa": Row(
        EXPERTS, *NAMES, "vllm.model_executor.models.granitemoeshared"
    ),
}
