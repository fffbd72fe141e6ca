# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""HY-V4 on NVIDIA and ROCm and its drafter, with the sparse attention that reads the
sink, and without it.
"""

from typing import Any

import pytest
import torch

from tests.models.attention_sink.harness import TINY, Row

HY_V4 = TINY | {
    "architectures": ["HYV4ForCausalLM"],
    "model_type": "hy_v4",
    "num_key_value_heads": 4,
    "mlp_layer_types": ["dense"] * 2,
    "layer_types": ["sparse_attention"] * 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "index_topk": 16,
    "index_head_dim": 128,
    "index_n_heads": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "hc_mult": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
NAMES = ("model.layers.{}.self_attn.learnable_sink_param",) * 2
MODULE = "vllm.models.hy_v4.nvidia"


def sparse_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU refuses sparse MLA: it gets HY-V4's own backend, which asks at once for an
    accelerator's workspace.
    """
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.workspace import (
        init_workspace_manager,
        is_workspace_manager_initialized,
    )

    backend = "vllm.models.hy_v4.nvidia.flashmla_sparse.HYV4FlashMLASparseBackend"
    monkeypatch.setattr(
        CpuPlatform,
        "get_attn_backend_cls",
        classmethod(lambda cls, *args, **kwargs: backend),
    )
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    if not is_workspace_manager_initialized():
        init_workspace_manager(torch.device("cpu"))


SPARSE: dict[str, Any] = {"dtype": torch.float32, "prepare": sparse_attention}

ROWS = {
    "hy-v4": Row(HY_V4, *NAMES, f"{MODULE}.model", "HYV4ForCausalLM", **SPARSE),
    "hy-v4-amd": Row(
        HY_V4,
        *NAMES,
        "vllm.models.hy_v4.amd.model",
        "HYV4ForCausalLM",
        dtype=torch.float32,
        prepare=sparse_attention,
    ),
    "hy-v4-dense": Row(
        HY_V4 | {"layer_types": ["full_attention"] * 2},
        *NAMES,
        f"{MODULE}.model",
        "HYV4ForCausalLM",
        dtype=None,
    ),
    "hy-v4-mtp": Row(
        HY_V4,
        "model.mtp_layers.{}.self_attn.learnable_sink_param",
        "model.layers.2.mtp_block.self_attn.learnable_sink_param",
        f"{MODULE}.mtp",
        called="model.layers.2.self_attn.learnable_sink_param",
        layers=(0,),
        **SPARSE,
        stages=(),
        unstaged="a drafter is whole on each stage",
        draft={"method": "mtp", "num_speculative_tokens": 1},
    ),
}
