# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Recipes for mixtures of experts, over plain attention, that transformers does not
have.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from .parts import (
    EXPERTS,
    NORMS,
    Tensors,
    as_another,
    attention,
    config_of,
    decoder,
    experts,
    fused_attention,
    linear,
    mlp,
    norms,
    pangu,
    under,
)
from .recipe import Recipe
from .shrink import TINY


def _bailing(architecture: str, *, qk_norm: bool, **fields: Any) -> Recipe:
    """Ling and its relatives. `fields` tell how they route."""
    corrected = fields.get("moe_router_enable_expert_bias", False)
    config = config_of(
        architecture,
        **EXPERTS,
        num_shared_experts=1,
        moe_shared_expert_intermediate_size=TINY["moe_intermediate_size"],
        norm_topk_prob=True,
        use_bias=False,
        use_qkv_bias=False,
        use_qk_norm=qk_norm,
        use_rmsnorm=True,
        embedding_dropout=0.0,
        **fields,
    )
    hidden, dense = config["hidden_size"], config["intermediate_size"]
    inner, head = config["moe_intermediate_size"], config["head_dim"]
    bias = "gate.expert_bias" if corrected else ""

    def layer(index: int) -> Tensors:
        names = "query_layernorm key_layernorm" if qk_norm else ""
        sparse = index >= config["first_k_dense_replace"]
        feed_forward = (
            experts(hidden, inner, shared="shared_experts", bias=bias)
            if sparse
            else mlp(hidden, dense)
        )
        return {
            **under("attention", fused_attention(config, "query_key_value", "dense")),
            **under("attention", norms(names, head)),
            **under("mlp", feed_forward),
            **norms(NORMS, hidden),
        }

    return decoder(config, layer, embedding="word_embeddings")


_CORRECTED = {
    "first_k_dense_replace": 1,
    "moe_router_enable_expert_bias": True,
    "score_function": "sigmoid",
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
}


def _deepseek() -> Recipe:
    config = config_of(
        "DeepseekForCausalLM",
        num_experts_per_tok=2,
        n_routed_experts=TINY["n_routed_experts"],
        n_shared_experts=1,
        moe_intermediate_size=TINY["moe_intermediate_size"],
        moe_layer_freq=1,
        first_k_dense_replace=1,
        norm_topk_prob=False,
        scoring_func="softmax",
    )
    hidden, dense = config["hidden_size"], config["intermediate_size"]
    inner = config["moe_intermediate_size"]

    def layer(index: int) -> Tensors:
        sparse = experts(hidden, inner, shared="shared_experts")
        return {
            **under("self_attn", attention(config)),
            **under("mlp", sparse if index else mlp(hidden, dense)),
            **norms(NORMS, hidden),
        }

    return decoder(config, layer)


def _k2_horizon() -> Recipe:
    """Gates over the heads. Without the experts that make the values of attention,
    which run on no CPU.
    """
    config = config_of(
        "K2HorizonForCausalLM",
        **EXPERTS,
        mlp_only_layers=[0],
        decoder_sparse_step=1,
        num_shared_experts=1,
        norm_topk_prob=True,
        moe_gate_bias=True,
        # Real ones have a sigmoid, which the CPU's router has not.
        router_score_func="softmax",
        router_scaling_factor=2.5,
        mova_num_experts=0,
        rope_head_dim=16,
        query_key_norm=True,
        attention_gate_func="softplus",
        attention_bias=True,
        layernorm_num_groups=2,
    )
    hidden, dense = config["hidden_size"], config["intermediate_size"]
    inner, head = config["moe_intermediate_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head
    sparse = experts(hidden, inner, shared="shared_experts", bias="gate.bias")

    def layer(index: int) -> Tensors:
        return {
            **under("self_attn", attention(config, bias=True, output_bias=True)),
            **norms("self_attn.q_norm", queries),
            **norms("self_attn.k_norm", config["num_key_value_heads"] * head),
            **linear("self_attn.gate_proj", hidden, queries),
            **under("mlp", sparse if index else mlp(hidden, dense)),
            **norms(NORMS, hidden),
        }

    return decoder(config, layer)


def _pangu_pro() -> Recipe:
    """Without the keys and values that are parameters of real checkpoints: vLLM 0.32.0
    neither loads nor serves them.
    """
    config = config_of(
        "PanguProMoEV2ForCausalLM",
        num_experts_per_tok=2,
        n_routed_experts=TINY["n_routed_experts"],
        n_shared_experts=1,
        moe_intermediate_size=TINY["moe_intermediate_size"],
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        router_enable_expert_bias=True,
        sandwich_norm=True,
        bias=True,
    )
    return pangu(config, attention(config, bias=True, output_bias=True))


RECIPES: dict[str, Callable[[], Recipe]] = {
    "BailingMoeForCausalLM": partial(
        _bailing,
        "BailingMoeForCausalLM",
        qk_norm=False,
        first_k_dense_replace=0,
        norm_head=True,
    ),
    "BailingMoeV2ForCausalLM": partial(
        _bailing, "BailingMoeV2ForCausalLM", qk_norm=True, **_CORRECTED
    ),
    "DeepseekForCausalLM": _deepseek,
    "ExaoneMoEForCausalLM": partial(
        as_another, "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"
    ),
    "K2HorizonForCausalLM": _k2_horizon,
    "PanguProMoEV2ForCausalLM": _pangu_pro,
    # Its configuration is read for both rope_theta and rope_scaling.
    "Param2MoEForCausalLM": partial(
        _bailing,
        "Param2MoEForCausalLM",
        qk_norm=True,
        model_type="step3p5",
        rope_theta=10000.0,
        rope_scaling=None,
        **_CORRECTED,
    ),
    "PhiMoEForCausalLM": partial(
        as_another, "PhiMoEForCausalLM", "PhimoeForCausalLM", lm_head_bias=True
    ),
    "SarvamMoEForCausalLM": partial(
        _bailing, "SarvamMoEForCausalLM", qk_norm=True, **_CORRECTED
    ),
}
