# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""MLA's fp8 weights for AITER, and its keys gathered for decode context parallelism,
stay where a graph reads them.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packaging.version import Version

import vllm
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.attention import MLAAttention, mla_attention
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend

HEADS, NOPE, ROPE, VALUE, RANK = 2, 24, 8, 40, 48
AITER = {"W_K", "W_K_scale", "W_V", "W_V_scale"}
GATHERED = {"W_UK_T", "W_UK_T_dcp_qrep"}

FORMS = [
    pytest.param(AITER, id="aiter-fp8"),
    pytest.param(
        GATHERED,
        id="gathered-keys",
        marks=pytest.mark.skipif(
            Version(vllm.__version__) < Version("0.26"), reason="gathers no keys"
        ),
    ),
]


@pytest.fixture(autouse=True)
def layout_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank. Backends that refuse a CPU are named, and never launched; linears keep
    their weight.
    """
    monkeypatch.setattr(
        mla_attention, "get_attn_backend", lambda *_, **__: TritonMLABackend
    )
    monkeypatch.setattr(
        mla_attention, "get_mla_prefill_backend", lambda _: lambda **_: None
    )
    monkeypatch.setattr(
        layer_utils, "dispatch_cpu_unquantized_gemm", lambda *_, **__: None
    )
    monkeypatch.setattr(
        mla_attention.rocm_aiter_ops, "triton_fp8_bmm", lambda *_, **__: None
    )
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tmp_path}/group", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield
    cleanup_dist_env_and_memory()


def made(form: set[str], weight: torch.Tensor) -> MLAAttention:
    """A layer that derives the tensors of `form`, loaded with `weight`."""
    with set_current_vllm_config(VllmConfig()):
        projection = ColumnParallelLinear(
            RANK, HEADS * (NOPE + VALUE), bias=False, params_dtype=torch.bfloat16
        )
        layer = MLAAttention(
            HEADS, 0.1, NOPE, ROPE, VALUE, None, RANK, projection, prefix="attention"
        )
    layer.is_aiter_triton_fp8_bmm_enabled = form is AITER
    layer.dcp_q_replicate = form is GATHERED
    load(layer, weight)
    return layer


def load(layer: MLAAttention, weight: torch.Tensor) -> None:
    layer.kv_b_proj.weight.data.copy_(weight)
    layer.process_weights_after_loading(torch.bfloat16)


def weight(seed: int) -> torch.Tensor:
    return torch.randn(
        HEADS * (NOPE + VALUE), RANK, generator=torch.Generator().manual_seed(seed)
    ) * (seed + 1)


@pytest.mark.parametrize("form", FORMS)
def test_every_update_writes_where_a_captured_graph_reads(form: set[str]) -> None:
    layer = made(form, weight(0))
    captured = {name: getattr(layer, name).detach() for name in form}
    places = {
        name: (t.data_ptr(), t.shape, t.stride(), t.dtype)
        for name, t in captured.items()
    }

    for update in (1, 2, 3):
        before = {name: tensor.float().clone() for name, tensor in captured.items()}
        load(layer, weight(update))
        fresh = made(form, weight(update))

        for name in form:
            now = getattr(layer, name)
            assert (now.data_ptr(), now.shape, now.stride(), now.dtype) == places[
                name
            ], (name, update)
            assert torch.equal(captured[name].float(), getattr(fresh, name).float()), (
                name,
                update,
            )
            assert not torch.equal(captured[name].float(), before[name]), (name, update)
