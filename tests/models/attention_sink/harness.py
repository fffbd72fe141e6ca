# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Builds the models that have attention sinks at tiny dimensions, and loads them as a
server and a trainer do.
"""

import functools
import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    get_tp_group,
    init_distributed_environment,
)
from vllm.distributed.parallel_state import ensure_model_parallel_initialized
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models import registry
from vllm.model_executor.models.utils import _model_to_pp_missing_layer_names
from vllm.utils.torch_utils import set_default_torch_dtype

HEADS = 4
#: The tensor-parallel sizes and ranks that one process stands for in turn.
RANKS = [(1, 0), (2, 0), (2, 1)]

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


Loaded = TypeVar("Loaded")


@contextmanager
def one_process() -> Iterator[None]:
    """The gloo groups of a world of one."""
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    yield
    destroy_model_parallel()
    destroy_distributed_environment()


def stand_for(size: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell the tensor-parallel group of the one process that it is rank `rank` of
    `size`.
    """
    monkeypatch.setattr(get_tp_group(), "world_size", size)
    monkeypatch.setattr(get_tp_group(), "rank_in_group", rank)


def layerwise(
    model: nn.Module, config: VllmConfig, load: Callable[[], Loaded]
) -> Loaded:
    """What `load` returns in the middle of the base's layerwise reload."""
    with set_current_vllm_config(config):
        initialize_layerwise_reload(model)
        loaded = load()
        finalize_layerwise_reload(model, config.model_config)
    return loaded


def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    del monkeypatch


@dataclass(frozen=True, eq=False)
class Row:
    """One model that has sinks.

    `config` is its config.json; `weight` and `parameter` are what a sink is called in
    the checkpoint and in vLLM, with `{}` for the layer, and `called` is what errors
    call the first one where that is not its parameter; `layers` are the layers that
    have one. The kernel wants `dtype` (None: it does not read the sink) and at least
    `kernel_heads`. `also` are weights, by shape, that the checkpoint has besides, where
    `load_weights` itself reads them. `module` is the vLLM module that a base must have
    to have the model, `model` its class where it is not the one that vLLM picks for the
    config on a CPU, `prepare` what stands in for hardware. `stages` are the pipeline
    stages, of two with one layer each, that can be built; `unstaged` says why the
    others cannot. `engine` are further arguments of the engine.

    A drafter's `config` is its target's, and `draft` the engine's speculative config,
    in which `model` is the drafter's own config.json where it has one. `silent` says
    that its `load_weights` tells nobody what it loaded.
    """

    config: dict[str, Any] = field(repr=False)
    weight: str
    parameter: str
    module: str
    model: str = ""
    called: str = ""
    layers: tuple[int, ...] = (0, 1)
    dtype: torch.dtype | None = torch.bfloat16
    kernel_heads: int = 0
    also: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    prepare: Callable[[pytest.MonkeyPatch], None] = nothing
    stages: tuple[int, ...] = (0, 1)
    unstaged: str = ""
    draft: dict[str, Any] = field(default_factory=dict, repr=False)
    silent: bool = False
    engine: dict[str, Any] = field(default_factory=dict, repr=False)

    def is_in_base(self) -> bool:
        """Whether this base has the model, with sinks."""
        try:
            known = registry.ModelRegistry.get_supported_archs()
            return (
                find_spec(self.module) is not None
                and self.config["architectures"][0] in known
            )
        except ModuleNotFoundError:
            return False

    def configure(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, size: int = 1
    ) -> VllmConfig:
        """What the engine makes of the row's configs, written below `folder`, for
        `size` tensor-parallel ranks.
        """
        self.prepare(monkeypatch)
        # vLLM asks each class what it can do in a process of its own, which takes
        # seconds and is prepared for nothing.
        monkeypatch.setattr(registry, "_run_in_subprocess", lambda ask: ask())
        draft = dict(self.draft)
        if "model" in draft:
            draft["model"] = _written(folder / "draft", draft["model"])
        return EngineArgs(
            model=_written(folder / "model", self.config),
            speculative_config=draft or None,
            tensor_parallel_size=size,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=128,
            **self.engine,
        ).create_engine_config()

    def build(self, config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
        """The model, for the groups that are set up."""
        self.prepare(monkeypatch)
        # The base remembers by id(model) what a stage lacks, and ids come again.
        _model_to_pp_missing_layer_names.clear()
        config.compilation_config.static_forward_context.clear()
        chosen = (
            getattr(importlib.import_module(self.module), self.model)
            if self.model
            else None
        )
        drafter = config.speculative_config.draft_model_config if self.draft else None
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
            return initialize_model(
                vllm_config=config, model_class=chosen, model_config=drafter
            )

    def checkpoint(
        self, version: int, heads: int = HEADS, dtype: torch.dtype = torch.bfloat16
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The sinks of a checkpoint; each version, layer and head has a value of its
        own, exact in any dtype.
        """
        for place, layer in enumerate(self.layers):
            yield (
                self.weight.format(layer),
                torch.arange(heads).to(dtype) + 16 * version + 4 * place,
            )
        for name, shape in self.also.items():
            yield name, torch.ones(shape, dtype=dtype)

    def sinks(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The sink parameters that this stage of the model has."""
        names = [self.parameter.format(layer) for layer in self.layers]
        return {
            name: parameter
            for name, parameter in model.named_parameters()
            if name in names
        }

    def check(
        self, model: nn.Module, version: int, size: int = 1, rank: int = 0
    ) -> None:
        """Every head of this rank has its value, and every padded head is -inf."""
        here = HEADS // size
        sinks = islice(self.checkpoint(version), len(self.layers))
        for (name, parameter), (_, whole) in zip(
            self.sinks(model).items(), sinks, strict=True
        ):
            dtype = self.dtype or parameter.dtype
            mine = whole[rank * here : (rank + 1) * here].to(dtype)
            padding = torch.full(
                (max(0, self.kernel_heads - here),), float("-inf"), dtype=dtype
            )
            assert parameter.dtype == dtype, f"{name}: {parameter.dtype}, not {dtype}"
            assert torch.equal(parameter.data, torch.cat([mine, padding])), (
                f"{name}: {parameter.data}, not {mine}"
            )

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[dict[str, list[torch.Tensor]]]:
        """The tensors handed to each sink's current weight loader meanwhile."""
        handed: dict[str, list[torch.Tensor]] = {}

        def watch(name: str, parameter: nn.Parameter) -> None:
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            handed[name] = []

            # `wraps` keeps the name and the chain by which a layerwise reload finds the
            # loader under its own.
            @functools.wraps(loader)
            def watching(param: torch.Tensor, loaded_weight: torch.Tensor) -> object:
                handed[name].append(loaded_weight)
                return loader(param, loaded_weight)

            parameter.weight_loader = watching

        for name, parameter in self.sinks(model).items():
            watch(name, parameter)
        yield handed

    def load(
        self, model: nn.Module, weights: Iterator[tuple[str, torch.Tensor]]
    ) -> set[str]:
        """A load that hands every sink over once, as the checkpoint has it; the sinks
        that it reports.
        """
        sent = list(weights)
        with self.watched(model) as handed:
            loaded = model.load_weights(iter(sent))
        for name, tensors in handed.items():
            assert len(tensors) == 1 and any(
                tensors[0] is tensor for _, tensor in sent
            ), f"{name}: {tensors}"
        assert (loaded is None) == self.silent
        if loaded is None:
            return set(handed)
        return {
            name for name in loaded if name.endswith(self.weight.rpartition(".")[2])
        }

    def reload(
        self,
        model: nn.Module,
        config: VllmConfig,
        weights: Iterator[tuple[str, torch.Tensor]],
    ) -> set[str]:
        """The same in a layerwise reload."""
        return layerwise(model, config, lambda: self.load(model, weights))

    def check_every_load(
        self, model: nn.Module, config: VllmConfig, size: int, rank: int
    ) -> None:
        """A cold load and two reloads report every sink, set the heads of this rank,
        and move nothing.
        """
        made = self.sinks(model)
        addresses = {name: parameter.data_ptr() for name, parameter in made.items()}
        assert self.load(model, self.checkpoint(1)) == set(made)
        self.check(model, 1, size, rank)
        for version in (2, 3):
            assert self.reload(model, config, self.checkpoint(version)) == set(made)
            self.check(model, version, size, rank)
            assert {
                name: parameter.data_ptr()
                for name, parameter in self.sinks(model).items()
            } == addresses


def _written(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
