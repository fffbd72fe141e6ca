# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The DFlash drafter of Qwen3."""

from tests.models.attention_sink.harness import TINY, Row

QWEN3 = TINY | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
DRAFTER = QWEN3 | {
    "architectures": ["DFlashDraftModel"],
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 16,
    "use_sliding_window": True,
    "dflash_config": {
        "attention_sink_bias": True,
        "mask_token_id": 5,
        "target_layer_ids": [0, 1],
    },
}

ROWS = {
    "qwen3-dflash": Row(
        QWEN3,
        "layers.{}.self_attn.attention_sink_bias",
        "model.layers.{}.self_attn.attention_sink_bias",
        "vllm.model_executor.models.qwen3_dflash",
        called="model.layers.2.self_attn.attention_sink_bias",
        stages=(),
        unstaged="a drafter is whole on each stage",
        draft={"method": "dflash", "model": DRAFTER, "num_speculative_tokens": 2},
        silent=True,
    )
}
