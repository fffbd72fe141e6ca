# SPDX-License-Identifier: Apache-2.0
"""Attention sinks through the real models, their real `load_weights` and the base's own layerwise reload.

Every model is the real class at tiny dimensions. Two things stand in for hardware: the tensor-parallel group of the one
process is told its size and rank, and what each row's `prepare` names. Nothing here reads experts or runs a forward
pass.
"""

import functools
import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.models.attention_sink import deepseek_v4, gpt_oss, laguna
from tests.models.attention_sink.harness import HEADS, Row
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    get_pp_group,
    init_distributed_environment,
)
from vllm.distributed.parallel_state import ensure_model_parallel_initialized
from vllm.engine.arg_utils import EngineArgs

ROWS = gpt_oss.ROWS | laguna.ROWS | deepseek_v4.ROWS
RANKS = [(1, 0), (2, 0), (2, 1)]

Build = Callable[..., tuple[nn.Module, VllmConfig]]


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """The gloo groups of a world of one."""
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    yield
    destroy_model_parallel()
    destroy_distributed_environment()


@pytest.fixture(params=ROWS)
def row(request: pytest.FixtureRequest) -> Row:
    """Each model that this base has."""
    row = ROWS[request.param]
    if not importlib.util.find_spec(row.module):
        pytest.skip(f"this base has no {row.module}")
    return row


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], VllmConfig]:
    @functools.cache
    def config(text: str) -> VllmConfig:
        folder: Path = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(text)
        arguments = EngineArgs(
            model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=128
        )
        return arguments.create_engine_config()

    return config


@pytest.fixture
def build(configs: Callable[[str], VllmConfig], row: Row, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Builds the row's model as rank `rank` of `size` tensor-parallel ranks."""

    def build(size: int = 1, rank: int = 0) -> tuple[nn.Module, VllmConfig]:
        config = configs(json.dumps(row.config))
        return row.build(config, monkeypatch, size, rank), config

    return build


@pytest.mark.parametrize("size,rank", RANKS)
def test_every_load_sets_the_heads_of_this_rank_in_place(build: Build, row: Row, size: int, rank: int) -> None:
    model, config = build(size, rank)
    made = row.sinks(model)
    assert len(made) == len(row.layers)
    for parameter in made.values():
        assert not parameter.requires_grad
        assert (parameter == float("-inf")).all(), "a head that was never loaded has no effect"
    addresses = {name: parameter.data_ptr() for name, parameter in made.items()}

    assert row.load(model, row.checkpoint(1)) == set(made)
    row.check(model, 1, size, rank)
    for version in (2, 3):
        assert row.reload(model, config, row.checkpoint(version)) == set(made)
        row.check(model, version, size, rank)
        assert {name: parameter.data_ptr() for name, parameter in row.sinks(model).items()} == addresses


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_checkpoint_of_another_dtype_is_cast(build: Build, row: Row, dtype: torch.dtype) -> None:
    model, config = build()
    row.load(model, row.checkpoint(1, dtype=dtype))
    row.check(model, 1)
    row.reload(model, config, row.checkpoint(2, dtype=dtype))
    row.check(model, 2)


def test_a_loader_set_after_construction_is_used(build: Build, row: Row) -> None:
    model, _ = build(2, 1)
    handed: list[torch.Tensor] = []
    for parameter in row.sinks(model).values():
        parameter.weight_loader = lambda param, loaded_weight: handed.append(loaded_weight)
    model.load_weights(row.checkpoint(1))
    assert [tuple(tensor.shape) for tensor in handed] == [(HEADS,)] * len(row.layers)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_pipeline_stage_without_the_layer_skips_it(
    build: Build, row: Row, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stage not in row.stages:
        pytest.skip(row.unstaged)
    monkeypatch.setattr(get_pp_group(), "world_size", 2)
    monkeypatch.setattr(get_pp_group(), "rank_in_group", stage)
    model, _ = build()
    name = row.parameter.format(row.layers[stage])
    assert list(row.sinks(model)) == [name]
    assert row.load(model, row.checkpoint(1)) == {name}
    assert row.sinks(model)[name].tolist()[:HEADS] == list(row.checkpoint(1))[stage][1].tolist()


@pytest.mark.parametrize("heads", [3, 6, 2])
def test_heads_of_another_model_are_refused(build: Build, row: Row, heads: int) -> None:
    model, _ = build(2, 1)
    name = re.escape(row.parameter.format(row.layers[0]))
    with pytest.raises(ValueError, match=rf"{name}: {heads} heads"):
        model.load_weights(row.checkpoint(1, heads=heads))


def test_a_tensor_of_another_rank_is_refused(build: Build, row: Row) -> None:
    model, _ = build()
    name = re.escape(row.parameter.format(row.layers[0]))
    with pytest.raises(ValueError, match=rf"{name}: .* shape \(4, 1\)"):
        model.load_weights((name, sink[:, None]) for name, sink in row.checkpoint(1))
