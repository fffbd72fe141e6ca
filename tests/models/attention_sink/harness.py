# SPDX-License-Identifier: Apache-2.0
"""Builds the models that have attention sinks at tiny dimensions, and loads them as a server and a trainer do."""

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import _model_to_pp_missing_layer_names
from vllm.utils.torch_utils import set_default_torch_dtype

HEADS = 4

#: What the configs of the models have in common.
TINY: dict[str, Any] = {
    "dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
}


def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    del monkeypatch


@dataclass(frozen=True)
class Row:
    """One model that has sinks.

    `config` is its config.json; `weight` and `parameter` are what a sink is called in the checkpoint and in vLLM, with
    `{}` for the layer; `layers` are the layers that have one and `padding` how many heads the kernel adds. `module` is
    the vLLM module that a base must have to have the model, `model` its class where it is not the one that vLLM picks
    for the config on a CPU, `prepare` what stands in for hardware. `stages` are the pipeline stages, of two with one
    layer each, that can be built; `unstaged` says why the others cannot.
    """

    config: dict[str, Any] = field(repr=False)
    weight: str
    parameter: str
    module: str
    model: str = ""
    layers: tuple[int, ...] = (0, 1)
    padding: int = 0
    prepare: Callable[[pytest.MonkeyPatch], None] = nothing
    stages: tuple[int, ...] = (0, 1)
    unstaged: str = ""

    def build(self, config: VllmConfig, monkeypatch: pytest.MonkeyPatch, size: int = 1, rank: int = 0) -> nn.Module:
        """The model as rank `rank` of `size` tensor-parallel ranks."""
        self.prepare(monkeypatch)
        monkeypatch.setattr(get_tp_group(), "world_size", size)
        monkeypatch.setattr(get_tp_group(), "rank_in_group", rank)
        # The base remembers by id(model) what a stage lacks, and ids come again.
        _model_to_pp_missing_layer_names.clear()
        config.compilation_config.static_forward_context.clear()
        chosen = getattr(importlib.import_module(self.module), self.model) if self.model else None
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
            return initialize_model(vllm_config=config, model_class=chosen)

    def checkpoint(
        self, version: int, heads: int = HEADS, dtype: torch.dtype = torch.bfloat16
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The sinks of a checkpoint; each version, layer and head has a value of its own, exact in any dtype."""
        for place, layer in enumerate(self.layers):
            yield self.weight.format(layer), torch.arange(heads).to(dtype) + 16 * version + 4 * place

    def sinks(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The sink parameters that this stage of the model has."""
        names = [self.parameter.format(layer) for layer in self.layers]
        return {name: parameter for name, parameter in model.named_parameters() if name in names}

    def check(self, model: nn.Module, version: int, size: int = 1, rank: int = 0) -> None:
        """Every head of this rank has its value, and every padded head is -inf."""
        here = HEADS // size
        for (name, parameter), (_, whole) in zip(self.sinks(model).items(), self.checkpoint(version), strict=True):
            mine = whole[rank * here : (rank + 1) * here].to(parameter.dtype)
            padding = torch.full((self.padding,), float("-inf"), dtype=parameter.dtype)
            assert torch.equal(parameter.data, torch.cat([mine, padding])), f"{name}: {parameter.data}, not {mine}"

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[dict[str, list[tuple[int, ...]]]]:
        """The shapes handed to each sink's current weight loader meanwhile."""
        shapes: dict[str, list[tuple[int, ...]]] = {}

        def watch(name: str, parameter: nn.Parameter) -> None:
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            shapes[name] = []

            # `wraps` keeps the name and the chain by which a layerwise reload finds the loader under its own.
            @functools.wraps(loader)
            def watching(param: torch.Tensor, loaded_weight: torch.Tensor) -> object:
                shapes[name].append(tuple(loaded_weight.shape))
                return loader(param, loaded_weight)

            parameter.weight_loader = watching

        for name, parameter in self.sinks(model).items():
            watch(name, parameter)
        yield shapes

    def load(self, model: nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        """A cold load, which hands every sink over once, whole; the names it reports."""
        with self.watched(model) as shapes:
            loaded = model.load_weights(weights)
        assert shapes == {name: [(HEADS,)] for name in self.sinks(model)}
        return loaded

    def reload(self, model: nn.Module, config: VllmConfig, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        """A layerwise reload in the three steps of the base, which hands every sink over once, whole."""
        with set_current_vllm_config(config):
            initialize_layerwise_reload(model)
            with self.watched(model) as shapes:
                loaded = model.load_weights(weights)
            finalize_layerwise_reload(model, config.model_config)
        assert shapes == {name: [(HEADS,)] for name in self.sinks(model)}
        return loaded
