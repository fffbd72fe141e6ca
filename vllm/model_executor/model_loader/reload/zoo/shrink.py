# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Recipes for the architectures that transformers has: its own classes at tiny
dimensions say what a checkpoint holds.
"""

import inspect
import re
import tempfile
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from .overrides import OVERRIDES, PUBLISHED, Published
from .recipe import Fill, Recipe, Spec

#: What a configuration's fields become, where it has them.
TINY: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "sliding_window": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Experts
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    # Latent attention
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    # What makes parameters
    "attention_bias": True,
    "mlp_bias": True,
    "use_bias": True,
    "use_qk_norm": True,
    "qk_layernorm": True,
    "add_router_bias": True,
}

#: Configurations within configurations.
NESTED = ("text_config", "vision_config", "audio_config")

#: A configuration that leads to more was not shrunk.
MOST_ELEMENTS = 20_000_000


def from_transformers(architecture: str, overrides: Mapping[str, Any]) -> Recipe:
    """The recipe for `architecture`, a class of transformers, with `overrides` for
    fields of its configuration.
    """
    published = PUBLISHED.get(architecture, Published())
    if published.by:
        overrides = OVERRIDES[published.by]
    model_class = getattr(transformers, published.by or architecture)
    config = shrunk(model_class.config_class, overrides)
    config.architectures = [architecture]
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class._from_config(config).parameters())
    if size > MOST_ELEMENTS:
        raise ValueError(f"{architecture} has {size:,} elements at tiny dimensions")
    with tempfile.TemporaryDirectory() as folder:
        model = model_class._from_config(config, dtype=torch.bfloat16)
        _keep_float32(model)
        model.save_pretrained(folder)
        saved = config.to_dict()
        if published.part:
            saved = saved[published.part] | {"architectures": [architecture]}
        return _as_published(published, saved, dict(_specs(Path(folder))))


def _keep_float32(model: torch.nn.Module) -> None:
    """What the class keeps in float32 is float32 in its checkpoints."""
    kept = model._keep_in_fp32_modules_strict
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if any(module in name for module in kept):
            tensor.data = tensor.data.float()


def shrunk(config_class: type, overrides: Mapping[str, Any]) -> Any:
    """A configuration of `config_class` at tiny dimensions."""
    same = getattr(config_class, "attribute_map", {})
    fields = _fields(config_class)
    told = fields & TINY.keys() | overrides.keys()
    tiny = {
        name: value
        for name, value in TINY.items()
        if name in fields | set(same) and same.get(name) not in told
    }
    # Some classes write to what they are given.
    return config_class(**tiny | deepcopy(dict(overrides)))


def _as_published(
    published: Published, config: dict[str, Any], tensors: dict[str, Spec]
) -> Recipe:
    merged = _merged(config, published.config)
    named = {
        _renamed(name, published.names): _filled(name, spec, published.fills)
        for name, spec in tensors.items()
        if not any(re.search(pattern, name) for pattern in published.without)
    }
    for name, like in published.also.items():
        if isinstance(like, tuple):
            named[name] = Spec(like)
        else:
            named |= {
                name + held.removeprefix(like): spec
                for held, spec in named.items()
                if held.startswith(like)
            }
    return Recipe(merged, named, backend=published.backend)


def _merged(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for name, value in fields.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict) and name in NESTED:
            merged[name] = _merged(config[name], value)
        else:
            merged[name] = value
    return merged


def _renamed(name: str, patterns: Mapping[str, str]) -> str:
    for pattern, replacement in patterns.items():
        name = re.sub(pattern, replacement, name)
    return name


def _filled(name: str, spec: Spec, patterns: Mapping[str, Fill]) -> Spec:
    fills = [fill for pattern, fill in patterns.items() if re.search(pattern, name)]
    return replace(spec, fill=fills[0]) if fills else spec


def _fields(config_class: type) -> set[str]:
    names = set(inspect.signature(config_class.__init__).parameters)
    for cls in config_class.__mro__:
        names |= set(getattr(cls, "__annotations__", ()))
    return names


def _specs(folder: Path) -> Iterator[tuple[str, Spec]]:
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            # What is no float is no weight: the class knows its values.
            fill = None if tensor.is_floating_point() else _always(tensor)
            yield name, Spec(tuple(tensor.shape), tensor.dtype, fill)


def _always(values: torch.Tensor) -> Fill:
    return lambda shape, generator: values
