# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The factory and the loader of attention sinks, on their own."""

import inspect
import math

import pytest
import torch
from torch import nn

from vllm.model_executor.model_loader import attention_sink
from vllm.model_executor.model_loader.attention_sink import new_sink
from vllm.model_executor.model_loader.reload import utils
from vllm.model_executor.model_loader.reload.meta import (
    get_numel_loaded,
    materialize_meta_tensor,
    to_meta_tensor,
)

INF = math.inf


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch):
    """Tells the loader the tensor-parallel size and rank, which need a process group
    otherwise.
    """

    def ranks(size: int, rank: int = 0) -> None:
        monkeypatch.setattr(
            attention_sink, "get_tensor_model_parallel_world_size", lambda: size
        )
        monkeypatch.setattr(
            attention_sink, "get_tensor_model_parallel_rank", lambda: rank
        )

    ranks(1)
    return ranks


def load(sink: torch.Tensor, *heads: float, dtype: torch.dtype = torch.float32) -> None:
    sink.weight_loader(sink, torch.tensor(heads, dtype=dtype))


def test_a_new_sink_has_no_effect() -> None:
    sink = new_sink(2, padded_heads=5, dtype=torch.float16)
    assert isinstance(sink, nn.Parameter) and not sink.requires_grad
    assert sink.dtype == torch.float16
    assert sink.tolist() == [-INF] * 5


def test_the_dtype_is_the_default_one_unless_given() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert new_sink(2).dtype == torch.bfloat16
        assert new_sink(2, dtype=torch.float32).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "size,rank,expected",
    [(1, 0, [1, 2, 3, 4]), (2, 0, [1, 2]), (2, 1, [3, 4]), (4, 3, [4])],
)
@pytest.mark.parametrize("padding", [0, 3])
def test_a_rank_gets_its_heads_and_padding_stays_without_effect(
    ranks, size, rank, expected, padding
) -> None:
    ranks(size, rank)
    sink = new_sink(len(expected), padded_heads=len(expected) + padding)
    address = sink.data_ptr()
    load(sink, 1, 2, 3, 4)
    assert sink.tolist() == expected + [-INF] * padding
    sink.data.fill_(math.nan)
    load(sink, 1, 2, 3, 4)
    assert sink.tolist() == expected + [-INF] * padding, "padding is set at every load"
    assert sink.data_ptr() == address


def test_a_rank_owns_heads_by_the_checkpoint_not_by_the_padded_parameter(ranks) -> None:
    ranks(2, 1)
    sink = new_sink(2, padded_heads=4)
    load(sink, 1, 2, 3, 4)
    assert sink.tolist() == [3, 4, -INF, -INF]


OTHER_MODEL = (
    "layer.sinks: {0} heads among 1 tensor-parallel ranks make {0} a rank, "
    "but the model was built for 4"
)


@pytest.mark.parametrize(
    "size,loaded,rule",
    [
        (
            2,
            [1.0] * 3,
            "layer.sinks: 3 heads do not divide among 2 tensor-parallel ranks",
        ),
        (1, [1.0] * 6, OTHER_MODEL.format(6)),
        (1, [1.0] * 2, OTHER_MODEL.format(2)),
        (1, [], OTHER_MODEL.format(0)),
        (
            1,
            [[1.0] * 4],
            r"layer.sinks: a sink has one dimension, heads, but shape \(1, 4\) has 2",
        ),
        (1, 1.0, r"layer.sinks: a sink has one dimension, heads, but shape \(\) has 0"),
    ],
)
@pytest.mark.parametrize("padding", [0, 4])
def test_the_wrong_shape_is_refused_and_nothing_written(
    ranks, size, loaded, rule, padding
) -> None:
    ranks(size)
    sink = new_sink(4, padded_heads=4 + padding, name="layer.sinks")
    with pytest.raises(ValueError, match=rule) as error:
        sink.weight_loader(sink, torch.tensor(loaded))
    assert "\n" not in str(error.value)
    assert sink.tolist() == [-INF] * (4 + padding)


def test_a_range_wider_than_a_parameter_that_tells_no_heads_is_refused(ranks) -> None:
    plain = torch.zeros(2)
    with pytest.raises(ValueError, match=r"attention sink: 4 heads .* built for 2"):
        attention_sink.load_sink(plain, torch.ones(4))
    attention_sink.load_sink(plain, torch.ones(1))
    assert plain.tolist() == [1, -INF]


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("held", FLOATS)
@pytest.mark.parametrize("sent", [*FLOATS, torch.float8_e4m3fn])
def test_values_that_survive_the_cast_are_loaded(
    ranks, sent: torch.dtype, held: torch.dtype
) -> None:
    sink = new_sink(6, dtype=held)
    load(sink, 0.5, -3, 0, -0.0, 240, math.nan, dtype=sent)
    assert sink.tolist()[:5] == [0.5, -3, 0, 0, 240] and math.isnan(sink[5])
    assert torch.signbit(sink[3])


def test_infinity_survives_the_cast(ranks) -> None:
    sink = new_sink(2, dtype=torch.bfloat16)
    load(sink, -INF, INF)
    assert sink.tolist() == [-INF, INF]


@pytest.mark.parametrize(
    "value,sent,held",
    [
        (1 + 2**-8, torch.float32, torch.bfloat16),
        (1 + 2**-11, torch.float32, torch.float16),
        (65536.0, torch.bfloat16, torch.float16),
        (2.0**-30, torch.bfloat16, torch.float16),
        (1 + 2**-10, torch.float16, torch.bfloat16),
        (1 + 2**-40, torch.float64, torch.float32),
        (2**24 + 1, torch.int64, torch.float32),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_value_that_would_change_is_refused_by_every_rank(
    ranks, value, sent, held, rank
) -> None:
    ranks(2, rank)
    sink = new_sink(2, dtype=held, name="layer.sinks")
    with pytest.raises(
        ValueError,
        match=f"layer.sinks: 1 of 4 heads change when cast from {sent} to {held}",
    ) as error:
        load(sink, 1, value, 2, 2, dtype=sent)
    assert "\n" not in str(error.value)
    assert sink.tolist() == [-INF] * 2


@pytest.mark.parametrize("padding", [0, 3])
def test_a_meta_parameter_counts_what_it_would_take(ranks, padding: int) -> None:
    """A layerwise reload runs the loader on meta to count, then once more on memory
    that nobody set.
    """
    ranks(2, 1)
    layer = nn.Module()
    layer.sink = new_sink(2, padded_heads=2 + padding, name="layer.sink")
    meta = to_meta_tensor(layer.sink)

    whole = torch.tensor([1.0, 2, 3, 4])
    arguments = inspect.signature(meta.weight_loader).bind(meta, whole)
    counted, _ = get_numel_loaded(meta.weight_loader, arguments)
    assert counted == 2

    real = materialize_meta_tensor(meta)
    real.fill_(math.nan)
    real.weight_loader(real, whole)
    assert real.tolist() == [3, 4] + [-INF] * padding
    with pytest.raises(ValueError, match=r"layer\.sink: 3 heads"):
        meta.weight_loader(meta, whole[:3])


def test_a_layer_is_complete_without_its_padding(ranks) -> None:
    if not hasattr(utils, "get_tensor_load_numel"):
        pytest.skip("this base counts padding")
    layer = nn.Module()
    layer.sink = new_sink(2, padded_heads=5)
    assert utils.get_layer_size(layer) == 2


def test_a_checkpoint_on_meta_is_taken_for_its_shape(ranks) -> None:
    """A trial run has no values to look at."""
    sink = to_meta_tensor(new_sink(4, dtype=torch.bfloat16))
    sink.weight_loader(sink, torch.empty(4, dtype=torch.float32, device="meta"))


def test_the_checkpoint_tensor_stays_as_it_is(ranks) -> None:
    ranks(2, 1)
    whole = torch.tensor([1.0, 2, 3, 4])
    sink = new_sink(2)
    sink.weight_loader(sink, whole)
    sink.data.zero_()
    assert whole.tolist() == [1, 2, 3, 4]
