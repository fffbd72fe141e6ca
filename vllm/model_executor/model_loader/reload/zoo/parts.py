# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Parts that the checkpoints of many architectures have in common, by the names and
shapes of their tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from .overrides import OVERRIDES
from .recipe import Recipe, Spec, normal
from .shrink import TINY, from_transformers

Tensors = dict[str, Spec]
Config = Mapping[str, Any]

#: Of `TINY`, what every decoder's configuration has.
_DECODER = [
    *("vocab_size", "hidden_size", "intermediate_size", "head_dim"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "max_position_embeddings"),
]


def config_of(architecture: str, model_type: str = "llama", **fields: Any) -> Config:
    """A decoder's config.json. Where the model's own type is known only to code on the
    hub, `model_type` is one whose configuration holds the same fields.
    """
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **{name: TINY[name] for name in _DECODER},
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    } | fields


#: Fields of a mixture of experts, by the names that most configurations use.
EXPERTS: dict[str, Any] = {
    name: TINY[name]
    for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
}

#: Fields of latent attention. The CPU's kernel takes latents of one width alone.
LATENT: dict[str, Any] = {
    name: TINY[name]
    for name in (
        *("q_lora_rank", "kv_lora_rank"),
        *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    )
}

#: The norms of most decoder layers.
NORMS = "input_layernorm post_attention_layernorm"


def under(prefix: str, tensors: Tensors) -> Tensors:
    if not prefix:
        return tensors
    return {f"{prefix}.{name}": spec for name, spec in tensors.items()}


def linear(name: str, inputs: int, outputs: int, bias: bool = False) -> Tensors:
    weight = {f"{name}.weight": Spec((outputs, inputs))}
    return weight | ({f"{name}.bias": Spec((outputs,))} if bias else {})


def norms(names: str, size: int, bias: bool = False) -> Tensors:
    """Norms over `size` channels, one for each of `names`."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return {f"{n}.{kind}": Spec((size,)) for n in names.split() for kind in kinds}


def attention(
    config: Config,
    names: str = "q_proj k_proj v_proj o_proj",
    *,
    bias: bool = False,
    output_bias: bool = False,
) -> Tensors:
    """Projections of grouped-query attention."""
    q, k, v, o = names.split()
    hidden, width = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * width
    keys = config["num_key_value_heads"] * width
    return {
        **linear(q, hidden, queries, bias),
        **linear(k, hidden, keys, bias),
        **linear(v, hidden, keys, bias),
        **linear(o, queries, hidden, output_bias),
    }


def fused_attention(
    config: Config, fused: str, output: str, *, bias: bool = False
) -> Tensors:
    """Grouped-query attention whose queries, keys and values are one projection."""
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    hidden = config["hidden_size"]
    return {
        **linear(fused, hidden, queries + 2 * keys, bias),
        **linear(output, queries, hidden),
    }


def latent_attention(
    config: Config,
    names: str = "q_a_proj q_a_layernorm q_b_proj "
    "kv_a_proj_with_mqa kv_a_layernorm kv_b_proj o_proj",
) -> Tensors:
    """Projections of multi-head latent attention. Without a `q_lora_rank` the queries
    come from one projection, `q_proj`.
    """
    q_a, q_norm, q_b, kv_a, kv_norm, kv_b, o = names.split()
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    query_rank = config["q_lora_rank"]
    if query_rank is None:
        queries = linear("q_proj", hidden, heads * (nope + rope))
    else:
        queries = {
            **linear(q_a, hidden, query_rank),
            **norms(q_norm, query_rank),
            **linear(q_b, query_rank, heads * (nope + rope)),
        }
    return {
        **queries,
        **linear(kv_a, hidden, rank + rope),
        **norms(kv_norm, rank),
        **linear(kv_b, rank, heads * (nope + value)),
        **linear(o, heads * value, hidden),
    }


def mlp(
    hidden: int,
    inner: int,
    names: str = "gate_proj up_proj down_proj",
    *,
    bias: bool = False,
) -> Tensors:
    """A gated feed-forward layer."""
    gate, up, down = names.split()
    return {
        **linear(gate, hidden, inner, bias),
        **linear(up, hidden, inner, bias),
        **linear(down, inner, hidden, bias),
    }


def experts(
    hidden: int,
    inner: int,
    *,
    router: str = "gate",
    shared: str = "",
    bias: str = "",
    idle: int = 0,
    names: str = "gate_proj up_proj down_proj",
    count: int = TINY["num_experts"],
) -> Tensors:
    """A router, and feed-forward layers each with tensors of its own: those it chooses
    from, and one named `shared` that all tokens pass. `bias` is the name of what
    corrects its choices, `idle` the number of choices that have no tensors.
    """
    one = mlp(hidden, inner, names)
    tensors = linear(router, hidden, count + idle)
    if bias:
        # So small that each expert is some token's choice.
        tensors[bias] = Spec((count + idle,), torch.float32, normal(0, 0.1))
    for index in range(count):
        tensors |= under(f"experts.{index}", one)
    return tensors | (under(shared, one) if shared else {})


def decoder(
    config: Config,
    layer: Callable[[int], Tensors],
    *,
    prefix: str = "model",
    embedding: str = "embed_tokens",
    layers: str = "layers",
    norm: str = "norm",
    norm_bias: bool = False,
    head: str = "lm_head",
    **extra: Spec,
) -> Recipe:
    """A decoder of `config["num_hidden_layers"]` layers, each as `layer` has it."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    body = linear(embedding, hidden, vocabulary)
    for index in range(config["num_hidden_layers"]):
        body |= under(f"{layers}.{index}", layer(index))
    body |= norms(norm, hidden, norm_bias)
    tensors = under(prefix, body) | linear(head, hidden, vocabulary) | extra
    return Recipe(config, tensors)


def as_another(architecture: str, base: str, **overrides: Any) -> Recipe:
    """The recipe of `base`, a class of transformers, for an architecture of the same
    format.
    """
    recipe = from_transformers(base, {**OVERRIDES.get(base, {}), **overrides})
    return replace(recipe, config={**recipe.config, "architectures": [architecture]})


def pangu(config: Config, heads: Tensors) -> Recipe:
    """A mixture of experts after the first layer, with a bias for each expert, and
    norms around both halves of a layer.
    """
    hidden, dense = config["hidden_size"], config["intermediate_size"]
    inner, bias = config["moe_intermediate_size"], "e_score_correction_bias"
    sparse = experts(hidden, inner, shared="shared_experts", bias=bias)

    def layer(index: int) -> Tensors:
        return {
            **under("self_attn", heads),
            **under("mlp", sparse if index else mlp(hidden, dense)),
            **norms(f"{NORMS} pre_mlp_layernorm post_mlp_layernorm", hidden),
        }

    return decoder(config, layer)
