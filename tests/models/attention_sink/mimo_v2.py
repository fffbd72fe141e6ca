# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""MiMo-V2, with and without a vision tower, and the drafter of each."""

import sys
from importlib.util import find_spec
from types import ModuleType

import pytest

from tests.models.attention_sink.harness import TINY, Row

MIMO_V2 = TINY | {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "hybrid_layer_pattern": [1, 1],
    "add_swa_attention_sink_bias": True,
    "sliding_window": 16,
    "sliding_window_size": 16,
    "swa_num_attention_heads": TINY["num_attention_heads"],
    "swa_num_key_value_heads": TINY["num_key_value_heads"],
    "swa_head_dim": TINY["head_dim"],
    "swa_v_head_dim": TINY["head_dim"],
    "v_head_dim": TINY["head_dim"],
    "attention_bias": False,
    "hidden_act": "silu",
    "layernorm_epsilon": 1e-6,
    "moe_layer_freq": [0, 0],
    "n_routed_experts": 4,
    "tie_word_embeddings": False,
}
OMNI = MIMO_V2 | {
    "architectures": ["MiMoV2OmniForCausalLM"],
    "vision_config": {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 4,
        "num_key_value_heads": 2,
        "qk_channels": 32,
        "kv_channels": 32,
        "out_hidden_size": 64,
        "use_sink": True,
    },
}
SINK = "model.layers.{}.self_attn.attention_sink_bias"
DRAFTED = "model.mtp.layers.{}.self_attn.attention_sink_bias"
MTP = {"method": "mtp", "num_speculative_tokens": 1}
MODULE = "vllm.model_executor.models.mimo_v2"


def images_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor that Omni names at import reads images with torchvision, which a
    CPU installation may lack.
    """
    if "torchvision" in sys.modules or find_spec("torchvision"):
        return
    for name in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional"):
        monkeypatch.setitem(
            sys.modules, f"torchvision{name}", ModuleType(f"torchvision{name}")
        )


def drafter(config: dict[str, object], **other: object) -> Row:
    return Row(
        config,
        DRAFTED,
        DRAFTED,
        f"{MODULE}_mtp",
        layers=(0,),
        draft=MTP,
        stages=(),
        unstaged="a drafter is whole on each stage",
        **other,
    )


ROWS = {
    "mimo-v2": Row(MIMO_V2, SINK, SINK, MODULE),
    "mimo-v2-mtp": drafter(MIMO_V2),
    "mimo-v2-omni": Row(
        OMNI, SINK, f"language_model.{SINK}", f"{MODULE}_omni", prepare=images_unread
    ),
    "mimo-v2-omni-mtp": drafter(OMNI, prepare=images_unread),
}
