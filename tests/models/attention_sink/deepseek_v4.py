# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4 on a CPU, with the heads its kernel wants and with more."""

import pytest

from tests.models.attention_sink.harness import TINY, Row

PADDING = 3
DEEPSEEK_V4 = TINY | {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_key_value_heads": 1,
    "head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 2,
    "sliding_window": 16,
    "compress_ratios": [1, 1],
    "compress_rope_theta": 10000.0,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default"},
    "rms_norm_eps": 1e-6,
    "index_topk": 16,
    "index_n_heads": 4,
    "index_head_dim": 64,
    "hc_mult": 2,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 2,
    "num_hash_layers": 0,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
}
NAMES = ("layers.{}.attn.attn_sink", "model.layers.{}.attn.attn_sink")
CPU = "vllm.models.deepseek_v4.cpu"


def cpu_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU worker's own stand-in for CUDA events."""
    del monkeypatch
    import vllm.v1.worker.cpu.shm  # noqa: F401


def padded_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that wants more heads than the model has."""
    cpu_worker(monkeypatch)
    from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention as Attention

    monkeypatch.setattr(Attention, "get_padded_num_q_heads", classmethod(lambda cls, heads: heads + PADDING))


ROWS = {
    "deepseek-v4-cpu": Row(DEEPSEEK_V4, *NAMES, CPU, prepare=cpu_worker),
    "deepseek-v4-cpu-padded": Row(DEEPSEEK_V4, *NAMES, CPU, padding=PADDING, prepare=padded_kernel),
}
