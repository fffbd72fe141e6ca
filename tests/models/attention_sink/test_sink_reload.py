# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention sinks through the real models, their real `load_weights` and the base's own
layerwise reload.

Every model is the real class at tiny dimensions. Two things stand in for hardware: the
tensor-parallel group of the one process is told its size and rank, and what each row's
`prepare` names. Nothing here reads experts or runs a forward pass.
"""

import functools
import logging
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from packaging.version import Version
from torch import nn

import vllm
from tests.models.attention_sink.harness import (
    HEADS,
    RANKS,
    Row,
    one_process,
    stand_for,
)
from tests.models.attention_sink.rows import ROWS
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group

Build = Callable[..., tuple[nn.Module, VllmConfig]]


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with one_process():
        yield


@pytest.fixture(params=ROWS)
def row(request: pytest.FixtureRequest) -> Row:
    """Each model that this base has."""
    row = ROWS[request.param]
    if not row.is_in_base():
        pytest.skip(f"this base has no {row.module}")
    return row


@pytest.fixture(scope="module")
def configs(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Row, int], VllmConfig]:
    @functools.cache
    def config(row: Row, size: int) -> VllmConfig:
        with pytest.MonkeyPatch.context() as monkeypatch:
            return row.configure(tmp_path_factory.mktemp("configs"), monkeypatch, size)

    return config


@pytest.fixture
def build(
    configs: Callable[[Row, int], VllmConfig], row: Row, monkeypatch: pytest.MonkeyPatch
) -> Build:
    """Builds the row's model as rank `rank` of `size` tensor-parallel ranks."""

    def build(size: int = 1, rank: int = 0) -> tuple[nn.Module, VllmConfig]:
        config = configs(row, size)
        stand_for(size, rank, monkeypatch)
        return row.build(config, monkeypatch), config

    return build


@pytest.mark.skipif(
    Version(vllm.__version__) < Version("0.31"), reason="has some of the models only"
)
def test_this_release_has_every_model() -> None:
    """A row whose module has another name is passed over by all other tests."""
    assert [name for name, row in ROWS.items() if not row.is_in_base()] == []


@pytest.mark.parametrize("size,rank", RANKS)
def test_every_load_sets_the_heads_of_this_rank_in_place(
    build: Build, row: Row, size: int, rank: int
) -> None:
    model, config = build(size, rank)
    made = row.sinks(model)
    assert len(made) == len(row.layers)
    for parameter in made.values():
        assert not parameter.requires_grad
        assert (parameter == float("-inf")).all(), (
            "a head that was never loaded has no effect"
        )
    row.check_every_load(model, config, size, rank)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_checkpoint_of_another_dtype_is_cast(
    build: Build, row: Row, dtype: torch.dtype
) -> None:
    model, config = build()
    row.load(model, row.checkpoint(1, dtype=dtype))
    row.check(model, 1)
    row.reload(model, config, row.checkpoint(2, dtype=dtype))
    row.check(model, 2)


def test_a_loader_set_after_construction_is_used(build: Build, row: Row) -> None:
    model, _ = build(2, 1)
    handed: list[torch.Tensor] = []
    for parameter in row.sinks(model).values():
        parameter.weight_loader = lambda param, loaded_weight: handed.append(
            loaded_weight
        )
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
    said: list[str] = []
    handler = logging.Handler(logging.INFO)
    monkeypatch.setattr(
        handler, "emit", lambda record: said.append(record.getMessage())
    )
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [handler])
    assert row.load(model, row.checkpoint(1)) == {name}
    assert not [line for line in said if "sink" in line]
    assert (
        row.sinks(model)[name].tolist()[:HEADS]
        == list(row.checkpoint(1))[stage][1].tolist()
    )


@pytest.mark.parametrize("heads", [3, 6, 2])
def test_heads_of_another_model_are_refused(build: Build, row: Row, heads: int) -> None:
    model, _ = build(2, 1)
    name = re.escape(row.called or row.parameter.format(row.layers[0]))
    with pytest.raises(ValueError, match=rf"{name}: {heads} heads"):
        model.load_weights(row.checkpoint(1, heads=heads))


def test_a_tensor_of_another_rank_is_refused(build: Build, row: Row) -> None:
    model, _ = build()
    name = re.escape(row.called or row.parameter.format(row.layers[0]))
    with pytest.raises(ValueError, match=rf"{name}: .* shape \(4, 1\)"):
        model.load_weights((name, sink[:, None]) for name, sink in row.checkpoint(1))


@pytest.mark.parametrize("row", ["hy-v4", "hy-v4-amd", "hy-v4-mtp"], indirect=True)
def test_what_hy_v4_pads_for_its_kernel_is_the_last_load(
    build: Build, row: Row
) -> None:
    model, config = build()
    kernels = [
        module.mla_attn.impl
        for module in model.modules()
        if hasattr(module, "mla_attn")
    ]
    assert len(kernels) == len(row.layers)
    row.load(model, row.checkpoint(1))
    row.reload(model, config, row.checkpoint(2))
    for kernel, (_, whole) in zip(kernels, row.checkpoint(2), strict=True):
        padded = kernel._sinks_for_query(
            torch.zeros(1, HEADS, 1), head_dim=1, kernel_heads=HEADS + 3
        )
        assert torch.equal(
            padded, torch.cat([whole.float(), torch.full((3,), float("-inf"))])
        )
