# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The inventory finds every tensor that a model reaches, and updates leave each where
it was.
"""

import ctypes
import functools
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime_CAPI
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy
import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
)

from vllm import LLM
from vllm._custom_ops import CPUDNNLGEMMHandler
from vllm.config import VllmConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.model_loader.reload.inventory import (
    Entry,
    inventory,
    poison,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum


@dataclass
class Record:
    tensor: torch.Tensor


class Private:
    __slots__ = ("__tensor",)

    def __init__(self, tensor: torch.Tensor):
        self.__tensor = tensor


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def method(self) -> None: ...


def closure(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


def default(tensor: torch.Tensor) -> Callable[..., torch.Tensor]:
    def function(
        x: torch.Tensor = tensor, *, y: torch.Tensor = tensor + 1
    ) -> torch.Tensor:
        return x + y

    return function


def labelled(tensor: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.scale = tensor
    return parameter


#: Name of a module's attribute -> what it is, made from one tensor, and the paths at
#: which that tensor is found.
HIDING_PLACES: dict[str, tuple[Callable[[torch.Tensor], object], list[str]]] = {
    "plain": (lambda t: t, ["plain"]),
    "listed": (lambda t: [None, (t,)], ["listed[1][0]"]),
    "mapped": (lambda t: {"a": {7: t}}, ["mapped['a'][7]"]),
    "record": (Record, ["record.tensor"]),
    "slotted": (Slotted, ["slotted.tensor"]),
    "private": (Private, ["private._Private__tensor"]),
    "queue": (lambda t: deque([0, t]), ["queue[1]"]),
    "space": (lambda t: SimpleNamespace(tensor=t), ["space.tensor"]),
    "closure": (closure, ["closure.tensor"]),
    "partial": (
        lambda t: functools.partial(print, t, end=t + 1),
        ["partial.args[0]", "partial.keywords['end']"],
    ),
    "bound": (lambda t: Slotted(t).method, ["bound.__self__.tensor"]),
    "default": (default, ["default.__defaults__[0]", "default.__kwdefaults__['y']"]),
    "labelled": (labelled, ["labelled.scale", "labelled"]),
    "module": (lambda t: [torch.nn.ParameterList([t])], ["module[0].0"]),
}


@pytest.mark.parametrize("name", HIDING_PLACES)
def test_a_tensor_is_found_wherever_it_is_kept(name: str) -> None:
    make, paths = HIDING_PLACES[name]
    model = torch.nn.Sequential(torch.nn.Identity())
    setattr(model[0], name, make(torch.arange(3.0)))
    found = inventory(model)
    assert sorted(found) == sorted(f"0.{path}" for path in paths)
    assert next(entry for path, entry in found.items() if path != "0.labelled").value[
        0
    ] in (0, 1)


def test_two_ways_to_a_tensor_of_one_name_are_two_entries() -> None:
    model = torch.nn.Identity()
    first, second = torch.zeros(1), torch.ones(1)
    model.function = closure(first)
    model.function.tensor = second
    model.mapped = {("a",): first + 1, 0: second + 1}
    assert len(inventory(model)) == 4


def test_a_weak_reference_and_a_cycle_are_followed_once() -> None:
    model = torch.nn.Identity()
    record = Record(torch.zeros(2))
    model.first, model.back = weakref.ref(record), [model]
    model.same = record.tensor
    assert list(inventory(model)) == ["first().tensor"]


def test_an_entry_says_what_it_is_and_where_it_lies() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4))
    model[0].derived = model[0].weight.detach()[::2]
    model[0].packed = torch.eye(2).to_sparse()
    model[0].copied = numpy.ones(3)
    found = inventory(model)
    kinds = {path: entry.kind for path, entry in found.items()}
    assert kinds == {
        "0.weight": "parameter",
        "0.bias": "parameter",
        "0.running_mean": "buffer",
        "0.running_var": "buffer",
        "0.num_batches_tracked": "buffer",
        "0.eps": "number",
        "0.momentum": "number",
        "0.derived": "attribute",
        "0.packed": "opaque",
        "0.copied": "attribute",
    }
    assert found["0.copied"].storage.address == model[0].copied.ctypes.data
    storage = found["0.derived"].storage
    assert (storage.address, storage.shape, storage.stride) == (
        model[0].weight.data_ptr(),
        (2,),
        (2,),
    )
    assert found["0.packed"].storage is None and {
        entry.owner for entry in found.values()
    } == {"BatchNorm1d"}


def test_settings_are_not_entered() -> None:
    model = torch.nn.Identity()
    model.config = VllmConfig()
    model.config.tensor = torch.zeros(1)
    model.path, model.operator = Path("a"), torch.ops.aten.add
    assert inventory(model) == {}


def numbers() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("handle", "owner"),
    [
        (numbers(), "Identity"),
        (ctypes.c_void_p(1), "Identity"),
        (datetime_CAPI, "Identity"),
        (Record(torch.optim.SGD([torch.zeros(1)])), "Record"),
    ],
)
def test_what_cannot_be_looked_into_is_listed_with_its_owner(handle, owner) -> None:
    model = torch.nn.Identity()
    model.handle = handle
    (entry,) = inventory(model).values()
    assert (entry.kind, entry.owner, entry.storage) == ("opaque", owner, None)


def test_the_address_of_a_native_object_is_no_tensor() -> None:
    model = torch.nn.Identity()
    model.handler = CPUDNNLGEMMHandler()
    model.handler.handler_tensor = torch.tensor([0])
    assert inventory(model)["handler.handler_tensor"].kind == "opaque"


class Layer(torch.nn.Module):
    """A layer that leaves tensors outside itself."""

    shared: torch.Tensor
    kept: ClassVar[dict[object, object]] = {}


BY_LAYER: dict[object, object] = {}
WEAKLY: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@functools.cache
def remembered(layer: Layer, number: int) -> torch.Tensor:
    return torch.full((1,), float(number))


@functools.lru_cache(maxsize=2)
def bounded(layer: Layer, number: int) -> torch.Tensor:
    return torch.full((1,), float(number))


CACHES: dict[str, Callable[[Layer], object]] = {
    "BY_LAYER": lambda layer: BY_LAYER.update({layer: torch.zeros(1)}),
    "BY_LAYER by identity": lambda layer: BY_LAYER.update({id(layer): torch.zeros(1)}),
    "BY_LAYER in a tuple": lambda layer: BY_LAYER.update(
        {(layer, 1): [torch.zeros(1)]}
    ),
    "WEAKLY": lambda layer: WEAKLY.update({layer: torch.zeros(1)}),
    "Layer.kept": lambda layer: Layer.kept.update({layer: torch.zeros(1)}),
    "Layer.shared": lambda layer: setattr(Layer, "shared", torch.zeros(1)),
    "remembered": lambda layer: remembered(layer, 7),
    "bounded": lambda layer: bounded(layer, 7),
}


@pytest.mark.parametrize("name", CACHES)
def test_caches_of_modules_and_classes_are_asked_for_the_layer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Layer, "shared", None, raising=False)
    for cache in (BY_LAYER, WEAKLY, Layer.kept):
        cache.clear()
    remembered.cache_clear(), bounded.cache_clear()
    model, other = torch.nn.Sequential(Layer()), Layer()
    CACHES[name](model[0])
    if name != "Layer.shared":
        CACHES[name](other)
    (path,) = inventory(model)
    assert path.partition("[")[0].endswith(name.partition(" ")[0])


def tensors(model: torch.nn.Module) -> dict[str, Entry]:
    found = inventory(model)
    return {path: entry for path, entry in found.items() if entry.storage is not None}


def test_poison_leaves_buffers_and_caches_alone_and_nothing_else() -> None:
    model = torch.nn.BatchNorm1d(64)
    model.derived, model.count = Record(torch.full((64,), 5.0)), torch.tensor([3])
    model.attn = torch.nn.Identity()
    model.attn.kv_cache = torch.zeros(8)
    before = {path: entry.value.clone() for path, entry in tensors(model).items()}
    addresses = {path: entry.storage for path, entry in tensors(model).items()}
    poison(model)
    after = tensors(model)
    changed = {
        path
        for path, entry in after.items()
        if not torch.equal(entry.value, before[path])
    }
    assert changed == {"weight", "bias", "derived.tensor"}
    assert {path: entry.storage for path, entry in after.items()} == addresses
    assert torch.isfinite(model.weight).all() and model.derived.tensor.abs().max() <= 1


def test_poison_keeps_what_shares_memory_with_a_buffer_or_a_cache() -> None:
    model = torch.nn.BatchNorm1d(8)
    model.mean = model.running_mean[2:]
    model.kv_cache = torch.zeros(2, 8)
    model.key_cache = model.kv_cache[0]
    poison(model)
    assert not any(t.any() for t in (model.running_mean, model.kv_cache))


def test_poison_reaches_expanded_and_packed_tensors() -> None:
    model = torch.nn.Identity()
    model.scale = torch.full((1,), 5.0).expand(4, 3)
    model.packed = torch.zeros(64, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    poison(model)
    assert (model.scale != 5.0).all() and model.packed.view(torch.uint8).any()


SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt-oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            **SMALL,
            num_key_value_heads=2,
            head_dim=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            pad_token_id=None,
        )
    ),
    "deepseek-v2": lambda: DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **SMALL,
            num_key_value_heads=4,
            first_k_dense_replace=2,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=32,
            qk_rope_head_dim=64,
            v_head_dim=32,
        )
    ),
}
#: What no walk over parameters would tell from any other, or not see at all.
KNOWN = {
    "gpt-oss": {"model.layers.1.attn.sinks", "model.layers.1.attn.attn.kv_cache"},
    "deepseek-v2": {
        f"model.layers.1.self_attn.mla_attn.mla_attn.{name}"
        for name in ("W_UV", "W_UK_T", "kv_cache")
    },
}


@contextmanager
def engine(checkpoint: Path) -> Iterator[LLM]:
    llm = LLM(
        str(checkpoint),
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


@pytest.mark.skipif(
    not current_platform.is_cpu(),
    reason="the addresses of a GPU engine are checked with its graphs",
)
@pytest.mark.parametrize("name", MODELS)
def test_ten_updates_leave_every_tensor_where_it_was(name: str, tmp_path: Path) -> None:
    if name == "deepseek-v2" and not hasattr(AttentionBackendEnum, "CPU_MLA"):
        pytest.skip("this release has no MLA on CPU")
    checkpoints = [tmp_path / str(seed) for seed in range(11)]
    for seed, path in enumerate(checkpoints):
        torch.manual_seed(seed)
        drawn = MODELS[name]().to(torch.bfloat16)
        for parameter in drawn.parameters():
            parameter.data.normal_(std=0.1)
        drawn.save_pretrained(path)
    with engine(checkpoints[0]) as llm:
        model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
        first = {path: entry.storage for path, entry in inventory(model).items()}
        assert set(first) >= KNOWN[name]
        parameters = {
            path: e.value.clone()
            for path, e in inventory(model).items()
            if e.kind == "parameter"
        }
        for checkpoint in checkpoints[1:]:
            llm.collective_rpc(
                "reload_weights", kwargs={"weights_path": str(checkpoint)}
            )
            assert {
                path: entry.storage for path, entry in inventory(model).items()
            } == first, checkpoint.name
        now = inventory(model)
        assert not [
            path
            for path, tensor in parameters.items()
            if torch.equal(tensor, now[path].value)
        ]
