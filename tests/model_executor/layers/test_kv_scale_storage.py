# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The host copies of the KV-cache scales stay on the host, and where they are, through
weight updates.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.quantization import kv_cache
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.reload.inventory import inventory
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

#: Host copies of the scales. Releases that have none bind constants anew instead, for
#: scales computed on the way.
SCALES = ("_k_scale_cpu", "_v_scale_cpu")
CONSTANTS = ("q_range", "k_range", "v_range")


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


def block() -> torch.nn.Sequential:
    """What a model is to the reload. The Triton backend is built on any device; no
    kernel is run.
    """
    layer = Attention(
        4, 64, 0.125, num_kv_heads=2, prefix="attn", attn_backend=TritonAttentionBackend
    )
    return torch.nn.Sequential(layer)


def test_updates_leave_every_tensor_of_a_layer_where_it_was() -> None:
    model = block()
    record_metadata_for_reloading(model)
    model[0].process_weights_after_loading(torch.bfloat16)
    first = {path: entry.storage for path, entry in inventory(model).items()}
    scales = [name for name in SCALES if f"0.{name}" in first]
    assert scales or set(first) >= {f"0.{name}" for name in CONSTANTS}

    for update in (1, 2, 3):
        for name in scales:
            getattr(model[0], name).fill_(update + 0.5)
        initialize_layerwise_reload(model)
        finalize_layerwise_reload(
            model, SimpleNamespace(dtype=torch.bfloat16)
        )  # the reload reads the dtype alone

        assert {
            path: entry.storage for path, entry in inventory(model).items()
        } == first, f"update {update}"
        assert all(getattr(model[0], name).item() == 1.0 for name in scales)


def test_pre_processed_weights_write_them_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scales come as buffers then; the rest of the step is left out."""
    layer = block()[0]
    if not hasattr(layer, SCALES[0]):
        pytest.skip("this release keeps no host copies")
    monkeypatch.setattr(kv_cache, "is_weights_pre_processed", lambda: True)
    first = {name: getattr(layer, name).data_ptr() for name in SCALES}

    for update in (1.5, 2.5):
        layer._k_scale.fill_(update)
        layer._v_scale.fill_(update * 2)
        kv_cache.BaseKVCacheMethod.process_weights_after_loading(None, layer)

        assert {name: getattr(layer, name).data_ptr() for name in SCALES} == first
        assert layer._k_scale_cpu.item() == layer._k_scale_float == update
        assert layer._v_scale_cpu.item() == layer._v_scale_float == update * 2


def test_they_are_on_the_host_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        layer = block()[0]
    if not hasattr(layer, SCALES[0]):
        pytest.skip("this release keeps no host copies")
    assert layer._k_scale.is_meta
    assert [getattr(layer, name).device.type for name in SCALES] == ["cpu", "cpu"]
