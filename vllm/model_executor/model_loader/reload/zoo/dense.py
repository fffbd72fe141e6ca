# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Recipes for dense architectures that transformers does not have."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .parts import (
    Config,
    Tensors,
    as_another,
    attention,
    config_of,
    decoder,
    fused_attention,
    linear,
    mlp,
    norms,
    under,
)
from .recipe import Recipe, Spec
from .shrink import TINY


def llama_layer(
    config: Config,
    *,
    bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    norm_bias: bool = False,
) -> Tensors:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    return {
        **under("self_attn", attention(config, bias=bias, output_bias=output_bias)),
        **under("mlp", mlp(hidden, inner, bias=mlp_bias)),
        **norms("input_layernorm post_attention_layernorm", hidden, norm_bias),
    }


def _like_llama(architecture: str, **fields: Any) -> Recipe:
    """Llama's names, without biases."""
    config = config_of(architecture, **fields)
    return decoder(config, lambda _: llama_layer(config))


def _first_llama() -> Recipe:
    """Early checkpoints hold the frequencies of their rotary embedding."""
    recipe = as_another("LLaMAForCausalLM", "LlamaForCausalLM")
    name = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    spec = Spec((TINY["head_dim"] // 2,), torch.float32)
    inverse = {name.format(i): spec for i in range(TINY["num_hidden_layers"])}
    return replace(recipe, tensors={**recipe.tensors, **inverse})


def _chatglm(architecture: str) -> Recipe:
    config = config_of(
        architecture,
        "chatglm",
        num_layers=2,
        padded_vocab_size=TINY["vocab_size"],
        ffn_hidden_size=TINY["intermediate_size"],
        kv_channels=TINY["head_dim"],
        seq_length=TINY["max_position_embeddings"],
        multi_query_attention=True,
        multi_query_group_num=TINY["num_key_value_heads"],
        add_qkv_bias=True,
        add_bias_linear=False,
        rmsnorm=True,
        post_layer_norm=True,
        original_rope=True,
    )
    hidden, inner = config["hidden_size"], config["ffn_hidden_size"]

    def layer(_: int) -> Tensors:
        names = "query_key_value", "dense"
        return {
            **under("self_attention", fused_attention(config, *names, bias=True)),
            **linear("mlp.dense_h_to_4h", hidden, 2 * inner),
            **linear("mlp.dense_4h_to_h", inner, hidden),
            **norms("input_layernorm post_attention_layernorm", hidden),
        }

    return decoder(
        config,
        layer,
        prefix="transformer",
        embedding="embedding.word_embeddings",
        layers="encoder.layers",
        norm="encoder.final_layernorm",
        head="transformer.output_layer",
        **{"transformer.rotary_pos_emb.inv_freq": Spec((TINY["head_dim"] // 4,))},
    )


def _exaone() -> Recipe:
    config = config_of(
        "ExaoneForCausalLM", activation_function="silu", layer_norm_epsilon=1e-5
    )
    hidden, inner = config["hidden_size"], config["intermediate_size"]

    def layer(_: int) -> Tensors:
        heads = attention(config, "q_proj k_proj v_proj out_proj")
        return {
            **under("attn.attention", heads),
            **under("mlp", mlp(hidden, inner, "c_fc_0 c_fc_1 c_proj")),
            **norms("ln_1 ln_2", hidden),
        }

    return decoder(
        config, layer, prefix="transformer", embedding="wte", layers="h", norm="ln_f"
    )


def _internlm2() -> Recipe:
    config = config_of("InternLM2ForCausalLM")
    hidden, inner = config["hidden_size"], config["intermediate_size"]

    def layer(_: int) -> Tensors:
        return {
            **under("attention", fused_attention(config, "wqkv", "wo")),
            **under("feed_forward", mlp(hidden, inner, "w1 w3 w2")),
            **norms("attention_norm ffn_norm", hidden),
        }

    return decoder(config, layer, embedding="tok_embeddings", head="output")


def _iquest_loop() -> Recipe:
    config = config_of("IQuestLoopCoderForCausalLM", loop_num=2, loop_window_size=16)
    gates: Tensors = {}
    for index in range(config["num_hidden_layers"]):
        name = f"model.gate_projections.{index}"
        gates |= linear(name, config["head_dim"], config["num_attention_heads"], True)
    return decoder(config, lambda _: llama_layer(config), **gates)


def _mimo() -> Recipe:
    """Qwen2's names, and a layer that predicts a second token."""
    config = config_of("MiMoForCausalLM", "qwen2", num_nextn_predict_layers=1)
    hidden = config["hidden_size"]
    layer = llama_layer(config, bias=True)
    names = "token_layernorm hidden_layernorm final_layernorm"
    second = layer | norms(names, hidden) | linear("input_proj", 2 * hidden, hidden)
    return decoder(config, lambda _: layer, **under("model.mtp_layers.0", second))


def _orion() -> Recipe:
    config = config_of("OrionForCausalLM")
    layer = llama_layer(config, norm_bias=True)
    return decoder(config, lambda _: layer, norm_bias=True)


def _pangu_embedded() -> Recipe:
    config = config_of("PanguEmbeddedForCausalLM", bias=True)
    layer = llama_layer(config, bias=True, output_bias=True)
    return decoder(config, lambda _: layer)


def _plamo3() -> Recipe:
    config = config_of(
        "Plamo3ForCausalLM",
        layer_types=["sliding_attention", "full_attention"],
        interleaved_sliding_window=[16, None],
        sliding_window_pattern=2,
        rope_local_theta=10000,
    )
    hidden, width = config["hidden_size"], config["head_dim"]
    inner = config["intermediate_size"]

    def layer(_: int) -> Tensors:
        return {
            **under("mixer", fused_attention(config, "qkv_proj", "o_proj")),
            **norms("mixer.q_norm mixer.k_norm", width),
            **linear("mlp.gate_up_proj", hidden, 2 * inner),
            **linear("mlp.down_proj", inner, hidden),
            **norms("pre_mixer_norm post_mixer_norm", hidden),
            **norms("pre_mlp_norm post_mlp_norm", hidden),
        }

    return decoder(config, layer, layers="layers.layers")


def _solar() -> Recipe:
    """Layers whose inputs are blended with those of earlier ones."""
    return _like_llama(
        "SolarForCausalLM",
        num_hidden_layers=3,
        bskcn_1=[1],
        bskcn_2=[1],
        bskcn_3=[2],
        bskcn_4=[2],
        bskcn_tv=[0.9, 0.8],
    )


def _telechat2() -> Recipe:
    config = config_of(
        "TeleChat2ForCausalLM",
        num_key_value_heads=TINY["num_attention_heads"],
        n_layer=TINY["num_hidden_layers"],
        n_head=TINY["num_attention_heads"],
        ffn_hidden_size=TINY["intermediate_size"],
        layer_norm_epsilon=1e-5,
    )
    hidden, inner = config["hidden_size"], config["intermediate_size"]

    def layer(_: int) -> Tensors:
        return {
            **linear("self_attention.query", hidden, hidden),
            **linear("self_attention.key_value", hidden, 2 * hidden),
            **linear("self_attention.dense", hidden, hidden, True),
            **linear("mlp.gate_proj", hidden, inner),
            **linear("mlp.up_proj", hidden, inner),
            **linear("mlp.down_proj", inner, hidden, True),
            **norms("input_layernorm post_attention_layernorm", hidden),
        }

    return decoder(
        config,
        layer,
        prefix="transformer",
        embedding="word_embeddings",
        layers="h",
        norm="ln_f",
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "ChatGLMForConditionalGeneration": partial(
        _chatglm, "ChatGLMForConditionalGeneration"
    ),
    "ChatGLMModel": partial(_chatglm, "ChatGLMModel"),
    "ExaoneForCausalLM": _exaone,
    "IQuestCoderForCausalLM": partial(_like_llama, "IQuestCoderForCausalLM"),
    "IQuestLoopCoderForCausalLM": _iquest_loop,
    "InternLM2ForCausalLM": _internlm2,
    "InternLM3ForCausalLM": partial(_like_llama, "InternLM3ForCausalLM"),
    "LLaMAForCausalLM": _first_llama,
    "MiMoForCausalLM": _mimo,
    "MiniCPMForCausalLM": partial(
        _like_llama,
        "MiniCPMForCausalLM",
        scale_emb=12,
        scale_depth=1.4,
        dim_model_base=32,
    ),
    "OrionForCausalLM": _orion,
    "PanguEmbeddedForCausalLM": _pangu_embedded,
    "Plamo3ForCausalLM": _plamo3,
    "Rnj1ForCausalLM": partial(
        as_another,
        "Rnj1ForCausalLM",
        "Gemma3ForCausalLM",
        layer_types=["full_attention"] * TINY["num_hidden_layers"],
        attention_bias=False,
    ),
    "SolarForCausalLM": _solar,
    "Step1ForCausalLM": partial(
        _like_llama, "Step1ForCausalLM", num_attention_groups=2
    ),
    "TeleChat2ForCausalLM": _telechat2,
    "TeleChat3ForCausalLM": partial(_like_llama, "TeleChat3ForCausalLM"),
    "TeleFLMForCausalLM": partial(
        _like_llama,
        "TeleFLMForCausalLM",
        use_mup=True,
        mup_scale_factor=2.0,
        output_mult=4.0,
    ),
}

IMPOSSIBLE: dict[str, str] = {"DeciLMForCausalLM": "needs remote code"}
