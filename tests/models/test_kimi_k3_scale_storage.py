# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Kimi-K3's inverse KV-cache scales stay where a captured graph reads them."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.models.kimi_k3.nvidia import mla
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend

DERIVED = ("_q_scale_inv", "_k_scale_inv", "W_UV", "W_UK_T")


@pytest.fixture(autouse=True)
def layout_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank. Backends that refuse a CPU are named, and never launched; linears keep
    their weight.
    """
    monkeypatch.setattr(mla, "get_attn_backend", lambda *_, **__: TritonMLABackend)
    monkeypatch.setattr(mla, "get_mla_prefill_backend", lambda _: lambda **_: None)
    monkeypatch.setattr(
        layer_utils, "dispatch_cpu_unquantized_gemm", lambda *_, **__: None
    )
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tmp_path}/group", 0, "gloo")
        initialize_model_parallel(1, 1)
    yield
    cleanup_dist_env_and_memory()


def block() -> torch.nn.Sequential:
    """What a model is to the reload, with linears that every load fills alike."""
    with set_current_vllm_config(VllmConfig()):
        layer = mla.MultiHeadLatentAttention(
            SimpleNamespace(rms_norm_eps=1e-6), 32, 2, 24, 8, 40, None, 48, prefix="a"
        )
    return torch.nn.Sequential(layer)


def process(layer: torch.nn.Module, q_scale: float, k_scale: float) -> None:
    """The post-load step where a checkpoint brings scales; without a quantization
    configuration it would set them to 1.
    """
    layer._q_scale.fill_(q_scale)
    layer._k_scale.fill_(k_scale)
    layer.process_weights_after_loading(torch.float32)


def test_updates_write_the_inverse_scales_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mla, "should_load_quant_weights", lambda _: True)
    layer = block()[0]
    torch.nn.init.normal_(layer.kv_b_proj.weight)
    process(layer, 2.0, 4.0)
    captured = {name: getattr(layer, name) for name in DERIVED}
    first = {name: tensor.data_ptr() for name, tensor in captured.items()}

    for q_scale, k_scale in ((4.0, 8.0), (0.5, 0.25), (1.0, 16.0)):
        process(layer, q_scale, k_scale)

        assert {name: getattr(layer, name).data_ptr() for name in DERIVED} == first
        assert captured["_q_scale_inv"].tolist() == [1 / q_scale]
        assert captured["_k_scale_inv"].tolist() == [1 / k_scale]


def test_a_layerwise_reload_leaves_them_where_they_are() -> None:
    model = block()
    torch.nn.init.normal_(model[0].kv_b_proj.weight)
    record_metadata_for_reloading(model)
    model[0].process_weights_after_loading(torch.float32)
    first = {name: getattr(model[0], name).data_ptr() for name in DERIVED}

    for update in (1, 2, 3):
        captured = model[0]._k_scale_inv
        captured.fill_(update + 0.5)
        initialize_layerwise_reload(model)
        finalize_layerwise_reload(
            model, SimpleNamespace(dtype=torch.float32)
        )  # the reload reads the dtype alone

        found = {name: getattr(model[0], name).data_ptr() for name in DERIVED}
        assert found == first, f"update {update}"
        assert captured.tolist() == [1.0]
