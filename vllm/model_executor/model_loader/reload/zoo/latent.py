# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Recipes for mixtures of experts, over latent attention, that transformers does not
have.
"""

from collections.abc import Callable
from typing import Any

from .parts import (
    LATENT,
    NORMS,
    Config,
    Tensors,
    config_of,
    decoder,
    experts,
    latent_attention,
    linear,
    mlp,
    norms,
    pangu,
    under,
)
from .recipe import Recipe
from .shrink import TINY


def _config(architecture: str, **fields: Any) -> Config:
    return config_of(
        architecture,
        "deepseek_v3",
        **LATENT
        | {
            "num_key_value_heads": TINY["num_attention_heads"],
            "n_routed_experts": TINY["n_routed_experts"],
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": TINY["moe_intermediate_size"],
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 0,
        }
        | fields,
    )


def _mistral_large() -> Recipe:
    """Mistral's own names."""
    config = _config("MistralLarge3ForCausalLM")
    hidden, dense = config["hidden_size"], config["intermediate_size"]
    inner = config["moe_intermediate_size"]
    projections = "wq_a q_a_norm wq_b wkv_a_with_mqa kv_a_norm wkv_b wo"
    names = "w1 w3 w2"
    sparse = experts(hidden, inner, shared="shared_experts", names=names)

    def layer(index: int) -> Tensors:
        return {
            **under("attention", latent_attention(config, projections)),
            **norms("attention_norm ffn_norm", hidden),
            **(sparse if index else under("feed_forward", mlp(hidden, dense, names))),
        }

    return decoder(config, layer, prefix="", embedding="tok_embeddings", head="output")


def _pangu_ultra() -> Recipe:
    config = _config(
        "PanguUltraMoEForCausalLM", sandwich_norm=True, router_enable_expert_bias=True
    )
    return pangu(config, latent_attention(config))


def _sarvam() -> Recipe:
    config = _config(
        "SarvamMLAForCausalLM",
        q_lora_rank=None,
        num_experts=TINY["num_experts"],
        num_shared_experts=1,
        moe_router_enable_expert_bias=True,
        score_function="sigmoid",
    )
    hidden, dense = config["hidden_size"], config["intermediate_size"]
    inner, bias = config["moe_intermediate_size"], "gate.e_score_correction_bias"
    sparse = experts(hidden, inner, shared="shared_experts", bias=bias)

    def layer(index: int) -> Tensors:
        return {
            **under("self_attn", latent_attention(config)),
            **under("mlp", sparse if index else mlp(hidden, dense)),
            **norms(NORMS, hidden),
        }

    return decoder(config, layer)


def _longcat_ngram() -> Recipe:
    """Two attentions in a layer, and experts beside them that may pass a token on as it
    is. Each run of tokens has embeddings too: a table for each length and each hash.
    """
    hashes, longest, ratio, idle = 2, 3, 2, 2
    config = config_of(
        "LongcatFlashNgramForCausalLM",
        "longcat_flash",
        **LATENT,
        num_layers=TINY["num_hidden_layers"],
        ffn_hidden_size=TINY["intermediate_size"],
        expert_ffn_hidden_size=TINY["moe_intermediate_size"],
        n_routed_experts=TINY["n_routed_experts"],
        moe_topk=TINY["moe_topk"],
        zero_expert_num=idle,
        zero_expert_type="identity",
        mla_scale_q_lora=True,
        mla_scale_kv_lora=True,
        emb_split_num=hashes,
        emb_neighbor_num=longest,
        ngram_vocab_size_ratio=ratio,
    )
    hidden, dense = config["hidden_size"], config["ffn_hidden_size"]
    sparse = experts(
        hidden,
        config["expert_ffn_hidden_size"],
        router="router.classifier",
        bias="router.e_score_correction_bias",
        idle=idle,
    )
    twice = {
        name: spec
        for half in (0, 1)
        for name, spec in {
            **under(f"self_attn.{half}", latent_attention(config)),
            **under(f"mlps.{half}", mlp(hidden, dense)),
            **norms(f"input_layernorm.{half} post_attention_layernorm.{half}", hidden),
        }.items()
    }
    embeddings: Tensors = {}
    tables = hashes * (longest - 1)
    for index in range(tables):
        width, rows = hidden // tables, ratio * config["vocab_size"] + 2 * index + 1
        name = "model.ngram_embeddings"
        embeddings |= linear(f"{name}.embedders.{index}", width, rows)
        embeddings |= linear(f"{name}.post_projs.{index}", width, hidden)
    recipe = decoder(config, lambda _: twice | under("mlp", sparse), **embeddings)
    # Its configuration counts attentions.
    attentions = {"num_hidden_layers": 2 * config["num_layers"]}
    return Recipe({**config, **attentions}, recipe.tensors)


RECIPES: dict[str, Callable[[], Recipe]] = {
    "LongcatFlashNgramForCausalLM": _longcat_ngram,
    "MistralLarge3ForCausalLM": _mistral_large,
    "PanguUltraMoEForCausalLM": _pangu_ultra,
    "SarvamMLAForCausalLM": _sarvam,
}
