# SPDX-License-Identifier: Apache-2.0
"""Attention sinks through the real models, their real `load_weights` and the base's own layerwise reload.

Every model is the real class at tiny dimensions. Two things stand in for hardware: the tensor-parallel group of the one
process is told its size and rank, and the MXFP4 experts, whose kernels a CPU without AMX refuses, are built without a
kernel. Nothing here reads experts or runs a forward pass.
"""

import functools
import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    get_pp_group,
    get_tp_group,
    init_distributed_environment,
)
from vllm.distributed.parallel_state import ensure_model_parallel_initialized
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import _model_to_pp_missing_layer_names
from vllm.utils.torch_utils import set_default_torch_dtype

HEADS = 4
PADDING = 3

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
GPT_OSS = TINY | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 4}
FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
QUARK = {
    "quant_method": "quark",
    "global_quant_config": {"weight": FP8, "input_tensors": FP8, "output_tensors": None, "bias": None},
    "layer_quant_config": {},
    "layer_type_quant_config": {},
    "kv_cache_quant_config": {},
    "exclude": ["lm_head", "re:.*attn.*", "re:.*router.*"],
    "export": {"kv_cache_group": [], "pack_method": "order"},
}
LAGUNA = TINY | {
    "architectures": ["LagunaForCausalLM"],
    "model_type": "laguna",
    "layer_types": ["sliding_attention"] * 2,
    "swa_attention_sink_enabled": True,
    "sliding_window": 16,
    "num_attention_heads_per_layer": [HEADS] * 2,
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "mlp_layer_types": ["dense"] * 2,
    "mlp_only_layers": [0, 1],
}
DEEPSEEK_V4 = TINY | {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_key_value_heads": 1,
    "head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 2,
    "sliding_window": 16,
    "compress_ratios": [1, 1],
    "compress_rope_theta": 10000.0,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default"},
    "rms_norm_eps": 1e-6,
    "index_topk": 16,
    "index_n_heads": 4,
    "index_head_dim": 64,
    "hc_mult": 2,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 2,
    "num_hash_layers": 0,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Row:
    """One model: its config, and what its two sinks are called in the checkpoint and in vLLM (`{}` is the layer)."""

    config: dict[str, Any] = field(repr=False)
    weight: str
    parameter: str
    padding: int = 0


GPT_OSS_NAMES = ("model.layers.{}.self_attn.sinks", "model.layers.{}.attn.sinks")
DEEPSEEK_NAMES = ("layers.{}.attn.attn_sink", "model.layers.{}.attn.attn_sink")
ROWS = {
    "gpt-oss": Row(GPT_OSS, *GPT_OSS_NAMES),
    "gpt-oss-mxfp4": Row(GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}, *GPT_OSS_NAMES),
    "gpt-oss-quark": Row(GPT_OSS | {"quantization_config": QUARK}, *GPT_OSS_NAMES),
    "laguna": Row(LAGUNA, *["model.layers.{}.self_attn.sink"] * 2),
    "deepseek-v4-cpu": Row(DEEPSEEK_V4, *DEEPSEEK_NAMES),
    "deepseek-v4-cpu-padded": Row(DEEPSEEK_V4, *DEEPSEEK_NAMES, padding=PADDING),
}
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


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], VllmConfig]:
    @functools.cache
    def config(row: str) -> VllmConfig:
        folder: Path = tmp_path_factory.mktemp(row)
        (folder / "config.json").write_text(json.dumps(ROWS[row].config))
        arguments = EngineArgs(
            model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=128
        )
        return arguments.create_engine_config()

    return config


@pytest.fixture
def build(configs: Callable[[str], VllmConfig], monkeypatch: pytest.MonkeyPatch) -> Build:
    """Builds a row's model as rank `rank` of `size` tensor-parallel ranks."""

    def build(row: str, size: int = 1, rank: int = 0) -> tuple[nn.Module, VllmConfig]:
        if row.startswith("deepseek") and not importlib.util.find_spec("vllm.models.deepseek_v4.cpu"):
            pytest.skip("this base has no DeepSeek V4 on CPU")
        if row.startswith("deepseek"):
            import vllm.v1.worker.cpu.shm  # noqa: F401  the CPU worker's own stand-in for CUDA events
        if ROWS[row].padding:
            from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention as Attention

            monkeypatch.setattr(Attention, "get_padded_num_q_heads", classmethod(lambda cls, heads: heads + PADDING))
        if row == "gpt-oss-mxfp4":
            from vllm.model_executor.layers.quantization import mxfp4

            monkeypatch.setattr(mxfp4, "select_mxfp4_moe_backend", lambda moe: (mxfp4.Mxfp4MoeBackend.NONE, None))
        monkeypatch.setattr(get_tp_group(), "world_size", size)
        monkeypatch.setattr(get_tp_group(), "rank_in_group", rank)
        # The base remembers by id(model) what a stage lacks, and ids come again.
        _model_to_pp_missing_layer_names.clear()
        config = configs(row)
        config.compilation_config.static_forward_context.clear()
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
            return initialize_model(vllm_config=config), config

    return build


def checkpoint(row: str, version: int, heads: int = HEADS, dtype: torch.dtype = torch.bfloat16):
    """The sinks of a row's checkpoint; each version, layer and head has a value of its own, exact in any dtype."""
    for layer in range(2):
        yield ROWS[row].weight.format(layer), torch.arange(heads).to(dtype) + 16 * version + 4 * layer


def sinks(model: nn.Module, row: str) -> dict[str, nn.Parameter]:
    names = [ROWS[row].parameter.format(layer) for layer in range(2)]
    return {name: parameter for name, parameter in model.named_parameters() if name in names}


@contextmanager
def watched(model: nn.Module, row: str) -> Iterator[dict[str, list[tuple[int, ...]]]]:
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

    for name, parameter in sinks(model, row).items():
        watch(name, parameter)
    yield shapes


def load(model: nn.Module, row: str, weights) -> set[str]:
    """A cold load, which hands every sink over once, whole."""
    with watched(model, row) as shapes:
        loaded = model.load_weights(weights)
    assert shapes == {name: [(HEADS,)] for name in sinks(model, row)}
    return loaded


def reload(model: nn.Module, config: VllmConfig, row: str, weights) -> set[str]:
    """A layerwise reload in the three steps of the base, which hands every sink over once, whole."""
    with set_current_vllm_config(config):
        initialize_layerwise_reload(model)
        with watched(model, row) as shapes:
            loaded = model.load_weights(weights)
        finalize_layerwise_reload(model, config.model_config)
    assert shapes == {name: [(HEADS,)] for name in sinks(model, row)}
    return loaded


def check(model: nn.Module, row: str, version: int, size: int, rank: int) -> None:
    """Every head of this rank has its value, and every padded head is -inf."""
    here = HEADS // size
    for (name, parameter), (_, whole) in zip(sinks(model, row).items(), checkpoint(row, version), strict=True):
        mine = whole[rank * here : (rank + 1) * here].to(parameter.dtype)
        padding = torch.full((ROWS[row].padding,), float("-inf"), dtype=parameter.dtype)
        assert torch.equal(parameter.data, torch.cat([mine, padding])), f"{name}: {parameter.data}, not {mine}"


@pytest.mark.parametrize("size,rank", RANKS)
@pytest.mark.parametrize("row", ROWS)
def test_every_load_sets_the_heads_of_this_rank_in_place(build: Build, row: str, size: int, rank: int) -> None:
    model, config = build(row, size, rank)
    made = sinks(model, row)
    assert len(made) == 2
    for parameter in made.values():
        assert not parameter.requires_grad
        assert (parameter == float("-inf")).all(), "a head that was never loaded has no effect"
    addresses = {name: parameter.data_ptr() for name, parameter in made.items()}

    assert load(model, row, checkpoint(row, 1)) == set(made)
    check(model, row, 1, size, rank)
    for version in (2, 3):
        assert reload(model, config, row, checkpoint(row, version)) == set(made)
        check(model, row, version, size, rank)
        assert {name: parameter.data_ptr() for name, parameter in sinks(model, row).items()} == addresses


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("row", ROWS)
def test_a_checkpoint_of_another_dtype_is_cast(build: Build, row: str, dtype: torch.dtype) -> None:
    model, config = build(row)
    load(model, row, checkpoint(row, 1, dtype=dtype))
    check(model, row, 1, 1, 0)
    reload(model, config, row, checkpoint(row, 2, dtype=dtype))
    check(model, row, 2, 1, 0)


@pytest.mark.parametrize("row", ROWS)
def test_a_loader_set_after_construction_is_used(build: Build, row: str) -> None:
    model, _ = build(row, 2, 1)
    handed: list[torch.Tensor] = []
    for parameter in sinks(model, row).values():
        parameter.weight_loader = lambda param, loaded_weight: handed.append(loaded_weight)
    model.load_weights(checkpoint(row, 1))
    assert [tuple(tensor.shape) for tensor in handed] == [(HEADS,)] * 2


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("row", ROWS)
def test_a_pipeline_stage_without_the_layer_skips_it(
    build: Build, row: str, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if row == "gpt-oss-quark" and stage == 1:
        pytest.skip("the Quark path of the base looks into layer 0 on every stage")
    monkeypatch.setattr(get_pp_group(), "world_size", 2)
    monkeypatch.setattr(get_pp_group(), "rank_in_group", stage)
    model, _ = build(row)
    name = ROWS[row].parameter.format(stage)
    assert list(sinks(model, row)) == [name]
    assert load(model, row, checkpoint(row, 1)) == {name}
    assert sinks(model, row)[name].tolist()[:HEADS] == list(checkpoint(row, 1))[stage][1].tolist()


@pytest.mark.parametrize("heads", [3, 6, 2])
@pytest.mark.parametrize("row", ROWS)
def test_heads_of_another_model_are_refused(build: Build, row: str, heads: int) -> None:
    model, _ = build(row, 2, 1)
    with pytest.raises(ValueError, match=rf"layers\.0\.\w+\.\w*sinks?: {heads} heads"):
        model.load_weights(checkpoint(row, 1, heads=heads))


@pytest.mark.parametrize("row", ROWS)
def test_a_tensor_of_another_rank_is_refused(build: Build, row: str) -> None:
    model, _ = build(row)
    with pytest.raises(ValueError, match=r"layers\.0\.\w+\.\w*sinks?: .* shape \(4, 1\)"):
        model.load_weights((name, sink[:, None]) for name, sink in checkpoint(row, 1))
