# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tensors that MLA derives from kv_b_proj keep their storage through weight updates and
take the new values.

Decode reads W_UV and W_UK_T, never kv_b_proj: a captured graph holds their addresses.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.kernels import linear as linear_kernels
from vllm.model_executor.kernels.linear.scaled_mm.triton import (
    TritonFp8BlockScaledMMKernel,
)
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.attention import MLAAttention, mla_attention
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms.interface import PlatformEnum
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend

HEADS, NOPE, ROPE, VALUE, RANK = 4, 16, 8, 24, 32
BF16 = torch.bfloat16


class NoPrefill:
    """Stands for the prefill kernels, which need a GPU; only decode reads the derived
    tensors.
    """

    def __init__(self, **_: object):
        pass


@pytest.fixture(autouse=True)
def accelerator_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """One rank, the Triton MLA backend whatever the platform, and linears that keep the
    checkpoint's layout.

    Both are what a GPU has: there MLA is served, and an unquantized linear keeps its
    weight.
    """
    monkeypatch.setattr(
        mla_attention, "get_attn_backend", lambda *_, **__: TritonMLABackend
    )
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda _: NoPrefill)
    monkeypatch.setattr(
        layer_utils, "dispatch_cpu_unquantized_gemm", lambda *_, **__: None
    )
    # get_model empties an accelerator cache, which raises outside a worker where there
    # is no accelerator.
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tmp_path}/group", 0, "gloo")
        initialize_model_parallel(1, 1)
    yield
    cleanup_dist_env_and_memory()
    _ROPE_DICT.clear()


def derived(layer: MLAAttention) -> dict[str, torch.Tensor]:
    return {"W_UV": layer.W_UV, "W_UK_T": layer.W_UK_T}


def storage(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[object, ...]]:
    return {
        name: (t.data_ptr(), t.shape, t.stride(), t.dtype)
        for name, t in tensors.items()
    }


def assert_same_bits(
    got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]
) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name].float(), tensor.float()), name


def draw(seed: int, dtype: torch.dtype) -> torch.Tensor:
    shape = (HEADS * (NOPE + VALUE), RANK)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def mla_layer(weight: torch.Tensor) -> MLAAttention:
    """One attention layer over one real kv_b_proj, loaded with `weight` and processed
    for bf16 activations.
    """
    with set_current_vllm_config(VllmConfig()):
        projection = ColumnParallelLinear(
            RANK,
            HEADS * (NOPE + VALUE),
            bias=False,
            params_dtype=weight.dtype,
            prefix="kv_b_proj",
        )
        layer = MLAAttention(
            num_heads=HEADS,
            scale=0.2,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE,
            v_head_dim=VALUE,
            q_lora_rank=None,
            kv_lora_rank=RANK,
            kv_b_proj=projection,
            prefix="attn",
        )
        load(layer, weight)
    return layer


def load(layer: MLAAttention, weight: torch.Tensor) -> None:
    layer.kv_b_proj.weight.data.copy_(weight)
    layer.process_weights_after_loading(BF16)


@pytest.mark.parametrize(
    "stored", [torch.float32, BF16], ids=["fp32-weights", "bf16-weights"]
)
def test_derived_weights_keep_their_storage(stored: torch.dtype) -> None:
    layer = mla_layer(draw(0, stored))
    captured = derived(layer)
    first = storage(captured)
    assert {t.dtype for t in captured.values()} == {BF16}

    for update in (1, 2, 3):
        load(layer, draw(update, stored))
        want = derived(mla_layer(draw(update, stored)))

        assert storage(derived(layer)) == first, f"update {update}"
        assert_same_bits(derived(layer), want)
        assert_same_bits(captured, want)


def save_deepseek(path: Path, seed: int, fp8: bool) -> Path:
    """A DeepSeek-V2 checkpoint of two dense layers in bf16, or in the block-wise fp8
    that DeepSeek publishes.
    """
    torch.manual_seed(seed)
    config = DeepseekV2Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=None,
        kv_lora_rank=RANK,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUE,
        max_position_embeddings=128,
        initializer_range=0.1,
    )
    DeepseekV2ForCausalLM(config).to(BF16).save_pretrained(
        path, safe_serialization=True
    )
    if fp8:
        quantise(path)
    return path


def quantise(path: Path) -> None:
    """Turn the checkpoint's linears into fp8 with one fp32 scale for each 8x8 block."""
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name]:
        rows, columns = tensors[name].shape
        blocks = tensors[name].float().view(rows // 8, 8, columns // 8, 8)
        scale = (
            blocks.abs().amax(dim=(1, 3), keepdim=True)
            / torch.finfo(torch.float8_e4m3fn).max
        )
        tensors[name] = (blocks / scale).view(rows, columns).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale[:, 0, :, 0].contiguous()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [8, 8],
    }
    (path / "config.json").write_text(json.dumps(config))


class Served:
    """A model as the worker loads it, with the real layerwise reload."""

    def __init__(self, checkpoint: Path):
        _ROPE_DICT.clear()  # else two models share one rotary embedding
        self.config = EngineArgs(
            model=str(checkpoint),
            dtype="bfloat16",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=64,
        ).create_engine_config()
        with set_current_vllm_config(self.config):
            self.model = get_model(vllm_config=self.config)

    def update(self, checkpoint: Path) -> None:
        with set_current_vllm_config(self.config), torch.no_grad():
            initialize_layerwise_reload(self.model)
            self.model.load_weights(
                iter(load_file(checkpoint / "model.safetensors").items())
            )
            finalize_layerwise_reload(self.model, self.config.model_config)

    def derived(self) -> dict[str, torch.Tensor]:
        layers = [
            (path, m)
            for path, m in self.model.named_modules()
            if isinstance(m, MLAAttention)
        ]
        assert len(layers) == 2
        return {
            f"{path}.{name}": tensor
            for path, layer in layers
            for name, tensor in derived(layer).items()
        }


@pytest.fixture(params=[False, True], ids=["bf16", "block-fp8"])
def checkpoints(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Path]:
    # A CPU has no block-wise fp8 kernel without AMX; the Triton one is prepared here,
    # and never launched.
    monkeypatch.setitem(
        linear_kernels._POSSIBLE_FP8_BLOCK_KERNELS,
        PlatformEnum.CPU,
        [TritonFp8BlockScaledMMKernel],
    )
    monkeypatch.setattr(
        TritonFp8BlockScaledMMKernel, "is_supported", lambda *_: (True, None)
    )
    return (
        save_deepseek(tmp_path / "A", seed=1, fp8=request.param),
        save_deepseek(tmp_path / "B", seed=2, fp8=request.param),
    )


def test_layerwise_reload_keeps_derived_weights_in_place(
    checkpoints: tuple[Path, Path],
) -> None:
    a, b = checkpoints
    fresh = {checkpoint: Served(checkpoint).derived() for checkpoint in checkpoints}
    assert not any(
        torch.equal(tensor, fresh[b][name]) for name, tensor in fresh[a].items()
    ), "A and B must differ"
    warm = Served(a)
    captured = warm.derived()
    first = storage(captured)

    for update, checkpoint in enumerate((b, a, b), start=1):
        warm.update(checkpoint)

        assert storage(warm.derived()) == first, f"update {update}"
        assert_same_bits(warm.derived(), fresh[checkpoint])
        assert_same_bits(captured, fresh[checkpoint])
