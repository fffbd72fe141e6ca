# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Recipes for mixtures of experts, over attention of a kind of their own, that
transformers does not have.
"""

from collections.abc import Callable

import torch

from .parts import (
    NORMS,
    Config,
    Tensors,
    attention,
    config_of,
    decoder,
    experts,
    fused_attention,
    linear,
    mlp,
    norms,
    under,
)
from .recipe import Recipe, Spec
from .shrink import TINY


def _mimo_v2() -> Recipe:
    """Sinks in the layers that attend to a window."""
    config = config_of(
        "MiMoV2ForCausalLM",
        "mimo_v2_flash",
        num_experts_per_tok=2,
        n_routed_experts=TINY["n_routed_experts"],
        moe_intermediate_size=TINY["moe_intermediate_size"],
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        hybrid_layer_pattern=[0, 1],
        moe_layer_freq=[0, 1],
        v_head_dim=TINY["head_dim"],
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=TINY["head_dim"],
        swa_v_head_dim=TINY["head_dim"],
        sliding_window=16,
        sliding_window_size=16,
        add_swa_attention_sink_bias=True,
        attention_bias=False,
        attention_value_scale=0.707,
        partial_rotary_factor=0.5,
        layernorm_epsilon=1e-5,
    )
    hidden, dense = config["hidden_size"], config["intermediate_size"]
    inner = config["moe_intermediate_size"]

    def layer(index: int) -> Tensors:
        tensors = {
            **under("self_attn", fused_attention(config, "qkv_proj", "o_proj")),
            **norms(NORMS, hidden),
        }
        if not index:
            return tensors | under("mlp", mlp(hidden, dense))
        sinks = Spec((config["swa_num_attention_heads"],))
        return {
            **tensors,
            "self_attn.attention_sink_bias": sinks,
            **under("mlp", experts(hidden, inner, bias="gate.e_score_correction_bias")),
        }

    return decoder(config, layer)


def _minimax_m3() -> Recipe:
    """Attention to the blocks that an index picks."""
    indexed, width = TINY["num_key_value_heads"], 128
    text = config_of(
        "MiniMaxM3SparseForCausalLM",
        "minimax_m3_text",
        intermediate_size=TINY["moe_intermediate_size"],
        dense_intermediate_size=TINY["intermediate_size"],
        shared_intermediate_size=TINY["moe_intermediate_size"],
        num_local_experts=TINY["num_local_experts"],
        num_experts_per_tok=2,
        n_shared_experts=1,
        use_routing_bias=True,
        hidden_act="swigluoai",
        rotary_dim=16,
        partial_rotary_factor=0.5,
        moe_layer_freq=[0, 1],
        sparse_attention_config={
            "use_sparse_attention": True,
            "sparse_index_dim": width,
            "sparse_num_index_heads": indexed,
            "sparse_topk_blocks": 2,
            "sparse_block_size": 128,
            "sparse_disable_index_value": [0, 1],
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_attention_freq": [0, 1],
        },
    )
    config = {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m3_vl",
        "text_config": text,
        "dtype": text["dtype"],
    }
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    sparse = experts(hidden, inner, bias="e_score_correction_bias", names="w1 w3 w2")

    def layer(index: int) -> Tensors:
        tensors = {
            **under("self_attn", attention(text)),
            **norms("self_attn.q_norm self_attn.k_norm", text["head_dim"]),
            **norms(NORMS, hidden),
        }
        if not index:
            dense = text["dense_intermediate_size"]
            return tensors | under("mlp", mlp(hidden, dense))
        return {
            **tensors,
            **linear("self_attn.index_q_proj", hidden, indexed * width),
            **linear("self_attn.index_k_proj", hidden, width),
            **norms("self_attn.index_q_norm self_attn.index_k_norm", width),
            **under("block_sparse_moe", sparse),
            **under("block_sparse_moe.shared_experts", mlp(hidden, inner)),
        }

    return Recipe(config, decoder(text, layer).tensors)


def _step3_text() -> Recipe:
    """Queries from a bottleneck; each projection of all experts is one tensor."""
    config = config_of(
        "Step3TextForCausalLM",
        "step3_text",
        num_key_value_heads=1,
        num_attention_groups=1,
        share_q_dim=64,
        moe_num_experts=TINY["num_experts"],
        moe_top_k=2,
        moe_intermediate_size=TINY["moe_intermediate_size"],
        share_expert_dim=TINY["moe_intermediate_size"],
        moe_layers_enum="1",
        max_position_embedding=TINY["max_position_embeddings"],
        norm_expert_weight=True,
    )
    hidden, dense = config["hidden_size"], config["intermediate_size"]
    bottleneck, head = config["share_q_dim"], config["head_dim"]
    queries = config["num_attention_heads"] * head

    def layer(index: int) -> Tensors:
        return {
            **linear("self_attn.q_proj", hidden, bottleneck),
            **norms("self_attn.inter_norm", bottleneck),
            **linear("self_attn.wq", bottleneck, queries),
            **linear("self_attn.k_proj", hidden, head),
            **linear("self_attn.v_proj", hidden, head),
            **linear("self_attn.o_proj", queries, hidden),
            **(_step_experts(config) if index else under("mlp", mlp(hidden, dense))),
            **norms(NORMS, hidden),
        }

    return decoder(config, layer)


def _step3p5() -> Recipe:
    """More heads in the layers that attend to a window, and a gate for each head."""
    config = config_of(
        "Step3p5ForCausalLM",
        "step3p5",
        num_attention_groups=TINY["num_key_value_heads"],
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=16,
        attention_other_setting={
            "attention_type": "sliding_attention",
            "num_attention_heads": 6,
            "num_attention_groups": 2,
            "head_dim": TINY["head_dim"],
        },
        use_head_wise_attn_gate=True,
        partial_rotary_factors=[0.5, 1.0],
        rope_theta=[5000000.0, 10000.0],
        moe_num_experts=TINY["num_experts"],
        moe_top_k=2,
        moe_intermediate_size=TINY["moe_intermediate_size"],
        share_expert_dim=TINY["moe_intermediate_size"],
        moe_layers_enum="1",
        # Real ones have a sigmoid, which the CPU's router has not.
        moe_router_activation="softmax",
        moe_router_scaling_factor=3.0,
        use_moe_router_bias=True,
        need_fp32_gate=True,
    )
    hidden, dense = config["hidden_size"], config["intermediate_size"]

    def layer(index: int) -> Tensors:
        heads = 6 if index else config["num_attention_heads"]
        tensors = {
            **under("self_attn", attention({**config, "num_attention_heads": heads})),
            **norms("self_attn.q_norm self_attn.k_norm", config["head_dim"]),
            **linear("self_attn.g_proj", hidden, heads),
            **norms(NORMS, hidden),
        }
        if not index:
            return tensors | under("mlp", mlp(hidden, dense))
        bias = Spec((config["moe_num_experts"],), torch.float32)
        return {**tensors, **_step_experts(config), "moe.router_bias": bias}

    return decoder(config, layer)


def _step_experts(config: Config) -> Tensors:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    count = config["moe_num_experts"]
    return {
        **linear("moe.gate", hidden, count),
        "moe.gate_proj.weight": Spec((count, inner, hidden)),
        "moe.up_proj.weight": Spec((count, inner, hidden)),
        "moe.down_proj.weight": Spec((count, hidden, inner)),
        **under("share_expert", mlp(hidden, config["share_expert_dim"])),
    }


RECIPES: dict[str, Callable[[], Recipe]] = {
    "MiMoV2ForCausalLM": _mimo_v2,
    "MiniMaxM3SparseForCausalLM": _minimax_m3,
    "Step3TextForCausalLM": _step3_text,
    "Step3p5ForCausalLM": _step3p5,
}
