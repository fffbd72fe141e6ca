# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Recipes for architectures that keep a state in some layers and attend in others, and
that transformers does not have.
"""

from collections.abc import Callable
from functools import partial

import torch

from .parts import (
    EXPERTS,
    LATENT,
    NORMS,
    Config,
    Tensors,
    as_another,
    config_of,
    decoder,
    experts,
    latent_attention,
    linear,
    mlp,
    norms,
    under,
)
from .recipe import Recipe, Spec
from .shrink import TINY

_KERNEL = 4


def _bailing_config(architecture: str, **fields: object) -> Config:
    return config_of(
        architecture,
        "deepseek_v3",
        **EXPERTS
        | LATENT
        | {
            "num_key_value_heads": TINY["num_attention_heads"],
            "num_shared_experts": 1,
            "moe_shared_expert_intermediate_size": TINY["moe_intermediate_size"],
            "moe_router_enable_expert_bias": True,
            "score_function": "sigmoid",
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "layer_group_size": 2,
            "use_bias": False,
            "use_qkv_bias": False,
        }
        | fields,
    )


def _bailing_layer(config: Config, index: int, heads: Tensors) -> Tensors:
    hidden, dense = config["hidden_size"], config["intermediate_size"]
    inner = config["moe_intermediate_size"]
    sparse = experts(hidden, inner, shared="shared_experts", bias="gate.expert_bias")
    return {
        **under("attention", heads),
        **under("mlp", sparse if index else mlp(hidden, dense)),
        **norms(NORMS, hidden),
    }


def _bailing_v2_5() -> Recipe:
    """Linear attention in all layers but the last of a group."""
    config = _bailing_config(
        "BailingMoeV2_5ForCausalLM",
        use_qk_norm=True,
        group_norm_size=2,
        linear_silu=True,
    )
    hidden, head = config["hidden_size"], config["head_dim"]
    width = config["num_attention_heads"] * head
    projections = (
        "q_a_proj q_a_layernorm q_b_proj "
        "kv_a_proj_with_mqa kv_a_layernorm kv_b_proj dense"
    )
    stateful = {
        **linear("query_key_value", hidden, 3 * width),
        **norms("query_layernorm key_layernorm", head),
        **linear("g_proj", hidden, width),
        **norms("g_norm", width),
        **linear("dense", width, hidden),
    }

    def layer(index: int) -> Tensors:
        heads = latent_attention(config, projections) if index else stateful
        return _bailing_layer(config, index, heads)

    return decoder(config, layer, embedding="word_embeddings")


def _bailing_v3() -> Recipe:
    """Delta attention, with a decay for each channel, in all layers but the last of a
    group.
    """
    config = _bailing_config(
        "BailingMoeV3ForCausalLM",
        no_kda_lora=True,
        short_conv_kernel_size=_KERNEL,
        gated_attention_proj_granularity_type="head_wise",
    )
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    width = heads * config["head_dim"]
    projections = (
        "q_a_proj q_a_layernorm q_b_proj "
        "kv_a_proj_with_mqa kv_a_layernorm kv_b_proj dense"
    )
    stateful = {
        **_delta(hidden, heads, config["head_dim"]),
        **linear("f_proj", hidden, width),
        **linear("g_proj", hidden, width),
    }
    attending = latent_attention(config, projections) | linear("g_proj", hidden, heads)

    def layer(index: int) -> Tensors:
        return _bailing_layer(config, index, attending if index else stateful)

    return decoder(config, layer, embedding="word_embeddings")


def _delta(hidden: int, heads: int, head: int) -> Tensors:
    """What all delta attentions have."""
    width = heads * head
    convolution = Spec((width, 1, _KERNEL))
    return {
        **linear("q_proj", hidden, width),
        **linear("k_proj", hidden, width),
        **linear("v_proj", hidden, width),
        **linear("b_proj", hidden, heads),
        **{f"{name}_conv1d.weight": convolution for name in "qkv"},
        "A_log": Spec((heads,), torch.float32),
        "dt_bias": Spec((width,), torch.float32),
        **norms("o_norm", head),
        **linear("o_proj", width, hidden),
    }


def _glm5_next() -> Recipe:
    """Delta attention and latent attention to the tokens that an indexer picks, over
    several streams of residuals.
    """
    streams, pool, heads, index_head = 4, 16, 2, 128
    config = config_of(
        "Glm5NextForCausalLM",
        "glm5_next_text",
        **LATENT
        | {
            "qk_rope_head_dim": 0,
            "num_key_value_heads": TINY["num_attention_heads"],
            "n_routed_experts": TINY["n_routed_experts"],
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": TINY["moe_intermediate_size"],
            "norm_topk_prob": True,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
            "layer_types": ["linear_attention", "indexed_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "indexer_types": ["full", "full"],
            "index_topk": 2 * pool,
            "index_kpool": pool,
            "index_kpool_always_select_tail": True,
            "index_n_heads": heads,
            "index_head_dim": index_head,
            "linear_head_dim": TINY["head_dim"],
            "linear_num_heads": TINY["num_attention_heads"],
            "linear_conv_kernel_dim": _KERNEL,
            "indexer_rope_interleave": True,
            "mla_use_nope": True,
            "num_nextn_predict_layers": 0,
            "mhc": True,
            "hc_mult": streams,
        },
    )
    hidden, dense = config["hidden_size"], config["intermediate_size"]
    inner, head = config["moe_intermediate_size"], config["linear_head_dim"]
    delta_heads = config["linear_num_heads"]
    mixed = (2 + streams) * streams
    stateful = {
        **_delta(hidden, delta_heads, head),
        **linear("f_a_proj", hidden, head),
        **linear("f_b_proj", head, delta_heads * head),
        **linear("g_a_proj", hidden, head),
        **linear("g_b_proj", head, delta_heads * head),
    }
    indexer = {
        **linear("wq_b", config["q_lora_rank"], heads * index_head),
        **linear("wk", hidden, index_head),
        **linear("weights_proj", hidden, heads),
        **norms("k_norm", index_head, True),
        "index_kpool_compress_ape": Spec((pool, index_head), torch.float32),
        "index_kpool_compress_gate": Spec((index_head, hidden)),
    }
    attending = latent_attention(config) | under("indexer", indexer)
    connections = {
        f"hc_{part}_{name}": Spec(shape, torch.float32)
        for part in ("attn", "ffn")
        for name, shape in (
            ("fn", (mixed, streams * hidden)),
            ("base", (mixed,)),
            ("scale", (3,)),
        )
    }
    bias = "gate.e_score_correction_bias"
    sparse = experts(hidden, inner, shared="shared_experts", bias=bias)

    def layer(index: int) -> Tensors:
        return {
            **under("self_attn", attending if index else stateful),
            **under("mlp", sparse if index else mlp(hidden, dense)),
            **norms(NORMS, hidden),
            **connections,
        }

    return decoder(config, layer)


RECIPES: dict[str, Callable[[], Recipe]] = {
    "BailingMoeV2_5ForCausalLM": _bailing_v2_5,
    "BailingMoeV3ForCausalLM": _bailing_v3,
    "Glm5NextForCausalLM": _glm5_next,
    # All layers of a kind are alike here: how those of real checkpoints differ, only
    # code on the hub can tell. Without experts: no kernel of the CPU has their
    # activation.
    "NemotronHPuzzleForCausalLM": partial(
        as_another,
        "NemotronHPuzzleForCausalLM",
        "NemotronHForCausalLM",
        layers_block_type=["linear_attention", "full_attention", "mlp"],
        sliding_window=None,
        attention_bias=False,
        mlp_bias=False,
        use_bias=False,
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=32,
        n_groups=2,
        chunk_size=16,
    ),
}
