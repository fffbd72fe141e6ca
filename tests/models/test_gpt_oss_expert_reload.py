# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""GPT-OSS experts through the real model, its real `load_weights` and the base's own
layerwise reload.

The model is the real class at tiny dimensions, in each of its loading paths. Three
things stand in for hardware: the tensor-parallel group of the one process is told its
size and rank; MXFP4 experts, whose kernels a CPU without AMX refuses, are built without
a kernel; and the experts' post-load step, which would put them in the layout of a CPU
kernel, is left out, so that parameters are compared as the checkpoint has them.
"""

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

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
from vllm.utils.torch_utils import set_default_torch_dtype

EXPERTS, HIDDEN, BLOCK = 4, 64, 32

CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
}


def inner(path: str) -> int:
    """The intermediate size: three MXFP4 blocks do not divide between two ranks, so the
    second pads.
    """
    return 3 * BLOCK if "mxfp4" in path else 2 * BLOCK


def rows(path: str, size: int) -> int:
    """How many of them a rank has: whole MXFP4 blocks, so that the last rank may have
    fewer.
    """
    unit = BLOCK if "mxfp4" in path else 1
    return -(-inner(path) // unit // size) * unit


def quark(weight: dict[str, Any], activation: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "global_quant_config": {
            "weight": weight,
            "input_tensors": activation,
            "output_tensors": None,
            "bias": None,
        },
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "kv_cache_quant_config": {},
        "exclude": ["lm_head", "re:.*attn.*", "re:.*router.*"],
        "export": {"kv_cache_group": [], "pack_method": "order"},
    }


TENSOR = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
CHANNEL = {
    "dtype": "fp8_e4m3",
    "qscheme": "per_channel",
    "is_dynamic": False,
    "symmetric": True,
    "ch_axis": 0,
}
FP4 = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "group_size": BLOCK,
    "ch_axis": -1,
    "scale_format": "e8m0",
    "is_dynamic": False,
}
QUANTIZATION = {
    "plain": None,
    "mxfp4": {"quant_method": "mxfp4"},
    "quark-fp8-tensor": quark(TENSOR, TENSOR),
    "quark-fp8-channel": quark(CHANNEL, CHANNEL | {"is_dynamic": True}),
    "quark-mxfp4": quark(FP4, None),
}
#: Each path, and in the Quark path both checkpoint layouts: one tensor for all experts,
#: or one for each. (Not for fp8 per tensor: the base has no branch for the w2 input
#: scale of all experts at once.)
ROWS = [
    ("plain", False),
    ("mxfp4", False),
    ("quark-fp8-tensor", True),
    ("quark-fp8-channel", False),
    ("quark-fp8-channel", True),
    ("quark-mxfp4", False),
    ("quark-mxfp4", True),
]
RANKS = [(1, 0), (2, 0), (2, 1)]
every_row = pytest.mark.parametrize(
    "path,split", ROWS, ids=[f"{path}-{'split' if s else 'whole'}" for path, s in ROWS]
)
every_rank = pytest.mark.parametrize("size,rank", RANKS)

Weights = dict[str, torch.Tensor]


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
    def config(path: str) -> VllmConfig:
        folder = tmp_path_factory.mktemp(path)
        quantization = QUANTIZATION[path]
        extra: dict[str, Any] = {"intermediate_size": inner(path)}
        extra |= {"quantization_config": quantization} if quantization else {}
        (folder / "config.json").write_text(json.dumps(CONFIG | extra))
        arguments = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=128,
        )
        return arguments.create_engine_config()

    return config


Build = Callable[..., tuple[nn.Module, VllmConfig]]


@pytest.fixture
def build(
    configs: Callable[[str], VllmConfig], monkeypatch: pytest.MonkeyPatch
) -> Build:
    """Builds the model for a path as rank `rank` of `size` tensor-parallel ranks."""

    def build(path: str, size: int = 1, rank: int = 0) -> tuple[nn.Module, VllmConfig]:
        from vllm.model_executor.layers.quantization import mxfp4
        from vllm.model_executor.layers.quantization.quark import quark_moe

        for module in (mxfp4, quark_moe):
            monkeypatch.setattr(
                module,
                "select_mxfp4_moe_backend",
                lambda *_: (mxfp4.Mxfp4MoeBackend.NONE, None),
            )
        monkeypatch.setattr(get_tp_group(), "world_size", size)
        monkeypatch.setattr(get_tp_group(), "rank_in_group", rank)
        config = configs(path)
        config.compilation_config.static_forward_context.clear()
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(vllm_config=config)
        monkeypatch.setattr(
            experts(model).quant_method,
            "process_weights_after_loading",
            lambda layer: None,
        )
        return model, config

    return build


def skip_what_the_base_lacks(
    model: nn.Module, path: str, split: bool, size: int
) -> None:
    if path == "quark-fp8-channel" and not split and size > 1:
        pytest.skip("no base cuts the w13 channel scales of all experts at once")
    if experts(model).w13_weight.shape[1] < 2 * rows(path, size):
        pytest.skip(
            "this base makes the parameters of a rank too small for whole MXFP4 blocks"
        )


def experts(model: nn.Module) -> nn.Module:
    (found,) = (module for module in model.modules() if hasattr(module, "w13_weight"))
    return found


def expected(path: str, version: int) -> Weights:
    """All experts of a checkpoint in vLLM's layout before any rank's cut: bytes or
    numbers of their own per version.
    """
    random = torch.Generator().manual_seed(version)
    size = inner(path)

    def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randint(1, 100, shape, generator=random).to(dtype)

    made = {"w13_bias": numbers(EXPERTS, 2 * size), "w2_bias": numbers(EXPERTS, HIDDEN)}
    if "mxfp4" in path:
        for name, rows, columns in (("w13", 2 * size, HIDDEN), ("w2", HIDDEN, size)):
            made[f"{name}_weight"] = numbers(
                EXPERTS, rows, columns // 2, dtype=torch.uint8
            )
            made[f"{name}_weight_scale"] = numbers(
                EXPERTS, rows, columns // BLOCK, dtype=torch.uint8
            )
        return made
    dtype = torch.float8_e4m3fn if "fp8" in path else torch.bfloat16
    made["w13_weight"] = numbers(EXPERTS, 2 * size, HIDDEN, dtype=dtype)
    made["w2_weight"] = numbers(EXPERTS, HIDDEN, size, dtype=dtype)
    if path == "quark-fp8-channel":
        made["w13_weight_scale"] = numbers(EXPERTS, 2 * size, dtype=torch.float32)
        made["w2_weight_scale"] = numbers(EXPERTS, HIDDEN, dtype=torch.float32)
    if path == "quark-fp8-tensor":
        made["w13_weight_scale"] = numbers(EXPERTS, 1, dtype=torch.float32)
        for name in ("w2_weight_scale", "w13_input_scale", "w2_input_scale"):
            made[name] = numbers(EXPERTS, dtype=torch.float32)
    return made


def checkpoint(path: str, split: bool, version: int) -> Weights:
    """The same experts under the names and in the layout of a checkpoint."""
    prefix = "model.layers.0.mlp.experts."
    made: Weights = {}
    for name, whole in expected(path, version).items():
        projection, _, kind = name.partition("_")
        projection = {"w13": "gate_up_proj", "w2": "down_proj"}[projection]
        if split:
            made |= {
                f"{prefix}{number}.{projection}.{kind}": one.clone()
                for number, one in enumerate(whole)
            }
        elif path == "plain":
            suffix = "" if kind == "weight" else f"_{kind}"
            made[f"{prefix}{projection}{suffix}"] = (
                whole.mT.contiguous() if kind == "weight" else whole
            )
        elif path == "mxfp4":
            suffix = {"weight": "_blocks", "weight_scale": "_scales", "bias": "_bias"}[
                kind
            ]
            blocks = (
                whole.view(*whole.shape[:2], -1, BLOCK // 2)
                if kind == "weight"
                else whole
            )
            made[f"{prefix}{projection}{suffix}"] = blocks
        else:
            made[f"{prefix}{projection}.{kind}"] = whole
    return made


def part(
    path: str,
    name: str,
    whole: torch.Tensor,
    parameter: torch.Tensor,
    size: int,
    rank: int,
) -> torch.Tensor:
    """What `parameter` of this rank holds after a load: its rows or columns, then zeros
    where the kernel pads.
    """
    start, end = (
        rank * rows(path, size),
        min((rank + 1) * rows(path, size), inner(path)),
    )
    if name in ("w13_weight", "w13_bias") or (
        name == "w13_weight_scale" and path != "quark-fp8-tensor"
    ):
        whole = whole[:, 2 * start : 2 * end]
    elif name == "w2_bias" and rank:
        whole = torch.zeros_like(whole)
    elif name == "w2_weight" or (name == "w2_weight_scale" and "mxfp4" in path):
        packed = inner(path) // whole.shape[-1]
        whole = whole[..., start // packed : end // packed]
    padded = torch.zeros(parameter.shape, dtype=parameter.dtype)
    padded[tuple(slice(length) for length in whole.shape)] = whole.to(parameter.dtype)
    return padded


def check(model: nn.Module, path: str, version: int, size: int, rank: int) -> None:
    layer = experts(model)
    whole = expected(path, version)
    assert set(whole) == set(layer._parameters)
    for name, parameter in layer.named_parameters():
        mine = part(path, name, whole[name], parameter, size, rank)
        wrong = (parameter.data.float() != mine.float()).sum().item()
        assert wrong == 0, (
            f"{name}: {wrong} of {mine.numel()} elements are not of version {version}"
        )


def reload(model: nn.Module, config: VllmConfig, weights: Weights) -> set[str]:
    """A layerwise reload, in the three steps of the base."""
    with set_current_vllm_config(config):
        initialize_layerwise_reload(model)
        loaded = model.load_weights(weights.items())
        finalize_layerwise_reload(model, config.model_config)
    return loaded


@every_rank
@every_row
def test_every_load_sets_every_expert_in_place(
    build: Build, path: str, split: bool, size: int, rank: int
) -> None:
    model, config = build(path, size, rank)
    skip_what_the_base_lacks(model, path, split, size)
    parameters = {
        name: p
        for name, p in model.named_parameters()
        if p in set(experts(model).parameters())
    }
    addresses = {name: parameter.data_ptr() for name, parameter in parameters.items()}

    assert model.load_weights(checkpoint(path, split, 1).items()) == set(parameters)
    check(model, path, 1, size, rank)
    for version in (2, 3):
        for parameter in parameters.values():
            parameter.data.view(torch.uint8).fill_(0x55)
        assert reload(model, config, checkpoint(path, split, version)) == set(
            parameters
        )
        check(model, path, version, size, rank)
        now = dict(model.named_parameters())
        assert {name: now[name].data_ptr() for name in parameters} == addresses


@every_row
def test_every_tensor_goes_through_the_current_loader(
    build: Build, path: str, split: bool
) -> None:
    model, _ = build(path)
    seen: list[tuple[str, int | None, tuple[int, ...]]] = []

    def loader(
        param, loaded_weight, weight_name, shard_id, expert_id, return_success=False
    ):
        assert shard_id is None
        seen.append(
            (weight_name.rpartition(".")[2], expert_id, tuple(loaded_weight.shape))
        )

    before = {}
    for name, parameter in experts(model).named_parameters():
        parameter.weight_loader = loader
        before[name] = parameter.data.view(torch.uint8).clone()
    model.load_weights(checkpoint(path, split, 1).items())
    whole = expected(path, 1)
    if split:
        assert sorted(seen) == sorted(
            (name, number, tuple(t.shape[1:]))
            for name, t in whole.items()
            for number in range(EXPERTS)
        )
    else:
        assert sorted(seen) == sorted(
            (name, None, tuple(tensor.shape)) for name, tensor in whole.items()
        )
    for name, parameter in experts(model).named_parameters():
        assert torch.equal(parameter.data.view(torch.uint8), before[name]), (
            f"{name} was written past its loader"
        )


@every_rank
@every_row
def test_the_senders_tensors_stay_as_they_are(
    build: Build, path: str, split: bool, size: int, rank: int
) -> None:
    model, config = build(path, size, rank)
    skip_what_the_base_lacks(model, path, split, size)
    for version in (1, 2):
        sent = checkpoint(path, split, version)
        if version == 1:
            model.load_weights(sent.items())
        else:
            reload(model, config, sent)
        for name, tensor in checkpoint(path, split, version).items():
            assert torch.equal(sent[name].float(), tensor.float()), (
                f"{name} was changed"
            )


@pytest.mark.parametrize(
    "name", ["gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"]
)
def test_experts_of_another_model_are_refused(build: Build, name: str) -> None:
    model, _ = build("plain")
    name = f"model.layers.0.mlp.experts.{name}"
    half = checkpoint("plain", False, 1)[name][..., : HIDDEN // 2].contiguous()
    with pytest.raises(
        ValueError,
        match=r"layers\.0\.mlp\.experts\.routed_experts\.w\w+: .* shape \(4, ",
    ):
        model.load_weights([(name, half)])
