# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The fp32 sinks of the FlashInfer backend follow their parameter through every weight
update, in place.

FlashInfer reads attention sinks as fp32. The real backend class is used;
flashinfer-python imports without a GPU.
"""

import os
from collections.abc import Iterator
from types import SimpleNamespace

os.environ.setdefault(
    "VLLM_HAS_FLASHINFER_CUBIN", "1"
)  # else vLLM asks a server for kernels that only a GPU runs

import pytest
import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.v1.attention.backends import flashinfer as backend_module
from vllm.v1.attention.backends.flashinfer import FlashInferBackend, FlashInferImpl

HEADS = 4
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A default configuration, and stand-ins for a counter buffer on the GPU that some
    releases allocate at the start.

    No sink passes through that buffer.
    """
    for name in ("get_device_sm_count", "_get_multi_ctas_kv_counter_buffer"):
        if hasattr(backend_module, name):
            monkeypatch.setattr(backend_module, name, lambda *_: 1)
    with set_current_vllm_config(VllmConfig()):
        yield


def draw(seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(HEADS, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameter(dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(draw(0, dtype), requires_grad=False)


def backend(sinks: torch.Tensor | None) -> FlashInferImpl:
    return FlashInferImpl(
        num_heads=HEADS,
        head_size=64,
        scale=0.125,
        num_kv_heads=2,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        sinks=sinks,
    )


def storage(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinks_take_the_values_of_every_update(dtype: torch.dtype) -> None:
    sinks = parameter(dtype)
    impl = backend(sinks)
    impl.process_weights_after_loading(torch.bfloat16)
    assert torch.equal(impl.sinks, draw(0, dtype).float())

    for update in (1, 2, 3):
        sinks.copy_(draw(update, dtype))
        impl.process_weights_after_loading(torch.bfloat16)
        fresh = backend(sinks)
        fresh.process_weights_after_loading(torch.bfloat16)

        assert torch.equal(impl.sinks, draw(update, dtype).float()), f"update {update}"
        assert torch.equal(impl.sinks, fresh.sinks), f"update {update}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinks_stay_where_a_captured_graph_reads_them(dtype: torch.dtype) -> None:
    sinks = parameter(dtype)
    impl = backend(sinks)
    impl.process_weights_after_loading(torch.bfloat16)
    captured = impl.sinks
    first = storage(captured)
    assert captured.dtype == torch.float32

    for update in (1, 2, 3):
        sinks.copy_(draw(update, dtype))
        impl.process_weights_after_loading(torch.bfloat16)

        assert storage(impl.sinks) == first, f"update {update}"
        assert torch.equal(captured, draw(update, dtype).float()), f"update {update}"


def test_fp32_sinks_are_read_from_their_parameter() -> None:
    sinks = parameter(torch.float32)
    impl = backend(sinks)

    for _ in range(2):
        impl.process_weights_after_loading(torch.bfloat16)
        assert impl.sinks.data_ptr() == sinks.data_ptr()


def test_a_layer_without_sinks_stays_without() -> None:
    impl = backend(None)

    for _ in range(2):
        impl.process_weights_after_loading(torch.bfloat16)
        assert impl.sinks is None


class SinkBlock(torch.nn.Module):
    """What a model with sinks is to the reload: a parameter, and an attention layer
    that was given it.
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.sinks = parameter(dtype)
        self.attn = Attention(
            HEADS,
            64,
            0.125,
            num_kv_heads=2,
            prefix="attn",
            attn_backend=FlashInferBackend,
            sinks=self.sinks,
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layerwise_reload_refreshes_the_sinks_in_place(dtype: torch.dtype) -> None:
    block = SinkBlock(dtype)
    record_metadata_for_reloading(block)
    block.attn.process_weights_after_loading(torch.bfloat16)
    first = storage(block.attn.impl.sinks)

    for update in (1, 2, 3):
        initialize_layerwise_reload(block)
        block.sinks.weight_loader(block.sinks, draw(update, dtype))
        finalize_layerwise_reload(
            block, SimpleNamespace(dtype=torch.bfloat16)
        )  # the reload reads the dtype alone

        assert torch.equal(block.attn.impl.sinks, draw(update, dtype).float()), (
            f"update {update}"
        )
        assert storage(block.attn.impl.sinks) == first, f"update {update}"
