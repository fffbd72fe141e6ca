# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""GPT-OSS: its plain, MXFP4 and Quark paths, and the token classifier made of it."""

import pytest

from tests.models.attention_sink.harness import TINY, Row

GPT_OSS = TINY | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_local_experts": 4,
}
FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
QUARK = {
    "quant_method": "quark",
    "global_quant_config": {
        "weight": FP8,
        "input_tensors": FP8,
        "output_tensors": None,
        "bias": None,
    },
    "layer_quant_config": {},
    "layer_type_quant_config": {},
    "kv_cache_quant_config": {},
    "exclude": ["lm_head", "re:.*attn.*", "re:.*router.*"],
    "export": {"kv_cache_group": [], "pack_method": "order"},
}
NAMES = ("model.layers.{}.self_attn.sinks", "model.layers.{}.attn.sinks")
MODULE = "vllm.model_executor.models.gpt_oss"


def experts_without_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of MXFP4 experts refuse a CPU without AMX; nothing here runs experts."""
    from vllm.model_executor.layers.quantization import mxfp4

    monkeypatch.setattr(
        mxfp4,
        "select_mxfp4_moe_backend",
        lambda moe: (mxfp4.Mxfp4MoeBackend.NONE, None),
    )


PRIVACY_FILTER = GPT_OSS | {
    "architectures": ["OpenAIPrivacyFilterForTokenClassification"],
    "model_type": "openai_privacy_filter",
    "sliding_window": 16,
}

ROWS = {
    "gpt-oss": Row(GPT_OSS, *NAMES, MODULE),
    "gpt-oss-mxfp4": Row(
        GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}},
        *NAMES,
        MODULE,
        prepare=experts_without_kernel,
    ),
    "gpt-oss-quark": Row(
        GPT_OSS | {"quantization_config": QUARK},
        *NAMES,
        MODULE,
        stages=(0,),
        unstaged="the Quark path of the base looks into layer 0 on every stage",
    ),
    "gpt-oss-privacy-filter": Row(
        PRIVACY_FILTER, *NAMES, "vllm.model_executor.models.openai_privacy_filter"
    ),
}
