# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Recipes for models of text and images that the registry counts as models of text."""

from collections.abc import Callable

from .parts import Tensors, attention, config_of, decoder, linear, mlp, norms, under
from .recipe import Recipe
from .shrink import TINY, from_transformers


def _hyperclova() -> Recipe:
    """What transformers has, under the names of the checkpoints."""
    text = dict(config_of("HyperCLOVAXForCausalLM"))
    hidden, vocabulary = text["hidden_size"], text["vocab_size"]
    recipe = from_transformers(
        "HyperCLOVAXVisionV2ForConditionalGeneration",
        {
            "text_config": text | {"model_type": "hyperclovax"},
            "vision_config": {
                "model_type": "qwen2_5_vl",
                "depth": 1,
                "hidden_size": 64,
                "intermediate_size": TINY["intermediate_size"],
                "num_heads": 2,
                "out_hidden_size": hidden,
                "fullatt_block_indexes": [0],
            },
            "image_token_id": 5,
            "video_token_id": 6,
            "tie_word_embeddings": False,
        },
    )
    language, projector = "model.language_model.", "model.vision_projector."
    tensors = {
        name.replace(language, f"{language}model.").replace(
            projector, "model.mm_projector."
        ): spec
        for name, spec in recipe.tensors.items()
        if "lm_head." not in name
    }
    config = {**recipe.config, "architectures": ["HCXVisionV2ForCausalLM"]}
    return Recipe(config, tensors | linear(f"{language}lm_head", hidden, vocabulary))


def _muse_glimmer() -> Recipe:
    """The language model alone."""
    config = config_of(
        "MuseGlimmerForCausalLM",
        "muse_glimmer_text",
        hidden_activation="silu",
        sliding_window=16,
        no_rope_layers=[1, 0],
        layer_types=["sliding_attention", "full_attention"],
        use_qk_norm=True,
        use_attn_output_gate=True,
        normalize_tok_embeddings=True,
    )
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]

    def layer(_: int) -> Tensors:
        return {
            **under("self_attn", attention(config)),
            **linear("self_attn.gate_proj", hidden, queries),
            **under("mlp", mlp(hidden, inner)),
            **norms("input_layernorm post_attention_layernorm", hidden),
            **norms("pre_feedforward_layernorm post_feedforward_layernorm", hidden),
        }

    return decoder(config, layer, prefix="model.language_model")


RECIPES: dict[str, Callable[[], Recipe]] = {
    "HCXVisionV2ForCausalLM": _hyperclova,
    "MuseGlimmerForCausalLM": _muse_glimmer,
}
